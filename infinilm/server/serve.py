"""`infinilm serve`: a socket, a model that is loaded while its health can already be asked for, an end."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import uvicorn

from infinilm.engine.adapters import LoRARequest
from infinilm.engine.request import EngineDead
from infinilm.server.app import make_app
from infinilm.server.errors import HttpError
from infinilm.server.exchange import Server, Settings
from infinilm.server.http_limits import Protocol, Web
from infinilm.server.log import Log
from infinilm.server.service import Service
from infinilm.server.sockets import address, listening

if TYPE_CHECKING:
    from infinilm.async_llm import AsyncLLM

LOG = logging.getLogger("infinilm.server")
LAST_SECONDS = 3.0  # for callers to read how their answers ended, longer than LINGER_SECONDS
CLOSE_SECONDS = 60.0  # for the engine to save and to end
DEAD_SECONDS = 3.0  # for all who ask to learn that the engine is dead
COMPLAINT_SECONDS = 60.0  # between two warnings that no file is left
KEEP_ALIVE_SECONDS = 75  # longer than proxies keep a connection, so that none is closed under their request


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where it listens, what it calls the model, and how much it lets in."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # the path of a Unix socket, in place of host and port
    names: tuple[str, ...] = ()
    loras: tuple[LoRARequest, ...] = ()  # adapters, which are models to those who ask
    max_num_seqs: int = 64  # answers that are made at once
    max_queue: int = 1024  # answers that wait
    max_queue_tokens: int = 1 << 22  # of their prompts
    shutdown_seconds: float = 30.0  # for what is under way when the server is to end
    prefix_file: str | Path | None = None  # of prefixes that are loaded at first and saved at last
    log_level: str = "info"
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        names = [*self.names, *(lora.lora_name for lora in self.loras)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is the name of two, of the model and its adapters")


def run(options: Options, load: Callable[[], AsyncLLM]) -> int:
    """Serve until a signal ends it; an error of `load` is raised. The status of the process: 0, unless the
    engine has died, the reason for which is the last that is told."""
    with redirect_stderr(cast(TextIO, Log(sys.stderr))):
        return run_logged(options, load)


def run_logged(options: Options, load: Callable[[], AsyncLLM]) -> int:
    prepare_logs(options.log_level)
    check_prefix_file(options.prefix_file)
    take_all_files()
    status = 0
    with listening(options.host, options.port, options.uds) as sock:
        process = Process(options, load, sock)
        try:
            asyncio.run(process.run())
        except EngineDead as error:
            LOG.error("the engine died", exc_info=error.__cause__)
            tell(f"error: {one_line(error)}")
            status = 1
    if process.has_stuck:
        leave_at_once(status)
    return status


def check_prefix_file(prefix_file: str | Path | None) -> None:
    """Before there is something to save"""
    if prefix_file is None:
        return
    path = Path(prefix_file).absolute()
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--prefix-cache-file: {path.parent} is no folder that can be written to")
    if path.exists() and not path.is_file():
        raise ValueError(f"--prefix-cache-file: {path} is there, and is no file")


def take_all_files() -> None:
    """As many as the system allows. Unless asked it often gives 1,024, and fewer callers would be heard than
    may wait for an answer."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def tell(text: str) -> None:
    """A disk that is full, or a reader of the log who is gone, ends nobody's answer."""
    with suppress(OSError):
        print(f"infinilm: {text}", file=sys.stderr, flush=True)


def prepare_logs(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))


