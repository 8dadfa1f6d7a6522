"""From a checkpoint to a model: every weight checked, copied once, kept in the form it will be used in."""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infinicore import nn
from infinicore.float8 import Float8, to_float8
from infinicore.nn.weight import WeightLayer
from infinicore.quantization import BlockType, QuantizedTensor, precise_activation_bits, quantize
from infinicore.tiles import PARTS, RowTensor, tile
from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.staging import Staging
from infinilm.config import DTYPES, EngineConfig, LlamaConfig, parse_dtype
from infinilm.models.gguf import tensor_names
from infinilm.models.mixture import BiasedRouter, Router
from infinilm.models.packed_copy import PackedCopy
from infinilm.models.registry import class_of, entry_of, read_config
from infinilm.models.stored import Stored, Weight

if TYPE_CHECKING:
    from infinilm.models.llama import LlamaForCausalLM

HEADS = ("lm_head.", "score.")
LOG = logging.getLogger("infinilm.weights")

# Tables that older files carry and models recompute.
RECOMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$|\.attn\.bias$")


def load_weights(
    checkpoint: Checkpoint, engine_config: EngineConfig, report: Callable[[int], None]
) -> LlamaForCausalLM:
    """Build the model without memory, then give it the checkpoint's weights one by one."""
    config = read_config(checkpoint)
    stored = stored_weights(checkpoint, config)
    placement = Placement(engine_config, config.dtype)
    check_dense(stored, placement.rounds_to)
    model = empty_model(class_of(checkpoint), stored, config)
    check_names(model, stored)
    copy = PackedCopy(checkpoint, engine_config.packed_cache, packed_weights(model, stored, placement))

    def done(weight: Weight) -> None:
        for source in weight.sources:
            checkpoint.forget(source)
        report(weight.num_bytes)

    fill(model, stored, placement, copy, done)
    tie_head(model)
    tell_of_dense(stored, model, placement.rounds_to)
    placement.tell_of_dequantized(stored)
    return model.eval()


def empty_model(model_class: type[LlamaForCausalLM], stored: Stored, config: LlamaConfig) -> LlamaForCausalLM:
    """Without memory, and with the heads that there are weights for"""
    if config.tie_word_embeddings and has_own_head(stored):
        config = replace(config, tie_word_embeddings=False)
    with torch.device("meta"):
        model = model_class(config)
        fit_heads(model, stored, config)
    return model


def fill(
    model: LlamaForCausalLM,
    stored: Stored,
    placement: Placement,
    copy: PackedCopy,
    done: Callable[[Weight], None],
) -> None:
    """Give a model its weights, those from the packed copy that it has; where there is none, one is made."""
    packed = copy.read()
    for name in wanted_names(model):
        give_weight(model, name, stored, placement, packed.get(name))
        done(stored[name])
    if not packed:
        copy.write(model)


def tie_head(model: LlamaForCausalLM) -> None:
    """One memory for the head and the embeddings, where they are the same"""
    if model.lm_head is None or not model.config.tie_word_embeddings:
        return
    weight = model.model.embed_tokens.weight
    if isinstance(weight, QuantizedTensor):
        model.lm_head.set_weight(weight)
    else:
        model.lm_head.weight = weight


def stored_weights(checkpoint: Checkpoint, config: LlamaConfig) -> Stored:
    """The weights of a checkpoint, in the form and under the names that its model has"""
    entry = entry_of(checkpoint)
    if entry.gguf is not None and checkpoint.is_gguf:
        stored = Stored(checkpoint, tensor_names(checkpoint, entry.gguf))
        if entry.gguf.has_paired_rows:
            part_pairs(stored, config)
    else:
        names = [name for name in checkpoint.names() if not RECOMPUTED.search(name)]
        stored = Stored(checkpoint, dict(zip(map(name_within(names), names), names, strict=True)))
    entry.model_class.arrange(stored, config)
    name_tied(stored, config)
    check_layers(stored, config)
    return stored


