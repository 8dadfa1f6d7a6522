"""Attention of tokens that stand alone, in half precision: warps that have 16 keys at a time, each its own.

A token is some programs for each key/value head, which share its keys. A thread loads what the tensor cores
want of it, so that keys and values go through no other thread's hands, and the next are on their way while
these are multiplied. What warps found is folded when all keys are seen: within a program, then over those of
a head, in their order, by the one that comes last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.ops.triton.attention_alone import (
    FOLDED_SPLITS,
    FOLDED_TILE,
    arrivals,
    fold_parts,
    share_of,
)
from infinicore.ops.triton.attention_places import (
    Seen,
    Sizes,
    arithmetic,
    capped,
    lanes_at,
    place_of,
    with_sinks,
)
from infinicore.ops.triton.cache import are_latest
from infinicore.ops.triton.fragments import pair_of_halves
from infinicore.ops.triton.tensors import num_processors, overlap, wait_for_inputs

# N tokens, B streams, M blocks of a stream, P blocks of a pool, S slots of a block, H query heads,
# K key/value heads, G query heads of each, D head size, W warps of a program.
# L threads, of which 4 g + t is one of a warp. It loads words, which are two values each: of keys 2 g and
# 2 g + 1 all d with d / 4 % 4 = t; of values, D / 8 from d = D / 8 g on, of the 4 keys that key_of tells.
SIZES = (64, 128)  # of heads
MOST_HEADS = 8  # of a group
RESIDENT = 8  # warps for each processor that keys are shared out among
MOST_WARPS = 4  # of a program: more take longer to fold than they gain
SLOW_WARPS = 2  # so many would be those of 34 to 66 streams with 8 heads, where the other kernel is faster
LONG_STREAM = 2048  # keys: where there may be more, twice as many programs share them


@triton.jit
def key_of(row):
    """Rows of scores are keys in another order: first the even ones, then the odd ones"""
    return row % 8 * 2 + row // 8


@triton.jit
def load_four(at, is_in):
    """4 d of two keys: [L, 2, 2]"""
    a = tl.load(at, mask=is_in, other=0, eviction_policy="evict_first")
    b = tl.load(at + 8, mask=is_in, other=0, eviction_policy="evict_first")
    c = tl.load(at + 16, mask=is_in, other=0, eviction_policy="evict_first")
    d = tl.load(at + 24, mask=is_in, other=0, eviction_policy="evict_first")
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def load_keys(word_ptr, first, lane, is_in, D: tl.constexpr):
    """[L, 2, 2, 2, 2] and 2 more of 128: the bits of d % 4, the lowest first, then those of d / 16"""
    at = word_ptr + first // 2 + lane % 4 * 32 + lane // 4
    low = tl.join(load_four(at, is_in), load_four(at + 128, is_in))
    top = tl.join(load_four(at + 256, is_in), load_four(at + 384, is_in))
    words = tl.join(low, top)
    if D == 128:
        low = tl.join(load_four(at + 512, is_in), load_four(at + 640, is_in))
        top = tl.join(load_four(at + 768, is_in), load_four(at + 896, is_in))
        words = tl.join(words, tl.join(low, top))
    return words


@triton.jit
def load_row(at, key, is_in, seen, end, ROW: tl.constexpr, D: tl.constexpr):
    """8 d of a value, or 16: [L, 4] or [L, 4, 2]; what is not seen may be anything, and is not loaded"""
    is_seen = (is_in & (key + 2 * ROW >= seen) & (key + 2 * ROW < end))[:, None]
    words = tl.load(at + ROW * D, mask=is_seen, other=0, eviction_policy="evict_first")
    if D == 128:
        others = tl.load(at + ROW * D + 4, mask=is_seen, other=0, eviction_policy="evict_first")
        words = tl.join(words, others)
    return words


@triton.jit
def load_values(word_ptr, first, key, lane, is_in, seen, end, D: tl.constexpr):
    """[L, 4, 2, 2] and 2 before the last two of 128: words, the last 4 or not, the bits of a row % 4"""
    own = key_of(lane % 4 * 4)
    at = (word_ptr + first // 2 + own * (D // 2) + lane // 4 * (D // 16))[:, None] + tl.arange(0, 4)[None, :]
    a = load_row(at, key + own, is_in, seen, end, 0, D)
    b = load_row(at, key + own, is_in, seen, end, 1, D)
    c = load_row(at, key + own, is_in, seen, end, 2, D)
    d = load_row(at, key + own, is_in, seen, end, 3, D)
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def load_both(
    key_ptr, value_ptr, table, key, lane, begin, end, seen, K, P, head, S: tl.constexpr, D: tl.constexpr
):
    """Keys and values from begin to end, as far as warps have them from `key` on; and NaN where no pool has
    their block"""
    first, lost = lanes_at(table, key, seen, end, K, P, head, D, S, 16)
    is_in = (key >= begin) & (key < end)
    keys = load_keys(key_ptr, first, lane, is_in, D)
    return keys, load_values(value_ptr, first, key, lane, is_in, seen, end, D), lost


@triton.jit
def keys_of(words, DTYPE: tl.constexpr, D: tl.constexpr, WARPS: tl.constexpr):
    """[W, 16, D], rows in their order"""
    halves = pair_of_halves(words.to(tl.uint32, bitcast=True)).to(DTYPE, bitcast=True)
    if D == 128:
        halves = halves.reshape(WARPS, 8, 4, 2, 2, 2, 2, 2, 2).permute(0, 8, 1, 7, 6, 5, 2, 4, 3)
    else:
        halves = halves.reshape(WARPS, 8, 4, 2, 2, 2, 2, 2).permute(0, 7, 1, 6, 5, 2, 4, 3)
    return halves.reshape(WARPS, 16, D)


@triton.jit
def values_of(words, DTYPE: tl.constexpr, D: tl.constexpr, WARPS: tl.constexpr):
    """[W, D, 16]: d in the order of place_in_head, columns are the rows of scores"""
    halves = pair_of_halves(words.to(tl.uint32, bitcast=True)).to(DTYPE, bitcast=True)
    if D == 128:
        halves = halves.reshape(WARPS, 8, 4, 4, 2, 2, 2, 2).permute(0, 4, 3, 7, 1, 2, 6, 5)
    else:
        halves = halves.reshape(WARPS, 8, 4, 4, 2, 2, 2).permute(0, 3, 6, 1, 2, 5, 4)
    return halves.reshape(WARPS, D, 16)


@triton.jit
def place_in_head(row, D: tl.constexpr):
    """The d that a row of values_of holds"""
    return row % 8 * (D // 8) + row // 16 * 2 + row // 8 % 2


@triton.jit
def attend_warps(
    state, q, keys, values, key, seen, end, lost, scale, cap,
    CAPS: tl.constexpr, DTYPE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """What each warp's heads have summed up, with 16 keys more"""
    sums, largest, total = state
    WARPS: tl.constexpr = sums.shape[0]
    scores = capped(tl.dot(keys_of(keys, DTYPE, D, WARPS), q) * scale, cap, CAPS) + lost[:, None, None]
    place = key[:, None, None] + key_of(tl.arange(0, 16))[None, :, None]
    scores = tl.where((place >= seen) & (place < end), scores, -float("inf"))  # [W, 16, HEADS]
    new = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new == -float("inf"), 0.0, new)
    scaled, weights = tl.exp2(largest - base), tl.exp2(scores - base[:, None, :])
    total = total * scaled + tl.sum(weights, 1)
    sums = tl.dot(values_of(values, DTYPE, D, WARPS), weights.to(DTYPE), sums * scaled[:, None, :])
    return sums, new, total


