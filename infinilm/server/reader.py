"""Text to parts: what a model writes becomes text, reasoning and calls of tools while it comes.

What turns out to be no call comes out as text, exactly as it was, and it does not matter how the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infinilm.server.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text, merged
from infinilm.server.scanner import BLANK, Mismatch, Scanner, Steps
from infinilm.server.tools import THOUGHTS, Family, Tool

BETWEEN = re.compile(r"[ \t\n\r;]*")  # two calls that nothing marks
NAME = re.compile(r"[a-zA-Z0-9_-]*")

# Of the headers of messages that have channels
RECIPIENT = "to=functions."
HEADER_WORDS = {"assistant", "analysis", "commentary", "final", "json", "code"}
WORDS = re.compile(r"[\w=.\- ]*")
BETWEEN_WORDS = re.compile(r"(?:\s|<\|channel\|>|<\|constrain\|>)+")

# The keys of a call as models spell them, and what they are here. The last ones are of no use.
KEYS = {
    "name": "name",
    "function": "name",
    "arguments": "arguments",
    "parameters": "arguments",
    "type": "type",
    "id": "id",
}


def has_reasoning(chat_template: str) -> bool:
    return any(end in chat_template for _, end in THOUGHTS)


def starts_in_reasoning(prompt: str) -> bool:
    """Whether the prompt that a template wrote ends with reasoning begun, as some do."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in THOUGHTS))


def closing(tag: str) -> str:
    return f"</{tag.removeprefix('<')}"


