"""SamplingParams and StructuredOutputsParams refuse what they cannot mean, by the field's name."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from infinilm import SamplingParams, StructuredOutputsParams

NAN, INFINITY = float("nan"), float("inf")
SURROGATE = "a\ud800"
NO_NUMBERS = (True, False, "1", [1.0], {}, NAN, INFINITY, -INFINITY, 10**5000, 1j, object())
NO_INTEGERS = (
    *NO_NUMBERS,
    1.0,
    1.5,
    np.float32(1),
    torch.tensor([1, 2]),
    np.True_,
    torch.tensor(True),
    2**63,
)
NO_FLAGS = (None, 0, 1, "false", "no", [])
NO_IDS = (-1, 2**31, 1.5, True, "1", "a", None)


def with_none(*values: object) -> tuple[object, ...]:
    """For the fields where None means nothing."""
    return (*values, None)


def ids_wrong() -> tuple[object, ...]:
    return (5, "12", {"a": 1}, b"12", *([token_id] for token_id in NO_IDS), [5, [6]])


def strings_wrong() -> tuple[object, ...]:
    return (5, {"a": 1}, b"a", [""], [None], [5], ["a", ["b"]], [b"a"], [SURROGATE], ["a" * 1025])


BAD: dict[str, tuple[object, ...]] = {
    "n": with_none(*NO_INTEGERS, 0, -1, 1025),
    "presence_penalty": with_none(*NO_NUMBERS, -2.01, 2.01),
    "frequency_penalty": with_none(*NO_NUMBERS, -2.01, 2.01),
    "repetition_penalty": with_none(*NO_NUMBERS, 0, 0.0, -1.0, 1e7),
    "temperature": with_none(*NO_NUMBERS, -1e-9, 1e300),
    "top_p": with_none(*NO_NUMBERS, 0, 0.0, -0.1, 1.01),
    "top_k": with_none(*NO_INTEGERS, -2),
    "min_p": with_none(*NO_NUMBERS, -0.1, 1.01),
    "seed": (*NO_INTEGERS, -(2**63) - 1),
    "stop": ("", SURROGATE, *strings_wrong(), ["a"] * 65, "a" * 1025),
    "stop_token_ids": (*ids_wrong(), range(1025)),
    "ignore_eos": NO_FLAGS,
    "max_tokens": (*NO_INTEGERS, 0, -1, 2**31),
    "min_tokens": with_none(*NO_INTEGERS, -1, 17),
    "logprobs": (*NO_INTEGERS, -1, 129),
    "prompt_logprobs": (*NO_INTEGERS, -1, 129),
    "detokenize": NO_FLAGS,
    "skip_special_tokens": NO_FLAGS,
    "include_stop_str_in_output": NO_FLAGS,
    "logit_bias": (
        5,
        "5",
        [5],
        [(5, 1.0, 2.0)],
        {"a": 1.0},
        {"-5": 1.0},
        {"²": 1.0},
        {"1" * 11: 1.0},
        {-1: 1.0},
        {2**31: 1.0},
        {5: 101.0},
        {5: NAN},
        {5: None},
        {5: True},
        {5: "1"},
        {5: 1.0, "5": 2.0},
        {token_id: 1.0 for token_id in range(4097)},
    ),
    "allowed_token_ids": (*ids_wrong(), [], range(2**20 + 1)),
    "bad_words": ("word", *strings_wrong(), ["a"] * 1025),
    "structured_outputs": ({"regex": "a"}, "a", True, StructuredOutputsParams),
}

GOOD: list[tuple[str, object, object]] = [
    ("n", 1024, 1024),
    ("n", np.int64(3), 3),
    ("n", torch.tensor(3), 3),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("repetition_penalty", np.float32(1.5), 1.5),
    ("temperature", 0, 0.0),
    ("temperature", 1e-9, 1e-9),
    ("temperature", torch.tensor(0.5), 0.5),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("min_p", 1, 1.0),
    ("seed", None, None),
    ("seed", -1, None),
    ("seed", -(2**63), -(2**63)),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("stop", None, ()),
    ("stop", [], ()),
    ("stop", "\n", ("\n",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop_token_ids", None, ()),
    ("stop_token_ids", [5, np.int64(6)], (5, 6)),
    ("stop_token_ids", torch.tensor([5, 6]), (5, 6)),
    ("max_tokens", None, None),
    ("logprobs", None, None),
    ("logprobs", 0, 0),
    ("prompt_logprobs", 128, 128),
    ("logit_bias", None, ()),
    ("logit_bias", {}, ()),
    ("logit_bias", {5: 1, "6": -100.0}, ((5, 1.0), (6, -100.0))),
    ("allowed_token_ids", None, None),
    ("allowed_token_ids", [5], (5,)),
    ("bad_words", None, ()),
    ("bad_words", ["a b"], ("a b",)),
]


def cases(table: dict[str, tuple[object, ...]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name} {number}")  # some of the values cannot be written
        for name, values in table.items()
        for number, value in enumerate(values)
    ]


def test_every_field_has_bad_values_here() -> None:
    assert [field.name for field in fields(SamplingParams)] == list(BAD)


@pytest.mark.parametrize("name, value", cases(BAD))
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^(an? .* of )?{name}(\[\d+\])? must"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name, given, kept", GOOD)
def test_a_value_is_kept_as_one_plain_type(name: str, given: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{name: given}), name)
    assert found == kept and type(found) is type(kept)


def test_the_defaults_are_those_of_vllm() -> None:
    assert SamplingParams() == SamplingParams(
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=None,
        stop=None,  # type: ignore[arg-type]
        stop_token_ids=None,  # type: ignore[arg-type]
        ignore_eos=False,
        max_tokens=16,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        detokenize=True,
        skip_special_tokens=True,
        include_stop_str_in_output=False,
        logit_bias=None,  # type: ignore[arg-type]
        allowed_token_ids=None,
        bad_words=None,  # type: ignore[arg-type]
        structured_outputs=None,
    )


def test_an_error_says_what_was_found_and_what_is_wanted() -> None:
    with pytest.raises(ValueError, match=r"^top_k must be a whole number from -1 to \d+, but is 1.5$"):
        SamplingParams(top_k=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^stop_token_ids\[1\] must be .*, but is -1$"):
        SamplingParams(stop_token_ids=(5, -1))


def test_an_error_is_short_however_long_the_value() -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams(stop="a" * 10**6)  # type: ignore[arg-type]
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("name", ["best_of", "max_new_tokens", "Temperature"])
def test_an_unknown_name_is_refused(name: str) -> None:
    for kind in (SamplingParams, StructuredOutputsParams):
        with pytest.raises(TypeError, match=name):
            kind(**{name: 2})


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "it is max_tokens"),
        ("stop_strings", "it is stop here"),
        ("guided_decoding", "structured_outputs"),
        ("guided_json", r"StructuredOutputsParams\(json="),
        ("response_format", r"StructuredOutputsParams\(json="),
        ("stream", r"LLM\.stream"),
        ("best_of", "n gives"),
        ("temprature", "did you mean temperature"),
    ],
)
def test_a_name_that_others_have_is_refused_with_ours(name: str, way_out: str) -> None:
    with pytest.raises(TypeError, match=f"SamplingParams does not know '{name}'; .*{way_out}"):
        SamplingParams(**{name: 2})
    assert SamplingParams(best_of=1, use_beam_search=False) == SamplingParams()  # type: ignore[call-arg]


def test_values_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[misc]


def test_params_do_not_change_and_can_be_compared_hashed_and_sent() -> None:
    stops = ["a", "b"]
    structured = StructuredOutputsParams(choice=("a", "b"))
    params = SamplingParams(stop=stops, logit_bias={5: 1.0}, structured_outputs=structured)  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    stops.append("c")
    assert params.stop == ("a", "b")
    same = [replace(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))]
    assert {params, *same} == {params}


def test_a_list_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="stop_token_ids must have at most 1024 items"):
        SamplingParams(stop_token_ids=count())  # type: ignore[arg-type]


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens, 3, not 4"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(ValueError, match="stop strings .* detokenize=False"):
        SamplingParams(stop=("a",), detokenize=False)
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000
    assert SamplingParams(n=4, temperature=0).n == 4


# --- StructuredOutputsParams --------------------------------------------------------------------------------


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["properties"] = found
    return found


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"items": found}
    return found


BAD_STRUCTURES: dict[str, tuple[object, ...]] = {
    "json": (
        "",
        5,
        [],
        "no json",
        "[]",
        "true",
        '{"a": 1',
        '{"minimum": NaN}',
        '{"minimum": 1e400}',
        '{"type": "object", "type": "array"}',
        '{"items": ' * 100_000,
        f'{{"title": "{"a" * 2**18}"}}',
        {"minimum": NAN},
        {"minimum": object()},
        {"enum": [SURROGATE]},
        {1: {}, "1": {}},
        cyclic(),
        nested(100_000),
        {"enum": [1] * 2**18},
    ),
    "regex": ("", 5, b"a", ["a"], SURROGATE, "a" * (2**18 + 1)),
    "choice": ("abc", [], [""], [5], [None], ["a", SURROGATE], ["a" * 2**17] * 3, {"a": 1}),
    "grammar": ("", 5, SURROGATE),
    "json_object": (1, "true", {}),
}


@pytest.mark.parametrize("name, value", cases(BAD_STRUCTURES))
def test_a_structure_that_cannot_be_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}"):
        StructuredOutputsParams(**{name: value})


class Answer:
    """As a class of Pydantic's, which some programs take for its schema"""


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (5, ", but is 5$"),
        ([], r", but is \[\]$"),
        (Answer, r", but is .*; model_json_schema\(\) of a Pydantic class gives one$"),
    ],
)
def test_what_is_no_schema_is_told_that_a_dict_or_its_text_is_wanted(schema: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"json must be a JSON schema, as a dict or its text{told}"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    "given, found",
    [
        ({}, "none"),
        ({"json_object": False}, "none"),
        ({"json": None, "regex": None}, "none"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"json": {}, "json_object": True}, "json and json_object"),
    ],
)
def test_a_structure_is_said_in_one_way(given: dict[str, Any], found: str) -> None:
    with pytest.raises(
        ValueError, match=f"one of json, regex, choice, grammar, json_object, but has {found}$"
    ):
        StructuredOutputsParams(**given)


def test_a_schema_has_one_text_however_it_is_given() -> None:
    schema = {"type": "object", "properties": {"z": {"const": "é"}, "a": {}}}
    kept = StructuredOutputsParams(json=schema)
    assert kept == StructuredOutputsParams(json=json.dumps(schema, indent=2)) == replace(kept)
    assert kept.json == '{"type":"object","properties":{"z":{"const":"é"},"a":{}}}'
