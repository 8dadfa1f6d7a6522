"""`infinilm bench`: how fast a model runs here, and how fast a server answers."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.options import (
    add_engine_options,
    add_model_options,
    add_number,
    engine_options,
    json_object,
    model_options,
    positive,
)

if TYPE_CHECKING:
    from infinilm.load import Arrivals, Load
    from infinilm.load.wire import Address


LOAD_HELP = (
    "Requests arrive at random, whether or not those before them were answered. Without --request-rate rates "
    "are doubled until the server answers no more for it; with --max-concurrency alone a client asks again "
    "when it has its answer. Failed requests are counted by what went wrong. Times are seconds."
)


def add(commands: Any) -> None:
    """`infinilm bench latency | throughput | serve`"""
    bench = commands.add_parser("bench", help="measure speed").add_subparsers(required=True, metavar="WHAT")
    add_latency(bench.add_parser("latency", help="prefill and decode tokens per second"))
    add_throughput(bench.add_parser("throughput", help="many requests at once, through the engine"))
    add_load(bench.add_parser("serve", help="load for any server of OpenAI's API", epilog=LOAD_HELP))


def add_latency(command: argparse.ArgumentParser) -> None:
    add_model_options(command)
    add_number(command, "--input-len", 512, "tokens of a prompt")
    add_number(command, "--output-len", 64, "tokens of an answer")
    add_number(command, "--batch-size", 1, "streams at once")
    add_number(command, "--rounds", 5, "that are counted")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=run_latency)


def add_throughput(command: argparse.ArgumentParser) -> None:
    add_model_options(command)
    add_engine_options(command)
    add_number(command, "--num-prompts", 64, "requests in all")
    add_number(command, "--input-len", 128, "tokens of each prompt, drawn at random")
    add_number(command, "--output-len", 64, "tokens of an answer")
    add_number(command, "--concurrency", 16, "requests in the engine at once, at most")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=run_throughput)


def add_load(command: argparse.ArgumentParser) -> None:
    add_server_options(command)
    add_pace_options(command)
    add_question_options(command)
    command.add_argument(
        "--goodput",
        type=limit,
        nargs="+",
        default=[],
        metavar="ttft:SECONDS",
        help="count requests whose first token (ttft:0.5) and further ones on average (itl:0.05) are in time",
    )
    command.add_argument("--chart", type=Path, metavar="FILE", help="draw what was found, by matplotlib")
    command.add_argument("--json", action="store_true", help="print a JSON object a line for each rate")
    command.set_defaults(run=run_load)


def add_server_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="http, https or unix:/PATH"
    )
    command.add_argument("--model", help="its name there; the first one there is if left out")
    command.add_argument("--api-key", metavar="KEY", help="that is sent with each request")
    command.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="completions if left out"
    )
    add_number(command, "--timeout", 600.0, "of a request", "SECONDS")


def add_pace_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--request-rate", type=float, nargs="+", metavar="R", help="requests a second, one or several; or inf"
    )
    command.add_argument("--max-concurrency", type=int, nargs="+", metavar="N", help="requests at once")
    add_number(command, "--num-prompts", 128, "requests at each rate")


def add_question_options(command: argparse.ArgumentParser) -> None:
    add_number(command, "--input-len", 128, "tokens of a prompt on average")
    add_number(command, "--output-len", 64, "tokens of an answer on average")
    command.add_argument(
        "--lengths", choices=("lognormal", "fixed"), default="lognormal", help="lognormal if left out"
    )
    command.add_argument(
        "--token-ids", type=int, metavar="N", help="prompts of token ids below N, not of words"
    )
    add_number(command, "--seed", 0, "of lengths, prompts and arrivals")
    command.add_argument(
        "--extra-body",
        type=json_object,
        default={"ignore_eos": True},
        metavar="JSON",
        help="further fields of each request; '{\"ignore_eos\": true}', for full answers, if left out",
    )


def limit(text: str) -> tuple[str, float]:
    """For --goodput"""
    name, _, seconds = text.partition(":")
    with suppress(ValueError):
        if name in ("ttft", "itl") and float(seconds) > 0:
            return name, float(seconds)
    raise argparse.ArgumentTypeError(f"must be ttft:SECONDS or itl:SECONDS, above 0, but is {text!r}")


def run_latency(options: argparse.Namespace) -> None:
    from infinilm.bench import Workload, measure_latency

    workload = Workload(options.input_len, options.output_len, options.batch_size, options.rounds)
    measured = measure_latency(workload, options.model, **model_options(options))
    if options.json:
        values = {name: value.median for name, value in measured.items()}
        spreads = {f"{name}_spread": value.spread for name, value in measured.items()}
        print(json.dumps(values | spreads))
        return
    for name, value in measured.items():
        print(f"{name.replace('_', ' '):34} {value.median:18,.1f} ±{value.spread:.0%}")


def run_throughput(options: argparse.Namespace) -> None:
    from infinilm.bench import Requests, measure_throughput

    requests = Requests(options.num_prompts, options.input_len, options.output_len, options.concurrency)
    measured = measure_throughput(requests, options.model, **engine_options(options))
    if options.json:
        print(json.dumps(measured))
        return
    for name, value in measured.items():
        numbers = value.items() if isinstance(value, dict) else [("", value)]
        shown = "  ".join(f"{of} {number:,.4g}".strip() for of, number in numbers)
        print(f"{name.replace('_', ' '):34} {shown}")


def run_load(options: argparse.Namespace) -> None:
    import asyncio

    from infinilm import load

    if options.chart is not None:
        load.check_chart(options.chart)  # before minutes of load
    asked = load.Load(
        options.num_prompts,
        options.input_len,
        options.output_len,
        options.lengths,
        options.token_ids,
        options.seed,
    )
    found = asyncio.run(measure_load(options, asked, arrivals_of(options)))
    if options.chart is not None:
        load.draw(found, options.chart)


def arrivals_of(options: argparse.Namespace) -> list[Arrivals]:
    """Every rate with every limit; none of either is a sweep."""
    from infinilm.load import Arrivals

    rates, limits = options.request_rate or [], options.max_concurrency or []
    for name, values in (("request-rate", rates), ("max-concurrency", limits)):
        for value in values:
            if not value > 0:
                raise ValueError(f"--{name} must be above 0, but is {value}")
    if not rates and not limits:
        return []
    return [Arrivals(rate, most) for rate in rates or [float("inf")] for most in limits or [None]]


async def model_there(options: argparse.Namespace, address: Address) -> str:
    from infinilm import load

    try:
        return await load.find_model(address, options.api_key)
    except OSError as error:
        raise ValueError(
            f"there is no server at {options.base_url}: {error}; start one by infinilm serve, or name "
            "another by --base-url"
        ) from error


async def measure_load(
    options: argparse.Namespace, asked: Load, arrivals: list[Arrivals]
) -> list[dict[str, Any]]:
    from infinilm import load
    from infinilm.load.wire import Address

    address = Address.of(options.base_url)
    if options.token_ids is not None and options.endpoint == "chat":
        raise ValueError("--token-ids needs --endpoint completions; a chat is made of words")
    positive("--timeout", options.timeout)
    model = options.model or await model_there(options, address)
    target = load.Target(
        address, model, options.endpoint, options.api_key, options.extra_body, options.timeout
    )
    if not options.json:
        print(f"{model}: {options.num_prompts} requests a rate, {asked.distribution}\n{load.COLUMNS}")
    found = []
    async for one in load.sweep(target, asked, arrivals, dict(options.goodput)):
        found.append(one)
        print(
            json.dumps(one) if options.json else "\n".join([load.row(one), *load.complaints(one)]), flush=True
        )
    return found
