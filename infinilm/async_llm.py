"""AsyncLLM: an LLM for coroutines, whose engine runs in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import reprlib
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from infinilm.arguments import OF_ASYNC, OF_POOLING, as_request_errors, one_each, with_options
from infinilm.config import EngineConfig
from infinilm.elsewhere import knowing
from infinilm.engine.adapters import LoRARequest
from infinilm.engine.engine import Engine
from infinilm.engine.intake import Prompt, RequestOptions
from infinilm.engine.request import EngineDead, QueueFull, Request, RequestError, RequestOutput
from infinilm.engine.stats import Progress, Stats
from infinilm.sampling import SamplingParams, plain_text
from infinilm.startup import Report, make_engine, tell_nobody
from infinilm.tokenizer import Tokenizer

News = RequestOutput | BaseException
Inbox = queue.SimpleQueue[Callable[[], None] | None]  # None is the end
Result = TypeVar("Result")


class Listener:
    """Where the outputs of one request go: to a coroutine, and no faster than it reads them. One that comes
    while another is unread takes its place, since it has all that the other has."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request_id: str | None) -> None:
        self.loop = loop
        self.request_id = request_id
        self.is_unwanted = False  # before the engine has heard of it
        self.has_unread = False  # on its way, or here
        self._item: News | None = None
        self._arrival: asyncio.Future[None] | None = None

    def put(self, item: News) -> None:
        self._item = item
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def next(self) -> RequestOutput:
        while (item := self._item) is None:
            self._arrival = self.loop.create_future()
            await self._arrival
        self._item, self.has_unread = None, False
        if isinstance(item, BaseException):
            raise item
        return item


class Post:
    """What listeners are to be told, until it is sent: one wake-up of an event loop for all of its own."""

    def __init__(self) -> None:
        self.letters: dict[asyncio.AbstractEventLoop, list[tuple[Listener, News]]] = {}

    def add(self, listener: Listener, item: News) -> None:
        listener.has_unread = True
        self.letters.setdefault(listener.loop, []).append((listener, item))

    def send(self) -> None:
        letters, self.letters = self.letters, {}
        for loop, own in letters.items():
            with suppress(RuntimeError):  # the loop is closed, so nobody listens
                loop.call_soon_threadsafe(hand_out, own)


def hand_out(letters: list[tuple[Listener, News]]) -> None:
    for listener, item in letters:
        listener.put(item)


