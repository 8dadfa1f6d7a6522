"""GGUF files as checkpoints: Hugging Face names, order of rows, and config, from what llama.cpp wrote."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from infinicore.quantization import BlockType, QuantizedTensor
from infinilm.checkpoint import Checkpoint, TensorInfo
from infinilm.checkpoint.gguf_fields import Fields
from infinilm.checkpoint.gguf_parts import Part, open_parts

# Mistral and SmolLM call themselves llama in GGUF.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

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
ROPE_FACTORS = "rope_freqs.weight"

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
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "pooling_type",  # of embeddings, not of text
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",
}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}


def open_gguf(path: Path) -> "GGUFCheckpoint":
    return GGUFCheckpoint(open_parts(path))


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file, or of all parts of a split one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        first = parts[0]
        fields = _Fields(first.metadata, first.path)
        homes = {name: part for part in parts for name in part.tensors}
        factors = homes.pop(ROPE_FACTORS, None)
        self._homes = {_hugging_face_name(name, fields): part for name, part in homes.items()}
        tensors = dict(zip(self._homes, (part.tensors[name] for name, part in homes.items()), strict=True))
        config = _config(fields, tensors)
        if factors is not None:
            divisors = factors.read(factors.tensors[ROPE_FACTORS])
            config["rope_scaling"] = _rope_factors(fields, config, divisors)
        super().__init__(first.path, config, first.metadata, tensors)
        self._interleaved_heads = _interleaved_heads(fields, config, tensors)

    def _read(self, name: str, info: TensorInfo) -> Tensor | QuantizedTensor:
        tensor = self._homes[name].read(info)
        num_heads = self._interleaved_heads.get(name)
        return tensor if num_heads is None else _in_halves(tensor, num_heads)

    def forget(self, name: str) -> None:
        info = self._info(name)
        self._homes[name].forget(info)

    def _release(self) -> None:
        del self._homes


class _Fields(Fields):
    """The metadata of a model of a known architecture"""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        super().__init__(metadata, path)
        self.architecture = self.value("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise self.error(f"architecture {short(self.architecture)} is not supported; known are {known}")
        self.check_keys()

    def check_keys(self) -> None:
        """Nothing that may change the answer is ignored."""
        for key, value in self.metadata.items():
            prefix, _, name = key.partition(".")
            if prefix != self.architecture or name in KNOWN_KEYS:
                continue
            if not isinstance(value, bool | int | float) or value not in HARMLESS.get(name, ()):
                raise self.error(f"metadata key {key!r} is not supported; its value is {short(value)}")

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"


def _hugging_face_name(name: str, fields: _Fields) -> str:
    match = TENSOR_NAME.fullmatch(name)
    layer, module, kind = match.groups() if match else (None, "", "")
    if layer is None and module in MODEL_MODULES:
        return f"{MODEL_MODULES[module]}.{kind}"
    if layer is not None and module in LAYER_MODULES:
        return f"model.layers.{layer}.{LAYER_MODULES[module]}.{kind}"
    raise fields.error(f"tensor {name!r} has no place in a {fields.architecture} model")


# Tensors


def _in_halves(tensor: Tensor | QuantizedTensor, num_heads: int) -> Tensor | QuantizedTensor:
    """Undo llama.cpp's order of the rows of a head: rotation pairs side by side (GPT-J) to halves (NeoX)."""
    order = torch.arange(tensor.shape[0]).view(num_heads, -1, 2).transpose(1, 2).flatten()
    if isinstance(tensor, QuantizedTensor):
        return replace(tensor, blocks=tensor.blocks.index_select(0, order))
    return tensor.index_select(0, order)


