"""Whatever a model chooses among the allowed tokens, the text is what was asked for; the rest is refused."""

from __future__ import annotations

import gc
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from torch import Tensor

from infinilm.engine.grammar import PROGRAM, GrammarCompiler, Matcher, check_enforceable
from infinilm.engine.grammar_schema import closed, loosened
from infinilm.engine.grammar_trial import COMPILE_STACK, SURVIVED, call_with_stack
from infinilm.engine.request import RequestError
from infinilm.sampling import StructuredOutputsParams
from infinilm.tokenizer import Tokenizer


class Tiny:
    """A vocabulary of bytes, some longer tokens, an end of text, a special token and a hole."""

    def __init__(self) -> None:
        longer = ['{"', '":', '", "', "ab", "b12", "true", "}\n", "é", "\n\n", "<|im", '"}', "\\u00"]
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [text.encode() for text in longer] + [b"<|end|>", b"<|start|>", b""]
        self.vocab_size = len(self.tokens)
        self.special_token_ids = frozenset((self.vocab_size - 3, self.vocab_size - 2))
        self.eos_token_ids = (self.vocab_size - 3,)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < self.vocab_size else b""

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        return list(text.encode())


class Case:
    """A tokenizer and its compiler, for a model with some rows more than it has tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size + 40
        self.ends = list(tokenizer.eos_token_ids)
        self.compiler = GrammarCompiler(tokenizer, self.vocab_size, tokenizer.eos_token_ids)
        tokens = [tokenizer.token_bytes(i) for i in range((self.vocab_size + 31) // 32 * 32)]
        self.closing = [i for i, token in enumerate(tokens) if token in (b'"', b"}", b"]", b":")]
        self.are_ends = np.isin(np.arange(len(tokens)), self.ends)
        are_special = np.isin(np.arange(len(tokens)), list(tokenizer.special_token_ids))
        self.are_good = np.array(list(map(bool, tokens))) & ~are_special | self.are_ends

    def compile(self, **wanted: Any) -> Matcher:
        return self.compiler.compile(StructuredOutputsParams(**wanted))

    def allowed(self, matcher: Matcher) -> list[int]:
        return tokens_in(matcher.mask())

    def follow(self, matcher: Matcher, text: str) -> bool:
        """Whether the text is one that may end here, taken byte by byte; RequestError if it cannot be."""
        for byte in text.encode():
            (token_id,) = (i for i in range(300) if self.tokenizer.token_bytes(i) == bytes([byte]))
            matcher.accept(token_id)
        return self.ends[0] in self.allowed(matcher)

    def accepts(self, text: str, **wanted: Any) -> bool:
        try:
            return self.follow(self.compile(**wanted), text)
        except RequestError:
            return False

    def walk(self, matcher: Matcher, seed: int) -> str:
        """The text of tokens chosen by chance; after a while those that close something come first."""
        choice, found = random.Random(seed), []
        for step in range(400):
            allowed = flags_in(matcher.mask())
            assert not allowed[~self.are_good].any()
            can_end, texts = allowed[self.ends].all(), np.flatnonzero(allowed & ~self.are_ends)
            if not len(texts) or (can_end and choice.random() < 0.2 + step / 100):
                matcher.accept(choice.choice(self.ends))
                assert matcher.is_finished
                return b"".join(map(self.tokenizer.token_bytes, found)).decode()
            assert not matcher.is_finished
            closing = [i for i in self.closing if allowed[i]] if step > 25 else []
            found.append(int(choice.choice(closing or texts)))
            matcher.accept(found[-1])
        raise AssertionError("a text without end")


def flags_in(words: Tensor) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.unpackbits(words.numpy().view(np.uint8), bitorder="little").astype(bool)


def tokens_in(words: Tensor) -> list[int]:
    return [int(token_id) for token_id in np.flatnonzero(flags_in(words))]


@pytest.fixture(scope="module")
def tiny() -> Case:
    return Case(Tiny())


@pytest.fixture(scope="module", params=["tiny", "real"])
def case(request: pytest.FixtureRequest, default_model_metadata: Any, tiny: Case) -> Case:
    return tiny if request.param == "tiny" else Case(Tokenizer.from_gguf(default_model_metadata))


# --- JSON ---------------------------------------------------------------------------------------------------


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_tree(value: Any) -> bool:
    return (
        value.keys() == {"children"} and len(value["children"]) <= 2 and all(map(is_tree, value["children"]))
    )


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
            "required": ["children"],
            "additionalProperties": False,
        }
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    tags = value.get("tags", ["a"])
    is_whole = {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
    is_good = 2 <= len(value["name"]) <= 8 and is_int(value["age"]) and 0 <= value["age"] <= 130
    return is_whole and is_good and 1 <= len(tags) <= 3 and set(tags) <= {"a", "b"}


SCHEMAS: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    (PERSON, is_person),
    (TREE, is_tree),
    ({"enum": ["é", 3, None, {"a": [True]}]}, lambda v: v in ("é", 3, None, {"a": [True]})),
    ({"const": 'say "\\hi"\n'}, lambda v: v == 'say "\\hi"\n'),
    ({"type": "integer", "minimum": -5, "exclusiveMaximum": 12}, lambda v: is_int(v) and -5 <= v < 12),
    ({"type": "integer", "multipleOf": 7}, lambda v: is_int(v) and v % 7 == 0),
    ({"type": "number", "minimum": 0.5, "maximum": 2.25}, lambda v: 0.5 <= v <= 2.25),
    ({"type": "string", "pattern": "^a[bc]{2,4}$"}, lambda v: bool(re.fullmatch("a[bc]{2,4}", v))),
    ({"type": "string", "format": "date"}, lambda v: bool(re.fullmatch(r"\d{4}-\d\d-\d\d", v))),
    ({"type": "integer", "minimum": 2**63 - 1024, "maximum": 2**63 - 1}, lambda v: -1024 <= v - 2**63 < 0),
    ({"type": ["boolean", "null"]}, lambda v: v in (True, False, None)),
    (
        {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "boolean"}},
        lambda v: 2 <= len(v) <= 3,
    ),
    (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": False, "minItems": 2},
        lambda v: v == [1, "x"],
    ),
    ({"anyOf": [{"const": 1}, {"type": "boolean"}]}, lambda v: v in (1, True, False)),
    ({"oneOf": [{"type": "null"}, {"const": "x"}]}, lambda v: v in (None, "x")),
    (
        {"allOf": [{"type": "string", "minLength": 3}, {"maxLength": 4}]},
        lambda v: isinstance(v, str) and 3 <= len(v) <= 4,
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "string", "maxLength": 3},
            "maxProperties": 3,
            "required": ["a"],
        },
        lambda v: is_int(v["a"]) and all(isinstance(v[key], str) for key in v.keys() - {"a"}),
    ),
    (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "maxProperties": 1},
        lambda v: v in ({}, {"a": 1}, {"b": 2}),
    ),
    (
        {"type": "object", "patternProperties": {"^x[0-9]$": {"const": 0}}, "additionalProperties": False},
        lambda v: all(re.fullmatch("x[0-9]", key) and v[key] == 0 for key in v),
    ),
]


@pytest.mark.parametrize(
    "schema, is_good", SCHEMAS, ids=lambda value: "" if callable(value) else str(value)[:40]
)
def test_any_choice_of_allowed_tokens_is_json_of_the_schema(
    case: Case, schema: dict[str, Any], is_good: Callable[[Any], bool]
) -> None:
    matcher = case.compile(json=schema)
    for seed in range(8):
        text = case.walk(matcher.copy(), seed)
        assert is_good(json.loads(text)), text


def test_json_object_is_any_object(case: Case) -> None:
    matcher = case.compile(json_object=True)
    for seed in range(12):
        assert isinstance(json.loads(case.walk(matcher.copy(), seed)), dict)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 3}},
        {"type": "array", "contains": {"const": 1}},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {}}},
        {"unevaluatedProperties": False},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"type": "object", "minProperties": 2},
        {"properties": {"default": {"type": "object", "minProperties": 2}}},
        {"type": "object", "required": ["a", "a"], "minProperties": 2},
        {"type": "object", "minProperties": 2.0},
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
        {"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}}},
        {"x-guidance": {"lenient": True}, "uniqueItems": True},
        {"$ref": "http://localhost/schema.json"},
        {"$ref": "file:///etc/hostname"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"type": "unknown"},
        {"type": 5},
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "maxLength": -1},
        {"type": "string", "maxLength": 2**63},
        {"enum": [{"a": [12345678901234567890]}]},
        {"const": 2**53 + 1},
        {"type": "integer", "maximum": 2**53 + 1},
        {"const": "a\x01b"},
        {"enum": ["a", {"b": ["\x7f"]}]},
        {"type": "string", "pattern": r"^a\x01b$"},
        {"type": "object", "patternProperties": 5},
        {"items": {"properties": {"a": {"uniqueItems": True}}}},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_enforced_is_refused(tiny: Case, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs\.json cannot be enforced: ."):
        tiny.compile(json=schema)


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        ({"type": "string", "format": "path", "maxLength": 3}, '"a/b"', '"a/bc"'),
        ({"anyOf": [{"type": "string", "format": "password"}, {"type": "null"}]}, '"x"', "5"),
        ({"format": "date", "type": "string"}, '"2026-01-31"', '"2026-01-32"'),
        (
            {"properties": {"format": {"format": "binary", "pattern": "^a$"}}},
            '{"format":"a"}',
            '{"format":"b"}',
        ),
        ({"const": {"format": "path", "uniqueItems": False}}, '{"format":"path","uniqueItems":false}', "{}"),
        ({"additionalProperties": {"const": 1}, "propertyNames": {"type": "string"}}, '{"a":1}', '{"a":2}'),
        ({"items": {"const": 1}, "uniqueItems": False}, "[1,1]", "[2]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_keywords_that_ask_for_nothing_are_left_out_and_the_others_hold(
    tiny: Case, schema: dict[str, Any], good: str, bad: str
) -> None:
    assert tiny.accepts(good, json=schema) and not tiny.accepts(bad, json=schema)


def test_what_is_loosened_holds_all_that_can_be_and_names_the_rest(tiny: Case) -> None:
    entry = {"type": "string", "pattern": "^(?!a)b$", "maxLength": 2, "not": {"const": "b"}, "enum": ["\0"]}
    tags = {"type": "array", "items": entry, "uniqueItems": True, "propertyNames": {"type": "string"}}
    some = {"oneOf": [{"$ref": "#/$defs/tags"}, {"type": ["array", "null"], "maxItems": 0}]}
    schema = {"properties": {"not": some}, "required": ["not"], "minProperties": 2, "$defs": {"tags": tags}}
    loose, dropped = loosened(schema)
    assert dropped == ["enum", "minProperties", "not", "pattern", "uniqueItems"] and "uniqueItems" in tags
    assert tiny.accepts('{"not":["xy","xy"]}', json=loose) and tiny.accepts('{"not":null}', json=loose)
    assert not tiny.accepts('{"not":["xyz"]}', json=loose) and not tiny.accepts("{}", json=loose)


def test_what_is_loosened_keeps_what_references_lead_through(tiny: Case) -> None:
    either = {"oneOf": [{"type": "integer"}, {"type": "string"}], "not": {}}
    loose, dropped = loosened({"properties": {"a": either, "b": {"$ref": "#/properties/a/oneOf/0"}}})
    assert dropped == ["not"]
    assert tiny.accepts('{"a":"x","b":1}', json=loose) and not tiny.accepts('{"a":"x","b":"y"}', json=loose)


A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
ONLY_A = {**A, "additionalProperties": False}
DEFINED = {"$ref": "#/$defs/a"}
TO_CLOSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an object": (A, ONLY_A),
    "an object in another": (
        {"properties": {"b": A}, "additionalProperties": False},
        {"properties": {"b": ONLY_A}, "additionalProperties": False},
    ),
    "items": ({"items": A}, {"items": ONLY_A}),
    "alternatives": ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [ONLY_A, {"type": "null"}]}),
    "definitions": (
        {"items": DEFINED, "$defs": {"a": A}},
        {"items": DEFINED, "$defs": {"a": ONLY_A}},
    ),
}
LEFT_OPEN: dict[str, dict[str, Any]] = {
    "what says so": {**A, "additionalProperties": {}},
    "what needs more": {**A, "required": ["b"]},
    "several at once": {"allOf": [A, {"properties": {"b": {}}}]},
    "one of several": {"oneOf": [A, {"properties": {"b": {}}}]},
    "a definition that is gone on from": {
        "items": {**DEFINED, "properties": {"b": {}}},
        "$defs": {"a": A},
    },
    "an alternative beside more": {"items": {"items": {}, "anyOf": [{"items": A}]}},
}


@pytest.mark.parametrize("schema, wanted", TO_CLOSE.values(), ids=TO_CLOSE)
def test_what_is_closed_has_no_properties_that_are_not_named(
    schema: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert closed(schema) == wanted


@pytest.mark.parametrize("schema", LEFT_OPEN.values(), ids=LEFT_OPEN)
def test_what_is_closed_keeps_properties_that_others_may_name(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_control_characters_that_have_a_short_escape_are_written_by_it(tiny: Case) -> None:
    assert tiny.accepts(r'"a\n\tb"', json={"const": "a\n\tb"})
    assert not tiny.accepts('"ab"', json={"const": "a\n\tb"})


def test_a_class_of_characters_may_have_some_that_json_has_no_short_escape_for(tiny: Case) -> None:
    schema = {"type": "string", "pattern": r"^[^\x00-\x1f]+$"}
    assert tiny.accepts('"ab"', json=schema) and not tiny.accepts('""', json=schema)


def test_a_key_cannot_be_written_in_a_second_way_to_evade_its_schema(tiny: Case) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert tiny.accepts('{"a":1,"b":"x"}', json=schema)
    assert not tiny.accepts('{"a":1,"\\u0061":"x"}', json=schema)
    assert not tiny.accepts('{"a":1,"a":"x"}', json=schema)


@pytest.mark.parametrize(
    "text, is_good",
    [('{"a":1}', True), ('{ "a": 1 }', True), ('{\n  "a": 1\n}', True), ("{\r\n}", True), (" {}", False)]
    + [("{\n\n}", False), ("{     }", False), ("{}\n", False), ("{\n" + " " * 65 + "}", False)],
    ids=ascii,
)
def test_whitespace_is_bounded(tiny: Case, text: str, is_good: bool) -> None:
    assert tiny.accepts(text, json_object=True) == is_good


# --- Others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "regex",
    ["ab*c?", "^[a-c]{2,5}$", "(ab|12)+", r"\d{3}-\d{4}", "é|ab12", r"x/y\n\"", r"<\|end\|>|<\|im_end\|>"],
)
def test_a_text_matches_all_of_its_regular_expression(case: Case, regex: str) -> None:
    matcher = case.compile(regex=regex)
    for seed in range(8):
        assert re.fullmatch(regex, case.walk(matcher.copy(), seed))


@pytest.mark.parametrize(
    "regex, good, bad",
    [
        (r"\d+", "12", "1٢"),
        (r"\w+", "a_1", "aé"),
        (r"[^\W\d]", "_", "é"),
        (r"[\d.-]+", "1.-2", "١"),
        (r"\D\W", "é٣", "1é"),
        (r"\\d", r"\d", "1"),
    ],
)
def test_digits_and_letters_of_a_regular_expression_are_those_of_ascii(
    tiny: Case, regex: str, good: str, bad: str
) -> None:
    assert tiny.accepts(good, regex=regex) and not tiny.accepts(bad, regex=regex)


CHOICES = ["a", "ab", "ab12", "é 😀", 'q"\\', "l1\nl2", "\x01", "<|im_end|>", "start: x"]


def test_a_choice_is_one_of_the_list_and_any_of_it(case: Case) -> None:
    choices = [text for text in CHOICES if case.vocab_size < 1000 or text != "\x01"]
    matcher = case.compile(choice=choices)
    found = {case.walk(matcher.copy(), seed) for seed in range(60)}
    assert found <= set(choices) and len(found) > len(choices) / 2
    assert all(
        case.walk(case.compile(choice=[text]), 0) == text for text in choices if text not in ("a", "ab")
    )


def test_every_choice_can_be_made(tiny: Case) -> None:
    assert all(tiny.accepts(text, choice=CHOICES) for text in CHOICES)
    assert not tiny.accepts("ab1", choice=CHOICES)


def test_a_grammar_is_llguidances_lark(case: Case) -> None:
    grammar = 'start: "(" inner ")"\ninner: start | /[0-9]{1,3}/'
    for seed in range(8):
        text = case.walk(case.compile(grammar=grammar), seed)
        assert text.count("(") == text.count(")") and text.strip("()").isdigit()


@pytest.mark.parametrize(
    "kind, text",
    [
        ("regex", "("),
        ("regex", r"(a)\1"),
        ("regex", r"\bword\b"),
        ("regex", "a$b"),
        ("regex", r"[^\s\S]"),
        ("grammar", "%%%"),
        ("grammar", "start: undefined"),
        ("grammar", "start: start"),
        ("grammar", "start: <|start|>"),
        ("grammar", "start: <[270]>"),
        ("grammar", "start: <[310]>"),
        ("grammar", '{"grammars": [{"lark_grammar": "start: /a/"}]}'),
        ("grammar", 'start: %json {"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}'),
    ],
)
def test_what_is_no_regular_expression_or_grammar_of_text_is_refused(
    tiny: Case, kind: str, text: str
) -> None:
    with pytest.raises(RequestError, match=rf"^structured_outputs\.{kind}"):
        tiny.compile(**{kind: text})


def test_an_error_names_what_cannot_be_and_is_short(tiny: Case) -> None:
    with pytest.raises(RequestError, match="uniqueItems"):
        tiny.compile(json={"type": "array", "uniqueItems": True})
    with pytest.raises(RequestError) as refusal:
        tiny.compile(regex="(" * 10_000)
    assert len(str(refusal.value)) < 400 and "<" not in str(refusal.value)


# --- The matcher --------------------------------------------------------------------------------------------


def test_the_end_is_allowed_exactly_where_the_text_may_end(tiny: Case) -> None:
    matcher, found = tiny.compile(regex="ab?"), []
    for token_id in b"ab":
        found.append((tiny.ends[0] in tiny.allowed(matcher), matcher.is_finished))
        matcher.accept(token_id)
    assert found == [(False, False), (True, False)]
    assert matcher.is_finished and tiny.allowed(matcher) == tiny.ends


def test_every_end_of_text_token_is_one(tiny: Case) -> None:
    compiler = GrammarCompiler(tiny.tokenizer, tiny.vocab_size, (ord("z"), *tiny.ends, 10**9))
    matcher = compiler.compile(StructuredOutputsParams(regex="[a-z]*"))
    assert {ord("z"), *tiny.ends} <= set(tiny.allowed(matcher))
    matcher.accept(ord("z"))  # which is no letter here
    assert matcher.is_finished


def test_without_an_end_of_text_token_no_text_can_be_complete(tiny: Case) -> None:
    compiler = GrammarCompiler(tiny.tokenizer, tiny.vocab_size, ())
    with pytest.raises(RequestError, match="an end of text"):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_a_token_that_was_not_allowed_is_refused_and_so_is_all_after_it(tiny: Case) -> None:
    matcher = tiny.compile(regex="ab")
    for _ in range(2):
        with pytest.raises(RequestError):
            matcher.accept(ord("x"))
    with pytest.raises(RequestError):
        tiny.allowed(matcher)


def test_a_copy_goes_its_own_way(tiny: Case) -> None:
    matcher = tiny.compile(regex="ab|cd")
    copy = matcher.copy()
    matcher.accept(ord("a"))
    copy.accept(ord("c"))
    assert (tiny.allowed(matcher), tiny.allowed(copy)) == ([ord("b")], [ord("d")])


def test_other_threads_run_while_a_mask_is_computed(tiny: Case) -> None:
    matcher, seen, go = tiny.compile(regex=r"(.*a.{20}){3}"), threading.Event(), threading.Event()
    words = matcher.no_token
    other = threading.Thread(target=lambda: go.wait() and seen.set())
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here on a thread runs until it lets others do so
    try:
        go.set()
        end = time.monotonic() + 20
        while not seen.is_set() and time.monotonic() < end:
            matcher._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
        was_seen = seen.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert was_seen


def test_threads_have_the_stacks_they_had_however_many_grammars_are_compiled_at_once() -> None:
    def call() -> None:
        for _ in range(50):
            call_with_stack(COMPILE_STACK, lambda: None)

    before = threading.stack_size()
    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert threading.stack_size() == before


# --- Grammars that ask for too much -------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


RULES = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} | "x"' for i in range(8000)) + '\nr8000: "a"'


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param({"grammar": RULES}, id="rules nested by the thousand"),
        pytest.param({"grammar": "start: " + "(" * 50_000}, id="parentheses"),
        pytest.param({"regex": "(" * 5000 + "a" + ")" * 5000}, id="groups"),
        pytest.param({"json": nested(400)}, id="arrays"),
        pytest.param({"json": {"allOf": [{"pattern": f"a{i}"} for i in range(500)]}}, id="intersections"),
        pytest.param({"json": {"patternProperties": {f"^a{{{i}}}$": {} for i in range(300)}}}, id="patterns"),
        pytest.param({"json": {"minItems": 10**30, "type": "array"}}, id="items"),
    ],
)
def test_a_grammar_that_takes_too_much_is_refused(tiny: Case, wanted: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs\..* cannot be enforced: ."):
        tiny.compile(**wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "(a+)+b"},
        {"regex": "(a|a)*(a|a)*(a|a)*b"},
        {"regex": "(a|b)*a(a|b){50}"},
        {"regex": "(.*a.{20}){3}"},
        {"regex": ".{1,100000}"},
        {"regex": "(.{1,1000}){1,1000}"},
        {"regex": "a{1000000000}"},
        {"grammar": 'start: e\ne: e e | "a" | e e e'},
        {"grammar": 'start: "a"{1000000000}'},
        {"json": {"type": "string", "minLength": 10**9}},
        {"json": {"type": "array", "minItems": 10**9, "items": {"const": 0}}},
        {"json": {"type": "object", "properties": {f"p{i}": {"const": i} for i in range(300)}}},
    ],
    ids=str,
)
def test_steps_of_a_hard_grammar_take_bounded_time_or_end_it(tiny: Case, wanted: dict[str, Any]) -> None:
    start = time.thread_time()
    try:
        matcher = tiny.compile(**wanted)
        for step in range(30):
            texts = [i for i in tiny.allowed(matcher) if i not in tiny.ends]
            if not texts:
                break
            matcher.accept(texts[step * 7 % len(texts)])
    except RequestError:
        pass
    assert time.thread_time() - start < 10


def test_a_grammar_is_tried_out_once(tiny: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.compile(regex="once")
    monkeypatch.setattr("infinilm.engine.grammar.PROGRAM", "there is no such program")
    tiny.compile(regex="once")
    with pytest.raises(RuntimeError, match="ended with status"):
        tiny.compile(regex="another")


def modules_of_a_trial(*places: str) -> str:
    """What a trial says of the modules that it imports, which it finds there"""
    command = [sys.executable, "-X", "importtime", "-I", "-S", PROGRAM, *places]
    trial = subprocess.run(command, input=b'start: "a"', capture_output=True)
    assert trial.stdout == SURVIVED, trial.stderr
    return trial.stderr.decode()


def test_a_trial_imports_no_more_of_llguidance_than_it_needs() -> None:
    assert "importlib.metadata" not in modules_of_a_trial(*sys.path)


def test_a_trial_imports_all_of_llguidance_where_its_library_has_another_place(tmp_path: Path) -> None:
    (tmp_path / "llguidance/inner").mkdir(parents=True)
    (tmp_path / "llguidance/__init__.py").write_text("from llguidance.inner._lib import *")
    library = Path(llguidance._lib.__file__)
    (tmp_path / "llguidance/inner" / library.name).symlink_to(library)
    assert "llguidance.inner._lib" in modules_of_a_trial(str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_that_others_ended_is_no_fault_of_the_grammar_and_made_again(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "trial.py").write_text(f"import os; os.kill(os.getpid(), {number})")
    wanted = StructuredOutputsParams(regex=f"ended by {number}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinilm.engine.grammar.PROGRAM", str(tmp_path / "trial.py"))
        with pytest.raises(RuntimeError, match=f"ended with status -{number}"):
            check_enforceable(wanted)
    check_enforceable(wanted)


def test_a_trial_that_was_killed_is_none_where_nobody_tells_how_children_end(
    tiny: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trial.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr("infinilm.engine.grammar.PROGRAM", str(tmp_path / "trial.py"))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RequestError, match="to compile; make it smaller"):
            tiny.compile(regex="killed")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_thread_that_cannot_start_is_no_fault_of_the_grammar(
    tiny: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tiny.compile(regex="threads")
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        tiny.compile(regex="threads")


# Each child is forked while another thread begins threads with stacks of their own.
FORKING = """
import os, signal, threading
from infinilm.engine.grammar_trial import call_with_stack

def keep_busy():
    while True:
        call_with_stack(1 << 20, int)

threading.Thread(target=keep_busy, daemon=True).start()
for _ in range(8):
    if os.fork() == 0:
        signal.alarm(60)
        os._exit(call_with_stack(1 << 20, threading.stack_size))
    print(os.wait()[1])
"""


def test_a_fork_leaves_no_child_waiting_for_a_thread_of_its_parent() -> None:
    child = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=120)
    assert child.stdout.split() == ["0"] * 8, child.stderr


def test_a_tokenizer_goes_with_the_compiler_that_was_made_for_it() -> None:
    case = Case(Tiny())
    case.compile(choice=["ab"])
    tokenizer = weakref.ref(case.tokenizer)
    del case
    gc.collect()
    assert tokenizer() is None
