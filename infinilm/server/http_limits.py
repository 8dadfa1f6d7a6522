"""HTTP as uvicorn has it, but for limits of ours: on time, on what is read and on what is to be sent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from infinilm.server.errors import HttpError, openai_error
from infinilm.server.exchange import dumps

# Bytes that are read at once: a caller may make of 256 KB 40,000 chunks, which take seconds to be told apart.
READ_SIZE = 4 << 10
MAX_HEAD = 64 << 10  # bytes of a request before its body
STALL_SECONDS = 120.0  # for a caller to read some of what it is sent
MAX_AHEAD = 64 << 10  # bytes of a next request that are read before the last one has been answered
URL_START = re.compile(rb"https?://[^/?]*", re.IGNORECASE)


class Web(uvicorn.Server):
    """uvicorn, but that signals are none of its business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def as_long_as_open(app: Any, transport: Any) -> ASGIApp:
    """An application that stops writing when its caller has gone"""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if transport.is_closing():
                await asyncio.sleep(0)  # in which the event loop tells uvicorn, who then writes no more
            await send(message)

        await app(scope, receive, send_on)

    return answer


class Connection(h11.Connection):
    """h11's, but that it takes what servers are to take: empty lines before a request, such as some clients
    send after a body (RFC 9112, 2.2), and whole URLs."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            ahead = self.trailing_data[0]
            self._receive_buffer.maybe_extract_at_most(len(ahead) - len(ahead.lstrip(b"\r\n")))
        event = super().next_event()
        return in_origin_form(event) if isinstance(event, h11.Request) else event


def in_origin_form(request: h11.Request) -> h11.Request:
    """Of a whole URL, as it is sent through proxies, what follows the host (RFC 9112, 3.2.2)"""
    host = URL_START.match(request.target)
    if host is None:
        return request
    path = request.target[host.end() :]
    target = path if path.startswith(b"/") else b"/" + path
    return h11.Request(
        method=request.method, headers=request.headers, target=target, http_version=request.http_version
    )


class Protocol(H11Protocol):
    """uvicorn's, with limits on the time to send a request's head and to read an answer; errors are JSON."""

    send_seconds = 30.0
    _head_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None
    _num_dropped = 0  # bytes

    @property
    def awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        transport.max_size = READ_SIZE
        transport.set_write_buffer_limits(0)  # so that pause_writing tells of whatever waits to be read
        self.conn = Connection(h11.SERVER, MAX_HEAD)
        super().connection_made(transport)
        self.app = as_long_as_open(self.app, transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.MUST_CLOSE:  # the request that is being answered was the last one
            self._drop(data)
            return
        if self.awaits_head:
            self._await_head()
        super().data_received(data)
        if not self.awaits_head:
            self._stop_awaiting_head()
            self._read_ahead()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._stop_awaiting_reading()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting_head()
        self._stop_awaiting_reading()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.awaits_head or not self.cycle.response_started:
            with suppress(h11.LocalProtocolError):
                self._send_error(400, msg)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """None: HTTP/2, which some clients offer each time, is a matter of course (RFC 9110, 7.8)."""

    def _read_ahead(self) -> None:
        """uvicorn would read no more before it has answered, and not hear that the caller leaves."""
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MAX_AHEAD:
            self.flow.resume_reading()

    def _drop(self, data: bytes) -> None:
        """Some, so as to hear that the caller leaves, but not all that one can send"""
        self._num_dropped += len(data)
        if self._num_dropped > MAX_AHEAD:
            self.flow.pause_reading()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.send_seconds, self._check_head)

    def _stop_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_head(self) -> None:
        self._head_timer = None
        if self.awaits_head and not self.transport.is_closing():
            self.transport.close()

    def _await_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(STALL_SECONDS, self._check_reading, unread)

    def _check_reading(self, unread_before: int) -> None:
        """Let go of who has read nothing: what is still to be sent would wait here for ever."""
        if self.transport.get_write_buffer_size() < unread_before:
            self._await_reading()
        else:
            self.transport.abort()

    def _stop_awaiting_reading(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _send_error(self, status: int, message: str) -> None:
        body = dumps(openai_error(HttpError(status, message))).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        start = h11.Response(status_code=status, headers=list(headers.items()), reason=b"Bad Request")
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
