"""Elementwise ops, over rows that may lie apart."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import (
    FLOATS,
    are_plain,
    fits,
    overlap,
    rows_of,
    settled,
    tanh,
    target,
    wait_for_inputs,
)

TILE = 1024


@triton.jit
def result_of(a, b, by, OP: tl.constexpr):
    if OP == "silu":
        y = a * tl.sigmoid(a)
    elif OP == "swiglu":
        y = a * tl.sigmoid(a) * b
    elif OP == "geglu":  # gelu_tanh(a) is a * sigmoid(2 sqrt(2/pi) (a + 0.044715 a^3))
        y = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a)) * b
    elif OP == "add":
        y = a + b
    elif OP == "add_scaled":
        y = a + by * b
    elif OP == "scale":
        y = by * a
    else:
        tl.static_assert(OP == "softcap")
        y = by * tanh(a / by)
    return y


@triton.jit
def elementwise_kernel(
    y_ptr, a_ptr, b_ptr, a_stride, b_stride, E, by,
    OP: tl.constexpr, HAS_B: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = column < E
    a = tl.load(a_ptr + row * a_stride + column, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + column, mask=is_in, other=0.0).to(tl.float32) if HAS_B else a
    y = result_of(a, b, by, OP)
    tl.store(y_ptr + row * E + column, y.to(y_ptr.dtype.element_ty), mask=is_in)


def computed(name: str, out: Tensor | None, a: Tensor, b: Tensor | None = None, by: float = 1.0) -> Tensor:
    y = target(out, a, rows=(a,) if b is None else (a, b))
    rows, others = rows_of(a), rows_of(a if b is None else b)
    num_rows, size = rows.shape
    elementwise_kernel[(num_rows, triton.cdiv(size, TILE))](
        y, rows, others, rows.stride(0), others.stride(0), size, by,
        OP=name, HAS_B=b is not None, TILE=TILE, num_warps=4, **overlap(a.device),
    )  # fmt: skip
    return settled(y, out)


def accepts_silu(out: Any, x: Tensor) -> bool:
    is_taken = are_plain(x.device, FLOATS, x) and x.dim() > 0 and x.numel() > 0
    return is_taken and fits(out, x.shape, x.dtype, x.device)


def silu(out: Tensor | None, x: Tensor) -> Tensor:
    return computed("silu", out, x)


def accepts_swiglu(out: Any, gate: Tensor, up: Tensor) -> bool:
    is_taken = accepts_silu(out, gate) and are_plain(gate.device, (gate.dtype,), up)
    return is_taken and gate.shape == up.shape


def swiglu(out: Tensor | None, gate: Tensor, up: Tensor) -> Tensor:
    return computed("swiglu", out, gate, up)


def accepts_geglu(out: Any, gate: Tensor, up: Tensor, approximate: str) -> bool:
    return accepts_swiglu(out, gate, up) and approximate == "tanh"


def geglu(out: Tensor | None, gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return computed("geglu", out, gate, up)


def accepts_add(out: Any, a: Tensor, b: Tensor) -> bool:
    return accepts_swiglu(out, a, b)


def add(out: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return computed("add", out, a, b)


def accepts_add_scaled(out: Any, a: Tensor, b: Tensor, factor: float) -> bool:
    return accepts_swiglu(out, a, b)


def add_scaled(out: Tensor | None, a: Tensor, b: Tensor, factor: float) -> Tensor:
    return computed("add_scaled", out, a, b, factor)


def accepts_scale(out: Any, x: Tensor, factor: float) -> bool:
    return accepts_silu(out, x)


def scale(out: Tensor | None, x: Tensor, factor: float) -> Tensor:
    return computed("scale", out, x, by=factor)


def accepts_softcap(out: Any, x: Tensor, cap: float) -> bool:
    return accepts_silu(out, x) and cap > 0


def softcap(out: Tensor | None, x: Tensor, cap: float) -> Tensor:
    return computed("softcap", out, x, by=cap)
