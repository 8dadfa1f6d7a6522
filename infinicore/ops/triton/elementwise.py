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
def silu_kernel(
    y_ptr, x_ptr, up_ptr, x_stride, up_stride, E,
    GATES: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = x * sigmoid(x), times up if there is one"""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = column < E
    x = tl.load(x_ptr + row * x_stride + column, mask=is_in, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(x)
    if GATES:
        y *= tl.load(up_ptr + row * up_stride + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * E + column, y.to(y_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def geglu_kernel(
    y_ptr, x_ptr, up_ptr, x_stride, up_stride, E, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """y = gelu_tanh(x) * up, where gelu_tanh(x) = x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))"""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = column < E
    x = tl.load(x_ptr + row * x_stride + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=is_in, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) * up
    tl.store(y_ptr + row * E + column, y.to(y_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def scale_kernel(
    y_ptr, x_ptr, unused_ptr, x_stride, unused_stride, E, by,
    CAPS: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = by * x, or by * tanh(x / by)"""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = column < E
    x = tl.load(x_ptr + row * x_stride + column, mask=is_in, other=0.0).to(tl.float32)
    y = by * (tanh(x / by) if CAPS else x)
    tl.store(y_ptr + row * E + column, y.to(y_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def add_kernel(
    y_ptr, a_ptr, b_ptr, a_stride, b_stride, E, by,
    SCALES: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = a + b, or a + by * b"""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = column < E
    a = tl.load(a_ptr + row * a_stride + column, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + column, mask=is_in, other=0.0).to(tl.float32)
    b = by * b if SCALES else b
    tl.store(y_ptr + row * E + column, (a + b).to(y_ptr.dtype.element_ty), mask=is_in)


def launch(kernel: Any, y: Tensor, a: Tensor, b: Tensor, *numbers: float, **options: bool) -> None:
    rows, others = rows_of(a), rows_of(b)
    num_rows, size = rows.shape
    kernel[(num_rows, triton.cdiv(size, TILE))](
        y, rows, others, rows.stride(0), others.stride(0), size, *numbers,
        TILE=TILE, num_warps=4, **options, **overlap(a.device),
    )  # fmt: skip


def accepts_silu(out: Any, x: Tensor) -> bool:
    is_taken = are_plain(x.device, FLOATS, x) and x.dim() > 0 and x.numel() > 0
    return is_taken and fits(out, x.shape, x.dtype, x.device)


def silu(out: Tensor | None, x: Tensor) -> Tensor:
    y = target(out, x, rows=(x,))
    launch(silu_kernel, y, x, x, GATES=False)
    return settled(y, out)


def accepts_swiglu(out: Any, gate: Tensor, up: Tensor) -> bool:
    is_taken = accepts_silu(out, gate) and are_plain(gate.device, (gate.dtype,), up)
    return is_taken and gate.shape == up.shape


def swiglu(out: Tensor | None, gate: Tensor, up: Tensor) -> Tensor:
    y = target(out, gate, rows=(gate, up))
    launch(silu_kernel, y, gate, up, GATES=True)
    return settled(y, out)


def accepts_geglu(out: Any, gate: Tensor, up: Tensor, approximate: str) -> bool:
    return accepts_swiglu(out, gate, up) and approximate == "tanh"


def geglu(out: Tensor | None, gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    y = target(out, gate, rows=(gate, up))
    launch(geglu_kernel, y, gate, up)
    return settled(y, out)


def accepts_add(out: Any, a: Tensor, b: Tensor) -> bool:
    return accepts_swiglu(out, a, b)


def add(out: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    y = target(out, a, rows=(a, b))
    launch(add_kernel, y, a, b, 1.0, SCALES=False)
    return settled(y, out)


def accepts_add_scaled(out: Any, a: Tensor, b: Tensor, factor: float) -> bool:
    return accepts_swiglu(out, a, b)


def add_scaled(out: Tensor | None, a: Tensor, b: Tensor, factor: float) -> Tensor:
    y = target(out, a, rows=(a, b))
    launch(add_kernel, y, a, b, factor, SCALES=True)
    return settled(y, out)


def accepts_scale(out: Any, x: Tensor, factor: float) -> bool:
    return accepts_silu(out, x)


def scale(out: Tensor | None, x: Tensor, factor: float) -> Tensor:
    y = target(out, x, rows=(x,))
    launch(scale_kernel, y, x, x, factor, CAPS=False)
    return settled(y, out)


def accepts_softcap(out: Any, x: Tensor, cap: float) -> bool:
    return accepts_silu(out, x) and cap > 0


def softcap(out: Tensor | None, x: Tensor, cap: float) -> Tensor:
    y = target(out, x, rows=(x,))
    launch(scale_kernel, y, x, x, cap, CAPS=True)
    return settled(y, out)
