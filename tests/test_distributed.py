"""Communicators and tensor-parallel layers on real processes over loopback, peers that fail among them."""

import copy
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from infinicore.distributed import CommunicationError, LocalCommunicator, TorchCommunicator
from infinicore.nn import functional as F
from infinicore.nn.linear import ColumnParallelLinear, RowParallelLinear

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]
IN, HIDDEN, OUT = 12, 16, 10
TIMEOUT = 2.0
PATIENCE = 240  # seconds for what must happen, on a machine however busy


def results_of(worker, size: int, folder: Path, num_survivors: int) -> list[dict]:
    """What worker(rank, size) returns on the first ranks, which must end by themselves."""
    # Forks of one process that has imported torch: each importing it by itself takes seconds
    multiprocessing.set_forkserver_preload(["torch.distributed", "infinicore.nn", "infinicore.distributed"])
    arguments = (worker, size, folder)
    ranks = mp.start_processes(
        rank_main, arguments, nprocs=size, join=False, start_method="forkserver"
    ).processes
    try:
        for rank in ranks[:num_survivors]:
            rank.join(timeout=PATIENCE)
            assert rank.exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_survivors)]


def rank_main(rank: int, worker, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", meeting, timedelta(seconds=PATIENCE), rank=rank, world_size=size)
    torch.save(worker(rank, size), folder / f"{rank}.pt")
    dist.destroy_process_group()


# Ranks in good health: one start of the processes serves all the facts below


def tensor_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(3, 5, generator=generator) * 10).to(dtype)


def parallel_mlp(rank: int, size: int, communicator) -> dict:
    torch.manual_seed(0)
    up = ColumnParallelLinear(IN, HIDDEN, tp_rank=rank, tp_size=size)
    down = RowParallelLinear(HIDDEN, OUT, tp_rank=rank, tp_size=size, communicator=communicator)
    x, residual = torch.randn(3, IN), torch.randn(3, OUT)
    with torch.inference_mode():
        return {
            "up.weight": up.weight.shape,
            "linear": down(up(x)),
            "gelu": down(F.gelu(up(x), "tanh")),
            "residual": down(up(x), residual),
            "gathered": communicator.all_gather(up(x)),
            "copy": copy.deepcopy(down)(up(x)),
        }


def parallel_gradients(rank: int, size: int, communicator) -> dict:
    """Of the input and the weights of a column-parallel layer before a row-parallel one"""
    torch.manual_seed(0)
    up = ColumnParallelLinear(IN, HIDDEN, tp_rank=rank, tp_size=size)
    down = RowParallelLinear(HIDDEN, OUT, tp_rank=rank, tp_size=size, communicator=communicator)
    x = torch.randn(3, IN, requires_grad=True)
    for layer in (up, down):
        layer.requires_grad_()
    down(F.gelu(up(x))).square().sum().backward()
    grads = {"x": x.grad, "up": up.weight.grad, "down": down.weight.grad, "bias": down.bias.grad}
    up.zero_grad()
    communicator.all_gather(F.gelu(up(x))).square().sum().backward()
    return {**grads, "gathered": up.weight.grad}


def disagreement(communicator, rank: int, size: int) -> dict:
    """What each rank is told of calls that differ, and that the communicator works on afterwards."""
    told = {}
    calls = {
        "shape": lambda: communicator.all_gather(torch.zeros(3 + rank)),
        "dim": lambda: communicator.all_gather(torch.zeros(3, 3), dim=-1 - rank % 2),
        "dtype": lambda: communicator.all_reduce(torch.zeros(3, dtype=DTYPES[rank])),
        "call": lambda: (
            communicator.all_reduce(torch.zeros(3)) if rank else communicator.broadcast(torch.zeros(3))
        ),
    }
    for name, call in calls.items() if size > 1 else ():
        try:
            call()
        except ValueError as error:
            told[name] = str(error)
    return {**told, "after": communicator.all_reduce(torch.ones(1)).item()}


def healthy(rank: int, size: int) -> dict:
    communicator = TorchCommunicator(timeout=PATIENCE)
    strided = torch.arange(12.0).view(3, 4).T
    return {
        "place": (communicator.rank, communicator.size),
        "sums": [communicator.all_reduce(tensor_of(rank, dtype)) for dtype in DTYPES],
        "one row": communicator.all_reduce(tensor_of(rank, torch.float32)[:1].clone()),
        "empty": communicator.all_reduce(torch.zeros(0, 3)),
        "scalar": communicator.all_reduce(torch.tensor(1.0)),
        "strided": communicator.all_reduce(strided.clone(memory_format=torch.preserve_format)),
        "rows": communicator.all_gather(tensor_of(rank, torch.bfloat16), dim=0),
        "columns": communicator.all_gather(tensor_of(rank, torch.bool)),
        "broadcast": communicator.broadcast(tensor_of(rank, torch.float32), src=size - 1),
        "mlp": parallel_mlp(rank, size, communicator),
        "gradients": parallel_gradients(rank, size, communicator),
        "disagreement": disagreement(communicator, rank, size),
    }


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["1 rank", "2 ranks", "4 ranks"])
def ranks(request, tmp_path_factory) -> list[dict]:
    return results_of(healthy, request.param, tmp_path_factory.mktemp("ranks"), request.param)


