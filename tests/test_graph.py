"""A recorded graph computes what its function computes, from what its buffers hold now."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from warm import RunPython

from infinicore import _native, nn, ops
from infinicore.graph import Arena, Graph, RecordError, results_in
from infinicore.nn import functional as F
from infinicore.nn.fused import gated_linear
from infinicore.ops.attention_reference import paged, unfold_keys
from infinicore.ops.samples import random_blocks
from infinicore.quantization import BlockType


def test_a_replay_gives_the_bits_of_a_plain_run_on_new_values(level: str) -> None:
    norm = nn.RMSNorm(64)
    norm.weight.load(torch.randn(64))
    x, residual = torch.randn(3, 64), torch.randn(3, 64)

    def step() -> Tensor:
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

    def step() -> Tensor:
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


def test_a_replay_calls_what_gemma_and_granite_add_on_new_values(level: str) -> None:
    gate, up = random_blocks(BlockType.Q4_0, 64, 2).pack(), random_blocks(BlockType.Q8_0, 64, 2).pack()
    keys, values, tables = paged(*torch.randn(2, 1, 4, 320, 16), block_size=64)
    x, sinks, stream, position = torch.randn(1, 64), torch.randn(4), torch.tensor([0]), torch.tensor([260])

    def step() -> Tensor:
        q = ops.scale(x, 8.0).view(1, 4, 16)
        y = ops.attention(q, keys, values, tables, stream, position, 0.25, 100, 2.0, sinks).view(1, 64)
        y = ops.add_scaled(x, gated_linear(y, gate, up, activation="gelu_tanh"), 0.22)
        return ops.softcap(F.geglu(y, x), 3.0)

    graph = Graph.record(step)
    for new_position in (261, 262, 3):
        x.normal_(), sinks.normal_()
        position.fill_(new_position)
        assert torch.equal(graph.replay().clone(), step())
    assert len(graph) == 6


def test_what_a_replay_would_leave_out_is_refused() -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    for function in (
        lambda: F.silu(x) + 1,
        lambda: F.silu(x).clone(),
        lambda: F.silu(x.double()),
        lambda: x.mul_(2),
        lambda: torch.add(x, 1, out=x),
        lambda: torch.nn.functional.relu(x, inplace=True),
    ):
        with pytest.raises(RecordError):
            Graph.record(function)
    assert torch.equal(ops.silu(x), F.silu(x))  # recording has ended in spite of the error
    assert torch.equal(x, before)  # what is refused is not done either


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


def test_a_tensor_that_moved_is_followed_wherever_it_was_given() -> None:
    x, y = torch.randn(2, 4, 8).unbind()
    graph = Graph.record(lambda: (F.silu(x), F.swiglu(y, x), F.swiglu(x, x)))
    x.set_(torch.randn(4, 8))
    assert all(map(torch.equal, graph.replay(), (F.silu(x), F.swiglu(y, x), F.swiglu(x, x))))


def test_storing_into_a_copy_of_a_cache_cannot_be_recorded() -> None:
    pools = paged(*torch.zeros(2, 1, 2, 16, 8), block_size=16)
    k, place = torch.randn(1, 2, 8), torch.tensor([0])
    with pytest.raises(ValueError, match="in place"):
        Graph.record(lambda: ops.store_kv(*pools[:2], k, k, pools[2], place, place))


ROUNDING = 1 << 12  # tensors begin at a line of the cache


def layers(x: Tensor, num_layers: int) -> Callable[[], Tensor]:
    """A function of ops of the size of x, six of whose tensors live at once"""
    weight = torch.randn(x.shape[-1])

    def layer(x: Tensor) -> Tensor:
        normed, total = ops.add_rms_norm(x, x, weight, 1e-5)
        gate, up = ops.silu(normed), ops.gelu(total, "tanh")
        return ops.swiglu(gate, up)

    def run() -> Tensor:
        y = x
        for _ in range(num_layers):
            y = layer(y)
        return y

    return run


def test_a_recording_takes_the_memory_of_what_lives_at_once() -> None:
    x, arena = torch.randn(64, 4096), Arena()
    run = layers(x, 30)
    graph = Graph.record(run, arena)
    num_bytes = x.nbytes
    assert 5 * num_bytes <= arena.num_bytes <= 6 * num_bytes + ROUNDING  # 150 tensors are made
    for _ in range(2):
        x.normal_()
        assert torch.equal(graph.replay(), run())


def test_ops_that_are_not_recorded_take_the_memory_of_what_lives_at_once_from_an_arena() -> None:
    x, arena = torch.randn(64, 4096), Arena()
    run = layers(x, 30)
    with results_in(arena):
        found = run()
    assert 5 * x.nbytes <= arena.num_bytes <= 6 * x.nbytes + ROUNDING
    assert torch.equal(found, run())


def test_a_result_in_an_arena_stays_as_it_is_while_others_are_made() -> None:
    x, arena = torch.randn(64, 4096), Arena()
    with results_in(arena):
        held = ops.silu(x)
    wanted = held.clone()
    with results_in(arena):
        layers(torch.randn(64, 4096), 3)()
    assert torch.equal(held, wanted)


def test_recordings_that_share_an_arena_take_the_memory_of_the_largest() -> None:
    arena, inputs = Arena(), [torch.randn(num_rows, 4096) for num_rows in (64, 32, 16, 1)]
    runs = [layers(x, 5) for x in inputs]
    graphs = [Graph.record(run, arena) for run in runs]
    results = sum(x.nbytes for x in inputs)
    assert arena.num_bytes <= 6 * inputs[0].nbytes + results + ROUNDING
    for _ in range(2):
        for x, run, graph in zip(inputs, runs, graphs, strict=True):
            x.normal_()
            assert torch.equal(graph.replay(), run())


def views_by_split(made: Tensor) -> tuple[Tensor, ...]:
    return made.split(64, -1)


def views_by_slices(made: Tensor) -> tuple[Tensor, ...]:
    return made[:, 3:67], made[:, 64:]


def views_of_views(made: Tensor) -> tuple[Tensor, ...]:
    half = made.view(4, 2, 64).transpose(0, 1)[1]
    return half, made.unflatten(-1, (2, 64))[:, 0]


@pytest.mark.parametrize("views", [views_by_split, views_by_slices, views_of_views])
def test_a_view_keeps_its_memory_when_the_tensor_it_was_made_of_is_gone(
    views: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    x, other = torch.randn(4, 128), torch.randn(4, 128)

    def step() -> Tensor:
        first, second = views(ops.silu(x))
        for _ in range(5):  # into whatever memory is free
            ops.gelu(other, "none")
        return ops.add(first, second)

    graph = Graph.record(step)
    assert torch.equal(graph.result, step())
    for _ in range(2):
        x.normal_()
        assert torch.equal(graph.replay(), step())


def test_memory_goes_to_the_next_tensor_when_the_last_view_dies() -> None:
    x = torch.randn(4, 128)
    places = []

    def step() -> Tensor:
        made = ops.silu(x)
        view = made[:, 3:]
        places.append(made.data_ptr())
        del made
        kept = ops.silu(x)
        del view
        places.extend((kept.data_ptr(), ops.silu(x).data_ptr()))
        return kept

    Graph.record(step)
    assert places[1] != places[0] == places[2]


def test_empty_tensors_come_from_the_arena_and_are_written_by_ops() -> None:
    x, arena = torch.randn(64, 4096), Arena()

    def step() -> Tensor:
        y = x
        for make in (torch.empty_like, lambda t: t.new_empty(t.shape), lambda t: torch.empty(t.shape)) * 4:
            y = ops.silu(y, out=make(y))
        assert torch.empty_like(y.t()).stride() == (1, 4096)
        assert torch.empty(3, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.empty(0, 4).shape == (0, 4)
        return y

    graph = Graph.record(step, arena)
    assert arena.num_bytes <= 3 * x.nbytes + ROUNDING
    x.normal_()
    assert torch.equal(graph.replay(), step())


def test_ops_that_write_to_tensors_from_outside_keep_them_and_follow_them() -> None:
    x, out = torch.randn(4, 8), torch.empty(4, 8)
    graph = Graph.record(lambda: ops.silu(ops.silu(x), out=out))
    x.normal_()
    out.set_(torch.zeros(4, 8))
    assert graph.replay() is out and torch.equal(out, ops.silu(ops.silu(x)))
    out.resize_(2, 8)
    with pytest.raises(ValueError, match="shape"):
        graph.replay()


def test_memory_outlives_the_arena_and_a_result_its_graph() -> None:
    x = torch.randn(64, 4096)
    graph = Graph.record(layers(x, 2), Arena())
    gc.collect()
    result = graph.replay()
    values = result.clone()
    del graph
    gc.collect()
    Graph.record(layers(x, 3))
    assert torch.equal(result, values)


def test_what_another_recording_made_is_an_input_like_any_other() -> None:
    x, arena = torch.randn(4, 8), Arena()
    first = [Graph.record(lambda: ops.silu(x), arena)]
    second = Graph.record(lambda: ops.gelu(first[0].result, "none"), Arena())
    x.normal_()
    first[0].replay()
    wanted = ops.gelu(ops.silu(x), "none")
    assert torch.equal(second.replay(), wanted)
    first.clear()  # the second graph keeps what it reads
    gc.collect()
    assert torch.equal(second.replay(), wanted)


def test_results_of_graphs_that_share_an_arena_take_the_memory_of_the_largest() -> None:
    rows, arena = [torch.randn(n, 4096) for n in range(64, 0, -1)], Arena()
    graphs = [Graph.record(lambda x=x: ops.silu(x), arena) for x in rows]
    assert arena.num_bytes <= rows[0].nbytes + ROUNDING
    for graph, x in zip(graphs, rows, strict=True):
        assert torch.equal(graph.replay(), ops.silu(x))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_recording_in_the_midst_of_another_leaves_it_alone(is_shared: bool) -> None:
    x, y, arena = torch.randn(4, 8), torch.randn(4, 8), Arena()
    inner: list[Graph[Tensor]] = []

    def outer() -> Tensor:
        before = ops.silu(x)
        inner.append(Graph.record(lambda: ops.silu(ops.gelu(y, "none")), arena if is_shared else None))
        with pytest.raises(RecordError):
            Graph.record(lambda: ops.silu(y) + 1, arena if is_shared else None)
        return ops.add(before, ops.silu(x))

    graph = Graph.record(outer, arena)
    assert len(graph) == 3 and len(inner[0]) == 2
    assert torch.equal(graph.result, 2 * ops.silu(x))
    x.normal_(), y.normal_()
    assert torch.equal(graph.replay(), 2 * ops.silu(x))
    assert torch.equal(inner[0].replay(), ops.silu(ops.gelu(y, "none")))


def test_threads_record_at_once_and_get_the_bits_they_get_alone() -> None:
    def task(thread: int) -> bool:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(thread))
        run = layers(x, 10)
        wanted = run()
        for _ in range(5):
            graph = Graph.record(run)
            if not torch.equal(graph.result, wanted) or not torch.equal(graph.replay(), wanted):
                return False
        return len(graph) == 40

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(task, range(4)))


def test_an_arena_serves_one_thread_at_a_time() -> None:
    arena, x = Arena(), torch.randn(64, 1024)
    graphs = [Graph.record(layers(x, 5), arena) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            list(pool.map(Graph.replay, graphs))  # each waits for its turn: what it writes is its own

        def step() -> None:
            with pytest.raises(RecordError, match="in use by another thread"):
                pool.submit(Graph.record, lambda: ops.silu(x), arena).result()

        Graph.record(step, arena)
        pool.submit(Graph.record, lambda: ops.silu(x), arena).result()


def test_jobs_are_done_behind_their_caller_in_their_order() -> None:
    """Each step reads what the one before has found: the tokens it drew, of which nobody here knows yet."""
    table = torch.randn(10, 8)
    given, read, found = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), []
    index = torch.tensor([0, 7])
    graph = Graph.record(lambda: F.silu(F.embedding(read, table)))
    queue, drawn, told = _native.Queue(), torch.tensor([4, 3]), torch.zeros(3, 2, 8)
    for step, numbers in enumerate([[0, 9], [0, 8], [0, 7]]):
        given[step] = torch.tensor(numbers)
        job = _native.Job()
        job.copy(read, given[step])
        job.take(read, drawn, index)  # the first number is the latest token, the second stays
        graph.add_to(job)
        job.copy(told[step], graph.result)
        job.copy(drawn, given[step].flip(0).contiguous())
        found.append(queue.begin(job))
    queue.wait(found[-1])
    queue.wait(found[0])  # known already
    assert torch.equal(told, F.silu(table[torch.tensor([[4, 9], [9, 8], [8, 7]])]))


def test_a_token_that_is_none_is_taken_as_the_first_and_a_place_beyond_the_table_changes_nothing() -> None:
    to, table = torch.tensor([5, 6, 7, 8]), torch.tensor([-1, 3])
    job, queue = _native.Job(), _native.Queue()
    job.take(to, table, torch.tensor([0, 1, 2, -1]))
    queue.begin(job)
    queue.settle()
    assert to.tolist() == [0, 3, 7, 8]


def test_who_waits_for_a_job_hears_what_was_wrong_in_it_and_nobody_else_does() -> None:
    table, ids = torch.randn(10, 8), torch.tensor([1, 2])
    graph, queue, job = Graph.record(lambda: F.embedding(ids, table)), _native.Queue(), _native.Job()
    graph.add_to(job)
    ids[1] = 10
    number = queue.begin(job)
    with pytest.raises(IndexError, match=r"10.*\[0, 10\)"):
        queue.wait(number)
    queue.begin(job)
    queue.settle()
    ids[1] = 9
    queue.wait(queue.begin(job))
    assert torch.equal(graph.result, table[[1, 9]])
    with pytest.raises(ValueError, match="no job of this number"):
        queue.wait(4)


def test_a_tensor_that_moves_is_followed_when_no_job_reads_it_any_more() -> None:
    x = torch.randn(256, 1024)
    before, after = x.detach(), torch.randn(256, 1024)  # which keep their memory
    graph, queue, told, numbers = (
        Graph.record(lambda: F.silu(x)),
        _native.Queue(),
        torch.empty(2, *x.shape),
        [],
    )
    for place in told:
        job = _native.Job()
        graph.add_to(job)
        job.copy(place, graph.result)
        numbers.append(queue.begin(job))  # the second one waits for the first
        x.set_(after)
    queue.wait(numbers[1])
    assert torch.equal(told, F.silu(torch.stack([before, after])))


def test_a_job_takes_contiguous_tensors_of_one_kind() -> None:
    job, numbers = _native.Job(), torch.zeros(4, 4, dtype=torch.int64)
    for to, source in ((numbers, numbers.float()), (numbers, numbers[0]), (numbers.T, numbers)):
        with pytest.raises(ValueError):
            job.copy(to, source)
    with pytest.raises(ValueError, match="int64"):
        job.take(numbers[0], numbers[1], numbers[2].int())
    with pytest.raises(TypeError):
        job.copy(numbers, [1, 2])  # type: ignore[arg-type]


FORKS = """
import os, torch
from infinicore import _native, ops
from infinicore.graph import Graph

