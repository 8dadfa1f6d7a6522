"""What a decoder layer is made of: ops that are others one after the other, so that a device may join them.

A reference here calls the ops by name. Where nobody joins them, each part finds the kernel that it would have
found alone, with its bits, and is recorded as that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinicore.ops.attention_reference import paged, store_kv
from infinicore.ops.quantized_reference import Weight, product
from infinicore.ops.reference import GATES, add, rms_norm, rope, rope_tables
from infinicore.ops.registry import op
from infinicore.ops.samples import HALF_PRODUCT, PRODUCT, Samples, not_finite, random

# N tokens, E hidden size, I intermediate size, H query heads, K key/value heads, D head size


def linear_add_samples(dtype: torch.dtype) -> Samples:
    for num_rows, size, num_outputs in ((1, 300, 33), (2, 64, 7), (5, 257, 40), (17, 96, 130), (64, 40, 16)):
        x, weight = random(num_rows, size, dtype=dtype), random(num_outputs, size, dtype=dtype)
        residual, bias = random(num_rows, num_outputs, dtype=dtype), random(num_outputs, dtype=dtype)
        yield x, weight, bias, residual
        yield x, weight, None, residual
    yield not_finite(64, dtype), random(35, 64, dtype=dtype), None, random(13, 35, dtype=dtype)
    yield random(2, 3, 8, dtype=dtype), random(4, 8, dtype=dtype), None, random(2, 3, 4, dtype=dtype)


@op(linear_add_samples, PRODUCT | HALF_PRODUCT)
def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + linear(x, weight, bias)"""
    return add(residual, product(x, weight, bias))


def gated_linear_samples(dtype: torch.dtype) -> Samples:
    for x, weight, bias, residual in linear_add_samples(dtype):
        both = torch.cat([weight, random(*weight.shape, dtype=dtype).flip(0)])
        biases = None if bias is None else torch.cat([bias, residual.reshape(-1, len(weight))[0]])
        yield x, random(x.shape[-1], dtype=dtype), 1e-5, both, biases
        yield x, None, 0.0, both, biases
    for _ in range(2):
        yield x, None, 0.0, both, biases, "gelu_tanh"


@op(gated_linear_samples, PRODUCT | HALF_PRODUCT)
def gated_linear(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    activation: str = "silu",
) -> Tensor:
    """activation(gate) * up of x [*, E], normalised first if there is a norm; weight [2 I, E] is of both"""
    normed = x if norm is None else rms_norm(x, norm, eps)
    gate, options = GATES[activation]
    return gate(*product(normed, weight, bias).chunk(2, -1), *options)


def places(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Angles for tokens of two streams, pools for two heads, and where the tokens go"""
    k, v = random(2, 2, 2, 64, size, dtype=dtype)
    keys, values, tables = paged(k, v, 16)
    streams = torch.arange(num_tokens) % 2
    slots = torch.arange(num_tokens) * 3 % 64
    return torch.arange(num_tokens) % 9, *rope_tables(size // 2, dtype), keys, values, tables, streams, slots


def store_heads_samples(dtype: torch.dtype) -> Samples:
    for num_tokens, size in ((1, 8), (2, 64), (7, 10), (9, 128)):
        q, k, v = torch.split(random(num_tokens, 6 + 2 + 2, size, dtype=dtype), [6, 2, 2], 1)
        for is_interleaved in (False, True):
            rows, sin, cos, *rest = places(num_tokens, size, dtype)
            yield q, k, v, rows, sin, cos, is_interleaved, *rest


class Where(NamedTuple):
    """How heads are rotated, and where their keys and values go: what store_heads takes beside them"""

    positions: Tensor  # [N]
    sin: Tensor  # [positions, D / 2]
    cos: Tensor
    is_interleaved: bool
    keys: Tensor  # a pool, as store_kv has it
    values: Tensor  # [blocks, K, slots of a block, D]
    block_tables: Tensor  # [B, M]
    streams: Tensor  # [N]
    slots: Tensor  # [N]

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.block_tables, self.streams, self.slots

    @property
    def head_dim(self) -> int:
        return 2 * self.sin.shape[1]


@op(store_heads_samples)
def store_heads(  # noqa: PLR0913  those of its parts
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    sin: Tensor,
    cos: Tensor,
    is_interleaved: bool,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    streams: Tensor,
    slots: Tensor,
) -> Tensor:
    """q [N, H, D], rotated. k [N, K, D], rotated too, and v go into the pools keys and values, in place."""
    k = rope(k, positions, sin, cos, is_interleaved)
    store_kv(keys, values, k, v, block_tables, streams, slots, out=(keys, values))
    return rope(q, positions, sin, cos, is_interleaved)


def project_heads_samples(dtype: torch.dtype) -> Samples:
    for num_tokens, size in ((1, 8), (1, 16), (3, 10), (1, 10)):
        for is_interleaved in (False, True):
            x, norm = random(num_tokens, 96, dtype=dtype), random(96, dtype=dtype)
            weight, bias = random(10 * size, 96, dtype=dtype), random(10 * size, dtype=dtype)
            rows, sin, cos, *rest = places(num_tokens, size, dtype)
            yield x, norm, 1e-5, weight, bias, rows, sin, cos, is_interleaved, *rest
            yield x, norm, 1e-5, weight, None, rows, sin, cos, is_interleaved, *rest


@op(project_heads_samples, PRODUCT | HALF_PRODUCT)
def project_heads(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None, *where: Any
) -> Tensor:
    """store_heads of the q, k and v of x [N, E], normalised first; weight [(H + 2 K) D, E] is that of all.
    Of `where` see Where."""
    pools = Where(*where)
    num_kv_heads = pools.values.shape[1]
    heads = product(rms_norm(x, norm, eps), weight, bias).view(len(x), -1, pools.head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    return store_heads(*torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1), *where)
