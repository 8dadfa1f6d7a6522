"""Registers the kernels of csrc/: every op that _native has is run by it where it takes the arguments."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from infinicore import _native
from infinicore.ops import reference as _references  # noqa: F401  fills OPS
from infinicore.ops.registry import OPS, Kernel

# In the order of DType in csrc/tensor.h
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)

_native.use_torch(torch, DTYPES, True)
if level := os.environ.get("INFINICORE_ISA"):
    _native.set_isa(level)


def store_kv(out: Any, keys: Tensor, values: Tensor, *args: Any) -> tuple[Tensor, Tensor] | None:
    """The native one writes in place."""
    if out is None:
        keys, values = keys.clone(), values.clone()
        out = keys, values
    return _native.store_kv(out, keys, values, *args)  # type: ignore[no-any-return]


for name in _native.ops():
    accepts, run, bind = (getattr(_native, prefix + name) for prefix in ("accepts_", "", "bind_"))
    OPS[name].register(Kernel("native", accepts, store_kv if name == "store_kv" else run, bind))


def read_all(buffer: Tensor, ahead: int = 0) -> int:
    """The sum of a contiguous int64 tensor, read on all threads: memory's speed.

    Bytes are asked for `ahead` of their use; how far is best differs from CPU to CPU.
    """
    return _native.read_all(buffer, ahead)


def get_num_threads() -> int:
    """How many threads the native core uses."""
    return _native.num_threads()


def set_num_threads(count: int) -> None:
    """Use this many threads from now on; results do not depend on it."""
    _native.set_num_threads(count)
