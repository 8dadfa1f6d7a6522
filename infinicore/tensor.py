"""Tensor is torch's; here are the ways to make one that the framework adds or narrows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, arange, empty, ones, randn, tensor, zeros

from infinicore.checks import check_device, sizes

if TYPE_CHECKING:
    from typing_extensions import Buffer

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

# Of which torch makes a tensor without a scale, and dies when it is used
QUANTISED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))


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
    shape: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """A copy of any bytes-like object as a tensor. Addresses are refused: their size cannot be checked."""
    shape = sizes("from_blob", "shape", shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"from_blob: shape {shape} has a negative size")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"from_blob: dtype must be a dtype, but is {dtype!r}")
    check_device("from_blob", device)
    return tensor_from_bytes(data, shape, dtype, "from_blob").to("cpu" if device is None else device)


def tensor_from_bytes(data: Buffer, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """A tensor with a copy of the bytes of any buffer object, strided ones read in row-major order; errors
    call what is loaded `name`."""
    if dtype in QUANTISED:
        raise TypeError(f"{name}: bytes alone cannot be {dtype}, which has scales beside them")
    try:
        view = memoryview(data)
    except TypeError as error:
        raise TypeError(f"{name}: data must be a bytes-like object, found {type(data).__name__}") from error
    wanted = math.prod(shape) * dtype.itemsize
    if view.nbytes != wanted:
        raise ValueError(
            f"{name}: data has {view.nbytes} bytes, but shape {tuple(shape)} of {dtype} takes {wanted} bytes"
        )
    if not wanted:
        return torch.empty(shape, dtype=dtype, device="cpu")  # torch.frombuffer refuses an empty buffer
    return torch.frombuffer(bytearray(view), dtype=dtype).view(shape)
