"""Contenders timed side by side: alternating rounds, median and spread, never a first call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from infinilm.bench import Measured

REST = 0.02  # seconds between contenders: the threads of the one before spin a while after their work


def race(
    contenders: dict[str, Callable[[], object]], num_rounds: int = 15, budget: float = 0.02
) -> dict[str, Measured]:
    """Seconds a call of each contender, timed for about `budget` seconds a round, in turn, warmed up."""
    num_calls = {name: calls_within(call, budget) for name, call in contenders.items()}
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, call in contenders.items():
            time.sleep(REST)
            call()
            rounds[name].append(seconds_per_call(call, num_calls[name]))
    return {name: Measured(tuple(values)) for name, values in rounds.items()}


def calls_within(call: Callable[[], object], budget: float) -> int:
    seconds_per_call(call, 3)
    return max(1, int(budget / max(seconds_per_call(call, 3), 1e-9)))


def seconds_per_call(call: Callable[[], object], num_calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def rounds_within(most: int, least: int, budget: float) -> Iterator[int]:
    """At least `least` rounds, and further ones up to `most` until `budget` seconds have passed."""
    start = time.perf_counter()
    for i in range(most):
        if i >= least and time.perf_counter() - start > budget:
            return
        yield i
