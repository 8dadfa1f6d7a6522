"""What was measured side by side, said in words: rates and ratios, and each target with what was found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from infinilm.bench import Measured

OURS = "infinilm"
INT8 = "infinilm int8"
BANDWIDTH = "the read bandwidth"
MEMORY_TASK = "prefill 512"  # peak memory is taken after it


@dataclass
class ModelResult:
    """One model: tokens a second by task and contender, and what loading took."""

    name: str
    file_bytes: int
    weight_bytes: int  # read for each token: a tied embedding is read as the output
    cache_bytes: int  # the keys and values of MEMORY_TASK
    load_seconds: dict[str, float]
    imported_bytes: dict[str, float]  # what a process held before it loaded the model
    rates: dict[str, dict[str, Measured]] = field(default_factory=dict)
    bandwidth: dict[str, Measured] = field(default_factory=dict)  # bytes a second, during a task
    peak_bytes: dict[str, float] = field(default_factory=dict)

    def ratio(self, task: str, contender: str, against: str) -> float | None:
        """How many times as fast a contender is, or which share of the bandwidth it uses."""
        rates = self.rates.get(task, {})
        if contender not in rates:
            return None
        if against == BANDWIDTH:
            return rates[contender].median * self.weight_bytes / self.bandwidth[task].median
        return rates[contender].median / rates[against].median if against in rates else None

    def noise(self, task: str, *contenders: str) -> float:
        """The largest spread of these."""
        return max(self.rates[task][name].spread for name in contenders if name in self.rates[task])

    def memory_ratio(self, contender: str) -> float:
        """What loading and a prompt took beyond imports and the cache, as a multiple of the file."""
        taken = self.peak_bytes[contender] - self.imported_bytes[contender] - self.cache_bytes
        return taken / self.file_bytes


# ---- targets ----


@dataclass(frozen=True)
class Target:
    """infinilm is at least so many times as fast as a peer, or uses such a share of the bandwidth."""

    model: str
    task: str
    against: str
    least: float


TARGETS = (
    Target("135M Q4_1", "decode", "llama.cpp", 2.5),
    Target("135M Q4_1", "prefill 512", "llama.cpp", 8.0),
    Target("135M Q4_1", "prefill 512", "transformers", 1.0),
    Target("135M Q4_1", "decode, context 8192", "llama.cpp", 3.0),
    Target("1B Q4_0", "decode", BANDWIDTH, 0.85),
    Target("1B Q4_0", "decode", "llama.cpp", 1.7),
    Target("1B Q8_0", "decode", BANDWIDTH, 0.85),
    Target("1B Q8_0", "decode", "llama.cpp", 1.6),
    Target("1B BF16", "decode", BANDWIDTH, 0.85),
    Target("1B BF16", "decode", "llama.cpp", 1.3),
    Target("1B Q4_0", "prefill 512", "llama.cpp", 5.0),
    Target("1B Q4_0", "prefill 512", "transformers", 1.5),
    Target("1B Q8_0", "prefill 512", "llama.cpp", 5.0),
    Target("1B Q8_0", "prefill 512", "transformers", 1.5),
    Target("1B Q4_0", "decode, 8 streams", "llama.cpp", 4.0),
    Target("1B Q4_0", "decode, 16 streams", "llama.cpp", 6.0),
)
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


def checks(models: list[ModelResult], first_token_seconds: float) -> Iterator[Check]:
    """Every target whose task and peer were measured."""
    by_name = {model.name: model for model in models}
    for target in TARGETS:
        if target.model in by_name and (check := check_ratio(target, by_name[target.model])):
            yield check
    yield Check(
        "from the command to the first token, 135M Q4_1",
        f"≤ {MOST_FIRST_TOKEN_SECONDS} s beyond `import torch`",
        f"{first_token_seconds:.2f} s",
        first_token_seconds <= MOST_FIRST_TOKEN_SECONDS,
    )
    yield from (check_memory(model) for model in models if not math.isnan(model.memory_ratio(OURS)))


def check_ratio(target: Target, model: ModelResult) -> Check | None:
    ours, int8 = (model.ratio(target.task, name, target.against) for name in (OURS, INT8))
    if ours is None:
        return None
    is_share = target.against == BANDWIDTH
    wanted = f"≥ {target.least:.0%} of {BANDWIDTH}" if is_share else f"≥ {target.least:g}x {target.against}"
    found = as_text(ours, is_share) + (f" (int8 {as_text(int8, is_share)})" if int8 else "")
    noise = model.noise(target.task, OURS, target.against)
    found += f", noisy: ±{noise:.0%}" if noise > MOST_NOISE else ""
    return Check(f"{target.task}, {target.model}", wanted, found, ours >= target.least)


def check_memory(model: ModelResult) -> Check:
    found = model.memory_ratio(OURS)
    return Check(
        f"memory beyond imports and the cache, {model.name}",
        f"≤ {MOST_MEMORY}x the file",
        f"{found:.2f}x",
        found <= MOST_MEMORY,
    )


def as_text(ratio: float, is_share: bool) -> str:
    return f"{ratio:.1%}" if is_share else f"{ratio:.2f}x"


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
    parts = ["".join(f"{name}: {value}  \n" for name, value in machine.items())]
    parts += [rate_table(model) for model in models]
    parts += [target_table(checked)]
    return "\n".join(parts)


def rate_table(model: ModelResult) -> str:
    """Tokens a second, and what loading took; a contender that was not asked has a dash."""
    names = list(model.load_seconds)
    rows = [[task, *(rate_cell(model, task, name) for name in names)] for task in model.rates]
    rows.append(["seconds to load", *(f"{model.load_seconds[name]:.1f}" for name in names)])
    peaks = (f"{model.peak_bytes[name] / 1e6:,.0f}" for name in names)
    rows.append([f"peak memory in MB, of a file of {model.file_bytes / 1e6:,.0f}", *peaks])
    return table([f"{model.name}, tokens a second", *names], rows)


def rate_cell(model: ModelResult, task: str, name: str) -> str:
    rate = model.rates[task].get(name)
    if rate is None:
        return "–"
    ratio = model.ratio(task, OURS, name)
    return f"{rate.median:.1f} ±{rate.spread:.0%}" + (f" ({ratio:.2f}x)" if ratio and name != OURS else "")


def target_table(checked: list[Check]) -> str:
    rows = [[check.what, check.target, check.found, check.verdict] for check in checked]
    return table(["target", "wanted", "found", ""], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])
