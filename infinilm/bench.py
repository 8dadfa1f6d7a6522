"""How fast a model runs here: alone and with many requests at once, next to the memory's own speed."""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

import infinicore
from infinilm.batch import Stream
from infinilm.engine.engine import Engine
from infinilm.llm import LLM
from infinilm.load import spread_of
from infinilm.models.llama import LlamaForCausalLM
from infinilm.runner import Pending, Runner
from infinilm.sampling import SamplingParams
from infinilm.startup import load_model
from infinilm.work import Work

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


def check_sizes(sizes: object, **least: int) -> None:
    """Every field is a number of at least 1, or what is said of it."""
    for name, value in vars(sizes).items():
        if value < least.get(name, 1):
            raise ValueError(
                f"{name.replace('_', '-')} must be at least {least.get(name, 1)}, but is {value}"
            )


def check_length(sizes: Workload | Requests, most: int, limit: str) -> None:
    num_tokens = sizes.input_len + sizes.output_len
    if num_tokens > most:
        given = f"input-len {sizes.input_len} and output-len {sizes.output_len}"
        raise ValueError(f"{given} are {num_tokens} tokens, but {limit}")


def random_prompts(vocab_size: int, length: int, count: int, seed: int) -> list[list[int]]:
    chosen = random.Random(seed)
    return [[chosen.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


# ---- latency: streams in lockstep --------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    input_len: int
    output_len: int
    batch_size: int
    rounds: int

    def __post_init__(self) -> None:
        check_sizes(self, output_len=2)


def measure_latency(workload: Workload, model: str | None, **options: str | None) -> dict[str, Measured]:
    """Random prompts in, end-of-text ignored. A first round, which is not counted, warms everything up.

    The model is loaded with the options, which are load_model's.
    """
    start = time.perf_counter()
    llama, _ = load_model(model, **options)  # type: ignore[arg-type]
    load_seconds = time.perf_counter() - start
    most = llama.config.longest  # what lies beyond it could be measured, but not asked for
    check_length(workload, most, f"the model's context is {most}")
    return {
        **measure_rounds(llama, workload),
        "load_seconds": Measured((load_seconds,)),
        "peak_memory_bytes": Measured((peak_memory(llama.device),)),  # before the bandwidth's own buffer
        **measure_limits(llama.device, workload.rounds),
    }


def measure_rounds(model: LlamaForCausalLM, workload: Workload) -> dict[str, Measured]:
    prompts = random_prompts(model.config.vocab_size, workload.input_len, workload.batch_size, seed=1)
    lockstep = Lockstep(model, prompts, workload.output_len)
    rounds = [run_once(lockstep, workload) for _ in range(workload.rounds + 1)][1:]
    num_prompt = workload.batch_size * workload.input_len
    num_decoded = workload.batch_size * (workload.output_len - 1)
    return {
        "prefill_tokens_per_second": Measured(tuple(num_prompt / prefill for prefill, _ in rounds)),
        "decode_tokens_per_second": Measured(tuple(num_decoded / rest for _, rest in rounds)),
    }


class Lockstep:
    """Streams of random tokens that are all drawn one token at each step."""

    def __init__(self, model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        self.model = model
        self.streams = [Stream(prompt, greedy(num_new)) for prompt in prompts]
        self.runner: Runner = model.runner(self.streams, num_new)

    def step(self) -> None:
        due = list(self.streams)
        while due:  # a prompt may take several steps of the model
            drawn = self.model.advanced(self.runner, due)
            due = [stream for stream in due if stream not in drawn]

    def rewind(self, num_tokens: int) -> None:
        """Forget all but the first tokens of each stream."""
        for stream in self.streams:
            del stream.token_ids[num_tokens:]
            stream.num_computed = num_tokens - 1

    def begin(self) -> None:
        """Forget all but the prompts, which are to be read again."""
        for stream in self.streams:
            del stream.token_ids[stream.num_prompt :]
            stream.num_computed = 0


def decode(runner: Runner, streams: Sequence[Stream], count: int) -> None:
    """So many tokens of each. As in the engine a step is launched before the last is read, if it may be."""
    last: Pending | None = None
    for _ in range(count):
        launched = runner.launch([Work(stream, 1) for stream in streams])
        for row, stream in enumerate(streams):
            stream.num_computed += 1
            stream.num_unread, stream.unread_row = stream.num_unread + 1, row
        if last is not None:
            take(last)
        last = launched
        if not launched.may_be_followed:
            take(last)
            last = None
    if last is not None:
        take(last)


def take(pending: Pending) -> None:
    for item, drawn in zip(pending.work, pending.read(), strict=True):
        item.stream.token_ids.append(drawn.token_ids[0])
        item.stream.num_unread -= 1


def run_once(lockstep: Lockstep, workload: Workload) -> tuple[float, float]:
    """Seconds up to the first tokens, and for the rest"""
    lockstep.begin()
    start = time.perf_counter()
    lockstep.step()
    first = time.perf_counter()
    decode(lockstep.runner, lockstep.streams, workload.output_len - 1)
    return first - start, time.perf_counter() - first


# ---- throughput: many requests through the engine ----------------------------------------------------------


@dataclass(frozen=True)
class Requests:
    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int

    def __post_init__(self) -> None:
        check_sizes(self, output_len=2)


@dataclass(frozen=True)
class Answered:
    """Some requests: the seconds that all took, of each up to its first token, and between tokens."""

    seconds: float
    first: list[float]
    gaps: list[float]


def measure_throughput(requests: Requests, model: str | None, **options: Any) -> dict[str, Any]:
    """Random prompts in, end-of-text ignored, at most so many requests in the engine at once."""
    given = {name: value for name, value in options.items() if value is not None}
    llm = LLM(model, **{"max_num_seqs": requests.concurrency} | given)
    warm_up = replace(requests, num_prompts=requests.concurrency, input_len=8, output_len=2)
    answer_all(llm.engine, warm_up, seed=0)
    answered = answer_all(llm.engine, requests, seed=1)
    num_input, num_output = (
        requests.num_prompts * length for length in (requests.input_len, requests.output_len)
    )
    return {
        **vars(requests),
        "elapsed_seconds": answered.seconds,
        "requests_per_second": requests.num_prompts / answered.seconds,
        "total_tokens_per_second": (num_input + num_output) / answered.seconds,
        "output_tokens_per_second": num_output / answered.seconds,
        "time_to_first_token_seconds": spread_of(answered.first),
        "inter_token_latency_seconds": spread_of(answered.gaps),
    }


def answer_all(engine: Engine, requests: Requests, seed: int) -> Answered:
    most = engine.max_length  # it would answer in fewer tokens where there is no room for more
    check_length(requests, most, f"the model and its cache take {most} at most")
    vocab_size = engine.model.config.vocab_size
    waiting = deque(random_prompts(vocab_size, requests.input_len, requests.num_prompts, seed))
    params, times = greedy(requests.output_len), dict[str, list[float]]()
    start = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and len(engine.requests) < requests.concurrency:
            request = engine.make({"prompt_token_ids": waiting.popleft()}, params)
            times[request.request_id] = [time.perf_counter()]
            engine.enqueue(request)
        for request in engine.step():
            if request.error is not None:
                raise request.error
            times[request.request_id].append(time.perf_counter())
    seconds = time.perf_counter() - start
    gaps = [[b - a for a, b in pairwise(moments)] for moments in times.values()]
    return Answered(seconds, [own[0] for own in gaps], [gap for own in gaps for gap in own[1:]])


# ---- the machine -------------------------------------------------------------------------------------------


def measure_limits(device: torch.device, num_rounds: int) -> dict[str, Measured]:
    """What the machine reads, and a CPU multiplies, at the most"""
    bandwidth = [memory_bandwidth(device) for _ in range(num_rounds)]
    products = [product_rate() for _ in range(num_rounds) if device.type == "cpu"]
    return {
        "read_bandwidth_bytes_per_second": Measured(tuple(bandwidth)),
        **({"byte_products_per_second": Measured(tuple(products))} if products else {}),
    }


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second: what a CPU reads, or a GPU reads and writes as it copies"""
    if device.type == "cpu":
        return read_bandwidth()
    source = torch.ones(4 * BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(device)

    return 2 * source.nbytes / timed(copy)


def read_bandwidth() -> float:
    """Bytes a second that the threads of the native core read from memory, by the fastest of a few ways"""
    buffer = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64, device="cpu")
    read = infinicore.ops.native.read_all
    return BANDWIDTH_BYTES / min(timed(partial(read, buffer, ahead)) for ahead in (None, 0, 512, 4096, 8192))


def product_rate() -> float:
    """Products of bytes a second, each added to a sum, that the native core's threads do with all at hand"""
    rounds, multiply = 1 << 16, infinicore.ops.native.count_products
    return multiply(rounds) / timed(partial(multiply, rounds))


def timed(call: Callable[[], object]) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_memory(device: torch.device) -> int:
    """The most bytes that the process had, or that it had on a GPU"""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
