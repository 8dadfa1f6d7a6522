"""linear, linear_add and gated_linear. One row is sums of products in registers, where reading the weight is
all the work; up to 128 are CUDA C++ on Hopper (hopper/rows.py), and those that must not depend on each other
Triton's (rows.py). All others are torch's, which is cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.ops.hopper import rows as hopper_rows
from infinicore.ops.triton import rows
from infinicore.ops.triton.norm import are_rows, rms_norm
from infinicore.ops.triton.tensors import (
    FLOATS,
    LARGEST_TILE,
    are_plain,
    fits,
    num_processors,
    overlap_reading,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)

# N rows of the weight, K their length
RESIDENT = 4  # programs that take rows in pairs, for each processor
SHORT = 8192  # bytes of a row that a program has as a whole


@triton.jit
def load_row(row_ptr, column, K):
    """Part of a row of a weight, as it is stored: it may take room for a while until it is wanted"""
    return tl.load(row_ptr + column, mask=column < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_wide(row_ptr, column, K):
    return tl.load(row_ptr + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def sum_of_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def normalised(x_ptr, norm, K, eps, NORMS: tl.constexpr, COLUMNS: tl.constexpr):
    """A row, normalised if there is a norm"""
    x = load_wide(x_ptr, tl.arange(0, COLUMNS), K)
    if NORMS:
        x = x * norm.to(tl.float32) * tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    return x


@triton.jit
def pair_product(x, first, second):
    """(sum(x * first), sum(x * second))"""
    return tl.reduce((first.to(tl.float32) * x, second.to(tl.float32) * x), 0, sum_of_two)


@triton.jit
def finished(y, n, is_row, bias_ptr, residual_ptr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    """y + bias[n] + residual[n]"""
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_row, other=0.0).to(tl.float32)
    if ADDS:
        y += tl.load(residual_ptr + n, mask=is_row, other=0.0).to(tl.float32)
    return y


@triton.jit
def short_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, weight_stride, N, K,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[n] = sum(x * weight[n]) + bias[n] + residual[n], by pairs of rows

    A program has the next rows on their way while it sums up those it has, the first before its input is
    there.
    """
    column, pair = tl.arange(0, COLUMNS), tl.arange(0, 2)
    row_ptr = weight_ptr + (2 * tl.program_id(0)).to(tl.int64) * weight_stride
    first = load_row(row_ptr, column, K)
    second = load_row(row_ptr + weight_stride, column, tl.where(2 * tl.program_id(0) + 1 < N, K, 0))
    wait_for_inputs(OVERLAPS)
    x = load_wide(x_ptr, column, K)
    for n in range(2 * tl.program_id(0), N, 2 * tl.num_programs(0)):
        ahead = n + 2 * tl.num_programs(0)
        row_ptr = weight_ptr + ahead.to(tl.int64) * weight_stride
        next_first, next_second = (
            load_row(row_ptr, column, tl.where(ahead < N, K, 0)),
            load_row(row_ptr + weight_stride, column, tl.where(ahead + 1 < N, K, 0)),
        )
        a, b = pair_product(x, first, second)
        y = tl.where(pair == 0, a, b)
        y = finished(y, n + pair, n + pair < N, bias_ptr, residual_ptr, HAS_BIAS, ADDS)
        tl.store(y_ptr + n + pair, y.to(y_ptr.dtype.element_ty), mask=n + pair < N)
        first, second = next_first, next_second


