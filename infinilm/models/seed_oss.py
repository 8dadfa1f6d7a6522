"""Seed-OSS: Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.registry import register


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    model_types = ("seed_oss",)
    vocab_size: int = 155136
    intermediate_size: int = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1

    @property
    def has_output_bias(self) -> bool:
        return self.attention_out_bias


@register(GGUF("seed_oss", modules={"post_attention_norm": "post_attention_layernorm"}))
class SeedOssForCausalLM(LlamaForCausalLM):
    config_class = SeedOssConfig
