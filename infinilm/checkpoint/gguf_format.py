"""The GGUF container: a buffer's metadata and tensor table. Nothing in it is believed before it is checked.

Sizes are Python integers, which do not overflow, and each is held against the bytes that are there before
anything is read, looped over or allocated for it. The layout is that of ggml's docs/gguf.md:

    magic | version | tensor count | value count | values | tensor infos | padding | tensor data
"""

import codecs
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from mmap import mmap
from typing import Any, overload

import numpy as np
import torch

from infinicore.quantization import BlockType
from infinilm.checkpoint import CheckpointError, TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# The largest vocabularies there are take 30 MB and have less than a million strings, merges included.
MAX_HEADER_BYTES = 1 << 26
MAX_STRINGS = 1 << 21
MAX_TEXT_BYTES = 1 << 24
CHECKED_BYTES = 1 << 20  # at a time, since text may take four times as many
MAX_TENSORS = 65_536
MAX_VALUES = 65_536
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 63
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 65_536

UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}

ELEMENT_TYPES: dict[int, torch.dtype | BlockType] = {
    0: torch.float32,
    1: torch.float16,
    30: torch.bfloat16,
    **{block_type.ggml_id: block_type for block_type in BlockType},
}


@dataclass(frozen=True)
class Header:
    """Metadata by key and tensors by GGUF name, their offsets from the start of the file.

    Arrays are Strings and numpy's: as Python's they would take many times the memory.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class Strings(Sequence[str]):
    """Texts in one piece of memory, each made when it is asked for; string i ends before byte ends[i]."""

    def __init__(self, raw: bytes, starts: Sequence[int], ends: Sequence[int]) -> None:
        self._raw, self._starts, self._ends = raw, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._raw[self._starts[index] : self._ends[index]].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        raw = self._raw
        return (raw[start:end].decode("utf-8") for start, end in zip(self._starts, self._ends, strict=True))


def read_header(buffer: bytes | bytearray | mmap, source: object) -> Header:
    """Read the header of the whole GGUF file in `buffer`; `source` is what errors call it."""
    cursor = _Cursor(memoryview(buffer), source)
    _check_magic(cursor)
    num_tensors = cursor.count("the number of tensors", MAX_TENSORS)
    num_values = cursor.count("the number of metadata values", MAX_VALUES)
    metadata = _read_metadata(cursor, num_values)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    return Header(metadata, _read_tensors(cursor, num_tensors, alignment))


class _Cursor:
    """A place in the buffer. Reads move it forward, never past the end of the file or of a sane header."""

    def __init__(self, view: memoryview, source: object) -> None:
        self.view = view
        self.source = source
        self.position = 0
        self.end = min(len(view), MAX_HEADER_BYTES)
        self.num_strings = 0  # of all arrays

    def error(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {rule}")

    def take(self, num_bytes: int, what: str) -> int:
        """Step over num_bytes and return where they start."""
        if num_bytes > self.end - self.position:
            raise self.error(
                f"{what} needs {num_bytes} bytes at byte {self.position}, past the end of the header: "
                f"the file has {len(self.view)} bytes, a header at most {MAX_HEADER_BYTES}"
            )
        self.position += num_bytes
        return self.position - num_bytes

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.view, self.take(struct.calcsize(code), what))[0]

    def count(self, what: str, maximum: int, minimum: int = 0) -> int:
        found: int = self.number("Q", what)
        if not minimum <= found <= maximum:
            raise self.error(f"{what} is {found}, not {minimum} to {maximum}")
        return found

    def text(self, what: str, max_bytes: int = MAX_TEXT_BYTES, min_bytes: int = 0) -> str:
        length = self.count(f"the length of {what}", max_bytes, min_bytes)
        start = self.take(length, what)
        return self.decode(start, start + length, what)

    def decode(self, start: int, end: int, what: str) -> str:
        try:
            return str(self.view[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason} at byte {start + error.start}") from error


def _check_magic(cursor: _Cursor) -> None:
    magic = cursor.number("4s", "the magic")
    if magic != MAGIC:
        # "version https://git-lfs…": what a clone without Git LFS has in the file's place
        hint = "; of a pointer of Git LFS, `git lfs pull` fetches the file" if magic == b"vers" else ""
        raise cursor.error(f"not a GGUF file: starts with {magic!r}, not {MAGIC!r}{hint}")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        kind = "in big-endian order" if is_swapped else f"version {version}"
        raise cursor.error(f"GGUF {kind} is not supported; convert it to version 3, little-endian")


def _read_metadata(cursor: _Cursor, num_values: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_values):
        key = cursor.text(f"metadata key {index}", MAX_KEY_BYTES, min_bytes=1)
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice")
        value_type = cursor.number("I", f"the type of metadata key {key!r}")
        metadata[key] = _read_value(cursor, value_type, f"metadata key {key!r}")
        if key == "general.alignment":
            _check_alignment(cursor, value_type, metadata[key])
    return metadata


def _check_alignment(cursor: _Cursor, value_type: int, value: Any) -> None:
    if value_type != UINT32:
        raise cursor.error(
            f"metadata key 'general.alignment' has value type {value_type}, not {UINT32} (uint32)"
        )
    if value.bit_count() != 1 or value > MAX_ALIGNMENT:
        raise cursor.error(
            f"metadata key 'general.alignment' is {value}, not a power of two to {MAX_ALIGNMENT}"
        )


def _read_value(cursor: _Cursor, value_type: int, what: str) -> Any:
    if value_type == STRING:
        return cursor.text(what)
    if value_type == ARRAY:
        return _read_array(cursor, what)
    return _read_scalars(cursor, value_type, 1, what).item()


def _read_array(cursor: _Cursor, what: str) -> "Strings | np.ndarray[Any, Any]":
    element_type = cursor.number("I", f"the element type of {what}")
    count = cursor.number("Q", f"the length of {what}")
    if element_type == ARRAY:
        raise cursor.error(f"{what} is an array of arrays, which is not supported")
    if element_type == STRING:
        return _read_strings(cursor, count, what)
    return _read_scalars(cursor, element_type, count, what)


def _read_scalars(cursor: _Cursor, value_type: int, count: int, what: str) -> "np.ndarray[Any, Any]":
    """A copy, since what is mapped may change or be cut short."""
    if value_type not in SCALARS:
        raise cursor.error(f"{what} has unknown value type {value_type}")
    code = SCALARS[value_type]
    start = cursor.take(count * struct.calcsize(code), f"{what} (number of values: {count})")
    values = np.frombuffer(cursor.view[start : cursor.position], f"<{code}")
    if value_type == BOOL and values.max(initial=0) > 1:
        raise cursor.error(f"{what} is a boolean with value {values.max()}, not 0 or 1")
    return values == 1 if value_type == BOOL else values.copy()


def _read_strings(cursor: _Cursor, count: int, what: str) -> Strings:
    if count * 8 > cursor.end - cursor.position:
        raise cursor.error(f"{what} claims {count} strings, more than the file has bytes for")
    cursor.num_strings += count
    if cursor.num_strings > MAX_STRINGS:
        raise cursor.error(f"{what} makes it {cursor.num_strings} strings, more than {MAX_STRINGS}")
    first = cursor.position
    starts = _string_starts(cursor, count, what) - first
    blanked = np.frombuffer(cursor.view[first : cursor.position], np.uint8).copy()
    for byte in range(1, 9):
        blanked[starts - byte] = 0  # a length between two strings, which no character may reach across
    raw = blanked.tobytes()
    ends = np.append(starts[1:] - 8, len(raw))[:count]
    strings = Strings(raw, starts.data, ends.data)
    _check_text(cursor, strings, raw, what)
    return strings


def _string_starts(cursor: _Cursor, count: int, what: str) -> "np.ndarray[Any, Any]":
    """Where each string begins. A vocabulary has 100,000, so this loop spells out what `text` does."""
    view, end, unpack = cursor.view, cursor.end, struct.Struct("<Q").unpack_from
    position, starts = cursor.position, array("q")
    for index in range(count):
        start = position + 8
        starts.append(start)
        position = start + unpack(view, position)[0] if start <= end else start
        if position > end:
            raise cursor.error(f"{what}: string {index} of {count} runs past the end of the header")
    cursor.position = position
    return np.array(starts, np.int64)


def _check_text(cursor: _Cursor, strings: Strings, raw: bytes, what: str) -> None:
    """All at once, piece by piece; only where that fails is it asked which string it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for begin in range(0, len(raw), CHECKED_BYTES):
            decoder.decode(raw[begin : begin + CHECKED_BYTES], final=begin + CHECKED_BYTES >= len(raw))
    except UnicodeDecodeError:
        for index in range(len(strings)):
            _check_string(cursor, strings, index, what)


