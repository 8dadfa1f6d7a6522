"""Products of bytes in the tensor cores, and how floats become bytes: two for each, of 16 bits that count
parts of the largest of a group.

Without a GPU what is spelt in instructions here is done by Triton's interpreter, to the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

# L threads, of which 4 g + t is thread t of column g of its warp
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded, and is its last bits


@triton.jit
def multiply_bytes(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, EMULATES: tl.constexpr):
    """c + a b of the tensor cores, 16 x 32 times 32 x 8, in registers of a warp's threads: four signed bytes

    Of a, rows g and g + 8, of b column g, of both the fours t; of c, the same rows and columns 2 t, 2 t + 1.
    """
    if EMULATES:
        low = byte_products(a0, b0) + byte_products(a2, b1)
        top = byte_products(a1, b0) + byte_products(a3, b1)
        d0, d1 = tl.split(low)
        d2, d3 = tl.split(top)
        size: tl.constexpr = c0.shape[0]
        return c0 + d0.reshape(size), c1 + d1.reshape(size), c2 + d2.reshape(size), c3 + d3.reshape(size)
    else:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def byte_products(a, b):
    """Rows of a times columns of b, [L] -> [L / 32, 8, 4, 2]"""
    x = a.reshape(a.shape[0] // 32, 8, 1, 4)
    y = b.reshape(b.shape[0] // 32, 1, 8, 4)
    products = signed_byte(x, 0) * signed_byte(y, 0) + signed_byte(x, 1) * signed_byte(y, 1)
    products += signed_byte(x, 2) * signed_byte(y, 2) + signed_byte(x, 3) * signed_byte(y, 3)
    return tl.sum(products, 3).reshape(a.shape[0] // 32, 8, 4, 2)


@triton.jit
def signed_byte(words, PLACE: tl.constexpr):
    return (words << (24 - 8 * PLACE)).to(tl.int32, bitcast=True) >> 24


@triton.jit
def byte_of_each(a, b, c, d, is_high, EMULATES: tl.constexpr):
    """One byte of each of four integers side by side: the second if is_high, else the first"""
    if EMULATES:
        shift = tl.where(is_high, 8, 0)
        low = ((a >> shift) & 0xFF) | (((b >> shift) & 0xFF) << 8)
        return low | (((c >> shift) & 0xFF) << 16) | (((d >> shift) & 0xFF) << 24)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 p, q; prmt.b32 p, $1, $2, $5; prmt.b32 q, $3, $4, $5; prmt.b32 $0, p, q, 0x5410; }",
            "=r,r,r,r,r,r", [a, b, c, d, tl.where(is_high, 0x51, 0x40)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def of_column(x, lane, EMULATES: tl.constexpr):
    """What the threads of column 2 t have, for thread t of every column"""
    if EMULATES:
        by_group = tl.max(x.reshape(x.shape[0] // 32, 4, 8), 2)[:, None, :]
        return tl.broadcast_to(by_group, [x.shape[0] // 32, 8, 4]).reshape(x.shape[0])
    else:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
            "=r,r,r", [x, lane % 4 * 8], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def larger_of(a, b):
    """The larger of two floats that are not negative; NaN if one is"""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(a, b, c, d):
    return larger_of(larger_of(tl.abs(a), tl.abs(b)), larger_of(tl.abs(c), tl.abs(d)))


@triton.jit
def exponent_of(largest):
    """The exponent of the largest of each column's threads: 16 signed bits count 2^-14 of it. NaN has 255.

    The bits of a float that is not negative are in its order, NaN's last. What would round to more than 127
    times 256 has the next exponent.
    """
    bits = largest.to(tl.int32, bitcast=True).reshape(largest.shape[0] // 4, 4)
    most = tl.broadcast_to(tl.max(bits, 1)[:, None], [largest.shape[0] // 4, 4]).reshape(largest.shape[0])
    return tl.maximum((tl.minimum(most, 0x7F800000) + 0x20000) >> 23, 15)


@triton.jit
def factor_of(exponent):
    """2^14 over that power, which makes integers of floats"""
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def part_of_one(exponent):
    """Its inverse, NaN where floats were not finite"""
    bits = tl.where(exponent == 255, 0x7FC00000, (exponent - 14) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def four(x):
    """[L, 4] -> its columns"""
    even, odd = tl.split(x.reshape(x.shape[0], 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d
