"""Tables: the blocks of each stream, where a step reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from infinilm.parcels import sent

# B streams, M blocks of a stream

KINDS = torch.int64, torch.int32


class Placed(Protocol):
    """Work of a stream that lies in these blocks. The list only grows: for other blocks there is another."""

    block_ids: list[int]


class Tables:
    """The blocks of each stream, in a row of its own that it keeps as long as it has them [B, M]"""

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device) -> None:
        self._tables = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device="cpu")
        self.on_device = self._tables.to(device)  # the same memory on a CPU
        self._numbers = self._tables.numpy()
        self._held: list[tuple[list[int], int]] = [([], 0)] * num_rows  # the blocks that each row shows
        self._rows: dict[int, int] = {}  # by the identity of a list of blocks
        self._free = list(range(num_rows))[::-1]

    def row_of(self, item: Placed) -> int:
        return self._rows[id(item.block_ids)]

    def of(self, work: Sequence[Placed], num_blocks: int) -> Tensor:
        """The tables of some work alone"""
        return torch.from_numpy(self._numbers[list(map(self.row_of, work)), :num_blocks])

    def know(self, work: Sequence[Placed]) -> bool:
        """Whether all of it has its row: to give it one changes what a step on a CPU may be reading."""
        return all(id(item.block_ids) in self._rows for item in work)

    def show(self, work: Sequence[Placed]) -> None:
        for item in work:
            if id(item.block_ids) not in self._rows:
                self._place(item.block_ids, work)
        changed = array("q"), array("i")
        for item in work:
            self._write(self.row_of(item), item.block_ids, *changed)
        if changed[0] and self.on_device is not self._tables:
            at, blocks = (torch.frombuffer(t, dtype=dtype) for t, dtype in zip(changed, KINDS, strict=True))
            self.on_device.view(-1).scatter_(0, *(sent(t, self.on_device.device) for t in (at, blocks)))

    def _place(self, block_ids: list[int], work: Sequence[Placed]) -> None:
        """An interrupt may come between any two lines: a row that it loses here is found among those that
        nobody has, and no row has two owners."""
        if not self._free:
            kept = {id(item.block_ids) for item in work}
            self._rows = {held: row for held, row in self._rows.items() if held in kept}
            taken = set(self._rows.values())
            self._free = [row for row in range(len(self._held)) if row not in taken]
        row = self._free.pop()
        self._held[row] = block_ids, 0  # which keeps the list, and so its identity
        self._rows[id(block_ids)] = row

    def _write(self, row: int, block_ids: list[int], at: array[int], blocks: array[int]) -> None:
        num_shown, count = self._held[row][1], len(block_ids)
        if num_shown == count:
            return
        new = block_ids[num_shown:]
        self._numbers[row, num_shown:count] = new
        self._held[row] = block_ids, count
        first = row * self._numbers.shape[1]
        at.extend(range(first + num_shown, first + count))
        blocks.extend(new)
