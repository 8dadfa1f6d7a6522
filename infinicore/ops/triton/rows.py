"""Products of several rows, through the tensor cores: programs stream rows of a weight past them.

Where a weight has too few rows to give every processor work, its columns are split too: the parts of a tile
are added in their order by the program that comes last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.ops.triton.splits import arrivals, leave_part, parts_at, sum_of_parts
from infinicore.ops.triton.tensors import overlap, wait_for_inputs

# M rows of x, N rows of the weight, K their length
HALVES = (torch.float16, torch.bfloat16)
OURS, OURS_GATED = range(33, 65), range(33, 129)  # numbers of rows for which cuBLAS is slower


@triton.jit
def load_tile(ptr, row, is_row, stride, column, K, IS_EVEN: tl.constexpr):
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    is_in = is_row[:, None] if IS_EVEN else is_row[:, None] & (column < K)[None, :]
    return tl.load(at, mask=is_in, other=0.0)


@triton.jit
def add_product(sums, x, weight, SWAPS: tl.constexpr):
    first, second = (weight, x) if SWAPS else (x, weight)
    return tl.dot(first, second.T, sums, input_precision="ieee")


@triton.jit
def finish(
    y_ptr, bias_ptr, residual_ptr, sums, gated, m, n, residual_stride, M, N,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Bias, gate, residual, and where it goes"""
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATES:
        if HAS_BIAS:
            gated += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        sums = sums / (1 + tl.exp(-sums)) * gated
    is_value = (m < M)[:, None] & (n < N)[None, :]
    row = m.to(tl.int64)[:, None]
    if ADDS:
        residual = tl.load(residual_ptr + row * residual_stride + n[None, :], mask=is_value, other=0.0)
        sums += residual.to(tl.float32)
    tl.store(y_ptr + row * N + n[None, :], sums.to(y_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def rows_kernel(
    y_ptr, part_ptr, arrival_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr,
    x_stride, weight_stride, residual_stride, M, N, K,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATES: tl.constexpr, IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, SWAPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = x @ weight.T + bias (+ residual), or silu(gate) * up of two weights that are N rows apart"""
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split, step = tl.program_id(2), tl.arange(0, STEP)
    begin = split * tl.cdiv(K, STEP * SPLITS) * STEP
    end = tl.minimum(begin + tl.cdiv(K, STEP * SPLITS) * STEP, K)
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros((SIZE, ROWS) if SWAPS else (ROWS, SIZE), tl.float32)
    gated = sums
    for start in range(begin, end, STEP):
        x = load_tile(x_ptr, m, m < M, x_stride, start + step, K, IS_EVEN)
        weight = load_tile(weight_ptr, n, n < N, weight_stride, start + step, K, IS_EVEN).to(x.dtype)
        sums = add_product(sums, x, weight, SWAPS)
        if GATES:
            weight = load_tile(weight_ptr, n + N, n < N, weight_stride, start + step, K, IS_EVEN).to(x.dtype)
            gated = add_product(gated, x, weight, SWAPS)
    if SWAPS:
        sums = sums.T
        gated = gated.T
    if SPLITS == 1:
        finish(y_ptr, bias_ptr, residual_ptr, sums, gated, m, n, residual_stride, M, N, HAS_BIAS, ADDS, GATES)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        at = parts_at(part_ptr, tile, SPLITS, ROWS, SIZE)
        if leave_part(at, arrival_ptr, tile, sums, split, SPLITS):
            sums = sum_of_parts(at, arrival_ptr, tile, SPLITS, ROWS * SIZE)
            finish(
                y_ptr, bias_ptr, residual_ptr, sums, sums, m, n, residual_stride, M, N, HAS_BIAS, ADDS, False
            )


class Tile(NamedTuple):
    """Rows of x and of the weight, and columns, that a program takes at once; warps and stages; how many
    programs share the columns; whether the weight is the first operand of the tensor cores"""

    rows: int
    size: int
    step: int
    num_warps: int
    num_stages: int
    splits: int = 1
    is_swapped: bool = False


DETERMINISTIC, DETERMINISTIC_WIDE = Tile(64, 64, 128, 4, 4), Tile(16, 32, 32, 4, 2)


def suits(x: Tensor, weight: Tensor, is_gated: bool = False) -> bool:
    """Whether cuBLAS is slower, or not what is wanted: it sums in another order for each number of rows"""
    if infinicore.deterministic:
        return True
    num_rows = x.numel() // x.shape[-1]
    return x.dtype in HALVES and x.dtype == weight.dtype and num_rows in (OURS_GATED if is_gated else OURS)


def tile_of(x: Tensor, weight: Tensor, is_gated: bool = False) -> Tile:
    """What an H200 does best; one for all where a row depends on no other"""
    if infinicore.deterministic:
        return DETERMINISTIC if x.dtype in HALVES else DETERMINISTIC_WIDE
    if not is_gated:
        return Tile(64, 64, 128, 4, 4, 2 if len(weight) <= 64 * 64 else 1, is_swapped=True)
    is_few = x.numel() <= 64 * x.shape[-1]
    return Tile(64, 128, 64, 4, 4) if is_few else Tile(128, 128, 64, 8, 4, is_swapped=True)


def launch(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """y = x @ weight.T + bias + residual, or silu(gate) * up where the weight has the rows of both"""
    tile = tile_of(x, weight, is_gated)
    num_rows, (num_outputs, size) = len(x), weight.shape
    num_outputs = num_outputs // 2 if is_gated else num_outputs
    grid = triton.cdiv(num_outputs, tile.size), triton.cdiv(num_rows, tile.rows), tile.splits
    is_split = tile.splits > 1
    num_parts = grid[0] * grid[1] * tile.splits * tile.rows * tile.size if is_split else 0
    rows_kernel[grid](
        y, x.new_empty(num_parts, dtype=torch.float32), arrivals(weight) if is_split else None,
        x, weight, bias, residual, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), num_rows, num_outputs, size,
        HAS_BIAS=bias is not None, ADDS=residual is not None, GATES=is_gated, IS_EVEN=size % tile.step == 0,
        ROWS=tile.rows, SIZE=tile.size, STEP=tile.step, SPLITS=tile.splits, SWAPS=tile.is_swapped,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(x.device),
    )  # fmt: skip