def test_each_rank_knows_its_place(ranks):
    assert [rank["place"] for rank in ranks] == [(index, len(ranks)) for index in range(len(ranks))]


@pytest.mark.parametrize("index", range(len(DTYPES)), ids=[str(dtype) for dtype in DTYPES])
def test_sum_is_exact_rounded_once_and_equal_on_every_rank(ranks, index):
    dtype = DTYPES[index]
    parts = [tensor_of(rank, dtype) for rank in range(len(ranks))]
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    expected = parts[0].to(wide)
    for part in parts[1:]:
        expected = expected + part
    assert all(torch.equal(rank["sums"][index], expected.to(dtype)) for rank in ranks)


def test_sum_of_an_element_does_not_depend_on_how_many_stand_beside_it(ranks):
    assert torch.equal(ranks[0]["one row"], ranks[0]["sums"][0][:1])


def test_odd_tensors_are_summed_too(ranks):
    for rank in ranks:
        assert rank["empty"].shape == (0, 3) and rank["scalar"].item() == len(ranks)
        assert torch.equal(rank["strided"], len(ranks) * torch.arange(12.0).view(3, 4).T)


def test_gather_joins_in_rank_order_along_the_dimension(ranks):
    rows = torch.cat([tensor_of(rank, torch.bfloat16) for rank in range(len(ranks))], dim=0)
    columns = torch.cat([tensor_of(rank, torch.bool) for rank in range(len(ranks))], dim=1)
    assert all(torch.equal(rank["rows"], rows) and torch.equal(rank["columns"], columns) for rank in ranks)


def test_broadcast_gives_every_rank_the_tensor_of_its_source(ranks):
    assert all(torch.equal(rank["broadcast"], tensor_of(len(ranks) - 1, torch.float32)) for rank in ranks)


@pytest.mark.parametrize("name", ["linear", "gelu", "residual", "copy", "gathered"])
def test_row_after_column_is_the_unsharded_result_on_every_rank(ranks, name):
    whole = parallel_mlp(0, 1, LocalCommunicator())[name]
    for rank in ranks:
        torch.testing.assert_close(rank["mlp"][name], whole, rtol=1e-5, atol=1e-6)
        assert torch.equal(rank["mlp"][name], ranks[0]["mlp"][name])


