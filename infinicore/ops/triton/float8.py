"""Products with weights in float8, and rows of them (infinicore/float8.py).

One row is sums of products in registers (float8_one.py); a few go through the tensor cores in their own
dtype (fragment_rows.py), so that only the weight is rounded. Many of bfloat16 are rounded too, each to a
scale of its own, for the float8 tensor cores, by CUDA C++ on Hopper (hopper/rows.py) or by cuBLAS. GPUs
without these take the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.float8 import LARGEST, Float8Tensor
from infinicore.ops.hopper import rows as hopper_rows
from infinicore.ops.triton import fragment_rows
from infinicore.ops.triton.float8_one import launch_one, takes_one, values_of
from infinicore.ops.triton.tensors import overlap, wait_for_inputs
from infinicore.ops.triton.tiles import IS_INTERPRETED

# M rows of x, N of the weight, K their length
MOST_ALONE = 32  # rows of float32, which the tensor cores do not take
TILE = 1024


@triton.jit
def products_of(words, x_at, is_in, EMULATES: tl.constexpr):
    """Words [P, R, 4] times 16 values of x for each piece: [P, R]"""
    a, b, c, d = values_of(words, EMULATES)
    products = a * tl.load(x_at, mask=is_in, other=0.0).to(tl.float32)[:, None, :]
    products += b * tl.load(x_at + 1, mask=is_in, other=0.0).to(tl.float32)[:, None, :]
    products += c * tl.load(x_at + 2, mask=is_in, other=0.0).to(tl.float32)[:, None, :]
    products += d * tl.load(x_at + 3, mask=is_in, other=0.0).to(tl.float32)[:, None, :]
    return tl.sum(products, 2)


@triton.jit
def row_kernel(
    y_ptr, x_ptr, word_ptr, scale_ptr, bias_ptr, x_stride, N, num_pieces,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, EMULATES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[m, n] = scale[n] * sum(x[m] * weight[n]) + bias[n]"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.arange(0, PIECES)
    lane = tl.arange(0, 4)
    start = row.to(tl.int64) * num_pieces
    at = word_ptr + (start[None, :, None] + piece[:, None, None]) * 4 + lane[None, None, :]
    is_row = (row < N)[None, :, None]
    # Weights do not depend on the kernel before: the first are on their way while it ends. Two stages take
    # turns, so that what is loaded stays in the registers it was loaded to.
    is_in = is_row & (piece < num_pieces)[:, None, None]
    words = tl.load(at, mask=is_in, other=0, eviction_policy="evict_first")
    wait_for_inputs(OVERLAPS)
    x_at = x_ptr + tl.program_id(1).to(tl.int64) * x_stride + piece[:, None] * 16 + lane[None, :] * 4
    sums = tl.zeros([PIECES, ROWS], tl.float32)
    for first in range(0, num_pieces, 2 * PIECES):
        second = first + PIECES
        is_in = is_row & (second + piece < num_pieces)[:, None, None]
        others = tl.load(at + second * 4, mask=is_in, other=0, eviction_policy="evict_first")
        sums += products_of(words, x_at + first * 16, (first + piece < num_pieces)[:, None], EMULATES)
        third = second + PIECES
        is_in = is_row & (third + piece < num_pieces)[:, None, None]
        words = tl.load(at + third * 4, mask=is_in, other=0, eviction_policy="evict_first")
        sums += products_of(others, x_at + second * 16, (second + piece < num_pieces)[:, None], EMULATES)
    y = tl.sum(sums, 0) * tl.load(scale_ptr + row, mask=row < N, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    to = y_ptr + tl.program_id(1).to(tl.int64) * N + row
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=row < N)


@triton.jit
def round_kernel(y_ptr, scale_ptr, x_ptr, x_stride, K, LARGEST, TILE: tl.constexpr, OVERLAPS: tl.constexpr):
    """y = x / scale as float8, where the largest of each row of x becomes the largest there is"""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.float32)
    for start in range(0, K, TILE):
        x = tl.load(x_ptr + row * x_stride + start + column, mask=start + column < K, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0) / LARGEST, 1e-30)
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, TILE):
        is_in = start + column < K
        x = tl.load(x_ptr + row * x_stride + start + column, mask=is_in, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * K + start + column, (x / scale).to(tl.float8e4nv), mask=is_in)


@triton.jit
def values_kernel(
    y_ptr, id_ptr, weight_ptr, scale_ptr, N, K, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """y[i] = weight[id[i]], NaN where there is no such row"""
    wait_for_inputs(OVERLAPS)
    out = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(id_ptr + out).to(tl.int64)
    is_row = (row >= 0) & (row < N)
    scale = tl.load(scale_ptr + row, mask=is_row, other=float("nan"))
    values = tl.load(weight_ptr + row * K + column, mask=is_row & (column < K), other=0.0).to(tl.float32)
    tl.store(y_ptr + out * K + column, (values * scale).to(y_ptr.dtype.element_ty), mask=column < K)


def launch_row(y: Tensor, x: Tensor, weight: Float8Tensor, bias: Tensor | None) -> None:
    num_rows, num_pieces = weight.shape[0], weight.shape[1] // 16
    rows, pieces = 8, min(triton.next_power_of_2(num_pieces), 128)
    row_kernel[(triton.cdiv(num_rows, rows), len(x))](
        y, x, weight.blocks.view(torch.int32), weight.row_scales, bias, x.stride(0), num_rows, num_pieces,
        HAS_BIAS=bias is not None, ROWS=rows, PIECES=pieces, EMULATES=IS_INTERPRETED,
        num_warps=max(pieces // 32, 1), num_stages=1, **overlap(x.device),
    )  # fmt: skip


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] as float8, and the scale [M, 1] of each"""
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    round_kernel[(len(x),)](
        y, scales, x, x.stride(0), x.shape[1], LARGEST, TILE=TILE, num_warps=4, **overlap(x.device)
    )
    return y, scales


