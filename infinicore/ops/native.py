"""Registers the kernels of csrc/: every op that _native has is run by it where it takes the arguments."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor

try:
    from infinicore import _native
except ImportError as error:
    raise ImportError(f"the native core of infinicore is not there: {error}; run `make setup`") from error

from infinicore.checks import integer
from infinicore.control_groups import cpu_quotas
from infinicore.ops import (  # noqa: F401  which fill OPS
    attention_reference,
    experts_reference,
    fused_reference,
    lora_reference,
    quantized_reference,
    reference,
    sampling_reference,
)
from infinicore.ops.registry import OPS, Kernel, Op

# In the order of DType in csrc/tensor.h
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
MAX_THREADS = 1024


def missing_from_core(name: str) -> Any:
    """Asked where the core lacks a name, as one does that is older than the Python sources."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"the native core of infinicore has no {name!r}, so it is older; run `make setup`")


def get_num_threads() -> int:
    """How many threads the native core uses."""
    return _native.num_threads()


def set_num_threads(count: int) -> None:
    """Use this many threads from now on; results do not depend on it."""
    found = integer("set_num_threads", "count", count)
    if not 1 <= found <= MAX_THREADS:
        raise ValueError(f"set_num_threads: count must be from 1 to {MAX_THREADS}, but is {found}")
    _native.set_num_threads(found)


def use_environment() -> None:
    if level := os.environ.get("INFINICORE_ISA"):
        _native.set_isa(level)
    if count := os.environ.get("INFINICORE_NUM_THREADS"):
        if not re.fullmatch("[0-9]{1,4}", count) or not 1 <= int(count) <= MAX_THREADS:
            raise ValueError(
                f"INFINICORE_NUM_THREADS must be a whole number from 1 to {MAX_THREADS}, but is {count!r}"
            )
        set_num_threads(int(count))
    else:
        set_num_threads(default_num_threads())


def default_num_threads() -> int:
    """The CPUs that the process may run on, and no more than it has the time of: threads beyond that only
    wait, and make the others wait for them."""
    return min(_native.num_threads(), MAX_THREADS, *cpu_quotas())


_native.__getattr__ = missing_from_core
_native.use_torch(torch, DTYPES, True)
use_environment()
# A forked child has none of the threads that torch knows of, and would wait for them for ever. Our own pool
# begins anew there (csrc/pool.cpp).
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def store_kv(out: Any, keys: Tensor, values: Tensor, *args: Any) -> tuple[Tensor, Tensor] | None:
    """The native one writes in place."""
    if out is None:
        keys, values = keys.clone(), values.clone()
        out = keys, values
    return _native.store_kv(out, keys, values, *args)  # type: ignore[no-any-return]


def op_of(name: str) -> Op[Any]:
    """The op that a kernel of the core computes"""
    if name not in OPS:
        raise ImportError(
            f"the native core of infinicore has {name!r}, of which no reference is imported: if the core is "
            "newer than the sources, run `make setup`; if the op is new, import its reference in native.py"
        )
    return OPS[name]


for name in _native.ops():
    accepts, run, bind = (getattr(_native, prefix + name) for prefix in ("accepts_", "", "bind_"))
    op_of(name).register(Kernel("native", accepts, store_kv if name == "store_kv" else run, bind))


def read_all(buffer: Tensor, ahead: int | None = 0) -> int:
    """The sum of a contiguous int64 tensor, read on all threads: memory's speed.

    Bytes are asked for `ahead` of their use, or, None, those of the next pages in turn; what is best differs
    from CPU to CPU.
    """
    return _native.read_all(buffer, ahead)


def count_products(rounds: int) -> int:
    """Multiply bytes, all operands at hand, for some rounds on all threads: how many products that were."""
    return _native.count_products(rounds)
