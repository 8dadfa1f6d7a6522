"""One row of bfloat16 times a weight in tiles, where reading the weight is all the work: with the norm before
it, and the residual, the gate or the rotation of heads after it.

Codes go through the tensor cores as the bytes they are. x becomes integers of 16 bits, 32 values at a time,
which are exact unless a value is less than a hundredth of the largest of its 32; each is two bytes. The
tensor cores take 8 columns: those are the two bytes of 4 groups, of which each has x there and zeros
elsewhere. So what comes out is a sum of each group, to be scaled in one operation.

On Hopper most of this is CUDA C++ (hopper/one.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.ops.hopper import one
from infinicore.ops.triton.beside import ALONE, Beside
from infinicore.ops.triton.cache import LANES, block_of
from infinicore.ops.triton.heads import angles, put
from infinicore.ops.triton.tensors import num_processors, overlap_reading, pairs_of, wait_for_inputs
from infinicore.ops.triton.tiles import (
    IS_INTERPRETED,
    Q4_0,
    Q4_1,
    Q4_K,
    Q8_0,
    Shape,
    capability,
    load_sides,
    sides_of,
)
from infinicore.ops.triton.tiles_bytes import (
    ROUNDING,
    byte_of_each,
    exponent_of,
    factor_of,
    four,
    larger_of,
    largest_of,
    multiply_bytes,
    of_column,
    part_of_one,
)
from infinicore.quantization import BlockType
from infinicore.tiles import TILE_ROWS, TiledTensor

# N rows of the weight, K their length, G groups of 32 values, L threads: 32 for each 4 groups at hand.
# Thread 4 g + t of a warp has rows 8 j + g of a tile, j being 0 to 3. Its column of x is the high byte of
# group g / 2 if g is even, else the low one, and it sums up group t.
TYPES = (BlockType.Q8_0, BlockType.Q4_0, BlockType.Q4_1, BlockType.Q4_K)


# ---- what is loaded ----------------------------------------------------------------------------------------


@triton.jit
def load_group(word_at, is_in, GROUP: tl.constexpr, TYPE: tl.constexpr):
    """Codes of one of 4 groups, those of Q8_0 by halves: [L, 4]

    Of what is not there they may be any: x is zero there, and so are scales.
    """
    SIZE: tl.constexpr = 256 if TYPE == Q8_0 else 128
    words = tl.load(word_at + GROUP * SIZE, mask=is_in, eviction_policy="evict_first")
    others = words
    if TYPE == Q8_0:
        others = tl.load(word_at + GROUP * SIZE + 128, mask=is_in, eviction_policy="evict_first")
    return words, others


@triton.jit
def load_four(
    word_ptr, half_ptr, byte_ptr, base, lane, first, num_groups,
    TYPE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """All that is stored of a warp's 4 groups from `first` on"""
    SIZE: tl.constexpr = 64 if TYPE == Q8_0 else 32
    lane = lane[:, None]
    first = first[:, None]
    j = tl.arange(0, 4)[None, :]
    word_at = word_ptr + (base + first * SIZE + lane) * 4 + j
    is_in = first < num_groups
    a = load_group(word_at, is_in, 0, TYPE)
    b = load_group(word_at, is_in if IS_WHOLE else first + 1 < num_groups, 1, TYPE)
    c = load_group(word_at, is_in if IS_WHOLE else first + 2 < num_groups, 2, TYPE)
    d = load_group(word_at, is_in if IS_WHOLE else first + 3 < num_groups, 3, TYPE)
    group = first + lane % 4
    is_in = is_in if IS_WHOLE else group < num_groups
    sides = load_sides(half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE)
    return a, b, c, d, sides


@triton.jit
def load_x(x_ptr, lane, first, num_groups):
    """A thread's 8 values of the group that its column is of, two to an integer: from 2 t, 8 + 2 t, ... on"""
    group = first + lane // 8
    at, is_in = x_ptr + group * 16 + lane % 4, group < num_groups
    low, next = tl.load(at, mask=is_in, other=0), tl.load(at + 4, mask=is_in, other=0)
    return low, next, tl.load(at + 8, mask=is_in, other=0), tl.load(at + 12, mask=is_in, other=0)


