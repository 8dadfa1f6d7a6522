"""Some rows of bfloat16, up to 16, times a weight in tiles, in registers.

They go through the tensor cores step by step (tiles_steps.py); what 128 adds to nibbles is taken off by a
product of its own.
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
    load_all,
    sides_of,
)
from infinicore.ops.triton.tiles_steps import OFFSET_PAIRS, four, multiply, pairs_of, step_of_rows
from infinicore.tiles import TiledTensor

# M rows of x, N of the weight, K their length, G groups of 32 values, L threads: 32 for each group at hand.
# Thread 4 g + t has rows 8 j + g of a tile, j being 0 to 3.


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
    z0, z1, z2, z3 = zero, zero, zero, zero
    if TYPE != Q8_0:
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
    group = (start + thread // 32)[:, None]
    lane = (thread % 32)[:, None]
    j = tl.arange(0, 4)[None, :]
    return load_all(
        word_ptr, half_ptr, byte_ptr, base, group, lane, j, group < num_groups, num_groups, TYPE
    )  # fmt: skip


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
