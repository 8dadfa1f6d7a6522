"""Servers with the same model and the same load: `python -m benchmarks.serving`.

infinilm's, llama-cpp-python's and xllamacpp's, each in its own process with its threads, all asked by
`infinilm bench serve`'s load generator. Clients that each wait for their answer (a closed loop), then
requests at random that wait for nobody (an open loop), in turn; prompts are random words, never the same
twice, and end-of-text is ignored. While infinilm has the most clients its /health is asked for, again and
again. Then what HTTP adds to the engine's own time a token: the same prompts from coroutines of the engine's
process and through the server. Clients have the same cores as the server.

The peers run in build/peers, which `make bench` makes; one that is missing is left out. Writes to this CPU's
folder in benchmarks/results/ as JSON, Markdown and a chart.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import charts, report
from benchmarks.machine import arguments, folder, machine, write
from benchmarks.side_by_side import BUILT_IN, path_of
from benchmarks.timing import rounds_within
from infinilm import load
from infinilm.bench import Measured, random_prompts
from infinilm.checkpoint import open_checkpoint
from infinilm.load import Answer, Arrivals, Load, Query, Target
from infinilm.load.wire import Address, request
from infinilm.models.registry import read_config

MODEL = BUILT_IN
PEERS = Path("build/peers/bin/python")
PROMPT, NUM_NEW = 128, 64
CLIENTS = {1: 8, 4: 16, 16: 32, 64: 64}  # with so many requests
RATES = (0.5, 1.0, 2.0, 4.0)  # requests a second
NUM_AT_RATE = 16
LIMITS = {"ttft": 1.0, "itl": 0.1}  # of goodput, seconds
AT = 16  # clients, where the targets are
LEAST_TIMES, MOST_ADDED, MOST_HEALTH = 4.0, 0.05, 0.1
MIN_ROUNDS = 1
NUM_PAIRS = 9  # of rounds, with a server and without
BUDGET = 20.0  # seconds of further rounds of a point
PATIENCE = 120.0  # seconds to load a model
HEALTH_EVERY = 0.05  # seconds
CONTROL = 3  # the type of tokens that are no text, in a GGUF file

XLLAMACPP = f"""
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_parallel, params.kv_unified = {max(CLIENTS)}, True
params.n_ctx = {max(CLIENTS) * 2 * (PROMPT + NUM_NEW)}
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(params)
sys.stdin.read()
"""


# ---- servers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """How a server is started on a port with some threads, what shows that it is installed, and what its
    bodies need."""

    command: Callable[[str, int, int], list[str]]
    python: Path = Path(sys.executable)
    module: str = "infinilm"
    extra: Callable[[Path], dict[str, Any]] = lambda path: {"ignore_eos": True}

    @property
    def is_installed(self) -> bool:
        if not self.python.exists():
            return False
        return (
            subprocess.run([self.python, "-c", f"import {self.module}"], capture_output=True).returncode == 0
        )


def without_control_tokens(path: Path) -> dict[str, Any]:
    """For a server that cannot ignore the end of text"""
    with open_checkpoint(path) as checkpoint:
        types = checkpoint.metadata["tokenizer.ggml.token_type"]
    return {"logit_bias": {str(token): -100 for token, kind in enumerate(types) if kind == CONTROL}}


def infinilm_command(path: str, port: int, num_threads: int) -> list[str]:
    options = ["--port", str(port), "--threads", str(num_threads), "--log-level", "warning"]
    return ["-m", "infinilm", "serve", path, *options]


def llama_command(path: str, port: int, num_threads: int) -> list[str]:
    options = {"model": path, "port": port, "n_threads": num_threads, "n_threads_batch": num_threads}
    options |= {"n_ctx": 2 * (PROMPT + NUM_NEW), "interrupt_requests": False, "verbose": False}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ["-m", "llama_cpp.server", *given]


def xllamacpp_command(path: str, port: int, num_threads: int) -> list[str]:
    return ["-c", XLLAMACPP, path, str(port), str(num_threads)]


CONTENDERS = {
    report.OURS: Contender(infinilm_command),
    "llama-cpp-python": Contender(llama_command, PEERS, "llama_cpp.server.app", without_control_tokens),
    "xllamacpp": Contender(xllamacpp_command, PEERS, "xllamacpp"),
}


@contextmanager
def running(name: str, path: Path, num_threads: int) -> Iterator[Target]:
    """A server that answers; RuntimeError with its last words if it does not."""
    contender, port = CONTENDERS[name], free_port()
    # Unbuffered, or its last words would not be the last in the log.
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as log:
        command = [str(contender.python), *contender.command(str(path), port, num_threads)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True
        )
        try:
            address = Address.of(f"http://127.0.0.1:{port}")
            model = wait_for(address, process)
            if model is None:
                log.seek(0)
                words = log.read().strip().splitlines() or ["it said nothing"]
                raise RuntimeError(f"{name} did not start: {words[-1]}")
            yield Target(address, model, extra=contender.extra(path))
        finally:
            process.terminate()
            process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def wait_for(address: Address, process: subprocess.Popen[str]) -> str | None:
    """The name of its model, once it has loaded it"""
    end = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < end:
        try:
            model = asyncio.run(load.find_model(address, None))
            asyncio.run(load.warm_up(Target(address, model), Load(1, 8, 2)))
            return model
        except (OSError, EOFError, ValueError):
            time.sleep(0.2)
    return None


def start(stack: ExitStack, path: Path, num_threads: int) -> dict[str, Target]:
    targets = {}
    for name, contender in CONTENDERS.items():
        if not contender.is_installed:
            print(f"{name} is left out: `make bench` brings it", flush=True)
            continue
        try:
            targets[name] = stack.enter_context(running(name, path, num_threads))
        except RuntimeError as error:
            if name == report.OURS:
                raise
            print(f"{error}; it is left out", flush=True)
    return targets


# ---- what is measured --------------------------------------------------------------------------------------


@dataclass
class Found:
    """By contender: what each number of clients gave in each round, what each rate gave; how long /health
    took meanwhile; and, in seconds a token, the engine alone and through the server."""

    clients: dict[str, dict[int, list[dict[str, Any]]]] = field(default_factory=dict)
    rates: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    health: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)

    def measured(self, name: str, num_clients: int, key: str = "output_tokens_per_second") -> Measured | None:
        rounds = self.clients.get(name, {}).get(num_clients)
        return Measured(tuple(one[key] for one in rounds)) if rounds else None

    def times(self, name: str, num_clients: int) -> float | None:
        """As many tokens a second has infinilm"""
        ours, theirs = self.measured(report.OURS, num_clients), self.measured(name, num_clients)
        return ours.median / theirs.median if ours and theirs and theirs.median else None

    @property
    def added(self) -> float | None:
        """The median of pairs of rounds, each of which found the machine as the other did"""
        pairs = [served / alone for alone, served in zip(self.alone, self.served, strict=True)]
        return statistics.median(pairs) - 1 if pairs else None


class Runs:
    """Numbers the runs, so that no two have the same prompts."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(
        self, target: Target, num_prompts: int, arrivals: Arrivals, health: list[float] | None = None
    ) -> dict[str, Any]:
        self.number += 1
        asked = load.queries(Load(num_prompts, PROMPT, NUM_NEW, "fixed"), self.number)
        run = (
            load.run(target, asked, arrivals) if health is None else watched(target, asked, arrivals, health)
        )
        found = load.measured(asyncio.run(run), arrivals, LIMITS)
        for line in load.complaints(found):
            print(line, flush=True)
        return found


