"""Weights in tiles as floats: all of one, rows of it, and what kernels make of those they have loaded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import overlap, wait_for_inputs
from infinicore.ops.triton.tiles import (
    Q4_0,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    Shape,
    load_all,
    low_pair,
    pair,
    sides_of,
    sign_pair,
)
from infinicore.tiles import TiledTensor

# M rows of x, N of the weight, K their length, G groups of 32 values, L threads: 32 for each group at hand.
# Thread 4 g + t has rows 8 j + g of a tile, j being 0 to 3.
POWER = 150 << 23  # 2^23 as a float32 in bits: the last of them count ones


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
def byte(words, power, V: tl.constexpr):
    """Likewise the signed byte V of every word"""
    bits = ((words >> (V // 2 * 8 + V % 2 * 16)) & 0xFF) ^ (power + 0x80)
    return bits.to(tl.float32, bitcast=True) - float((1 << 23) + 128)


@triton.jit
def number(words, high, j, power, V: tl.constexpr, TYPE: tl.constexpr):
    """Value V of every word, before it is scaled"""
    value = byte(words if V < 4 else high, power, V % 4) if TYPE == Q8_0 else nibble(words, power, V)
    if TYPE == Q4_0:
        value -= 8.0
    elif TYPE == Q6_K:
        bits = (high >> (8 * (j % 2) + V // 2 * 2 + V % 2 * 16).to(tl.uint32)) & 3
        value = value + bits.to(tl.float32) * 16.0 - 32.0
    return value


@triton.jit
def load_numbers(
    word_ptr, half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE: tl.constexpr
):  # fmt: skip
    """Words, their high bits, scales of their two halves, and minimums"""
    words, high, a, b, c, d = load_all(
        word_ptr, half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE
    )
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
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def pair_of_values(words, high, j, scale, minimum, pairs, P: tl.constexpr, TYPE: tl.constexpr):
    """Values 2 P and 2 P + 1 of every word, scaled, in bfloat16, two at a time: [..., 2]"""
    if TYPE == Q6_K:
        top = ((high >> (8 * (j % 2) + 2 * P).to(tl.uint32)) & 0x00030003) | pairs
        # 130: what is left of the high bits is those of a signed number
        both = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c; mov.b32 c, 0x41804180; sub.rn.bf16x2 a, $2, $4; sub.rn.bf16x2 b, $1, $5;"
            " fma.rn.bf16x2 a, a, c, b; mul.rn.bf16x2 $0, a, $3; }",
            "=r,r,r,r,r,r", [pair(words, pairs, P), top, scale, pairs + 0x00020002, pairs],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    elif (TYPE == Q8_0) | (TYPE == Q4_0):
        if TYPE == Q8_0:
            half = words if P < 2 else high
            low = low_pair(half, pairs, P % 2)
            taken = sign_pair(half, pairs, P % 2)
        else:
            low = pair(words, pairs, P)
            taken = pairs + 0x00080008
        both = tl.inline_asm_elementwise(
            "{ .reg .b32 a; sub.rn.bf16x2 a, $1, $3; mul.rn.bf16x2 $0, a, $2; }",
            "=r,r,r,r", [low, scale, taken], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        both = tl.inline_asm_elementwise(
            "{ .reg .b32 a; sub.rn.bf16x2 a, $1, $4; fma.rn.bf16x2 $0, a, $2, $3; }",
            "=r,r,r,r,r", [pair(words, pairs, P), scale, minimum, pairs],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    even = both.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    odd = (both >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(even, odd)


@triton.jit
def load_values(
    word_ptr, half_ptr, byte_ptr, tile, start, num_groups, stride, power,
    GROUPS: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What a tile holds of GROUPS groups from `start` on, rounded once: [32, 32 GROUPS]"""
    thread = tl.arange(0, GROUPS * 32)[:, None]
    lane = thread % 32
    j = tl.arange(0, 4)[None, :]
    group = start + thread // 32
    words, high, first, last, minimum = load_numbers(
        word_ptr, half_ptr, byte_ptr, tile.to(tl.int64) * stride, group, lane, j, group < num_groups,
        num_groups, TYPE,
    )  # fmt: skip
    low = step(words, high, j, first, minimum, power, 0, TYPE, DTYPE)
    top = step(words, high, j, last, minimum, power, 4, TYPE, DTYPE)
    # group, g, t, j, bits of a value's place in its word
    values = tl.join(low, top).reshape(GROUPS, 8, 4, 4, 2, 2, 2)
    return values.permute(3, 1, 0, 6, 5, 2, 4).reshape(32, GROUPS * 32)


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
        word_ptr, half_ptr, byte_ptr, tile, start, num_groups, stride, power,
        GROUPS, TYPE, y_ptr.dtype.element_ty,
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
    to = y_ptr + out * num_groups * 32 + group * 32 + t * 2
    for V in tl.static_range(8):
        scale = first if V < 4 else last
        found = value(words, high, j, scale, minimum, power, V, TYPE, y_ptr.dtype.element_ty)
        tl.store(to + V // 2 * 8 + V % 2, tl.where(is_row, found, float("nan")), mask=is_in)


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
