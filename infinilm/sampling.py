"""SamplingParams, and the way from logits to a token: penalty, temperature, min-p, top-k, top-p, the draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from infinicore.nn import functional as F


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
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed + stream)

    def next_token(self, logits: Tensor, token_ids: Tensor) -> int:
        """The token that follows token_ids [T], given the logits [V] of what comes next."""
        logits = apply_repetition_penalty(logits.float(), token_ids, self.params.repetition_penalty)
        if self.params.temperature == 0:
            return int(logits.argmax())
        logits = apply_min_p(logits, self.params.min_p, self.params.temperature)
        random_val = torch.rand((), generator=self.generator, dtype=torch.float64).item()
        top_k, temperature = max(self.params.top_k, 0), self.params.temperature
        return int(F.random_sample(logits, random_val, self.params.top_p, top_k, temperature))


def apply_repetition_penalty(logits: Tensor, token_ids: Tensor, penalty: float) -> Tensor:
    """Make tokens that were seen less likely: positive logits divided by the penalty, negative multiplied."""
    if penalty == 1.0 or token_ids.numel() == 0:
        return logits
    seen = torch.unique(token_ids)
    scores = logits[seen]
    return logits.index_put((seen,), torch.where(scores < 0, scores * penalty, scores / penalty))


def apply_min_p(logits: Tensor, min_p: float, temperature: float) -> Tensor:
    """Drop tokens less likely than min_p times the likeliest one."""
    if min_p == 0.0:
        return logits
    return logits.masked_fill(logits < logits.max() + math.log(min_p) * temperature, -torch.inf)
