"""Numbers, flags and choices that files and callers give, checked: an error names what is wrong."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def check_whole(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, but is {short(value)}")
    return value


def check_number(name: str, value: Any, high: float, low: float = 0.0) -> float:
    """The number as a float. It is compared first, since JSON has integers that no float can hold."""
    if type(value) not in (int, float) or not low <= value <= high or value <= 0:
        wanted = f"from {low} to {high}" if low else f"above 0, up to {high}"
        raise ValueError(f"{name} must be a number {wanted}, but is {short(value)}")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, but is {short(value)}")
    return value


def check_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if isinstance(value, bool) or not any(isinstance(value, type(one)) and value == one for one in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, but is {short(value)}")


def knowing(elsewhere: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """A function or a dataclass that says of keywords which others know, and it does not, what they are
    here."""

    def with_advice(target: Any) -> Any:
        if isinstance(target, type):
            target.__init__ = advised(target.__name__, target.__init__, elsewhere)  # type: ignore[misc]
            return target
        return advised(target.__name__, target, elsewhere)

    return with_advice


def advised(where: str, function: Callable[..., Any], elsewhere: Mapping[str, str]) -> Callable[..., Any]:
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                raise TypeError(f"{where} does not know {name!r}{advice_on(name, known, elsewhere)}")
        return function(*args, **given)

    return checked


def advice_on(name: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    advice = elsewhere.get(name) or (f"did you mean {close[0]}?" if close else "")
    return f"; {advice}" if advice else ""
