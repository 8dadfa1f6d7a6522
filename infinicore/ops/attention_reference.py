"""What the ops on a paged cache mean, in plain torch, with the inputs they are tested on.

N tokens, B streams, M blocks of a stream, P blocks in the pool, S slots of a block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infinicore.block_formats import DEQUANTIZERS, q8_0_parts
from infinicore.ops.reference import wide
from infinicore.ops.registry import DEFAULT_TOLERANCES, RECORDING, Kernel, Tolerance, op
from infinicore.ops.samples import EXACT, NOT_FINITE, Samples, not_finite, random
from infinicore.quantization import BlockType

KEY_LANES = 16  # keys that lie side by side in a pool
Q8_0 = BlockType.Q8_0


def unfold_keys(keys: Tensor) -> Tensor:
    """A pool of keys with a row for each, as a pool of values has: [P, K, S/16, D, 16] -> [P, K, S, D]

    q8_0 keys are rows of its blocks: [P, K, S/16, D/32*544] -> [P, K, S, D/32*34].
    """
    if keys.dtype != torch.uint8:
        return keys.transpose(-1, -2).flatten(-3, -2)
    groups = torch.unflatten(keys, -1, (-1, KEY_LANES * Q8_0.bytes_per_block))
    scales = torch.unflatten(groups[..., : 2 * KEY_LANES], -1, (KEY_LANES, 2))
    codes = torch.unflatten(groups[..., 2 * KEY_LANES :], -1, (-1, KEY_LANES)).transpose(-1, -2)
    blocks = torch.cat([scales, codes], -1)  # [P, K, S/16, D/32, 16, 34]
    return blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def fold_keys(rows: Tensor) -> Tensor:
    """What unfold_keys undoes: 16 keys side by side, a lane for each"""
    groups = torch.unflatten(rows, -2, (-1, KEY_LANES))  # [P, K, S/16, 16, D]
    if rows.dtype != torch.uint8:
        return groups.transpose(-1, -2).contiguous()
    blocks = torch.unflatten(groups, -1, (-1, Q8_0.bytes_per_block)).transpose(-3, -2)
    scales, codes = blocks[..., :2], blocks[..., 2:].transpose(-1, -2)
    return torch.cat([scales.flatten(-2), codes.flatten(-2)], -1).flatten(-2)


def rows_as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """x [..., D] as a pool of this dtype holds it; uint8 is q8_0"""
    if dtype != torch.uint8:
        return x.to(dtype)
    scale, codes = q8_0_parts(torch.unflatten(x.float(), -1, (-1, Q8_0.elements_per_block)))
    return torch.cat([scale.half().view(torch.uint8), codes.view(torch.uint8)], -1).flatten(-2)


def values_of(rows: Tensor) -> Tensor:
    """What the rows of a pool are worth: [..., D] in the precision it is computed in"""
    if rows.dtype != torch.uint8:
        return wide(rows)
    blocks = rows.reshape(-1, Q8_0.bytes_per_block)
    return DEQUANTIZERS[Q8_0.name](blocks).view(*rows.shape[:-1], -1)


def paged(
    keys: Tensor, values: Tensor, block_size: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools with the keys and values [B, K, T, D] of some streams, in blocks that lie in no order, and their
    tables [B, T/S]"""
    num_streams, num_blocks = len(keys), keys.shape[2] // block_size
    order = torch.randperm(num_streams * num_blocks, generator=torch.Generator().manual_seed(num_blocks))

    def pool(rows: Tensor) -> Tensor:
        blocks = torch.unflatten(rows, 2, (num_blocks, block_size)).transpose(1, 2).flatten(0, 1)
        return rows_as(dtype or rows.dtype, blocks[order.argsort()])

    return fold_keys(pool(keys)), pool(values), order.view(num_streams, num_blocks)