class Worker:
    """The engine's thread. Others put calls into its inbox; it makes them between two steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox: Inbox = queue.SimpleQueue()
        self.listeners: dict[str, Listener] = {}
        self.post = Post()
        self.death: BaseException | None = None
        self.end: Future[BaseException] = Future()
        self.thread = threading.Thread(target=self.run, name="infinilm-engine", daemon=True)
        INBOXES[self.thread] = self.inbox

    def run(self) -> None:
        try:
            while self.obey():
                for request in self.engine.step():
                    self.tell(request)
                self.post.send()
        except BaseException as error:
            self.die(error)
        else:
            self.die(EngineDead("the engine was shut down"))

    def obey(self) -> bool:
        """Make the calls that wait, at least one where there is nothing else to do; False is the end."""
        while True:
            try:
                call = self.inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            self.post.send()

    def add(self, request: Request, listener: Listener) -> None:
        if self.death is not None:
            self.post.add(listener, self.dead())
            return
        try:
            self.engine.enqueue(request)
        except BaseException as error:  # what is no fault of its caller ends the engine, and nobody hangs
            self.post.add(listener, error)
            if not isinstance(error, RequestError | QueueFull):
                raise
        else:
            self.listeners[request.request_id] = listener

    def tell(self, request: Request) -> None:
        listener = self.listeners[request.request_id]
        if listener.loop.is_closed():  # nobody will read what comes, nor say so
            self.engine.abort(request.request_id)
        elif request.is_finished or not listener.has_unread:
            self.post.add(listener, request.error or request.output())
        if request.is_finished:
            del self.listeners[request.request_id]

    def abort(self, request_id: str, owner: Listener | None = None) -> None:
        """On behalf of its owner, where one is given: another request may have the same id by now."""
        listener = self.listeners.get(request_id)
        if listener is None or owner not in (None, listener):
            return
        request = self.engine.requests[request_id]
        self.engine.abort(request_id)
        self.tell(request)

    def make(self, call: Callable[[], Result], outcome: Future[Result]) -> None:
        """The call's errors are its caller's."""
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            if self.death is not None:
                raise self.dead()
            outcome.set_result(call())
        except StopIteration as error:  # no coroutine can be given one
            outcome.set_exception(RuntimeError(f"the call raised {error!r}"))
        except BaseException as error:
            outcome.set_exception(error)

    def die(self, error: BaseException) -> None:
        """Nobody is left waiting, nor those whose calls nobody has made yet."""
        self.death = error
        self.engine.close()
        for listener in self.listeners.values():
            self.post.add(listener, self.dead())
        self.listeners.clear()
        with suppress(queue.Empty):
            while True:
                if call := self.inbox.get(block=False):
                    call()
        self.post.send()
        self.end.set_result(error)

    def dead(self) -> EngineDead:
        error = EngineDead(f"the engine has stopped: {self.death}")
        error.__cause__ = self.death
        return error

    def stop(self) -> None:
        """Wait for the end of the step that is on; what still waits fails."""
        end_thread(self.thread, self.inbox)


# Of threads and not of workers: where nobody else holds it, a thread frees its worker, and with it the model.
INBOXES: weakref.WeakKeyDictionary[threading.Thread, Inbox] = weakref.WeakKeyDictionary()


@atexit.register
def end_threads() -> None:
    """Python ends threads where they are; a process whose thread is within a kernel, or frees a tensor, then
    aborts."""
    for thread, inbox in list(INBOXES.items()):
        end_thread(thread, inbox)


def end_thread(thread: threading.Thread, inbox: Inbox) -> None:
    if thread.is_alive():  # in a fork it is not
        inbox.put(None)
        if thread is not threading.current_thread():  # which `run` may have called from
            thread.join()


class AsyncLLM:
    """An LLM for coroutines: its engine runs in a thread, all requests at once. Keywords are LLM's."""

    @with_options
    def __init__(self, model: str | Path | None = None, report: Report = tell_nobody, **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        self._pid = os.getpid()
        self._worker = Worker(make_engine(self.config, report))
        self.model, self.tokenizer = self.engine.model, self.engine.tokenizer
        self._encoders = ThreadPoolExecutor(2, "infinilm-encoder")
        self._making: set[Listener] = set()  # of requests on their way to the engine
        self._worker.thread.start()

    @property
    def engine(self) -> Engine:
        return self._worker.engine

    @knowing(OF_ASYNC)
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, again and again until it has finished. Leaving the loop ends the request."""
        default = self.engine.model.recommended
        (params,) = one_each("sampling_params", sampling_params, SamplingParams, 1, default)
        options = RequestOptions(
            priority=priority, request_id=request_id, cache_salt=cache_salt, lora_request=lora_request
        )
        make = partial(self.engine.make, prompt, params, **options)
        request, listener = await self._begin(make, request_id)
        with self._ending(request, listener):
            while not (output := await listener.next()).finished:
                yield output
            yield output

    async def follow(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """The same of a request that the engine has made already; it is followed once."""
        self._check_alive()
        listener = Listener(asyncio.get_running_loop(), request.request_id)
        request.metrics.arrival_time = time.monotonic()
        self._let_in(request, listener)
        with self._ending(request, listener):
            while not (output := await listener.next()).finished:
                yield output
            yield output

    @knowing(OF_POOLING)
    async def encode(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Tensor:
        """The state [hidden_size] of the prompt's last token after the last norm, in float32. A request like
        others: it waits its turn, is read beside them, and ends when its coroutine is cancelled; one that is
        aborted raises Aborted."""
        options = RequestOptions(
            priority=priority, request_id=request_id, cache_salt=cache_salt, lora_request=lora_request
        )
        make = partial(self.engine.make_encoding, prompt, prompt_name, truncate_prompt_tokens, **options)
        request, listener = await self._begin(make, request_id)
        with self._ending(request, listener):
            await listener.next()
            return request.state()

    async def logits(self, states: Tensor) -> Tensor:
        """Logits of what follows states that `encode` gave: [*, hidden_size] -> [*, vocab_size]"""
        model, size = self.model, self.model.config.hidden_size
        if not isinstance(states, Tensor) or states.shape[-1:] != (size,):
            found = tuple(states.shape) if isinstance(states, Tensor) else states
            raise RequestError(f"logits wants states [..., {size}], but was given {reprlib.repr(found)}")

        @torch.inference_mode()
        def logits() -> Tensor:
            return model.logits(states.to(model.model.norm.weight)).float().cpu()

        return await self.run(logits)

    async def run(self, call: Callable[[], Result]) -> Result:
        """What a function returns that the engine's thread calls between two steps; nobody else is in the
        engine meanwhile, and everybody waits."""
        self._check_alive()
        outcome: Future[Result] = Future()
        worker = self._worker
        worker.inbox.put(lambda: worker.make(call, outcome))
        self._check_alive()  # after the call is in the inbox: who dies later will find it there
        return await asyncio.wrap_future(outcome)

    async def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    async def save_prefixes(self, path: str | Path) -> int:
        """Write what the cache knows to a file, for another process with this model; the number of blocks"""
        return await self.run(partial(self.engine.save_prefixes, path))

    async def load_prefixes(self, path: str | Path) -> int:
        """Take over saved prefixes, as far as there is room; ValueError if they are of another model."""
        return await self.run(partial(self.engine.load_prefixes, path))

    async def reset_prefix_cache(self) -> bool:
        """Forget all prefixes, as after a change of weights; False, and none, while there are requests."""
        return await self.run(self.engine.reset_prefix_cache)

    @property
    def death(self) -> BaseException | None:
        """Why the engine has stopped; None while it lives"""
        return self._worker.death

    async def died(self) -> BaseException:
        """Wait for the engine's end: what it died of, or an EngineDead after `shutdown`"""
        self._check_process()
        return await asyncio.shield(asyncio.wrap_future(self._worker.end))

    def stats(self) -> Stats:
        """What runs, waits and has been counted, at this moment"""
        return self.engine.stats()

    def progress(self, request_id: str) -> Progress | None:
        """How far the prompt of a request has been read; None before the engine has it and once it ended"""
        return self.engine.progress(request_id)

    async def _begin(self, make: Callable[[], Request], request_id: str | None) -> tuple[Request, Listener]:
        """A request, made and let in"""
        self._check_alive()
        listener = Listener(asyncio.get_running_loop(), request_id)
        arrival_time = time.monotonic()
        request = await self._made(make, listener)
        request.metrics.arrival_time = arrival_time
        self._let_in(request, listener)
        return request, listener

    def _let_in(self, request: Request, listener: Listener) -> None:
        worker = self._worker
        worker.inbox.put(lambda: worker.add(request, listener))
        if listener.is_unwanted:
            worker.inbox.put(lambda: worker.abort(request.request_id, listener))
        self._check_alive()  # after the call is in the inbox: who dies later will find it there

    @contextmanager
    def _ending(self, request: Request, listener: Listener) -> Iterator[None]:
        """A context whose request is given up by leaving it early"""
        worker = self._worker
        try:
            yield
        finally:
            if not request.is_finished:
                worker.inbox.put(lambda: worker.abort(request.request_id, listener))

    async def _made(self, make: Callable[[], Request], listener: Listener) -> Request:
        def encoded() -> Request:
            self._check_alive()  # it may have waited for its turn until after a shutdown
            with as_request_errors():
                return make()

        self._making.add(listener)
        try:
            return await listener.loop.run_in_executor(self._encoders, encoded)
        finally:
            self._making.discard(listener)

    async def abort(self, request_id: str) -> None:
        """End a request: its loop sees a last output whose finish_reason is "abort"."""
        self._check_alive()
        if not isinstance(request_id, str):  # in the engine's thread a wrong one would end all of them
            found = reprlib.repr(request_id)
            raise RequestError(f"request_id must be a string, but is {found}", "request_id")
        for listener in list(self._making):
            listener.is_unwanted |= listener.request_id == request_id
        worker, name = self._worker, plain_text(request_id)
        worker.inbox.put(lambda: worker.abort(name))

    def shutdown(self) -> None:
        """Stop the engine; what still waits fails."""
        if self._pid == os.getpid():
            self._worker.stop()
            self._encoders.shutdown(wait=False)

    def __del__(self) -> None:
        if hasattr(self, "_encoders") and self._pid == os.getpid():
            self._worker.inbox.put(None)
            self._encoders.shutdown(wait=False)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise EngineDead("the engine's thread is in the process that made it, not in a fork of it")

    def _check_alive(self) -> None:
        self._check_process()
        if self._worker.death is not None:
            raise self._worker.dead()
