"""rope: a program rotates a few heads of a token."""

from __future__ import annotations

from typing import Any

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

# N tokens, H heads, D head size
TILE = 1024  # pairs that one program rotates
LARGEST_HEAD = 2048


@triton.jit(do_not_specialize=["num_positions", "table_length"])
def rope_kernel(
    y_ptr, x_ptr, position_ptr, sin_ptr, cos_ptr, token_stride, head_stride, sin_stride, cos_stride,
    H, HALF, num_positions, table_length,
    IS_INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """(y0, y1) = (x0 c - x1 s, x0 s + x1 c) for the pairs of some heads of a token"""
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token % num_positions).to(tl.int64)
    is_known = (position >= 0) & (position < table_length)
    pair = tl.arange(0, TILE)
    is_pair = pair < HALF
    lost = tl.where(is_known, 0.0, float("nan"))
    at = tl.where(is_known, position, 0)
    sin = tl.load(sin_ptr + at * sin_stride + pair, mask=is_pair, other=0.0).to(tl.float32) + lost
    cos = tl.load(cos_ptr + at * cos_stride + pair, mask=is_pair, other=0.0).to(tl.float32) + lost

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_in = (head < H)[:, None] & is_pair[None, :]
    if IS_INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, HALF + pair
    x = x_ptr + token * token_stride + head[:, None] * head_stride
    x0 = tl.load(x + first[None, :], mask=is_in, other=0.0).to(tl.float32)
    x1 = tl.load(x + second[None, :], mask=is_in, other=0.0).to(tl.float32)
    y0 = x0 * cos[None, :] - x1 * sin[None, :]
    y1 = x0 * sin[None, :] + x1 * cos[None, :]
    y = y_ptr + (token * H + head[:, None]) * (2 * HALF)
    tl.store(y + first[None, :], y0.to(y_ptr.dtype.element_ty), mask=is_in)
    tl.store(y + second[None, :], y1.to(y_ptr.dtype.element_ty), mask=is_in)


def launch(y: Tensor, x: Tensor, positions: Tensor, sin: Tensor, cos: Tensor, is_interleaved: bool) -> None:
    tokens = x.reshape(-1, *x.shape[-2:])
    tokens = tokens if tokens.stride(2) == 1 else tokens.contiguous()
    num_tokens, num_heads, size = tokens.shape
    tile = triton.next_power_of_2(size // 2)
    heads = min(max(TILE // tile, 1), triton.next_power_of_2(num_heads))
    rope_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        y, tokens, positions.contiguous(), sin, cos, tokens.stride(0), tokens.stride(1), sin.stride(0),
        cos.stride(0), num_heads, size // 2, positions.numel(), len(sin),
        IS_INTERLEAVED=is_interleaved, HEADS=heads, TILE=tile, num_warps=4, **overlap(x.device),
    )  # fmt: skip


def accepts_rope(
    out: Any, x: Tensor, positions: Tensor, sin: Tensor, cos: Tensor, is_interleaved: bool
) -> bool:
    return (
        are_plain(x.device, FLOATS, x, sin, cos)
        and are_plain(x.device, INDICES, positions)
        and x.dim() in (3, 4)
        and x.numel() > 0
        and x.shape[-1] % 2 == 0
        and x.shape[-1] <= LARGEST_HEAD
        and positions.shape in (x.shape[:-2], x.shape[-3:-2])
        and are_tables(sin, cos, x.shape[-1] // 2)
        and fits(out, x.shape, x.dtype, x.device)
    )


def are_tables(sin: Tensor, cos: Tensor, half: int) -> bool:
    is_pair = sin.dim() == 2 and sin.shape == cos.shape and len(sin) > 0 and sin.shape[1] == half
    return is_pair and all(t.stride(1) == 1 or half == 1 for t in (sin, cos))


def rope(
    out: Tensor | None, x: Tensor, positions: Tensor, sin: Tensor, cos: Tensor, is_interleaved: bool
) -> Tensor:
    y = target(out, x, positions, sin, cos, rows=(x,))
    launch(y, x, positions, sin, cos, is_interleaved)
    return settled(y, out)
