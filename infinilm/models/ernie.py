"""ERNIE 4.5, without experts: Llama that rotates neighbours; one flag gives all its layers biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.phi3 import half_a_head_apart
from infinilm.models.registry import register
from infinilm.models.stored import Stored


@dataclass(frozen=True, kw_only=True)
class Ernie4_5Config(LlamaConfig):
    model_types = ("ernie4_5",)
    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """GGUF files, which have no model_type, say it by the biases that they have."""
        if "model_type" not in content:
            return content
        has_biases = content.get("use_bias") or False
        return {**content, "attention_bias": has_biases, "mlp_bias": has_biases}


@register(GGUF("ernie4_5"))
class Ernie4_5ForCausalLM(LlamaForCausalLM):
    config_class = Ernie4_5Config

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        for part in ("self_attn.q_proj", "self_attn.k_proj"):
            stored.reorder(part, lambda rows: half_a_head_apart(rows, config, are_neighbours=True))
