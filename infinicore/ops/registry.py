"""Op and Kernel: what an op means, who can compute it, and which kernel runs for these arguments.

An op *is* its reference, a pure function in plain torch. A kernel registers against it with an `accepts`
predicate and may then trust its inputs. `op(...)` picks a kernel at each call; `op.resolve(..., out=...)`
picks once and returns a call that runs on the same tensors again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")  # a tensor, or a tuple of them

# Which kernels to ask, in this order, before the reference.
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("native",), "cuda": ("triton",), "musa": ("triton",)}

# Kernels that run only without `out=`, and only while `infinicore.use_ntops` is on.
ACCELERATORS = ("triton",)

OPS: dict[str, Op[Any]] = {}


@dataclass(frozen=True)
class Kernel:
    """One way to compute an op: `accepts` says when, `run` does it, `bind` prepares a repeated call."""

    name: str
    accepts: Callable[..., bool]
    run: Callable[..., Any]
    bind: Callable[..., Callable[[], None]] | None = None


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float


DEFAULT_TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(2e-6, 2e-6),
    torch.float16: Tolerance(2e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
}


@dataclass
class Op(Generic[Result]):
    """A named computation; `samples` yields argument tuples that every kernel is tested on."""

    name: str
    reference: Callable[..., Result]
    samples: Callable[[torch.dtype], Iterable[tuple[Any, ...]]]
    tolerances: dict[torch.dtype, Tolerance] = field(default_factory=lambda: DEFAULT_TOLERANCES)
    kernels: dict[str, Kernel] = field(default_factory=dict)

    def __call__(self, *args: Any, out: Any = None) -> Result:
        kernel = self.pick(*args, out=out)
        result: Result = write(self.reference(*args), out) if kernel is None else kernel.run(*args, out=out)
        return result

    def pick(self, *args: Any, out: Any = None) -> Kernel | None:
        """The first preferred kernel that accepts these arguments, or None for the reference."""
        for name in PREFERENCE.get(args[0].device.type, ()):
            kernel = self.kernels.get(name)
            if kernel is not None and is_enabled(name, out) and kernel.accepts(*args, out=out):
                return kernel
        return None

    def resolve(self, *args: Any, out: Any) -> Callable[[], None]:
        """Check and choose now, run later: the returned call writes `out` from the same tensors each time."""
        kernel = self.pick(*args, out=out)
        if kernel is None or kernel.bind is None:
            return lambda: void(self(*args, out=out))
        return kernel.bind(*args, out=out)

    def kernel(
        self, name: str, accepts: Callable[..., bool], bind: Callable[..., Callable[[], None]] | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function as a kernel of this op."""

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            self.kernels[name] = Kernel(name, accepts, run, bind)
            return run

        return register


def op(
    samples: Callable[[torch.dtype], Iterable[tuple[Any, ...]]],
    tolerances: dict[torch.dtype, Tolerance] = DEFAULT_TOLERANCES,
) -> Callable[[Callable[..., Result]], Op[Result]]:
    """Make an Op of its reference, named after it."""

    def make(reference: Callable[..., Result]) -> Op[Result]:
        made = Op(reference.__name__, reference, samples, tolerances)
        OPS[made.name] = made
        return made

    return make


def is_enabled(kernel_name: str, out: Any) -> bool:
    if kernel_name not in ACCELERATORS:
        return True
    import infinicore

    return infinicore.use_ntops and out is None


def write(result: Any, out: Any) -> Any:
    """Copy a fresh result into `out`, if there is one. Safe whatever `out` shares memory with."""
    if out is None:
        return result
    if isinstance(result, tuple):
        return tuple(write(part, target) for part, target in zip(result, out, strict=True))
    return out.copy_(result)


def void(_: Any) -> None:
    """Drop a value."""
