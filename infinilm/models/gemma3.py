"""Gemma 3, its text: Gemma 2 with norms of query and key heads, and frequencies of their own for windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from torch import Tensor

from infinicore import nn
from infinilm.config import LAYER_TYPES, LlamaConfig, rope_mapping
from infinilm.models import gemma2
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaDecoderLayer
from infinilm.models.qwen import Qwen3Attention
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.rope import MAX_THETA, LlamaRoPE, RopeParameters, rope_type_of
from infinilm.values import check_number, check_whole

# What a model that also sees says of all its parts
OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config")


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(gemma2.Gemma2Config):
    model_types = ("gemma3_text", "gemma3")
    layers_of_27b = 62
    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope_theta: float = 1000000.0
    rope_local_base_freq: float = 10000.0
    sliding_window_pattern: int = 6  # of so many layers the last has no window
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    local_rope: RopeParameters = field(init=False, repr=False)

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The text's part of a model that also sees; newer files have two ropes in rope_parameters."""
        if isinstance(content.get("text_config"), Mapping):
            whole = [key for key in content if key.endswith("token_id") or key in OF_THE_WHOLE]
            content = {
                **content["text_config"],
                **{key: content[key] for key in whole},
                "model_type": "gemma3",
            }
        content, kinds = dict(super().adapted(content)), rope_mapping(content, "rope_parameters")
        check_ropes(kinds, rope_mapping(content, "rope_scaling"))
        content["attn_logit_softcapping"] = None  # of which its attention knows nothing
        if "model_type" not in content and content.get("sliding_window", 0) is None:
            content["sliding_window_pattern"] = 1  # a GGUF file without windows
        if kinds:
            scaling = {**rope_mapping(kinds, "full_attention"), **rope_mapping(content, "rope_scaling")}
            content |= {"rope_parameters": None, "rope_scaling": scaling}
            local = rope_mapping(kinds, "sliding_attention")
            if rope_type_of(local) != "default":
                raise ValueError(f"rope_parameters: {short(local)} is not supported where there is a window")
            if local.get("rope_theta") is not None:
                content["rope_local_base_freq"] = local["rope_theta"]
        return content

    def __post_init__(self, torch_dtype: Any) -> None:
        super().__post_init__(torch_dtype)
        theta = check_number("rope_local_base_freq", self.rope_local_base_freq, MAX_THETA)
        self._set(local_rope=self.rope_of(theta, None))
        if not self.rope.is_fixed:
            raise ValueError(f"rope_scaling {short(self.rope_scaling)} is not supported in a gemma3 model")

    @property
    def longest(self) -> int:
        return self.max_position_embeddings  # which its files give with the factor of its rope in it

    def _fill_in(self) -> None:
        step = check_whole("sliding_window_pattern", self.sliding_window_pattern, 1, 4096)
        self._fill_in_windows(lambda layer: (layer + 1) % step > 0)
        super()._fill_in()


def check_ropes(kinds: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    """With what transformers passes over, a model may have been trained or not."""
    if kinds and not kinds.keys() & set(LAYER_TYPES):
        wanted = " and ".join(map(repr, LAYER_TYPES))
        raise ValueError(f"rope_parameters of a gemma3 model are of {wanted}, but here {short(kinds)}")
    if not kinds and "rope_type" not in scaling and rope_type_of(scaling) != "default":
        raise ValueError(f"rope_scaling of a gemma3 model needs a rope_type, but is {short(scaling)}")


class Gemma3RoPE(LlamaRoPE):
    """The rope of layers without a window; `local` is that of layers with one."""

    def __init__(self, parameters: RopeParameters, local: RopeParameters) -> None:
        super().__init__(parameters)
        self.local = LlamaRoPE(local)

    def anew(self) -> LlamaRoPE:
        return Gemma3RoPE(self.rope_parameters, self.local.rope_parameters)

    def reaching(self, num_positions: int, like: Tensor) -> LlamaRoPE:
        longer = super().reaching(num_positions, like)
        if isinstance(longer, Gemma3RoPE) and longer is not self:
            longer.local = self.local.reaching(num_positions, like)
        return longer


class Gemma3Attention(Qwen3Attention, gemma2.Gemma2Attention):
    """Gemma 2's, with Qwen3's norms of heads"""

    def rope_of(self, rope: nn.RoPE | None) -> nn.RoPE | None:
        return rope.local if isinstance(rope, Gemma3RoPE) and self.sliding_window is not None else rope


class Gemma3DecoderLayer(gemma2.Gemma2DecoderLayer):
    attention_class = Gemma3Attention


class Gemma3Model(gemma2.Gemma2Model):
    def __init__(self, config: Gemma3Config, layer_class: type[LlamaDecoderLayer]) -> None:
        super().__init__(config, layer_class)
        self.rope_instance = Gemma3RoPE(config.rope, config.local_rope)


@register(
    GGUF(
        "gemma3",
        {"rope.freq_base_swa": "rope_local_base_freq"},
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
        # In a model that also sees, where the text's part stands depends on who saved it.
        stored.move("language_model.", "")
        stored.move("model.language_model.", "model.")
        for part in ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_"):
            stored.drop(part)
        super().arrange(stored, config)
