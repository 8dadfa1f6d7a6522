"""Granite 3: Llama with a multiplier for what is embedded, what is added, scores, and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from infinicore import ops
from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from infinilm.models.registry import register
from infinilm.values import check_number

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
MAX_MULTIPLIER = 1e6


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    model_types = ("granite",)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def _check(self) -> None:
        super()._check()
        for name in MULTIPLIERS:
            self._set(**{name: check_number(name, getattr(self, name), MAX_MULTIPLIER)})


class GraniteAttention(LlamaAttention):
    def __init__(self, config: GraniteConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.scaling = config.attention_multiplier


class GraniteDecoderLayer(LlamaDecoderLayer):
    attention_class = GraniteAttention

    def __init__(self, config: GraniteConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.multiplier = config.residual_multiplier

    def flow(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x = ops.add_scaled(x, attention(x, norm=self.input_layernorm), self.multiplier)
        return ops.add_scaled(x, self.mlp(x, self.post_attention_layernorm), self.multiplier)


class GraniteModel(LlamaModel):
    config: GraniteConfig

    def embed(self, token_ids: Tensor) -> Tensor:
        return ops.scale(super().embed(token_ids), self.config.embedding_multiplier)


@register(
    GGUF(
        "granite",
        keys={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        has_paired_rows=True,
    )
)
class GraniteForCausalLM(LlamaForCausalLM):
    config_class = GraniteConfig
    layer_class = GraniteDecoderLayer
    model_class = GraniteModel
    config: GraniteConfig

    def logits(self, hidden_states: Tensor) -> Tensor:
        return ops.scale(super().logits(hidden_states), 1 / self.config.logits_scaling)
