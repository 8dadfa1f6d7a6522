"""Adapters over HTTP: models of their own names, beside the one that they change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import write_model
from loras import adapter
from servers import GREEDY, HELLO, NAME, Running, answered, error_of, named_events, running

from infinilm import LLM, LoRARequest, RequestError, SamplingParams, load_model
from infinilm.cli.serve import loras as parsed
from infinilm.server import serve

NAMES = (NAME, "calm", "wild")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loras(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoRARequest, ...]:
    model, root = load_model(folder)[0], tmp_path_factory.mktemp("adapters")
    return tuple(adapter(root / name, model, seed, 4 + seed) for seed, name in enumerate(NAMES[1:]))


@pytest.fixture(scope="module")
def server(folder: Path, loras: tuple[LoRARequest, ...]) -> Iterator[Running]:
    with running(folder, loras=loras) as made:
        yield made


@pytest.fixture(scope="module")
def texts(folder: Path, loras: tuple[LoRARequest, ...]) -> dict[str, str]:
    """What each says, without a server"""
    llm = LLM(folder, kv_cache_memory="8MB")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = {
        name: llm.chat(HELLO, params, lora_request=lora)[0].outputs[0].text
        for name, lora in zip(NAMES, (None, *loras), strict=True)
    }
    assert len(set(found.values())) == 3
    return found


def test_models_lists_adapters_with_the_model_they_change(server: Running) -> None:
    listed = answered(server.http.get("/v1/models"))["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [(NAME, None), ("calm", NAME), ("wild", NAME)]
    assert answered(server.http.get("/v1/models/wild"))["parent"] == NAME


@pytest.mark.parametrize("name", NAMES)
def test_each_api_answers_by_the_adapter_of_a_name(name: str, server: Running, texts: dict[str, str]) -> None:
    chat = {"model": name, "messages": HELLO, "max_tokens": 12, **GREEDY}
    found = answered(server.http.post("/v1/chat/completions", json=chat))
    assert (found["model"], found["choices"][0]["message"]["content"]) == (name, texts[name])
    found = answered(server.http.post("/v1/messages", json=chat))
    assert (found["model"], found["content"][0]["text"]) == (name, texts[name])
    asked = {"model": name, "input": HELLO, "max_output_tokens": 12, **GREEDY}
    found = answered(server.http.post("/v1/responses", json=asked))
    assert (found["model"], found["output"][0]["content"][0]["text"]) == (name, texts[name])


def test_streams_tell_the_adapters_name(server: Running, texts: dict[str, str]) -> None:
    chat = {"model": "calm", "messages": HELLO, "max_tokens": 12, "stream": True, **GREEDY}
    events = named_events(server.http.post("/v1/messages", json=chat).text)
    assert events[0]["message"]["model"] == "calm"
    told = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(told) == texts["calm"]
    chunks = server.client().chat.completions.create(**without_ignore(chat))  # type: ignore[call-overload]
    assert {chunk.model for chunk in chunks} == {"calm"}


def without_ignore(body: dict[str, Any]) -> dict[str, Any]:
    extra = {"ignore_eos": body["ignore_eos"]}
    return {**{key: value for key, value in body.items() if key != "ignore_eos"}, "extra_body": extra}


def test_completions_and_embeddings_are_the_adapters(server: Running) -> None:
    told, directions = set(), set()
    for name in NAMES:
        body = {"model": name, "prompt": "hello", "max_tokens": 12, **GREEDY}
        found = answered(server.http.post("/v1/completions", json=body))
        told.add((found["model"], found["choices"][0]["text"]))
        found = answered(server.http.post("/v1/embeddings", json={"model": name, "input": "hello"}))
        assert found["model"] == name
        directions.add(tuple(found["data"][0]["embedding"]))
    assert len({text for _, text in told}) == len(directions) == 3
    assert {name for name, _ in told} == set(NAMES)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_name_that_nothing_has_is_404_and_the_names_there_are_are_told(path: str, server: Running) -> None:
    response = server.http.post(path, json={"model": "other", "messages": HELLO, "max_tokens": 1})
    assert response.status_code == 404
    assert all(name in response.text for name in NAMES)
    assert server.http.get("/v1/models/other").status_code == 404


def test_a_path_is_no_name(server: Running, loras: tuple[LoRARequest, ...]) -> None:
    """Callers choose among what the server has, and make it read nothing."""
    body = {"model": str(loras[0].lora_path), "messages": HELLO}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"


def test_an_adapter_that_cannot_be_read_keeps_the_server_from_starting(folder: Path, tmp_path: Path) -> None:
    with running(folder, loras=(LoRARequest("a", 1, tmp_path / "nowhere"),)) as server:
        assert isinstance(server.failure, RequestError) and "no such folder" in str(server.failure)


def test_names_are_given_once() -> None:
    with pytest.raises(ValueError, match="'tiny' is the name of two"):
        serve.Options(names=("tiny",), loras=(LoRARequest("tiny", 1, "path"),))


def test_the_command_takes_names_and_paths() -> None:
    assert parsed(["a=b", "c=d=e"]) == (LoRARequest("a", 1, "b"), LoRARequest("c", 2, "d=e"))
    for wrong in ("a", "=b", "a="):
        with pytest.raises(ValueError, match="--lora takes NAME=PATH"):
            parsed([wrong])