class Reader(Scanner):
    """`add` gives the parts that are sure by now, `finish` the rest. Without tools there are no calls."""

    def __init__(
        self,
        family: Family,
        tools: Sequence[Tool] = (),
        starts_in_reasoning: bool = False,
        has_reasoning: bool = False,
    ) -> None:
        super().__init__()
        self._family = family
        self._tools = {tool.full_name: tool for tool in tools}
        self._is_reasoning = starts_in_reasoning
        self._has_reasoning = has_reasoning or starts_in_reasoning
        self._think, self._end_of_think = family.thoughts
        self._markers = (
            *(family.markers if tools or family.has_channels else ()),
            *family.noise,
            *([self._end_of_think] if self._has_reasoning else []),
        )
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")

        self._blanks: list[str] = []  # to be dropped if a call follows
        self._parts: list[Part] = []
        self._num_calls = 0
        self._is_open = False  # a call has begun and not ended
        self._is_whole = False  # the last one has all its arguments
        self._is_after_call = False  # and nothing has been said since
        self._steps = self._answer()

    def add(self, text: str) -> list[Part]:
        self._feed(text)
        next(self._steps, None)
        return self._gathered()

    def finish(self) -> list[Part]:
        self._is_over = True
        next(self._steps, None)
        return self._gathered()

    def _gathered(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return merged(parts)

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
            if self._has_reasoning and (yield from self._is_ahead(self._think)):
                self._read(len(self._think))
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
        return (yield from self._is_ahead(RECIPIENT if self._family.has_channels else "{"))

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
        if marker != self._end_of_think:
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
        except Mismatch:
            self._end_call()
            rest = "".join(self._raw)
            self._say(rest) if rest.strip() else self._blanks.append(rest)
            return False
        return True

    def _form(self, marker: str) -> Steps[None]:
        match marker:
            case "<tool_call>" | "<seed:tool_call>":
                yield from self._run(BLANK)
                yield from self._marked_call()
                yield from self._closing(closing(marker))
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
            case _:  # <|python_tag|>, <|start|>, <|channel|>, or nothing
                yield from self._message() if self._family.has_channels else self._call_object()

    def _message(self) -> Steps[None]:
        """A header, which tells the channel of what follows, or the tool that it is for"""
        header = yield from self._recorded(self._header())
        words = BETWEEN_WORDS.split(header.strip())
        tools = [word.removeprefix(RECIPIENT) for word in words if word.startswith(RECIPIENT)]
        if len({*words} - HEADER_WORDS) != len(tools):
            raise Mismatch
        yield from self._expect("<|message|>")
        if tools:
            yield from self._arguments(self._tool_called(tools[0]))
            self._end_call()
        else:
            self._is_reasoning = "analysis" in words
            self._blanks.clear()

    def _header(self) -> Steps[None]:
        yield from self._run(WORDS)
        for marker in ("<|channel|>", "<|constrain|>"):
            if (yield from self._is_ahead(marker)):
                yield from self._expect(marker)
                yield from self._run(WORDS)

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
            raise Mismatch
        if not self._is_open:
            self._whole_call(tool, waiting or "{}")
        yield from self._expect("}")
        self._end_call()

    def _marked_call(self) -> Steps[None]:
        if (yield from self._is_ahead("<function=")):
            yield from self._call_in_tags()
        elif (yield from self._peek()) == "{":
            yield from self._call_object()
        else:
            yield from self._call_with_keys()

    def _call_in_tags(self) -> Steps[None]:
        """<function=name> and <parameter=key>value</parameter> of each argument, as Qwen3-Coder and Seed-OSS
        have it. It is told whole: without its end, nothing tells whether there would be more."""
        yield from self._expect("<function=")
        tool = yield from self._tool_name()
        yield from self._expect(">")
        arguments: dict[str, str] = {}
        while (yield from self._is_next("<parameter=")):
            key = yield from self._new_key(arguments, ">")
            value = yield from self._up_to("</parameter>")
            arguments[key] = as_json(value.removeprefix("\n").removesuffix("\n"), tool.schema, key)
        yield from self._expect("</function>")
        self._call_of(tool, arguments)

    def _call_with_keys(self) -> Steps[None]:
        """A name, then <arg_key>key</arg_key> and <arg_value>value</arg_value> of each argument, as GLM-4.5
        has it. It is told whole too, and only its closing tag tells that it is a call."""
        tool = yield from self._tool_name()
        arguments: dict[str, str] = {}
        while (yield from self._is_next("<arg_key>")):
            key = yield from self._new_key(arguments, "</arg_key>")
            if not (yield from self._is_next("<arg_value>")):
                raise Mismatch
            arguments[key] = as_json((yield from self._up_to("</arg_value>")), tool.schema, key)
        if not (yield from self._is_ahead("</tool_call>")):
            raise Mismatch
        self._call_of(tool, arguments)

    def _is_next(self, tag: str) -> Steps[bool]:
        """Whether the tag comes after blanks; if so, it is taken"""
        yield from self._run(BLANK)
        if not (yield from self._is_ahead(tag)):
            return False
        self._take(len(tag))
        return True

    def _new_key(self, arguments: Mapping[str, str], end: str) -> Steps[str]:
        key = yield from self._up_to(end)
        if key in arguments:
            raise Mismatch
        return key

    def _call_of(self, tool: Tool, arguments: Mapping[str, str]) -> None:
        pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        self._whole_call(tool, f"{{{', '.join(pairs)}}}")
        self._end_call()

    def _up_to(self, end: str) -> Steps[str]:
        """What stands before an end, which is taken too"""
        return (yield from self._recorded(self._through(end))).removesuffix(end)

    def _through(self, end: str) -> Steps[None]:
        while (place := self._text.find(end, self._at)) < 0:
            self._take(len(self._text) - num_begun(self._text, self._at, [end]) - self._at)
            if self._is_over:
                raise Mismatch
            yield
        self._take(place + len(end) - self._at)

    def _key(self, seen: list[str]) -> Steps[str]:
        """A key of a call, by the name that it has here, up to its value"""
        yield from self._run(BLANK)
        written = yield from self._word()
        key = KEYS.get(written, "")
        if not key or key in seen:
            raise Mismatch
        seen.append(key)
        yield from self._colon()
        return key

    def _tool_name(self) -> Steps[Tool]:
        return self._tool_called((yield from self._recorded(self._run(NAME))))

    def _tool_called(self, name: str) -> Tool:
        if name not in self._tools:
            raise Mismatch
        return self._tools[name]

    def _arguments(self, tool: Tool) -> Steps[None]:
        """From here on it is a call; a mistake only ends it."""
        yield from self._run(BLANK)
        if tool.kind == "custom":
            yield from self._input_text(tool)
            return
        if (yield from self._peek()) != "{":
            raise Mismatch
        self._begin_call(tool, self._argue)
        yield from self._object()
        self._end_arguments()

    def _input_text(self, tool: Tool) -> Steps[None]:
        """{"input": "..."} of a custom tool"""
        yield from self._expect("{")
        yield from self._run(BLANK)
        if (yield from self._word()) != "input":
            raise Mismatch
        yield from self._colon()
        if (yield from self._peek()) != '"':
            raise Mismatch
        self._begin_call(tool, self._argue_decoded)
        yield from self._string()
        self._end_arguments()
        yield from self._run(BLANK)
        yield from self._expect("}")

    def _whole_call(self, tool: Tool, arguments: str) -> None:
        found = input_in(arguments) if tool.kind == "custom" else arguments
        self._begin_call(tool, self._argue)
        self._argue(found)
        self._end_arguments()

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
        self._is_open, self._is_whole = True, False
        self._raw = []
        self._sink = sink

    def _argue(self, text: str) -> None:
        self._parts += [CallArguments(self._num_calls - 1, text)] if text else []

    def _argue_decoded(self, piece: str) -> None:
        if piece != '"':
            self._argue(decoded(piece) if piece.startswith("\\") else piece)

    def _end_arguments(self) -> None:
        self._is_whole = True
        self._record("")

    def _end_call(self) -> None:
        if self._is_open:
            self._parts.append(CallEnd(self._num_calls - 1, self._is_whole))
            self._is_open = False
            self._is_after_call = True

    def _take_half(self, length: int) -> None:
        """Nobody could read the arguments with it."""
        self._read(length) if self._is_open else self._take(length)


def input_in(arguments: str) -> str:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):  # numbers of thousands of digits, nesting by the thousand
        raise Mismatch from None
    if found.keys() != {"input"} or not isinstance(found["input"], str):
        raise Mismatch
    return found["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates show such values to models
# What Python writes otherwise in a list or dict. A text that does not end takes the rest: all is read once.
PYTHON_PART = re.compile(
    r"""'([^'\\]*(?:\\.[^'\\]*)*)(?:'|\Z)|"([^"\\]*(?:\\.[^"\\]*)*)(?:"|\Z)|True|False|None""", re.DOTALL
)
IN_PYTHON_TEXT = re.compile(r"""\\.|\"""", re.DOTALL)
PYTHON_ESCAPES = {r"\x": r"\u00", r"\'": "'", '"': r"\""}


def as_json(text: str, schema: Mapping[str, Any], name: str) -> str:
    """What stands between tags as an argument of this name: a string, unless its schema wants something else
    and it reads as that. Where no type is known, objects and lists are told by their looks."""
    properties = schema.get("properties")
    kinds = kinds_of(properties.get(name)) if isinstance(properties, Mapping) else set()
    is_nested = text[:1] in ("{", "[")
    value = PYTHON_PART.sub(python_as_json, text) if is_nested else PYTHON.get(text, text)
    is_wanted = value == "null" and "null" in kinds if "string" in kinds else kinds or is_nested
    return value if is_wanted and is_json(value) else json.dumps(text, ensure_ascii=False)


def python_as_json(found: re.Match[str]) -> str:
    """A text or a word; of those that JSON has too, itself"""
    if found[0] in PYTHON:
        return PYTHON[found[0]]
    text = found[1] if found[2] is None else found[2]
    return f'"{IN_PYTHON_TEXT.sub(lambda part: PYTHON_ESCAPES.get(part[0], part[0]), text)}"'


def kinds_of(schema: Any) -> set[str]:
    """The types that a client's schema names, itself or as alternatives"""
    if not isinstance(schema, Mapping):
        return set()
    named = [schema]
    for key in ("anyOf", "oneOf"):
        named += schema[key] if isinstance(schema.get(key), list) else []
    kinds = [each.get("type") for each in named if isinstance(each, Mapping)]
    flat = [kind for each in kinds for kind in (each if isinstance(each, list) else [each])]
    return {kind for kind in flat if isinstance(kind, str)}


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refused)
    except (ValueError, RecursionError):  # numbers of thousands of digits, nesting by the thousand
        return False
    return True


def refused(constant: str) -> None:
    raise ValueError(f"{constant} is Python's, and no JSON")


def num_begun(text: str, start: int, markers: Sequence[str]) -> int:
    """How many characters at the end of text, after start, could be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def decoded(escape: str) -> str:
    found = str(json.loads(f'"{escape}"'))
    return "\ufffd" if "\ud800" <= found <= "\udfff" else found  # half a pair is no text
