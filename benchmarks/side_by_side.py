"""infinilm, llama.cpp and transformers on the same GGUF, in one run: `python -m benchmarks.side_by_side`.

Every contender lives in a process of its own and is asked in turn, so that all meet the same machine.
Prompts are random token ids, end-of-text is ignored, a first round is not counted. A ratio above 1 means that
infinilm is faster; its int8 row is `--activations int8`. llama-cpp-python and transformers are optional
(`pip install .[bench]`): what is missing is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NUM_THREADS = 2


@dataclass(frozen=True)
class Task:
    """Decode `output` tokens after a prompt, for `batch` streams at once."""

    prompt: int
    output: int
    batch: int = 1

    def __str__(self) -> str:
        return f"prompt {self.prompt}, {self.output} tokens, batch {self.batch}"


@dataclass(frozen=True)
class Answer:
    prefill: float  # seconds to the first token
    decode: float  # seconds for the rest


# ---- contenders: each loads a model and returns a function from a task to its times ----


def load_int8(path: str) -> Callable[[Task], Answer]:
    return load_infinilm(path, "int8")


def load_infinilm(path: str, activations: str | None = None) -> Callable[[Task], Answer]:
    import torch

    import infinicore
    from infinilm.bench import Workload, run_once
    from infinilm.llm import load_model

    infinicore.set_num_threads(NUM_THREADS)
    torch.set_num_threads(NUM_THREADS)
    model, _ = load_model(path, activations=activations)
    return lambda task: Answer(*run_once(model, Workload(task.prompt, task.output, task.batch, 1), seed=1))


def load_llama_cpp(path: str) -> Callable[[Task], Answer]:
    """llama.cpp through its C interface, which alone decodes several streams at once."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())

    def run(task: Task) -> Answer:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = task.batch * (task.prompt + task.output + 32), 512
        params.n_threads = params.n_threads_batch = NUM_THREADS
        params.n_seq_max, params.kv_unified = task.batch, True
        context = llama_cpp.llama_init_from_model(model, params)
        answer = decode_streams(llama_cpp, context, task)
        llama_cpp.llama_free(context)
        return answer

    return run


