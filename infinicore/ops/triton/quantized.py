"""Products with quantised weights, read as the bytes they are, and rows of them (infinicore/tiles.py).

Up to 16 rows of bfloat16 go through the tensor cores by way of the instruction whose registers the tiles are
laid out for: a nibble becomes a bfloat16 as the last bits of 128, and what that adds is taken off by a
product of its own. More rows, and float16, go there by way of Triton's own products. For many it pays to make
floats of the whole weight first, for cuBLAS.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.float8 import Float8Tensor
from infinicore.ops.triton import float8
from infinicore.ops.triton.splits import fold, part_of, splits_of
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

# M rows of x, N of the weight, K their length, G groups of 32 values, L threads: 32 for each group at hand.
# Thread 4 g + t has rows 8 j + g of a tile, j being 0 to 3.
# The types by ggml's numbers
Q4_0 = tl.constexpr(2)
Q4_1 = tl.constexpr(3)
Q8_0 = tl.constexpr(8)
Q4_K = tl.constexpr(12)
Q6_K = tl.constexpr(14)

POWER = 150 << 23  # 2^23 as a float32 in bits: the last of them count ones
PAIR = 0x43004300  # two bfloat16 of 128, likewise
MOST_IN_REGISTERS = 16  # rows; with more, Triton's products
MOST_FOR_TILES = 256  # rows; with more, floats are made of a weight as a whole
MOST_ALONE = 16  # rows of float32, which the tensor cores do not take
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# ---- what a tile holds -------------------------------------------------------------------------------------
# `base` is where a tile begins, in steps of 16 bytes; shapes are what base, group, lane and j make together.


@triton.jit
def load_words(ptr, base, group, lane, j, is_in, PLANES: tl.constexpr, PLANE: tl.constexpr):
    """Codes as uint32: 8 nibbles of row 8 j + lane / 4"""
    at = ptr + (base + (group * PLANES + PLANE) * 32 + lane) * 4 + j
    return tl.load(at, mask=is_in, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)


@triton.jit
def load_high(ptr, base, group, lane, j, is_in, num_groups, TYPE: tl.constexpr):
    """The high nibbles of Q8_0, or the words of Q6_K that hold the high bits of rows j and j ^ 1"""
    if TYPE == Q8_0:
        high = load_words(ptr, base, group, lane, j, is_in, 2, 1)
    else:
        at = ptr + (base + num_groups * 32) * 4 + (group * 32 + lane) * 2 + j // 2
        high = tl.load(at, mask=is_in, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    return high


@triton.jit
def load_side(ptr, base, index, lane, j, is_in, SIZE: tl.constexpr):
    """Number `index` of rows 8 j + lane / 4, of a part whose elements have SIZE bytes"""
    return tl.load(ptr + base * (16 // SIZE) + (index * 8 + lane // 4) * 4 + j, mask=is_in, other=0)


@triton.jit
def load_sides(half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE: tl.constexpr):
    """Scales and minimums as they are stored, up to four of them"""
    if TYPE == Q8_0:
        a = load_side(half_ptr, base + num_groups * 64, group, lane, j, is_in, 2)
        b, c, d = a, a, a
    elif TYPE == Q4_0:
        a = load_side(half_ptr, base + num_groups * 32, group, lane, j, is_in, 2)
        b, c, d = a, a, a
    elif TYPE == Q4_1:
        a = load_side(half_ptr, base + num_groups * 32, group, lane, j, is_in, 2)
        b = load_side(half_ptr, base + num_groups * 36, group, lane, j, is_in, 2)
        c, d = a, a
    elif TYPE == Q4_K:
        a = load_side(half_ptr, base + num_groups * 36, group // 8, lane, j, is_in, 2)
        b = load_side(half_ptr, base + num_groups * 36 + num_groups // 2, group // 8, lane, j, is_in, 2)
        c = load_side(byte_ptr, base + num_groups * 32, group, lane, j, is_in, 1)
        d = load_side(byte_ptr, base + num_groups * 34, group, lane, j, is_in, 1)
    else:
        a = load_side(half_ptr, base + num_groups * 52, group // 8, lane, j, is_in, 2)
        b = a
        c = load_side(byte_ptr, base + num_groups * 48, group * 2, lane, j, is_in, 1)
        d = load_side(byte_ptr, base + num_groups * 48, group * 2 + 1, lane, j, is_in, 1)
    return a, b, c, d


@triton.jit
def sides_of(a, b, c, d, TYPE: tl.constexpr):
    """What they mean, in float32: the scales of the first and last 16 values of a group, and what is added"""
    first = a.to(tl.float32)
    last = first
    minimum = first
    if TYPE == Q4_1:
        minimum = b.to(tl.float32)
    elif TYPE == Q4_K:
        first = first * c.to(tl.float32)
        last = first
        minimum = -b.to(tl.float32) * d.to(tl.float32)
    elif TYPE == Q6_K:
        last = first * d.to(tl.int8, bitcast=True).to(tl.float32)
        first = first * c.to(tl.int8, bitcast=True).to(tl.float32)
    return first, last, minimum


# ---- a few rows, in registers ------------------------------------------------------------------------------


@triton.jit
def multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, EMULATES: tl.constexpr):
    """c + a b of the tensor cores, 16 x 16 times 16 x 8, in registers of a warp's threads: pairs of bfloat16

    Of a, rows g and g + 8, of b column g, of both the pairs t; of c, the same rows and columns 2 t, 2 t + 1.
    """
    if EMULATES:
        low = products_of(a0, b0) + products_of(a2, b1)
        top = products_of(a1, b0) + products_of(a3, b1)
        d0, d1 = tl.split(low)
        d2, d3 = tl.split(top)
        size: tl.constexpr = c0.shape[0]
        return c0 + d0.reshape(size), c1 + d1.reshape(size), c2 + d2.reshape(size), c3 + d3.reshape(size)
    else:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def products_of(a, b):
    """Without a GPU: rows of a times columns of b, [L] -> [L / 32, 8, 4, 2]"""
    x = a.reshape(a.shape[0] // 32, 8, 1, 4)
    y = b.reshape(b.shape[0] // 32, 1, 8, 4)
    low = (x << 16).to(tl.float32, bitcast=True) * (y << 16).to(tl.float32, bitcast=True)
    top = (x & 0xFFFF0000).to(tl.float32, bitcast=True) * (y & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.sum(low + top, 3).reshape(a.shape[0] // 32, 8, 4, 2)


@triton.jit
def four(x):
    """[L, 4] -> its columns"""
    even, odd = tl.split(x.reshape(x.shape[0], 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def pair(words, pairs, P: tl.constexpr):
    """Values 2 P and 2 P + 1 of every word, each plus 128, as bfloat16 side by side"""
    return ((words >> (4 * P)) & 0x000F000F) | pairs


@triton.jit
def high_pair(high, pairs, P: tl.constexpr, J: tl.constexpr, TYPE: tl.constexpr):
    """The same of the high bits of row J"""
    if TYPE == Q8_0:
        return ((high >> (4 * P)) & 0x000F000F) | pairs
    else:
        return ((high >> (8 * (J % 2) + 2 * P)) & 0x00030003) | pairs


@triton.jit
def step_of_rows(
    u, v, high_u, high_v, b0, b1, d0, d1, d2, d3, pairs,
    P: tl.constexpr, J: tl.constexpr, TYPE: tl.constexpr, EMULATES: tl.constexpr,
):  # fmt: skip
    """Add the products of pairs P and P + 1 of rows 8 J + g (words u) and 8 J + 8 + g (words v)"""
    d0, d1, d2, d3 = multiply(
        pair(u, pairs, P), pair(v, pairs, P), pair(u, pairs, P + 1), pair(v, pairs, P + 1),
        b0, b1, d0, d1, d2, d3, EMULATES,
    )  # fmt: skip
    if (TYPE == Q8_0) | (TYPE == Q6_K):
        # 16 x: the exponents of a pair of bfloat16, plus 4
        d0, d1, d2, d3 = multiply(
            high_pair(high_u, pairs, P, J, TYPE), high_pair(high_v, pairs, P, J + 1, TYPE),
            high_pair(high_u, pairs, P + 1, J, TYPE), high_pair(high_v, pairs, P + 1, J + 1, TYPE),
            b0 + 0x02000200, b1 + 0x02000200, d0, d1, d2, d3, EMULATES,
        )  # fmt: skip
    return d0, d1, d2, d3


@triton.jit
def products_of_rows(
    u, v, high_u, high_v, b0, b1, b2, b3, z0, z1, z2, z3, s, r, first_s, first_r, pairs,
    J: tl.constexpr, TYPE: tl.constexpr, EMULATES: tl.constexpr,
):  # fmt: skip
    """Scaled products of a group with two rows: [L, 2, 2], columns before rows. z is what 128 and so on add,
    negative, of the first step and of both."""
    if TYPE == Q6_K:  # which has a scale for each step
        d0, d1, d2, d3 = step_of_rows(
            u, v, high_u, high_v, b0, b1, z0, z1, z0, z1, pairs, 0, J, TYPE, EMULATES
        )
        e0, e1, e2, e3 = step_of_rows(
            u, v, high_u, high_v, b2, b3, z2, z3, z2, z3, pairs, 2, J, TYPE, EMULATES
        )
        low = tl.join(d0 * first_s + e0 * s, d1 * first_s + e1 * s)
        top = tl.join(d2 * first_r + e2 * r, d3 * first_r + e3 * r)
    else:
        d0, d1, d2, d3 = step_of_rows(
            u, v, high_u, high_v, b0, b1, z2, z3, z2, z3, pairs, 0, J, TYPE, EMULATES
        )
        d0, d1, d2, d3 = step_of_rows(
            u, v, high_u, high_v, b2, b3, d0, d1, d2, d3, pairs, 2, J, TYPE, EMULATES
        )
        low = tl.join(d0 * s, d1 * s)
        top = tl.join(d2 * r, d3 * r)
    return tl.join(low, top)


@triton.jit
def products_of_columns(
    words, high, scale, first_scale, minimum, x_ptr, x_stride, M, column, group, lane, is_in, pairs, offset,
    TYPE: tl.constexpr, EMULATES: tl.constexpr,
):  # fmt: skip
    """Scaled products of a group with 8 rows of x, from `column` on: [L, 2, 2, 2], by column, then row"""
    column += lane // 4
    at = x_ptr + column.to(tl.int64) * x_stride + group * 16 + (lane % 4) * 2
    is_x = (is_in & (column < M))[:, None]
    b0, b1 = tl.split(
        tl.load(at[:, None] + tl.arange(0, 2)[None, :], mask=is_x, other=0).to(tl.uint32, bitcast=True)
    )
    b2, b3 = tl.split(
        tl.load(at[:, None] + 8 + tl.arange(0, 2)[None, :], mask=is_x, other=0).to(tl.uint32, bitcast=True)
    )
    zero = tl.zeros([lane.shape[0]], tl.float32)
    taken = tl.zeros([lane.shape[0]], tl.uint32) + offset
    z0, z1, _, _ = multiply(taken, taken, taken, taken, b0, b1, zero, zero, zero, zero, EMULATES)
    y0, y1 = zero, zero
    if TYPE != Q6_K:
        y0, y1 = z0, z1
    z2, z3, _, _ = multiply(taken, taken, taken, taken, b2, b3, y0, y1, zero, zero, EMULATES)
    u0, u1, u2, u3 = four(words)
    h0, h1, h2, h3 = four(high)
    s0, s1, s2, s3 = four(scale)
    f0, f1, f2, f3 = four(first_scale)
    low = products_of_rows(
        u0, u1, h0, h1, b0, b1, b2, b3, z0, z1, z2, z3, s0, s1, f0, f1, pairs, 0, TYPE, EMULATES
    )  # fmt: skip
    top = products_of_rows(
        u2, u3, h2, h3, b0, b1, b2, b3, z0, z1, z2, z3, s2, s3, f2, f3, pairs, 2, TYPE, EMULATES
    )  # fmt: skip
    result = tl.join(low, top)
    if (TYPE == Q4_1) | (TYPE == Q4_K):
        # The sum of x is what 128 adds, over -128.
        sums = tl.join(z2, z3) * (-1.0 / 128)
        m0, m1, m2, m3 = four(minimum)
        by_row = tl.join(tl.join(m0, m1), tl.join(m2, m3))
        result += by_row[:, None, :, :] * sums[:, :, None, None]
    return result


@triton.jit
def store_columns(y_ptr, bias_ptr, sums, tile, column, M, N, HAS_BIAS: tl.constexpr):
    """[L, 2, 2, 2], summed over the groups, goes to 8 rows of y"""
    total = tl.sum(sums.reshape(sums.shape[0] // 32, 32, 8), 0)  # [thread, column | row, its low bit first]
    lane = tl.arange(0, 32)[:, None]
    which = tl.arange(0, 8)[None, :]
    column += lane % 4 * 2 + which // 4
    row = tile * 32 + ((which // 2) % 2 + which % 2 * 2) * 8 + lane // 4
    if HAS_BIAS:
        total += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    to = y_ptr + column.to(tl.int64) * N + row
    tl.store(to, total.to(y_ptr.dtype.element_ty), mask=(row < N) & (column < M))


@triton.jit
def load_stage(
    word_ptr, half_ptr, byte_ptr, base, thread, start, num_groups, TYPE: tl.constexpr
):  # fmt: skip
    """All that is stored of a thread's groups from `start` on"""
    PLANES: tl.constexpr = 2 if TYPE == Q8_0 else 1
    group = (start + thread // 32)[:, None]
    lane = (thread % 32)[:, None]
    j = tl.arange(0, 4)[None, :]
    is_in = group < num_groups
    words = load_words(word_ptr, base, group, lane, j, is_in, PLANES, 0)
    high = words
    if (TYPE == Q8_0) | (TYPE == Q6_K):
        high = load_high(word_ptr, base, group, lane, j, is_in, num_groups, TYPE)
    a, b, c, d = load_sides(half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE)
    return words, high, a, b, c, d


@triton.jit
def products_of_stage(
    words, high, a, b, c, d, x_ptr, x_stride, M, column, thread, start, num_groups, pairs, offset,
    TYPE: tl.constexpr, EMULATES: tl.constexpr,
):  # fmt: skip
    group = start + thread // 32
    first, last, minimum = sides_of(a, b, c, d, TYPE)
    return products_of_columns(
        words, high, last, first, minimum, x_ptr, x_stride, M, column, group, thread % 32,
        group < num_groups, pairs, offset, TYPE, EMULATES,
    )  # fmt: skip


@triton.jit
def few_kernel(
    y_ptr, x_ptr, word_ptr, half_ptr, byte_ptr, bias_ptr, x_stride, stride, M, N, num_groups, pairs, offset,
    HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, TYPE: tl.constexpr,
    EMULATES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A tile's 32 columns of y [M, N], for 8 or 16 rows of x; warps share the groups of a row.

    Two stages take turns, so that what is loaded stays in the registers it was loaded to.
    """
    tile = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS
    base = tile.to(tl.int64) * stride
    thread = tl.arange(0, GROUPS * 32)
    # Weights do not depend on the kernel before: the first are on their way while it ends.
    words, high, a, b, c, d = load_stage(word_ptr, half_ptr, byte_ptr, base, thread, 0, num_groups, TYPE)
    wait_for_inputs(OVERLAPS)
    low = tl.zeros([GROUPS * 32, 2, 2, 2], tl.float32)
    top = low
    for start in range(0, num_groups, 2 * GROUPS):
        other_words, other_high, e, f, g, h = load_stage(
            word_ptr, half_ptr, byte_ptr, base, thread, start + GROUPS, num_groups, TYPE
        )
        low += products_of_stage(
            words, high, a, b, c, d, x_ptr, x_stride, M, column, thread, start, num_groups, pairs, offset,
            TYPE, EMULATES,
        )  # fmt: skip
        if COLUMNS > 8:
            top += products_of_stage(
                words, high, a, b, c, d, x_ptr, x_stride, M, column + 8, thread, start, num_groups, pairs,
                offset, TYPE, EMULATES,
            )  # fmt: skip
        words, high, a, b, c, d = load_stage(
            word_ptr, half_ptr, byte_ptr, base, thread, start + 2 * GROUPS, num_groups, TYPE
        )
        low += products_of_stage(
            other_words, other_high, e, f, g, h, x_ptr, x_stride, M, column, thread, start + GROUPS,
            num_groups, pairs, offset, TYPE, EMULATES,
        )  # fmt: skip
        if COLUMNS > 8:
            top += products_of_stage(
                other_words, other_high, e, f, g, h, x_ptr, x_stride, M, column + 8, thread, start + GROUPS,
                num_groups, pairs, offset, TYPE, EMULATES,
            )  # fmt: skip
    store_columns(y_ptr, bias_ptr, low, tile, column, M, N, HAS_BIAS)
    if COLUMNS > 8:
        store_columns(y_ptr, bias_ptr, top, tile, column + 8, M, N, HAS_BIAS)


# ---- floats ------------------------------------------------------------------------------------------------


@triton.jit
def nibble(words, power, V: tl.constexpr):
    """Value V of every word as a float32: the last bits of a power of two, which is then taken off.

    The power is an argument since the first operation takes one constant, and that is the mask.
    """
    BIT: tl.constexpr = V // 2 * 4 + V % 2 * 16
    AT: tl.constexpr = BIT if BIT < 16 else BIT - 12  # below the 23 bits that a float32 has
    half = words if BIT < 16 else words >> 12
    bits = (half & (15 << AT)) | (power - (AT << 23))
    return bits.to(tl.float32, bitcast=True) - float(1 << (23 - AT))


@triton.jit
def number(words, high, j, power, V: tl.constexpr, TYPE: tl.constexpr):
    """Value V of every word, before it is scaled"""
    value = nibble(words, power, V)
    if TYPE == Q4_0:
        value -= 8.0
    elif TYPE == Q8_0:
        value = value + nibble(high, power, V) * 16.0 - 128.0
    elif TYPE == Q6_K:
        bits = (high >> (8 * (j % 2) + V // 2 * 2 + V % 2 * 16).to(tl.uint32)) & 3
        value = value + bits.to(tl.float32) * 16.0 - 32.0
    return value


@triton.jit
def load_numbers(
    word_ptr, half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE: tl.constexpr
):  # fmt: skip
    """Words, their high bits, scales of their two halves, and minimums"""
    PLANES: tl.constexpr = 2 if TYPE == Q8_0 else 1
    words = load_words(word_ptr, base, group, lane, j, is_in, PLANES, 0)
    high = words
    if (TYPE == Q8_0) | (TYPE == Q6_K):
        high = load_high(word_ptr, base, group, lane, j, is_in, num_groups, TYPE)
    a, b, c, d = load_sides(half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE)
    first, last, minimum = sides_of(a, b, c, d, TYPE)
    return words, high, first, last, minimum


@triton.jit
def value(words, high, j, scale, minimum, power, V: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    result = number(words, high, j, power, V, TYPE) * scale
    if (TYPE == Q4_1) | (TYPE == Q4_K):
        result += minimum
    return result.to(DTYPE)


@triton.jit
def step(words, high, j, scale, minimum, power, V: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Values V to V + 3 of every word: [..., 2, 2], the low bit of which before the high one"""
    low = tl.join(
        value(words, high, j, scale, minimum, power, V, TYPE, DTYPE),
        value(words, high, j, scale, minimum, power, V + 1, TYPE, DTYPE),
    )
    top = tl.join(
        value(words, high, j, scale, minimum, power, V + 2, TYPE, DTYPE),
        value(words, high, j, scale, minimum, power, V + 3, TYPE, DTYPE),
    )
    return tl.join(low, top)


@triton.jit
def twice(x):
    """A float32 as two bfloat16 side by side"""
    return x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) * 0x00010001


@triton.jit
def pair_of_values(words, high, j, scale, minimum, pairs, P: tl.constexpr, TYPE: tl.constexpr):
    """Values 2 P and 2 P + 1 of every word, scaled, in bfloat16, two at a time: [..., 2]"""
    low = pair(words, pairs, P)
    if (TYPE == Q8_0) | (TYPE == Q6_K):
        if TYPE == Q8_0:
            top = pair(high, pairs, P)
        else:
            top = ((high >> (8 * (j % 2) + 2 * P).to(tl.uint32)) & 0x00030003) | pairs
        # 136 or 130: what is left of the high bits is those of a signed number
        both = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c; mov.b32 c, 0x41804180; sub.rn.bf16x2 a, $2, $4; sub.rn.bf16x2 b, $1, $5;"
            " fma.rn.bf16x2 a, a, c, b; mul.rn.bf16x2 $0, a, $3; }",
            "=r,r,r,r,r,r", [low, top, scale, pairs + (0x00080008 if TYPE == Q8_0 else 0x00020002), pairs],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    elif TYPE == Q4_0:
        both = tl.inline_asm_elementwise(
            "{ .reg .b32 a; sub.rn.bf16x2 a, $1, $3; mul.rn.bf16x2 $0, a, $2; }",
            "=r,r,r,r", [low, scale, pairs + 0x00080008], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        both = tl.inline_asm_elementwise(
            "{ .reg .b32 a; sub.rn.bf16x2 a, $1, $4; fma.rn.bf16x2 $0, a, $2, $3; }",
            "=r,r,r,r,r", [low, scale, minimum, pairs], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    even = both.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    odd = (both >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(even, odd)


@triton.jit
def load_values(
    word_ptr, half_ptr, byte_ptr, tile, start, num_tiles, num_groups, stride, power,
    TILES: tl.constexpr, GROUPS: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr,
    IN_PAIRS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """What these tiles hold of GROUPS groups from `start` on, rounded once: [32 TILES, 32 GROUPS]"""
    thread = tl.arange(0, TILES * GROUPS * 32)[:, None]
    lane = thread % 32
    j = tl.arange(0, 4)[None, :]
    group = start + thread // 32 % GROUPS
    # A tile beyond the last is one that is there, and is not stored.
    at = tl.minimum(tile + thread // (32 * GROUPS), num_tiles - 1)
    is_in = tl.full([1, 1], 1, tl.int1) if IS_WHOLE else group < num_groups
    words, high, first, last, minimum = load_numbers(
        word_ptr, half_ptr, byte_ptr, at.to(tl.int64) * stride, group, lane, j, is_in, num_groups, TYPE
    )
    if IN_PAIRS:
        first = twice(first)
        last = twice(last)
        minimum = twice(minimum)
        low = tl.join(
            pair_of_values(words, high, j, first, minimum, power, 0, TYPE),
            pair_of_values(words, high, j, first, minimum, power, 1, TYPE),
        )
        top = tl.join(
            pair_of_values(words, high, j, last, minimum, power, 2, TYPE),
            pair_of_values(words, high, j, last, minimum, power, 3, TYPE),
        )
    else:
        low = step(words, high, j, first, minimum, power, 0, TYPE, DTYPE)
        top = step(words, high, j, last, minimum, power, 4, TYPE, DTYPE)
    # tile, group, g, t, j, bits of a value's place in its word
    values = tl.join(low, top).reshape(TILES, GROUPS, 8, 4, 4, 2, 2, 2)
    return values.permute(0, 4, 2, 1, 7, 3, 6, 5).reshape(TILES * 32, GROUPS * 32)


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
def values_kernel(
    y_ptr, word_ptr, half_ptr, byte_ptr, stride, N, num_groups, power,
    GROUPS: tl.constexpr, TYPE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y [N, K] = the weight"""
    wait_for_inputs(OVERLAPS)
    tile = tl.program_id(0)
    start = tl.program_id(1) * GROUPS
    values = load_values(
        word_ptr, half_ptr, byte_ptr, tile, start, tl.cdiv(N, 32), num_groups, stride, power,
        1, GROUPS, TYPE, y_ptr.dtype.element_ty, False, False,
    )  # fmt: skip
    row = tile * 32 + tl.arange(0, 32)
    column = start * 32 + tl.arange(0, GROUPS * 32)
    to = y_ptr + row.to(tl.int64)[:, None] * (num_groups * 32) + column[None, :]
    tl.store(to, values, mask=(row < N)[:, None] & (column < num_groups * 32)[None, :])


@triton.jit
def rows_kernel(
    y_ptr, id_ptr, word_ptr, half_ptr, byte_ptr, stride, N, num_groups, power,
    GROUPS: tl.constexpr, TYPE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[i] = weight[id[i]], NaN where there is no such row"""
    wait_for_inputs(OVERLAPS)
    out = tl.program_id(0).to(tl.int64)
    wanted = tl.load(id_ptr + out).to(tl.int64)
    is_row = (wanted >= 0) & (wanted < N)
    row = tl.where(is_row, wanted, 0)
    t = tl.arange(0, 4)[None, :]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    is_in = group < num_groups
    j = (row % 32 // 8).to(tl.int32)
    lane = (row % 8).to(tl.int32) * 4 + t
    words, high, first, last, minimum = load_numbers(
        word_ptr, half_ptr, byte_ptr, row // 32 * stride, group, lane, j, is_in, num_groups, TYPE
    )
    to = y_ptr + out * num_groups * 32 + group * 32 + t * 4
    for V in tl.static_range(8):
        scale = first if V < 4 else last
        found = value(words, high, j, scale, minimum, power, V, TYPE, y_ptr.dtype.element_ty)
        tl.store(to + V // 4 * 16 + V % 4, tl.where(is_row, found, float("nan")), mask=is_in)


# ---- launches ----------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What kernels are told of a weight: its memory by the size of its elements, and sizes"""

    pointers: tuple[Tensor, Tensor, Tensor]
    stride: int
    num_groups: int

    @classmethod
    def of(cls, weight: TiledTensor) -> Shape:
        blocks = weight.blocks
        views = (blocks.view(torch.int32), blocks.view(torch.float16), blocks)
        return cls(views, blocks.stride(0) // 16, weight.shape[1] // 32)


# By how much a value is less than its nibbles plus 128, the high ones times 16. Each is a bfloat16 exactly.
OFFSETS = {2: -136.0, 3: -128.0, 8: -2304.0, 12: -128.0, 14: -2208.0}


def pair_of(number: float) -> int:
    """A bfloat16 twice in 32 bits, as a signed integer"""
    return int(torch.tensor([number, number], dtype=torch.bfloat16).view(torch.int32))


OFFSET_PAIRS = {type: pair_of(number) for type, number in OFFSETS.items()}


def launch_few(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    shape, type = Shape.of(weight), weight.type.ggml_id
    columns = 8 if len(x) <= 8 else 16
    groups, num_warps = groups_of(len(weight.blocks), shape.num_groups, x.device)
    few_kernel[(triton.cdiv(len(x), columns), len(weight.blocks))](
        y, pairs_of(x), *shape.pointers, bias, x.shape[1] // 2, shape.stride, len(x), weight.shape[0],
        shape.num_groups, PAIR, OFFSET_PAIRS[type],
        HAS_BIAS=bias is not None, COLUMNS=columns, GROUPS=groups, TYPE=type,
        EMULATES=IS_INTERPRETED, num_warps=num_warps, num_stages=1, **overlap(x.device),
    )  # fmt: skip


def groups_of(num_tiles: int, num_groups: int, device: torch.device) -> tuple[int, int]:
    """How many groups a program takes at once, and on how many warps: what was fastest on an H200"""
    tiles_each = num_tiles / num_processors(device)
    best = (4, 4) if tiles_each > 16 else (8, 4) if tiles_each > 4 else (16, 4) if tiles_each > 1 else (32, 8)
    most = triton.next_power_of_2(num_groups)
    return min(best[0], most), min(best[1], most)


def pairs_of(x: Tensor) -> Tensor:
    """Rows of bfloat16, two to an int32"""
    whole = (
        x if x.is_contiguous() and x.data_ptr() % 4 == 0 else x.clone(memory_format=torch.contiguous_format)
    )
    return whole.view(torch.int32)


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


def tile_of(num_rows: int, weight: TiledTensor) -> Tile:
    columns = 64 if num_rows <= 64 else 128
    return Tile(4, columns, 2, 8, 4) if len(weight.blocks) >= 512 else Tile(2, columns, 4, 4, 3)


def launch_tiles(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    shape, tile = Shape.of(weight), tile_of(len(x), weight)
    grid = triton.cdiv(len(weight.blocks), tile.tiles), triton.cdiv(len(x), tile.columns)
    num_steps = triton.cdiv(shape.num_groups, tile.groups)
    splits = splits_of(grid[0] * grid[1], num_steps, x.device)
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


TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def values_of(weight: TiledTensor, dtype: torch.dtype) -> Tensor:
    """All of it as floats"""
    y = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    shape = Shape.of(weight)
    groups = min(triton.next_power_of_2(shape.num_groups), 8)
    values_kernel[(len(weight.blocks), triton.cdiv(shape.num_groups, groups))](
        y, *shape.pointers, shape.stride, weight.shape[0], shape.num_groups, POWER,
        GROUPS=groups, TYPE=weight.type.ggml_id, num_warps=4, **overlap(weight.device),
    )  # fmt: skip
    return y


def launch_rows(y: Tensor, ids: Tensor, weight: TiledTensor) -> None:
    shape = Shape.of(weight)
    groups = min(triton.next_power_of_2(shape.num_groups), 32)
    rows_kernel[(ids.numel(), triton.cdiv(shape.num_groups, groups))](
        y, ids, *shape.pointers, shape.stride, weight.shape[0], shape.num_groups, POWER,
        GROUPS=groups, TYPE=weight.type.ggml_id, num_warps=max(groups // 8, 1), **overlap(weight.device),
    )  # fmt: skip


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's, which says what instructions it has; without one, whatever the interpreter spells out"""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


# ---- the ops -----------------------------------------------------------------------------------------------


def is_taken(weight: Any, device: torch.device) -> bool:
    """Whether kernels here read this kind of weight, which lies on the device"""
    has_float8 = isinstance(weight, Float8Tensor) and capability(device) >= (8, 9)
    is_known = (isinstance(weight, TiledTensor) or has_float8) and weight.device == device
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
    if x.dtype == torch.bfloat16 and len(x) <= MOST_IN_REGISTERS and capability(x.device) >= (8, 0):
        launch_few(y, x, weight, bias)
    elif len(x) == 1 or (x.dtype == torch.float32 and len(x) <= MOST_ALONE):
        launch_row(y, x, weight, bias)
    elif x.dtype != torch.float32 and len(x) <= MOST_FOR_TILES:
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
        launch_rows(y, ids.contiguous(), weight)
    return settled(y, out)
