"""Saved prefixes: the full blocks of a cache in a file, for a later process that runs the same model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinicore import _native
from infinicore.quantization import PackedTensor, QuantizedTensor
from infinilm.cache import PagedCache
from infinilm.checkpoint.huggingface import read_tensors, write_tensors
from infinilm.engine.blocks import Blocks, Chain

FORMAT = "infinilm prefixes 1"


def fingerprint(model: Any, cache: PagedCache) -> dict[str, str]:
    """What must be the same for keys and values to be, bit for bit; each with its name for an error."""
    return {
        "format": FORMAT,
        "weights": digest_of_weights(model),
        "config": json.dumps(model.config.to_dict(), sort_keys=True, default=str),
        "dtype": str(cache.shape.dtype),
        "block_size": str(cache.shape.size),
        "instruction_set": _native.isa(),
    }


def digest_of_weights(model: Any) -> str:
    """Of every byte, in the form the weights are used in"""
    total = hashlib.sha256()
    for name, weight in weights_of(model):
        total.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        total.update(memoryview(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return total.hexdigest()


def weights_of(model: Any) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor):
            bits = weight.activation_bits if isinstance(weight, PackedTensor) else 32
            found.append((f"{path}.{weight.type.name}.{bits}", weight.blocks))
    return found + list(model.named_parameters())


def save(path: str | Path, model: Any, cache: PagedCache, blocks: Blocks) -> int:
    """Write what can be found in the cache; the number of blocks"""
    kept = [(block, blocks.contents[block]) for block in in_order(blocks)]
    index = {content.serial: i for i, (_, content) in enumerate(kept)}
    ids = torch.tensor([block for block, _ in kept], dtype=torch.int64)
    tensors = {
        "token_ids": torch.tensor([content.token_ids for _, content in kept], dtype=torch.int64),
        "parents": torch.tensor([index.get(content.parent, -1) for _, content in kept], dtype=torch.int64),
        "digests": torch.tensor([list(content.digest) for _, content in kept], dtype=torch.uint8),
    }
    for layer, (keys, values) in enumerate(cache.layers):
        tensors[f"keys.{layer}"], tensors[f"values.{layer}"] = (t[ids.to(t.device)].cpu() for t in (keys, values))
    write_tensors(path, tensors, fingerprint(model, cache))
    return len(kept)


def in_order(blocks: Blocks) -> list[int]:
    """Blocks that can be reached, every one after its parent"""
    by_serial = sorted(blocks.contents, key=lambda block: blocks.contents[block].serial)
    reached, serials = [], {0}
    for block in by_serial:
        content = blocks.contents[block]
        if content.parent in serials and blocks.found.get(content.digest) == block:
            reached.append(block)
            serials.add(content.serial)
    return reached


def load(path: str | Path, model: Any, cache: PagedCache, blocks: Blocks) -> int:
    """Fill empty blocks with what a file holds, and let it be found: the number of them. A file of another model,
    or in another form, is a ValueError."""
    tensors = read_tensors(path, fingerprint(model, cache))
    check_shapes(path, tensors, cache)
    taken = adopt(path, tensors, blocks)
    rows, ids = torch.tensor(list(taken), dtype=torch.int64), torch.tensor(list(taken.values()), dtype=torch.int64)
    for layer, pools in enumerate(cache.layers):
        for name, pool in zip(("keys", "values"), pools, strict=True):
            pool[ids.to(pool.device)] = tensors[f"{name}.{layer}"][rows].to(pool.device)
    return len(taken)


def adopt(path: str | Path, tensors: dict[str, Tensor], blocks: Blocks) -> dict[int, int]:
    """The block that each row of the file goes to, as far as there is room and it is not known already"""
    taken: dict[int, int] = {}
    chains: dict[int, Chain] = {}
    names = ("parents", "token_ids", "digests")
    for row, (parent, token_ids, digest) in enumerate(zip(*(tensors[name].tolist() for name in names), strict=True)):
        if parent >= 0 and parent not in chains:
            continue  # there was no room for what comes before
        chain, tokens = chains.get(parent, Chain(b"")), tuple(token_ids)
        if parent >= 0 and bytes(digest) != blocks.next_digest(chain, tokens):
            raise ValueError(f"{path}: row {row} does not follow from its parent {parent}; the file is damaged")
        chain, block = blocks.adopt(chain, bytes(digest), tokens)
        if chain is not None:
            chains[row] = chain
        if block is not None:
            taken[row] = block
    return taken


def check_shapes(path: str | Path, tensors: dict[str, Tensor], cache: PagedCache) -> None:
    """Names, shapes and dtypes as `save` writes them, parents before their children, token ids that are some."""
    count, size = len(tensors.get("parents", ())), cache.shape.size
    wanted = {
        "token_ids": ((count, size), torch.int64),
        "parents": ((count,), torch.int64),
        "digests": ((count, 32), torch.uint8),
    }
    for layer, (keys, values) in enumerate(cache.layers):
        wanted[f"keys.{layer}"] = ((count, *keys.shape[1:]), keys.dtype)
        wanted[f"values.{layer}"] = ((count, *values.shape[1:]), values.dtype)
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if found != wanted:
        wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise ValueError(f"{path}: {wrong[0]!r} is {found.get(wrong[0])}, but {wanted.get(wrong[0])} is needed")
    if bool((tensors["parents"] >= torch.arange(count)).any()) or bool((tensors["parents"] < -1).any()):
        raise ValueError(f"{path}: a block comes before its parent; the file is damaged")
