"""Ministral 3: Mistral whose queries grow with their position; and the text of any Mistral that also sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from infinicore import nn, ops
from infinilm.batch import Batch
from infinilm.config import LlamaConfig, scaling_of
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel, Pools
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.models.text_part import keep_text, text_config
from infinilm.models.two_ropes import TwoRopes
from infinilm.rope import MAX_FACTOR, TRAINED, RopeParameters
from infinilm.values import check_number, check_one_of

GROWTH, LOG_MULTIPLIER = "llama_4_scaling_beta", "yarn_log_multiplier"
# Where config.json says nothing of rotation
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, TRAINED: 16384, GROWTH: 0.1}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}


@dataclass(frozen=True, kw_only=True)
class QueryRope(RopeParameters):
    """Rotation that stretches, by the logarithm of how many trained lengths a position has behind it"""

    growth: float

    def tables(self, length: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        passed = torch.floor(positions.to("cpu", torch.float32) / self.original_max_position)
        stretch = (1 + self.growth * torch.log(1 + passed)).unsqueeze(1)
        sin, cos = super().tables(length, positions)
        return sin * stretch, cos * stretch


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(LlamaConfig):
    model_types = ("ministral3", "mistral3")
    without = ("attention_bias", "mlp_bias")
    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 11
    llama_4_scaling_beta: float = 0.0
    query_rope: QueryRope = field(init=False, repr=False)

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Folders have it among what is said of rotation. GGUF files, which have no model_type, have it
        beside that, and have mscale_all_dim by another name."""
        if isinstance(content.get("text_config"), Mapping):
            content = text_of_one_that_sees(content)
        scaling = dict(scaling_of(content) or (YARN if "model_type" in content else {}))
        scaling.pop("max_position_embeddings", None)  # which is that of the model
        if content.get(LOG_MULTIPLIER):
            scaling |= {"mscale": 1.0, "mscale_all_dim": content[LOG_MULTIPLIER]}
        growth = scaling.pop(GROWTH, content.get(GROWTH))
        return {**content, GROWTH: growth, "rope_scaling": scaling, "rope_parameters": None}

    def __post_init__(self, torch_dtype: Any) -> None:
        super().__post_init__(torch_dtype)
        if self.llama_4_scaling_beta != 0:
            check_number(GROWTH, self.llama_4_scaling_beta, MAX_FACTOR)
        if not self.rope.is_fixed:
            raise ValueError(f"rope_scaling {short(self.rope_scaling)} is not supported in this model")
        self._set(query_rope=QueryRope(**vars(self.rope), growth=self.llama_4_scaling_beta))


def text_of_one_that_sees(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of this kind or of the older one, which has another window and rotation where nothing is said"""
    kind = content["text_config"].get("model_type", "mistral")
    check_one_of("text_config: model_type", kind, ("mistral", "ministral3"))
    text = text_config({"tie_word_embeddings": True, **content})
    if kind == "ministral3":
        return text
    return {"sliding_window": 4096, **text, "rope_scaling": scaling_of(text) or {"rope_type": "default"}}


class Ministral3Attention(LlamaAttention):
    def rotate(
        self, q: Tensor, k: Tensor, v: Tensor, rope: nn.RoPE | None, batch: Batch, pools: Pools
    ) -> Tensor:
        if not isinstance(rope, TwoRopes):
            return super().rotate(q, k, v, rope, batch, pools)
        q = ops.rope(q, *rope.other.rotation(batch.rope_rows, q.dtype))
        k = ops.rope(k, *rope.rotation(batch.rope_rows, k.dtype))
        return super().rotate(q, k, v, None, batch, pools)


class Ministral3DecoderLayer(LlamaDecoderLayer):
    attention_class = Ministral3Attention


class Ministral3Model(LlamaModel):
    def __init__(self, config: Ministral3Config, layer_class: type[LlamaDecoderLayer]) -> None:
        super().__init__(config, layer_class)
        if config.query_rope.growth:
            self.rope_instance = TwoRopes(config.rope, config.query_rope)


GGUF_KEYS = {"attention.temperature_scale": GROWTH, f"rope.scaling.{LOG_MULTIPLIER}": LOG_MULTIPLIER}


@register(GGUF("mistral3", GGUF_KEYS, has_paired_rows=True, has_windows=True))
class Ministral3ForCausalLM(LlamaForCausalLM):
    config_class = Ministral3Config
    layer_class = Ministral3DecoderLayer
    model_class = Ministral3Model

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        keep_text(stored)
