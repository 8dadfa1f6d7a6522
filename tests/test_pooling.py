"""Embeddings and rankings over HTTP: what they are, to whom they belong, and what is refused."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import HIDDEN, VOCAB_SIZE, write_model
from patience import wait_until
from servers import NAME, Running, answered, error_of, request_of, running

from infinilm import LLM, SamplingParams
from infinilm.models.judging import ASKED, PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_LENGTH = 4096
DOCUMENTS = ["Paris is the capital of France.", "Cats purr.", "The Seine flows through Paris."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=MAX_LENGTH)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, max_num_seqs=8, max_queue=56, max_queue_tokens=1 << 20) as made:
        yield made


def embed(server: Running, given: Any, **body: Any) -> list[list[float]]:
    return [one["embedding"] for one in answered(server.post("/v1/embeddings", input=given, **body))["data"]]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return error_of(response)


# ---- embeddings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}], ids=["base64", "float"])
def test_openais_client_gets_what_the_library_embeds(idle: Running, llm: LLM, options: Any) -> None:
    """It asks for base64 unless it is told otherwise, which its own strict check does not know."""
    with idle.client(is_strict=bool(options)) as client:
        answer = client.embeddings.create(model=NAME, input=["hello", "a cat"], **options)
    expected = [found.outputs.embedding for found in llm.embed(["hello", "a cat"])]
    assert [found.embedding for found in answer.data] == expected
    assert [found.index for found in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len("hello" + "a cat")


def test_base64_is_little_endian_float32(idle: Running) -> None:
    (numbers,) = embed(idle, "hello")
    (text,) = embed(idle, "hello", encoding_format="base64")
    assert list(struct.unpack(f"<{HIDDEN}f", base64.b64decode(str(text)))) == numbers
    assert math.hypot(*numbers) == pytest.approx(1.0)


def test_texts_and_their_token_ids_alone_or_in_a_list_are_the_same(idle: Running) -> None:
    tokens = idle.post("/tokenize", prompt="hello").json()["tokens"]
    (expected,) = embed(idle, "hello")
    assert embed(idle, tokens) == embed(idle, [tokens]) == embed(idle, ["hello"]) == [expected]
    assert embed(idle, [tokens, "hello"]) == [expected, expected]


def test_dimensions_cut_off_and_scale_anew(idle: Running) -> None:
    (whole,), (cut,) = embed(idle, "hello"), embed(idle, "hello", dimensions=8)
    length = math.hypot(*whole[:8])
    assert cut == pytest.approx([number / length for number in whole[:8]])
    error = refusal(idle.post("/v1/embeddings", input="hello", dimensions=HIDDEN + 1))
    assert error["param"] == "dimensions" and str(HIDDEN) in error["message"]


def test_ids_of_another_tokenizer_are_refused_with_a_hint(idle: Running) -> None:
    error = refusal(idle.post("/v1/embeddings", input=[[57668, VOCAB_SIZE]]))
    assert error["param"] == "input" and "57668" in error["message"] and "tiktoken" in error["message"]
    assert refusal(idle.post("/v1/embeddings", input=[-1]))["param"] == "input"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * (MAX_LENGTH + 1)}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "8"}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": MAX_LENGTH + 1}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_wrong_embedding_is_refused_by_its_field(idle: Running, body: dict[str, Any], param: str) -> None:
    assert refusal(idle.post("/v1/embeddings", **body))["param"] == param


def test_a_prompt_of_the_whole_context_is_embedded(idle: Running) -> None:
    assert len(embed(idle, "a" * MAX_LENGTH)[0]) == HIDDEN
    error = refusal(idle.post("/v1/embeddings", input="a" * (MAX_LENGTH + 1)))
    assert error["code"] == "context_length_exceeded" and str(MAX_LENGTH) in error["message"]


def test_longer_texts_and_token_ids_are_cut_at_their_end_where_that_is_asked_for(idle: Running) -> None:
    long = "".join(chr(97 + index % 26) for index in range(MAX_LENGTH + 9))
    tokens = idle.post("/tokenize", prompt=long[:50]).json()["tokens"]
    assert embed(idle, [long, "b"], truncate_prompt_tokens=-1) == embed(idle, [long[:MAX_LENGTH], "b"])
    assert embed(idle, [long, tokens], truncate_prompt_tokens=7) == embed(idle, [long[:7]]) * 2
    answer = answered(idle.post("/v1/embeddings", input=[long, "b"], truncate_prompt_tokens=7))
    assert answer["usage"]["prompt_tokens"] == 8


def test_many_inputs_beside_other_requests_are_as_if_alone(idle: Running) -> None:
    texts = [f"text {index} of many" for index in range(100)]
    alone = [embed(idle, text)[0] for text in texts[:3]]
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(idle.chat, "hello", max_tokens=50, ignore_eos=True) for _ in range(4)]
        together = embed(idle, texts)
        assert all(answer.result().status_code == 200 for answer in beside)
    assert together[:3] == alone and len(together) == 100


# ---- rankings ----------------------------------------------------------------------------------------------


def rerank(server: Running, documents: list[Any], query: str = "France?", **body: Any) -> dict[str, Any]:
    return answered(server.post("/v1/rerank", query=query, documents=documents, **body))


def probability(llm: LLM, prompt: list[int], token_id: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, allowed_token_ids=[token_id])
    (answer,) = llm.generate([prompt], params)
    (found,) = answer.outputs[0].logprobs or ()
    return math.exp(found[token_id].logprob)


def score_by_hand(llm: LLM, document: str) -> float:
    """P(yes) / (P(yes) + P(no)), by logprobs of the tokens that the words begin with"""
    question = ASKED.content.format(query="France?", document=document)
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
    yes, no = (
        sum(probability(llm, prompt, llm.tokenizer.encode(word)[0]) for word in words)
        for words in (("yes", "Yes"), ("no", "No"))
    )
    return yes / (yes + no)


def test_scores_are_the_probability_of_yes_against_no(idle: Running, llm: LLM) -> None:
    answer = rerank(idle, DOCUMENTS)
    scores = {found["index"]: found["relevance_score"] for found in answer["results"]}
    assert [scores[index] for index in range(3)] == pytest.approx(
        [score_by_hand(llm, document) for document in DOCUMENTS]
    )
    assert len(set(scores.values())) == 3


def test_the_built_in_model_finds_what_answers_a_query(default_model_path: Path) -> None:
    documents = ["Bananas are yellow.", "Paris is the capital of France.", "Berlin is in Germany."]
    with running(default_model_path) as server:
        results = rerank(server, documents, "What is the capital of France?")["results"]
    assert results[0]["index"] == 1


def test_results_are_sorted_and_independent_of_the_other_documents(idle: Running) -> None:
    results = rerank(idle, DOCUMENTS)["results"]
    assert [one["relevance_score"] for one in results] == sorted(
        (one["relevance_score"] for one in results), reverse=True
    )
    for one in results:
        (alone,) = rerank(idle, [{"text": DOCUMENTS[one["index"]]}])["results"]
        assert alone["relevance_score"] == one["relevance_score"]
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}


def test_the_best_few_may_be_asked_for_without_their_texts(idle: Running) -> None:
    whole = rerank(idle, DOCUMENTS, top_n=9)
    best = rerank(idle, DOCUMENTS, top_n=1, return_documents=False)
    assert len(whole["results"]) == 3
    assert best["results"] == [{name: whole["results"][0][name] for name in ("index", "relevance_score")}]
    assert best["usage"]["total_tokens"] == whole["usage"]["total_tokens"] > 0
    assert best["id"].startswith("rerank-") and best["model"] == NAME
    for path in ("/rerank", "/v2/rerank"):  # the second is Cohere's
        same = idle.post(path, query="France?", documents=DOCUMENTS, top_n=1, return_documents=False).json()
        assert same["results"] == best["results"]


def test_a_ranking_has_the_meta_without_which_the_ai_sdk_reads_none(idle: Running) -> None:
    """Its provider for Cohere wants the key, whatever stands under it."""
    answer = answered(idle.post("/v2/rerank", query="France?", documents=DOCUMENTS))
    assert answer["meta"] == {"tokens": {"input_tokens": answer["usage"]["prompt_tokens"]}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "\ud800", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a"], "instruction": "\ud800"}, "instruction"),
        ({"query": "a", "documents": ["\ud800"]}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [1]}, "documents"),
        ({"query": "a", "documents": [{"text": "a", "title": "b"}]}, "documents"),
        ({"query": "a", "documents": ["a" * MAX_LENGTH]}, "documents"),
        ({"query": "a", "documents": ["a"] * 2049}, "documents"),
        ({"query": "a", "documents": ["a"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["a"], "top_n": True}, "top_n"),
        ({"query": "a", "documents": ["a"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_wrong_ranking_is_refused_by_its_field(idle: Running, body: dict[str, Any], param: str) -> None:
    assert refusal(idle.http.post("/v1/rerank", content=json.dumps(body)))["param"] == param


def test_a_wrong_query_of_a_score_is_refused_by_its_field(idle: Running) -> None:
    body = json.dumps({"text_1": ["a", "\ud800"], "text_2": ["a", "b"]})
    assert refusal(idle.http.post("/score", content=body))["param"] == "text_1"


@pytest.mark.parametrize(("query", "document"), [("a" * MAX_LENGTH, "b"), ("a", "b" * MAX_LENGTH)])
def test_a_query_and_a_document_beyond_the_context_are_told_together(
    idle: Running, query: str, document: str
) -> None:
    told = refusal(idle.post("/v1/rerank", query=query, documents=[document]))
    assert "a query with one of documents has" in told["message"]
    assert told["code"] == "context_length_exceeded"


def test_where_a_ranking_is_to_be_cut_the_question_after_the_document_stays(idle: Running) -> None:
    bare = rerank(idle, [""])["usage"]["total_tokens"]
    for limit, kept in ((bare + 6, 6), (-1, MAX_LENGTH - bare)):
        cut = rerank(
            idle, ["b" * 2 * MAX_LENGTH, "short"], truncate_prompt_tokens=limit, return_documents=False
        )
        assert cut["results"] == rerank(idle, ["b" * kept, "short"], return_documents=False)["results"]
        assert cut["usage"]["total_tokens"] == bare + kept + bare + len("short")
    told = refusal(
        idle.post("/v1/rerank", query="a" * MAX_LENGTH, documents=["b"], truncate_prompt_tokens=-1)
    )
    assert told["param"] == "truncate_prompt_tokens" and "no room" in told["message"]


def test_so_many_tokens_of_each_document_are_read_as_a_ranking_asks_for(idle: Running) -> None:
    asked = {"query": "France?", "documents": ["b" * 2 * MAX_LENGTH, "short"]}
    cut = answered(idle.post("/v2/rerank", **asked, max_tokens_per_doc=6))
    short = rerank(idle, ["bbbbbb", "short"])
    scores = [(one["index"], one["relevance_score"]) for one in cut["results"]]
    assert scores == [(one["index"], one["relevance_score"]) for one in short["results"]]
    assert {one["document"]["text"] for one in cut["results"]} == set(asked["documents"])
    whole = answered(idle.post("/v2/rerank", query="France?", documents=DOCUMENTS, max_tokens_per_doc=4096))
    assert whole["results"] == rerank(idle, DOCUMENTS)["results"]


def test_a_model_without_a_template_is_asked_in_plain_text(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", max_position_embeddings=MAX_LENGTH, chat_template=None)
    with running(folder) as server:
        answer = rerank(server, ["x"], "q")
    asked = PLAIN.format(question=ASKED.content.format(query="q", document="x"))
    assert answer["usage"]["total_tokens"] == len(asked)
    assert 0 < answer["results"][0]["relevance_score"] < 1


# ---- both --------------------------------------------------------------------------------------------------


def test_who_leaves_ends_what_was_asked(idle: Running) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": ["a" * 4000] * 60}),
        ("/v1/rerank", {"query": "a", "documents": ["a" * 3000] * 60}),
    ):
        caller = idle.open(request_of(path, json.dumps(body).encode()))
        wait_until(lambda: idle.llm.stats().num_running)
        caller.close()
        idle.check_idle()


def test_too_many_are_told_to_come_again_before_they_are_encoded(idle: Running) -> None:
    body = json.dumps({"input": ["a"] * 33}).encode()
    with idle.paused():
        callers = [idle.open(request_of("/v1/embeddings", body)) for _ in range(2)]
        wait_until(lambda: len(idle.process.server.calls) == 2)
        response = idle.post("/v1/embeddings", input=["a"] * 33)
        refusal(response, 429)
        assert int(response.headers["retry-after"]) >= 1
    for caller in callers:
        assert caller.recv(12) == b"HTTP/1.1 200"
        caller.close()
