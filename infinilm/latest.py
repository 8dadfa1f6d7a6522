"""Latest: the tokens that the last step drew, for the next one, and on their way to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Latest:
    """The tokens of the last step, where the next one finds them: a list, or on a GPU the beginning of memory
    in which the numbers of a step follow."""

    def __init__(self, num_rows: int, most_bytes: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.tokens: list[int] = []
        self.is_sent = device.type == "cuda"
        if self.is_sent:
            self.memory = torch.zeros(8 * num_rows + most_bytes, dtype=torch.uint8, device=device)
            self.on_device = self.memory[: 8 * num_rows].view(torch.int64)
            host = torch.empty(2, num_rows, dtype=torch.int64, device="cpu", pin_memory=True)
            self._hosts = list(host)

    def note(self, tokens: Tensor | list[int]) -> list[int] | Readback:
        if isinstance(tokens, list) or not self.is_sent:
            self.tokens = tokens if isinstance(tokens, list) else tokens.tolist()
            return self.tokens
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

    def here(self, row: int) -> int:
        """A token, as far as the host knows it. Where the logits were no numbers any token may follow: 0"""
        return 0 if self.is_sent else max(self.tokens[row], 0)

    def known(self, token_ids: Tensor) -> Tensor:
        """The ids, with a token of the last step in the place of each -1 - row"""
        latest = self.on_device if self.is_sent else torch.tensor(self.tokens, device="cpu").clamp(min=0)
        return torch.where(token_ids < 0, latest[(-1 - token_ids).clamp(min=0)], token_ids)


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
