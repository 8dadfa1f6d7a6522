"""Rows times a weight of bytes, through the tensor cores, with the residual or the gate after it.

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
from infinicore.float8 import Float8Tensor
from infinicore.ops.hopper import tiled
from infinicore.ops.triton.fragments import FP8, columns_of, fetch, load_float8, load_tiles
from infinicore.ops.triton.rows import HALVES, finish
from infinicore.ops.triton.splits import arrivals, leave_part, parts_at, sum_of_parts
from infinicore.ops.triton.tensors import num_processors, overlap, wait_for_inputs
from infinicore.ops.triton.tiles import IS_INTERPRETED, PAIR, Shape, capability
from infinicore.ops.triton.tiles_values import POWER
from infinicore.quantization import BlockType
from infinicore.tiles import TILE_ROWS, TiledTensor

# M rows of x, N of y, K their length
MOST_SPLITS = 8
AHEAD = 2  # steps of few rows, whose weights are fetched while the kernel before ends; four are too many
NIBBLES = (BlockType.Q4_0, BlockType.Q4_1, BlockType.Q4_K)
MOST_ROWS, MOST_FLOAT8_ROWS = 256, 64  # with more, floats are made of a weight as a whole, or float8 of x


@triton.jit
def finish_tiles(
    y_ptr, scale_ptr, bias_ptr, residual_ptr, sums, column, first, residual_stride, M, N,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATES: tl.constexpr, TILES: tl.constexpr,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Sums, by j / 2, tile, j % 2 and g, in the order of rows, with what comes after a product"""
    EACH: tl.constexpr = TILES // 2 if GATES else TILES
    row = first * 32 + tl.arange(0, EACH * 32)
    parted = sums.reshape(2, TILES // EACH, EACH, 16, COLUMNS)
    if GATES:
        values, others = tl.split(parted.permute(2, 0, 3, 4, 1))
    else:
        values = parted.permute(2, 0, 3, 4, 1)
        others = values
    values = values.reshape(EACH * 32, COLUMNS)
    others = others.reshape(EACH * 32, COLUMNS)
    if TYPE == FP8:
        values *= tl.load(scale_ptr + row, mask=row < N, other=0.0)[:, None]
        if GATES:
            others *= tl.load(scale_ptr + N + row, mask=row < N, other=0.0)[:, None]
    finish(
        y_ptr, bias_ptr, residual_ptr, values.T, others.T, column, row, residual_stride, M, N,
        HAS_BIAS, ADDS, GATES,
    )  # fmt: skip


@triton.jit
def load_weight(
    source, first, apart, start, num_rows, K, stride, power,
    TILES: tl.constexpr, LENGTH: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr, EACH: tl.constexpr,
    IS_WHOLE: tl.constexpr, IN_PAIRS: tl.constexpr, EMULATES: tl.constexpr,
):  # fmt: skip
    """[TILES * 32, LENGTH], the columns in the order of columns_of"""
    word_ptr, half_ptr, byte_ptr = source
    if TYPE == FP8:
        weight = load_float8(
            word_ptr, first, apart, start, num_rows, K, TILES, LENGTH, DTYPE, EACH, IS_WHOLE, EMULATES
        )
    else:
        weight = load_tiles(
            word_ptr, half_ptr, byte_ptr, first, apart, start, tl.cdiv(num_rows, 32), K // 32, stride,
            power, TILES, LENGTH, TYPE, DTYPE, EACH, IS_WHOLE, IN_PAIRS,
        )  # fmt: skip
    return weight


@triton.jit
def add_product(sums, weight, x, EMULATES: tl.constexpr):
    if EMULATES:  # where bfloat16 are bits
        weight = weight.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(weight, x.T, sums)


@triton.jit(do_not_specialize=["M", "num_steps", "apart"])
def fragment_kernel(
    y_ptr, part_ptr, arrival_ptr, x_ptr, word_ptr, half_ptr, byte_ptr, scale_ptr, bias_ptr, residual_ptr,
    x_stride, residual_stride, stride, M, N, K, apart, num_steps, power,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATES: tl.constexpr, TILES: tl.constexpr,
    COLUMNS: tl.constexpr, LENGTH: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
    TYPE: tl.constexpr, IN_PAIRS: tl.constexpr, IS_WHOLE: tl.constexpr, EMULATES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = x times the weight + bias (+ residual), or silu(gate) * up of tiles that are some apart

    IS_WHOLE says that steps divide a row, so that none looks beyond it.
    """
    EACH: tl.constexpr = TILES // 2 if GATES else TILES
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    num_rows = N * (TILES // EACH)
    first, split = tl.program_id(0) * EACH, tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = columns_of(LENGTH, TYPE)
    x_row = x_ptr + tl.minimum(column, M - 1).to(tl.int64)[:, None] * x_stride + at[None, :]
    if OVERLAPS:
        for i in tl.static_range(AHEAD):
            start = (split * num_steps + i) * LENGTH
            if start < K:
                fetch(word_ptr, first, apart, start, num_rows, K, stride, TILES, EACH, TYPE)
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros([TILES * 32, COLUMNS], tl.float32)
    for number in range(split * num_steps, (split + 1) * num_steps):
        start = number * LENGTH
        weight = load_weight(
            (word_ptr, half_ptr, byte_ptr), first, apart, start, num_rows, K, stride, power,
            TILES, LENGTH, TYPE, DTYPE, EACH, IS_WHOLE, IN_PAIRS, EMULATES,
        )  # fmt: skip
        is_x = tl.full([1, 1], 1, tl.int1) if IS_WHOLE else (start + at < K)[None, :]
        sums = add_product(sums, weight, tl.load(x_row + start, mask=is_x, other=0.0), EMULATES)
    pointers, place = (y_ptr, scale_ptr, bias_ptr, residual_ptr), (column, first, residual_stride, M, N)
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        part_at = parts_at(part_ptr, tile, SPLITS, TILES * 32, COLUMNS)
        if leave_part(part_at, arrival_ptr, tile, sums, split, SPLITS):
            sums = sum_of_parts(part_at, arrival_ptr, tile, SPLITS, TILES * 32 * COLUMNS)
            finish_tiles(*pointers, sums, *place, HAS_BIAS, ADDS, GATES, TILES, COLUMNS, TYPE)
    else:
        finish_tiles(*pointers, sums, *place, HAS_BIAS, ADDS, GATES, TILES, COLUMNS, TYPE)


class Tile(NamedTuple):
    """Tiles of the weight, each of a warp, rows of x and columns that a program takes at once; stages; how
    many programs share the columns"""

    tiles: int
    columns: int
    length: int
    num_stages: int
    splits: int = 1


DETERMINISTIC = Tile(4, 64, 128, 3)


def suits(x: Tensor, weight: TiledTensor | Float8Tensor) -> bool:
    """Whether x is of a dtype, and has as few rows, as are taken here"""
    most = MOST_FLOAT8_ROWS if isinstance(weight, Float8Tensor) else MOST_ROWS
    return x.dtype in HALVES and (infinicore.deterministic or x.numel() <= most * x.shape[-1])


def tile_of(num_rows: int, weight: TiledTensor | Float8Tensor) -> Tile:
    """What an H200 does best; one for all where a row depends on no other"""
    if infinicore.deterministic:
        return DETERMINISTIC
    if num_rows <= 16:
        tile = Tile(4, 16, 256, 3) if weight.type in NIBBLES else Tile(4, 16, 128, 5)
    elif num_rows <= 32:
        tile = Tile(8, 32, 128, 3)
    elif num_rows <= 64:
        is_small = weight.shape[0] <= 64 * num_processors(weight.device)
        tile = Tile(4, 64, 64, 5) if is_small else Tile(8, 64, 128, 3)
    else:
        tile = Tile(8, 128, 64, 3)
    return tile._replace(splits=splits_of(tile, num_rows, weight))


def splits_of(tile: Tile, num_rows: int, weight: TiledTensor | Float8Tensor) -> int:
    """A power of two, so that every processor has work for eight warps; not more than there are steps"""
    num_programs = triton.cdiv(weight.shape[0], TILE_ROWS * tile.tiles) * triton.cdiv(num_rows, tile.columns)
    wanted = 8 * num_processors(weight.device) // (num_programs * tile.tiles)
    most: int = min(wanted, MOST_SPLITS, triton.cdiv(weight.shape[1], tile.length))
    return 1 << max(most.bit_length() - 1, 0)


def launch(
    y: Tensor,
    x: Tensor,
    weight: TiledTensor | Float8Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """y = x times the weight + bias + residual, or silu(gate) * up where the weight has the rows of both"""
    if tiled.suits(x, weight):
        return tiled.launch(y, x, weight, bias, residual, is_gated)
    size, num_outputs = x.shape[1], y.shape[-1]
    tile = tile_of(len(x), weight)
    each = tile.tiles // 2 if is_gated else tile.tiles
    grid = (
        triton.cdiv(triton.cdiv(num_outputs, TILE_ROWS), each),
        triton.cdiv(len(x), tile.columns),
        tile.splits,
    )
    is_split = tile.splits > 1
    num_parts = grid[0] * grid[1] * tile.splits * tile.tiles * TILE_ROWS * tile.columns if is_split else 0
    num_steps = triton.cdiv(size, tile.length * tile.splits)
    in_pairs = x.dtype == torch.bfloat16 and not IS_INTERPRETED and capability(x.device) >= (9, 0)
    fragment_kernel[grid](
        y, x.new_empty(num_parts, dtype=torch.float32), arrivals(weight.blocks) if is_split else None, x,
        *pointers_of(weight), bias, residual, x.stride(0), 0 if residual is None else residual.stride(0),
        weight.blocks.stride(0) // 16, len(x), num_outputs, size, num_outputs // TILE_ROWS, num_steps,
        PAIR if in_pairs else POWER,
        HAS_BIAS=bias is not None, ADDS=residual is not None, GATES=is_gated, TILES=tile.tiles,
        COLUMNS=tile.columns, LENGTH=tile.length, SPLITS=tile.splits,
        TYPE=FP8.value if isinstance(weight, Float8Tensor) else weight.type.ggml_id, IN_PAIRS=in_pairs,
        AHEAD=AHEAD if tile.columns == 16 else 0, EMULATES=IS_INTERPRETED,
        IS_WHOLE=num_steps * tile.splits * tile.length == size,
        num_warps=tile.tiles, num_stages=tile.num_stages, **overlap(x.device),
    )  # fmt: skip


def pointers_of(weight: TiledTensor | Float8Tensor) -> tuple[Tensor | None, ...]:
    """Its memory by the size of its elements, and the scales of its rows"""
    if isinstance(weight, Float8Tensor):
        return weight.blocks.view(torch.int32), None, None, weight.row_scales
    return *Shape.of(weight).pointers, None
