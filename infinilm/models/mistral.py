"""Mistral: Llama that looks through a window; its GGUF files call themselves llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.config import LlamaConfig
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.registry import register


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    model_types = ("mistral",)
    sliding_window: int | None = 4096

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """It has no biases."""
        return {**content, "attention_bias": False, "mlp_bias": False}


@register()
class MistralForCausalLM(LlamaForCausalLM):
    config_class = MistralConfig
