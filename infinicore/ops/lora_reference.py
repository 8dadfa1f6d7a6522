"""Low-rank adapters: what one adds to the rows of a product that are its own.

The reference calls products by name, so that on a GPU they are those of other layers, with their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinicore.ops.fused_reference import linear_add
from infinicore.ops.reference import linear
from infinicore.ops.registry import op
from infinicore.ops.samples import HALF_PRODUCT, PRODUCT, Samples, not_finite, random

# N rows, R rows of all adapters together


def add_lora_samples(dtype: torch.dtype) -> Samples:
    """Three adapters, of ranks 5, 0 and 8, and rows of each and of none"""
    ends = torch.tensor([5, 5, 13])
    for num_rows, size, num_outputs in ((1, 300, 33), (3, 7, 1), (5, 257, 1100), (17, 96, 130), (64, 40, 16)):
        base, x = random(num_rows, num_outputs, dtype=dtype), random(num_rows, size, dtype=dtype, scale=0.3)
        a, b = random(13, size, dtype=dtype, scale=0.3), random(13, num_outputs, dtype=dtype, scale=0.3)
        for adapters in (torch.arange(num_rows) % 4 - 1, torch.arange(num_rows) // 5 % 4 - 1):
            yield base, x, a, b, ends, adapters
        yield base, x, a, b, ends, torch.full((num_rows,), 2)
    x, mixed = not_finite(37, dtype), torch.arange(13) % 4 - 1
    yield random(13, 9, dtype=dtype), x, random(13, 37, dtype=dtype), random(13, 9, dtype=dtype), ends, mixed
    none = torch.empty(0, dtype=torch.int64)
    yield random(0, 9, dtype=dtype), random(0, 8, dtype=dtype), a[:, :8], b[:, :9], ends, none
    base, x = random(2, 9, dtype=dtype), random(2, 8, dtype=dtype)
    yield base, x, a[:0, :8], b[:0, :9], none, torch.tensor([-1, -1])


@op(add_lora_samples, PRODUCT | HALF_PRODUCT)
def add_lora(base: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Tensor, adapters: Tensor) -> Tensor:
    """base [N, out] + (x aᵀ) b of x [N, in], each row by the rows of a [R, in] and b [R, out] of its adapter:
    those of adapter i end at ends[i], where the next one's begin. -1 is no adapter: the row stays as it is.

    ends lie on the host, whatever the device of the others.
    """
    y, begin = base, 0
    for adapter, end in enumerate(ends.tolist()):
        if end > begin:
            low = linear(x, a[begin:end], None)
            added = linear_add(low, b[begin:end].T.contiguous(), None, base)
            y = torch.where((adapters == adapter)[:, None], added, y)
        begin = end
    return y.clone() if y is base else y
