"""Bodies, what those of several APIs have in common, and how they are read.

A field that a body does not have is refused, a value of the wrong type by its name. But where agents send
fields that nobody knew of before, only those are refused that would change the answer. A type is checked
here, a range by SamplingParams. /openapi.json is made of bodies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from infinilm.engine.request import RequestError
from infinilm.sampling import MAX_TOKENS, SamplingParams
from infinilm.tokenizer.chat import joined_text

MAX_AGENT_TOOLS = 1024  # with those of the servers that an agent is connected to
# What a conversation and its template are rendered with, which callers may not take the place of.
OWN_VARIABLES = ("chat_template", "tokenize", "messages", "tools", "max_tokens", "self")

B = TypeVar("B", bound="Body")


class BodyError(RequestError):
    """What is wrong with a body, and in which of its fields."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param)
        self.code = code


class Body(BaseModel):
    """A whole body. A field that is null has not been given, nor one whose value asks for nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    idle: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    refused: ClassVar[Mapping[str, str]] = {}  # fields, and what to do without them
    codes: ClassVar[Mapping[str, str]] = {}  # of errors about them, where clients know one

    model: str | None = None

    @classmethod
    def asks(cls, name: str, value: Any) -> bool:
        idle = cls.idle.get(name, ())
        return value is not None and not any(type(value) is type(one) and value == one for one in idle)


class Inner(BaseModel):
    """An object inside a body, which may have further keys: templates see them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = {name: value for name, value in given.items() if value is not None}
        if cls.model_config["extra"] == "forbid":
            for name in asked.keys() - cls.model_fields.keys():
                raise ValueError(f"{name[:64]!r} is not supported; leave it out")
        return asked


# ---- values that several bodies have -----------------------------------------------------------------------


def several_prompts(prompt: Any) -> list[str | list[int]]:
    """Prompts from a text, token ids, or a list of either"""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        several = [prompt] if is_ids(prompt) else prompt
        if all(isinstance(one, str) or is_ids(one) for one in several):
            return several
    raise ValueError("must be a text, token ids, or a list of such")


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def of_kinds(given: Any, kinds: Sequence[str | None]) -> Any:
    """Without objects of a type that others serve, and ours does not; what is no list is refused later."""
    if not isinstance(given, list):
        return given
    return [one for one in given if not isinstance(one, dict) or one.get("type") in kinds]


