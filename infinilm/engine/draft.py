"""Guesses of the tokens that follow a stream, for the model to confirm several in one step.

They change nothing but time: a confirmed token is the very one that the model would have drawn, since a row's
logits do not depend on its neighbours and its random number not on when it is drawn.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infinilm.batch import Stream
from infinilm.draw import needs_adjusting
from infinilm.engine.request import Completion
from infinilm.engine.scheduler import Scheduler
from infinilm.runner import Runner
from infinilm.values import check_one_of, check_whole
from infinilm.work import Work

LONGEST_REST = 64  # steps without guesses, for streams whose guesses come to nothing


@dataclass(frozen=True)
class SpeculativeConfig:
    """method "ngram": what followed the last tokens when they last occurred; or a model that guesses."""

    num_speculative_tokens: int
    method: str | None = None
    model: str | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        check_whole("num_speculative_tokens", self.num_speculative_tokens, 1, 32)
        check_whole("prompt_lookup_max", self.prompt_lookup_max, 1, 32)
        check_whole("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        method = self.method or ("draft_model" if self.model else "ngram")
        check_one_of("method", method, ("ngram", "draft_model"))
        if (method == "ngram") != (self.model is None):
            raise ValueError(
                f"speculative_config: method {method!r} and model {self.model!r} do not go together"
            )
        object.__setattr__(self, "method", method)

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> SpeculativeConfig | None:
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config must be a mapping, but is {given!r}")
        known = cls.__dataclass_fields__
        if unknown := [key for key in given if key not in known]:
            raise ValueError(f"speculative_config does not know {unknown}; it has {', '.join(known)}")
        if "num_speculative_tokens" not in given:
            raise ValueError("speculative_config needs num_speculative_tokens")
        return cls(**given)


def may_guess(stream: Completion) -> bool:
    """Where tokens depend on more than the ones before (a grammar, penalties), guesses would need as much."""
    if stream.rest > 0:
        stream.rest -= 1
        return False
    return not needs_adjusting(stream)


def note_guesses(stream: Completion, num_guessed: int, num_right: int) -> None:
    """A stream that guesses right guesses more the next time; one that guesses in vain fewer, and rests for a
    while, longer each time."""
    if num_right == num_guessed:
        stream.most_guesses *= 2
    elif num_right == 0:
        stream.most_guesses = max(stream.most_guesses // 2, 1)
    stream.last_rest = 0 if num_right else min(max(1, 2 * stream.last_rest), LONGEST_REST)
    stream.rest = stream.last_rest


@dataclass(eq=False)
class NgramDrafter:
    config: SpeculativeConfig
    scheduler: Scheduler

    def guess(self) -> None:
        for stream in self.scheduler.answering():
            if may_guess(stream):
                stream.drafts = self.following(stream.token_ids)[: room_of(stream, self.config)]

    def following(self, token_ids: array[int]) -> list[int]:
        """What came after the last tokens, as many of them as possible, where they last stood before"""
        for length in range(self.config.prompt_lookup_max, self.config.prompt_lookup_min - 1, -1):
            if len(token_ids) > length and (end := last_end(token_ids, length)) is not None:
                return token_ids[end : end + self.config.num_speculative_tokens].tolist()
        return []


def last_end(token_ids: array[int], length: int) -> int | None:
    """Where the last `length` tokens end when they occur for the last time before"""
    size = token_ids.itemsize
    data, end = token_ids.tobytes(), (len(token_ids) - 1) * size
    wanted = data[-length * size :]
    while (found := data.rfind(wanted, 0, end)) >= 0:
        if found % size == 0:
            return found // size + length
        end = found + len(wanted) - 1
    return None


def room_of(stream: Completion, config: SpeculativeConfig) -> int:
    """How many guesses can still be of use"""
    stream.most_guesses = min(stream.most_guesses, config.num_speculative_tokens)
    return max(min(stream.most_guesses, stream.max_tokens - stream.num_drawn - 1), 0)


@dataclass(eq=False)
class ModelDrafter:
    """A small model of the same vocabulary. Its keys lie in blocks of the same numbers, in its own cache.

    Where a stream was found in the cache of the large model, that of the small one may lack a token: then its
    guesses are worse, and nothing else.
    """

    config: SpeculativeConfig
    scheduler: Scheduler
    runner: Runner
    shadows: dict[Completion, Stream] = field(default_factory=dict)

    def guess(self) -> None:
        self.shadows = {stream: self.shadow(stream) for stream in self.scheduler.answering()}
        guessing = {
            stream: shadow
            for stream, shadow in self.shadows.items()
            if self.catch_up(shadow) and may_guess(stream)
        }
        for _ in range(self.config.num_speculative_tokens):
            due = {
                stream: shadow
                for stream, shadow in guessing.items()
                if shadow.num_pending
                and len(shadow) - len(stream) < room_of(stream, self.config)
                and self.scheduler.take_blocks(stream, len(shadow))
            }
            if due:
                self.advance(list(due.values()))
        for stream, shadow in guessing.items():
            stream.drafts = shadow.token_ids[len(stream) :].tolist()

    def shadow(self, stream: Completion) -> Stream:
        """The stream as the small model sees it: what it has computed, as far as that was confirmed"""
        known = self.shadows.get(stream)
        if known is None or known.block_ids is not stream.block_ids:
            params = replace(stream.params, logprobs=None, prompt_logprobs=None)
            known = Stream((), params, stream.seed, stream.index)
            known.num_prompt, known.num_whole = stream.num_prompt, stream.num_whole
            known.block_ids, known.num_computed = stream.block_ids, stream.num_found
        known.token_ids = stream.token_ids[:]
        known.num_computed = min(known.num_computed, len(stream) - 1)
        return known

    def catch_up(self, shadow: Stream) -> bool:
        """Compute the prompt in parts, one each step; whether it is done but for the last tokens."""
        if shadow.num_pending > self.scheduler.max_num_batched_tokens:
            self.runner.run([Work(shadow, self.scheduler.max_num_batched_tokens)])
            shadow.num_computed += self.scheduler.max_num_batched_tokens
            return False
        return True

    def advance(self, shadows: Sequence[Stream]) -> None:
        work = [Work(shadow, shadow.num_pending) for shadow in shadows]
        for item, drawn in zip(work, self.runner.run(work), strict=True):
            item.stream.num_computed += item.num_tokens
            if drawn.token_ids[0] >= 0:
                item.stream.token_ids.append(drawn.token_ids[0])
