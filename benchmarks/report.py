"""What was measured side by side, said in words: rates and ratios, and each target with what was found.

`python -m benchmarks.report` prints the README's table: of every machine with results, how infinilm compares
with llama.cpp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinilm.bench import Measured

OURS = "infinilm"
INT8 = "infinilm int8"
PEER = "llama.cpp"
BANDWIDTH = "the read bandwidth"
DENSE_MODEL = "1B BF16"
LEAST_OPTIMISED = 0.2  # of the read bandwidth


@dataclass(frozen=True)
class Accuracy:
    """The mean Kullback-Leibler divergence from the exact model; how often the likeliest token is the same"""

    divergence: float
    share_same: float


@dataclass
class ModelResult:
    """One model: tokens a second by task and contender, and what loading took."""

    name: str
    file_bytes: int
    weight_bytes: int  # read for each token: a tied embedding is read as the output
    cache_bytes: int  # the keys and values of the first task, after which peak memory is taken
    load_seconds: dict[str, float]
    imported_bytes: dict[str, float]  # what a process held before it loaded the model, and libraries since
    rates: dict[str, dict[str, Measured]] = field(default_factory=dict)
    bandwidth: dict[str, Measured] = field(default_factory=dict)  # bytes a second, during a task
    peak_bytes: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, Accuracy] = field(default_factory=dict)

    @classmethod
    def of(cls, written: dict[str, Any]) -> ModelResult:
        """From a results file"""
        rates = {task: measured(found) for task, found in written["rates"].items()}
        accuracy = {name: Accuracy(**found) for name, found in written.get("accuracy", {}).items()}
        bandwidth = measured(written["bandwidth"])
        return cls(**written | {"rates": rates, "bandwidth": bandwidth, "accuracy": accuracy})

    def ratio(self, task: str, contender: str, against: str) -> float | None:
        """How many times as fast a contender is, or which share of the bandwidth it uses."""
        rates = self.rates.get(task, {})
        if contender not in rates:
            return None
        if against == BANDWIDTH:
            return rates[contender].median * self.weight_bytes / self.bandwidth[task].median
        return rates[contender].median / rates[against].median if against in rates else None

    def is_optimised(self, contender: str) -> bool:
        """Whether it decodes as one that was made for this CPU does: what multiplies bfloat16 one by one,
        where others wait for the memory, reads a twentieth of what the memory could give."""
        share = self.ratio("decode", contender, BANDWIDTH)
        return self.name != DENSE_MODEL or share is None or share >= LEAST_OPTIMISED

    def noise(self, task: str, *contenders: str) -> float:
        """The largest spread of these."""
        return max(self.rates[task][name].spread for name in contenders if name in self.rates[task])

    def memory_ratio(self, contender: str) -> float:
        """What loading and a prompt took beyond imports and the cache, as a multiple of the file."""
        taken = self.peak_bytes[contender] - self.imported_bytes[contender] - self.cache_bytes
        return taken / self.file_bytes


def measured(written: dict[str, dict[str, list[float]]]) -> dict[str, Measured]:
    return {name: Measured(tuple(runs["runs"])) for name, runs in written.items()}


# ---- targets ----


@dataclass(frozen=True)
class Target:
    """infinilm is at least so many times as fast as a peer, or uses such a share of the bandwidth.

    Where there is AMX, more may be wanted of it; where the memory is read as fast as it can be, that will do.
    """

    model: str
    task: str
    against: str
    least: float
    least_on_amx: float | None = None
    or_share: float | None = None


TARGETS = (
    Target("135M Q4_1", "decode", PEER, 2.5),
    Target("135M Q4_1", "prefill 512", PEER, 5.0),
    Target("135M Q4_1", "prefill 512", "transformers", 1.0),
    Target("135M Q4_1", "decode, context 8192", PEER, 3.0),
    Target("1B Q4_0", "decode", PEER, 1.7, or_share=0.85),
    Target("1B Q8_0", "decode", PEER, 1.7, or_share=0.85),
    Target("1B Q4_K_M", "decode", PEER, 1.3),
    Target("1B BF16", "decode", BANDWIDTH, 0.85),
    Target("1B BF16", "decode", PEER, 1.3),
    Target("4B-A0.5B Q4_0", "decode", PEER, 1.5),
    Target("4B-A0.5B Q4_0", "decode", BANDWIDTH, 0.8),
    *(Target(f"1B {name}", "prefill 512", PEER, 2.0, 5.0) for name in ("Q4_0", "Q8_0", "Q4_K_M")),
    *(Target(f"1B {name}", "prefill 512", "transformers", 1.5) for name in ("Q4_0", "Q8_0")),
    *(
        Target(f"1B {name}", f"decode, {count} streams", PEER, 2.0, 4.0)
        for name in ("Q4_0", "Q4_K_M")
        for count in (8, 16)
    ),
)
MOST_DIVERGENCE, LEAST_SAME = 1e-5, 0.999
MOST_FIRST_TOKEN_SECONDS = 1.5
MOST_MEMORY = 1.15
MOST_NOISE = 0.2  # a spread beyond which a ratio says little: something else was running


@dataclass(frozen=True)
class Check:
    what: str
    target: str
    found: str
    is_met: bool

    def __str__(self) -> str:
        return f"{self.what}: target {self.target}, found {self.found}: {self.verdict}"

    @property
    def verdict(self) -> str:
        return "met" if self.is_met else "missed"


def checks(models: list[ModelResult], first_token_seconds: float, has_amx: bool) -> Iterator[Check]:
    """Every target whose task and peer were measured."""
    by_name = {model.name: model for model in models}
    for target in TARGETS:
        if target.model in by_name and (check := check_ratio(target, by_name[target.model], has_amx)):
            yield check
    yield from (check_accuracy(model) for model in models if OURS in model.accuracy)
    yield Check(
        "from the command to the first token, 135M Q4_1",
        f"≤ {MOST_FIRST_TOKEN_SECONDS} s beyond `import torch`",
        f"{first_token_seconds:.2f} s",
        first_token_seconds <= MOST_FIRST_TOKEN_SECONDS,
    )
    yield from (check_memory(model) for model in models if not math.isnan(model.memory_ratio(OURS)))


def check_ratio(target: Target, model: ModelResult, has_amx: bool) -> Check | None:
    """None of a peer that was not measured, or is not made for this CPU"""
    ours, int8 = (found_of(target, model, name) for name in (OURS, INT8))
    if ours is None or not model.is_optimised(target.against):
        return None
    least = target.least_on_amx if has_amx and target.least_on_amx else target.least
    wanted = bar(target.against, least)
    wanted += f" or {bar(BANDWIDTH, target.or_share)}" if target.or_share else ""
    found = as_text(ours, target) + (f" (int8 {as_text(int8, target)})" if int8 else "")
    noise = model.noise(target.task, OURS, target.against)
    found += f", noisy: ±{noise:.0%}" if noise > MOST_NOISE else ""
    is_met = ours[0] >= least or (target.or_share is not None and ours[1] >= target.or_share)
    return Check(f"{target.task}, {target.model}", wanted, found, is_met)


def found_of(target: Target, model: ModelResult, contender: str) -> tuple[float, float] | None:
    """What a contender has of what is wanted, and which share of the bandwidth"""
    ratio = model.ratio(target.task, contender, target.against)
    return None if ratio is None else (ratio, model.ratio(target.task, contender, BANDWIDTH) or 0)


def bar(against: str, least: float) -> str:
    return f"≥ {least:.0%} of {BANDWIDTH}" if against == BANDWIDTH else f"≥ {least:g}x {against}"


def as_text(found: tuple[float, float], target: Target) -> str:
    ratio, share = found
    if target.against == BANDWIDTH:
        return f"{share:.1%}"
    return f"{ratio:.2f}x" + (f", {share:.0%} of {BANDWIDTH}" if target.or_share else "")


def check_accuracy(model: ModelResult) -> Check:
    found = model.accuracy[OURS]
    return Check(
        f"logits against the exact model's, {model.name}",
        f"KL ≤ {MOST_DIVERGENCE:.0e}, same top token ≥ {LEAST_SAME:.1%}",
        f"{found.divergence:.1e}, {found.share_same:.2%}",
        found.divergence <= MOST_DIVERGENCE and found.share_same >= LEAST_SAME,
    )


def check_memory(model: ModelResult) -> Check:
    found = model.memory_ratio(OURS)
    return Check(
        f"memory beyond imports and the cache, {model.name}",
        f"≤ {MOST_MEMORY}x the file",
        f"{found:.2f}x",
        found <= MOST_MEMORY,
    )


# ---- tables ----


def line(model: ModelResult, task: str) -> str:
    """A task in one line of plain text."""
    cells = [f"{task:22}"]
    for name, rate in model.rates[task].items():
        ratio = "" if name == OURS else f" ({model.ratio(task, OURS, name) or 0:.2f}x)"
        cells.append(f"{name} {rate.median:.1f} ±{rate.spread:.0%}{ratio}")
    if share := model.ratio(task, OURS, BANDWIDTH) if task == "decode" else None:
        cells.append(f"{share:.0%} of {model.bandwidth[task].median / 1e9:.1f} GB/s")
    return "  ".join(cells)


def resources(model: ModelResult) -> str:
    loads = (f"{name} {seconds:.1f}" for name, seconds in model.load_seconds.items())
    peaks = (f"{name} {num_bytes / 1e6:,.0f}" for name, num_bytes in model.peak_bytes.items())
    return (
        f"{'seconds to load':22}  {'  '.join(loads)}\n"
        f"{'peak memory, MB':22}  {'  '.join(peaks)}  the file {model.file_bytes / 1e6:,.0f}"
    )


def markdown(models: list[ModelResult], checked: list[Check], machine: dict[str, str]) -> str:
    parts = [head(machine), *(rate_table(model) for model in models), target_table(checked)]
    return "\n".join(parts)


def head(machine: dict[str, str]) -> str:
    """The first lines of a report"""
    return "".join(f"{name}: {value}  \n" for name, value in machine.items())


def rate_table(model: ModelResult) -> str:
    """Tokens a second, and what loading took; a contender that was not asked has a dash."""
    names = list(model.load_seconds)
    rows = [[task, *(rate_cell(model, task, name) for name in names)] for task in model.rates]
    rows.append(["seconds to load", *(f"{model.load_seconds[name]:.1f}" for name in names)])
    peaks = (f"{model.peak_bytes[name] / 1e6:,.0f}" for name in names)
    rows.append([f"peak memory in MB, of a file of {model.file_bytes / 1e6:,.0f}", *peaks])
    return table([f"{model.name}, tokens a second", *names], rows + accuracy_rows(model, names))


def accuracy_rows(model: ModelResult, names: list[str]) -> list[list[str]]:
    found = [model.accuracy.get(name) for name in names]
    if not any(found):
        return []
    return [
        ["KL against the exact model", *(f"{one.divergence:.1e}" if one else "–" for one in found)],
        ["same top token", *(f"{one.share_same:.2%}" if one else "–" for one in found)],
    ]


def rate_cell(model: ModelResult, task: str, name: str) -> str:
    rate = model.rates[task].get(name)
    if rate is None:
        return "–"
    told = f"{rate.median:.1f} ±{rate.spread:.0%}"
    if name == OURS:
        return told
    remark = "" if model.is_optimised(name) else ", not made for this CPU"
    return f"{told} ({model.ratio(task, OURS, name):.2f}x{remark})"


def target_table(checked: list[Check]) -> str:
    rows = [[check.what, check.target, check.found, check.verdict] for check in checked]
    return table(["target", "wanted", "found", ""], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


# ---- all machines ----


def summary(results: Path) -> str:
    """Every machine with results, and how many times as fast as llama.cpp infinilm is there"""
    paths = sorted(results.glob("*/side_by_side.json"))
    found = {path.parent.name: json.loads(path.read_text()) for path in paths}
    by_task = {
        name: dict(ratios([ModelResult.of(model) for model in content["models"]]))
        for name, content in found.items()
    }
    tasks = dict.fromkeys(task for told in by_task.values() for task in told)
    rows = [[task, *(told.get(task, "–") for told in by_task.values())] for task in tasks]
    named = "".join(f"- {name}: {content['machine']['CPU']}\n" for name, content in found.items())
    return f"{named}\n{table([f'infinilm to {PEER}', *found], rows)}"


def ratios(models: list[ModelResult]) -> Iterator[tuple[str, str]]:
    for model in models:
        for task in model.rates:
            ours, int8 = (model.ratio(task, name, PEER) for name in (OURS, INT8))
            if ours and not model.is_optimised(PEER):
                yield f"{model.name}, {task}", f"{PEER} is not made for it"
            elif ours:
                yield f"{model.name}, {task}", f"{ours:.2f}x" + (f" (int8 {int8:.2f}x)" if int8 else "")
        if OURS in model.accuracy and PEER in model.accuracy:
            ours, theirs = (model.accuracy[name].divergence for name in (OURS, PEER))
            yield f"{model.name}, KL against the exact model", f"{ours:.1e} to {theirs:.1e}"


if __name__ == "__main__":
    print(summary(Path(__file__).parent / "results"), end="")
