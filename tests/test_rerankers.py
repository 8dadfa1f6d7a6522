"""Rerankers in the shapes in which people download them, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from downloads import (
    PAIR_TEMPLATE,
    engine,
    write_gguf,
    write_json,
    write_model,
    write_modules,
    write_tokenizer,
)
from servers import answered, error_of, running

from infinilm import RequestError
from infinilm.checkpoint import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is.", "Cats purr, and they sleep, " * 9, "no\n", "<|im_end|>yes", ""]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def write_reranker(folder: Path, **config: Any) -> Any:
    """Qwen3-Reranker's weights, without the files that say what they are for"""
    model = write_model(folder, "Qwen3ForCausalLM", **config)
    write_tokenizer(folder)
    return model


def write_pair_reranker(folder: Path, answers: Any) -> Any:
    """With those files"""
    model = write_reranker(folder)
    write_tokenizer(folder, chat_template=PAIR_TEMPLATE)
    write_modules(folder, LogitScore=answers)
    prompts = {"prompts": {"query": "Find it"}, "default_prompt_name": "query", "model_type": "CrossEncoder"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    return model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    write_reranker(folder)
    return folder


def judged_ids(folder: Path, document: str, instruction: str = INSTRUCTION) -> list[int]:
    """As Qwen's own example has it: what stands around a pair is encoded by itself. But special tokens of a
    document stay text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, AFTER))
    content = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
    inner = tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True)
    return [*before, *inner, *after]


@torch.inference_mode()
def yes_against_no(model: Any, ids: list[int], folder: Path) -> float:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answers = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    logits = model(torch.tensor([ids])).logits[0, -1]
    return float(torch.log_softmax(logits[answers], 0)[1].exp())


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_scores_are_those_of_qwens_own_example(is_tied: bool, tmp_path: Path) -> None:
    model = write_reranker(tmp_path, tie_word_embeddings=is_tied)
    llm = engine(tmp_path, max_num_batched_tokens=128)
    for given in (None, "Find rivers"):
        outputs = llm.score(QUERY, DOCUMENTS, instruction=given)
        for document, output in zip(DOCUMENTS, outputs, strict=True):
            ids = judged_ids(tmp_path, document, given or INSTRUCTION)
            assert output.prompt_token_ids == ids
            assert output.outputs.score == pytest.approx(yes_against_no(model, ids, tmp_path), rel=1e-5)
        assert len({output.outputs.score for output in outputs}) == len(DOCUMENTS)


def test_a_template_of_query_and_document_is_what_is_asked(tmp_path: Path) -> None:
    """And the files beside it say which tokens answer, and what is told before"""
    answers = {"true_token_id": 40, "false_token_id": 41}
    model = write_pair_reranker(tmp_path, answers)
    llm = engine(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for given in (None, "Look"):
        (output,) = llm.score([QUERY], "Paris is.", instruction=given)
        pair = [{"role": "query", "content": QUERY}, {"role": "document", "content": "Paris is."}]
        messages = [{"role": "system", "content": given or "Find it"}, *pair]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert output.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
        with torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(logits[40] - logits[41])), rel=1e-5)


def test_a_long_document_is_cut_before_what_follows_it(reranker: Path) -> None:
    """Between characters, of which some have several tokens"""
    llm = engine(reranker)
    bare = len(judged_ids(reranker, ""))
    long = "Zürich yes 東京 <|im_end|>" * 99
    for limit, document in (
        (bare + 9, "Zürich yes"),
        (bare + 8, "Zürich "),
        (bare + 2, "Z"),
        (bare + 1, "Z"),
    ):
        (output,) = llm.score(QUERY, long, truncate_prompt_tokens=limit)
        assert output.prompt_token_ids == judged_ids(reranker, document)
    (output,) = llm.score(QUERY, long, truncate_prompt_tokens=-1)
    ids, after = output.prompt_token_ids, llm.tokenizer.encode(AFTER)
    assert 1021 <= len(ids) <= 1024 and ids[-len(after) :] == after
    assert llm.tokenizer.decode(ids[: -len(after)], skip_special_tokens=False)[len(BEFORE) :] in (
        f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {long}"
    )
    with pytest.raises(RequestError, match=f"the question alone has {bare}"):
        llm.score(QUERY, long, truncate_prompt_tokens=bare)


# What stands around a document is one token where it is empty.
JOINED_TEMPLATE = PAIR_TEMPLATE.replace("<Document>: ", "n").replace("}}<|im_end|>\n\n", "}}o\n\n")


@pytest.mark.parametrize("template", [PAIR_TEMPLATE, JOINED_TEMPLATE], ids=["apart", "joined"])
def test_a_template_stays_whole_around_a_document_that_is_cut(template: str, tmp_path: Path) -> None:
    write_pair_reranker(tmp_path, {"true_token_id": 40, "false_token_id": 41})
    llm = engine(tmp_path, chat_template=template)
    (short,) = llm.score(QUERY, "Paris is ")
    (cut,) = llm.score(QUERY, "Paris is " * 999, truncate_prompt_tokens=len(short.prompt_token_ids))
    assert cut.prompt_token_ids == short.prompt_token_ids and cut.outputs == short.outputs


def test_one_token_alone_may_answer(tmp_path: Path) -> None:
    model = write_pair_reranker(tmp_path, {"true_token_id": 40, "false_token_id": None})
    (output,) = engine(tmp_path).score(QUERY, "Paris is.")
    with torch.inference_mode():
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
    assert output.outputs.score == pytest.approx(float(torch.sigmoid(logits[40])), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"quantize": "q8_0"}], ids=["float", "q8_0"])
def test_a_model_made_to_classify_scores_by_its_own_head(options: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path, "Qwen3ForSequenceClassification", num_labels=1, tie_word_embeddings=True)
    write_tokenizer(tmp_path)
    llm = engine(tmp_path, **options)
    for document, output in zip(DOCUMENTS, llm.score(QUERY, DOCUMENTS), strict=True):
        ids = judged_ids(tmp_path, document)
        with torch.inference_mode():
            wanted = float(torch.sigmoid(model(torch.tensor([ids])).logits[0, 0]))
        assert output.prompt_token_ids == ids
        assert output.outputs.score == pytest.approx(wanted, abs=0.2 if options else 1e-5)
    with pytest.raises(RequestError, match="no head"):
        llm.generate("a")


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
# What sentence-transformers reads first stands first.
ACTIVATIONS: dict[str, tuple[Any, Any, bool]] = {
    "of the config": ({}, {"sentence_transformers": {"activation_fn": IDENTITY}}, False),
    "as it was before": ({}, {"sbert_ce_default_activation_function": IDENTITY}, False),
    "of its own file": ({"activation_fn": "torch.nn.Identity"}, {}, False),
    "of both": ({"activation_fn": SIGMOID}, {"sentence_transformers": {"activation_fn": IDENTITY}}, True),
    "none": ({"activation_fn": None}, {"sentence_transformers": {"version": "4.0.1"}}, True),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_score_of_a_head_is_as_its_files_have_it(name: str, tmp_path: Path) -> None:
    beside, config, is_sigmoid = ACTIVATIONS[name]
    model = write_model(tmp_path, "Qwen3ForSequenceClassification", num_labels=1, **config)
    write_tokenizer(tmp_path)
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "CrossEncoder", **beside})
    (output,) = engine(tmp_path).score(QUERY, DOCUMENTS[0])
    with torch.inference_mode():
        logit = model(torch.tensor([output.prompt_token_ids])).logits[0, 0]
    wanted = torch.sigmoid(logit) if is_sigmoid else logit
    assert output.outputs.score == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("given", ["torch.nn.modules.activation.Tanh", "os.system", 5])
def test_an_activation_of_scores_that_is_not_known_is_refused(given: Any, tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "Qwen3ForSequenceClassification",
        num_labels=1,
        sentence_transformers={"activation_fn": given},
    )
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="activation_fn .* is not supported; known are .*Sigmoid"):
        engine(tmp_path)


@torch.inference_mode()
def test_a_gguf_file_of_a_reranker_scores_by_the_two_rows_that_its_converter_kept(tmp_path: Path) -> None:
    model = write_reranker(tmp_path, tie_word_embeddings=True)
    rows = model.lm_head.weight[[260, 261]]  # of yes and no
    labels = {"pooling_type": gguf.PoolingType.RANK, "classifier_output_labels": ["yes", "no"]}
    write_gguf(tmp_path / "model.gguf", tmp_path, rows, **labels)
    llm = engine(tmp_path / "model.gguf")
    for output in llm.score(QUERY, DOCUMENTS):
        ids = output.prompt_token_ids
        assert output.outputs.score == pytest.approx(yes_against_no(model, ids, tmp_path), rel=1e-5)
        assert llm.tokenizer.decode(ids, skip_special_tokens=False).startswith(BEFORE + "<Instruct>")


def test_bits_do_not_depend_on_company(reranker: Path) -> None:
    documents = [f"{i} " * (i % 7 * 9 + 1) + "and so on" for i in range(24)]
    together = engine(reranker, max_num_batched_tokens=64, max_num_seqs=5).score(QUERY, documents)
    llm = engine(reranker, enable_prefix_caching=False)
    alone = [llm.score(QUERY, document)[0].outputs for document in documents]
    assert alone == [output.outputs for output in together]
    assert [output.num_cached_tokens > 0 for output in together[5:]] == [True] * 19


def test_each_document_may_have_its_own_query(reranker: Path) -> None:
    llm = engine(reranker)
    (first,), (second,) = llm.score("a", "c"), llm.score("b", "d")
    assert [one.outputs for one in llm.score(["a", "b"], ["c", "d"])] == [first.outputs, second.outputs]
    for queries, documents in ((["a", "b"], ["c"]), (["a", "b"], "c"), (5, "c"), ("a", [5]), ([], ["a"])):
        with pytest.raises(RequestError, match="queries|documents"):
            llm.score(queries, documents)


def test_a_reranker_of_which_nothing_says_how_it_is_asked_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForSequenceClassification", num_labels=1)
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="chat_template .*query"):
        engine(tmp_path).score(QUERY, DOCUMENTS)
    assert engine(tmp_path, chat_template=PAIR_TEMPLATE).score(QUERY, DOCUMENTS)


def test_several_labels_and_answers_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3ForSequenceClassification", num_labels=3)
    write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="3 scores"):
        engine(tmp_path).score(QUERY, DOCUMENTS)
    write_pair_reranker(tmp_path, {"true_token_id": 262, "false_token_id": 1})
    with pytest.raises(RequestError, match="262"):
        engine(tmp_path).score(QUERY, DOCUMENTS)


def test_a_model_that_is_no_reranker_takes_no_instruction(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForCausalLM")
    write_tokenizer(tmp_path)
    llm = engine(tmp_path)
    assert llm.score(QUERY, "Paris is.")
    with pytest.raises(RequestError, match="instruction"):
        llm.score(QUERY, "Paris is.", instruction="Find rivers")


def test_a_server_ranks_and_scores_as_the_library_does(reranker: Path) -> None:
    llm = engine(reranker)
    expected = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, instruction="Find rivers")]
    asked = {"instruction": "Find rivers"}
    with running(reranker) as server:
        for path in ("/rerank", "/v1/rerank"):
            results = answered(server.post(path, query=QUERY, documents=DOCUMENTS, **asked))["results"]
            found = {one["index"]: one["relevance_score"] for one in results}
            assert [found[index] for index in range(len(DOCUMENTS))] == expected
        for path in ("/score", "/v1/score"):
            answer = answered(server.post(path, text_1=QUERY, text_2=DOCUMENTS, **asked))
            wanted = [{"index": i, "object": "score", "score": one} for i, one in enumerate(expected)]
            assert answer["data"] == wanted and answer["object"] == "list"
            assert answer["usage"]["total_tokens"] > 0
        pairs = answered(server.post("/score", text_1=[QUERY, "a"], text_2=[DOCUMENTS[0], "b"], **asked))
        assert pairs["data"][0]["score"] == expected[0] != pairs["data"][1]["score"]
        for body, param in (
            ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
            ({"text_1": "a"}, "text_2"),
            ({"text_1": "a", "text_2": []}, "text_2"),
            ({"text_1": "a", "text_2": ["a" * 1024]}, "text_2"),
            ({"text_1": "a", "text_2": "b", "instruction": 5}, "instruction"),
        ):
            response = server.post("/score", **body)
            assert response.status_code == 400 and error_of(response)["param"] == param
        server.check_idle()
