"""infinilm, llama.cpp and transformers on the same GGUF files, in turn: `python -m benchmarks.side_by_side`.

Rounds alternate, so that all contenders meet the same machine; a first one is not counted. A ratio in
brackets says how many times as fast infinilm is; `infinilm int8` is `--activations int8`. Of the built-in
model, whose weights are real, the logits of every position of a text are compared with the exact model's.
llama-cpp-python and transformers are optional: what is missing, or would take minutes, is left out. Results
are printed, and written to this CPU's folder in benchmarks/results/ as JSON, Markdown and a chart.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import infinicore
from benchmarks import accuracy, charts, report
from benchmarks.contenders import CONTENDERS, Task, is_installed
from benchmarks.machine import arguments, folder, machine, write
from benchmarks.report import ModelResult
from benchmarks.timing import REST, rounds_within
from benchmarks.worker import Worker, WorkerError
from infinilm.bench import Measured, read_bandwidth
from infinilm.checkpoint import open_checkpoint
from infinilm.config import LlamaConfig
from infinilm.hub import resolve
from infinilm.models.mixture import MixtureConfig
from infinilm.models.registry import read_config
from infinilm.models.stored import Stored
from infinilm.models.weights import stored_weights

BUILT_IN = "135M Q4_1"
PARTIAL = "partial"  # results of some models, or of a run that is under way
NUM_DECODED = 32
SHORT_PROMPT = 16
MIN_ROUNDS = 2
ROUND_BUDGET = 30.0  # seconds after which a task has no further rounds
PATIENCE = 120.0  # seconds for one prompt: llama.cpp needs many more for bfloat16 where the CPU has none
WARM_UP_PROMPT = 32

Plan = dict[Task, tuple[str, ...]]  # who is asked each task
Told = TypeVar("Told")


def prefill(length: int) -> Task:
    return Task(f"prefill {length}", length)


def decode(context: int = 0, num_streams: int = 1) -> Task:
    """The last tokens of a context, so that none lies beyond what a model was trained for."""
    where = f", context {context}" if context else ""
    streams = f", {num_streams} streams" if num_streams > 1 else ""
    prompt = max(SHORT_PROMPT, context - NUM_DECODED - 1)
    return Task(f"decode{where}{streams}", prompt, num_streams, NUM_DECODED)


# Memory is read after the first task of each. Where transformers is not named it would take minutes, and a
# dense model has no int8 activations.
PAIR = ("infinilm", "llama.cpp")
FAST = ("infinilm", "infinilm int8", "llama.cpp")
ALL = (*FAST, "transformers")
MODES = ("infinilm", "infinilm int16", "infinilm int8", "llama.cpp")
EVERY = (*MODES, "transformers")
STREAMS: Plan = {decode(0, 8): FAST, decode(0, 16): FAST}
PLANS: dict[str, Plan] = {
    BUILT_IN: {
        prefill(512): EVERY,
        decode(): EVERY,
        decode(0, 8): ALL,
        decode(0, 16): FAST,
        prefill(128): ALL,
        prefill(2048): ALL,
        decode(2048): ALL,
        decode(8192): FAST,
    },
    "1B Q4_0": {prefill(512): ALL, decode(): ALL, **STREAMS},
    "1B Q4_K_M": {prefill(512): FAST, decode(): FAST, **STREAMS},
    "1B Q8_0": {prefill(512): ALL, decode(): ALL},
    "1B BF16": {prefill(512): PAIR, decode(): PAIR},
    "4B-A0.5B Q4_0": {prefill(512): PAIR, decode(): PAIR, decode(0, 8): PAIR},
}
QUICK: dict[str, Plan] = {
    BUILT_IN: {prefill(512): MODES, decode(): MODES},
    "1B Q4_0": {prefill(512): FAST, decode(): FAST, decode(0, 8): FAST},
}


@dataclass(frozen=True)
class Effort:
    """How many rounds, with how many threads, and the tokens whose logits are compared"""

    num_rounds: int
    num_threads: int
    num_compared: int = accuracy.NUM_TOKENS


def path_of(model: str) -> Path:
    """A file as it is; a model of the plans is found, or made."""
    if model == BUILT_IN:
        return resolve(None)
    if model not in PLANS:
        return Path(model)
    from benchmarks.random_model import SIZES, cached_model

    size, type_name = model.split()
    return cached_model(type_name, SIZES[size])


# ---- one model ----


def run_model(name: str, path: Path, plan: Plan, effort: Effort) -> tuple[ModelResult, dict[str, str]]:
    """What was measured, and what the contenders say of themselves."""
    asked = {contender for names in plan.values() for contender in names}
    workers = start_workers([name for name in CONTENDERS if name in asked], path, effort.num_threads)
    result = new_result(name, path, workers)
    print(f"\n{name}, {effort.num_threads} threads, tokens a second", flush=True)
    for task, names in plan.items():
        measure(result, task, {name: workers[name] for name in names if name in workers}, effort.num_rounds)
        print(report.line(result, task.name), flush=True)
        if not result.peak_bytes:
            result.peak_bytes = {name: worker.peak_memory() for name, worker in workers.items()}
            result.imported_bytes = {name: worker.imported_memory() for name, worker in workers.items()}
    if name == BUILT_IN:
        compare(result, path, workers, effort)
    for worker in workers.values():
        worker.close()
    print(report.resources(result), flush=True)
    return result, {name: worker.note for name, worker in workers.items()}


def start_workers(names: Sequence[str], path: Path, num_threads: int) -> dict[str, Worker]:
    workers = {}
    for name in filter(is_installed, names):
        try:
            workers[name] = Worker(name, str(path), num_threads)
        except WorkerError as error:
            leave_out(name, error)
    return workers


def leave_out(name: str, error: WorkerError) -> None:
    """A peer may fail, and the others are still worth measuring."""
    if name == report.OURS:
        raise error
    print(f"{error}; it is left out", flush=True)


def new_result(name: str, path: Path, workers: dict[str, Worker]) -> ModelResult:
    with open_checkpoint(path) as checkpoint:
        config = read_config(checkpoint)
        weight_bytes = bytes_read(stored_weights(checkpoint, config), config)
    sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    return ModelResult(
        name,
        file_bytes=path.stat().st_size,
        weight_bytes=weight_bytes,
        cache_bytes=512 * 2 * 4 * math.prod(sizes),  # of 512 tokens, keys and values in float32
        load_seconds={name: worker.load_seconds for name, worker in workers.items()},
        imported_bytes={name: worker.imported_memory() for name, worker in workers.items()},
    )


def bytes_read(stored: Stored, config: LlamaConfig) -> int:
    """By one token, which goes through some of the experts where there are such"""
    share = config.num_experts_per_tok / config.num_experts if isinstance(config, MixtureConfig) else 1.0
    parts = {name: weight.num_bytes for name, weight in stored.items()}
    return int(sum(size * (share if ".experts." in name else 1.0) for name, size in parts.items()))


def measure(result: ModelResult, task: Task, workers: dict[str, Worker], num_rounds: int) -> None:
    """Also of the memory's read speed, in the same rounds."""
    found, bandwidth = [], []
    for rates in rounds(workers, task, num_rounds):
        bandwidth.append(read_bandwidth())
        found.append(rates)
    result.rates[task.name] = by_contender(found)
    result.bandwidth[task.name] = Measured(tuple(bandwidth))


