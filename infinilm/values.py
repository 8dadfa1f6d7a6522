"""Numbers, flags and choices that files and callers give, checked: a ValueError names what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as short
from typing import Any


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
