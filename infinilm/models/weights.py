"""From a checkpoint to a model: every weight checked, copied once, kept in the form it will be used in."""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from infinicore import nn
from infinicore.float8 import Float8, to_float8
from infinicore.quantization import BlockType, QuantizedTensor, precise_activation_bits, quantize
from infinicore.tiles import PARTS, RowTensor, tile
from infinilm.checkpoint import Checkpoint, CheckpointError
from infinilm.checkpoint.staging import Staging
from infinilm.config import DTYPES, EngineConfig, LlamaConfig, parse_dtype

LOG = logging.getLogger("infinilm.weights")

# Tables that older files carry and models recompute.
RECOMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$|\.attn\.bias$")


class Buildable(Protocol):
    def __init__(self, config: LlamaConfig) -> None: ...


Model = TypeVar("Model", bound=Buildable)


def load_weights(
    model_class: type[Model],
    checkpoint: Checkpoint,
    engine_config: EngineConfig,
    report: Callable[[int], None],
) -> Model:
    """Build the model without memory, then give it the checkpoint's weights one by one."""
    config = read_config(checkpoint)
    check_layers(checkpoint, config)
    placement = Placement(engine_config, config.dtype)
    if placement.rounds_to is not None:
        check_dense(checkpoint)
    with torch.device("meta"):
        model: Any = model_class(config)
    wanted = wanted_names(model, config)
    found = {name for name in checkpoint.names() if not RECOMPUTED.search(name)}
    check_names(checkpoint, wanted, found - tied_names(config))
    for name in wanted:
        give_weight(model, name, checkpoint, placement)
        checkpoint.forget(name)
        report(checkpoint.num_bytes_of(name))
    if config.tie_word_embeddings:
        share_weight(model.lm_head, model.model.embed_tokens.weight)
    tell_of_dense(checkpoint, model, placement.rounds_to)
    placement.tell_of_dequantized(checkpoint)
    return model.eval()  # type: ignore[no-any-return]


ACTIVATION_BITS = {"float32": 32, "int16": 16, "int8": 8}
QUANTIZED: dict[str, BlockType | Float8] = {
    "q8_0": BlockType.Q8_0,
    "q4_0": BlockType.Q4_0,
    "fp8": Float8.FP8,
}


def rounded_type(quantize: str | None, device: torch.device) -> BlockType | Float8 | None:
    """What `quantize` asks matrices to be rounded to"""
    if quantize is not None and quantize not in QUANTIZED:
        raise ValueError(f"quantize must be one of {sorted(QUANTIZED)}, but is {quantize!r}")
    if quantize == "fp8" and device.type != "cuda":
        raise ValueError(f"quantize 'fp8' needs a GPU, not {device}; 'q8_0' takes as much memory on a CPU")
    return None if quantize is None else QUANTIZED[quantize]


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
        activations, is_plain = config.activations, device.type == "cpu" and dtype is None
        if activations is not None and activations not in ACTIVATION_BITS:
            raise ValueError(f"activations must be one of {sorted(ACTIVATION_BITS)}, but are {activations!r}")
        if activations not in (None, "float32") and not is_plain:
            raise ValueError(f"activations {activations!r} need a CPU and no dtype, not {dtype} on {device}")
        self.packs = is_plain and activations != "float32"
        self.activation_bits = ACTIVATION_BITS[activations] if activations else None
        self.rounds_to = rounded_type(config.quantize, device)
        can_quantize = device.type == "cuda" or (device.type == "cpu" and dtype in (None, torch.float32))
        if self.rounds_to is not None and not can_quantize:
            raise ValueError(
                f"quantize needs a GPU, or a CPU and no dtype or float32, not {dtype} on {device}"
            )
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

    def dense(self, weight: Tensor | QuantizedTensor) -> Tensor:
        """In the dtype that is computed in; a copy, which nothing done to the file reaches"""
        if isinstance(weight, QuantizedTensor):
            self.dequantized[weight.type.name] += 1
            weight = weight.dequantize(self.dtype)
        is_copy = self.staging is not None
        return weight.to(device=self.device, dtype=self.dtype, copy=not is_copy)

    def tell_of_dequantized(self, checkpoint: Checkpoint) -> None:
        """Say that more memory is taken than the file's; nothing else would."""
        if self.staging is not None and self.dequantized:
            found = ", ".join(f"{count} {name}" for name, count in self.dequantized.items())
            known = ", ".join(type.name for type in PARTS)
            LOG.warning(f"{checkpoint.path}: {found} matrices become {self.dtype}: a GPU keeps {known}")


def read_config(checkpoint: Checkpoint) -> LlamaConfig:
    try:
        return LlamaConfig.from_dict(checkpoint.config)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.path}: config: {error}") from error


def check_layers(checkpoint: Checkpoint, config: LlamaConfig) -> None:
    """Before anything is built: a config may claim any number of layers, but its file holds this many."""
    layers = {
        int(m[1]) for name in checkpoint.names() if (m := re.match(r"model\.layers\.(\d{1,9})\.", name))
    }
    if layers != set(range(min(config.num_hidden_layers, len(layers) + 1))):
        held = f"weights of {len(layers)} layers, the last of them {max(layers, default=None)}"
        raise CheckpointError(
            f"{checkpoint.path}: config has {config.num_hidden_layers} layers, but it holds {held}"
        )


