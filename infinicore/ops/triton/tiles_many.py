"""Rows times a weight in tiles whose values become floats on their way: one by one in float32, or many
through Triton's own products. Where a weight is small its sums are split between processors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.ops.triton.splits import fold, part_of, splits_of, store_sums
from infinicore.ops.triton.tensors import overlap, wait_for_inputs
from infinicore.ops.triton.tiles import IS_INTERPRETED, PAIR, Shape, capability
from infinicore.ops.triton.tiles_values import POWER, load_numbers, load_values, value
from infinicore.tiles import TiledTensor

# M rows of x, N of the weight, K their length, G groups of 32 values, L threads: 32 for each group at hand.
# Thread 4 g + t has rows 8 j + g of a tile, j being 0 to 3.
TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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
        x_at = x_ptr + m * x_stride + group * 32 + lane % 4 * 4
        for V in tl.static_range(8):
            x = tl.load(x_at + V // 4 * 16 + V % 4, mask=is_in, other=0.0).to(tl.float32)
            scale = first if V < 4 else last
            sums += value(words, high, j, scale, minimum, power, V, TYPE, tl.float32) * x
    y = tl.sum(tl.sum(sums.reshape(GROUPS, 8, 4, 4), 0), 1)  # [g, j]
    row = tile * 32 + tl.arange(0, 4)[None, :] * 8 + tl.arange(0, 8)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + m * N + row, y.to(y_ptr.dtype.element_ty), mask=row < N)


@triton.jit
def tiles_kernel(
    y_ptr, part_ptr, x_ptr, word_ptr, half_ptr, byte_ptr, bias_ptr, x_stride, stride, M, N,
    num_groups, num_steps, power,
    HAS_BIAS: tl.constexpr, IS_SPLIT: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr,
    IS_WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The product of TILES tiles of the weight and COLUMNS rows of x, or of a split of its sums.

    IS_WHOLE says that steps divide a row, so that none looks beyond it.
    """
    row = tl.program_id(0) * TILES * 32 + tl.arange(0, TILES * 32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    at = tl.arange(0, GROUPS * 32)
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros([TILES * 32, COLUMNS], tl.float32)
    x_row = x_ptr + tl.minimum(column, M - 1).to(tl.int64)[:, None] * x_stride + at[None, :]
    for number_of_step in range(split * num_steps, (split + 1) * num_steps):
        start = number_of_step * GROUPS
        weight = load_values(
            word_ptr, half_ptr, byte_ptr, tl.program_id(0) * TILES, start, tl.cdiv(N, 32), num_groups, stride,
            power, TILES, GROUPS, TYPE, DTYPE, IN_PAIRS, IS_WHOLE,
        )  # fmt: skip
        is_x = tl.full([1, 1], 1, tl.int1) if IS_WHOLE else (start * 32 + at < num_groups * 32)[None, :]
        x = tl.load(x_row + start * 32, mask=is_x, other=0.0)
        sums = tl.dot(weight, x.T, sums)
    store_sums(y_ptr, part_ptr, bias_ptr, sums, row, column, split, M, N, HAS_BIAS, IS_SPLIT)


def launch_row(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    shape = Shape.of(weight)
    groups = min(triton.next_power_of_2(shape.num_groups), 16)
    row_kernel[(len(weight.blocks), len(x))](
        y, x, *shape.pointers, bias, x.stride(0), shape.stride, weight.shape[0], shape.num_groups, POWER,
        HAS_BIAS=bias is not None, GROUPS=groups, TYPE=weight.type.ggml_id,
        num_warps=min(groups, 8), num_stages=1, **overlap(x.device),
    )  # fmt: skip


class Tile(NamedTuple):
    """How many tiles of the weight, rows of x and groups a program takes at once"""

    tiles: int
    columns: int
    groups: int
    num_warps: int
    num_stages: int


DETERMINISTIC = Tile(2, 64, 4, 4, 3)


def tile_of(num_rows: int, weight: TiledTensor) -> Tile:
    """What an H200 does best; one for all where a row depends on no other"""
    if infinicore.deterministic:
        return DETERMINISTIC
    columns = 64 if num_rows <= 64 else 128
    return Tile(4, columns, 2, 8, 4) if len(weight.blocks) >= 512 else Tile(2, columns, 4, 4, 3)


def launch_tiles(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    shape, tile = Shape.of(weight), tile_of(len(x), weight)
    grid = triton.cdiv(len(weight.blocks), tile.tiles), triton.cdiv(len(x), tile.columns)
    num_steps = triton.cdiv(shape.num_groups, tile.groups)
    splits = 1 if infinicore.deterministic else splits_of(grid[0] * grid[1], num_steps, x.device)
    in_pairs = x.dtype == torch.bfloat16 and not IS_INTERPRETED and capability(x.device) >= (9, 0)
    part = part_of(y, splits)
    tiles_kernel[(*grid, splits)](
        y, part, x, *shape.pointers, bias, x.stride(0), shape.stride, len(x), weight.shape[0],
        shape.num_groups, triton.cdiv(num_steps, splits), PAIR if in_pairs else POWER,
        HAS_BIAS=bias is not None, IS_SPLIT=splits > 1, TILES=tile.tiles, COLUMNS=tile.columns,
        GROUPS=tile.groups, TYPE=weight.type.ggml_id, DTYPE=TRITON_TYPES[x.dtype], IN_PAIRS=in_pairs,
        IS_WHOLE=shape.num_groups % (tile.groups * splits) == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(x.device),
    )  # fmt: skip
    fold(y, part, bias)
