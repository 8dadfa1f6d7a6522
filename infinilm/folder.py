"""A model's folder, which nobody vouches for: no link leads out of it, no file is read past its limit."""

import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, Self

# The largest of real models are a few kilobytes. Python makes up to 30 bytes of each byte of JSON.
MAX_CONFIG_BYTES = 1 << 18
# A tensor takes about six values. Without this cap brackets alone would become gigabytes of lists.
MAX_JSON_VALUES = 1 << 19
MAX_NAME_LENGTH = 1024
NUMBERS = (float, list)  # what may be, or hold, a number that is not finite

SPLIT_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class PartName:
    """The name of one file of a split GGUF model: stem-00001-of-00003.gguf is the first of three."""

    stem: str
    number: int
    count: int

    @classmethod
    def parse(cls, name: str) -> Self | None:
        match = SPLIT_NAME.fullmatch(name)
        return cls(match[1], int(match[2]), int(match[3])) if match else None

    def of(self, number: int) -> Self:
        """The name of another part of the same model"""
        return replace(self, number=number)

    def __str__(self) -> str:
        return f"{self.stem}-{self.number:05}-of-{self.count:05}.gguf"


def is_later_part(name: str) -> bool:
    """Whether it is found by the name of another file, the first part of its model."""
    part = PartName.parse(name)
    return part is not None and part.number != 1


@dataclass(frozen=True)
class Folder:
    """The files of one folder; what breaks a rule is an error of the caller's kind."""

    path: Path
    error: type[ValueError]

    def file(self, name: str) -> Path:
        """The path of a file that has to be there."""
        path = self.find(name)
        if path is None:
            raise self.error(f"{self.path / name}: no such file")
        return path

    def find(self, name: str) -> Path | None:
        """The path of a file, None if there is nothing of this name."""
        path = self.path / name
        if not os.path.lexists(path):
            return None
        if not path.is_file():  # a pipe would be waited for; a link that leads nowhere is half a download
            raise self.error(f"{path}: is neither a file nor a link to one")
        target = path.resolve()
        if not any(target.is_relative_to(allowed) for allowed in self._allowed()):
            raise self.error(
                f"{path}: is a link out of its folder, to {target}; copy the file into the folder"
            )
        return path

    def _allowed(self) -> list[Path]:
        """The folder itself, and the `blobs` that a snapshot in the hub's cache links to."""
        root = self.path.resolve()
        snapshots = [path for path in (root, *root.parents) if path.parent.name == "snapshots"]
        return [root, *(snapshot.parent.parent / "blobs" for snapshot in snapshots)]

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """What a file holds, None if there is none."""
        path = self.find(name)
        if path is None:
            return None
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise self.error(f"{path}: has {path.stat().st_size} bytes, more than {max_bytes}")
        return raw

    def read_object(self, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
        raw = self.read(name, max_bytes)
        return None if raw is None else parse_object(raw, self.path / name, self.error)

    def read_list(self, name: str) -> list[Any] | None:
        raw = self.read(name, MAX_CONFIG_BYTES)
        found = None if raw is None else parse_json(raw, self.path / name, self.error)
        if not isinstance(found, list | None):
            raise self.error(f"{self.path / name}: its JSON is a {type(found).__name__}, not a list")
        return found


def expanded(path: str | Path, error: type[ValueError]) -> Path:
    """With the home folder that ~ stands for"""
    try:
        return Path(path).expanduser()
    except RuntimeError as reason:  # there is no user of this name
        raise error(f"{path}: {reason}") from reason


def parse_object(
    raw: bytes, source: object, error: type[ValueError], max_values: int = MAX_JSON_VALUES
) -> dict[str, Any]:
    """The object that JSON from a stranger describes; `source` is what errors call it."""
    value = parse_json(raw, source, error, max_values)
    if not isinstance(value, dict):
        raise error(f"{source}: its JSON is a {type(value).__name__}, not an object")
    return value


def parse_json(raw: bytes, source: object, error: type[ValueError], max_values: int = MAX_JSON_VALUES) -> Any:
    if raw.count(b",") > max_values:
        raise error(f"{source}: its JSON has more than {max_values} values")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_checked)
    except (ValueError, RecursionError) as reason:
        raise error(f"{source}: not valid JSON: {reason}") from reason


def _checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {quoted(max(counts, key=counts.__getitem__))} appears twice")
    for key, value in pairs:
        if type(value) in NUMBERS and not _is_finite(value):
            raise ValueError(f"key {quoted(key)} is {short(value)}, but JSON has finite numbers alone")
    return found


def _is_finite(value: float | list[Any]) -> bool:
    """No NaN and no infinity, which Python takes for JSON and makes of 1e400; objects were checked before."""
    if isinstance(value, list):  # of which a tokenizer has half a million, of two texts each
        return all(_is_finite(item) for item in value if type(item) in NUMBERS)
    return math.isfinite(value)


def quoted(name: str) -> str:
    """A key or the name of a tensor, whole unless it is absurd."""
    return repr(name) if len(name) <= MAX_NAME_LENGTH else f"{short(name)} of {len(name)} characters"
