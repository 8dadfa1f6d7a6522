"""How a request is read and its answer travels: whole as JSON, or as server-sent events while it is made.

Here, and nowhere else, work is raced with the client's leaving, with time and with the server's end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from infinilm.engine.request import QueueFull
from infinilm.folder import parse_object
from infinilm.server import answers
from infinilm.server.admission import Overloaded
from infinilm.server.asks import as_body_errors
from infinilm.server.bodies import Body, read
from infinilm.server.service import Service
from infinilm.server.turn import Caller

LINGER_SECONDS = 2.0  # for a caller to read why it was refused
STALL_SECONDS = 120.0  # for a caller to read what it has been sent
LARGE_BODY = 64 << 10  # bytes, from which JSON is not read on the event loop
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
LOG = logging.getLogger("infinilm.server")

B = TypeVar("B", bound=Body)
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


# ---- the server --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What holds for every request. Keys are of callers, any of which lets them in; without one all may."""

    keys: tuple[str, ...] = ()
    max_body: int = 16 << 20  # bytes
    max_bodies: int = 256 << 20  # of all bodies that are held at once
    max_header_count: int = 256
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
    num_held: int = 0  # bytes of bodies

    def hold(self, call: Call, data: bytes) -> None:
        """A part of a body, until the call ends; HttpError if that is too much, for one or for all."""
        call.body += data
        self.num_held += len(data)
        if len(call.body) > self.settings.max_body:
            raise too_large(self.settings.max_body)
        if self.num_held > self.settings.max_bodies:
            told = "the server holds as many bodies as it can; try again in 1 s"
            raise HttpError(429, told, "rate_limit_error", headers={"retry-after": "1"})

    @property
    def reason_to_refuse(self) -> HttpError | None:
        """Why nothing that is new is answered: the server is to end, or its engine is dead."""
        is_dead = self.service is not None and self.service.llm.death is not None
        return self.refusal or (engine_dead() if is_dead else None)

    def end_calls(self, error: BaseException) -> None:
        """Answer all that are under way with an error: a body, or an event that ends a stream."""
        for call in list(self.calls):
            call.end(error)


