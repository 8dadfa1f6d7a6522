"""SamplingParams, and the way from logits to a token: penalty, temperature, min-p, top-k, top-p, the draw."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from infinicore import ops


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 (or -1) keeps all."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_range("max_tokens", self.max_tokens, 1, 1 << 31)
        check_range("temperature", self.temperature, 0.0, 1e6)
        check_range("top_k", self.top_k, -1, 1 << 31)
        check_range("top_p", self.top_p, 0.0, 1.0)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        if self.seed is not None:
            check_range("seed", self.seed, 0, (1 << 63) - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, but is {self.ignore_eos!r}")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise ValueError(f"stop_token_ids must be a tuple of token ids, but is {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids:
            check_range("a stop token id", token_id, 0, 1 << 31)


def check_range(name: str, value: float, low: float, high: float) -> None:
    kind = int if isinstance(low, int) else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise ValueError(
            f"{name} must be {'whole and ' if kind is int else ''}from {low} to {high}, but is {value!r}"
        )


class Sampler:
    """Draws the tokens of one stream. Its random numbers depend on the seed alone, not on other streams."""

    def __init__(self, params: SamplingParams, stream: int = 0) -> None:
        self.params = params
        self.largest = Largest()
        generator = torch.Generator()
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed + stream)
        self.random_numbers = random_numbers(generator)

    def next_token(self, logits: Tensor, token_ids: Tensor) -> int:
        """The token that follows token_ids [T], given the float32 logits [V] of what comes next."""
        params = self.params
        logits = apply_repetition_penalty(logits, token_ids, params.repetition_penalty)
        if params.temperature == 0:
            return self.largest(logits)
        logits = apply_min_p(logits, params.min_p, params.temperature)
        # The op itself rather than F.random_sample: the parameters have been checked.
        options = (params.top_p, max(params.top_k, 0), params.temperature)
        return int(ops.random_sample(logits, next(self.random_numbers), *options))


class Largest:
    """Where the largest logit [V] is, the first of equal ones.

    A recorded step writes to the same logits each time, so the call on them is prepared once; its result is
    read from plain memory. Next to a step's weights, which leave nothing else in the CPU's caches, each call
    into torch would take longer than the search.
    """

    def __init__(self) -> None:
        self.found = array("q", [0])
        self.logits: Tensor | None = None

    def __call__(self, logits: Tensor) -> int:
        if logits is not self.logits:
            out = torch.frombuffer(self.found, dtype=torch.int64)[0]
            self.search = ops.random_sample.resolve(logits, 0.0, 1.0, 0, 0.0, out=out)
            self.logits = logits
        self.search()
        return self.found[0]


def random_numbers(generator: torch.Generator) -> Iterator[float]:
    """Numbers from 0 to 1, drawn many at a time: the same as one by one, and cheaper."""
    while True:
        yield from torch.rand(64, generator=generator, dtype=torch.float64).tolist()


def apply_repetition_penalty(logits: Tensor, token_ids: Tensor, penalty: float) -> Tensor:
    """Make tokens that were seen less likely: positive logits divided by the penalty, negative multiplied."""
    if penalty == 1.0 or token_ids.numel() == 0:
        return logits
    scores = logits[token_ids]  # a token seen twice is written twice, with the same value
    return logits.index_put((token_ids,), torch.where(scores < 0, scores * penalty, scores / penalty))


def apply_min_p(logits: Tensor, min_p: float, temperature: float) -> Tensor:
    """Drop tokens less likely than min_p times the likeliest one."""
    if min_p == 0.0:
        return logits
    return logits.masked_fill(logits < logits.max() + math.log(min_p) * temperature, -torch.inf)
