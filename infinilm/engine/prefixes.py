"""Saved prefixes: the full blocks of a cache in a file, for a later process that runs the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinicore import _native
from infinicore.quantization import PackedTensor, QuantizedTensor
from infinilm.cache import PagedCache
from infinilm.checkpoint.huggingface import read_tensors, write_tensors
from infinilm.engine.blocks import Blocks, Chain
from infinilm.models.packed_copy import build

FORMAT = "infinilm prefixes 2"


def fingerprint(model: Any, cache: PagedCache) -> dict[str, str]:
    """What must be the same for keys and values to be, bit for bit; each with its name for an error."""
    return {
        "format": FORMAT,
        "weights": digest_of(weights_of(model)).hex(),
        "config": repr(model.config),
        "dtype": str(cache.shape.dtype),
        "block_size": str(cache.shape.size),
        "instruction_set": _native.isa(),
        "device": model.device.type,
        "build": build(),
    }


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Of every byte, and of what each tensor is"""
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.digest()


def weights_of(model: Any) -> list[tuple[str, Tensor]]:
    """In the form they are used in"""
    found: list[tuple[str, Tensor]] = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor):
            bits = weight.activation_bits if isinstance(weight, PackedTensor) else 32
            found.append((f"{path}.{weight.type.name}.{bits}", weight.blocks))
    return found + list(model.named_parameters())


def save(path: str | Path, model: Any, cache: PagedCache, blocks: Blocks) -> int:
    """Write what can be found in the cache; the number of blocks"""
    ids = in_order(blocks)
    kept = [blocks.contents[block] for block in ids]
    salts = sorted({content.parent for content in kept if isinstance(content.parent, bytes)})
    index: dict[int | bytes, int] = {content.serial: i for i, content in enumerate(kept)}
    index |= {salt: -1 - i for i, salt in enumerate(salts)}
    tensors = {
        "token_ids": here([c.token_ids for c in kept], torch.int64).view(-1, blocks.size),
        "parents": here([index[c.parent] for c in kept], torch.int64),
        "salts": here(list(json.dumps([salt.hex() for salt in salts]).encode()), torch.uint8),
    }
    for layer, (keys, values) in enumerate(cache.layers):
        for name, pool in (("keys", keys), ("values", values)):
            tensors[f"{name}.{layer}"] = pool[ids].cpu().contiguous()
    tensors["digest"] = here(list(digest_of(sorted(tensors.items()))), torch.uint8)
    write_tensors(path, tensors, fingerprint(model, cache))
    return len(kept)


def here(numbers: list[Any], dtype: torch.dtype) -> Tensor:
    """On the host, whatever torch's default device is"""
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def in_order(blocks: Blocks) -> list[int]:
    """Blocks that can be reached, every one after its parent"""
    reached, serials = [], set()
    for block, content in sorted(blocks.contents.items(), key=lambda item: item[1].serial):
        has_parent = isinstance(content.parent, bytes) or content.parent in serials
        if has_parent and blocks.found.get(content.digest) == block:
            reached.append(block)
            serials.add(content.serial)
    return reached


def load(path: str | Path, model: Any, cache: PagedCache, blocks: Blocks) -> int:
    """Fill empty blocks with what a file holds, and let it be found: the number of them. A file of another
    model, or in another form, is a ValueError."""
    tensors = read_tensors(path, fingerprint(model, cache))
    check_shapes(path, tensors, cache)
    if bytes(tensors.pop("digest").tolist()) != digest_of(sorted(tensors.items())):
        raise ValueError(f"{path}: its tensors are not those that were saved; the file is damaged")
    salts, known = salts_in(path, tensors), set(blocks.contents)
    try:
        taken = adopt(tensors, salts, blocks)
        rows, ids = list(taken), list(taken.values())
        for layer, pools in enumerate(cache.layers):
            for name, pool in zip(("keys", "values"), pools, strict=True):
                pool[ids] = tensors[f"{name}.{layer}"][rows].to(pool.device)
    except BaseException:  # an interrupt, no memory: what is not all there shall not be found
        blocks.forget(blocks.contents.keys() - known)
        raise
    return len(taken)


def adopt(tensors: dict[str, Tensor], salts: list[bytes], blocks: Blocks) -> dict[int, int]:
    """The block that each row of the file goes to, as far as there is room and it is not known already"""
    taken: dict[int, int] = {}
    chains: dict[int, Chain | None] = {-1 - i: blocks.root(salt) for i, salt in enumerate(salts)}
    for row, (parent, tokens) in enumerate(
        zip(tensors["parents"].tolist(), tensors["token_ids"].tolist(), strict=True)
    ):
        chain = chains[parent]
        if chain is not None:  # else there was no room for what comes before
            chain, block = blocks.adopt(chain, tuple(tokens))
            if block is not None:
                taken[row] = block
        chains[row] = chain
    return taken


def salts_in(path: str | Path, tensors: dict[str, Tensor]) -> list[bytes]:
    try:
        salts = [bytes.fromhex(salt) for salt in json.loads(bytes(tensors["salts"].tolist()))]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: 'salts' cannot be read; the file is damaged: {error}") from error
    if bool((tensors["parents"] < -len(salts)).any()):
        raise ValueError(f"{path}: 'parents' name more salts than there are; the file is damaged")
    return salts


def check_shapes(path: str | Path, tensors: dict[str, Tensor], cache: PagedCache) -> None:
    """Names, shapes and dtypes as `save` writes them, and parents before their children"""
    count, size = len(tensors.get("parents", ())), cache.shape.size
    wanted = {
        "token_ids": ((count, size), torch.int64),
        "parents": ((count,), torch.int64),
        "salts": ((len(tensors.get("salts", ())),), torch.uint8),
        "digest": ((32,), torch.uint8),
    }
    for layer, (keys, values) in enumerate(cache.layers):
        wanted[f"keys.{layer}"] = ((count, *keys.shape[1:]), keys.dtype)
        wanted[f"values.{layer}"] = ((count, *values.shape[1:]), values.dtype)
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if found != wanted:
        wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise ValueError(
            f"{path}: {wrong[0]!r} is {found.get(wrong[0])}, but {wanted.get(wrong[0])} is needed"
        )
    if bool((tensors["parents"] >= torch.arange(count, device="cpu")).any()):
        raise ValueError(f"{path}: a block comes before its parent; the file is damaged")