def template_variables(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError("must be an object")
    for name in OWN_VARIABLES:
        if name in given:
            raise ValueError(f"must not have {name!r}, which is the server's")
    return given


def whole(given: Any) -> Any:
    """JSON does not tell 16.0 from 16 (JSON Schema, 6.1.1), and some clients write all numbers so."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


TEXT = {"type": "string"}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
CONTENT = {"anyOf": [TEXT, {"type": "array", "items": PART}, {"type": "null"}]}
PROMPT = {"anyOf": [TEXT, IDS, {"type": "array", "items": {"anyOf": [TEXT, IDS]}, "minItems": 1}]}

Content = Annotated[Any, PlainValidator(joined_text), WithJsonSchema(CONTENT)]
Prompts = Annotated[Any, PlainValidator(several_prompts), WithJsonSchema(PROMPT)]
Variables = Annotated[Any, PlainValidator(template_variables), WithJsonSchema({"type": "object"})]
Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=0)]
Limit = Annotated[Whole, Field(ge=1, le=MAX_TOKENS)]


class Function(Inner):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Grammar(Inner):
    """Of what a custom tool takes"""

    syntax: Literal["lark", "regex"] = "lark"
    definition: str = ""


class Sampled(Body):
    """How an answer is drawn; from top_k on the fields are vLLM's."""

    temperature: float | None = None
    top_p: float | None = None
    seed: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    stream: bool = False
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    stop_token_ids: list[Any] | None = None
    bad_words: list[Any] | None = None
    allowed_token_ids: list[Any] | None = None
    priority: Whole = 0
    cache_salt: str | None = None
    return_progress: bool = False


# ---- reading them ------------------------------------------------------------------------------------------


def read(kind: type[B], given: Mapping[str, Any]) -> B:
    """The body that an object is; BodyError with the name of the field that is wrong."""
    asked = {name: value for name, value in given.items() if kind.asks(name, value)}
    is_open = kind.model_config.get("extra") != "forbid"
    for name, value in asked.items():
        if name in kind.refused or not (is_open or name in kind.model_fields):
            way_out = kind.refused.get(name, "leave it out")
            told = f"{name[:64]} is not supported, but is {short(value)}; {way_out}"
            raise BodyError(told, name[:64], kind.codes.get(name))
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise body_error(error, kind, asked) from None


# What an error of pydantic wants, where its own words are not ours.
WANTED = {
    "missing": "given",
    "too_short": "given",
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
    "string_unicode": "text, without halves of surrogate pairs",
    "union_tag_not_found": "an object with a type",
}


def body_error(error: ValidationError, kind: type[Body], asked: Mapping[str, Any]) -> BodyError:
    """An error that names the first field that is wrong, with all kinds that it may be of."""
    first, *others = error.errors(include_url=False)
    name = str(first["loc"][0])
    wanted = [kind_wanted(one) for one in (first, *others) if one["loc"][0] == first["loc"][0]]
    if len(wanted) > 1 and name in asked and has_kinds(kind, name):
        return BodyError(
            f"{name} must be {' or '.join(dict.fromkeys(wanted))}, but is {short(asked[name])}", name
        )
    place = place_of(first["loc"][1:], asked.get(name))
    if first["type"] == "value_error":  # in words of our own
        reason = str(first["ctx"]["error"])
        found = "" if "but is" in reason else f", but is {short(first['input'])}"
        return BodyError(f"{name}{place}{'' if reason.startswith('must') else ':'} {reason}{found}", name)
    value = None if first["type"] == "missing" else first["input"]
    return BodyError(f"{name}{place} must be {wanted_of(first)}, but is {short(value)}", name)


def has_kinds(kind: type[Body], name: str) -> bool:
    wanted = kind.model_fields[name].annotation
    return get_origin(wanted) in (Union, UnionType) and len(set(get_args(wanted)) - {NoneType}) > 1


def place_of(location: Sequence[int | str], value: Any) -> str:
    """A place as a caller would write it, without the types by which pydantic tells objects apart"""
    place = ""
    for i, at in enumerate(location):
        is_key = not isinstance(value, dict) or at in value or i == len(location) - 1
        if not is_key and at == (value.get("type") or "message"):
            continue
        place += f"[{at}]" if isinstance(at, int) else f".{at}"
        value = value.get(at) if isinstance(value, dict) else item_of(value, at)
    return place


def item_of(value: Any, at: int | str) -> Any:
    is_item = isinstance(value, list) and isinstance(at, int) and at < len(value)
    return value[at] if is_item else None


def kind_wanted(error: Any) -> str:
    """One kind among several: the place after the field's name and the kind's is inside an object."""
    inside = ".".join(part for part in error["loc"][2:] if isinstance(part, str))
    return f"an object whose {inside} is {wanted_of(error)}" if inside else wanted_of(error)


def wanted_of(error: Any) -> str:
    told = str(error["msg"]).removeprefix("Input should be ").removeprefix("a valid ")
    if error["type"] == "union_tag_invalid":
        return f"of a type among {error['ctx']['expected_tags']}, for the model reads nothing else"
    if error["type"] == "too_long":
        return f"at most {error['ctx']['max_length']} items long"
    if error["type"] in ("string_too_short", "string_too_long"):
        return f"{told.removeprefix('String should have ')} long"
    return WANTED.get(error["type"], told)


# ---- what bodies say of sampling ---------------------------------------------------------------------------


def sampled(body: Sampled, defaults: Mapping[str, Any], **asked: Any) -> SamplingParams:
    """What the body says under names of SamplingParams. What is asked besides takes its place: an API may
    mean something else by a name, or have another for it."""
    named = {field.name: getattr(body, field.name, None) for field in fields(SamplingParams)}
    given = {name: value for name, value in named.items() if value is not None}
    with as_body_errors({**given, **asked}):
        return SamplingParams(**{**defaults, **given, **asked})


@contextmanager
def as_body_errors(given: Mapping[str, Any], param: str | None = None) -> Iterator[None]:
    """Errors of SamplingParams name the field first."""
    try:
        yield
    except BodyError:
        raise
    except (ValueError, TypeError) as error:
        named = [word for word in re.findall(r"\w+", str(error)) if word in given]
        told = str(error) if param is None or param in str(error) else f"{param}: {error}"
        raise BodyError(told, named[0] if named else param) from error