# ---- what becomes of it ------------------------------------------------------------------------------------


@triton.jit
def floats_of(pairs):
    """The two bfloat16 of every integer"""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def all_floats_of(x):
    a, b = floats_of(x[0])
    c, d = floats_of(x[1])
    e, f = floats_of(x[2])
    g, h = floats_of(x[3])
    return a, b, c, d, e, f, g, h


@triton.jit
def normed(f, norm):
    """Times the weights of a norm; the factor of the whole row is left for the sums"""
    n = all_floats_of(norm)
    a, b, c, d = f[0] * n[0], f[1] * n[1], f[2] * n[2], f[3] * n[3]
    return a, b, c, d, f[4] * n[4], f[5] * n[5], f[6] * n[6], f[7] * n[7]


@triton.jit
def squares_of(f):
    low = f[0] * f[0] + f[1] * f[1] + (f[2] * f[2] + f[3] * f[3])
    return low + (f[4] * f[4] + f[5] * f[5] + (f[6] * f[6] + f[7] * f[7]))


@triton.jit
def rounded(x, factor, base):
    return (x * factor + base).to(tl.int32, bitcast=True)


@triton.jit
def column_of(f, lane, TYPE: tl.constexpr, EMULATES: tl.constexpr):
    """A thread's bytes of its column, in the order of the codes, and what a one is worth in group t"""
    largest = larger_of(largest_of(f[0], f[1], f[2], f[3]), largest_of(f[4], f[5], f[6], f[7]))
    exponent = exponent_of(largest)
    factor = factor_of(exponent)
    is_high = lane // 4 % 2 == 0
    # The low byte is signed too, so the high one is that of 128 more.
    base = tl.where(is_high, ROUNDING + 128.0, ROUNDING)
    i0, i1 = rounded(f[0], factor, base), rounded(f[1], factor, base)
    i2, i3 = rounded(f[2], factor, base), rounded(f[3], factor, base)
    i4, i5 = rounded(f[4], factor, base), rounded(f[5], factor, base)
    i6, i7 = rounded(f[6], factor, base), rounded(f[7], factor, base)
    if TYPE == Q8_0:
        b0 = byte_of_each(i0, i2, i1, i3, is_high, EMULATES)
        b1 = byte_of_each(i4, i6, i5, i7, is_high, EMULATES)
    else:
        b0 = byte_of_each(i0, i4, i1, i5, is_high, EMULATES)
        b1 = byte_of_each(i2, i6, i3, i7, is_high, EMULATES)
    return b0, b1, part_of_one(of_column(exponent, lane, EMULATES))


@triton.jit
def add_rows(sums, u, v, other_u, other_v, b0, b1, TYPE: tl.constexpr, EMULATES: tl.constexpr):
    """Sums of two rows, with the products of one group"""
    if TYPE == Q8_0:
        return multiply_bytes(u, v, other_u, other_v, b0, b1, *sums, EMULATES)
    else:
        NIBBLES: tl.constexpr = 0x0F0F0F0F
        return multiply_bytes(
            u & NIBBLES, v & NIBBLES, (u >> 4) & NIBBLES, (v >> 4) & NIBBLES, b0, b1, *sums, EMULATES
        )


@triton.jit
def add_group(
    sums, words, others, b0, b1, lane, GROUP: tl.constexpr, TYPE: tl.constexpr, EMULATES: tl.constexpr
):
    """Sums of rows g, g + 8 and of rows g + 16, g + 24, with the products of one group in its two columns"""
    u0, u1, u2, u3 = four(words)
    v0, v1, v2, v3 = four(others)
    is_own = lane // 8 == GROUP
    b0 = tl.where(is_own, b0, 0)
    b1 = tl.where(is_own, b1, 0)
    low = add_rows(sums[0], u0, u1, v0, v1, b0, b1, TYPE, EMULATES)
    top = add_rows(sums[1], u2, u3, v2, v3, b0, b1, TYPE, EMULATES)
    return low, top


@triton.jit
def whole(high, low):
    """The sum of both bytes"""
    return (high * 256 + low).to(tl.float32)