async def watched(
    target: Target, asked: Sequence[Query], arrivals: Arrivals, health: list[float]
) -> list[Answer]:
    """The answers, and beside them the seconds that /health takes again and again"""
    watching = asyncio.create_task(watch(replace(target.address, prefix=""), health))
    try:
        return await load.run(target, asked, arrivals)
    finally:
        watching.cancel()


async def watch(address: Address, health: list[float]) -> None:
    while True:
        start = time.perf_counter()
        try:
            async with request(address, "GET", "/health", {}) as response:
                is_well = response.status == 200
        except (OSError, EOFError):
            is_well = False
        health.append(time.perf_counter() - start if is_well else PATIENCE)
        await asyncio.sleep(HEALTH_EVERY)


def closed_loop(
    targets: dict[str, Target], clients: Sequence[int], num_rounds: int, runs: Runs, found: Found
) -> None:
    found.clients = {name: {} for name in targets}
    for count in clients:
        for _ in rounds_within(num_rounds, MIN_ROUNDS, BUDGET):
            for name, target in targets.items():
                health = found.health if name == report.OURS and count == max(clients) else None
                one = runs(target, CLIENTS.get(count, 2 * count), Arrivals(concurrency=count), health)
                found.clients[name].setdefault(count, []).append(one)
                print(f"{name:18} {load.row(one)}", flush=True)


