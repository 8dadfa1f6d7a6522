"""Many streams at once, infinilm beside llama.cpp: `python -m benchmarks.throughput`.

Each stream has a prompt of 128 random tokens and gets 64 more, all from the same moment on: infinilm by its
engine, llama.cpp by its own batch. Rounds alternate; a short one before them is not counted. Told are tokens
a second, prompts included, and the times to the first token and between tokens that half of them (p50) and
all but a hundredth (p99) do not exceed. Writes to this CPU's folder in benchmarks/results/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks import charts, report
from benchmarks.contenders import Task, Times
from benchmarks.machine import arguments, folder, machine, write
from benchmarks.side_by_side import BUILT_IN, FAST, Effort, in_turn, path_of, start_workers
from benchmarks.timing import rounds_within
from benchmarks.worker import Worker
from infinilm.bench import Measured
from infinilm.load import spread_of

MODELS = (BUILT_IN, "1B Q4_0")
STREAMS = (1, 8, 16, 32, 64)
PROMPT, NUM_NEW = 128, 64
WARM_UP = 16, 4
MIN_ROUNDS = 2
BUDGET = 60.0  # seconds of further rounds of a point


@dataclass
class Point:
    """One contender with so many streams: tokens a second by round, and seconds of all rounds."""

    rates: Measured
    first: dict[str, float]
    gaps: dict[str, float]

    @classmethod
    def of(cls, task: Task, rounds: Sequence[Times]) -> Point:
        return cls(
            Measured(tuple(task.num_counted / times.seconds for times in rounds)),
            spread_of([seconds for times in rounds for seconds in times.first]),
            spread_of([seconds for times in rounds for seconds in times.gaps]),
        )


@dataclass
class Served:
    """A model: its points by contender and number of streams."""

    name: str
    points: dict[str, dict[int, Point]] = field(default_factory=dict)


def task_of(num_streams: int) -> Task:
    return Task(f"{num_streams} streams", PROMPT, num_streams, NUM_NEW, is_served=True)


def run_model(name: str, path: Path, streams: Sequence[int], effort: Effort) -> tuple[Served, dict[str, str]]:
    workers = start_workers(FAST, path, effort.num_threads)
    served = Served(name, {contender: {} for contender in workers})
    print(f"\n{name}, {effort.num_threads} threads, tokens a second", flush=True)
    for num_streams in streams:
        for contender, point in measure(task_of(num_streams), dict(workers), effort.num_rounds).items():
            served.points[contender][num_streams] = point
        print(line(served, num_streams), flush=True)
    for worker in workers.values():
        worker.close()
    return served, {name: worker.note for name, worker in workers.items()}


def measure(task: Task, workers: dict[str, Worker], num_rounds: int) -> dict[str, Point]:
    prompt, num_tokens = WARM_UP
    short = replace(task, prompt=prompt, num_tokens=num_tokens)
    in_turn(workers, lambda worker: worker.times(short))
    rounds: dict[str, list[Times]] = {name: [] for name in workers}
    for _ in rounds_within(num_rounds, MIN_ROUNDS, BUDGET):
        for name, times in in_turn(workers, lambda worker: worker.times(task)).items():
            rounds[name].append(times)
    return {name: Point.of(task, runs) for name, runs in rounds.items() if runs}


# ---- what was found ----


def line(served: Served, num_streams: int) -> str:
    return f"{num_streams:8} at once  " + "  ".join(
        f"{name} {cell(served, name, num_streams)}" for name in served.points
    )


def cell(served: Served, name: str, num_streams: int) -> str:
    """Its rate, and how many times as fast infinilm is"""
    point, ours = served.points[name].get(num_streams), served.points[report.OURS].get(num_streams)
    if point is None:
        return "–"
    rate = f"{point.rates.median:.1f} ±{point.rates.spread:.0%}"
    is_peer = name != report.OURS and ours is not None
    return f"{rate} ({ours.rates.median / point.rates.median:.2f}x)" if is_peer else rate  # type: ignore[union-attr]


def seconds_cell(seconds: dict[str, float]) -> str:
    return f"{seconds['p50']:.3g} / {seconds['p99']:.3g}"


def markdown(models: Sequence[Served], facts: dict[str, str]) -> str:
    return "\n".join([report.head(facts), *(table for served in models for table in tables(served))])


def tables(served: Served) -> list[str]:
    names = list(served.points)
    streams = sorted({count for points in served.points.values() for count in points})
    rates = [[f"{count}", *(cell(served, name, count) for name in names)] for count in streams]
    found = [report.table([f"{served.name}, tokens a second by streams", *names], rates)]
    for title in ("first", "gaps"):
        rows = [
            [f"{count}", *(times_cell(served, name, count, title) for name in names)] for count in streams
        ]
        what = "to the first token" if title == "first" else "between tokens"
        found.append(report.table([f"{served.name}, seconds {what}, p50 / p99", *names], rows))
    return found


def times_cell(served: Served, name: str, num_streams: int, title: str) -> str:
    point = served.points[name].get(num_streams)
    return "–" if point is None else seconds_cell(getattr(point, title))


def write_results(models: Sequence[Served], facts: dict[str, str], stem: Path) -> None:
    content = {"machine": facts, "models": [asdict(served) for served in models]}
    write(stem, content, markdown(models, facts))
    curves = {
        served.name: {
            name: {count: point.rates for count, point in points.items()}
            for name, points in served.points.items()
        }
        for served in models
    }
    charts.draw_lines(curves, "streams at once, prompts included", facts["CPU"], stem.with_suffix(".png"))


def main() -> None:
    parser = arguments(__doc__)
    known = ", ".join(map(repr, MODELS))
    parser.add_argument("--model", action="append", help=f"a GGUF file or one of {known}; again for more")
    parser.add_argument("--streams", type=int, action="append", help="how many at once; again for more")
    parser.add_argument("--rounds", type=int, default=3, help="at most; long tasks have fewer")
    options = parser.parse_args()
    facts, models, effort = machine(options.threads), [], Effort(options.rounds, options.threads)
    for name in options.model or MODELS:
        served, notes = run_model(name, path_of(name), options.streams or STREAMS, effort)
        models.append(served)
        facts |= notes
    stem = "partial_throughput" if options.model or options.streams else "throughput"
    write_results(models, facts, folder(options.threads) / stem)


if __name__ == "__main__":
    main()
