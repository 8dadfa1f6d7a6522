"""Load for any server of OpenAI's API, and what its callers see: tokens a second, times, errors.

An open loop: requests arrive at random, so many a second on average (a Poisson process), whether or not
those before them have been answered; a slow server does not slow down who asks it. With a limit on requests
at once and no rate it is a closed loop: so many clients, each with its next request when it has its answer.

What is measured, for each request:
- time to the first token: from the moment it was due to the first text of its answer, connecting included;
- inter-token latency: between two chunks that have text. A server may put several tokens into a chunk, which
  `tokens_per_chunk` tells; the time per output token divides by tokens instead;
- tokens: by the usage that the server tells at the end, or, where it tells none, by the chunks that have
  text (`tokens_counted_by`).

A request that fails is counted by what went wrong, and in nothing else. No torch here: a client is light.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from infinilm.wire import Address, Response, WireError, request

SIGMA = 0.5  # of a lognormal distribution's logarithm
MOST = 4  # times the mean: no length is beyond it
MAX_RATES = 12  # of a sweep
LEAST_GAIN = 1.1  # by which a doubled rate must raise what is answered, or the server is saturated
# One token each in most vocabularies
WORDS = """
    the of and to in is that for it as with was on be by at from are this have or an they which one you had
    not but what all were when we there can your said if do will each about how up out them then she many
    some so these would other into has more her two like him see time could no make than first been its who
    now people my made over did down only way find use may water long little very after word called just
    where most know get through back much go good new write our me man too any day same right look think
    also around another came come work three must because does part even place well such here take why help
    put different away again off went old number great tell men say small every found still between name
""".split()  # noqa: SIM905


# ---- what is asked -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Requests: how many, and how long their prompts and answers are, on average or each."""

    num_prompts: int = 128
    input_len: int = 128
    output_len: int = 64
    lengths: str = "lognormal"  # or "fixed"
    token_ids: int | None = None  # prompts of ids below it; of words if None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                told = f"{name.replace('_', '-')} must be at least 1, but is {getattr(self, name)}"
                raise ValueError(told)
        if self.lengths not in ("lognormal", "fixed"):
            raise ValueError(f"lengths must be lognormal or fixed, but is {self.lengths!r}")
        if self.token_ids is not None and self.token_ids < 1:
            raise ValueError(f"token-ids must be at least 1, but is {self.token_ids}")

    @property
    def distribution(self) -> str:
        """In words"""
        if self.lengths == "fixed":
            return f"prompts of {self.input_len} and answers of {self.output_len} tokens"
        return (
            f"lognormal lengths, sigma {SIGMA:g}, at most {MOST} times the mean: "
            f"prompts of {self.input_len} and answers of {self.output_len} tokens on average"
        )


@dataclass(frozen=True)
class Question:
    prompt: str | list[int]
    num_tokens: int  # of the answer


def questions(load: Load, run: int) -> list[Question]:
    """Lengths are the same in every run, prompts are not: no run finds those of another in a cache."""
    of_lengths, of_words = random.Random(load.seed), random.Random(f"{load.seed} {run}")
    return [
        Question(prompt(load, drawn(load, load.input_len, of_lengths), of_words), num_tokens)
        for num_tokens in [drawn(load, load.output_len, of_lengths) for _ in range(load.num_prompts)]
    ]


def drawn(load: Load, mean: int, chosen: random.Random) -> int:
    if load.lengths == "fixed":
        return mean
    length = round(chosen.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))
    return min(max(length, 1), MOST * mean)


def prompt(load: Load, length: int, chosen: random.Random) -> str | list[int]:
    if load.token_ids is not None:
        return [chosen.randrange(load.token_ids) for _ in range(length)]
    return " ".join(chosen.choices(WORDS, k=length))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests are due: a Poisson process, or all at once"""
    chosen, moment, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(moment)
        moment += chosen.expovariate(rate) if math.isfinite(rate) else 0.0
    return found


# ---- one request -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The server, and how it is to be asked."""

    address: Address
    model: str
    endpoint: str = "completions"  # or "chat"
    api_key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of each body
    timeout: float = 600.0  # seconds for a request

    @property
    def path(self) -> str:
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, question: Question) -> bytes:
        asked: dict[str, Any] = {"prompt": question.prompt}
        if self.endpoint == "chat":
            asked = {"messages": [{"role": "user", "content": question.prompt}]}
        how = {"model": self.model, "max_tokens": question.num_tokens, "temperature": 0.0}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**asked, **how, **streamed, **self.extra}).encode()


