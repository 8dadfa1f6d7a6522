"""OLMo 2: norms after attention and MLP instead of before, and of all queries and all keys of a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from infinicore import ops
from infinicore.nn.linear import project
from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaRMSNorm
from infinilm.models.registry import register


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    model_types = ("olmo2",)
    without = ("mlp_bias",)
    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = 50279
    pad_token_id: int | None = 1


class Olmo2Attention(LlamaAttention):
    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = LlamaRMSNorm(config.num_attention_heads * config.head_dim, config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(config.num_key_value_heads * config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in (self.q_norm(q), self.k_norm(k), v))
        return q, k, v


class Olmo2DecoderLayer(LlamaDecoderLayer):
    """x + norm(attention(x)), then x + norm(mlp(x))"""

    attention_class = Olmo2Attention

    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        del self.input_layernorm
        self.post_feedforward_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def flow(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x = ops.add(x, self.post_attention_layernorm(attention(x)))
        return ops.add(x, self.post_feedforward_layernorm(self.mlp(x)))


GGUF_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@register(GGUF("olmo2", modules=GGUF_NORMS))
class Olmo2ForCausalLM(LlamaForCausalLM):
    config_class = Olmo2Config
    layer_class = Olmo2DecoderLayer
