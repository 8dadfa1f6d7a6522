"""LLaMA: Llama 2 and 3, SmolLM2; and what other models change in files of their own.

A step works on a flat list of tokens (`step`); `forward` lays a batch of rows out as one. Attribute names are
the keys of Hugging Face checkpoints. Shapes: N tokens of a step, R of them with logits, B streams, S new
tokens of each, T all of a stream, H query heads, K key/value heads, D head size, E hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from infinicore import nn, ops
from infinicore.checks import check_usable, number, positive
from infinicore.nn import functional as F
from infinicore.nn.linear import (
    adds_residual,
    lay_together,
    project,
    project_heads,
    project_onto,
    project_through,
)
from infinicore.ops.fused_reference import Where
from infinilm import elsewhere
from infinilm.batch import Batch, Pausing, finished
from infinilm.cache import DynamicCache, PagedCache, attend
from infinilm.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from infinilm.config import EngineConfig, LlamaConfig
from infinilm.elsewhere import knowing
from infinilm.generation import NO_HEAD, GenerationMixin
from infinilm.models.gguf import GGUF
from infinilm.models.inputs import cache_of, check_attention, check_inputs, check_keys, check_states
from infinilm.models.judging import ASKED, Question
from infinilm.models.pooling import Pooling, read_pooling
from infinilm.models.recommended import recommended_sampling
from infinilm.models.registry import class_of, register
from infinilm.models.stored import Stored
from infinilm.models.weights import load_weights
from infinilm.rope import LlamaRoPE
from infinilm.sampling import SamplingParams

__all__ = [
    "AutoLlamaModel",
    "LlamaAttention",
    "LlamaConfig",
    "LlamaDecoderLayer",
    "LlamaForCausalLM",
    "LlamaMLP",
    "LlamaModel",
    "LlamaRMSNorm",
    "grouped_query_attention",
    "multi_head_attention",
    "repeat_kv",
]

LlamaRMSNorm = nn.RMSNorm
MOST_POSITIONS = 1 << 20  # that a caller may name beyond what a model was made for: tables have them all
Cache = PagedCache | DynamicCache
Pools = tuple[Tensor, Tensor]


def repeat_kv(keys: Tensor, values: Tensor, ngroup: int) -> tuple[Tensor, Tensor]:
    """Each key/value head ngroup times in a row: [T, K, D] -> [T, K * ngroup, D]"""
    check_keys("repeat_kv", keys, values)
    ngroup = positive("repeat_kv", "ngroup", ngroup)
    return keys.repeat_interleave(ngroup, dim=1), values.repeat_interleave(ngroup, dim=1)


def multi_head_attention(querys: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention of one stream, the queries being its last ones: [S, H, D], [T, H, D] -> [S, H, D]"""
    check_attention("multi_head_attention", querys, keys, values)
    if querys.shape[1] != keys.shape[1]:
        heads = f"{querys.shape[1]} heads of querys, but {keys.shape[1]} of keys"
        raise ValueError(f"multi_head_attention: there are {heads}; grouped_query_attention shares them")
    scaling = number("multi_head_attention", "scaling", scaling)
    q, k, v = (t.transpose(0, 1) for t in (querys, keys, values))  # [H, S or T, D]
    weights = F.causal_softmax(q @ k.transpose(1, 2) * scaling)  # [H, S, T]
    return (weights @ v).transpose(0, 1)


