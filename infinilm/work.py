"""Work: tokens of streams that a step computes, and what comes of each: tokens drawn, logprobs, states"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinilm.batch import Stream
from infinilm.draw import Ranked, Row, draw, needs_adjusting, ranked

NOWHERE = range(0)


class Work:
    """The next num_tokens of a stream, which are to be computed, from where it is now.

    After the last known token one is drawn, and one after each guess.
    """

    __slots__ = ("block_ids", "num_drawn", "num_tokens", "start", "stream")

    def __init__(self, stream: Stream, num_tokens: int) -> None:
        self.stream = stream
        self.num_tokens = num_tokens
        self.start = stream.num_computed
        self.block_ids = stream.block_ids
        self.num_drawn = 1 + len(stream.drafts) if num_tokens == stream.num_pending else 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def prompt_positions(self) -> range:
        """Positions of the prompt whose logprobs are wanted and follow a token of this work"""
        stream = self.stream
        if stream.params.prompt_logprobs is None:
            return NOWHERE
        return range(self.start + 1, min(self.end + 1, stream.num_prompt))

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the token that is drawn is wanted of it, by nothing but the stream's settings.

        The stream may then go on before that token is known here.
        """
        stream = self.stream
        wants_more = stream.params.logprobs is not None or stream.wants_state or stream.drafts
        return not (wants_more or self.prompt_positions or needs_adjusting(stream))


@dataclass
class Drawn:
    """What came of some work: tokens (-1 where the logits were no numbers) and, if wanted, logprobs, or the
    state [E] that the first of them was drawn from."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Ranked]] = field(default_factory=list)
    prompt_logprobs: list[list[Ranked]] = field(default_factory=list)
    state: Tensor | None = None


def num_tokens_of(work: Sequence[Work]) -> int:
    return sum(item.num_tokens for item in work)


def drawn_rows(work: Sequence[Work]) -> list[Row]:
    return [
        Row(item.stream, len(item.stream) + item.stream.num_unread + i)
        for item in work
        for i in range(item.num_drawn)
    ]


def tokens_alone(work: Sequence[Work], tokens: Sequence[int]) -> list[Drawn]:
    """What came of work of which nothing else is wanted"""
    drawn = iter(tokens)
    return [Drawn([next(drawn)] if item.num_drawn else []) for item in work]


def collected(
    work: Sequence[Work],
    states: Tensor,
    logits: Tensor,
    rows: Sequence[Row],
    tokens: list[int] | None = None,
) -> list[Drawn]:
    """What came of each item of the work. The tokens of a replay are drawn already, but that does not count
    where a stream has something to say about its logits."""
    results = [Drawn() for _ in work]
    note_states(work, states, results)
    logits = without_prompts(work, logits, results)
    if not rows:
        return results
    streams = [row.stream for row in rows]
    if tokens is None or any(map(needs_adjusting, streams)):
        tokens = draw(logits, rows).tolist()
    logprobs = chosen_logprobs(logits, streams, tokens)
    at = 0
    for item, result in zip(work, results, strict=True):
        own = slice(at, at := at + item.num_drawn)
        result.token_ids, result.logprobs = tokens[own], logprobs[own]
    return results


def note_states(work: Sequence[Work], states: Tensor, results: list[Drawn]) -> None:
    """Copies, in float32: the next replay writes over the states."""
    if not any(item.stream.wants_state for item in work):
        return
    end = 0
    for item, result in zip(work, results, strict=True):
        end += len(item.prompt_positions) + item.num_drawn
        if item.num_drawn and item.stream.wants_state:
            result.state = states[end - 1].to("cpu", torch.float32, copy=True)


def without_prompts(work: Sequence[Work], logits: Tensor, results: list[Drawn]) -> Tensor:
    """The logits that tokens are drawn from; those of prompts go into the results."""
    if not any(item.prompt_positions for item in work):
        return logits
    kept, at = [], 0
    for item, result in zip(work, results, strict=True):
        stream, positions = item.stream, item.prompt_positions
        own, at = logits[at : at + len(positions)], at + len(positions)
        if positions:
            wanted = stream.token_ids[positions.start : positions.stop].tolist()
            result.prompt_logprobs = ranked(own, wanted, stream.params.prompt_logprobs or 0)
        kept.append(logits[at : at + item.num_drawn])
        at += item.num_drawn
    return torch.cat(kept)


def chosen_logprobs(logits: Tensor, streams: Sequence[Stream], tokens: list[int]) -> list[list[Ranked]]:
    """The drawn token of each row and the likeliest ones, as far as its stream asks for them"""
    found: list[list[Ranked]] = [[] for _ in streams]
    wanted = [i for i, s in enumerate(streams) if s.params.logprobs is not None and tokens[i] >= 0]
    if wanted:
        num_top = max(streams[i].params.logprobs or 0 for i in wanted)
        for i, best in zip(wanted, ranked(logits[wanted], [tokens[i] for i in wanted], num_top), strict=True):
            found[i] = best[: 1 + (streams[i].params.logprobs or 0)]
    return found
