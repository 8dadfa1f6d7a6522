"""Many requests: at a rate, so many at once, or at rates that rise until the server is saturated."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from infinilm.load.client import Answer, Target, ask, headers_of, message_of
from infinilm.load.measures import head, measured
from infinilm.load.prompts import Arrivals, Load, Query, queries
from infinilm.load.wire import Address, request

MAX_RATES = 12  # of a sweep
LEAST_GAIN = 1.1  # by which a doubled rate must raise what is answered, or the server is saturated


async def run(target: Target, asked: Sequence[Query], arrivals: Arrivals, seed: int = 0) -> list[Answer]:
    """Ask all; what waits for its turn because of a limit is due when it has it."""
    gate = asyncio.Semaphore(arrivals.concurrency) if arrivals.concurrency else nullcontext()
    start = time.perf_counter()

    async def one(query: Query, moment: float) -> Answer:
        await asyncio.sleep(start + moment - time.perf_counter())
        async with gate:
            return await ask(target, query, time.perf_counter() if arrivals.concurrency else start + moment)

    moments = arrivals.moments(len(asked), seed)
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
    (answer,) = await run(target, queries(mean, run=-1), Arrivals())
    if answer.error is not None:
        raise ValueError(f"a first request failed, {answer.error}: {answer.told}")
    return answer.end - answer.due


async def sweep(
    target: Target, load: Load, wanted: Sequence[Arrivals], limits: Mapping[str, float]
) -> AsyncIterator[dict[str, Any]]:
    """What each of them gives; without any, rates from one request after the other, doubled to saturation."""
    seconds = await warm_up(target, load)
    rate, best = float(f"{1 / seconds:.2g}"), 0.0
    for number in range(len(wanted) or MAX_RATES):
        arrivals = wanted[number] if wanted else Arrivals(rate * 2**number)
        answers = await run(target, queries(load, number), arrivals, load.seed)
        found = measured(answers, arrivals, limits)
        yield {**head(target, load), **found}
        if not wanted and found["requests_per_second"] < LEAST_GAIN * best:
            return
        best = max(best, found["requests_per_second"])
