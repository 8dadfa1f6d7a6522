"""GLM-4: Llama with biases on q, k and v that rotates neighbours in the first half of each head. Its files
have gate and up as one matrix. Those of type glm4: with norms after attention and MLP too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from infinicore import ops
from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaRMSNorm
from infinilm.models.phi3 import FUSED, PartlyRotatedConfig, half_a_head_apart, split_fused
from infinilm.models.registry import register
from infinilm.models.stored import Stored


@dataclass(frozen=True, kw_only=True)
class GlmConfig(PartlyRotatedConfig):
    model_types: ClassVar[tuple[str, ...]] = ("glm",)
    without = ("mlp_bias",)
    biases_output = False
    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True
    partial_rotary_factor: float = 0.5
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = (151329, 151336, 151338)
    pad_token_id: int | None = 151329


@register(GGUF("chatglm", modules=FUSED))
class GlmForCausalLM(LlamaForCausalLM):
    config_class: type[GlmConfig] = GlmConfig

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        split_fused(stored, config)
        for part in ("self_attn.q_proj", "self_attn.k_proj"):
            stored.reorder(part, lambda rows: half_a_head_apart(rows, config, are_neighbours=True))


@dataclass(frozen=True, kw_only=True)
class Glm4Config(GlmConfig):
    model_types = ("glm4",)


class Glm4DecoderLayer(LlamaDecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))"""

    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.post_self_attn_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_mlp_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def flow(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x = ops.add(x, self.post_self_attn_layernorm(attention(x, norm=self.input_layernorm)))
        return ops.add(x, self.post_mlp_layernorm(self.mlp(x, norm=self.post_attention_layernorm)))


GGUF_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}


@register(GGUF("glm4", modules={**FUSED, **GGUF_NORMS}))
class Glm4ForCausalLM(GlmForCausalLM):
    config_class = Glm4Config
    layer_class = Glm4DecoderLayer
