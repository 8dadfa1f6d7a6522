"""GenerationMixin.generate: Hugging Face's shape over the same step that the engine runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infinicore import get_num_threads
from infinicore.checks import integer, positive, sizes
from infinicore.quantization import PackedTensor
from infinilm import elsewhere
from infinilm.batch import Stream
from infinilm.cache import BlockShape, PagedCache
from infinilm.elsewhere import knowing
from infinilm.runner import Runner
from infinilm.sampling import SamplingParams
from infinilm.work import Work

if TYPE_CHECKING:
    from infinilm.config import LlamaConfig

PREFILL_TOKENS = 512
# Multiplications of one product on two threads of a CPU, about a tenth of a second: interrupts are heard
# between two ops.
PRODUCT_WORK = 1 << 31
BLOCK_SIZE = 64
NO_HEAD = (
    "the model has no head (lm_head), so that it embeds texts but cannot generate any; "
    "take a checkpoint that has one"
)

Prompt = Tensor | Sequence[Sequence[int]]
Callback = Callable[[list[int | None]], bool | None]


class GenerationMixin:
    """Adds `generate` to a model with a `step`."""

    config: LlamaConfig
    device: Any

    @property
    def has_head(self) -> bool:
        """Whether there are logits, without which nothing is generated"""
        return True

    @knowing(elsewhere.GENERATE)
    @torch.inference_mode()
    def generate(  # noqa: PLR0913  Hugging Face's shape
        self,
        input_ids: Prompt,
        max_new_tokens: int = 20,
        *,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        callback: Callback | None = None,
    ) -> Tensor:
        """Prompts [B, S] (or lists of ids of any lengths) -> [B, S + new], prompts included.

        Greedy unless do_sample is true or one of temperature, top_k, top_p, min_p is given. A stream that
        meets an end-of-text token is filled up with pad_token_id. attention_mask is 0 at padding. callback
        gets each step's tokens, None for streams that have ended, and may return True to stop.
        """
        if not self.has_head:
            raise ValueError(NO_HEAD)
        pad = self.pad_id(pad_token_id)
        rows, prompts = as_prompts(input_ids, attention_mask, pad)
        params = sampling_params(
            do_sample,
            {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
            max_tokens=positive("generate", "max_new_tokens", max_new_tokens),
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        generated = []
        for tokens in self.steps(prompts, params, self.eos_ids(eos_token_id)):
            generated.append([pad if token is None else token for token in tokens])
            if callback is not None and callback(tokens):
                break
        return torch.cat([rows, torch.tensor(generated, device="cpu").T], dim=1).to(self.device)

    def steps(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, stop_ids: Sequence[int]
    ) -> Iterator[list[int | None]]:
        """The next token of every stream, step by step; None once a stream has ended."""
        num_new = params.max_tokens or 1
        streams = [
            Stream(prompt, params, secrets.randbits(63) if params.seed is None else params.seed)
            for prompt in prompts
        ]
        for stream in streams:
            stream.switch_at = self.config.rope.switch_at(len(stream))
        runner = self.runner(streams, num_new)
        running = streams
        for step in range(num_new):
            drawn: dict[Stream, int] = {}
            while due := [stream for stream in running if stream not in drawn]:
                drawn.update(self.advanced(runner, due))
            yield [drawn.get(stream) for stream in streams]
            running = [stream for stream in running if drawn[stream] not in stop_ids]
            if not running or step + 1 == num_new:
                return

    @property
    def cache_dtype(self) -> torch.dtype:
        """In which keys and values are kept: as states are, or in float16 where layers round what enters them
        to integers, which changes more than that does."""
        weights = (getattr(module, "weight", None) for module in self.modules())  # type: ignore[attr-defined]
        rounds = any(isinstance(weight, PackedTensor) for weight in weights)
        return torch.float16 if rounds else self.model.norm.weight.dtype  # type: ignore[attr-defined]

    def runner(self, streams: Sequence[Stream], num_new: int) -> Runner:
        """With a cache that has the blocks of all streams, which are given to them"""
        num_blocks = 0
        for stream in streams:
            end = num_blocks + -(-(len(stream) + num_new) // BLOCK_SIZE)
            stream.block_ids = list(range(num_blocks, end))
            num_blocks = end
        max_length = max(map(len, streams)) + num_new
        cache = self.new_cache(num_blocks)
        return Runner(self, cache, len(streams), max_length, step_tokens(self.config, self.device))

    def new_cache(self, num_blocks: int) -> PagedCache:
        config = self.config
        shape = BlockShape(config.num_key_value_heads, config.head_dim, BLOCK_SIZE, self.cache_dtype)
        try:
            return PagedCache(config.num_hidden_layers, shape, num_blocks, self.device)
        except RuntimeError as error:  # which is all that torch calls memory that there is not
            found = f"keys and values of {num_blocks * BLOCK_SIZE} tokens do not fit on {self.device}"
            raise MemoryError(f"generate: {found}; ask for fewer max_new_tokens or prompts") from error

    def advanced(self, runner: Runner, streams: Sequence[Stream]) -> dict[Stream, int]:
        """Compute what is pending, as much as one step takes, and append what is drawn where it ends."""
        budget, work = runner.step_tokens, []
        for stream in streams:
            if count := min(stream.num_pending, budget):
                work.append(Work(stream, count))
                budget -= count
        drawn = {}
        for item, result in zip(work, runner.run(work), strict=True):
            item.stream.num_computed += item.num_tokens
            for token in result.token_ids:
                check_drawn(token)
                item.stream.token_ids.append(token)
                item.stream.begin_anew_if_due()
                drawn[item.stream] = token
        return drawn

    def eos_ids(self, given: int | Sequence[int] | None) -> tuple[int, ...]:
        return self.config.eos_token_ids if given is None else sizes("generate", "eos_token_id", given)

    def pad_id(self, given: int | None) -> int:
        """The model never sees it, so that any number that is given will do."""
        if given is not None:
            return integer("generate", "pad_token_id", given)
        candidates = (self.config.pad_token_id, *self.config.eos_token_ids, 0)
        return next(i for i in candidates if i is not None and 0 <= i < self.config.vocab_size)


def sampling_params(
    do_sample: bool | None, choice: Mapping[str, float | None], **others: Any
) -> SamplingParams:
    """Greedy unless sampling is asked for, or something of how tokens are chosen; None leaves it as usual."""
    if not isinstance(do_sample, bool | None):  # "no" would be a yes
        raise TypeError(f"do_sample must be True, False or None, but is {short(do_sample)}")
    chosen: dict[str, Any] = {name: value for name, value in choice.items() if value is not None}
    params = SamplingParams(**chosen, **others)
    is_sampled = any(chosen.values()) if do_sample is None else do_sample
    return params if is_sampled else replace(params, temperature=0.0)


def step_tokens(config: LlamaConfig, device: torch.device) -> int:
    """How many tokens are fed at once: fewer to large models, where a product takes long on few threads."""
    if device.type != "cpu":
        return PREFILL_TOKENS
    work = PRODUCT_WORK * max(get_num_threads() // 2, 1)
    return min(PREFILL_TOKENS, max(work // (config.hidden_size * config.intermediate_size), 16))


def check_drawn(token: int) -> None:
    if token < 0:
        raise ArithmeticError("the model's logits are NaN or infinite, so that no token can be drawn")


def as_prompts(
    input_ids: Prompt, attention_mask: Tensor | None, pad_id: int
) -> tuple[Tensor, list[list[int]]]:
    """The rows [B, S] that the result begins with, and the token ids of each prompt without its padding"""
    if isinstance(input_ids, Tensor):
        return as_rows(input_ids, attention_mask)
    if attention_mask is not None:
        raise ValueError("attention_mask is for input_ids in a tensor; lists of ids have no padding")
    prompts = as_lists(input_ids)
    length = max(map(len, prompts))
    rows = [[pad_id] * (length - len(prompt)) + prompt for prompt in prompts]
    return torch.tensor(rows, device="cpu"), prompts


def as_rows(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, list[list[int]]]:
    is_whole = not (input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool)
    if input_ids.dim() != 2 or input_ids.numel() == 0 or not is_whole:
        found = f"{tuple(input_ids.shape)} of {input_ids.dtype}"
        raise ValueError(f"input_ids must be [batch, seq] of integers and not empty, but are {found}")
    rows = input_ids.cpu().long()  # torch joins few unsigned types to others
    is_real = torch.ones_like(rows) if attention_mask is None else as_mask(attention_mask)
    if is_real.shape != rows.shape or not bool(is_real.bool().any(1).all()):
        raise ValueError(
            f"attention_mask must be {tuple(rows.shape)} as input_ids are, with a token in each row"
        )
    return rows, [row[real.bool()].tolist() for row, real in zip(rows, is_real, strict=True)]


def as_mask(attention_mask: Tensor) -> Tensor:
    try:
        return torch.as_tensor(attention_mask, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        found = short(attention_mask)
        raise TypeError(f"attention_mask must be a tensor, but is {found}: {error}") from None


def as_lists(input_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        prompts = [[integer("generate", "a token id", i) for i in prompt] for prompt in input_ids]
    except TypeError:
        wanted = "a tensor [batch, seq] or lists of token ids"
        raise TypeError(f"input_ids must be {wanted}, but are {short(input_ids)}") from None
    if not prompts or not all(prompts):
        raise ValueError("input_ids must hold at least one prompt, and every prompt at least one token")
    return prompts
