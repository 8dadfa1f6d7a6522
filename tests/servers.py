"""A server with a tiny model on a port of its own, and what must hold when its callers are gone."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
from engines import check_idle

from infinilm import AsyncLLM
from infinilm.server import serve
from infinilm.server.stream import Settings

PATIENCE = 60.0  # seconds, for what takes milliseconds on an idle machine
NAME = "tiny"


def wait_until(is_so: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Running:
    """`infinilm serve` in a thread of the test."""

    def __init__(
        self, load: Callable[[], AsyncLLM], settings: Settings | None = None, **options: Any
    ) -> None:
        self.sock = serve.inet_socket("127.0.0.1", 0)
        self.port: int = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        given = serve.Options(names=(NAME,), settings=settings or Settings(), **options)
        self.process = serve.Process(given, load, self.sock)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: self.process.web.started or not self.thread.is_alive())
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def _run(self) -> None:
        try:
            asyncio.run(self.process.run())
        except Exception as error:
            self.failure = error

    @property
    def llm(self) -> AsyncLLM:
        assert self.process.server.service is not None
        return self.process.server.service.llm

    def wait(self) -> Running:
        wait_until(lambda: self.process.server.service is not None or not self.thread.is_alive())
        return self

    def stop(self) -> None:
        with suppress(RuntimeError):  # it has ended already
            self.process.loop.call_soon_threadsafe(self.process.stop)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self.http.close()
        self.sock.close()

    def client(self, is_strict: bool = True, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", _strict_response_validation=is_strict, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, content: str = "hello", **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)

    def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which ends as it should"""
        if path.endswith("chat/completions"):
            body = {"messages": [{"role": "user", "content": "hello"}], **body}
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        *events, done, rest = response.text.split("\n\n")
        assert done == "data: [DONE]" and rest == ""
        return [json.loads(one.removeprefix("data: ")) for one in events if not one.startswith(":")]

    def open(self, request: bytes) -> socket.socket:
        """A connection that has sent this much"""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        sock.sendall(request)
        return sock

    def ask(self, path: str = "/v1/chat/completions", **body: Any) -> socket.socket:
        """A connection that waits for the answer"""
        if path.endswith("chat/completions"):
            body = {"messages": [{"role": "user", "content": "hello"}], **body}
        return self.open(request_of(path, json.dumps(body).encode()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine makes no step meanwhile."""
        may_go, has_stopped = threading.Event(), threading.Event()

        def stop() -> None:
            has_stopped.set()
            may_go.wait(PATIENCE)

        self.llm._worker.inbox.put(stop)
        assert has_stopped.wait(PATIENCE)
        try:
            yield
        finally:
            may_go.set()

    def open_things(self) -> tuple[int, int]:
        """Threads and files, without the connections that are kept for a next request"""
        self.http.close()
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def check_idle(self) -> None:
        """Nothing is left of requests that have ended."""
        service = self.process.server.service
        assert service is not None
        wait_until(lambda: not self.llm.engine.has_work and not self.process.server.calls)
        check_idle(self.llm.engine)
        wait_until(lambda: self.process.server.num_held == 0)
        assert service.admission.num_answers == service.admission.num_tokens == 0


def request_of(path: str, body: bytes, *headers: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: here", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def read_until(sock: socket.socket, end: bytes) -> bytes:
    """What a connection says up to some bytes, or to its end"""
    read = b""
    while end not in read and (chunk := sock.recv(1 << 16)):
        read += chunk
    return read


@contextmanager
def running(folder: Path, settings: Settings | None = None, **options: Any) -> Iterator[Running]:
    """A server of the model in a folder"""
    engine = {"kv_cache_memory": "32MB", **options.pop("engine", {})}
    queue = {"max_queue": 1 << 20, "max_queue_tokens": 1 << 62}
    made = Running(lambda: AsyncLLM(folder, **queue, **engine), settings, **options)
    try:
        yield made.wait()
    finally:
        made.stop()