@triton.jit
def add_four(
    totals, codes, x, norm, lane, TYPE: tl.constexpr, NORMS: tl.constexpr, EMULATES: tl.constexpr
):  # fmt: skip
    """The totals of rows g, g + 8, g + 16 and g + 24, with the products of 4 groups, and of squares of x"""
    a, b, c, d, sides = codes
    f = all_floats_of(x)
    squares = totals[4]
    if NORMS:
        squares += squares_of(f)
        f = normed(f, norm)
    b0, b1, one = column_of(f, lane, TYPE, EMULATES)
    zero = tl.zeros([lane.shape[0]], tl.int32)
    z0, z1 = zero, zero
    if TYPE != Q8_0:
        # What is to be taken off of all rows, or the sum of x
        each = zero + (-0x07070708 if TYPE == Q4_0 else 0x01010101)
        z0, z1, _, _ = multiply_bytes(each, each, each, each, b0, b1, zero, zero, zero, zero, EMULATES)
    if TYPE == Q4_0:
        sums = ((z0, z1, z0, z1), (z0, z1, z0, z1))
    else:
        sums = ((zero, zero, zero, zero), (zero, zero, zero, zero))
    sums = add_group(sums, *a, b0, b1, lane, 0, TYPE, EMULATES)
    sums = add_group(sums, *b, b0, b1, lane, 1, TYPE, EMULATES)
    sums = add_group(sums, *c, b0, b1, lane, 2, TYPE, EMULATES)
    low, top = add_group(sums, *d, b0, b1, lane, 3, TYPE, EMULATES)
    scale, _, minimum = sides_of(*sides, TYPE)
    s0, s1, s2, s3 = four(scale * one[:, None])
    t0 = totals[0] + whole(low[0], low[1]) * s0
    t1 = totals[1] + whole(low[2], low[3]) * s1
    t2 = totals[2] + whole(top[0], top[1]) * s2
    t3 = totals[3] + whole(top[2], top[3]) * s3
    if (TYPE == Q4_1) | (TYPE == Q4_K):
        m0, m1, m2, m3 = four(minimum * (whole(z0, z1) * one)[:, None])
        t0 += m0
        t1 += m1
        t2 += m2
        t3 += m3
    return t0, t1, t2, t3, squares


@triton.jit
def load_norm(norm_ptr, lane, first, num_groups, NORMS: tl.constexpr):
    """The norm's weights in the order of load_x, if there is a norm"""
    return load_x(norm_ptr, lane, first, num_groups) if NORMS else first


