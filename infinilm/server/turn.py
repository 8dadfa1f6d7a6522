"""One way for a request of any API: a Turn goes in, off the event loop it becomes tokens, Pieces come out."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from infinilm.engine.request import Aborted, CompletionOutput, Logprobs, Request, RequestError, RequestOutput
from infinilm.engine.stats import Progress
from infinilm.sampling import SamplingParams, StructuredOutputsParams
from infinilm.server.bodies import BodyError
from infinilm.server.parts import CallEnd, CallStart, Part
from infinilm.server.reader import Reader
from infinilm.server.tools import TAGS, Choice, Family, Named, Tool
from infinilm.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from infinilm.server.admission import Place
    from infinilm.server.service import Service

LOG = logging.getLogger("infinilm.server")
News = asyncio.Queue[int | BaseException | None]
PROGRESS_SECONDS = 0.25  # between two reports of a long prompt


# ---- what is asked -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What is to be continued, a conversation or else a plain prompt, and how."""

    params: SamplingParams
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] = ""
    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    allowed: frozenset[str] | None = None  # full names of the tools that alone may be called, if not all
    parallel: bool | None = None  # several calls in one answer; None where nothing is said of it
    variables: Mapping[str, Any] = field(default_factory=dict)  # that the template sees
    salt: str | None = None  # prefixes are shared with turns of the same alone
    priority: int = 0
    prompt_field: str = "messages"  # of the body, which is continued
    structure_field: str = "structured_outputs"  # of the body, which asks for a structure

    @property
    def called(self) -> tuple[Tool, ...]:
        """The tools that the answer may call"""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.full_name in self.allowed)

    @property
    def is_free(self) -> bool:
        """Whether the answer may be without calls"""
        return self.choice in ("auto", "none")

    @property
    def is_parallel(self) -> bool:
        """Whether one answer may have several calls. Where one tool is chosen it has one; where calls are
        forced too, unless several are asked for: a small model does not find an end by itself."""
        if isinstance(self.choice, Named):
            return False
        return self.choice == "auto" if self.parallel is None else self.parallel

    @contextmanager
    def as_body_errors(self) -> Iterator[None]:
        """Errors of the tokenizer and the engine name the field of the body that they are about."""
        try:
            yield
        except BodyError:
            raise
        except (RequestError, TokenizerError) as error:
            name = getattr(error, "field", None) or self.prompt_field
            if name == "structured_outputs":  # which a turn has of its tools too
                name = "tools" if self.params.structured_outputs is None else self.structure_field
            told = str(error) if str(error).startswith(name) else f"{name}: {error}"
            raise BodyError(told, name) from error


@dataclass(frozen=True)
class Prepared:
    """A turn, and the request that it is to the engine."""

    turn: Turn
    request: Request
    starts_in_reasoning: bool

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        return self.request.params


@dataclass(eq=False)
class Caller:
    """The one who asks: an id for the engine and the log, how much is asked, and what ends with it."""

    request_id: str
    num_bytes: int = 0
    stack: ExitStack = field(default_factory=ExitStack)

    def new_ids(self) -> Iterator[str]:
        """For requests to the engine, which are all different: callers may give several requests one id."""
        key = uuid.uuid4().hex
        return (f"{self.request_id}-{key}-{number}" for number in count())


def encode(turn: Turn, tokenizer: Tokenizer, family: Family, max_tokens: int | None = None) -> list[int]:
    """The tokens of a turn's prompt; TooLong, where they are sure to be more. It may take long."""
    if turn.messages is None:
        prompt = turn.prompt
        return tokenizer.encode(prompt, max_tokens=max_tokens) if isinstance(prompt, str) else list(prompt)
    # All tools are shown, so that prompts begin alike, but where no grammar rules out those not allowed.
    is_limited = turn.choice == "auto" and not family.is_marked_by_text
    shown = turn.called if is_limited else turn.tools
    messages, tools = family.conversation(turn.messages, shown, turn.choice)
    return tokenizer.encode_chat(messages, max_tokens=max_tokens, **{"tools": tools, **turn.variables})


def enforced(turn: Turn, family: Family, starts_in_reasoning: bool) -> SamplingParams:
    """The turn's parameters with the grammar that its tools need"""
    params = turn.params
    structure, warnings = structure_of(turn, family, starts_in_reasoning)
    for warning in warnings:
        LOG.warning("%s", warning)
    has_parts = turn.messages is not None and (family.has_channels or family.thoughts != TAGS)
    has_markers = has_parts or (turn.called and family.keeps_special_tokens)
    return replace(
        params,
        structured_outputs=structure,
        # Where calls are forced a stop string would be met in what callers never see, and cut the call off.
        stop=params.stop if turn.is_free else (),
        skip_special_tokens=params.skip_special_tokens and not has_markers,
    )


