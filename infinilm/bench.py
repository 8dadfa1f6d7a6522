"""How fast a model runs here: prefill and decode, as a user gets them, next to the memory's own speed."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import infinicore
from infinicore.graph import Graph
from infinilm.cache import DynamicCache
from infinilm.generation import DecodeStep
from infinilm.llm import load_model
from infinilm.models.llama import LlamaForCausalLM
from infinilm.sampling import SamplingParams

BANDWIDTH_BYTES = 512 << 20  # far beyond any cache


@dataclass(frozen=True)
class Measured:
    """Some runs of one quantity: their median, and half the distance of the quartiles as a share of it."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        if len(self.runs) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.runs, n=4)
        return (high - low) / 2 / self.median


@dataclass(frozen=True)
class Workload:
    prompt_length: int = 512
    output_length: int = 64
    batch_size: int = 1
    num_rounds: int = 5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 2 if name == "output_length" else 1
            if value < least:
                raise ValueError(f"{name.replace('_', '-')} must be at least {least}, but is {value}")


def measure_latency(
    workload: Workload, model: str | None = None, **options: str | None
) -> dict[str, Measured]:
    """Random prompts in, end-of-text ignored. A first round, which is not counted, warms everything up.

    The model is loaded with the options, which are load_model's.
    """
    loads = []

    def load() -> LlamaForCausalLM:
        start = time.perf_counter()
        loaded, _ = load_model(model, **options)  # type: ignore[arg-type]
        loads.append(time.perf_counter() - start)
        return loaded

    llama = load()
    rounds = [run_once(llama, workload, seed) for seed in range(workload.num_rounds + 1)][1:]
    gaps = [run.gap for run in rounds if run.gap is not None]
    memory = peak_memory()  # before the bandwidth's own buffer
    bandwidth = [read_bandwidth() for _ in range(workload.num_rounds)]
    num_prompt = workload.batch_size * workload.prompt_length
    num_decoded = workload.batch_size * (workload.output_length - 1)
    return {
        "prefill_tokens_per_second": Measured(tuple(num_prompt / run.prefill for run in rounds)),
        "decode_tokens_per_second": Measured(tuple(num_decoded / run.decode for run in rounds)),
        **({"python_microseconds_per_step": Measured(tuple(1e6 * gap for gap in gaps))} if gaps else {}),
        "load_seconds": Measured(tuple(loads)),
        "peak_memory_bytes": Measured((memory,)),
        "read_bandwidth_bytes_per_second": Measured(tuple(bandwidth)),
    }


class TimedStep(DecodeStep):
    """A DecodeStep that notes the time between its replays: Python, and the choice of tokens."""

    def __init__(self, model: LlamaForCausalLM, cache: DynamicCache) -> None:
        super().__init__(model, cache)
        self.gaps: list[float] = []
        self.replay_end: float | None = None

    def replay(self, graph: Graph[Tensor]) -> None:
        if self.replay_end is not None:
            self.gaps.append(time.perf_counter() - self.replay_end)
        super().replay(graph)
        self.replay_end = time.perf_counter()


@dataclass(frozen=True)
class Round:
    """Seconds up to the first tokens, for the rest, and between two replays, if steps were replayed."""

    prefill: float
    decode: float
    gap: float | None


def run_once(model: LlamaForCausalLM, workload: Workload, seed: int) -> Round:
    generator = torch.Generator().manual_seed(seed)
    shape = (workload.batch_size, workload.prompt_length)
    token_ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(model.device)
    params = SamplingParams(max_tokens=workload.output_length, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    cache = DynamicCache()
    step = TimedStep(model, cache)
    steps = model.steps(token_ids, params, cache, step=step)
    next(steps)
    first = time.perf_counter()
    for _ in steps:
        pass
    decode = time.perf_counter() - first
    return Round(first - start, decode, statistics.median(step.gaps) if step.gaps else None)


def read_bandwidth() -> float:
    """Bytes a second that the threads of the native core read from memory, by the fastest of a few ways"""
    buffer, read = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64), infinicore.ops.native.read_all
    return BANDWIDTH_BYTES / min(timed(partial(read, buffer, ahead)) for ahead in (0, 512, 4096, 8192))


def timed(call: Callable[[], object]) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
