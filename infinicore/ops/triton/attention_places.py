"""What the kernels of attention share: which tokens are runs, and where keys lie in pools of blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.triton.tensors import tanh

# N tokens, B streams, M blocks of a stream, P blocks of a pool, S slots of a block, H query heads,
# K key/value heads, G query heads of each, D head size, KEYS keys that are looked at together
LONG = tl.constexpr(8)  # tokens of one stream in a row that make a run


class Seen(NamedTuple):
    """The tensors that kernels of attention read, in their order"""

    q: Tensor  # [N, H, D]
    keys: Tensor
    values: Tensor
    tables: Tensor  # [B, M]
    streams: Tensor  # [N]
    slots: Tensor  # [N]
    sinks: Tensor | None


class Sizes(NamedTuple):
    """The numbers that they read after those and the strides of q, in their order"""

    scale: float
    cap: float
    window: int
    num_tokens: int
    num_streams: int
    num_table_blocks: int
    num_blocks: int
    num_kv_heads: int
    group: int
    size: int


@triton.jit
def in_run(stream_ptr, n, N, LONG: tl.constexpr):
    """Whether tokens n are among LONG or more in a row of one stream"""
    own = tl.load(stream_ptr + n, mask=n < N, other=-1)
    length = tl.where(n < N, 1, 0)
    goes_left, goes_right = n < N, n < N
    for i in tl.static_range(1, LONG):
        left = tl.load(stream_ptr + n - i, mask=(n >= i) & (n < N), other=-1)
        right = tl.load(stream_ptr + n + i, mask=n + i < N, other=-1)
        goes_left = goes_left & (n >= i) & (left == own)
        goes_right = goes_right & (n + i < N) & (right == own)
        length += tl.where(goes_left, 1, 0) + tl.where(goes_right, 1, 0)
    return length >= LONG


@triton.jit
def place_of(stream_ptr, slot_ptr, n, is_in, B, M, S: tl.constexpr):
    """(stream, slot, NaN where there is no such place): one that there is stands for it"""
    stream = tl.load(stream_ptr + n, mask=is_in, other=0).to(tl.int64)
    slot = tl.load(slot_ptr + n, mask=is_in, other=0).to(tl.int64)
    is_there = (stream >= 0) & (stream < B) & (slot >= 0) & (slot < M * S)
    lost = tl.where(is_there, 0.0, float("nan"))
    return tl.where(is_there, stream, 0), tl.where(is_there, slot, 0).to(tl.int32), lost


@triton.jit
def lanes_at(table_ptr, key, seen, end, K, P, head, D, S: tl.constexpr, LANES: tl.constexpr):
    """Where the LANES keys from `key` on begin in a pool, and NaN where no pool has their block

    Of keys that are not seen it is somewhere in the first block.
    """
    is_any = (key + LANES > seen) & (key < end)
    block = tl.load(table_ptr + key // S, mask=is_any, other=0).to(tl.int64)
    is_there = (block >= 0) & (block < P)
    lost = tl.where(is_there, 0.0, float("nan"))
    return ((tl.where(is_there, block, 0) * K + head) * S + key % S) * D, lost


@triton.jit
def capped(scores, cap, CAPS: tl.constexpr):
    """cap * tanh(scores), if there is a cap"""
    if CAPS:
        scores = cap * tanh(scores)
    return scores


@triton.jit
def with_sinks(total, largest, sink_ptr, head, is_head, HAS_SINKS: tl.constexpr):
    """The sums of weights, and what the sinks of these heads add to them"""
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head, mask=is_head, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - largest)
    return total


def arithmetic(q: Tensor, values: Tensor) -> dict[str, Any]:
    """What products are computed in: the dtype that queries and pools share, float32 where they differ"""
    dtypes = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    dtype = dtypes.get(q.dtype, tl.float32) if q.dtype == values.dtype else tl.float32
    return {"DTYPE": dtype, "PRECISION": "ieee"}


def padded(size: int) -> int:
    power: int = triton.next_power_of_2(size)
    return max(power, 16)
