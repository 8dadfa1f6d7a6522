"""Contenders timed side by side: alternating rounds, median and spread, never a first call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

REST = 0.02  # seconds between contenders: the threads of the one before spin a while after their work


@dataclass(frozen=True)
class Timing:
    """Seconds a call, over rounds."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        low, _, high = statistics.quantiles(self.rounds, n=4)
        return (high - low) / 2 / self.median


def race(
    contenders: dict[str, Callable[[], object]], num_rounds: int = 15, budget: float = 0.02
) -> dict[str, Timing]:
    """Time each contender for about `budget` seconds a round, in turn, after a warm-up."""
    num_calls = {name: calls_within(call, budget) for name, call in contenders.items()}
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, call in contenders.items():
            time.sleep(REST)
            call()
            rounds[name].append(seconds_per_call(call, num_calls[name]))
    return {name: Timing(tuple(values)) for name, values in rounds.items()}


def calls_within(call: Callable[[], object], budget: float) -> int:
    seconds_per_call(call, 3)
    return max(1, int(budget / max(seconds_per_call(call, 3), 1e-9)))


def seconds_per_call(call: Callable[[], object], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls
