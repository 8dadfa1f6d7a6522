"""GenerationMixin.generate: the plain loop, a prefill and then a token a step for every stream of a batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infinicore.graph import Graph, RecordError
from infinilm.cache import DynamicCache
from infinilm.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from infinilm.config import LlamaConfig

PREFILL_CHUNK = 512
# Multiplications of one product on a CPU, about a tenth of a second: interrupts are heard between two ops.
PRODUCT_WORK = 1 << 31

Prompt = Tensor | Sequence[Sequence[int]]
Callback = Callable[[list[int | None]], bool | None]


class GenerationMixin:
    """Adds `generate` to a model that maps token ids to the logits of the next ones."""

    config: LlamaConfig
    device: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """torch.nn.Module's, of the class this is mixed into"""
        return super().__call__(*args, **kwargs)  # type: ignore[misc,no-any-return]

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
        past_key_values: DynamicCache | None = None,
        callback: Callback | None = None,
    ) -> Tensor:
        """Prompts [B, S] (or lists of ids of any lengths) -> [B, S + new], prompts included.

        Greedy unless do_sample is true or one of temperature, top_k, top_p, min_p is given. A stream that
        meets an end-of-text token is filled up with pad_token_id. attention_mask is 0 at padding. callback
        gets each step's tokens, None for streams that have ended, and may return True to stop.
        """
        pad = self.pad_id(pad_token_id)
        token_ids, mask = as_batch(input_ids, attention_mask, pad, self.device)
        is_greedy = not do_sample if do_sample is not None else not (temperature or top_k or top_p or min_p)
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=0.0 if is_greedy else 1.0 if temperature is None else temperature,
            top_k=top_k or 0,
            top_p=1.0 if top_p is None else top_p,
            min_p=min_p or 0.0,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop_token_ids=self.eos_ids(eos_token_id),
        )
        generated = []
        cache = past_key_values if past_key_values is not None else DynamicCache()
        for tokens in self.steps(token_ids, params, cache, mask, pad):
            generated.append(filled(tokens, pad))
            if callback is not None and callback(tokens):
                break
        return torch.cat([token_ids, torch.tensor(generated, device=token_ids.device).T], dim=1)

    def steps(
        self,
        token_ids: Tensor,
        params: SamplingParams,
        cache: DynamicCache,
        attention_mask: Tensor | None = None,
        pad_token_id: int = 0,
        step: DecodeStep | None = None,
    ) -> Iterator[list[int | None]]:
        """The next token of every stream of token_ids [B, S], step by step; None once a stream has ended.

        step, if given, is used in place of a new DecodeStep on this cache.
        """
        streams = [Stream(params, row, i) for i, row in enumerate(real_tokens(token_ids, attention_mask))]
        rows = logits_of_streams(self.prefill(token_ids, cache, attention_mask))
        step = DecodeStep(self, cache) if step is None else step
        num_steps = params.max_tokens or max(self.config.max_position_embeddings - cache.get_seq_length(), 1)
        for i in range(num_steps):
            tokens = [stream.next_token(row) for stream, row in zip(streams, rows, strict=True)]
            yield tokens
            if all(stream.has_ended for stream in streams) or i + 1 == num_steps:
                return
            rows = step(filled(tokens, pad_token_id))

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, cache: DynamicCache, attention_mask: Tensor | None) -> Tensor:
        """The logits after a prompt, fed in chunks: memory stays bounded, and an interrupt is heard soon.

        A rope whose frequencies depend on the whole length must see the prompt whole.
        """
        length, rope = cache.get_seq_length() + token_ids.shape[1], self.config.rope
        can_cut = attention_mask is None and rope.regime(1) == rope.regime(length)
        size = chunk_length(self.config, len(token_ids), self.device) if can_cut else token_ids.shape[1]
        for chunk in torch.split(token_ids, size, dim=1):
            logits = self(input_ids=chunk, past_key_values=cache, attention_mask=attention_mask)
        return logits

    def eos_ids(self, given: int | Sequence[int] | None) -> tuple[int, ...]:
        if given is None:
            return self.config.eos_token_ids
        return (given,) if isinstance(given, int) else tuple(given)

    def pad_id(self, given: int | None) -> int:
        candidates = (given, self.config.pad_token_id, *self.config.eos_token_ids, 0)
        return next(i for i in candidates if i is not None and 0 <= i < self.config.vocab_size)


