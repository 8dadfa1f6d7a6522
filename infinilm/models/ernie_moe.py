"""ERNIE 4.5 with experts: chosen by softmax and a bias that has no part in their shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

from torch import Tensor

from infinicore import ops
from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.deepseek_v3 import BIAS_MODULES
from infinilm.models.ernie import Ernie4_5Config, Ernie4_5ForCausalLM
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaDecoderLayer, LlamaMLP
from infinilm.models.mixture import (
    GGUF_KEYS,
    GGUF_MODULES,
    MAX_EXPERTS,
    BiasedRouter,
    MixtureConfig,
    MixtureMLP,
    place_bias,
    stack_experts,
)
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.values import check_whole

# What would be computed in another way
USUAL: dict[str, tuple[Any, ...]] = {"use_bias": (None, False), "moe_norm_min": (None, 1e-12)}
OURS = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}


@dataclass(frozen=True, kw_only=True)
class Ernie4_5MoeConfig(Ernie4_5Config, MixtureConfig):
    model_types = ("ernie4_5_moe",)
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: int = 4
    head_dim: int = None  # type: ignore[assignment]  # hidden_size / num_attention_heads
    num_experts: int = 64
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1536
    norm_topk_prob: bool = True
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1  # the first layer with experts
    moe_layer_end_index: int = -1  # the last; -1: that of the model
    moe_layer_interval: int = 1  # of so many layers the last has experts

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Shares of experts always add up to one. A number of two names has that under the usual one."""
        for key, usual in USUAL.items():
            if content.get(key) not in usual:
                raise ValueError(f"{key} = {short(content[key])} is not supported in an ernie4_5_moe model")
        own = {ours: name for name, ours in OURS.items() if name in content and content.get(ours) is None}
        numbers = {ours: content[name] for ours, name in own.items()}
        return {**super().adapted(content), **numbers, "norm_topk_prob": True}

    def _check(self) -> None:
        super()._check()
        count = LIMITS["num_hidden_layers"]
        # All of them are one MLP.
        most = min(MAX_EXPERTS, LIMITS["intermediate_size"] // self.moe_intermediate_size)
        check_whole("moe_num_shared_experts", self.moe_num_shared_experts, 0, most)
        check_whole("moe_layer_start_index", self.moe_layer_start_index, 0, count)
        check_whole("moe_layer_end_index", self.moe_layer_end_index, -1, count)
        check_whole("moe_layer_interval", self.moe_layer_interval, 1, count)

    def has_experts(self, layer: int) -> bool:
        last = self.moe_layer_end_index if self.moe_layer_end_index >= 0 else self.num_hidden_layers
        return self.moe_layer_start_index <= layer <= last and (layer + 1) % self.moe_layer_interval == 0


class Ernie4_5MoeMLP(MixtureMLP):
    def __init__(self, config: Ernie4_5MoeConfig) -> None:
        super().__init__(config)
        self.gate: BiasedRouter = BiasedRouter(config)
        size = config.moe_intermediate_size * config.moe_num_shared_experts
        self.shared_experts = LlamaMLP(replace(config, intermediate_size=size)) if size else None

    def choice(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.gate.e_score_correction_bias
        return ops.route(scores, self.num_chosen, self.is_normalized, "softmax", bias, (1, 1))

    def mixed(self, x: Tensor) -> Tensor:
        mixed = super().mixed(x)
        return mixed if self.shared_experts is None else ops.add(mixed, self.shared_experts(x))


class Ernie4_5MoeDecoderLayer(LlamaDecoderLayer):
    mlp_class = Ernie4_5MoeMLP

    def __init__(self, config: Ernie4_5MoeConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        if not config.has_experts(layer_idx):
            self.mlp = LlamaMLP(config)


KEYS = {
    **GGUF_KEYS,
    "expert_shared_count": "moe_num_shared_experts",
    "expert_shared_feed_forward_length": "shared_size",  # which the count and that of one say too
    "interleave_moe_layer_step": "moe_layer_interval",
    "leading_dense_block_count": "moe_layer_start_index",
}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
MODULES = {**GGUF_MODULES, **SHARED, **BIAS_MODULES}


@register(GGUF("ernie4_5-moe", KEYS, MODULES, {"moe_layer_start_index": 0}, has_experts=True))
class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    config_class = Ernie4_5MoeConfig
    layer_class = Ernie4_5MoeDecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        """The bias stands under a name of its own; layers that guess further tokens are not read."""
        stored.drop("model.mtp_")
        for name in ("mlp.moe_statics", "mlp.gate.moe_statics"):
            stored.rename(f"{name}.e_score_correction_bias", "mlp.gate.e_score_correction.bias")
        stored.flatten("mlp.gate.e_score_correction")  # [1, experts]
        place_bias(stored)
        stack_experts(stored, config)
        super().arrange(stored, config)
