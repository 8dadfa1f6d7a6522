"""Engine: requests in, steps, outputs. A step is schedule -> run -> update, each of them in one place."""

from __future__ import annotations

import itertools
import math
import os
import random
import reprlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import infinicore
from infinicore.checks import integer
from infinilm.cache import DTYPES, BlockShape, PagedCache
from infinilm.config import EngineConfig, LlamaConfig
from infinilm.draw import has_choice
from infinilm.engine import prefixes
from infinilm.engine.adapters import Adapters, LoRARequest
from infinilm.engine.blocks import Blocks
from infinilm.engine.draft import ModelDrafter, NgramDrafter, SpeculativeConfig, note_guesses
from infinilm.engine.memory import share_of, told_of_memory
from infinilm.engine.request import Completion, NumericalError, QueueFull, Request, RequestError
from infinilm.engine.scheduler import Scheduler, num_tokens_of
from infinilm.engine.stats import STEP_TOKENS, Histogram, Progress, Stats
from infinilm.generation import NO_HEAD, step_tokens
from infinilm.models.llama import LlamaForCausalLM
from infinilm.runner import Drawn, Passage, Pending, Runner, Work
from infinilm.sampling import SamplingParams, is_text
from infinilm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from infinilm.engine.grammar import GrammarCompiler

# How a prompt is read whose last state is wanted: as if one token were to follow, which needs no room.
ENCODING = SamplingParams(temperature=0.0, max_tokens=1)

Prompt = str | Sequence[int] | Mapping[str, Any]


class Launched(NamedTuple):
    """A step under way, and when it was launched"""

    pending: Pending
    time: float


