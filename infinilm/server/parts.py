"""What an answer is made of: text, reasoning, and calls of tools, each while it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from infinilm.server.tools import Tool


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `name` is the tool's own, without the namespace."""

    index: int
    id: str
    tool: Tool

    @property
    def name(self) -> str:
        return self.tool.name


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON as the model wrote it, or of a custom tool's input."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    is_whole: bool = True  # not where its arguments were cut off, or are no JSON


Part = Text | Reasoning | CallStart | CallArguments | CallEnd


def merged(parts: Iterable[Part]) -> list[Part]:
    """One part of those that follow each other and are alike"""
    return [joined(list(alike)) for _, alike in groupby(parts, key=kind_of)]


def kind_of(part: Part) -> tuple[type, int | None]:
    return type(part), getattr(part, "index", None)


def joined(parts: list[Part]) -> Part:
    first = parts[0]
    if len(parts) == 1 or not isinstance(first, Text | Reasoning | CallArguments):
        return first
    return replace(first, text="".join(part.text for part in parts if isinstance(part, type(first))))
