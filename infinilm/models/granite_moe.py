"""Granite 3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.granite import GGUF_SCALES, GraniteConfig, GraniteDecoderLayer, GraniteForCausalLM
from infinilm.models.mixture import GGUF_KEYS, GGUF_MODULES, MixtureConfig, MixtureMLP, stack_experts
from infinilm.models.registry import register
from infinilm.models.stored import Stored

# As files of either kind have them, the second since transformers has experts as one tensor
NAMES = {
    "router.layer.weight": "gate.weight",
    "router.weight": "gate.weight",
    "input_linear.weight": "experts.gate_up_proj",
    "experts.gate_up_proj": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "experts.down_proj": "experts.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(GraniteConfig, MixtureConfig):
    model_types = ("granitemoe",)
    without = ("mlp_bias",)

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Shares of experts always add up to one."""
        return {**super().adapted(content), "norm_topk_prob": True}


class GraniteMoeDecoderLayer(GraniteDecoderLayer):
    mlp_class = MixtureMLP


@register(
    GGUF(
        "granitemoe",
        {**GGUF_SCALES, **GGUF_KEYS},
        GGUF_MODULES,
        {"attention_multiplier": None},
        has_paired_rows=True,
        has_experts=True,
    )
)
class GraniteMoeForCausalLM(GraniteForCausalLM):
    config_class = GraniteMoeConfig
    layer_class = GraniteMoeDecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        for theirs, ours in NAMES.items():
            stored.rename(f"block_sparse_moe.{theirs}", f"mlp.{ours}")
        stack_experts(stored, config)
