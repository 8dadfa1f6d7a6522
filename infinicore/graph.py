"""Graph: record the ops of a function once, replay them in one native call.

The function runs on fixed buffers. What changes from step to step (tokens, positions) is written into them
before a replay, never decided in Python. Only ops with native kernels can be recorded; whatever else torch
would compute during the recording is refused, because a replay would leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinicore import _native
from infinicore.ops.registry import RECORDING

Result = TypeVar("Result")


class RecordError(RuntimeError):
    """The function computes something that a replay could not repeat."""


class Graph(Generic[Result]):
    """The recorded calls and the result they write to: each `replay` computes it anew."""

    def __init__(self, calls: list[Callable[[], None]], result: Result) -> None:
        self._graph = _native.Graph(calls)
        self.result = result

    @classmethod
    def record(cls, function: Callable[[], Result]) -> Graph[Result]:
        """Run the function and keep its ops."""
        calls: list[Callable[[], None]] = []
        RECORDING.append(calls)
        try:
            with torch.inference_mode(), OnlyViews():  # type: ignore[no-untyped-call]
                result = function()
        finally:
            RECORDING.pop()
        return cls(calls, result)

    def replay(self) -> Result:
        self._graph.replay()
        return self.result

    def __len__(self) -> int:
        return len(self._graph)


class OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch make empty tensors and views, and refuses every computation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        is_write = func._schema.is_mutable
        if is_write or not (is_view or "empty" in func._schema.name or func._schema.name == "aten::detach"):
            raise RecordError(f"{func} is not a native op, so a replay would leave it out")
        return func(*args, **(kwargs or {}))
