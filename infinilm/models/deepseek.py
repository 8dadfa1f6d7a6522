"""DeepSeek-V2: keys and values of latents; the first layers are dense, the others have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, ClassVar

from torch import Tensor

from infinicore import nn, ops
from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.latent import LatentAttention, LatentConfig, joined
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from infinilm.models.mixture import (
    GGUF_KEYS,
    GGUF_MODULES,
    MAX_EXPERTS,
    MixtureConfig,
    MixtureMLP,
    stack_experts,
)
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.rope import MAX_FACTOR
from infinilm.values import check_number, check_whole

# What others of the family do in another way; 1 is how llama.cpp writes softmax. Of shares that add up to one
# the makers' code, transformers and llama.cpp each make something else.
USUAL: dict[str, tuple[Any, ...]] = {
    "topk_method": (None, "greedy"),
    "scoring_func": (None, "softmax", 1),
    "norm_topk_prob": (None, False),
    "moe_layer_freq": (None, 1),
    "use_mla": (None, True),
}
LOG_MULTIPLIER = "yarn_log_multiplier"


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig(MixtureConfig):
    usual: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # what keys may say that have no field
    n_shared_experts: int = 1
    first_k_dense_replace: int = 0
    routed_scaling_factor: float = 1.0

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        for key, usual in cls.usual.items():
            if content.get(key, usual[0]) not in usual:
                kind = cls.model_types[0]
                raise ValueError(f"{key} = {short(content[key])} is not supported in a {kind} model")
        if "model_type" not in content:
            return content
        return {**content, "num_experts": content.get("n_routed_experts"), "n_routed_experts": None}

    def _check(self) -> None:
        super()._check()
        # All of them are one MLP.
        most = min(MAX_EXPERTS, LIMITS["intermediate_size"] // self.moe_intermediate_size)
        check_whole("n_shared_experts", self.n_shared_experts, 1, most)
        check_whole("first_k_dense_replace", self.first_k_dense_replace, 0, LIMITS["num_hidden_layers"])
        check_number("routed_scaling_factor", self.routed_scaling_factor, MAX_FACTOR)


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(LatentConfig, SharedExpertsConfig):
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    usual = USUAL
    vocab_size: int = 102400
    num_experts: int = 64
    moe_intermediate_size: int = 1407
    n_shared_experts: int = 2

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        content = super().adapted(content)
        return content if "model_type" in content else of_gguf(content)


def of_gguf(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """GGUF files, which have no model_type, have how wide a head is, and of yarn a tenth of mscale_all_dim,
    which mscale then equals."""
    plain_dim = content["head_dim"] - content.get("qk_rope_head_dim", 0)
    weight, scaling = 10 * content.get(LOG_MULTIPLIER, 0), content["rope_scaling"]
    if weight and scaling is not None:
        scaling = {**scaling, "mscale": weight, "mscale_all_dim": weight}
    own = {"qk_nope_head_dim": plain_dim, "partial_rotary_factor": None, "rope_scaling": scaling}
    return {**content, **own}


class SharedExpertsMLP(MixtureMLP):
    def __init__(self, config: SharedExpertsConfig) -> None:
        super().__init__(config)
        self.factor = config.routed_scaling_factor
        size = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = LlamaMLP(replace(config, intermediate_size=size))

    def mixed(self, x: Tensor) -> Tensor:
        return ops.add_scaled(self.shared_experts(x), super().mixed(x), self.factor)


class DenseFirstDecoderLayer(LlamaDecoderLayer):
    mlp_class: type[nn.Module] = SharedExpertsMLP

    def __init__(self, config: SharedExpertsConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        if layer_idx < config.first_k_dense_replace:
            self.mlp = LlamaMLP(config)


class DeepseekV2DecoderLayer(DenseFirstDecoderLayer):
    attention_class: type[LlamaAttention] = LatentAttention


SHARED_KEYS = {
    **GGUF_KEYS,
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_gating_func": "scoring_func",
}
SHARED_MODULES = {
    **GGUF_MODULES,
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
KEYS = {
    **SHARED_KEYS,
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    # Where the two above are those of a cache of latents, as newer files have them, these count.
    "attention.key_length_mla": "head_dim",
    "attention.value_length_mla": "v_head_dim",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    f"rope.scaling.{LOG_MULTIPLIER}": LOG_MULTIPLIER,
}
MODULES = {
    **SHARED_MODULES,
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q_a", "q_b", "kv_b", "k_b", "v_b")},
    **{f"attn_{part}_a_norm": f"self_attn.{part}_a_layernorm" for part in ("q", "kv")},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
}


@register(GGUF("deepseek2", KEYS, MODULES, {"q_lora_rank": None}, has_experts=True))
class DeepseekV2ForCausalLM(LlamaForCausalLM):
    config_class: type[LlamaConfig] = DeepseekV2Config
    layer_class: type[LlamaDecoderLayer] = DeepseekV2DecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        stack_experts(stored, config)
        stored.join(["self_attn.k_b_proj", "self_attn.v_b_proj"], "self_attn.kv_b_proj.weight", joined)
