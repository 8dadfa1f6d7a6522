"""One request: how a server is asked, and what is heard of its answer, with the times."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from infinilm.load.prompts import Query
from infinilm.load.wire import Address, Response, WireError, request


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

    def body(self, query: Query) -> bytes:
        asked: dict[str, Any] = {"prompt": query.prompt}
        if self.endpoint == "chat":
            asked = {"messages": [{"role": "user", "content": query.prompt}]}
        how = {"model": self.model, "max_tokens": query.num_tokens, "temperature": 0.0}
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


async def ask(target: Target, query: Query, due: float) -> Answer:
    """Never raises for what a server or the way to it does."""
    answer = Answer(due, sent=time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout):
            await listen(target, query, answer)
    except Failure as error:
        answer.error, answer.told = error.args
    except TimeoutError:
        answer.error, answer.told = "timeout", f"no whole answer within {target.timeout:g} s"
    except (OSError, EOFError, WireError) as error:
        answer.error, answer.told = type(error).__name__, str(error)
    answer.end = time.perf_counter()
    return answer


async def listen(target: Target, query: Query, answer: Answer) -> None:
    headers = headers_of(target.api_key)
    async with request(target.address, "POST", target.path, headers, target.body(query)) as response:
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
        found = json.loads(data.decode())
    except ValueError as error:
        raise Failure("not JSON", repr(data[:200])) from error
    if not isinstance(found, dict):
        raise Failure("not JSON", repr(data[:200]))
    return found


def has_text(choice: Mapping[str, Any]) -> bool:
    told = choice.get("delta") or choice
    return any(told.get(name) for name in ("text", "content", "reasoning_content", "reasoning"))


def message_of(body: bytes) -> str:
    """The message of an error, whatever its shape"""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
