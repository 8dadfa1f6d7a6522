"""Gemma 3, its text: Gemma 2 with norms of query and key heads, and frequencies of their own for windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.config import LlamaConfig
from infinilm.models import gemma2
from infinilm.models.gguf import GGUF
from infinilm.models.qwen import Qwen3Attention
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.models.text_part import keep_text, text_config
from infinilm.models.two_ropes import TwoRopesAttention, TwoRopesConfig, TwoRopesModel
from infinilm.values import check_whole


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(gemma2.Gemma2Config, TwoRopesConfig):
    model_types = ("gemma3_text", "gemma3")
    layers_of_27b = 62
    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope_theta: float = 1000000.0
    sliding_window_pattern: int = 6  # of so many layers the last has no window
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        content = super().adapted(text_config(content))
        content = {**content, "attn_logit_softcapping": None}  # which its attention has not
        return content if "model_type" in content else of_gguf(content)

    @property
    def longest(self) -> int:
        return self.max_position_embeddings  # which its files give with the factor of its rope in it

    def _fill_in(self) -> None:
        step = check_whole("sliding_window_pattern", self.sliding_window_pattern, 1, 4096)
        self._fill_in_windows(lambda layer: (layer + 1) % step > 0)
        super()._fill_in()


def of_gguf(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """GGUF files, which have no model_type, may have no windows, and write 0 where there is no cap."""
    pattern = {"sliding_window_pattern": 1} if content.get("sliding_window", 0) is None else {}
    cap = content.get("final_logit_softcapping") or None
    return {**content, **pattern, "final_logit_softcapping": cap}


class Gemma3Attention(Qwen3Attention, gemma2.Gemma2Attention, TwoRopesAttention):
    """Gemma 2's, with Qwen3's norms of heads"""


class Gemma3DecoderLayer(gemma2.Gemma2DecoderLayer):
    attention_class = Gemma3Attention


class Gemma3Model(gemma2.Gemma2Model, TwoRopesModel):
    """Gemma 2's, with two ropes"""


@register(
    GGUF(
        "gemma3",
        {
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        gemma2.GGUF_NORMS,
        gemma2.GGUF_SCALE,
        has_windows=True,
        other_parts=("mm.", "vision."),
    )
)
class Gemma3ForCausalLM(gemma2.Gemma2ForCausalLM):
    config_class = Gemma3Config
    layer_class = Gemma3DecoderLayer
    model_class = Gemma3Model

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        keep_text(stored)
        super().arrange(stored, config)
