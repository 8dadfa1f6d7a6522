"""SamplingParams and StructuredOutputsParams: every value checked when the object is made."""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from infinicore import checks
from infinilm import elsewhere
from infinilm.elsewhere import knowing
from infinilm.folder import parse_object

MAX_SEQUENCES = 1024
MAX_TOKENS = (1 << 31) - 1
MAX_TOKEN_ID = (1 << 31) - 1
# Each is an object a token: with this many, a prompt of 8192 tokens makes a million of them.
MAX_LOGPROBS = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BIASES = 4096
# Above the vocabulary of any model.
MAX_ALLOWED_TOKEN_IDS = 1 << 20
# Of a schema, a regular expression, a grammar, and of all choices together.
MAX_GRAMMAR_LENGTH = 1 << 18


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What a text must be. One of: a JSON schema (a dict, or its text), a regular expression that matches all
    of it, a list to choose from, a grammar in llguidance's Lark, or any JSON object. An object has no
    properties but those that its schema names, unless that says so or combines several schemas.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        settle(self, STRUCTURED_CHECKS)
        given = [name for name in STRUCTURED_CHECKS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must be given one of {', '.join(STRUCTURED_CHECKS)}, "
                f"but has {' and '.join(given) or 'none'}"
            )


@knowing(elsewhere.SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when they end, under vLLM's names. temperature 0 is greedy; top_k 0 (or -1)
    keeps all; max_tokens None goes as far as the model does; a seed, but not -1, makes the choice repeatable.

    Where a tuple is kept any list will do, for stop one string too; a dict of logit_bias is kept as pairs.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        settle(self, CHECKS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens, {self.max_tokens}, not {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are looked for in text: with detokenize=False there is none")


# --- What each field may be ---------------------------------------------------------------------------------

Check = Callable[[str, Any], Any]  # a field's name and value -> the value as it is kept


def settle(params: object, table: Mapping[str, Check]) -> None:
    for name, check in table.items():
        object.__setattr__(params, name, check(name, getattr(params, name)))


def refused(name: str, wanted: str, value: object) -> ValueError:
    try:
        shown = reprlib.repr(value)
    except ValueError:  # Python writes no integers of thousands of digits
        shown = f"too long to be shown, a {type(value).__name__}"
    return ValueError(f"{name} must be {wanted}, but is {shown}")


def is_bool(value: object) -> bool:
    return isinstance(value, bool) or getattr(value, "dtype", None) in (np.bool_, torch.bool)


def whole(low: int, high: int, name: str, value: Any) -> int:
    with contextlib.suppress(TypeError, ValueError):
        found = checks.integer("SamplingParams", name, value)
        if low <= found <= high and not is_bool(value):
            return found
    raise refused(name, f"a whole number from {low} to {high}", value)


def number(low: float, high: float, name: str, value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        found = checks.number("SamplingParams", name, value)
        if low <= found <= high and not is_bool(value):  # neither holds for NaN
            return found
    raise refused(name, f"a number from {low:g} to {high:g}", value)


def share(name: str, value: Any) -> float:
    """A part of the whole; none of it would leave no token."""
    found = number(0.0, 1.0, name, value)
    if found == 0.0:
        raise refused(name, "above 0 and at most 1", value)
    return found


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refused(name, "True or False", value)
    return value


def seed(name: str, value: Any) -> int | None:
    """-1 is none, as vLLM has it."""
    found = -1 if value is None else whole(-(1 << 63), (1 << 63) - 1, name, value)
    return None if found == -1 else found


def top_k(name: str, value: Any) -> int:
    return max(whole(-1, MAX_TOKEN_ID, name, value), 0)


def optional(check: Check, name: str, value: Any) -> Any:
    return None if value is None else check(name, value)


def items(check: Check, limit: int, name: str, value: Any) -> tuple[Any, ...]:
    """Each of a list's items checked; None is an empty list."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise refused(name, "a list", value)
    found = tuple(islice(value, limit + 1))
    if len(found) > limit:
        raise ValueError(f"{name} must have at most {limit} items, but has more")
    return tuple(check(f"{name}[{i}]", item) for i, item in enumerate(found))


def some_items(check: Check, limit: int, name: str, value: Any) -> tuple[Any, ...]:
    found = items(check, limit, name, value)
    if not found:
        raise refused(name, "a list of at least one item, or None", value)
    return found


def is_text(value: str) -> bool:
    """Half a surrogate pair has no bytes. To look at each character here takes a second for 16 MB."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_text(value: str) -> str:
    """Of a subclass, which may compare and hash in its own way or not at all, the text alone"""
    return str.__str__(value)


def string(max_length: int, name: str, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= max_length:
        raise refused(name, f"a string of 1 to {max_length} characters", value)
    if not is_text(value):
        raise refused(name, "text, without halves of surrogate pairs", value)
    return plain_text(value)


def stop(name: str, value: Any) -> tuple[str, ...]:
    return items(stop_string, MAX_STOPS, name, (value,) if isinstance(value, str) else value)


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and its bias; in JSON, the ids of an object are strings of digits."""
    pairs = value.items() if isinstance(value, Mapping) else value
    found: tuple[tuple[int, float], ...] = items(bias, MAX_BIASES, name, pairs)
    if len(dict(found)) < len(found):
        raise refused(name, "a dict with each token id once", value)
    return found


def bias(name: str, value: Any) -> tuple[int, float]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise refused(name, "a token id and its bias", value)
    key, added = value
    is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
    token = token_id(f"a token id of {name.partition('[')[0]}", int(key) if is_digits else key)
    return token, number(-100.0, 100.0, f"{name.partition('[')[0]}[{token}]", added)


def structured(name: str, value: Any) -> StructuredOutputsParams:
    if not isinstance(value, StructuredOutputsParams):
        raise refused(name, "a StructuredOutputsParams or None", value)
    return value


def schema(name: str, value: Any) -> str:
    """One text for one schema, however it was given; its properties keep their order."""
    if not isinstance(value, str | dict):
        advice = "; model_json_schema() of a Pydantic class gives one" if isinstance(value, type) else ""
        raise ValueError(f"{refused(name, 'a JSON schema, as a dict or its text', value)}{advice}")
    given = string(MAX_GRAMMAR_LENGTH, name, json_text(name, value) if isinstance(value, dict) else value)
    parsed = parse_object(given.encode(), name, ValueError)
    return string(MAX_GRAMMAR_LENGTH, name, json_text(name, parsed))  # escapes can write halves of pairs too


def json_text(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON schema, but is not JSON: {error}") from None


def choices(name: str, value: Any) -> tuple[str, ...]:
    found = some_items(grammar_text, MAX_GRAMMAR_LENGTH, name, value)
    if sum(map(len, found)) > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"{name} must have at most {MAX_GRAMMAR_LENGTH} characters in all, but has more")
    return found


token_id = partial(whole, 0, MAX_TOKEN_ID)
stop_string = partial(string, MAX_STOP_LENGTH)
grammar_text = partial(string, MAX_GRAMMAR_LENGTH)

CHECKS: dict[str, Check] = {
    "n": partial(whole, 1, MAX_SEQUENCES),
    "presence_penalty": partial(number, -2.0, 2.0),
    "frequency_penalty": partial(number, -2.0, 2.0),
    "repetition_penalty": partial(number, 1e-6, 1e6),
    "temperature": partial(number, 0.0, 1e6),
    "top_p": share,
    "top_k": top_k,
    "min_p": partial(number, 0.0, 1.0),
    "seed": seed,
    "stop": stop,
    "stop_token_ids": partial(items, token_id, MAX_STOP_TOKEN_IDS),
    "ignore_eos": flag,
    "max_tokens": partial(optional, partial(whole, 1, MAX_TOKENS)),
    "min_tokens": partial(whole, 0, MAX_TOKENS),
    "logprobs": partial(optional, partial(whole, 0, MAX_LOGPROBS)),
    "prompt_logprobs": partial(optional, partial(whole, 0, MAX_LOGPROBS)),
    "detokenize": flag,
    "skip_special_tokens": flag,
    "include_stop_str_in_output": flag,
    "logit_bias": biases,
    "allowed_token_ids": partial(optional, partial(some_items, token_id, MAX_ALLOWED_TOKEN_IDS)),
    "bad_words": partial(items, stop_string, MAX_BAD_WORDS),
    "structured_outputs": partial(optional, structured),
}
STRUCTURED_CHECKS: dict[str, Check] = {
    "json": partial(optional, schema),
    "regex": partial(optional, grammar_text),
    "choice": partial(optional, choices),
    "grammar": partial(optional, grammar_text),
    "json_object": lambda name, value: value is not None and flag(name, value),
}
