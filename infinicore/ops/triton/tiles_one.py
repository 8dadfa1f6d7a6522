"""One row of bfloat16 times a weight in tiles, where reading the weight is all the work.

The tensor cores take 8 columns, and one row of x is one. So 4 groups of 32 values go through them at once: a
column is a half of a group, and has x there and zeros elsewhere. What comes out is the sum of each half of
each group, to be scaled in one operation, and what 128 adds to nibbles is one more product for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import num_processors, overlap, wait_for_inputs
from infinicore.ops.triton.tiles import (
    IS_INTERPRETED,
    PAIR,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    Shape,
    load_sides,
    sides_of,
)
from infinicore.ops.triton.tiles_steps import OFFSET_PAIRS, four, multiply, pairs_of, step_of_rows
from infinicore.tiles import TiledTensor

# N rows of the weight, K their length, G groups of 32 values, L threads: 32 for each 4 groups at hand.
# Thread 4 g + t has rows 8 j + g of a tile, j being 0 to 3; its column of x is half g % 2 of group g / 2, and
# it sums up the halves of group t.


@triton.jit
def load_group(
    word_at, high_at, is_in, GROUP: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Codes of one of 4 groups, and their other halves or high bits: [L, 4]

    Of what is not there they may be any: x is zero there, and so are scales.
    """
    SIZE: tl.constexpr = 256 if TYPE == Q8_0 else 128
    words = tl.load(word_at + GROUP * SIZE, mask=is_in, eviction_policy="evict_first")
    high = words
    if TYPE == Q8_0:
        high = tl.load(word_at + GROUP * SIZE + 128, mask=is_in, eviction_policy="evict_first")
    elif TYPE == Q6_K:
        high = tl.load(high_at + GROUP * 64, mask=is_in, eviction_policy="evict_first")
    return words.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)


