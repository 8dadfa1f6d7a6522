"""Outputs of an answer that still grows: each is kept as it was, and costs no more than the one before."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from typing import Any

import pytest
from engines import Tiny, prompt

from infinilm import SamplingParams
from infinilm.draw import Ranked
from infinilm.engine.request import Completion, CompletionOutput
from infinilm.engine.so_far import SoFar

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.at(tmp_path_factory.mktemp("tiny"))


# ---- the items so far --------------------------------------------------------------------------------------


def test_what_is_appended_later_is_not_among_them() -> None:
    items = [1, 2, 3, 4]
    found = SoFar(items, 1)
    items.append(5)
    assert list(found) == [2, 3, 4] and len(found) == 3 and 5 not in found
    with pytest.raises(IndexError):
        found[3]


@pytest.mark.parametrize("index", [0, -1, slice(None), slice(1, None), slice(-2, 9), slice(None, None, -1)])
def test_they_are_indexed_as_a_list_is(index: Any) -> None:
    found = SoFar("abcdef", 2)[index]
    wanted = list("cdef")[index]
    assert found == wanted and type(found) is type(wanted)


def test_they_equal_a_list_of_the_same_and_look_like_it() -> None:
    found = SoFar([1, 2, 3], 1)
    assert found == [2, 3] and found == [2, 3] and found == SoFar([2, 3]) and found == (2, 3)
    assert found != [2] and found != [2, 4] and found != "23"
    assert repr(found) == "[2, 3]" and [*found, 4] == [2, 3, 4]


def test_copies_are_lists_of_these_alone() -> None:
    found = SoFar([1, 2, 3], 1)
    assert type(copy.deepcopy(found)) is list and pickle.loads(pickle.dumps(found)) == [2, 3]


# ---- outputs -----------------------------------------------------------------------------------------------


def contents(output: CompletionOutput) -> tuple[str, list[int], list[Any], str | None]:
    return output.text, list(output.token_ids), list(output.logprobs or ()), output.finish_reason


def test_an_output_that_is_kept_does_not_change_and_begins_the_next(tiny: Tiny) -> None:
    engine = tiny.engine()
    request = engine.make(prompt(9), SamplingParams(seed=1, max_tokens=20, ignore_eos=True, logprobs=1, n=2))
    engine.enqueue(request)
    kept, seen = [], []
    while engine.has_work:
        engine.step()
        kept.append(request.output().outputs)
        seen.append([contents(output) for output in kept[-1]])
    assert [[contents(output) for output in outputs] for outputs in kept] == seen
    for part, whole in zip(kept, kept[1:], strict=False):
        for before, after in zip(part, whole, strict=True):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.logprobs is not None and before.logprobs is not None
            assert after.logprobs[: len(before.logprobs)] == before.logprobs
    assert [len(output.token_ids) for output in kept[-1]] == [20, 20]


def num_bytes_of_an_output(stream: Completion) -> int:
    stream.output()  # what is made once
    tracemalloc.start()
    try:
        output = stream.output()
        num_bytes, _ = tracemalloc.get_traced_memory()
        assert len(output.token_ids) == stream.num_drawn
    finally:
        tracemalloc.stop()
    return num_bytes


def test_an_output_takes_no_more_memory_the_longer_the_answer_is(tiny: Tiny) -> None:
    params = SamplingParams(max_tokens=500, ignore_eos=True, logprobs=0, detokenize=False)
    (stream,) = tiny.engine().make(prompt(9), params).completions
    sizes = {}
    for num_drawn in range(1, 491):
        stream.append(7, [Ranked(7, -1.0, 1)])
        sizes[num_drawn] = num_bytes_of_an_output(stream)
    assert stream.finish_reason is None
    assert sizes[490] == sizes[300] < 1000  # one list of 300 items has 2400 bytes


def test_of_an_answer_that_has_ended_there_is_one_output_and_it_has_plain_lists(tiny: Tiny) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0)
    (stream,) = tiny.engine().make(prompt(9), params).completions
    for _ in range(3):
        stream.append(7, [Ranked(7, -1.0, 1)])
    output = stream.output()
    assert output.finish_reason == "length" and stream.output() is output
    assert type(output.token_ids) is list and type(output.logprobs) is list