def tied_names(config: LlamaConfig) -> set[str]:
    return {"lm_head.weight"} if config.tie_word_embeddings else set()


def wanted_names(model: torch.nn.Module, config: LlamaConfig) -> list[str]:
    return [name for name in model.state_dict() if name not in tied_names(config)]


def check_names(checkpoint: Checkpoint, wanted: list[str], found: set[str]) -> None:
    if missing := sorted(set(wanted) - found):
        raise CheckpointError(f"{checkpoint.path}: {len(missing)} weights are missing, first {missing[0]!r}")
    if unknown := sorted(found - set(wanted)):
        raise CheckpointError(
            f"{checkpoint.path}: {len(unknown)} weights have no place, first {unknown[0]!r}"
        )


def give_weight(model: torch.nn.Module, name: str, checkpoint: Checkpoint, placement: Placement) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    place: Tensor = getattr(module, leaf)
    if tuple(checkpoint.shape(name)) != tuple(place.shape):
        shapes = f"{tuple(checkpoint.shape(name))}, but the config asks for {tuple(place.shape)}"
        raise CheckpointError(f"{checkpoint.path}: {name!r} has shape {shapes}")
    check_dtype(checkpoint, name)
    weight = placement.arrived(checkpoint.tensor(name))
    check_finite(checkpoint, name, weight)
    if isinstance(module, nn.Linear | nn.Embedding) and leaf == "weight":
        weight = placement.quantized(weight)
        if placement.keeps(weight):
            module.set_weight(placement.kept(weight))
            return
    setattr(module, leaf, nn.Parameter(placement.dense(weight)))


def share_weight(module: nn.Linear, weight: nn.Parameter | QuantizedTensor) -> None:
    if isinstance(weight, QuantizedTensor):
        module.set_weight(weight)
    else:
        module.weight = weight


def check_dense(checkpoint: Checkpoint) -> None:
    """Rounding what is rounded already would only lose more."""
    found = [name for name in checkpoint.names() if isinstance(checkpoint.dtype(name), BlockType)]
    if found:
        kind = type_name(checkpoint.dtype(found[0]))
        raise CheckpointError(
            f"{checkpoint.path}: quantize takes a checkpoint of floats, but {found[0]!r} is {kind} already"
        )


def tell_of_dense(checkpoint: Checkpoint, model: torch.nn.Module, wanted: BlockType | Float8 | None) -> None:
    """Say which matrices could not be quantised; nothing else would."""
    if wanted is None:
        return
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    dense = [layer for layer in layers if not isinstance(layer.weight, QuantizedTensor)]
    if dense:
        length = dense[0].weight.shape[1]
        warnings.warn(
            f"{checkpoint.path}: {len(dense)} of {len(layers)} matrices stay dense: rows of {length} "
            f"do not fill {wanted.name} blocks of {wanted.elements_per_block}",
            stacklevel=2,
        )


def check_dtype(checkpoint: Checkpoint, name: str) -> None:
    dtype = checkpoint.dtype(name)
    if not isinstance(dtype, BlockType) and dtype not in DTYPES.values():
        raise CheckpointError(f"{checkpoint.path}: {name!r} is {dtype}; expected one of {sorted(DTYPES)}")


def check_finite(checkpoint: Checkpoint, name: str, weight: Tensor | QuantizedTensor) -> None:
    """NaN and infinity in a weight would spoil every answer; they are refused here, by name."""
    if isinstance(weight, QuantizedTensor):
        is_finite = weight.has_finite_scales()
    else:
        is_finite = weight.numel() == 0 or bool(torch.isfinite(torch.stack(weight.aminmax())).all())
    if not is_finite:
        raise CheckpointError(f"{checkpoint.path}: {name!r} holds NaN or infinity")


def describe(checkpoint: Checkpoint) -> dict[str, str]:
    """What a checkpoint is and the memory it needs, without reading its weights."""
    config = read_config(checkpoint)
    check_layers(checkpoint, config)
    counts = Counter({"": 0})
    for name in checkpoint.names():
        counts[type_name(checkpoint.dtype(name))] += math.prod(checkpoint.shape(name))
    total = sum(counts.values())
    shares = ", ".join(f"{kind} {count / total:.0%}" for kind, count in counts.most_common() if count)
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    heads = f"{config.num_attention_heads} query heads, {config.num_key_value_heads} key/value heads"
    cache = per_token * config.max_position_embeddings
    return {
        "model": str(checkpoint.path),
        "architecture": config.model_type,
        "parameters": f"{total:,}",
        "layers": f"{config.num_hidden_layers} of width {config.hidden_size}, {heads} of {config.head_dim}",
        "vocabulary": f"{config.vocab_size:,}{', tied' if config.tie_word_embeddings else ''}",
        "context": f"{config.max_position_embeddings:,} tokens, rope {config.rope.scaling['rope_type']}",
        "weights": f"{checkpoint.num_bytes / 1e6:,.1f} MB ({shares})",
        "memory": f"{checkpoint.num_bytes / 1e6:,.0f} MB of weights, and {per_token / 1e3:,.1f} kB a token "
        f"({cache / 1e6:,.0f} MB for a full context)",
    }


def type_name(dtype: torch.dtype | BlockType) -> str:
    return dtype.name if isinstance(dtype, BlockType) else str(dtype).removeprefix("torch.")
