"""Keys and values in pools of blocks: PagedCache for an engine, DynamicCache for one batch of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from infinicore import get_num_threads, ops
from infinicore.checks import check_place, integer
from infinicore.nn.checks import check_float, check_same
from infinicore.ops.attention_reference import KEY_LANES, Q8_0, unfold_keys
from infinilm.batch import Batch

# Multiplications of one call on two threads, about a tenth of a second: Python hears an interrupt between
# two calls only.
CALL_WORK = 1 << 28
TOGETHER = 16  # tokens that the kernel takes at once

# B streams, S block size, P blocks of a pool, M blocks of a stream, N tokens, T positions,
# K key/value heads, D head size


@dataclass(frozen=True)
class BlockShape:
    """What one block of a layer holds: keys [K, S/16, D, 16], as attention reads them, and values [K, S, D].

    q8_0 has groups of 32 along D, each with its float16 scale.
    """

    num_kv_heads: int
    head_dim: int
    size: int
    dtype: torch.dtype

    def pools(self, num_blocks: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Memory for keys and values, not touched yet

        A CPU reads one head at a time: its blocks follow each other, or every page would begin a new read.
        """
        keys, values = ((num_blocks, self.num_kv_heads, *part) for part in (self.keys, self.values))
        outer = (1, 0) if torch.device(device).type == "cpu" else (0, 1)

        def pool(sizes: tuple[int, ...]) -> Tensor:
            # No view: one that was made without gradients cannot be written to with them.
            order = (*outer, *range(2, len(sizes)))
            return torch.empty_permuted(sizes, order, dtype=self.dtype, device=device)

        return pool(keys), pool(values)

    @property
    def keys(self) -> tuple[int, ...]:
        groups, (_, row) = self.size // KEY_LANES, self.values
        return (groups, row * KEY_LANES) if self.dtype == torch.uint8 else (groups, row, KEY_LANES)

    @property
    def values(self) -> tuple[int, ...]:
        return self.size, Q8_0.bytes_per_row(self.head_dim) if self.dtype == torch.uint8 else self.head_dim

    @property
    def num_bytes(self) -> int:
        """The bytes of the keys and values of one block"""
        keys, values = self.pools(1, "meta")
        return keys.nbytes + values.nbytes


