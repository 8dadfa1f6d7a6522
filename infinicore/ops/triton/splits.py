"""Sums of products that processors share: each leaves its part, and the one that comes last adds them up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TILES = 1024  # of a result whose sums are split
# How many parts of a tile have come, by where a weight lies: it is in one product at a time.
ARRIVALS: dict[int, Tensor] = {}


@triton.jit
def parts_at(part_ptr, tile, SPLITS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Where the first part of a tile [HEIGHT, WIDTH] of sums goes; the others follow"""
    place = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return part_ptr + tile.to(tl.int64) * (SPLITS * HEIGHT * WIDTH) + place


@triton.jit
def leave_part(at, arrival_ptr, tile, sums, split, SPLITS: tl.constexpr):
    """Whether this was the last part to come"""
    tl.store(at + split * (sums.shape[0] * sums.shape[1]), sums)
    tl.debug_barrier()
    return tl.atomic_add(arrival_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1


@triton.jit
def sum_of_parts(at, arrival_ptr, tile, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """In their order, whoever came first; the next product finds that none has come"""
    tl.store(arrival_ptr + tile, 0)
    sums = tl.load(at)
    for i in tl.static_range(1, SPLITS):
        sums += tl.load(at + i * SIZE)
    return sums


def arrivals(weight: Tensor) -> Tensor:
    if weight.data_ptr() not in ARRIVALS:
        ARRIVALS[weight.data_ptr()] = torch.zeros(MOST_TILES, dtype=torch.int32, device=weight.device)
    return ARRIVALS[weight.data_ptr()]
