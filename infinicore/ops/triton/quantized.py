"""Products with quantised weights, read as the bytes they are, and rows of them (infinicore/tiles.py).

One row is sums of products in registers. A few go through the tensor cores, a tile of the weight being made
floats on its way there. For many it pays to make floats of the whole weight first, for cuBLAS.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.float8 import Float8Tensor
from infinicore.ops.triton import float8
from infinicore.ops.triton.tensors import (
    FLOATS,
    INDICES,
    are_plain,
    fits,
    num_processors,
    overlap,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)
from infinicore.tiles import TiledTensor

# M rows of x, N of the weight, K their length, P pieces of 16 bytes of codes, F fields of a word, S splits
# The types by ggml's numbers
Q4_0 = tl.constexpr(2)
Q4_1 = tl.constexpr(3)
Q8_0 = tl.constexpr(8)
Q4_K = tl.constexpr(12)
Q6_K = tl.constexpr(14)

POWER = 150 << 23  # 2^23 as a float32 in bits: the last of them count ones
MOST_FOR_TILES = 256  # rows; with more, floats are made of a weight as a whole
MOST_ALONE = 16  # rows of float32, which the tensor cores do not take


# ---- what a tile holds -------------------------------------------------------------------------------------


@triton.jit
def load_words(ptr, row, piece, is_in, num_pieces, stride):
    """Codes of these rows and pieces, where there are any: [R], [P], [P, R] -> int32 [P, R, 4]

    A warp takes pieces of a row, and a thread of it the same ones of every row, with their scales and x.
    """
    start = (row // 8).to(tl.int64) * stride + (row % 8) * num_pieces
    at = ptr + (start[None, :, None] + piece[:, None, None]) * 4 + tl.arange(0, 4)[None, None, :]
    words = tl.load(at, mask=is_in[:, :, None], other=0, eviction_policy="evict_first")
    return words.to(tl.uint32, bitcast=True)


@triton.jit
def load_high(ptr, row, piece, is_in, num_pieces, stride):
    """Of Q6_K the high bits: 16 of them for each word"""
    start = ((row // 8).to(tl.int64) * stride + num_pieces * 8) * 8 + (row % 8) * num_pieces * 4
    at = ptr + start[None, :, None] + piece[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    return tl.load(at, mask=is_in[:, :, None], other=0, eviction_policy="evict_first").to(tl.uint32)


@triton.jit
def load_side_by_side(ptr, row, index, is_in, start, stride, SIZE: tl.constexpr):
    """Number `index` of each row, of a part whose elements have SIZE bytes and lie 8 rows together"""
    at = ((row // 8).to(tl.int64) * stride + start) * (16 // SIZE) + row % 8
    return tl.load(ptr + at[None, :] + index[:, None] * 8, mask=is_in, other=0)


@triton.jit
def load_scale(
    half_ptr, byte_ptr, row, piece, is_in, num_pieces, stride, HALF: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """What the values of a piece are multiplied by, of Q6_K those of one half of it: float32 [P, R]"""
    if TYPE == Q8_0:
        scale = load_side_by_side(half_ptr, row, piece // 2, is_in, num_pieces * 8, stride, 2)
    elif TYPE == Q4_K:
        block = load_side_by_side(half_ptr, row, piece // 8, is_in, num_pieces * 9, stride, 2)
        group = load_side_by_side(byte_ptr, row, piece, is_in, num_pieces * 8, stride, 1)
        scale = block.to(tl.float32) * group.to(tl.float32)
    elif TYPE == Q6_K:
        block = load_side_by_side(half_ptr, row, piece // 8, is_in, num_pieces * 13, stride, 2)
        group = load_side_by_side(byte_ptr, row, piece * 2 + HALF, is_in, num_pieces * 12, stride, 1)
        scale = block.to(tl.float32) * group.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        scale = load_side_by_side(half_ptr, row, piece, is_in, num_pieces * 8, stride, 2)
    return scale.to(tl.float32)


@triton.jit
def load_minimum(half_ptr, byte_ptr, row, piece, is_in, num_pieces, stride, TYPE: tl.constexpr):
    """What is added to the values of a piece of Q4_1 or Q4_K: float32 [P, R]"""
    if TYPE == Q4_1:
        return load_side_by_side(half_ptr, row, piece, is_in, num_pieces * 9, stride, 2).to(tl.float32)
    start = num_pieces * 9 + num_pieces // 8
    block = load_side_by_side(half_ptr, row, piece // 8, is_in, start, stride, 2)
    start = num_pieces * 8 + num_pieces // 2
    group = load_side_by_side(byte_ptr, row, piece, is_in, start, stride, 1)
    return -block.to(tl.float32) * group.to(tl.float32)


@triton.jit
def field(words, high, power, F: tl.constexpr, TYPE: tl.constexpr):
    """Field F of every word as the number it stands for, float32.

    Its bits become the last ones of a large power of two, which is then taken off: one operation each.
    The power is an argument since the first of them takes one constant, and that is the mask.
    """
    BITS: tl.constexpr = 8 if TYPE == Q8_0 else 4
    IS_LOW: tl.constexpr = F * BITS < 16
    AT: tl.constexpr = F * BITS if IS_LOW else F * BITS - 12  # below the 23 bits that a float32 has
    OFFSET: tl.constexpr = 128 if TYPE == Q8_0 else 8 if TYPE == Q4_0 else 32 if TYPE == Q6_K else 0
    half = words if IS_LOW else words >> 12
    bits = power - (AT << 23)
    if TYPE == Q6_K:
        bits = ((high << (4 if IS_LOW else 6)) & (48 << AT)) | bits
    bits = (half & (((1 << BITS) - 1) << AT)) | bits
    return bits.to(tl.float32, bitcast=True) - float((1 << (23 - AT)) + OFFSET)


# ---- one row -----------------------------------------------------------------------------------------------


@triton.jit
def row_kernel(
    y_ptr, x_ptr, word_ptr, short_ptr, half_ptr, byte_ptr, bias_ptr, x_stride, stride, N, num_pieces, power,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, TYPE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum(x[m] * weight[n]) + bias[n]"""
    FIELDS: tl.constexpr = 4 if TYPE == Q8_0 else 8
    HALVES: tl.constexpr = 2 if TYPE == Q6_K else 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.arange(0, PIECES)
    # Weights do not depend on the kernel before: the first are on their way while it ends.
    is_in = (piece < num_pieces)[:, None]
    words = load_words(word_ptr, row, piece, is_in, num_pieces, stride)
    high = load_high(short_ptr, row, piece, is_in, num_pieces, stride) if TYPE == Q6_K else words
    wait_for_inputs(OVERLAPS)
    x_row = x_ptr + tl.program_id(1).to(tl.int64) * x_stride
    sums = tl.zeros([PIECES, ROWS], tl.float32)
    for start in range(0, num_pieces, PIECES):
        at = start + piece
        x_at = x_row + at[:, None] * (4 * FIELDS) + tl.arange(0, 4)[None, :]
        is_in = (at < num_pieces)[:, None]
        is_next = (at + PIECES < num_pieces)[:, None]
        next_words = load_words(word_ptr, row, at + PIECES, is_next, num_pieces, stride)
        next_high = words
        if TYPE == Q6_K:
            next_high = load_high(short_ptr, row, at + PIECES, is_next, num_pieces, stride)
        x_sums = tl.zeros([PIECES, 4], tl.float32)
        for HALF in tl.static_range(HALVES):
            scale = load_scale(half_ptr, byte_ptr, row, at, is_in, num_pieces, stride, HALF, TYPE)
            products = tl.zeros([PIECES, ROWS, 4], tl.float32)
            for F in tl.static_range(HALF * FIELDS // HALVES, (HALF + 1) * FIELDS // HALVES):
                x = tl.load(x_at + 4 * F, mask=is_in, other=0.0).to(tl.float32)
                products += field(words, high, power, F, TYPE) * x[:, None, :]
                x_sums += x
            sums += tl.sum(products, 2) * scale
        if (TYPE == Q4_1) | (TYPE == Q4_K):
            minimum = load_minimum(half_ptr, byte_ptr, row, at, is_in, num_pieces, stride, TYPE)
            sums += minimum * tl.sum(x_sums, 1)[:, None]
        words, high = next_words, next_high
    y = tl.sum(sums, 0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    to = y_ptr + tl.program_id(1).to(tl.int64) * N + row
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=row < N)


# ---- few rows ----------------------------------------------------------------------------------------------


@triton.jit
def scaled(words, high, power, scale, minimum, F: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    values = field(words, high, power, F, TYPE) * scale[:, :, None]
    if (TYPE == Q4_1) | (TYPE == Q4_K):
        values += minimum[:, :, None]
    return values.to(DTYPE)


@triton.jit
def four(words, high, power, scale, minimum, F: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Fields F to F + 3 of every word: [P, R, 4, 2, 2], the low bit of which before the high one"""
    low = tl.join(
        scaled(words, high, power, scale, minimum, F, TYPE, DTYPE),
        scaled(words, high, power, scale, minimum, F + 1, TYPE, DTYPE),
    )
    top = tl.join(
        scaled(words, high, power, scale, minimum, F + 2, TYPE, DTYPE),
        scaled(words, high, power, scale, minimum, F + 3, TYPE, DTYPE),
    )
    return tl.join(low, top)


@triton.jit
def load_values(
    word_ptr, short_ptr, half_ptr, byte_ptr, row, piece, is_in, num_pieces, stride, power,
    TYPE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What these rows and pieces hold, rounded once: [R], [P], [P, R] -> [R, P * values of a piece]"""
    words = load_words(word_ptr, row, piece, is_in, num_pieces, stride)
    high = load_high(short_ptr, row, piece, is_in, num_pieces, stride) if TYPE == Q6_K else words
    scale = load_scale(half_ptr, byte_ptr, row, piece, is_in, num_pieces, stride, 0, TYPE)
    minimum = scale
    if (TYPE == Q4_1) | (TYPE == Q4_K):
        minimum = load_minimum(half_ptr, byte_ptr, row, piece, is_in, num_pieces, stride, TYPE)
    low = four(words, high, power, scale, minimum, 0, TYPE, DTYPE)
    if TYPE == Q8_0:
        values = low.permute(1, 0, 4, 3, 2).reshape(row.shape[0], piece.shape[0] * 16)
    else:
        if TYPE == Q6_K:
            scale = load_scale(half_ptr, byte_ptr, row, piece, is_in, num_pieces, stride, 1, TYPE)
        top = four(words, high, power, scale, minimum, 4, TYPE, DTYPE)
        both = tl.join(low, top).permute(1, 0, 5, 4, 3, 2)
        values = both.reshape(row.shape[0], piece.shape[0] * 32)
    return values


@triton.jit
def tiles_kernel(
    y_ptr, part_ptr, x_ptr, word_ptr, short_ptr, half_ptr, byte_ptr, bias_ptr, x_stride, stride, M, N,
    num_pieces, num_steps, power,
    HAS_BIAS: tl.constexpr, IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PIECES: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS of the weight, COLUMNS rows of x] of the product, or of a split of its sums"""
    LENGTH: tl.constexpr = PIECES * (16 if TYPE == Q8_0 else 32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    at = tl.arange(0, LENGTH)
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_row = x_ptr + column.to(tl.int64)[:, None] * x_stride + at[None, :]
    for step in range(split * num_steps, (split + 1) * num_steps):
        piece = step * PIECES + tl.arange(0, PIECES)
        is_in = (piece < num_pieces)[:, None] & (row < tl.cdiv(N, 8) * 8)[None, :]  # tiles are whole
        weight = load_values(
            word_ptr, short_ptr, half_ptr, byte_ptr, row, piece, is_in, num_pieces, stride, power, TYPE, DTYPE
        )
        is_x = (column < M)[:, None] & (step * LENGTH + at < num_pieces * (LENGTH // PIECES))[None, :]
        x = tl.load(x_row + step * LENGTH, mask=is_x, other=0.0)
        sums = tl.dot(weight, x.T, sums)
    is_stored = (column < M)[:, None] & (row < N)[None, :]
    if IS_SPLIT:
        to = part_ptr + (split.to(tl.int64) * M + column)[:, None] * N + row[None, :]
        tl.store(to, sums.T, mask=is_stored)
    else:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
        to = y_ptr + column.to(tl.int64)[:, None] * N + row[None, :]
        tl.store(to, sums.T.to(y_ptr.dtype.element_ty), mask=is_stored)


@triton.jit
def fold_kernel(
    y_ptr, part_ptr, bias_ptr, total, N,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = the sum of the splits, in their order, + bias"""
    wait_for_inputs(OVERLAPS)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(part_ptr + split * total + at, mask=at < total, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + at % N, mask=at < total, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=at < total)


# ---- rows as they are --------------------------------------------------------------------------------------


@triton.jit
def values_kernel(
    y_ptr, id_ptr, word_ptr, short_ptr, half_ptr, byte_ptr, stride, M, N, num_pieces, power,
    HAS_IDS: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, TYPE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[i] = weight[id[i]], NaN where there is no such row; without ids, weight[i]"""
    wait_for_inputs(OVERLAPS)
    LENGTH: tl.constexpr = 16 if TYPE == Q8_0 else 32
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    row = out
    is_row = out < M
    if HAS_IDS:
        wanted = tl.load(id_ptr + out, mask=out < M, other=0).to(tl.int64)
        is_row = (wanted >= 0) & (wanted < N)
        row = tl.where(is_row, wanted, 0)
    is_in = (piece < num_pieces)[:, None] & is_row[None, :]
    values = load_values(
        word_ptr, short_ptr, half_ptr, byte_ptr, row, piece, is_in, num_pieces, stride, power,
        TYPE, y_ptr.dtype.element_ty,
    )  # fmt: skip
    if HAS_IDS:
        values = tl.where(is_row[:, None], values, float("nan"))
    column = tl.program_id(1) * (PIECES * LENGTH) + tl.arange(0, PIECES * LENGTH)
    size = num_pieces * LENGTH
    to = y_ptr + out.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(to, values, mask=(out < M)[:, None] & (column < size)[None, :])


# ---- launches ----------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What kernels are told of a weight: its memory by the size of its elements, and its sizes in pieces"""

    pointers: tuple[Tensor, Tensor, Tensor, Tensor]
    stride: int
    num_pieces: int

    @classmethod
    def of(cls, weight: TiledTensor) -> Shape:
        blocks = weight.blocks
        views = (blocks.view(torch.int32), blocks.view(torch.int16), blocks.view(torch.float16), blocks)
        return cls(views, blocks.stride(0) // 16, weight.shape[1] // values_per_piece(weight))


def values_per_piece(weight: TiledTensor) -> int:
    return 16 if weight.type.ggml_id == Q8_0.value else 32


def launch_row(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    shape, rows = Shape.of(weight), 8
    pieces = min(triton.next_power_of_2(shape.num_pieces), 128)
    row_kernel[(triton.cdiv(weight.shape[0], rows), len(x))](
        y, x, *shape.pointers, bias, x.stride(0), shape.stride, weight.shape[0], shape.num_pieces, POWER,
        HAS_BIAS=bias is not None, ROWS=rows, PIECES=pieces, TYPE=weight.type.ggml_id,
        num_warps=max(pieces // 32, 1), num_stages=1, **overlap(x.device),
    )  # fmt: skip


class Tile(NamedTuple):
    """How many rows of the weight and of x, and how many pieces, a program takes at once"""

    rows: int
    columns: int
    pieces: int
    num_warps: int
    num_stages: int


def tile_of(num_rows: int, weight: TiledTensor) -> Tile:
    pieces = 128 // values_per_piece(weight)
    columns = min(max(triton.next_power_of_2(num_rows), 16), 128)
    return Tile(64 if columns < 64 else 128, columns, pieces, 4 if columns < 64 else 8, 3)


def splits_of(num_programs: int, num_steps: int, device: torch.device) -> int:
    """Into how many parts the sums are split, so that every processor has work"""
    wanted = 2 * num_processors(device) // num_programs
    return max(min(wanted, num_steps // 4, 8), 1)


def launch_tiles(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    shape, tile = Shape.of(weight), tile_of(len(x), weight)
    grid = triton.cdiv(weight.shape[0], tile.rows), triton.cdiv(len(x), tile.columns)
    num_steps = triton.cdiv(shape.num_pieces, tile.pieces)
    splits = splits_of(grid[0] * grid[1], num_steps, x.device)
    part = y if splits == 1 else torch.empty((splits, *y.shape), dtype=torch.float32, device=x.device)
    tiles_kernel[(*grid, splits)](
        y, part, x, *shape.pointers, bias, x.stride(0), shape.stride, len(x), weight.shape[0],
        shape.num_pieces, triton.cdiv(num_steps, splits), POWER,
        HAS_BIAS=bias is not None, IS_SPLIT=splits > 1, ROWS=tile.rows, COLUMNS=tile.columns,
        PIECES=tile.pieces, TYPE=weight.type.ggml_id, DTYPE=TRITON_TYPES[x.dtype],
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(x.device),
    )  # fmt: skip
    if splits > 1:
        fold_kernel[(triton.cdiv(y.numel(), 1024),)](
            y, part, bias, y.numel(), weight.shape[0],
            HAS_BIAS=bias is not None, SPLITS=splits, TILE=1024, num_warps=4, **overlap(x.device),
        )  # fmt: skip


TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def launch_values(y: Tensor, ids: Tensor | None, weight: TiledTensor) -> None:
    shape, rows = Shape.of(weight), 8 if ids is None else 1
    pieces = min(triton.next_power_of_2(shape.num_pieces), 32)
    num_rows = len(weight.blocks) * 8 if ids is None else ids.numel()
    values_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(shape.num_pieces, pieces))](
        y, ids, *shape.pointers, shape.stride, weight.shape[0] if ids is None else num_rows, weight.shape[0],
        shape.num_pieces, POWER, HAS_IDS=ids is not None, ROWS=rows, PIECES=pieces, TYPE=weight.type.ggml_id,
        num_warps=4, **overlap(weight.device),
    )  # fmt: skip


def values_of(weight: TiledTensor, dtype: torch.dtype) -> Tensor:
    """All of it as floats"""
    y = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    launch_values(y, None, weight)
    return y


# ---- the ops -----------------------------------------------------------------------------------------------


def is_taken(weight: Any, device: torch.device) -> bool:
    """Whether kernels here read this kind of weight, which lies on the device"""
    is_known = isinstance(weight, TiledTensor | Float8Tensor) and weight.device == device
    return is_known and weight.blocks.is_contiguous() and weight.shape[0] > 0 and weight.shape[1] % 16 == 0


def accepts_quantized_linear(out: Any, x: Tensor, weight: Any, bias: Tensor | None) -> bool:
    return (
        is_taken(weight, x.device)
        and are_plain(x.device, FLOATS, x)
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and (bias is None or (are_plain(x.device, (x.dtype,), bias) and bias.shape == weight.shape[:1]))
        and fits(out, (*x.shape[:-1], weight.shape[0]), x.dtype, x.device)
    )


def quantized_linear(
    out: Tensor | None, x: Tensor, weight: TiledTensor | Float8Tensor, bias: Tensor | None
) -> Tensor:
    like = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    y = target(out, like, x, *weight.planes, *(() if bias is None else (bias,)))
    rows, bias = rows_of(x), None if bias is None else bias.contiguous()
    if isinstance(weight, Float8Tensor):
        float8.linear(y.view(-1, weight.shape[0]), rows, weight, bias)
    else:
        linear(y.view(-1, weight.shape[0]), rows, weight, bias)
    return settled(y, out)


def linear(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    """y [M, N] = x [M, K] times the weight + bias"""
    is_float32 = x.dtype == torch.float32
    if len(x) == 1 or (is_float32 and len(x) <= MOST_ALONE):
        launch_row(y, x, weight, bias)
    elif len(x) <= MOST_FOR_TILES and not is_float32:
        launch_tiles(y, x, weight, bias)
    elif bias is None:
        torch.mm(x, values_of(weight, x.dtype).t(), out=y)
    else:
        torch.addmm(bias, x, values_of(weight, x.dtype).t(), out=y)


def accepts_quantized_embedding(out: Any, ids: Tensor, weight: Any) -> bool:
    return (
        is_taken(weight, ids.device)
        and are_plain(ids.device, INDICES, ids)
        and ids.numel() > 0
        and fits(out, (*ids.shape, weight.shape[1]), torch.float32, ids.device)
    )


def quantized_embedding(out: Tensor | None, ids: Tensor, weight: TiledTensor | Float8Tensor) -> Tensor:
    like = torch.empty((*ids.shape, weight.shape[1]), dtype=torch.float32, device=ids.device)
    y = target(out, like, ids, *weight.planes)
    if isinstance(weight, Float8Tensor):
        float8.rows(y, ids.contiguous(), weight)
    else:
        launch_values(y, ids.contiguous(), weight)
    return settled(y, out)
