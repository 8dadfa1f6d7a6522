"""Weights of bytes, in tiles or float8, as floats in the registers where the tensor cores take them from.

A thread of a warp holds of its tile of 32 rows what the tensor cores want of it, so that what it loads goes
through no other thread's hands. Float8 ask for another order of columns for this, of x, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infinicore.ops.triton.tiles import Q8_0
from infinicore.ops.triton.tiles_values import load_numbers, pair_of_values, step, twice

# L threads: 32 for each tile of 32 rows. Thread 4 g + t of a tile has its rows 8 j + g, j being 0 to 3.
BF16 = tl.constexpr(tl.bfloat16)
FP8 = tl.constexpr(-1)  # stands where tiles have ggml's number of their type


@triton.jit
def columns_of(LENGTH: tl.constexpr, TYPE: tl.constexpr):
    """The columns of x in the order in which the tensor cores take those of a weight"""
    column = tl.arange(0, LENGTH)
    if TYPE == FP8:  # of 64: 16 are a thread's, 4 of them a word's
        word = column % 64 // 16
        column = column // 64 * 64 + column % 8 // 2 * 16 + word * 4 + column % 16 // 8 * 2 + column % 2
        column = tl.max_contiguous(tl.multiple_of(column, 2), 2)
    return column


@triton.jit
def pair_of_halves(both):
    """Two bfloat16 or float16 of every word, in a dimension of their own"""
    return tl.join(both.to(tl.uint16), (both >> 16).to(tl.uint16))


@triton.jit
def bfloat16_of_bytes(words):
    """The four float8 of every word as two pairs of bfloat16: their bits are the last of the exponent and the
    first of the fraction of a bfloat16, which is smaller by 2^120"""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d, f, z; mov.b32 f, 0x7B807B80; mov.b32 z, 0x80008000;"
        " prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; shr.u32 c, a, 4; shr.u32 d, b, 4;"
        " and.b32 c, c, 0x07F007F0; and.b32 d, d, 0x07F007F0;"
        " lop3.b32 a, a, 0x80008000, c, 0xEA; lop3.b32 b, b, 0x80008000, d, 0xEA;"
        " fma.rn.bf16x2 $0, a, f, z; fma.rn.bf16x2 $1, b, f, z; }",
        "=r,=r,r", [words], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def float16_of_bytes(words):
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [words], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def float8_of(words, V: tl.constexpr, DTYPE: tl.constexpr):
    """Byte V of every word"""
    return ((words >> (8 * V)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit
def values_of_bytes(words, DTYPE: tl.constexpr, EMULATES: tl.constexpr):
    """The four float8 of every word: [..., 2, 2], the low bit of which before the high one"""
    if EMULATES:
        low = tl.join(float8_of(words, 0, DTYPE), float8_of(words, 1, DTYPE))
        top = tl.join(float8_of(words, 2, DTYPE), float8_of(words, 3, DTYPE))
    else:
        first, last = bfloat16_of_bytes(words) if DTYPE == BF16 else float16_of_bytes(words)
        low = pair_of_halves(first).to(DTYPE, bitcast=True)
        top = pair_of_halves(last).to(DTYPE, bitcast=True)
    return tl.join(low, top)


@triton.jit
def load_float8(
    word_ptr, first, apart, start, num_rows, K,
    TILES: tl.constexpr, LENGTH: tl.constexpr, DTYPE: tl.constexpr, EACH: tl.constexpr,
    IS_WHOLE: tl.constexpr, EMULATES: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, LENGTH * TILES * 2)[:, None]  # of 64 columns, row 8 j of a tile, tile, g, t
    tile = first + thread // 32 % EACH + thread // (32 * EACH) % (TILES // EACH) * apart
    j = thread // (32 * TILES) % 4
    column = start + thread // (128 * TILES) * 64 + thread % 4 * 16
    row = tl.minimum(tile * 32 + j * 8 + thread % 32 // 4, num_rows - 1)
    at = word_ptr + (row.to(tl.int64) * K + column) // 4 + tl.arange(0, 4)[None, :]
    is_in = tl.full([1, 1], 1, tl.int1) if IS_WHOLE else column < K
    words = tl.load(at, mask=is_in, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    values = values_of_bytes(words, DTYPE, EMULATES).reshape(LENGTH // 64, 2, 2, TILES, 8, 4, 4, 2, 2)
    # j / 2, tile, j % 2, g; 64 columns, word, the high bit of a value's place, t, the low bit
    return values.permute(1, 3, 2, 4, 0, 6, 8, 5, 7).reshape(TILES * 32, LENGTH)


@triton.jit
def load_tiles(
    word_ptr, half_ptr, byte_ptr, first, apart, start, num_tiles, num_groups, stride, power,
    TILES: tl.constexpr, LENGTH: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr,
    EACH: tl.constexpr, IS_WHOLE: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = LENGTH // 32
    thread = tl.arange(0, TILES * GROUPS * 32)[:, None]  # group, tile, g, t
    tile = first + thread // 32 % EACH + thread // (32 * EACH) % (TILES // EACH) * apart
    group = start // 32 + thread // (32 * TILES)
    j = tl.arange(0, 4)[None, :]
    # A tile beyond the last is one that is there, and is not stored.
    base = tl.minimum(tile, num_tiles - 1).to(tl.int64) * stride
    is_in = tl.full([1, 1], 1, tl.int1) if IS_WHOLE else group < num_groups
    words, high, scale, last, minimum = load_numbers(
        word_ptr, half_ptr, byte_ptr, base, group, thread % 32, j, is_in, num_groups, TYPE
    )
    if IN_PAIRS:
        scale, last, minimum = twice(scale), twice(last), twice(minimum)
        low = tl.join(
            pair_of_values(words, high, j, scale, minimum, power, 0, TYPE),
            pair_of_values(words, high, j, scale, minimum, power, 1, TYPE),
        )
        top = tl.join(
            pair_of_values(words, high, j, last, minimum, power, 2, TYPE),
            pair_of_values(words, high, j, last, minimum, power, 3, TYPE),
        )
    else:
        low = step(words, high, j, scale, minimum, power, 0, TYPE, DTYPE)
        top = step(words, high, j, last, minimum, power, 4, TYPE, DTYPE)
    values = tl.join(low, top).reshape(GROUPS, TILES, 8, 4, 2, 2, 2, 2, 2)
    # j / 2, tile, j % 2, g; group, its half, the high bit of a value's place, t, the low bit
    return values.permute(4, 1, 5, 2, 0, 8, 7, 3, 6).reshape(TILES * 32, LENGTH)


@triton.jit
def fetch(
    word_ptr, first, apart, start, num_rows, K, stride,
    TILES: tl.constexpr, EACH: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Bring 4 KB of each tile into the L2 cache: what a step takes of it, or most of that"""
    thread = tl.arange(0, TILES * 32)
    tile = first + thread // 32 % EACH + thread // (32 * EACH) * apart
    if TYPE == FP8:
        row = tl.minimum(tile * 32 + thread % 32, num_rows - 1)
        at = word_ptr + (row.to(tl.int64) * K + start) // 4
    else:
        SIZE: tl.constexpr = 8 if TYPE == Q8_0 else 4  # words of a row and group
        at = word_ptr + tl.minimum(tile, tl.cdiv(num_rows, 32) - 1).to(tl.int64) * stride * 4
        at += tl.minimum(start * SIZE + thread % 32 * 32, stride * 4 - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
