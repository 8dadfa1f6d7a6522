"""Registers the kernels of csrc/ and says what each accepts: plain CPU tensors that need no gradient."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infinicore import _native
from infinicore.ops import reference
from infinicore.ops.registry import Op

_native.use_torch(torch.Tensor, torch.nn.Parameter, True)
if level := os.environ.get("INFINICORE_ISA"):
    _native.set_isa(level)

ROPE_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
INDEX_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)  # of positions and ids
GELU_KERNELS = {"none": "gelu", "tanh": "gelu_tanh", "fast": "gelu_fast"}


def needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def accepts_rows(*args: Any, out: Tensor | None) -> bool:
    """The tensors given are rows of one floating dtype, and `out` may be written while they are read."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    return _native.accepts_rows(out, *tensors) and tensors[0].dim() > 0 and not needs_grad(*tensors)


def accepts_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, out: Any
) -> bool:
    return (weight is None) == (bias is None) and accepts_rows(x, weight, bias, out=out)


def accepts_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Any) -> bool:
    if out is None:
        return accepts_rows(x, residual, weight, out=None)
    y, total = out
    can_write = all(accepts_rows(x, residual, weight, out=o) for o in out) and accepts_rows(total, out=y)
    return can_write and y.data_ptr() != total.data_ptr()  # y is written while total is read


def accepts_rope(x: Tensor, positions: Tensor, sin: Tensor, cos: Tensor, _: bool, *, out: Any) -> bool:
    """Not the shared predicate: rope alone knows float64. Its shapes are checked by RopeInfo."""
    has_rows = x.stride(-1) == 1 or x.shape[-1] == 1
    is_contiguous = positions.is_contiguous() and sin.is_contiguous() and cos.is_contiguous()
    if not (x.dtype in ROPE_DTYPES and positions.dtype in INDEX_DTYPES and has_rows and is_contiguous):
        return False
    has_one_dtype = x.dtype == sin.dtype == cos.dtype and positions.is_cpu
    return (
        has_one_dtype
        and not needs_grad(x, sin, cos)
        and (out is None or _native.may_write(out, x, positions, sin, cos))
    )


def accepts_embedding(ids: Tensor, weight: Tensor, *, out: Tensor | None) -> bool:
    is_simple = ids.is_cpu and weight.is_cpu and ids.is_contiguous() and weight.stride(-1) == 1
    if (
        not is_simple
        or ids.dtype not in INDEX_DTYPES
        or weight.dtype not in ROPE_DTYPES
        or needs_grad(weight)
    ):
        return False
    return out is None or (out.is_contiguous() and _native.may_write(out, ids, weight))


def accepts_random_sample(logits: Tensor, *_: Any, out: Tensor | None) -> bool:
    return accepts_rows(logits, out=None) and (out is None or out.is_cpu)


def register(
    op: Op[Any],
    accepts: Callable[..., bool] = accepts_rows,
    empty: Callable[..., Any] = lambda first, *_: torch.empty_like(first),
    native: Callable[..., tuple[Any, ...]] | None = None,
) -> None:
    """Make `_native.<name>(*outputs, *args)` a kernel; `native` rewrites (name, *args) where they differ."""

    def call(prefix: str, args: tuple[Any, ...], out: Any) -> Any:
        name, *rest = native(*args) if native else (op.name, *args)
        outputs = out if isinstance(out, tuple) else (out,)
        return getattr(_native, prefix + name)(*outputs, *rest)

    def run(*args: Any, out: Any = None) -> Any:
        target = empty(*args) if out is None else out
        call("", args, target)
        return target

    op.kernel("native", accepts, bind=lambda *args, out: call("bind_", args, out))(run)


def sample_arguments(
    logits: Tensor, random_val: float, topp: float, topk: int, temperature: float
) -> tuple[Any, ...]:
    workspace = torch.empty(2 * len(logits), dtype=torch.int32)
    return "random_sample", logits, workspace, random_val, topp, topk, temperature


for row_op in (
    reference.rms_norm,
    reference.silu,
    reference.swiglu,
    reference.softmax,
    reference.causal_softmax,
):
    register(row_op)
register(reference.gelu, native=lambda x, approximate: (GELU_KERNELS[approximate], x))
register(reference.layer_norm, accepts_layer_norm)
register(
    reference.add_rms_norm,
    accepts_add_rms_norm,
    empty=lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)
register(reference.rope, accepts_rope)
register(
    reference.embedding,
    accepts_embedding,
    empty=lambda ids, weight: weight.new_empty(*ids.shape, weight.shape[1]),
)
register(
    reference.random_sample,
    accepts_random_sample,
    empty=lambda *_: torch.empty((), dtype=torch.int64),
    native=sample_arguments,
)


def get_num_threads() -> int:
    """How many threads the native core uses."""
    return _native.num_threads()


def set_num_threads(count: int) -> None:
    """Use this many threads from now on; results do not depend on it."""
    _native.set_num_threads(count)
