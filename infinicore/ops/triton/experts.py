"""route, and experts of dense weights for few tokens: each pair of a token and a slot reads its own expert.

More tokens, and other weights, are the reference's, product by product; but where a token is to have the same
bits in any company, dense ones are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import infinicore
from infinicore.ops.experts_reference import LEAST_TOTAL, MOST_PAIRS, SCORINGS
from infinicore.ops.triton.tensors import (
    FLOATS,
    INDICES,
    LARGEST_TILE,
    are_plain,
    fits,
    overlap,
    settled,
    target,
    wait_for_inputs,
)

# N tokens, X experts, k slots of a token, E hidden size, I intermediate size
ROWS, COLUMNS, WARPS = 4, 1024, 4  # of a weight at a time, and for them


@triton.jit
def in_order(x, place, SIZE: tl.constexpr):
    """Integers in the order of floats, NaN above all, that tell equals apart: the first is the largest"""
    bits = tl.where(x != x, 0x7FFFFFFF, (x + 0.0).to(tl.int32, bitcast=True))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * (1 << 32) + (SIZE - place)


@triton.jit
def within_best_groups(
    worth, expert, X, GROUPS: tl.constexpr, KEPT: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Minus infinity for all but the groups whose two best add up to most"""
    group, of_expert = tl.arange(0, ROOM), expert // (X // GROUPS)
    sums = tl.full([ROOM], -float("inf"), tl.float32)
    for g in range(GROUPS):
        order = tl.where(of_expert == g, in_order(worth, expert, SIZE), -(1 << 63))
        is_best = order == tl.max(order, 0)
        best = tl.sum(tl.where(is_best, worth, 0.0), 0)
        order = tl.where(is_best, -(1 << 63), order)
        sums = tl.where(group == g, best + tl.sum(tl.where(order == tl.max(order, 0), worth, 0.0), 0), sums)
    order = tl.where(group < GROUPS, in_order(sums, group, ROOM), -(1 << 63))
    is_kept = expert < 0
    for _ in range(KEPT):
        is_best = order == tl.max(order, 0)
        is_kept = is_kept | (of_expert == tl.sum(tl.where(is_best, group, 0), 0))
        order = tl.where(is_best, -(1 << 63), order)
    return tl.where(is_kept, worth, -float("inf"))


@triton.jit
def route_kernel(
    ids_ptr, shares_ptr, logits_ptr, bias_ptr, stride, X,
    CHOSEN: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    ROOM: tl.constexpr, NORMALIZES: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    LEAST_TOTAL: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The CHOSEN experts of a row that are worth most, and the scores of their logits"""
    wait_for_inputs(OVERLAPS)
    token, expert, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE), tl.arange(0, SLOTS)
    x = tl.load(logits_ptr + token * stride + expert, mask=expert < X, other=-float("inf")).to(tl.float32)
    largest = in_order(x, expert, SIZE)
    top = tl.sum(tl.where(largest == tl.max(largest, 0), x, 0.0), 0)
    worth = x
    if HAS_BIAS or GROUPS > 1:
        worth = 1 / (1 + tl.exp(-x)) if SIGMOID else tl.exp(x - top) / tl.sum(tl.exp(x - top), 0)
        if HAS_BIAS:
            worth += tl.load(bias_ptr + expert, mask=expert < X, other=0.0)
        worth = within_best_groups(worth, expert, X, GROUPS, KEPT, ROOM, SIZE)
    order = tl.where(expert < X, in_order(worth, expert, SIZE), -(1 << 63))
    ids, chosen = tl.zeros([SLOTS], tl.int32), tl.full([SLOTS], -float("inf"), tl.float32)
    for i in tl.static_range(CHOSEN):
        is_best = order == tl.max(order, 0)
        ids = tl.where(slot == i, tl.sum(tl.where(is_best, expert, 0), 0), ids)
        chosen = tl.where(slot == i, tl.sum(tl.where(is_best, x, 0.0), 0), chosen)
        order = tl.where(is_best, -(1 << 63), order)
    if SIGMOID:
        shares = 1 / (1 + tl.exp(-chosen))
        total = tl.sum(tl.where(slot < CHOSEN, shares, 0.0), 0) + LEAST_TOTAL if NORMALIZES else 1.0
    else:
        if NORMALIZES:
            largest = in_order(chosen, slot, SLOTS)
            top = tl.sum(tl.where(largest == tl.max(largest, 0), chosen, 0.0), 0)
        shares = tl.exp(chosen - top)
        total = tl.sum(tl.where(slot < CHOSEN, shares, 0.0), 0) if NORMALIZES else tl.sum(tl.exp(x - top), 0)
    tl.store(ids_ptr + token * CHOSEN + slot, ids, mask=slot < CHOSEN)
    tl.store(shares_ptr + token * CHOSEN + slot, shares / total, mask=slot < CHOSEN)


@triton.jit
def products(
    x_ptr, weight_ptr, bias_ptr, stride, first, row, N, K, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """x times some rows of an expert's weight, which begin with `first`, and their bias"""
    column = tl.arange(0, COLUMNS)
    place = weight_ptr + (first + row).to(tl.int64)[:, None] * stride
    sums = tl.zeros([row.shape[0], COLUMNS], tl.float32)
    for start in range(0, K, COLUMNS):
        is_in = start + column < K
        x = tl.load(x_ptr + start + column, mask=is_in, other=0.0).to(tl.float32)
        mask = (row < N)[:, None] & is_in[None, :]
        weight = tl.load(place + (start + column)[None, :], mask=mask, other=0.0)
        sums += weight.to(tl.float32) * x[None, :]
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + first + row, mask=row < N, other=0.0).to(tl.float32)
    return y