def headers_of(api_key: str | None) -> dict[str, str]:
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return {"content-type": "application/json", "accept": "text/event-stream, application/json", **key}


@dataclass
class Answer:
    """What came of a request, with times by the monotonic clock."""

    due: float
    sent: float = math.nan
    end: float = math.nan
    moments: list[float] = field(default_factory=list)  # of chunks with text
    num_prompt: int | None = None  # tokens, as the server counts them
    num_usage: int | None = None
    is_whole: bool = False
    error: str | None = None  # what kind
    told: str = ""  # what the server said of it

    @property
    def num_tokens(self) -> int:
        return len(self.moments) if self.num_usage is None else self.num_usage

    @property
    def first(self) -> float:
        return self.moments[0] - self.due

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.moments)]

    @property
    def seconds_a_token(self) -> float:
        """After the first"""
        return (self.moments[-1] - self.moments[0]) / max(self.num_tokens - 1, 1)


class Failure(Exception):
    """What kind of error an answer is, and what the server said of it."""


async def ask(target: Target, question: Question, due: float) -> Answer:
    """Never raises for what a server or the way to it does."""
    answer = Answer(due, sent=time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout):
            await listen(target, question, answer)
    except Failure as error:
        answer.error, answer.told = error.args
    except TimeoutError:
        answer.error, answer.told = "timeout", f"no whole answer within {target.timeout:g} s"
    except (OSError, EOFError, WireError) as error:
        answer.error, answer.told = type(error).__name__, str(error)
    answer.end = time.perf_counter()
    return answer


async def listen(target: Target, question: Question, answer: Answer) -> None:
    headers = headers_of(target.api_key)
    async with request(target.address, "POST", target.path, headers, target.body(question)) as response:
        if response.status != 200:
            raise Failure(f"HTTP {response.status}", message_of(await response.whole()))
        async for data in events(response):
            note(answer, data)
    if not answer.is_whole:
        raise Failure("cut off", "the stream ended before its answer had")
    if not answer.moments:
        raise Failure("no text", "the answer has no text, so that nothing could be timed")


async def events(response: Response) -> AsyncIterator[bytes]:
    """The data of server-sent events; OpenAI's have one line each"""
    async for line in response.lines():
        if line.startswith(b"data:"):
            yield line[5:].strip()


def note(answer: Answer, data: bytes) -> None:
    """What an event says"""
    if data.startswith(b"[DONE]"):
        answer.is_whole = True
        return
    try:
        note_chunk(answer, parsed(data), data)
    except (AttributeError, TypeError, LookupError, ValueError) as error:
        raise Failure("not a chunk", repr(data[:200])) from error


def note_chunk(answer: Answer, chunk: Mapping[str, Any], data: bytes) -> None:
    if error := chunk.get("error"):
        kind = error.get("type") if isinstance(error, dict) else None
        raise Failure(f"error event {kind or ''}".strip(), message_of(data))
    for choice in chunk.get("choices") or ():
        answer.is_whole |= choice.get("finish_reason") is not None
        if has_text(choice):
            answer.moments.append(time.perf_counter())
    if usage := chunk.get("usage"):
        answer.num_prompt, answer.num_usage = (
            int(usage[name]) for name in ("prompt_tokens", "completion_tokens")
        )


def parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise Failure("not JSON", repr(data[:200])) from error
    if not isinstance(found, dict):
        raise Failure("not JSON", repr(data[:200]))
    return found


def has_text(choice: Mapping[str, Any]) -> bool:
    told = choice.get("delta") or choice
    return any(told.get(name) for name in ("text", "content", "reasoning_content", "reasoning"))


def message_of(body: bytes) -> str:
    """Of an error, whatever its shape"""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")


# ---- many --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """Requests a second, and how many there may be at once, if there is a limit."""

    rate: float = math.inf
    concurrency: int | None = None


