"""store_heads and project_heads: what comes before attention. Queries are rotated; keys are too, and go into
the pools of their streams with the values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.cache import LANES, are_places, are_pools, note_stored
from infinicore.ops.triton.linear import (
    are_product,
    is_alone,
    load_row,
    normalised,
    num_pair_programs,
    pair_product,
    pair_tile,
)
from infinicore.ops.triton.norm import are_rows
from infinicore.ops.triton.rope import TILE, are_tables
from infinicore.ops.triton.tensors import (
    FLOATS,
    IN_TURN,
    INDICES,
    are_plain,
    fits,
    overlap,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)
from infinicore.tiles import RowTensor

# N tokens, H query heads, K key/value heads, D head size, E hidden size, B streams, M blocks of a stream,
# P blocks of a pool, S slots of a block. Heads are counted on: of the queries, of the keys, of the values.
REGISTERS = 128  # of a thread that projects: with more, not all programs would be there at once
# Programs that come early stand where the kernel before leaves room, all on a few processors, which attention
# then has not: with more tokens than this it took a fifth longer.
EARLY_TOKENS = 16


@triton.jit
def angles(sin_ptr, cos_ptr, position, pair, is_pair, sin_stride, cos_stride, length):
    """sin and cos of some pairs at a position, NaN where there is no such position"""
    is_known = (position >= 0) & (position < length)
    lost = tl.where(is_known, 0.0, float("nan"))
    at = tl.where(is_known, position, 0)
    sin = tl.load(sin_ptr + at * sin_stride + pair, mask=is_pair, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + at * cos_stride + pair, mask=is_pair, other=0.0).to(tl.float32)
    return sin + lost, cos + lost


@triton.jit
def place_of(table_ptr, stream, slot, B, M, P, S: tl.constexpr):
    """(block, place in it) of a token; the block is -1 where there is none"""
    is_there = (stream >= 0) & (stream < B) & (slot >= 0) & (slot < M * S)
    block = tl.load(table_ptr + stream * M + slot // S, mask=is_there, other=-1).to(tl.int64)
    return tl.where((block >= 0) & (block < P), block, -1), slot % S


@triton.jit
def put(
    q_ptr, key_ptr, value_ptr, y, token, head, d, is_in, block, place, H, K, D,
    S: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Values of some heads at d, to where each belongs: queries to rows, keys and values to their block"""
    y = y.to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + (token * H + head) * D + d, y, mask=is_in & (head < H))
    is_in = is_in & (block >= 0)
    is_key, is_value = is_in & (head >= H) & (head < H + K), is_in & (head >= H + K)
    first = (block * K + (head - H) % K) * S * D
    key = first + place // LANES * LANES * D + d * LANES + place % LANES
    tl.store(key_ptr + key, y.to(key_ptr.dtype.element_ty), mask=is_key)
    tl.store(value_ptr + first + place * D + d, y.to(value_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def row_of(pair, half, D, IS_INTERLEAVED: tl.constexpr):
    """Of a pair, counted through all heads, the first row"""
    return pair // half * D + (2 * (pair % half) if IS_INTERLEAVED else pair % half)


@triton.jit(do_not_specialize=["length", "B", "M", "P"])
def project_kernel(
    q_ptr, key_ptr, value_ptr, x_ptr, norm_ptr, weight_ptr, bias_ptr, position_ptr, sin_ptr, cos_ptr,
    table_ptr, stream_ptr, slot_ptr, weight_stride, sin_stride, cos_stride, eps, length, B, M, P, H, K, D, E,
    HAS_BIAS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Pairs of one token, from its state: norm, product, rotation, and where they belong

    A program normalises the state once and has the next rows on their way while it sums up those it has.
    """
    half, column = D // 2, tl.arange(0, COLUMNS)
    num_pairs = (H + 2 * K) * half
    gap = 1 if IS_INTERLEAVED else half
    row = row_of(tl.program_id(0), half, D, IS_INTERLEAVED)
    row_ptr = weight_ptr + row.to(tl.int64) * weight_stride
    first, second = load_row(row_ptr, column, E), load_row(row_ptr + gap * weight_stride, column, E)
    norm = tl.load(norm_ptr + column, mask=column < E, other=0.0)
    wait_for_inputs(OVERLAPS, True)
    position = tl.load(position_ptr).to(tl.int64)
    stream, slot = tl.load(stream_ptr).to(tl.int64), tl.load(slot_ptr).to(tl.int64)
    block, place = place_of(table_ptr, stream, slot, B, M, P, S)
    x = normalised(x_ptr, norm, E, eps, True, COLUMNS)
    for n in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        ahead = n + tl.num_programs(0)
        row_ptr = weight_ptr + row_of(ahead, half, D, IS_INTERLEAVED).to(tl.int64) * weight_stride
        num_columns = tl.where(ahead < num_pairs, E, 0)
        next_first, next_second = (
            load_row(row_ptr, column, num_columns),
            load_row(row_ptr + gap * weight_stride, column, num_columns),
        )
        sin, cos = angles(sin_ptr, cos_ptr, position, n % half, True, sin_stride, cos_stride, length)
        y0, y1 = pair_product(x, first, second)
        row, head = row_of(n, half, D, IS_INTERLEAVED), n // half
        if HAS_BIAS:
            y0 += tl.load(bias_ptr + row).to(tl.float32)
            y1 += tl.load(bias_ptr + row + gap).to(tl.float32)
        r0 = tl.where(head < H + K, y0 * cos - y1 * sin, y0)
        r1 = tl.where(head < H + K, y0 * sin + y1 * cos, y1)
        d = row % D
        put(q_ptr, key_ptr, value_ptr, r0, 0, head, d, True, block, place, H, K, D, S, LANES)
        put(q_ptr, key_ptr, value_ptr, r1, 0, head, d + gap, True, block, place, H, K, D, S, LANES)
        first, second = next_first, next_second


@triton.jit(do_not_specialize=["length", "B", "M", "P"])
def store_kernel(
    y_ptr, key_ptr, value_ptr, q_ptr, k_ptr, v_ptr, position_ptr, sin_ptr, cos_ptr, table_ptr, stream_ptr,
    slot_ptr, q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    sin_stride, cos_stride, length, B, M, P, H, K, D,
    IS_INTERLEAVED: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some heads of a token: rotated, and put where they belong"""
    wait_for_inputs(OVERLAPS, True)
    half = D // 2
    token = tl.program_id(0).to(tl.int64)
    head, pair = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, TILE)[None, :]
    if IS_INTERLEAVED:
        d = 2 * pair
        gap = 1
    else:
        d = pair
        gap = half
    position = tl.load(position_ptr + token).to(tl.int64)
    sin, cos = angles(sin_ptr, cos_ptr, position, pair, pair < half, sin_stride, cos_stride, length)
    q_at = q_ptr + token * q_token_stride + head * q_head_stride
    k_at = k_ptr + token * k_token_stride + (head - H) * k_head_stride
    v_at = v_ptr + token * v_token_stride + (head - H - K) * v_head_stride
    at = tl.where(head < H, q_at, tl.where(head < H + K, k_at, v_at)) + d
    is_in = (head < H + 2 * K) & (pair < half)
    x0 = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    x1 = tl.load(at + gap, mask=is_in, other=0.0).to(tl.float32)
    is_rotated = head < H + K
    r0 = tl.where(is_rotated, x0 * cos - x1 * sin, x0)
    r1 = tl.where(is_rotated, x0 * sin + x1 * cos, x1)
    stream, slot = tl.load(stream_ptr + token).to(tl.int64), tl.load(slot_ptr + token).to(tl.int64)
    block, place = place_of(table_ptr, stream, slot, B, M, P, S)
    put(y_ptr, key_ptr, value_ptr, r0, token, head, d, is_in, block, place, H, K, D, S, LANES)
    put(y_ptr, key_ptr, value_ptr, r1, token, head, d + gap, is_in, block, place, H, K, D, S, LANES)


def launch_project(q: Tensor, x: Tensor, norm: Tensor, eps: float, *rest: Any) -> None:
    weight, bias, positions, sin, cos, is_interleaved, keys, values, *places = rest
    tables, streams, slots = (place.contiguous() for place in places)
    num_blocks, num_kv_heads, block_size, size = values.shape
    num_heads = q.shape[-2]
    project_kernel[(num_pair_programs(len(weight) // 2, x.device),)](
        q, keys, values, x, norm, weight, bias, positions, sin, cos, tables, streams, slots,
        weight.stride(0), sin.stride(0), cos.stride(0), eps, len(sin), *tables.shape, num_blocks,
        num_heads, num_kv_heads, size, weight.shape[1],
        HAS_BIAS=bias is not None, IS_INTERLEAVED=is_interleaved, S=block_size, LANES=LANES,
        maxnreg=REGISTERS, **pair_tile(weight), **overlap(x.device),
    )  # fmt: skip
    note_stored(values, tables, streams, slots)


def launch_store(y: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    positions, sin, cos, is_interleaved, keys, values, *places = rest
    positions, tables, streams, slots = (place.contiguous() for place in (positions, *places))
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    num_blocks, num_kv_heads, block_size, size = values.shape
    num_tokens, num_heads, _ = q.shape
    tile = triton.next_power_of_2(size // 2)
    heads = min(max(TILE // tile, 1), triton.next_power_of_2(num_heads + 2 * num_kv_heads))
    store_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        y, keys, values, q, k, v, positions, sin, cos, tables, streams, slots,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], sin.stride(0), cos.stride(0), len(sin),
        *tables.shape, num_blocks, num_heads, num_kv_heads, size,
        IS_INTERLEAVED=is_interleaved, S=block_size, LANES=LANES, HEADS=heads, TILE=tile, num_warps=4,
        **(overlap(q.device) if num_tokens <= EARLY_TOKENS else IN_TURN),
    )  # fmt: skip
    note_stored(values, tables, streams, slots)


def are_heads(num_tokens: int, *rest: Any) -> bool:
    """Whether tokens can be rotated by these tables and stored in these pools"""
    positions, sin, cos, _, keys, values, *places = rest
    return (
        are_pools(keys, values)
        and values.shape[3] % 2 == 0
        and are_plain(keys.device, FLOATS, sin, cos)
        and are_plain(keys.device, INDICES, positions)
        and positions.shape == (num_tokens,)
        and are_tables(sin, cos, values.shape[3] // 2)
        and are_places(num_tokens, keys.device, *places)
    )


def accepts_store_heads(out: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> bool:
    if not are_heads(len(q), *rest):
        return False
    _, num_kv_heads, _, size = rest[5].shape
    return (
        are_plain(rest[5].device, (q.dtype,), k, v)
        and are_plain(rest[5].device, FLOATS, q)
        and q.dim() == 3
        and q.numel() > 0
        and q.shape[2] == size
        and k.shape == v.shape == (len(q), num_kv_heads, size)
        and fits(out, q.shape, q.dtype, q.device)
    )


def store_heads(out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    y = target(out, q, *(t for t in rest if isinstance(t, Tensor)), q, k, v)
    launch_store(y, q, k, v, *rest)
    return settled(y, out)


def accepts_project_heads(  # noqa: PLR0913  those of the op
    out: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, *rest: Any
) -> bool:
    """One row alone: those of more are a norm, a product and store_heads"""
    return (
        is_alone(x)
        and are_rows(x, norm)
        and are_product(x, weight, bias)
        and are_heads(1, *rest)
        and x.device == rest[4].device
        and len(weight) > 2 * rest[5].shape[1] * rest[5].shape[3]
        and len(weight) % rest[5].shape[3] == 0
        and fits(out, query_shape(weight, rest[5]), x.dtype, x.device)
    )


def query_shape(weight: Tensor | RowTensor, values: Tensor) -> tuple[int, int, int]:
    _, num_kv_heads, _, size = values.shape
    return 1, weight.shape[0] // size - 2 * num_kv_heads, size


def project_heads(out: Tensor | None, x: Tensor, norm: Tensor, eps: float, *rest: Any) -> Tensor:
    weight, bias, *others = rest
    like = torch.empty(query_shape(weight, others[5]), dtype=x.dtype, device=x.device)
    y = target(out, like, x, norm, *(t for t in rest if isinstance(t, Tensor)))
    launch_project(y, rows_of(x), norm.contiguous(), eps, *rest)
    return settled(y, out)
