"""Attention over pools of blocks: a token's result depends on its own keys alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import infinicore
from infinicore import _native, ops
from infinicore.ops.attention_reference import fold_keys, paged, rows_as, unfold_keys, values_of
from infinicore.quantization import BlockType, quantize

LENGTH, ROOM = 700, 768
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
Place = tuple[int, int]  # a stream and a slot in it


@cache
def problem(
    dtype: torch.dtype = torch.float32, block_size: int = 16, num_kv_heads: int = 2
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(queries of every slot of three streams [B, T, H, D], (key pool, value pool, block tables))"""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, LENGTH, 6, 32, generator=generator)
    keys, values = torch.randn(2, 3, num_kv_heads, ROOM, 32, generator=generator)
    return q, paged(keys, values, block_size, dtype)


def attend(
    q: Tensor,
    pools: tuple[Tensor, Tensor, Tensor],
    places: Iterable[Place],
    window: int = 0,
    bend: tuple[float, Tensor | None] = (0.0, None),
) -> Tensor:
    streams, slots = torch.tensor(list(places)).t().contiguous()
    return ops.attention(q[streams, slots], *pools, streams, slots, 0.2, window, *bend)


SINKS = torch.linspace(-2, 3, 6)  # of six heads
BENDS = {"straight": (0.0, None), "capped": (1.5, None), "sinking": (0.0, SINKS), "both": (1.5, SINKS)}


@pytest.mark.parametrize("bend", ["straight", "both"])
@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_gets_the_same_bits_alone_in_a_batch_and_in_a_prompt(
    dtype: torch.dtype, window: int, bend: str, level: str
) -> None:
    q, pools = problem(dtype)
    how = window, BENDS[bend]
    for stream, slot in ((0, 0), (1, 255), (2, 256), (0, 699)):
        alone = attend(q, pools, [(stream, slot)], *how)[0]
        batch = [(s, (slot + 97 * s) % LENGTH) for s in range(3)] * 2
        batch[4] = (stream, slot)
        assert torch.equal(attend(q, pools, batch, *how)[4], alone)
        prompt = [(stream, s) for s in range(max(0, slot - 50), slot + 1)]
        assert torch.equal(attend(q, pools, prompt, *how)[-1], alone)


def by_the_book(q: Tensor, k: Tensor, v: Tensor, window: int, softcap: float, sinks: Tensor | None) -> Tensor:
    """Attention of one stream in float64, from its definition: q [T, H, D], k and v [T, K, D]"""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(q))), -torch.inf)
    if sinks is not None:
        beside = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, beside], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


@cache
def one_stream(
    length: int, size: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """(q [T, H, D], k and v [T, K, D], (pools that hold them, their block table, streams, slots))"""
    generator = torch.Generator().manual_seed(size)
    q = 3 * torch.randn(length, 6, size, generator=generator).to(dtype)
    k, v = torch.randn(2, length, 2, size, generator=generator).to(dtype)
    padded = torch.zeros(2, 1, 2, -(-length // 64) * 64, size)
    padded[:, 0, :, :length] = torch.stack([k, v]).transpose(1, 2)
    pools = paged(*padded, block_size=64, dtype=dtype)
    return q, k, v, (*pools, torch.zeros(length, dtype=torch.int64), torch.arange(length))


@cache
def wanted_of(length: int, size: int, window: int, bend: str, dtype: torch.dtype = torch.float32) -> Tensor:
    q, k, v, _ = one_stream(length, size, dtype)
    return by_the_book(q.double(), k.double(), v.double(), window, *BENDS[bend])


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_caps_sinks_and_windows_mean_what_their_formula_says(size: int, bend: str, level: str) -> None:
    for length in (1, 37, 301):
        q, _, _, stored = one_stream(length, size)
        for window in (0, 40):
            found = ops.attention(q, *stored, size**-0.5, window, *BENDS[bend])
            wanted = wanted_of(length, size, window, bend)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_without_a_cap_and_with_sinks_that_weigh_nothing_bits_are_those_of_plain_attention(
    level: str,
) -> None:
    q, pools = problem()
    for places in ([(1, 600)], [(0, slot) for slot in range(250, 290)]):
        plain = attend(q, pools, places)
        assert torch.equal(attend(q, pools, places, 0, (0.0, torch.full((6,), -torch.inf))), plain)
        assert torch.equal(attend(q, pools, places, 0, (0.0, None)), plain)


def test_a_sink_that_outweighs_every_key_leaves_nothing(level: str) -> None:
    q, pools = problem()
    sinks = torch.tensor([0.0, 300.0, 0.0, 1e30, 0.0, 0.0])
    found = attend(q, pools, [(1, 600), (0, 3)], 0, (0.0, sinks))
    assert found[:, [1, 3]].abs().max() < 1e-30 and (found[:, [0, 2, 4, 5]].abs().amax(-1) > 1e-3).all()


def test_kernels_decline_sinks_that_are_not_one_for_each_head() -> None:
    q, pools = problem()
    place = torch.tensor([0])
    for bad in (SINKS[:5], SINKS[None], SINKS.double(), torch.ones(12)[::2], 3.0):
        assert ops.attention.pick(q[0, :1], *pools, place, place, 0.2, 0, 0.0, bad) is None
    assert ops.attention.pick(q[0, :1], *pools, place, place, 0.2, 0, -1.0) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_any_size_and_order_give_the_same_bits(dtype: torch.dtype, level: str) -> None:
    places = [(0, 0), (1, 511), (2, 699), (2, 16)]
    prompt = [(1, slot) for slot in range(500, 560)]
    (q, pools), *others = (problem(dtype, block_size) for block_size in (16, 32, 64, 128, 256))
    for _, other in others:
        for some in (places, prompt):
            assert torch.equal(attend(q, other, some, 300), attend(q, pools, some, 300))


def test_one_two_and_three_threads_give_the_same_bits(level: str, keep_threads: None) -> None:
    for dtype in (torch.float32, torch.uint8):
        q, pools = problem(dtype)
        for places in ([(0, 650), (1, 3)], [(2, slot) for slot in range(LENGTH)]):
            results = []
            for count in (1, 2, 3):
                infinicore.set_num_threads(count)
                results.append(attend(q, pools, places, 0, BENDS["both"]))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_tokens_in_any_order_get_the_bits_they_get_alone(level: str, keep_threads: None) -> None:
    """Few tokens over several splits, those of one stream not from first to last"""
    q, pools = problem()
    infinicore.set_num_threads(2)
    for places in ([(0, 639), (0, 3), (0, 300)], [(1, 300), (1, 600), (1, 2), (0, 0), (0, 520), (2, 630)]):
        alone = torch.cat([attend(q, pools, [place]) for place in places])
        assert torch.equal(attend(q, pools, places), alone)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_heads_that_share_a_key_head_get_the_bits_they_get_with_keys_of_their_own(
    num_kv_heads: int, level: str
) -> None:
    q, (keys, values, tables) = problem(num_kv_heads=num_kv_heads)
    own = [t.repeat_interleave(6 // num_kv_heads, 1) for t in (keys, values)]
    for places in ([(1, 600)], [(0, slot) for slot in range(250, 290)]):
        shared = attend(q, (keys, values, tables), places)
        assert torch.equal(attend(q, (*own, tables), places), shared)


@pytest.mark.parametrize("bend", ["straight", "both"])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_few_and_many_rows_of_a_model_in_bfloat16_get_the_same_bits(
    num_kv_heads: int, window: int, bend: str, level: str
) -> None:
    """From one row, which needs no tile, to tiles that are not full"""
    q, pools = problem(torch.bfloat16, num_kv_heads=num_kv_heads)
    q, how = q.bfloat16(), (window, BENDS[bend])
    for slot in (0, 30, 255, 290, 699):
        alone = attend(q, pools, [(1, slot)], *how)[0]
        for count in (2, 3, 7, 70):
            prompt = [(1, s) for s in range(max(0, slot - count + 1), slot + 1)]
            assert torch.equal(attend(q, pools, prompt, *how)[-1], alone)


@pytest.mark.parametrize("size", [32, 64, 96, 128])
def test_a_model_in_bfloat16_loses_no_more_than_its_states_do(size: int, level: str) -> None:
    for length in (1, 7, 512):
        q, _, _, stored = one_stream(length, size, torch.bfloat16)
        found = ops.attention(q, *stored, size**-0.5, 0)
        wanted = wanted_of(length, size, 0, "straight", torch.bfloat16)
        assert found.dtype == torch.bfloat16
        assert ((found - wanted) ** 2).sum() < 1e-5 * (wanted**2).sum()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_spoils_only_those_who_see_it(
    dtype: torch.dtype, bad: float, level: str
) -> None:
    q, (keys, values, tables) = problem(dtype)
    q, spoilt = q.to(dtype), values.clone()
    spoilt[tables[1, 3], 1, 5, 7] = bad  # slot 53 of stream 1, key head 1
    for first in (40, 52):
        prompt = [(1, slot) for slot in range(first, 60)]
        wanted = attend(q, (keys, values, tables), prompt)
        found = attend(q, (keys, spoilt, tables), prompt)
        assert torch.equal(found[: 53 - first], wanted[: 53 - first])
        sees = found[53 - first :]
        assert torch.equal(sees[:, :3], wanted[53 - first :, :3]) and not sees[:, 3:, 7].isfinite().any()
        others = [i for i in range(32) if i != 7]
        assert torch.equal(sees[..., others], wanted[53 - first :][..., others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 20])
def test_what_a_token_does_not_see_may_be_nan_and_its_blocks_nowhere(
    dtype: torch.dtype, window: int, level: str
) -> None:
    q, (keys, values, tables) = problem(dtype, block_size=32)
    for place in ((0, 5), (1, 261), (2, 639)):
        wanted = attend(q, (keys, values, tables), [place], window)
        stream, slot = place
        first = max(slot - window + 1, 0) if window else 0
        spoilt = only_seen(keys, values, tables, stream, range(first, slot + 1))
        assert torch.equal(attend(q, spoilt, [place], window), wanted) and wanted.isfinite().all()


def test_a_gradient_through_a_cache_is_that_of_plain_attention_whatever_lies_in_empty_slots() -> None:
    q, k, v = (torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    pools = torch.full((1, 2, 1, 8, 16), torch.nan).double(), torch.full((1, 2, 16, 8), torch.nan).double()
    places = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), torch.arange(5)
    ops.store_kv(*pools, k, v, *places, out=pools)
    found = torch.autograd.grad(ops.attention(q, *pools, *places, 8**-0.5, 0).sum(), (q, k, v))
    heads = (t.transpose(0, 1) for t in (q, k, v))
    plain = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    torch.testing.assert_close(found, torch.autograd.grad(plain.sum(), (q, k, v)))


def only_seen(
    keys: Tensor, values: Tensor, tables: Tensor, stream: int, slots: range
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools that are NaN but for some slots of a stream, and tables that name no block but theirs"""
    nan = rows_as(values.dtype, torch.full((values.shape[1], 32), torch.nan))
    rows, block_size = unfold_keys(keys), values.shape[2]
    new_rows, new_values = nan[:, None].expand_as(rows).clone(), nan[:, None].expand_as(values).clone()
    new_tables = torch.full_like(tables, -1)
    entries, at = torch.tensor(slots) // block_size, torch.tensor(slots) % block_size
    blocks = new_tables[stream, entries] = tables[stream, entries]
    new_rows[blocks, :, at], new_values[blocks, :, at] = rows[blocks, :, at], values[blocks, :, at]
    return fold_keys(new_rows), new_values, new_tables


def test_tokens_far_apart_in_a_window_do_not_read_the_blocks_between_them(level: str) -> None:
    q, (keys, values, tables) = problem()
    places = [(0, 5), (0, 250)]
    wanted = attend(q, (keys, values, tables), places, 10)
    tables = tables.clone()
    tables[0, 1:15] = torch.arange(14) * 10**15 - 10**10
    assert torch.equal(attend(q, (keys, values, tables), places, 10), wanted)
    streams, slots = torch.tensor(places).t()
    by_reference = ops.attention.reference(q[streams, slots], keys, values, tables, streams, slots, 0.2, 10)
    torch.testing.assert_close(by_reference, wanted)


def test_places_outside_the_tables_are_refused_and_nothing_is_stored(level: str) -> None:
    q, (keys, values, tables) = problem()
    keys, values = keys.clone(), values.clone()
    before = keys.clone(), values.clone()
    for place in ((0, ROOM), (0, -1), (3, 0), (-1, 0), (0, 2**62)):
        streams, slots = torch.tensor([(0, 0), place]).t().contiguous()
        found = f"token 1 is at slot {place[1]} of stream {place[0]}, .* 3 streams, .* room for 768 slots"
        with pytest.raises(IndexError, match=found):
            ops.attention(q[0, :2], keys, values, tables, streams, slots, 0.2, 0)
        with pytest.raises(IndexError, match=found):
            new = torch.zeros(2, 2, 32)
            ops.store_kv(keys, values, new, new, tables, streams, slots, out=(keys, values))
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [-1, 144, 2**31 - 1])
def test_a_token_that_sees_no_block_is_refused_and_nothing_is_stored(
    block: int, dtype: torch.dtype, level: str
) -> None:
    q, (keys, values, tables) = problem()
    keys, values, tables = keys.clone(), values.clone(), tables.to(dtype, copy=True)
    before = keys.clone()
    tables[2, 3] = block
    places = [(2, 47), (0, 700), (2, 30), (2, 690), (2, 50)]
    streams, slots = torch.tensor(places).t().contiguous()
    where = f"entry 3 of that stream's block table, of 48, is {block}, and the pools have 144 blocks"
    queries = q[0, :5]
    with pytest.raises(IndexError, match=f"token 3 is at slot 690 of stream 2, but {where}"):
        ops.attention(queries, keys, values, tables, streams, slots, 0.2, 0)
    with pytest.raises(IndexError, match=f"token 4 is at slot 50 of stream 2, but {where}"):
        ops.attention(queries, keys, values, tables, streams, slots, 0.2, 30)
    with pytest.raises(IndexError, match=f"token 4 is at slot 50 of stream 2, but {where}"):
        new = torch.zeros(5, 2, 32)
        ops.store_kv(keys, values, new, new, tables, streams, slots, out=(keys, values))
    assert torch.equal(keys, before)


def test_the_reference_refuses_what_the_kernel_refuses() -> None:
    q, (keys, values, tables) = problem()
    for place, block, found in (
        ((0, ROOM), 0, "no slot 768 of stream 0 in block tables of 3 streams, each with room for 768 slots"),
        ((-1, 3), 0, "no slot 3 of stream -1"),
        ((1, -1), 0, "no slot -1 of stream 1"),
        ((2, 690), -1, "slot 48 of stream 2 is in block -1, and the pools have 144 blocks"),
        ((2, 690), 144, "slot 48 of stream 2 is in block 144"),
    ):
        spoilt = tables.clone()
        spoilt[2, 3] = block
        with pytest.raises(IndexError, match=found):
            streams, slots = torch.tensor([place]).t()
            ops.attention.reference(q[0, :1], keys, values, spoilt, streams, slots, 0.2, 0)


def test_a_stored_key_and_value_in_q8_0_have_the_bits_of_a_quantised_row(level: str) -> None:
    k, v = torch.randn(2, 40, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 4, 64)
    keys, values, tables = paged(*torch.zeros(2, 1, 3, 64, 64), block_size=16, dtype=torch.uint8)
    places = torch.zeros(40, dtype=torch.int64), torch.arange(40).flip(0)
    ops.store_kv(keys, values, k, v, tables, *places, out=(keys, values))
    for pool, rows in ((unfold_keys(keys), k), (values, v)):
        stored = pool[tables[0]].transpose(0, 1).flatten(1, 2)[:, places[1]]  # [K, N, bytes]
        wanted = quantize(rows.transpose(0, 1).contiguous(), BlockType.Q8_0)
        assert torch.equal(stored.flatten(0, 1), wanted.blocks)
        assert torch.equal(values_of(stored), wanted.dequantize())


def test_of_two_tokens_at_one_slot_the_later_stays(level: str, keep_threads: None) -> None:
    k = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    for count in (1, 2):
        infinicore.set_num_threads(count)
        keys, values, tables = paged(*torch.zeros(2, 1, 4, 16, 64), block_size=16)
        place = torch.zeros(2, dtype=torch.int64)
        ops.store_kv(keys, values, k, k, tables, place, place, out=(keys, values))
        assert torch.equal(values[0, :, 0], k[1]) and torch.equal(unfold_keys(keys)[0, :, 0], k[1])


def heads_to_store(
    places: list[Place], size: int, dtype: torch.dtype, pool: torch.dtype, is_interleaved: bool
) -> tuple[Any, ...]:
    """Arguments of store_heads: six heads of queries, three of keys; a token of each place"""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(len(places), 12, size, generator=generator)
    rows[0, ::5, 1], rows[0, 11, 2] = torch.tensor([torch.nan, torch.inf, -torch.inf]), torch.inf
    heads = rows.to(dtype).split((6, 3, 3), 1)
    angles = torch.randn(60, size // 2, generator=generator)
    pools = paged(*torch.zeros(2, 5, 3, 64, size), block_size=32, dtype=pool)
    streams, slots = torch.tensor(places).t().contiguous()
    turned = slots % 50, angles.sin().to(dtype), angles.cos().to(dtype), is_interleaved
    return *heads, *turned, *pools, streams, slots


def stored_one_after_the_other(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The queries and the pools, where the parts of store_heads are ops by themselves"""
    q, k, v, positions, sin, cos, is_interleaved, keys, values, *where = args
    turned = positions, sin, cos, is_interleaved
    pools = keys.clone(), values.clone()
    ops.store_kv(*pools, ops.rope(k, *turned), v, *where, out=pools)
    return ops.rope(q, *turned), *pools


STORED = {
    "one": [(2, 5)],
    "streams": [(s, 13 * s + 3) for s in range(5)],
    "prompt": [(1, slot) for slot in range(7, 55)],
    "mixed": [*((0, slot) for slot in range(20, 40)), (3, 0), (4, 63), *((2, slot) for slot in range(9))],
    "again": [(1, 4), (3, 9), (1, 5), (1, 4), (3, 9), (3, 9)],
}


@pytest.mark.parametrize("pool", [*DTYPES[:3], torch.uint8], ids=str)
@pytest.mark.parametrize("places", STORED)
def test_heads_are_rotated_and_stored_with_the_bits_of_their_parts(
    places: str, pool: torch.dtype, level: str, keep_threads: None
) -> None:
    for size in (64,) if pool == torch.uint8 else (10, 64, 256):
        for is_interleaved in (False, True):
            rows = torch.float32 if pool == torch.uint8 else pool
            args = heads_to_store(STORED[places], size, rows, pool, is_interleaved)
            infinicore.set_num_threads(1)
            wanted = stored_one_after_the_other(args)
            for num_threads in (1, 2, 5):
                infinicore.set_num_threads(num_threads)
                again = heads_to_store(STORED[places], size, rows, pool, is_interleaved)
                assert ops.store_heads.pick(*again).name == "native"
                found = ops.store_heads(*again), again[7], again[8]
                assert all(map(same_bits, found, wanted))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_heads_that_have_no_place_or_no_angle_are_refused_before_any_is_stored(level: str) -> None:
    args = heads_to_store(STORED["streams"], 64, torch.float32, torch.float16, False)
    for at, bad, message in (
        (3, 60, r"rope: position 60 \(element 4\) is outside \[0, 60\)"),
        (10, 5, "token 4 is at slot 55 of stream 5, but there are block tables of 5 streams"),
        (11, 64, "token 4 is at slot 64 of stream 4, but there are block tables of 5 streams"),
    ):
        given = list(args)
        given[at] = args[at].clone()
        given[at][4] = bad
        with pytest.raises(IndexError, match=message):
            ops.store_heads(*given)
        assert not args[7].any() and not args[8].any()


def test_heads_that_do_not_fit_each_other_are_not_stored_natively() -> None:
    args = heads_to_store(STORED["streams"], 64, torch.float32, torch.float16, False)
    assert ops.store_heads.pick(*args).name == "native"
    for at, other in (
        (0, args[0].half()),
        (0, args[0][:4]),
        (0, args[0][..., :32]),
        (1, args[1][:, :2]),
        (2, args[2].half()),
        (3, args[3][:4]),
        (3, args[3].repeat(1, 1)),
        (4, args[4][:, :30]),
        (5, args[5].half()),
        (7, args[7][:, :2]),
        (10, args[10][:4]),
    ):
        assert not _native.accepts_store_heads(None, *args[:at], other, *args[at + 1 :])


def refused_pools() -> list[tuple[Tensor, Tensor, Tensor]]:
    _, (keys, values, tables) = problem()
    _, (q8_keys, q8_values, _) = problem(torch.uint8)
    wide = torch.zeros(144, 2, 16, 64)
    return [
        (keys[:-1], values, tables),
        (keys[:, :1], values, tables),
        (keys[..., :-1, :], values, tables),
        (keys[..., :8], values, tables),
        (keys.transpose(-1, -2), values, tables),
        (keys, values[:, :, :-1], tables),
        (keys, values[..., :-1], tables),
        (keys, wide[..., ::2], tables),
        (keys, values.half(), tables),
        (keys.to(torch.int8), values.to(torch.int8), tables),
        (keys[:, :, :0], values[:, :, :0], tables),
        (keys.repeat(1, 1, 3, 1, 1), values.repeat(1, 1, 3, 1), tables),
        (keys.repeat(1, 1, 32, 1, 1), values.repeat(1, 1, 32, 1), tables),
        (q8_keys, values, tables),
        (q8_keys[..., :-1], q8_values, tables),
        (q8_keys, q8_values[..., :-1], tables),
        (q8_keys, q8_values.view(torch.int8), tables),
        (keys, values, tables[0]),
        (keys, values, tables.to(torch.int16)),
        (keys, values, tables.t().contiguous().t()),
        (keys, values, tables.float()),
    ]


@pytest.mark.parametrize("pools", refused_pools(), ids=lambda pools: str([tuple(t.shape) for t in pools]))
def test_kernels_decline_pools_and_tables_they_could_not_stay_within(
    pools: tuple[Tensor, Tensor, Tensor],
) -> None:
    new, place = torch.zeros(1, 2, 32), torch.tensor([0])
    assert ops.attention.pick(new, *pools, place, place, 0.2, 0) is None
    assert not _native.accepts_store_kv(pools[:2], *pools[:2], new, new, pools[2], place, place)


def test_kernels_decline_places_that_are_not_one_for_each_token() -> None:
    q, (keys, values, tables) = problem()
    place, new = torch.tensor([0]), torch.zeros(2, 2, 32)
    for streams, slots in ((place, place), (torch.tensor([0, 0]), place), (torch.zeros(2), torch.zeros(2))):
        assert ops.attention.pick(q[0, :2], keys, values, tables, streams, slots, 0.2, 0) is None
        out = (keys, values)
        assert not _native.accepts_store_kv(out, keys, values, new, new, tables, streams, slots)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8], ids=str)
def test_torch_stores_in_place_what_the_reference_stores_into_copies(dtype: torch.dtype) -> None:
    rows = torch.float64 if dtype == torch.float64 else torch.float32
    keys, values, tables = paged(*torch.randn(2, 2, 3, 96, 32, dtype=rows), block_size=16, dtype=dtype)
    k, v = torch.randn(2, 4, 3, 32, dtype=rows)
    places = tables, torch.tensor([1, 0, 1, 0]), torch.tensor([88, 0, 89, 33])
    wanted = ops.store_kv.reference(keys, values, k, v, *places)
    (kernel,) = (kernel for kernel in ops.store_kv.kernels if kernel.name == "torch")
    assert kernel.run(None, keys, values, k, v, *places) is None
    found = kernel.run((keys, values), keys, values, k, v, *places)
    assert found[0] is keys and found[1] is values
    assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])
