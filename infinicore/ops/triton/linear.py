"""linear, linear_add and gated_linear. One row is sums of products in registers, where reading the weight is
all the work; a few rows go through the tensor cores (rows.py); more are torch's, which is cuBLAS.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.ops.triton import rows
from infinicore.ops.triton.norm import are_rows, rms_norm
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
def load_weights(at, is_row, column, K):
    is_in = is_row[:, None] & (column < K)[None, :]
    return tl.load(at, mask=is_in, other=0.0, eviction_policy="evict_first")


@triton.jit
def first_weights(weight_ptr, norm_ptr, row, is_row, weight_stride, K, COLUMNS: tl.constexpr):
    """Where some rows of a weight lie, their first columns, and those of a norm.

    They do not depend on the kernel before, so they are on their way while it ends; as they are stored, since
    they take room until then.
    """
    column = tl.arange(0, COLUMNS)
    at = weight_ptr + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    norm = tl.load(norm_ptr + column, mask=column < K, other=0.0)
    return at, load_weights(at, is_row, column, K), norm


@triton.jit
def row_products(
    x_ptr, norm_ptr, at, weight, norm, is_row, K, eps,
    NORMS: tl.constexpr, COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """sum(x * weight[row]) for some rows, x being normalised first if there is a norm.

    The mean square is a factor of the sum, so it is found on the way.
    """
    column = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
    squares = x * x
    if NORMS:
        x = x * norm.to(tl.float32)
    sums = weight.to(tl.float32) * x[None, :]
    for start in range(COLUMNS, COLUMNS if IS_WHOLE else K, COLUMNS):
        weight = load_weights(at + start, is_row, start + column, K)
        x = tl.load(x_ptr + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        if NORMS:
            squares += x * x
            norm = tl.load(norm_ptr + start + column, mask=start + column < K, other=0.0)
            x = x * norm.to(tl.float32)
        sums += weight.to(tl.float32) * x[None, :]
    y = tl.sum(sums, 1)
    if NORMS:
        y = y * tl.rsqrt(tl.sum(squares, 0) / K + eps)
    return y


@triton.jit
def linear_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, weight_stride, N, K,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[n] = sum(x * weight[n]) + bias[n] + residual[n]"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, weight, _ = first_weights(weight_ptr, weight_ptr, row, row < N, weight_stride, K, COLUMNS)
    wait_for_inputs(OVERLAPS)
    if ADDS:
        residual = tl.load(residual_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    y = row_products(x_ptr, x_ptr, at, weight, weight, row < N, K, 0.0, False, COLUMNS, IS_WHOLE)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    if ADDS:
        y += residual
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < N)


@triton.jit
def gated_kernel(
    y_ptr, x_ptr, norm_ptr, weight_ptr, bias_ptr, weight_stride, N, K, eps,
    NORMS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[n] = silu(gate[n]) * up[n], whose weights are N rows apart"""
    pair = tl.program_id(0) * ROWS + tl.arange(0, 2 * ROWS) // 2
    row = pair + tl.arange(0, 2 * ROWS) % 2 * N
    at, weight, norm = first_weights(
        weight_ptr, norm_ptr if NORMS else weight_ptr, row, pair < N, weight_stride, K, COLUMNS
    )
    wait_for_inputs(OVERLAPS)
    y = row_products(x_ptr, norm_ptr, at, weight, norm, pair < N, K, eps, NORMS, COLUMNS, IS_WHOLE)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=pair < N, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, (ROWS, 2)))
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def tile_of(size: int, width: int) -> Tile:
    """What reads weights fastest on an H200: a row as a whole if it is short, else in steps"""
    if size <= 8192 // width:
        return Tile(1, triton.next_power_of_2(size), 4)
    return Tile(1, 4096 // width, 8)


def launch(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> None:
    num_rows, size = weight.shape
    tile = tile_of(size, weight.element_size())
    linear_kernel[(triton.cdiv(num_rows, tile.rows),)](
        y, x, weight, bias, residual, weight.stride(0), num_rows, size,
        HAS_BIAS=bias is not None, ADDS=residual is not None, ROWS=tile.rows, COLUMNS=tile.columns,
        IS_WHOLE=size <= tile.columns, num_warps=tile.num_warps, **overlap(x.device),
    )  # fmt: skip


def launch_gated(
    y: Tensor, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> None:
    num_rows, size = len(weight) // 2, weight.shape[1]
    tile = tile_of(size, weight.element_size())
    gated_kernel[(triton.cdiv(num_rows, tile.rows),)](
        y, x, norm, weight, bias, weight.stride(0), num_rows, size, eps,
        NORMS=norm is not None, HAS_BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns,
        IS_WHOLE=size <= tile.columns, num_warps=tile.num_warps, **overlap(x.device),
    )  # fmt: skip


def are_product(x: Any, weight: Any, bias: Any) -> bool:
    """Whether these are rows, a dense weight whose rows are contiguous, and a bias or none"""
    return (
        isinstance(x, Tensor)
        and are_plain(x.device, FLOATS, x, weight)
        and weight.dim() == 2
        and weight.stride(1) == 1
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and min(x.numel(), weight.numel()) > 0
        and x.dtype in (weight.dtype, torch.float32)
        and (bias is None or (are_plain(x.device, (x.dtype,), bias) and bias.shape == weight.shape[:1]))
    )


def is_alone(x: Tensor) -> bool:
    """Whether this is one row, which has a kernel of its own unless it is to have its bits among others"""
    return x.numel() == x.shape[-1] and not infinicore.deterministic


def are_few(x: Tensor, weight: Tensor, is_gated: bool = False) -> bool:
    """One row, or as many as the tensor cores take better than cuBLAS"""
    return is_alone(x) or rows.tile_of(x, weight, is_gated) is not None


def accepts_linear(out: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        are_product(x, weight, bias)
        and are_few(x, weight)
        and fits(out, (*x.shape[:-1], len(weight)), x.dtype, x.device)
    )


def linear(out: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return multiplied(out, x, weight, bias, None)


def accepts_linear_add(out: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    return (
        accepts_linear(out, x, weight, bias)
        and are_plain(x.device, (x.dtype,), residual)
        and residual.shape == (*x.shape[:-1], len(weight))
    )


def linear_add(
    out: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
) -> Tensor:
    return multiplied(out, x, weight, bias, residual)


def multiplied(
    out: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    like = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    y = target(out, like, x, weight, *(t for t in (bias, residual) if t is not None))
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else rows_of(residual)
    by = launch if is_alone(x) else rows.launch
    by(y, rows_of(x), weight, bias, residual)
    return settled(y, out)


def accepts_gated_linear(
    out: Any, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> bool:
    return (
        are_product(x, weight, bias)
        and len(weight) % 2 == 0
        and are_few(x, weight, True)
        and (norm is None or are_rows(x, norm))
        and fits(out, (*x.shape[:-1], len(weight) // 2), x.dtype, x.device)
    )


def gated_linear(
    out: Tensor | None, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    like = torch.empty((*x.shape[:-1], len(weight) // 2), dtype=x.dtype, device=x.device)
    y = target(out, like, x, weight, *(t for t in (norm, bias) if t is not None))
    bias = None if bias is None else bias.contiguous()
    if is_alone(x):
        launch_gated(y, rows_of(x), norm, eps, weight, bias)
    else:
        normed = x if norm is None else rms_norm(None, x, norm, eps)
        rows.launch(y, rows_of(normed), weight, bias, is_gated=True)
    return settled(y, out)
