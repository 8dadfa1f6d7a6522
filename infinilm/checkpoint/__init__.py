"""A model's files as a config and named tensors, in whichever format they are stored."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, Self

import torch
from torch import Tensor

from infinicore.quantization import BlockType, QuantizedTensor
from infinilm.folder import Folder, is_later_part


class CheckpointError(ValueError):
    """A model's files break a rule; the message names the file, the tensor or key, and the rule."""


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor; `offset` is the byte of the file where its data starts."""

    shape: tuple[int, ...]
    dtype: torch.dtype | BlockType
    offset: int
    num_bytes: int


class Checkpoint(ABC):
    """Tensors under the names their files have, mapped from disk and touched only when asked for.

    `config` is the content of config.json, `metadata` that of GGUF; the other is empty. A tensor is often a
    view of the mapped file: it outlives `close`, and writing to it never reaches the file. Copy what has to
    survive another process cutting the file short.
    """

    is_gguf = False

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        metadata: dict[str, Any],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.path = path
        self.config = config
        self.metadata = metadata
        self._tensors = tensors
        self._is_closed = False

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def dtype(self, name: str) -> torch.dtype | BlockType:
        return self._info(name).dtype

    def tensor(self, name: str) -> Tensor | QuantizedTensor:
        info = self._info(name)
        if self._is_closed:
            raise CheckpointError(f"{self.path}: {name!r} was asked for after the checkpoint was closed")
        return self._read(name, info)

    def stamps(self) -> list[tuple[str, int, int]]:
        """The files that tensors are read from, where they are known: name, bytes, when it was written"""
        return []

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self._tensors.values())

    def forget(self, name: str) -> None:
        """Give the memory of a tensor's pages back, and of those beside it, once what was read is copied.

        All can be read again, as the file has it.
        """
        self._info(name)

    def forget_vocabulary(self) -> None:
        """Give the memory of what a tokenizer is made of back, and keep what is said of the model."""
        for key in [key for key in self.metadata if key.startswith("tokenizer.")]:
            if not isinstance(self.metadata[key], bool | int | float):
                del self.metadata[key]

    def close(self) -> None:
        """Let go of the files. Each mapping ends with the last tensor that views it."""
        if not self._is_closed:
            self._is_closed = True
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: no tensor {name!r} among its {len(self._tensors)}")
        return self._tensors[name]

    @abstractmethod
    def _read(self, name: str, info: TensorInfo) -> Tensor | QuantizedTensor: ...

    @abstractmethod
    def _release(self) -> None: ...


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face folder, a .gguf file, or a folder that holds one; its headers are checked first.

    Of a GGUF model in several files, the first opens all.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a checkpoint's path must be a string or a Path, but is {short(path)}")
    try:
        return _open(Path(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _open(path: Path) -> Checkpoint:
    # The two formats import the names above, so they come in here.
    from infinilm.checkpoint.gguf import open_gguf
    from infinilm.checkpoint.huggingface import open_folder

    if path.is_dir():
        folder = Folder(path, CheckpointError)
        has_config = folder.find("config.json") is not None
        return open_folder(folder) if has_config else open_gguf(_only_gguf(folder))
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(
            f"{path}: neither a .gguf file nor a folder; give the folder that has config.json"
        )
    return open_gguf(path)


def _only_gguf(folder: Folder) -> Path:
    names = sorted(entry.name for entry in folder.path.iterdir() if entry.suffix.lower() == ".gguf")
    found = [name for name in names if not is_later_part(name)] or names[:1]
    if not found:
        is_adapter = folder.find("adapter_config.json") is not None
        way_out = "; it is an adapter, which is given beside its model (LoRARequest, --lora)"
        missing = f"{folder.path}: holds neither config.json nor a .gguf file"
        raise CheckpointError(missing + way_out if is_adapter else missing)
    if len(found) > 1:
        first = ", ".join(found[:5])
        raise CheckpointError(
            f"{folder.path}: holds {len(found)} .gguf files ({first}); give the path of one"
        )
    return folder.file(found[0])
