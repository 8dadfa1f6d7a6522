"""Protobuf messages read by hand: nothing in them is believed before it is checked.

A message is a run of fields, each a number and a kind in one integer, then its value. A length is held
against the bytes there are before anything is read, and the fields of a whole file are counted.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

VARINT, FIXED64, SIZED, FIXED32 = 0, 1, 2, 5

FLOAT = struct.Struct("<f")
KINDS = {str: SIZED, bytes: SIZED, float: FIXED32, int: VARINT, bool: VARINT}

# By the number of a field: its name, and what its value is.
Schema = Mapping[int, tuple[str, type]]


class ProtobufReader:
    """Reads the messages of one file, of which each may be inside another."""

    def __init__(self, max_fields: int) -> None:
        self._max_fields = self._num_left = max_fields

    def message(self, raw: bytes, schema: Schema) -> dict[str, Any]:
        """The fields that the schema knows, by name, the last of each. Others are stepped over."""
        found: dict[str, Any] = {}
        for number, kind, value in self.fields(raw):
            if number not in schema:
                continue
            name, wanted = schema[number]
            if kind != KINDS[wanted]:
                raise ValueError(f"field {name!r} is of kind {kind}, but must be of kind {KINDS[wanted]}")
            found[name] = _value(value, wanted)
        return found

    def fields(self, raw: bytes) -> Iterator[tuple[int, int, Any]]:
        """(number, kind, value) of each: an integer, or the bytes of a text, a message or a float"""
        place, end = 0, len(raw)
        while place < end:
            self._count()
            tag, place = _varint(raw, place)
            number, kind = tag >> 3, tag & 7
            if kind == VARINT:
                value, place = _varint(raw, place)
                yield number, kind, value
                continue
            size, place = _size(raw, place, kind)
            if size > end - place:
                raise ValueError(f"is cut short, or no protobuf: a field of {size} bytes, {end - place} left")
            yield number, kind, raw[place : place + size]
            place += size

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"has more than {self._max_fields} fields")


def _size(raw: bytes, place: int, kind: int) -> tuple[int, int]:
    """How many bytes a value has, and where it begins"""
    if kind == SIZED:
        return _varint(raw, place)
    if kind in (FIXED32, FIXED64):
        return 4 if kind == FIXED32 else 8, place
    raise ValueError(f"is no protobuf: a field of kind {kind} before byte {place}")


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """An integer of seven bits a byte, the least first, and where it ends"""
    value = 0
    for index, byte in enumerate(raw[place : place + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, place + index + 1
    raise ValueError(f"is no protobuf: no integer at byte {place} of {len(raw)}")


def _value(value: Any, wanted: type) -> Any:
    if wanted is str:
        return value.decode("utf-8")
    if wanted is float:
        return FLOAT.unpack(value)[0]
    if wanted is int:  # the lower half, in two's complement
        return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
    return bool(value) if wanted is bool else value
