"""Mixtral: Llama with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from infinilm.models.mixture import GGUF_KEYS, GGUF_MODULES, MixtureConfig, MixtureMLP, stack_experts
from infinilm.models.registry import register
from infinilm.models.stored import Stored


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MixtureConfig):
    model_types = ("mixtral",)
    without = ("attention_bias",)
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    norm_topk_prob: bool = True

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Shares of experts always add up to one."""
        return {**super().adapted(content), "norm_topk_prob": True}


class MixtralDecoderLayer(LlamaDecoderLayer):
    mlp_class = MixtureMLP


@register(GGUF("llama", GGUF_KEYS, GGUF_MODULES, has_experts=True, has_paired_rows=True, has_windows=True))
class MixtralForCausalLM(LlamaForCausalLM):
    config_class = MixtralConfig
    layer_class = MixtralDecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        stored.rename("block_sparse_moe.gate", "mlp.gate")
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        stack_experts(
            stored, config, {ours: f"block_sparse_moe.experts.{{}}.{w}" for ours, w in names.items()}
        )
