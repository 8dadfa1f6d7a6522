"""Steps of the tensor cores over weights in tiles: 16 values of 16 rows, by way of the instruction whose
registers the tiles are laid out for.

A nibble becomes a bfloat16 as the last bits of 128, and so do the last 7 bits of a byte, whose sign is the
last bit of the exponent of what a second product takes off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tiles import Q6_K, Q8_0, low_pair, pair, sign_pair

# M rows of x, N of the weight, K their length, G groups of 32 values, L threads: 32 for each group at hand.
# Thread 4 g + t has rows 8 j + g of a tile, j being 0 to 3.
SIGNS = tl.constexpr(-0x7FFF8000)  # of two bfloat16


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
def high_pair(high, pairs, P: tl.constexpr, J: tl.constexpr):
    """As `pair`, of the high bits of Q6_K of row J"""
    return ((high >> (8 * (J % 2) + 2 * P)) & 0x00030003) | pairs


@triton.jit
def step_of_bytes(u, v, b0, b1, d0, d1, d2, d3, pairs, EMULATES: tl.constexpr):
    """Add the products of the bytes of two rows, which are words u and v"""
    d0, d1, d2, d3 = multiply(
        low_pair(u, pairs, 0), low_pair(v, pairs, 0), low_pair(u, pairs, 1), low_pair(v, pairs, 1),
        b0, b1, d0, d1, d2, d3, EMULATES,
    )  # fmt: skip
    negative = pairs | SIGNS
    return multiply(
        sign_pair(u, negative, 0), sign_pair(v, negative, 0), sign_pair(u, negative, 1),
        sign_pair(v, negative, 1), b0, b1, d0, d1, d2, d3, EMULATES,
    )  # fmt: skip


@triton.jit
def step_of_rows(
    u, v, high_u, high_v, b0, b1, d0, d1, d2, d3, pairs,
    P: tl.constexpr, J: tl.constexpr, TYPE: tl.constexpr, EMULATES: tl.constexpr,
):  # fmt: skip
    """Add the products of pairs P and P + 1 of rows 8 J + g (words u) and 8 J + 8 + g (words v)"""
    if TYPE == Q8_0:
        if P == 0:
            return step_of_bytes(u, v, b0, b1, d0, d1, d2, d3, pairs, EMULATES)
        else:
            return step_of_bytes(high_u, high_v, b0, b1, d0, d1, d2, d3, pairs, EMULATES)
    d0, d1, d2, d3 = multiply(
        pair(u, pairs, P), pair(v, pairs, P), pair(u, pairs, P + 1), pair(v, pairs, P + 1),
        b0, b1, d0, d1, d2, d3, EMULATES,
    )  # fmt: skip
    if TYPE == Q6_K:
        # 16 x: the exponents of a pair of bfloat16, plus 4
        d0, d1, d2, d3 = multiply(
            high_pair(high_u, pairs, P, J), high_pair(high_v, pairs, P, J + 1),
            high_pair(high_u, pairs, P + 1, J), high_pair(high_v, pairs, P + 1, J + 1),
            b0 + 0x02000200, b1 + 0x02000200, d0, d1, d2, d3, EMULATES,
        )  # fmt: skip
    return d0, d1, d2, d3


# By how much a value is less than its nibbles plus 128, the high ones times 16. Each is a bfloat16 exactly.
OFFSETS = {2: -136.0, 3: -128.0, 8: 0.0, 12: -128.0, 14: -2208.0}


def pair_of(number: float) -> int:
    """A bfloat16 twice in 32 bits, as a signed integer"""
    return int(torch.tensor([number, number], dtype=torch.bfloat16).view(torch.int32))


OFFSET_PAIRS = {type: pair_of(number) for type, number in OFFSETS.items()}


def pairs_of(x: Tensor) -> Tensor:
    """Rows of bfloat16, two to an int32"""
    whole = (
        x if x.is_contiguous() and x.data_ptr() % 4 == 0 else x.clone(memory_format=torch.contiguous_format)
    )
    return whole.view(torch.int32)
