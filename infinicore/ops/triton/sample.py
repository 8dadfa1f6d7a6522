"""sample: a token of each row, without sorting it.

The largest logit of each part of a row is found first, by many programs. Then a row is one program's. One
that wants the largest has it. Of another, sums of weights above four levels tell between which of them the
cuts by top_k and top_p and the drawn token lie; what is there is listed, and each of the three searched for
by bisection over the bits of weights, since those of positive floats are ordered as they are. Tokens of equal
weight stand by id, and how many of them are meant follows from a division.

Weights are float32 and sums of many float64: they part from the reference's by about 1e-8 of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import (
    FLOATS,
    are_plain,
    fits,
    overlap,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)

# R rows, V vocabulary
PART = 4096  # logits whose largest one program finds
TILE = 4096  # logits of a row that are looked at together
SHORT = 1024  # candidates that are looked at together
MOST_LISTED = 8192  # candidates that are listed; where there are more, the whole row is searched

LEAST = tl.constexpr(2.0**-120)  # a smaller weight is none
LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.0e38)


@triton.jit
def tops_kernel(
    top_ptr, first_ptr, logit_ptr, logit_stride, V, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """The largest logit of a part of a row, and where it stands first; +inf where one is NaN"""
    wait_for_inputs(OVERLAPS)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = part * TILE + tl.arange(0, TILE)
    x = tl.load(logit_ptr + row * logit_stride + column, mask=column < V, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    at = row * tl.num_programs(0) + part
    tl.store(top_ptr + at, top)
    tl.store(first_ptr + at, tl.min(tl.where((x == top) & (column < V), column, V), 0))


@triton.jit
def weights_of(row, column):
    """exp((logit - the largest) / temperature), 0 below the least, by the quotient in two halves"""
    logit_ptr, V, top, high, low, least = row
    x = tl.load(logit_ptr + column, mask=column < V, other=-float("inf")).to(tl.float32) - top
    weight = tl.exp2(tl.fma(x, low, x * high))
    return tl.where(weight >= least, weight, 0.0)


@triton.jit
def sums_above(row, floor, TILE: tl.constexpr):
    """How many weights reach each of the four levels, and their sums

    Each of many lanes adds up few weights in float32.
    """
    first, second, third = at_level(floor, 0), at_level(floor, 1), at_level(floor, 2)
    nothing, zero = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    count_0, count_1, count_2, count_3 = nothing, nothing, nothing, nothing
    sum_0, sum_1, sum_2, sum_3 = zero, zero, zero, zero
    for start in range(0, row[1], TILE):
        weight = weights_of(row, start + tl.arange(0, TILE))
        count_0 += (weight >= first).to(tl.int32)
        count_1 += (weight >= second).to(tl.int32)
        count_2 += (weight >= third).to(tl.int32)
        count_3 += (weight > 0).to(tl.int32)
        sum_0 += tl.where(weight >= first, weight, 0.0)
        sum_1 += tl.where(weight >= second, weight, 0.0)
        sum_2 += tl.where(weight >= third, weight, 0.0)
        sum_3 += weight
    counts = levels(tl.sum(count_0, 0), tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0))
    return counts, levels(exact_sum(sum_0), exact_sum(sum_1), exact_sum(sum_2), exact_sum(sum_3))


@triton.jit
def exact_sum(values):
    return tl.sum(values.to(tl.float64), 0)


@triton.jit
def levels(a, b, c, d):
    index = tl.arange(0, 4)
    return tl.where(index == 0, a, tl.where(index == 1, b, tl.where(index == 2, c, d)))


@triton.jit
def at_level(values, index):
    """0 at -1"""
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, tl.zeros_like(values)), 0)


@triton.jit
def list_candidates(row, bounds, weight_ptr, id_ptr, TILE: tl.constexpr):
    """Weights within the bounds and their tokens, in the order of these"""
    V = row[1]
    count = 0
    for start in range(0, V, TILE):
        column = start + tl.arange(0, TILE)
        weight = weights_of(row, column)
        is_in = ((weight >= bounds[0]) & (weight < bounds[1])).to(tl.int32)
        place = count + tl.cumsum(is_in, 0) - 1
        tl.store(weight_ptr + place, weight, mask=is_in > 0)
        tl.store(id_ptr + place, column, mask=is_in > 0)
        count += tl.sum(is_in, 0)


@triton.jit
def candidates_at(row, bounds, listed, index):
    """Weights within the bounds, 0 where there is none: of the list, or of the row itself"""
    weight_ptr, _, count, is_listed = listed
    if is_listed:
        weight = tl.load(weight_ptr + index, mask=index < count, other=0.0)
    else:
        weight = weights_of(row, index)
        weight = tl.where((weight >= bounds[0]) & (weight < bounds[1]), weight, 0.0)
    return weight


@triton.jit
def tally(row, bounds, listed, key, SHORT: tl.constexpr):
    """Of candidates whose bits are at least `key`: how many, their sum and the least; and the largest below

    What stands above the bounds counts too.
    """
    counts = tl.zeros([SHORT], tl.int32)
    sums = tl.zeros([SHORT], tl.float64)
    least = tl.full([SHORT], 0x7FFFFFFF, tl.int32)
    most = tl.zeros([SHORT], tl.int32)
    for start in range(0, tl.where(listed[3], listed[2], row[1]), SHORT):
        weight = candidates_at(row, bounds, listed, start + tl.arange(0, SHORT))
        bits = weight.to(tl.int32, bitcast=True)
        is_in = bits >= key
        counts += is_in.to(tl.int32)
        sums += tl.where(is_in, weight, 0.0).to(tl.float64)
        least = tl.minimum(least, tl.where(is_in, bits, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(is_in, 0, bits))
    return bounds[2] + tl.sum(counts, 0), bounds[3] + tl.sum(sums, 0), tl.min(least, 0), tl.max(most, 0)


@triton.jit
def search(row, bounds, listed, wanted, BY_COUNT: tl.constexpr, PASSES: tl.constexpr, SHORT: tl.constexpr):
    """(bits, weight) of the largest candidate with which all down to it reach what is wanted, or pass it;
    and how many stand above it, and their sum"""
    low = bounds[0].to(tl.int32, bitcast=True)
    high = tl.minimum(bounds[1], 1.0).to(tl.int32, bitcast=True)
    while low < high:
        middle = low + (high - low + 1) // 2
        count, total, least, most = tally(row, bounds, listed, middle, SHORT)
        if BY_COUNT:
            is_reached = count >= wanted
        elif PASSES:
            is_reached = total > wanted
        else:
            is_reached = total >= wanted
        low = tl.where(is_reached, tl.maximum(tl.minimum(least, high), middle), low)
        high = tl.where(is_reached, high, tl.maximum(tl.minimum(most, middle - 1), low))
    count, total, least, most = tally(row, bounds, listed, low + 1, SHORT)
    key = tl.where(most > 0, most, least)  # where rounding left nothing to reach, there is one all the same
    return key, key.to(tl.float32, bitcast=True).to(tl.float64), count, total


@triton.jit
def token_at(row, bounds, listed, key, rank, SHORT: tl.constexpr):
    """The candidate of these bits that has so many of them before it, or the last"""
    found, count = -1, 0
    for start in range(0, tl.where(listed[3], listed[2], row[1]), SHORT):
        index = start + tl.arange(0, SHORT)
        weight = candidates_at(row, bounds, listed, index)
        is_at = (weight.to(tl.int32, bitcast=True) == key).to(tl.int32)
        is_due = (is_at > 0) & (count + tl.cumsum(is_at, 0) - 1 <= rank)
        found = tl.maximum(found, tl.max(tl.where(is_due, index, -1), 0))
        count += tl.sum(is_at, 0)
    return tl.load(listed[1] + found, mask=listed[3], other=found)


@triton.jit
def bounded(counts, sums, floor, top_k, top_p, uniform):
    """Between which weights the cuts and the drawn token lie, with how many are above and their sum; and how
    many are between"""
    total = at_level(counts, 3)
    by_k = tl.sum((counts < top_k).to(tl.int32), 0)
    kept = at_level(sums, by_k)
    least_kept = tl.where(top_k < total, at_level(sums, by_k - 1), kept)
    by_p = tl.minimum(tl.sum((sums < top_p * kept).to(tl.int32), 0), by_k)
    if top_p < 1:
        kept, least_kept = at_level(sums, by_p), top_p * least_kept
    last = tl.where(top_p < 1, by_p, by_k)
    lower = tl.minimum(tl.sum((sums <= uniform * kept).to(tl.int32), 0), last)
    upper = tl.minimum(tl.sum((sums <= uniform * least_kept).to(tl.int32), 0), lower)
    if top_p < 1:
        lower, upper = tl.maximum(lower, by_p), tl.minimum(upper, by_p)
    if top_k < total:
        lower, upper = tl.maximum(lower, by_k), tl.minimum(upper, by_k)
    above = at_level(counts, upper - 1)
    ceiling = tl.where(upper > 0, at_level(floor, upper - 1), float("inf"))
    bounds = (at_level(floor, lower), ceiling, above, at_level(sums, upper - 1))
    return bounds, at_level(counts, lower) - above


@triton.jit
def drawn(
    row, top_k, top_p, uniform, weight_ptr, id_ptr,
    TILE: tl.constexpr, SHORT: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The token that a row's number draws from what top_k and then top_p leave of it"""
    floor = levels(2.0**-2, 2.0**-6, 2.0**-12, LEAST)
    counts, sums = sums_above(row, floor, TILE)
    total = at_level(counts, 3)
    top_k = tl.where((top_k > 0) & (top_k < total), top_k, total).to(tl.int32)
    bounds, count = bounded(counts, sums, floor, top_k, top_p, uniform)
    is_listed = count <= LISTED
    if is_listed:
        list_candidates(row, bounds, weight_ptr, id_ptr, TILE)
        tl.debug_barrier()
    listed = (weight_ptr, id_ptr, count, is_listed)
    kept = at_level(sums, 3)
    last, num_last = 0, 0x7FFFFFFF  # the bits of the last that are kept, and how many of these
    if top_k < total:
        last, weight, num_above, above = search(row, bounds, listed, top_k, True, False, SHORT)
        num_last = top_k - num_above
        kept = above + num_last * weight
    if top_p < 1:
        key, weight, _, above = search(row, bounds, listed, top_p * kept, False, False, SHORT)
        num_due = tl.maximum(tl.ceil((top_p * kept - above) / weight), 1.0).to(tl.int32)
        num_last = tl.where(key == last, tl.minimum(num_due, num_last), num_due)
        last = key
        kept = above + num_last * weight
    key, weight, _, above = search(row, bounds, listed, uniform * kept, False, True, SHORT)
    rank = tl.maximum(tl.floor((uniform * kept - above) / weight), 0.0).to(tl.int32)
    rank = tl.where(key > last, rank, tl.minimum(rank, num_last - 1))
    return token_at(row, bounds, listed, tl.maximum(key, last), rank, SHORT)


