"""One row of bfloat16 times a weight in float8, where reading the weight is all the work: with the norm
before it, and the residual, the gate or the rotation of heads after it.

A program holds the row, and has the next rows of the weight on their way while it sums up those it has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.float8 import Float8Tensor
from infinicore.ops.triton.beside import ALONE, Beside
from infinicore.ops.triton.cache import LANES, block_of
from infinicore.ops.triton.heads import angles, put, row_of
from infinicore.ops.triton.tensors import (
    LARGEST_TILE,
    num_processors,
    overlap_reading,
    pairs_of,
    wait_for_inputs,
)
from infinicore.ops.triton.tiles import IS_INTERPRETED

# N rows of the weight, K their length in pieces of 16 values, R rows that a program takes at once, P pieces
ROWS = 4
WARPS = 16  # of a processor, each thread of which holds two pieces of every row


@triton.jit
def byte_of(words, V: tl.constexpr):
    return ((words >> (8 * V)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def values_of(words, EMULATES: tl.constexpr):
    """The four float8 of a word as float32, two at a time by way of float16"""
    if EMULATES:
        return byte_of(words, 0), byte_of(words, 1), byte_of(words, 2), byte_of(words, 3)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high, a, b, c, d; .reg .b32 first, last; mov.b32 {low, high}, $4;"
            " cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 last, high;"
            " mov.b32 {a, b}, first; mov.b32 {c, d}, last;"
            " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }",
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def four(x):
    """[P, R, 4] -> its columns"""
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def load_pairs(ptr, piece, num_pieces):
    """8 pairs of bfloat16 for each piece, each pair an integer [P, 1]"""
    at = ptr + piece[:, None, None] * 8 + tl.arange(0, 4)[None, None, :]
    is_in = (piece < num_pieces)[:, None, None]
    return four(tl.load(at, mask=is_in, other=0)), four(tl.load(at + 4, mask=is_in, other=0))


@triton.jit
def floats_of(pairs, of_norm, NORMS: tl.constexpr):
    """The two bfloat16 of every integer, times those of a norm"""
    low, top = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)
    squares = low * low + top * top
    if NORMS:
        low *= (of_norm << 16).to(tl.float32, bitcast=True)
        top *= (of_norm & -0x10000).to(tl.float32, bitcast=True)
    return low, top, squares


@triton.jit
def add_word(sums, words, x, y, EMULATES: tl.constexpr):
    """sums [P, R] + products of a word's four values with those of two integers"""
    a, b, c, d = values_of(words, EMULATES)
    return sums + a * x[0] + b * x[1] + c * y[0] + d * y[1]


