"""DynamicCache: the keys and values of one batch of streams, contiguous, growing as they come."""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 256  # positions of room added at least, so that decoding seldom copies


class DynamicCache:
    """Keys and values [B, K, T, D] of every layer, appended to by `update`.

    Room is kept beyond what is filled; `update` returns views of the filled part.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._lengths: list[int] = []
        # True where a key may be attended to [B, T]; None while no position is padding.
        self.key_mask: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, K, S, D] to a layer and return all it holds, [B, K, T, D] each."""
        check_update(keys, values, layer_idx, len(self._lengths))
        if layer_idx == len(self._lengths):
            self._add_layer(keys, values)
        start, end = self._lengths[layer_idx], self._lengths[layer_idx] + keys.shape[2]
        self._make_room(layer_idx, keys, end)
        self._keys[layer_idx][:, :, start:end] = keys
        self._values[layer_idx][:, :, start:end] = values
        self._lengths[layer_idx] = end
        return self._keys[layer_idx][:, :, :end], self._values[layer_idx][:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many positions a layer holds."""
        return self._lengths[layer_idx] if layer_idx < len(self._lengths) else 0

    def extend_mask(self, mask: Tensor | None, batch_size: int, num_new: int) -> Tensor | None:
        """Note which of the new positions are real ([B, S], None: all), and return the mask of all."""
        if mask is None and self.key_mask is None:
            return None
        new = torch.ones(batch_size, num_new, dtype=torch.bool) if mask is None else mask.bool()
        old = self.key_mask
        if old is None:
            old = torch.ones(batch_size, self.get_seq_length(), dtype=torch.bool, device=new.device)
        self.key_mask = torch.cat([old, new.to(old.device)], dim=1)
        return self.key_mask

    def __len__(self) -> int:
        return len(self._lengths)

    def _add_layer(self, keys: Tensor, values: Tensor) -> None:
        self._keys.append(keys.new_empty(*keys.shape[:2], 0, keys.shape[3]))
        self._values.append(values.new_empty(*values.shape[:2], 0, values.shape[3]))
        self._lengths.append(0)

    def _make_room(self, layer: int, keys: Tensor, end: int) -> None:
        held = self._keys[layer]
        if held.shape[:2] != keys.shape[:2] or held.shape[3] != keys.shape[3]:
            shapes = f"{tuple(keys.shape)} to {tuple(held.shape[:2])} streams and heads of {held.shape[3]}"
            raise ValueError(f"cache: cannot append keys {shapes}; use a new cache for another batch")
        if end <= held.shape[2]:
            return
        room = end + max(GROWTH, held.shape[2] // 2) if self._lengths[layer] else end + GROWTH
        self._keys[layer] = grown(held, room, self._lengths[layer])
        self._values[layer] = grown(self._values[layer], room, self._lengths[layer])


def grown(held: Tensor, room: int, length: int) -> Tensor:
    larger = held.new_empty(held.shape[0], held.shape[1], room, held.shape[3])
    larger[:, :, :length] = held[:, :, :length]
    return larger


def check_update(keys: Tensor, values: Tensor, layer_idx: int, num_layers: int) -> None:
    if keys.dim() != 4 or keys.shape != values.shape:
        shapes = f"{tuple(keys.shape)} and {tuple(values.shape)}"
        raise ValueError(f"cache: keys and values must both be [batch, heads, seq, dim], but are {shapes}")
    if not 0 <= layer_idx <= num_layers:
        raise IndexError(f"cache: layer {layer_idx} comes out of turn; expected at most {num_layers}")
