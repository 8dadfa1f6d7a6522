"""Granite 3: Llama with a multiplier for what is embedded, what is added, scores, and logits.

GGUF files of Granite 4 that have no Mamba layers are the same, and may not rotate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from infinicore import ops
from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from infinilm.models.registry import register
from infinilm.values import check_number

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
MIN_MULTIPLIER, MAX_MULTIPLIER = 1e-6, 1e6  # of which the quotients are float32's too
GGUF_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
GGUF_ROPE = {"rope.scaling.finetuned": "has_rope"}  # as llama.cpp reads it here
# Of Granite 4: sizes of layers that are not there
IDLE_KEYS = {
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_d_inner",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    model_types: ClassVar[tuple[str, ...]] = ("granite",)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = 1.0  # None: that of Llama
    logits_scaling: float = 1.0
    has_rope: bool = True

    def _check(self) -> None:
        super()._check()
        for name in MULTIPLIERS:
            if getattr(self, name) is not None:
                checked = check_number(name, getattr(self, name), MAX_MULTIPLIER, MIN_MULTIPLIER)
                self._set(**{name: checked})


class GraniteAttention(LlamaAttention):
    def __init__(self, config: GraniteConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.rotates = config.has_rope
        if config.attention_multiplier is not None:
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
        keys={**GGUF_SCALES, **GGUF_ROPE, **IDLE_KEYS},
        constants={"attention_multiplier": None},
        has_paired_rows=True,
    )
)
class GraniteForCausalLM(LlamaForCausalLM):
    config_class: type[GraniteConfig] = GraniteConfig
    layer_class: type[LlamaDecoderLayer] = GraniteDecoderLayer
    model_class = GraniteModel
    config: GraniteConfig

    def logits(self, hidden_states: Tensor) -> Tensor:
        return ops.scale(super().logits(hidden_states), 1 / self.config.logits_scaling)
