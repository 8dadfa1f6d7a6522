"""A model on two processes, its tensors split or its layers: both have half of it, both get all tokens."""

import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.distributed as dist

from infinicore.distributed import TorchCommunicator
from infinilm.models.llama import LlamaConfig, LlamaForCausalLM
from infinilm.models.parallel import split_layers, split_tensors

PROMPT = [[1, 2, 3]]


def load() -> LlamaForCausalLM:
    """In earnest LlamaForCausalLM.from_pretrained(path); here it is small, and random by one seed."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    ))  # fmt: skip


def run_rank(split: Callable[..., LlamaForCausalLM], rank: int, meeting_point: str) -> tuple[int, list[int]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    try:
        model = split(load(), TorchCommunicator(timeout=10))
        held = sum(parameter.numel() for parameter in model.model.layers.parameters())
        return held, model.generate(PROMPT, max_new_tokens=8)[0].tolist()
    finally:
        dist.destroy_process_group()


def run(split: Callable[..., LlamaForCausalLM]) -> list[tuple[int, list[int]]]:
    """What each rank holds of the layers, and what it generated."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("fork")) as pool:
        calls = [pool.submit(run_rank, split, rank, f"{folder}/meeting") for rank in range(2)]
        return [call.result() for call in calls]


def main() -> None:
    split_by = {"tensors": run(split_tensors), "layers": run(split_layers)}  # forks come before threads
    whole = load()
    total = sum(parameter.numel() for parameter in whole.model.layers.parameters())
    tokens = whole.generate(PROMPT, max_new_tokens=8)[0].tolist()
    for how, ranks in split_by.items():
        for rank, (held, found) in enumerate(ranks):
            same = "the whole model's" if found == tokens else "other"
            print(f"{how} split, rank {rank}: {held / total:.0%} of the layers' weights, {same} tokens")


if __name__ == "__main__":
    main()
