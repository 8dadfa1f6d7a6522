"""Every type of weights that GGUF files have, infinilm beside llama.cpp: `python -m benchmarks.every_type`.

Two layers of the 1B shape with random weights, made in build/ once; rounds alternate as in
benchmarks.side_by_side. A type that infinilm does not know is left out. Writes to this CPU's folder in
benchmarks/results/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import infinicore
from benchmarks import report
from benchmarks.machine import arguments, folder, machine, write
from benchmarks.random_model import SMALL, cached_model
from benchmarks.report import OURS, PEER, ModelResult
from benchmarks.side_by_side import PAIR, Effort, Plan, decode, prefill, run_model
from infinicore.quantization import BlockType

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
PLAN: Plan = {prefill(512): PAIR, decode(): PAIR, decode(0, 16): PAIR}


def known(types: Sequence[str]) -> list[str]:
    for name in types:
        if name not in BlockType.__members__:
            print(f"{name} is left out: infinilm does not know it")
    return [name for name in types if name in BlockType.__members__]


def type_table(models: Sequence[ModelResult]) -> str:
    """Tokens a second of both, and how many times as fast infinilm is"""
    rows = [[model.name, *(cell(model, task.name) for task in PLAN)] for model in models]
    return report.table([f"0.2B, tokens a second of {OURS} / {PEER}", *(task.name for task in PLAN)], rows)


def cell(model: ModelResult, task: str) -> str:
    rates, ratio = model.rates[task], model.ratio(task, OURS, PEER)
    told = " / ".join(f"{rates[name].median:.1f}" for name in PAIR if name in rates)
    return told + (f" ({ratio:.2f}x)" if ratio else "")


def write_results(models: Sequence[ModelResult], facts: dict[str, str], stem: Path) -> None:
    content = {"machine": facts, "models": [asdict(model) for model in models]}
    write(stem, content, f"{report.head(facts)}\n{type_table(models)}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--type", action="append", choices=TYPES, help="again for more; all if left out")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    infinicore.set_num_threads(options.threads)
    facts, models, effort = machine(options.threads), [], Effort(options.rounds, options.threads)
    for name in known(options.type or TYPES):
        result, notes = run_model(name, cached_model(name, SMALL), PLAN, effort)
        models.append(result)
        facts |= notes
    print(f"\n{type_table(models)}")
    stem = "partial_every_type" if options.type else "every_type"
    write_results(models, facts, folder(options.threads) / stem)


if __name__ == "__main__":
    main()
