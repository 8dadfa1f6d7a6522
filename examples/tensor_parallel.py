"""Tensor parallelism on two processes: each holds half of both weights, both get the whole result."""

import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch.distributed as dist

import infinicore
from infinicore import Tensor, nn
from infinicore.distributed import Communicator, LocalCommunicator, TorchCommunicator


def feed_forward(communicator: Communicator) -> Tensor:
    """One seed gives one model and one input on every rank: [2, 10, 64] -> [2, 10, 64]"""
    infinicore.manual_seed(0)
    share = {"tp_rank": communicator.rank, "tp_size": communicator.size}
    column = nn.ColumnParallelLinear(64, 256, **share)
    row = nn.RowParallelLinear(256, 64, **share, communicator=communicator)
    x = infinicore.randn(2, 10, 64)
    hidden = column(x)  # [2, 10, 256 / tp_size]: this rank's features
    return row(hidden)  # summed over the ranks


def run_rank(rank: int, num_ranks: int, meeting_point: str) -> list[float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=num_ranks)
    try:
        return feed_forward(TorchCommunicator(timeout=10)).flatten().tolist()
    finally:
        dist.destroy_process_group()


def run(num_ranks: int) -> list[list[float]]:
    """What each rank got."""
    # Forked ranks need not import torch again; on GPUs take "spawn", as CUDA does not survive a fork.
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(num_ranks, get_context("fork")) as pool:
        ranks = range(num_ranks)
        calls = [pool.submit(run_rank, rank, num_ranks, f"{folder}/meeting") for rank in ranks]
        return [call.result() for call in calls]


def main() -> None:
    outputs = run(num_ranks=2)
    whole = feed_forward(LocalCommunicator()).flatten()
    for rank, output in enumerate(outputs):
        error = (infinicore.tensor(output) - whole).abs().max()
        print(f"rank {rank}: {len(output)} values, at most {error:.1e} from the unsharded result")
    print("equal on both ranks:", outputs[0] == outputs[1])


if __name__ == "__main__":
    main()
