"""Tensor is torch's; here are the ways to make one that the framework adds or narrows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, arange, empty, ones, randn, tensor, zeros

__all__ = [
    "Tensor",
    "arange",
    "empty",
    "from_blob",
    "from_numpy",
    "from_torch",
    "ones",
    "randn",
    "tensor",
    "zeros",
]


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over the array's memory; a read-only array is copied, so that nobody writes through it."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"from_numpy: expected a numpy array, but got {type(array).__name__}")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def from_torch(source: Tensor) -> Tensor:
    """The tensor itself: both names mean one type."""
    if not isinstance(source, Tensor):
        raise TypeError(f"from_torch: expected a torch tensor, but got {type(source).__name__}")
    return source


def from_blob(
    data: Any,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """A copy of any bytes-like object as a tensor. Addresses are refused: their size cannot be checked."""
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise TypeError(
            f"from_blob: expected contiguous bytes, but got {type(data).__name__}: {error}"
        ) from None
    if any(size < 0 for size in shape):
        raise ValueError(f"from_blob: shape {tuple(shape)} has a negative size")
    wanted = math.prod(shape) * dtype.itemsize
    if view.nbytes != wanted:
        raise ValueError(f"from_blob: got {view.nbytes} bytes, but {tuple(shape)} of {dtype} takes {wanted}")
    if wanted == 0:
        return torch.empty(*shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(view), dtype=dtype).reshape(*shape).to(device or "cpu")
