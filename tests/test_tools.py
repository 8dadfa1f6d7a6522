"""Tools: every family's calls are forced, written by a model, and read back; what is no call stays text."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grammar import Case
from test_grammar import Tiny as Vocabulary

from infinilm import LLM, RequestError, SamplingParams, StructuredOutputsParams
from infinilm.engine.grammar import Matcher
from infinilm.engine.request import CompletionOutput
from infinilm.server import bodies
from infinilm.server.answers import finish_reason
from infinilm.server.openai_bodies import ChatBody
from infinilm.server.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from infinilm.server.reader import Reader, has_reasoning, starts_in_reasoning
from infinilm.server.tools import (
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    OURS,
    SEED,
    Choice,
    Family,
    Named,
    Tool,
    family_of,
)
from infinilm.server.turn import Reading, Turn, encode, enforced
from infinilm.tokenizer import Tokenizer
from infinilm.tokenizer.chat import Renderer, with_content, with_thoughts

FAMILIES = {
    "llama3": LLAMA3,
    "hermes": HERMES,
    "mistral": MISTRAL,
    "args": MISTRAL_ARGS,
    "harmony": HARMONY,
    "ours": OURS,
    "seed": SEED,
}

WEATHER = Tool(
    "get_weather",
    "How the weather is",
    {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "country": {"enum": ["FR", "\u00d6S"]},
                },
                "required": ["city", "country"],
            },
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["place", "unit"],
    },
)
SUM = Tool(
    "add-numbers",
    "The sum",
    {
        "type": "object",
        "properties": {
            "numbers": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "minItems": 2,
                "maxItems": 4,
            }
        },
        "required": ["numbers"],
        "additionalProperties": False,
    },
)
FLIGHT = Tool(
    "book",
    "Books a flight",
    {
        "type": "object",
        "properties": {"flight": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3,4}$"}},
        "required": ["flight"],
    },
    namespace="travel",
)
CLOCK = Tool("clock", "The time")
PATCH = Tool("apply_patch", "Patches files", kind="custom")
TOOLS = [WEATHER, SUM, FLIGHT, CLOCK, PATCH]


def read(
    family: Family, pieces: Iterable[str], tools: Iterable[Tool] = TOOLS, **options: bool
) -> tuple[list[Part], Reader]:
    reader = Reader(family, list(tools), **options)
    return [part for piece in pieces for part in reader.add(piece)] + reader.finish(), reader


def told(parts: Iterable[Part]) -> list[tuple[Any, ...]]:
    """The parts in short, those that follow each other and are alike as one; ids are checked elsewhere."""
    found: list[tuple[Any, ...]] = []
    for part in parts:
        match part:
            case CallStart(index, _, tool):
                found.append(("call", index, tool.full_name))
            case CallEnd(index):
                found.append(("end", index))
            case CallArguments(index, text):
                found.append((index, text))
            case Text(text) | Reasoning(text):
                found.append((type(part).__name__.lower(), text))
        if len(found) > 1 and found[-1][0] == found[-2][0] and not isinstance(part, CallStart | CallEnd):
            last = found.pop()
            found[-1] = (last[0], found[-1][1] + last[1])
    return found


def parts_of(
    family: Family, text: str, tools: Iterable[Tool] = TOOLS, **options: bool
) -> list[tuple[Any, ...]]:
    """Read at once and one character at a time, which must be the same."""
    whole, single = (told(read(family, pieces, tools, **options)[0]) for pieces in ([text], text))
    assert whole == single
    return whole


def call(index: int, name: str, *arguments: str) -> list[tuple[Any, ...]]:
    return [("call", index, name), *((index, text) for text in arguments), ("end", index)]


# --- What models write --------------------------------------------------------------------------------------

CITY = '{"place": {"city": "Paris"}, "n": [1, -2.5e+3, true, null]}'
CALL = f'{{"name": "get_weather", "arguments": {CITY}}}'
LLAMA_CALL = f'{{"name": "get_weather", "parameters": {CITY}}}'
CLOCK_CALL = '{"name": "clock", "arguments": {}}'
PARIS, TIME = call(0, "get_weather", CITY), call(1, "clock", "{}")

TAGS = """<tool_call>
<function=get_weather>
<parameter=place>
{"city": "Paris"}
</parameter>
<parameter=unit>
cel\u00a0"sius"
 </b></parameter>
</function>"""
TAGGED = '{"place": {"city": "Paris"}, "unit": "cel\u00a0\\"sius\\"\\n </b>"}'

KEYS = """<tool_call>get_weather
<arg_key>place</arg_key>
<arg_value>{"city": "Paris"}</arg_value>
<arg_key>unit</arg_key><arg_value>cel\u00a0"sius"
 </b>
