"""Attention of runs: tokens of one stream in a row, such as a prompt, by tiles of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.attention_places import (
    LONG,
    Seen,
    Sizes,
    arithmetic,
    capped,
    in_run,
    padded,
    place_of,
    with_sinks,
)
from infinicore.ops.triton.cache import LANES
from infinicore.ops.triton.tensors import overlap, shared_memory, wait_for_inputs

# N tokens, B streams, M blocks of a stream, P blocks of a pool, S slots of a block, H query heads,
# K key/value heads, G query heads of each, D head size, KEYS keys that are looked at together


@triton.jit
def blocks_of(table_ptr, key, is_seen, K, P, head, S: tl.constexpr):
    """Where the blocks of some keys begin, in slots of a head, and NaN for those that no pool has

    Of keys that are not seen it is the first block of the pool.
    """
    block = tl.load(table_ptr + key // S, mask=is_seen, other=0).to(tl.int64)
    is_there = (block >= 0) & (block < P)
    lost = tl.where(is_there, 0.0, float("nan"))
    return (tl.where(is_there, block, 0) * K + head) * S, lost


@triton.jit
def load_keys(key_ptr, first, key, d, D, S: tl.constexpr, LANES: tl.constexpr):
    """[D, KEYS], of which LANES lie side by side

    Also of those that are not seen, which have a block too: a mask that ends among lanes would cut loads.
    """
    place = key % S
    at = (first + place // LANES * LANES) * D + place % LANES
    at = at[None, :] + (d * LANES)[:, None]
    at = tl.max_contiguous(tl.multiple_of(at, (1, LANES)), (1, LANES))
    return tl.load(key_ptr + at, mask=(d < D)[:, None], other=0.0)


@triton.jit
def load_values(value_ptr, first, key, is_seen, d, D, S: tl.constexpr):
    """[KEYS, D]"""
    at = ((first + key % S) * D)[:, None] + d[None, :]
    return tl.load(value_ptr + at, mask=is_seen[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def weigh(scores, factor, largest):
    """(weights, the largest score so far, what earlier sums are to be scaled by)

    Scores times a factor, which is not negative, are powers of two. The largest of none is -inf, and stands
    for 0.
    """
    new = tl.maximum(largest, tl.max(scores, 1) * factor)
    base = tl.where(new == -float("inf"), 0.0, new)
    return tl.exp2(scores * factor - base[:, None]), new, tl.exp2(largest - base)


@triton.jit
def add_spoilt_keys(
    sums, total, largest, q, slot, key_ptr, value_ptr, table, begin, end, last, scale, cap, window,
    K, P, head, D: tl.constexpr, CAPS: tl.constexpr,
    S: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """add_keys where values may be no numbers: those are NaN to tokens that see them, and nothing to the
    others, whose weight of 0 would make NaN of them"""
    d = tl.arange(0, DIM)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_there = key <= last
        first, missing = blocks_of(table, key, is_there, K, P, head, S)
        keys = load_keys(key_ptr, first, key, d, D, S, LANES).to(DTYPE)
        scores = tl.dot(q, keys, input_precision=PRECISION) * scale
        scores = capped(scores, cap, CAPS) + missing[None, :]
        is_seen = (key[None, :] <= slot[:, None]) & ((window <= 0) | (key[None, :] > slot[:, None] - window))
        weights, largest, scaled = weigh(tl.where(is_seen, scores, -float("inf")), 1.0, largest)
        values = load_values(value_ptr, first, key, is_there, d, D, S).to(DTYPE)
        total = total * scaled + tl.sum(weights, 1)
        is_finite = tl.abs(values.to(tl.float32)) < float("inf")
        spoils = tl.where(is_finite, 0.0, 1.0).to(DTYPE)
        num_spoilt = tl.dot(is_seen.to(DTYPE), spoils, input_precision=PRECISION)
        sums = tl.where(num_spoilt > 0, float("nan"), sums * scaled[:, None])
        values = tl.where(is_finite, values, 0.0)
        sums = tl.dot(weights.to(DTYPE), values, sums, input_precision=PRECISION)
    return sums, total, largest


@triton.jit
def four_blocks(table, start, end, S: tl.constexpr, LANES: tl.constexpr):
    """The blocks of four times LANES keys from `start` on, a multiple of as many: one for each LANES, 0 where
    there are no keys"""
    at = table + start // S
    a = tl.load(at, mask=start < end, other=0)
    b = tl.load(at + 1, mask=start + LANES < end, other=0) if S == LANES else a
    c = tl.load(at + 2 * LANES // S, mask=start + 2 * LANES < end, other=0) if S <= 2 * LANES else a
    d = tl.load(at + 3, mask=start + 3 * LANES < end, other=0) if S == LANES else c
    return a, b, c, d


@triton.jit
def lost_of(blocks, P):
    """NaN where the pool has not all of them"""
    a, b, c, d = blocks
    is_lost = (a < 0) | (a >= P) | (b < 0) | (b >= P) | (c < 0) | (c >= P) | (d < 0) | (d >= P)
    return tl.where(is_lost, float("nan"), 0.0)


@triton.jit
def in_pool(block, P):
    """A block that the pool has: itself, or the last"""
    return tl.minimum(block.to(tl.uint32), (P - 1).to(tl.uint32))


@triton.jit
def starts_of(blocks, group, K, P, D: tl.constexpr, S: tl.constexpr):
    """Where the one of four blocks that each group has begins in a pool"""
    low = tl.where(group == 0, in_pool(blocks[0], P), in_pool(blocks[1], P))
    top = tl.where(group == 2, in_pool(blocks[2], P), in_pool(blocks[3], P))
    return tl.where(group < 2, low, top).to(tl.uint64) * (K * S * D).to(tl.uint32).to(tl.uint64)


@triton.jit
def load_part(at, d, D: tl.constexpr, AXIS: tl.constexpr):
    """What lies there, of which d is the place in a head along an axis"""
    return tl.load(at) if d.shape[0] == D else tl.load(at, mask=tl.expand_dims(d < D, 1 - AXIS), other=0.0)


@triton.jit
def add_keys(
    sums, total, largest, q, slot, key_ptr, value_ptr, table, begin, end, scale, cap, window,
    K, P, head, D: tl.constexpr, IS_PARTED: tl.constexpr, CAPS: tl.constexpr,
    S: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the tokens of a tile have summed up, with the keys from begin to end: all see all of them, or some
    see some if they are parted. Four times LANES at once, whose blocks are found one round ahead"""
    d, k = tl.arange(0, DIM), tl.arange(0, 4 * LANES)
    key_ptr += head * S * D
    value_ptr += head * S * D
    lost = 0.0
    blocks = four_blocks(table, begin, end, S, LANES)
    for start in range(begin, end, 4 * LANES):
        lost += lost_of(blocks, P)
        first = starts_of(blocks, k // LANES, K, P, D, S)
        place = start % S + k if S > 4 * LANES else k % S
        blocks = four_blocks(table, start + 4 * LANES, end, S, LANES)
        at = (place // LANES * LANES * D + place % LANES)[None, :] + (d * LANES)[:, None]
        at = (key_ptr + first)[None, :] + at
        at = tl.max_contiguous(tl.multiple_of(at, (1, 2 * LANES)), (1, LANES))
        scores = tl.dot(q, load_part(at, d, D, 0).to(DTYPE), input_precision=PRECISION)
        at = (value_ptr + first)[:, None] + ((place * D)[:, None] + d[None, :])
        if IS_PARTED:
            behind = slot[:, None] - (start + k)[None, :]
            is_seen = (behind >= 0) & ((window <= 0) | (behind < window))
            scores = tl.where(is_seen, capped(scores * scale, cap, CAPS), -float("inf"))
            weights, largest, scaled = weigh(scores, 1.0, largest)
            values = tl.load(at, mask=(d < D)[None, :] & (start + k < end)[:, None], other=0.0).to(DTYPE)
        else:
            if CAPS:
                weights, largest, scaled = weigh(capped(scores * scale, cap, CAPS), 1.0, largest)
            else:
                weights, largest, scaled = weigh(scores, scale, largest)
            values = load_part(at, d, D, 1).to(DTYPE)
        total = total * scaled + tl.sum(weights, 1)
        sums = tl.dot(weights.to(DTYPE), values, sums * scaled[:, None], input_precision=PRECISION)
    return sums + lost, total, largest


@triton.jit
def add_parted_keys(
    sums, total, largest, q, slot, key_ptr, value_ptr, table, begin, end, last, scale, cap, window,
    K, P, head, D: tl.constexpr, CAPS: tl.constexpr,
    S: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys that some see: as others are added, where the tile has room for as many at once"""
    if KEYS == 4 * LANES:
        sums, total, largest = add_keys(
            sums, total, largest, q, slot, key_ptr, value_ptr, table, begin, end,
            scale, cap, window, K, P, head, D, True, CAPS, S, LANES, DIM, DTYPE, PRECISION,
        )  # fmt: skip
    else:
        sums, total, largest = add_spoilt_keys(
            sums, total, largest, q, slot, key_ptr, value_ptr, table, begin, end, last,
            scale, cap, window, K, P, head, D, CAPS, S, LANES, DIM, KEYS, DTYPE, PRECISION,
        )  # fmt: skip
    return sums, total, largest


@triton.jit
def spans_of(slot, is_own, window, KEYS: tl.constexpr, LANES: tl.constexpr):
    """(begin, whole, parted, last) of the keys that some of the own tokens see, of which all see those from
    `whole` to `parted`, which are four times LANES each"""
    seen = tl.where(window > 0, tl.maximum(slot - window + 1, 0), 0)
    last = tl.max(tl.where(is_own, slot, 0), 0)
    begin = tl.min(tl.where(is_own, seen, 1 << 30), 0) // KEYS * KEYS
    whole = tl.cdiv(tl.max(tl.where(is_own, seen, 0), 0), 4 * LANES) * 4 * LANES
    parted = (tl.min(tl.where(is_own, slot, 1 << 30), 0) + 1) // (4 * LANES) * 4 * LANES
    return begin, whole, tl.maximum(parted, whole), last


@triton.jit
def attend_run(
    q, slot, is_own, pools, scale, cap, window, K, P, head, D: tl.constexpr, CAPS: tl.constexpr,
    S: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(sums, sums of weights, largest scores) of the own tokens of a tile, over all keys of their stream

    A value that is no number makes NaN of a sum, as does a block that is not there. Which tokens see it is
    asked only then.
    """
    TOKENS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    begin, whole, parted, last = spans_of(slot, is_own, window, KEYS, LANES)
    largest = tl.full((TOKENS,), -float("inf"), tl.float32)
    total, sums = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS, DIM), tl.float32)
    sums, total, largest = add_parted_keys(
        sums, total, largest, q, slot, *pools, begin, whole, last,
        scale, cap, window, K, P, head, D, CAPS, S, LANES, DIM, KEYS, DTYPE, PRECISION,
    )  # fmt: skip
    sums, total, largest = add_keys(
        sums, total, largest, q, slot, *pools, whole, parted,
        scale, cap, window, K, P, head, D, False, CAPS, S, LANES, DIM, DTYPE, PRECISION,
    )  # fmt: skip
    sums, total, largest = add_parted_keys(
        sums, total, largest, q, slot, *pools, parted, last + 1, last,
        scale, cap, window, K, P, head, D, CAPS, S, LANES, DIM, KEYS, DTYPE, PRECISION,
    )  # fmt: skip
    if KEYS == 4 * LANES:  # noqa: SIM102  this is known when it is compiled
        if tl.max(tl.max((sums != sums).to(tl.int32), 1), 0) > 0:
            largest = tl.full((TOKENS,), -float("inf"), tl.float32)
            total, sums = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS, DIM), tl.float32)
            sums, total, largest = add_spoilt_keys(
                sums, total, largest, q, slot, *pools, begin, last + 1, last,
                scale, cap, window, K, P, head, D, CAPS, S, LANES, DIM, KEYS, DTYPE, PRECISION,
            )  # fmt: skip
    return sums, total, largest


