"""Parcel: arrays of numbers side by side in plain memory, which goes to a device in one copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Kinds = Sequence[tuple[str, int]]  # of each array its type, as `array` names it, and its length

DTYPES = {"q": torch.int64, "d": torch.float64, "f": torch.float32}


class Parcel:
    """Python writes into the arrays, and the memory is a tensor: no call into torch lies between.

    Memory that is sent to a GPU is pinned, so that a copy takes nobody's time.
    """

    def __init__(self, kinds: Kinds, is_sent: bool) -> None:
        self.memory = torch.zeros(num_bytes(kinds), dtype=torch.uint8, device="cpu", pin_memory=is_sent)
        whole, at = memoryview(self.memory.numpy()), 0  # type: ignore[arg-type]
        self.arrays: list[Any] = []  # memoryviews, of ints or floats
        for (kind, _), size in zip(kinds, sizes_of(kinds), strict=True):
            self.arrays.append(whole[at : at + size].cast(kind))  # type: ignore[call-overload]
            at += size


def sent(t: Tensor, device: torch.device) -> Tensor:
    """On a device, without waiting for it. A GPU reads pinned memory when its turn has come, and torch keeps
    that until then; of other memory nobody knows when it has been read."""
    is_far = device.type == "cuda" and t.is_cpu
    return t.pin_memory().to(device, non_blocking=True) if is_far else t.to(device)


def sizes_of(kinds: Kinds) -> list[int]:
    """The bytes of each array"""
    return [length * array(kind).itemsize for kind, length in kinds]


def num_bytes(kinds: Kinds) -> int:
    return sum(sizes_of(kinds))


def tensors_of(memory: Tensor, kinds: Kinds) -> list[Tensor]:
    """The arrays of a parcel, in its memory or in a copy of it"""
    parts = torch.split(memory, sizes_of(kinds))
    return [part.view(DTYPES[kind]) for part, (kind, _) in zip(parts, kinds, strict=True)]
