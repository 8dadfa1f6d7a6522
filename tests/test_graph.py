"""A recorded graph computes what its function computes, from what its buffers hold now."""

from __future__ import annotations

import pytest
import torch

from infinicore import nn, ops
from infinicore.graph import Graph, RecordError
from infinicore.nn import functional as F
from infinicore.ops.reference import paged, random_blocks, unfold_keys
from infinicore.quantization import BlockType


def test_a_replay_gives_the_bits_of_a_plain_run_on_new_values(level: str) -> None:
    norm = nn.RMSNorm(64)
    norm.weight.load(torch.randn(64))
    x, residual = torch.randn(3, 64), torch.randn(3, 64)

    def step() -> torch.Tensor:
        normed, total = F.add_rms_norm(x, residual, [64], norm.weight)
        return ops.add(F.swiglu(norm(normed), total).view(3, 2, 32), F.silu(x).view(3, 2, 32))

    graph = Graph.record(step)
    for _ in range(3):
        x.normal_(), residual.normal_()
        assert torch.equal(graph.replay(), step())
    assert len(graph) == 5


def test_a_replay_calls_the_same_products_attention_and_cache_on_new_values(level: str) -> None:
    """What a decode step is made of: dense and packed products, rope, a cache that grows, attention."""
    dense, packed = torch.randn(64, 64), random_blocks(BlockType.Q4_0, 64, 2).pack()
    keys, values, tables = paged(*torch.zeros(2, 1, 4, 320, 16), block_size=64)
    x, stream, position = torch.randn(1, 64), torch.tensor([0]), torch.tensor([260])
    sin, cos = torch.rand(2, 300, 8)

    def step() -> torch.Tensor:
        q = F.rope(F.linear(x, dense).view(1, 4, 16), position, sin, cos)
        k = F.linear(x, packed).view(1, 4, 16)
        ops.store_kv(keys, values, k, q, tables, stream, position, out=(keys, values))
        return ops.attention(q, keys, values, tables, stream, position, 0.25, 0)

    graph = Graph.record(step)
    for new_position in (261, 262, 3):
        x.normal_()
        position.fill_(new_position)
        replayed = graph.replay().clone()
        place = tables[0, new_position // 64], slice(None), new_position % 64
        assert unfold_keys(keys)[place].any() and values[place].any()
        assert torch.equal(replayed, step()) and replayed.any()


def test_what_a_replay_would_leave_out_is_refused() -> None:
    x = torch.randn(3, 4)
    for function in (
        lambda: F.silu(x) + 1,
        lambda: F.silu(x).clone(),
        lambda: F.silu(x.double()),
        lambda: x.mul_(2),
    ):
        with pytest.raises(RecordError):
            Graph.record(function)
    assert torch.equal(ops.silu(x), F.silu(x))  # recording has ended in spite of the error


def test_an_error_in_a_replay_is_raised_and_the_graph_lives_on() -> None:
    table, ids = torch.randn(10, 8), torch.tensor([1, 2])
    graph = Graph.record(lambda: F.silu(F.embedding(ids, table)))
    ids[1] = 10
    with pytest.raises(IndexError, match=r"10.*\[0, 10\)"):
        graph.replay()
    ids[1] = 9
    assert torch.equal(graph.replay(), F.silu(table[[1, 9]]))


def test_a_tensor_that_moved_is_followed_and_one_that_was_resized_is_refused() -> None:
    x = torch.randn(4, 8)
    graph = Graph.record(lambda: F.silu(x))
    x.set_(torch.randn(4, 8))
    assert torch.equal(graph.replay(), F.silu(x))
    x.resize_(2, 8)
    with pytest.raises(ValueError, match="shape"):
        graph.replay()


def test_storing_into_a_copy_of_a_cache_cannot_be_recorded() -> None:
    pools = paged(*torch.zeros(2, 1, 2, 16, 8), block_size=16)
    k, place = torch.randn(1, 2, 8), torch.tensor([0])
    with pytest.raises(ValueError, match="in place"):
        Graph.record(lambda: ops.store_kv(*pools[:2], k, k, pools[2], place, place))
