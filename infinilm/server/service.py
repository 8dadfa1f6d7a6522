"""A model as the APIs see it: they touch the engine, the tokenizer and its template through here alone."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from infinilm.engine.adapters import LoRARequest
from infinilm.engine.intake import RequestOptions
from infinilm.engine.request import EngineDead
from infinilm.models.recommended import FIELDS
from infinilm.server.admission import Admission
from infinilm.server.bodies import BodyError
from infinilm.server.reader import Reader, has_reasoning, starts_in_reasoning
from infinilm.server.tally import Tally
from infinilm.server.tools import family_of
from infinilm.server.turn import Caller, Prepared, Reading, Run, Turn, encode, enforced
from infinilm.tokenizer import Tokenizer, TooLong

if TYPE_CHECKING:
    from infinilm.async_llm import AsyncLLM
    from infinilm.llm import LLM

T = TypeVar("T")
PULSE_SECONDS = 5.0  # that a sign of life of the engine is believed
PATIENCE_SECONDS = 10.0  # with an engine that gives none
BYTES_A_TOKEN = 3  # of a body that has not been encoded yet


class UnknownModel(BodyError):
    def __init__(self, name: str, served: Sequence[str]) -> None:
        told = f"The model {short(name)} does not exist; this server has {', '.join(map(repr, served))}"
        super().__init__(told, "model", "model_not_found")


class Served(NamedTuple):
    """What a request is answered with, by the name that the answer tells: the model, or it with an adapter"""

    name: str
    lora: LoRARequest | None = None


class Preparer:
    """Requests to the engine from turns, and what its outputs are read by"""

    def __init__(self, llm: LLM | AsyncLLM) -> None:
        self.engine = llm.engine
        self.max_model_len: int = llm.engine.max_length
        self.tokenizer: Tokenizer = llm.tokenizer
        self.family = family_of(self.tokenizer.chat_template)
        self.has_reasoning = has_reasoning(self.tokenizer.chat_template or "")
        recommended = llm.engine.model.recommended
        self.defaults = {name: getattr(recommended, name) for name in FIELDS}

    def prepare(self, turn: Turn, request_id: str, served: Served) -> Prepared:
        """In any thread: make a turn's request, so that what is wrong is known before an answer begins."""
        with turn.as_body_errors():
            token_ids = self._tokens_within(turn)
            starts = self._starts_in_reasoning(turn, token_ids)
            params = enforced(turn, self.family, starts)
            options = RequestOptions(
                priority=turn.priority, request_id=request_id, cache_salt=turn.salt, lora_request=served.lora
            )
            return Prepared(turn, self.engine.make(token_ids, params, **options), starts)

    def tokens_of(self, turn: Turn) -> list[int]:
        """What the model reads of a turn. It may take long."""
        with turn.as_body_errors():
            return encode(turn, self.tokenizer, self.family)

    def _tokens_within(self, turn: Turn) -> list[int]:
        try:
            token_ids = encode(turn, self.tokenizer, self.family, self.max_model_len)
        except TooLong as error:
            raise self._too_long(f"at least {error.least}", turn.prompt_field) from error
        if len(token_ids) >= self.max_model_len:
            raise self._too_long(f"{len(token_ids)}", turn.prompt_field)
        return token_ids

    def _too_long(self, found: str, name: str) -> BodyError:
        """In words that agents know, and shorten a conversation by: OpenAI's and Anthropic's"""
        return BodyError(
            f"This model's maximum context length is {self.max_model_len} tokens, of a prompt and its "
            f"answer together, but the prompt is too long: {found} tokens > {self.max_model_len - 1}; "
            f"shorten {name}",
            name,
            "context_length_exceeded",
        )

    def readings(self, prepared: Sequence[Prepared]) -> list[list[Reading]]:
        """One for each choice of each turn, numbered through"""
        numbers = count()
        return [[self._reading(one, next(numbers)) for _ in range(one.params.n)] for one in prepared]

    def _reading(self, prepared: Prepared, index: int) -> Reading:
        turn, reader = prepared.turn, None
        if turn.messages is not None:
            reader = Reader(self.family, turn.called, prepared.starts_in_reasoning, self.has_reasoning)
        return Reading(index, reader, turn.is_parallel)

    def _starts_in_reasoning(self, turn: Turn, token_ids: Sequence[int]) -> bool:
        """Some templates begin the model's thoughts themselves."""
        if turn.messages is None or not self.has_reasoning:
            return False
        return starts_in_reasoning(self.tokenizer.decode(token_ids[-8:], skip_special_tokens=False))


class Service(Preparer):
    """A model as the APIs see it."""

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        max_answers: int,
        max_tokens: int,
        loras: Sequence[LoRARequest],
    ) -> None:
        super().__init__(llm)
        self.llm = llm
        self.names = tuple(names)  # that it is asked for by; the first is the one it tells
        self.loras = {lora.lora_name: lora for lora in loras}
        self.created = int(time.time())
        self.vocab_size: int = llm.model.config.vocab_size
        self.admission = Admission(max_answers, max_tokens)
        self._threads = ThreadPoolExecutor(2, "infinilm-server")
        self.tally = Tally(self.max_model_len)
        self._pulse = Pulse(llm)

    @property
    def name(self) -> str:
        return self.names[0]

    def served(self, name: str | None) -> Served:
        """What has this name, the model if there is none; UnknownModel where nothing has it"""
        if name is None or name in self.names:
            return Served(self.name)
        if name not in self.loras:
            raise UnknownModel(name, (self.name, *self.loras))
        return Served(name, self.loras[name])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, call: Callable[..., T], *arguments: Any) -> T:
        """The result of a call that may take long."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def start(self, turns: Sequence[Turn], caller: Caller, served: Served) -> Run:
        """Turns on their way, or RequestError or Overloaded. Their place is theirs until the stack ends."""
        place = self.admission.enter(sum(turn.params.n for turn in turns), caller.num_bytes // BYTES_A_TOKEN)
        caller.stack.callback(place.leave)
        named = [*zip(turns, caller.new_ids(), strict=False)]
        prepared = await self.off_loop(lambda: [self.prepare(turn, own, served) for turn, own in named])
        place.takes(sum(len(one.token_ids) for one in prepared))
        return Run(self, prepared, place, served.name)

    async def is_alive(self) -> bool:
        return await self._pulse.beats()


class Pulse:
    """Whether the engine's thread still makes calls. A sign of life is believed for a while, and the next one
    asked for: who asks in the midst of a long step need not wait for its end."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._last = -math.inf
        self._asked: asyncio.Task[None] | None = None

    async def beats(self) -> bool:
        if self._llm.death is not None:
            return False
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._ask())
        if time.monotonic() - self._last >= PULSE_SECONDS:
            await asyncio.wait({self._asked}, timeout=PATIENCE_SECONDS)
        return time.monotonic() - self._last < PULSE_SECONDS

    async def _ask(self) -> None:
        with suppress(EngineDead):
            await self._llm.run(time.monotonic)
            self._last = time.monotonic()
