"""LoRA adapters as PEFT saves them: what adapter_config.json says, checked, and weights for a model's layers.

Which layers are adapted, the tensors say: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from infinicore import nn
from infinilm.adapters import Adapter
from infinilm.checkpoint import Checkpoint, CheckpointError
from infinilm.checkpoint.huggingface import open_adapter
from infinilm.config import DTYPES
from infinilm.models.stored import Stored, Weight
from infinilm.values import check_flag, check_whole

if TYPE_CHECKING:
    from infinilm.models.llama import LlamaForCausalLM

Value = TypeVar("Value", int, float)

MAX_RANK = 1 << 16
MAX_ALPHA = 1e6
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
PLAIN_NAME = re.compile(r"\^?[\w.]+")

# Keys that change what an adapter is, and their harmless values.
OFF = (None, False)
NONE: tuple[Any, ...] = (None, [], {})
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "modules_to_save": NONE,
    "use_dora": OFF,
    "lora_bias": OFF,
    "fan_in_fan_out": OFF,
    "use_qalora": OFF,
    "use_bdlora": (None,),
    "layer_replication": NONE,
    "trainable_token_indices": NONE,
    "target_parameters": NONE,
    "alora_invocation_tokens": NONE,
    "megatron_config": NONE,
    "arrow_config": NONE,
    "kasa_config": NONE,
    "monteclora_config": NONE,
    # the others begin by changing the model's own weights
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


def read_adapter(path: str | Path, model: LlamaForCausalLM, max_rank: int) -> Adapter:
    """The adapter in a folder, for a model whose layers it fits; CheckpointError if it breaks a rule"""
    with open_adapter(path) as checkpoint:
        config = LoraConfig.read(checkpoint)
        names = tensor_names(checkpoint)
        stored = Stored(checkpoint, {f"{module}.weight": sides["B"] for module, sides in names.items()})
        type(model).arrange(stored, model.config)  # as the model's own weights: of B the rows are the same
        check_all_arranged(stored, names)
        reading = Reading(checkpoint, config, model, max_rank)
        return Adapter({name.removesuffix(".weight"): reading.pair(name, b) for name, b in stored.items()})


@dataclass(frozen=True)
class LoraConfig:
    """How much an adapter adds: alpha / rank, or alpha / √rank, where a pattern may name others"""

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | None  # ends of names; None where the tensors alone say it
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> LoraConfig:
        content = checkpoint.config
        try:
            check_kind(content)
            return cls(
                check_whole("r", content.get("r", 8), 1, MAX_RANK),
                alpha("lora_alpha", content.get("lora_alpha", 8)),
                content.get("use_rslora") is not None and check_flag("use_rslora", content["use_rslora"]),
                targets(content.get("target_modules")),
                {k: check_whole("rank_pattern", v, 1, MAX_RANK) for k, v in pattern(content, "rank")},
                {k: alpha("alpha_pattern", v) for k, v in pattern(content, "alpha")},
            )
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path}: adapter_config.json: {error}") from error

    def has(self, module: str) -> bool:
        return self.target_modules is None or any(is_end(name, module) for name in self.target_modules)

    def rank(self, module: str) -> int:
        return named(module, self.rank_pattern, self.r)

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        return named(module, self.alpha_pattern, self.lora_alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )


def check_kind(content: Mapping[str, Any]) -> None:
    if (kind := content.get("peft_type", "LORA")) != "LORA":
        raise ValueError(f"peft_type {short(kind)} is not supported; expected 'LORA'")
    for key, harmless in UNSUPPORTED.items():
        if content.get(key) not in harmless:
            raise ValueError(f"{key} = {short(content[key])} is not supported")


def alpha(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_ALPHA:
        raise ValueError(f"{name} must be a number of at most {MAX_ALPHA:g}, but is {short(value)}")
    return float(value)


def targets(value: Any) -> tuple[str, ...] | None:
    """A regular expression, as "all-linear", says nothing that the tensors do not."""
    if isinstance(value, str | None):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"target_modules must be a list of names or a string, but is {short(value)}")
    return tuple(value)


def pattern(content: Mapping[str, Any], what: str) -> Iterator[tuple[str, Any]]:
    """The items of rank_pattern or alpha_pattern. Of the regular expressions that PEFT takes for keys, those
    that are the end of a name, or ^ and a whole one: another might take for ever."""
    found = content.get(f"{what}_pattern") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{what}_pattern must be an object, but is {short(found)}")
    for key, value in found.items():
        if not PLAIN_NAME.fullmatch(key):
            raise ValueError(f"{what}_pattern has {short(key)}, which is not the end of a module's name")
        yield key, value


def named(module: str, values: Mapping[str, Value], default: Value) -> Value:
    """The first value whose key is the module's name or its end"""
    return next((value for key, value in values.items() if is_end(key, module)), default)


