"""Phi-3, 3.5 and 4-mini: Llama whose files hold q, k and v as one matrix, and gate and up as another.

4-mini rotates a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinilm.config import LlamaConfig, scaling_of
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.values import check_number


@dataclass(frozen=True, kw_only=True)
class PartlyRotatedConfig(LlamaConfig):
    partial_rotary_factor: float = 1.0

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of heads null is all, whatever is rotated where files say nothing of it."""
        content = super().adapted(content)
        is_null = content.get("partial_rotary_factor", 1.0) is None
        return {**content, "partial_rotary_factor": 1.0} if is_null else content

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def _check(self) -> None:
        super()._check()
        check_number("partial_rotary_factor", self.partial_rotary_factor, 1.0)
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            part = f"partial_rotary_factor {self.partial_rotary_factor} of a head of {self.head_dim}"
            raise ValueError(f"{part} is {self.rotary_dim}, which has no pairs to rotate")


@dataclass(frozen=True, kw_only=True)
class Phi3Config(PartlyRotatedConfig):
    model_types = ("phi3",)
    without = ("attention_bias", "mlp_bias")
    has_renewed_rope = True
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | tuple[int, ...] | None = 32000
    pad_token_id: int | None = 32000

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first files call longrope "su" or "yarn". The length of training stands beside it, or is
        theirs. GGUF files, which have no model_type, have it among the scaling, and mean what they say."""
        if "model_type" not in content:
            return content
        content = {"original_max_position_embeddings": 4096, **content}
        scaling = scaling_of(content)
        if scaling.get("type", scaling.get("rope_type")) not in ("su", "yarn"):
            return content
        return {**content, "rope_scaling": {**scaling, "type": "longrope", "rope_type": "longrope"}}


FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@register(GGUF("phi3", modules=FUSED, has_windows=True))
class Phi3ForCausalLM(LlamaForCausalLM):
    config_class = Phi3Config

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        split_fused(stored, config)
        for part in ("self_attn.q_proj", "self_attn.k_proj"):
            stored.reorder(part, lambda rows: half_a_head_apart(rows, config))


def split_fused(stored: Stored, config: LlamaConfig) -> None:
    query_size, key_size = (
        heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    parts = [f"self_attn.{name}_proj" for name in "qkv"]
    stored.split("self_attn.qkv_proj", parts, [query_size, key_size, key_size])
    stored.split("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"], [config.intermediate_size] * 2)


def half_a_head_apart(num_rows: int, config: LlamaConfig, are_neighbours: bool = False) -> Tensor:
    """The order of rows in which what is rotated together lies half a head apart, as it does where all of a
    head is; queries and keys are in it alike, so that their products are the same. In files it lies half of
    what is rotated apart, or side by side."""
    front, back = torch.arange(config.head_dim, device="cpu").tensor_split([config.rotary_dim])
    pairs = front.view(-1, 2).T if are_neighbours else front.view(2, -1)
    order, size = torch.cat([pairs, back.view(2, -1)], dim=1).flatten(), config.head_dim
    return (torch.arange(0, num_rows, size, device="cpu")[:, None] + order).flatten()
