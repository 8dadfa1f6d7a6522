"""linear for one row, where reading the weight is all the work: sums of products in registers.

More rows are torch's, which is cuBLAS: no tile of ours through the tensor cores read a weight faster.
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

# N rows of the weight, K their length


class Tile(NamedTuple):
    """How much of the weight a program takes at once, and on how many warps"""

    rows: int
    columns: int
    num_warps: int


@triton.jit
def linear_kernel(
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


def tile_of(size: int, width: int) -> Tile:
    """What reads weights fastest on an H200: a row as a whole if it is short, else in steps"""
    if size <= 8192 // width:
        return Tile(1, triton.next_power_of_2(size), 4)
    return Tile(1, 4096 // width, 8)


def launch(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    num_rows, size = weight.shape
    tile = tile_of(size, weight.element_size())
    linear_kernel[(triton.cdiv(num_rows, tile.rows),)](
        y, x, weight, bias, weight.stride(0), num_rows, size,
        HAS_BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps,
        **overlap(x.device),
    )  # fmt: skip


def accepts_linear(out: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        are_plain(x.device, FLOATS, x, weight)
        and weight.dim() == 2
        and weight.stride(1) == 1
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and min(x.numel(), weight.numel()) > 0
        and x.numel() == x.shape[-1]
        and x.dtype in (weight.dtype, torch.float32)
        and (bias is None or (are_plain(x.device, (x.dtype,), bias) and bias.shape == weight.shape[:1]))
        and fits(out, (*x.shape[:-1], len(weight)), x.dtype, x.device)
    )


def linear(out: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    like = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    y = target(out, like, x, weight, *(() if bias is None else (bias,)))
    launch(y, rows_of(x), weight, None if bias is None else bias.contiguous())
    return settled(y, out)
