"""GGUF files as checkpoints: names, rows and metadata as llama.cpp wrote them."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from infinicore.quantization import QuantizedTensor
from infinilm.checkpoint import Checkpoint, TensorInfo
from infinilm.checkpoint.gguf_parts import Part, open_parts


def open_gguf(path: Path) -> "GGUFCheckpoint":
    return GGUFCheckpoint(open_parts(path))


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file, or of all parts of a split one."""

    is_gguf = True

    def __init__(self, parts: Sequence[Part]) -> None:
        self._homes = {name: part for part in parts for name in part.tensors}
        tensors = {name: part.tensors[name] for name, part in self._homes.items()}
        super().__init__(parts[0].path, {}, parts[0].metadata, tensors)

    def stamps(self) -> list[tuple[str, int, int]]:
        return list(dict.fromkeys(part.stamp for part in self._homes.values()))

    def _read(self, name: str, info: TensorInfo) -> Tensor | QuantizedTensor:
        return self._homes[name].read(info)

    def forget(self, name: str) -> None:
        info = self._info(name)
        self._homes[name].forget(info)

    def _release(self) -> None:
        del self._homes