def _check_string(cursor: _Cursor, strings: Strings, index: int, what: str) -> None:
    try:
        strings[index]
    except UnicodeDecodeError as error:
        raise cursor.error(
            f"{what} is not UTF-8: {error.reason} at byte {error.start} of string {index}"
        ) from error


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    data_length = 0
    for index in range(num_tensors):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME_BYTES, min_bytes=1)
        if name in tensors:
            raise cursor.error(f"tensor {name!r} appears twice")
        tensors[name] = info = _read_tensor(cursor, f"tensor {name!r}")
        wanted = _padded(data_length, alignment)
        if info.offset != wanted:
            raise cursor.error(
                f"tensor {name!r} has offset {info.offset}, but the one before it ends at {wanted}"
            )
        data_length = wanted + info.num_bytes
    data_start = _padded(cursor.position, alignment) if tensors else cursor.position
    _check_extent(cursor, data_start + data_length, alignment)
    return {name: replace(info, offset=data_start + info.offset) for name, info in tensors.items()}


def _read_tensor(cursor: _Cursor, what: str) -> TensorInfo:
    num_dims = cursor.number("I", f"the number of dimensions of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"{what} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
    # GGUF counts the fastest dimension first, torch last.
    shape = tuple(cursor.number("Q", f"the shape of {what}") for _ in range(num_dims))[::-1]
    type_id = cursor.number("I", f"the type of {what}")
    if type_id not in ELEMENT_TYPES:
        known = ", ".join(f"{known} {dtype}" for known, dtype in ELEMENT_TYPES.items())
        raise cursor.error(f"{what} has type {type_id}; known are {known}")
    offset = cursor.number("Q", f"the offset of {what}")
    num_bytes = _num_bytes(cursor, ELEMENT_TYPES[type_id], shape, what)
    return TensorInfo(shape, ELEMENT_TYPES[type_id], offset, num_bytes)


def _num_bytes(cursor: _Cursor, dtype: torch.dtype | BlockType, shape: tuple[int, ...], what: str) -> int:
    if 0 in shape:
        raise cursor.error(f"{what} has shape {shape}, but no dimension may be 0")
    if not isinstance(dtype, BlockType):
        num_bytes = prod(shape) * dtype.itemsize
    elif shape[-1] % dtype.elements_per_block:
        raise cursor.error(f"{what} has rows of {shape[-1]}, not whole {dtype} of {dtype.elements_per_block}")
    else:
        num_bytes = prod(shape) // dtype.elements_per_block * dtype.bytes_per_block
    if num_bytes > len(cursor.view):
        raise cursor.error(f"{what} {shape} needs {num_bytes} bytes, but the file has {len(cursor.view)}")
    return num_bytes


def _check_extent(cursor: _Cursor, end: int, alignment: int) -> None:
    """The file ends with its last tensor, or with the padding after it."""
    found = len(cursor.view)
    if not end <= found <= _padded(end, alignment):
        fault = "it is cut short" if found < end else "something follows the last tensor"
        raise cursor.error(f"the header describes {end} bytes, but the file has {found}: {fault}")


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