def name_tied(stored: Stored, config: LlamaConfig) -> None:
    """Of a weight's names a file may have the head's alone: safetensors keeps the first in the alphabet."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if config.tie_word_embeddings and head in stored and embedding not in stored:
        stored.put(embedding, stored.pop(head))


def name_within(names: list[str]) -> Callable[[str], str]:
    """The names in the files of a bare model, of which embedders are made, are those inside `model`."""
    is_bare = "embed_tokens.weight" in names
    return lambda name: f"model.{name}" if is_bare and not name.startswith(HEADS) else name


def has_own_head(stored: Stored) -> bool:
    """Whether there is a head that is not the embeddings: then it counts, whatever the config says."""
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return False
    is_alike = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    return not is_alike or not torch.equal(head.read(), embedding.read())  # type: ignore[arg-type]


def fit_heads(model: LlamaForCausalLM, stored: Stored, config: LlamaConfig) -> None:
    """Files of embedders have no head, those of rerankers one that scores a text."""
    if (score := stored.get("score.weight")) is not None:
        if len(score.shape) != 2:
            raise stored.error(f"'score.weight' has shape {score.shape}, but should be a matrix")
        model.score = nn.Linear(config.hidden_size, score.shape[0], bias=False)
    has_logits = config.tie_word_embeddings or "lm_head.weight" in stored
    if model.score is not None or not has_logits:
        model.lm_head = None


def part_pairs(stored: Stored, config: LlamaConfig) -> None:
    """Undo llama.cpp's order of the rows of a head: rotation pairs side by side (GPT-J) to halves (NeoX)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for module, num_heads in heads.items():
        for name, _, _ in stored.named(f"self_attn.{module}"):
            check_rows(stored, name, num_heads * config.head_dim)
        stored.reorder(f"self_attn.{module}", partial(halves_of_pairs, num_heads))


def halves_of_pairs(num_heads: int, num_rows: int) -> Tensor:
    return torch.arange(num_rows, device="cpu").view(num_heads, -1, 2).transpose(1, 2).flatten()


def check_rows(stored: Stored, name: str, num_rows: int) -> None:
    weight, num_dims = stored[name], 1 if name.endswith("bias") else 2
    if len(weight.shape) != num_dims or weight.shape[0] != num_rows:
        raise stored.error(f"tensor {name!r} has shape {weight.shape}, but its heads need {num_rows} rows")


ACTIVATION_BITS = {"float32": 32, "int16": 16, "int8": 8}
QUANTIZED: dict[str, BlockType | Float8] = {
    "q8_0": BlockType.Q8_0,
    "q4_0": BlockType.Q4_0,
    "fp8": Float8.FP8,
}


def activation_bits(activations: str | None, device: torch.device, dtype: torch.dtype | None) -> int | None:
    """What `activations` asks what enters packed layers to be rounded to"""
    if activations is None:
        return None
    if activations not in ACTIVATION_BITS:
        raise ValueError(f"activations must be one of {sorted(ACTIVATION_BITS)}, but are {activations!r}")
    if activations != "float32" and (device.type != "cpu" or dtype is not None):
        raise ValueError(f"activations {activations!r} need a CPU and no dtype, not {dtype} on {device}")
    return ACTIVATION_BITS[activations]


def rounded_type(
    quantize: str | None, device: torch.device, dtype: torch.dtype | None
) -> BlockType | Float8 | None:
    """What `quantize` asks matrices to be rounded to"""
    if quantize is None:
        return None
    if quantize not in QUANTIZED:
        raise ValueError(f"quantize must be one of {sorted(QUANTIZED)}, but is {quantize!r}")
    if quantize == "fp8" and device.type != "cuda":
        raise ValueError(f"quantize 'fp8' needs a GPU, not {device}; 'q8_0' takes as much memory on a CPU")
    if device.type != "cuda" and (device.type != "cpu" or dtype not in (None, torch.float32)):
        raise ValueError(f"quantize needs a GPU, or a CPU and no dtype or float32, not {dtype} on {device}")
    return QUANTIZED[quantize]