def open_loop(targets: dict[str, Target], rates: Sequence[float], runs: Runs, found: Found) -> None:
    """A server that answers less than half of what comes is asked no more."""
    found.rates = {name: [] for name in targets}
    left = dict(targets)
    for rate in rates:
        for name, target in list(left.items()):
            one = runs(target, NUM_AT_RATE, Arrivals(rate))
            found.rates[name].append(one)
            print(f"{name:18} {load.row(one)}", flush=True)
            if one["requests_per_second"] < rate / 2:
                del left[name]


def added_time(target: Target, path: Path, num_threads: int, num_rounds: int, found: Found) -> None:
    """The same prompts in the engine's own process and through HTTP; a first round of each is not counted."""
    with open_checkpoint(path) as checkpoint:
        vocab_size = read_config(checkpoint).vocab_size
    asked = [Query(prompt, NUM_NEW) for prompt in random_prompts(vocab_size, PROMPT, CLIENTS[AT], seed=1)]
    with engine_alone(path, num_threads) as alone:
        for number in range(-1, num_rounds):
            engine, served = alone(number), through_server(target, asked, number)
            print(
                f"ms a token, {AT} at once: engine {1e3 * engine:.3f}, served {1e3 * served:.3f}", flush=True
            )
            if number >= 0:
                found.alone.append(engine)
                found.served.append(served)


def through_server(target: Target, asked: Sequence[Query], number: int) -> float:
    """Seconds a token. No round finds the prompts of another."""
    salted = {**target.extra, "cache_salt": f"round {number}"}
    through = Target(target.address, target.model, extra=salted)
    one = load.measured(asyncio.run(load.run(through, asked, Arrivals(concurrency=AT))), Arrivals(), {})
    if one["failed"]:
        raise RuntimeError(f"requests failed: {one['errors']}")
    return float(one["elapsed_seconds"] / one["total_output_tokens"])