def _interleaved_heads(
    fields: _Fields, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, int]:
    """The number of heads of each tensor whose rows are not in Hugging Face's order."""
    if fields.architecture != "llama":
        return {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = {name: heads[name.split(".")[-2]] for name in tensors if name.split(".")[-2] in heads}
    for name, num_heads in found.items():
        _check_rows(fields, name, tensors[name], num_heads * config["head_dim"])
    return found


def _check_rows(fields: _Fields, name: str, info: TensorInfo, num_rows: int) -> None:
    num_dims = 1 if name.endswith("bias") else 2
    if len(info.shape) != num_dims or info.shape[0] != num_rows:
        raise fields.error(f"tensor {name!r} has shape {info.shape}, but its heads need {num_rows} rows")
    if num_dims == 1 and isinstance(info.dtype, BlockType):
        raise fields.error(f"tensor {name!r} is {info.dtype}, but the rows of a bias are no blocks")


# Config


def _config(fields: _Fields, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config.json this model would have."""
    key, vocab_size = fields.key, _vocab_size(fields, tensors)
    num_heads = fields.integer(key("attention.head_count"))
    return {
        "architectures": [ARCHITECTURES[fields.architecture]],
        "model_type": fields.architecture,
        "vocab_size": vocab_size,
        "hidden_size": fields.integer(key("embedding_length")),
        "intermediate_size": fields.integer(key("feed_forward_length")),
        "num_hidden_layers": _num_layers(fields, tensors),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer(key("attention.head_count_kv"), num_heads),
        "head_dim": _head_dim(fields, num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields.integer(key("context_length")),
        "rms_norm_eps": fields.number(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": fields.number(key("rope.freq_base"), 10000.0),
        "rope_scaling": _rope_scaling(fields),
        "sliding_window": _sliding_window(fields),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": _token_id(fields, "bos", vocab_size),
        "eos_token_id": _token_id(fields, "eos", vocab_size),
        "pad_token_id": _token_id(fields, "padding", vocab_size),
    }


def _vocab_size(fields: _Fields, tensors: Mapping[str, TensorInfo]) -> int:
    if "model.embed_tokens.weight" not in tensors:
        raise fields.error("tensor 'token_embd.weight' is missing")
    rows = tensors["model.embed_tokens.weight"].shape[0]
    if fields.integer(fields.key("vocab_size"), rows) != rows:
        raise fields.error(
            f"metadata key {fields.key('vocab_size')!r} is not the {rows} rows of 'token_embd.weight'"
        )
    return rows


def _num_layers(fields: _Fields, tensors: Mapping[str, TensorInfo]) -> int:
    num_layers = fields.integer(fields.key("block_count"))
    found = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    if len(found) != num_layers or max(found) != num_layers - 1:
        raise fields.error(
            f"metadata key {fields.key('block_count')!r} is {num_layers}, "
            f"but the tensors are of {len(found)} layers up to number {max(found, default=None)}"
        )
    return num_layers


def _head_dim(fields: _Fields, num_heads: int) -> int:
    hidden_size = fields.integer(fields.key("embedding_length"))
    head_dim = fields.integer(fields.key("attention.key_length"), hidden_size // num_heads, minimum=2)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(fields.key(name), head_dim) != head_dim:
            raise fields.error(f"metadata key {fields.key(name)!r} is not the head size, {head_dim}")
    if head_dim % 2:
        raise fields.error(f"the head size {head_dim} is odd, so it has no rotation pairs")
    return head_dim


def _sliding_window(fields: _Fields) -> int | None:
    """0 is how llama.cpp writes that there is none; in Qwen's files nothing says which layers have one."""
    key = fields.key("attention.sliding_window")
    window = fields.integer(key, 0, minimum=0) or None
    if fields.architecture == "llama" or window is None:
        return window
    if window < fields.integer(fields.key("context_length")):
        raise fields.error(f"metadata key {key!r} is not supported; its value is {window}")
    return None


def _token_id(fields: _Fields, role: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    return fields.integer(key, minimum=0, maximum=vocab_size - 1) if key in fields.metadata else None


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    prefix = fields.key("rope.")
    # As llama.cpp reads it, a factor without a type is linear.
    default = "linear" if prefix + "scaling.factor" in fields.metadata else "none"
    kind = fields.value(prefix + "scaling.type", str, default)
    if kind not in ("none", "linear", "yarn"):
        raise fields.error(
            f"metadata key {prefix + 'scaling.type'!r} is {short(kind)}; known are none, linear, yarn"
        )
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": fields.number(prefix + "scaling.factor")}
    return scaling if kind == "linear" else scaling | _yarn(fields, prefix + "scaling.")


def _yarn(fields: _Fields, prefix: str) -> dict[str, Any]:
    context_length = fields.integer(fields.key("context_length"))
    betas = [name for name in ("beta_fast", "beta_slow") if f"{prefix}yarn_{name}" in fields.metadata]
    return {
        "original_max_position_embeddings": fields.integer(
            f"{prefix}original_context_length", context_length
        ),
        **{name: fields.number(f"{prefix}yarn_{name}") for name in betas},
    }


def _rope_factors(
    fields: _Fields, config: Mapping[str, Any], factors: Tensor | QuantizedTensor
) -> dict[str, Any]:
    """Llama 3's scaling: GGUF keeps the divisor of each frequency, not the constants of the formula.

    Hugging Face's name for given divisors is longrope: here the same at every length, and no other factor.
    """
    wanted = (config["head_dim"] // 2,)
    if config["rope_scaling"] is not None:
        raise fields.error(f"has both tensor {ROPE_FACTORS!r} and rope scaling {config['rope_scaling']}")
    if isinstance(factors, QuantizedTensor) or tuple(factors.shape) != wanted:
        raise fields.error(
            f"tensor {ROPE_FACTORS!r} has shape {tuple(factors.shape)}, not unquantised {wanted}"
        )
    divisors = factors.float()
    if not (divisors.isfinite() & (divisors > 0)).all():
        raise fields.error(f"tensor {ROPE_FACTORS!r} has values that are not finite and above 0")
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": divisors.tolist(),
        "long_factor": divisors.tolist(),
        "original_max_position_embeddings": config["max_position_embeddings"],
    }
