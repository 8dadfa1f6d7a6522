"""rms_norm, and the sum before it: a program for each row, which it holds as a whole."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.registry import write
from infinicore.ops.triton.tensors import (
    FLOATS,
    LARGEST_TILE,
    are_plain,
    fits,
    overlap_reading,
    rows_of,
    settled,
    target,
    wait_for_inputs,
)

# R rows, E row length


@triton.jit
def rms_norm_kernel(
    y_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, x_stride, residual_stride, E, eps,
    ADDS: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = round(x / sqrt(mean(x^2) + eps)) * weight, where x + residual is rounded first if there is one"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    is_in = column < E
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAPS)
    x = tl.load(x_ptr + row * x_stride + column, mask=is_in, other=0.0)
    if ADDS:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=is_in, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * E + column, x, mask=is_in)
    v = x.to(tl.float32)
    normalized = v * tl.rsqrt(tl.sum(v * v, 0) / E + eps)
    y = normalized.to(x.dtype).to(tl.float32) * weight
    tl.store(y_ptr + row * E + column, y.to(y_ptr.dtype.element_ty), mask=is_in)


def launch(y: Tensor, total: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    rows, others, weight = rows_of(x), rows_of(residual), weight.contiguous()
    num_rows, size = rows.shape
    tile = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        y, total, rows, others, weight, rows.stride(0), others.stride(0), size, eps,
        ADDS=total is not y, TILE=tile, num_warps=min(max(tile // 256, 1), 16),
        **overlap_reading(x.device, weight),
    )  # fmt: skip


def are_rows(x: Any, weight: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and are_plain(x.device, FLOATS, x, weight)
        and x.numel() > 0
        and weight.shape == x.shape[-1:]
        and x.shape[-1] <= LARGEST_TILE
    )


def accepts_rms_norm(out: Any, x: Tensor, weight: Tensor, eps: float) -> bool:
    return are_rows(x, weight) and fits(out, x.shape, x.dtype, x.device)


def rms_norm(out: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = target(out, x, weight, rows=(x,))
    launch(y, y, x, x, weight, eps)
    return settled(y, out)


def accepts_add_rms_norm(out: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> bool:
    return (
        are_rows(x, weight)
        and are_plain(x.device, (x.dtype,), residual)
        and residual.shape == x.shape
        and (out is None or (len(out) == 2 and all(fits(t, x.shape, x.dtype, x.device) for t in out)))
    )


def add_rms_norm(
    out: tuple[Tensor, Tensor] | None, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if out is not None:  # the two of them may overlap each other, which the copy refuses
        return write(add_rms_norm(None, x, residual, weight, eps), out)
    y, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    launch(y, total, x, residual, weight, eps)
    return y, total