def is_end(name: str, module: str) -> bool:
    return name == f"^{module}" or f".{module}".endswith(f".{name}")


def tensor_names(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """The names of A and B, by the module as the model's own files call it"""
    found: dict[str, dict[str, str]] = {}
    for name in checkpoint.names():
        match = TENSOR.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{checkpoint.path}: {name!r} is no lora_A or lora_B of a linear layer")
        module = match["module"]
        whole = f"model.{module}" if module.startswith("layers.") else module  # of a model without its head
        other = found.setdefault(whole, {}).setdefault(match["side"], name)
        if other != name:
            both = f"{other!r} and {name!r} are both lora_{match['side']} of {whole!r}"
            raise CheckpointError(f"{checkpoint.path}: {both}")
    for module, sides in found.items():
        if len(sides) != 2:
            raise CheckpointError(f"{checkpoint.path}: {module!r} has one of lora_A and lora_B, but not both")
    if not found:
        raise CheckpointError(f"{checkpoint.path}: its file holds no weights")
    return found


def check_all_arranged(stored: Stored, names: Mapping[str, Mapping[str, str]]) -> None:
    """What a model leaves out of its own files, an adapter may not change."""
    found = {source for weight in stored.values() for source in weight.sources}
    if left := [module for module, sides in names.items() if sides["B"] not in found]:
        raise stored.error(f"{left[0]!r} is adapted, but no part of the model that is run here")


class Reading:
    """Weights on their way from a file to a model's layers"""

    def __init__(
        self, checkpoint: Checkpoint, config: LoraConfig, model: LlamaForCausalLM, max_rank: int
    ) -> None:
        self.checkpoint, self.config, self.model, self.max_rank = checkpoint, config, model, max_rank
        self.modules = dict(model.named_modules())

    def error(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.path}: {rule}")

    def pair(self, name: str, b: Weight) -> tuple[Tensor, Tensor]:
        """What a layer adds: A [rank, in] and B [rank, out], with the scale in it"""
        layer = self.layer(name.removesuffix(".weight"))
        source = b.sources[0]
        module = source.removesuffix(".lora_B.weight").removeprefix("base_model.model.")
        if not self.config.has(module):
            raise self.error(f"{module!r} has weights, but is not among the target_modules")
        rank = self.config.rank(module)
        if rank > self.max_rank:
            raise self.error(f"{module!r} has rank {rank}; max_lora_rank is {self.max_rank}")
        first = source.removesuffix("lora_B.weight") + "lora_A.weight"
        self.check(first, self.checkpoint.shape(first), (rank, layer.in_features))
        self.check(source, b.shape, (layer.out_features, rank))
        down, up = self.checkpoint.tensor(first), b.read()
        return self.kept(first, down), self.kept(source, up.float().T * self.config.scale(module))  # type: ignore[union-attr]

    def layer(self, module: str) -> nn.Linear:
        """One that its model calls with the rows of a step; experts are called with those that chose them."""
        layer, parent = self.modules.get(module), self.modules.get(module.rpartition(".")[0])
        is_called = isinstance(layer, nn.Linear) and not isinstance(parent, nn.Experts)
        if not is_called or not module.startswith("model.layers."):
            raise self.error(f"{module!r} is adapted, but is no linear layer of the model's decoder layers")
        return layer  # type: ignore[return-value]

    def check(self, name: str, shape: tuple[int, ...], wanted: tuple[int, int]) -> None:
        if tuple(shape) != wanted:
            raise self.error(f"{name!r} has shape {tuple(shape)}, but the model and config want {wanted}")
        if self.checkpoint.dtype(name) not in DTYPES.values():
            kinds = f"{self.checkpoint.dtype(name)}; expected one of {sorted(DTYPES)}"
            raise self.error(f"{name!r} is {kinds}")

    def kept(self, name: str, weight: Any) -> Tensor:
        """A copy as the model's states are, which nothing done to the file reaches"""
        like = self.model.model.norm.weight
        kept: Tensor = weight.to(device=like.device, dtype=like.dtype, copy=True).contiguous()
        if not bool(torch.isfinite(kept).all()):
            raise self.error(f"{name!r} holds NaN or infinity, or does in {kept.dtype}")
        return kept
