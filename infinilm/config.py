"""LlamaConfig: what a model is; its fields are the keys of config.json. EngineConfig: how to run it.

Both are checked once and frozen. Other models' configs stand in their own files, on what LlamaConfig has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from reprlib import repr as short
from typing import Any, ClassVar, Self

import torch

from infinilm import elsewhere
from infinilm.elsewhere import knowing
from infinilm.rope import (
    MAX_POSITION,
    MAX_THETA,
    RopeParameters,
    check_frequencies,
    checked_scaling,
    rope_type_of,
)
from infinilm.values import check_flag, check_number, check_one_of, check_whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

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
LAYER_TYPES = ("full_attention", "sliding_attention")  # without a window, and with one
# Models that have no window, whatever size their config.json gives one, as files made from another model's
# do. Their GGUF files may be Mistral's, which has one; those have no model_type.
WITHOUT_WINDOW = (
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "llama",
    "olmo2",
    "olmoe",
    "seed_oss",
)
# Models whose layers all look equally far back, whatever layer_types say.
WITH_EQUAL_LAYERS = (*WITHOUT_WINDOW, "mixtral", "phi3")
MAX_TOKEN_ID = (1 << 31) - 1
# Sizes that follow from others where a file has null for them, whatever a family has where files say nothing.
FOLLOWING = ("num_key_value_heads", "head_dim")

# Keys of config.json that would change the computation in ways unknown here, and their harmless values;
# a model that knows one has it as a field.
OFF = (None, False)
ONE = (None, 1)
NONE = (None, 0)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
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

INSTEAD = {"quantization_config": "give the unquantised model, or a GGUF file for quantised weights"}


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
    """Llama, Llama 2 and 3, SmolLM2; what other models have beside or instead, their own classes say."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)  # the first where config.json has none
    has_renewed_rope: ClassVar[bool] = False
    biases_output: ClassVar[bool] = True  # attention_bias is also of what leaves attention
    activation_functions: ClassVar[tuple[str, ...]] = ("silu", "swish")  # two names of one
    without: ClassVar[tuple[str, ...]] = ()  # what the family never has, whatever its files say
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

    model_type: str = None  # type: ignore[assignment]  # the first of model_types
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
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    attention_bias: bool = False
    mlp_bias: bool = False
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
        self._set(rope=self.rope_of(self.rope_theta, self.rope_scaling))
        self._set(rope_scaling=deepcopy(self.rope_scaling))  # the caller's own may change

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The config that the content of a config.json describes; what this model cannot do is refused."""
        content = cls.adapted({**content, **scaling_part(content)})
        content = {**content, **dict.fromkeys(cls.without, False)}
        names = {f.name: f.type for f in fields(cls) if f.init}
        for key, harmless in UNSUPPORTED.items():
            if key not in names and content.get(key) not in harmless:
                advice = f"; {INSTEAD[key]}" if key in INSTEAD else ""
                raise ValueError(f"{key} = {short(content[key])} is not supported{advice}")
        # null means "the default", except where a model may have none, and of sizes that follow from others
        given = {
            key: value
            for key, value in content.items()
            if key in names and (value is not None or key in FOLLOWING or "None" in str(names[key]))
        }
        given["torch_dtype"] = content.get("torch_dtype")
        config = cls(**{**given, **rope_keys(content)})
        if content.get("model_type") in WITHOUT_WINDOW:
            config._set(sliding_window=None)
        if content.get("model_type") in WITH_EQUAL_LAYERS:
            config._set(layer_types=None)
        return config

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json with a field's name for each key that the family spells in its own way"""
        return content

    @property
    def num_key_value_groups(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def rotary_dim(self) -> int:
        """How much of a head is rotated"""
        return self.head_dim

    @property
    def has_output_bias(self) -> bool:
        """Whether what leaves attention has a bias"""
        return self.attention_bias and self.biases_output

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def window_of(self, layer: int) -> int | None:
        """How many positions a layer looks back over, itself included; None for all."""
        if self.layer_types is not None and self.layer_types[layer] != "sliding_attention":
            return None
        return self.sliding_window

    @property
    def longest(self) -> int:
        """How long a text may be where more is asked for than max_position_embeddings"""
        return self.rope.reach

    def rope_of(self, theta: float, scaling: Mapping[str, Any] | None) -> RopeParameters:
        """What rotates, with frequencies that have been seen to exist"""
        checked = checked_scaling(scaling, self.rotary_dim)
        lengths = self.max_position_embeddings, checked, self.rotary_dim, self.has_renewed_rope
        rope = RopeParameters(self.head_dim, theta, *lengths)
        check_frequencies(rope)
        return rope

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _fill_in(self) -> None:
        self._check_sizes("hidden_size", "num_attention_heads")
        if self.model_type is None:
            self._set(model_type=self.model_types[0])
        if self.num_key_value_heads is None:
            self._set(num_key_value_heads=self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                sizes = f"hidden_size {self.hidden_size}, num_attention_heads {self.num_attention_heads}"
                raise ValueError(f"{sizes}: the first must be a multiple of the second, or head_dim be given")
            self._set(head_dim=self.hidden_size // self.num_attention_heads)

    def _fill_in_windows(self, has_window: Callable[[int], bool]) -> None:
        """Where config.json has no layer_types: which layers the model usually has a window in"""
        self._check_sizes("num_hidden_layers")
        if self.layer_types is None:
            layers = range(self.num_hidden_layers)
            self._set(layer_types=tuple(LAYER_TYPES[has_window(layer)] for layer in layers))

    def _check(self) -> None:
        if self.model_type not in self.model_types:
            raise ValueError(f"model_type {short(self.model_type)} is not one of {self.model_types}")
        self._check_sizes(*LIMITS)
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"num_attention_heads {self.num_attention_heads}"
            raise ValueError(f"{heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, but is {self.head_dim}")
        self._set(rope_theta=check_number("rope_theta", self.rope_theta, MAX_THETA))
        self._set(rms_norm_eps=check_number("rms_norm_eps", self.rms_norm_eps, 1.0, 1e-30))
        for flag in fields(self):
            if flag.type == "bool":
                check_flag(flag.name, getattr(self, flag.name))
        if self.hidden_act not in self.activation_functions:
            wanted = " or ".join(map(repr, self.activation_functions))
            raise ValueError(f"hidden_act {short(self.hidden_act)} is not supported; expected {wanted}")
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
    scaling = scaling_of(content)
    if scaling.get("rope_theta") is not None:
        theta = scaling["rope_theta"]
    if trained is not None and scaling and rope_type_of(scaling) in ("llama3", "longrope", "yarn"):
        scaling = {**scaling, "original_max_position_embeddings": trained}
    return {"rope_scaling": scaling or None, **({} if theta is None else {"rope_theta": theta})}


def scaling_part(content: Mapping[str, Any]) -> dict[str, Any]:
    """What newer files have among rope_parameters, and older ones beside them"""
    found = scaling_of(content).get("partial_rotary_factor")
    return {} if found is None else {"partial_rotary_factor": found}


def scaling_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    return rope_mapping(content, "rope_scaling") or rope_mapping(content, "rope_parameters")


def rope_mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = content.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"{key} must be a mapping, but is {short(found)}")
    return found or {}


# ---- how to run a model ------------------------------------------------------------------------------------

KV_CACHE_DTYPES = {**DTYPES, "q8_0": torch.uint8}  # or "auto"
BLOCK_SIZES = (16, 32, 64, 128, 256)
# What each number is at the least and at the most
RANGES = {
    "max_model_len": (2, MAX_POSITION),
    "max_num_seqs": (1, 1024),
    "max_num_batched_tokens": (1, 1 << 20),
    "seed": (0, (1 << 63) - 1),
    "max_queue": (1, 1 << 31),
    "max_queue_tokens": (1, 1 << 62),
    "max_loras": (1, 1 << 16),
    "max_lora_rank": (1, 1 << 16),
}
UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


@knowing(elsewhere.ENGINE)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and run. None leaves a choice to the engine, which makes it from the model and
    the memory there is."""

    model: str | Path | None = None
    device: torch.device | str | None = None  # "auto" or None: a GPU if there is one, else the CPU
    dtype: torch.dtype | str | None = None  # "auto" or None: as it is stored
    activations: str | None = None
    quantize: str | None = None
    packed_cache: str | Path | None = None  # a folder for packed copies of GGUF models, which a CPU maps
    max_model_len: int | None = None  # tokens of a prompt and its answer; the model's own if None
    max_num_seqs: int = 64  # streams that run at once
    max_num_batched_tokens: int | None = None  # tokens of one step
    kv_cache_dtype: str = "auto"  # that of the model's states, or float16 where its layers round what enters
    kv_cache_memory: int | str | None = None  # bytes, also as "2GiB"; a share of what is free if None
    block_size: int = 16
    enable_prefix_caching: bool = True
    seed: int | None = None
    speculative_config: Mapping[str, Any] | None = field(default=None, hash=False)
    chat_template: str | None = None
    deterministic: bool = False  # on a GPU the same bits in any company, as a CPU always has; for the process
    max_queue: int = 1024  # requests that wait
    max_queue_tokens: int = 1 << 22
    enable_lora: bool = True  # requests may name adapters
    max_loras: int = 64  # adapters that are kept; of more, the one longest not asked for is read again
    max_lora_rank: int = 512

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value, default = getattr(self, name), getattr(EngineConfig, name)
            if value is not None or default is not None:  # else it is left to the engine
                check_whole(name, value, low, high)
        check_one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_CACHE_DTYPES))
        check_one_of("block_size", self.block_size, BLOCK_SIZES)
        for name in ("enable_prefix_caching", "deterministic", "enable_lora"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.packed_cache, str | Path | None) or self.packed_cache == "":
            raise ValueError(f"packed_cache must be the path of a folder, but is {short(self.packed_cache)}")
        if not isinstance(self.chat_template, str | None):
            raise ValueError(f"chat_template must be the text of one, but is {short(self.chat_template)}")
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", None)
        object.__setattr__(self, "kv_cache_memory", checked_bytes("kv_cache_memory", self.kv_cache_memory))


def checked_bytes(name: str, value: Any) -> int | None:
    """A number of bytes, also written as "512MB" or "2GiB"."""
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,16}(?:\.\d{1,9})?)\s*([kmgt]i?)?b?\s*", value.lower())
        if match is None:
            units = "kB, MB, GB, TB, KiB, MiB, GiB, TiB"
            raise ValueError(f"{name} must be a number of bytes, or of {units}, but is {short(value)}")
        value = int(float(match[1]) * UNITS[match[2] or ""])
    return check_whole(name, value, 1, 1 << 50)
