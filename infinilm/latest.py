"""Latest: the tokens that the last step drew, for the next one, and on their way to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infinicore import _native


class Latest:
    """The tokens of the last step that was launched, where the next one finds them while it is unread: on a
    GPU the beginning of memory in which the numbers of a step follow. On a CPU such steps are in a queue."""

    def __init__(self, num_rows: int, most_bytes: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.is_sent = device.type == "cuda"
        self.memory = torch.zeros(8 * num_rows + most_bytes * self.is_sent, dtype=torch.uint8, device=device)
        self.on_device = self.memory[: 8 * num_rows].view(torch.int64)
        self.queue = _native.Queue()
        if self.is_sent:
            host = torch.empty(2, num_rows, dtype=torch.int64, device="cpu", pin_memory=True)
            self._hosts = list(host)

    def settle(self) -> None:
        """Wait for the steps of a CPU that are under way; on a GPU all that follows is done after them."""
        self.queue.settle()

    def note(self, tokens: Tensor) -> Readback:
        """What a GPU has drawn, or will have"""
        place = self.on_device[: len(tokens)]
        if tokens.data_ptr() != place.data_ptr():
            place.copy_(tokens)
        self._hosts.reverse()  # what is read of the step before is in the other
        return Readback(self._hosts[0], place)

    def copy(self) -> Tensor | None:
        return self.on_device.clone() if self.is_sent else None

    def restore(self, before: Tensor | None) -> None:
        if before is not None:
            self.on_device.copy_(before)

    def known(self, token_ids: Tensor) -> Tensor:
        """The ids, with a token of the last step in the place of each -1 - row, or 0 where its logits were no
        numbers: any token may follow"""
        latest = self.on_device[(-1 - token_ids).clamp(min=0)].clamp(min=0)
        return torch.where(token_ids < 0, latest, token_ids)


class Waited:
    """Tokens that a step will have drawn which goes on behind its caller, on a CPU"""

    def __init__(self, queue: _native.Queue, job: _native.Job, tokens: memoryview) -> None:
        self._queue, self._tokens = queue, tokens
        self._number = queue.begin(job)

    def read(self) -> list[int]:
        self._queue.wait(self._number)
        return self._tokens.tolist()


class Readback:
    """Tokens that a GPU has drawn, or will have, copied into memory of the host when that is done."""

    def __init__(self, memory: Tensor, tokens: Tensor) -> None:
        self._memory = memory[: len(tokens)]
        self._memory.copy_(tokens, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        self._event.synchronize()
        return self._memory.tolist()
