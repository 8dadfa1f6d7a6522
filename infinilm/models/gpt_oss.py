"""GPT-OSS: experts with biases and a clamped gate, sinks in attention, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infinicore import nn
from infinicore.quantization import BlockType, QuantizedTensor
from infinilm.batch import Batch
from infinilm.cache import attend
from infinilm.config import LlamaConfig, scaling_of
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, Pools
from infinilm.models.mixture import GGUF_KEYS, GGUF_MODULES, MixtureConfig, MixtureMLP, Router
from infinilm.models.registry import register
from infinilm.models.stored import Stored, Weight

MODULES = {
    **GGUF_MODULES,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MixtureConfig):
    model_types = ("gpt_oss",)
    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_experts: int = 128
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its quantisation is known; its frequencies are blended without rounding."""
        content, scaling = dict(super().adapted(content)), scaling_of(content)
        method = content.get("quantization_config")
        if isinstance(method, Mapping) and method.get("quant_method") == "mxfp4":
            content["quantization_config"] = None
        if scaling:
            content |= {"rope_scaling": {"truncate": False, **scaling}, "rope_parameters": None}
        if content.get("swiglu_limit") not in (None, 7.0):
            raise ValueError(f"swiglu_limit = {content['swiglu_limit']} is not supported; expected 7.0")
        return content

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.layer_types is None:
            self._check_sizes("num_hidden_layers")
            kinds = ("sliding_attention", "full_attention")
            self._set(layer_types=[kinds[layer % 2] for layer in range(self.num_hidden_layers)])


class GptOssAttention(LlamaAttention):
    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def attend(self, q: Tensor, batch: Batch, pools: Pools) -> Tensor:
        return attend(pools, q, batch, self.scaling, self.sliding_window, sinks=self.sinks)


class GptOssMLP(MixtureMLP):
    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        del self.gate
        self.router = Router(config.hidden_size, config.num_experts)
        sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.experts = nn.Experts(*sizes, bias=True, activation="swiglu_oai")

    def scores(self, x: Tensor) -> Tensor:
        return self.router(x)  # type: ignore[no-any-return]


class GptOssDecoderLayer(LlamaDecoderLayer):
    attention_class = GptOssAttention
    mlp_class = GptOssMLP


@register(GGUF("gpt-oss", GGUF_KEYS, MODULES, has_experts=True, has_windows=True))
class GptOssForCausalLM(LlamaForCausalLM):
    config_class = GptOssConfig
    layer_class = GptOssDecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        """Hugging Face's files hold gate and up row by row in turn: in blocks, or transposed."""
        stored.rename("self_attn.sinks.weight", "self_attn.sinks")
        for part in ("gate_up", "down"):
            name = f"mlp.experts.{part}_proj"
            stored.join([name], f"{name}.weight", as_rows)
            stored.join([f"{name}_blocks", f"{name}_scales"], f"{name}.weight", as_blocks)
            stored.rename(f"{name}_bias", f"{name}.bias")
            stored.flatten(name)
        stored.deal("mlp.experts.gate_up_proj", ["mlp.experts.gate_proj", "mlp.experts.up_proj"])
        for part in ("gate", "up"):
            stored.flatten(f"mlp.experts.{part}_proj")


def as_rows(experts: Weight) -> Weight:
    """[X, columns, R] -> [X, R, columns]; GGUF's are so already"""
    num_experts, num_columns, num_rows = experts.shape
    return replace(
        experts,
        shape=(num_experts, num_rows, num_columns),
        read=lambda: experts.read().transpose(1, 2),  # type: ignore[union-attr]
    )


def as_blocks(codes: Weight, scales: Weight) -> Weight:
    """uint8 [X, R, G, 16], two values a byte, and [X, R, G] -> X R rows of MXFP4"""
    num_experts, num_rows, num_groups, _ = codes.shape
    shape = (num_experts * num_rows, 32 * num_groups)
    return Weight(
        shape,
        BlockType.MXFP4,
        lambda: QuantizedTensor(mxfp4(codes.read(), scales.read()), BlockType.MXFP4, shape),  # type: ignore[arg-type]
        codes.sources + scales.sources,
    )


def mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Blocks of the exponent, then the first 16 values in the low halves of bytes, the others in the high"""
    values = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)  # [X, R, G, 32]
    packed = values[..., :16] | values[..., 16:] << 4
    return torch.cat([scales.unsqueeze(-1), packed], dim=-1).flatten(2).flatten(0, 1)
