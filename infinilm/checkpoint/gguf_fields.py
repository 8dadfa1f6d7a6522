"""The metadata of a GGUF file, by key: what is asked for has the right type and range."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from infinilm.checkpoint import CheckpointError
from infinilm.checkpoint.gguf_format import Strings

MAX_INTEGER = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)

Value = TypeVar("Value", int, float, str)


class Fields:
    """A key without a default has to be there."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path

    def error(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {rule}")

    def value(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        found = self.metadata.get(key, default)
        if found is None:
            raise self.error(f"metadata key {key!r} is missing")
        if type(found) is not kind:
            name = "array" if isinstance(found, Strings | np.ndarray) else type(found).__name__
            raise self.error(f"metadata key {key!r} is of type {name}, not {kind.__name__}")
        return found

    def integer(
        self, key: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        found = self.value(key, int, default)
        if not minimum <= found <= maximum:
            raise self.error(f"metadata key {key!r} is {found}, not {minimum} to {maximum}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key, float, default)
        if not 0 < found <= MAX_FLOAT32:
            raise self.error(f"metadata key {key!r} is {found}, not a finite float32 above 0")
        return as_written(found)


def as_written(value: float) -> float:
    """A float32 as the decimal it was written from: 1e-05, not 9.999999747378752e-06"""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value