def rounds(workers: dict[str, Worker], task: Task, num_rounds: int) -> Iterator[dict[str, float]]:
    """Tokens a second of each, in turn; whoever fails is out of `workers`."""
    warm_up(workers, task)
    for _ in rounds_within(num_rounds, MIN_ROUNDS, ROUND_BUDGET):
        yield run_round(workers, task)


def by_contender(found: Sequence[dict[str, float]]) -> dict[str, Measured]:
    """Of those that took part to the end"""
    return {name: Measured(tuple(rates[name] for rates in found)) for name in found[-1]}


def warm_up(workers: dict[str, Worker], task: Task) -> None:
    """A round that is not counted; a peer that would take minutes for a prompt is left out of the task."""
    if not task.is_prefill:
        run_round(workers, task)
        return
    for key, rate in run_round(workers, replace(task, prompt=WARM_UP_PROMPT)).items():
        name, expected = workers[key].name, task.prompt / rate
        if expected > PATIENCE and name != report.OURS:
            print(f"{name} is left out of {task.name}: it would take {expected:.0f} s", flush=True)
            del workers[key]


def run_round(workers: dict[str, Worker], task: Task) -> dict[str, float]:
    """Tokens a second of each"""
    return in_turn(workers, lambda worker: task.num_counted / worker.seconds(task))


