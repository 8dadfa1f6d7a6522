"""Hunyuan, without experts: Llama with a norm of each query and key head, after they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from infinicore import nn, ops
from infinilm.batch import Batch
from infinilm.config import LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaRMSNorm, Pools
from infinilm.models.registry import register
from infinilm.rope import MAX_FACTOR, MAX_THETA, rope_type_of
from infinilm.values import check_number


@dataclass(frozen=True, kw_only=True)
class HunYuanDenseV1Config(LlamaConfig):
    model_types = ("hunyuan_v1_dense",)
    without = ("mlp_bias",)
    vocab_size: int = 290943
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Files may say that heads have norms, which they always have."""
        return {**content, "use_qk_norm": None}

    def _fill_in(self) -> None:
        """What files call dynamic and give an alpha is another base, whatever the length."""
        super()._fill_in()
        self._check_sizes("head_dim")
        scaling, size = self.rope_scaling or {}, self.head_dim
        if rope_type_of(scaling) == "dynamic" and scaling.get("alpha") and size > 2:
            alpha = check_number("rope_scaling: alpha", scaling["alpha"], MAX_FACTOR)
            theta = check_number("rope_theta", self.rope_theta, MAX_THETA)
            self._set(rope_theta=theta * alpha ** (size / (size - 2)), rope_scaling=None)


class HunYuanAttention(LlamaAttention):
    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.query_layernorm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)

    def rotate(
        self, q: Tensor, k: Tensor, v: Tensor, rope: nn.RoPE | None, batch: Batch, pools: Pools
    ) -> Tensor:
        if rope is not None:
            q, k = (ops.rope(part, *rope.rotation(batch.rope_rows, q.dtype)) for part in (q, k))
        return super().rotate(self.query_layernorm(q), self.key_layernorm(k), v, None, batch, pools)


class HunYuanDecoderLayer(LlamaDecoderLayer):
    attention_class = HunYuanAttention


GGUF_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


@register(GGUF("hunyuan-dense", modules=GGUF_NORMS))
class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    config_class = HunYuanDenseV1Config
    layer_class = HunYuanDecoderLayer
