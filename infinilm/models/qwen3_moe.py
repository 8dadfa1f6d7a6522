"""Qwen3-MoE: Qwen3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.models.gguf import GGUF
from infinilm.models.mixture import GGUF_KEYS, GGUF_MODULES, MixtureMLP
from infinilm.models.qwen import Qwen3Attention
from infinilm.models.qwen2_moe import Qwen2MoeConfig, Qwen2MoeDecoderLayer, Qwen2MoeForCausalLM
from infinilm.models.registry import register


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen2MoeConfig):
    model_types = ("qwen3_moe",)
    biases_output = True
    intermediate_size: int = 6144
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    attention_bias: bool = False
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Some files speak of Qwen2-MoE's biases and shared expert, which it never has, and of norms of
        heads, which it always has."""
        settled = ("qkv_bias", "shared_expert_intermediate_size", "use_qk_norm")
        return super().adapted({key: value for key, value in content.items() if key not in settled})


class Qwen3MoeDecoderLayer(Qwen2MoeDecoderLayer):
    attention_class = Qwen3Attention
    mlp_class = MixtureMLP


@register(GGUF("qwen3moe", GGUF_KEYS, GGUF_MODULES, {"norm_topk_prob": True}, has_experts=True))
class Qwen3MoeForCausalLM(Qwen2MoeForCausalLM):
    config_class = Qwen3MoeConfig
    layer_class = Qwen3MoeDecoderLayer