def linear(y: Tensor, x: Tensor, weight: Float8Tensor, bias: Tensor | None) -> None:
    """y [M, N] = x [M, K] times the weight + bias"""
    if x.dtype == torch.float32 and (infinicore.deterministic or len(x) <= MOST_ALONE):
        launch_row(y, x, weight, bias)
    elif takes_one(x, weight):
        launch_one(y, x, weight, bias)
    elif fragment_rows.suits(x, weight):
        fragment_rows.launch(y, x, weight, bias)
    elif rounds(x, weight):
        launch_rounded(y, x, weight, bias)
    elif x.dtype == torch.bfloat16 and weight.shape[0] % 16 == 0:
        values, scales = rounded(x)
        torch._scaled_mm(
            values, weight.values.t(), scales, weight.row_scales[None], bias=bias, out_dtype=y.dtype, out=y
        )
    else:
        y.copy_(torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias))


def rounds(x: Tensor, weight: Float8Tensor, is_gated: bool = False) -> bool:
    """Whether rows are rounded, and so few that cuBLAS takes longer"""
    is_many = x.dtype == torch.bfloat16 and not fragment_rows.suits(x, weight)
    return is_many and hopper_rows.suits(x, weight.blocks.view(torch.bfloat16), is_gated)


def launch_rounded(
    y: Tensor,
    x: Tensor,
    weight: Float8Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """y = x times the weight + bias + residual, or silu(gate) * up where the weight has the rows of both"""
    values, scales = rounded(x)
    pairs, others = values.view(torch.bfloat16), weight.blocks.view(torch.bfloat16)
    hopper_rows.launch(y, pairs, others, bias, residual, is_gated, (scales, weight.row_scales))


def rows(y: Tensor, ids: Tensor, weight: Float8Tensor) -> None:
    """y [M, K] = the rows that ids name"""
    num_rows, size = weight.shape
    values_kernel[(ids.numel(), triton.cdiv(size, TILE))](
        y, ids, weight.values, weight.row_scales, num_rows, size,
        TILE=TILE, num_warps=4, **overlap(ids.device),
    )  # fmt: skip
