"""LlamaConfig: what a checkpoint is. Its fields are the keys of config.json, checked once and frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, ClassVar

import torch

from infinilm.rope import RopeParameters, checked_scaling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What an architecture means where its config.json does not say it.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True, "attention_output_bias": False},
    "qwen3": {"has_qk_norm": True},
}
# Keys of config.json that would change the computation in ways unknown here, and their harmless values.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "pretraining_tp": (None, 1),
}


def parse_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """float32, bfloat16 or float16, by name or as torch's; None stays None."""
    if value is None or value in DTYPES.values():
        return value  # type: ignore[return-value]
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {sorted(DTYPES)}, but is {value!r}")
    return DTYPES[name]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Llama, Mistral, Qwen2, Qwen3 and SmolLM2 as values of one set of fields."""

    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar[dict[str, tuple[list[str], list[str]]]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = None  # type: ignore[assignment]  # as many as attention heads
    head_dim: int = None  # type: ignore[assignment]  # hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    attention_output_bias: bool = None  # type: ignore[assignment]  # as attention_bias
    mlp_bias: bool = False
    has_qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None  # "full_attention" or "sliding_attention" for each layer
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    dtype: torch.dtype | None = None
    torch_dtype: InitVar[torch.dtype | str | None] = None
    rope: RopeParameters = field(init=False, repr=False)

    def __post_init__(self, torch_dtype: torch.dtype | str | None) -> None:
        self._set(dtype=parse_dtype(self.dtype if self.dtype is not None else torch_dtype))
        self._fill_in()
        self._check()
        scaling = checked_scaling(self.rope_scaling, self.head_dim)
        self._set(rope=RopeParameters(self.head_dim, self.rope_theta, self.max_position_embeddings, scaling))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LlamaConfig:
        """The config that the content of a config.json describes; what this model cannot do is refused."""
        model_type = content.get("model_type", "llama")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"model_type {model_type!r} is unknown; expected one of {sorted(ARCHITECTURES)}")
        for key, harmless in UNSUPPORTED.items():
            if content.get(key) not in harmless:
                raise ValueError(f"{key} = {content[key]!r} is not supported")
        known = {f.name for f in fields(cls) if f.init} | {"torch_dtype"}
        # null means "the default", except for the special tokens, which a model may not have
        given = {
            key: value
            for key, value in content.items()
            if key in known and (value is not None or key.endswith("_token_id"))
        }
        return cls(**{**ARCHITECTURES[model_type], **given, **rope_keys(content), **window_keys(content)})

    @property
    def num_key_value_groups(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def window_of(self, layer: int) -> int | None:
        """How many positions a layer looks back over, itself included; None for all."""
        if self.layer_types is not None and self.layer_types[layer] != "sliding_attention":
            return None
        return self.sliding_window

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _fill_in(self) -> None:
        check_sizes(self, ("hidden_size", "num_attention_heads"))
        if self.num_key_value_heads is None:
            self._set(num_key_value_heads=self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                sizes = f"hidden_size {self.hidden_size}, num_attention_heads {self.num_attention_heads}"
                raise ValueError(f"{sizes}: the first must be a multiple of the second, or head_dim be given")
            self._set(head_dim=self.hidden_size // self.num_attention_heads)
        if self.attention_output_bias is None:
            self._set(attention_output_bias=self.attention_bias)
        if isinstance(self.eos_token_id, list):
            self._set(eos_token_id=tuple(self.eos_token_id))

    def _check(self) -> None:
        check_sizes(self, SIZES)
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"num_attention_heads {self.num_attention_heads}"
            raise ValueError(f"{heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, but is {self.head_dim}")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or value <= 0
            ):
                raise ValueError(f"{name} must be a finite positive number, but is {value!r}")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act {self.hidden_act!r} is not supported; expected 'silu'")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
MAX_SIZE = 1 << 28  # beyond any model; keeps products of sizes far inside 64 bits


def check_sizes(config: LlamaConfig, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            raise ValueError(f"{name} must be a whole number from 1 to {MAX_SIZE}, but is {value!r}")


def rope_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, which newer files put together under rope_parameters"""
    together = content.get("rope_parameters")
    if together is None:
        return {}
    if not isinstance(together, Mapping):
        raise ValueError(f"rope_parameters must be a mapping, but is {together!r}")
    theta = together.get("rope_theta", content.get("rope_theta"))
    return {"rope_scaling": together, **({} if theta is None else {"rope_theta": theta})}


def window_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding windows, which Qwen configs give a size even where they are switched off"""
    if content.get("model_type") in ("qwen2", "qwen3") and not content.get("use_sliding_window"):
        return {"sliding_window": None, "layer_types": None}
    types = content.get("layer_types")
    if types is None and content.get("use_sliding_window") and content.get("max_window_layers") is not None:
        first, count = content["max_window_layers"], content.get("num_hidden_layers", 32)
        types = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    return {"layer_types": None if types is None else tuple(types)}
