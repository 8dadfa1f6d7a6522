"""A contender in a process of its own that answers how long a task took it, and the other end of its pipe."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS, Contender, Task, Times


def serve(name: str, path: str, num_threads: int) -> None:
    """Load a model, then answer tasks from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    module, load = CONTENDERS[name]
    importlib.import_module(module)
    imported = peak_memory(os.getpid()) - library_memory(os.getpid())
    start = time.perf_counter()
    contender = load(path, num_threads)
    hello = {"load": time.perf_counter() - start, "imported": imported, "note": contender.note}
    print(json.dumps(hello), file=answers, flush=True)
    opened = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "token_ids" in asked:
            save_logits(contender, **asked)
            task, told = None, {}
        else:
            task = Task(**asked)
            told = answer(contender, task, is_open=task == opened and not task.is_prefill)
        print(json.dumps(told), file=answers, flush=True)
        opened = task


def save_logits(contender: Contender, token_ids: list[int], path: str) -> None:
    import numpy as np

    np.save(path, contender.logits(token_ids))


def answer(contender: Contender, task: Task, is_open: bool) -> dict[str, Any]:
    if not task.is_served:
        return {"seconds": run(contender, task, is_open)}
    if not is_open:
        contender.open(task)
    return asdict(contender.serve())


def run(contender: Contender, task: Task, is_open: bool) -> float:
    """Seconds; prompts that are already read serve further rounds of decoding."""
    if not is_open:
        contender.open(task)
        filling = seconds_of(contender.fill)
        if task.is_prefill:
            return filling
    contender.rewind()
    return seconds_of(contender.decode)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_memory(process: int) -> float:
    """The most bytes a process has held; what is not known is no number."""
    path = Path(f"/proc/{process}/status")
    peak = path.read_text().partition("VmHWM:")[2] if path.exists() else ""
    return float(peak.split()[0]) * 1024 if peak else math.nan


def library_memory(process: int) -> float:
    """The bytes of shared libraries that are in a process's memory: more when more of their code has run."""
    path = Path(f"/proc/{process}/smaps")
    total, is_library = 0.0, False
    for first, *others in map(str.split, path.read_text().splitlines() if path.exists() else ()):
        if not first.endswith(":"):  # a mapping begins, the name of its file the last that is said of it
            is_library = ".so" in others[-1]
        elif is_library and first == "Rss:":
            total += float(others[0]) * 1024
    return total


class WorkerError(RuntimeError):
    """A contender's process has ended."""


class Worker:
    """A contender in its process: its load time, its memory and its times for tasks."""

    def __init__(self, name: str, path: str, num_threads: int) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", name, path, str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        hello = self.read()
        self.load_seconds, self.note = float(hello["load"]), str(hello["note"])
        self.imported_bytes = float(hello["imported"])

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise WorkerError(f"{self.name} ended with code {self.process.wait()}: {self.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> str:
        self.log.seek(0)
        return (self.log.read().strip().splitlines() or ["it said nothing"])[-1]

    def seconds(self, task: Task) -> float:
        return float(self.ask(asdict(task))["seconds"])

    def times(self, task: Task) -> Times:
        return Times(**self.ask(asdict(task)))

    def save_logits(self, token_ids: list[int], path: Path) -> None:
        self.ask({"token_ids": token_ids, "path": str(path)})

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # read says what became of the process
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        return self.read()

    def peak_memory(self) -> float:
        return peak_memory(self.process.pid)

    def imported_memory(self) -> float:
        """What imports took, and all of their libraries that has been read in since."""
        return self.imported_bytes + library_memory(self.process.pid)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with suppress(BrokenPipeError):
                if stream:
                    stream.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="One contender's process, for benchmarks.side_by_side.")
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("path")
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    serve(options.name, options.path, options.threads)


if __name__ == "__main__":
    main()
