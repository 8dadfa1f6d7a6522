"""A call as a handler is given it, what it may be answered with, and the server that it came to."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from starlette.datastructures import QueryParams
from starlette.types import Scope

from infinilm.folder import parse_object
from infinilm.server.bodies import Body, as_body_errors, read
from infinilm.server.errors import ErrorBody, HttpError, engine_dead, openai_error
from infinilm.server.service import Service
from infinilm.server.stored import Owner, Store
from infinilm.server.turn import Caller

LARGE_BODY = 64 << 10  # bytes, from which the event loop neither reads JSON nor makes anything of it
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"

B = TypeVar("B", bound=Body)
T = TypeVar("T")
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
NUMBERS_AT_ONCE = 4 << 10
MAX_DEPTH = 256  # of JSON: Python's own limit is another in another thread, and when it is written again
STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # in and out, as signed bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What holds for every request. Keys are of callers, any of which lets them in; without one all may."""

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()  # of pages that may call from a browser, beside the server's own
    max_body: int = 16 << 20  # bytes
    max_bodies: int = 256 << 20  # of all bodies that are held at once
    send_seconds: float = 30.0  # for a caller to send a request
    request_seconds: float | None = None  # for an answer
    heartbeat_seconds: float = 10.0  # of silence in a stream


@dataclass
class Server:
    """What the routes share. There is no service while the model is loaded, nor after it could not be."""

    settings: Settings = field(default_factory=Settings)
    service: Service | None = None
    refusal: HttpError | None = None  # of all that is new, once the server is to end
    statuses: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # of answers, by method and path
    calls: set[Call] = field(default_factory=set)  # that are being answered
    bodies: set[asyncio.Timeout] = field(default_factory=set)  # limits of those that have not come whole
    num_held: int = 0  # bytes of bodies, and of stored answers that they go on from
    store: Store = field(default_factory=Store)

    def hold(self, call: Call, num_bytes: int, what: str = "the body") -> None:
        """More for a call, until it ends; HttpError if that is too much, for one or for all."""
        call.num_bytes += num_bytes
        self.num_held += num_bytes
        if call.num_bytes > self.settings.max_body:
            raise too_large(self.settings.max_body, what)
        if self.num_held > self.settings.max_bodies:
            told = "the server holds as many bodies as it can; try again in 1 s"
            raise HttpError(429, told, "rate_limit_error", headers={"retry-after": "1"})

    @property
    def reason_to_refuse(self) -> HttpError | None:
        """Why nothing that is new is answered: the server is to end, or its engine is dead."""
        is_dead = self.service is not None and self.service.llm.death is not None
        return self.refusal or (engine_dead() if is_dead else None)

    def end_bodies(self) -> None:
        """Refuse what has not come whole, for the reason that there is."""
        for limit in self.bodies:
            if not limit.expired():
                limit.reschedule(0.0)

    def end_calls(self, error: BaseException) -> None:
        """Answer all that are under way with an error: a body, or an event that ends a stream."""
        for call in list(self.calls):
            call.end(error)


def too_large(limit: int, what: str = "the body") -> HttpError:
    return HttpError(413, f"{what} must have at most {limit} bytes, but has more")


@dataclass(eq=False, kw_only=True)
class Call(Caller):
    """A request, read whole."""

    server: Server
    scope: Scope
    body: bytearray = field(default_factory=bytearray)
    task: asyncio.Task[None] | None = None
    error: BaseException | None = None  # the server's reason to end it

    @property
    def service(self) -> Service:
        if self.server.service is None:
            raise HttpError(
                503, "Loading model", "unavailable_error", code="loading", headers={"retry-after": "1"}
            )
        return self.server.service

    @property
    def owner(self) -> Owner:
        """Whose the answers are that this one asks for, and may name"""
        owner: Owner = self.scope["infinilm.owner"]
        return owner

    def query(self, kind: type[B]) -> B:
        """The query as one of its kind, or BodyError."""
        return read(kind, QueryParams(self.scope["query_string"]))

    async def read(self, kind: type[B]) -> B:
        """The body as one of its kind, or BodyError."""
        return await self.made(self.parse, kind)

    async def made(self, make: Callable[..., T], *given: Any) -> T:
        """What is made of the body, off the event loop where that is large"""
        service = self.service
        return make(*given) if self.num_bytes < LARGE_BODY else await service.off_loop(make, *given)

    def parse(self, kind: type[B]) -> B:
        with as_body_errors(kind.model_fields):
            given = parse_object(bytes(self.body), "body", ValueError)
            check_depth(bytes(self.body))
        return read(kind, given)

    def end(self, error: BaseException) -> None:
        self.error = error
        if self.task is not None:
            self.task.cancel()


def check_depth(body: bytes) -> None:
    """Of a body that is JSON, which has not too many values"""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    steps = memoryview(STRINGS.sub(b"", body).translate(STEPS, NO_BRACKETS)).cast("b")
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise ValueError(f"body: its JSON is nested more than {MAX_DEPTH} deep")


@dataclass(frozen=True)
class Events:
    """A stream. `source` gives one or several events at a time; `beat` one for when it has been silent;
    `ending` those that tell of an error, the last ones."""

    source: AsyncIterator[bytes]
    ending: Callable[[HttpError], bytes]
    beat: Callable[[], bytes] = lambda: COMMENT


@dataclass(frozen=True)
class Raw:
    """An answer that is not JSON, or has been written already."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Reply = Mapping[str, Any] | Raw | Events
Handler = Callable[[Call], Awaitable[Reply]]


@dataclass(frozen=True)
class Operation:
    """A method of a path, who answers it, and what it reads: a body, or a query."""

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    query: type[Body] | None = None
    can_stream: bool = False
    error_body: ErrorBody = openai_error


def dumped_in_turns(told: Mapping[str, Any]) -> bytes:
    """The JSON of a long answer. While the encoder is at work no other thread is, so it is given the lists in
    parts: objects one by one, numbers some at a time."""
    fields = (
        f"{dumps(name)}:{list_in_turns(value) if isinstance(value, list) else dumps(value)}"
        for name, value in told.items()
    )
    return f"{{{','.join(fields)}}}".encode()


def list_in_turns(items: list[Any]) -> str:
    size = 1 if items and isinstance(items[0], dict) else NUMBERS_AT_ONCE
    parts = (dumps(items[start : start + size])[1:-1] for start in range(0, len(items), size))
    return f"[{','.join(parts)}]"


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + dumps(data).encode() + b"\n\n"


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + dumps(data).encode() + b"\n\n"


def openai_ending(error: HttpError) -> bytes:
    return event(openai_error(error)) + DONE
