"""store_kv: new keys and values into the blocks of their streams; and which of them came last."""

from __future__ import annotations

import weakref
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from infinicore.ops.triton.tensors import FLOATS, INDICES, are_plain, overlap, wait_for_inputs

# N tokens, B streams, M blocks of a stream, P blocks of a pool, S slots of a block, K heads, D head size
LANES = 16  # keys that lie side by side
BLOCK_SIZES = (16, 32, 64, 128, 256)
LARGEST_HEAD = 256
# Of each pool of values, where the last kernel that wrote to it found its tokens: tables, streams, slots
LATEST = WeakTensorKeyDictionary()


@triton.jit
def block_of(table_ptr, stream_ptr, slot_ptr, B, M, P, S: tl.constexpr):
    """(block, place in it) of a token; the block is -1 where there is none"""
    stream, slot = tl.load(stream_ptr).to(tl.int64), tl.load(slot_ptr).to(tl.int64)
    is_there = (stream >= 0) & (stream < B) & (slot >= 0) & (slot < M * S)
    block = tl.load(table_ptr + stream * M + slot // S, mask=is_there, other=-1).to(tl.int64)
    return tl.where((block >= 0) & (block < P), block, -1), slot % S


@triton.jit
def key_at(first, place, d, D, LANES: tl.constexpr):
    """keys[block, head, place / LANES, d, place % LANES], of a head whose slots begin at `first`"""
    return first + place // LANES * LANES * D + d * LANES + place % LANES


@triton.jit
def value_at(first, place, d, D):
    """values[block, head, place, d]"""
    return first + place * D + d


@triton.jit(do_not_specialize=["B", "M", "P"])
def store_kv_kernel(
    key_ptr, value_ptr, k_ptr, v_ptr, table_ptr, stream_ptr, slot_ptr,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, B, M, P, K, D,
    S: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One head of a token"""
    wait_for_inputs(OVERLAPS, True)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block, place = block_of(table_ptr, stream_ptr + token, slot_ptr + token, B, M, P, S)
    d = tl.arange(0, TILE)
    is_in = (d < D) & (block >= 0)
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + d, mask=is_in, other=0.0)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + d, mask=is_in, other=0.0)
    first = (block * K + head) * S * D
    tl.store(key_ptr + key_at(first, place, d, D, LANES), k.to(key_ptr.dtype.element_ty), mask=is_in)
    tl.store(value_ptr + value_at(first, place, d, D), v.to(value_ptr.dtype.element_ty), mask=is_in)


def launch(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, *places: Tensor) -> None:
    tables, streams, slots = (place.contiguous() for place in places)
    k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (k, v))
    num_blocks, num_heads, block_size, size = values.shape
    store_kv_kernel[(len(k), num_heads)](
        keys, values, k, v, tables, streams, slots, *k.stride()[:2], *v.stride()[:2],
        *tables.shape, num_blocks, num_heads, size,
        S=block_size, LANES=LANES, TILE=triton.next_power_of_2(size), num_warps=1, **overlap(k.device),
    )  # fmt: skip
    note_stored(values, tables, streams, slots)


def note_stored(values: Tensor, *places: Tensor) -> None:
    """Whoever launches a kernel that writes to a pool says so. Such a kernel lets the next one come late."""
    LATEST[values] = [weakref.ref(place) for place in places]


def are_latest(values: Tensor, *places: Tensor) -> bool:
    """Whether these tokens, and none else, are written to a pool by a kernel that may not have ended yet"""
    known = LATEST.get(values, ())
    return len(known) > 0 and all(ref() is place for ref, place in zip(known, places, strict=True))


def are_pools(keys: Any, values: Any) -> bool:
    """Whether these are pools of floats, laid out as attention reads them"""
    if not (isinstance(values, Tensor) and are_plain(values.device, FLOATS, values)) or values.dim() != 4:
        return False
    num_blocks, num_heads, block_size, size = values.shape
    return (
        are_plain(values.device, (values.dtype,), keys)
        and block_size in BLOCK_SIZES
        and 0 < size <= LARGEST_HEAD
        and keys.shape == (num_blocks, num_heads, block_size // LANES, size, LANES)
        and keys.is_contiguous()
        and values.is_contiguous()
        and keys.numel() > 0
    )


def are_places(num_tokens: int, device: Any, tables: Any, streams: Any, slots: Any) -> bool:
    return (
        are_plain(device, INDICES, tables, streams, slots)
        and tables.dim() == 2
        and tables.numel() > 0
        and streams.shape == slots.shape == (num_tokens,)
    )


def accepts_store_kv(out: Any, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, *places: Tensor) -> bool:
    return (
        are_pools(keys, values)
        and are_plain(keys.device, FLOATS, k, v)
        and k.dim() == 3
        and len(k) > 0
        and k.shape == v.shape == (len(k), values.shape[1], values.shape[3])
        and are_places(len(k), keys.device, *places)
        and (out is None or (len(out) == 2 and out[0] is keys and out[1] is values))
    )


def store_kv(
    out: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, *places: Tensor
) -> tuple[Tensor, Tensor]:
    pools = (keys.clone(), values.clone()) if out is None else (keys, values)
    launch(*pools, k, v, *places)
    return pools if out is None else out
