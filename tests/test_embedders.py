"""Embedding models in the shapes in which people download them, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from downloads import (
    LAST_TOKEN,
    PROMPTS,
    engine,
    last_state,
    tokens_of,
    write_embedder,
    write_gguf,
    write_json,
    write_model,
    write_modules,
    write_tokenizer,
)
from parity import nmse
from servers import NAME, answered, error_of, running

from infinilm import RequestError, runner
from infinilm.checkpoint import CheckpointError
from infinilm.models.llama import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["Paris is the capital of France.", "Cats purr, and sleep " * 12, "a"]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-embedding, tied": ("Qwen3Model", {"tie_word_embeddings": True}),
    "qwen3-embedding, untied": ("Qwen3Model", {"tie_word_embeddings": False}),
    "qwen3-embedding, with its head": ("Qwen3ForCausalLM", {"tie_word_embeddings": False}),
    "e5-mistral": ("MistralModel", {"sliding_window": 40}),
    "llama": ("LlamaModel", {}),
}


def check_close(found: list[float], wanted: torch.Tensor) -> None:
    ours = torch.tensor(found)
    assert torch.nn.functional.cosine_similarity(ours, wanted, dim=0) > 1 - 1e-6
    assert nmse(ours, wanted) <= 1e-9


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headless")
    write_embedder(folder)
    return folder


@pytest.mark.parametrize("shape", SHAPES)
def test_embeddings_are_the_last_states_of_transformers_of_length_one(shape: str, tmp_path: Path) -> None:
    kind, config = SHAPES[shape]
    oracle = write_embedder(tmp_path, kind, **config)
    body = getattr(oracle, "model", oracle)
    llm = engine(tmp_path, max_num_batched_tokens=64)
    for name, before in ((None, ""), *PROMPTS.items()):
        for text, output in zip(TEXTS, llm.embed(TEXTS, prompt_name=name), strict=True):
            ids = tokens_of(tmp_path, before + text)
            assert output.prompt_token_ids == ids and ids[-1] == 0  # <|endoftext|>
            check_close(output.outputs.embedding, torch.nn.functional.normalize(last_state(body, ids), dim=0))


def test_what_the_files_name_as_the_default_prompt_stands_before_texts(tmp_path: Path) -> None:
    write_embedder(tmp_path)
    config = {"prompts": PROMPTS, "default_prompt_name": "query"}
    write_json(tmp_path / "config_sentence_transformers.json", config)
    llm = engine(tmp_path)
    ids = tokens_of(tmp_path, "a cat")
    asked, named, given = [
        llm.embed(prompt, prompt_name=name)[0].prompt_token_ids
        for prompt, name in (("a cat", None), ("a cat", "document"), (ids, None))
    ]
    assert asked == tokens_of(tmp_path, PROMPTS["query"] + "a cat") and named == given == ids


def test_an_end_that_the_tokenizers_settings_ask_for_is_added_to_texts_alone(tmp_path: Path) -> None:
    """As E5-Mistral's ask for it, and its users add it by hand"""
    oracle = write_model(tmp_path, "MistralModel")
    write_tokenizer(tmp_path, add_eos_token=True)
    write_modules(tmp_path, Pooling=LAST_TOKEN, Normalize=None)
    llm = engine(tmp_path)
    ids = [*tokens_of(tmp_path, "a cat", add_special_tokens=False), 2]
    for text in ("a cat", "a cat<|im_end|>", ids):
        (output,) = llm.embed([text])
        assert output.prompt_token_ids == ids
        check_close(output.outputs.embedding, torch.nn.functional.normalize(last_state(oracle, ids), dim=0))
    (output,) = llm.embed([ids[:-1]])
    assert output.prompt_token_ids == ids[:-1]


def test_without_a_module_that_normalizes_states_stay_as_they_are(tmp_path: Path) -> None:
    oracle = write_embedder(tmp_path)
    write_modules(tmp_path, Pooling={"pooling_mode": "lasttoken"})  # as newer files have it
    (output,) = engine(tmp_path).embed("a cat")
    check_close(output.outputs.embedding, last_state(oracle, tokens_of(tmp_path, "a cat")))