async def run(target: Target, asked: Sequence[Question], pace: Pace, seed: int = 0) -> list[Answer]:
    """Ask all; what waits for its turn because of a limit is due when it has it."""
    gate = asyncio.Semaphore(pace.concurrency) if pace.concurrency else nullcontext()
    start = time.perf_counter()

    async def one(question: Question, moment: float) -> Answer:
        await asyncio.sleep(start + moment - time.perf_counter())
        async with gate:
            return await ask(target, question, time.perf_counter() if pace.concurrency else start + moment)

    moments = arrivals(pace.rate, len(asked), seed)
    return await asyncio.gather(*(one(*both) for both in zip(asked, moments, strict=True)))


async def find_model(address: Address, api_key: str | None) -> str:
    """The first that the server tells of"""
    async with request(address, "GET", "/models", headers_of(api_key)) as response:
        body = await response.whole()
        if response.status != 200:
            raise ValueError(f"the server's list of models is HTTP {response.status}: {message_of(body)}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError("the server tells of no model; name one by --model") from error


async def warm_up(target: Target, load: Load) -> float:
    """The seconds of one request of the mean lengths, which is not counted"""
    mean = Load(1, load.input_len, load.output_len, "fixed", load.token_ids, load.seed)
    (answer,) = await run(target, questions(mean, run=-1), Pace())
    if answer.error is not None:
        raise ValueError(f"a first request failed, {answer.error}: {answer.told}")
    return answer.end - answer.due


async def sweep(
    target: Target, load: Load, paces: Sequence[Pace], limits: Mapping[str, float]
) -> AsyncIterator[dict[str, Any]]:
    """What each pace gives; without any, rates from one request after the other, doubled to saturation."""
    seconds = await warm_up(target, load)
    rate, best = float(f"{1 / seconds:.2g}"), 0.0
    for number in range(len(paces) or MAX_RATES):
        pace = paces[number] if paces else Pace(rate * 2**number)
        answers = await run(target, questions(load, number), pace, load.seed)
        found = measured(answers, pace, limits)
        yield {**head(target, load), **found}
        if not paces and found["requests_per_second"] < LEAST_GAIN * best:
            return
        best = max(best, found["requests_per_second"])


# ---- what came of them -------------------------------------------------------------------------------------


def head(target: Target, load: Load) -> dict[str, Any]:
    return {
        "base_url": target.address.uds or target.address.authority,
        "endpoint_type": target.endpoint,
        "model_id": target.model,
        "distribution": load.distribution,
        **vars(load),
    }


def measured(answers: Sequence[Answer], pace: Pace, limits: Mapping[str, float]) -> dict[str, Any]:
    """In the words of `bench throughput`, then in those of `vllm bench serve`"""
    whole = [answer for answer in answers if answer.error is None]
    seconds = max(answer.end for answer in answers) - min(answer.due for answer in answers)
    inputs, num_output = [one.num_prompt for one in whole], sum(one.num_tokens for one in whole)
    num_input = None if None in inputs else sum(filter(None, inputs))  # not every server tells
    num_chunks = sum(len(one.moments) for one in whole)
    is_counted = all(one.num_usage is not None for one in whole)
    failed = [answer for answer in answers if answer.error is not None]
    found = {
        "request_rate": pace.rate if math.isfinite(pace.rate) else "inf",
        "max_concurrency": pace.concurrency,
        "completed": len(whole),
        "failed": len(failed),
        "errors": dict(Counter(one.error for one in failed)),
        "error_messages": {one.error: one.told for one in reversed(failed)},
        "elapsed_seconds": seconds,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "tokens_counted_by": "usage" if is_counted else "chunks",
        "tokens_per_chunk": num_output / num_chunks if num_chunks and is_counted else None,
        "requests_per_second": len(whole) / seconds,
        "total_tokens_per_second": None if num_input is None else (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "time_to_first_token_seconds": spread_of([one.first for one in whole]),
        "inter_token_latency_seconds": spread_of([gap for one in whole for gap in one.gaps]),
        "time_per_output_token_seconds": spread_of([one.seconds_a_token for one in whole]),
        "goodput_limits_seconds": dict(limits),
        "good_requests_per_second": sum(is_good(one, limits) for one in whole) / seconds if limits else None,
        "most_seconds_sent_late": max(answer.sent - answer.due for answer in answers),
    }
    return found | vllm_words(found)


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Its first token came in time, and the others did on average."""
    found = {"ttft": answer.first, "itl": answer.seconds_a_token}
    return all(found[name] <= most for name, most in limits.items())


def vllm_words(found: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "duration": "elapsed_seconds",
        "request_throughput": "requests_per_second",
        "request_goodput": "good_requests_per_second",
        "output_throughput": "output_tokens_per_second",
        "total_token_throughput": "total_tokens_per_second",
    }
    spreads = {
        "ttft": "time_to_first_token_seconds",
        "tpot": "time_per_output_token_seconds",
        "itl": "inter_token_latency_seconds",
    }
    return {theirs: found[ours] for theirs, ours in names.items()} | {
        f"{'median' if of == 'p50' else of}_{theirs}_ms": None if value is None else 1e3 * value
        for theirs, ours in spreads.items()
        for of, value in found[ours].items()
    }


def spread_of(seconds: Sequence[float]) -> dict[str, Any]:
    """Their mean, and what half of them, nine tenths and all but a hundredth do not exceed"""
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    ordered = sorted(seconds)
    shares = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
    return {"mean": statistics.fmean(ordered)} | {
        name: percentile(ordered, share) for name, share in shares.items()
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of them that so large a share does not exceed"""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


# ---- as a person reads it ----------------------------------------------------------------------------------

COLUMNS = (
    f"{'rate':>11} {'requests/s':>11} {'output tok/s':>13} {'total tok/s':>12}  {'first token, s':^20}  "
    f"{'between tokens, s':^20}  {'goodput/s':>9} {'failed':>7}\n"
    f"{'':>50}  {'p50    p90    p99':^20}  {'p50    p90    p99':^20}"
)


def row(found: Mapping[str, Any]) -> str:
    rate = f"{float(found['request_rate']):g}"
    if found["max_concurrency"]:
        rate = f"{'' if rate == 'inf' else f'{rate}, '}{found['max_concurrency']} at once"
    spreads = (
        " ".join(short(found[name][of]) for of in ("p50", "p90", "p99"))
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
    )
    return (
        f"{rate:>11} {found['requests_per_second']:11.3g} {found['output_tokens_per_second']:13.4g} "
        f"{short(found['total_tokens_per_second'], 4):>12}  {'  '.join(spreads)}  "
        f"{short(found['good_requests_per_second']):>9} {found['failed']:7}"
    )


def short(value: float | None, num_digits: int = 3) -> str:
    return f"{'–' if value is None else format(value, f'.{num_digits}g'):>6}"


def complaints(found: Mapping[str, Any]) -> list[str]:
    """A line for each kind of error"""
    return [
        f"        {count} failed, {kind}: {found['error_messages'][kind]}"
        for kind, count in found["errors"].items()
    ]


def draw(rates: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens a second, and the times of tokens, by the rate of requests"""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    figure.suptitle(f"{rates[0]['model_id']}; {rates[0]['distribution']}", fontsize=9)
    panels = figure.subplots(1, 3)
    offered, name = paces_of(rates)
    panels[0].plot(offered, [one["output_tokens_per_second"] for one in rates], "o-")
    panels[0].set(ylabel="output tokens a second")
    keys = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    for panel, key in zip(panels[1:], keys, strict=True):
        for of in ("p50", "p90", "p99"):
            panel.plot(offered, [one[key][of] or math.nan for one in rates], "o-", label=of)
        panel.set(ylabel=key.replace("_seconds", ", s").replace("_", " "))
        panel.legend(frameon=False)
    for panel in panels:
        panel.set(xlabel=name, ylim=0)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def paces_of(rates: Sequence[Mapping[str, Any]]) -> tuple[list[float], str]:
    if all(one["request_rate"] == "inf" for one in rates):
        return [one["max_concurrency"] or one["num_prompts"] for one in rates], "requests at once"
    done = [one["requests_per_second"] for one in rates]
    offered = [
        most if one["request_rate"] == "inf" else one["request_rate"]
        for one, most in zip(rates, done, strict=True)
    ]
    return offered, "requests a second that arrive"