@contextmanager
def engine_alone(path: Path, num_threads: int) -> Iterator[Callable[[int], float]]:
    """A process with an engine and no server: what a round takes it, in seconds a token"""
    count = CLIENTS[AT]
    sizes = {"prompt": PROMPT, "num-new": NUM_NEW, "num-prompts": count, "clients": AT}
    given = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.asked", str(path), *given]
    threads = {name: str(num_threads) for name in ("INFINICORE_NUM_THREADS", "OMP_NUM_THREADS")}
    with subprocess.Popen(
        command, env=os.environ | threads, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, told = process.stdin, process.stdout

        def seconds(number: int) -> float:
            print(f"round {number}", file=asked, flush=True)
            return float(told.readline()) / (count * NUM_NEW)

        yield seconds
        asked.close()


# ---- what was found ----------------------------------------------------------------------------------------


def checks(found: Found) -> list[report.Check]:
    checked = []
    for name in found.clients:
        times = found.times(name, AT)
        if name != report.OURS and times is not None:
            what = f"output tokens a second, {AT} clients"
            wanted = f"≥ {LEAST_TIMES:g}x {name}"
            checked.append(report.Check(what, wanted, f"{times:.2f}x", times >= LEAST_TIMES))
    if found.health:
        seconds = load.percentile(sorted(found.health), 0.99)
        wanted, told = f"p99 ≤ {1e3 * MOST_HEALTH:.0f} ms", f"{1e3 * seconds:.1f} ms"
        checked.append(report.Check("/health under load", wanted, told, seconds <= MOST_HEALTH))
    if found.added is not None:
        what = f"what the server adds to the engine's time a token, {AT} clients"
        told = f"{found.added:+.1%}"
        checked.append(report.Check(what, f"≤ {MOST_ADDED:.0%}", told, found.added <= MOST_ADDED))
    return checked


def client_tables(found: Found) -> Iterator[str]:
    names = list(found.clients)
    counts = sorted({count for points in found.clients.values() for count in points})
    for key, title in (("output_tokens_per_second", "output tokens"), ("requests_per_second", "requests")):
        rows = [[str(count), *(rate_cell(found, name, count, key) for name in names)] for count in counts]
        yield report.table([f"{title} a second by clients", *names], rows)
    for key, title in (
        ("time_to_first_token_seconds", "to the first token"),
        ("inter_token_latency_seconds", "between tokens"),
    ):
        rows = [
            [str(count), *(spread_cell(found.clients[name].get(count), key) for name in names)]
            for count in counts
        ]
        yield report.table([f"seconds {title} by clients, p50 / p90 / p99", *names], rows)


def rate_cell(found: Found, name: str, count: int, key: str) -> str:
    rate = found.measured(name, count, key)
    if rate is None:
        return "–"
    times = found.times(name, count) if name != report.OURS else None
    ratio = f" ({times:.2f}x)" if times and key == "output_tokens_per_second" else ""
    return f"{rate.median:.3g} ±{rate.spread:.0%}{ratio}"


def spread_cell(rounds: Sequence[dict[str, Any]] | None, key: str) -> str:
    """Of the last round"""
    if not rounds:
        return "–"
    return " / ".join(load.short(rounds[-1][key][of]).strip() for of in ("p50", "p90", "p99"))


def rate_table(found: Found) -> str:
    names = list(found.rates)
    rates = sorted({one["request_rate"] for points in found.rates.values() for one in points})
    rows = [[f"{rate:g}", *(open_cell(found.rates[name], rate) for name in names)] for rate in rates]
    limits = ", ".join(f"{name} ≤ {most:g} s" for name, most in LIMITS.items())
    title = f"requests a second that arrive: answered, good ({limits}), first token p50 / p90 / p99"
    return report.table([title, *names], rows)


def open_cell(points: Sequence[dict[str, Any]], rate: float) -> str:
    (one,) = [one for one in points if one["request_rate"] == rate] or [None]
    if one is None:
        return "–"
    first = spread_cell([one], "time_to_first_token_seconds")
    return f"{one['requests_per_second']:.2g}, {one['good_requests_per_second']:.2g}, {first}"


def markdown(found: Found, checked: list[report.Check], facts: dict[str, str]) -> str:
    tables = [*client_tables(found), rate_table(found), report.target_table(checked)]
    return "\n".join([report.head(facts), *tables])


def write_results(found: Found, facts: dict[str, str], stem: Path) -> None:
    checked = checks(found)
    print("", *checked, sep="\n")
    content = {"machine": facts, **asdict(found), "targets": [asdict(check) for check in checked]}
    write(stem, content, markdown(found, checked, facts))
    charts.draw_serving(found.clients, found.rates, facts["CPU"], stem.with_suffix(".png"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=MODEL, help="a GGUF file, or the built-in one")
    parser.add_argument("--clients", type=int, action="append", help="how many at once; again for more")
    parser.add_argument("--rate", type=float, action="append", help="requests a second; again for more")
    parser.add_argument("--rounds", type=int, default=3, help="at most; long tasks have fewer")
    options = parser.parse_args()
    path, found, runs = path_of(options.model), Found(), Runs()
    load_told = f"prompts of {PROMPT} words, answers of {NUM_NEW} tokens, {options.threads} threads each"
    facts = machine(options.threads) | {"model": options.model, "load": load_told}
    with ExitStack() as stack:
        targets = start(stack, path, options.threads)
        closed_loop(targets, options.clients or list(CLIENTS), options.rounds, runs, found)
        open_loop(targets, options.rate or RATES, runs, found)
        added_time(targets[report.OURS], path, options.threads, NUM_PAIRS, found)
    is_partial = options.clients or options.rate or options.model != MODEL
    write_results(found, facts, folder(options.threads) / ("partial_serving" if is_partial else "serving"))


if __name__ == "__main__":
    main()
