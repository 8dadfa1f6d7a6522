"""silu and swiglu: elementwise over rows that may lie apart."""

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


def launch(y: Tensor, x: Tensor, up: Tensor) -> None:
    rows, ups = rows_of(x), rows_of(up)
    num_rows, size = rows.shape
    silu_kernel[(num_rows, triton.cdiv(size, TILE))](
        y, rows, ups, rows.stride(0), ups.stride(0), size,
        GATES=up is not x, TILE=TILE, num_warps=4, **overlap(x.device),
    )  # fmt: skip


def accepts_silu(out: Any, x: Tensor) -> bool:
    is_taken = are_plain(x.device, FLOATS, x) and x.dim() > 0 and x.numel() > 0
    return is_taken and fits(out, x.shape, x.dtype, x.device)


def silu(out: Tensor | None, x: Tensor) -> Tensor:
    y = target(out, x, rows=(x,))
    launch(y, x, x)
    return settled(y, out)


def accepts_swiglu(out: Any, gate: Tensor, up: Tensor) -> bool:
    is_taken = accepts_silu(out, gate) and are_plain(gate.device, (gate.dtype,), up)
    return is_taken and gate.shape == up.shape


def swiglu(out: Tensor | None, gate: Tensor, up: Tensor) -> Tensor:
    y = target(out, gate, rows=(gate, up))
    launch(y, gate, up)
    return settled(y, out)
