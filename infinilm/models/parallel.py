"""A model on several ranks: `split_tensors` gives each a share of every layer, `split_layers` some layers.

Every rank loads the model, splits it, and then makes the same calls; each gets the same logits, bit for bit,
and draws the same tokens if all have one seed. Ranks of other models, or with other tokens, are refused: what
they have would add up without a word. Shares are what base_model_tp_plan of the config says; layers go to
ranks in their order, one after the other.
"""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infinicore import _native, nn
from infinicore.distributed import Communicator
from infinicore.quantization import QuantizedTensor
from infinilm.batch import Batch
from infinilm.cache import DynamicCache
from infinilm.models.llama import Cache, LlamaAttention, LlamaForCausalLM

# ---- what must be the same on every rank -------------------------------------------------------------------

# What it is, and how it comes to be
ALIKE = {
    "split": "call split_tensors on all, or split_layers on all",
    "config": "give all the same checkpoint",
    "weights": "give all the same checkpoint, dtype and quantisation",
    "instruction set": "set INFINICORE_ISA to one that all CPUs have",
}
FACT_BYTES = 16


def check_alike(split: str, model: LlamaForCausalLM, communicator: Communicator) -> None:
    """Refuse, on every rank alike, to split different models."""
    if not isinstance(model, LlamaForCausalLM):
        raise TypeError(f"{split}: model must be one, as load_model gives it, not {type(model).__name__}")
    if not isinstance(communicator, Communicator):
        kind = type(communicator).__name__
        raise TypeError(f"{split}: communicator must be one, such as TorchCommunicator(), not {kind}")
    if communicator.size == 1:
        return
    own = bytearray().join(fact.encode().ljust(FACT_BYTES) for fact in facts_of(split, model))
    facts = communicator.all_gather(torch.frombuffer(own, dtype=torch.uint8).to(model.device), 0)
    ranks = facts.view(-1, len(ALIKE), FACT_BYTES)
    for i, (name, way_out) in enumerate(ALIKE.items()):
        found = [bytes(fact).decode().rstrip() for fact in ranks[:, i].tolist()]
        if len(set(found)) > 1:
            raise ValueError(f"the ranks differ in {name}, in rank order: {'; '.join(found)}; {way_out}")


def facts_of(split: str, model: LlamaForCausalLM) -> Iterator[str]:
    """In the order of ALIKE"""
    yield split
    yield f"{zlib.crc32(repr(model.config).encode()):08x}"
    yield f"{checksum(model):08x}"
    yield _native.isa() if model.device.type == "cpu" else model.device.type


def checksum(model: LlamaForCausalLM) -> int:
    """Of every weight in the form it is used in; ten times as fast as a digest that no liar could meet"""
    total = 0
    for name, weight in weights_of(model):
        total = zlib.crc32(f"{name} {weight.dtype} {tuple(weight.shape)}".encode(), total)
        stored = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        total = zlib.crc32(stored.numpy().data, total)
    return total


def weights_of(model: LlamaForCausalLM) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor):
            yield f"{path} {weight.type.name}", weight.blocks


def compare_tokens(model: LlamaForCausalLM, communicator: Communicator) -> None:
    """From here on, before tokens are embedded. A GPU would have to wait for it at every step, and could
    record none."""
    if communicator.size > 1 and model.device.type == "cpu":
        model.model.embed_tokens.register_forward_pre_hook(partial(check_tokens, communicator))


def check_tokens(communicator: Communicator, embedding: nn.Module, args: tuple[Any, ...]) -> None:
    """As a hook: ranks with different tokens would make states that are nobody's."""
    token_ids = args[0].flatten()
    ranks = communicator.all_gather(token_ids, 0).view(-1, len(token_ids))
    if bool((ranks != token_ids).any()):
        shown = "; ".join(reprlib.repr(row) for row in ranks.tolist())
        raise ValueError(
            f"the ranks are given different tokens, in rank order: {shown}; make the same calls on all, and "
            "with one seed where tokens are drawn"
        )


# ---- a share of every layer --------------------------------------------------------------------------------


def split_tensors(model: LlamaForCausalLM, communicator: Communicator) -> LlamaForCausalLM:
    """Keep this rank's share of the model's layers, in place: some heads of attention, some columns of the
    MLP. Embeddings, norms and the head stay whole."""
    check_alike("split_tensors", model, communicator)
    layers, size = linears_of(model), communicator.size
    kinds = {name: kind_of(name, model) for name in layers}
    check_split(model, layers, size)
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(model.model.get_submodule(parent), own, SHARES[kinds[name]](layer, communicator))
    for attention in attentions_of(model):
        attention.num_key_value_heads //= size
    config = model.config
    model.config = model.model.config = replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=config.num_key_value_heads // size,
        intermediate_size=config.intermediate_size // size,
    )
    compare_tokens(model, communicator)
    return model


