"""What work costs infinilm as it grows: `python -m benchmarks.scaling [--model FILE]`.

Seconds of a prompt by its length, and milliseconds of a decoded token by its context and by the streams that
are decoded together. Writes to this CPU's folder in benchmarks/results/.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks import charts, report
from benchmarks.contenders import Infinilm, Task
from benchmarks.machine import arguments, folder, machine, write
from benchmarks.side_by_side import NUM_DECODED, SHORT_PROMPT
from benchmarks.timing import rounds_within
from benchmarks.worker import seconds_of
from infinilm.bench import Measured
from infinilm.hub import resolve

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
STREAMS = (1, 2, 4, 8, 16, 32)
BUDGET = 20.0  # seconds of further rounds of a point

Curve = dict[int, Measured]


def prefill_seconds(contender: Infinilm, task: Task, num_rounds: int) -> Measured:
    runs = []
    for _ in rounds_within(num_rounds, 1, BUDGET):
        contender.open(task)
        runs.append(seconds_of(contender.fill))
    return Measured(tuple(runs))


def decode_milliseconds(contender: Infinilm, task: Task, num_rounds: int) -> Measured:
    """Of one step of a task that is open and filled; a first round is not counted."""
    runs = []
    for _ in range(num_rounds + 1):
        contender.rewind()
        runs.append(1e3 * seconds_of(contender.decode) / task.num_tokens)
    return Measured(tuple(runs[1:]))


def by_length(contender: Infinilm, lengths: tuple[int, ...], num_rounds: int) -> tuple[Curve, Curve]:
    prefill, decode = {}, {}
    for length in lengths:
        task = Task(f"context {length}", length, 1, NUM_DECODED)
        prefill[length] = prefill_seconds(contender, task, num_rounds)
        decode[length] = decode_milliseconds(contender, task, num_rounds)
        print(f"{length:8} {show(prefill[length])} {show(decode[length])}", flush=True)
    return prefill, decode


def by_streams(contender: Infinilm, streams: tuple[int, ...], num_rounds: int) -> Curve:
    curve = {}
    for num_streams in streams:
        task = Task(f"{num_streams} streams", SHORT_PROMPT, num_streams, NUM_DECODED)
        contender.open(task)
        contender.fill()
        curve[num_streams] = decode_milliseconds(contender, task, num_rounds)
        rate = 1e3 * num_streams / curve[num_streams].median
        print(f"{num_streams:8} {show(curve[num_streams])} {rate:14.1f}", flush=True)
    return curve


def show(measured: Measured) -> str:
    return f"{measured.median:9.2f} ±{measured.spread:4.0%}"


def run(contender: Infinilm, num_rounds: int, num_sizes: int | None) -> dict[str, Curve]:
    contender.open(Task("warm-up", 64))
    contender.fill()
    print(f"{'length':>8} {'prefill, s':>15} {'decode, ms':>15}")
    prefill, decode = by_length(contender, LENGTHS[:num_sizes], num_rounds)
    print(f"\n{'streams':>8} {'a step, ms':>15} {'tokens/s':>14}")
    return {
        "seconds to read a prompt by its tokens": prefill,
        "milliseconds a token by tokens of context": decode,
        "milliseconds a step by streams": by_streams(contender, STREAMS[:num_sizes], num_rounds),
    }


def write_results(curves: dict[str, Curve], facts: dict[str, str], stem: Path) -> None:
    points = {name: {x: asdict(point) for x, point in curve.items()} for name, curve in curves.items()}
    tables = [
        report.table(name.split(" by ")[::-1], [[f"{x}", show(point)] for x, point in curve.items()])
        for name, curve in curves.items()
    ]
    write(stem, {"machine": facts, "curves": points}, "\n".join([report.head(facts), *tables]))
    charts.draw_curves(curves, f"infinilm on {facts['CPU']}", stem.with_suffix(".png"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a GGUF file; the built-in model if left out")
    parser.add_argument("--rounds", type=int, default=3, help="at most; long prompts have fewer")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    options = parser.parse_args()
    contender = Infinilm(str(resolve(options.model)), options.threads)
    curves = run(contender, options.rounds, 3 if options.quick else None)
    stem = "partial_scaling" if options.quick or options.model else "scaling"
    write_results(curves, machine(options.threads), folder(options.threads) / stem)


if __name__ == "__main__":
    main()
