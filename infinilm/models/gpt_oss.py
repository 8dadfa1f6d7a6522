"""GPT-OSS: experts with biases and a clamped gate, sinks in attention, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from infinicore import nn
from infinilm.config import LlamaConfig, scaling_of
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from infinilm.models.mixture import GGUF_KEYS, GGUF_MODULES, MixtureConfig, MixtureMLP, Router
from infinilm.models.mxfp4 import joined_blocks
from infinilm.models.registry import register
from infinilm.models.stored import Stored

MODULES = {
    **GGUF_MODULES,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # what ops.experts computes
# Where config.json says nothing of rotation
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
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
        """Its quantisation is known, and its rotation where nothing is said of it. Shares of experts always
        add up to one."""
        content = {**super().adapted(content), "norm_topk_prob": True}
        method = content.get("quantization_config")
        if isinstance(method, Mapping) and method.get("quant_method") == "mxfp4":
            content["quantization_config"] = None
        for key, wanted in SWIGLU.items():
            if content.get(key) not in (None, wanted):
                raise ValueError(f"{key} = {short(content[key])} is not supported; expected {wanted}")
        return {**content, "rope_scaling": rotation(content), "rope_parameters": None}

    def _fill_in(self) -> None:
        super()._fill_in()
        self._fill_in_windows(lambda layer: layer % 2 == 0)


def rotation(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """GGUF files, which have no model_type, do not say that frequencies are blended without rounding."""
    scaling = scaling_of(content)
    if "model_type" in content:
        return YARN if not scaling and content.get("rope_parameters") is None else scaling
    return {"truncate": False, **scaling} if scaling else scaling


class GptOssAttention(LlamaAttention):
    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))


class GptOssMLP(MixtureMLP):
    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        del self.gate
        self.router = Router(config.hidden_size, config.num_experts)
        sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.experts = nn.Experts(*sizes, bias=True, activation="swiglu_oai")

    def scores(self, x: Tensor) -> Tensor:
        return self.router(x)


class GptOssDecoderLayer(LlamaDecoderLayer):
    attention_class = GptOssAttention
    mlp_class = GptOssMLP


@register(GGUF("gpt-oss", GGUF_KEYS, MODULES, has_experts=True, has_windows=True))
class GptOssForCausalLM(LlamaForCausalLM):
    config_class = GptOssConfig
    layer_class = GptOssDecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        stored.rename("self_attn.sinks.weight", "self_attn.sinks")
        if not stored.is_gguf:
            part_experts(stored)
        for part in ("gate", "up", "down"):
            stored.flatten(f"mlp.experts.{part}_proj")


def part_experts(stored: Stored) -> None:
    """Hugging Face's files hold gate and up row by row in turn: in blocks, or transposed."""
    for part in ("gate_up", "down"):
        name = f"mlp.experts.{part}_proj"
        stored.transpose(name, f"{name}.weight")
        stored.join([f"{name}_blocks", f"{name}_scales"], f"{name}.weight", joined_blocks)
        stored.rename(f"{name}_bias", f"{name}.bias")
        stored.flatten(name)
    stored.deal("mlp.experts.gate_up_proj", ["mlp.experts.gate_proj", "mlp.experts.up_proj"])
