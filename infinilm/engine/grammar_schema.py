"""JSON schemas, before llguidance has them: what it would take but not enforce, and what says nothing"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any

import llguidance

# Each is compared with every other, a fifth of a millisecond a pair.
MAX_PATTERN_PROPERTIES = 64
# Keywords of schemas under which there are others by name, those under which there is data, and those that
# llguidance does not implement.
NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
DATA = {"const", "enum", "default", "examples"}
UNKNOWN_KEYWORDS = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
# Keywords by which an object may have properties that are not named, and all that are about parts of a text.
OPENING = {"additionalProperties", "patternProperties", "minProperties"}
OF_PARTS = OPENING | {"properties", "required", "items"}
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
# Characters without a short escape in JSON: where \u is not written, llguidance leaves them out of a text.
UNSPELLED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
UNSPELLED_PATTERN = re.compile(UNSPELLED.pattern + r"|\\(?:x|u00)(?:0[0-7bef]|1[0-9a-f]|7f)", re.IGNORECASE)
CHARACTER_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
UNKNOWN_PATTERN = re.compile(r"\(\?<?[=!]|\\[bB1-9]")  # looks around, or back at what was found


def check_schema(schema: dict[str, Any]) -> None:
    """What llguidance would take, but not enforce or not in bounded time."""
    if "x-guidance" in schema:
        raise ValueError("'x-guidance' is no keyword of JSON Schema; leave it out")
    num_patterns = 0
    for found in filter(lambda value: isinstance(value, dict), values_in(schema)):
        if has_unknown_count(found):
            raise ValueError("minProperties above 1 is only known for properties that are required")
        check_numbers(found)
        if names := unspelled(found):
            raise ValueError(f"{names.pop()} has a control character that JSON has no short escape for")
        patterns = found.get("patternProperties")
        num_patterns += len(patterns) if isinstance(patterns, dict) else 0
    if num_patterns > MAX_PATTERN_PROPERTIES:
        raise ValueError(f"{num_patterns} patternProperties, but {MAX_PATTERN_PROPERTIES} are the most")


def has_unknown_count(schema: dict[str, Any]) -> bool:
    """Keys that are not named may come twice, and then count twice."""
    required, wanted = schema.get("required"), schema.get("minProperties")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    return isinstance(wanted, int) and wanted > max(num_required, 1)


def check_numbers(schema: dict[str, Any]) -> None:
    """llguidance keeps them as float64; bounds beyond 64 bits it brings back inside."""
    bounds = (value for value in schema.values() if isinstance(value, int))
    lost = [value for value in bounds if abs(value) < 2**63 - 1 and int(float(value)) != value]
    values = values_in([schema.get("const"), schema.get("enum")])
    lost += [value for value in values if isinstance(value, int) and abs(value) > 2**53]
    if lost:
        raise ValueError(f"the integer {short(lost[0])} has more digits than are told apart")


def unspelled(schema: dict[str, Any]) -> set[str]:
    """Keywords that ask for a text with such a character; of a class of a pattern others are taken."""
    pattern = CHARACTER_CLASS.sub("", str(schema.get("pattern", "")))
    names = {"pattern"} if UNSPELLED_PATTERN.search(pattern) else set()
    for name in ("const", "enum"):
        texts = (value for value in values_in(schema.get(name)) if isinstance(value, str))
        names |= {name} if any(map(UNSPELLED.search, texts)) else set()
    return names


def values_in(value: Any) -> Iterator[Any]:
    """All of them, at any depth, also where a schema has data: a $ref can lead there."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        yield found
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def drop_notes(schema: dict[str, Any]) -> None:
    """Drop what holds a text to nothing, wherever it stands."""
    for found in schemas_in(schema):
        drop_own_notes(found)


def drop_own_notes(schema: dict[str, Any]) -> None:
    """Formats that are not known are notes, as JSON Schema has it; every name is a text."""
    if isinstance(schema.get("format"), str) and schema["format"] not in known_formats():
        del schema["format"]
    if schema.get("propertyNames") in ({"type": "string"}, {}):
        del schema["propertyNames"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]


@functools.cache
def known_formats() -> frozenset[str]:
    """Those of JSON Schema that llguidance enforces"""
    schemas = {name: json.dumps({"type": "string", "format": name}) for name in FORMATS}
    grammars = {name: llguidance.LLMatcher.grammar_from_json_schema(schemas[name]) for name in FORMATS}
    return frozenset(name for name in FORMATS if not llguidance.LLMatcher.validate_grammar(grammars[name]))


def loosened(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schema without the keywords that cannot be enforced, and which these are; oneOf becomes anyOf."""
    loose: dict[str, Any] = json.loads(json.dumps(schema))
    dropped: set[str] = set()
    is_referred_to = "/oneOf/" in json.dumps(loose)  # where a $ref leads through it, it keeps its name
    for found in schemas_in(loose):
        drop_own_notes(found)
        hard = UNKNOWN_KEYWORDS & found.keys() | unspelled(found)
        hard |= {"pattern"} if UNKNOWN_PATTERN.search(str(found.get("pattern", ""))) else set()
        hard |= {"minProperties"} if has_unknown_count(found) else set()
        for name in hard:
            del found[name]
        if "anyOf" not in found and "oneOf" in found and not is_referred_to:
            found["anyOf"] = found.pop("oneOf")
        dropped |= hard
    return loose, sorted(dropped)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without properties that it does not name: left free, a small model invents them for ever."""
    found: dict[str, Any] = closed_part(schema)
    for key in ("$defs", "definitions"):  # where all that refer to them want nothing else of the same text
        if isinstance(schema.get(key), dict) and not any(map(is_combined, schemas_in(schema))):
            found = {**found, key: {name: closed_part(one) for name, one in schema[key].items()}}
    return found


def closed_part(schema: Any) -> Any:
    if not isinstance(schema, dict) or is_combined(schema):
        return schema
    found = dict(schema)
    if isinstance(schema.get("anyOf"), list):
        found["anyOf"] = list(map(closed_part, schema["anyOf"]))
    if "items" in schema:
        found["items"] = closed_part(schema["items"])
    if isinstance(schema.get("properties"), dict):
        found["properties"] = {name: closed_part(value) for name, value in schema["properties"].items()}
        required = schema["required"] if isinstance(schema.get("required"), list) else []
        if not OPENING & schema.keys() and set(map(str, required)) <= found["properties"].keys():
            found["additionalProperties"] = False
    return found


def is_combined(schema: dict[str, Any]) -> bool:
    """Whether a text has to be of several schemas at once, or not of one: closed, one of them would forbid
    what another names."""
    wanted = ({"$ref"} & schema.keys(), {"anyOf"} & schema.keys(), OF_PARTS & schema.keys())
    return bool({"allOf", "oneOf"} & schema.keys()) or sum(map(bool, wanted)) > 1


def schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """It and those inside, which may be changed meanwhile; data that looks like a schema is none."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        yield found
        for name, value in found.items():
            named = name in NAMED_SCHEMAS and isinstance(value, dict)
            inner = value.values() if named else value if isinstance(value, list) else [value]
            waiting += [one for one in inner if isinstance(one, dict) and name not in DATA]
