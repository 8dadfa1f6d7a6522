"""SmolLM3: Llama of whose layers one in four does not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from infinilm.models.registry import register
from infinilm.values import check_flag, check_whole


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    model_types = ("smollm3",)
    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    rope_theta: float = 2000000.0
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 128000
    eos_token_id: int | tuple[int, ...] | None = 128001
    pad_token_id: int | None = 128004
    no_rope_layers: tuple[int, ...] | None = None  # 1 for each layer that rotates, 0 for one that does not
    no_rope_layer_interval: int = 4

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Windows have a size in files even where they are switched off."""
        flag = content.get("use_sliding_window")
        if flag is not None and check_flag("use_sliding_window", flag):
            return content
        types = content.get("layer_types")
        if isinstance(types, list | tuple) and "sliding_attention" in types:
            raise ValueError("layer_types has 'sliding_attention', but use_sliding_window is not on")
        return {**content, "sliding_window": None, "layer_types": None}

    def _fill_in(self) -> None:
        super()._fill_in()
        most = LIMITS["num_hidden_layers"]
        step = check_whole("no_rope_layer_interval", self.no_rope_layer_interval, 1, most)
        if self.no_rope_layers is None:
            self._check_sizes("num_hidden_layers")
            layers = range(self.num_hidden_layers)
            self._set(no_rope_layers=tuple(int((layer + 1) % step != 0) for layer in layers))

    def _check(self) -> None:
        super()._check()
        flags = self.no_rope_layers
        is_list = isinstance(flags, list | tuple) and len(flags) >= self.num_hidden_layers
        if not is_list or any(flag not in (0, 1) for flag in flags or ()):
            wanted = f"{self.num_hidden_layers} numbers, 0 or 1"
            raise ValueError(f"no_rope_layers must be {wanted}, but is {short(flags)}")
        rotates = tuple(flags or ())
        self._set(no_rope_layers=rotates)
        if self.sliding_window is not None:  # which the layers have that do not rotate
            self._fill_in_windows(lambda layer: not rotates[layer])


class SmolLM3Attention(LlamaAttention):
    def __init__(self, config: SmolLM3Config, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.rotates = bool((config.no_rope_layers or ())[layer_idx])


class SmolLM3DecoderLayer(LlamaDecoderLayer):
    attention_class = SmolLM3Attention


@register(GGUF("smollm3", has_paired_rows=True))
class SmolLM3ForCausalLM(LlamaForCausalLM):
    config_class = SmolLM3Config
    layer_class = SmolLM3DecoderLayer
