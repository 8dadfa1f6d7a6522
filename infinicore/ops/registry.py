"""Op and Kernel: what an op means, who can compute it, and which kernel runs for these arguments.

An op *is* its reference, a pure function in plain torch. A kernel registers against it and declines what
it does not take. `op(...)` asks the kernels at each call; `op.resolve(..., out=...)` asks once and returns a
call that runs on the same tensors again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

import infinicore

if TYPE_CHECKING:
    from infinicore import _native

Result = TypeVar("Result")  # a tensor, or a tuple of them

# Kernels are asked in this order, before the reference; each says for itself which device it is for.
PREFERENCE = ("native", "triton", "torch")
# Those of an accelerator run where infinicore.use_ntops says so, on its devices.
ACCELERATED = ("triton",)
ACCELERATOR_DEVICES = ("cuda", "musa")

OPS: dict[str, Op[Any]] = {}


class Recordings(threading.local):
    """The graphs that this thread is recording (infinicore.graph), innermost last."""

    def __init__(self) -> None:
        self.stack: list[_native.Graph] = []


RECORDING = Recordings()


@dataclass(frozen=True)
class Kernel:
    """One way to compute an op. All three take (out, *args), where out is None, a tensor, or a tuple of them:
    `accepts` says when, `run` does it and returns the output, or None for what it does not accept, and `bind`
    prepares a call that can be repeated."""

    name: str
    accepts: Callable[..., bool]
    run: Callable[..., Any]
    bind: Callable[..., Callable[[], None]]


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
    kernels: list[Kernel] = field(default_factory=list)

    def __call__(self, *args: Any, out: Any = None) -> Result:
        result = self.attempt(out, *args)
        return write(self._refer(*args), out) if result is None else result

    def _refer(self, *args: Any) -> Result:
        """The reference, which autocast leaves alone as it does a kernel: who computes decides no dtype"""
        if not torch._C._is_any_autocast_enabled():
            return self.reference(*args)
        with torch._C._DisableAutocast():
            return self.reference(*args)

    def attempt(self, out: Any, *args: Any) -> Result | None:
        """What the first kernel that accepts these arguments makes of them; None if there is none."""
        if not RECORDING.stack:
            return self._run(out, *args)
        # Graph.record watches what torch is asked for between kernels, which takes longer than to ask it. A
        # kernel's own questions need no watch: its call is kept whole.
        with torch._C.DisableTorchFunction():
            return self._record(out, *args)

    def _run(self, out: Any, *args: Any) -> Result | None:
        if is_watched() or (out is not None and is_followed(out)):
            return None
        for kernel in self.kernels:
            result: Result | None = kernel.run(out, *args)
            if result is not None:
                if out is not None:
                    note_write(out)
                return result
        return None

    def _record(self, out: Any, *args: Any) -> Result | None:
        for kernel in self.kernels:
            result: Result | None = kernel.run(out, *args)
            if result is not None:
                RECORDING.stack[-1].append(kernel.bind(result, *args))
                return result
        return None

    def pick(self, *args: Any, out: Any = None) -> Kernel | None:
        """The first kernel that accepts these arguments, or None for the reference."""
        return next((kernel for kernel in self.kernels if kernel.accepts(out, *args)), None)

    def resolve(self, *args: Any, out: Any) -> Callable[[], None]:
        """Check and choose now, run later: the returned call writes `out` from the same tensors each time."""
        if kernel := self.pick(*args, out=out):
            return kernel.bind(out, *args)

        def run() -> None:
            write(self._refer(*args), out)

        return run

    def register(self, kernel: Kernel) -> None:
        if kernel.name not in PREFERENCE:
            known = " or ".join(map(repr, PREFERENCE))
            raise ValueError(f"{self.name}: a kernel is named {kernel.name!r}; expected {known}")
        if kernel.name in ACCELERATED:
            kernel = if_accelerated(kernel)
        self.kernels.append(kernel)
        self.kernels.sort(key=lambda k: PREFERENCE.index(k.name))


def is_watched() -> bool:
    """Whether torch traces what is computed, or carries derivatives along: it would not see a kernel"""
    if is_dynamo_compiling():  # which cannot read what the next ones tell
        return True
    is_traced = _get_tracing_state() is not None or _len_torch_dispatch_stack() > 0
    return is_traced or forward_ad._current_level >= 0


def is_followed(out: Any) -> bool:
    """Whether `out` belongs to a computation with gradients, which has to be written by torch itself"""
    return torch.is_grad_enabled() and any(getattr(part, "requires_grad", False) for part in parts_of(out))


def parts_of(out: Any) -> Iterable[Any]:
    return out if isinstance(out, tuple | list) else (out,)


def note_write(out: Any) -> None:
    """Tell autograd, which may have kept the tensor for a gradient."""
    for tensor in parts_of(out):
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def op(
    samples: Callable[[torch.dtype], Iterable[tuple[Any, ...]]],
    tolerances: dict[torch.dtype, Tolerance] = DEFAULT_TOLERANCES,
) -> Callable[[Callable[..., Result]], Op[Result]]:
    """Make an Op of its reference, named after it."""

    def make(reference: Callable[..., Result]) -> Op[Result]:
        made = Op(reference.__name__, reference, samples, tolerances)
        if made.name in OPS:  # one of the two would have no kernels
            raise ValueError(f"there is an op {made.name!r} already; give this one another name")
        OPS[made.name] = made
        return made

    return make


def if_accelerated(kernel: Kernel) -> Kernel:
    """An accelerator's kernel, which declines what `infinicore.use_ntops` keeps from it, and while a native
    graph is recorded, which could not keep its calls."""

    def accepts(out: Any, *args: Any) -> bool:
        if not infinicore.use_ntops or RECORDING.stack:
            return False
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        is_there = first is not None and first.device.type in ACCELERATOR_DEVICES
        return is_there and kernel.accepts(out, *args)

    def run(out: Any, *args: Any) -> Any:
        return kernel.run(out, *args) if accepts(out, *args) else None

    return replace(kernel, accepts=accepts, run=run)


def write(result: Result, out: Any) -> Result:
    """Copy a fresh result into `out`, if there is one. Safe whatever inputs `out` shares memory with."""
    if out is None:
        return result
    if isinstance(result, tuple):
        check_apart(out)
        return tuple(write(part, target) for part, target in zip(result, out, strict=True))  # type: ignore[return-value]
    if out.shape != result.shape:  # type: ignore[attr-defined]
        raise ValueError(f"out has shape {tuple(out.shape)}, but the result has {tuple(result.shape)}")  # type: ignore[attr-defined]
    return out.copy_(result)  # type: ignore[no-any-return]


def check_apart(outputs: tuple[torch.Tensor, ...]) -> None:
    """Two results need two places. Conservative: what lies interleaved is refused as well."""
    spans = sorted(map(span_of, outputs))
    if any(begin < last for (_, last), (begin, _) in zip(spans, spans[1:], strict=False)):
        raise ValueError("out: two of the outputs overlap; give each result memory of its own")


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses a tensor lies between"""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin
