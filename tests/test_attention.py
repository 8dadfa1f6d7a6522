"""Attention over a cache: a token's result depends on its own keys alone, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import infinicore
from infinicore import ops

LENGTH = 700


def problem(dtype: torch.dtype = torch.float32, num_streams: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """(queries of every position of every stream [B, T, H, D], keys, values)"""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(num_streams, LENGTH, 6, 32, generator=generator)
    keys, values = torch.randn(2, num_streams, 2, LENGTH, 32, generator=generator).to(dtype)
    return q, keys, values


def attend(q: Tensor, keys: Tensor, values: Tensor, places: list[tuple[int, int]], window: int = 0) -> Tensor:
    streams, positions = torch.tensor(places).t().contiguous()
    queries = torch.stack([q[stream, position] for stream, position in places])
    return ops.attention(queries, keys, values, streams, positions, 0.2, window)


@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_gets_the_same_bits_alone_in_a_batch_and_in_a_prompt(
    dtype: torch.dtype, window: int, level: str
) -> None:
    q, keys, values = problem(dtype)
    for stream, position in ((0, 0), (1, 255), (2, 256), (0, 699)):
        alone = attend(q, keys, values, [(stream, position)], window)[0]
        batch = [(s, (position + 97 * s) % LENGTH) for s in range(3)] * 2
        batch[4] = (stream, position)
        assert torch.equal(attend(q, keys, values, batch, window)[4], alone)
        prompt = [(stream, p) for p in range(max(0, position - 50), position + 1)]
        assert torch.equal(attend(q, keys, values, prompt, window)[-1], alone)


def test_one_two_and_three_threads_give_the_same_bits(level: str, keep_threads: None) -> None:
    q, keys, values = problem()
    for places in ([(0, 650), (1, 3)], [(2, position) for position in range(LENGTH)]):
        results = []
        for count in (1, 2, 3):
            infinicore.set_num_threads(count)
            results.append(attend(q, keys, values, places))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_places_outside_the_cache_are_refused_and_nothing_is_stored(level: str) -> None:
    q, keys, values = problem()
    before = keys.clone()
    for place in ((0, LENGTH), (0, -1), (3, 0), (-1, 0)):
        streams, positions = torch.tensor([place]).t().contiguous()
        with pytest.raises(IndexError, match="3 streams of 700 positions"):
            ops.attention(q[0, :1], keys, values, streams, positions, 0.2, 0)
        with pytest.raises(IndexError, match="3 streams of 700 positions"):
            new = torch.zeros(1, 2, 32)
            ops.store_kv(keys, values, new, new, streams, positions, out=(keys, values))
    assert torch.equal(keys, before)
