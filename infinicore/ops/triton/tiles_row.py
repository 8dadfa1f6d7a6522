"""Rows of float32 times a weight in tiles whose values become floats on their way, one row at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import overlap, wait_for_inputs
from infinicore.ops.triton.tiles import Shape
from infinicore.ops.triton.tiles_values import POWER, load_numbers, value
from infinicore.tiles import TiledTensor

# M rows of x, N of the weight, K their length, G groups of 32 values, L threads: 32 for each group at hand.
# Thread 4 g + t has rows 8 j + g of a tile, j being 0 to 3.


@triton.jit
def row_kernel(
    y_ptr, x_ptr, word_ptr, half_ptr, byte_ptr, bias_ptr, x_stride, stride, N, num_groups, power,
    HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, TYPE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A tile's 32 columns of a row of y, in float32"""
    wait_for_inputs(OVERLAPS)
    tile = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    thread = tl.arange(0, GROUPS * 32)[:, None]
    lane = thread % 32
    j = tl.arange(0, 4)[None, :]
    sums = tl.zeros([GROUPS * 32, 4], tl.float32)
    for start in range(0, num_groups, GROUPS):
        group = start + thread // 32
        is_in = group < num_groups
        words, high, first, last, minimum = load_numbers(
            word_ptr, half_ptr, byte_ptr, tile.to(tl.int64) * stride, group, lane, j, is_in, num_groups, TYPE
        )
        x_at = x_ptr + m * x_stride + group * 32 + lane % 4 * 2
        for V in tl.static_range(8):
            x = tl.load(x_at + V // 2 * 8 + V % 2, mask=is_in, other=0.0).to(tl.float32)
            scale = first if V < 4 else last
            sums += value(words, high, j, scale, minimum, power, V, TYPE, tl.float32) * x
    y = tl.sum(tl.sum(sums.reshape(GROUPS, 8, 4, 4), 0), 1)  # [g, j]
    row = tile * 32 + tl.arange(0, 4)[None, :] * 8 + tl.arange(0, 8)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + m * N + row, y.to(y_ptr.dtype.element_ty), mask=row < N)


def launch_row(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    shape = Shape.of(weight)
    groups = min(triton.next_power_of_2(shape.num_groups), 16)
    row_kernel[(len(weight.blocks), len(x))](
        y, x, *shape.pointers, bias, x.stride(0), shape.stride, weight.shape[0], shape.num_groups, POWER,
        HAS_BIAS=bias is not None, GROUPS=groups, TYPE=weight.type.ggml_id,
        num_warps=min(groups, 8), num_stages=1, **overlap(x.device),
    )  # fmt: skip