def structure_of(
    turn: Turn, family: Family, starts_in_reasoning: bool
) -> tuple[StructuredOutputsParams | None, list[str]]:
    """What the answer is held to, and what a client should be told. A structure that is asked for is of what
    is said: where calls are forced, nothing is."""
    asked, called = turn.params.structured_outputs, turn.called
    if turn.is_free and asked is not None and (called or starts_in_reasoning):
        is_parallel = turn.parallel is True  # as where calls are forced: small models find no end
        return family.beside(asked, called, is_parallel, starts_in_reasoning)
    if not called:
        return asked, []
    is_limited = len(called) < len(turn.tools)
    grammar, warnings = family.grammar(called, turn.choice, turn.is_parallel, starts_in_reasoning, is_limited)
    return grammar or asked, warnings


# ---- what comes of it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """What has come since the last piece of a choice. One with a finish_reason is the last.

    `text` is what `parts` were read from: completions take it as it is, and have none.
    """

    index: int
    text: str
    parts: list[Part]
    token_ids: list[int]
    logprobs: Sequence[Logprobs | None] | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None
    has_calls: bool = False  # the choice has called a tool by now, and no stop string has cut a call off


@dataclass(frozen=True)
class Usage:
    """Tokens; a prompt is counted once, however many answers it has."""

    prompt: int
    cached: int
    drawn: int
    miss: int | None = None  # the first place where a prompt differs from a recent one that it began like


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    misses = [output.prefix_miss for output in outputs]
    return Usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(len(found.token_ids) for output in outputs for found in output.outputs),
        next((place for place in misses if place is not None), None),
    )


def cache_miss(usage: Usage) -> dict[str, Any]:
    """Where a prompt of which more could have been cached parts from the one before. It stands beside the
    details of the tokens, for OpenAI's agents take nothing but numbers among these."""
    return {} if usage.miss is None else {"cache_miss": {"position": usage.miss}}


def progress_body(progress: Progress) -> dict[str, Any]:
    told = {"total": progress.total, "cache": progress.cached, "processed": progress.processed}
    return {"prompt_progress": told}


class Reading:
    """One choice on its way: what of it has been told. Without a reader it is text, which has no parts."""

    def __init__(self, index: int, reader: Reader | None, is_parallel: bool) -> None:
        self.index = index
        self.reader = reader
        self.is_parallel = is_parallel  # if not, calls after the first are not told
        self.num_text = self.num_tokens = 0
        self.has_calls = self.is_in_call = self.is_done = False

    def piece(self, found: CompletionOutput) -> Piece | None:
        """None where nothing can be told."""
        is_news = len(found.text) > self.num_text or found.finish_reason is not None
        if self.is_done or not (is_news or found.logprobs):
            return None
        text, tokens = found.text[self.num_text :], found.token_ids[self.num_tokens :]
        logprobs = None if found.logprobs is None else found.logprobs[self.num_tokens :]
        self.num_text, self.num_tokens = len(found.text), len(found.token_ids)
        self.is_done = found.finish_reason is not None
        parts = [] if self.reader is None else self.parts(self.reader, text)
        has_calls = self.has_calls and not (self.is_in_call and isinstance(found.stop_reason, str))
        return Piece(
            self.index, text, parts, tokens, logprobs, found.finish_reason, found.stop_reason, has_calls
        )

    def parts(self, reader: Reader, text: str) -> list[Part]:
        parts = self.told(reader.add(text))
        for part in parts:
            if isinstance(part, CallStart | CallEnd):
                self.has_calls, self.is_in_call = True, isinstance(part, CallStart)
        return [*parts, *(self.told(reader.finish()) if self.is_done else ())]

    def told(self, parts: list[Part]) -> list[Part]:
        return parts if self.is_parallel else [part for part in parts if getattr(part, "index", 0) == 0]


def pieces_of(readings: Sequence[Reading], output: RequestOutput) -> list[Piece]:
    """What there is to tell of the choices of a turn"""
    found = zip(readings, output.outputs, strict=True)
    return [piece for reading, one in found if (piece := reading.piece(one)) is not None]