def decode_streams(llama_cpp: Any, context: Any, task: Task) -> Answer:
    """Streams share one batch a step."""
    import random

    rng, vocab = random.Random(1), 32000
    batch = llama_cpp.llama_batch_init(512, 0, task.batch)

    def decode(entries: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)
        for i, (token, position, stream, wants_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = stream, wants_logits
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(context)

    start = time.perf_counter()
    for stream in range(task.batch):
        for begin in range(0, task.prompt, 512):
            end = min(task.prompt, begin + 512)
            decode([(rng.randrange(vocab), p, stream, p == task.prompt - 1) for p in range(begin, end)])
    first = time.perf_counter()
    for step in range(task.output - 1):
        decode([(rng.randrange(vocab), task.prompt + step, stream, True) for stream in range(task.batch)])
    times = Answer(first - start, time.perf_counter() - first)
    llama_cpp.llama_batch_free(batch)
    return times


def load_transformers(path: str) -> Callable[[Task], Answer]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(NUM_THREADS)
    file = Path(path)
    dtype = torch.bfloat16 if has_bfloat16() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()

    @torch.inference_mode()
    def run(task: Task) -> Answer:
        token_ids = torch.randint(0, model.config.vocab_size, (task.batch, task.prompt))
        start = time.perf_counter()
        output = model(token_ids, use_cache=True, logits_to_keep=1)
        first = time.perf_counter()
        for _ in range(task.output - 1):
            token_ids = output.logits[:, -1:].argmax(-1)
            output = model(token_ids, past_key_values=output.past_key_values, use_cache=True)
        return Answer(first - start, time.perf_counter() - first)

    return run


def has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; without, transformers is faster in float32."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags or " bf16" in flags


CONTENDERS: dict[str, tuple[str, Callable[[str], Callable[[Task], Answer]]]] = {
    "infinilm": ("infinilm", load_infinilm),
    "infinilm int8": ("infinilm", load_int8),
    "llama.cpp": ("llama_cpp", load_llama_cpp),
    "transformers": ("transformers", load_transformers),
}


# ---- workers ----


def serve(name: str, path: str) -> None:
    """Answer tasks from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    start = time.perf_counter()
    run = CONTENDERS[name][1](path)
    print(json.dumps({"load": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(run(Task(**json.loads(line))))), file=answers, flush=True)


class Worker:
    def __init__(self, name: str, path: str) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.side_by_side", "--worker", name, "--model", path]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.load_seconds = float(self.read()["load"])

    def read(self) -> dict[str, float]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def run(self, task: Task) -> Answer:
        print(json.dumps(asdict(task)), file=self.process.stdin, flush=True)
        return Answer(**self.read())

    def peak_memory(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status")
        if not status.exists():
            return float("nan")
        return float(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()


# ---- the run ----


def measure(workers: dict[str, Worker], task: Task, num_rounds: int) -> dict[str, list[Answer]]:
    answers: dict[str, list[Answer]] = {name: [] for name in workers}
    for i in range(num_rounds + 1):
        for name, worker in workers.items():
            answer = worker.run(task)
            if i > 0:
                answers[name].append(answer)
    return answers


def rows(task: Task, answers: dict[str, list[Answer]]) -> Iterator[dict[str, Any]]:
    sizes = {"prefill": task.prompt * task.batch, "decode": (task.output - 1) * task.batch}
    for phase, num_tokens in sizes.items():
        rates = {name: [num_tokens / getattr(a, phase) for a in runs] for name, runs in answers.items()}
        medians = {name: statistics.median(values) for name, values in rates.items()}
        spreads = {name: (max(v) - min(v)) / 2 / medians[name] for name, v in rates.items()}
        yield {"task": str(task), "phase": phase, "tokens_per_second": medians, "spread": spreads}


def show(row: dict[str, Any]) -> None:
    ours = row["tokens_per_second"]["infinilm"]
    cells = [f"{row['task']:34} {row['phase']:8}"]
    for name, rate in row["tokens_per_second"].items():
        ratio = "" if name == "infinilm" else f" ({ours / rate:5.2f}x)"
        cells.append(f"{name} {rate:8.1f} ±{row['spread'][name]:3.0%}{ratio}")
    print("  ".join(cells), flush=True)


def run_model(path: str, tasks: list[Task], num_rounds: int) -> dict[str, Any]:
    names = [name for name, (module, _) in CONTENDERS.items() if importlib.util.find_spec(module)]
    workers = {name: Worker(name, path) for name in names}
    print(f"\n{Path(path).name}, {NUM_THREADS} threads")
    table = []
    for task in tasks:
        for row in rows(task, measure(workers, task, num_rounds)):
            table.append(row)
            show(row)
    loads = {name: worker.load_seconds for name, worker in workers.items()}
    peaks = {name: worker.peak_memory() for name, worker in workers.items()}
    print("load seconds   " + "  ".join(f"{name} {value:.2f}" for name, value in loads.items()))
    print("peak memory MB " + "  ".join(f"{name} {value / 1e6:.0f}" for name, value in peaks.items()))
    for worker in workers.values():
        worker.close()
    return {"model": Path(path).name, "rows": table, "load_seconds": loads, "peak_memory_bytes": peaks}


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    for line in lscpu.splitlines():
        if line.startswith("Model name:"):
            cpu = line.partition(":")[2].strip()
    return {"cpu": cpu, "architecture": platform.machine(), "threads": NUM_THREADS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help="a GGUF file, again for more; the built-in model if left out"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer tasks")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker, options.model[0])
        return
    from infinilm.hub import resolve

    paths = options.model or [str(resolve(None))]
    tasks = [Task(512, 64), Task(16, 64, 8)]
    if not options.quick:
        tasks += [Task(128, 32), Task(2048, 32), Task(8000, 16), Task(16, 32, 16)]
    results = {"machine": machine(), "models": [run_model(path, tasks, options.rounds) for path in paths]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "side_by_side.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