def attend(  # noqa: PLR0913  where keys are, who looks, and how
    pools: tuple[Tensor, Tensor],
    q: Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Let q [N, H, D] attend to all that each token may see -> [N, H, D]; their keys are in the pools.

    softcap and sinks [H] are those of `ops.attention`. In several calls where one takes long on a CPU; the
    bits are the same.
    """
    num_keys = max(batch.lengths)
    work = q[0].numel() * min(num_keys, window or num_keys)  # of a token
    room = CALL_WORK * max(get_num_threads() // 2, 1)
    size = max(room // work // TOGETHER, 1) * TOGETHER
    how = scale, window or 0, softcap, sinks
    if len(q) <= size or not q.is_cpu:
        return ops.attention(q, *pools, batch.block_tables, batch.streams, batch.slots, *how)
    out = torch.empty_like(q)
    for start in range(0, len(q), size):
        part, streams, slots, attended = (
            t[start : start + size] for t in (q, batch.streams, batch.slots, out)
        )
        ops.attention(part, *pools, batch.block_tables, streams, slots, *how, out=attended)
    return out


class PagedCache:
    """A pool of blocks for each layer. Which block is whose, the tables of a Batch say."""

    def __init__(
        self, num_layers: int, shape: BlockShape, num_blocks: int, device: torch.device | str
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.layers = [shape.pools(num_blocks, device) for _ in range(num_layers)]

    def room(self, layer: int, batch: Batch, heads: tuple[int, int], x: Tensor) -> tuple[Tensor, Tensor]:
        """The pools of a layer, for keys and values [N, *heads] of a batch, in the dtype of x"""
        return self.layers[layer]


class DynamicCache:
    """The streams of one batch, which grow as keys come: block i of stream b is block i * B + b of its layer.

    Streams may have different lengths: padding is never stored. dtype None is that of a layer's first keys.
    """

    def __init__(self, block_size: int = 64, dtype: torch.dtype | None = None) -> None:
        if integer("DynamicCache", "block_size", block_size) < KEY_LANES or block_size % KEY_LANES:
            wanted = f"a multiple of {KEY_LANES}"
            raise ValueError(f"DynamicCache: block_size must be {wanted}, but is {block_size}")
        check_place("DynamicCache", dtype, None)
        self.block_size = block_size
        self.dtype = dtype
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: dict[int, list[int]] = {}  # of the streams, by layer
        self._starts: list[int] = []  # how long they were when tokens were placed last

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, K, S, D] to a layer and return all it holds, [B, K, T, D] each."""
        check_update(keys, values, layer_idx, len(self.layers))
        batch_size, _, num_new, _ = keys.shape
        batch = self.place([num_new] * batch_size, layer_idx, device=keys.device)
        k, v = (t.transpose(1, 2).flatten(0, 1) for t in (keys, values))  # [N, K, D]
        pools = self.room(layer_idx, batch, (k.shape[1], k.shape[2]), k)
        ops.store_kv(*pools, k, v, batch.block_tables, batch.streams, batch.slots, out=pools)
        return self._contents(pools, batch)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many positions a layer holds, of its longest stream."""
        return max(self._lengths.get(integer("DynamicCache", "layer_idx", layer_idx), [0]))

    def lengths(self, batch_size: int, layer_idx: int) -> list[int]:
        """How many positions each stream has in a layer."""
        held = self._lengths.get(layer_idx, [0] * batch_size)
        if len(held) != batch_size:
            raise ValueError(
                f"cache: it holds {len(held)} streams, but {batch_size} came; another batch needs a new one"
            )
        return held

    def place(
        self,
        counts: Sequence[int],
        layer_idx: int = 0,
        token_ids: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Where new tokens go, so many of each stream; rope rows are their places."""
        self._starts = starts = self.lengths(len(counts), layer_idx)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        arange = partial(torch.arange, device="cpu")
        slots = torch.cat([arange(start, end) for start, end in zip(starts, lengths, strict=True)])
        num_blocks = -(-max(lengths) // self.block_size)
        tables = arange(num_blocks * len(counts)).view(num_blocks, len(counts)).T.contiguous()
        streams = arange(len(counts)).repeat_interleave(torch.tensor(counts, device="cpu"))
        ids = slots if token_ids is None else token_ids
        return Batch(ids, slots, streams, slots, tables, lengths).to(torch.device(device))

    def room(self, layer: int, batch: Batch, heads: tuple[int, int], x: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's pools, large enough for the streams' new lengths, which are noted."""
        shape = BlockShape(*heads, self.block_size, self._dtype_of(layer) or x.dtype)
        held = self.layers.setdefault(layer, shape.pools(0, x.device))
        if (held[1].shape[1], held[1].shape[3]) != heads:
            shapes = f"heads {heads} to those of {(held[1].shape[1], held[1].shape[3])}"
            raise ValueError(f"cache: cannot append {shapes}; use a new cache for another model")
        if batch.block_tables.numel() > len(held[0]):
            num_blocks = batch.block_tables.numel() + max(len(batch.lengths), len(held[0]) // 2)
            self.layers[layer] = tuple(map(grown, held, shape.pools(num_blocks, x.device)))  # type: ignore[assignment]
        elif any(pool.requires_grad for pool in held):  # gradients of earlier steps need them as they are
            self.layers[layer] = held[0].clone(), held[1].clone()
        self.note_lengths(layer, batch)
        return self.layers[layer]

    def _dtype_of(self, layer: int) -> torch.dtype | None:
        """That of the first keys: what a layer holds is not rounded when others come."""
        return self.layers[layer][0].dtype if layer in self.layers else self.dtype

    def note_lengths(self, layer: int, batch: Batch) -> None:
        """How long the streams of a layer are from now on, whichever rank computes it"""
        held, wanted = self.lengths(len(batch.lengths), layer), list(batch.lengths)
        if held not in (self._starts, wanted):  # the latter where a layer is computed again, for gradients
            raise ValueError(
                f"cache: layer {layer} holds {held} positions, but {self._starts} come before these: a call "
                "has ended midway; use a new cache, or truncate this one to where it was"
            )
        self._lengths[layer] = wanted

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        length = integer("DynamicCache", "length", length)
        if length < 0:
            raise ValueError(f"DynamicCache: length must be 0 or more, but is {length}")
        for layer, lengths in self._lengths.items():
            self._lengths[layer] = [min(length, held) for held in lengths]

    def __len__(self) -> int:
        return len(self.layers)

    def _contents(self, pools: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """What the streams hold, [B, K, T, D] each"""
        end = max(batch.lengths)

        def joined(blocks: Tensor) -> Tensor:
            return blocks[batch.block_tables].transpose(1, 2).flatten(2, 3)[:, :, :end]  # of [B, M, K, S, D]

        return joined(unfold_keys(pools[0])), joined(pools[1])


def grown(held: Tensor, larger: Tensor) -> Tensor:
    larger[: len(held)] = held
    return larger


def check_update(keys: Tensor, values: Tensor, layer_idx: int, num_layers: int) -> None:
    check_float("cache", "keys", keys)
    check_same("cache", keys, "values", values)
    if keys.dim() != 4 or len(keys) == 0 or keys.shape != values.shape:
        shapes = f"{tuple(keys.shape)} and {tuple(values.shape)}"
        wanted = "[batch, heads, seq, dim] of a stream or more"
        raise ValueError(f"cache: keys and values must both be {wanted}, but are {shapes}")
    if not 0 <= integer("cache", "layer_idx", layer_idx) <= num_layers:
        raise IndexError(f"cache: layer_idx {layer_idx} comes out of turn; expected at most {num_layers}")
