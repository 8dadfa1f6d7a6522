"""From what a caller gives to a request that has been checked, or an error that says what is wrong."""

from __future__ import annotations

import itertools
import os
import random
import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from infinicore.checks import integer
from infinilm.config import EngineConfig
from infinilm.engine.adapters import Adapters, LoRARequest
from infinilm.engine.blocks import Blocks
from infinilm.engine.request import Request, RequestError
from infinilm.generation import NO_HEAD
from infinilm.models.llama import LlamaForCausalLM
from infinilm.sampling import SamplingParams, is_text, plain_text
from infinilm.tokenizer import ChatPrompt, Tokenizer

if TYPE_CHECKING:
    from infinilm.engine.grammar import GrammarCompiler

# How a prompt is read whose last state is wanted: as if one token were to follow, which needs no room
ENCODING = SamplingParams(temperature=0.0, max_tokens=1)

Prompt = str | Sequence[int] | Mapping[str, Any]


class RequestOptions(TypedDict, total=False):
    """What may be said of a request besides its prompt and how that is continued"""

    priority: int
    request_id: str | None
    cache_salt: str | None
    lora_request: LoRARequest | None


@dataclass(eq=False)
class Intake:
    """Requests for one model and the blocks of its cache"""

    model: LlamaForCausalLM
    tokenizer: Tokenizer
    config: EngineConfig
    adapters: Adapters
    blocks: Blocks
    max_length: int

    def __post_init__(self) -> None:
        self._serials = itertools.count()
        self._name = f"request-{secrets.token_hex(4)}"  # of those without one, which no caller gives another
        self._seeds = random.Random(self.config.seed)
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def make(self, prompt: Prompt, params: SamplingParams, **options: Unpack[RequestOptions]) -> Request:
        """A request that has been checked; RequestError if it is wrong or can never be served. Any thread may
        ask."""
        if not self.model.has_head:
            raise RequestError(NO_HEAD)
        return self._made(prompt, params, options)

    def make_encoding(
        self,
        prompt: Prompt,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """A request whose prompt is read, for the state of its last token, and not continued. A text is read
        as the model's files have texts embedded, with the prompt of this name before it."""
        limit = limit_of(truncate_prompt_tokens, self.max_length)
        return self._made(self._encoded(prompt, prompt_name, limit), ENCODING, options, wants_state=True)

    def _made(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, wants_state: bool = False
    ) -> Request:
        check_options(options)
        text, token_ids = self._tokens_of(prompt)
        self._check_ids(token_ids, params)
        max_tokens = self._room_for(len(token_ids), params, wants_state)
        request = self._request(text, token_ids, params, max_tokens, options)
        request.completions[0].wants_state = wants_state
        self._prepare(request)
        return request

    def _request(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        options: RequestOptions,
    ) -> Request:
        serial = next(self._serials)
        request_id = options.get("request_id")
        ends = frozenset() if params.ignore_eos else frozenset(self._eos_ids)
        return Request(
            f"{self._name}-{serial}" if request_id is None else plain_text(request_id),
            text,
            token_ids,
            params,
            self.tokenizer,
            serial,
            self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens,
            eos_ids=ends,
            stop_ids=ends | frozenset(params.stop_token_ids),
            bad_words=self._bad_words(params),
            priority=int.__int__(options.get("priority", 0)),  # a subclass may compare in its own way
            cache_salt=options.get("cache_salt") or "",
            adapter=self.adapters.of(options.get("lora_request")),
        )

    def _prepare(self, request: Request) -> None:
        """Its streams learn whose keys they share, when their rope switches, and what may follow."""
        length, outputs = len(request.prompt_token_ids), request.params.structured_outputs
        matcher = None if outputs is None else self._grammars.compile(outputs)
        for completion in request.completions:
            completion.salt = self.salt(length, request)
            completion.switch_at = self.model.config.rope.switch_at(length)
            if matcher is not None:
                completion.matcher = matcher.with_masks(self._threads())

    def salt(self, length: int, request: Request) -> bytes:
        """Requests with the same salt share keys: their rope's frequencies and adapter are the same, and none
        asked to be apart."""
        salt = f"{self.model.config.rope.regime(length)}:{request.cache_salt}".encode()
        return salt if request.adapter is None else b"lora " + request.adapter.digest + salt

    @property
    def _eos_ids(self) -> tuple[int, ...]:
        """Files may name others, which the model cannot draw."""
        named = *self.tokenizer.eos_token_ids, *self.model.config.eos_token_ids
        return tuple(token_id for token_id in named if token_id < self.model.config.vocab_size)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Its library is imported by those alone who ask for structured outputs."""
        from infinilm.engine.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.model.config.vocab_size, self._eos_ids)

    def _threads(self) -> ThreadPoolExecutor:
        """For masks; a fork has none of its parent's threads."""
        if self._pool is None or self._pool[0] != os.getpid():
            threads = ThreadPoolExecutor(1, "infinilm-masks")
            threads.submit(int)  # starts it here: where none can be, this request fails and not a step of all
            self._pool = os.getpid(), threads
        return self._pool[1]

    def close(self) -> None:
        """End its threads; no request follows."""
        if self._pool is not None and self._pool[0] == os.getpid():
            self._pool[1].shutdown(wait=False)

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if that is what was given or a template wrote, and its tokens"""
        if isinstance(prompt, Mapping):
            prompt = content_of(prompt)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, max_tokens=self.max_length)
        ids = token_ids_of(prompt)
        return (prompt.text, ChatPrompt(ids)) if isinstance(prompt, ChatPrompt) else (None, ids)

    def _encoded(self, prompt: Prompt, prompt_name: str | None, limit: int | None) -> Prompt:
        """Text to be embedded as its tokens; token ids stay as they are, or the first of them."""
        given = content_of(prompt) if isinstance(prompt, Mapping) else prompt
        if isinstance(given, str):
            return self.model.pooling.encode(
                given, self.tokenizer, prompt_name, limit=limit, max_tokens=self.max_length
            )
        if prompt_name is not None:
            raise RequestError("prompt_name is for texts, but the prompt is given as token ids")
        return given if limit is None else token_ids_of(given)[:limit]

    def _check_ids(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        vocab_size = self.model.config.vocab_size
        named = {
            None: token_ids,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": [token_id for token_id, _ in params.logit_bias],
        }
        for name, ids in named.items():
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    has = f"{name or 'the prompt'} has token id {token_id}"
                    raise RequestError(f"{has}; the model's are 0 to {vocab_size - 1}", name)

    def _room_for(self, num_prompt: int, params: SamplingParams, wants_state: bool) -> int:
        """How many tokens may follow a prompt."""
        if num_prompt == 0:
            raise RequestError("the prompt has no tokens; the model needs one at least")
        room = self.max_length - num_prompt
        most = self.max_length - (not wants_state)
        if num_prompt > most:
            model_len = self.config.max_model_len or self.model.max_length
            blocks = f"{self.blocks.num_blocks} blocks of {self.blocks.size} tokens"
            raise RequestError(
                f"the prompt has {num_prompt} tokens; with max_model_len {model_len} and {blocks} "
                f"for keys and values, {most} are the most"
            )
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Their tokens at the beginning of a text, and after a space"""
        encoded = [
            self.tokenizer.encode(start + word.lstrip(), add_special_tokens=False, allow_special=False)
            for word in params.bad_words
            for start in ("", " ")
        ]
        return [token_ids for token_ids in encoded if token_ids]


def limit_of(truncate_prompt_tokens: Any, max_length: int) -> int | None:
    """How many tokens of a prompt that is not continued are kept; None is all, and -1 as many as may be."""
    given, name = truncate_prompt_tokens, "truncate_prompt_tokens"
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or not (given == -1 or 1 <= given <= max_length):
        wanted = f"-1 or a whole number from 1 to {max_length}"
        raise RequestError(f"{name} must be {wanted}, but is {reprlib.repr(given)}", name)
    return max_length if given == -1 else given


def content_of(prompt: Mapping[str, Any]) -> Any:
    if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        keys = reprlib.repr(list(prompt))
        raise RequestError(f"a prompt has either 'prompt' or 'prompt_token_ids', but this one has {keys}")
    ((key, value),) = prompt.items()
    if isinstance(value, str) != (key == "prompt"):
        wanted = "a text" if key == "prompt" else "a list of token ids"
        raise RequestError(f"{key} must be {wanted}, but is {reprlib.repr(value)}")
    return value


def token_ids_of(prompt: Any) -> list[int]:
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt must be a text or a list of token ids, but is {reprlib.repr(prompt)}")
    ids = list(prompt)
    try:
        if any(isinstance(token_id, bool) for token_id in ids):
            raise TypeError("a token id must be a whole number, not True or False")
        return [integer("prompt", "a token id", token_id) for token_id in ids]
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def check_options(options: Mapping[str, Any]) -> None:
    priority = options.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be a whole number, but is {priority!r}", "priority")
    for name in ("request_id", "cache_salt"):
        value = options.get(name)
        if not isinstance(value, str | None):
            raise RequestError(f"{name} must be a string, but is {value!r}", name)
        if value is not None and not is_text(value):
            wanted = "text, without halves of surrogate pairs"
            raise RequestError(f"{name} must be {wanted}, but is {value!r}", name)
