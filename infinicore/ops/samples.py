"""Inputs that ops are tested on, and how near to its reference a kernel must come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infinicore.ops.registry import Tolerance
from infinicore.quantization import BlockType, QuantizedTensor

ODD_SIZES = (1, 7, 17, 31, 33, 127, 1023)
EXACT = {dtype: Tolerance(0, 0) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
# A dot product's error grows with its terms, not with its value, which may be near zero.
PRODUCT = {torch.float32: Tolerance(1e-5, 1e-4)}
HALF_PRODUCT = {torch.float16: Tolerance(2e-3, 2e-2), torch.bfloat16: Tolerance(1.6e-2, 2e-2)}
Samples = Iterator[tuple[Any, ...]]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal values that depend on the shape alone, so that a failing case can be run again."""
    generator = torch.Generator().manual_seed(sum((i + 1) * size for i, size in enumerate(shape)))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


NOT_FINITE = (torch.nan, torch.inf, -torch.inf)


def not_finite(size: int, dtype: torch.dtype) -> Tensor:
    """Rows with a value that is not finite at their start, midst or end, rows with two, one without."""
    x = random(13, size, dtype=dtype)
    for row in range(9):
        x[row, (0, size // 2, size - 1)[row // 3]] = NOT_FINITE[row % 3]
    for row, (first, last) in enumerate(((1, 2), (1, 0), (2, 0)), start=9):
        x[row, 0], x[row, size - 1] = NOT_FINITE[first], NOT_FINITE[last]
    return x


def not_finite_samples(dtype: torch.dtype) -> Samples:
    for size in (3, 18, 133):  # ends of vectors, whole ones, and several at once
        yield (not_finite(size, dtype),)


def row_samples(dtype: torch.dtype) -> Samples:
    for size in ODD_SIZES:
        yield (random(3, size, dtype=dtype, scale=3.0),)
    yield from not_finite_samples(dtype)
    yield (random(2, 3, 5, 65, dtype=dtype),)
    yield (random(40, 1025, dtype=dtype),)  # enough for two threads
    yield (random(0, 8, dtype=dtype),)
    yield (random(3, 0, dtype=dtype),)


def pair_samples(dtype: torch.dtype) -> Samples:
    for (x,) in row_samples(dtype):
        yield x, random(*x.shape, dtype=dtype).flip(0)
    for (x,) in not_finite_samples(dtype):
        yield random(*x.shape, dtype=dtype), x
        yield x, x.flip(0)


def small_rows(dtype: torch.dtype) -> Tensor:
    """Rows whose mean square is near eps, and one of zeros: without eps a norm of them is another."""
    x = random(4, 40, dtype=dtype, scale=2.0**-8)
    x[2] = 0
    return x


def random_blocks(type: BlockType, num_rows: int, num_blocks: int) -> QuantizedTensor:
    """Random bytes, but for two bits of each: whichever are a float16 scale, it is below 1/128."""
    generator = torch.Generator().manual_seed(type.ggml_id)
    row_bytes = num_blocks * type.bytes_per_block
    blocks = torch.randint(256, (num_rows, row_bytes), generator=generator, dtype=torch.uint8) & 0b10011111
    if type is BlockType.MXFP4:  # whose scale is an exponent
        blocks.view(-1, type.bytes_per_block)[:, 0] %= 8
        blocks.view(-1, type.bytes_per_block)[:, 0] += 118
    return QuantizedTensor(blocks, type, (num_rows, num_blocks * type.elements_per_block))
