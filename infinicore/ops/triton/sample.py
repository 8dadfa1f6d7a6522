"""sample: a token of each row, without sorting it.

The largest logit of each part of a row is found first, then sums of weights above a few levels, both by many
programs; from there on a row is one program's. One that wants the largest logit has it. Of another, the cuts
by top_k and top_p and the drawn token are found in the same way, one after the other: sums tell between which
levels it lies, the weights between those are listed, and it is searched for among them by bisection over
their bits, since those of positive floats are ordered as they are. Tokens of equal weight stand by id, and
how many of them are meant follows from a division. The weights of a part that are not very small have been
put together by then, the larger ones first, so that of a row that has few of them few are looked at.

Weights are float32 and sums of many float64: they part from the reference's by about 1e-8 of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.ops.hopper import draw
from infinicore.ops.triton.tensors import (
    FLOATS,
    are_plain,
    fits,
    on_device,
    overlap,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)

# R rows, V vocabulary
PART = 4096  # logits of a row that one program looks at together
WIDTH = 128  # weights of each part that the last program looks at together
SEARCHED = 2048  # weights that are searched together
COUNTED = tl.constexpr(256)  # weights of a part whose levels are found together
LEVELS = tl.constexpr(8)
KEPT = tl.constexpr(6)  # the level of which weights are put together
FIRST = 5  # that of those which come first, where there are few rows: to tell them apart takes time, too
FEW_ROWS = 8
REGISTERS = 64  # of a thread that sums: with more, fewer programs would be there at once
LEAST = tl.constexpr(2.0**-120)  # a smaller weight is none
COLDEST = tl.constexpr(2.0**-126)  # a lower temperature may be 0 where there is a division by it
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


# ---- weights -----------------------------------------------------------------------------------------------


@triton.jit
def top_of(top_ptr, row, num_parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(top_ptr + row * num_parts + part, mask=part < num_parts, other=-float("inf")), 0)


@triton.jit
def kind_of(top, row, uniform_ptr, setting_ptr, top_k_ptr):
    """(whether a token can be drawn from a row, whether it is another than that of the largest logit)"""
    temperature = tl.load(setting_ptr + row * 3)
    is_sound = (temperature >= 0) & (temperature < float("inf")) & (tl.abs(top) < float("inf"))
    is_greedy = (temperature < COLDEST) | (tl.load(top_k_ptr + row) == 1) | (tl.load(uniform_ptr + row) == 0)
    return is_sound, is_sound & (is_greedy == 0)


@triton.jit
def source_of(logit_ptr, V, top, row, logit_stride, setting_ptr):
    """What the weights of a row are made of; the quotient by the temperature is in two halves."""
    scale = LOG2E / tl.load(setting_ptr + row * 3).to(tl.float64)
    high = tl.minimum(scale, LARGEST).to(tl.float32)
    low = tl.where(scale < LARGEST, scale - high, 0.0).to(tl.float32)
    least = tl.maximum(tl.minimum(tl.load(setting_ptr + row * 3 + 2), 1.0), LEAST)
    return logit_ptr + row * logit_stride, V, top, high, low, least


@triton.jit
def weights_of(source, column):
    """exp((logit - the largest) / temperature), 0 below the least"""
    logit_ptr, V, top, high, low, least = source
    x = tl.load(logit_ptr + column, mask=column < V, other=-float("inf")).to(tl.float32) - top
    weight = tl.exp2(tl.fma(x, low, x * high))
    return tl.where(weight >= least, weight, 0.0)


@triton.jit
def floor_of(level):
    """The least weight of a level: 2^-2, -4, -6, -8, -11, -15, -20, and that of all"""
    exponent = tl.where(level < 4, 2 * level + 2, tl.where(level == 4, 11, tl.where(level == 5, 15, 20)))
    exponent = tl.where(level == LEVELS - 1, 120, exponent)
    return ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sums_kernel(
    count_ptr, sum_ptr, part_ptr, top_ptr, logit_ptr, uniform_ptr, setting_ptr, top_k_ptr, logit_stride, V,
    PARTS: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The weights of a part of a row that are kept; and how many reach each level, and their sums"""
    wait_for_inputs(OVERLAPS)
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    top = top_of(top_ptr, row, num_parts, PARTS)
    if kind_of(top, row, uniform_ptr, setting_ptr, top_k_ptr)[1]:
        source = source_of(logit_ptr, V, top, row, logit_stride, setting_ptr)
        # Rows of 8 are a thread's, which so counts by itself most of what is kept.
        place = tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        weight = weights_of(source, part * TILE + place)
        kept_ptr, is_kept = part_ptr + (row * num_parts + part) * TILE, weight >= floor_of(KEPT)
        tl.store(kept_ptr + kept_places(weight, FIRST), weight, mask=is_kept)
        tl.debug_barrier()
        counts, sums = kept_above(kept_ptr, tl.sum(is_kept.to(tl.int32)), LEVELS)
        # The last level has the others too: it is no less than the one before it, whatever is rounded.
        level, others = tl.arange(0, LEVELS), tl.where(is_kept, 0.0, weight)
        counts += tl.where(level == LEVELS - 1, tl.sum((others > 0).to(tl.int32)), 0)
        sums += tl.where(level == LEVELS - 1, tl.sum(others.to(tl.float64)), 0.0)
        at = (row * LEVELS + level) * num_parts + part
        tl.store(count_ptr + at, counts)
        tl.store(sum_ptr + at, sums)


