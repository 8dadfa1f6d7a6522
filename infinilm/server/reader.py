"""Text to parts: what a model writes becomes text, reasoning and calls of tools while it comes.

A Reader is a parser written as generators: each takes what is there of its piece of syntax and yields where
it has to wait for more. So the work is linear in the text, however it is cut. What turns out to be no call
comes out as text, exactly as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from infinilm.server.tools import Family, Tool

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

THINK, END_OF_THINK = "<think>", "</think>"
BLANK = re.compile(r"[ \t\n\r]*")  # JSON's
BETWEEN = re.compile(r"[ \t\n\r;]*")  # two calls that nothing marks
NAME = re.compile(r"[a-zA-Z0-9_-]*")
DIGITS = re.compile(r"[0-9]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
HIGH_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
LITERALS = {"t": "true", "f": "false", "n": "null"}

# The keys of a call as models spell them, and what they are here. The last ones are of no use.
KEYS = {
    "name": "name",
    "function": "name",
    "arguments": "arguments",
    "parameters": "arguments",
    "type": "type",
    "id": "id",
}


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


Part = Text | Reasoning | CallStart | CallArguments | CallEnd


def has_reasoning(chat_template: str) -> bool:
    return END_OF_THINK in chat_template


def starts_in_reasoning(prompt: str) -> bool:
    """Whether the prompt that a template wrote ends with reasoning begun, as some do."""
    return prompt.rstrip().endswith(THINK)


class NotACall(Exception):
    """What began like a call does not go on like one."""


class Reader:
    """`add` gives the parts that are sure by now, `finish` the rest. Without tools there are no calls."""

    def __init__(
        self,
        family: Family,
        tools: Sequence[Tool] = (),
        starts_in_reasoning: bool = False,
        has_reasoning: bool = False,
    ) -> None:
        self._family = family
        self._tools = {tool.full_name: tool for tool in tools}
        self._is_reasoning = starts_in_reasoning
        self._has_reasoning = has_reasoning or starts_in_reasoning
        self._markers = (
            *(family.markers if tools else ()),
            *family.noise,
            *([END_OF_THINK] if self._has_reasoning else []),
        )
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")

        self._text, self._at, self._is_over = "", 0, False  # what has not been taken yet
        self._blanks: list[str] = []  # to be dropped if a call follows
        self._raw: list[str] = []  # what has been taken of a call and would be lost if it is none
        self._sink: Callable[[str], None] = self._raw.append
        self._parts: list[Part] = []
        self._num_calls = 0
        self._is_open = False  # a call has begun and not ended
        self._is_after_call = False  # and nothing has been said since
        self._steps = self._answer()

    def add(self, text: str) -> list[Part]:
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._steps, None)
        return self._gathered()

    def finish(self) -> list[Part]:
        self._is_over = True
        next(self._steps, None)
        return self._gathered()

    def _gathered(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return [joined(list(alike)) for _, alike in groupby(parts, key=kind_of)]

    # ---- the answer ----------------------------------------------------------------------------------------

    def _answer(self) -> Steps[None]:
        is_edge = True  # at the beginning, after a call, and where reasoning begins or ends
        while True:
            if is_edge:
                yield from self._edge()
            marker = yield from self._plain()
            if not marker:
                break
            is_edge = yield from self._take_up(marker)
        if not self._is_after_call:
            self._say_with_blanks("")

    def _edge(self) -> Steps[None]:
        """Blanks, reasoning that begins, calls that nothing marks"""
        while True:
            yield from self._take_blanks()
            if self._is_reasoning:
                self._blanks.clear()
            if self._has_reasoning and (yield from self._is_ahead(THINK)):
                self._read(len(THINK))
                self._is_reasoning = True
            elif not (yield from self._is_bare_call_ahead()) or not (yield from self._attempt("")):
                return

    def _take_blanks(self) -> Steps[None]:
        pattern = BETWEEN if self._family.has_bare_calls and self._num_calls else BLANK
        while True:
            self._blanks.append(self._read_match(pattern))
            if self._is_over or self._at < len(self._text):
                return
            yield

    def _is_bare_call_ahead(self) -> Steps[bool]:
        if not self._family.has_bare_calls or not self._tools or self._is_reasoning:
            return False
        return (yield from self._peek()) == "{"

    def _plain(self) -> Steps[str]:
        """Text up to the next marker; which one it was, or none at the end."""
        while True:
            found = self._pattern.search(self._text, self._at)
            if found:
                self._say(self._read(found.start() - self._at))
                return self._read(len(found[0]))
            num_held = 0 if self._is_over else num_begun(self._text, self._at, self._markers)
            self._say(self._read(len(self._text) - num_held - self._at))
            if self._is_over:
                return ""
            yield

    def _say(self, text: str) -> None:
        """Blanks at the end of reasoning wait: before its marker they mean nothing."""
        shown = text.rstrip() if self._is_reasoning else text
        if shown:
            self._say_with_blanks(shown)
        if len(shown) < len(text):
            self._blanks.append(text[len(shown) :])

    def _say_with_blanks(self, text: str) -> None:
        whole = "".join([*self._blanks, text])
        self._blanks.clear()
        self._parts += [Reasoning(whole) if self._is_reasoning else Text(whole)] if whole else []
        self._is_after_call = False

    def _take_up(self, marker: str) -> Steps[bool]:
        """Go on after a marker; True where an edge is."""
        if marker in self._family.noise:
            return False
        if marker != END_OF_THINK:
            return (yield from self._attempt(marker))
        if not self._is_reasoning:
            self._say(marker)
            return False
        self._is_reasoning = False
        yield from self._take_blanks()
        self._blanks.clear()
        return True

    # ---- calls ---------------------------------------------------------------------------------------------

    def _attempt(self, marker: str) -> Steps[bool]:
        """A call, or several, that a marker announces; False if there is none, and all has been said."""
        self._record(marker)
        try:
            yield from self._form(marker)
        except NotACall:
            self._end_call()
            rest = "".join(self._raw)
            self._say(rest) if rest.strip() else self._blanks.append(rest)
            return False
        return True

    def _form(self, marker: str) -> Steps[None]:
        match marker:
            case "<tool_call>":
                yield from self._call_object()
                yield from self._closing("</tool_call>")
            case "<function=":
                tool = yield from self._tool_name()
                yield from self._expect(">")
                yield from self._arguments(tool)
                self._end_call()
                yield from self._closing("</function>")
            case "[TOOL_CALLS]":
                yield from self._run(BLANK)
                is_list = (yield from self._peek()) == "["
                yield from self._call_list() if is_list else self._call_with_args()
            case _:  # <|python_tag|>, or nothing
                yield from self._call_object()

    def _call_list(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._call_object()
            self._record("")
            yield from self._run(BLANK)
            if not (yield from self._option(",")):
                break
        yield from self._expect("]")

    def _call_with_args(self) -> Steps[None]:
        """name[ARGS]{...}, some models with an id of theirs after the name"""
        tool = yield from self._tool_name()
        if (yield from self._is_ahead("[CALL_ID]")):
            yield from self._expect("[CALL_ID]")
            yield from self._run(NAME)
        yield from self._expect("[ARGS]")
        yield from self._arguments(tool)
        self._end_call()

    def _call_object(self) -> Steps[None]:
        """{"name": ..., "arguments": {...}}, its keys in any order"""
        keys: list[str] = []
        tool, waiting = None, None  # arguments that came before the name
        yield from self._run(BLANK)
        yield from self._expect("{")
        while True:
            key = yield from self._key(keys)
            if key == "name":
                tool = self._tool_called((yield from self._word()))
            elif key == "arguments" and tool is None:
                waiting = yield from self._recorded(self._object())
            elif key == "arguments" and tool is not None:
                yield from self._arguments(tool)
            else:
                yield from self._word()
            yield from self._run(BLANK)
            if not (yield from self._option(",")):
                break
        if tool is None or (yield from self._peek()) != "}":
            raise NotACall
        if not self._is_open:
            self._whole_call(tool, waiting or "{}")
        yield from self._expect("}")
        self._end_call()

    def _key(self, seen: list[str]) -> Steps[str]:
        """A key of a call, by the name that it has here, up to its value"""
        yield from self._run(BLANK)
        written = yield from self._word()
        key = KEYS.get(written, "")
        if not key or key in seen:
            raise NotACall
        seen.append(key)
        yield from self._colon()
        return key

    def _tool_name(self) -> Steps[Tool]:
        return self._tool_called((yield from self._recorded(self._run(NAME))))

    def _tool_called(self, name: str) -> Tool:
        if name not in self._tools:
            raise NotACall
        return self._tools[name]

    def _arguments(self, tool: Tool) -> Steps[None]:
        """From here on it is a call; a mistake only ends it."""
        yield from self._run(BLANK)
        if tool.kind == "custom":
            yield from self._input_text(tool)
            return
        if (yield from self._peek()) != "{":
            raise NotACall
        self._begin_call(tool, self._argue)
        yield from self._object()
        self._record("")

    def _input_text(self, tool: Tool) -> Steps[None]:
        """{"input": "..."} of a custom tool"""
        yield from self._expect("{")
        yield from self._run(BLANK)
        if (yield from self._word()) != "input":
            raise NotACall
        yield from self._colon()
        if (yield from self._peek()) != '"':
            raise NotACall
        self._begin_call(tool, self._argue_decoded)
        yield from self._string()
        self._record("")
        yield from self._run(BLANK)
        yield from self._expect("}")

    def _whole_call(self, tool: Tool, arguments: str) -> None:
        found = input_in(arguments) if tool.kind == "custom" else arguments
        self._begin_call(tool, self._argue)
        self._argue(found)
        self._record("")

    def _closing(self, marker: str) -> Steps[None]:
        """Models leave it out at times."""
        yield from self._take_blanks()
        if (yield from self._is_ahead(marker)):
            self._read(len(marker))
            self._blanks.clear()

    def _begin_call(self, tool: Tool, sink: Callable[[str], None]) -> None:
        self._blanks.clear()
        self._parts.append(CallStart(self._num_calls, self._family.new_id(), tool))
        self._num_calls += 1
        self._is_open = True
        self._raw = []
        self._sink = sink

    def _argue(self, text: str) -> None:
        self._parts += [CallArguments(self._num_calls - 1, text)] if text else []

    def _argue_decoded(self, piece: str) -> None:
        if piece != '"':
            self._argue(decoded(piece) if piece.startswith("\\") else piece)

    def _end_call(self) -> None:
        if self._is_open:
            self._parts.append(CallEnd(self._num_calls - 1))
            self._is_open = False
            self._is_after_call = True

    def _record(self, text: str) -> None:
        """Keep what is taken from now on."""
        self._raw = [text]
        self._sink = self._raw.append

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
                raise NotACall

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
            raise NotACall
        yield from self._run(DIGITS)

    def _string(self) -> Steps[None]:
        yield from self._expect('"')
        while True:
            yield from self._run(PLAIN)
            if (yield from self._option('"')):
                return
            if (yield from self._peek()) != "\\":
                raise NotACall
            yield from self._escape()

    def _escape(self) -> Steps[None]:
        """Whole, and both halves of a surrogate pair at once. Half an escape at the very end is dropped."""
        while len(ahead := self._text[self._at : self._at + 12]) < escape_length(ahead):
            if self._is_over:
                self._read(len(ahead)) if self._is_open else self._take(len(ahead))
                raise NotACall
            yield
        found = PAIR.match(ahead) or ESCAPE.match(ahead)
        if not found:
            raise NotACall
        self._take(len(found[0]))

    def _word(self) -> Steps[str]:
        """A string, decoded"""
        return str(json.loads((yield from self._recorded(self._string()))))

    def _colon(self) -> Steps[None]:
        yield from self._run(BLANK)
        yield from self._expect(":")
        yield from self._run(BLANK)

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
                raise NotACall

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


def input_in(arguments: str) -> str:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):  # numbers of thousands of digits, nesting by the thousand
        raise NotACall from None
    if found.keys() != {"input"} or not isinstance(found["input"], str):
        raise NotACall
    return found["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def kind_of(part: Part) -> tuple[type, int | None]:
    return type(part), getattr(part, "index", None)


def joined(parts: list[Part]) -> Part:
    """One part of several that are alike"""
    first = parts[0]
    if len(parts) == 1 or not isinstance(first, Text | Reasoning | CallArguments):
        return first
    return replace(first, text="".join(part.text for part in parts if isinstance(part, type(first))))


def num_begun(text: str, start: int, markers: Sequence[str]) -> int:
    """How many characters at the end of text, after start, could be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def escape_length(ahead: str) -> int:
    """How much of it is needed to know the escape at its beginning."""
    if ahead[1:2] != "u":
        return 2
    if not HIGH_HALF.match(ahead):
        return 6
    return {"": 7, "\\": 8, "\\u": 12}.get(ahead[6:8], 6)


def decoded(escape: str) -> str:
    found = str(json.loads(f'"{escape}"'))
    return "\ufffd" if "\ud800" <= found <= "\udfff" else found  # half a pair is no text