class Run:
    """Turns under way, the choices of each numbered after those of the one before."""

    def __init__(self, service: Service, prepared: Sequence[Prepared], place: Place, model: str) -> None:
        self.prepared = prepared
        self.model = model  # the name that answers tell
        self.start = time.monotonic()
        self._service, self._place = service, place
        self._outputs: dict[int, RequestOutput] = {}  # the last of each turn
        self._readings = service.readings(prepared)

    async def pieces(self, has_progress: bool = False) -> AsyncGenerator[Piece | Progress, None]:
        """What there is to tell, as it comes; leaving ends the turns."""
        async with aclosing(self._with_progress() if has_progress else self._news()) as news:
            async for item in news:
                for told in [item] if isinstance(item, Progress) else self._told(item):
                    yield told

    async def whole(self) -> list[list[Piece]]:
        """Each choice of each turn as one piece"""
        async with aclosing(self._news()) as news:
            async for _ in news:
                pass
        return [self._told(number) for number in range(len(self.prepared))]

    def output(self, number: int) -> RequestOutput:
        """The last of one turn"""
        return self._outputs[number]

    @property
    def outputs(self) -> list[RequestOutput]:
        return [self._outputs[number] for number in range(len(self.prepared)) if number in self._outputs]

    @property
    def usage(self) -> Usage:
        prompt = sum(len(one.token_ids) for one in self.prepared)
        return replace(usage_of(self.outputs), prompt=prompt)

    def timings(self) -> dict[str, Any]:
        """Times and rates, named as llama.cpp names them"""
        usage, now = self.usage, time.monotonic()
        firsts = [output.metrics.first_token_time for output in self.outputs if output.metrics]
        first = min((found for found in firsts if found is not None), default=now)
        prompt, drawn = usage.prompt - usage.cached, usage.drawn
        return {
            "cache_n": usage.cached,
            **rates("prompt", prompt, first - self.start),
            **rates("predicted", drawn, now - first),
        }

    def progress(self) -> Progress:
        found = [self._service.llm.progress(one.request.request_id) for one in self.prepared]
        return Progress(
            sum(len(one.token_ids) for one in self.prepared),
            sum(one.cached for one in found if one),
            sum(one.processed for one in found if one),
        )

    def _told(self, number: int) -> list[Piece]:
        return pieces_of(self._readings[number], self._outputs[number])

    def _news(self) -> AsyncGenerator[int, None]:
        """The number of a turn whenever there is more of it."""
        return self._merged() if len(self.prepared) > 1 else self._follow(0)

    async def _follow(self, number: int) -> AsyncGenerator[int, None]:
        one = self.prepared[number]
        with one.turn.as_body_errors(), self._service.tally.watch(one.params) as watch:
            async with aclosing(self._service.llm.follow(one.request)) as outputs:
                async for output in outputs:
                    watch.note(output)
                    if number not in self._outputs:
                        self._place.has_begun(len(one.token_ids))
                    self._outputs[number] = output
                    if output.finished and any(one.finish_reason == "abort" for one in output.outputs):
                        raise Aborted("the server ended the request before it was complete")
                    yield number

    async def _merged(self) -> AsyncGenerator[int, None]:
        news: News = asyncio.Queue()
        tasks = [asyncio.create_task(self._tell(number, news)) for number in range(len(self.prepared))]
        num_left = len(tasks)
        try:
            while num_left:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    yield item
        finally:
            await end_tasks(*tasks)

    async def _tell(self, number: int, news: News) -> None:
        """All there is of one turn, then None, or the error that it ends with"""
        try:
            async with aclosing(self._follow(number)) as source:
                async for _ in source:
                    news.put_nowait(number)
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    async def _with_progress(self) -> AsyncGenerator[int | Progress, None]:
        """News, and before the first of them how far the prompt has been read."""
        async with aclosing(self._news()) as news:
            first, told = asyncio.ensure_future(anext(news)), None
            try:
                while not (await asyncio.wait({first}, timeout=PROGRESS_SECONDS))[0]:
                    if (now := self.progress()) != told:
                        told = now
                        yield now
                number = first.result()
            finally:
                await end_tasks(first)
            yield Progress(self.usage.prompt, self.usage.cached, self.usage.prompt)
            yield number
            async for number in news:
                yield number


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Nothing of them goes on; what they fail with is told to nobody."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def rates(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(seconds * 1e3, 3),
        f"{name}_per_second": round(count / max(seconds, 1e-9), 3),
    }
