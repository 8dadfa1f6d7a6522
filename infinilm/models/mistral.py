"""Mistral: Llama that looks through a window; its GGUF files call themselves llama."""

from __future__ import annotations

from dataclasses import dataclass

from infinilm.config import LlamaConfig
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.registry import register


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    model_types = ("mistral",)
    without = ("attention_bias", "mlp_bias")
    sliding_window: int | None = 4096


@register()
class MistralForCausalLM(LlamaForCausalLM):
    config_class = MistralConfig