def wait_for_one():
    queue.wait(queue.begin(job))
    assert torch.equal(graph.result, ops.silu(x))

x = torch.randn(4, 8)
graph, queue, job = Graph.record(lambda: ops.silu(x)), _native.Queue(), _native.Job()
graph.add_to(job)
wait_for_one()
under_way = queue.begin(job)
child = os.fork()
queue.wait(under_way)  # a child has nobody who would do it, and does not wait
x.normal_()
wait_for_one()
if child == 0:
    del queue
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for _ in range(1000):
    queue.begin(job)  # under way when the process ends
print("done")
"""


def test_a_fork_has_a_queue_of_its_own_and_a_process_ends_though_jobs_are_under_way(
    run_python: RunPython,
) -> None:
    result = run_python(FORKS)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_an_embedding_that_could_learn_is_recorded_with_its_padding_row() -> None:
    table, ids = nn.Embedding(5, 8, padding_idx=1).requires_grad_(), torch.tensor([1, 2])
    graph = Graph.record(lambda: table(ids))
    ids.fill_(4)
    assert torch.equal(graph.replay(), table.weight.detach()[ids])


def test_a_replay_within_a_recording_is_refused() -> None:
    x = torch.randn(4, 8)
    graph = Graph.record(lambda: ops.silu(x))
    with pytest.raises(RecordError, match="replay within a recording"):
        Graph.record(graph.replay)


def test_an_op_after_a_recording_makes_memory_of_its_own() -> None:
    x, arena = torch.randn(64, 4096), Arena()
    graph = Graph.record(lambda: ops.silu(x), arena)
    num_bytes = arena.num_bytes
    plain = [ops.silu(x) for _ in range(5)]
    x.normal_()
    graph.replay()
    assert arena.num_bytes == num_bytes and torch.equal(plain[0], plain[-1])
