"""OLMoE: Llama with experts, and with OLMo 2's norms of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from infinilm.models.mixture import GGUF_KEYS, GGUF_MODULES, MixtureConfig, MixtureMLP, stack_experts
from infinilm.models.olmo2 import Olmo2Attention
from infinilm.models.registry import register
from infinilm.models.stored import Stored


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MixtureConfig):
    model_types = ("olmoe",)
    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    num_experts: int = 64
    num_experts_per_tok: int = 8
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = 50279
    pad_token_id: int | None = 1


class OlmoeDecoderLayer(LlamaDecoderLayer):
    attention_class = Olmo2Attention
    mlp_class = MixtureMLP


@register(GGUF("olmoe", GGUF_KEYS, GGUF_MODULES, has_experts=True))
class OlmoeForCausalLM(LlamaForCausalLM):
    config_class = OlmoeConfig
    layer_class = OlmoeDecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        stack_experts(stored, config)
