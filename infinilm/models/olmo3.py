"""OLMo 3: OLMo 2 of whose layers three in four look through a window, and are rotated without a scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.models.gguf import GGUF
from infinilm.models.olmo2 import GGUF_NORMS, Olmo2Attention, Olmo2Config, Olmo2DecoderLayer, Olmo2ForCausalLM
from infinilm.models.registry import register
from infinilm.models.two_ropes import TwoRopesAttention, TwoRopesConfig, TwoRopesModel


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config, TwoRopesConfig):
    model_types = ("olmo3",)
    rope_theta: float = 500000.0
    rope_local_base_freq: float = 500000.0
    sliding_window: int | None = 4096

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """GGUF files, which have no model_type, may have one base for both ropes."""
        if "model_type" not in content:
            content = {"rope_local_base_freq": content.get("rope_theta"), **content}
        return super().adapted(content)

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.sliding_window is not None:
            self._fill_in_windows(lambda layer: (layer + 1) % 4 > 0)


class Olmo3Attention(Olmo2Attention, TwoRopesAttention):
    """OLMo 2's, with two ropes"""


class Olmo3DecoderLayer(Olmo2DecoderLayer):
    attention_class = Olmo3Attention


@register(
    GGUF(
        "olmo2",
        {"rope.freq_base_swa": "rope_local_base_freq"},
        GGUF_NORMS,
        has_windows=True,
        names_windows=True,
    )
)
class Olmo3ForCausalLM(Olmo2ForCausalLM):
    config_class = Olmo3Config
    layer_class = Olmo3DecoderLayer
    model_class = TwoRopesModel
