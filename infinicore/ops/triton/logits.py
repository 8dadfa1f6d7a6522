"""adjust_logits and logprobs: what stands around the draw of a token.

A token that is out of range, which a CPU reports, is passed over in a history; as a choice it has no logprob.
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
TILE = 1024
PROGRAMS = 8  # that count the tokens before a row
PART = 2048  # logits of a row whose largest one program finds
MOST_FOUND = 1 << 14  # largest logits of all parts of a row, of which the largest are taken
NONE = tl.constexpr(-(2**63))


# ---- adjust_logits -----------------------------------------------------------------------------------------


@triton.jit
def count_kernel(
    count_ptr, history_ptr, end_ptr, length, V, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """Counts for each token before a row: 1 if it is of the prompt, and 2 for each time it was drawn since"""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    begin = tl.load(end_ptr + 2 * row - 1, mask=row > 0, other=0)
    prompt_end, end = tl.load(end_ptr + 2 * row), tl.load(end_ptr + 2 * row + 1)
    begin, end = tl.maximum(begin, 0), tl.minimum(end, length)
    for start in range(begin + tl.program_id(0) * TILE, end, tl.num_programs(0) * TILE):
        at = start + tl.arange(0, TILE)
        token = tl.load(history_ptr + at, mask=at < end, other=-1)
        is_there = (token >= 0) & (token < V)
        of_prompt = is_there & (at < prompt_end)
        tl.atomic_or(count_ptr + row * V + token, 1, mask=of_prompt, sem="relaxed")
        tl.atomic_add(count_ptr + row * V + token, 2, mask=is_there & (at >= prompt_end), sem="relaxed")


@triton.jit
def adjust_kernel(
    y_ptr, logit_ptr, count_ptr, penalty_ptr, allowed_ptr, logit_stride, penalty_stride, allowed_stride, V,
    HAS_HISTORY: tl.constexpr, HAS_MASK: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    column, row = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1).to(tl.int64)
    is_in = column < V
    y = tl.load(logit_ptr + row * logit_stride + column, mask=is_in, other=0.0).to(tl.float32)
    if HAS_HISTORY:
        repetition = tl.load(penalty_ptr + row * penalty_stride)
        presence = tl.load(penalty_ptr + row * penalty_stride + 1)
        frequency = tl.load(penalty_ptr + row * penalty_stride + 2)
        seen = tl.load(count_ptr + row * V + column, mask=is_in, other=0)
        count = seen >> 1
        scaled = tl.where(y < 0, y * repetition, tl.div_rn(y, tl.zeros_like(y) + repetition))
        y = tl.where(seen > 0, scaled, y)
        # The product is rounded before it is added, as it is on a CPU.
        each = (frequency.to(tl.float64) * count.to(tl.float64)).to(tl.float32)
        y = tl.where(count > 0, y - (presence + each), y)
    if HAS_MASK:
        word = tl.load(allowed_ptr + row * allowed_stride + column // 32, mask=is_in, other=0)
        y = tl.where(((word >> (column % 32)) & 1) > 0, y, -float("inf"))
    tl.store(y_ptr + row * V + column, y, mask=is_in)


def accepts_adjust_logits(
    out: Any, logits: Tensor, history: Tensor, ends: Tensor, penalties: Tensor, allowed: Tensor | None
) -> bool:
    device, (num_rows, size) = logits.device, logits.shape if logits.dim() == 2 else (0, 0)
    return (
        are_plain(device, FLOATS, logits)
        and num_rows * size > 0
        and are_plain(device, (torch.int64,), history, ends)
        and are_plain(device, (torch.float32,), penalties)
        and history.dim() == 1
        and ends.shape == (num_rows, 2)
        and penalties.shape == (num_rows, 3)
        and (allowed is None or are_mask(allowed, num_rows, size, device))
        and fits(out, logits.shape, torch.float32, device)
    )


def are_mask(allowed: Tensor, num_rows: int, size: int, device: torch.device) -> bool:
    return are_plain(device, (torch.int32,), allowed) and allowed.shape == (num_rows, triton.cdiv(size, 32))


def counted(logits: Tensor, history: Tensor, ends: Tensor) -> Tensor:
    """How often each token stands before each row [R, V]"""
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    count_kernel[(PROGRAMS, len(logits))](
        counts, history.contiguous(), ends.contiguous(), len(history), logits.shape[1],
        TILE=TILE, num_warps=4, **overlap(logits.device),
    )  # fmt: skip
    return counts


def adjust_logits(
    out: Tensor | None, logits: Tensor, history: Tensor, ends: Tensor, penalties: Tensor, allowed: Any
) -> Tensor:
    like = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    y = target(out, like, penalties, *(() if allowed is None else (allowed,)), rows=(logits,))
    rows, penalties = rows_of(logits), penalties.contiguous()
    mask = None if allowed is None else rows_of(allowed)
    counts = counted(rows, history, ends) if len(history) else None
    adjust_kernel[(triton.cdiv(rows.shape[1], TILE), len(rows))](
        y, rows, counts, penalties, mask, rows.stride(0), penalties.stride(0),
        0 if mask is None else mask.stride(0), rows.shape[1],
        HAS_HISTORY=counts is not None, HAS_MASK=mask is not None, TILE=TILE, num_warps=4,
        **overlap(logits.device),
    )  # fmt: skip
    return settled(y, out)


# ---- logprobs ----------------------------------------------------------------------------------------------


@triton.jit
def key_of(x, column):
    """Numbers that are ordered as logits are, equal ones by falling id"""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return ordered * 4294967296 + (0x7FFFFFFF - column)


@triton.jit
def logit_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def part_kernel(
    key_ptr, part_ptr, logit_ptr, token_ptr, logit_stride, V, num_top,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The num_top largest logits of a part of a row, how many are above the token's, the largest, and the sum
    of weights by that, which is NaN where a logit is none"""
    wait_for_inputs(OVERLAPS)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = part * TILE + tl.arange(0, TILE)
    logit_ptr += row * logit_stride
    x = tl.load(logit_ptr + column, mask=column < V, other=-float("inf")).to(tl.float32)
    x = tl.where(x == 0, 0.0, x)  # -0 is equal to 0
    token = tl.load(token_ptr + row)
    is_there = (token >= 0) & (token < V)
    chosen = tl.load(logit_ptr + tl.where(is_there, token, 0)).to(tl.float32)
    top = tl.max(x, 0)
    weight = tl.where(x == -float("inf"), 0.0, tl.exp(x - top))
    at = row * tl.num_programs(0) + part
    tl.store(part_ptr + 3 * at, tl.sum((x > chosen).to(tl.float64), 0))
    tl.store(part_ptr + 3 * at + 1, top.to(tl.float64))
    tl.store(part_ptr + 3 * at + 2, tl.sum(weight.to(tl.float64), 0))
    keys = tl.where(column < V, key_of(x, column), NONE)
    for i in range(num_top):
        key = tl.max(keys, 0)
        tl.store(key_ptr + at * num_top + i, key)
        keys = tl.where(keys == key, NONE, keys)


