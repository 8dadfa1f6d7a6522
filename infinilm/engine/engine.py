"""Engine: requests in, steps, outputs. A step is schedule -> run -> update, each of them in one place."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import infinicore
from infinilm.cache import PagedCache
from infinilm.config import EngineConfig, LlamaConfig
from infinilm.draw import has_choice
from infinilm.engine import prefixes
from infinilm.engine.adapters import Adapters
from infinilm.engine.blocks import Blocks
from infinilm.engine.caches import make_caches
from infinilm.engine.draft import ModelDrafter, NgramDrafter, SpeculativeConfig, note_guesses
from infinilm.engine.intake import Intake
from infinilm.engine.request import Completion, NumericalError, QueueFull, Request, RequestError
from infinilm.engine.scheduler import Scheduler
from infinilm.engine.stats import STEP_TOKENS, Histogram, Progress, Stats
from infinilm.generation import NO_HEAD, step_tokens
from infinilm.models.llama import LlamaForCausalLM
from infinilm.runner import Passage, Pending, Runner
from infinilm.tokenizer import Tokenizer
from infinilm.work import Drawn, Work, num_tokens_of

# Parameters that say which tokens may not be drawn
RULING_OUT = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")


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
        self.max_length = min(config.max_model_len or model.max_length, room)
        tokens = config.max_num_batched_tokens or step_tokens(model.config, model.device)
        self.scheduler = Scheduler(self.blocks, config.max_num_seqs, tokens, model.device.type == "cpu")
        self.counts = self.scheduler.counts
        self.step_sizes = Histogram(STEP_TOKENS)
        self.intake = Intake(model, tokenizer, config, self.adapters, self.blocks, self.max_length)
        self.make, self.make_encoding = self.intake.make, self.intake.make_encoding  # in any thread
        self.runner = Runner(model, self.cache, config.max_num_seqs, self.max_length, tokens)
        self.drafter = self._drafter(draft, others)
        if self.drafter is not None:  # which looks at the last token to guess what follows
            self.runner.is_ahead = False
        self._passage: Passage | None = None
        self.requests: dict[str, Request] = {}
        self._launched: Pending | None = None
        self._last_read = 0.0
        self._moving: Request | None = None  # which is given its next tokens at this moment

    def anew(self) -> Engine:
        """One for the same models, with nothing in it"""
        return Engine(self.model, self.tokenizer, self.config, self.draft)

    def close(self) -> None:
        """End its threads; no step follows."""
        self.intake.close()

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
        check_draft(draft, self.model.config)
        runner = Runner(draft, caches[0], self.config.max_num_seqs, self.max_length)
        return ModelDrafter(config, self.scheduler, runner)

    @property
    def _runners(self) -> list[Runner]:
        """Of the model, and of one that guesses"""
        return [self.runner, *([self.drafter.runner] if isinstance(self.drafter, ModelDrafter) else [])]

    # ---- requests in and out -------------------------------------------------------------------------------

    def has_room_for(self, request: Request) -> bool:
        scheduler, config = self.scheduler, self.config
        num_tokens = scheduler.num_waiting_tokens + len(request.prompt_token_ids)
        has_place = scheduler.num_waiting < config.max_queue and num_tokens <= config.max_queue_tokens
        return has_place or not scheduler.num_waiting

    def enqueue(self, request: Request) -> None:
        """Let a request in, or QueueFull at a time when too many wait."""
        if request.request_id in self.requests:
            raise RequestError(f"request_id {request.request_id!r} is in use")
        if request.is_finished:  # no step would end it again
            raise RequestError(f"request {request.request_id!r} has ended already; make another")
        if not self.has_room_for(request):
            raise QueueFull(
                f"{self.scheduler.num_waiting} requests of {self.scheduler.num_waiting_tokens} tokens wait "
                f"already; max_queue is {self.config.max_queue}, max_queue_tokens "
                f"{self.config.max_queue_tokens}"
            )
        if not self.requests:
            for runner in self._runners:
                runner.look_for_hooks()  # while others run it would take their time
        self.requests[request.request_id] = request
        for completion in request.completions:
            self.scheduler.add(completion)

    def abort(self, request_id: str) -> None:
        """Forget a request, whatever it is at; its output ends here."""
        request = self.requests.get(request_id)
        if request is None:
            return
        try:
            for completion in request.completions:
                if completion.finish_reason is None:
                    completion.finish("abort")
            self._settle(request)
        except BaseException:  # an interrupt: no block is lost, and the request may be aborted again
            self._begin_anew()
            raise

    # ---- what it tells -------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """The numbers of this moment; any thread may ask."""
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
        num_cached = request.num_cached_tokens  # at its beginning; a preempted stream has none at first
        num_done = total if first.num_drawn else min(max(first.num_computed, num_cached), total)
        return Progress(total, num_cached, num_done)

    def save_prefixes(self, path: str | Path) -> int:
        """Write what the cache knows to a file, for another process with this model; the number of blocks"""
        self.runner.settle()
        return prefixes.save(path, self.model, self.cache, self.blocks)

    def load_prefixes(self, path: str | Path) -> int:
        """Take over saved prefixes, as far as there is room; ValueError if they are of another model."""
        self.runner.settle()
        return prefixes.load(path, self.model, self.cache, self.blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes, as after a change of weights; False, and none, while there are requests.

        Recordings are forgotten too: they hold the layers and tensors that the model had.
        """
        if self.requests:
            return False
        self.blocks.forget(list(self.blocks.contents))
        for runner in self._runners:
            runner.begin_anew()
        return True

    # ---- a step --------------------------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Move requests forward; those are returned that have something new.

        Where the runner is ahead, the next step is launched before this one is read, and what is done with
        the tokens of this one is done meanwhile. Of a stream that turns out to have ended the next step
        computes a token too many, which is dropped.
        """
        try:
            return self._step()
        except BaseException:  # an interrupt, memory that is not there: others may go on with their requests
            self._begin_anew()
            raise

    def _begin_anew(self) -> None:
        """After a step or an abort that ended midway: what came of it is lost, and is computed again."""
        self._launched = self._passage = None
        if self._moving is not None:
            self._moving.error = RuntimeError(
                f"request {self._moving.request_id}: its step was interrupted in the midst of a token"
            )
            self._moving = None
        for request in [request for request in self.requests.values() if request.is_finished]:
            request.metrics.finished_time = time.monotonic()
            del self.requests[request.request_id]
        streams = (stream for request in self.requests.values() for stream in request.completions)
        self.scheduler.begin_anew(stream for stream in streams if stream.finish_reason is None)

    def _step(self) -> list[Request]:
        work: Sequence[Work] = []
        drawn: list[Drawn] = []
        if (launched := self._launched or self._launch()) is not None:
            may_be_followed = launched.may_be_followed and not self.scheduler.beside
            self._launched = self._launch() if may_be_followed else None
            work, drawn = launched.work, self._finish(launched)
        beside = self.scheduler.beside if self._launched is None else []
        if beside and (read := self._read_beside(beside, work)) is not None:
            work, drawn = [*work, *beside], [*drawn, *read]
            self.scheduler.beside = []
        if work:
            self.step_sizes.add(num_tokens_of(work))
        return self._update(work, drawn)

    def _finish(self, pending: Pending) -> list[Drawn]:
        """What came of it; it ran since it was launched, or since the one before it was done."""
        drawn = pending.read()
        start, self._last_read = max(pending.start, self._last_read), time.perf_counter()
        if pending.is_settled and all(item.num_drawn == item.num_tokens for item in pending.work):
            self.scheduler.pace.note_answers(num_tokens_of(pending.work), self._last_read - start)
        return drawn

    def _launch(self) -> Pending | None:
        """Begin the next step, if there is anything to do."""
        if self.drafter is not None:
            self.drafter.guess()
        work = self.scheduler.schedule()
        if not work:
            return None
        prepare_masks(work)
        pending = self.runner.launch(work)
        self.scheduler.advance(work)
        return pending

    def _read_beside(self, prompts: Sequence[Work], answers: Sequence[Work]) -> list[Drawn] | None:
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
            if stream.finish_reason is not None:
                continue  # it has ended since it was launched
            request = self._moving = stream.request
            self._accept(item, stream, result)
            self._moving = None
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
        if stream.finish_reason is None and stream.begin_anew_if_due():
            self.scheduler.switch(stream, self.intake.salt(len(stream), stream.request))

    def _take_state(self, stream: Completion, result: Drawn) -> None:
        if result.token_ids[0] < 0:
            self._fail(stream)
            return
        stream.state = result.state
        stream.finish("stop")
        self._note_tokens(stream.request, 0)

    def _append(self, stream: Completion, result: Drawn) -> int:
        """Take what was drawn: a token, and as long as guesses were right those after it; the number of
        guesses that were wrong, whose keys are to be computed anew."""
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
        metrics = request.metrics
        metrics.last_token_time = time.monotonic()
        if metrics.first_token_time is None:
            metrics.first_token_time = metrics.last_token_time
            self.counts.prompt_tokens += len(request.prompt_token_ids)
            self.counts.cached_tokens += request.num_cached_tokens
        self.counts.generated_tokens += count

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
            names = [name for name in RULING_OUT if getattr(request.params, name)]
            request.error = RequestError(
                f"no token is left to be drawn after {' and '.join(names)}", next(iter(names), None)
            )
        for completion in request.completions:
            self.blocks.forget(completion.block_ids)
            completion.chain = None
            completion.finish("abort")

    def _settle(self, request: Request) -> None:
        """Let go of what has ended."""
        for completion in request.completions:
            if completion.finish_reason is not None:
                self.scheduler.remove(completion)
        if request.is_finished:
            request.metrics.finished_time = time.monotonic()
            self.requests.pop(request.request_id, None)
        if not self.requests:
            self._launched = None  # nobody wants what will come of it
            self.runner.settle()  # the caller may change the model


def check_length(config: EngineConfig, llama: LlamaConfig) -> None:
    """Beyond what its rope reaches a model knows no angles."""
    longest, wanted = llama.longest, config.max_model_len
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_model_len is {wanted}, but the model's rope reaches {longest} positions")


def check_draft(draft: LlamaForCausalLM, llama: LlamaConfig) -> None:
    """What it guesses are tokens of the model."""
    if not draft.has_head:
        raise ValueError(f"speculative_config: {NO_HEAD}")
    if draft.config.vocab_size != llama.vocab_size:
        sizes = f"{draft.config.vocab_size} tokens, but the model {llama.vocab_size}"
        raise ValueError(f"speculative_config: the draft model has {sizes}; they must be the same")


def prepare_masks(work: Sequence[Work]) -> None:
    """They are made while the step runs."""
    for item in work:
        if item.num_drawn and item.stream.matcher is not None:
            item.stream.matcher.prepare()