@triton.jit
def gate_kernel(
    h_ptr, x_ptr, ids_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, x_stride, gate_stride, up_stride,
    X, INNER, E, CHOSEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr,
    CLAMPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """h[pair] = gated(gate(x), up(x)) of the pair's expert"""
    wait_for_inputs(OVERLAPS)
    pair, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    is_there = (expert >= 0) & (expert < X)
    first = tl.where(is_there, expert, 0) * INNER
    x_row = x_ptr + (pair // CHOSEN).to(tl.int64) * x_stride
    T = h_ptr.dtype.element_ty
    g = products(x_row, gate_ptr, gate_bias_ptr, gate_stride, first, row, INNER, E, HAS_BIAS, COLUMNS)
    u = products(x_row, up_ptr, up_bias_ptr, up_stride, first, row, INNER, E, HAS_UP_BIAS, COLUMNS)
    g, u = g.to(T).to(tl.float32), u.to(T).to(tl.float32)
    if CLAMPS:
        g = tl.where(g > 7.0, 7.0, g)
        u = tl.where(u > 7.0, 7.0, tl.where(u < -7.0, -7.0, u))
        h = g / (1 + tl.exp(-1.702 * g)) * (u + 1.0)
    else:
        h = g / (1 + tl.exp(-g)) * u
    h = tl.where(is_there, h, float("nan"))
    tl.store(h_ptr + pair.to(tl.int64) * INNER + row, h.to(T), mask=row < INNER)


@triton.jit
def down_kernel(
    y_ptr, h_ptr, ids_ptr, shares_ptr, down_ptr, bias_ptr, shares_stride, down_stride,
    X, INNER, E, CHOSEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y[token] = the sum over its slots, from first to last, of share * down(h)"""
    wait_for_inputs(OVERLAPS)
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    T = y_ptr.dtype.element_ty
    total = tl.zeros([ROWS], tl.float32)
    for slot in range(CHOSEN):
        pair = token * CHOSEN + slot
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        first = tl.where((expert >= 0) & (expert < X), expert, 0) * E
        y = products(
            h_ptr + pair * INNER, down_ptr, bias_ptr, down_stride, first, row, E, INNER, HAS_BIAS, COLUMNS
        )
        total += tl.load(shares_ptr + token * shares_stride + slot) * y.to(T).to(tl.float32)
    tl.store(y_ptr + token * E + row, total.to(T), mask=row < E)


def accepts_route(  # noqa: PLR0913  as the op has them
    out: Any,
    logits: Tensor,
    num_chosen: int,
    normalizes: bool,
    scoring: str,
    bias: Tensor | None,
    groups: tuple[int, int],
) -> bool:
    return (
        out is None
        and are_plain(logits.device, FLOATS, logits)
        and logits.dim() == 2
        and logits.stride(1) == 1
        and logits.shape[1] <= LARGEST_TILE
        and len(logits) > 0
        and scoring in SCORINGS
        and have_enough(num_chosen, logits.shape[1], groups)
        and (bias is None or is_vector(bias, logits))
    )


def have_enough(num_chosen: int, num_experts: int, groups: tuple[int, int]) -> bool:
    num_groups, num_kept = groups
    if not 1 <= num_kept <= num_groups or num_experts % num_groups:
        return False
    size = num_experts // num_groups
    return (num_groups == 1 or size >= 2) and 1 <= num_chosen <= num_kept * size


def is_vector(bias: Tensor, logits: Tensor) -> bool:
    is_plain = are_plain(logits.device, (torch.float32,), bias) and bias.is_contiguous()
    return is_plain and tuple(bias.shape) == (logits.shape[1],)


def route(  # noqa: PLR0913
    out: None,
    logits: Tensor,
    num_chosen: int,
    normalizes: bool,
    scoring: str,
    bias: Tensor | None,
    groups: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    route_kernel[(num_tokens,)](
        ids, shares, logits, bias, logits.stride(0), num_experts, CHOSEN=num_chosen,
        SLOTS=triton.next_power_of_2(num_chosen), SIZE=triton.next_power_of_2(num_experts),
        GROUPS=groups[0], KEPT=groups[1], ROOM=triton.next_power_of_2(groups[0]), NORMALIZES=normalizes,
        SIGMOID=scoring == "sigmoid", HAS_BIAS=bias is not None, LEAST_TOTAL=LEAST_TOTAL, num_warps=1,
        **overlap(logits.device),
    )  # fmt: skip
    return ids, shares


def accepts_experts(  # noqa: PLR0913  as the op has them
    out: Any,
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weights: Sequence[Any],
    biases: Sequence[Tensor | None],
    activation: str,
) -> bool:
    given = [bias for bias in biases if bias is not None]
    return (
        are_plain(x.device, FLOATS, x)
        and are_plain(x.device, (x.dtype,), *weights, *given)
        and are_plain(x.device, INDICES, ids)
        and are_plain(x.device, (torch.float32,), shares)
        and ids.numel() > 0
        and (ids.numel() <= MOST_PAIRS or infinicore.deterministic)
        and all(t.dim() == 2 and t.stride(1) == 1 for t in (x, shares, *weights))
        and all(bias.is_contiguous() for bias in given)
        and x.shape[1] == weights[0].shape[1]
        and fits(out, x.shape, x.dtype, x.device)
    )


def columns_of(weight: Tensor) -> int:
    return min(COLUMNS, int(triton.next_power_of_2(weight.shape[1])))


def experts(  # noqa: PLR0913
    out: Tensor | None,
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
) -> Tensor:
    (num_tokens, hidden), inner, ids = x.shape, weights[2].shape[1], ids.contiguous()
    gate, up, down = weights
    sizes = len(down) // hidden, inner, hidden
    tile = {"CHOSEN": ids.shape[1], "ROWS": ROWS, "num_warps": WARPS, **overlap(x.device)}
    h = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    gate_kernel[(ids.numel(), triton.cdiv(inner, ROWS))](
        h, x, ids, gate, up, biases[0], biases[1], x.stride(0), gate.stride(0), up.stride(0), *sizes,
        HAS_BIAS=biases[0] is not None, HAS_UP_BIAS=biases[1] is not None,
        CLAMPS=activation == "swiglu_oai", COLUMNS=columns_of(gate), **tile,
    )  # fmt: skip
    y = target(out, x, ids, shares, *weights)
    down_kernel[(num_tokens, triton.cdiv(hidden, ROWS))](
        y, h, ids, shares, down, biases[2], shares.stride(0), down.stride(0), *sizes,
        HAS_BIAS=biases[2] is not None, COLUMNS=columns_of(down), **tile,
    )  # fmt: skip
    return settled(y, out)
