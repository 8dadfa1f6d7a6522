"""Syntax in a text that comes in pieces: JSON, and what a parser of more than JSON is made of.

A Scanner's methods are generators: each takes what is there of its piece of syntax and yields where it has to
wait for more. So the work is linear in the text, however it is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

BLANK = re.compile(r"[ \t\n\r]*")  # JSON's
DIGITS = re.compile(r"[0-9]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
HIGH_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
LITERALS = {"t": "true", "f": "false", "n": "null"}


class Mismatch(Exception):
    """What comes next is not what the syntax wants."""


class Scanner:
    """The text that has not been taken yet; what is taken of it goes into a sink."""

    def __init__(self) -> None:
        self._text, self._at, self._is_over = "", 0, False
        self._raw: list[str] = []  # what has been taken and may be wanted back
        self._sink: Callable[[str], None] = self._raw.append

    def _feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def _record(self, text: str) -> None:
        """Keep what is taken from now on."""
        self._raw = [text]
        self._sink = self._raw.append

    # ---- what is there -------------------------------------------------------------------------------------

    def _recorded(self, steps: Steps[None]) -> Steps[str]:
        """What the steps take, which is kept as well."""
        start = len(self._raw)
        yield from steps
        return "".join(self._raw[start:])

    def _peek(self) -> Steps[str]:
        """The next character; none at the end."""
        while self._at == len(self._text) and not self._is_over:
            yield
        return self._text[self._at : self._at + 1]

    def _is_ahead(self, wanted: str) -> Steps[bool]:
        while wanted.startswith(ahead := self._text[self._at : self._at + len(wanted)]):
            if ahead == wanted or self._is_over:
                return ahead == wanted
            yield
        return False

    def _expect(self, wanted: str) -> Steps[None]:
        for char in wanted:
            if not (yield from self._option(char)):
                raise Mismatch

    def _option(self, *wanted: str) -> Steps[bool]:
        if (yield from self._peek()) not in wanted:
            return False
        self._take(1)
        return True

    def _run(self, pattern: re.Pattern[str]) -> Steps[None]:
        """All that pattern, which matches any length, matches here."""
        while True:
            self._sink_some(self._read_match(pattern))
            if self._is_over or self._at < len(self._text):
                return
            yield

    def _take(self, length: int) -> None:
        self._sink_some(self._read(length))

    def _sink_some(self, piece: str) -> None:
        if piece:
            self._sink(piece)

    def _read_match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        return self._read(len(found[0]) if found else 0)

    def _read(self, length: int) -> str:
        start, self._at = self._at, self._at + length
        return self._text[start : self._at]

    def _take_half(self, length: int) -> None:
        """Take the rest of an escape in the midst of which the text ends."""
        self._take(length)

    # ---- JSON ----------------------------------------------------------------------------------------------

    def _object(self) -> Steps[None]:
        """A JSON object: nesting is a list and no recursion, which would cost depth at each step."""
        closers: list[str] = []
        place = "value"
        while True:
            yield from self._run(BLANK)
            char = yield from self._peek()
            if closers and char == closers[-1] and place in ("first", "next"):
                yield from self._expect(closers.pop())
                if not closers:
                    return
                place = "next"
            elif place == "next":
                yield from self._expect(",")
                place = "key" if closers[-1] == "}" else "value"
            elif place == "key" or (place == "first" and closers[-1] == "}"):
                yield from self._string()
                yield from self._colon()
                place = "value"
            elif char == "{" or (char == "[" and closers):
                closers.append("}" if char == "{" else "]")
                self._take(1)
                place = "first"
            elif closers:
                yield from self._scalar(char)
                place = "next"
            else:
                raise Mismatch

    def _scalar(self, char: str) -> Steps[None]:
        if char == '"':
            yield from self._string()
        elif char in LITERALS:
            yield from self._expect(LITERALS[char])
        else:
            yield from self._number()

    def _number(self) -> Steps[None]:
        yield from self._option("-")
        if not (yield from self._option("0")):
            yield from self._digits()
        if (yield from self._option(".")):
            yield from self._digits()
        if (yield from self._option("e", "E")):
            yield from self._option("+", "-")
            yield from self._digits()

    def _digits(self) -> Steps[None]:
        if not DIGITS.match((yield from self._peek()))[0]:  # type: ignore[index]
            raise Mismatch
        yield from self._run(DIGITS)

    def _string(self) -> Steps[None]:
        yield from self._expect('"')
        while True:
            yield from self._run(PLAIN)
            if (yield from self._option('"')):
                return
            if (yield from self._peek()) != "\\":
                raise Mismatch
            yield from self._escape()

    def _escape(self) -> Steps[None]:
        """Whole, and both halves of a surrogate pair at once"""
        while len(ahead := self._text[self._at : self._at + 12]) < escape_length(ahead):
            if self._is_over:
                self._take_half(len(ahead))
                raise Mismatch
            yield
        found = PAIR.match(ahead) or ESCAPE.match(ahead)
        if not found:
            raise Mismatch
        self._take(len(found[0]))

    def _word(self) -> Steps[str]:
        """A string, decoded"""
        return str(json.loads((yield from self._recorded(self._string()))))

    def _colon(self) -> Steps[None]:
        yield from self._run(BLANK)
        yield from self._expect(":")
        yield from self._run(BLANK)


def escape_length(ahead: str) -> int:
    """How much of it is needed to know the escape at its beginning."""
    if ahead[1:2] != "u":
        return 2
    if not HIGH_HALF.match(ahead):
        return 6
    return {"": 7, "\\": 8, "\\u": 12}.get(ahead[6:8], 6)
