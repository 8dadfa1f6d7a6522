"""Qwen2 and 2.5: Llama with biases on q, k and v. Qwen3: with a norm of each query and key head instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.judging import QWEN3
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaRMSNorm
from infinilm.models.registry import register
from infinilm.rope import MAX_POSITION
from infinilm.values import check_flag, check_whole


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    without = ("mlp_bias",)
    biases_output = False
    attention_bias: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Files give windows a size even where they are switched off. Qwen2 always has attention's biases."""
        content = dict(super().adapted(content))
        if content.get("model_type") == "qwen2":
            content["attention_bias"] = True
        window, types = content.get("sliding_window", 4096), content.get("layer_types")
        if window is not None:
            check_whole("sliding_window", window, 1, MAX_POSITION)
        flag = content.get("use_sliding_window")
        if flag is None or not check_flag("use_sliding_window", flag):
            window = None
        elif window is not None and types is None:
            types = late_windows(content)
        return {**content, "sliding_window": window, "layer_types": types}


def late_windows(content: Mapping[str, Any]) -> list[str]:
    """All but the first layers look through the window."""
    first = check_whole("max_window_layers", content.get("max_window_layers", 28), 0, MAX_POSITION)
    limit = LIMITS["num_hidden_layers"]
    count = check_whole("num_hidden_layers", content.get("num_hidden_layers", 32), 1, limit)
    return ["full_attention" if i < first else "sliding_attention" for i in range(count)]


@register(GGUF("qwen2"))
class Qwen2ForCausalLM(LlamaForCausalLM):
    config_class = Qwen2Config


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    model_types = ("qwen3",)
    biases_output = True
    head_dim: int = 128
    attention_bias: bool = False


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen3Attention


@register(GGUF("qwen3"))
class Qwen3ForCausalLM(LlamaForCausalLM):
    config_class = Qwen3Config
    layer_class = Qwen3DecoderLayer
    question = QWEN3