class Process:
    """From the first connection to the last."""

    def __init__(self, options: Options, load: Callable[[], AsyncLLM], sock: socket.socket) -> None:
        self.options, self.load, self.sock = options, load, sock
        self.server = Server(options.settings)
        self.stopping = asyncio.Event()
        self.is_hurried = self.has_stuck = False
        self.last_complaint = -math.inf
        self.web = Web(
            uvicorn.Config(
                make_app(self.server),
                http=type("Protocol", (Protocol,), {"send_seconds": options.settings.send_seconds}),
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(LAST_SECONDS),
            )
        )

    async def run(self) -> None:
        """Until it is told to stop. What the model could not be loaded for is raised, and EngineDead."""
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self.complain)
        life = asyncio.ensure_future(self.live())
        told = asyncio.ensure_future(self.stopping.wait())
        with self.signals():
            tell(f"listening on {address(self.sock)}, loading the model")
            web = asyncio.ensure_future(self.web.serve(sockets=[self.sock]))
            await asyncio.wait({life, told, web}, return_when=asyncio.FIRST_COMPLETED)
            await self.drain(0.0 if life.done() else self.options.shutdown_seconds)
            self.web.should_exit = True
            await web
            self.has_stuck = not life.done() and self.server.service is None
            await self.close()
        told.cancel()
        if life.done() or not life.cancel():
            life.result()

    async def live(self) -> None:
        """Load the model, then wait for an end that should not come."""
        options = self.options
        llm = await in_thread(self.load_all)
        await self.load_prefixes(llm)
        names = options.names or (str(llm.config.model),)
        max_answers = options.max_num_seqs + options.max_queue
        self.server.service = Service(llm, names, max_answers, options.max_queue_tokens, options.loras)
        tell(f"ready: {names[0]} at {address(self.sock)}")
        if not options.uds:
            tell(f"the chat page is {address(self.sock)}/")
        await llm.died()
        await asyncio.sleep(DEAD_SECONDS)

    def load_all(self) -> AsyncLLM:
        """The model, and its adapters before anybody waits for an answer of theirs"""
        llm = self.load()
        try:
            for lora in self.options.loras:
                llm.engine.adapters.of(lora)
        except BaseException:
            llm.shutdown()
            raise
        return llm

    def complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of what nobody else hears. For a connection that there is no file for, asyncio tries and complains
        thousands of times a second, which would fill a disk."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - self.last_complaint > COMPLAINT_SECONDS:
            self.last_complaint = loop.time()
            tell("warning: too many files are open, so new callers wait; raise the limit (ulimit -n)")

    # ---- the end -------------------------------------------------------------------------------------------

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Once one has told it to stop, more change nothing: Python itself takes a while to end, by a signal
        with another status. The event loop's own way would let some through before they are ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def tell_loop(*_: object) -> None:
            self.loop.call_soon_threadsafe(self.stop)

        before = {number: signal.signal(number, tell_loop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.stopping.is_set() else handler)

    def stop(self) -> None:
        """Let what is under way come to its end; told twice, end it."""
        self.is_hurried = self.stopping.is_set()
        self.stopping.set()

    async def drain(self, seconds: float) -> None:
        """Take nothing new, wait for the rest, and tell those whose answers took too long."""
        self.server.refusal = shutting_down("the server is shutting down; ask another, or later")
        self.server.end_bodies()
        if self.server.calls and seconds:
            tell(f"ending: {len(self.server.calls)} answers under way have {seconds:g} s")
        end = self.loop.time() + seconds
        while self.server.calls and self.loop.time() < end and not self.is_hurried:
            await asyncio.sleep(0.01)
        self.server.end_calls(shutting_down("the server was shut down before the answer was complete"))
        end = self.loop.time() + LAST_SECONDS
        while self.server.calls and self.loop.time() < end:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """The engine, once nobody asks it any more; one that does not react is left."""
        if (service := self.server.service) is None:
            return
        death = service.llm.death
        service.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if death is None:
                    await self.save_prefixes(service.llm)
                await in_thread(service.llm.shutdown)
        except TimeoutError:
            tell("warning: the engine did not react, and is left as it is")
            self.has_stuck = True
        if death is not None:
            raise EngineDead(f"the engine died: {one_line(death)}") from death

    # ---- prefixes ------------------------------------------------------------------------------------------

    async def load_prefixes(self, llm: AsyncLLM) -> None:
        """A file that cannot be used is as good as none."""
        path = self.options.prefix_file
        if path is None:
            return
        try:
            tell(f"{await llm.load_prefixes(path)} blocks of prefixes are known from {path}")
        except FileNotFoundError:
            pass
        except Exception as error:
            tell(f"warning: no prefixes are known: {one_line(error)}")

    async def save_prefixes(self, llm: AsyncLLM) -> None:
        path = self.options.prefix_file
        if path is None:
            return
        try:
            tell(f"{await llm.save_prefixes(path)} blocks of prefixes are saved in {path}")
        except Exception as error:
            tell(f"warning: prefixes are not saved: {one_line(error)}")


def shutting_down(message: str) -> HttpError:
    headers = {"connection": "close", "retry-after": "1"}
    return HttpError(503, message, "unavailable_error", code="shutting_down", headers=headers)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def leave_at_once(status: int) -> None:
    """A thread that still works cannot be ended, and would run into what Python takes down before it ends."""
    sys.stderr.flush()
    os._exit(status)


async def in_thread(call: Callable[[], Any]) -> Any:
    """In one that the process need not wait for when it ends."""
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="infinilm-loader", daemon=True).start()
    return await asyncio.wrap_future(outcome)