def in_turn(workers: dict[str, Worker], ask: Callable[[Worker], Told]) -> dict[str, Told]:
    """What each tells; one that fails takes no further part in the task."""
    told = {}
    for key, worker in list(workers.items()):
        time.sleep(REST)
        try:
            told[key] = ask(worker)
        except WorkerError as error:
            leave_out(worker.name, error)
            del workers[key]
    return told


def compare(result: ModelResult, path: Path, workers: dict[str, Worker], effort: Effort) -> None:
    """Each one's logits with the exact model's"""
    token_ids = accuracy.text_ids(path)[: effort.num_compared]
    wanted = accuracy.exact_logits(path, token_ids, effort.num_threads)
    result.accuracy = in_turn(
        dict(workers), lambda worker: accuracy.accuracy(wanted, accuracy.logits_of(worker, token_ids))
    )
    for row in report.accuracy_rows(result, list(workers)):
        told = "  ".join(f"{name} {cell}" for name, cell in zip(workers, row[1:], strict=True))
        print(f"{row[0]:22}  {told}", flush=True)


# ---- the command, as a user types it ----

GENERATE = "from infinilm.cli import main; main(['generate', 'Why is the sky blue?', '--max-tokens', '1'])"
IMPORT = "import torch; print(torch)"


def first_token_seconds(effort: Effort) -> float:
    """From `infinilm generate` to its first letter, less what `import torch` takes."""
    pairs = [
        [seconds_to_output(code, effort.num_threads) for code in (GENERATE, IMPORT)]
        for _ in range(effort.num_rounds + 1)
    ][1:]
    generate, torch = (Measured(runs).median for runs in zip(*pairs, strict=True))
    print(f"\nfirst token after {generate:.2f} s, of which `import torch` {torch:.2f} s", flush=True)
    return generate - torch


def seconds_to_output(code: str, num_threads: int) -> float:
    environment = os.environ | {"INFINICORE_NUM_THREADS": str(num_threads)}
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    first = process.stdout.read(1) if process.stdout else b""
    seconds = time.perf_counter() - start
    process.communicate()  # whoever prints to a reader that has left fails
    if not first:
        raise RuntimeError(f"{code!r} printed nothing and ended with code {process.returncode}")
    return seconds


# ---- the run ----


def run_all(plans: dict[str, Plan], effort: Effort, stem: str) -> None:
    facts, models = machine(effort.num_threads), []
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    for name in EVERY:
        if not is_installed(name):
            print(f"{name} is left out: `make bench` or `pip install '.[bench]'` brings it")
    first_token, has_amx = first_token_seconds(effort), infinicore._native.isa() == "amx"
    checked: list[report.Check] = []
    for name, plan in plans.items():
        result, notes = run_model(name, path_of(name), plan, effort)
        models.append(result)
        facts |= notes
        checked = list(report.checks(models, first_token, has_amx))
        write_results(models, checked, facts, folder(effort.num_threads) / PARTIAL)
    print("", *checked, sep="\n")
    write_results(models, checked, facts, folder(effort.num_threads) / stem)


def write_results(
    models: list[ModelResult], checked: list[report.Check], facts: dict[str, str], stem: Path
) -> None:
    content = {
        "machine": facts,
        "models": [asdict(model) for model in models],
        "targets": [asdict(check) for check in checked],
    }
    write(stem, content, report.markdown(models, checked, facts))
    charts.draw_rates(models, facts["CPU"], stem.with_suffix(".png"))


def main() -> None:
    parser = arguments(__doc__)
    known = ", ".join(map(repr, PLANS))
    parser.add_argument("--model", action="append", help=f"a GGUF file or one of {known}; again for more")
    parser.add_argument("--rounds", type=int, default=3, help="at most; long tasks have fewer")
    parser.add_argument("--quick", action="store_true", help="two models, few tasks, two rounds: minutes")
    options = parser.parse_args()
    infinicore.set_num_threads(options.threads)
    known_plans = QUICK if options.quick else PLANS
    plans = {name: known_plans.get(name, QUICK["1B Q4_0"]) for name in options.model or known_plans}
    effort = Effort(options.rounds, options.threads)
    if options.quick:
        effort = Effort(MIN_ROUNDS, options.threads, accuracy.FEW_TOKENS)
    run_all(plans, effort, "side_by_side" if plans == PLANS else PARTIAL)


if __name__ == "__main__":
    main()
