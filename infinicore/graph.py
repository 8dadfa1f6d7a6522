"""Graph: record the ops of a function once, replay them in one native call.

The function runs on fixed buffers. What changes from step to step (tokens, positions) is written into them
before a replay, never decided in Python. Only ops with native kernels can be recorded; whatever else torch
would compute during the recording is refused, because a replay would leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from infinicore import _native
from infinicore.ops.registry import RECORDING

Result = TypeVar("Result")


class RecordError(RuntimeError):
    """The function computes something that a replay could not repeat."""


class Arena:
    pass


class Graph(Generic[Result]):
    """The recorded calls and the result they write to: each `replay` computes it anew."""

    def __init__(self, calls: list[Callable[[], None]], result: Result) -> None:
        self._graph = _native.Graph(calls)
        self.result = result

    @classmethod
    def record(cls, function: Callable[[], Result], arena: Any = None) -> Graph[Result]:
        """Run the function and keep its ops."""
        calls: list[Callable[[], None]] = []
        RECORDING.stack.append(calls)
        try:
            with torch.inference_mode(), OnlyViews():
                result = function()
        finally:
            RECORDING.stack.pop()
        return cls(calls, result)

    def replay(self) -> Result:
        self._graph.replay()
        return self.result

    def __len__(self) -> int:
        return len(self._graph)


class OnlyViews(TorchFunctionMode):
    """Lets torch make empty tensors and views, and refuses every computation.

    It watches calls from Python, which is all that can come between two native ops.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name == "__get__" and not isinstance(result := func(*args), Tensor):
            return result  # a shape, a dtype: most of what is asked for, so it is let through first
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise RecordError(f"{name} writes without a native op, so a replay would leave it out")
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        made = [t for t in results if isinstance(t, Tensor)]
        if made and not name.removeprefix("new_").startswith("empty") and not are_views(made, args):
            raise RecordError(f"{name} is not a native op, so a replay would leave it out")
        return result


def are_views(made: list[Tensor], args: tuple[Any, ...]) -> bool:
    storages = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
    return all(t.untyped_storage().data_ptr() in storages for t in made)
