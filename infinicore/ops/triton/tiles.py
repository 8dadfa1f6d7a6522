"""What kernels read of weights in tiles (infinicore/tiles.py): codes, scales and minimums as stored."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.tiles import TiledTensor

# M rows of x, N of the weight, K their length, G groups of 32 values, L threads: 32 for each group at hand.
# Thread 4 g + t has rows 8 j + g of a tile, j being 0 to 3.
# The types by ggml's numbers
Q4_0 = tl.constexpr(2)
Q4_1 = tl.constexpr(3)
Q8_0 = tl.constexpr(8)
Q4_K = tl.constexpr(12)
Q6_K = tl.constexpr(14)

PAIR = 0x43004300  # two bfloat16 of 128, in bits: the last of them count ones
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# `base` is where a tile begins, in steps of 16 bytes; shapes are what base, group, lane and j make together.


@triton.jit
def load_words(ptr, base, group, lane, j, is_in, PLANES: tl.constexpr, PLANE: tl.constexpr):
    """Codes as uint32: 8 nibbles of row 8 j + lane / 4"""
    at = ptr + (base + (group * PLANES + PLANE) * 32 + lane) * 4 + j
    return tl.load(at, mask=is_in, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)


@triton.jit
def load_high(ptr, base, group, lane, j, is_in, num_groups, TYPE: tl.constexpr):
    """The words of the last values of Q8_0, or those of Q6_K that hold the high bits of rows j and j ^ 1"""
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


@triton.jit
def load_all(
    word_ptr, half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE: tl.constexpr
):  # fmt: skip
    """All that is stored: words, those of the high bits, and what sides_of takes"""
    PLANES: tl.constexpr = 2 if TYPE == Q8_0 else 1
    words = load_words(word_ptr, base, group, lane, j, is_in, PLANES, 0)
    high = words
    if (TYPE == Q8_0) | (TYPE == Q6_K):
        high = load_high(word_ptr, base, group, lane, j, is_in, num_groups, TYPE)
    a, b, c, d = load_sides(half_ptr, byte_ptr, base, group, lane, j, is_in, num_groups, TYPE)
    return words, high, a, b, c, d


@triton.jit
def pair(words, pairs, P: tl.constexpr):
    """Nibbles 2 P and 2 P + 1 of every word, each plus 128, as bfloat16 side by side"""
    return ((words >> (4 * P)) & 0x000F000F) | pairs


@triton.jit
def low_pair(words, pairs, P: tl.constexpr):
    """The last 7 bits of bytes 2 P and 2 P + 1, likewise"""
    return ((words >> (8 * P)) & 0x007F007F) | pairs


@triton.jit
def sign_pair(words, pairs, P: tl.constexpr):
    """What those are more than the bytes: 128, or 256 of a negative one, which is the next exponent"""
    return ((words >> (8 * P)) & 0x00800080) | pairs


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


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's, which says what instructions it has; without one, whatever the interpreter spells out"""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
