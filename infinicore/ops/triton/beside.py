"""What stands beside the product of one row, and is one launch with it"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from infinicore.ops.fused_reference import Where


class Heads(NamedTuple):
    """How heads are rotated, and where they belong: what `rotation_of` reads, sizes, and slots of a block"""

    pointers: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    block_size: int

    @classmethod
    def of(cls, num_heads: int, where: Where) -> Heads:
        positions, tables, streams, slots = (t.contiguous() for t in (where.positions, *where.places))
        num_blocks, num_kv_heads, block_size, _ = where.values.shape
        sin, cos = where.sin, where.cos
        strides = sin.stride(0), cos.stride(0), len(sin)
        sizes = *strides, *tables.shape, num_blocks, num_heads, num_kv_heads
        pointers = positions, sin, cos, streams, slots, tables, where.keys, where.values
        return cls(pointers, sizes, block_size)


class Beside(NamedTuple):
    """What comes before and after a product: a norm, in bfloat16; a residual, or the gate of its last rows by
    its first ones, or what becomes of heads"""

    norm: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    is_gated: bool = False
    heads: Heads | None = None


ALONE = Beside()