def forget_unseen(
    tables: Tensor, streams: Sequence[int], slots: Sequence[int], window: int, block_size: int
) -> None:
    """Spoils the entries of block tables that no token may look at."""
    is_seen = torch.zeros(tables.shape, dtype=torch.bool)
    for stream, slot in zip(streams, slots, strict=True):
        first = max(slot - window + 1, 0) if window else 0
        is_seen[stream, first // block_size : slot // block_size + 1] = True
    tables[~is_seen] = 1 << 30


def attention_samples(dtype: torch.dtype) -> Samples:
    """Pools in `dtype` and in q8_0, queries in it and in float32; slots that no token may see are NaN."""
    for num_heads, num_kv_heads, dim, window, block_size in (
        (1, 1, 8, 0, 16),
        (6, 2, 33, 0, 32),
        (9, 3, 64, 0, 64),
        (4, 4, 16, 5, 16),
        (8, 1, 128, 300, 128),
        (3, 1, 32, 40, 256),
    ):
        for slots in ([0], [6, 7, 3], [530, 2], list(range(20, 60)), []):
            streams = [i % 2 if len(slots) < 9 else 1 for i in range(len(slots))]
            k, v = (random(2, num_kv_heads, 768, dim, dtype=dtype).flip(i) for i in (0, 2))
            for unseen in (k, v):
                unseen[:, :, max(slots, default=0) + 1 :] = torch.nan
            places = torch.tensor(streams, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
            for pool in (dtype, torch.uint8) if dim % 32 == 0 else (dtype,):
                keys, values, tables = paged(k, v, block_size, pool)
                forget_unseen(tables, streams, slots, window, block_size)
                for rows in dict.fromkeys((torch.float32, dtype)):
                    q = random(len(slots), num_heads, dim, dtype=rows)
                    yield q, keys, values, tables, *places, dim**-0.5, window
    yield from bent_attention_samples(dtype)
    for slots in ([6, 7, 3], [530, 270, 2], list(range(20, 60))):
        for bad in NOT_FINITE:
            yield from spoilt_attention_samples(dtype, slots, bad)


BENDS = ((0.7, False), (0.0, True), (2.0, True))  # a soft cap, and whether there are sinks


def bent_attention_samples(dtype: torch.dtype) -> Samples:
    """With soft caps that bend most scores, with sinks, and with both"""
    for num_heads, num_kv_heads, dim, window in ((6, 2, 33, 0), (8, 1, 64, 300), (3, 1, 32, 40)):
        for slots in ([6, 7, 3], [530, 2], list(range(20, 60))):
            k, v = (random(2, num_kv_heads, 768, dim, dtype=dtype).flip(i) for i in (0, 2))
            keys, values, tables = paged(k, v, 64, dtype if dim < 64 else torch.uint8)
            places = torch.tensor([i % 2 for i in range(len(slots))]), torch.tensor(slots)
            q, sinks = random(len(slots), num_heads, dim, dtype=dtype), random(num_heads, dtype=dtype)
            for softcap, has_sinks in BENDS:
                bend = softcap, sinks if has_sinks else None
                yield q, keys, values, tables, *places, dim**-0.5, window, *bend


def spoilt_attention_samples(dtype: torch.dtype, slots: list[int], bad: float) -> Samples:
    """One number of a query, of a key or of a value that some of the tokens may see is not finite."""
    places = torch.tensor([0] * len(slots)), torch.tensor(slots)
    for spoilt in range(3):
        q = random(len(slots), 4, 17, dtype=torch.float32)
        keys, values = random(1, 2, 768, 17, dtype=dtype), random(1, 2, 768, 17, dtype=dtype).flip(2)
        (q[1, 2], keys[0, 1, max(slots) - 3], values[0, 1, max(slots) - 3])[spoilt][5] = bad
        keys, values, tables = paged(keys, values, 64)
        yield q, keys, values, tables.int(), *places, 17**-0.5, 0
        yield q, keys, values, tables.int(), *places, 17**-0.5, 0, 0.7, random(4, dtype=torch.float32)


# Where tiles multiply them, the weights of a model in bfloat16 are rounded as its states are.
TOLERANCES = {torch.float32: Tolerance(2e-5, 2e-6), torch.bfloat16: Tolerance(1.6e-2, 4e-3)}


@op(attention_samples, DEFAULT_TOLERANCES | TOLERANCES)
def attention(  # noqa: PLR0913  what a token is, what it sees, and how
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    streams: Tensor,
    slots: Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Each token attends to the keys of its stream up to its slot, the last `window` of them (0: all).

    Scores are scale * q . k, bent to softcap * tanh(score / softcap) where softcap > 0. sinks [H] are logits
    that take part in each head's softmax without a value.

    q [N, H, D], keys [P, K, S/16, D, 16] with a lane for each key, values [P, K, S, D], block_tables [B, M],
    streams and slots [N] -> [N, H, D]. The key of a slot lies in block block_tables[stream, slot // S]. Pools
    of uint8 are q8_0: keys [P, K, S/16, D/32*544], for each 32 of D the scales of 16 keys and 32 rows of 16
    codes, values [P, K, S, D/32*34].
    """
    blocks_at(block_tables, streams, slots, values)
    y = torch.empty_like(q)
    for stream in sorted(set(streams.tolist())):
        tokens = (streams == stream).nonzero().flatten()
        blocks = blocks_seen(block_tables, stream, slots[tokens], window, values)
        k, v = (
            values_of(rows.transpose(0, 1).flatten(1, 2))  # [K, T, D]
            for rows in (unfold_keys(keys[blocks]), values[blocks])
        )
        for some in tokens.split(TOKENS_AT_ONCE):
            y[some] = attend(q[some], k, v, slots[some], scale, window, softcap, sinks)
    return y


def blocks_at(block_tables: Tensor, streams: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """The block of each of these slots of these streams [N]"""
    num_blocks, _, block_size = values.shape[:3]
    num_streams, room = block_tables.shape
    for stream, slot in zip(streams.tolist(), slots.tolist(), strict=True):
        if not (0 <= stream < num_streams and 0 <= slot < room * block_size):
            raise IndexError(
                f"there is no slot {slot} of stream {stream} in block tables of {num_streams} streams, "
                f"each with room for {room * block_size} slots"
            )
    blocks = block_tables[streams.long(), slots.long() // block_size].long()
    for stream, slot, block in zip(streams.tolist(), slots.tolist(), blocks.tolist(), strict=True):
        if not 0 <= block < num_blocks:
            raise IndexError(
                f"slot {slot} of stream {stream} is in block {block}, and the pools have {num_blocks} blocks"
            )
    return blocks


def blocks_seen(block_tables: Tensor, stream: int, slots: Tensor, window: int, values: Tensor) -> Tensor:
    """The blocks of a stream up to its last slot here; block 0 stands for those that no token sees."""
    block_size = values.shape[2]
    first = (slots.long() - window + 1).clamp(min=0) if window else torch.zeros_like(slots)
    starts = torch.arange(0, int(slots.max()) + 1, block_size, device=slots.device)
    is_seen = (starts <= slots[:, None]) & (starts + block_size > first[:, None])
    seen = starts[is_seen.any(0)]
    blocks = torch.zeros_like(starts)
    blocks[is_seen.any(0)] = blocks_at(block_tables, torch.full_like(seen, stream), seen, values)
    return blocks


TOKENS_AT_ONCE = 128  # so that the scores of a long prompt take no more memory than its keys


def attend(  # noqa: PLR0913  those of attention
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of some tokens of one stream: q [N, H, D], k and v [K, T, D], slots [N] -> [N, H, D]"""
    column = torch.arange(k.shape[1], device=q.device)
    visible = column <= slots[:, None]  # [N, T]
    if window:
        visible = visible & (column > slots[:, None] - window)
    grouped = torch.unflatten(wide(q), 1, (len(k), -1)).movedim(0, 2)  # [K, H/K, N, D]
    k = k.masked_fill(~visible.any(0)[:, None], 0)  # a gradient would be NaN by what was never stored
    scores = grouped @ k.to(grouped.dtype).transpose(1, 2).unsqueeze(1) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    weights = softmax(scores.masked_fill(~visible, -torch.inf), sinks)  # [K, H/K, N, T]
    y = weigh(weights, v.to(grouped.dtype).unsqueeze(1), visible)
    return y.movedim(2, 0).flatten(1, 2).to(q.dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension of scores [K, H/K, N, T], and a sink [H] beside them if there are any"""
    if sinks is None:
        return torch.softmax(scores, -1)
    beside = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, beside], -1), -1)[..., :-1]


def weigh(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """weights [..., N, T] @ v [..., T, D], where what is not finite is lost on those who do not see it

    In a plain product 0 * NaN would spoil them too.
    """
    v = v.masked_fill(~visible.any(0)[:, None], 0)
    is_finite = v.isfinite()
    y = weights @ v.masked_fill(~is_finite, 0)
    for t in (~is_finite).flatten(0, 1).any(-1).any(0).nonzero().flatten().tolist():
        product = weights[..., t, None] * v[..., None, t, :].masked_fill(is_finite[..., None, t, :], 0)
        y = y + product.masked_fill(~visible[:, t, None], 0)
    return y


def store_kv_samples(dtype: torch.dtype) -> Samples:
    for num_tokens in (0, 1, 3):
        keys, values = random(2, 3, 96, 32, dtype=dtype), random(2, 3, 96, 32, dtype=dtype).flip(0)
        streams, slots = torch.tensor([1, 0, 1])[:num_tokens], torch.tensor([88, 0, 33])[:num_tokens]
        for pool in (dtype, torch.uint8):
            new_keys, new_values, tables = paged(keys, values, 16, pool)
            forget_unseen(tables, streams.tolist(), slots.tolist(), 1, 16)
            for rows in dict.fromkeys((torch.float32, dtype)):
                k = random(num_tokens, 3, 32, dtype=rows)
                yield new_keys, new_values, k, k.neg(), tables, streams, slots
    places = torch.tensor([1, 0, 1, 0]), torch.tensor([88, 0, 33, 2])
    for size, pool in ((17, dtype), (64, torch.uint8)):
        k = not_finite(size, torch.float32)[:12].view(4, 3, size)
        old_keys, old_values = random(2, 2, 3, 96, size, dtype=dtype)
        keys, values, tables = paged(old_keys, old_values, 32, pool)
        yield keys, values, k, 1e6 * k.flip(0), tables.int(), *places  # some of it beyond float16


@op(store_kv_samples, EXACT)
def store_kv(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    streams: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """The pools of attention with k and v [N, K, D] at (stream, slot) of each token, rounded as they are"""
    blocks, places = blocks_at(block_tables, streams, slots, values), slots.long() % values.shape[2]
    new_keys, new_values = unfold_keys(keys).clone(), values.clone()
    new_keys[blocks, :, places] = rows_as(keys.dtype, k)
    new_values[blocks, :, places] = rows_as(values.dtype, v)
    return fold_keys(new_keys), new_values


def writes_in_place(out: Any, keys: Tensor, values: Tensor, *_: Tensor) -> bool:
    return out is not None and out[0] is keys and out[1] is values and not RECORDING.stack


def store_in_place(out: Any, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, *places: Tensor) -> Any:
    """The same for pools that are written where they lie, of which only the blocks that change are copied"""
    if not writes_in_place(out, keys, values):
        return None
    tables, streams, slots = places
    used, own = torch.unique(blocks_at(tables, streams, slots, values), return_inverse=True)
    parts = keys[used], values[used]
    keys[used], values[used] = store_kv.reference(
        *parts, k, v, own[:, None], torch.arange(len(own), device=own.device), slots % values.shape[2]
    )
    return out


store_kv.register(
    Kernel(
        "torch",
        writes_in_place,
        store_in_place,
        lambda out, *args: lambda: store_in_place(out, *args),
    )
)
