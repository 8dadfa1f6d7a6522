"""GLM-4.5 with experts, chosen as DeepSeek-V3's; the first half of each head is rotated, by its halves."""

from __future__ import annotations

from dataclasses import dataclass

from infinilm.config import LlamaConfig
from infinilm.models.deepseek import SHARED_KEYS, SHARED_MODULES, DenseFirstDecoderLayer
from infinilm.models.deepseek_v3 import (
    BIAS_MODULES,
    GROUP_KEYS,
    GroupedConfig,
    GroupedMLP,
    drop_guessing_layers,
)
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaForCausalLM
from infinilm.models.mixture import place_bias, stack_experts
from infinilm.models.phi3 import PartlyRotatedConfig, half_a_head_apart
from infinilm.models.qwen import Qwen3Attention
from infinilm.models.registry import register
from infinilm.models.stored import Stored


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(PartlyRotatedConfig, GroupedConfig):
    model_types = ("glm4_moe",)
    without = ("mlp_bias",)
    biases_output = False
    vocab_size: int = 151552
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1408
    first_k_dense_replace: int = 1
    use_qk_norm: bool = False  # a norm of each query and key head
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


class Glm4MoeDecoderLayer(DenseFirstDecoderLayer):
    mlp_class = GroupedMLP

    def __init__(self, config: Glm4MoeConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        attention_class = Qwen3Attention if config.use_qk_norm else LlamaAttention
        self.self_attn = attention_class(config, layer_idx)


NORMS = {"post_attention_norm": "post_attention_layernorm"}


@register(
    GGUF(
        "glm4moe",
        {**SHARED_KEYS, **GROUP_KEYS},
        {**SHARED_MODULES, **BIAS_MODULES, **NORMS},
        {"norm_topk_prob": False, "first_k_dense_replace": 0},
        may_norm_heads=True,
        has_experts=True,
        has_sigmoids=True,
    )
)
class Glm4MoeForCausalLM(LlamaForCausalLM):
    config_class = Glm4MoeConfig
    layer_class = Glm4MoeDecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        if isinstance(config, GroupedConfig):
            drop_guessing_layers(stored, config)
        place_bias(stored)
        stack_experts(stored, config)
        for part in ("q_proj", "k_proj", "q_norm", "k_norm"):
            stored.reorder(f"self_attn.{part}", lambda rows: half_a_head_apart(rows, config))