@triton.jit
def load_four(
    word_ptr, half_ptr, byte_ptr, base, thread, start, num_groups,
    TYPE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """All that is stored of a warp's 4 groups from `start` on"""
    PLANES: tl.constexpr = 2 if TYPE == Q8_0 else 1
    lane = (thread % 32)[:, None]
    first = (start + thread // 32 * 4)[:, None]
    j = tl.arange(0, 4)[None, :]
    word_at = word_ptr + (base + first * (32 * PLANES) + lane) * 4 + j
    high_at = word_ptr + (base + num_groups * 32) * 4 + (first * 32 + lane) * 2 + j // 2
    is_in = first < num_groups
    a = load_group(word_at, high_at, is_in, 0, TYPE)
    b = load_group(word_at, high_at, is_in if IS_WHOLE else first + 1 < num_groups, 1, TYPE)
    c = load_group(word_at, high_at, is_in if IS_WHOLE else first + 2 < num_groups, 2, TYPE)
    d = load_group(word_at, high_at, is_in if IS_WHOLE else first + 3 < num_groups, 3, TYPE)
    group = first + lane % 4
    is_in = is_in if IS_WHOLE else group < num_groups
    sides = load_sides(half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE)
    return a, b, c, d, sides


@triton.jit
def load_x(x_ptr, thread, start, num_groups):
    """A thread's pairs of its column: two of them"""
    g = thread % 32 // 4
    group = start + thread // 32 * 4 + g // 2
    at = x_ptr + group * 16 + (g % 2 * 8 + thread % 4 * 2)
    is_in = (group < num_groups)[:, None]
    found = tl.load(at[:, None] + tl.arange(0, 2)[None, :], mask=is_in, other=0)
    return tl.split(found.to(tl.uint32, bitcast=True))


@triton.jit
def add_group(
    sums, words, high, x, column, pairs, GROUP: tl.constexpr, TYPE: tl.constexpr, EMULATES: tl.constexpr
):
    """Sums of rows g, g + 8 and g + 16, g + 24, with the products of one group in its two columns"""
    u0, u1, u2, u3 = four(words)
    h0, h1, h2, h3 = four(high)
    low, top = sums
    for HALF in tl.static_range(2):
        is_own = column == 2 * GROUP + HALF
        b0 = tl.where(is_own, x[0], 0)
        b1 = tl.where(is_own, x[1], 0)
        low = step_of_rows(u0, u1, h0, h1, b0, b1, *low, pairs, 2 * HALF, 0, TYPE, EMULATES)
        top = step_of_rows(u2, u3, h2, h3, b0, b1, *top, pairs, 2 * HALF, 2, TYPE, EMULATES)
    return low, top


@triton.jit
def scaled(total, first_half, last_half, first, last, TYPE: tl.constexpr):
    if TYPE == Q6_K:
        return total + first_half * first + last_half * last
    else:
        return total + (first_half + last_half) * first


@triton.jit
def add_four(
    totals, codes, x, column, pairs, offset, TYPE: tl.constexpr, EMULATES: tl.constexpr
):  # fmt: skip
    """The totals of rows g, g + 8, g + 16 and g + 24, with the products of 4 groups"""
    a, b, c, d, sides = codes
    zero = tl.zeros([column.shape[0]], tl.float32)
    z0, z1 = zero, zero
    if TYPE != Q8_0:
        taken = tl.zeros([column.shape[0]], tl.uint32) + offset
        z0, z1, _, _ = multiply(taken, taken, taken, taken, x[0], x[1], zero, zero, zero, zero, EMULATES)
    sums = ((z0, z1, z0, z1), (z0, z1, z0, z1))
    sums = add_group(sums, *a, x, column, pairs, 0, TYPE, EMULATES)
    sums = add_group(sums, *b, x, column, pairs, 1, TYPE, EMULATES)
    sums = add_group(sums, *c, x, column, pairs, 2, TYPE, EMULATES)
    low, top = add_group(sums, *d, x, column, pairs, 3, TYPE, EMULATES)
    first, last, minimum = sides_of(*sides, TYPE)
    f0, f1, f2, f3 = four(first)
    l0, l1, l2, l3 = four(last)
    t0 = scaled(totals[0], low[0], low[1], f0, l0, TYPE)
    t1 = scaled(totals[1], low[2], low[3], f1, l1, TYPE)
    t2 = scaled(totals[2], top[0], top[1], f2, l2, TYPE)
    t3 = scaled(totals[3], top[2], top[3], f3, l3, TYPE)
    if (TYPE == Q4_1) | (TYPE == Q4_K):
        # The sum of x is what 128 adds, over -128.
        m0, m1, m2, m3 = four(minimum * ((z0 + z1) * (-1.0 / 128))[:, None])
        t0 += m0
        t1 += m1
        t2 += m2
        t3 += m3
    return t0, t1, t2, t3


@triton.jit
def one_kernel(
    y_ptr, x_ptr, word_ptr, half_ptr, byte_ptr, bias_ptr, stride, N, num_groups, pairs, offset,
    HAS_BIAS: tl.constexpr, WARPS: tl.constexpr, TYPE: tl.constexpr, IS_WHOLE: tl.constexpr,
    EMULATES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A tile's 32 columns of y; warps share the groups of a row, and have 4 of them twice on their way"""
    tile = tl.program_id(0)
    base = tile.to(tl.int64) * stride
    thread = tl.arange(0, WARPS * 32)
    column = thread % 32 // 4
    STEP: tl.constexpr = WARPS * 4
    # Weights do not depend on the kernel before: the first are on their way while it ends.
    codes = load_four(word_ptr, half_ptr, byte_ptr, base, thread, 0, num_groups, TYPE, IS_WHOLE)
    others = load_four(word_ptr, half_ptr, byte_ptr, base, thread, STEP, num_groups, TYPE, IS_WHOLE)
    wait_for_inputs(OVERLAPS)
    x, other_x = load_x(x_ptr, thread, 0, num_groups), load_x(x_ptr, thread, STEP, num_groups)
    zero = tl.zeros([WARPS * 32], tl.float32)
    totals = (zero, zero, zero, zero)
    for start in range(0, num_groups, 2 * STEP):
        totals = add_four(totals, codes, x, column, pairs, offset, TYPE, EMULATES)
        third = start + 2 * STEP
        codes = load_four(word_ptr, half_ptr, byte_ptr, base, thread, third, num_groups, TYPE, IS_WHOLE)
        x = load_x(x_ptr, thread, third, num_groups)
        totals = add_four(totals, others, other_x, column, pairs, offset, TYPE, EMULATES)
        fourth = third + STEP
        others = load_four(word_ptr, half_ptr, byte_ptr, base, thread, fourth, num_groups, TYPE, IS_WHOLE)
        other_x = load_x(x_ptr, thread, fourth, num_groups)
    rows = tl.join(tl.join(totals[0], totals[1]), tl.join(totals[2], totals[3]))  # [L, j % 2, j / 2]
    y = tl.sum(tl.sum(rows.reshape(WARPS, 8, 4, 2, 2), 2), 0)  # [g, j % 2, j / 2]
    row = tile * 32 + tl.arange(0, 8)[:, None, None] + tl.arange(0, 2)[None, :, None] * 8
    row += tl.arange(0, 2)[None, None, :] * 16
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < N)


def launch_one(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    shape, type = Shape.of(weight), weight.type.ggml_id
    num_warps = warps_of(len(weight.blocks), shape.num_groups, x.device)
    one_kernel[(len(weight.blocks),)](
        y, pairs_of(x), *shape.pointers, bias, shape.stride, weight.shape[0], shape.num_groups, PAIR,
        OFFSET_PAIRS[type],
        HAS_BIAS=bias is not None, WARPS=num_warps, TYPE=type, IS_WHOLE=shape.num_groups % 4 == 0,
        EMULATES=IS_INTERPRETED, num_warps=num_warps, num_stages=1, **overlap(x.device),
    )  # fmt: skip


def warps_of(num_tiles: int, num_groups: int, device: torch.device) -> int:
    """How many share a tile: what was fastest on an H200"""
    tiles_each = num_tiles / num_processors(device)
    best = 4 if tiles_each > 4 else 8 if tiles_each > 1 else 16
    most: int = triton.next_power_of_2(triton.cdiv(num_groups, 4))
    return min(best, most)
