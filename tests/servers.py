"""A server with a tiny model on a port of its own, what is asked of it, and what must hold when its callers
are gone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from engines import LONG_LENGTH, check_idle
from patience import PATIENCE, wait_until

from infinilm import LLM, AsyncLLM, SamplingParams
from infinilm.server import serve
from infinilm.server.exchange import Settings
from infinilm.server.sockets import inet_socket

NAME = "tiny"
MAX_LENGTH = LONG_LENGTH
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_tokens": 90_000}
DIGIT = {"type": "object", "properties": {"digit": {"enum": [1, 2]}}, "required": ["digit"]}
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}\n{% endfor %}"
    "{{ reasoning_effort }}{% if enable_thinking is false %}quick:{% else %}<think>{% endif %}"
)


class Running:
    """`infinilm serve` in a thread of the test."""

    def __init__(
        self, load: Callable[[], AsyncLLM], settings: Settings | None = None, **options: Any
    ) -> None:
        self.sock = inet_socket("127.0.0.1", 0)
        self.port: int = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        given = serve.Options(names=(NAME,), settings=settings or Settings(), **options)
        self.process = serve.Process(given, load, self.sock)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: self.process.web.started or not self.thread.is_alive())
        self.http = self._client()

    def _client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, timeout=PATIENCE, verify=False
        )  # certificates are slow to load

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
            body = {"messages": HELLO, **body}
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        *events, done, rest = response.text.split("\n\n")
        assert done == "data: [DONE]" and rest == ""
        return [json.loads(one.removeprefix("data: ")) for one in events if not one.startswith(":")]

    def prompt_of(self, path: str, **body: Any) -> str:
        """What the model reads of a request"""
        asked: list[list[int]] = []
        make = self.llm.engine.make

        def noted(token_ids: list[int], *rest: Any, **options: Any) -> Any:
            asked.append(token_ids)
            return make(token_ids, *rest, **options)

        self.llm.engine.make = noted  # type: ignore[method-assign]
        try:
            answered(self.post(path, **body))
        finally:
            self.llm.engine.make = make  # type: ignore[method-assign]
        text: str = self.post("/detokenize", tokens=asked[0]).json()["prompt"]
        return text

    def open(self, request: bytes) -> socket.socket:
        """A connection that has sent this much"""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        sock.sendall(request)
        return sock

    def ask(self, path: str = "/v1/chat/completions", **body: Any) -> socket.socket:
        """A connection that waits for the answer"""
        if path.endswith("chat/completions"):
            body = {"messages": HELLO, **body}
        return self.open(request_of(path, json.dumps(body).encode()))

    def paused(self) -> AbstractContextManager[None]:
        """The engine makes no step meanwhile."""
        return standing_still(self.llm._worker.inbox.put)

    def deaf(self) -> AbstractContextManager[None]:
        """The event loop does nothing meanwhile."""
        return standing_still(self.process.loop.call_soon_threadsafe)

    def wait_for_tokens(self) -> None:
        """Some request is being answered."""
        requests = self.llm.engine.requests
        wait_until(
            lambda: any(one.num_drawn > 3 for asked in list(requests.values()) for one in asked.completions)
        )

    def fail_calls(self) -> None:
        """All that is under way ends with an error."""
        for call in list(self.process.server.calls):
            assert call.task is not None
            call.task.get_loop().call_soon_threadsafe(call.end, RuntimeError("ends"))

    def open_things(self) -> tuple[int, ...]:
        """Threads, files, tasks and processes, without the connections that are kept for a next request"""
        self.http.close()
        self.http = self._client()
        num_tasks = len(asyncio.all_tasks(self.process.loop))
        num_children = len(psutil.Process().children(recursive=True))
        return threading.active_count(), len(os.listdir("/proc/self/fd")), num_tasks, num_children

    def check_idle(self) -> None:
        """Nothing is left of requests that have ended."""
        service = self.process.server.service
        assert service is not None
        wait_until(lambda: not self.llm.engine.has_work and not self.process.server.calls)
        check_idle(self.llm.engine)
        wait_until(lambda: self.process.server.num_held == 0)
        assert service.admission.num_answers == service.admission.num_tokens == 0


def texts(llm: LLM, content: str = "hello", **params: Any) -> list[str]:
    """What a model says to a message, without a server"""
    settings = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    (answer,) = llm.chat([{"role": "user", "content": content}], settings)
    return [found.text for found in answer.outputs]


@contextmanager
def standing_still(hand_over: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Those who make the calls that are handed over do nothing else meanwhile."""
    may_go, has_stopped = threading.Event(), threading.Event()

    def stop() -> None:
        has_stopped.set()
        may_go.wait(PATIENCE)

    hand_over(stop)
    assert has_stopped.wait(PATIENCE)
    try:
        yield
    finally:
        may_go.set()


def request_of(path: str, body: bytes, *headers: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: here", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def read_until(sock: socket.socket, end: bytes) -> bytes:
    """What a connection says up to some bytes, or to its end"""
    read = b""
    while end not in read and (chunk := sock.recv(1 << 16)):
        read += chunk
    return read


def answered(response: httpx.Response) -> dict[str, Any]:
    """What is answered where nothing is wrong"""
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def named_events(text: str) -> list[dict[str, Any]]:
    """Of a stream: each is named as its type says"""
    *told, rest = text.split("\n\n")
    assert rest == ""
    lines = [one.split("\n") for one in told]
    found = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {one['type']}" for one in found]
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """In OpenAI's shape, which tells nothing of the server's inside"""
    (key,) = response.json()
    found: dict[str, Any] = response.json()["error"]
    assert key == "error" and set(found) == {"message", "type", "param", "code"}
    assert not re.search(r"Traceback|0x[0-9a-f]{6}|site-packages|/infinilm", response.text)
    return found


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


@contextmanager
def loading(folder: Path) -> Iterator[tuple[Running, threading.Event]]:
    """A server whose model is there when the event is set"""
    may_load = threading.Event()

    def load() -> AsyncLLM:
        may_load.wait(PATIENCE)
        return AsyncLLM(folder, kv_cache_memory="32MB")

    made = Running(load)
    try:
        yield made, may_load
    finally:
        may_load.set()
        made.wait().stop()
