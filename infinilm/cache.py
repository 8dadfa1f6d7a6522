"""DynamicCache: the keys and values of one batch of streams, contiguous, growing as they come."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from infinicore import ops

# Multiplications of one call, about a tenth of a second: Python hears an interrupt between two calls only.
CALL_WORK = 1 << 28
GROWTH = 256  # positions of room added at least, so that decoding seldom copies

# B streams, S new tokens, T all tokens of a stream, H query heads, K key/value heads, D head size


class DynamicCache:
    """Keys and values [B, K, T, D] of every layer. Layers hand q, k, v to `attend`, which stores and attends.

    Room is kept beyond what is filled, so that a step can be recorded and replayed until it is full.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._lengths: list[int] = []
        # True where a key may be attended to [B, T]; None while no position is padding.
        self.key_mask: Tensor | None = None
        # The stream and slot of each new token, flat. A recorded step reads the slots of the one before where
        # they were, and to write numbers there is cheaper than any call of torch.
        self._streams = torch.empty(0, dtype=torch.int64)
        self._slot_numbers = array("q")
        self.slots = torch.empty(0, dtype=torch.int64)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, K, S, D] to a layer and return all it holds, [B, K, T, D] each."""
        check_update(keys, values, layer_idx, len(self._lengths))
        start = self.get_seq_length(layer_idx)
        end = start + keys.shape[2]
        held_keys, held_values = self._with_room(layer_idx, keys, end)
        held_keys[:, :, start:end] = keys
        held_values[:, :, start:end] = values
        self._lengths[layer_idx] = end
        return held_keys[:, :, :end], held_values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many positions a layer holds."""
        return self._lengths[layer_idx] if layer_idx < len(self._lengths) else 0

    def begin(self, batch_size: int, num_new: int, mask: Tensor | None) -> None:
        """Before the layers see new tokens: where they go, and which of them are real ([B, S], None: all)."""
        self._extend_mask(mask, batch_size, num_new)
        start = self.get_seq_length()
        slots = array("q", range(start, start + num_new)) * batch_size
        if num_new == 1 and len(self._slot_numbers) == batch_size:
            self._slot_numbers[:] = slots
            return
        self._streams = torch.arange(batch_size).repeat_interleave(num_new)
        self._slot_numbers, self.slots = slots, torch.frombuffer(slots, dtype=torch.int64)

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Store k and v [B, S, K, D], and let q [B, S, H, D] attend to all it may see -> [B, S, H, D]"""
        if self.key_mask is not None or not q.is_cpu:
            keys, values = self.update(k.transpose(1, 2), v.transpose(1, 2), layer_idx)
            return attend_masked(q.transpose(1, 2), keys, values, self.key_mask, scale, window).transpose(
                1, 2
            )
        end = self.get_seq_length(layer_idx) + q.shape[1]
        keys, values = self._with_room(layer_idx, k.transpose(1, 2), end)
        places = (self._streams, self.slots)
        ops.store_kv(keys, values, k.flatten(0, 1), v.flatten(0, 1), *places, out=(keys, values))
        self._lengths[layer_idx] = end
        return attend_in_parts(q.flatten(0, 1), keys, values, places, end, scale, window).view(q.shape)

    @property
    def num_slots(self) -> int:
        """How many positions fit without moving anything."""
        return self._keys[0].shape[2] if self._keys else 0

    def make_room(self, num_new: int) -> None:
        for layer, length in enumerate(self._lengths):
            self._with_room(layer, self._keys[layer][:, :, :0], length + num_new)

    def advance(self, num_new: int) -> None:
        """Count positions that a replayed step has stored."""
        self._lengths = [length + num_new for length in self._lengths]

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self._lengths = [min(length, held) for held in self._lengths]

    def __len__(self) -> int:
        return len(self._lengths)

    def _extend_mask(self, mask: Tensor | None, batch_size: int, num_new: int) -> None:
        if mask is None and self.key_mask is None:
            return
        new = torch.ones(batch_size, num_new, dtype=torch.bool) if mask is None else mask.bool()
        old = self.key_mask
        if old is None:
            old = torch.ones(batch_size, self.get_seq_length(), dtype=torch.bool, device=new.device)
        self.key_mask = torch.cat([old, new.to(old.device)], dim=1)

    def _with_room(self, layer: int, keys: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """A layer's buffers, with room for positions below `end` of what `keys` [B, K, S, D] is like."""
        if layer == len(self._lengths):
            empty = keys.new_empty(*keys.shape[:2], 0, keys.shape[3])
            self._keys.append(empty)
            self._values.append(empty)
            self._lengths.append(0)
        held, length = self._keys[layer], self._lengths[layer]
        if held.shape[:2] != keys.shape[:2] or held.shape[3] != keys.shape[3]:
            shapes = f"{tuple(keys.shape)} to {tuple(held.shape[:2])} streams and heads of {held.shape[3]}"
            raise ValueError(f"cache: cannot append keys {shapes}; use a new cache for another batch")
        if end > held.shape[2]:
            room = end + max(GROWTH, length // 2)
            self._keys[layer] = grown(held, room, length)
            self._values[layer] = grown(self._values[layer], room, length)
        return self._keys[layer], self._values[layer]


def grown(held: Tensor, room: int, length: int) -> Tensor:
    larger = held.new_empty(held.shape[0], held.shape[1], room, held.shape[3])
    larger[:, :, :length] = held[:, :, :length]
    return larger


def attend_in_parts(  # noqa: PLR0913  those of the op
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    places: tuple[Tensor, Tensor],
    num_keys: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """ops.attention of tokens [B * S, H, D], in several calls where one takes long; the bits are the same."""
    work = q[0].numel() * min(num_keys, window or num_keys)  # of a token
    size = max(CALL_WORK // work // 16, 1) * 16  # the kernel takes 16 together
    if len(q) <= size:
        return ops.attention(q, keys, values, *places, scale, window or 0)
    out = torch.empty_like(q)
    for start in range(0, len(q), size):
        part, streams, slots, attended = (t[start : start + size] for t in (q, *places, out))
        ops.attention(part, keys, values, streams, slots, scale, window or 0, out=attended)
    return out


def check_update(keys: Tensor, values: Tensor, layer_idx: int, num_layers: int) -> None:
    if keys.dim() != 4 or keys.shape != values.shape:
        shapes = f"{tuple(keys.shape)} and {tuple(values.shape)}"
        raise ValueError(f"cache: keys and values must both be [batch, heads, seq, dim], but are {shapes}")
    if not 0 <= layer_idx <= num_layers:
        raise IndexError(f"cache: layer {layer_idx} comes out of turn; expected at most {num_layers}")


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, window: int | None
) -> Tensor:
    """Attention of the last S of T tokens, by torch: [B, H, S, D], [B, K, T, D] -> [B, H, S, D]"""
    visible = visible_keys(q.shape[2], k.shape[2], key_mask, window, q.device)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def visible_keys(
    num_queries: int, num_keys: int, key_mask: Tensor | None, window: int | None, device: torch.device
) -> Tensor | None:
    """Which keys each query sees, broadcast to [B, 1, S, T]; None where it is all of them.

    Every query sees itself, so that padding yields numbers rather than NaN.
    """
    if num_queries == 1 and key_mask is None and (window is None or num_keys <= window):
        return None
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    visible = key <= query  # [S, T]
    if window is not None:
        visible &= key > query - window
    if key_mask is None:
        return visible
    return (visible & key_mask[:, None, None, :].to(device)) | (key == query)
