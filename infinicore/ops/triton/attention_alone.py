"""Attention of tokens that stand alone, such as the next one of each of many streams.

A token is a program for each key/value head and split of its keys: all query heads of the group read the keys
once. How many splits there are follows from the number of tokens, how long they are from the token's slot, so
a recorded launch serves any lengths; the parts are folded in their order, by the program that comes last
where there are few, else afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import infinicore
from infinicore.ops.triton.attention_places import (
    LONG,
    Seen,
    Sizes,
    arithmetic,
    capped,
    in_run,
    lanes_at,
    padded,
    place_of,
    with_sinks,
)
from infinicore.ops.triton.cache import LANES
from infinicore.ops.triton.tensors import num_processors, overlap, wait_for_inputs

# N tokens, B streams, M blocks of a stream, P blocks of a pool, S slots of a block, H query heads,
# K key/value heads, G query heads of each, D head size, KEYS keys that are looked at together
PROGRAMS = 4  # for each processor, which the keys are split for
MOST_SPLITS = 64
MOST_PARTS = 1 << 24  # values of splits that wait to be folded
FOLDED_SPLITS = 16  # at most, where the last program of a token and head folds them
FOLDED_TILE = 8192  # values that it folds at once
MOST_FOLDED = 4096  # tokens times heads
# How many splits of a token and head have come, for each pool: it is one step's at a time.
ARRIVALS = WeakTensorKeyDictionary()


@triton.jit
def share_of(slot, split, window, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """(first key that is seen, begin and end of a split): splits are equal numbers of tiles of KEYS"""
    seen = tl.where(window > 0, tl.maximum(slot - window + 1, 0), 0)
    begin = seen // KEYS * KEYS
    num_tiles = tl.cdiv(slot + 1 - begin, KEYS)
    size = tl.cdiv(num_tiles, SPLITS) * KEYS
    return seen, begin + split * size, tl.minimum(begin + (split + 1) * size, slot + 1)


@triton.jit(do_not_specialize=["N"])
def list_kernel(list_ptr, stream_ptr, N, LONG: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr):
    """How many tokens stand alone, and which those are, in their order"""
    wait_for_inputs(OVERLAPS)
    count = 0
    for start in range(0, N, TILE):
        n = start + tl.arange(0, TILE)
        is_alone = ((n < N) & (in_run(stream_ptr, n, N, LONG) == 0)).to(tl.int32)
        tl.store(list_ptr + count + tl.cumsum(is_alone, 0), n, mask=is_alone > 0)
        count += tl.sum(is_alone, 0)
    tl.store(list_ptr, count)


@triton.jit
def lane_scores(
    q, key_ptr, first, lost, key, seen, end, scale, cap, D,
    CAPS: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[HEADS, LANES]; the keys are [D, LANES] in one piece"""
    d, lane = tl.arange(0, DIM)[:, None], tl.arange(0, LANES)[None, :]
    keys = tl.load(key_ptr + first + (d * LANES + lane), mask=d < D, other=0.0).to(DTYPE)
    scores = capped(tl.dot(q, keys, input_precision=PRECISION) * scale, cap, CAPS) + lost
    return tl.where((key + lane >= seen) & (key + lane < end), scores, -float("inf"))