@pytest.mark.parametrize("limit", [1, 2, 20, 1024])
def test_a_text_is_cut_as_transformers_cuts_it_and_keeps_its_end(limit: int, headless: Path) -> None:
    long = "Cats purr, and sleep " * 100
    (output,) = engine(headless).embed(long, truncate_prompt_tokens=limit)
    wanted = tokens_of(headless, long, truncation=True, max_length=limit)
    assert output.prompt_token_ids == wanted and wanted[-1] == 0 and len(wanted) == limit


def test_an_end_that_settings_ask_for_stays_behind_a_text_that_is_cut(tmp_path: Path) -> None:
    write_model(tmp_path, "MistralModel")
    write_tokenizer(tmp_path, add_eos_token=True)
    llm = engine(tmp_path, max_model_len=8)
    ids = tokens_of(tmp_path, "a cat sleeps", add_special_tokens=False)
    cut, given, short = llm.embed(["a cat sleeps", ids, "a cat"], truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == [*ids[:7], 2] and given.prompt_token_ids == ids[:8]
    assert short.prompt_token_ids == [*ids[:5], 2]
    for wrong in (0, -2, 9, True, 2.0, "3"):
        with pytest.raises(RequestError, match="truncate_prompt_tokens must be -1 or .* from 1 to 8"):
            llm.embed("a cat", truncate_prompt_tokens=wrong)  # type: ignore[arg-type]


def test_a_text_longer_than_the_files_have_it_is_refused_unless_more_is_asked_for(tmp_path: Path) -> None:
    oracle = write_embedder(tmp_path)
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False})
    (output,) = engine(tmp_path).embed("a" * 19)
    assert len(output.prompt_token_ids) == 20
    with pytest.raises(RequestError, match="has 21 tokens; with max_model_len 20 "):
        engine(tmp_path).embed("a" * 20)
    (output,) = engine(tmp_path, max_model_len=40).embed("a" * 30)
    wanted = last_state(oracle, tokens_of(tmp_path, "a" * 30))
    check_close(output.outputs.embedding, torch.nn.functional.normalize(wanted, dim=0))
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 1 << 20})
    assert engine(tmp_path).engine.max_length == 1024  # the model's own


def test_a_model_without_a_head_says_that_it_cannot_generate(headless: Path) -> None:
    llm = engine(headless)
    for ask in (lambda: llm.generate("a"), lambda: list(llm.stream("a"))):
        with pytest.raises(RequestError, match="no head"):
            ask()
    with pytest.raises(RequestError, match="for embeddings"):
        llm.score("a", "b")
    model = LlamaForCausalLM.from_pretrained(headless)
    for call in (lambda: model.generate([[1, 2]]), lambda: model(torch.tensor([[1, 2]]))):
        with pytest.raises(ValueError, match="no head"):
            call()


def test_a_tied_head_generates_although_the_files_have_none(tmp_path: Path) -> None:
    write_embedder(tmp_path, tie_word_embeddings=True)
    (output,) = engine(tmp_path).generate("a")
    assert output.outputs[0].token_ids