class Engine:
    """Many requests at once over one model, each exactly as if it were alone."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: Tokenizer,
        config: EngineConfig,
        draft: LlamaForCausalLM | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.draft = draft
        self.adapters = Adapters(model, config)
        check_length(config, model.config)
        if config.deterministic:
            infinicore.deterministic = True
        self.cache, *others = make_caches([model] if draft is None else [model, draft], config)
        self.blocks = Blocks(self.cache.num_blocks, config.block_size, config.enable_prefix_caching)
        room = self.cache.num_blocks * config.block_size
        self.max_length = min(config.max_model_len or model.config.max_position_embeddings, room)
        tokens = config.max_num_batched_tokens or step_tokens(model.config, model.device)
        self.scheduler = Scheduler(self.blocks, config.max_num_seqs, tokens, model.device.type == "cpu")
        self.counts = self.scheduler.counts
        self.step_tokens = Histogram(STEP_TOKENS)
        self.runner = Runner(model, self.cache, config.max_num_seqs, self.max_length)
        self.drafter = self._drafter(draft, others)
        if self.drafter is not None:  # which looks at the last token to guess what follows
            self.runner.is_ahead = False
        self._passage: Passage | None = None
        self.requests: dict[str, Request] = {}
        self._launched: Launched | None = None
        self._last_read = 0.0
        self._serials = itertools.count()
        self._seeds = random.Random(config.seed)
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def anew(self) -> Engine:
        """One for the same models, with nothing in it"""
        return Engine(self.model, self.tokenizer, self.config, self.draft)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Files may name others, which the model cannot draw."""
        named = *self.tokenizer.eos_token_ids, *self.model.config.eos_token_ids
        return tuple(token_id for token_id in named if token_id < self.model.config.vocab_size)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def _drafter(
        self, draft: LlamaForCausalLM | None, caches: Sequence[PagedCache]
    ) -> NgramDrafter | ModelDrafter | None:
        config = SpeculativeConfig.read(self.config.speculative_config)
        if config is None:
            return None
        if draft is None:
            return NgramDrafter(config, self.scheduler)
        if draft.config.vocab_size != self.model.config.vocab_size:
            sizes = f"{draft.config.vocab_size} tokens, but the model {self.model.config.vocab_size}"
            raise ValueError(f"speculative_config: the draft model has {sizes}; they must be the same")
        runner = Runner(draft, caches[0], self.config.max_num_seqs, self.max_length)
        return ModelDrafter(config, self.scheduler, runner)

    # ---- requests in and out -------------------------------------------------------------------------------

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        request_id: str | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """A request that has been checked; RequestError if it is wrong or can never be served."""
        if params is not ENCODING and not self.model.has_head:
            raise RequestError(NO_HEAD)
        check_options(priority, request_id, cache_salt)
        text, token_ids = self._tokens_of(prompt)
        self._check_ids(token_ids, params)
        max_tokens = self._room_for(len(token_ids), params)
        serial = next(self._serials)
        ends = frozenset() if params.ignore_eos else frozenset(self.eos_ids)
        request = Request(
            f"request-{serial}" if request_id is None else request_id,
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
            priority=priority,
            cache_salt=cache_salt or "",
            adapter=self.adapters.of(lora_request),
        )
        for completion in request.completions:
            completion.salt = self._salt(len(token_ids), request)
            completion.turning_point = self.model.config.rope.turning_point(len(token_ids))
        if params.structured_outputs is not None:
            matcher = self._grammars.compile(params.structured_outputs)
            for completion in request.completions:
                completion.matcher = matcher.with_masks(self._threads())
        return request

    def _salt(self, length: int, request: Request) -> bytes:
        """Who shares it shares keys: the rope's frequencies and the adapter are the same, and nobody asked to
        be apart."""
        salt = f"{self.model.config.rope.regime(length)}:{request.cache_salt}".encode()
        return salt if request.adapter is None else b"lora " + request.adapter.digest + salt

    def make_encoding(
        self,
        prompt: Prompt,
        priority: int = 0,
        request_id: str | None = None,
        cache_salt: str | None = None,
        prompt_name: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """A request whose prompt is read, for the state of its last token, and not continued. A text is read
        as the model's files have texts embedded, with the prompt of this name before it."""
        encoded = self._encoded(prompt, prompt_name)
        request = self.make(encoded, ENCODING, priority, request_id, cache_salt, lora_request)
        request.completions[0].wants_state = True
        return request

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Its library is imported by those alone who ask for structured outputs."""
        from infinilm.engine.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.model.config.vocab_size, self.eos_ids)

    def _threads(self) -> ThreadPoolExecutor:
        """For masks; a fork has none of its parent's threads."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(1, "infinilm-masks")
        return self._pool[1]

    def close(self) -> None:
        """End its threads; no step follows."""
        if self._pool is not None and self._pool[0] == os.getpid():
            self._pool[1].shutdown(wait=False)

    def has_room_for(self, request: Request) -> bool:
        scheduler, config = self.scheduler, self.config
        num_tokens = scheduler.num_waiting_tokens + len(request.prompt_token_ids)
        has_place = scheduler.num_waiting < config.max_queue and num_tokens <= config.max_queue_tokens
        return has_place or not scheduler.waiting

    def enqueue(self, request: Request) -> None:
        """Let a request in, or QueueFull at a time when too many wait."""
        if request.request_id in self.requests:
            raise RequestError(f"request_id {request.request_id!r} is in use")
        if not self.has_room_for(request):
            raise QueueFull(
                f"{self.scheduler.num_waiting} requests of {self.scheduler.num_waiting_tokens} tokens wait "
                f"already; max_queue is {self.config.max_queue}, max_queue_tokens "
                f"{self.config.max_queue_tokens}"
            )
        self.requests[request.request_id] = request
        for completion in request.completions:
            self.scheduler.add(completion)

    def abort(self, request_id: str) -> None:
        """Forget a request, whatever it is at; its output ends here."""
        if request := self.requests.get(request_id):
            for completion in request.completions:
                if completion.finish_reason is None:
                    completion.finish("abort")
            self._settle(request)

    # ---- what it tells -------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Of this moment; any thread may ask."""
        scheduler, blocks = self.scheduler, self.blocks
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_blocks_used=blocks.num_blocks - blocks.num_free,
            num_blocks=blocks.num_blocks,
            **vars(self.counts),
        )

    def progress(self, request_id: str) -> Progress | None:
        """How far a prompt has been read, None where there is no such request; any thread may ask."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        first, total = request.completions[0], len(request.prompt_token_ids)
        num_done = total if first.num_drawn else min(first.num_computed, total)
        return Progress(total, request.num_cached_tokens, num_done)

    def save_prefixes(self, path: str | Path) -> int:
        """Write what the cache knows to a file, for another process with this model; the number of blocks"""
        return prefixes.save(path, self.model, self.cache, self.blocks)

    def load_prefixes(self, path: str | Path) -> int:
        """Take over saved prefixes, as far as there is room; ValueError if they are of another model."""
        return prefixes.load(path, self.model, self.cache, self.blocks)

    # ---- a step --------------------------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Move requests forward; those are returned that have something new.

        Where the runner is ahead, the next step is launched before this one is read, and what is done with
        the tokens of this one is done meanwhile. Of a stream that turns out to have ended the next step
        computes a token too many, which is dropped.
        """
        work: Sequence[Work] = []
        drawn: list[Drawn] = []
        if (launched := self._launched or self._launch()) is not None:
            self._launched = self._launch() if launched.pending.may_be_followed else None
            work, drawn = launched.pending.work, self._finish(launched)
        if self.scheduler.beside and (read := self._read(self.scheduler.beside, work)) is not None:
            work, drawn = [*work, *self.scheduler.beside], [*drawn, *read]
            self.scheduler.beside = []
        if work:
            self.step_tokens.add(num_tokens_of(work))
        return self._update(work, drawn)

    def _finish(self, launched: Launched) -> list[Drawn]:
        """What came of it; it ran since it was launched, or since the one before it was done."""
        pending, drawn = launched.pending, launched.pending.read()
        start, self._last_read = max(launched.time, self._last_read), time.perf_counter()
        if pending.is_settled and all(item.num_drawn == item.num_tokens for item in pending.work):
            self.scheduler.pace.note_answers(num_tokens_of(pending.work), self._last_read - start)
        return drawn

    def _launch(self) -> Launched | None:
        """Begin the next step, if there is anything to do."""
        if self.drafter is not None:
            self.drafter.guess()
        work = self.scheduler.schedule()
        if not work:
            return None
        prepare_masks(work)
        start = time.perf_counter()
        pending = self.runner.launch(work)
        self.scheduler.advance(work)
        return Launched(pending, start)

    def _read(self, prompts: Sequence[Work], answers: Sequence[Work]) -> list[Drawn] | None:
        """Go on with what is read beside answers; what came of it, once it is done"""
        if self._passage is None or self._passage.work is not prompts:
            prepare_masks(prompts)
            self._passage = self.runner.begin(prompts)
        passage, seconds = self._passage, self.scheduler.seconds_beside(answers)
        drawn = passage.advance(seconds)
        if drawn is not None:
            self._passage = None
            self.scheduler.pace.note_layer(passage.num_tokens, passage.slowest, seconds)
            self.scheduler.advance(prompts)
        return drawn

    def _update(self, work: Sequence[Work], drawn: Sequence[Drawn]) -> list[Request]:
        moved: dict[str, Request] = {}
        for item, result in zip(work, drawn, strict=True):
            stream: Any = item.stream
            request: Request = stream.request
            is_gone = self.requests.get(request.request_id) is not request
            if is_gone or stream.finish_reason is not None:
                continue  # it has ended since it was launched
            if request.error is None:
                self._accept(item, stream, result)
            if result.token_ids or request.error is not None:
                moved[request.request_id] = request
        for request in moved.values():
            self._settle(request)
        return list(moved.values())

    def _accept(self, item: Work, stream: Completion, result: Drawn) -> None:
        stream.num_unread -= item.num_drawn > 0
        if any(math.isnan(found[0].logprob) for found in result.prompt_logprobs):
            self._fail(stream)
            return
        stream.request.note_prompt_logprobs(item.prompt_positions, result.prompt_logprobs)
        num_computed = item.end
        if result.state is not None:
            self._take_state(stream, result)
        elif result.token_ids:
            num_computed -= self._append(stream, result)
        if item.block_ids is stream.block_ids:  # it was not preempted meanwhile
            self.scheduler.keep(stream, num_computed)
        if stream.finish_reason is None and stream.turn():
            self.scheduler.turn(stream, self._salt(len(stream), stream.request))

    def _take_state(self, stream: Completion, result: Drawn) -> None:
        if result.token_ids[0] < 0:
            self._fail(stream)
            return
        stream.state = result.state
        stream.finish("stop")
        self._note_tokens(stream.request, 0)

    def _append(self, stream: Completion, result: Drawn) -> int:
        """What was drawn: a token, and as long as guesses were right the ones after them. How many guesses
        were wrong, whose keys are to be computed anew."""
        num_before = len(stream)
        guesses, stream.drafts = stream.drafts, []
        logprobs = result.logprobs or [[]] * len(result.token_ids)
        num_right = 0
        for token_id, guess, ranked in zip(result.token_ids, [*guesses, None], logprobs, strict=False):
            if token_id < 0:
                self._fail(stream)
                break
            stream.append(token_id, ranked)
            if stream.finish_reason is not None or token_id != guess:
                break
            num_right += 1
        num_wrong = len(guesses) - num_right
        stream.num_computed -= num_wrong
        if stream.request.error is None:
            self._note_tokens(stream.request, len(stream) - num_before)
            if guesses:
                self._note_guesses(stream, len(guesses), num_right)
        return num_wrong

    def _note_tokens(self, request: Request, count: int) -> None:
        if request.metrics.first_token_time is None:
            self.counts.prompt_tokens += len(request.prompt_token_ids)
            self.counts.cached_tokens += request.num_cached_tokens
        self.counts.generated_tokens += count
        request.note_token()

    def _note_guesses(self, stream: Completion, num_guessed: int, num_right: int) -> None:
        self.counts.drafts += 1
        self.counts.draft_tokens += num_guessed
        self.counts.accepted_tokens += num_right
        note_guesses(stream, num_guessed, num_right)

    def _fail(self, stream: Completion) -> None:
        """Nobody shall find keys that may have NaN among them."""
        request = stream.request
        if has_choice(stream, self.model.config.vocab_size):
            request.error = NumericalError(
                f"request {request.request_id}: the model's logits are NaN or infinite, "
                "so that no token can be drawn"
            )
        else:
            request.error = RequestError(
                f"request {request.request_id}: no token is left to be drawn, since allowed_token_ids, "
                "bad_words, min_tokens or structured_outputs rule each of them out"
            )
        for completion in request.completions:
            self.blocks.forget(completion.block_ids)
            completion.chain = None

    def _settle(self, request: Request) -> None:
        """Let go of what has ended."""
        for completion in request.completions:
            if completion.finish_reason is not None or request.error is not None:
                self.scheduler.remove(completion)
        if request.is_finished:
            request.metrics.finished_time = time.monotonic()
            self.requests.pop(request.request_id, None)
        if not self.requests:
            self._launched = None  # nobody wants what will come of it

    # ---- what is checked -----------------------------------------------------------------------------------

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if that is what was given, and its tokens"""
        if isinstance(prompt, Mapping):
            prompt = content_of(prompt)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, token_ids_of(prompt)

    def _encoded(self, prompt: Prompt, prompt_name: str | None) -> Prompt:
        """Text to be embedded as its tokens; token ids stay as they are."""
        given = content_of(prompt) if isinstance(prompt, Mapping) else prompt
        if isinstance(given, str):
            return self.model.pooling.encode(given, self.tokenizer, prompt_name)
        if prompt_name is not None:
            raise RequestError("prompt_name is for texts, but the prompt is given as token ids")
        return given

    def _check_ids(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        vocab_size = self.model.config.vocab_size
        named = {
            "the prompt": token_ids,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": [token_id for token_id, _ in params.logit_bias],
        }
        for name, ids in named.items():
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name} has token id {token_id}; the model's are 0 to {vocab_size - 1}"
                    )

    def _room_for(self, num_prompt: int, params: SamplingParams) -> int:
        """How many tokens may follow a prompt."""
        if num_prompt == 0:
            raise RequestError("the prompt has no tokens; the model needs one at least")
        room = self.max_length - num_prompt
        most = self.max_length - (params is not ENCODING)
        if num_prompt > most:
            model_len = self.config.max_model_len or self.model.config.max_position_embeddings
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
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt must be a text or a list of token ids, but is {reprlib.repr(prompt)}")
    ids = list(prompt)
    try:
        if any(isinstance(token_id, bool) for token_id in ids):
            raise TypeError("a token id must be a whole number, not True or False")
        return [integer("prompt", "a token id", token_id) for token_id in ids]
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def check_options(priority: Any, request_id: Any, cache_salt: Any) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be a whole number, but is {priority!r}")
    for name, value in (("request_id", request_id), ("cache_salt", cache_salt)):
        if not isinstance(value, str | None):
            raise RequestError(f"{name} must be a string, but is {value!r}")
        if value is not None and not is_text(value):
            raise RequestError(f"{name} must be text, without halves of surrogate pairs, but is {value!r}")


def check_length(config: EngineConfig, llama: LlamaConfig) -> None:
    """Beyond the length it was trained for a model knows no angles, but for rope that grows with it."""
    longest, wanted = llama.max_position_embeddings, config.max_model_len
    if wanted is not None and wanted > longest and llama.rope.scaling["rope_type"] != "dynamic":
        raise ValueError(f"max_model_len is {wanted}, but the model's max_position_embeddings are {longest}")


def prepare_masks(work: Sequence[Work]) -> None:
    """They are made while the step runs."""
    for item in work:
        if item.num_drawn and item.stream.matcher is not None:
            item.stream.matcher.prepare()


def make_caches(models: Sequence[LlamaForCausalLM], config: EngineConfig) -> list[PagedCache]:
    """A cache for each model, of equally many blocks: as many as kv_cache_memory has room for, or a share of
    what is free, and no more than all streams can fill."""
    llama = models[0].config
    shapes = [block_shape(model, config) for model in models]
    block_bytes = sum(
        shape.num_bytes * model.config.num_hidden_layers for shape, model in zip(shapes, models, strict=True)
    )
    given = config.kv_cache_memory
    num_bytes = given if isinstance(given, int) else share_of(models[0].device)
    most = config.max_num_seqs * -(
        -(config.max_model_len or llama.max_position_embeddings) // config.block_size
    )
    num_blocks = min(num_bytes // block_bytes, most)
    if num_blocks < 1:
        raise ValueError(f"kv_cache_memory: {num_bytes:,} bytes do not hold one block of {block_bytes:,}")
    tell(num_blocks * block_bytes, num_blocks, shapes[0])
    with told_of_memory(f"{num_blocks * block_bytes / 1e6:,.0f} MB of keys and values", models[0].device):
        return [
            PagedCache(model.config.num_hidden_layers, shape, num_blocks, model.device)
            for model, shape in zip(models, shapes, strict=True)
        ]


def block_shape(model: LlamaForCausalLM, config: EngineConfig) -> BlockShape:
    dtype = model.cache_dtype if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
    head_dim = model.config.head_dim
    if dtype == torch.uint8 and head_dim % 32:
        raise ValueError(f"kv_cache_dtype 'q8_0' needs heads of a multiple of 32, but they have {head_dim}")
    return BlockShape(model.config.num_key_value_heads, head_dim, config.block_size, dtype)


def tell(num_bytes: int, num_blocks: int, shape: BlockShape) -> None:
    kind = "q8_0" if shape.dtype == torch.uint8 else str(shape.dtype).removeprefix("torch.")
    blocks = f"{num_blocks:,} blocks of {shape.size} tokens in {kind}"
    print(f"infinilm: keys and values: up to {num_bytes / 1e6:,.0f} MB, {blocks}", file=sys.stderr)
