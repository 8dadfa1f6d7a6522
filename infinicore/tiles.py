"""Quantised matrices as a GPU reads them: 8 rows are a tile, in which each kind of byte lies together.

A thread then takes 16 bytes of codes at once, and the scales of 8 rows at once. The bytes are those of the
blocks in another order; only the 6-bit scales of Q4_K take 8 bits, which makes it 3 % larger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from infinicore.quantization import (
    BlockType,
    QuantizedTensor,
    _fields,
    _group_scales,
    _grouped,
    _half,
    _parts,
)

# N rows, K their length, T tiles, P pieces of 16 bytes of codes, G groups
TILE_ROWS = 8
CHUNK = 1 << 24  # values that are rearranged at once


class Part(NamedTuple):
    """What a row has of one kind: `num_bytes` for every `elements`. In a tile codes lie row after row, of
    scales those of its 8 rows side by side."""

    elements: int
    num_bytes: int
    is_codes: bool = False


BYTES, NIBBLES, HIGH_BITS = Part(16, 16, True), Part(32, 16, True), Part(32, 8, True)
PARTS = {
    BlockType.Q8_0: (BYTES, Part(32, 2)),
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
        """Of the same kind, with other rows"""
        return replace(self, blocks=planes[0], shape=(num_rows, self.shape[1]))


@dataclass(frozen=True, eq=False, repr=False)
class TiledTensor(RowTensor):
    """A quantised matrix in tiles, uint8 [T, bytes of a tile], the last of them filled up with zeros.

    The 16 bytes of a piece are 4 words: field f of word j is value 4 f + j of the piece. Bytes are unsigned,
    and the high 2 bits of six lie 16 to a word, those of its fields f and f + 4 side by side.
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
        halves = [part for part in self.parts() if part.shape[-1] == 2]
        return all(bool(half.contiguous().view(torch.float16).isfinite().all()) for half in halves)

    def parts(self, tiles: slice = slice(None)) -> list[Tensor]:
        """Of the rows of these tiles, what PARTS names: uint8 [N, how many, bytes of each]"""
        blocks, found, start = self.blocks[tiles], [], 0
        for elements, size, is_codes in PARTS[self.type]:
            count = self.shape[1] // elements
            raw = blocks[:, start : start + TILE_ROWS * count * size]
            sizes = (TILE_ROWS, count) if is_codes else (count, TILE_ROWS)
            laid = raw.reshape(len(blocks), *sizes, size)
            by_row = laid if is_codes else laid.transpose(1, 2)
            found.append(by_row.flatten(0, 1))
            start += raw.shape[1]
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
    """Rows of blocks, uint8 [N, bytes of a row], as their parts: [N, how many, bytes of each]"""
    parts = SPLITTERS[type](rows.reshape(-1, type.bytes_per_block))
    kinds = PARTS[type]
    return [part.reshape(len(rows), -1, kind.num_bytes) for part, kind in zip(parts, kinds, strict=True)]