@triton.jit
def load_next(
    source, x_ptr, norm_ptr, lane, first, num_groups,
    TYPE: tl.constexpr, IS_WHOLE: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """What add_four takes"""
    codes = load_four(*source, lane, first, num_groups, TYPE, IS_WHOLE)
    x = load_x(x_ptr, lane, first, num_groups)
    return codes, x, load_norm(norm_ptr, lane, first, num_groups, NORMS)


@triton.jit
def sums_of(totals, num_groups, eps, NORMS: tl.constexpr, TILES: tl.constexpr):
    """The sums of all threads, normed: [tile, g, j % 2, j / 2]"""
    EACH: tl.constexpr = totals[4].shape[0] // (32 * TILES)
    by_thread = tl.join(tl.join(totals[0], totals[1]), tl.join(totals[2], totals[3]))  # [L, j % 2, j / 2]
    y = tl.sum(tl.sum(by_thread.reshape(TILES, EACH, 8, 4, 2, 2), 3), 1)
    if NORMS:  # of which both columns of a group, and both tiles, have the squares
        y *= tl.rsqrt(tl.sum(totals[4], 0) / (num_groups * (64 * TILES)) + eps)
    return y


@triton.jit
def one_kernel(
    y_ptr, x_ptr, norm_ptr, word_ptr, half_ptr, byte_ptr, bias_ptr, residual_ptr, where,
    stride, N, num_groups, apart, eps,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr, GATES: tl.constexpr,
    ROTATES: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, DEPTH: tl.constexpr,
    TYPE: tl.constexpr, IS_WHOLE: tl.constexpr, EMULATES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """32 columns of y from a tile, or from two that are some tiles apart: silu(gate) * up, or the two halves
    of heads, which are rotated and put where they belong

    Warps share the groups of a row, and have DEPTH times 4 of them on their way, 1 or 2.
    """
    TILES: tl.constexpr = 2 if GATES or ROTATES else 1
    EACH: tl.constexpr = WARPS // TILES
    STEP: tl.constexpr = EACH * 4
    thread = tl.arange(0, WARPS * 32)
    lane, first, tile = thread % 32, thread // 32 % EACH * 4, tl.program_id(0)
    if ROTATES:
        tile += tile // apart * apart
    if TILES == 2:
        base = ((tile + thread // (32 * EACH) * apart).to(tl.int64) * stride)[:, None]
    else:
        base = tile.to(tl.int64) * stride
    source = word_ptr, half_ptr, byte_ptr, base
    # Weights do not depend on the kernel before: the first are on their way while it ends.
    codes = load_four(*source, lane, first, num_groups, TYPE, IS_WHOLE)
    norm = load_norm(norm_ptr, lane, first, num_groups, NORMS)
    others, other_norm = codes, norm
    if DEPTH == 2:
        others = load_four(*source, lane, first + STEP, num_groups, TYPE, IS_WHOLE)
        other_norm = load_norm(norm_ptr, lane, first + STEP, num_groups, NORMS)
    wait_for_inputs(OVERLAPS, ROTATES)
    x = load_x(x_ptr, lane, first, num_groups)
    other_x = load_x(x_ptr, lane, first + STEP, num_groups) if DEPTH == 2 else x
    row = tile * 32 + tl.arange(0, 8)[:, None, None] + tl.arange(0, 2)[None, :, None] * 8
    row += tl.arange(0, 2)[None, None, :] * 16  # [g, j % 2, j / 2]
    residual = tl.load(residual_ptr + row, mask=row < N, other=0.0).to(tl.float32) if ADDS else 0.0
    rotation = rotation_of(row % (64 * apart), where, S) if ROTATES else row
    zero = tl.zeros([WARPS * 32], tl.float32)
    totals = (zero, zero, zero, zero, zero)
    pointers = source, x_ptr, norm_ptr
    for start in range(0, num_groups, DEPTH * STEP):
        totals = add_four(totals, codes, x, norm, lane, TYPE, NORMS, EMULATES)
        ahead = start + DEPTH * STEP + first
        codes, x, norm = load_next(*pointers, lane, ahead, num_groups, TYPE, IS_WHOLE, NORMS)
        if DEPTH == 2:
            totals = add_four(totals, others, other_x, other_norm, lane, TYPE, NORMS, EMULATES)
            ahead += STEP
            others, other_x, other_norm = load_next(*pointers, lane, ahead, num_groups, TYPE, IS_WHOLE, NORMS)
    y = sums_of(totals, num_groups, eps, NORMS, TILES)
    if ROTATES:
        store_rotated(y_ptr, bias_ptr, y, rotation, row, apart * 32, where, HAS_BIAS, S, LANES)
    else:
        store_row(y_ptr, bias_ptr, y, residual, row, N, HAS_BIAS, GATES)


@triton.jit
def rotation_of(d, where, S: tl.constexpr):
    """(sin, cos, block, place): by how much a head is rotated at d, and where it is put"""
    position_ptr, sin_ptr, cos_ptr, stream_ptr, slot_ptr, table_ptr, _, _ = where[0]
    sin_stride, cos_stride, length, B, M, P, _, _ = where[1]
    position = tl.load(position_ptr).to(tl.int64)
    sin, cos = angles(sin_ptr, cos_ptr, position, d, True, sin_stride, cos_stride, length)
    block, place = block_of(table_ptr, stream_ptr, slot_ptr, B, M, P, S)
    return sin, cos, block, place


@triton.jit
def store_rotated(
    q_ptr, bias_ptr, y, rotation, row, half, where,
    HAS_BIAS: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[tile, g, j % 2, j / 2], the two halves of heads, `half` rows each: to rows, or to their block"""
    sin, cos, block, place = rotation
    key_ptr, value_ptr, H, K = where[0][6], where[0][7], where[1][6], where[1][7]
    first, second = tl.split(y.permute(1, 2, 3, 0))
    if HAS_BIAS:
        first += tl.load(bias_ptr + row).to(tl.float32)
        second += tl.load(bias_ptr + row + half).to(tl.float32)
    head, d = row // (2 * half), row % (2 * half)
    r0 = tl.where(head < H + K, first * cos - second * sin, first)
    r1 = tl.where(head < H + K, first * sin + second * cos, second)
    put(q_ptr, key_ptr, value_ptr, r0, 0, head, d, True, block, place, H, K, 2 * half, S, LANES)
    put(q_ptr, key_ptr, value_ptr, r1, 0, head, d + half, True, block, place, H, K, 2 * half, S, LANES)


@triton.jit
def store_row(y_ptr, bias_ptr, y, residual, row, N, HAS_BIAS: tl.constexpr, GATES: tl.constexpr):
    """[tile, g, j % 2, j / 2] with what comes after a product"""
    if GATES:
        gate, up = tl.split(y.permute(1, 2, 3, 0))
        if HAS_BIAS:
            gate += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + N + row, mask=row < N, other=0.0).to(tl.float32)
        result = gate / (1 + tl.exp(-gate)) * up
    else:
        result = y.reshape(8, 2, 2) + residual
        if HAS_BIAS:
            result += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, result.to(y_ptr.dtype.element_ty), mask=row < N)


class Plan(NamedTuple):
    """How many warps share a tile, and how far ahead they load"""

    num_warps: int
    depth: int


def takes_one(x: Tensor, weight: TiledTensor) -> bool:
    """Whether this is one row that need not have its bits among others, and a weight of a type known here"""
    is_alone = x.numel() == x.shape[-1] and not infinicore.deterministic
    is_known = weight.type in TYPES and capability(x.device) >= (8, 0)
    return is_alone and x.dtype == torch.bfloat16 and is_known


def launch_one(
    y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None, beside: Beside = ALONE
) -> None:
    """y [1, N] of x [1, K]; of a gate, y [1, N / 2]; of heads [1, H, D], the queries"""
    if one.suits(x, weight, beside):
        return one.launch(y, x, weight, bias, beside)
    shape, plan, heads = Shape.of(weight), plan_of(weight, x.device), beside.heads
    num_tiles, num_warps, apart = len(weight.blocks), plan.num_warps, 1
    if beside.is_gated or heads is not None:
        num_tiles, num_warps = num_tiles // 2, num_warps * 2
        apart = num_tiles if heads is None else y.shape[-1] // (2 * TILE_ROWS)
    norm = None if beside.norm is None else pairs_of(beside.norm)
    one_kernel[(num_tiles,)](
        y, pairs_of(x), norm, *shape.pointers, bias, beside.residual, heads and heads[:2], shape.stride,
        y.shape[-1], shape.num_groups, apart, beside.eps,
        HAS_BIAS=bias is not None, ADDS=beside.residual is not None, NORMS=norm is not None,
        GATES=beside.is_gated, ROTATES=heads is not None, S=heads.block_size if heads else 0, LANES=LANES,
        WARPS=num_warps, DEPTH=plan.depth, TYPE=weight.type.ggml_id, IS_WHOLE=shape.num_groups % 4 == 0,
        EMULATES=IS_INTERPRETED, num_warps=num_warps, num_stages=1, **overlap_reading(x.device, beside.norm),
    )  # fmt: skip


def plan_of(weight: TiledTensor, device: torch.device) -> Plan:
    """What was fastest on an H200, by how many tiles a processor has"""
    num_tiles, is_bytes = len(weight.blocks) / num_processors(device), weight.type is BlockType.Q8_0
    if num_tiles > 16 or 1 < num_tiles <= 4:
        best = Plan(8, 2)
    elif num_tiles > 4:
        best = Plan(4, 2 if is_bytes else 1)
    else:
        best = Plan(16, 1 if is_bytes else 2)
    return Plan(min(best.num_warps, triton.next_power_of_2(triton.cdiv(weight.shape[1], 128))), best.depth)
