"""Sums of products that processors share: each has a split of the terms, and these are folded in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import num_processors, overlap, wait_for_inputs

TILE = 1024


@triton.jit
def store_sums(
    y_ptr, part_ptr, bias_ptr, sums, row, column, split, M, N, HAS_BIAS: tl.constexpr, IS_SPLIT: tl.constexpr
):
    """Sums [rows of a weight, columns: rows of x] go to y [M, N], or to their split of it"""
    is_stored = (column < M)[:, None] & (row < N)[None, :]
    if IS_SPLIT:
        to = part_ptr + (split.to(tl.int64) * M + column)[:, None] * N + row[None, :]
        tl.store(to, sums.T, mask=is_stored)
    else:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
        to = y_ptr + column.to(tl.int64)[:, None] * N + row[None, :]
        tl.store(to, sums.T.to(y_ptr.dtype.element_ty), mask=is_stored)


@triton.jit
def fold_kernel(
    y_ptr, part_ptr, bias_ptr, total, N,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y = the sum of the splits, in their order, + bias"""
    wait_for_inputs(OVERLAPS)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(part_ptr + split * total + at, mask=at < total, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + at % N, mask=at < total, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=at < total)


def splits_of(num_programs: int, num_steps: int, device: torch.device) -> int:
    """Into how many parts the sums are split, so that every processor has work"""
    wanted = 2 * num_processors(device) // num_programs
    return max(min(wanted, num_steps // 4, 8), 1)


def part_of(y: Tensor, splits: int) -> Tensor:
    """Where the sums of each split go; y itself if there is one"""
    return y if splits == 1 else torch.empty((splits, *y.shape), dtype=torch.float32, device=y.device)


def fold(y: Tensor, part: Tensor, bias: Tensor | None) -> None:
    """y [M, N] = the sum of its splits + bias, if it has any"""
    if part is not y:
        fold_kernel[(triton.cdiv(y.numel(), TILE),)](
            y, part, bias, y.numel(), y.shape[1],
            HAS_BIAS=bias is not None, SPLITS=len(part), TILE=TILE, num_warps=4, **overlap(y.device),
        )  # fmt: skip