def grouped_query_attention(querys: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """multi_head_attention where H / K query heads share a head: [S, H, D], [T, K, D] -> [S, H, D]"""
    check_attention("grouped_query_attention", querys, keys, values)
    num_heads, num_kv_heads = querys.shape[1], keys.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly")
    if num_heads != num_kv_heads:
        keys, values = repeat_kv(keys, values, num_heads // num_kv_heads)
    return multi_head_attention(querys, keys, values, scaling)


class LlamaMLP(nn.Module):
    """down(act_fn(gate x) * up x)"""

    act_fn = staticmethod(F.silu)  # to be read: one op has it with the products
    activation = "silu"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, norm: nn.RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """[*, E] -> [*, E]: mlp(x), or of norm(x), with a residual added"""
        layers = self.gate_proj, self.up_proj, self.down_proj
        return project_through(x, *layers, norm, residual, self.activation)

    def lay_out(self) -> None:
        lay_together(self.gate_proj, self.up_proj)


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions over a cache of keys and values.

    project -> rotate -> attend; a model may do each in its own way.
    """

    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = config.num_key_value_groups
        self.scaling = config.head_dim**-0.5
        self.sliding_window = config.window_of(layer_idx)
        self.rotates = True
        self.softcap = 0.0  # of scores, where a model has one
        self.register_parameter("sinks", None)  # [H], logits that take part in every softmax
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.has_output_bias)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        rope_instance: nn.RoPE | None = None,
        *,
        batch: Batch | None = None,
        position_ids: Tensor | None = None,
        norm: nn.RMSNorm | None = None,
        residual: Tensor | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Tokens [N, E] of a batch -> [N, E]: attention(x), or of norm(x), with a residual added. Without a
        batch, see `of_streams`."""
        if batch is None or past_key_values is None:
            where = past_key_values, rope_instance, position_ids
            y = of_streams(partial(self, norm=norm), self.layer_idx, hidden_states, *where)
            return y if residual is None else y + residual
        heads = self.num_key_value_heads, self.head_dim
        pools = past_key_values.room(self.layer_idx, batch, heads, hidden_states)
        q = self.queries(hidden_states, norm, self.rope_of(rope_instance), batch, pools)
        return project_onto(self.attend(q, batch, pools).flatten(1), self.o_proj, residual)

    def queries(
        self, x: Tensor, norm: nn.RMSNorm | None, rope: nn.RoPE | None, batch: Batch, pools: Pools
    ) -> Tensor:
        """[N, E] -> [N, H, D], rotated; the keys and values of x go into the pools. All at once where a model
        does nothing of its own in between."""
        parts = type(self).project, type(self).rotate
        if rope is None or parts != (LlamaAttention.project, LlamaAttention.rotate):
            return self.rotate(*self.project(x if norm is None else norm(x)), rope, batch, pools)
        layers = self.q_proj, self.k_proj, self.v_proj
        where = Where(*rope.rotation(batch.rope_rows, x.dtype), *pools, *places(batch))
        return project_heads(x, layers, norm, where)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, E] -> q [N, H, D], k and v [N, K, D]"""
        projected = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in projected)
        return q, k, v

    def rope_of(self, rope: nn.RoPE | None) -> nn.RoPE | None:
        """What rotates in this layer, of what the model has"""
        return rope if self.rotates else None

    def rotate(
        self, q: Tensor, k: Tensor, v: Tensor, rope: nn.RoPE | None, batch: Batch, pools: Pools
    ) -> Tensor:
        """q, rotated; k, rotated, and v go into the pools"""
        if rope is None:
            ops.store_kv(*pools, k, v, *places(batch), out=pools)
            return q
        return ops.store_heads(q, k, v, *rope.rotation(batch.rope_rows, q.dtype), *pools, *places(batch))

    def attend(self, q: Tensor, batch: Batch, pools: Pools) -> Tensor:
        """[N, H, D] -> [N, H, D]"""
        return attend(pools, q, batch, self.scaling, self.sliding_window, self.softcap, self.sinks)  # type: ignore[arg-type]

    def lay_out(self) -> None:
        lay_together(self.q_proj, self.k_proj, self.v_proj)


def of_streams(
    layer: Callable[..., Tensor],
    layer_idx: int,
    hidden_states: Tensor,
    cache: Cache | None,
    rope: nn.RoPE | None,
    position_ids: Tensor | None,
) -> Tensor:
    """A layer by itself, [B, S, E] -> [B, S, E]: streams go on in a DynamicCache, or begin here"""
    check_states(hidden_states, position_ids, rope)
    held = cache_of(cache)
    shape = hidden_states.shape
    batch = held.place([shape[1]] * shape[0], layer_idx, device=hidden_states.device)
    rows = batch.slots if position_ids is None else position_ids.expand(shape[:2]).flatten().long()
    if isinstance(rope, LlamaRoPE):
        longer = rope.reaching(end_of(rows, rope.rope_parameters.max_position), hidden_states)
        rope, rows = placed(longer, rows, batch.streams)
    batch = replace(batch, rope_rows=rows)
    return layer(hidden_states.flatten(0, 1), held, rope_instance=rope, batch=batch).view(shape)


def placed(rope: LlamaRoPE, positions: Tensor, streams: Tensor) -> tuple[LlamaRoPE, Tensor]:
    """What rotates these tokens [N], and their rows; a stream is a sequence that ends with them"""
    spans = torch.zeros_like(positions).scatter_reduce(0, streams, positions + 1, "amax")[streams]
    return rope.placed(positions, spans)


def end_of(positions: Tensor, longest: int) -> int:
    """How far a rope has to reach for these positions"""
    end, most = int(positions.max()) + 1, max(longest, MOST_POSITIONS)
    if end > most:
        raise IndexError(f"position_ids: position {end - 1} is outside [0, {most})")
    return end


def places(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Where the keys and values of a batch go, in pools"""
    return batch.block_tables, batch.streams, batch.slots


class LlamaDecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))"""

    attention_class: type[LlamaAttention] = LlamaAttention
    mlp_class: type[nn.Module] = LlamaMLP

    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = self.mlp_class(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        use_cache: bool = True,
        rope_instance: nn.RoPE | None = None,
        *,
        batch: Batch | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Tokens [N, E] of a batch -> [N, E]. Without a batch, see `of_streams`."""
        if batch is None:
            where = past_key_values, rope_instance, position_ids
            return of_streams(self, self.self_attn.layer_idx, hidden_states, *where)
        known = {"past_key_values": past_key_values, "rope_instance": rope_instance, "batch": batch}
        return self.flow(hidden_states, partial(self.self_attn, **known))

    def flow(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """What the layer makes of x; attention knows where its keys and values are, and what rotates."""
        if adds_residual(self.self_attn):
            x = attention(x, norm=self.input_layernorm, residual=x)
        else:
            x = ops.add(x, attention(self.input_layernorm(x)))
        if adds_residual(self.mlp):
            return self.mlp(x, norm=self.post_attention_layernorm, residual=x)
        return ops.add(x, self.mlp(self.post_attention_layernorm(x)))


class LlamaModel(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, config: LlamaConfig, layer_class: type[LlamaDecoderLayer] = LlamaDecoderLayer) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope_instance = LlamaRoPE(config.rope)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = True,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 1,
    ) -> Tensor:
        """[B, S] token ids -> [B, logits_to_keep, E], the last of each stream; 0 keeps all.

        attention_mask [B, S] is 0 at padding among the new tokens, on either side. Padding is left out on the
        way in, and comes back as zeros: where it was, or before the last of a stream that has fewer.
        """
        check_inputs(input_ids, position_ids, attention_mask, logits_to_keep)
        cache = cache_of(past_key_values)
        is_real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        is_real = is_real.to(input_ids.device).bool()  # [B, S]
        counts = is_real.sum(1)
        batch = cache.place(counts.tolist(), token_ids=input_ids[is_real], device=input_ids.device)
        positions = batch.slots if position_ids is None else position_ids.expand(input_ids.shape)[is_real]
        rope, rows = self.placed(positions.long(), batch.streams)
        last = counts.cumsum(0) - 1 if logits_to_keep == 1 else None
        states = self.run(replace(batch, rope_rows=rows, logit_rows=last), cache, rope)
        if last is not None:
            return states[:, None]
        if logits_to_keep:
            is_real = is_real.sort(1).values  # the last of each stream stand at the end
        padded = states.new_zeros(*input_ids.shape, states.shape[-1])
        padded[is_real] = states
        return padded[:, -logits_to_keep:]

    def placed(self, positions: Tensor, streams: Tensor) -> tuple[LlamaRoPE, Tensor]:
        """What rotates these tokens [N], and their rows; a stream is a sequence that ends with them"""
        rope = self.rope_reaching(end_of(positions, self.config.max_position_embeddings))
        return placed(rope, positions, streams)

    def rope_reaching(self, num_positions: int) -> LlamaRoPE:
        """Angles of positions below num_positions, for the caller to keep: another thread may want others."""
        rope = self.rope_instance
        if (longer := rope.reaching(num_positions, self.norm.weight)) is not rope:
            self.rope_instance = longer
        return longer

    def run(self, batch: Batch, cache: Cache, rope: nn.RoPE) -> Tensor:
        """The states [R, E] of tokens whose logits are wanted."""
        return finished(self.run_by_layers(batch, cache, rope))

    def run_by_layers(self, batch: Batch, cache: Cache, rope: nn.RoPE) -> Pausing[Tensor]:
        """The same, with a pause after each layer. Ops and views alone: it can be recorded."""
        hidden_states = self.embed(batch.token_ids)  # [N, E]
        for layer in self.layers:
            hidden_states = layer(hidden_states, cache, rope_instance=rope, batch=batch)
            yield
        if batch.logit_rows is not None:
            hidden_states = ops.embedding(batch.logit_rows, hidden_states)
        return self.norm(hidden_states)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] -> [N, E]"""
        return self.embed_tokens(token_ids, self.norm.weight.dtype)


@register(GGUF("llama", has_paired_rows=True, has_windows=True))
class LlamaForCausalLM(nn.Module, GenerationMixin):
    """LlamaModel with the head that turns states into logits, or another; files of embedders have none."""

    config_class: type[LlamaConfig] = LlamaConfig
    layer_class: type[LlamaDecoderLayer] = LlamaDecoderLayer
    model_class: type[LlamaModel] = LlamaModel
    question: Question = ASKED
    pooling: Pooling = Pooling()
    recommended: SamplingParams = SamplingParams()  # unless a request says otherwise

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.use_cache = config.use_cache
        self.model = self.model_class(config, self.layer_class)
        self.lm_head: nn.Linear | None = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.score: nn.Linear | None = None  # of a text, in the files of rerankers
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def has_head(self) -> bool:
        return self.lm_head is not None

    @property
    def max_length(self) -> int:
        """How many tokens a text may have where no other number is asked for"""
        longest = self.config.max_position_embeddings
        return min(self.pooling.max_tokens or longest, longest)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 1,
    ) -> Tensor:
        """[B, S] token ids -> logits [B, logits_to_keep, V] of what follows the last ones; 0 keeps all."""
        use_cache = self.use_cache if use_cache is None else use_cache
        hidden_states = self.model(
            input_ids, position_ids, past_key_values, use_cache, attention_mask, logits_to_keep
        )
        return self.logits(hidden_states)

    def step(self, batch: Batch, cache: Cache, rope: nn.RoPE) -> tuple[Tensor, Tensor]:
        """The states [R, E] of the tokens of a batch that want them, and the logits [R, V] of what follows;
        without a head the states again, of which a token tells as well whether they are numbers"""
        return finished(self.step_by_layers(batch, cache, rope))

    def step_by_layers(self, batch: Batch, cache: Cache, rope: nn.RoPE) -> Pausing[tuple[Tensor, Tensor]]:
        """The same, with a pause after each layer"""
        states = yield from self.model.run_by_layers(batch, cache, rope)
        return states, self.logits(states) if self.has_head else states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[*, E] -> [*, V]; the one way from states to logits"""
        if self.lm_head is None:
            raise ValueError(NO_HEAD)
        return self.lm_head(hidden_states)

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        """Give the weights of a checkpoint the names and forms they have here, where files have others."""

    @classmethod
    @knowing(elsewhere.ENGINE)
    def from_pretrained(
        cls,
        model_path: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        activations: str | None = None,
        quantize: str | None = None,
    ) -> LlamaForCausalLM:
        """The model in a Hugging Face folder or a GGUF file, of whichever kind it is.

        dtype None keeps weights as they are stored, quantised ones too, and computes in float32 on a CPU.
        What enters quantised layers is then rounded to 16 bits, which changes a product by 1e-9 of its square
        (12 where AMX meets four-bit weights: 1e-7). activations "int16" asks for 16 bits everywhere; "int8"
        is faster and less exact, "float32" slower and exact. quantize "q8_0" or "q4_0" makes a quantised
        model of a checkpoint of floats while it is loaded.
        """
        check_usable(device)
        config = EngineConfig(device=device, dtype=dtype, activations=activations, quantize=quantize)
        with open_checkpoint(model_path) as checkpoint:
            return cls.from_checkpoint(checkpoint, config)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig,
        report: Callable[[int], None] = lambda num_bytes: None,
    ) -> LlamaForCausalLM:
        """The model of an open checkpoint; `report` is told the bytes of each weight once it is in."""
        found = class_of(checkpoint)
        if not issubclass(found, cls):
            raise CheckpointError(f"{checkpoint.path}: its model is a {found.__name__}, not a {cls.__name__}")
        pooling, recommended = read_pooling(checkpoint), recommended_sampling(checkpoint)
        model = load_weights(checkpoint, config, report)
        model.pooling, model.recommended = pooling, recommended
        if model.device.type != "cpu":
            model.lay_out()
        return model

    def lay_out(self) -> None:
        """Put weights that are multiplied with one input side by side, for a GPU to take them as one."""
        for module in self.model.modules():
            if isinstance(module, LlamaAttention | LlamaMLP):
                module.lay_out()


class AutoLlamaModel:
    """Loads a model and says how long it took."""

    @staticmethod
    @knowing(elsewhere.ENGINE)
    def from_pretrained(
        model_path: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> LlamaForCausalLM:
        start = time.perf_counter()
        print(f"loading {model_path} on {device or 'cpu'} as {dtype or 'stored'}")
        model = LlamaForCausalLM.from_pretrained(model_path, device, dtype)
        print(f"loaded in {(time.perf_counter() - start) * 1000:.0f} ms")
        return model
