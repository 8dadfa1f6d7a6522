"""embedding: rows of a weight by their ids."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import (
    FLOATS,
    INDICES,
    are_plain,
    fits,
    overlap,
    settled,
    target,
    wait_for_inputs,
)

# V rows of the weight, E their length
TILE = 1024


@triton.jit
def embedding_kernel(
    y_ptr, id_ptr, weight_ptr, weight_stride, V, E, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """y[i] = weight[id[i]], NaN where there is no such row"""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = tl.load(id_ptr + row).to(tl.int64)
    at = weight_ptr + wanted * weight_stride + column
    values = tl.load(at, mask=(column < E) & (wanted >= 0) & (wanted < V), other=float("nan"))
    tl.store(y_ptr + row * E + column, values.to(y_ptr.dtype.element_ty), mask=column < E)


def accepts_embedding(out: Any, ids: Tensor, weight: Tensor) -> bool:
    return (
        are_plain(ids.device, INDICES, ids)
        and are_plain(ids.device, FLOATS, weight)
        and weight.dim() == 2
        and weight.stride(1) == 1
        and min(ids.numel(), weight.numel()) > 0
        and any(
            fits(out, (*ids.shape, weight.shape[1]), dtype, ids.device)
            for dtype in (weight.dtype, torch.float32)
        )
    )


def embedding(out: Tensor | None, ids: Tensor, weight: Tensor) -> Tensor:
    num_rows, size = weight.shape
    shape, dtype = (*ids.shape, size), weight.dtype if out is None else out.dtype
    y = target(out, torch.empty(shape, dtype=dtype, device=ids.device), ids, weight)
    embedding_kernel[(ids.numel(), triton.cdiv(size, TILE))](
        y, ids.contiguous(), weight, weight.stride(0), num_rows, size,
        TILE=TILE, num_warps=4, **overlap(ids.device),
    )  # fmt: skip
    return settled(y, out)
