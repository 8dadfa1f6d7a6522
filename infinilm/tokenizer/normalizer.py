"""What sentencepiece makes of a text before it looks for pieces: other characters, fewer spaces, one ahead.

The sign for a space is the library's to write; what its own steps would only come near to is done here.
"""

import re
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import pairwise

SPACE = "▁"
MAX_KEY_BYTES = 64  # of a key of the table; the longest in use have 18
MAX_REPLACEMENT_BYTES = 64  # for one key: U+FDFA, the longest in use, stands for 33


class CharacterTable:
    """Characters, and runs of them, that are written otherwise: the longest key at each place counts.

    The file has its keys as a double array, as Darts writes it: how long the array is, the array, the
    replacements, each with a zero behind it.
    """

    def __init__(self, table: bytes) -> None:
        size = size_of_keys(table)
        self._units = struct.unpack_from(f"<{size // 4}I", table, 4)
        self._replacements = table[4 + size :]

    def rewrite(self, text: str) -> str:
        alone = {ord(character): self._longest(character)[0] for character in set(text)}
        joined = {pair for pair in map("".join, set(pairwise(text))) if self._is_in_a_key(pair)}
        return self._rewrite_by_keys(text, alone, joined) if joined else text.translate(alone)

    def _rewrite_by_keys(self, text: str, alone: Mapping[int, str], joined: Set[str]) -> str:
        found, place = [], 0
        while place < len(text):
            if text[place : place + 2] in joined:
                replacement, length = self._longest(text[place : place + MAX_KEY_BYTES])
            else:
                replacement, length = alone[ord(text[place])], 1
            found.append(replacement)
            place += length
        return "".join(found)

    def _is_in_a_key(self, text: str) -> bool:
        raw = text.encode()
        return self._walk(raw)[1] == len(raw)

    def _longest(self, text: str) -> tuple[str, int]:
        """(what stands for the beginning of text, how many characters that is)"""
        raw = text.encode()[:MAX_KEY_BYTES]
        end, _ = self._walk(raw)
        if end is None:
            return text[0], 1
        length, value = end
        return self._replacement(value), len(raw[:length].decode())

    def _walk(self, raw: bytes) -> tuple[tuple[int, int] | None, int]:
        """The way of raw through the array: (length, value) of the longest key on it, and how far it goes."""
        units, end = self._units, None
        place = _offset(units[0])
        for index, byte in enumerate(raw):
            place ^= byte
            if place >= len(units) or units[place] & 0x800000FF != byte:
                return end, index
            unit = units[place]
            place ^= _offset(unit)
            if unit >> 8 & 1 and place < len(units):  # a key ends here, and its value is the first child
                end = index + 1, units[place] & 0x7FFFFFFF
        return end, len(raw)

    def _replacement(self, start: int) -> str:
        end = self._replacements.find(b"\0", start)
        if not 0 <= end - start <= MAX_REPLACEMENT_BYTES:
            rule = f"has at most {MAX_REPLACEMENT_BYTES} bytes and a zero behind it"
            raise ValueError(f"a replacement in the table of characters {rule}; none does at {start}")
        return self._replacements[start:end].decode("utf-8")


def size_of_keys(table: bytes) -> int:
    """How many bytes of a table its keys take, which fit into it"""
    size = int.from_bytes(table[:4], "little")
    if size % 4 or not 4 <= size <= len(table) - 4:
        raise ValueError(f"its table of characters has {len(table)} bytes, {size} of them for keys")
    return size


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


@dataclass(frozen=True)
class Normalizer:
    """The steps of one model, on a text or a stretch of it between special tokens."""

    table: CharacterTable | None
    symbols: re.Pattern[str]  # what the table leaves alone
    removes_extra_spaces: bool
    adds_prefix: bool
    prefixes_every_stretch: bool

    @property
    def shortens(self) -> bool:
        """Whether a text may lose much of its length"""
        return self.table is not None or self.removes_extra_spaces

    def rewrite_between(self, kept_whole: re.Pattern[str], text: str, is_start: bool) -> str:
        """A whole text, less the tokens that are found in it as they are written."""
        pieces = kept_whole.split(text)
        for index in range(0, len(pieces), 2):
            is_first = is_start and index == 0
            pieces[index] = self.rewrite(pieces[index], is_first or self.prefixes_every_stretch)
        return "".join(pieces)

    def rewrite(self, text: str, has_prefix: bool) -> str:
        if self.table is not None:
            pieces = self.symbols.split(text)
            pieces[::2] = map(self.table.rewrite, pieces[::2])
            text = "".join(pieces)
        if self.removes_extra_spaces:
            text = re.sub(" +", " ", text).lstrip(" ").rstrip(f" {SPACE}")
        return SPACE + text if text and has_prefix and self.adds_prefix else text