@triton.jit
def folded_warps(sums, largest, total):
    """The sums, largest scores and totals of all warps: [D, HEADS] and twice [HEADS]"""
    most = tl.max(largest, 0)
    scaled = tl.exp2(largest - tl.where(most == -float("inf"), 0.0, most)[None, :])
    return tl.sum(sums * scaled[:, None, :], 0), most, tl.sum(total * scaled, 0)


@triton.jit
def first_stored(stream_ptr, slot_ptr, stream, slot, N, TOKENS: tl.constexpr):
    """The first slot, up to `slot`, that a token of this step has in the stream"""
    n = tl.arange(0, TOKENS)
    streams = tl.load(stream_ptr + n, mask=n < N, other=-1)
    slots = tl.load(slot_ptr + n, mask=n < N, other=0).to(tl.int64)
    return tl.min(tl.where(streams == stream, tl.minimum(slots, slot), slot), 0).to(tl.int32)


@triton.jit
def load_early(
    pools, place, key, lane, begin, end, stored, S: tl.constexpr, D: tl.constexpr, WARPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """load_both, of which keys from those 16 on that have `stored` among them are loaded when the kernel
    before has ended, which stores them"""
    new = tl.maximum(tl.minimum(end, stored) - begin, 0) // 16 * 16 + begin
    keys, values, gone = load_both(*pools, key, lane, begin, new, *place, S, D)
    wait_for_inputs(OVERLAPS)
    if new < tl.minimum(end, begin + WARPS * 16):
        new_keys, new_values, gone = load_both(*pools, key, lane, new, end, *place, S, D)
        keys |= new_keys
        values |= new_values
    return keys, values, gone


@triton.jit
def load_queries(
    q_ptr, head, q_head_stride, G, WARPS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """[W, D, HEADS] of a group of heads, each warp the same"""
    g, d = tl.arange(0, HEADS), tl.arange(0, D)
    at = q_ptr + (head * G + g)[None, :] * q_head_stride + d[:, None]
    q = tl.load(at, mask=(g < G)[None, :], other=0.0).to(DTYPE)
    return tl.broadcast_to(q[None, :, :], [WARPS, D, HEADS])


@triton.jit
def nothing_yet(WARPS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    largest = tl.full((WARPS, HEADS), -float("inf"), tl.float32)
    return tl.zeros((WARPS, D, HEADS), tl.float32), largest, tl.zeros((WARPS, HEADS), tl.float32)


@triton.jit
def store_whole(y_ptr, found, row, head, G, sink_ptr, HAS_SINKS: tl.constexpr):
    """The result, by a program that has seen all keys"""
    sums, largest, total = found
    D: tl.constexpr = sums.shape[0]
    g, d = tl.arange(0, sums.shape[1]), place_in_head(tl.arange(0, D), D)[:, None]
    total = with_sinks(total, largest, sink_ptr, head * G + g, g < G, HAS_SINKS)
    y = (sums / total[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[None, :] * D + d, y, mask=(g < G)[None, :])


@triton.jit
def store_part(part_ptr, weight_ptr, found, part, G):
    sums, largest, total = found
    D: tl.constexpr = sums.shape[0]
    g, d = tl.arange(0, sums.shape[1]), place_in_head(tl.arange(0, D), D)[:, None]
    tl.store(part_ptr + part[None, :] * D + d, sums, mask=(g < G)[None, :])
    tl.store(weight_ptr + 2 * part, largest, mask=g < G)
    tl.store(weight_ptr + 2 * part + 1, total, mask=g < G)


@triton.jit(do_not_specialize=["window", "N", "B", "M", "P"])
def warps_kernel(
    y_ptr, part_ptr, weight_ptr, arrival_ptr, q_ptr, key_ptr, value_ptr, table_ptr, stream_ptr, slot_ptr,
    sink_ptr, q_token_stride, q_head_stride, scale, cap, window, N, B, M, P, K, G,
    CAPS: tl.constexpr, HAS_SINKS: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WARPS: tl.constexpr, SPLITS: tl.constexpr, FOLDED: tl.constexpr, IS_EARLY: tl.constexpr,
    TOKENS: tl.constexpr, DTYPE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The heads of a group over a split of the keys of one token: the result, or its part of it

    If the kernel before stores these tokens and none else, keys before those are on their way while it ends.
    """
    if not IS_EARLY:
        wait_for_inputs(OVERLAPS)
    token, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    stream, slot, lost = place_of(stream_ptr, slot_ptr, token, True, B, M, S)
    seen, begin, end = share_of(slot, split, window, SPLITS, 16)
    thread, warp = tl.arange(0, WARPS * 32), tl.arange(0, WARPS)
    lane, key = thread % 32, begin + thread // 32 * 16
    pools, place = (key_ptr, value_ptr, table_ptr + stream * M), (seen, K, P, head)
    if IS_EARLY:
        stored = first_stored(stream_ptr, slot_ptr, stream, slot, N, TOKENS)
        keys, values, gone = load_early(pools, place, key, lane, begin, end, stored, S, D, WARPS, OVERLAPS)
    else:
        keys, values, gone = load_both(*pools, key, lane, begin, end, *place, S, D)
    q = load_queries(q_ptr + token * q_token_stride, head, q_head_stride, G, WARPS, HEADS, D, DTYPE)
    state = nothing_yet(WARPS, HEADS, D)
    for start in range(begin, end, WARPS * 16):
        key = start + (WARPS + thread // 32) * 16
        next_keys, next_values, next_gone = load_both(*pools, key, lane, begin, end, *place, S, D)
        here = tl.max(gone.reshape(WARPS, 32), 1) + lost
        state = attend_warps(
            state, q, keys, values, start + warp * 16, seen, end, here, scale, cap, CAPS, DTYPE, D
        )
        keys, values, gone = next_keys, next_values, next_gone
    found, row = folded_warps(*state), (token * K + head) * G + tl.arange(0, HEADS)
    if SPLITS == 1:
        store_whole(y_ptr, found, row, head, G, sink_ptr, HAS_SINKS)
    else:
        if begin < end:
            store_part(part_ptr, weight_ptr, found, row * SPLITS + split, G)
        fold_parts(
            y_ptr, part_ptr, weight_ptr, arrival_ptr, sink_ptr, token, head, slot, window, K, G, D,
            HAS_SINKS, D, 16, SPLITS, FOLDED,
        )  # fmt: skip


class Plan(NamedTuple):
    """How many warps a program has, and how many programs share the keys of a token"""

    num_warps: int
    splits: int


def plan_of(num_groups: int, num_keys: int, device: torch.device) -> Plan:
    """For so many tokens times heads, of so many keys at most: as many warps as processors take"""
    if infinicore.deterministic:
        return Plan(MOST_WARPS, FOLDED_SPLITS)
    most = max(RESIDENT * num_processors(device) // num_groups, 1)
    num_warps = min(1 << most.bit_length() - 1, MOST_WARPS)
    splits = min(1 << (most // num_warps).bit_length() - 1, FOLDED_SPLITS)
    is_long = splits == FOLDED_SPLITS and num_keys > LONG_STREAM
    return Plan(num_warps, 2 * splits if is_long else splits)


def suits(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether these are heads and pools that this kernel knows, and so many that it is the faster one"""
    num_kv_heads = values.shape[1]
    return (
        q.dtype == values.dtype
        and q.dtype != torch.float32
        and q.shape[2] in SIZES
        and q.shape[1] // num_kv_heads <= MOST_HEADS
        and plan_of(len(q) * num_kv_heads, 0, q.device).num_warps != SLOW_WARPS
        and all(pool.data_ptr() % 16 == 0 for pool in (keys, values))
    )


def launch_warps(y: Tensor, seen: Seen, sizes: Sizes) -> None:
    q, keys, values, tables, streams, slots, sinks = seen
    num_tokens, num_heads, size = q.shape
    num_kv_heads = sizes.num_kv_heads
    plan = plan_of(num_tokens * num_kv_heads, tables.shape[1] * values.shape[2], q.device)
    is_split = plan.splits > 1
    is_early = is_split and are_latest(values, tables, streams, slots)
    num_parts = num_tokens * num_heads * plan.splits if is_split else 0
    parts, weights = (q.new_empty(num_parts, n, dtype=torch.float32) for n in (size, 2))
    heads = triton.next_power_of_2(sizes.group)
    warps_kernel[(num_tokens, num_kv_heads, plan.splits)](
        y, parts, weights, arrivals(values) if is_split else None, q, keys.view(torch.int32),
        values.view(torch.int32), tables, streams, slots, sinks, *q.stride()[:2], *sizes[:-1],
        CAPS=sizes.cap > 0, HAS_SINKS=sinks is not None, S=values.shape[2], HEADS=max(heads, 4), D=size,
        WARPS=plan.num_warps, SPLITS=plan.splits,
        FOLDED=min(max(FOLDED_TILE // (plan.splits * size), 1), heads) if is_split else 0,
        IS_EARLY=is_early, TOKENS=triton.next_power_of_2(num_tokens) if is_early else 1,
        DTYPE=arithmetic(q, values)["DTYPE"], num_warps=plan.num_warps, num_stages=1, **overlap(q.device),
    )  # fmt: skip
