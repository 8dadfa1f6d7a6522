"""Graph: record the ops of a function once, replay them in one native call, or as one CUDA graph.

The function runs on fixed buffers. What changes from step to step (tokens, positions) is written into them
before a replay, never decided in Python. Only ops with native kernels can be recorded; whatever else torch
would compute during the recording is refused, because a replay would leave it out.

What the function makes lies in an arena, and a tensor that has died leaves its place to the next: a recording
takes the memory of what lives at once, and the next one with that arena takes the same.

On a GPU an arena is a CudaArena, and its graphs are CUDA's: whatever the function launches there is recorded,
torch's own kernels too, and what would wait for the device is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from infinicore import _native
from infinicore.ops.registry import RECORDING

Result = TypeVar("Result")


class RecordError(RuntimeError):
    """The function computes something that a replay could not repeat."""


class Arena(_native.Arena):
    """Memory for recordings, `num_bytes` of it so far. It lives as long as a graph or a tensor needs it.

    Graphs that share an arena write over each other's tensors: what one has computed is to be read before
    another is recorded or replayed. One thread uses it at a time: a replay waits for its turn, a recording
    does not. It grows least when the largest graph is recorded first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()


class CudaArena:
    """The same on a GPU: what CUDA graphs make lies in one pool of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.pool = torch.cuda.graph_pool_handle()


class Graph(Generic[Result]):
    """The recorded calls and the result they write to: each `replay` computes it anew.

    The result stays as it is until this graph, or one with the same arena, is replayed or recorded.
    """

    def __init__(
        self, graph: _native.Graph | torch.cuda.CUDAGraph, arena: Arena | CudaArena, result: Result
    ) -> None:
        self._graph = graph
        self._arena = arena
        self.result = result

    @classmethod
    def record(cls, function: Callable[[], Result], arena: Arena | CudaArena | None = None) -> Graph[Result]:
        """Run the function and keep its ops; what they make lies in the arena, or in one of its own."""
        arena = Arena() if arena is None else arena
        if isinstance(arena, CudaArena):
            return cls(*captured(function, arena))
        graph = _native.Graph(arena)
        with alone_in(arena), recording(graph), torch.inference_mode(), OnlyViews(graph):
            result = function()
        if not RECORDING.stack:  # a recording around this one may still read what it made
            graph.end()
        return cls(graph, arena, result)

    def replay(self) -> Result:
        if RECORDING.stack:
            raise RecordError("a replay within a recording is not a native op, so it would be left out")
        with self._arena.lock:
            self._graph.replay()
        return self.result

    def add_to(self, job: _native.Job) -> None:
        """Let a job replay it, behind its caller: until that is done nobody else may use the arena."""
        job.replay(self._graph)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """How many native calls it has; a CUDA graph tells nothing of its kernels."""
        return 0 if isinstance(self._graph, torch.cuda.CUDAGraph) else len(self._graph)


def captured(
    function: Callable[[], Result], arena: CudaArena
) -> tuple[torch.cuda.CUDAGraph, CudaArena, Result]:
    """Run the function, which compiles and loads what it needs, and then again for the graph to keep it.

    What it has computed is there after the next replay.
    """
    graph = torch.cuda.CUDAGraph()
    with alone_in(arena), torch.inference_mode(), torch.cuda.device(arena.device):
        function()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=arena.pool, capture_error_mode="thread_local"):
                result = function()
        except RuntimeError as error:
            # torch takes no further graph into a pool whose first one has failed.
            arena.pool = torch.cuda.graph_pool_handle()
            raise RecordError(f"a CUDA graph cannot repeat this: {error}") from error
    graph.replay()
    return graph, arena, result


@contextmanager
def alone_in(arena: Arena | CudaArena) -> Iterator[None]:
    """Never waits: two recordings that each wait for the other's arena would do so for ever."""
    if not arena.lock.acquire(blocking=False):
        raise RecordError("the arena is in use by another thread; give each thread an Arena of its own")
    try:
        yield
    finally:
        arena.lock.release()


@contextmanager
def recording(graph: _native.Graph) -> Iterator[None]:
    """The ops that this thread runs go into the graph, and their results into its arena."""
    RECORDING.stack.append(graph)
    _native.record_into(graph)
    try:
        yield
    finally:
        RECORDING.stack.pop()
        _native.record_into(RECORDING.stack[-1] if RECORDING.stack else None)


@contextmanager
def results_in(arena: Arena) -> Iterator[None]:
    """What ops make in this thread lies in the arena as long as it lives, and nothing is recorded.

    One op after the other so takes the same pages. A heap would put into them what lives longer, and grow.
    """
    _native.record_into(_native.Graph(arena))
    try:
        yield
    finally:
        _native.record_into(RECORDING.stack[-1] if RECORDING.stack else None)


class OnlyViews(TorchFunctionMode):
    """Lets torch make empty tensors, which then lie in the arena, and views; refuses every computation.

    It watches calls from Python, which is all that can come between two native ops.
    """

    def __init__(self, graph: _native.Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name == "__get__" and not isinstance(result := func(*args), Tensor):
            return result  # a shape, a dtype: most of what is asked for, so it is let through first
        kwargs, makes_room = kwargs or {}, name.removeprefix("new_").startswith("empty")
        has_out = kwargs.get("out") is not None
        if writes(name) or kwargs.get("inplace") or (has_out and not makes_room):
            raise RecordError(f"{name} writes without a native op, so a replay would leave it out")
        result = func(*args, **kwargs)
        if makes_room:
            return result if has_out else self.in_arena(result)
        results = result if isinstance(result, tuple | list) else (result,)
        made = [t for t in results if isinstance(t, Tensor)]
        if made and not are_views(made, args):
            raise RecordError(f"{name} is not a native op, so a replay would leave it out")
        return result

    def in_arena(self, made: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return self.graph.empty_like(made)


def writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def are_views(made: list[Tensor], args: tuple[Any, ...]) -> bool:
    storages = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
    return all(t.untyped_storage().data_ptr() in storages for t in made)