def test_gradients_are_those_of_the_unsharded_layers_or_a_ranks_part_of_them(ranks):
    whole, found = parallel_gradients(0, 1, LocalCommunicator()), [rank["gradients"] for rank in ranks]
    for rank in found:
        torch.testing.assert_close(rank["bias"], whole["bias"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(rank["x"] for rank in found), whole["x"], rtol=1e-5, atol=1e-5)
    for name, dim in (("up", 0), ("down", 1), ("gathered", 0)):
        joined = torch.cat([rank[name] for rank in found], dim)
        torch.testing.assert_close(joined, whole[name], rtol=1e-5, atol=1e-5)


def test_each_rank_holds_its_share_of_the_weights_only(ranks):
    assert all(rank["mlp"]["up.weight"] == (HIDDEN // len(ranks), IN) for rank in ranks)


def test_ranks_that_call_differently_are_all_told_and_can_go_on(ranks):
    for rank in ranks:
        told = dict(rank["disagreement"])
        assert told.pop("after") == len(ranks)
        if len(ranks) > 1:
            assert "along 0 of torch.float32 (3,); all_gather along 0 of torch.float32 (4,)" in told["shape"]
            assert "all_gather along 1 of torch.float32 (3, 3); all_gather along 0 of" in told["dim"]
            assert "torch.float32 (3,); all_reduce of torch.bfloat16 (3,)" in told["dtype"]
            assert (
                "broadcast from rank 0 of torch.float32 (3,); all_reduce of torch.float32 (3,)"
                in told["call"]
            )


# Ranks that fail


def with_lost_peers(rank: int, size: int) -> dict:
    """Rank 0 meets each of the others in a group of two, in which the other one then fails in its own way."""
    fates = {1: "killed", 2: "absent", 3: "stopped"}
    groups = {peer: dist.new_group([0, peer]) for peer in fates}
    met = [peer for peer in fates if rank in (0, peer)]
    for peer in met:
        TorchCommunicator(groups[peer], PATIENCE).all_reduce(torch.ones(1))
    if rank:
        meet_fate(fates[rank])
    time.sleep(0.5)
    return {fates[peer]: failures_of(TorchCommunicator(groups[peer], TIMEOUT)) for peer in met}


def meet_fate(fate: str) -> None:
    if fate != "absent":
        os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    time.sleep(PATIENCE)


def failures_of(communicator: TorchCommunicator) -> list[tuple[str, float]]:
    return [
        failure_of(lambda: communicator.all_reduce(torch.ones(1000))),
        failure_of(lambda: communicator.all_gather(torch.ones(1))),
        failure_of(lambda: communicator.broadcast(torch.ones(1))),
    ]


def failure_of(collective) -> tuple[str, float]:
    start = time.monotonic()
    try:
        collective()
    except CommunicationError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, list[tuple[str, float]]]:
    return results_of(with_lost_peers, 4, tmp_path_factory.mktemp("lost"), num_survivors=1)[0]


@pytest.mark.parametrize("fate", ["killed", "absent", "stopped"])
def test_lost_peer_ends_in_an_error_by_the_timeout_and_not_by_that_of_the_group(failures, fate):
    message, seconds = failures[fate][0]
    assert message.startswith("all_reduce on rank 0 of 2 failed after") and "timeout 2 s" in message
    assert seconds < PATIENCE / 4


@pytest.mark.parametrize("fate", ["killed", "absent", "stopped"])
def test_after_a_failure_the_next_collectives_fail_at_once_and_say_why(failures, fate):
    for message, seconds in failures[fate][1:]:
        assert "cannot follow a failed collective: all_reduce on rank 0 of 2" in message
        assert seconds < TIMEOUT


# One process


def test_after_an_interrupt_the_next_collectives_fail_as_the_peers_are_elsewhere(group_of_one, monkeypatch):
    communicator = TorchCommunicator()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(communicator, "_allgather", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        communicator.all_reduce(torch.ones(1))
    with pytest.raises(CommunicationError, match="all_reduce on rank 0 of 1 was interrupted; restart"):
        communicator.broadcast(torch.ones(1))


def test_threads_that_share_a_communicator_are_told_and_neither_gets_what_may_be_the_others(
    group_of_one, monkeypatch
):
    communicator, is_in, may_end = TorchCommunicator(), threading.Event(), threading.Event()
    gather = communicator._allgather

    def slow(*args, **options):
        is_in.set()
        may_end.wait(PATIENCE)
        return gather(*args, **options)

    monkeypatch.setattr(communicator, "_allgather", slow)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(communicator.all_reduce, torch.ones(1))
        is_in.wait(PATIENCE)
        with pytest.raises(CommunicationError, match="another thread was in a collective; give each thread"):
            communicator.broadcast(torch.ones(1))
        may_end.set()
        with pytest.raises(CommunicationError, match="broadcast from rank 0 on rank 0 of 1 came while"):
            first.result()
    with pytest.raises(CommunicationError, match="cannot follow a failed collective: broadcast"):
        communicator.all_reduce(torch.ones(1))


def test_communicator_without_a_process_group_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"init_process_group first, or use LocalCommunicator\(\)"):
        TorchCommunicator()


def test_local_communicator_is_one_rank_that_gives_back_what_it_gets():
    communicator, tensor = LocalCommunicator(), torch.ones(2, 3)
    assert (communicator.rank, communicator.size) == (0, 1)
    assert communicator.all_reduce(tensor) is tensor and communicator.broadcast(tensor) is tensor
    gathered = communicator.all_gather(tensor)
    assert torch.equal(gathered, tensor) and gathered.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    "collective, arguments, error",
    [
        ("all_reduce", ([1.0],), TypeError),
        ("all_gather", (torch.ones(2), 1), ValueError),
        ("all_gather", (torch.tensor(1.0),), ValueError),
        ("broadcast", (torch.ones(2), 1), ValueError),
        ("broadcast", (torch.ones(2), -1), ValueError),
        ("all_reduce", (torch.ones(2).to_sparse(),), TypeError),
        ("all_gather", (torch.ones(2).to_sparse(),), TypeError),
        ("all_reduce", (torch.ones(1).expand(2),), ValueError),
        ("all_gather", (torch.ones(2), "0"), TypeError),
        ("all_gather", (torch.ones(2), torch.zeros(2)), TypeError),
        ("broadcast", (torch.ones(1).expand(2),), ValueError),
        ("broadcast", (torch.ones(2), None), TypeError),
    ],
)
def test_wrong_arguments_are_refused(collective, arguments, error):
    with pytest.raises(error, match=collective):
        getattr(LocalCommunicator(), collective)(*arguments)


@pytest.fixture
def group_of_one(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_collectives_may_stand_in_what_torch_compiles(group_of_one):
    communicator = TorchCommunicator()
    compiled = torch.compile(lambda x: communicator.all_reduce(x + 1) * 2, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), 1e-9, 1e6])
def test_timeout_must_be_a_time(group_of_one, timeout):
    with pytest.raises(ValueError, match="timeout must be between"):
        TorchCommunicator(timeout=timeout)


@pytest.mark.parametrize("timeout", [None, "30", [30.0]])
def test_timeout_must_be_a_number(group_of_one, timeout):
    with pytest.raises(TypeError, match="timeout must be a number"):
        TorchCommunicator(timeout=timeout)