class DecodeStep:
    """One token a stream -> the logits [V] of what follows it in each, valid until the next step.

    It is recorded at its first run and replayed while the cache has room. Where that cannot be (a device or
    dtype, padding, weights without a native kernel), the model is run as ever.

    A replay leaves nothing but weights in the CPU's caches, so that each call into torch after it takes tens
    of microseconds: tokens are written to memory that the recording reads, the logits are views made once.
    """

    def __init__(self, model: Any, cache: DynamicCache) -> None:
        self.model = model
        self.cache = cache
        self.graph: Graph[Tensor] | None = None
        is_float32 = model.model.norm.weight.dtype == torch.float32
        self.can_record = is_float32 and cache.key_mask is None and not model.config.rope.is_dynamic

    def __call__(self, tokens: Sequence[int]) -> Sequence[Tensor]:
        if not self.can_record:
            return self.run_plain(tokens)
        position = self.cache.get_seq_length()
        self.cache.begin(len(tokens), 1, None)
        if self.graph is None or not self.is_good_for(position):
            return self.record(tokens, position)
        self.tokens[:] = array("q", tokens)
        self.replay(self.graph)
        self.cache.advance(1)
        return self.rows

    def is_good_for(self, position: int) -> bool:
        """Whether what was recorded is right at this position: the keys have room, the rope its angles."""
        is_same_rope: bool = self.rope.rope_parameters.regime(position + 1) == self.rope.regime
        return is_same_rope and position < self.end

    def replay(self, graph: Graph[Tensor]) -> None:
        graph.replay()

    @torch.inference_mode()
    def record(self, tokens: Sequence[int], position: int) -> Sequence[Tensor]:
        self.cache.make_room(1)
        self.rope = self.model.model.rope_reaching(position + 1)
        self.end = min(self.rope.max_seq_len, self.cache.num_slots)
        self.tokens = array("q", tokens)
        self.token_ids = torch.frombuffer(self.tokens, dtype=torch.int64)[:, None]
        self.positions = self.cache.slots[:, None]  # the same where there is no padding
        try:
            self.graph = Graph.record(self.compute)
        except RecordError:
            self.can_record = False
            self.cache.truncate(position)
            return self.run_plain(tokens)
        self.rows = logits_of_streams(self.graph.result)
        return self.rows

    def compute(self) -> Tensor:
        hidden_states = self.model.model.run_layers(self.token_ids, self.positions, self.cache, self.rope)
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden_states))
        return logits

    @torch.inference_mode()
    def run_plain(self, tokens: Sequence[int]) -> Sequence[Tensor]:
        token_ids = torch.tensor(tokens, device=self.model.device)[:, None]
        return logits_of_streams(self.model(input_ids=token_ids, past_key_values=self.cache))


def logits_of_streams(logits: Tensor) -> Sequence[Tensor]:
    """[B, S, V] -> the last logits [V] of each stream, where they are sampled: float32 on the CPU"""
    return logits[:, -1].cpu().float().unbind()


class Stream:
    """One sequence of a batch while it grows."""

    def __init__(self, params: SamplingParams, token_ids: Tensor, index: int) -> None:
        self.sampler = Sampler(params, index)
        self.token_ids = token_ids.cpu()
        self.has_ended = False

    def next_token(self, logits: Tensor) -> int | None:
        """The next token, or None once the stream has ended."""
        if self.has_ended:
            return None
        params = self.sampler.params
        token = self.sampler.next_token(logits, self.token_ids)
        if params.repetition_penalty != 1.0:  # nothing else looks back
            self.token_ids = torch.cat([self.token_ids, torch.tensor([token])])
        self.has_ended = token in params.stop_token_ids
        return token


def chunk_length(config: LlamaConfig, batch_size: int, device: torch.device) -> int:
    """How many tokens of each prompt are fed at once: fewer to large models, where a product takes long."""
    if device.type != "cpu":
        return PREFILL_CHUNK
    work = batch_size * config.hidden_size * config.intermediate_size
    return min(PREFILL_CHUNK, max(PRODUCT_WORK // work, 16))


def filled(tokens: list[int | None], pad: int) -> list[int]:
    return [pad if token is None else token for token in tokens]


def as_batch(
    input_ids: Prompt, attention_mask: Tensor | None, pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Token ids [B, S] and their mask; prompts of several lengths are padded on the left."""
    if isinstance(input_ids, Tensor):
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise ValueError(
                f"input_ids must be [batch, seq] and not empty, but are {tuple(input_ids.shape)}"
            )
        has_padding = attention_mask is not None and not bool(attention_mask.bool().all())
        return input_ids.to(device), attention_mask if has_padding else None
    if not input_ids or any(len(prompt) == 0 for prompt in input_ids):
        raise ValueError("input_ids must hold at least one prompt, and every prompt at least one token")
    length = max(map(len, input_ids))
    rows = [[pad_id] * (length - len(prompt)) + list(prompt) for prompt in input_ids]
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in input_ids])
    return torch.tensor(rows, device=device), None if bool(mask.all()) else mask


def real_tokens(token_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    if mask is None:
        return list(token_ids)
    return [row[keep.bool().to(row.device)] for row, keep in zip(token_ids, mask, strict=True)]
