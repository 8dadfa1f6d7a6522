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
    num_processors,
    overlap,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)

# N rows of the weight, K their length
RESIDENT = 8  # programs of linear_kernel that a processor has at once, or some more
FETCHED_BYTES = 1 << 13  # the longest row that is fetched ahead


class Tile(NamedTuple):
    """How much of a row of the weight a program takes at once, and on how many warps"""

    columns: int
    num_warps: int


@triton.jit
def load_row(row_ptr, column, K):
    """Part of a row of a weight, as it is stored: it may take room for a while until it is wanted"""
    return tl.load(row_ptr + column, mask=column < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_wide(row_ptr, column, K):
    return tl.load(row_ptr + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def fetch(ptr, NUM_BYTES: tl.constexpr):
    """Have memory brought as near as all processors share, and wait for nothing"""
    tl.inline_asm_elementwise(
        "{.reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r", [ptr, NUM_BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def sum_of_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def row_product(x_ptr, row_ptr, weight, K, COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """sum(x * row), of which the first columns are there"""
    column = tl.arange(0, COLUMNS)
    sums = weight.to(tl.float32) * load_wide(x_ptr, column, K)
    for start in range(COLUMNS, COLUMNS if IS_WHOLE else K, COLUMNS):
        weight = load_row(row_ptr, start + column, K)
        sums += weight.to(tl.float32) * load_wide(x_ptr, start + column, K)
    return tl.sum(sums, 0)


@triton.jit
def pair_product(
    x_ptr, norm_ptr, first_ptr, second_ptr, first, second, norm, K, eps,
    NORMS: tl.constexpr, COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """sum(x * row) for two rows of which the first columns are there, x being normalised if there is a norm.

    The mean square is a factor of the sums, so it is found on the way.
    """
    column = tl.arange(0, COLUMNS)
    x = load_wide(x_ptr, column, K)
    squares = x * x
    if NORMS:
        x = x * norm.to(tl.float32)
    firsts, seconds = first.to(tl.float32) * x, second.to(tl.float32) * x
    for start in range(COLUMNS, COLUMNS if IS_WHOLE else K, COLUMNS):
        first, second = load_row(first_ptr, start + column, K), load_row(second_ptr, start + column, K)
        x = load_wide(x_ptr, start + column, K)
        squares += x * x
        if NORMS:
            x = x * load_wide(norm_ptr, start + column, K)
        firsts += first.to(tl.float32) * x
        seconds += second.to(tl.float32) * x
    y0, y1, square = tl.reduce((firsts, seconds, squares), 0, sum_of_three)
    factor = tl.rsqrt(square / K + eps) if NORMS else 1.0
    return y0 * factor, y1 * factor


@triton.jit
def linear_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, weight_stride, N, K, ahead,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr,
    FETCHED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[n] = sum(x * weight[n]) + bias[n] + residual[n]

    Weights do not depend on the kernel before: the first are on their way while it ends, and programs that
    are there by then fetch some of those that come after them.
    """
    n = tl.program_id(0)
    row_ptr = weight_ptr + n.to(tl.int64) * weight_stride
    weight = load_row(row_ptr, tl.arange(0, COLUMNS), K)
    if OVERLAPS and FETCHED > 0:  # noqa: SIM102  known when it is compiled, unlike what follows
        if (n < ahead) & (n + 2 * ahead < N):
            fetch(row_ptr + ahead.to(tl.int64) * weight_stride, FETCHED)
            fetch(row_ptr + 2 * ahead.to(tl.int64) * weight_stride, FETCHED)
    wait_for_inputs(OVERLAPS)
    residual = tl.load(residual_ptr + n).to(tl.float32) if ADDS else 0.0
    y = row_product(x_ptr, row_ptr, weight, K, COLUMNS, IS_WHOLE) + residual
    if HAS_BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))


@triton.jit
def gated_kernel(
    y_ptr, x_ptr, norm_ptr, weight_ptr, bias_ptr, weight_stride, N, K, eps,
    NORMS: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[n] = silu(gate[n]) * up[n], whose weights are N rows apart"""
    n = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    gate_ptr = weight_ptr + n.to(tl.int64) * weight_stride
    up_ptr = gate_ptr + N.to(tl.int64) * weight_stride
    gate, up = load_row(gate_ptr, column, K), load_row(up_ptr, column, K)
    norm = tl.load(norm_ptr + column, mask=column < K, other=0.0) if NORMS else gate
    wait_for_inputs(OVERLAPS)
    g, u = pair_product(x_ptr, norm_ptr, gate_ptr, up_ptr, gate, up, norm, K, eps, NORMS, COLUMNS, IS_WHOLE)
    if HAS_BIAS:
        g += tl.load(bias_ptr + n).to(tl.float32)
        u += tl.load(bias_ptr + N + n).to(tl.float32)
    tl.store(y_ptr + n, (g / (1 + tl.exp(-g)) * u).to(y_ptr.dtype.element_ty))


def tile_of(size: int, width: int, num_rows: int) -> Tile:
    """What reads weights fastest on an H200: rows as a whole if they are short, else in steps"""
    if size * width <= 8192:
        return Tile(triton.next_power_of_2(size), 8 if num_rows <= 8192 else 4)
    return Tile(2048 // width, 4)


def launch(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> None:
    num_rows, size = weight.shape
    tile = tile_of(size, weight.element_size(), num_rows)
    linear_kernel[(num_rows,)](
        y, x, weight, bias, residual, weight.stride(0), num_rows, size, RESIDENT * num_processors(x.device),
        HAS_BIAS=bias is not None, ADDS=residual is not None, COLUMNS=tile.columns,
        IS_WHOLE=size <= tile.columns, FETCHED=fetched(weight), num_warps=tile.num_warps, **overlap(x.device),
    )  # fmt: skip


def fetched(weight: Tensor) -> int:
    """Bytes of a row, if they are few and can be fetched: those are 16 at a time"""
    row_bytes, stride = (n * weight.element_size() for n in (weight.shape[1], weight.stride(0)))
    is_aligned = weight.data_ptr() % 16 == row_bytes % 16 == stride % 16 == 0
    return row_bytes if is_aligned and row_bytes <= FETCHED_BYTES else 0


def launch_gated(
    y: Tensor, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> None:
    num_rows, size = len(weight) // 2, weight.shape[1]
    tile = tile_of(size, weight.element_size(), len(weight))
    gated_kernel[(num_rows,)](
        y, x, norm, weight, bias, weight.stride(0), num_rows, size, eps,
        NORMS=norm is not None, HAS_BIAS=bias is not None, COLUMNS=tile.columns,
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
    return is_alone(x) or rows.suits(x, weight, is_gated)


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