@triton.jit(do_not_specialize=["window", "N", "B", "M", "P", "K"])
def runs_kernel(
    y_ptr, q_ptr, key_ptr, value_ptr, table_ptr, stream_ptr, slot_ptr, sink_ptr,
    q_token_stride, q_head_stride, scale, cap, window, N, B, M, P, K, G, D: tl.constexpr,
    CAPS: tl.constexpr, HAS_SINKS: tl.constexpr,
    S: tl.constexpr, LANES: tl.constexpr, LONG: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One head of a tile of tokens, stream after stream of those that it holds runs of"""
    wait_for_inputs(OVERLAPS)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the last tokens of a prompt take longest
    n, d = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIM)
    todo = in_run(stream_ptr, n, N, LONG)
    is_any = tl.max(todo.to(tl.int32), 0)
    if is_any == 0:
        return
    stream, slot, lost = place_of(stream_ptr, slot_ptr, n, n < N, B, M, S)
    rows = n.to(tl.int64)
    is_value = (n < N)[:, None] & (d < D)[None, :]
    q_at = q_ptr + rows[:, None] * q_token_stride + head * q_head_stride + d[None, :]
    q = tl.load(q_at, mask=is_value, other=0.0).to(DTYPE)
    while is_any > 0:
        current = tl.min(tl.where(todo, stream, 1 << 62), 0)
        is_own = todo & (stream == current)
        pools = key_ptr, value_ptr, table_ptr + current * M
        sums, total, largest = attend_run(
            q, slot, is_own, pools, scale, cap, window, K, P, head // G, D,
            CAPS, S, LANES, KEYS, DTYPE, PRECISION,
        )  # fmt: skip
        total = with_sinks(total, largest, sink_ptr, head, True, HAS_SINKS)
        y = sums / total[:, None] + lost[:, None]
        y_at = y_ptr + (rows * K * G + head)[:, None] * D + d[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_own[:, None] & (d < D)[None, :])
        todo = todo & (stream != current)
        is_any = tl.max(todo.to(tl.int32), 0)


def runs_tile(is_wide: bool, dim: int, device: torch.device) -> tuple[int, int, int, int]:
    """Tokens and keys at once, warps, stages: the fastest on Hopper, smaller where a program may have less"""
    is_small = shared_memory(device) < 200_000
    if is_wide:
        return (16, 32, 4, 1) if is_small and dim > 128 else (32, 32, 4, 2)
    if dim > 128:
        return (32, 32, 4, 2) if is_small else (64, 32, 4, 3)
    return 128, 64, 8, 3 if is_small or dim < 128 else 4


def launch_runs(y: Tensor, seen: Seen, sizes: Sizes) -> None:
    if sizes.scale < 0:
        seen, sizes = seen._replace(q=-seen.q), sizes._replace(scale=-sizes.scale)
    num_tokens, num_heads, size = seen.q.shape
    math_of = arithmetic(seen.q, seen.values)
    dim = padded(size)
    tokens, keys, num_warps, num_stages = runs_tile(math_of["DTYPE"] == tl.float32, dim, y.device)
    runs_kernel[(num_heads, triton.cdiv(num_tokens, tokens))](
        y, *seen, *seen.q.stride()[:2], *sizes,
        CAPS=sizes.cap > 0, HAS_SINKS=seen.sinks is not None,
        S=seen.values.shape[2], LANES=LANES, LONG=LONG, TOKENS=tokens, DIM=dim, KEYS=keys,
        num_warps=num_warps, num_stages=num_stages, **math_of, **overlap(y.device),
    )  # fmt: skip
