"""How a request is read and its answer travels: whole as JSON, or as server-sent events while it is made.

Here, and nowhere else, work is raced with the client's leaving, with time and with the server's end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from infinilm.server.errors import ErrorBody, HttpError, http_error
from infinilm.server.exchange import Call, Events, Operation, Raw, Server, Settings, dumps, too_large
from infinilm.server.turn import end_tasks

LINGER_SECONDS = 2.0  # for a caller to read why it was refused
LOG = logging.getLogger("infinilm.server")


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
            await race(self.answer(call, sender), call, sender, receive)
        except HttpError as error:
            await refuse(error, self.operation.error_body, sender, receive)
        except Gone:
            return
        finally:
            self.server.num_held -= call.num_bytes

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
        await self.read_parts(call, receive)

    async def read_parts(self, call: Call, receive: Receive) -> None:
        """Within the limit of time, which the server's end shortens."""
        seconds = self.server.settings.send_seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                self.server.bodies.add(limit)
                while await self.read_part(call, receive):
                    pass
        except TimeoutError:
            late = HttpError(408, f"the body did not come within {seconds:g} s")
            raise self.server.reason_to_refuse or late from None
        finally:
            self.server.bodies.discard(limit)

    async def read_part(self, call: Call, receive: Receive) -> bool:
        """Whether more follows"""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        call.body += message.get("body", b"")
        self.server.hold(call, len(call.body) - call.num_bytes)
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


def timed_out(settings: Settings) -> HttpError:
    """An error that clients should not answer by asking again: the next time would take as long"""
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
        await end_tasks(task, gone)
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
            beats = asyncio.ensure_future(self._beat(events, seconds))
            try:
                async for data in source:
                    await self._write(data)
            finally:
                await end_tasks(beats)
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

    async def _beat(self, events: Events, seconds: float) -> None:
        """By the clock: whatever the engine is at, no proxy shall think that the stream is dead."""
        while True:
            silence = time.monotonic() - self._last
            if silence >= seconds and not self._is_writing:
                await self._write(events.beat())
            await asyncio.sleep(max(seconds - silence, seconds / 4))
