"""EXAONE 4: norms after attention and MLP, as OLMo 2 has them, and of each query and key head, as Qwen3 has
them. Where layers look through a window, those that do not are not rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.olmo2 import GGUF_NORMS, Olmo2DecoderLayer
from infinilm.models.qwen import Qwen3Attention
from infinilm.models.registry import register
from infinilm.values import check_whole


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(LlamaConfig):
    model_types = ("exaone4",)
    without = ("attention_bias", "mlp_bias")
    vocab_size: int = 102400
    intermediate_size: int = 16384
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4  # of so many layers the last has no window
    bos_token_id: int | None = 0

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Beside layer_types, which say all, the pattern may be a word."""
        return content if content.get("layer_types") is None else {**content, "sliding_window_pattern": None}

    def _fill_in(self) -> None:
        super()._fill_in()
        most = LIMITS["num_hidden_layers"]
        step = check_whole("sliding_window_pattern", self.sliding_window_pattern, 1, most)
        if self.sliding_window is not None:
            self._fill_in_windows(lambda layer: (layer + 1) % step > 0)


class Exaone4Attention(Qwen3Attention):
    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.rotates = config.sliding_window is None or self.sliding_window is not None


class Exaone4DecoderLayer(Olmo2DecoderLayer):
    attention_class = Exaone4Attention  # type: ignore[assignment]  # which is none of OLMo 2


@register(GGUF("exaone4", modules=GGUF_NORMS, has_windows=True, names_windows=True))
class Exaone4ForCausalLM(LlamaForCausalLM):
    config_class = Exaone4Config
    layer_class = Exaone4DecoderLayer
