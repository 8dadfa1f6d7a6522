"""SoFar: the items of a list that still grows, as it is now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


class SoFar(Sequence[T]):
    """The items of a list from some place up to its end of now; what is appended later is not among them.

    Nothing is copied: it is made as quickly for a million items as for one. It equals a list of the same
    items; slices of it are plain lists, and so is what it is pickled or copied to.
    """

    __slots__ = ("_items", "_places")

    def __init__(self, items: Sequence[T], start: int = 0) -> None:
        self._items = items
        self._places = range(start, len(items))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._items[place] for place in self._places[index]]
        return self._items[self._places[index]]

    def __iter__(self) -> Iterator[T]:
        return map(self._items.__getitem__, self._places)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | SoFar):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
