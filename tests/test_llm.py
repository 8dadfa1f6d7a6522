"""LLM and load_model say what is wrong with their arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infinilm import LLM, DynamicCache, SamplingParams, load_model


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> LLM:
    return LLM(default_model_path)


GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.mark.parametrize("model", [123, "", [], b"model.gguf"])
def test_a_model_is_named_by_text_or_path(model: Any) -> None:
    with pytest.raises(ValueError, match="model must be a path, a Hugging Face id"):
        load_model(model)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: holds neither config.json nor a .gguf file"):
        load_model(tmp_path)


@pytest.mark.parametrize("device", ["gpu", "cuda:999", "cpu:x", "meta", 1.5, ["cpu"]])
def test_a_device_that_cannot_be_used_is_named_before_anything_is_read(device: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device .* cannot be used here: .*; take 'cpu'"):
        load_model(tmp_path, device=device)


@pytest.mark.parametrize("prompts", [None, b"x", 5, {"a": 1}, [["a", "b"]], [None], ["a", b"b"], [1, 2]])
def test_prompts_are_strings(prompts: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match="prompts must be a string or a list of strings, but are"):
        llm.generate(prompts, GREEDY)


def test_prompts_may_come_from_any_iterable(llm: LLM) -> None:
    prompts = ("One, two,", "Red, green,")
    assert llm.generate((text for text in prompts), GREEDY) == llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [None, "hi", 3, {"role": "user", "content": "x"}, [None], ["hi"]])
def test_messages_are_lists_of_mappings(messages: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match="messages must be a list of .*, but are"):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize("params", [5, {"max_tokens": 3}, "greedy", [GREEDY, GREEDY]])
def test_sampling_params_are_of_their_class(params: Any, llm: LLM) -> None:
    for call in (
        lambda: llm.generate("a", params),
        lambda: llm.chat([{"role": "user", "content": "a"}], params),
        lambda: next(llm.stream([1], params)),
    ):
        with pytest.raises(TypeError, match="sampling_params must be one SamplingParams, but are"):
            call()


@pytest.mark.parametrize("token_ids", ["hi", [1.5], ["a"], [[1]], [None], [2**70]])
def test_streams_begin_with_integers(token_ids: Any, llm: LLM) -> None:
    with pytest.raises((TypeError, ValueError), match="stream: a token id must"):
        next(llm.stream(token_ids, GREEDY))


def test_max_tokens_none_goes_as_far_as_the_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(llm.model.config, max_position_embeddings=8)
    monkeypatch.setattr(llm.model, "config", short)
    params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
    assert len(list(llm.stream([1] * 5, params))) == 3
    assert len(list(llm.model.steps(torch.tensor([[1] * 5]), params, DynamicCache()))) == 3
