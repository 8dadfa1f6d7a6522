"""What goes into the engine and what comes out: requests, their outputs, and the errors of both sides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor

from infinilm.adapters import Adapter
from infinilm.batch import Stream
from infinilm.draw import Ranked
from infinilm.engine.blocks import Chain
from infinilm.engine.text import Text
from infinilm.sampling import SamplingParams
from infinilm.tokenizer import ChatPrompt


class RequestError(ValueError):
    """A user's mistake; nothing else is one. The field is what it is about, where that is not the prompt."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(RuntimeError):
    """More waits than the engine lets in; later there may be room."""


class NumericalError(ArithmeticError):
    """The model's logits are NaN or infinite, so that no token can be drawn."""


class Aborted(RuntimeError):
    """The request was ended by `abort`, so that there is nothing to return."""


class EngineDead(RuntimeError):
    """The engine has stopped; `__cause__` says why."""


@dataclass(frozen=True)
class Logprob:
    """How likely a token is at a place, by the model's own logits: before penalties, temperature, masks"""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]


@dataclass
class RequestMetrics:
    """Seconds of time.monotonic()."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt. finish_reason is "stop", "length" or "abort" once it has ended."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and what followed it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    # Where the cache does not know all of the prompt: the position of the first token that differs from the
    # recent prompt of the same salt that begins most like it, if there is one that shares a block.
    prefix_miss: int | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """A text as a vector: the state of its last token after the model's last norm, of length one unless the
    model's files have it otherwise."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class ScoringOutput:
    """How well a document answers a query: from 0 to 1, unless a reranker's files ask for logits"""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """A prompt of a query and a document, and its score."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True
    num_cached_tokens: int = 0


class Completion(Stream):
    """A stream of the engine: one of the n that a request asks for."""

    def __init__(self, request: Request, index: int) -> None:
        super().__init__(request.prompt_token_ids, request.params, request.seed, index)
        self._request = ref(request)  # which holds its streams, and is freed with its last user
        self.text = request.new_text()
        self.max_tokens = request.max_tokens
        self.stop_ids = request.stop_ids
        self.bad_words = request.bad_words
        self.adapter = request.adapter
        self.salt = b""  # who has another does not find its blocks
        self.chain: Chain | None = None
        self.num_found = 0  # tokens that the cache knew when it began
        self.rest = self.last_rest = 0  # steps without guesses: to come, and when guesses last failed
        self.most_guesses = 2  # at the next step that has some
        self.state: Tensor | None = None  # [E], where it is wanted and has been computed
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def request(self) -> Request:
        """What it is one of; gone, like those who wanted it, once the stream has ended"""
        if (found := self._request()) is None:
            raise ReferenceError("the request of this stream is gone")
        return found

    @property
    def order(self) -> tuple[int, int, int]:
        """Lowest goes first: by priority, then by arrival"""
        return self.request.priority, self.request.serial, self.index

    def append(self, token_id: int, ranked: list[Ranked]) -> None:
        """One more token, and what its end, if it is one, was."""
        self.token_ids.append(token_id)
        if ranked:
            self.cumulative_logprob += ranked[0].logprob
            self.logprobs.append(self.request.named(ranked))
        if token_id in self.stop_ids and self.num_drawn >= self.params.min_tokens:
            self.text.add(token_id, is_shown=self.params.include_stop_str_in_output)
            self.finish("stop", None if token_id in self.request.eos_ids else token_id)
            return
        if self.matcher is not None:
            self.matcher.accept(token_id)
        self.text.add(token_id)
        if self.text.stop is not None:
            self.finish("stop", self.text.stop)
        elif self.matcher is not None and self.matcher.is_finished:
            self.finish("stop")
        elif self.num_drawn >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.text.finish()

    def output(self) -> CompletionOutput:
        has_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            self.index,
            self.text.text,
            self.token_ids[self.num_prompt :].tolist(),
            self.cumulative_logprob if has_logprobs else None,
            list(self.logprobs) if has_logprobs else None,
            self.finish_reason,
            self.stop_reason,
        )


@dataclass
class Request:
    """A prompt and how to continue it; everything in it has been checked."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    tokenizer: Any
    serial: int
    seed: int
    max_tokens: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    bad_words: Sequence[Sequence[int]] = ()
    priority: int = 0
    cache_salt: str = ""
    adapter: Adapter | None = None
    num_cached_tokens: int = 0
    prefix_miss: int | None = None
    error: BaseException | None = None
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics(time.monotonic())
        self.completions = [Completion(self, index) for index in range(self.params.n)]

    @property
    def is_finished(self) -> bool:
        return self.error is not None or all(c.finish_reason is not None for c in self.completions)

    def new_text(self) -> Text:
        """For what follows, which is a text of its own after a conversation or a special token"""
        ids, wanted = self.prompt_token_ids, self.params.structured_outputs
        is_start = isinstance(ids, ChatPrompt) or ids[-1] in self.tokenizer.special_token_ids
        # A choice or a match begins with a space only if that is asked for; a grammar may be of free text.
        is_exact = wanted is not None and wanted.grammar is None
        return Text(self.tokenizer, self.params, is_start and not is_exact)

    def note_prompt_logprobs(self, positions: range, found: Sequence[list[Ranked]]) -> None:
        """Keep those of new positions: some are computed again, and by others of the n."""
        for position, ranked in zip(positions, found, strict=False):
            if position == len(self.prompt_logprobs):
                self.prompt_logprobs.append(self.named(ranked))

    def named(self, ranked: list[Ranked]) -> Logprobs:
        return {
            token_id: Logprob(logprob, rank, self.tokenizer.token_text(token_id))
            for token_id, logprob, rank in ranked
        }

    def embedding(self, vector: Tensor) -> EmbeddingRequestOutput:
        """What the state of an encoding became"""
        output, cached = EmbeddingOutput(vector.tolist()), self.num_cached_tokens
        return EmbeddingRequestOutput(
            self.request_id, self.prompt_token_ids, output, num_cached_tokens=cached
        )

    def scoring(self, score: float) -> ScoringRequestOutput:
        output, cached = ScoringOutput(score), self.num_cached_tokens
        return ScoringRequestOutput(self.request_id, self.prompt_token_ids, output, num_cached_tokens=cached)

    def state(self) -> Tensor:
        """What an encoding was for"""
        found = self.completions[0].state
        if found is None:
            raise Aborted(f"request {self.request_id} was aborted before its state was computed")
        return found

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [completion.output() for completion in self.completions],
            self.is_finished,
            None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            self.num_cached_tokens,
            self.metrics,
            self.prefix_miss,
        )
