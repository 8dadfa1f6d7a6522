"""What an engine tells of itself: how much runs and waits, and what has been counted since it began."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Stats:
    """An engine at one moment: streams that run, requests that wait, blocks that are held; then `Counts`."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks_used: int
    num_blocks: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class Progress:
    """Tokens of a prompt: all, those found in the cache, and those that are done with, found or computed."""

    total: int
    cached: int
    processed: int
