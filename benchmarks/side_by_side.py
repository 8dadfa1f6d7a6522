"""infinilm, llama.cpp and transformers on the same GGUF files, in turn: `python -m benchmarks.side_by_side`.

Rounds alternate, so that all contenders meet the same machine; a first one is not counted. A ratio in
brackets says how many times as fast infinilm is; `infinilm int8` is `--activations int8`. llama-cpp-python
and transformers are optional: what is missing, or would take minutes, is left out. Results are printed, and
written to benchmarks/results/ as JSON, Markdown and a chart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import infinicore
from benchmarks import charts, report
from benchmarks.contenders import CONTENDERS, NUM_THREADS, Task, Worker, WorkerError, is_installed
from benchmarks.report import ModelResult
from benchmarks.timing import rounds_within
from infinilm.bench import Measured, read_bandwidth
from infinilm.checkpoint import open_checkpoint
from infinilm.hub import resolve

RESULTS = Path(__file__).parent / "results"
NUM_DECODED = 32
SHORT_PROMPT = 16
MIN_ROUNDS = 2
ROUND_BUDGET = 45.0  # seconds after which a task has no further rounds

Plan = dict[Task, tuple[str, ...]]  # who is asked each task


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
ALL = tuple(CONTENDERS)
FAST = ("infinilm", "infinilm int8", "llama.cpp")
DENSE = ("infinilm", "llama.cpp")
QUICK: Plan = {prefill(512): ALL, decode(): ALL, decode(0, 8): ALL}
PLANS: dict[str, Plan] = {
    "135M Q4_1": {
        **QUICK,
        decode(0, 16): FAST,
        prefill(128): ALL,
        prefill(2048): ALL,
        decode(2048): ALL,
        decode(8192): FAST,
    },
    "1B Q4_0": {prefill(512): ALL, decode(): ALL, decode(0, 8): FAST, decode(0, 16): FAST},
    "1B Q8_0": {prefill(512): ALL, decode(): ALL},
    "1B BF16": {prefill(512): DENSE, decode(): DENSE},
}


def path_of(model: str) -> Path:
    """A file as it is; a model of the plans is found, or made."""
    if model == "135M Q4_1":
        return resolve(None)
    if model not in PLANS:
        return Path(model)
    from benchmarks.random_model import cached_model

    return cached_model(model.split()[1])


# ---- one model ----


def run_model(name: str, plan: Plan, num_rounds: int) -> tuple[ModelResult, dict[str, str]]:
    """What was measured, and what the contenders say of themselves."""
    path, asked = path_of(name), {contender for names in plan.values() for contender in names}
    workers = start_workers([contender for contender in CONTENDERS if contender in asked], path)
    result = new_result(name, path, workers)
    print(f"\n{name}, {NUM_THREADS} threads, tokens a second", flush=True)
    for task, names in plan.items():
        measure(result, task, {name: workers[name] for name in names if name in workers}, num_rounds)
        print(report.line(result, task.name), flush=True)
        if not result.peak_bytes:
            result.peak_bytes = {name: worker.peak_memory() for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    print(report.resources(result), flush=True)
    return result, {name: worker.note for name, worker in workers.items()}


def start_workers(names: list[str], path: Path) -> dict[str, Worker]:
    workers = {}
    for name in filter(is_installed, names):
        try:
            workers[name] = Worker(name, str(path))
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
        config, weight_bytes = checkpoint.config, checkpoint.num_bytes
    sizes = (config[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    return ModelResult(
        name,
        file_bytes=path.stat().st_size,
        weight_bytes=weight_bytes,
        cache_bytes=512 * 2 * 4 * math.prod(sizes),  # of 512 tokens, keys and values in float32
        load_seconds={name: worker.load_seconds for name, worker in workers.items()},
        imported_bytes={name: worker.imported_bytes for name, worker in workers.items()},
    )


def measure(result: ModelResult, task: Task, workers: dict[str, Worker], num_rounds: int) -> None:
    """Also of the memory's read speed, in the same rounds."""
    runs: dict[str, list[float]] = {name: [] for name in workers}
    bandwidth = []
    run_round(workers, replace(task, prompt=64) if task.is_prefill else task)  # warms up
    for _ in rounds_within(num_rounds, MIN_ROUNDS, ROUND_BUDGET):
        bandwidth.append(read_bandwidth())
        for name, seconds in run_round(workers, task).items():
            runs[name].append(task.num_counted / seconds)
    result.rates[task.name] = {name: Measured(tuple(runs[name])) for name in workers}
    result.bandwidth[task.name] = Measured(tuple(bandwidth))


