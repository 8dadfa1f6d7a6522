"""Registers the kernels of csrc/ and says what each accepts: plain CPU tensors that need no gradient."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infinicore import _native
from infinicore.ops import reference
from infinicore.ops.registry import Kernel, Op

_native.use_torch(torch.Tensor, torch.nn.Parameter, torch.is_grad_enabled, True)
if level := os.environ.get("INFINICORE_ISA"):
    _native.set_isa(level)

GELU_KERNELS = {"none": "gelu", "tanh": "gelu_tanh", "fast": "gelu_fast"}


def register(
    op: Op[Any],
    accepts: Callable[..., bool] = _native.accepts_rows,
    empty: Callable[..., Any] = lambda first, *_: torch.empty_like(first),
) -> None:
    """Make `_native.<op>(out, *args)` a kernel of the op."""
    run_native, bind_native = getattr(_native, op.name), getattr(_native, "bind_" + op.name)

    def run(out: Any, *args: Any) -> Any:
        if out is None:
            out = empty(*args)
        run_native(out, *args)
        return out

    op.register(Kernel("native", accepts, run, bind_native))


def run_gelu(out: Tensor | None, x: Tensor, approximate: str) -> Tensor:
    y = torch.empty_like(x) if out is None else out
    getattr(_native, GELU_KERNELS[approximate])(y, x)
    return y


def bind_gelu(out: Tensor, x: Tensor, approximate: str) -> Callable[[], None]:
    return getattr(_native, "bind_" + GELU_KERNELS[approximate])(out, x)  # type: ignore[no-any-return]


def accepts_add_rms_norm(out: tuple[Tensor, Tensor] | None, *args: Any) -> bool:
    if out is None:
        return _native.accepts_rows(None, *args)
    y, total = out  # y is written while total is read, so they may not be one
    return (
        _native.accepts_rows(y, *args) and _native.accepts_rows(total, *args) and _native.are_apart(y, total)
    )


def run_add_rms_norm(out: tuple[Tensor, Tensor] | None, x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    y, total = (torch.empty_like(x), torch.empty_like(x)) if out is None else out
    _native.add_rms_norm(y, total, x, *args)
    return y, total


def bind_add_rms_norm(out: tuple[Tensor, Tensor], *args: Any) -> Callable[[], None]:
    return _native.bind_add_rms_norm(*out, *args)  # type: ignore[no-any-return]


def accepts_layer_norm(
    out: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> bool:
    return (weight is None) == (bias is None) and _native.accepts_rows(out, x, weight, bias)


def accepts_random_sample(out: Tensor | None, logits: Tensor, *_: Any) -> bool:
    return _native.accepts_rows(None, logits)


def run_random_sample(out: Tensor | None, logits: Tensor, *args: Any) -> Tensor:
    token = torch.empty((), dtype=torch.int64) if out is None else out
    _native.random_sample(token, logits, sampling_workspace(logits), *args)
    return token


def bind_random_sample(out: Tensor, logits: Tensor, *args: Any) -> Callable[[], None]:
    return _native.bind_random_sample(out, logits, sampling_workspace(logits), *args)  # type: ignore[no-any-return]


def sampling_workspace(logits: Tensor) -> Tensor:
    return torch.empty(2 * len(logits), dtype=torch.int32)


register(reference.rms_norm)
register(reference.silu)
register(reference.swiglu)
register(reference.softmax)
register(reference.causal_softmax)
register(reference.layer_norm, accepts_layer_norm)
register(reference.rope, _native.accepts_rope)
register(
    reference.embedding,
    _native.accepts_embedding,
    empty=lambda ids, weight: weight.new_empty(*ids.shape, weight.shape[1]),
)
reference.gelu.register(Kernel("native", _native.accepts_rows, run_gelu, bind_gelu))
reference.add_rms_norm.register(Kernel("native", accepts_add_rms_norm, run_add_rms_norm, bind_add_rms_norm))
reference.random_sample.register(
    Kernel("native", accepts_random_sample, run_random_sample, bind_random_sample)
)


def get_num_threads() -> int:
    """How many threads the native core uses."""
    return _native.num_threads()


def set_num_threads(count: int) -> None:
    """Use this many threads from now on; results do not depend on it."""
    _native.set_num_threads(count)