def tiles_of(parts: Sequence[Tensor], type: BlockType) -> Tensor:
    """uint8 [N, how many, bytes of each] for each part -> tiles [T, bytes of a tile]"""
    num_tiles = -(-len(parts[0]) // TILE_ROWS)
    laid = []
    for part, kind in zip(parts, PARTS[type], strict=True):
        padded = torch.nn.functional.pad(part, (0, 0, 0, 0, 0, num_tiles * TILE_ROWS - len(part)))
        by_tile = padded.view(num_tiles, TILE_ROWS, *part.shape[1:])
        laid.append((by_tile if kind.is_codes else by_tile.transpose(1, 2)).flatten(1))
    return torch.cat(laid, 1)


# From blocks, uint8 [N, bytes per block], to the parts of each


def _byte_pieces(values: Tensor) -> Tensor:
    """[N, 16 P] -> the same, byte f of word j being value 4 f + j of its 16"""
    return values.reshape(len(values), -1, 4, 4).transpose(2, 3).flatten(1)


def _nibble_pieces(fields: Tensor) -> Tensor:
    """[N, 32 P] -> [N, 16 P], field f of word j being value 4 f + j of its 32"""
    pairs = fields.reshape(len(fields), -1, 4, 2, 4)  # [N, P, byte, low or high, word]
    return (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).transpose(2, 3).flatten(1)


def _high_pieces(fields: Tensor) -> Tensor:
    """[N, 32 P] of 2 bits -> [N, 8 P], those of value 4 f + j in half-word j, at bit 4 f or 4 f - 14"""
    f = fields.reshape(len(fields), -1, 8, 4).unbind(2)  # each [N, P, word]
    low, high = (f[i] | f[i + 4] << 2 | f[i + 1] << 4 | f[i + 5] << 6 for i in (0, 2))
    return torch.stack([low, high], -1).flatten(1)


def _split_q8_0(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, values = _parts(blocks, 2, 32)
    return _byte_pieces(values ^ 0x80), scale


def _split_q4_0(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, packed = _parts(blocks, 2, 16)
    return _nibble_pieces(_fields(packed, 4, 16)), scale


def _split_q4_1(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, minimum, packed = _parts(blocks, 2, 2, 16)
    return _nibble_pieces(_fields(packed, 4, 16)), scale, minimum


def _split_q4_k(blocks: Tensor) -> tuple[Tensor, ...]:
    scale, minimum, groups, packed = _parts(blocks, 2, 2, 12, 128)
    return _nibble_pieces(_fields(packed, 4, 32)), *_group_scales(groups), scale, minimum


def _split_q6_k(blocks: Tensor) -> tuple[Tensor, ...]:
    low, high, scales, scale = _parts(blocks, 128, 64, 16, 2)
    return _nibble_pieces(_fields(low, 4, 64)), _high_pieces(_fields(high, 2, 32)), scales, scale


SPLITTERS: dict[BlockType, Callable[[Tensor], tuple[Tensor, ...]]] = {
    BlockType.Q8_0: _split_q8_0,
    BlockType.Q4_0: _split_q4_0,
    BlockType.Q4_1: _split_q4_1,
    BlockType.Q4_K: _split_q4_k,
    BlockType.Q6_K: _split_q6_k,
}


# And from the parts of rows, uint8 [N, how many, bytes of each], to float32 [N, K]


def _bytes_of(pieces: Tensor) -> Tensor:
    return pieces.reshape(*pieces.shape[:2], 4, 4).transpose(2, 3).flatten(1)


def _nibbles_of(pieces: Tensor) -> Tensor:
    words = pieces.reshape(*pieces.shape[:2], 4, 4).transpose(2, 3)  # [N, P, byte, word]
    return torch.stack([words & 15, words >> 4], 3).flatten(1)


def _high_bits_of(pieces: Tensor) -> Tensor:
    low, high = pieces.reshape(*pieces.shape[:2], 4, 2).unbind(3)  # each [N, P, word]
    shifted = ((low, 0), (low, 4), (high, 0), (high, 4), (low, 2), (low, 6), (high, 2), (high, 6))
    fields = [half >> shift & 3 for half, shift in shifted]
    return torch.stack(fields, 2).flatten(1)


def _halves(raw: Tensor) -> Tensor:
    """float16 bytes [N, G, 2] -> float32 [N, G]"""
    return _half(raw.flatten(0, 1)).view(raw.shape[:2])


def _spread(scales: Tensor, groups: Tensor) -> Tensor:
    """The scale of each group: that of its block, [N, B], times its own, [N, G]"""
    return scales.repeat_interleave(groups.shape[1] // scales.shape[1], 1) * groups.float()


def _values_q8_0(codes: Tensor, scale: Tensor) -> Tensor:
    return _grouped(_halves(scale), _bytes_of(codes).float() - 128)


def _values_q4_0(codes: Tensor, scale: Tensor) -> Tensor:
    return _grouped(_halves(scale), _nibbles_of(codes).float() - 8)


def _values_q4_1(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return _grouped(_halves(scale), _nibbles_of(codes), -_halves(minimum))


def _values_q4_k(codes: Tensor, scales: Tensor, minimums: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    lowest = _spread(_halves(minimum), minimums[..., 0])
    return _grouped(_spread(_halves(scale), scales[..., 0]), _nibbles_of(codes), lowest)


def _values_q6_k(codes: Tensor, high: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    fields = _nibbles_of(codes) | _high_bits_of(high) << 4
    signed = scales[..., 0].contiguous().view(torch.int8)
    return _grouped(_spread(_halves(scale), signed), fields.float() - 32)


VALUES: dict[BlockType, Callable[..., Tensor]] = {
    BlockType.Q8_0: _values_q8_0,
    BlockType.Q4_0: _values_q4_0,
    BlockType.Q4_1: _values_q4_1,
    BlockType.Q4_K: _values_q4_k,
    BlockType.Q6_K: _values_q6_k,
}
