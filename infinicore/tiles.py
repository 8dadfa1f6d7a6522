"""Quantised matrices as a GPU reads them: 32 rows are a tile, laid out as the tensor cores take them.

A thread of a warp loads 16 bytes, which hold 8 values of each of the 4 rows whose products it computes. The
bytes are those of the blocks in another order; only the 6-bit scales of Q4_K take 8 bits: 3 % more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from infinicore.block_formats import _fields, _group_scales, _grouped, _half, _parts
from infinicore.quantization import BlockType, QuantizedTensor

# N rows, K their length, T tiles, G groups of 32 values of a row, B blocks of a row
TILE_ROWS = 32
CHUNK = 1 << 24  # values that are rearranged at once


class Part(NamedTuple):
    """What a row has of one kind: `num_bytes` for every `elements`.

    Codes lie by groups of 32 values: of each, `num_bytes` of all rows of a tile. The others are scales and
    minimums, those of rows g, g + 8, g + 16 and g + 24 side by side.
    """

    elements: int
    num_bytes: int
    is_codes: bool = False


BYTES, NIBBLES, HIGH_BITS = Part(32, 32, True), Part(32, 16, True), Part(32, 8, True)
PARTS = {
    BlockType.Q8_0: (BYTES, Part(32, 2)),  # the first 16 values of a group, then the last
    BlockType.Q4_0: (NIBBLES, Part(32, 2)),
    BlockType.Q4_1: (NIBBLES, Part(32, 2), Part(32, 2)),  # and minimums
    BlockType.Q4_K: (NIBBLES, Part(32, 1), Part(32, 1), Part(256, 2), Part(256, 2)),
    BlockType.Q6_K: (NIBBLES, HIGH_BITS, Part(16, 1), Part(256, 2)),
}


def bytes_per_tile(type: BlockType, row_length: int) -> int:
    type.bytes_per_row(row_length)  # which refuses rows that fill no blocks
    return TILE_ROWS * sum(row_length // part.elements * part.num_bytes for part in PARTS[type])


class RowTensor(QuantizedTensor):
    """A quantised matrix for a GPU: `planes` of memory, in each of which its rows follow each other."""

    row_step: ClassVar[int] = 1  # a matrix of so many rows, or a multiple, can be followed by another

    @property
    def planes(self) -> tuple[Tensor, ...]:
        return (self.blocks,)

    def of(self, planes: Sequence[Tensor], num_rows: int) -> Self:
        """One of the same kind, with other rows"""
        return replace(self, blocks=planes[0], shape=(num_rows, self.shape[1]))

    def part(self, begin: int, end: int) -> QuantizedTensor:
        self._check_part(begin, end)
        step = self.row_step
        if begin % step or (end % step and end < self.shape[0]):
            return self.rows(torch.arange(begin, end, device=self.device))
        return self.of([plane[begin // step : -(-end // step)] for plane in self.planes], end - begin)


@dataclass(frozen=True, eq=False, repr=False)
class TiledTensor(RowTensor):
    """A quantised matrix in tiles, uint8 [T, bytes of a tile], the last of them filled up with zeros.

    A group of 32 values of all 32 rows is 512 bytes of nibbles, 16 for each of 32 threads 4 g + t: 4 words,
    for rows g, g + 8, g + 16 and g + 24. Value v of a word is value 8 (v / 2) + 2 t + v % 2 of the group, at
    nibble v / 2 if v is even, else at v / 2 + 4. Of Q8_0 a group is 512 bytes for its first 16 values and 512
    for its last; value v of a word is at byte v / 2 if v is even, else at v / 2 + 2. The high 2 bits of Q6_K
    lie as its nibbles do, two rows to a word.
    """

    row_step: ClassVar[int] = TILE_ROWS

    def __post_init__(self) -> None:
        if self.type not in PARTS:
            raise ValueError(f"tiles are of {', '.join(t.name for t in PARTS)}, not of {self.type.name}")
        wanted = (-(-self.shape[0] // TILE_ROWS), bytes_per_tile(self.type, self.shape[-1]))
        if len(self.shape) != 2 or tuple(self.blocks.shape) != wanted or self.blocks.dtype != torch.uint8:
            raise ValueError(
                f"tiled {self.type.name} {self.shape} needs torch.uint8 tiles {wanted}, "
                f"but has {self.blocks.dtype} {tuple(self.blocks.shape)}"
            )

    def clone(self) -> TiledTensor:
        return replace(self, blocks=self.blocks.clone())

    def rows(self, indices: Tensor) -> TiledTensor:
        parts = [part[indices] for part in self.parts()]
        return replace(self, blocks=tiles_of(parts, self.type), shape=(len(indices), self.shape[1]))

    def has_finite_scales(self) -> bool:
        halves = [
            part for part, kind in zip(self.parts(), PARTS[self.type], strict=True) if kind.num_bytes == 2
        ]
        return all(bool(_halves(half).isfinite().all()) for half in halves)

    def parts(self, tiles: slice = slice(None)) -> list[Tensor]:
        """What PARTS names, of the rows of these tiles: uint8 [N, how many, bytes of each], codes singly"""
        blocks, found, start = self.blocks[tiles], [], 0
        for kind in PARTS[self.type]:
            size = TILE_ROWS * self.shape[1] // kind.elements * kind.num_bytes
            found.append(rows_of_tiles(blocks[:, start : start + size], kind))
            start += size
        return [part[: self.shape[0] - (tiles.start or 0) * TILE_ROWS] for part in found]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.empty(self.shape, dtype=dtype, device=self.blocks.device)
        step = max(CHUNK // (TILE_ROWS * self.shape[1]), 1)
        for start in range(0, len(self.blocks), step):
            rows = slice(start * TILE_ROWS, (start + step) * TILE_ROWS)
            values[rows] = VALUES[self.type](*self.parts(slice(start, start + step)))
        return values


def tile(weight: QuantizedTensor) -> TiledTensor:
    """The same matrix in tiles, where it lies"""
    num_rows, length = weight.shape
    step = max(CHUNK // length // TILE_ROWS, 1) * TILE_ROWS
    tiles = [
        tiles_of(taken_apart(rows, weight.type), weight.type) for rows in torch.split(weight.blocks, step)
    ]
    return TiledTensor(torch.cat(tiles), weight.type, (num_rows, length))


def can_be_one(weights: Sequence[object]) -> bool:
    """Whether rows of one of these could follow those of another in one matrix"""
    known = [weight for weight in weights if isinstance(weight, RowTensor)]
    kinds = {(weight.type, weight.shape[1]) for weight in known}
    is_whole = all(weight.shape[0] % weight.row_step == 0 for weight in known[:-1])
    return len(known) == len(weights) and len(kinds) == 1 and is_whole


def laid_together(weights: Sequence[RowTensor]) -> list[RowTensor]:
    """The same weights, each plane of one following that of the one before"""
    places = []
    for parts in zip(*(weight.planes for weight in weights), strict=True):
        places.append(torch.split(torch.cat(parts), [len(part) for part in parts]))
    return [w.of(planes, w.shape[0]) for w, planes in zip(weights, zip(*places, strict=True), strict=True)]


def taken_apart(rows: Tensor, type: BlockType) -> list[Tensor]:
    """Parts of rows of blocks, uint8 [N, bytes of a row]: [N, how many, bytes of each], codes singly"""
    parts = SPLITTERS[type](rows.reshape(-1, type.bytes_per_block))
    kinds = PARTS[type]
    sizes = [1 if kind.is_codes else kind.num_bytes for kind in kinds]
    return [part.reshape(len(rows), -1, size) for part, size in zip(parts, sizes, strict=True)]


def tiles_of(parts: Sequence[Tensor], type: BlockType) -> Tensor:
    """The parts of rows -> tiles [T, bytes of a tile]"""
    num_tiles = -(-len(parts[0]) // TILE_ROWS)
    laid = []
    for part, kind in zip(parts, PARTS[type], strict=True):
        padded = torch.nn.functional.pad(part, (0, 0, 0, 0, 0, num_tiles * TILE_ROWS - len(part)))
        laid.append(laid_out(padded, kind))
    return torch.cat(laid, 1)


def laid_out(part: Tensor, kind: Part) -> Tensor:
    """One part of whole tiles, [32 T, how many, bytes of each] -> [T, bytes of it in a tile]"""
    if not kind.is_codes:
        return part.view(-1, 4, 8, *part.shape[1:]).permute(0, 3, 2, 1, 4).flatten(1)
    if kind is HIGH_BITS:
        return _high_words(part).flatten(1)
    return (_nibble_words(part) if kind is NIBBLES else _byte_words(part)).flatten(1)


def rows_of_tiles(laid: Tensor, kind: Part) -> Tensor:
    """The inverse of laid_out"""
    if not kind.is_codes:
        by_group = laid.reshape(len(laid), -1, 8, 4, kind.num_bytes)  # [T, how many, g, j, bytes]
        return by_group.permute(0, 3, 2, 1, 4).flatten(0, 2)
    groups = laid.reshape(len(laid), -1, TILE_ROWS * kind.num_bytes)
    if kind is HIGH_BITS:
        return _high_bits_of(groups)
    return _nibbles_of(groups) if kind is NIBBLES else _bytes_of(groups)


# A value's place: row 8 j + g of its tile, value 16 s + 8 p + 2 t + o of its group; that of its bits: thread
# 4 g + t, word j, byte 2 o + s, and there p. That of a byte: half s, thread 4 g + t, word j, byte 2 o + p.


def _byte_words(codes: Tensor) -> Tensor:
    """[32 T, 32 G, 1] -> bytes of words [T, G, 1024]"""
    laid = codes.view(-1, 4, 8, codes.shape[1] // 32, 2, 2, 4, 2).permute(0, 3, 4, 2, 6, 1, 7, 5)
    return laid.flatten(2)  # [T, G, s, g, t, j, o, p]


def _bytes_of(words: Tensor) -> Tensor:
    """The inverse of _byte_words"""
    laid = words.reshape(*words.shape[:2], 2, 8, 4, 4, 2, 2)
    return laid.permute(0, 5, 3, 1, 2, 7, 4, 6).reshape(len(words) * TILE_ROWS, -1, 1)


def _nibble_words(codes: Tensor) -> Tensor:
    """[32 T, 32 G, 1] -> bytes of words [T, G, 512]"""
    laid = codes.view(-1, 4, 8, codes.shape[1] // 32, 2, 2, 4, 2).permute(0, 3, 2, 6, 1, 7, 4, 5)
    return (laid[..., 0] | laid[..., 1] << 4).flatten(2)  # [T, G, g, t, j, o, s]


def _nibbles_of(words: Tensor) -> Tensor:
    """The inverse of _nibble_words"""
    laid = words.reshape(*words.shape[:2], 8, 4, 4, 2, 2)
    codes = torch.stack([laid & 15, laid >> 4], -1)  # [T, G, g, t, j, o, s, p]
    return codes.permute(0, 4, 2, 1, 6, 7, 3, 5).reshape(len(words) * TILE_ROWS, -1, 1)


def _high_words(codes: Tensor) -> Tensor:
    """[32 T, 32 G, 1] of 2 bits -> bytes [T, G, 256] of words j / 2: byte 2 o + j % 2, bits 4 s + 2 p"""
    laid = codes.view(-1, 2, 2, 8, codes.shape[1] // 32, 2, 2, 4, 2).permute(0, 4, 3, 7, 1, 8, 2, 5, 6)
    # Each [T, G, g, t, j / 2, o, j % 2]
    shifted = [laid[..., s, p] << (4 * s + 2 * p) for s in (0, 1) for p in (0, 1)]
    return torch.stack(shifted).sum(0, dtype=torch.uint8).flatten(2)


def _high_bits_of(words: Tensor) -> Tensor:
    """The inverse of _high_words"""
    laid = words.reshape(*words.shape[:2], 8, 4, 2, 2, 2)
    fields = [laid >> (4 * s + 2 * p) & 3 for s in (0, 1) for p in (0, 1)]
    codes = torch.stack(fields, -1).reshape(*laid.shape, 2, 2)  # [T, G, g, t, j / 2, o, j % 2, s, p]
    return codes.permute(0, 4, 6, 2, 1, 7, 8, 3, 5).reshape(len(words) * TILE_ROWS, -1, 1)


# From blocks, uint8 [N, bytes per block], to the parts of each


def _split_q8_0(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, values = _parts(blocks, 2, 32)
    return values, scale


def _split_q4_0(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, packed = _parts(blocks, 2, 16)
    return _fields(packed, 4, 16), scale


def _split_q4_1(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, minimum, packed = _parts(blocks, 2, 2, 16)
    return _fields(packed, 4, 16), scale, minimum


def _split_q4_k(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, minimum, groups, packed = _parts(blocks, 2, 2, 12, 128)
    return _fields(packed, 4, 32), *_group_scales(groups), scale, minimum


def _split_q6_k(blocks: Tensor) -> tuple[Tensor, ...]:
    low, high, scales, scale = _parts(blocks, 128, 64, 16, 2)
    return _fields(low, 4, 64), _fields(high, 2, 32), scales, scale


SPLITTERS: dict[BlockType, Callable[[Tensor], tuple[Tensor, ...]]] = {
    BlockType.Q8_0: _split_q8_0,
    BlockType.Q4_0: _split_q4_0,
    BlockType.Q4_1: _split_q4_1,
    BlockType.Q4_K: _split_q4_k,
    BlockType.Q6_K: _split_q6_k,
}


# And from the parts of rows, uint8 [N, how many, bytes of each], to float32 [N, K]


def _halves(raw: Tensor) -> Tensor:
    """float16 bytes [N, G, 2] -> float32 [N, G]"""
    return _half(raw.flatten(0, 1)).view(raw.shape[:2])


def _spread(scales: Tensor, groups: Tensor) -> Tensor:
    """The scale of each group: that of its block, [N, B], times its own, [N, G]"""
    return scales.repeat_interleave(groups.shape[1] // scales.shape[1], 1) * groups.float()


def _values_q8_0(codes: Tensor, scale: Tensor) -> Tensor:
    return _grouped(_halves(scale), codes.flatten(1).view(torch.int8).float())


def _values_q4_0(codes: Tensor, scale: Tensor) -> Tensor:
    return _grouped(_halves(scale), codes.flatten(1).float() - 8)


def _values_q4_1(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return _grouped(_halves(scale), codes.flatten(1), -_halves(minimum))


def _values_q4_k(codes: Tensor, scales: Tensor, minimums: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    lowest = _spread(_halves(minimum), minimums[..., 0])
    return _grouped(_spread(_halves(scale), scales[..., 0]), codes.flatten(1), lowest)


def _values_q6_k(codes: Tensor, high: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    fields = (codes | high << 4).flatten(1)
    signed = scales[..., 0].contiguous().view(torch.int8)
    return _grouped(_spread(_halves(scale), signed), fields.float() - 32)


VALUES: dict[BlockType, Callable[..., Tensor]] = {
    BlockType.Q8_0: _values_q8_0,
    BlockType.Q4_0: _values_q4_0,
    BlockType.Q4_1: _values_q4_1,
    BlockType.Q4_K: _values_q4_k,
    BlockType.Q6_K: _values_q6_k,
}
