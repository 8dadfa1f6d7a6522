"""Qwen2-MoE: Qwen2 with experts, and one that all tokens go through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, ClassVar

from torch import Tensor

from infinicore import nn, ops
from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from infinilm.models.mixture import GGUF_KEYS, GGUF_MODULES, MixtureConfig, MixtureMLP, Router, stack_experts
from infinilm.models.qwen import Qwen2Config
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.values import check_whole

SHARED_KEYS = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SHARED_MODULES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(Qwen2Config, MixtureConfig):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe",)
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    max_position_embeddings: int = 32768
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    decoder_sparse_step: int = 1  # of so many layers the last has experts
    mlp_only_layers: tuple[int, ...] = ()  # and none of these

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        if content.get("use_sliding_window") not in (None, False):
            raise ValueError(f"use_sliding_window is not supported in a {cls.model_types[0]} model")
        content = {**content, "sliding_window": None, "layer_types": None}  # files have them all the same
        has_bias = content.get("qkv_bias")
        return super().adapted(content if has_bias is None else {**content, "attention_bias": has_bias})

    def _check(self) -> None:
        super()._check()
        limit = LIMITS["intermediate_size"]
        check_whole("shared_expert_intermediate_size", self.shared_expert_intermediate_size, 1, limit)
        check_whole("decoder_sparse_step", self.decoder_sparse_step, 1, LIMITS["num_hidden_layers"])
        layers = self.mlp_only_layers
        if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
            raise ValueError(f"mlp_only_layers must be numbers of layers, but is {short(layers)}")
        self._set(mlp_only_layers=tuple(layers))

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class Qwen2MoeMLP(MixtureMLP):
    def __init__(self, config: Qwen2MoeConfig) -> None:
        super().__init__(config)
        size = config.shared_expert_intermediate_size
        self.shared_expert = LlamaMLP(replace(config, intermediate_size=size))
        self.shared_expert_gate = Router(config.hidden_size, 1, bias=False)

    def mixed(self, x: Tensor) -> Tensor:
        shared = ops.gate_rows(self.shared_expert(x), self.shared_expert_gate(x))
        return ops.add(super().mixed(x), shared)


class Qwen2MoeDecoderLayer(LlamaDecoderLayer):
    mlp_class: type[nn.Module] = Qwen2MoeMLP

    def __init__(self, config: Qwen2MoeConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        if not config.has_experts(layer_idx):
            self.mlp = LlamaMLP(config)


@register(
    GGUF("qwen2moe", {**GGUF_KEYS, **SHARED_KEYS}, {**GGUF_MODULES, **SHARED_MODULES}, has_experts=True)
)
class Qwen2MoeForCausalLM(LlamaForCausalLM):
    config_class: type[LlamaConfig] = Qwen2MoeConfig
    layer_class: type[LlamaDecoderLayer] = Qwen2MoeDecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        stack_experts(stored, config)
        stored.flatten("mlp.shared_expert_gate")  # a vector in GGUF