</arg_value>
"""
KEYED = '{"place": {"city": "Paris"}, "unit": "cel\u00a0\\"sius\\"\\n </b>\\n"}'

WRITTEN: dict[str, tuple[Family, str, list[tuple[Any, ...]]]] = {
    "one call": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", PARIS),
    "two calls": (
        HERMES,
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CLOCK_CALL}\n</tool_call>\n",
        PARIS + TIME,
    ),
    "text around calls": (
        HERMES,
        f"I look.\n<tool_call>{CALL}</tool_call> \n So.",
        [("text", "I look.\n"), *PARIS, ("text", " \n So.")],
    ),
    "blanks before a call": (HERMES, f"\n\n<tool_call>{CALL}</tool_call>", PARIS),
    "no closing tag": (HERMES, f"<tool_call>{CALL}\n<tool_call>{CLOCK_CALL}", PARIS + TIME),
    "arguments before the name": (
        HERMES,
        f'<tool_call>{{"arguments": {CITY}, "name": "get_weather"}}</tool_call>',
        PARIS,
    ),
    "no arguments": (OURS, '<tool_call>{"name": "clock"}</tool_call>', call(0, "clock", "{}")),
    "tags": (HERMES, f"Well.\n{TAGS}\n</tool_call>", [("text", "Well.\n"), *call(0, "get_weather", TAGGED)]),
    "two in tags, one left open": (
        HERMES,
        f"{TAGS}\n<tool_call><function=clock></function></tool_call>\n",
        call(0, "get_weather", TAGGED) + TIME,
    ),
    "custom, in tags": (
        HERMES,
        "<tool_call><function=apply_patch>\n<parameter=input>\n<a>\n</parameter>\n</function></tool_call>",
        call(0, "apply_patch", "<a>"),
    ),
    "keys and values": (
        HERMES,
        f"Well.\n{KEYS}</tool_call>",
        [("text", "Well.\n"), *call(0, "get_weather", KEYED)],
    ),
    "two with keys, one without": (
        HERMES,
        f"{KEYS}</tool_call>\n<tool_call>clock</tool_call>\n",
        call(0, "get_weather", KEYED) + TIME,
    ),
    "custom, with a key": (
        HERMES,
        "<tool_call>apply_patch<arg_key>input</arg_key><arg_value>\n<a>\n</arg_value></tool_call>",
        call(0, "apply_patch", "\n<a>\n"),
    ),
    "Seed's tags": (
        SEED,
        f"Well.{TAGS.replace('<tool', '<seed:tool')}\n</seed:tool_call>",
        [("text", "Well."), *call(0, "get_weather", TAGGED)],
    ),
    "Seed's, two": (
        SEED,
        f"<seed:tool_call>{CALL}</seed:tool_call>\n<seed:tool_call>\n<function=clock>\n</function>",
        PARIS + TIME,
    ),
    "a namespace": (OURS, '<tool_call>{"name": "travel__book"}</tool_call>', call(0, "travel__book", "{}")),
    "bare": (LLAMA3, LLAMA_CALL, PARIS),
    "bare, after blanks, and a second": (LLAMA3, f" \n{LLAMA_CALL}; {CLOCK_CALL}<|eom_id|>", PARIS + TIME),
    "one a line": (LLAMA3, f"{LLAMA_CALL}\n{CLOCK_CALL}\nDone.", [*PARIS, *TIME, ("text", "\nDone.")]),
    "python_tag": (LLAMA3, f"Well.<|python_tag|>{LLAMA_CALL}", [("text", "Well."), *PARIS]),
    "its type too": (
        LLAMA3,
        '{"type": "function", "name": "clock", "parameters": {}}',
        call(0, "clock", "{}"),
    ),
    "function tags": (
        LLAMA3,
        f"<function=get_weather>{CITY}</function><function=clock>{{}}</function>",
        PARIS + TIME,
    ),
    "a list": (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CLOCK_CALL}]", PARIS + TIME),
    "a list with ids": (
        MISTRAL,
        f'Well.[TOOL_CALLS][{CALL[:-1]}, "id": "abcdef123"}}]',
        [("text", "Well."), *PARIS],
    ),
    "names and arguments": (
        MISTRAL_ARGS,
        f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]clock[CALL_ID]123456789[ARGS]{{}}",
        PARIS + TIME,
    ),
    "custom": (
        HERMES,
        r'<tool_call>{"name": "apply_patch", "arguments": {"input": "a\n\"\ud83d\ude00\u00e9\ud83d"}}',
        call(0, "apply_patch", 'a\n"😀é�'),
    ),
    "custom, arguments first": (
        HERMES,
        r'<tool_call>{"arguments": {"input": "\ud83d\ude00"}, "name": "apply_patch"}',
        call(0, "apply_patch", "😀"),
    ),
    "custom, without input": (
        HERMES,
        '<tool_call>{"name": "apply_patch", "arguments": {"input": ""}}',
        call(0, "apply_patch"),
    ),
}


@pytest.mark.parametrize("family, text, expected", WRITTEN.values(), ids=WRITTEN)
def test_calls_are_read_as_each_family_writes_them(family, text, expected):
    assert parts_of(family, text) == expected


PAIR = "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
NO_CALLS: dict[str, tuple[Family, str]] = {
    "text": (HERMES, "Just a < b > c.\n"),
    "blanks": (HERMES, " \n"),
    "part of a marker": (HERMES, "a<tool_cal"),
    "an unknown tool": (HERMES, '<tool_call>\n{"name": "rm", "arguments": {"a": 1}}\n</tool_call> ok'),
    "no JSON": (HERMES, " <tool_call>clock()</tool_call>"),
    "an unknown key": (HERMES, '<tool_call>{"name": "clock", "why": 1}</tool_call>'),
    "a key twice": (HERMES, '<tool_call>{"name": "clock", "name": "clock"}</tool_call>'),
    "arguments that are no object": (HERMES, '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>'),
    "no name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "a bad escape": (HERMES, r'<tool_call>{"name": "clo\xck"}</tool_call>'),
    "cut before its arguments": (HERMES, '<tool_call>{"name": "clock", "arg'),
    "cut in an escape": (HERMES, r'<tool_call>{"name": "\ud83d\u'),
    "tags of an unknown tool": (HERMES, "<tool_call><function=rm></function></tool_call>"),
    "tags twice": (
        HERMES,
        "<tool_call><function=clock><parameter=a>1</parameter><parameter=a>2</parameter></function>",
    ),
    "tags cut in a name": (HERMES, "<tool_call>\n<funct"),
    "tags cut in a value": (HERMES, "<tool_call><function=clock><parameter=a>\n1\n</para"),
    "tags cut between values": (HERMES, "<tool_call><function=clock><parameter=a>\n1\n</parameter>\n"),
    "keys of an unknown tool": (HERMES, "<tool_call>rm\n<arg_key>a</arg_key></tool_call>"),
    "a key without a value": (HERMES, "<tool_call>clock\n<arg_key>a</arg_key>\n</tool_call>"),
    "a key that comes twice": (HERMES, f"<tool_call>clock\n{2 * PAIR}</tool_call>"),
    "keys cut in a name": (HERMES, "<tool_call>clo"),
    "keys cut after a name": (HERMES, "<tool_call>clock"),
    "keys cut in a value": (HERMES, "<tool_call>clock\n<arg_key>a</arg_key>\n<arg_value>1</arg_v"),
    "keys cut between values": (HERMES, f"<tool_call>clock\n{PAIR}"),
    "Seed's cut": (SEED, "a<seed:tool_call>\n<function=clock>\n<parameter=a>1</parameter>"),
    "tags of a custom tool without input": (HERMES, "<tool_call><function=apply_patch></function>"),
    "custom of two keys": (HERMES, '<tool_call>{"arguments": {"input": "a", "b": 1}, "name": "apply_patch"}'),
    "custom of deep nesting": (
        HERMES,
        '<tool_call>{"arguments": {"input": ' + "[" * 9999 + "]" * 9999 + '}, "name": "apply_patch"}',
    ),
    "JSON": (LLAMA3, '{"answer": 42}'),
    "JSON with a name": (LLAMA3, '{"name": "Ada", "parameters": {}}'),
    "JSON later on": (LLAMA3, f"So: {LLAMA_CALL}"),
    "a function without a name": (LLAMA3, "<function=>{}</function>"),
    "python": (LLAMA3, "<|python_tag|>print(1)"),
    "no list": (MISTRAL, "[TOOL_CALLS] none"),
    "an unfinished list": (MISTRAL, '[TOOL_CALLS][{"name": "rm"'),
    "no arguments": (MISTRAL_ARGS, "[TOOL_CALLS]clock[CALL_ID]12"),
}


@pytest.mark.parametrize("family, text", NO_CALLS.values(), ids=NO_CALLS)
def test_what_is_no_call_is_text_as_it_was(family, text):
    assert parts_of(family, text) == [("text", text)]


@pytest.mark.parametrize("family, text", [case[:2] for case in WRITTEN.values()], ids=WRITTEN)
def test_without_tools_all_is_text(family, text):
    assert parts_of(family, text, []) == [("text", text.removesuffix("<|eom_id|>"))]


@pytest.mark.parametrize(
    "kind, text, value",
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": "integer"}, "12", "12"),
        ({"type": "integer"}, "a dozen", '"a dozen"'),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "9" * 5000, f'"{"9" * 5000}"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "array"}, '[1,\n"a"]', '[1,\n"a"]'),
        # as Seed-OSS's template shows lists and objects: as Python writes them
        (
            {"type": "array"},
            repr(["it's", 'a "b"', "None", "\x7f\\", "\n"]),
            r"""["it's", "a \"b\"", "None", "\u007f\\", "\n"]""",
        ),
        ({"type": "object"}, "{'k': [1, None], 'b': True}", '{"k": [1, null], "b": true}'),
        ({"type": "object"}, '{"ok": True}', '{"ok": true}'),
        ({"type": "object"}, "{'k': 1", "\"{'k': 1\""),
        ({"type": "string"}, "['a']", "\"['a']\""),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({"oneOf": [{"type": "string"}, 7]}, "7", '"7"'),
        ({"$ref": "#/$defs/Place"}, '{"city": "Rome"}', '{"city": "Rome"}'),
        ({"$ref": "#/$defs/Color"}, "12", '"12"'),
        ({"type": [{}], "anyOf": 7}, "[" * 9999, f'"{"[" * 9999}"'),
        (7, "\n a\n", r'"\n a\n"'),
    ],
)
def test_what_stands_between_tags_has_the_type_that_its_schema_wants(kind, text, value):
    tool = Tool("run", parameters={"type": "object", "properties": {"a": kind}})
    written = f"<tool_call>\n<function=run>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert parts_of(HERMES, written, [tool]) == call(0, "run", f'{{"a": {value}}}')


def test_after_an_unknown_tool_the_next_call_is_read():
    text = f'<tool_call>{{"name": "rm"}}</tool_call>\n<tool_call>{CALL}</tool_call>'
    assert parts_of(HERMES, text) == [("text", '<tool_call>{"name": "rm"}</tool_call>\n'), *PARIS]


BROKEN = {
    "a number": ('{"a": 1.2', ".3}}</tool_call>"),
    "a leading zero": ('{"a": 0', "1}}"),
    "a literal": ('{"a": tr', "ie}}"),
    "a bare word": ("{", "a: 1}}"),
    "a trailing comma": ('{"a": [1,', "]}}"),
    "a wrong bracket": ('{"a": [1', "}}"),
    "a line break in a string": ('{"a": "b', '\n"}}'),
    "a bad escape": ('{"a": "b', '\\x"}}'),
    "no colon": ('{"a" ', "1}}"),
}


@pytest.mark.parametrize("good, bad", BROKEN.values(), ids=BROKEN)
def test_a_mistake_in_arguments_ends_the_call_and_the_rest_is_text(good, bad):
    text = f'<tool_call>{{"name": "clock", "arguments": {good}{bad}'
    assert parts_of(HERMES, text) == [*call(0, "clock", good), ("text", bad)]


def test_what_follows_the_arguments_wrongly_is_text():
    text = '<tool_call>{"name": "clock", "arguments": {} , "x'
    assert parts_of(HERMES, text) == [*call(0, "clock", "{}"), ("text", ' , "x')]


def test_a_call_that_is_cut_off_ends_without_half_an_escape():
    for tail in ("", "\\", r"\u", r"\u00e", r"\ud83d", r"\ud83d\ude"):
        text = f'<tool_call>{{"name": "clock", "arguments": {{"a": "b{tail}'
        assert parts_of(HERMES, text) == call(0, "clock", '{"a": "b')


def test_a_call_that_is_cut_off_after_its_arguments_leaves_no_text():
    for text in ('<tool_call>{"name": "clock", "arguments": {} \n', "<function=clock>{} \n"):
        assert parts_of(replace(HERMES, markers=("<tool_call>", "<function=")), text) == call(
            0, "clock", "{}"
        )


@pytest.mark.parametrize(
    "text, stop, is_parallel, reason",
    [
        ('<tool_call>{"name": "clock", "arguments": {"at', '"', True, "stop"),
        ('<tool_call>{"name": "clock", "arguments": {}}\n', "</tool_call>", True, "tool_calls"),
        ('<tool_call>{"name": "clock", "arguments": {}', None, True, "tool_calls"),  # the model's own end
        (f"<tool_call>{CALL}<tool_call>{CALL[:-20]}", "[", True, "stop"),
        (f"<tool_call>{CALL}<tool_call>{CALL[:-20]}", "[", False, "tool_calls"),  # the second is not told
    ],
)
def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_made(text, stop, is_parallel, reason):
    for size in (1, len(text)):
        reading = Reading(0, Reader(HERMES, TOOLS), is_parallel)
        for end in range(size, len(text), size):
            reading.piece(CompletionOutput(0, text[:end], [1]))
        piece = reading.piece(CompletionOutput(0, text, [1], finish_reason="stop", stop_reason=stop))
        assert piece is not None and finish_reason(piece) == reason


def test_escapes_and_markers_are_never_emitted_in_part():
    reader = Reader(HERMES, TOOLS)
    text = r'a<tool_call>{"name": "clock", "arguments": {"a": "\u00e9\ud83d\ude00\n"}}</tool_call>'
    pieces = [part.text for char in text for part in reader.add(char) if hasattr(part, "text")]
    assert [piece for piece in pieces if "\\" in piece] == [r"\u00e9", r"\ud83d\ude00", r"\n"]
    assert pieces[0] == "a" and not [piece for piece in pieces if "<" in piece]


def test_arguments_come_as_they_are_written():
    reader = Reader(HERMES, TOOLS)
    assert reader.add('<tool_call>{"name": "clock", "arguments"') == []
    (start, arguments) = reader.add(': {"a": "so')
    assert isinstance(start, CallStart) and arguments == CallArguments(0, '{"a": "so')
    assert reader.add(" on") == [CallArguments(0, " on")]
    assert reader.add('"}}') == [CallArguments(0, '"}'), CallEnd(0)]


@pytest.mark.parametrize(
    "name, arguments", [("clock", '{"a": [1, "b"]}'), ("apply_patch", '{"input": "x\\ny"}')]
)
def test_a_call_says_whether_all_its_arguments_came(name, arguments):
    begin = f'<tool_call>{{"name": "{name}", "arguments": '
    ends = [
        part.is_whole
        for end in range(len(arguments) + 1)
        for part in read(HERMES, [begin + arguments[:end]])[0]
        if isinstance(part, CallEnd)
    ]
    num_whole = 2 if name == "apply_patch" else 1  # whose input is all there before the brace
    assert ends[-num_whole:] == [True] * num_whole and not any(ends[:-num_whole]) and len(ends) > 3


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_ids_are_new_and_of_the_familys_form(family):
    found = {family.new_id() for _ in range(100)}
    pattern = "[a-zA-Z0-9]{9}" if family.name == "mistral" else "call_[0-9a-f]{24}"
    assert len(found) == 100 and all(re.fullmatch(pattern, one) for one in found)


# --- Reasoning ----------------------------------------------------------------------------------------------

THOUGHTS: dict[str, tuple[str, dict[str, bool], list[tuple[Any, ...]]]] = {
    "begun by the model": (
        "<think>\nHm.\n\nYes \n</think>\n\nSo.",
        {},
        [("reasoning", "Hm.\n\nYes"), ("text", "So.")],
    ),
    "begun by the prompt": (
        "Hm.</think>So.",
        {"starts_in_reasoning": True},
        [("reasoning", "Hm."), ("text", "So.")],
    ),
    "begun by both": (
        "<think>\nHm.</think>So.",
        {"starts_in_reasoning": True},
        [("reasoning", "Hm."), ("text", "So.")],
    ),
    "none": ("<think>\n\n</think>\n\nSo.", {}, [("text", "So.")]),
    "unfinished": ("<think>\nHm. </thin", {}, [("reasoning", "Hm. </thin")]),
    "before a call": (
        f"<think>Hm.\n</think>\n\n<tool_call>{CALL}</tool_call>",
        {},
        [("reasoning", "Hm."), *PARIS],
    ),
    "unfinished, with a call": (
        f"<think>Hm.\n<tool_call>{CALL}</tool_call>",
        {},
        [("reasoning", "Hm."), *PARIS],
    ),
    "with what is no call": (
        "<think>Hm <tool_call>x</think>So",
        {},
        [("reasoning", "Hm <tool_call>x"), ("text", "So")],
    ),
    "only spoken of": ("Write <think> and </think>.", {}, [("text", "Write <think> and </think>.")]),
}


@pytest.mark.parametrize("text, options, expected", THOUGHTS.values(), ids=THOUGHTS)
def test_reasoning_is_told_from_the_answer(text, options, expected):
    assert parts_of(HERMES, text, has_reasoning=True, **options) == expected


MAGISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[THINK]{{ thoughts }}[/THINK][TOOL_CALLS]clock[ARGS]{}"


@pytest.mark.parametrize(
    "said, parts", [(" So.", [("text", "So.")]), (f"[TOOL_CALLS]get_weather[ARGS]{CITY}", PARIS)]
)
def test_reasoning_of_magistral_is_told_from_answers_and_calls(said, parts):
    text = f"[THINK]Hm [THI <think>\n[/THINK]{said}"
    assert has_reasoning(MAGISTRAL)
    assert parts_of(family_of(MAGISTRAL), text, has_reasoning=True) == [
        ("reasoning", "Hm [THI <think>"),
        *parts,
    ]


ANALYSIS = "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"
CHANNELS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "an answer": (
        f"{ANALYSIS}<|channel|>final<|message|>So.<|return|>",
        [("reasoning", "Hm."), ("text", "So.")],
    ),
    "no thoughts": ("<|channel|>final<|message|> to=you: <b>\n", [("text", " to=you: <b>\n")]),
    "no channel": ('{"a": 1}', [("text", '{"a": 1}')]),
    "a call": (
        f"{ANALYSIS}<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{CITY}<|call|>",
        [("reasoning", "Hm."), *PARIS],
    ),
    "for whom before where": (
        f"{ANALYSIS} to=functions.get_weather<|channel|>commentary json<|message|>{CITY}",
        [("reasoning", "Hm."), *PARIS],
    ),
    "a header that the prompt has begun": (
        f" to=functions.get_weather<|channel|>commentary<|message|>{CITY}<|call|>",
        PARIS,
    ),
    "words before a call": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.get_weather<|message|>{CITY}",
        [("text", "I look."), *PARIS],
    ),
    "an unknown tool": (
        "<|channel|>commentary to=functions.rm<|message|>{}",
        [("text", "<|channel|>commentary to=functions.rm<|message|>{}")],
    ),
    "a tool of no client": (
        f"{ANALYSIS}<|channel|>analysis to=python code<|message|>1",
        [("reasoning", "Hm.\n<|start|>assistant<|channel|>analysis to=python code<|message|>1")],
    ),
    "a header cut off": ("<|channel|>fin", [("text", "<|channel|>fin")]),
}


@pytest.mark.parametrize("text, expected", CHANNELS.values(), ids=CHANNELS)
def test_channels_tell_thoughts_answers_and_calls_apart(text, expected):
    assert parts_of(HARMONY, text) == expected
    for place in range(len(text) + 1):  # and what is no header is never lost
        parts, _ = read(HARMONY, [f"{text[:place]}½{text[place:]}"])
        assert sum(getattr(part, "text", "").count("½") for part in parts) == 1
        check_order(parts)


def test_what_only_looks_like_a_header_is_not_held_back():
    said = "Each has `<|start|>` before it, and <|channel|>\n"
    parts = Reader(HARMONY).add(f"<|channel|>final<|message|>{said}")
    assert told(parts) == [("text", said)]


def test_channels_are_told_apart_without_tools():
    assert parts_of(HARMONY, CHANNELS["an answer"][0], []) == CHANNELS["an answer"][1]


def test_reasoning_of_seed_is_told_from_answers_and_calls():
    template = "{% if tools %}<seed:think>{{ thoughts }}</seed:think><seed:tool_call>{% endif %}"
    assert family_of(template) == SEED and has_reasoning(template) and starts_in_reasoning("<seed:think>\n")
    text = "<seed:think>\nHm <think>.</seed:think>\n<seed:tool_call>\n<function=clock>\n</function>"
    found = parts_of(SEED, text, has_reasoning=True)
    assert found == [("reasoning", "Hm <think>."), *call(0, "clock", "{}")]


@pytest.mark.parametrize(
    "family", [HARMONY, family_of(MAGISTRAL), SEED], ids=["channels", "Magistral", "Seed"]
)
@pytest.mark.parametrize("tools", [(), (CLOCK,)], ids=["no tools", "a tool"])
def test_the_text_keeps_the_special_tokens_that_tell_thoughts_from_answers(family, tools):
    turn = Turn(params=SamplingParams(), messages=QUESTION, tools=tools)
    assert not enforced(turn, family, starts_in_reasoning=False).skip_special_tokens
    completion = Turn(params=SamplingParams(), prompt="Once")
    assert enforced(completion, family, starts_in_reasoning=False).skip_special_tokens


def test_without_reasoning_in_the_template_its_tags_are_text():
    assert parts_of(HERMES, "<think>Hm.</think>So.") == [("text", "<think>Hm.</think>So.")]


def test_a_bare_call_follows_reasoning():
    assert parts_of(LLAMA3, f"Hm.</think>\n{LLAMA_CALL}", starts_in_reasoning=True) == [
        ("reasoning", "Hm."),
        *PARIS,
    ]


def test_the_end_of_a_prompt_tells_whether_reasoning_has_begun():
    assert starts_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not starts_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not starts_in_reasoning("assistant: <think> unfinished\nuser: a\nassistant:")
    assert has_reasoning("{{ '</think>' }}") and not has_reasoning("{{ messages }}")


# --- However it is cut --------------------------------------------------------------------------------------

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<function=", ">", "</function>",
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "analysis", " to=functions.", "<parameter=",
    "</parameter>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "clock", "apply_patch", CALL, CLOCK_CALL, LLAMA_CALL,
    "{", "}", "[", "]", ",", ";", ":", '"', "\\", r"\u00e9", r"\ud83d\ude00", r"\ud83d",
    '"name"', '"arguments"', '"input"', "{}",
    '{"name": "clock", "arguments": ', '{"name": "apply_patch", "arguments": {"input": "',
    "1", "-0.5", "e", "true", " ", "\n", "é", "😀", "<", "a", "½",
]  # fmt: skip
BEGINNINGS = [
    f"{marker}{beginning}"
    for marker in (
        "<tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS][",
        "<function=clock>",
        "[TOOL_CALLS]clock[ARGS]",
        "<tool_call><function=clock><parameter=a>",
        "<|channel|>commentary to=functions.clock<|message|>",
        "",
    )
    for beginning in (
        CALL,
        CALL[:-1],
        CALL[:-9],
        '{"name": "apply_patch", "arguments": {"input": "',
        '{"a": ["b',
    )
]
fragments = st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from(BEGINNINGS), st.text(max_size=3))
texts = st.lists(fragments, max_size=20).map("".join)


def cut(text: str, seed: int) -> list[str]:
    choice = random.Random(seed)
    places = sorted(choice.randrange(len(text) + 1) for _ in range(choice.randrange(8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@settings(deadline=None, max_examples=400)
@given(texts, st.sampled_from(list(FAMILIES.values())), st.booleans(), st.booleans(), st.integers(0, 9))
def test_parts_do_not_depend_on_cuts_and_nothing_is_lost(text, family, is_thinking, thinks, seed):
    options = {"starts_in_reasoning": is_thinking, "has_reasoning": thinks}
    whole = parts_of(family, text, **options)
    parts, _ = read(family, cut(text, seed), **options)
    assert told(parts) == whole
    check_order(parts)
    # What no syntax is made of is never dropped, and text stays in order.
    assert sum(str(part[-1]).count("½") for part in whole) == text.count("½")
    rest = iter(text)
    for kind, *_, said in whole:
        assert kind not in ("text", "reasoning") or all(char in rest for char in said)
    if not any(kind == "call" for kind, *_ in whole) and not is_thinking and not thinks and not family.noise:
        assert whole == ([("text", text)] if text else [])


@pytest.mark.parametrize(
    "name", [name for name in WRITTEN if name not in ("its type too", "a list with ids")]
)
def test_what_is_put_into_a_call_anywhere_is_never_lost(name):
    family, text, _ = WRITTEN[name]
    for added in ("½", ' "½"', ', "½', ",½", "\\½", "{½", "[½"):
        for place in range(len(text) + 1):
            parts, _ = read(family, [text[:place] + added + text[place:]])
            assert sum(getattr(part, "text", "").count("½") for part in parts) == 1
            check_order(parts)


def check_order(parts: list[Part]) -> None:
    """Calls one after the other, each with arguments between its start and its end, no part empty."""
    num_calls, is_open = 0, False
    for part in parts:
        match part:
            case CallStart(index):
                assert not is_open and index == num_calls
                num_calls, is_open = num_calls + 1, True
            case CallArguments(index, text):
                assert is_open and index == num_calls - 1 and text
            case CallEnd(index):
                assert is_open and index == num_calls - 1
                is_open = False
            case Text(text) | Reasoning(text):
                assert not is_open and text
    assert not is_open


LONG = {
    "text": lambda n: "a < b\n" * (n // 6),
    "blanks": lambda n: f"<tool_call>{CALL}</tool_call>" + "\n" * n,
    "markers": lambda n: "<tool_call>" * (n // 11),
    "calls": lambda n: f"<tool_call>{CALL}</tool_call>\n" * (n // 100),
    "a string": lambda n: f'<tool_call>{{"name": "clock", "arguments": {{"a": "{"b" * n}"}}}}',
    "escapes": lambda n: f'<tool_call>{{"name": "clock", "arguments": {{"a": "{chr(92) * (n // 2 * 2)}"}}}}',
    "a number": lambda n: f'<tool_call>{{"name": "clock", "arguments": {{"a": {"1" * n}}}}}',
    "nesting": lambda n: f'<tool_call>{{"name": "clock", "arguments": {{"a": {"[" * n}',
    "arguments before the name": lambda n: (
        f'<tool_call>{{"arguments": {{"a": "{"b" * n}"}}, "name": "clock"}}'
    ),
    "thoughts": lambda n: "<think>" + "a \n" * (n // 3),
}


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
def test_hardly_any_text_is_looked_at_twice(make):
    reader, most = Reader(HERMES, TOOLS, has_reasoning=True), 0
    for char in make(3000):
        reader.add(char)
        most = max(most, len(reader._text) - reader._at)
    assert most < len("</tool_call>")


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
def test_the_work_grows_as_the_text_does(make):
    """Four times the text is about four times the work, by CPU time; squared it would be sixteen times."""

    def seconds(length: int) -> float:
        text = make(length)
        start = time.process_time()
        read(HERMES, [text], has_reasoning=True)
        return time.process_time() - start

    short, long = (min(seconds(length) for _ in range(2)) for length in (12_000, 48_000))
    assert long < 9 * short + 0.02


# --- Conversations ------------------------------------------------------------------------------------------

# As strict as the families' own templates are.
QWEN = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ '' + m.content }}
{%- for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
LLAMA = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>
{% if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- else %}{{ '' + m.content }}{% endif %}<|eot_id|>
{% endfor %}"""
MISTRALS = """{% macro id(x) %}
{%- if x is not string or x | length != 9 %}{{ raise_exception('9') }}{% endif %}{{ x }}{% endmacro %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]
{%- for c in m.tool_calls %}{{ c.function | tojson }}{{ id(c.id) }}{% endfor %}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}{{ id(m.tool_call_id) }}
{%- else %}[{{ m.role }}]{{ '' + m.content }}{% endif %}{% endfor %}"""
OSS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% set last = namespace(name=none) %}
{%- for m in messages %}{% if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- set f = m.tool_calls[0].function %}{% set last.name = f.name %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call alone is written') }}{% endif -%}
<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}
{%- elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|message|>{{ m.content | tojson }}
{%- else %}<|start|>{{ m.role }}<|message|>{{ '' + m.content }}{% endif %}{% endfor %}"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ '' + m.content }}{% endfor %}"
TEMPLATES = {"hermes": QWEN, "llama3": LLAMA, "mistral": MISTRALS, "harmony": OSS, "ours": PLAIN}


def function_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def as_read(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages of a client, as their body has them"""
    body = bodies.read(ChatBody, {"messages": messages})
    return [message.model_dump(exclude_unset=True) for message in body.messages]


HISTORY = as_read(
    [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "and time?"}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Two calls.",
            "tool_calls": [
                function_call("call_a", "get_weather", '{"place": {"city": "Paris"}}'),
                function_call("call_b", "clock", ""),
            ],
        },
        {"role": "tool", "tool_call_id": "call_b", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_a", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": "Sunny, noon.", "tool_calls": []},
        {"role": "user", "content": "Thanks"},
    ]
)


def rendered(
    family: Family, messages: list[dict[str, Any]], tools: list[Tool], choice: Choice = "auto"
) -> str:
    found, shown = family.conversation(messages, tools, choice)
    told = with_content(found, TEMPLATES[family.name])
    return renderer(family.name).render({"messages": told, "tools": shown})


@cache
def renderer(name: str) -> Renderer:
    """One of a family, whose process is started once for all tests"""
    return Renderer(TEMPLATES[name])


def test_a_template_tells_its_family(default_model_metadata):
    assert {name: family_of(template).name for name, template in TEMPLATES.items()} == {
        n: n for n in TEMPLATES
    }
    assert family_of(MISTRALS + "[ARGS]") == MISTRAL_ARGS
    assert family_of(default_model_metadata["tokenizer.chat_template"]) == family_of(None) == OURS
    assert family_of("<|start_header_id|>{{ messages }}") == OURS  # Llama 3.0, which knows no tools


def test_hermes_has_calls_as_objects_and_results_in_their_role():
    text = rendered(HERMES, HISTORY, [CLOCK])
    assert text.startswith('{"type": "function", "function": {"name": "clock", "description": "The time"')
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text and "Weather\nand time?" in text
    assert '<think>Two calls.</think><tool_call>\n{"name": "get_weather", "arguments": {"place"' in text
    assert '{"name": "clock", "arguments": {}}' in text and "<|im_start|>tool\nsunny<|im_end|>" in text


@pytest.mark.parametrize("content", [None, ""])
def test_calls_without_a_word_beside_them_have_no_content_as_deepseeks_template_wants_it(content):
    message = {"role": "assistant", "content": content, "tool_calls": [function_call("a", "clock", "{}")]}
    ((told,), _) = HERMES.conversation([message], [CLOCK])
    template = "{% if messages[0]['content'] is none %}a call{% endif %}"
    assert with_content([told], template)[0]["content"] is None
    assert with_content([told], "{{ messages }}")[0]["content"] == ""
    either = (
        "{% if m['content'] is none or m['content'] == '' or m['content']|length == 0 %}"  # Ministral 3's
    )
    assert with_content([told], either)[0]["content"] == ""


def test_llamas_calls_come_one_by_one_each_with_its_result():
    found, _ = LLAMA3.conversation(HISTORY, [CLOCK])
    told = [(m["role"], m["content"] or m["tool_calls"][0]["function"]["name"]) for m in found[2:6]]
    assert told == [("assistant", "get_weather"), ("tool", "sunny"), ("assistant", "clock"), ("tool", "noon")]
    assert '{"name": "clock", "parameters": {}}' in rendered(LLAMA3, HISTORY, [CLOCK])


def test_the_calls_of_gpt_oss_come_one_by_one_with_what_was_thought_before():
    messages, tools = HARMONY.conversation(HISTORY, [CLOCK])
    text = renderer("harmony").render({"messages": with_thoughts(messages), "tools": tools})
    thought, first, result, second = text.split("<|start|>")[3:7]
    assert thought == "assistant<|channel|>analysis<|message|>Two calls.<|end|>"
    assert first == (
        'assistant to=functions.get_weather<|channel|>commentary json<|message|>{"place": {"city": "Paris"}}'
    )
    assert result == 'functions.get_weather to=assistant<|message|>"sunny"'
    assert second == "assistant to=functions.clock<|channel|>commentary json<|message|>{}"


def test_llama_loses_neither_what_is_said_beside_a_call_nor_a_result_of_none():
    calls = [function_call("a", "clock", "{}")]
    messages = [
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "content": "?"},
    ]
    found, _ = LLAMA3.conversation(messages)
    assert [message["content"] for message in found] == ["Well.", "", "?"]


@pytest.mark.parametrize("content", ["", "Well."])
def test_llama_keeps_the_reasoning_before_calls_once(content):
    calls = [function_call("a", "clock", "{}"), function_call("b", "clock", "{}")]
    message = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": calls}
    found, _ = LLAMA3.conversation([message])
    first, *others = [message.get("reasoning_content") for message in found]
    assert first == "Hm." and others == [None] * (len(found) - 1)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_from_before_there_were_tools_is_shown_as_one(name):
    call = {"name": "clock", "arguments": '{"zone": "UTC"}'}
    old = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "clock", "content": "noon"},
    ]
    new = [
        {"role": "assistant", "tool_calls": [{"id": None, "type": "function", "function": call}]},
        {"role": "tool", "name": "clock", "content": "noon"},
    ]
    text = rendered(FAMILIES[name], old, [CLOCK])
    assert text == rendered(FAMILIES[name], new, [CLOCK]) and '{"zone": "UTC"}' in text


def test_mistrals_ids_have_9_letters_and_still_belong_together():
    found, _ = MISTRAL.conversation(HISTORY)
    ids = [call["id"] for call in found[2]["tool_calls"]]
    assert [found[4]["tool_call_id"], found[3]["tool_call_id"]] == ids
    assert "[TOOL_RESULTS]noon" in rendered(MISTRAL, HISTORY, [CLOCK])
    kept = [{"role": "tool", "content": "", "tool_call_id": "abcDEF123"}]
    assert MISTRAL.conversation(kept)[0][0]["tool_call_id"] == "abcDEF123"


def test_a_template_without_tools_has_all_in_words(default_model_metadata):
    found, shown = OURS.conversation(HISTORY, [CLOCK, FLIGHT])
    assert shown is None and [message["role"] for message in found] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert found[0]["content"].startswith("Be brief.\n\n") and '"name": "travel__book"' in found[0]["content"]
    assert parts_of(OURS, found[2]["content"])[3:] == call(1, "clock", "{}")
    assert found[3]["content"].count("<tool_response>") == 2
    text = Tokenizer.from_gguf(default_model_metadata).apply_chat_template(found)
    assert "travel__book" in text and "sunny" in text and "Two calls." not in text


def test_a_template_that_refuses_system_messages_gets_ours_from_the_user():
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + PLAIN
    )
    family = family_of(template)
    for messages in (HISTORY, HISTORY[1:]):
        found, _ = family.conversation(messages, [CLOCK])
        text = Renderer(template).render({"messages": found})
        assert text.startswith("<user>") and '"clock"' in text and "Weather" in text
        assert [message["role"] for message in found] == ["user", "assistant", "user", "assistant", "user"]
    assert family.conversation([HISTORY[0]])[0] == [{"role": "user", "content": "Be brief."}]
    assert family.grammar([CLOCK], "required") == OURS.grammar([CLOCK], "required")


def test_a_conversation_without_a_system_message_gets_ours_before_it():
    found, _ = OURS.conversation(HISTORY[1:], [CLOCK])
    assert [message["role"] for message in found[:2]] == ["system", "user"]
    assert OURS.conversation(HISTORY[1:2], [])[0] == OURS.conversation(HISTORY[1:2], [CLOCK], "none")[0]


@pytest.mark.parametrize("family", [HERMES, LLAMA3, MISTRAL, HARMONY, OURS], ids=lambda family: family.name)
@pytest.mark.parametrize("arguments", ["{not json", "[1]", "3", "[" * 99999, '{"a": NaN}', {"a": 1}])
def test_whatever_arguments_a_client_sends_are_rendered(family, arguments):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [function_call("i", "f", arguments)]},
    ]
    assert isinstance(rendered(family, messages, []), str)


def test_a_custom_tools_call_is_written_with_its_input():
    calls = [{"id": "a", "type": "custom", "custom": {"name": "apply_patch", "input": 'say "a"\n'}}]
    (found,), _ = OURS.conversation([{"role": "assistant", "content": "Now.", "tool_calls": calls}])
    assert parts_of(OURS, found["content"]) == [("text", "Now.\n"), *call(0, "apply_patch", 'say "a"\n')]


@pytest.mark.parametrize(
    "message, found",
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content: a part must be.*image_url"),
        ({"role": "user", "content": 3}, ".content must be a text or a list of parts, but is 3"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, ".content: a part must be.*but is"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, ".tool_calls[0].function must be given"),
        ({"role": "assistant", "tool_calls": 3}, ".tool_calls must be a list, but is 3"),
        ({"role": []}, ".role must be 'system'.*but is []"),
        ("hi", " must be an object, but is 'hi'"),
        ({"role": "assistant", "tool_calls": [3]}, ".tool_calls[0] must be an object, but is 3"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message, found):
    pattern = re.escape(f"messages[0]{found}").replace(r"\.\*", ".*")
    with pytest.raises(RequestError, match=pattern):
        as_read([message])


def test_a_custom_tool_shows_its_grammar():
    tool = Tool("edit", "Edits", kind="custom", input_grammar=("lark", 'start: "x"'))
    _, (shown,) = HERMES.conversation(HISTORY, [tool])
    assert shown["function"]["description"] == 'Edits\nThe input has to follow this lark grammar:\nstart: "x"'
    assert shown["function"]["parameters"]["required"] == ["input"]


@pytest.mark.parametrize("name", ["", "a b", "é", "a.b", 'x"', "a\n", "a" * 129])
def test_names_that_are_none_are_refused(name):
    for make in (lambda: Tool(name), lambda: Tool("a", namespace=name)):
        with pytest.raises(RequestError, match="tools: a name must be 1 to 128 letters, digits, _ and -"):
            make()


@pytest.mark.parametrize(
    "tools, choice, found",
    [
        ([], "required", "tool_choice: a tool is to be called, but tools has none"),
        ([CLOCK], Named("cloc"), r"tool_choice: 'cloc' is to be called, but tools has \['clock'\]"),
        ([CLOCK, CLOCK], "auto", "'clock' is there 2 times"),
        ([Tool("b__c", namespace="a"), Tool("c", namespace="a__b")], "auto", "'a__b__c' is there 2 times"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(tools, choice, found):
    for ask in (lambda: HERMES.conversation(HISTORY, tools, choice), lambda: HERMES.grammar(tools, choice)):
        with pytest.raises(RequestError, match=found):
            ask()


# --- Forced calls -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(Vocabulary())


def calls_in(
    family: Family, text: str, tools: Iterable[Tool] = TOOLS, **options: bool
) -> list[tuple[Tool, Any]]:
    """The calls of a text that has nothing else but reasoning, with their arguments"""
    parts, _ = read(family, cut(text, 3), tools, **options)
    assert not [part for part in parts if isinstance(part, Text)]
    starts = {part.index: part.tool for part in parts if isinstance(part, CallStart)}
    texts = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == i) for i in starts]
    return [
        (tool, text if tool.kind == "custom" else json.loads(text))
        for tool, text in zip(starts.values(), texts, strict=True)
    ]


def walk(case: Case, matcher: Matcher, seed: int, beginning: str) -> str:
    """A text of tokens chosen by chance after the beginning"""
    for byte in beginning.encode():
        matcher.accept(byte)
    return beginning + case.walk(matcher, seed)


def check_arguments(tool: Tool, arguments: Any) -> None:
    if tool.kind == "function":
        jsonschema_rs.validate(dict(tool.parameters) or {"type": "object", "maxProperties": 0}, arguments)


@pytest.mark.parametrize("thinks", [False, True], ids=["", "thinks"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_whatever_a_model_chooses_required_calls_are_read_back_and_valid(case, family, thinks):
    params, warnings = family.grammar(TOOLS, "required", starts_in_reasoning=thinks)
    assert warnings == []
    matcher = case.compiler.compile(params)
    for seed in range(6):
        text = walk(case, matcher.copy(), seed, f"Hm.{family.thoughts[1]}\n\n" if thinks else "")
        found = calls_in(family, text, starts_in_reasoning=thinks)
        assert found
        for tool, arguments in found:
            check_arguments(tool, arguments)


@pytest.mark.parametrize(
    "family, tool", [*zip(FAMILIES.values(), [*TOOLS, SUM, WEATHER], strict=True)], ids=FAMILIES
)
def test_a_named_tool_is_called_once_where_calls_are_not_parallel(case, family, tool):
    params, _ = family.grammar(TOOLS, Named(tool.full_name), is_parallel=False)
    ((found, arguments),) = calls_in(family, case.walk(case.compiler.compile(params), 1))
    assert found == tool
    check_arguments(tool, arguments)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_calls_may_be_several_where_they_are_parallel(case, family):
    text = family.begin + family.between.join(f"{family.head % 'clock'}{{}}{family.tail}" for _ in range(3))
    for is_parallel in (True, False):
        params, _ = family.grammar([CLOCK], "required", is_parallel)
        assert case.accepts(text + family.end, grammar=params.grammar) == is_parallel
    assert len(calls_in(family, text + family.end)) == 3


@pytest.mark.parametrize(
    "choice, parallel, found",
    [
        ("auto", None, True),
        ("auto", False, False),
        ("required", None, False),
        ("required", True, True),
        (Named("clock"), None, False),
        (Named("clock"), True, False),
    ],
)
def test_forced_calls_are_several_only_where_that_is_asked_for(choice, parallel, found):
    assert Turn(params=SamplingParams(), choice=choice, parallel=parallel).is_parallel == found


STRUCTURES = {
    "a schema": (StructuredOutputsParams(json={"type": "object", "required": ["a"]}), '{"a":1}'),
    "an object": (StructuredOutputsParams(json_object=True), '{"b":2}'),
    "a choice": (StructuredOutputsParams(choice=["yes", "no"]), "no"),
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("tools", [[], [CLOCK]], ids=["no tools", "a tool"])
def test_a_structure_follows_the_reasoning_that_a_prompt_has_begun(name, tools, case):
    structure, text = STRUCTURES[name]
    turn = Turn(params=SamplingParams(structured_outputs=structure), tools=tuple(tools))
    params = enforced(turn, HERMES, starts_in_reasoning=True).structured_outputs
    call = f"<tool_call>\n{CLOCK_CALL}\n</tool_call>"
    assert case.accepts(f"hm</think>\n\n{text}", grammar=params.grammar)
    assert case.accepts(f"hm</think>\n\n{call}", grammar=params.grammar) == bool(tools)
    assert not case.accepts(f"hm</think>\n\n{text}{call}", grammar=params.grammar)
    assert not case.accepts("hm</think>\n\nmaybe", grammar=params.grammar)


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_a_structure_that_no_call_can_stand_beside_is_kept(kind):
    structure = StructuredOutputsParams(**{kind: "a+" if kind == "regex" else "start: /a+/"})
    assert HERMES.beside(structure, [CLOCK]) == (structure, [])


def test_a_schema_without_all_its_keywords_still_makes_objects(case):
    tool = Tool("f", parameters={"properties": {"a": {"type": "integer"}}})
    params, _ = HERMES.grammar([tool], "required", is_parallel=False)
    assert case.accepts(
        '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>', grammar=params.grammar
    )
    assert not case.accepts(
        '<tool_call>\n{"name": "f", "arguments": {"b":1}}\n</tool_call>', grammar=params.grammar
    )
    assert not case.accepts(
        '<tool_call>\n{"name": "f", "arguments": 1}\n</tool_call>', grammar=params.grammar
    )


def test_a_property_that_is_required_but_not_described_may_be_anything(case):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}
    params, _ = HERMES.grammar([Tool("f", parameters=schema)], "required")
    for arguments, is_good in (('{"a":1,"b":"x"}', True), ('{"a":1}', False)):
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert case.accepts(call, grammar=params.grammar) == is_good


def test_properties_that_a_schema_allows_beside_its_own_stay_allowed(case):
    schema = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
    params, _ = HERMES.grammar([Tool("f", parameters=schema)], "required")
    assert case.accepts(
        '<tool_call>\n{"name": "f", "arguments": {"b":1}}\n</tool_call>', grammar=params.grammar
    )


UNENFORCEABLE = {
    "a keyword": ({"properties": {"a": {"not": {"type": "string"}}}}, r"'bad' cannot be enforced: .*not"),
    "a pattern": (
        {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
        "'bad' cannot be enforced: .*look-ahead",
    ),
    "a count": ({"type": "object", "minProperties": 3}, "'bad' cannot be enforced: minProperties"),
    "its type": (
        {"type": "array"},
        "'bad' cannot be enforced: their type is 'array', but arguments are an 'object'",
    ),
    "ours": ({"x-guidance": {}}, "'bad' cannot be enforced: 'x-guidance'"),
    "nothing fits": ({"properties": {"a": False}, "required": ["a"]}, "'bad' cannot be enforced"),
    "size": ({"properties": {f"p{i}": {} for i in range(40_000)}}, "characters"),
}


@pytest.mark.parametrize("schema, found", UNENFORCEABLE.values(), ids=UNENFORCEABLE)
def test_a_schema_that_cannot_be_enforced_is_refused_where_calls_are_forced_and_a_warning_otherwise(
    schema, found
):
    tools = [CLOCK, Tool("bad", parameters=schema, is_strict=True)]
    with pytest.raises(RequestError, match=f"{found}.*let tool_choice be 'auto'"):
        HERMES.grammar(tools, "required")
    params, (warning,) = HERMES.grammar(tools, "auto")
    assert params is None and re.search(found, warning)


def test_a_tool_that_is_not_strict_is_forced_without_what_cannot_be_enforced(case):
    tags = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
    tool = Tool("f", parameters={"type": "object", "properties": {"tags": tags}, "required": ["tags"]})
    params, (warning,) = HERMES.grammar([CLOCK, tool], Named("f"))
    assert warning == "tools: 'f' is not held to uniqueItems"
    for tags, is_good in (('["a","a"]', True), ('["c"]', False)):
        call = f'<tool_call>\n{{"name": "f", "arguments": {{"tags":{tags}}}}}\n</tool_call>'
        assert case.accepts(call, grammar=params.grammar) == is_good
    with pytest.raises(RequestError, match="'f' cannot be enforced: leave out .*uniqueItems"):
        HERMES.grammar([CLOCK, replace(tool, is_strict=True)], "required")


def test_a_lark_grammar_of_a_custom_tool_is_not_enforced_but_a_regex_is(case):
    lark = Tool("edit", kind="custom", input_grammar=("lark", 'start: "x"'))
    with pytest.raises(RequestError, match="'edit' cannot be enforced: a 'lark' grammar"):
        HERMES.grammar([lark], "required")
    regex = Tool("edit", kind="custom", input_grammar=("regex", "[a-c]{3}"))
    params, _ = HERMES.grammar([regex], Named("edit"), is_parallel=False)
    ((_, text),) = calls_in(HERMES, case.walk(case.compiler.compile(params), 2), [regex])
    assert re.fullmatch("[a-c]{3}", text)


def test_free_calls_are_not_held_to_anything_unless_a_tool_is_strict():
    for family in FAMILIES.values():
        assert family.grammar(TOOLS, "auto") == family.grammar(TOOLS, "none") == (None, [])


@pytest.mark.parametrize("family", [HERMES, OURS], ids=["hermes", "ours"])
def test_strict_tools_are_held_to_their_schemas_where_calls_are_free(case, family):
    tools = [replace(SUM, is_strict=True), PATCH, Tool("bad", parameters={"not": {}}, is_strict=True)]
    params, (warning,) = family.grammar(tools, "auto")
    assert "'bad' cannot be enforced" in warning

    def is_taken(text: str) -> bool:
        return case.accepts(text, grammar=params.grammar)

    def sum_of(numbers: str) -> str:
        return f'<tool_call>\n{{"name": "add-numbers", "arguments": {{"numbers":{numbers}}}}}\n</tool_call>'

    assert is_taken("Just a <tool> and {text}.") and is_taken("")
    assert is_taken(f"Well. {sum_of('[1,2]')}\n{sum_of('[3,4]')} So.") and not is_taken(sum_of("[1]"))
    assert is_taken('<tool_call>\n{"name": "bad", "arguments": {"x":1}}\n</tool_call>')
    assert is_taken('<tool_call>\n{"name": "apply_patch", "arguments": {"input":"a"}}\n</tool_call>')
    assert not is_taken('<tool_call>\n{"name": "apply_patch", "arguments": {"b":"a"}}\n</tool_call>')
    one, _ = family.grammar(tools, "auto", is_parallel=False)
    assert not case.accepts(sum_of("[1,2]") * 2, grammar=one.grammar)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_tool_that_is_not_allowed_is_ruled_out_by_the_grammar_or_not_shown(case, family):
    turn = Turn(params=SamplingParams(), messages=QUESTION, tools=(CLOCK, SUM), allowed=frozenset({"clock"}))
    assert turn.called == (CLOCK,)
    if family.is_marked_by_text:
        grammar = enforced(turn, family, starts_in_reasoning=False).structured_outputs.grammar
        call = '{"name": "%s", "arguments": {"numbers":[1,2]}}'
        texts = [f"So. <tool_call>\n{call % name}\n</tool_call>" for name in ("clock", "add-numbers")]
        assert [case.accepts(text, grammar=grammar) for text in ("So.", *texts)] == [True, True, False]
    tokenizer = Shown()
    encode(turn, tokenizer, family)
    assert ("add-numbers" in tokenizer.shown) == family.is_marked_by_text


class Shown:
    """What a template would be given"""

    def encode_chat(self, messages, max_tokens=None, tools=None):
        self.shown = json.dumps([messages, tools])
        return []


@pytest.mark.parametrize("family", [LLAMA3, MISTRAL, MISTRAL_ARGS], ids=["llama3", "mistral", "args"])
def test_strict_tools_that_are_not_held_to_it_are_told(family):
    params, (warning,) = family.grammar([CLOCK, replace(SUM, is_strict=True)], "auto")
    assert params is None and "'add-numbers' is strict, but not enforced" in warning


# --- The default model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(default_model_path) -> LLM:
    return LLM(default_model_path)


QUESTION = [{"role": "user", "content": "What is the weather in Paris, and 2 plus 3?"}]


def answer(llm: LLM, choice: Choice, **sampling: Any) -> tuple[Tool, Any]:
    """The one call that is made of a question"""
    family = family_of(llm.tokenizer.chat_template)
    messages, shown = family.conversation(QUESTION, TOOLS[:4], choice)
    forced, _ = family.grammar(TOOLS[:4], choice, is_parallel=False)
    params = SamplingParams(max_tokens=200, structured_outputs=forced, **sampling)
    (output,) = llm.chat(messages, params, tools=shown)
    assert output.outputs[0].finish_reason == "stop"
    (found,) = calls_in(family, output.outputs[0].text)
    return found


@pytest.mark.parametrize("tool", [WEATHER, SUM, FLIGHT], ids=lambda tool: tool.name)
def test_the_default_model_calls_a_named_tool_with_valid_arguments(llm, tool):
    found, arguments = answer(llm, Named(tool.full_name), temperature=1, seed=7)
    assert found == tool
    check_arguments(tool, arguments)


def test_the_default_model_makes_a_required_call_that_is_valid(llm):
    check_arguments(*answer(llm, "required", temperature=0))