@triton.jit
def load_rows(
    word_ptr, scale_ptr, n, is_row, which, piece, num_pieces, half, gap, D,
    PAIRS: tl.constexpr, ROTATES: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """[P, R, 4] and scales [R]: rows n, or rows n and those that lie `gap` further"""
    row = n
    if ROTATES:
        row = row_of(n, half, D, IS_INTERLEAVED)
    if PAIRS:
        row += which * gap
    at = row.to(tl.int64)[None, :, None] * num_pieces + piece[:, None, None]
    is_in = is_row[None, :, None] & (piece < num_pieces)[:, None, None]
    at = word_ptr + at * 4 + tl.arange(0, 4)[None, None, :]
    words = tl.load(at, mask=is_in, other=0, eviction_policy="evict_first")
    return words, tl.load(scale_ptr + row, mask=is_row, other=0.0)


@triton.jit
def load_residual(residual_ptr, n, N, ADDS: tl.constexpr):
    return tl.load(residual_ptr + n, mask=n < N, other=0.0).to(tl.float32) if ADDS else n


@triton.jit
def biased(y, bias_ptr, row, is_row, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    return y


@triton.jit
def load_floats(x_ptr, norm, piece, num_pieces, eps, NORMS: tl.constexpr):
    """A row in 8 pairs of floats for each piece, times those of a norm; and the factor of the norm"""
    p, q = load_pairs(x_ptr, piece, num_pieces)
    n, m = norm
    a, b = floats_of(p[0], n[0], NORMS), floats_of(p[1], n[1], NORMS)
    c, d = floats_of(p[2], n[2], NORMS), floats_of(p[3], n[3], NORMS)
    e, f = floats_of(q[0], m[0], NORMS), floats_of(q[1], m[1], NORMS)
    g, h = floats_of(q[2], m[2], NORMS), floats_of(q[3], m[3], NORMS)
    factor = 1.0
    if NORMS:
        squares = a[2] + b[2] + c[2] + d[2] + (e[2] + f[2] + g[2] + h[2])
        factor = tl.rsqrt(tl.sum(squares) / (num_pieces * 16) + eps)
    return (a, b, c, d, e, f, g, h), factor


@triton.jit
def row_sums(words, x, EMULATES: tl.constexpr):
    """[R]: sums of the products of a row and of rows of the weight"""
    v0, v1, v2, v3 = four(words)
    sums = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
    sums = add_word(sums, v0, x[0], x[1], EMULATES)
    sums = add_word(sums, v1, x[2], x[3], EMULATES)
    sums = add_word(sums, v2, x[4], x[5], EMULATES)
    sums = add_word(sums, v3, x[6], x[7], EMULATES)
    return tl.sum(sums, 0)


@triton.jit
def store_row(
    y_ptr, bias_ptr, first, second, residual, n, N,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    first = biased(first, bias_ptr, n, n < N, HAS_BIAS)
    if GATES:
        second = biased(second, bias_ptr, n + N, n < N, HAS_BIAS)
        first = first / (1 + tl.exp(-first)) * second
    if ADDS:
        first += residual
    tl.store(y_ptr + n, first.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def one_kernel(
    y_ptr, x_ptr, norm_ptr, word_ptr, scale_ptr, bias_ptr, residual_ptr, where, N, num_pieces, D, eps,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr, GATES: tl.constexpr,
    ROTATES: tl.constexpr, IS_INTERLEAVED: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, EMULATES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[n] = scale[n] * sum(x * weight[n]) + bias[n] + residual[n]; or silu(gate) * up, whose weights are N
    rows apart; or the two halves of heads, which are rotated and put where they belong. N counts y, or pairs.
    """
    PAIRS: tl.constexpr = GATES or ROTATES
    EACH: tl.constexpr = ROWS // 2 if PAIRS else ROWS
    each, r, piece = tl.arange(0, EACH), tl.arange(0, ROWS), tl.arange(0, PIECES)
    half = D // 2
    gap = (1 if IS_INTERLEAVED else half) if ROTATES else N
    begin, step = tl.program_id(0) * EACH, tl.num_programs(0) * EACH
    pointers, sizes = (word_ptr, scale_ptr), (r // EACH, piece, num_pieces, half, gap, D)
    n = begin + r % EACH
    words, scale = load_rows(*pointers, n, n < N, *sizes, PAIRS, ROTATES, IS_INTERLEAVED)
    norm = load_pairs(norm_ptr if NORMS else word_ptr, piece, num_pieces if NORMS else 0)
    wait_for_inputs(OVERLAPS, ROTATES)
    rotation = place_now(where, S) if ROTATES else 0
    residual = load_residual(residual_ptr, begin + each, N, ADDS)
    x, factor = load_floats(x_ptr, norm, piece, num_pieces, eps, NORMS)
    for start in range(begin, N, step):
        n = start + step + r % EACH
        next_words, next_scale = load_rows(*pointers, n, n < N, *sizes, PAIRS, ROTATES, IS_INTERLEAVED)
        next_residual = load_residual(residual_ptr, start + step + each, N, ADDS)
        y = row_sums(words, x, EMULATES) * (scale * factor)
        if PAIRS:
            first, second = tl.split(y.reshape(2, EACH).permute(1, 0))
        else:
            first, second = y, y
        if ROTATES:
            store_rotated(
                y_ptr, bias_ptr, first, second, start + each, N, rotation, where, half, gap, D,
                HAS_BIAS, IS_INTERLEAVED, S, LANES,
            )  # fmt: skip
        else:
            store_row(y_ptr, bias_ptr, first, second, residual, start + each, N, HAS_BIAS, ADDS, GATES)
        words, scale, residual = next_words, next_scale, next_residual


@triton.jit
def place_now(where, S: tl.constexpr):
    """(position, block, place) of the token"""
    position_ptr, _, _, stream_ptr, slot_ptr, table_ptr, _, _ = where[0]
    _, _, _, B, M, P, _, _ = where[1]
    block, place = block_of(table_ptr, stream_ptr, slot_ptr, B, M, P, S)
    return tl.load(position_ptr).to(tl.int64), block, place


@triton.jit
def store_rotated(
    q_ptr, bias_ptr, first, second, pair, num_pairs, rotation, where, half, gap, D,
    HAS_BIAS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    position, block, place = rotation
    _, sin_ptr, cos_ptr, _, _, _, key_ptr, value_ptr = where[0]
    sin_stride, cos_stride, length, _, _, _, H, K = where[1]
    is_pair = pair < num_pairs
    row = row_of(pair, half, D, IS_INTERLEAVED)
    head, d = pair // half, row % D
    first = biased(first, bias_ptr, row, is_pair, HAS_BIAS)
    second = biased(second, bias_ptr, row + gap, is_pair, HAS_BIAS)
    sin, cos = angles(sin_ptr, cos_ptr, position, pair % half, is_pair, sin_stride, cos_stride, length)
    r0 = tl.where(head < H + K, first * cos - second * sin, first)
    r1 = tl.where(head < H + K, first * sin + second * cos, second)
    put(q_ptr, key_ptr, value_ptr, r0, 0, head, d, is_pair, block, place, H, K, D, S, LANES)
    put(q_ptr, key_ptr, value_ptr, r1, 0, head, d + gap, is_pair, block, place, H, K, D, S, LANES)


def takes_one(x: Tensor, weight: Float8Tensor) -> bool:
    """Whether this is one row that a program can hold, and need not have its bits among others"""
    is_alone = x.numel() == x.shape[-1] <= LARGEST_TILE and not infinicore.deterministic
    return is_alone and x.dtype == torch.bfloat16


def launch_one(
    y: Tensor,
    x: Tensor,
    weight: Float8Tensor,
    bias: Tensor | None,
    beside: Beside = ALONE,
    is_interleaved: bool = False,
) -> None:
    """y [1, N] of x [1, K]; of a gate, y [1, N / 2]; of heads [1, H, D], the queries"""
    num_rows, size = weight.shape
    heads = beside.heads
    is_paired = beside.is_gated or heads is not None
    pieces = triton.next_power_of_2(size // 16)
    num_warps = min(max(pieces // 64, 1), WARPS)
    num_units = triton.cdiv(num_rows, ROWS)
    norm = None if beside.norm is None else pairs_of(beside.norm)
    one_kernel[(min(num_units, WARPS // num_warps * num_processors(x.device)),)](
        y, pairs_of(x), norm, weight.blocks.view(torch.int32), weight.row_scales, bias, beside.residual,
        heads and heads[:2], num_rows // 2 if is_paired else num_rows, size // 16, y.shape[-1], beside.eps,
        HAS_BIAS=bias is not None, ADDS=beside.residual is not None, NORMS=norm is not None,
        GATES=beside.is_gated, ROTATES=heads is not None, IS_INTERLEAVED=is_interleaved,
        S=heads.block_size if heads else 0, LANES=LANES, ROWS=ROWS, PIECES=pieces,
        EMULATES=IS_INTERPRETED, num_warps=num_warps, num_stages=1, maxnreg=128,
        **overlap_reading(x.device, beside.norm),
    )  # fmt: skip
