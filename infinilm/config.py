"""LlamaConfig: what a checkpoint is; its fields are the keys of config.json. EngineConfig: how to run it.

Both are checked once and frozen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from reprlib import repr as short
from typing import Any, ClassVar

import torch

from infinilm.rope import (
    MAX_POSITION,
    MAX_THETA,
    RopeParameters,
    check_flag,
    check_frequencies,
    check_number,
    check_whole,
    checked_scaling,
    rope_type_of,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What an architecture means where its config.json does not say it.
QWEN: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {**QWEN, "attention_bias": True, "attention_output_bias": False},
    "qwen3": {**QWEN, "has_qk_norm": True},
}
# Far above any model there is, and small enough that what is sized by them takes no time and little memory.
LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": MAX_POSITION,
}
FLAGS = (
    "attention_bias",
    "attention_output_bias",
    "mlp_bias",
    "has_qk_norm",
    "tie_word_embeddings",
    "use_cache",
)
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_TOKEN_ID = (1 << 31) - 1

# Keys of config.json that would change the computation in ways unknown here, and their harmless values.
OFF = (None, False)
ONE = (None, 1)
NONE = (None, 0)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "pretraining_tp": ONE,
    # rotation
    "partial_rotary_factor": ONE,
    "rotary_pct": ONE,
    "rope_interleaved": OFF,
    "no_rope_layers": (None, []),
    "alibi": OFF,
    # experts
    "num_experts": NONE,
    "num_local_experts": NONE,
    "n_routed_experts": NONE,
    "n_shared_experts": NONE,
    # attention
    "attn_logit_softcapping": NONE,
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "attn_temperature_tuning": NONE,
    "attention_chunk_size": (None,),
    "clip_qkv": (None,),
    "use_qk_norm": OFF,
    "qk_norm": OFF,
    "qk_layernorm": OFF,
    "is_causal": (None, True),
    "use_bidirectional_attention": OFF,
    "add_cross_attention": OFF,
    "is_encoder_decoder": OFF,
    "pruned_heads": (None, {}),
    # what is added up, and what comes out
    "use_parallel_residual": OFF,
    "parallel_attn": OFF,
    "residual_multiplier": ONE,
    "embedding_multiplier": ONE,
    "scale_emb": ONE,
    "scale_depth": (None,),
    "logit_scale": ONE,
    "logits_scaling": ONE,
    "final_logit_softcapping": NONE,
    # an activation by another name
    "hidden_activation": (None, "silu"),
}


def parse_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """float32, bfloat16 or float16, by name or as torch's; None stays None."""
    if value is None:
        return None
    name = str(value).removeprefix("torch.") if isinstance(value, str | torch.dtype) else ""
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {sorted(DTYPES)}, but is {short(value)}")
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
        check_frequencies(self.rope)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LlamaConfig:
        """The config that the content of a config.json describes; what this model cannot do is refused."""
        model_type = content.get("model_type", "llama")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            known = sorted(ARCHITECTURES)
            raise ValueError(f"model_type {short(model_type)} is unknown; expected one of {known}")
        for key, harmless in UNSUPPORTED.items():
            if content.get(key) not in harmless:
                raise ValueError(f"{key} = {short(content[key])} is not supported")
        known_keys = {f.name for f in fields(cls) if f.init} | {"torch_dtype"}
        # null means "the default", except for the special tokens, which a model may not have
        given = {
            key: value
            for key, value in content.items()
            if key in known_keys and (value is not None or key.endswith("_token_id"))
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
        self._check_sizes("hidden_size", "num_attention_heads")
        if self.num_key_value_heads is None:
            self._set(num_key_value_heads=self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                sizes = f"hidden_size {self.hidden_size}, num_attention_heads {self.num_attention_heads}"
                raise ValueError(f"{sizes}: the first must be a multiple of the second, or head_dim be given")
            self._set(head_dim=self.hidden_size // self.num_attention_heads)
        if self.attention_output_bias is None:
            self._set(attention_output_bias=self.attention_bias)

    def _check(self) -> None:
        self._check_sizes(*LIMITS)
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"num_attention_heads {self.num_attention_heads}"
            raise ValueError(f"{heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, but is {self.head_dim}")
        self._set(rope_theta=check_number("rope_theta", self.rope_theta, MAX_THETA))
        self._set(rms_norm_eps=check_number("rms_norm_eps", self.rms_norm_eps, 1.0, 1e-30))
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act {short(self.hidden_act)} is not supported; expected 'silu'")
        self._check_windows()
        for name in ("bos_token_id", "pad_token_id"):
            self._set(**{name: token_id(name, getattr(self, name))})
        self._set(eos_token_id=end_token_ids(self.eos_token_id))

    def _check_sizes(self, *names: str) -> None:
        for name in names:
            check_whole(name, getattr(self, name), 1, LIMITS[name])

    def _check_windows(self) -> None:
        if self.sliding_window is not None:
            check_whole("sliding_window", self.sliding_window, 1, MAX_POSITION)
        types = self.layer_types
        if types is None:
            return
        if not isinstance(types, list | tuple) or len(types) != self.num_hidden_layers:
            raise ValueError(f"layer_types must name {self.num_hidden_layers} layers, but is {short(types)}")
        if unknown := [kind for kind in types if kind not in LAYER_TYPES]:
            raise ValueError(f"layer_types has {short(unknown[0])}; expected {' or '.join(LAYER_TYPES)}")
        if "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("layer_types has 'sliding_attention', but sliding_window gives it no size")
        self._set(layer_types=tuple(types))


def token_id(name: str, value: Any) -> int | None:
    """-1 is how some files write that there is none."""
    found = None if value is None else check_whole(name, value, -1, MAX_TOKEN_ID)
    return None if found == -1 else found


def end_token_ids(value: Any) -> int | tuple[int, ...] | None:
    if not isinstance(value, list | tuple):
        return token_id("eos_token_id", value)
    return tuple(check_whole("eos_token_id", each, 0, MAX_TOKEN_ID) for each in value)


def rope_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """rope_scaling, or rope_parameters as newer files call it, where they also put rope_theta.

    A length of training that stands outside is the one to take (Phi 3 writes it there).
    """
    theta, trained = content.get("rope_theta"), content.get("original_max_position_embeddings")
    scaling = rope_mapping(content, "rope_scaling") or rope_mapping(content, "rope_parameters")
    if scaling.get("rope_theta") is not None:
        theta = scaling["rope_theta"]
    if trained is not None and scaling and rope_type_of(scaling) in ("llama3", "longrope", "yarn"):
        scaling = {**scaling, "original_max_position_embeddings": trained}
    return {"rope_scaling": scaling or None, **({} if theta is None else {"rope_theta": theta})}


def rope_mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = content.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"{key} must be a mapping, but is {short(found)}")
    return found or {}


def window_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding windows, which Qwen configs give a size even where they are switched off"""
    model_type, types = content.get("model_type", "llama"), content.get("layer_types")
    window = content.get("sliding_window", None if model_type == "llama" else 4096)
    if window is not None:  # also where it is switched off
        check_whole("sliding_window", window, 1, MAX_POSITION)
    if model_type in ("qwen2", "qwen3"):
        flag = content.get("use_sliding_window")
        is_on = flag is not None and check_flag("use_sliding_window", flag)
        window = window if is_on else None
        types = qwen_layer_types(content) if is_on and window is not None and types is None else types
    return {"sliding_window": window, "layer_types": types}


def qwen_layer_types(content: Mapping[str, Any]) -> list[str]:
    """All but the first layers look through the window."""
    first = check_whole("max_window_layers", content.get("max_window_layers", 28), 0, MAX_POSITION)
    limit = LIMITS["num_hidden_layers"]
    count = check_whole("num_hidden_layers", content.get("num_hidden_layers", 32), 1, limit)
    return ["full_attention" if i < first else "sliding_attention" for i in range(count)]


# ---- how to run a model ------------------------------------------------------------------------------------

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "q8_0")
BLOCK_SIZES = (16, 32, 64, 128, 256)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and run. None leaves a choice to the engine, which makes it from the model and
    the memory there is."""

    model: str | Path | None = None
    device: torch.device | str | None = None  # "auto" or None: a GPU if there is one, else the CPU
    dtype: torch.dtype | str | None = None
    activations: str | None = None
    quantize: str | None = None
    max_model_len: int | None = None  # tokens of a prompt and its answer; the model's own if None
    max_num_seqs: int = 64  # streams that run at once
    max_num_batched_tokens: int | None = None  # tokens of one step
    kv_cache_dtype: str = "auto"  # that of the model's states, or float16 where its layers round what enters
    kv_cache_memory: int | str | None = None  # bytes, also as "2GiB"; a share of what is free if None
    block_size: int = 16
    enable_prefix_caching: bool = True
    seed: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    chat_template: str | None = None
    deterministic: bool = False  # on a GPU the same bits in any company, as a CPU always has; for the process
    max_queue: int = 1024  # requests that wait
    max_queue_tokens: int = 1 << 22

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_model_len", 2, MAX_POSITION),
            ("max_num_seqs", 1, 1024),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("seed", 0, (1 << 63) - 1),
            ("max_queue", 1, 1 << 31),
            ("max_queue_tokens", 1, 1 << 62),
        ):
            value = getattr(self, name)
            if value is not None or name.startswith(("max_num_seqs", "max_queue")):
                check_whole(name, value, low, high)
        check_one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_one_of("block_size", self.block_size, BLOCK_SIZES)
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        check_flag("deterministic", self.deterministic)
        if not isinstance(self.chat_template, str | None):
            raise ValueError(f"chat_template must be the text of one, but is {short(self.chat_template)}")
        object.__setattr__(self, "kv_cache_memory", checked_bytes("kv_cache_memory", self.kv_cache_memory))


def check_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if isinstance(value, bool) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, but is {short(value)}")


def checked_bytes(name: str, value: Any) -> int | None:
    """A number of bytes, also written as "512MB" or "2GiB"."""
    if value is None:
        return None
    match = (
        re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmg]i?)?b?\s*", value.lower())
        if isinstance(value, str)
        else None
    )
    if match:
        value = int(float(match[1]) * UNITS[match[2] or ""])
    return check_whole(name, value, 1, 1 << 50)
