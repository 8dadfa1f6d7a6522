"""Mixtures of experts: which of them a token is given to, and what they make of it.

The reference of the experts calls other ops by name, an expert at a time, so on a device that has no kernel
for all of them each product finds the one that it would have found alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infinicore.ops.quantized_reference import Weight, product
from infinicore.ops.reference import swiglu, wide
from infinicore.ops.registry import op
from infinicore.ops.samples import (
    HALF_PRODUCT,
    PRODUCT,
    Samples,
    not_finite,
    not_finite_samples,
    random,
    random_blocks,
)
from infinicore.ops.sampling_reference import check_ids
from infinicore.quantization import BlockType, QuantizedTensor

# N tokens, X experts, k of them chosen, E hidden size, I intermediate size
MOST_PAIRS = 128  # of a token and an expert that a GPU has one kernel for
SCORINGS = ("softmax", "sigmoid")
LEAST_TOTAL = 1e-20  # so that scores that are all zero stay so


def route_samples(dtype: torch.dtype) -> Samples:
    plain = "softmax", None, (1, 1)
    for num_tokens, num_experts, num_chosen in ((1, 128, 8), (7, 5, 5), (3, 33, 2), (300, 64, 6), (0, 8, 2)):
        for normalizes in (False, True):
            yield random(num_tokens, num_experts, dtype=dtype), num_chosen, normalizes, *plain
    yield random(4, 9, dtype=dtype).round(), 6, False, *plain  # of which many are equal
    for (logits,) in not_finite_samples(dtype):
        for normalizes in (False, True):
            yield logits, 3, normalizes, *plain
    for scoring in SCORINGS:
        yield from other_route_samples(dtype, scoring)


def other_route_samples(dtype: torch.dtype, scoring: str) -> Samples:
    """By other scores, with a bias, in groups"""
    for num_tokens, num_experts, num_chosen, groups in (
        (7, 64, 6, (8, 3)),
        (2, 5, 3, (1, 1)),
        (0, 8, 2, (2, 1)),
    ):
        logits, bias = random(num_tokens, num_experts, dtype=dtype), random(num_experts, dtype=torch.float32)
        for normalizes in (False, True):
            for added in (None, bias):
                yield logits, num_chosen, normalizes, scoring, added, groups
    equal = random(4, 12, dtype=dtype).round()
    yield equal, 6, True, scoring, torch.ones(12), (4, 2)
    for (logits,) in not_finite_samples(dtype):
        num_groups = 3 if logits.shape[1] == 18 else 1
        bias = random(logits.shape[1], dtype=torch.float32)
        yield logits, 3, True, scoring, bias, (num_groups, 1)


@op(route_samples)
def route(  # noqa: PLR0913  all that families of models do differently
    logits: Tensor,
    num_chosen: int,
    normalizes: bool,
    scoring: str,
    bias: Tensor | None,
    groups: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """The experts that are worth most in falling order, the first of equals first, and their shares.

    logits [N, X] -> int32 [N, k], float32 [N, k]. Shares are the scores of the chosen, "softmax" or "sigmoid"
    of the logits; normalised they add up to 1. A bias [X] is added to scores for choosing alone. Of `groups`,
    the first number of them being equally many experts in a row, the second is kept: those whose two best add
    up to most. NaN counts as the largest; it makes NaN of its own share and of all that it is added up with.
    """
    x = logits.float()
    worth = x
    # Unless something is added up, the order of the logits is that of the scores, and tells more apart.
    if bias is not None or groups[0] > 1:
        scores = torch.softmax(x, -1) if scoring == "softmax" else torch.sigmoid(x)
        worth = within_best_groups(scores if bias is None else scores + bias, *groups)
    ids = falling(worth)[1][:, :num_chosen]
    return ids.int(), shares_of(x, ids, normalizes, scoring)


def falling(values: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sort(values, dim=-1, descending=True, stable=True)


def within_best_groups(worth: Tensor, num_groups: int, num_kept: int) -> Tensor:
    """Minus infinity in the place of those that are in other groups"""
    groups = worth.view(len(worth), num_groups, worth.shape[1] // num_groups)
    sums = falling(groups)[0][..., :2].sum(-1)
    is_left_out = torch.ones_like(sums, dtype=torch.bool).scatter(1, falling(sums)[1][:, :num_kept], False)
    return groups.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(1)


def shares_of(logits: Tensor, ids: Tensor, normalizes: bool, scoring: str) -> Tensor:
    """Of softmax those that are normalised are the softmax of the chosen alone."""
    chosen = logits.gather(1, ids)
    if scoring == "softmax":
        return torch.softmax(chosen, -1) if normalizes else torch.softmax(logits, -1).gather(1, ids)
    scores = torch.sigmoid(chosen)
    return scores / (scores.sum(-1, keepdim=True) + LEAST_TOTAL) if normalizes else scores


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), gate at most 7 and up from -7 to 7: GPT-OSS's"""
    g, u = wide(gate).clamp(max=7), wide(up).clamp(-7, 7)
    return (g * torch.sigmoid(1.702 * g) * (u + 1)).to(gate.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": swiglu, "swiglu_oai": swiglu_oai}


def choice(num_tokens: int, num_chosen: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Other experts for each token, the first of them for none, and shares"""
    order = random(num_tokens, num_experts, dtype=torch.float32).argsort(1)
    ids = order[:, :num_chosen].int()
    return ids.clamp(min=min(1, num_experts - 1)), random(num_tokens, num_chosen, dtype=torch.float32)


def expert_samples(dtype: torch.dtype) -> Samples:
    sizes = ((1, 2, 4, 32, 48), (7, 3, 5, 33, 17), (2, 1, 1, 64, 32), (40, 4, 8, 64, 96), (0, 2, 4, 32, 48))
    for rows in dict.fromkeys((torch.float32, dtype)):
        for num_tokens, num_chosen, num_experts, hidden, inner in sizes:
            gate = random(num_experts * inner, hidden, dtype=dtype, scale=hidden**-0.5)
            down = random(num_experts * hidden, inner, dtype=dtype, scale=inner**-0.5)
            biases = [random(len(weight), dtype=rows) for weight in (gate, gate, down)]
            x, chosen = random(num_tokens, hidden, dtype=rows), choice(num_tokens, num_chosen, num_experts)
            yield x, *chosen, (gate, gate.flip(0), down), (None, None, None), "silu"
            yield x, *chosen, (gate, gate.flip(0), down), tuple(biases), "swiglu_oai"
        x = not_finite(hidden, rows)
        yield x, *choice(len(x), 2, num_experts), (gate, gate.flip(0), down), (None, None, None), "silu"
    if dtype == torch.float32:
        yield from quantized_expert_samples()


def quantized_expert_samples() -> Samples:
    types = (BlockType.Q4_0, BlockType.Q8_0, BlockType.Q4_K, BlockType.Q6_K, BlockType.Q5_1, BlockType.MXFP4)
    for type in types:
        hidden, inner = 256, 512
        gate = random_blocks(type, 4 * inner, hidden // type.elements_per_block)
        down = random_blocks(type, 4 * hidden, inner // type.elements_per_block)
        up = gate.rows(torch.arange(4 * inner).flip(0))
        for num_tokens in (1, 3, 40):
            x = random(num_tokens, hidden, dtype=torch.float32, scale=0.02)
            ids, shares = choice(num_tokens, 2, 4)
            chosen = ids, shares / 128  # so that results are of the size that tolerances are for
            yield x, *chosen, (gate, up, down), (None, None, None), "silu"
            bits = 8 + 4 * (num_tokens % 3)
            packed = (gate.pack(bits), up.pack(bits), down.pack(16))
            yield x, *chosen, packed, (random(4 * inner, dtype=torch.float32), None, None), "silu"
    yield x, *chosen, (gate.pack(8), up.pack(16), down), (None, None, None), "swiglu_oai"
    yield x, *chosen, (gate, up.dequantize(torch.bfloat16), down.pack(12)), (None, None, None), "silu"


@op(expert_samples, PRODUCT | HALF_PRODUCT)
def experts(  # noqa: PLR0913  what a mixture is made of
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    activation: str,
) -> Tensor:
    """The sum, over the experts of each token, of what they make of it times their share.

    x [N, E], ids and shares [N, k] -> [N, E]. The weights are those of gate and up, [X I, E], and of down,
    [X E, I], the rows of an expert after those of the one before it; biases, if any, are [X I] and [X E].
    """
    num_experts, pairs = weights[2].shape[0] // x.shape[1], ids.flatten().long()
    order = pairs.argsort(stable=True)
    rows = x[order // ids.shape[1]]
    products = [rows[:0]]
    # What is no expert is counted before the first or after the last one: a device is waited for once.
    places = pairs.clamp(-1, num_experts) + 1
    below, *counts, beyond = places.bincount(minlength=num_experts + 2).tolist()
    if below or beyond:
        check_ids("experts: id", pairs, 0, num_experts)
    for expert, given in enumerate(torch.split(rows, counts)):
        if len(given) > 0:
            products.append(one_expert(given, expert, num_experts, weights, biases, activation))
    y = torch.cat(products)[order.argsort()].view(*ids.shape, x.shape[1])
    return (wide(y) * shares.unsqueeze(-1)).sum(1).to(x.dtype)


def one_expert(  # noqa: PLR0913  those of all, and which
    x: Tensor,
    expert: int,
    num_experts: int,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    activation: str,
) -> Tensor:
    gate, up, down = (part_of(weight, expert, num_experts) for weight in weights)
    gate_bias, up_bias, down_bias = (bias_of(bias, expert, num_experts) for bias in biases)
    states = ACTIVATIONS[activation](product(x, gate, gate_bias), product(x, up, up_bias))
    return product(states, down, down_bias)


def part_of(weight: Weight, expert: int, num_experts: int) -> Weight:
    num_rows = weight.shape[0] // num_experts
    begin, end = expert * num_rows, (expert + 1) * num_rows
    return weight.part(begin, end) if isinstance(weight, QuantizedTensor) else weight[begin:end]


def bias_of(bias: Tensor | None, expert: int, num_experts: int) -> Tensor | None:
    return None if bias is None else bias.view(num_experts, -1)[expert]
