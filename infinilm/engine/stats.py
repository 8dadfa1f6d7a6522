"""What an engine tells of itself: how much runs and waits, and what has been counted since it began."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# vLLM's bounds, so that its dashboards show what they are made for.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """How many values were at most as large as each of some bounds, or larger than all, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass
class Counts:
    """They only grow. The engine's thread counts; any may read."""

    prompt_tokens: int = 0  # of requests whose first token came
    cached_tokens: int = 0  # of these prompts, found and not computed
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens of prompts that were looked up
    prefix_hits: int = 0  # tokens that were found
    drafts: int = 0  # steps of a stream with guesses
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(kw_only=True)
class Stats(Counts):
    """An engine at one moment: streams that run, requests that wait, blocks that are held, and its counts."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks_used: int
    num_blocks: int


@dataclass(frozen=True)
class Progress:
    """Tokens of a prompt: all, those found in the cache, and those that are done with, found or computed."""

    total: int
    cached: int
    processed: int