@pytest.mark.parametrize("recorded_at", [1, 1 << 60], ids=["recorded", "plain"])
def test_bits_do_not_depend_on_company(
    recorded_at: int, headless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RECORDED_AT", recorded_at)
    texts = [f"{i} " * (i % 7 * 9 + 1) + "and so on" for i in range(24)]
    together = engine(headless, max_num_batched_tokens=48, max_num_seqs=5).embed(texts)
    llm = engine(headless, enable_prefix_caching=False)
    assert [llm.embed(text)[0].outputs for text in texts] == [output.outputs for output in together]


def test_a_quantised_embedder_embeds(headless: Path) -> None:
    (whole,), (rounded,) = (engine(headless, **more).embed("a cat") for more in ({}, {"quantize": "q8_0"}))
    found, wanted = (torch.tensor(output.outputs.embedding) for output in (rounded, whole))
    assert 0 < 1 - float(found @ wanted) < 1e-2


@pytest.mark.parametrize(
    "modules, named",
    [
        ({"Pooling": {"pooling_mode_mean_tokens": True}}, "mean_tokens"),
        ({"Pooling": {"pooling_mode_cls_token": True}}, "cls_token"),
        ({"Pooling": {**LAST_TOKEN, "pooling_mode_mean_tokens": True}}, "lasttoken and mean_tokens"),
        ({"Pooling": {"pooling_mode": "mean"}}, "mean"),
        ({"Pooling": {"pooling_mode": ["lasttoken", "max"]}}, "max"),
        ({"Pooling": {}}, "mean_tokens"),
        ({"Pooling": LAST_TOKEN, "Dense": {}}, "Dense"),
        ({"LogitScore": {"true_token_id": "yes"}}, "true_token_id"),
    ],
    ids=str,
)
def test_other_ways_to_pool_are_refused_by_name(modules: Any, named: str, tmp_path: Path) -> None:
    write_embedder(tmp_path)
    write_modules(tmp_path, **modules)
    with pytest.raises(CheckpointError, match=named):
        LlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "file, content",
    [
        ("modules.json", {}),
        ("modules.json", [5]),
        ("modules.json", [{"type": "Pooling"}]),
        ("modules.json", [{"type": "Pooling", "path": "../.."}]),
        ("1_Pooling/config.json", []),
        ("sentence_bert_config.json", []),
        ("sentence_bert_config.json", {"max_seq_length": 0}),
        ("sentence_bert_config.json", {"max_seq_length": "512"}),
        ("config_sentence_transformers.json", {"prompts": ["query"]}),
        ("config_sentence_transformers.json", {"prompts": {"query": 5}}),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"}),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": []}),
    ],
    ids=str,
)
def test_files_that_make_no_sense_are_refused(file: str, content: Any, tmp_path: Path) -> None:
    folder = tmp_path / "inner" / "folder"
    folder.mkdir(parents=True)
    write_embedder(folder)
    write_json(tmp_path / "config.json", LAST_TOKEN)  # which lies outside
    write_json(folder / file, content)
    with pytest.raises(CheckpointError, match=r"\.json|Pooling"):
        LlamaForCausalLM.from_pretrained(folder)


def test_gguf_files_say_how_they_pool_too(tmp_path: Path) -> None:
    oracle = write_embedder(tmp_path, tie_word_embeddings=True)
    write_gguf(tmp_path / "last.gguf", tmp_path, pooling_type=gguf.PoolingType.LAST, add_eos_token=True)
    (output,) = engine(tmp_path / "last.gguf").embed("cat")
    assert output.prompt_token_ids == tokens_of(tmp_path, "cat")
    wanted = last_state(oracle, output.prompt_token_ids)
    check_close(output.outputs.embedding, torch.nn.functional.normalize(wanted, dim=0))
    write_gguf(tmp_path / "mean.gguf", tmp_path, pooling_type=gguf.PoolingType.MEAN)
    with pytest.raises(CheckpointError, match=r"qwen3\.pooling_type.*mean"):
        LlamaForCausalLM.from_pretrained(tmp_path / "mean.gguf")


def test_a_prompt_of_no_such_name_or_for_token_ids_is_refused(headless: Path) -> None:
    llm = engine(headless)
    with pytest.raises(RequestError, match="prompt_name 'passage' .*'query', 'document'"):
        llm.embed("a", prompt_name="passage")
    with pytest.raises(RequestError, match=r"prompt_name \['query'\] is not one of the model's"):
        llm.embed("a", prompt_name=["query"])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt_name is for texts"):
        llm.embed([5], prompt_name="query")


def test_a_server_embeds_for_openais_client_and_does_not_generate(headless: Path) -> None:
    expected = [output.outputs.embedding for output in engine(headless).embed(TEXTS, prompt_name="query")]
    with running(headless) as server, server.client(is_strict=False) as client:
        asked = {"model": NAME, "input": TEXTS, "extra_body": {"prompt_name": "query"}}
        assert [found.embedding for found in client.embeddings.create(**asked).data] == expected
        (cut, *_) = client.embeddings.create(**asked, dimensions=8).data
        wanted = torch.nn.functional.normalize(torch.tensor(expected[0][:8]), dim=0)
        torch.testing.assert_close(torch.tensor(cut.embedding), wanted)
        for more in ({"input": "a", "prompt_name": "passage"}, {"input": [5], "prompt_name": "query"}):
            response = server.post("/v1/embeddings", **more)
            assert response.status_code == 400 and error_of(response)["param"] == "prompt_name"
        response = server.post("/v1/completions", prompt="a")
        assert response.status_code == 400 and "no head" in error_of(response)["message"]
        response = server.post("/v1/rerank", query="a", documents=["b"])
        assert response.status_code == 400 and "for embeddings" in error_of(response)["message"]
        assert answered(server.http.get("/health"))
        server.check_idle()
