"""Two ropes: layers that look through a window are rotated by frequencies of their own, never scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from torch import Tensor

from infinicore import nn
from infinilm.config import LAYER_TYPES, LlamaConfig, rope_mapping
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaModel
from infinilm.rope import MAX_THETA, LlamaRoPE, RopeParameters, rope_type_of
from infinilm.values import check_number


@dataclass(frozen=True, kw_only=True)
class TwoRopesConfig(LlamaConfig):
    rope_local_base_freq: float = 10000.0
    local_rope: RopeParameters = field(init=False, repr=False)

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Newer files have both in rope_parameters."""
        content, kinds = dict(super().adapted(content)), rope_mapping(content, "rope_parameters")
        check_ropes(kinds, rope_mapping(content, "rope_scaling"))
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
            raise ValueError(f"rope_scaling {short(self.rope_scaling)} is not supported beside another rope")


def check_ropes(kinds: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    """With what transformers passes over, a model may have been trained or not."""
    if kinds and not kinds.keys() & set(LAYER_TYPES):
        wanted = " and ".join(map(repr, LAYER_TYPES))
        raise ValueError(
            f"rope_parameters of a model with two ropes are of {wanted}, but here {short(kinds)}"
        )
    if not kinds and "rope_type" not in scaling and rope_type_of(scaling) != "default":
        raise ValueError(f"rope_scaling of a model with two ropes needs a rope_type, but is {short(scaling)}")


class TwoRopes(LlamaRoPE):
    """A rope and another one: that of layers with a window, or of queries (`ministral3.py`)"""

    def __init__(self, parameters: RopeParameters, other: RopeParameters) -> None:
        super().__init__(parameters)
        self.other = LlamaRoPE(other)

    def anew(self) -> LlamaRoPE:
        return TwoRopes(self.rope_parameters, self.other.rope_parameters)

    def reaching(self, num_positions: int, like: Tensor) -> LlamaRoPE:
        longer = super().reaching(num_positions, like)
        if isinstance(longer, TwoRopes) and longer is not self:
            longer.other = self.other.reaching(num_positions, like)
        return longer


class TwoRopesAttention(LlamaAttention):
    def rope_of(self, rope: nn.RoPE | None) -> nn.RoPE | None:
        return rope.other if isinstance(rope, TwoRopes) and self.sliding_window is not None else rope


class TwoRopesModel(LlamaModel):
    def __init__(self, config: TwoRopesConfig, layer_class: type[LlamaDecoderLayer]) -> None:
        super().__init__(config, layer_class)
        self.rope_instance = TwoRopes(config.rope, config.local_rope)
