"""LLM: text in, text out, over an engine that the caller runs."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from infinilm.arguments import (
    OF_GENERATE,
    OF_POOLING,
    OF_STREAM,
    as_conversations,
    as_pairs,
    as_prompts,
    as_request_errors,
    as_variables,
    one_each,
    with_options,
)
from infinilm.config import EngineConfig
from infinilm.elsewhere import knowing
from infinilm.engine.adapters import LoRARequest
from infinilm.engine.engine import Engine
from infinilm.engine.intake import Prompt, limit_of
from infinilm.engine.request import (
    EmbeddingRequestOutput,
    Request,
    RequestError,
    RequestOutput,
    ScoringRequestOutput,
)
from infinilm.models.judging import Judge
from infinilm.progress import progress
from infinilm.sampling import SamplingParams
from infinilm.startup import Report, make_engine, tell_nobody
from infinilm.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model with its tokenizer and engine: `generate` continues prompts, `chat` answers, `stream` does as
    it goes. Keyword arguments are the fields of EngineConfig."""

    @with_options
    def __init__(self, model: str | Path | None = None, report: Report = tell_nobody, **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        self._begin(make_engine(self.config, report))
        self.model, self.tokenizer = self.engine.model, self.engine.tokenizer

    def _begin(self, engine: Engine) -> None:
        self._engine, self._pid = engine, os.getpid()
        self._lock = threading.Lock()  # held for a step, so that callers in other threads move along
        self._unwanted: list[str] = []  # requests that nobody waits for any more

    @property
    def engine(self) -> Engine:
        if self._pid != os.getpid():  # in a fork, whose parent may have been in the midst of a step
            self._begin(self._engine.anew())
        return self._engine

    @knowing(OF_GENERATE)
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, token ids, {"prompt_token_ids": ...}, or a list of such.

        Of several prompts those with a lower priority number go first. An adapter may be given for all of
        them, or one, or None, for each.
        """
        given = as_prompts(prompts)
        default = self.get_default_sampling_params()
        params = one_each("sampling_params", sampling_params, SamplingParams, len(given), default)
        priorities = one_each("priority", priority, int, len(given), 0)
        loras = one_each("lora_request", lora_request, LoRARequest | None, len(given), None)
        with as_request_errors():
            requests = [
                self.engine.make(prompt, own, priority=rank, cache_salt=cache_salt, lora_request=lora)
                for prompt, own, rank, lora in zip(given, params, priorities, loras, strict=True)
            ]
        self._finish(requests, use_tqdm)
        return [request.output() for request in requests]

    @knowing(OF_POOLING)
    def embed(
        self,
        prompts: Any,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, given as for `generate`: the state of its last token after the last norm,
        scaled to length one unless the model's files have it otherwise. prompt_name is of a prompt in those
        files, such as "query", that stands before each text. Of longer prompts the first
        truncate_prompt_tokens are read, -1 being as many as the model takes; without it they are refused."""
        given = as_prompts(prompts)
        loras = one_each("lora_request", lora_request, LoRARequest | None, len(given), None)
        with as_request_errors():
            requests = [
                self.engine.make_encoding(
                    prompt, prompt_name, truncate_prompt_tokens, cache_salt=cache_salt, lora_request=lora
                )
                for prompt, lora in zip(given, loras, strict=True)
            ]
        self._finish(requests, use_tqdm)
        return [request.embedding(self.model.pooling.vector(request.state())) for request in requests]

    @knowing(OF_POOLING)
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each document answers the query, or its own of several: from 0 to 1, as a reranker has it,
        or as any other model says yes or no. An instruction tells a reranker what to look for.
        Where a question is longer than truncate_prompt_tokens, its document is cut; -1 is as for `embed`."""
        judge = Judge(self.model, self.tokenizer, self.engine.max_length)
        limit = limit_of(truncate_prompt_tokens, self.engine.max_length)
        with as_request_errors():
            requests = [
                self.engine.make_encoding(judge.prompt(*pair, instruction, limit), cache_salt=cache_salt)
                for pair in as_pairs(queries, documents)
            ]
        self._finish(requests, use_tqdm)
        return [request.scoring(judge.score(request.state())) for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. A template that knows tools is given them. What is
        left of the keywords are its variables, also those of chat_template_kwargs."""
        variables = as_variables({"tools": tools, **template_variables}, chat_template_kwargs)
        most = self.engine.max_length
        with as_request_errors():
            prompts = [
                self.tokenizer.encode_chat(conversation, max_tokens=most, **variables)
                for conversation in as_conversations(messages)
            ]
        return self.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
        )

    @knowing(OF_STREAM)
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[tuple[int, str]]:
        """(token, the text that can be shown since the last one) as they come, of one continuation."""
        default = self.get_default_sampling_params()
        (checked,) = one_each("sampling_params", params, SamplingParams, 1, default)
        if checked.n != 1:
            raise RequestError(f"stream gives one continuation, but n is {checked.n}; generate gives several")
        with as_request_errors():
            request = self.engine.make(prompt, checked, lora_request=lora_request)
        (completion,) = request.completions
        text = request.new_text()  # a step may bring several tokens, which are told apart here
        with closing(self._steps([request])) as steps:  # it ends with its caller, whoever still holds it
            for _ in steps:
                with self._lock:  # in other threads' steps a last token is there before the end that it is
                    tokens = completion.token_ids[completion.num_prompt + text.num_tokens :]
                    num_drawn, has_ended = completion.num_drawn, completion.finish_reason is not None
                for token in tokens:
                    num_shown = len(text.text)
                    is_shown = checked.include_stop_str_in_output or token not in completion.stop_ids
                    text.add(token, is_shown)
                    if has_ended and text.num_tokens == num_drawn:
                        text.finish()
                    yield token, text.text[num_shown:]

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What applies where a call has none: the model's own, if its files recommend any"""
        return self.engine.model.recommended

    def save_prefixes(self, path: str | Path) -> int:
        """Write what the cache knows to a file, for another process with this model; the number of blocks"""
        engine = self.engine  # before its lock: a fork has another of both
        with self._lock:
            return engine.save_prefixes(path)

    def load_prefixes(self, path: str | Path) -> int:
        """Take over saved prefixes, as far as there is room; ValueError if they are of another model."""
        engine = self.engine
        with self._lock:
            return engine.load_prefixes(path)

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes, as after a change of weights; False, and none, while there are requests."""
        engine = self.engine
        with self._lock:
            return engine.reset_prefix_cache()

    def _finish(self, requests: list[Request], use_tqdm: bool) -> None:
        is_shown = use_tqdm and len(requests) > 1
        bar = progress("prompts", len(requests), is_shown)
        with bar as advance, closing(self._steps(requests)) as steps:
            for finished in steps:
                advance(len(finished))

    def _steps(self, requests: Sequence[Request]) -> Generator[list[Request], None, None]:
        """Run steps until all requests have ended; after each, those that have ended since the last one.

        Between two of them anybody may run others, which move these requests as well.
        """
        engine, waiting, running = self.engine, deque(requests), dict[str, Request]()
        try:
            while waiting or running:
                with self._lock:
                    self._forget_unwanted()
                    while waiting and engine.has_room_for(waiting[0]):
                        request = waiting.popleft()
                        running[request.request_id] = request
                        engine.enqueue(request)
                    engine.step()
                ended = [running.pop(request_id) for request_id in running.keys() - engine.requests.keys()]
                for request in ended:
                    if request.error is not None:
                        raise request.error
                yield ended
        finally:  # an error, an interrupt, a caller who stopped listening
            if engine is self._engine:  # which a fork has since taken another for
                self._give_up(running)

    def _give_up(self, request_ids: Iterable[str]) -> None:
        """Whoever runs a step at this moment, perhaps this very thread, will forget them before the next."""
        self._unwanted += request_ids
        if not self._lock.locked():
            with self._lock:  # an interrupt between acquire() and a try would leave it locked
                self._forget_unwanted()

    def _forget_unwanted(self) -> None:
        while self._unwanted:
            self._engine.abort(self._unwanted[0])
            del self._unwanted[0]  # not before it is done, which an interrupt may prevent