class HttpError(Exception):
    """An answer other than 200, as any API may tell it."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})


def http_error(error: BaseException) -> HttpError:
    """Any error as an answer. What is our own fault is told to the log alone."""
    if isinstance(error, HttpError):
        return error
    status, body = answers.error_of(error)
    told = body["error"]
    headers = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(error.seconds if isinstance(error, Overloaded) else 1)
    return HttpError(
        status, told["message"], told["type"], param=told["param"], code=told["code"], headers=headers
    )


def openai_error(error: HttpError) -> dict[str, Any]:
    told = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
    return {"error": told}


ErrorBody = Callable[[HttpError], dict[str, Any]]


# ---- a request ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call(Caller):
    """A request, read whole."""

    server: Server = field(default_factory=Server)
    scope: Scope = field(default_factory=dict)
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
    def path_params(self) -> dict[str, Any]:
        found: dict[str, Any] = self.scope.get("path_params", {})
        return found

    async def read(self, kind: type[B]) -> B:
        """The body as one of its kind, or BodyError."""
        service = self.service
        if len(self.body) < LARGE_BODY:
            return self.parse(kind)
        return await service.off_loop(self.parse, kind)

    def parse(self, kind: type[B]) -> B:
        with as_body_errors(kind.model_fields):
            given = parse_object(bytes(self.body), "body", ValueError)
        return read(kind, given)

    def end(self, error: BaseException) -> None:
        self.error = error
        if self.task is not None:
            self.task.cancel()


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
    """A method of a path, who answers it, and what it reads."""

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    can_stream: bool = False
    error_body: ErrorBody = openai_error


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + dumps(data).encode() + b"\n\n"


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + dumps(data).encode() + b"\n\n"


def openai_ending(error: HttpError) -> bytes:
    return event(openai_error(error)) + DONE


# ---- the way of one ----------------------------------------------------------------------------------------


class Gone(Exception):
    """The client has left."""


class Endpoint:
    """An operation as an ASGI application."""

    def __init__(self, server: Server, operation: Operation) -> None:
        self.server = server
        self.operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope["infinilm.request_id"], server=self.server, scope=scope)
        sender = Sender(send)
        try:
            await self.read_body(call, receive)
            call.num_bytes = len(call.body)
            await race(self.answer(call, sender), call, sender, receive)
        except HttpError as error:
            await refuse(error, self.operation.error_body, sender, receive)
        except Gone:
            return
        finally:
            self.server.num_held -= len(call.body)

    async def read_body(self, call: Call, receive: Receive) -> None:
        """All of it, within the limits of size and time."""
        headers = dict(call.scope["headers"])
        limit = self.server.settings.max_body
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            found = headers[b"content-encoding"][:64].decode("latin-1")
            raise HttpError(
                415, f"content-encoding must be left out, but is {found!r}; send the body as it is"
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large(limit)
        try:
            async with asyncio.timeout(self.server.settings.send_seconds):
                while await self.read_part(call, receive):
                    pass
        except TimeoutError:
            seconds = self.server.settings.send_seconds
            raise HttpError(408, f"the body did not come within {seconds:g} s") from None

    async def read_part(self, call: Call, receive: Receive) -> bool:
        """Whether more follows"""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        self.server.hold(call, message.get("body", b""))
        return bool(message.get("more_body", False))

    async def answer(self, call: Call, sender: Sender) -> None:
        """Whatever happens on the way, the caller is told."""
        with call.stack:
            limit = asyncio.timeout(self.server.settings.request_seconds)
            try:
                async with limit:
                    await self.reply(call, sender)
            except asyncio.CancelledError:
                if call.error is None:
                    raise
                if call.task is not None:
                    call.task.uncancel()
                await self.send_error(http_error(call.error), sender)
            except Exception as error:
                told = timed_out(self.server.settings) if limit.expired() else self.noted(error, call)
                await self.send_error(told, sender)

    def noted(self, error: Exception, call: Call) -> HttpError:
        told = http_error(error)
        if told.status == 500:
            LOG.error("request %s failed", call.request_id, exc_info=error)
        return told

    async def reply(self, call: Call, sender: Sender) -> None:
        if (refusal := self.server.reason_to_refuse) is not None:
            await self.send_error(refusal, sender)
            return
        reply = await self.operation.handler(call)
        if isinstance(reply, Events):
            await sender.stream(reply, self.server.settings.heartbeat_seconds)
        elif isinstance(reply, Raw):
            await sender.whole(reply)
        else:
            await sender.whole(Raw(dumps(reply).encode()))

    async def send_error(self, error: HttpError, sender: Sender) -> None:
        if sender.events is not None:
            await sender.end(sender.events.ending(error))
        elif not sender.has_begun:
            body = dumps(self.operation.error_body(error)).encode()
            await sender.whole(Raw(body, status=error.status, headers=error.headers))


def too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body must have at most {limit} bytes, but has more")


def engine_dead() -> HttpError:
    return HttpError(503, "the engine has stopped", "server_error", code="engine_dead")


def timed_out(settings: Settings) -> HttpError:
    """Which the same request would be again"""
    told = f"the answer was not complete within {settings.request_seconds:g} s"
    headers = {"x-should-retry": "false"}
    return HttpError(503, told, "timeout_error", code="request_timeout", headers=headers)


async def refuse(error: HttpError, error_body: ErrorBody, sender: Sender, receive: Receive) -> None:
    """Tell of an error before the body has been read. What is still sent is dropped for a while: a connection
    that is closed at once may lose the answer under it."""
    body = dumps(error_body(error)).encode()
    headers = {"connection": "close", **error.headers}
    await sender.whole(Raw(body, status=error.status, headers=headers), is_last=False)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive()).get("more_body", False):
                del message
    await sender.end(b"")


async def race(work: Any, call: Call, sender: Sender, receive: Receive) -> None:
    """Do the work as long as the client is there."""
    task = call.task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnect(receive))
    call.server.calls.add(call)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if sender.is_complete:  # then receive says "disconnect" as well
            await asyncio.wait({task})
    finally:
        call.server.calls.discard(call)
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Sender:
    """Writes one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last = time.monotonic()  # when something was sent
        self._is_writing = False
        self.has_begun = self.is_complete = False
        self.events: Events | None = None

    async def whole(self, raw: Raw, is_last: bool = True) -> None:
        await self._begin(raw.status, {"content-length": str(len(raw.body)), **raw.headers}, raw.content_type)
        await (self.end(raw.body) if is_last else self._write(raw.body))

    async def stream(self, events: Events, seconds: float) -> None:
        """All events, their headers before the first is there."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self.events = events
        async with aclosing(events.source) as source:  # type: ignore[type-var]
            await self._begin(200, headers, "text/event-stream; charset=utf-8")
            beats = asyncio.ensure_future(self._beat(events, seconds, asyncio.current_task()))
            try:
                async for data in source:
                    await self._write(data)
            finally:
                beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)
        await self.end(b"")

    async def end(self, data: bytes) -> None:
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _begin(self, status: int, headers: Mapping[str, str], content_type: str) -> None:
        self.has_begun = True
        told = {"content-type": content_type, **headers}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in told.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, data: bytes) -> None:
        self._last, self._is_writing = time.monotonic(), True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing = False

    async def _beat(self, events: Events, seconds: float, owner: asyncio.Task[Any] | None) -> None:
        """By the clock: whatever the engine is at, no proxy shall think that the stream is dead. Who reads
        nothing any more is given up."""
        while True:
            silence = time.monotonic() - self._last
            if self._is_writing and silence > STALL_SECONDS and owner is not None:
                owner.cancel()
                return
            if silence >= seconds and not self._is_writing:
                await self._write(events.beat())
            await asyncio.sleep(max(seconds - silence, seconds / 4))