@triton.jit
def whole_kernel(
    id_ptr, value_ptr, key_ptr, part_ptr, logit_ptr, token_ptr, logit_stride, V, num_parts, num_top,
    PARTS: tl.constexpr, KEYS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A row's parts put together"""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    is_part, at = part < num_parts, part_ptr + 3 * (row * num_parts + part)
    tops = tl.load(at + 1, mask=is_part, other=-float("inf"))
    top = tl.max(tops, 0)
    sums = tl.load(at + 2, mask=is_part, other=0.0)
    total = tl.sum(tl.where(tops == -float("inf"), sums, sums * tl.exp(tops - top)), 0)
    is_sound = (total > 0) & (top < float("inf"))
    base = top + tl.log(total)
    token = tl.load(token_ptr + row)
    is_there = is_sound & (token >= 0) & (token < V)
    chosen = tl.load(logit_ptr + row * logit_stride + token, mask=is_there, other=0.0).to(tl.float64)
    rank = 1 + tl.sum(tl.load(at, mask=is_part, other=0.0), 0).to(tl.int64)
    id_ptr += row * (1 + num_top)
    value_ptr += row * (1 + num_top)
    tl.store(id_ptr, tl.where(is_there, rank, -1))
    tl.store(value_ptr, tl.where(is_there, chosen - base, float("nan")).to(tl.float32))
    place = tl.arange(0, KEYS)
    keys = tl.load(key_ptr + row * num_parts * num_top + place, mask=place < num_parts * num_top, other=NONE)
    for i in range(num_top):
        key = tl.max(keys, 0)
        value = logit_of(key).to(tl.float64) - base
        tl.store(id_ptr + 1 + i, tl.where(is_sound, 0x7FFFFFFF - (key & 0xFFFFFFFF), -1))
        tl.store(value_ptr + 1 + i, tl.where(is_sound, value, float("nan")).to(tl.float32))
        keys = tl.where(keys == key, NONE, keys)


def accepts_logprobs(out: Any, logits: Tensor, tokens: Tensor, num_top: int) -> bool:
    if not (are_plain(logits.device, FLOATS, logits) and logits.dim() == 2 and logits.numel() > 0):
        return False
    (num_rows, size), device, shape = logits.shape, logits.device, (len(logits), 1 + num_top)
    return (
        are_plain(device, (torch.int64,), tokens)
        and tokens.shape == (num_rows,)
        and 0 <= num_top <= size
        and triton.cdiv(size, PART) * num_top <= MOST_FOUND
        and (
            out is None
            or (fits(out[0], shape, torch.int64, device) and fits(out[1], shape, torch.float32, device))
        )
    )


def logprobs(
    out: tuple[Tensor, Tensor] | None, logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor]:
    rows, tokens, device = rows_of(logits), tokens.contiguous(), logits.device
    (num_rows, size), num_parts = rows.shape, triton.cdiv(rows.shape[1], PART)
    keys = torch.empty(num_rows, num_parts, num_top, dtype=torch.int64, device=device)
    parts = torch.empty(num_rows, num_parts, 3, dtype=torch.float64, device=device)
    ids = torch.empty(num_rows, 1 + num_top, dtype=torch.int64, device=device)
    values = torch.empty(ids.shape, dtype=torch.float32, device=device)
    part_kernel[(num_parts, num_rows)](
        keys, parts, rows, tokens, rows.stride(0), size, num_top, TILE=PART, num_warps=4, **overlap(device)
    )
    whole_kernel[(num_rows,)](
        ids, values, keys, parts, rows, tokens, rows.stride(0), size, num_parts, num_top,
        PARTS=triton.next_power_of_2(num_parts), KEYS=triton.next_power_of_2(max(num_parts * num_top, 1)),
        num_warps=4, **overlap(device),
    )  # fmt: skip
    return (ids, values) if out is None else (out[0].copy_(ids), out[1].copy_(values))
