"""LLM: text in, text out."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from infinicore.checks import integer
from infinilm.cache import DynamicCache
from infinilm.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from infinilm.hub import resolve
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.weights import read_config
from infinilm.sampling import SamplingParams
from infinilm.tokenizer import Detokenizer, Tokenizer

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" at an end-of-text token, "length" at max_tokens


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and what followed it."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


def load_model(
    model: str | Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    activations: str | None = None,
    quantize: str | None = None,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[LlamaForCausalLM, Tokenizer]:
    """A model and its tokenizer: a path, a Hugging Face id, or None for the built-in default."""
    check_arguments(model, device)
    path = resolve(None if model is None else str(model))
    with open_checkpoint(path) as checkpoint:
        tokenizer = tokenizer_of(checkpoint)
        check_vocabulary(checkpoint, tokenizer)
        llama = LlamaForCausalLM.from_checkpoint(checkpoint, device, dtype, activations, quantize, report)
        return llama, tokenizer


def check_arguments(model: str | Path | None, device: torch.device | str | None) -> None:
    """What would only fail, and less clearly, when half a model has been read."""
    if not isinstance(model, str | Path | None) or model == "":
        raise ValueError(
            f"model must be a path, a Hugging Face id such as 'org/name', or None, not {model!r}"
        )
    try:
        torch.zeros(1, device=device or "cpu").item()
    except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device {device!r} cannot be used here: {reason}; take 'cpu', or 'cuda' on a GPU"
        ) from error


def items_of(name: str, wanted: str, value: Any, kind: type | UnionType) -> list[Any]:
    """The items of whatever can be iterated over, all of one kind."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    items = list(value) if is_list else []
    if not is_list or not all(isinstance(item, kind) for item in items):
        raise TypeError(f"{name} must be {wanted}, but are {reprlib.repr(value)}")
    return items


def checked(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be one SamplingParams, but are {reprlib.repr(params)}")
    return params


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.metadata:
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_folder(checkpoint.path)


def check_vocabulary(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Every token has its row. Rows beyond the last token are padding, as Qwen has it."""
    num_rows = read_config(checkpoint).vocab_size
    if tokenizer.vocab_size > num_rows:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has token ids up to {tokenizer.vocab_size - 1}, but the model "
            f"{num_rows} rows of embeddings; take the tokenizer that belongs to this model"
        )


class LLM:
    """A model with its tokenizer: `generate` continues prompts, `chat` answers, `stream` does as it goes."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        activations: str | None = None,
        quantize: str | None = None,
        report: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.model, self.tokenizer = load_model(
            model, device=device, dtype=dtype, activations=activations, quantize=quantize, report=report
        )

    def generate(
        self, prompts: str | Sequence[str], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt."""
        given = [prompts] if isinstance(prompts, str) else prompts
        texts = items_of("prompts", "a string or a list of strings", given, str)
        params = checked(sampling_params or SamplingParams())
        return [self._complete(self.tokenizer.encode(text), params, text) for text in texts]

    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        wanted = "a list of {'role': ..., 'content': ...}, or of such lists"
        given = items_of("messages", wanted, messages, Mapping | list | tuple)
        conversations = [given] if given and isinstance(given[0], Mapping) else given
        params = checked(sampling_params or SamplingParams())
        return [self._complete(self.tokenizer.encode_chat(m), params, None) for m in conversations]

    def stream(self, token_ids: Sequence[int], params: SamplingParams) -> Iterator[tuple[int, str]]:
        """(token, the text it completes) as they come; an end-of-text token has no text of its own."""
        ids = [integer("stream", "a token id", token_id) for token_id in token_ids]
        params = self._with_stops(checked(params), len(ids))
        prompt = torch.tensor([ids], device=self.model.device)
        detokenizer = Detokenizer(self.tokenizer)
        for step, (token,) in enumerate(self.model.steps(prompt, params, DynamicCache()), start=1):
            if token is None:
                return
            text = "" if token in params.stop_token_ids else detokenizer.add(token)
            is_last = step == params.max_tokens or token in params.stop_token_ids
            yield token, text + detokenizer.finish() if is_last else text

    def _complete(self, token_ids: list[int], params: SamplingParams, prompt: str | None) -> RequestOutput:
        pieces = list(self.stream(token_ids, params))
        stops = self._with_stops(params, len(token_ids)).stop_token_ids
        tokens, texts = [token for token, _ in pieces], [text for _, text in pieces]
        reason = "stop" if tokens[-1] in stops else "length"
        return RequestOutput(prompt, token_ids, [CompletionOutput(0, "".join(texts), tokens, reason)])

    def _with_stops(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The parameters with the model's end-of-text tokens, and no more tokens than its context holds."""
        room = self.model.config.max_position_embeddings - num_prompt_tokens
        if num_prompt_tokens == 0 or room < 1:
            limit = self.model.config.max_position_embeddings
            raise ValueError(f"the prompt has {num_prompt_tokens} tokens; the model takes 1 to {limit - 1}")
        ends = () if params.ignore_eos else (*self.tokenizer.eos_token_ids, *self.model.config.eos_token_ids)
        return replace(
            params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=tuple({*params.stop_token_ids, *ends}),
        )