@triton.jit
def long_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, weight_stride, N, K,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The same by a row, in steps of some columns"""
    n, column = tl.program_id(0), tl.arange(0, COLUMNS)
    row_ptr = weight_ptr + n.to(tl.int64) * weight_stride
    weight = load_row(row_ptr, column, K)
    wait_for_inputs(OVERLAPS)
    sums = weight.to(tl.float32) * load_wide(x_ptr, column, K)
    for start in range(COLUMNS, K, COLUMNS):
        weight = load_row(row_ptr, start + column, K)
        sums += weight.to(tl.float32) * load_wide(x_ptr, start + column, K)
    y = finished(tl.sum(sums, 0), n, n < N, bias_ptr, residual_ptr, HAS_BIAS, ADDS)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))


@triton.jit
def gated_kernel(
    y_ptr, x_ptr, norm_ptr, weight_ptr, bias_ptr, weight_stride, N, K, eps,
    NORMS: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[n] = silu(gate[n]) * up[n], whose weights are N rows apart

    A program normalises x once and has the next rows on their way while it sums up those it has.
    """
    column, apart = tl.arange(0, COLUMNS), N.to(tl.int64) * weight_stride
    row_ptr = weight_ptr + tl.program_id(0).to(tl.int64) * weight_stride
    gate, up = load_row(row_ptr, column, K), load_row(row_ptr + apart, column, K)
    norm = tl.load(norm_ptr + column, mask=column < K, other=0.0) if NORMS else gate
    wait_for_inputs(OVERLAPS)
    x = normalised(x_ptr, norm, K, eps, NORMS, COLUMNS)
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        ahead = n + tl.num_programs(0)
        row_ptr = weight_ptr + ahead.to(tl.int64) * weight_stride
        num_columns = tl.where(ahead < N, K, 0)
        next_gate, next_up = (
            load_row(row_ptr, column, num_columns),
            load_row(row_ptr + apart, column, num_columns),
        )
        g, u = pair_product(x, gate, up)
        if HAS_BIAS:
            g += tl.load(bias_ptr + n).to(tl.float32)
            u += tl.load(bias_ptr + N + n).to(tl.float32)
        tl.store(y_ptr + n, (g / (1 + tl.exp(-g)) * u).to(y_ptr.dtype.element_ty))
        gate, up = next_gate, next_up


def launch(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> None:
    num_rows, size = weight.shape
    is_short = size * weight.element_size() <= SHORT
    kernel = short_kernel if is_short else long_kernel
    num_programs = num_pair_programs(triton.cdiv(num_rows, 2), x.device) if is_short else num_rows
    tile = pair_tile(weight) if is_short else {"COLUMNS": 2048 // weight.element_size(), "num_warps": 4}
    kernel[(num_programs,)](
        y, x, weight, bias, residual, weight.stride(0), num_rows, size,
        HAS_BIAS=bias is not None, ADDS=residual is not None, **tile, **overlap_reading(x.device, weight),
    )  # fmt: skip


def launch_gated(
    y: Tensor, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> None:
    num_rows, size = len(weight) // 2, weight.shape[1]
    norm = None if norm is None else norm.contiguous()
    gated_kernel[(num_pair_programs(num_rows, x.device),)](
        y, x, norm, weight, bias, weight.stride(0), num_rows, size, eps,
        NORMS=norm is not None, HAS_BIAS=bias is not None, **pair_tile(weight),
        **overlap_reading(x.device, weight, norm),
    )  # fmt: skip


def num_pair_programs(num_pairs: int, device: torch.device) -> int:
    return min(num_pairs, RESIDENT * num_processors(device))


def pair_tile(weight: Tensor) -> dict[str, int]:
    """Whole rows, and so many warps that a thread has 32 values of a row of 16 bits, as far as there are"""
    columns = triton.next_power_of_2(weight.shape[1])
    return {"COLUMNS": columns, "num_warps": min(max(columns * weight.element_size() // 2048, 1), 16)}


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
    """One row, as many as cuBLAS takes longer for, or any that are to have their bits among others"""
    return is_alone(x) or infinicore.deterministic or hopper_rows.suits(x, weight, is_gated)


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
    by = launch if is_alone(x) else rows.launch if infinicore.deterministic else hopper_rows.launch
    by(y, rows_of(x), weight, bias, residual)
    return settled(y, out)


def accepts_gated_linear(
    out: Any,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "silu",
) -> bool:
    return (
        activation == "silu"
        and are_product(x, weight, bias)
        and len(weight) % 2 == 0
        and weight.shape[1] <= LARGEST_TILE
        and are_few(x, weight, True)
        and (norm is None or are_rows(x, norm))
        and fits(out, (*x.shape[:-1], len(weight) // 2), x.dtype, x.device)
    )


def gated_linear(
    out: Tensor | None,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "silu",
) -> Tensor:
    like = torch.empty((*x.shape[:-1], len(weight) // 2), dtype=x.dtype, device=x.device)
    y = target(out, like, x, weight, *(t for t in (norm, bias) if t is not None))
    bias = None if bias is None else bias.contiguous()
    if is_alone(x):
        launch_gated(y, rows_of(x), norm, eps, weight, bias)
    else:
        normed = x if norm is None else rms_norm(None, x, norm, eps)
        by = rows.launch if infinicore.deterministic else hopper_rows.launch
        by(y, rows_of(normed), weight, bias, is_gated=True)
    return settled(y, out)
