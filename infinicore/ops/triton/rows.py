"""Products of several rows that do not depend on each other: one tile for any number of them, and no splits.

cuBLAS sums in another order for each number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import overlap, wait_for_inputs

# M rows of x, N rows of the weight, K their length
HALVES = (torch.float16, torch.bfloat16)
# Rows of x and of the weight, and columns, that a program takes at once
TILE = {"ROWS": 64, "SIZE": 64, "STEP": 128, "num_warps": 4, "num_stages": 4}
WIDE_TILE = {"ROWS": 16, "SIZE": 32, "STEP": 32, "num_warps": 4, "num_stages": 2}  # of float32


@triton.jit
def load_tile(ptr, row, is_row, stride, column, K, IS_EVEN: tl.constexpr):
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    is_in = is_row[:, None] if IS_EVEN else is_row[:, None] & (column < K)[None, :]
    return tl.load(at, mask=is_in, other=0.0)


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
    y_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, x_stride, weight_stride, residual_stride, M, N, K,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATES: tl.constexpr, IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = x @ weight.T + bias (+ residual), or silu(gate) * up of two weights that are N rows apart"""
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    step = tl.arange(0, STEP)
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros((ROWS, SIZE), tl.float32)
    gated = sums
    for start in range(0, K, STEP):
        x = load_tile(x_ptr, m, m < M, x_stride, start + step, K, IS_EVEN)
        weight = load_tile(weight_ptr, n, n < N, weight_stride, start + step, K, IS_EVEN).to(x.dtype)
        sums = tl.dot(x, weight.T, sums, input_precision="ieee")
        if GATES:
            weight = load_tile(weight_ptr, n + N, n < N, weight_stride, start + step, K, IS_EVEN).to(x.dtype)
            gated = tl.dot(x, weight.T, gated, input_precision="ieee")
    finish(y_ptr, bias_ptr, residual_ptr, sums, gated, m, n, residual_stride, M, N, HAS_BIAS, ADDS, GATES)


def launch(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """y = x @ weight.T + bias + residual, or silu(gate) * up where the weight has the rows of both"""
    tile = TILE if x.dtype in HALVES else WIDE_TILE
    num_rows, (num_outputs, size) = len(x), weight.shape
    num_outputs = num_outputs // 2 if is_gated else num_outputs
    rows_kernel[triton.cdiv(num_outputs, tile["SIZE"]), triton.cdiv(num_rows, tile["ROWS"])](
        y, x, weight, bias, residual, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), num_rows, num_outputs, size,
        HAS_BIAS=bias is not None, ADDS=residual is not None, GATES=is_gated,
        IS_EVEN=size % tile["STEP"] == 0, **tile, **overlap(x.device),
    )  # fmt: skip
