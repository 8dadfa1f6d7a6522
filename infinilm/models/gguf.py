"""What llama.cpp's names mean: of a model's tensors, and of the metadata that are its config."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import numpy as np

from infinicore.quantization import QuantizedTensor
from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.gguf_fields import Fields, as_written
from infinilm.config import LAYER_TYPES
from infinilm.rope import yarn_attention_factor

MODEL_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSOR_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?(\w+)\.(weight|bias)")
# Divisors of the frequencies: of Llama 3, of texts up to the trained length, of longer ones
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

# What is read of an architecture's keys, and what says nothing about the computation. Any other key may
# change it in a way we do not know, unless its value leaves it off.
KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",  # beside the one of RMS norms, which these models have
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "classifier.output_labels",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "pooling_type",  # of embeddings, not of text
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",
}
# What a file may give as one number, or as an array of each layer's
LAYER_KEYS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
HARMLESS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}

WINDOW_LAYERS = "attention.sliding_window_pattern"
GUESSING_LAYERS = "nextn_predict_layers"  # at the end, for further tokens; not read
HEAD_NORM = "model.layers.0.self_attn.q_norm.weight"
SIGMOID = 2  # as expert_gating_func


@dataclass(frozen=True)
class GGUF:
    """How GGUF files have a model, where it is not as they have Llama."""

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)  # of metadata: the names that config.json has
    modules: Mapping[str, str] = field(default_factory=dict)  # of a layer: the model's names
    constants: Mapping[str, Any] = field(default_factory=dict)  # of config.json, where files are silent
    has_paired_rows: bool = False  # the two rows of q or k that are rotated together lie side by side
    has_windows: bool = False
    names_windows: bool = False  # files may say which layers have one
    usual_window: int = 0  # where files are silent
    may_norm_heads: bool = False  # queries and keys, where files have the weights of such norms
    has_experts: bool = False
    has_sigmoids: bool = False  # which choose experts; files may say so
    other_parts: tuple[str, ...] = ()  # what keys begin with that say nothing of the text

    @property
    def kind(self) -> tuple[str, bool, bool, bool]:
        """What tells its files from those of others: `gguf_kind` in registry.py finds it there"""
        return self.architecture, self.has_experts, self.has_sigmoids, self.names_windows

    def name_of(self, name: str) -> str | None:
        """The model's name of a tensor"""
        if name == "cls.output.weight":  # of a reranker
            return "score.weight"
        match = TENSOR_NAME.fullmatch(name)
        layer, module, kind = match.groups() if match else (None, "", "")
        if layer is None and module in MODEL_MODULES:
            return f"{MODEL_MODULES[module]}.{kind}"
        path = self.modules.get(module, LAYER_MODULES.get(module))
        return None if layer is None or path is None else f"model.layers.{layer}.{path}.{kind}"


def tensor_names(checkpoint: Checkpoint, kind: GGUF) -> dict[str, str]:
    """The model's name of each tensor, and the file's"""
    fields, found = ModelFields(checkpoint, kind), dict[str, str]()
    for name in checkpoint.names():
        if name in ROPE_FACTORS or fields.is_guessing(name):
            continue
        if (ours := kind.name_of(name)) is None:
            raise fields.error(f"tensor {name!r} has no place in a {kind.architecture} model")
        if ours in found:
            raise fields.error(f"{found[ours]!r} and {name!r} are both {ours!r}")
        found[ours] = name
    return found


class ModelFields(Fields):
    """The metadata of a model, of which none that may change the answer is ignored"""

    def __init__(self, checkpoint: Checkpoint, kind: GGUF) -> None:
        super().__init__(checkpoint.metadata, checkpoint.path)
        self.kind = kind
        self.metadata = {**self.metadata, **self._of_equal_layers()}

    def _of_equal_layers(self) -> dict[str, Any]:
        """The one number of arrays that have the same for each layer"""
        count, keys = self.metadata.get(self.key("block_count")), map(self.key, LAYER_KEYS)
        arrays = {key: self.metadata[key] for key in keys if isinstance(self.metadata.get(key), np.ndarray)}
        numbers = {key: array.tolist() for key, array in arrays.items() if len(array) == count}
        return {key: each[0] for key, each in numbers.items() if len(set(each)) == 1}

    @property
    def num_layers(self) -> int:
        """Without those that guess further tokens, where the model knows of such"""
        count = self.integer(self.key("block_count"))
        if GUESSING_LAYERS not in self.kind.keys:
            return count
        return count - self.integer(self.key(GUESSING_LAYERS), 0, minimum=0, maximum=count - 1)

    def is_guessing(self, name: str) -> bool:
        match = re.match(r"blk\.(\d{1,6})\.", name)
        return GUESSING_LAYERS in self.kind.keys and match is not None and int(match[1]) >= self.num_layers

    def check_keys(self) -> None:
        for key, value in self.metadata.items():
            prefix, _, name = key.partition(".")
            is_known = name in KNOWN_KEYS or name in self.kind.keys or name.startswith(self.kind.other_parts)
            is_known |= name == WINDOW_LAYERS and self.kind.names_windows
            if prefix != self.kind.architecture or is_known:
                continue
            if not isinstance(value, bool | int | float) or value not in HARMLESS.get(name, ()):
                raise self.error(f"metadata key {key!r} is not supported; its value is {short(value)}")

    def key(self, name: str) -> str:
        return f"{self.kind.architecture}.{name}"

    def own(self) -> dict[str, Any]:
        """What this kind of model has beside others, under the names of its config.json"""
        found = {
            ours: self.metadata[self.key(name)]
            for name, ours in self.kind.keys.items()
            if self.key(name) in self.metadata
        }
        for ours, value in found.items():
            if not isinstance(value, bool | int | float | str):
                raise self.error(f"metadata for {ours!r} are an array, not one value")
        return {ours: as_written(value) if type(value) is float else value for ours, value in found.items()}


