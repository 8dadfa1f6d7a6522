"""What further threads are worth, infinilm beside llama.cpp: `python -m benchmarks.threads`.

Tokens a second of the 1B Q4_0 with 1, 2, 4 … threads, each contender with each number in its own process and
all in turn, so that they meet the same machine. Then what is lost where another program keeps one of the CPUs
busy. Writes to this CPU's folder in benchmarks/results/ as JSON, Markdown and a chart.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import charts, report
from benchmarks.contenders import Task
from benchmarks.machine import arguments, folder, machine, write
from benchmarks.report import OURS, PEER, Check
from benchmarks.side_by_side import (
    PAIR,
    by_contender,
    decode,
    path_of,
    prefill,
    rounds,
    run_round,
    start_workers,
)
from benchmarks.worker import Worker
from infinilm.bench import Measured

MODEL = "1B Q4_0"
TASKS = (prefill(512), decode(), decode(0, 16))
LEAST_LINEAR = 0.85  # of as many times the speed as there are threads
MOST_LINEAR = 8  # threads of which that is wanted
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"

Curves = dict[str, dict[int, Measured]]  # by contender and threads


@dataclass
class Found:
    """Tokens a second: of each task by contender and threads; of decoding alone, and beside a busy core"""

    curves: dict[str, Curves] = field(default_factory=dict)
    alone: dict[str, Measured] = field(default_factory=dict)
    beside: dict[str, Measured] = field(default_factory=dict)

    def speed_up(self, task: str, name: str, count: int) -> float | None:
        """Over its own single thread"""
        curve = self.curves[task].get(name, {})
        return curve[count].median / curve[1].median if count in curve and 1 in curve else None


def counts_up_to(most: int) -> list[int]:
    """1, 2, 4 …, and all there are"""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


# ---- what is measured ----


def by_threads(workers: dict[int, dict[str, Worker]], task: Task, num_rounds: int) -> Curves:
    """All in turn, by the key `contender count`"""
    together = {f"{name} {count}": worker for count, of in workers.items() for name, worker in of.items()}
    measured = by_contender(list(rounds(together, task, num_rounds)))
    curves: Curves = {}
    for key, rate in measured.items():
        name, _, count = key.rpartition(" ")
        curves.setdefault(name, {})[int(count)] = rate
    return curves


@contextmanager
def busy_core() -> Iterator[None]:
    """A program that spins on the last of the CPUs that this process may use"""
    cpu = max(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", SPIN, str(cpu)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # now it spins
        try:
            yield
        finally:
            process.kill()


def beside_a_busy_core(workers: dict[str, Worker], num_rounds: int, found: Found) -> None:
    alone, beside = [], []
    for rates in rounds(workers, decode(), num_rounds):
        alone.append(rates)
        with busy_core():
            beside.append(run_round(workers, decode()))
    found.alone, found.beside = by_contender(alone), by_contender(beside)


def run(path: Path, counts: Sequence[int], num_rounds: int) -> tuple[Found, dict[str, str]]:
    workers = {count: start_workers(PAIR, path, count) for count in counts}
    found, most = Found(), workers[max(counts)]
    for task in TASKS:
        found.curves[task.name] = by_threads(workers, task, num_rounds)
        print(thread_table(found, task.name), flush=True)
    if hasattr(os, "sched_setaffinity"):
        beside_a_busy_core(dict(most), num_rounds, found)
        print(busy_table(found), flush=True)
    for worker in (worker for of in workers.values() for worker in of.values()):
        worker.close()
    return found, {name: worker.note for name, worker in most.items()}


# ---- what was found ----


def checks(found: Found) -> Iterator[Check]:
    for task, curves in found.curves.items():
        for count in (count for count in curves[OURS] if count > 1):
            ours, theirs = (found.speed_up(task, name, count) for name in (OURS, PEER))
            if ours is not None:
                yield check(f"{task}, {count} threads", count, ours, theirs)


def check(what: str, count: int, ours: float, theirs: float | None) -> Check:
    """Of linear, where there are few enough threads, and of what llama.cpp makes of them"""
    wanted, told, is_met = [], f"{ours:.2f}x ({ours / count:.0%})", True
    if count <= MOST_LINEAR:
        wanted.append(f"≥ {LEAST_LINEAR:.0%} of linear")
        is_met = ours / count >= LEAST_LINEAR
    if theirs is not None:
        wanted.append(f"ahead of {PEER}'s speed-up")
        told, is_met = f"{told}, {PEER} {theirs:.2f}x", is_met and ours > theirs
    return Check(what, ", ".join(wanted), told, is_met)


def thread_table(found: Found, task: str) -> str:
    names, counts = list(found.curves[task]), sorted(found.curves[task][OURS])
    rows = [[f"{count}", *(thread_cell(found, task, name, count) for name in names)] for count in counts]
    return report.table([f"{task}, tokens a second by threads", *names], rows)


def thread_cell(found: Found, task: str, name: str, count: int) -> str:
    """Its rate, how many times that of one thread, and which share of as many times as there are threads"""
    rate, faster = found.curves[task][name].get(count), found.speed_up(task, name, count)
    if rate is None or faster is None:
        return "–"
    told = f"{rate.median:.1f} ±{rate.spread:.0%}"
    return told if count == 1 else f"{told}, {faster:.2f}x, {faster / count:.0%} of linear"


def busy_table(found: Found) -> str:
    pairs = {name: (found.alone[name].median, rate.median) for name, rate in found.beside.items()}
    rows = [
        [name, f"{alone:.1f}", f"{rate:.1f}", f"{1 - rate / alone:.0%}"]
        for name, (alone, rate) in pairs.items()
    ]
    return report.table(["decode, tokens a second", "alone", "beside a busy core", "lost"], rows)


def write_results(found: Found, facts: dict[str, str], stem: Path) -> None:
    checked = list(checks(found))
    print(*checked, sep="\n")
    tables = [thread_table(found, task) for task in found.curves]
    tables += [busy_table(found)] if found.beside else []
    content = {"machine": facts, **asdict(found), "targets": [asdict(check) for check in checked]}
    write(stem, content, "\n".join([report.head(facts), *tables, report.target_table(checked)]))
    title = f"{facts['model']} on {facts['CPU']}"
    charts.draw_lines(found.curves, "threads", title, stem.with_suffix(".png"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=MODEL, help="a GGUF file; %(default)s if left out")
    parser.add_argument("--rounds", type=int, default=5, help="at most; long tasks have fewer")
    options = parser.parse_args()
    found, notes = run(path_of(options.model), counts_up_to(options.threads), options.rounds)
    facts = machine(options.threads) | {"model": options.model} | notes
    stem = "threads" if options.model == MODEL else "partial_threads"
    write_results(found, facts, folder(options.threads) / stem)


if __name__ == "__main__":
    main()