@triton.jit
def kept_above(kept_ptr, num_kept, LEVELS: tl.constexpr):
    """[LEVELS]: of the weights that a part has kept, which are few, how many reach a level, and their sum"""
    floor, place = floor_of(tl.arange(0, LEVELS))[None, :], tl.arange(0, COUNTED)[:, None]
    counts, sums = tl.zeros([COUNTED, LEVELS], tl.int32), tl.zeros([COUNTED, LEVELS], tl.float64)
    for start in range(0, num_kept, COUNTED):
        weight = tl.load(kept_ptr + start + place, mask=start + place < num_kept, other=0.0)
        is_above = weight >= floor
        counts += is_above.to(tl.int32)
        sums += tl.where(is_above, weight, 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(sums, 0)


@triton.jit
def kept_places(weight, FIRST: tl.constexpr):
    """Where the weights that are kept are put: those of the level FIRST, which are counted in the low half of
    a number, before the others, which are counted in the high one"""
    is_kept = weight >= floor_of(KEPT)
    if FIRST == KEPT:
        place = counted(is_kept.to(tl.int32)) - 1
    else:
        is_first = weight >= floor_of(FIRST)
        counts = counted(tl.where(is_first, 1, tl.where(is_kept, 1 << 16, 0)))
        num_first = tl.sum(is_first.to(tl.int32))
        place = tl.where(is_first, counts & 0xFFFF, num_first + (counts >> 16)) - 1
    return place


@triton.jit
def counted(numbers):
    """Their sums up to each, row after row"""
    totals = tl.sum(numbers, 1)
    return tl.cumsum(numbers, 1) + (tl.cumsum(totals, 0) - totals)[:, None]


@triton.jit
def over_parts(table_ptr, row, num_parts, PARTS: tl.constexpr, LEVELS: tl.constexpr):
    """[LEVELS] of a row"""
    level, part = tl.arange(0, LEVELS)[:, None], tl.arange(0, PARTS)[None, :]
    at = (row * LEVELS + level) * num_parts + part
    return tl.sum(tl.load(table_ptr + at, mask=part < num_parts, other=0), 1)


@triton.jit
def at_level(values, index, LEVELS: tl.constexpr):
    """0 at -1"""
    return tl.sum(tl.where(tl.arange(0, LEVELS) == index, values, tl.zeros_like(values)), 0)


# ---- where a cut or a token lies ---------------------------------------------------------------------------


@triton.jit
def kept_down_to(parts, lower):
    """How many of each part's collected weights may be as large as `lower`, and the most of these counts"""
    _, least_first, num_first, num_kept = parts
    counts = tl.where(lower >= least_first, num_first, num_kept)
    return counts, tl.max(counts, 0)


@triton.jit
def kept_at(parts, counts, start, PARTS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """The next collected weights of each part, [PARTS, WIDTH]; 0 where there are no more"""
    part_ptr = parts[0]
    index = start + tl.arange(0, WIDTH)[None, :]
    at = part_ptr + tl.arange(0, PARTS)[:, None] * PART + index
    return tl.load(at, mask=index < counts[:, None], other=0.0)


@triton.jit
def listed(
    source, parts, lower, upper, list_ptr, PARTS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr
):
    """How many weights lie from lower to upper, which are written to the list in any order"""
    tl.debug_barrier()  # others may still read what was listed before
    count = 0
    if lower >= floor_of(KEPT):
        counts, most = kept_down_to(parts, lower)
        for start in range(0, most, WIDTH):
            weight = tl.reshape(kept_at(parts, counts, start, PARTS, PART, WIDTH), [PARTS * WIDTH])
            count += append(list_ptr + count, weight, lower, upper)
    else:
        for start in range(0, source[1], PART):
            weight = weights_of(source, start + tl.arange(0, PART))
            count += append(list_ptr + count, weight, lower, upper)
    tl.debug_barrier()
    return count


@triton.jit
def append(list_ptr, weight, lower, upper):
    is_in = ((weight >= lower) & (weight < upper)).to(tl.int32)
    tl.store(list_ptr + tl.cumsum(is_in, 0) - 1, weight, mask=is_in > 0)
    return tl.sum(is_in, 0)


@triton.jit
def tally(list_ptr, length, key, SEARCHED: tl.constexpr):
    """The count, the sum and the least of those in the list whose bits are at least `key`; and the largest of
    the others"""
    counts = tl.zeros([SEARCHED], tl.int32)
    sums = tl.zeros([SEARCHED], tl.float64)
    least = tl.full([SEARCHED], 0x7FFFFFFF, tl.int32)
    most = tl.zeros([SEARCHED], tl.int32)
    for start in range(0, length, SEARCHED):
        index = start + tl.arange(0, SEARCHED)
        weight = tl.load(list_ptr + index, mask=index < length, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        is_in = bits >= key
        counts += is_in.to(tl.int32)
        sums += tl.where(is_in, weight, 0.0).to(tl.float64)
        least = tl.minimum(least, tl.where(is_in, bits, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(is_in, 0, bits))
    return tl.sum(counts, 0), tl.sum(sums, 0), tl.min(least, 0), tl.max(most, 0)


@triton.jit
def between(low, high, wanted, missed, reached, is_guess):
    """Halfway, or where a straight line from what is missed to what is reached has what is wanted"""
    share = tl.where(is_guess, (wanted - missed) / (reached - missed), 0.5)
    steps = tl.minimum(tl.maximum(share, 0.0), 1.0) * (high - low).to(tl.float64)
    return tl.minimum(tl.maximum(high - steps.to(tl.int32), low + 1), high)


@triton.jit
def find(
    source, parts, counts, sums, wanted, list_ptr, BY_COUNT: tl.constexpr, PASSES: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, SEARCHED: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """(bits, weight) of the largest weight with which all down to it reach what is wanted, or pass it; and
    how many are above it, and their sum"""
    values = counts if BY_COUNT else sums
    is_missed = values <= wanted if PASSES else values < wanted
    level = tl.minimum(tl.sum(is_missed.to(tl.int32), 0), LEVELS - 1)
    upper = tl.where(level > 0, floor_of(tl.maximum(level - 1, 0)), float("inf"))
    above, sum_above = at_level(counts, level - 1, LEVELS), at_level(sums, level - 1, LEVELS)
    length = listed(source, parts, floor_of(level), upper, list_ptr, PARTS, PART, WIDTH)
    low = floor_of(level).to(tl.int32, bitcast=True)
    high = tl.minimum(upper, 1.0).to(tl.int32, bitcast=True)
    missed, reached = at_level(values, level - 1, LEVELS).to(tl.float64), at_level(values, level, LEVELS)
    reached, is_guess = reached.to(tl.float64), True
    while low < high:
        middle = between(low, high, wanted, missed, reached, is_guess)
        count, total, least, most = tally(list_ptr, length, middle, SEARCHED)
        value = (above + count).to(tl.float64) if BY_COUNT else sum_above + total
        is_reached = value > wanted if PASSES else value >= wanted
        low = tl.where(is_reached, tl.maximum(tl.minimum(least, high), middle), low)
        high = tl.where(is_reached, high, tl.maximum(tl.minimum(most, middle - 1), low))
        reached, missed = tl.where(is_reached, value, reached), tl.where(is_reached, missed, value)
        is_guess = is_guess == 0
    count, total, least, most = tally(list_ptr, length, low + 1, SEARCHED)
    key = tl.where(most > 0, most, least)  # where rounding left nothing to reach, there is one all the same
    return key, key.to(tl.float32, bitcast=True).to(tl.float64), above + count, sum_above + total


@triton.jit
def part_with(parts, key, rank, PARTS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """The part that has the weight of these bits before which there are so many of them, or the last; and how
    many are in parts before"""
    num_at = tl.zeros([PARTS], tl.int32)
    counts, most = kept_down_to(parts, key.to(tl.float32, bitcast=True))
    for start in range(0, most, WIDTH):
        bits = kept_at(parts, counts, start, PARTS, PART, WIDTH).to(tl.int32, bitcast=True)
        num_at += tl.sum((bits == key).to(tl.int32), 1)
    before, part = tl.cumsum(num_at, 0) - num_at, tl.arange(0, PARTS)
    found = tl.max(tl.where((num_at > 0) & (before <= rank), part, 0), 0)
    return found, tl.sum(tl.where(part == found, before, 0), 0)


@triton.jit
def token_at(source, parts, key, rank, PARTS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """The token whose weight has these bits, with so many of them before it, or the last"""
    begin, end = 0, source[1]
    if key >= floor_of(KEPT).to(tl.int32, bitcast=True):
        part, before = part_with(parts, key, rank, PARTS, PART, WIDTH)
        begin, end, rank = part * PART, (part + 1) * PART, rank - before
    found, count = -1, 0
    for start in range(begin, end, PART):
        column = start + tl.arange(0, PART)
        is_at = (weights_of(source, column).to(tl.int32, bitcast=True) == key).to(tl.int32)
        is_due = (is_at > 0) & (count + tl.cumsum(is_at, 0) - 1 <= rank)
        found = tl.maximum(found, tl.max(tl.where(is_due, column, -1), 0))
        count += tl.sum(is_at, 0)
    return found


@triton.jit
def drawn(
    source, parts, counts, sums, top_k, top_p, uniform, list_ptr,
    PARTS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, SEARCHED: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """The token that a row's number draws from what top_k and then top_p leave of it"""
    total, kept = at_level(counts, LEVELS - 1, LEVELS), at_level(sums, LEVELS - 1, LEVELS)
    last, num_last = 0, 0x7FFFFFFF  # the bits of the last that are kept, and how many of these
    if (top_k > 0) & (top_k < total):
        last, weight, num_above, above = find(
            source, parts, counts, sums, top_k, list_ptr, True, False, PARTS, PART, WIDTH, SEARCHED, LEVELS
        )
        num_last = top_k.to(tl.int32) - num_above
        kept = above + num_last * weight
    if top_p < 1:
        wanted = top_p * kept
        key, weight, _, above = find(
            source, parts, counts, sums, wanted, list_ptr, False, False, PARTS, PART, WIDTH, SEARCHED, LEVELS
        )
        num_due = tl.maximum(tl.ceil((wanted - above) / weight), 1.0).to(tl.int32)
        num_last = tl.where(key == last, tl.minimum(num_due, num_last), num_due)
        last = key
        kept = above + num_last * weight
    wanted = uniform * kept
    key, weight, _, above = find(
        source, parts, counts, sums, wanted, list_ptr, False, True, PARTS, PART, WIDTH, SEARCHED, LEVELS
    )
    rank = tl.maximum(tl.floor((wanted - above) / weight), 0.0).to(tl.int32)
    rank = tl.where(key > last, rank, tl.minimum(rank, num_last - 1))
    return token_at(source, parts, tl.maximum(key, last), rank, PARTS, PART, WIDTH)


@triton.jit
def sample_kernel(
    token_ptr, top_ptr, first_ptr, count_ptr, sum_ptr, part_ptr, list_ptr, logit_ptr, uniform_ptr,
    setting_ptr, top_k_ptr, logit_stride, V, num_parts, PARTS: tl.constexpr, PART: tl.constexpr,
    WIDTH: tl.constexpr, SEARCHED: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    top = top_of(top_ptr, row, num_parts, PARTS)
    tops = tl.load(top_ptr + row * num_parts + part, mask=part < num_parts, other=-float("inf"))
    firsts = tl.load(first_ptr + row * num_parts + part, mask=part < num_parts, other=V)
    token = tl.min(tl.where(tops == top, firsts, V), 0)
    is_sound, is_drawn = kind_of(top, row, uniform_ptr, setting_ptr, top_k_ptr)
    if is_drawn:
        counted = count_ptr + row * LEVELS * num_parts + part
        num_first = tl.load(counted + FIRST * num_parts, mask=part < num_parts, other=0)
        num_kept = tl.load(counted + KEPT * num_parts, mask=part < num_parts, other=0)
        token = drawn(
            source_of(logit_ptr, V, top, row, logit_stride, setting_ptr),
            (part_ptr + row * num_parts * PART, floor_of(FIRST), num_first, num_kept),
            over_parts(count_ptr, row, num_parts, PARTS, LEVELS),
            over_parts(sum_ptr, row, num_parts, PARTS, LEVELS),
            tl.load(top_k_ptr + row),
            tl.load(setting_ptr + row * 3 + 1).to(tl.float64),
            tl.load(uniform_ptr + row),
            list_ptr + row * V, PARTS, PART, WIDTH, SEARCHED, LEVELS,
        )  # fmt: skip
    tl.store(token_ptr + row, tl.where(is_sound, token, -1).to(tl.int64))


def launch(y: Tensor, logits: Tensor, uniforms: Tensor, settings: Tensor, top_k: Tensor) -> None:
    (num_rows, size), device = logits.shape, logits.device
    num_parts = triton.cdiv(size, PART)
    parts, many = triton.next_power_of_2(num_parts), (num_parts, num_rows)
    tops, firsts = (torch.empty(num_rows, num_parts, dtype=dtype, device=device) for dtype in KINDS[:2])
    table = num_rows, LEVELS.value, num_parts
    counts, sums = (torch.empty(table, dtype=dtype, device=device) for dtype in KINDS[1:])
    kept = torch.empty(num_rows, num_parts, PART, device=device)
    weights = torch.empty(num_rows, size, device=device)
    is_few = num_rows <= FEW_ROWS and not infinicore.deterministic
    first, options = FIRST if is_few else KEPT.value, overlap(device)
    tops_kernel[many](tops, firsts, logits, logits.stride(0), size, TILE=PART, num_warps=4, **options)
    sums_kernel[many](
        counts, sums, kept, tops, logits, uniforms, settings, top_k, logits.stride(0), size,
        PARTS=parts, TILE=PART, LEVELS=LEVELS, FIRST=first, num_warps=8, maxnreg=REGISTERS, **options,
    )  # fmt: skip
    sample_kernel[(num_rows,)](
        y, tops, firsts, counts, sums, kept, weights, logits, uniforms, settings, top_k,
        logits.stride(0), size, num_parts, PARTS=parts, PART=PART, WIDTH=WIDTH, SEARCHED=SEARCHED,
        LEVELS=LEVELS, FIRST=first, num_warps=8, **options,
    )  # fmt: skip


KINDS = (torch.float32, torch.int32, torch.float64)


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
    sent = [on_device(t, logits.device).contiguous() for t in settings]
    y = target(out, torch.empty(len(logits), dtype=torch.int64, device=logits.device), logits, *sent)
    rows = rows_of(logits)
    (draw.launch if draw.suits(rows) else launch)(y, rows, *sent)
    return settled(y, out)