def linears_of(model: LlamaForCausalLM) -> dict[str, nn.Linear]:
    found = model.model.named_modules()
    return {name: module for name, module in found if isinstance(module, nn.Linear)}


def kind_of(name: str, model: LlamaForCausalLM) -> str:
    for pattern, kind in model.config.base_model_tp_plan.items():
        if fnmatchcase(name, pattern):
            return kind
    raise ValueError(f"a {type(model).__name__} cannot be split: no plan says how {name} is")


def check_split(model: LlamaForCausalLM, layers: dict[str, nn.Linear], size: int) -> None:
    config = model.config
    if not layers:
        raise ValueError(f"this {type(model).__name__} has been split already")
    for key in ("num_key_value_heads", "intermediate_size"):
        if getattr(config, key) % size:
            raise ValueError(f"{key} is {getattr(config, key)}, which {size} ranks cannot share evenly")
    for name, layer in layers.items():
        if not isinstance(layer.weight, Tensor):
            raise ValueError(f"{name} is quantised, which cannot be split: give a checkpoint of floats")
    for attention in attentions_of(model):
        norms = [child for child in attention.children() if isinstance(child, nn.RMSNorm)]
        if any(len(norm.weight) != config.head_dim for norm in norms):
            raise ValueError(f"a {type(model).__name__} cannot be split: it has norms of all heads at once")


def attentions_of(model: LlamaForCausalLM) -> list[LlamaAttention]:
    return [module for module in model.modules() if isinstance(module, LlamaAttention)]


def column_share(layer: nn.Linear, communicator: Communicator) -> nn.Module:
    """Some of its outputs"""
    rank, size = communicator.rank, communicator.size
    share = nn.ColumnParallelLinear(*sizes_of(layer), "meta", rank, size)  # memory comes with the weights
    share.weight = nn.Parameter(layer.get_parameter("weight").detach(), 0, rank, size)
    share.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), 0, rank, size)
    return share


def row_share(layer: nn.Linear, communicator: Communicator) -> nn.Module:
    """Some of its inputs, whose products all ranks add up"""
    rank, size = communicator.rank, communicator.size
    share = nn.RowParallelLinear(*sizes_of(layer), "meta", rank, size, communicator)
    share.weight = nn.Parameter(layer.get_parameter("weight").detach(), 1, rank, size)
    share.bias = layer.bias
    return share


SHARES = {"colwise": column_share, "rowwise": row_share}


def sizes_of(layer: nn.Linear) -> tuple[int, int, bool, torch.dtype]:
    return layer.in_features, layer.out_features, layer.bias is not None, layer.get_parameter("weight").dtype


# ---- some layers whole -------------------------------------------------------------------------------------


def split_layers(model: LlamaForCausalLM, communicator: Communicator) -> LlamaForCausalLM:
    """Keep this rank's layers alone, in place; the states that the last of them makes go to all ranks."""
    check_alike("split_layers", model, communicator)
    layers, size = model.model.layers, communicator.size
    if any(isinstance(layer, Away) for layer in layers):
        raise ValueError(f"this {type(model).__name__} has been split already")
    if len(layers) < size:
        raise ValueError(f"num_hidden_layers is {len(layers)}, which {size} ranks cannot share")
    owners = [i * size // len(layers) for i in range(len(layers))]
    for i, owner in enumerate(owners):
        is_last = owner not in owners[i + 1 :]
        if owner != communicator.rank:
            layers[i] = Away(i, communicator, owner if is_last else None)
        elif is_last:
            layers[i].register_forward_hook(partial(send, communicator))
    compare_tokens(model, communicator)
    return model


def send(communicator: Communicator, layer: nn.Module, args: Any, states: Tensor) -> Tensor:
    """The states that a layer has made, as a hook of it: to all ranks"""
    return communicator.broadcast(states, communicator.rank)


class Away(nn.Module):
    """A layer of another rank: what it makes comes from there if it is that rank's last."""

    def __init__(self, layer_idx: int, communicator: Communicator, source: int | None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.communicator = communicator
        self.source = source

    def forward(self, states: Tensor, cache: Cache, *, batch: Batch, **_: Any) -> Tensor:
        if isinstance(cache, DynamicCache):
            cache.note_lengths(self.layer_idx, batch)
        if self.source is None:
            return states
        return self.communicator.broadcast(torch.empty_like(states), self.source)
