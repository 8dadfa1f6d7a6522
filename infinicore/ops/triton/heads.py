"""store_heads and project_heads: what comes before attention. Queries are rotated; keys are too, and go into
the pools of their streams with the values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.fused_reference import Where
from infinicore.ops.triton.cache import LANES, are_places, are_pools, block_of, key_at, note_stored, value_at
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
    overlap_reading,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)
from infinicore.tiles import RowTensor

# N tokens, H query heads, K key/value heads, D head size, E hidden size, B streams, M blocks of a stream,
# P blocks of a pool, S slots of a block. Heads are counted on: of the queries, of the keys, of the values.
REGISTERS = 128  # of a thread that projects: with more, not all programs would be there at once
# Programs that come early, and attention after them, have the memory of a processor as the product before had
# it split, with little cache: with more tokens than this attention took a fifth longer.
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
    tl.store(key_ptr + key_at(first, place, d, D, LANES), y.to(key_ptr.dtype.element_ty), mask=is_key)
    tl.store(value_ptr + value_at(first, place, d, D), y.to(value_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def row_of(pair, half, D, IS_INTERLEAVED: tl.constexpr):
    """The first row of a pair, pairs counted through all heads"""
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
    block, place = block_of(table_ptr, stream_ptr, slot_ptr, B, M, P, S)
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
def store_heads_kernel(
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
    block, place = block_of(table_ptr, stream_ptr + token, slot_ptr + token, B, M, P, S)
    put(y_ptr, key_ptr, value_ptr, r0, token, head, d, is_in, block, place, H, K, D, S, LANES)
    put(y_ptr, key_ptr, value_ptr, r1, token, head, d + gap, is_in, block, place, H, K, D, S, LANES)


def launch_project(  # noqa: PLR0913  those of the op
    q: Tensor, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, where: Where
) -> None:
    tables, streams, slots = (place.contiguous() for place in where.places)
    sin, cos, keys, values = where.sin, where.cos, where.keys, where.values
    num_blocks, num_kv_heads, block_size, size = values.shape
    num_heads = q.shape[-2]
    project_kernel[(num_pair_programs(len(weight) // 2, x.device),)](
        q, keys, values, x, norm, weight, bias, where.positions, sin, cos, tables, streams, slots,
        weight.stride(0), sin.stride(0), cos.stride(0), eps, len(sin), *tables.shape, num_blocks,
        num_heads, num_kv_heads, size, weight.shape[1],
        HAS_BIAS=bias is not None, IS_INTERLEAVED=where.is_interleaved, S=block_size, LANES=LANES,
        maxnreg=REGISTERS, **pair_tile(weight), **overlap_reading(x.device, weight, norm),
    )  # fmt: skip
    note_stored(values, tables, streams, slots)


def launch_store(y: Tensor, q: Tensor, k: Tensor, v: Tensor, where: Where) -> None:
    positions, tables, streams, slots = (t.contiguous() for t in (where.positions, *where.places))
    sin, cos, keys, values = where.sin, where.cos, where.keys, where.values
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    num_blocks, num_kv_heads, block_size, size = values.shape
    num_tokens, num_heads, _ = q.shape
    tile = triton.next_power_of_2(size // 2)
    heads = min(max(TILE // tile, 1), triton.next_power_of_2(num_heads + 2 * num_kv_heads))
    store_heads_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        y, keys, values, q, k, v, positions, sin, cos, tables, streams, slots,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], sin.stride(0), cos.stride(0), len(sin),
        *tables.shape, num_blocks, num_heads, num_kv_heads, size,
        IS_INTERLEAVED=where.is_interleaved, S=block_size, LANES=LANES, HEADS=heads, TILE=tile, num_warps=4,
        **(overlap(q.device) if num_tokens <= EARLY_TOKENS else IN_TURN),
    )  # fmt: skip
    note_stored(values, tables, streams, slots)


def are_heads(num_tokens: int, where: Where) -> bool:
    """Whether tokens can be rotated by these tables and stored in these pools"""
    if not are_pools(where.keys, where.values):
        return False
    device, size = where.keys.device, where.values.shape[3]
    return (
        size % 2 == 0
        and are_plain(device, FLOATS, where.sin, where.cos)
        and are_plain(device, INDICES, where.positions)
        and where.positions.shape == (num_tokens,)
        and are_tables(where.sin, where.cos, size // 2)
        and are_places(num_tokens, device, *where.places)
    )


def are_projected_heads(num_rows: int, where: Where) -> bool:
    """Whether the rows of a weight are those of queries, keys and values"""
    _, num_kv_heads, _, size = where.values.shape
    return num_rows > 2 * num_kv_heads * size and num_rows % size == 0


def accepts_store_heads(out: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> bool:
    where = Where(*rest)
    if not are_heads(len(q), where):
        return False
    _, num_kv_heads, _, size = where.values.shape
    return (
        are_plain(where.keys.device, (q.dtype,), k, v)
        and are_plain(where.keys.device, FLOATS, q)
        and q.dim() == 3
        and q.numel() > 0
        and q.shape[2] == size
        and k.shape == v.shape == (len(q), num_kv_heads, size)
        and fits(out, q.shape, q.dtype, q.device)
    )


def store_heads(out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    y = target(out, q, *(t for t in rest if isinstance(t, Tensor)), q, k, v)
    launch_store(y, q, k, v, Where(*rest))
    return settled(y, out)


def accepts_project_heads(  # noqa: PLR0913  those of the op
    out: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, *rest: Any
) -> bool:
    """One row alone: those of more are a norm, a product and store_heads"""
    where = Where(*rest)
    return (
        is_alone(x)
        and are_rows(x, norm)
        and are_product(x, weight, bias)
        and are_heads(1, where)
        and x.device == where.keys.device
        and are_projected_heads(len(weight), where)
        and fits(out, query_shape(weight, where), x.dtype, x.device)
    )


def query_shape(weight: Tensor | RowTensor, where: Where) -> tuple[int, int, int]:
    _, num_kv_heads, _, size = where.values.shape
    return 1, weight.shape[0] // size - 2 * num_kv_heads, size


def project_heads(out: Tensor | None, x: Tensor, norm: Tensor, eps: float, *rest: Any) -> Tensor:
    weight, bias, where = *rest[:2], Where(*rest[2:])
    like = torch.empty(query_shape(weight, where), dtype=x.dtype, device=x.device)
    y = target(out, like, x, norm, *(t for t in rest if isinstance(t, Tensor)))
    launch_project(y, rows_of(x), norm.contiguous(), eps, weight, bias, where)
    return settled(y, out)
