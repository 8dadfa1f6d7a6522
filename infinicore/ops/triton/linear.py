"""linear for few rows, where reading the weight is all the work. Many rows are torch's, which is cuBLAS.

One row is a sum of products in registers. A few rows go through tensor cores with the weight as the taller
operand, so that no part of a tile is padding but its few columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import (
    FLOATS,
    are_plain,
    fits,
    overlap,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)

# R rows of x, N rows of the weight, K their length
HALVES = (torch.float16, torch.bfloat16)
MOST_ROWS = 64


class Tile(NamedTuple):
    """How much of the weight a program takes at once, and on how many warps"""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@triton.jit
def one_row_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, weight_stride, N, K,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[n] = sum(x * weight[n]) + bias[n]"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = weight_ptr + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    is_row = (row < N)[:, None]
    # Weights do not depend on the kernel before: the first are on their way while it ends.
    weight = tl.load(at, mask=is_row & (column < K)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_inputs(OVERLAPS)
    x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
    sums = weight.to(tl.float32) * x[None, :]
    for start in range(COLUMNS, K, COLUMNS):
        is_column = start + column < K
        weight = tl.load(
            at + start, mask=is_row & is_column[None, :], other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_ptr + start + column, mask=is_column, other=0.0).to(tl.float32)
        sums += weight.to(tl.float32) * x[None, :]
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < N)


@triton.jit
def few_rows_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, x_stride, weight_stride, R, N, K,
    HAS_BIAS: tl.constexpr, X_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[r, n] = sum(x[r] * weight[n]) + bias[n] for all rows of x and some of the weight"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    r = tl.arange(0, X_ROWS)
    wait_for_inputs(OVERLAPS)
    weight_at = weight_ptr + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    x_at = x_ptr + r.to(tl.int64)[None, :] * x_stride + column[:, None]
    sums = tl.zeros((ROWS, X_ROWS), tl.float32)
    for start in range(0, K, COLUMNS):
        is_column = start + column < K
        weight = tl.load(
            weight_at + start,
            mask=(row < N)[:, None] & is_column[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_at + start, mask=(r < R)[None, :] & is_column[:, None], other=0.0)
        sums = tl.dot(weight, x, sums)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    at = y_ptr + r.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(at, sums.to(y_ptr.dtype.element_ty), mask=(row < N)[:, None] & (r < R)[None, :])


def one_row_tile(size: int, width: int) -> Tile:
    """What came out fastest on an H200 (TB/s at 4096 and 14336 columns): short rows whole, long ones in steps"""
    if size <= 8192 // width:
        return Tile(1, triton.next_power_of_2(size), 4, 3)
    return Tile(1, 4096 // width, 8, 3)


def few_rows_tile(num_rows: int, size: int, num_x_rows: int) -> Tile:
    rows = 32 if num_rows < 1 << 13 else 64
    return Tile(rows, 256 if num_x_rows <= 32 else 128, 4, 4)


def launch_one(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> None:
    num_rows, size = weight.shape
    one_row_kernel[(triton.cdiv(num_rows, tile.rows),)](
        y, x, weight, bias, weight.stride(0), num_rows, size,
        HAS_BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(x.device),
    )  # fmt: skip


def launch_few(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> None:
    num_rows, size = weight.shape
    few_rows_kernel[(triton.cdiv(num_rows, tile.rows),)](
        y, x, weight, bias, x.stride(0), weight.stride(0), len(x), num_rows, size,
        HAS_BIAS=bias is not None, X_ROWS=max(triton.next_power_of_2(len(x)), 16), ROWS=tile.rows,
        COLUMNS=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(x.device),
    )  # fmt: skip


def accepts_linear(out: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        are_plain(x.device, FLOATS, x, weight)
        and weight.dim() == 2
        and weight.stride(1) == 1
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and min(x.numel(), weight.numel()) > 0
        and is_few(x, weight)
        and (bias is None or (are_plain(x.device, (x.dtype,), bias) and bias.shape == weight.shape[:1]))
        and fits(out, (*x.shape[:-1], len(weight)), x.dtype, x.device)
    )


def is_few(x: Tensor, weight: Tensor) -> bool:
    """One row of any dtype whose weight need not be rounded; a few where the tensor cores take them as is"""
    num_rows = x.numel() // x.shape[-1]
    if num_rows == 1:
        return x.dtype in (weight.dtype, torch.float32)
    return num_rows <= MOST_ROWS and x.dtype == weight.dtype and x.dtype in HALVES


def linear(out: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, bias = rows_of(x), None if bias is None else bias.contiguous()
    like = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    y = target(out, like, x, weight, *(() if bias is None else (bias,)))
    if len(rows) == 1:
        launch_one(y, rows, weight, bias, one_row_tile(weight.shape[1], weight.element_size()))
    else:
        launch_few(y, rows, weight, bias, few_rows_tile(*weight.shape, len(rows)))
    return settled(y, out)