@triton.jit
def sample_kernel(
    token_ptr, top_ptr, first_ptr, weight_ptr, id_ptr, logit_ptr, uniform_ptr, setting_ptr, top_k_ptr,
    logit_stride, setting_stride, V, num_parts, PARTS: tl.constexpr,
    TILE: tl.constexpr, SHORT: tl.constexpr, LISTED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    index = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = index * num_parts + part
    tops = tl.load(top_ptr + at, mask=part < num_parts, other=-float("inf"))
    top = tl.max(tops, 0)
    firsts = tl.load(first_ptr + at, mask=part < num_parts, other=V)
    token = tl.min(tl.where(tops == top, firsts, V), 0)
    temperature = tl.load(setting_ptr + index * setting_stride)
    top_p = tl.load(setting_ptr + index * setting_stride + 1).to(tl.float64)
    min_p = tl.load(setting_ptr + index * setting_stride + 2)
    uniform, top_k = tl.load(uniform_ptr + index), tl.load(top_k_ptr + index)
    is_sound = (temperature >= 0) & (temperature < float("inf")) & (tl.abs(top) < float("inf"))
    is_greedy = (temperature == 0) | (top_k == 1) | (uniform == 0)
    if is_sound & (is_greedy == 0):
        scale = LOG2E / temperature.to(tl.float64)
        high = tl.minimum(scale, LARGEST).to(tl.float32)
        low = tl.where(scale < LARGEST, scale - high, 0.0).to(tl.float32)
        least = tl.maximum(tl.minimum(min_p, 1.0), LEAST)
        row = (logit_ptr + index * logit_stride, V, top, high, low, least)
        listed_at = index * LISTED
        token = drawn(
            row, top_k, top_p, uniform, weight_ptr + listed_at, id_ptr + listed_at,
            TILE, SHORT, LISTED,
        )  # fmt: skip
    tl.store(token_ptr + index, tl.where(is_sound, token, -1).to(tl.int64))


def launch(y: Tensor, logits: Tensor, uniforms: Tensor, settings: Tensor, top_k: Tensor) -> None:
    (num_rows, size), num_parts = logits.shape, triton.cdiv(logits.shape[1], PART)
    tops, firsts = (torch.empty(num_rows, num_parts, dtype=dtype, device=logits.device) for dtype in KINDS)
    weights, ids = (torch.empty(num_rows, MOST_LISTED, dtype=dtype, device=logits.device) for dtype in KINDS)
    tops_kernel[(num_parts, num_rows)](
        tops, firsts, logits, logits.stride(0), size, TILE=PART, num_warps=4, **overlap(logits.device)
    )
    sample_kernel[(num_rows,)](
        y, tops, firsts, weights, ids, logits, uniforms, settings, top_k,
        logits.stride(0), settings.stride(0), size, num_parts, PARTS=triton.next_power_of_2(num_parts),
        TILE=TILE, SHORT=SHORT, LISTED=MOST_LISTED, num_warps=16,
        **overlap(logits.device),
    )  # fmt: skip


KINDS = (torch.float32, torch.int32)


def accepts_sample(out: Any, logits: Tensor, uniforms: Tensor, settings: Tensor, top_k: Tensor) -> bool:
    device = logits.device
    return (
        are_plain(device, FLOATS, logits)
        and logits.dim() == 2
        and logits.numel() > 0
        and are_plain(uniforms.device, (torch.float64,), uniforms)
        and are_plain(settings.device, (torch.float32,), settings)
        and are_plain(top_k.device, (torch.int64,), top_k)
        and all(t.device in (device, torch.device("cpu")) for t in (uniforms, settings, top_k))
        and uniforms.shape == top_k.shape == logits.shape[:1]
        and settings.shape == (len(logits), 3)
        and fits(out, logits.shape[:1], torch.int64, device)
    )


def sample(out: Tensor | None, logits: Tensor, *settings: Tensor) -> Tensor:
    """What stands beside the logits may be on the CPU, from where it is sent without waiting."""
    sent = [t.to(logits.device, non_blocking=True).contiguous() for t in settings]
    y = target(out, torch.empty(len(logits), dtype=torch.int64, device=logits.device), logits, *sent)
    launch(y, rows_of(logits), *sent)
    return settled(y, out)
