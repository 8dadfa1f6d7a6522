"""A packed copy of a GGUF model's matrices on disk, by choice: whoever loads the model next maps it, packs
nothing, and shares its memory with all others that do.

The first page is a label, the digest of all that a copy depends on: the source's files, the matrices, this
build and its instruction set. With another label, or another size, it is made anew. Nothing else in the file
says anything: matrices follow each other in the order of the model, each from a whole page on, so what a file
holds may make answers wrong, but is never read as a place or a size.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

import infinicore
from infinicore import _native
from infinicore.quantization import PackedTensor
from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.gguf_parts import MAP_FLAGS
from infinilm.folder import expanded
from infinilm.models.stored import Weight
from infinilm.whole_file import whole_file

FORMAT = "infinilm packed 1"
PAGE = 4096
LOG = logging.getLogger("infinilm.weights")


class PackedCopy:
    """The file in a folder that has, or will have, these matrices of a checkpoint; without a folder, none"""

    def __init__(
        self, checkpoint: Checkpoint, folder: str | Path | None, weights: Mapping[str, Weight]
    ) -> None:
        self.weights = weights if folder is not None and checkpoint.stamps() else {}
        if self.weights:
            source = checkpoint.path.resolve()
            digest = hashlib.sha256(os.fsencode(source)).hexdigest()
            self.path = expanded(folder or "", ValueError) / f"{source.name}.{digest[:16]}.packed"
            self.label = label_of(checkpoint, weights)

    def read(self) -> dict[str, PackedTensor]:
        """Every matrix, in mapped memory; none where there is no copy of just these"""
        memory = self._mapped() if self.weights else None
        if memory is None or memory[: len(self.label)] != self.label:
            return {}
        found, at = {}, PAGE
        for name, weight in self.weights.items():
            found[name] = packed = matrix_in(memory, at, weight)
            at += padded(packed.num_bytes)
        if all(packed.has_finite_scales() for packed in found.values()):
            return found
        LOG.warning(f"{self.path}: holds NaN or infinity, so it is damaged, and made anew")
        return {}

    def _mapped(self) -> mmap.mmap | None:
        try:
            if not self.path.is_file():  # to open a pipe would be to wait
                return None
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size != self.num_bytes or is_of_another(status):
                    return None
                return mmap.mmap(file.fileno(), self.num_bytes, MAP_FLAGS, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:  # the latter if it has become shorter since
            LOG.warning(f"{self.path}: cannot be read: {error}; the model is packed in memory")
            return None

    @property
    def num_bytes(self) -> int:
        return PAGE + sum(padded(prod(panels_of(weight))) for weight in self.weights.values())

    def write(self, model: torch.nn.Module) -> None:
        """Put the matrices of a model that has been loaded there, all or nothing. A disk that cannot take
        them is told of, and does no other harm."""
        if not self.weights:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                self._write_to(file, model)
        except OSError as error:
            LOG.warning(
                f"{self.path}: no packed copy is kept: {error.strerror}; make room for {self.num_bytes:,} "
                "bytes, or name another folder as packed_cache"
            )

    def _write_to(self, file: BinaryIO, model: torch.nn.Module) -> None:
        file.write(self.label.ljust(PAGE, b"\0"))
        for name in self.weights:
            packed: PackedTensor = model.get_submodule(name.rpartition(".")[0]).weight  # type: ignore[assignment]
            file.write(packed.blocks.numpy().data)
            file.write(bytes(padded(packed.num_bytes) - packed.num_bytes))


def label_of(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> bytes:
    parts = [(name, str(weight.dtype), weight.shape) for name, weight in weights.items()]
    label = checkpoint.stamps(), parts, build(), _native.isa()
    return FORMAT.encode() + hashlib.sha256(repr(label).encode()).digest()


def build() -> str:
    """The build of the kernels: others may lay out weights, or round, in another way."""
    core = os.stat(_native.__file__)
    return f"{infinicore.__version__} {core.st_size} {core.st_mtime_ns}"


def is_of_another(status: os.stat_result) -> bool:
    """Whether somebody else wrote it, who might also cut it short while it is in use"""
    return hasattr(os, "getuid") and status.st_uid != os.getuid()


def matrix_in(memory: mmap.mmap, at: int, weight: Weight) -> PackedTensor:
    panels = panels_of(weight)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=prod(panels), offset=at)
    return PackedTensor(raw.view(panels), weight.dtype, weight.shape)  # type: ignore[arg-type]


def panels_of(weight: Weight) -> tuple[int, int]:
    return weight.dtype.packed_shape(*weight.shape)  # type: ignore[union-attr]  # all are in blocks


def padded(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