def run_round(workers: dict[str, Worker], task: Task) -> dict[str, float]:
    """Seconds of each; one that fails takes no further part in the task."""
    seconds = {}
    for name, worker in list(workers.items()):
        try:
            seconds[name] = worker.seconds(task)
        except WorkerError as error:
            leave_out(name, error)
            del workers[name]
    return seconds


# ---- the command, as a user types it ----

GENERATE = "from infinilm.cli import main; main(['generate', 'Why is the sky blue?', '--max-tokens', '1'])"
IMPORT = "import torch; print(torch)"


def first_token_seconds(num_rounds: int) -> float:
    """From `infinilm generate` to its first letter, less what `import torch` takes."""
    rounds = [(seconds_to_output(GENERATE), seconds_to_output(IMPORT)) for _ in range(num_rounds + 1)][1:]
    generate, torch = (Measured(runs).median for runs in zip(*rounds, strict=True))
    print(f"\nfirst token after {generate:.2f} s, of which `import torch` {torch:.2f} s", flush=True)
    return generate - torch


def seconds_to_output(code: str) -> float:
    environment = os.environ | {"INFINICORE_NUM_THREADS": str(NUM_THREADS)}
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    first = process.stdout.read(1) if process.stdout else b""
    seconds = time.perf_counter() - start
    process.communicate()  # whoever prints to a reader that has left fails
    if not first:
        raise RuntimeError(f"{code!r} printed nothing and ended with code {process.returncode}")
    return seconds


# ---- the run ----


def machine() -> dict[str, str]:
    return {
        "CPU": f"{cpu_name()}, {os.cpu_count()} cores, {NUM_THREADS} threads each",
        "versions": ", ".join(f"{package} {version(package)}" for package in ("infinilm", "torch")),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    known = subprocess.run(["lscpu"], capture_output=True, text=True).stdout if info.exists() else ""
    names = [line.partition(":")[2].strip() for line in known.splitlines() if line.startswith("Model name:")]
    return f"{names[0] if names else platform.processor()} ({platform.machine()})"


def run_all(plans: dict[str, Plan], num_rounds: int, stem: str) -> None:
    facts, models = machine(), []
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    for name in CONTENDERS:
        if not is_installed(name):
            print(f"{name} is left out: `make bench` or `pip install '.[bench]'` brings it")
    for name, plan in plans.items():
        result, notes = run_model(name, plan, num_rounds)
        models.append(result)
        facts |= notes
    checked = list(report.checks(models, first_token_seconds(num_rounds)))
    print("", *checked, sep="\n")
    write_results(models, checked, facts, stem)


def write_results(
    models: list[ModelResult], checked: list[report.Check], facts: dict[str, str], stem: str
) -> None:
    RESULTS.mkdir(exist_ok=True)
    content = {
        "machine": facts,
        "models": [asdict(model) for model in models],
        "targets": [asdict(check) for check in checked],
    }
    (RESULTS / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / f"{stem}.md").write_text(report.markdown(models, checked, facts))
    charts.draw_rates(models, facts["CPU"], RESULTS / f"{stem}.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(map(repr, PLANS))
    parser.add_argument("--model", action="append", help=f"a GGUF file or one of {known}; again for more")
    parser.add_argument("--rounds", type=int, default=3, help="at most; long tasks have fewer")
    parser.add_argument("--quick", action="store_true", help="the built-in model and few tasks")
    options = parser.parse_args()
    infinicore.set_num_threads(NUM_THREADS)
    names = options.model or (["135M Q4_1"] if options.quick else list(PLANS))
    plans = {name: QUICK if options.quick else PLANS.get(name, QUICK) for name in names}
    run_all(plans, options.rounds, "side_by_side" if plans == PLANS else "partial")


if __name__ == "__main__":
    main()
