"""Staging: tensors of mapped files on their way to a GPU, through pinned memory.

One piece is filled while the one before it is sent, and no more of a tensor is on the host than these pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
NUM_PIECES = 3


class Staging:
    """Pinned memory for tensors to one GPU; what is sent is there for all that follows in its stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        shape = NUM_PIECES, PIECE_BYTES
        self._pieces = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._sent = [torch.cuda.Event() for _ in range(NUM_PIECES)]  # type: ignore[no-untyped-call]
        self._next = 0

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the GPU, contiguous"""
        arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        pieces, places = (torch.split(bytes_of(t), PIECE_BYTES) for t in (tensor, arrived))
        for piece, place in zip(pieces, places, strict=True):
            self._send_piece(piece, place)
        return arrived

    def _send_piece(self, piece: Tensor, place: Tensor) -> None:
        index, self._next = self._next, (self._next + 1) % NUM_PIECES
        self._sent[index].synchronize()
        pinned = self._pieces[index, : len(piece)].copy_(piece)
        place.copy_(pinned, non_blocking=True)
        self._sent[index].record(torch.cuda.current_stream(self.device))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
