"""The files of a GGUF model: one, or the parts that llama.cpp splits a large one into.

Each part says which it is, of how many, and how many tensors they hold together. The first has the model's
metadata; what others say of the model is not read. A part is found by its name, in which only the number
differs from the first one's, so no file says where to look for another.
"""

import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from infinicore.quantization import BlockType, QuantizedTensor
from infinilm.checkpoint import CheckpointError, TensorInfo
from infinilm.checkpoint.gguf_fields import Fields
from infinilm.checkpoint.gguf_format import MAX_TENSORS, read_header
from infinilm.folder import Folder, PartName

# The largest models there are have some two hundred parts.
MAX_PARTS = 1024

# Private: torch may take the memory for its own, and the file still never changes. Linux is told (0x4000,
# MAP_NORESERVE) to set nothing aside for changes, so that a model may be larger than memory.
MAP_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)

# Who touches a page is given those around it as well, as far as Linux keeps them in one piece.
MAPPED_AROUND = 2 << 20


class Part:
    """A GGUF file in a writable buffer, usually a mapping of it; its header has been checked."""

    def __init__(self, buffer: mmap.mmap | bytearray, path: Path, written: int = 0) -> None:
        header = read_header(buffer, path)
        self.path = path
        self.stamp = (path.name, len(buffer), written)
        self.metadata = header.metadata
        self.tensors = header.tensors
        self._buffer = buffer
        self._drop(0, len(buffer))  # the header has been copied

    def read(self, info: TensorInfo) -> Tensor | QuantizedTensor:
        if isinstance(self._buffer, mmap.mmap) and self._buffer.size() != len(self._buffer):
            raise CheckpointError(f"{self.path}: changed its size while it was open; open it again")
        raw = torch.frombuffer(self._buffer, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
        if info.offset % 8:
            raw = raw.clone()  # the file's alignment is below the elements', and kernels need whole elements
        if isinstance(info.dtype, BlockType):
            return QuantizedTensor(raw.view(prod(info.shape[:-1]), -1), info.dtype, info.shape)
        return raw.view(info.dtype).view(info.shape)

    def forget(self, info: TensorInfo) -> None:
        end = info.offset + info.num_bytes
        self._drop(max(info.offset - MAPPED_AROUND, 0), min(end + MAPPED_AROUND, len(self._buffer)))

    def _drop(self, begin: int, end: int) -> None:
        """Give the pages of these bytes back; they are read from the file again where they are touched."""
        if isinstance(self._buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._buffer.madvise(mmap.MADV_DONTNEED, begin, end - begin)


@dataclass(frozen=True)
class Split:
    """What a part says of itself"""

    number: int
    count: int
    num_tensors: int

    def __str__(self) -> str:
        return f"part {self.number} of {self.count} with {self.num_tensors} tensors in all"


def open_parts(path: Path) -> list[Part]:
    """The file at path, and all that belong to it where it is the first of several"""
    first = open_part(path)
    split = read_split(first)
    if split is None:
        return [first]
    name = checked_name(path, split)
    homes: dict[str, Part] = {}
    for part in chain([first], later_parts(path, name, split)):
        add_tensors(part, homes, split)
    if len(homes) < split.num_tensors:
        raise wrong_count(path, split, f"only {len(homes)}")
    return list(dict.fromkeys([first, *homes.values()]))


def open_part(path: Path) -> Part:
    if not path.stat().st_size:
        raise CheckpointError(f"{path}: is empty")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, MAP_FLAGS, mmap.PROT_READ | mmap.PROT_WRITE)
        return Part(mapped, path, os.fstat(file.fileno()).st_mtime_ns)


def read_split(part: Part) -> Split | None:
    """None for a whole model, which may say that it is the only part."""
    fields = Fields(part.metadata, part.path)
    count = fields.integer("split.count", 1, minimum=0, maximum=MAX_PARTS)
    if count <= 1:
        return None
    number = fields.integer("split.no", minimum=0, maximum=count - 1) + 1
    return Split(number, count, fields.integer("split.tensors.count", maximum=MAX_TENSORS))


def checked_name(path: Path, split: Split) -> PartName:
    name = PartName.parse(path.name)
    wanted = PartName(name.stem if name else "NAME", split.number, split.count)
    if name != wanted:
        raise CheckpointError(
            f"{path}: is part {split.number} of {split.count} of a split model, whose parts are found by "
            f"their names; call it {wanted}, and the others likewise"
        )
    if name.number != 1:
        raise CheckpointError(
            f"{path}: is part {name.number} of {name.count} of a split model; give the first, {name.of(1)}"
        )
    return name


def later_parts(first: Path, name: PartName, split: Split) -> Iterator[Part]:
    folder = Folder(first.parent, CheckpointError)
    for number in range(2, split.count + 1):
        path = folder.find(str(name.of(number)))
        if path is None:
            raise CheckpointError(
                f"{first}: is the first of {split.count} parts, but {name.of(number)} is not beside it; "
                "put all parts into one folder"
            )
        part = open_part(path)
        check_split(part, first, replace(split, number=number))
        yield part


def check_split(part: Part, first: Path, wanted: Split) -> None:
    found = read_split(part)
    if found != wanted:
        raise CheckpointError(
            f"{part.path}: says it is {found or 'no part of a split model'}, but by {first.name} it is "
            f"{wanted}; take all parts of one model"
        )
    part.metadata = {}  # only the first one's matter, and those of a thousand parts may be large


def add_tensors(part: Part, homes: dict[str, Part], split: Split) -> None:
    for name in part.tensors:
        home = homes.setdefault(name, part)
        if home is not part:
            raise CheckpointError(
                f"{part.path}: tensor {name!r} is also in {home.path.name}; take all parts of one model"
            )
    if len(homes) > split.num_tensors:
        raise wrong_count(part.path, split, "more")


def wrong_count(path: Path, split: Split, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: 'split.tensors.count' is {split.num_tensors}, but the {split.count} parts hold {found}; "
        "take all parts of one model"
    )