class Placement:
    """Where weights go and in which dtype.

    Without a dtype, matrices stay as they are stored on a CPU: quantised ones packed, for kernels that round
    activations (to 16 bits, or fewer by choice) and work on integers, others for kernels that multiply
    floats. Elsewhere the checkpoint's dtype is used. A float32 model keeps quantised matrices as blocks. On a
    GPU those whose types have kernels there are kept in tiles, whatever the dtype.
    With a type to round to, dense matrices are quantised to it, one after the other, and kept like those.
    """

    def __init__(self, config: EngineConfig, stored_dtype: torch.dtype | None) -> None:
        device, dtype = torch.device(config.device or "cpu"), parse_dtype(config.dtype)
        is_plain = device.type == "cpu" and dtype is None
        self.activation_bits = activation_bits(config.activations, device, dtype)
        self.packs = is_plain and config.activations != "float32"
        self.rounds_to = rounded_type(config.quantize, device, dtype)
        self.device = device
        self.staging = Staging(device) if device.type == "cuda" else None
        self.dequantized: Counter[str] = Counter()  # matrices of each type that have no kernels there
        self.keeps_stored = is_plain
        self.dtype = dtype or (torch.float32 if is_plain else stored_dtype or torch.bfloat16)

    def arrived(self, weight: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
        """On a GPU if it goes there, else where the file has it"""
        if self.staging is None:
            return weight
        if isinstance(weight, QuantizedTensor):
            return replace(weight, blocks=self.staging.send(weight.blocks))
        return self.staging.send(weight)

    def quantized(self, weight: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
        """A matrix in blocks, if that was asked for and its rows fill them."""
        if self.rounds_to is None or isinstance(weight, QuantizedTensor):
            return weight
        if weight.shape[-1] % self.rounds_to.elements_per_block:
            return weight
        return to_float8(weight) if isinstance(self.rounds_to, Float8) else quantize(weight, self.rounds_to)

    def kept(self, weight: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
        """A copy, which nothing done to the file reaches."""
        if isinstance(weight, QuantizedTensor) and self.staging is not None:
            return weight if isinstance(weight, RowTensor) else tile(weight)
        if isinstance(weight, QuantizedTensor) and self.packs:
            return weight.pack(self.activation_bits or precise_activation_bits(weight.type))
        return weight.clone()

    def keeps(self, weight: Tensor | QuantizedTensor) -> bool:
        """Whether this matrix stays in the form it is stored in."""
        if not isinstance(weight, QuantizedTensor):
            return self.keeps_stored
        if self.staging is not None:
            return isinstance(weight, RowTensor) or weight.type in PARTS
        return self.device.type == "cpu" and self.dtype == torch.float32

    def dense(self, weight: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """A copy, which nothing done to the file reaches"""
        if isinstance(weight, QuantizedTensor):
            self.dequantized[weight.type.name] += 1
            weight = weight.dequantize(dtype)
        is_copy = self.staging is not None
        return weight.to(device=self.device, dtype=dtype, copy=not is_copy)

    def tell_of_dequantized(self, stored: Stored) -> None:
        """Say that more memory is taken than the file's; nothing else would."""
        if self.staging is not None and self.dequantized:
            found = ", ".join(f"{count} {name}" for name, count in self.dequantized.items())
            known = ", ".join(type.name for type in PARTS)
            LOG.warning(f"{stored.path}: {found} matrices become {self.dtype}: a GPU keeps {known}")


def check_layers(stored: Stored, config: LlamaConfig) -> None:
    """Before anything is built: a config may claim any number of layers, but its file holds this many."""
    layers = {int(m[1]) for name in stored if (m := re.match(r"model\.layers\.(\d{1,9})\.", name))}
    if layers != set(range(min(config.num_hidden_layers, len(layers) + 1))):
        held = f"weights of {len(layers)} layers, the last of them {max(layers, default=None)}"
        raise stored.error(f"config has {config.num_hidden_layers} layers, but it holds {held}")


def tied_names(config: LlamaConfig) -> set[str]:
    return {"lm_head.weight"} if config.tie_word_embeddings else set()


def wanted_names(model: LlamaForCausalLM) -> list[str]:
    return [name for name in model.state_dict() if name not in tied_names(model.config)]


def check_names(model: LlamaForCausalLM, stored: Stored) -> None:
    wanted, found = set(wanted_names(model)), set(stored) - tied_names(model.config)
    if missing := sorted(wanted - found):
        raise stored.error(f"{len(missing)} weights are missing, first {missing[0]!r}")
    if unknown := sorted(found - wanted):
        raise stored.error(f"{len(unknown)} weights have no place, first {unknown[0]!r}")


def packed_weights(model: LlamaForCausalLM, stored: Stored, placement: Placement) -> dict[str, Weight]:
    """The weights whose blocks are packed as they are stored"""
    layers = {f"{path}.weight": m for path, m in model.named_modules() if isinstance(m, WeightLayer)}
    found = {name: stored[name] for name in wanted_names(model) if name in layers and placement.packs}
    return {
        name: weight
        for name, weight in found.items()
        if isinstance(weight.dtype, BlockType) and weight.shape == tuple(layers[name].weight.shape)
    }


def give_weight(
    model: torch.nn.Module,
    name: str,
    stored: Stored,
    placement: Placement,
    packed: QuantizedTensor | None,
) -> None:
    """The weight of this name, as it is stored or packed already"""
    path, _, leaf = name.rpartition(".")
    module, found = model.get_submodule(path), stored[name]
    check_fits(stored, name, getattr(module, leaf))
    weight: Tensor | QuantizedTensor = placement.arrived(found.read()) if packed is None else packed
    if packed is None:
        check_finite(stored, name, weight)
    if isinstance(module, WeightLayer) and leaf == "weight":
        weight = weight if isinstance(module, Router) else placement.quantized(weight)
        if placement.keeps(weight):
            module.set_weight(placement.kept(weight))
            return
    is_precise = isinstance(module, BiasedRouter) and leaf != "weight"
    dense = placement.dense(weight, torch.float32 if is_precise else placement.dtype)
    if dense.dtype == torch.float16 and found.dtype != torch.float16 and not is_finite(dense):
        raise stored.error(f"{name!r} has numbers beyond float16; take bfloat16 or float32 as dtype")
    setattr(module, leaf, nn.Parameter(dense))


def check_fits(stored: Stored, name: str, place: Tensor) -> None:
    found = stored[name]
    if tuple(found.shape) != tuple(place.shape):
        shapes = f"{tuple(found.shape)}, but the config asks for {tuple(place.shape)}"
        raise stored.error(f"{name!r} has shape {shapes}")
    if not isinstance(found.dtype, BlockType) and found.dtype not in DTYPES.values():
        raise stored.error(f"{name!r} is {found.dtype}; expected one of {sorted(DTYPES)}")


def check_dense(stored: Stored, wanted: BlockType | Float8 | None) -> None:
    """Rounding what is rounded already would only lose more."""
    found = [name for name, weight in stored.items() if isinstance(weight.dtype, BlockType)]
    if wanted is not None and found:
        kind = type_name(stored[found[0]].dtype)
        raise stored.error(f"quantize takes a checkpoint of floats, but {found[0]!r} is {kind} already")


def tell_of_dense(stored: Stored, model: torch.nn.Module, wanted: BlockType | Float8 | None) -> None:
    """Say which matrices could not be quantised; nothing else would."""
    if wanted is None:
        return
    layers = [m for m in model.modules() if isinstance(m, WeightLayer) and not isinstance(m, Router)]
    dense = [layer for layer in layers if not isinstance(layer.weight, QuantizedTensor)]
    if dense:
        length = dense[0].weight.shape[1]
        warnings.warn(
            f"{stored.path}: {len(dense)} of {len(layers)} matrices stay dense: rows of {length} "
            f"do not fill {wanted.name} blocks of {wanted.elements_per_block}",
            stacklevel=2,
        )


def check_finite(stored: Stored, name: str, weight: Tensor | QuantizedTensor) -> None:
    """NaN and infinity in a weight would spoil every answer; they are refused here, by name."""
    if not is_finite(weight):
        raise stored.error(f"{name!r} holds NaN or infinity")


def is_finite(weight: Tensor | QuantizedTensor) -> bool:
    if isinstance(weight, QuantizedTensor):
        return weight.has_finite_scales()
    return weight.numel() == 0 or bool(torch.isfinite(torch.stack(weight.aminmax())).all())


def type_name(dtype: torch.dtype | BlockType) -> str:
    return dtype.name if isinstance(dtype, BlockType) else str(dtype).removeprefix("torch.")
