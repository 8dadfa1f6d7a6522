"""From a checkpoint to a model: every weight checked, copied once, kept in the form it will be used in."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from infinicore import nn
from infinicore.quantization import BlockType, QuantizedTensor, precise_activation_bits, quantize
from infinilm.checkpoint import Checkpoint, CheckpointError
from infinilm.config import DTYPES, EngineConfig, LlamaConfig, parse_dtype

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
    if placement.block_type is not None:
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
    tell_of_dense(checkpoint, model, placement.block_type)
    return model.eval()  # type: ignore[no-any-return]


ACTIVATION_BITS = {"float32": 32, "int16": 16, "int8": 8}
QUANTIZED = {"q8_0": BlockType.Q8_0, "q4_0": BlockType.Q4_0}


def block_type(quantize: str | None) -> BlockType | None:
    if quantize is not None and quantize not in QUANTIZED:
        raise ValueError(f"quantize must be one of {sorted(QUANTIZED)}, but is {quantize!r}")
    return None if quantize is None else QUANTIZED[quantize]


class Placement:
    """Where weights go and in which dtype.

    Without a dtype, matrices stay as they are stored on a CPU: quantised ones packed, for kernels that round
    activations (to 16 bits, or fewer by choice) and work on integers, others for kernels that multiply
    floats. Elsewhere the checkpoint's dtype is used. A float32 model keeps quantised matrices as blocks.
    With a block type, dense matrices are quantised to it, one after the other, and then kept like those.
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
        self.block_type = block_type(config.quantize)
        if self.block_type is not None and (device.type != "cpu" or dtype not in (None, torch.float32)):
            raise ValueError(f"quantize needs a CPU and no dtype or float32, not {dtype} on {device}")
        self.device = device
        self.keeps_stored = is_plain
        self.dtype = dtype or (torch.float32 if is_plain else stored_dtype or torch.bfloat16)

    def quantized(self, weight: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
        """A matrix in blocks, if that was asked for and its rows fill them."""
        if self.block_type is None or isinstance(weight, QuantizedTensor):
            return weight
        if weight.shape[-1] % self.block_type.elements_per_block:
            return weight
        return quantize(weight, self.block_type)

    def kept(self, weight: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
        """A copy, which nothing done to the file reaches."""
        if isinstance(weight, QuantizedTensor) and self.packs:
            return weight.pack(self.activation_bits or precise_activation_bits(weight.type))
        return weight.clone()

    def keeps(self, weight: Tensor | QuantizedTensor) -> bool:
        """Whether this matrix stays in the form it is stored in."""
        if isinstance(weight, QuantizedTensor):
            return self.device.type == "cpu" and self.dtype == torch.float32
        return self.keeps_stored


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
    weight = checkpoint.tensor(name)
    check_finite(checkpoint, name, weight)
    if isinstance(module, nn.Linear | nn.Embedding) and leaf == "weight":
        weight = placement.quantized(weight)
        if placement.keeps(weight):
            module.set_weight(placement.kept(weight))
            return
    dense = weight.dequantize(placement.dtype) if isinstance(weight, QuantizedTensor) else weight
    owned = dense.to(device=placement.device, dtype=placement.dtype, copy=True)
    setattr(module, leaf, nn.Parameter(owned))


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


def tell_of_dense(checkpoint: Checkpoint, model: torch.nn.Module, wanted: BlockType | None) -> None:
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
