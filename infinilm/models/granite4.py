"""Granite 4, of attention alone: Granite that may not rotate, and whose files call its MLP shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from infinilm.config import LlamaConfig
from infinilm.models.granite import GraniteConfig, GraniteForCausalLM
from infinilm.models.registry import register
from infinilm.models.stored import Stored

ATTENTION = ("attention", "full_attention")  # two names of one


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(GraniteConfig):
    model_types = ("granitemoehybrid",)
    without = ("mlp_bias",)

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Where files say nothing there are Mamba layers, experts, and no rotation."""
        types = content.get("layer_types")
        if not isinstance(types, list | tuple) or any(kind not in ATTENTION for kind in types):
            raise ValueError(f"layer_types {short(types)} is not supported; expected 'attention' alone")
        return {
            "num_local_experts": 8,
            **content,
            "layer_types": None,
            "intermediate_size": content.get("shared_intermediate_size", 1024),
            "has_rope": content.get("position_embedding_type") == "rope",
        }


@register()
class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    config_class = GraniteMoeHybridConfig

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        halves = [config.intermediate_size] * 2
        stored.split("shared_mlp.input_linear", ["mlp.gate_proj", "mlp.up_proj"], halves)
        stored.rename("shared_mlp.output_linear", "mlp.down_proj")