def read_gguf_config(checkpoint: Checkpoint, kind: GGUF) -> dict[str, Any]:
    """The config.json this model would have."""
    fields, names = ModelFields(checkpoint, kind), tensor_names(checkpoint, kind)
    fields.check_keys()
    key, vocab_size = fields.key, _vocab_size(fields, checkpoint)
    num_heads = fields.integer(key("attention.head_count"))
    head_dim = _head_dim(fields, num_heads)
    return {
        "vocab_size": vocab_size,
        "hidden_size": fields.integer(key("embedding_length")),
        "intermediate_size": fields.integer(key("feed_forward_length")),
        "num_hidden_layers": _num_layers(fields, names),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer(key("attention.head_count_kv"), num_heads),
        "head_dim": head_dim,
        "partial_rotary_factor": _rotated_share(fields, head_dim),
        "max_position_embeddings": fields.integer(key("context_length")),
        "rms_norm_eps": fields.number(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": fields.number(key("rope.freq_base"), 10000.0),
        "rope_scaling": _rope_scaling(fields, checkpoint),
        "sliding_window": _sliding_window(fields),
        "layer_types": _layer_types(fields),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in names,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "bos_token_id": _token_id(fields, "bos", vocab_size),
        "eos_token_id": _token_id(fields, "eos", vocab_size),
        "pad_token_id": _token_id(fields, "padding", vocab_size),
        **({"use_qk_norm": HEAD_NORM in names} if kind.may_norm_heads else {}),
        **kind.constants,
        **fields.own(),
    }


def _vocab_size(fields: ModelFields, checkpoint: Checkpoint) -> int:
    if "token_embd.weight" not in checkpoint.names():
        raise fields.error("tensor 'token_embd.weight' is missing")
    rows = checkpoint.shape("token_embd.weight")[0]
    if fields.integer(fields.key("vocab_size"), rows) != rows:
        raise fields.error(
            f"metadata key {fields.key('vocab_size')!r} is not the {rows} rows of 'token_embd.weight'"
        )
    return rows


def _num_layers(fields: ModelFields, names: Mapping[str, str]) -> int:
    num_layers = fields.num_layers
    found = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    if len(found) != num_layers or max(found) != num_layers - 1:
        raise fields.error(
            f"metadata key {fields.key('block_count')!r} is {num_layers}, "
            f"but the tensors are of {len(found)} layers up to number {max(found, default=None)}"
        )
    return num_layers


def _head_dim(fields: ModelFields, num_heads: int) -> int:
    hidden_size = fields.integer(fields.key("embedding_length"))
    head_dim = fields.integer(fields.key("attention.key_length"), hidden_size // num_heads, minimum=2)
    size = "attention.value_length"
    if size not in fields.kind.keys and fields.integer(fields.key(size), head_dim) != head_dim:
        raise fields.error(f"metadata key {fields.key(size)!r} is not the head size, {head_dim}")
    if head_dim % 2:
        raise fields.error(f"the head size {head_dim} is odd, so it has no rotation pairs")
    return head_dim


def _rotated_share(fields: ModelFields, head_dim: int) -> float:
    """Of a head's size it is as much as the file says, below which the quotient may have been rounded."""
    count = fields.integer(fields.key("rope.dimension_count"), head_dim)
    share = count / head_dim
    return share if int(head_dim * share) == count else math.nextafter(share, math.inf)


def _sliding_window(fields: ModelFields) -> int | None:
    """0 is how llama.cpp writes that there is none; in some files nothing says which layers have one."""
    key = fields.key("attention.sliding_window")
    window = fields.integer(key, fields.kind.usual_window, minimum=0) or None
    if fields.kind.has_windows or window is None:
        return window
    if window < fields.integer(fields.key("context_length")):
        raise fields.error(f"metadata key {key!r} is not supported; its value is {window}")
    return None


def _layer_types(fields: ModelFields) -> list[str] | None:
    key, count = fields.key(WINDOW_LAYERS), fields.integer(fields.key("block_count"))
    flags = fields.metadata.get(key)
    if flags is None:
        return None
    if not isinstance(flags, np.ndarray) or flags.dtype != bool or len(flags) != count:
        raise fields.error(f"metadata key {key!r} must have a flag for each layer, but is {short(flags)}")
    return [LAYER_TYPES[flag] for flag in flags.tolist()]


def _token_id(fields: ModelFields, role: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    return fields.integer(key, minimum=0, maximum=vocab_size - 1) if key in fields.metadata else None


# Rotation


def _rope_scaling(fields: ModelFields, checkpoint: Checkpoint) -> dict[str, Any] | None:
    prefix = fields.key("rope.")
    # As llama.cpp reads it, a factor without a type is linear.
    default = "linear" if _factor_key(fields) in fields.metadata else "none"
    kind = fields.value(prefix + "scaling.type", str, default)
    if kind not in ("none", "linear", "yarn", "longrope"):
        known = "none, linear, yarn, longrope"
        raise fields.error(f"metadata key {prefix + 'scaling.type'!r} is {short(kind)}; known are {known}")
    _check_yarn_factor(fields, kind)
    factors = [name for name in ROPE_FACTORS if name in checkpoint.names()]
    is_scaled = kind != "none" and fields.number(_factor_key(fields), 1.0) != 1.0
    if factors and (is_scaled or kind == "yarn"):
        raise fields.error(f"has both tensor {factors[0]!r} and metadata key {_factor_key(fields)!r}")
    if factors:
        return _longrope(fields, checkpoint, factors)
    _check_no_factors(fields, kind)
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": fields.number(_factor_key(fields))}
    return scaling if kind == "linear" else scaling | _yarn(fields, prefix + "scaling.")


def _factor_key(fields: ModelFields) -> str:
    """The factor had another name at first."""
    new, old = (fields.key(f"rope.{name}") for name in ("scaling.factor", "scale_linear"))
    return old if old in fields.metadata and new not in fields.metadata else new


def _check_no_factors(fields: ModelFields, kind: str) -> None:
    """What is said of divisors needs them. Files of OLMo 3 have yarn's usual factor there, once more."""
    attention_factor = fields.number(fields.key("rope.scaling.attn_factor"), 1.0)
    is_usual = math.isclose(attention_factor, _yarn_factor(fields, kind), rel_tol=1e-6)
    if kind == "longrope" or (attention_factor != 1.0 and not is_usual):
        name, value = ("type", kind) if kind == "longrope" else ("attn_factor", attention_factor)
        found = f"metadata key {fields.key(f'rope.scaling.{name}')!r} is {short(value)}"
        raise fields.error(f"{found}, but tensor {ROPE_FACTORS[1]!r} is missing")


def _check_yarn_factor(fields: ModelFields, kind: str) -> None:
    """Only yarn's usual factor of attention means one thing: converters write here a key of config.json that
    replaces it, or else one that multiplies it, and for these models llama.cpp reads neither."""
    key, usual = fields.key("rope.scaling.yarn_attn_factor"), _yarn_factor(fields, kind)
    found = fields.number(key, usual)
    if not math.isclose(found, usual, rel_tol=1e-6):
        raise fields.error(f"metadata key {key!r} is {found}; only {usual:.6g} is supported")


def _yarn_factor(fields: ModelFields, kind: str) -> float:
    """That of attention, where nothing else is said"""
    return yarn_attention_factor({"factor": fields.number(_factor_key(fields)) if kind == "yarn" else 1.0})


def _yarn(fields: ModelFields, prefix: str) -> dict[str, Any]:
    context_length = fields.integer(fields.key("context_length"))
    betas = [name for name in ("beta_fast", "beta_slow") if f"{prefix}yarn_{name}" in fields.metadata]
    return {
        "original_max_position_embeddings": fields.integer(
            f"{prefix}original_context_length", context_length
        ),
        **{name: fields.number(f"{prefix}yarn_{name}") for name in betas},
    }


def _longrope(fields: ModelFields, checkpoint: Checkpoint, names: list[str]) -> dict[str, Any]:
    """Divisors of the frequencies, as Hugging Face's longrope has them. Files of Llama 3 keep these, and not
    the constants of its formula: the same at every length, and with no other factor."""
    context_length = fields.integer(fields.key("context_length"))
    prefix = fields.key("rope.scaling.")
    return {
        "rope_type": "longrope",
        "attention_factor": fields.number(prefix + "attn_factor", 1.0),
        "short_factor": _divisors(fields, checkpoint, names[0]),
        "long_factor": _divisors(fields, checkpoint, names[-1]),
        "original_max_position_embeddings": fields.integer(
            prefix + "original_context_length", context_length
        ),
    }


def _divisors(fields: ModelFields, checkpoint: Checkpoint, name: str) -> list[float]:
    factors = checkpoint.tensor(name)
    head_dim = _head_dim(fields, fields.integer(fields.key("attention.head_count")))
    wanted = (fields.integer(fields.key("rope.dimension_count"), head_dim) // 2,)
    if isinstance(factors, QuantizedTensor) or tuple(factors.shape) != wanted:
        raise fields.error(f"tensor {name!r} has shape {tuple(factors.shape)}, not unquantised {wanted}")
    divisors = factors.float()
    if not (divisors.isfinite() & (divisors > 0)).all():
        raise fields.error(f"tensor {name!r} has values that are not finite and above 0")
    return divisors.tolist()