@triton.jit
def add_lanes(
    sums, weights, value_ptr, first, key, seen, end, D,
    LANES: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + weights * values, which are [LANES, D] in one piece; what is not seen may be anything"""
    lane, d = tl.arange(0, LANES)[:, None], tl.arange(0, DIM)[None, :]
    is_seen = (key + lane >= seen) & (key + lane < end)
    values = tl.load(value_ptr + first + (lane * D + d), mask=is_seen & (d < D), other=0.0).to(DTYPE)
    return tl.dot(weights.to(DTYPE), values, sums, input_precision=PRECISION)


@triton.jit
def attend_alone(
    sums, largest, total, q, seen, begin, end, lost, key_ptr, value_ptr, table, scale, cap, K, P, head, D,
    CAPS: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the heads of a group sum up over the keys from begin to end, as far as those are seen.

    Lanes lie in one block each, so an address is a number for all of them. It is found one round ahead: loads
    that wait for no other are begun several rounds ahead.
    """
    first, first_lost = lanes_at(table, begin, seen, end, K, P, head, D, S, LANES)
    second, second_lost = lanes_at(table, begin + LANES, seen, end, K, P, head, D, S, LANES)
    for key in range(begin, end, 2 * LANES):
        next_first, next_first_lost = lanes_at(table, key + 2 * LANES, seen, end, K, P, head, D, S, LANES)
        next_second, next_second_lost = lanes_at(table, key + 3 * LANES, seen, end, K, P, head, D, S, LANES)
        scores = lane_scores(
            q, key_ptr, first, first_lost + lost, key, seen, end, scale, cap, D,
            CAPS, LANES, DIM, DTYPE, PRECISION,
        )  # fmt: skip
        others = lane_scores(
            q, key_ptr, second, second_lost + lost, key + LANES, seen, end, scale, cap, D,
            CAPS, LANES, DIM, DTYPE, PRECISION,
        )  # fmt: skip
        new = tl.maximum(largest, tl.max(tl.maximum(scores, others), 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        scaled, largest = tl.exp2(largest - base), new
        weights, other_weights = tl.exp2(scores - base[:, None]), tl.exp2(others - base[:, None])
        total = total * scaled + tl.sum(weights + other_weights, 1)
        sums = add_lanes(
            sums * scaled[:, None], weights, value_ptr, first, key, seen, end, D, LANES, DIM, DTYPE, PRECISION
        )
        sums = add_lanes(
            sums, other_weights, value_ptr, second, key + LANES, seen, end, D, LANES, DIM, DTYPE, PRECISION
        )
        first, first_lost, second, second_lost = next_first, next_first_lost, next_second, next_second_lost
    return sums, largest, total


@triton.jit
def fold_parts(
    y_ptr, part_ptr, weight_ptr, arrival_ptr, sink_ptr, token, head, slot, window, K, G, D,
    HAS_SINKS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    FOLDED: tl.constexpr,
):  # fmt: skip
    """The heads of a group from their parts, by whoever is the last to have written one"""
    tl.debug_barrier()
    num_before = tl.atomic_add(arrival_ptr + token * K + head, 1, sem="acq_rel", scope="gpu")
    if num_before == SPLITS - 1:
        tl.store(arrival_ptr + token * K + head, 0)
        split, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
        _, begin, end = share_of(slot, split, window, SPLITS, KEYS)
        for first in range(0, G, FOLDED):
            g = first + tl.arange(0, FOLDED)
            is_used = (g < G)[:, None] & (begin < end)[None, :]
            row = (token * K + head) * G + g
            part = row[:, None] * SPLITS + split[None, :]
            largest = tl.load(weight_ptr + 2 * part, mask=is_used, other=-float("inf"))
            total = tl.load(weight_ptr + 2 * part + 1, mask=is_used, other=0.0)
            at = part_ptr + part[:, :, None] * DIM + d[None, None, :]
            sums = tl.load(at, mask=is_used[:, :, None], other=0.0)
            base = tl.max(largest, 1)
            weight = tl.exp2(largest - tl.where(base == -float("inf"), 0.0, base)[:, None])
            total = with_sinks(tl.sum(total * weight, 1), base, sink_ptr, head * G + g, g < G, HAS_SINKS)
            y = tl.sum(sums * weight[:, :, None], 1) / total[:, None]
            is_value = (g < G)[:, None] & (d < D)[None, :]
            tl.store(y_ptr + row[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=is_value)


@triton.jit(do_not_specialize=["window", "N", "B", "M", "P"])
def alone_kernel(
    y_ptr, part_ptr, weight_ptr, arrival_ptr, list_ptr, q_ptr, key_ptr, value_ptr, table_ptr, stream_ptr,
    slot_ptr, sink_ptr, q_token_stride, q_head_stride, scale, cap, window, N, B, M, P, K, G, D,
    CAPS: tl.constexpr, HAS_SINKS: tl.constexpr,
    S: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, FOLDED: tl.constexpr, HAS_RUNS: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The heads of a group over a split of the keys of one token: the result, or its part of it"""
    wait_for_inputs(OVERLAPS)
    head, split = tl.program_id(1), tl.program_id(2)
    g, d = tl.arange(0, HEADS), tl.arange(0, DIM)
    is_value = (g < G)[:, None] & (d < D)[None, :]
    num_tokens = tl.load(list_ptr) if HAS_RUNS else N
    for i in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = (tl.load(list_ptr + 1 + i) if HAS_RUNS else tl.program_id(0)).to(tl.int64)
        stream, slot, lost = place_of(stream_ptr, slot_ptr, token, True, B, M, S)
        seen, begin, end = share_of(slot, split, window, SPLITS, KEYS)
        if begin < end:
            q_at = q_ptr + token * q_token_stride + (head * G + g)[:, None] * q_head_stride + d[None, :]
            q = tl.load(q_at, mask=is_value, other=0.0).to(DTYPE)
            largest = tl.full((HEADS,), -float("inf"), tl.float32)
            total, sums = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, DIM), tl.float32)
            sums, largest, total = attend_alone(
                sums, largest, total, q, seen, begin, end, lost, key_ptr, value_ptr, table_ptr + stream * M,
                scale, cap, K, P, head, D, CAPS, S, LANES, DIM, DTYPE, PRECISION,
            )  # fmt: skip
            row = (token * K + head) * G + g
            if SPLITS == 1:
                total = with_sinks(total, largest, sink_ptr, head * G + g, g < G, HAS_SINKS)
                y = (sums / total[:, None]).to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + row[:, None] * D + d[None, :], y, mask=is_value)
            else:
                part = row * SPLITS + split
                tl.store(part_ptr + part[:, None] * DIM + d[None, :], sums, mask=(g < G)[:, None])
                tl.store(weight_ptr + 2 * part, largest, mask=g < G)
                tl.store(weight_ptr + 2 * part + 1, total, mask=g < G)
        if FOLDED > 0:
            fold_parts(
                y_ptr, part_ptr, weight_ptr, arrival_ptr, sink_ptr, token, head, slot, window, K, G, D,
                HAS_SINKS, DIM, KEYS, SPLITS, FOLDED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["window", "N", "B", "M"])
def fold_kernel(
    y_ptr, part_ptr, weight_ptr, list_ptr, stream_ptr, slot_ptr, sink_ptr, window, N, B, M, H, D,
    HAS_SINKS: tl.constexpr, S: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_RUNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The parts of a head of one token, weighed by their largest scores"""
    wait_for_inputs(OVERLAPS)
    head, split, d = tl.program_id(1), tl.arange(0, SPLITS), tl.arange(0, DIM)
    num_tokens = tl.load(list_ptr) if HAS_RUNS else N
    for i in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = (tl.load(list_ptr + 1 + i) if HAS_RUNS else tl.program_id(0)).to(tl.int64)
        _, slot, _ = place_of(stream_ptr, slot_ptr, token, True, B, M, S)
        _, begin, end = share_of(slot, split, window, SPLITS, KEYS)
        is_used = begin < end
        part = (token * H + head) * SPLITS + split
        largest = tl.load(weight_ptr + 2 * part, mask=is_used, other=-float("inf"))
        total = tl.load(weight_ptr + 2 * part + 1, mask=is_used, other=0.0)
        sums = tl.load(part_ptr + part[:, None] * DIM + d[None, :], mask=is_used[:, None], other=0.0)
        base = tl.max(largest, 0)
        weight = tl.exp2(largest - tl.where(base == -float("inf"), 0.0, base))
        # A part that is not used has the weight 0 and nothing to weigh.
        y = tl.sum(sums * weight[:, None], 0)
        y /= with_sinks(tl.sum(total * weight, 0), base, sink_ptr, head, True, HAS_SINKS)
        tl.store(y_ptr + (token * H + head) * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def num_splits(num_programs: int, num_values: int, device: torch.device) -> int:
    """Enough to give every processor work, but no more than their parts' memory is worth"""
    wanted = PROGRAMS * num_processors(device) // num_programs
    most = min(max(MOST_PARTS // num_values, 1), MOST_SPLITS)
    return min(1 << max(wanted - 1, 0).bit_length(), 1 << most.bit_length() - 1)


def alone_tile(is_wide: bool, dim: int) -> tuple[int, int]:
    """Warps and stages, as an H200 does best"""
    return (4, 2) if is_wide or dim > 128 else (2, 3)


class Plan(NamedTuple):
    """How many programs share the keys of a token, and whether the last of them folds what they found; on
    how many warps, in how many stages"""

    splits: int
    is_folded: bool
    num_warps: int
    num_stages: int


def plan_of(num_programs: int, q: Tensor, num_kv_heads: int, is_wide: bool, has_runs: bool) -> Plan:
    """For so many programs of each key/value head"""
    num_tokens, num_heads, size = q.shape
    dim, groups = padded(size), num_programs * num_kv_heads
    if infinicore.deterministic:
        return Plan(FOLDED_SPLITS, True, *alone_tile(is_wide, dim))
    splits = num_splits(groups, num_tokens * num_heads * dim, q.device)
    is_folded = not has_runs and splits > 1 and is_few(groups, q.device)
    splits = min(splits, FOLDED_SPLITS) if is_folded else splits
    return Plan(splits, is_folded, *alone_tile(is_wide, dim))


def launch_alone(y: Tensor, seen: Seen, sizes: Sizes, has_runs: bool) -> None:
    q, values, streams, sinks = seen.q, seen.values, seen.streams, seen.sinks
    num_tokens, num_heads, size = q.shape
    num_kv_heads, block_size = values.shape[1:3]
    alone = listed(streams) if has_runs else streams
    # Where a stream's tokens come one after the other, no more of them stand alone.
    num_programs = min(num_tokens, (LONG.value - 1) * sizes.num_streams) if has_runs else num_tokens
    math_of, dim = arithmetic(q, values), padded(size)
    plan = plan_of(num_programs, q, num_kv_heads, math_of["DTYPE"] == tl.float32, has_runs)
    shared = {"S": block_size, "DIM": dim, "KEYS": 2 * LANES, "SPLITS": plan.splits, "HAS_RUNS": has_runs}
    shared["HAS_SINKS"] = sinks is not None
    num_parts = num_tokens * num_heads * plan.splits if plan.splits > 1 else 0
    parts, weights = (q.new_empty(num_parts, n, dtype=torch.float32) for n in (dim, 2))
    arrived = arrivals(values) if plan.is_folded else None
    alone_kernel[(num_programs, num_kv_heads, plan.splits)](
        y, parts, weights, arrived, alone, *seen, *q.stride()[:2], *sizes,
        CAPS=sizes.cap > 0, LANES=LANES, HEADS=padded(sizes.group),
        FOLDED=folded_heads(plan, dim, sizes.group),
        num_warps=plan.num_warps, num_stages=plan.num_stages, **shared, **math_of, **overlap(q.device),
    )  # fmt: skip
    if plan.splits > 1 and not plan.is_folded:
        fold_kernel[(num_programs, num_heads)](
            y, parts, weights, alone, streams, seen.slots, sinks, sizes.window, num_tokens, sizes.num_streams,
            sizes.num_table_blocks, num_heads, size, num_warps=4, **shared, **overlap(q.device),
        )  # fmt: skip


def folded_heads(plan: Plan, dim: int, group: int) -> int:
    """How many heads of a group the last program folds at once"""
    most: int = min(max(FOLDED_TILE // (plan.splits * dim), 1), triton.next_power_of_2(group))
    return most if plan.is_folded else 0


def is_few(groups: int, device: torch.device) -> bool:
    """Whether so few splits give every processor work that one program can fold them"""
    return num_processors(device) // 2 <= FOLDED_SPLITS * groups <= FOLDED_SPLITS * MOST_FOLDED


def arrivals(pool: Tensor) -> Tensor:
    if pool not in ARRIVALS:
        ARRIVALS[pool] = torch.zeros(MOST_FOLDED, dtype=torch.int32, device=pool.device)
    found: Tensor = ARRIVALS[pool]
    return found


def listed(streams: Tensor) -> Tensor:
    """How many tokens stand alone, then which"""
    tokens = torch.empty(len(streams) + 1, dtype=torch.int32, device=streams.device)
    list_kernel[(1,)](
        tokens, streams, len(streams), LONG=LONG, TILE=1024, num_warps=8, **overlap(streams.device)
    )
    return tokens
