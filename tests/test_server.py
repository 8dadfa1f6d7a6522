"""The server as its callers see it: by OpenAI's own client, by the byte, and by those who mean it ill."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engines import VOCAB_SIZE
from patience import PATIENCE, wait_until
from servers import (
    DIGIT,
    ENDLESS,
    GREEDY,
    HELLO,
    MAX_LENGTH,
    NAME,
    Running,
    answered,
    error_of,
    loading,
    read_until,
    request_of,
    running,
    texts,
)

from infinilm import LLM, AsyncLLM, SamplingParams
from infinilm.engine.grammar import GrammarCompiler
from infinilm.server import exchange, http_limits
from infinilm.server.app import OPERATIONS
from infinilm.server.exchange import Settings
from infinilm.server.service import Service
from infinilm.tokenizer import chat

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def default_server(default_model_path: Path) -> Iterator[Running]:
    """The built-in model, for what needs real text"""
    with running(default_model_path, engine={"kv_cache_memory": "256MB"}) as made:
        yield made


# ---- chats -------------------------------------------------------------------------------------------------


def test_openais_client_reads_a_chat(idle: Running, llm: LLM) -> None:
    with idle.client() as client:
        answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=8, extra_body=GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == texts(llm, max_tokens=8)[0] and choice.finish_reason == "length"
    assert answer.id.startswith("chatcmpl-") and answer.model == NAME
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 8)


def test_openais_client_reads_a_stream_which_says_what_the_whole_answer_says(idle: Running, llm: LLM) -> None:
    with idle.client() as client:
        stream = client.chat.completions.create(
            model=NAME,
            messages=HELLO,
            max_tokens=40,
            n=2,
            seed=1,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = list(stream)
    said = [
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) for i in (0, 1)
    ]
    assert said == texts(llm, max_tokens=40, n=2, seed=1, temperature=1.0)
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)
    roles = [chunk.choices[0].index for chunk in chunks if chunk.choices[0].delta.role]
    assert roles == [0, 1]
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert ends == ["length", "length"]


def test_usage_comes_last_where_it_is_asked_for_and_tells_cached_tokens(idle: Running) -> None:
    content = "a prompt of some blocks of sixteen tokens, which a second request finds in the cache"
    messages = [{"role": "user", "content": content}]
    for is_second in (False, True):
        *chunks, last = idle.stream(
            messages=messages, max_tokens=3, stream_options={"include_usage": True}, **GREEDY
        )
        assert all(chunk["usage"] is None for chunk in chunks) and last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        num_cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert num_cached == last["timings"]["cache_n"] and (num_cached >= 64) == is_second


@pytest.mark.parametrize("asked", [{}, {"path": "/v1/completions", "prompt": "hello"}], ids=["chat", "text"])
def test_usage_so_far_is_in_every_chunk_where_it_is_asked_for(asked: Any, idle: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = idle.stream(**asked, max_tokens=5, stream_options=options, return_progress=True, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5  # a busy machine may tell all tokens at once
    assert chunks[-1]["usage"] == last["usage"] and last["choices"] == []
    alone = idle.stream(**asked, max_tokens=5, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in alone)


def test_timings_stand_in_the_last_chunk_alone(idle: Running) -> None:
    *chunks, last = idle.stream(max_tokens=5, n=2, **GREEDY)
    assert not any("timings" in chunk for chunk in chunks)
    assert last["timings"]["prompt_n"] + last["timings"]["cache_n"] == 11
    assert last["timings"]["predicted_n"] == 10 and last["timings"]["predicted_per_second"] > 0


def test_progress_of_a_prompt_is_told_where_it_is_asked_for(folder: Path) -> None:
    with running(folder, engine={"max_num_batched_tokens": 16}) as server:
        content = "word " * 3000
        chunks = server.stream(
            messages=[{"role": "user", "content": content}], max_tokens=2, return_progress=True
        )
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert told[-1]["processed"] == told[-1]["total"] > 15_000
        assert [one["processed"] for one in told] == sorted({one["processed"] for one in told})
        assert len(told) > 1 and all(chunk["choices"] for chunk in chunks)
        assert not any("prompt_progress" in chunk for chunk in server.stream(max_tokens=2))


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(idle: Running) -> None:
    asked = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = idle.chat(**asked).json()["choices"][0]["logprobs"]["content"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in idle.stream(**asked)]
    assert [one for part in parts if part for one in part["content"]] == whole and len(whole) == 12


def test_a_seed_gives_the_first_of_n_the_answer_of_one(idle: Running) -> None:
    alone, *_ = idle.chat(seed=7, max_tokens=9).json()["choices"]
    first, *_ = idle.chat(seed=7, max_tokens=9, n=3).json()["choices"]
    assert first["message"] == alone["message"]


def test_a_stop_string_is_never_half_emitted(idle: Running, llm: LLM) -> None:
    (text,) = texts(llm, max_tokens=60)
    stop = text[20:24]
    chunks = idle.stream(max_tokens=60, stop=[stop], **GREEDY)
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said == text[: text.index(stop)] and chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_is_kept(strict: bool, idle: Running) -> None:
    schema = {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 2}
    wanted = {"type": "json_schema", "json_schema": {"name": "two", "schema": schema, "strict": strict}}
    answer = idle.chat(response_format=wanted, max_tokens=40).json()["choices"][0]
    assert set(json.loads(answer["message"]["content"])) <= {1, 22} and answer["finish_reason"] == "stop"


@pytest.mark.parametrize("key", ["schema", "value"])  # llama.cpp's, and what Hugging Face's client sends
def test_the_schema_of_a_json_object_is_kept(key: str, idle: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    wanted = {"type": "json_object", key: {**schema, "additionalProperties": False}}
    answer = idle.chat(response_format=wanted, max_tokens=100).json()["choices"][0]
    assert json.loads(answer["message"]["content"])["a"] in (1, 22) and answer["finish_reason"] == "stop"


PAIR = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a", "b"],
    "$defs": {"b": {"type": "object", "properties": {"c": {"const": 3}}, "required": ["c"]}},
}
AS_JSON = {"type": "json_schema", "name": "pair", "schema": PAIR}


@pytest.mark.parametrize(
    "path, asked",
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": AS_JSON}}),
        ("/v1/chat/completions", {"structured_outputs": {"json": PAIR}}),
        ("/v1/chat/completions", {"structured_outputs": {"json": json.dumps(PAIR)}}),
        ("/v1/responses", {"input": "hello", "text": {"format": AS_JSON}}),
        ("/v1/messages", {"output_config": {"format": AS_JSON}}),
    ],
)
def test_an_answer_has_no_properties_that_its_schema_does_not_name(
    path: str, asked: dict[str, Any], idle: Running
) -> None:
    limit = "max_output_tokens" if "input" in asked else "max_tokens"
    given = {} if "input" in asked else {"messages": HELLO}
    found = idle.post(path, **given, **asked, **{limit: 400}).json()
    text = {
        "/v1/chat/completions": lambda: found["choices"][0]["message"]["content"],
        "/v1/responses": lambda: found["output"][0]["content"][0]["text"],
        "/v1/messages": lambda: found["content"][0]["text"],
    }[path]()
    assert json.loads(text) in [{"a": a, "b": {"c": 3}} for a in (1, 22)]


def test_keys_of_a_structure_that_ask_for_nothing_are_not_missed(idle: Running) -> None:
    unasked = {"json": None, "json_object": False, "disable_any_whitespace": False, "structural_tag": None}
    answer = idle.chat(structured_outputs={"regex": "ab", **unasked}, max_tokens=9).json()["choices"][0]
    assert answer["message"]["content"] == "ab"


DIAL = {"type": "function", "function": {"name": "dial", "parameters": DIGIT}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "dial"}}])
def test_a_forced_call_is_one_which_no_stop_string_ends(choice: Any, idle: Running) -> None:
    without_end = {"logit_bias": {"0": -100}, "max_tokens": 4000}
    asked = {"tools": [DIAL], "tool_choice": choice, "stop": ['"', "dial", "\n"], **without_end}
    answer = idle.chat(**asked).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["digit"] in (1, 2)
    assert answer["finish_reason"] == "tool_calls"


RING = {"type": "function", "function": {"name": "ring"}}


def allowed_tools(mode: str, name: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_of_the_tools_that_are_shown_only_those_allowed_are_called(mode: str, idle: Running) -> None:
    asked = {"tools": [RING, DIAL], "tool_choice": allowed_tools(mode, "dial")}
    shown = {"messages": HELLO, "max_tokens": 1, **asked}
    assert idle.prompt_of(CHAT, **shown) == idle.prompt_of(CHAT, **{**shown, "tool_choice": mode})
    if mode == "required":
        for seed in range(4):
            answer = answered(idle.chat(**asked, seed=seed, temperature=2, max_tokens=4000))["choices"][0]
            assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["dial"]


CUSTOM = {"syntax": "regex", "definition": "(ab|cd)\n"}
WRITE = {"type": "custom", "custom": {"name": "write", "format": {"type": "grammar", "grammar": CUSTOM}}}


def test_a_custom_tool_gets_its_text_in_a_chat(idle: Running) -> None:
    choice = {"type": "custom", "custom": {"name": "write"}}
    asked: Any = {"tools": [DIAL, WRITE], "tool_choice": choice, "max_tokens": 300, **GREEDY}
    answer = answered(idle.chat(**asked))["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"]["name"] == "write"
    assert call["custom"]["input"] in ("ab\n", "cd\n") and answer["finish_reason"] == "tool_calls"
    chunks = [one["choices"][0]["delta"].get("tool_calls") for one in idle.stream(CHAT, **asked)]
    first, *rest = [one for (one,) in filter(None, chunks)]
    assert (first["type"], first["custom"]) == ("custom", {"name": "write", "input": ""})
    assert "".join(one["custom"]["input"] for one in rest) == call["custom"]["input"]
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    shown = idle.prompt_of(CHAT, messages=[*HELLO, *said], tools=[WRITE], max_tokens=1)
    assert json.dumps(call["custom"]["input"]) in shown
    with idle.client() as client:
        by_client: Any = {"messages": HELLO, "tools": [WRITE], "tool_choice": choice}
        found: Any = client.chat.completions.create(model=NAME, **by_client)
    assert found.choices[0].message.tool_calls[0].custom.input in ("ab\n", "cd\n")


YES_OR_NO = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": YES_OR_NO}}


def first_letter(server: Running, letter: str) -> dict[str, Any]:
    """What makes an answer begin with it, if it may"""
    (token,) = server.post("/tokenize", prompt=letter).json()["tokens"]
    return {"logit_bias": {str(token): 100}, "max_tokens": 4000}


@pytest.mark.parametrize("is_strict", [True, False])
def test_who_is_free_to_call_may_say_what_a_schema_wants(is_strict: bool, idle: Running) -> None:
    tool = {**DIAL, "function": {**DIAL["function"], "strict": is_strict}}
    asked = {"tools": [tool], "response_format": ANSWER, **first_letter(idle, "{")}
    (choice,) = answered(idle.chat(**asked))["choices"]
    assert json.loads(choice["message"]["content"])["yes"] in (True, False)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_who_has_a_schema_to_answer_by_may_call_a_tool(choice: str, idle: Running) -> None:
    tool = {**DIAL, "function": {**DIAL["function"], "strict": True}}
    asked = {"tools": [tool], "tool_choice": choice, "response_format": ANSWER, **first_letter(idle, "<")}
    (found,) = answered(idle.chat(**asked))["choices"]
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["digit"] in (1, 2)
    assert found["message"]["content"] is None and found["finish_reason"] == "tool_calls"


def note_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: list[str]) -> None:
    call = getattr(owner, name)

    def noted(*given: Any, **options: Any) -> Any:
        calls.append(name)
        return call(*given, **options)

    monkeypatch.setattr(owner, name, noted)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_request_is_made_and_its_grammar_compiled_once(
    is_stream: bool, idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its answer begins, so that what is wrong can still be told by a status"""
    calls: list[str] = []
    note_calls(monkeypatch, idle.llm.engine, "make", calls)
    note_calls(monkeypatch, GrammarCompiler, "compile", calls)
    choices = ["once", f"as a stream: {is_stream}"]
    answer = idle.chat(stream=is_stream, structured_outputs={"choice": choices}, max_tokens=30)
    assert answer.status_code == 200 and calls == ["make", "compile"]


def test_max_tokens_beyond_the_context_is_clamped(folder: Path) -> None:
    with running(folder, engine={"max_model_len": 64}) as server:
        answer = server.chat(max_tokens=(1 << 31) - 1, **GREEDY).json()
        assert answer["usage"]["total_tokens"] == 64 and answer["choices"][0]["finish_reason"] == "length"


def test_a_salt_keeps_prefixes_apart(idle: Running) -> None:
    content = "a prompt that only those of the same salt may find in the cache of this server"

    def num_cached(salt: str) -> int:
        usage = idle.chat(content, max_tokens=1, cache_salt=salt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [num_cached(salt) for salt in ("a", "b", "a")] == [0, 0, 80]


def test_parts_of_content_and_an_answer_without_any_are_rendered(idle: Running) -> None:
    said: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": None},
    ]
    tokens = idle.post("/tokenize", messages=said).json()["tokens"]
    text = idle.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text == "system:be\nbrief\nassistant:\n"


# ---- completions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"], [66, 67], [[66, 67], [68, 69]]], ids=str)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(prompt: Any, idle: Running, llm: LLM) -> None:
    with idle.client() as client:
        answer = client.completions.create(model=NAME, prompt=prompt, extra_body=GREEDY)
    given: Any = prompt if isinstance(prompt[0], str | list) and not isinstance(prompt, str) else [prompt]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=16)
    wanted = [out.outputs[0].text for out in llm.generate(given, params)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(len(wanted)))


def test_echo_has_the_logprobs_of_the_prompt_as_lm_eval_reads_them(idle: Running, llm: LLM) -> None:
    prompts = [[66, 67, 68, 69, 70], [90, 91, 92]]
    asked = {"logprobs": 1, "echo": True, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = idle.post("/v1/completions", prompt=prompts, **asked).json()["choices"]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, logprobs=1)
    for prompt, choice, output in zip(prompts, choices, llm.generate(prompts, params), strict=True):
        found = choice["logprobs"]
        assert output.prompt_logprobs is not None
        wanted = [
            known[token].logprob for token, known in zip(prompt, output.prompt_logprobs, strict=True) if known
        ]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == wanted and len(found["tokens"]) == len(prompt) + 1
        assert choice["text"] == llm.tokenizer.decode(prompt) + output.outputs[0].text
        for tokens, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
            assert tokens in top and len(top) <= 2


def test_a_text_that_tokens_share_is_told_with_the_token_itself_or_the_likeliest(
    idle: Running, llm: LLM
) -> None:
    asked = {"logprobs": 20, "max_tokens": 30, "seed": 5, "ignore_eos": True}
    found = idle.post("/v1/completions", prompt=[66, 67], **asked).json()["choices"][0]["logprobs"]
    (output,) = llm.generate([[66, 67]], SamplingParams(**asked))
    (drawn,) = output.outputs
    assert drawn.logprobs is not None and len({len(top) for top in found["top_logprobs"]}) > 1
    told = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    for (token, logprob, top), known in zip(told, drawn.logprobs, strict=True):
        assert known is not None and top[token] == logprob
        for text in top.keys() - {token}:
            assert top[text] == max(one.logprob for one in known.values() if one.decoded_token == text)


def test_the_prompt_alone_can_be_wanted_back(idle: Running) -> None:
    answer = idle.post("/v1/completions", prompt="abc", echo=True, max_tokens=0, logprobs=0).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0


def test_a_stream_of_several_prompts_says_what_the_whole_answer_says(idle: Running) -> None:
    asked = {"prompt": ["ab", "cde"], "n": 2, "echo": True, "logprobs": 1, "seed": 3, "max_tokens": 9}
    whole = idle.post("/v1/completions", **asked).json()["choices"]
    chunks = idle.stream("/v1/completions", **asked)
    for choice in whole:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [item for one in own if one["logprobs"] for item in one["logprobs"][name]]
            assert joined == choice["logprobs"][name], name
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [choice["finish_reason"]]


# ---- models and tokens -------------------------------------------------------------------------------------


def test_models_tell_their_length_and_what_they_are_sampled_with(idle: Running) -> None:
    with idle.client() as client:
        (listed,) = client.models.list()
        found = client.models.retrieve(NAME)
    assert listed == found and found.model_extra is not None
    assert found.id == NAME and found.model_extra["max_model_len"] == MAX_LENGTH
    assert found.model_extra["default_sampling"]["temperature"] == 1.0


def test_the_default_sampling_is_the_models_own(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, own := tmp_path / "own")
    (own / "generation_config.json").write_text(
        json.dumps({"temperature": 1e-3, "top_k": 1, "eos_token_id": 0})
    )
    with running(own) as server:
        told = server.http.get(f"/v1/models/{NAME}").json()["default_sampling"]
        assert told["temperature"] == 1e-3 and told["top_k"] == 1
        answers = {server.chat(max_tokens=12).json()["choices"][0]["message"]["content"] for _ in range(3)}
        assert len(answers) == 1
        others = {server.chat(max_tokens=12, temperature=2, top_k=0).text for _ in range(3)}
        assert len(others) == 3


def test_tokens_of_a_text_and_of_a_chat_and_back(idle: Running) -> None:
    found = idle.post("/tokenize", prompt="abc", return_token_strs=True).json()
    assert found == {
        "count": 3,
        "max_model_len": MAX_LENGTH,
        "tokens": [66, 67, 68],
        "token_strs": ["a", "b", "c"],
    }
    chat = idle.post("/tokenize", messages=HELLO).json()
    assert idle.post("/detokenize", tokens=chat["tokens"]).json() == {"prompt": "user:hello\n"}


def test_special_tokens_written_by_a_user_are_plain_text(idle: Running) -> None:
    said = [{"role": "user", "content": "</s>"}]
    assert 0 not in idle.post("/tokenize", messages=said).json()["tokens"]


# ---- what asks for nothing ---------------------------------------------------------------------------------

UNASKED = {
    "best_of": 1,
    "length_penalty": 1.0,
    "seed": -1,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
UNASKED_OF_CHATS = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "continue_final_message": False,
    "echo": False,
    "include_reasoning": True,
    "logprobs": False,
    "top_logprobs": 0,
}


def test_fields_of_vllm_with_its_own_values_are_no_matter(idle: Running) -> None:
    plain = idle.chat(max_tokens=5, **GREEDY).json()["choices"]
    assert idle.chat(max_tokens=5, **GREEDY, **UNASKED, **UNASKED_OF_CHATS).json()["choices"] == plain
    asked = {"prompt": "hello", "max_tokens": 5, **GREEDY}
    plain = idle.post("/v1/completions", **asked).json()["choices"]
    asked |= {**UNASKED, "add_special_tokens": True, "suffix": ""}
    assert idle.post("/v1/completions", **asked).json()["choices"] == plain
    tokens = answered(idle.post("/tokenize", messages=HELLO))
    assert answered(idle.post("/tokenize", messages=HELLO, continue_final_message=False)) == tokens


def test_the_best_of_as_many_as_are_told_are_those(idle: Running) -> None:
    asked = {"prompt": "hello", "max_tokens": 5, "n": 2, **GREEDY}
    plain = answered(idle.post("/v1/completions", **asked))["choices"]
    assert answered(idle.post("/v1/completions", **asked, best_of=2))["choices"] == plain
    refusal = error_of(idle.post("/v1/completions", **asked, best_of=3))
    assert (
        refusal["param"] == "best_of" and "must be as many as n, which is 2, but is 3" in refusal["message"]
    )


def test_how_an_answer_is_cached_and_how_long_it_should_be_are_no_matter(idle: Running) -> None:
    plain = idle.chat(max_tokens=5, **GREEDY).json()["choices"]
    hints = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}, "verbosity": "low"}
    assert idle.chat(max_tokens=5, **GREEDY, **hints).json()["choices"] == plain


def test_stop_strings_may_be_as_many_as_editors_send(idle: Running) -> None:
    asked = {"prompt": "hello", "max_tokens": 8, **GREEDY}
    said = answered(idle.post("/v1/completions", **asked))["choices"][0]["text"]
    stop = [*(f"<|fim_{number}|>" for number in range(9)), said[0]]
    (choice,) = answered(idle.post("/v1/completions", **asked, stop=stop))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


# ---- what is refused ---------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("temperature", "top_p", "presence_penalty")
        for value in ("0.5", True, [], -3)
    ),
    *(
        (name, value)
        for name in ("max_tokens", "n", "seed", "top_k")
        for value in ("1", True, 1.5, 1 << 64, -(1 << 64))
    ),
    ("frequency_penalty", 2.5),
    ("max_tokens", 0),
    ("max_tokens", 1 << 31),
    ("n", 1_000_000),
    ("stop", ["a"] * 65),
    ("stop", "x" * 1_000_000),
    ("stop", [1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.5]),
    ("allowed_token_ids", [VOCAB_SIZE]),
    ("allowed_token_ids", []),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": "2"}),
    ("logit_bias", {str(i): 1 for i in range(10_000)}),
    ("bad_words", ["x"] * 2000),
    ("top_logprobs", 21),
    ("top_logprobs", 2),
    ("logprobs", 3),
    ("stream", "yes"),
    ("stream_options", {"other": True}),
    ("messages", []),
    ("messages", [[]]),
    ("messages", ["hello"]),
    ("messages", [{"role": "king", "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": "\ud800"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [1] * 100_000),
    ("messages", [{"role": "assistant", "function_call": {"name": "x"}}]),
    ("model", 5),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
    ("chat_template_kwargs", {"tokenize": True}),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"tools": []}),
    ("chat_template_kwargs", {"max_tokens": 9}),
    ("chat_template_kwargs", []),
    ("suffix", "x"),
    ("add_special_tokens", True),
    ("continue_final_message", True),
    ("length_penalty", 2.0),
    ("use_beam_search", True),
    ("wings", 2),
    ("best_of", 1_000_000),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_object", "schema": "x"}),
    ("response_format", {"type": "json_object", "value": "x"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}}),
    ("structured_outputs", {"regex": "(a"}),
    ("structured_outputs", {"json": {"$ref": "#/a"}}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}),
    ("structured_outputs", {"json_object": False, "structural_tag": None}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "x"}}),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
    ("tool_choice", allowed_tools("required", "x")),
    ("tool_choice", allowed_tools("always", "dial")),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "custom", "function": {"name": "x"}}]),
    ("tools", [{"type": "web_search"}]),
    ("tools", [5]),
    ("priority", "high"),
    ("cache_salt", 5),
]


@pytest.mark.parametrize("name, value", WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_field_is_told_by_its_name(name: str, value: Any, idle: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 2, name: value}
    response = idle.http.post("/v1/chat/completions", content=json.dumps(body))
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == name and name in error_of(response)["message"]


@pytest.mark.parametrize(
    "name, value, way_out",
    [
        ("guided_json", {"type": "object"}, "structured_outputs"),
        ("guided_choice", ["yes", "no"], "structured_outputs"),
        ("functions", [{"name": "dial"}], "tools"),
        ("function_call", {"name": "dial"}, "tool_choice"),
    ],
)
def test_a_field_of_old_is_told_the_one_that_took_its_place(
    name: str, value: Any, way_out: str, idle: Running
) -> None:
    assert error_of(idle.chat(**{name: value}))["message"].endswith(f"use {way_out}")


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "function", "name": "a b"}]}),
        ("/v1/responses/input_tokens", {"input": "hello", "tools": [{"type": "function", "name": "a b"}]}),
    ],
)
def test_a_tool_whose_name_is_none_is_an_error_of_the_tools(idle: Running, path: str, body: Any) -> None:
    error = error_of(idle.post(path, **body))
    assert error["param"] == "tools" and error["message"].startswith("tools: a name must be")


def test_an_object_that_may_be_a_word_too_is_told_what_it_lacks(idle: Running) -> None:
    told = error_of(idle.chat(tools=[DIAL], tool_choice={"type": "function", "name": "dial"}))["message"]
    assert told.startswith("tool_choice must be 'none', 'auto' or 'required' or an object whose function is")


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], [-1], [VOCAB_SIZE], [1 << 31], [1 << 63], [1.5], ["a", 1], [True], 5, {}],
    ids=str,
)
def test_a_wrong_prompt_is_told(prompt: Any, idle: Running) -> None:
    response = idle.post("/v1/completions", prompt=prompt)
    assert response.status_code == 400 and error_of(response)["param"] == "prompt"


BODIES = {
    "empty": b"",
    "text": b"hello",
    "list": b"[1]",
    "deep": b"[" * 100_000,
    "bytes": b"\xff\xfe",
    "twice": b'{"n": 1, "n": 2}',
    "nan": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "huge": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e400}',
    "long": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}",
    "many": b"{" + b",".join(b'"k%d": 1' % i for i in range(100_000)) + b"}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_body_that_is_no_object_of_json_is_told(body: bytes, idle: Running) -> None:
    response = idle.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


def test_a_prompt_beyond_the_context_is_told_its_limit(folder: Path) -> None:
    with running(folder, engine={"max_model_len": 64}) as server:
        answer = server.chat("x" * (63 - 6), max_tokens=5, **GREEDY).json()
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 64
        for length in (64, 65):
            response = server.chat("x" * (length - 6), max_tokens=5)
            assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
        assert "64 tokens" in error_of(response)["message"] and error_of(response)["param"] == "messages"
        assert "prompt is too long: 65 tokens > 63" in error_of(response)["message"]  # what Claude Code reads
        server.check_idle()


HOPELESS = "x" * (1 << 20)  # more than any vocabulary has in so few tokens
TALK = [{"role": "user", "content": HOPELESS}]
ASKED_OF_MUCH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": HOPELESS},
    "/v1/responses": {"input": HOPELESS},
    "/v1/messages": {"messages": TALK, "max_tokens": 9},
    "/v1/embeddings": {"input": HOPELESS},
    "/v1/rerank": {"query": "a", "documents": [HOPELESS]},
}


@pytest.mark.parametrize("path", ASKED_OF_MUCH)
def test_a_hopeless_prompt_is_refused_before_it_is_encoded(path: str, idle: Running) -> None:
    response = idle.post(path, **{"model": NAME, **ASKED_OF_MUCH[path]})
    assert response.status_code == 400
    assert "maximum context length" in response.text and " at least " in response.text


def test_a_hopeless_prompt_is_counted_and_cut_where_that_is_asked_for(idle: Running) -> None:
    assert idle.post("/tokenize", prompt=HOPELESS).json()["count"] == len(HOPELESS)
    cut = idle.post("/v1/embeddings", input=HOPELESS, truncate_prompt_tokens=9)
    assert cut.json()["usage"]["prompt_tokens"] == 9


def test_a_prompt_that_no_cache_here_can_hold_is_told_its_limit(folder: Path) -> None:
    with running(folder, engine={"kv_cache_memory": 20 << 10}) as server:
        limit = server.http.get(f"/v1/models/{NAME}").json()["max_model_len"]
        assert limit < 200
        response = server.chat("x" * limit)
        assert response.status_code == 400 and error_of(response)["code"] == "context_length_exceeded"
        assert server.chat(**GREEDY).json()["usage"]["total_tokens"] == limit
        server.check_idle()


def test_what_is_not_there_is_told_in_json(idle: Running) -> None:
    assert error_of(idle.chat(model="other"))["code"] == "model_not_found"
    assert idle.chat(model="other").status_code == 404
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ):
        response = idle.http.request(method, path)
        assert response.status_code == status and error_of(response)["message"]


def test_a_body_over_the_limit_is_refused_before_it_is_read(folder: Path) -> None:
    with running(folder, Settings(max_body=1000)) as server:
        with server.open(
            b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 1001\r\n\r\n"
        ) as sock:
            assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 413")
        response = server.http.post("/v1/completions", content=iter([b"x" * 600, b"x" * 600]))
        assert response.status_code == 413 and "1000 bytes" in error_of(response)["message"]
        assert server.post("/v1/completions", prompt="x" * 900).status_code == 200


def test_who_sends_a_body_over_the_limit_reads_why_it_was_refused(idle: Running) -> None:
    response = idle.http.post("/v1/completions", content=b"x" * (20 << 20))
    assert response.status_code == 413 and error_of(response)["message"]


def test_all_bodies_together_are_bounded(folder: Path) -> None:
    with running(folder, Settings(max_bodies=2000)) as server:
        half = b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 1600\r\n\r\n" + b"{" * 1500
        with server.open(half):
            wait_until(lambda: server.process.server.num_held == 1500)
            response = server.post("/v1/completions", prompt="x" * 1500)
            assert response.status_code == 429 and response.headers["retry-after"] == "1"
        wait_until(lambda: server.process.server.num_held == 0)
        assert server.post("/v1/completions", prompt="x" * 1500, max_tokens=1).status_code == 200
        server.check_idle()


def test_a_compressed_body_is_refused(idle: Running) -> None:
    response = idle.http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert response.status_code == 415 and error_of(response)["message"]


def test_many_tiny_chunks_are_one_body_and_hold_nobody_up(idle: Running) -> None:
    body = json.dumps({"prompt": "x" * 40_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
    num_others = 0
    with ThreadPoolExecutor(1) as threads, idle.open(head + chunks) as sock:
        answer = threads.submit(read_until, sock, b"\r\n")
        while idle.process.server.num_held < len(body) and not answer.done():  # it is being read
            assert idle.http.get("/version").status_code == 200
            num_others += 1
        assert answer.result().startswith(b"HTTP/1.1 200") and num_others > 4


def test_who_sends_too_slowly_is_cut_off(folder: Path) -> None:
    with running(folder, Settings(send_seconds=0.3)) as server:
        with server.open(b"POST /v1/completions HTTP/1.1\r\nhost: he") as sock:
            assert read_until(sock, b"nothing") == b""
        with server.open(b"POST /tokenize HTTP/1.1\r\nhost: here\r\ncontent-length: 9\r\n\r\n{") as sock:
            assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "headers", [["x: " + "y" * 100_000], [f"x{i}: y" for i in range(10_000)], ["a: b"] * 300]
)
def test_too_many_headers_are_refused(headers: list[str], idle: Running) -> None:
    with idle.open(request_of("/tokenize", b"{}", *headers)) as sock:
        assert read_until(sock, b"\r\n").split()[1] in (b"400", b"431")


# ---- keys --------------------------------------------------------------------------------------------------


def test_every_route_but_the_public_ones_needs_the_key(folder: Path) -> None:
    with running(folder, Settings(keys=("secret", "other"))) as server:
        for operation in OPERATIONS:
            path = operation.path.replace("{name:path}", NAME)
            for headers in (
                {},
                {"authorization": "Bearer secre"},
                {"x-api-key": "secret\xff".encode("latin-1")},
            ):
                response = server.http.request(operation.method, path, headers=headers)
                assert (response.status_code == 401) == (path not in ("/health", "/")), path
                if response.status_code == 401 and operation.method != "HEAD":
                    assert response.json()["error"]["type"] == "authentication_error"
        assert server.http.get("/nothing", headers={"host": "x/health?"}).status_code == 401
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "other"}):
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        with server.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_pages_of_allowed_origins_may_call_from_a_browser(folder: Path) -> None:
    """Browsers ask beforehand, without the key, then let a page read what tells its origin, errors too."""
    path, page = "/v1/chat/completions", "https://chat.example"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    key = {"authorization": "Bearer secret"}
    with running(folder, Settings(keys=("secret",), origins=(page,))) as server:
        told = server.http.options(path, headers={"origin": page, **asked})
        assert told.status_code == 200 and told.headers["access-control-allow-origin"] == page
        assert "authorization" in told.headers["access-control-allow-headers"].lower()
        evil = {"origin": "https://evil.example"}
        assert server.http.options(path, headers={**evil, **asked}).status_code == 400
        for headers, stream, status in ((key, True, 200), (key, False, 200), ({}, False, 401)):
            body = {"messages": HELLO, "max_tokens": 2, "stream": stream}
            response = server.http.post(path, json=body, headers={"origin": page, **headers})
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == page
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        other = server.http.get("/v1/models", headers={**evil, **key})
        assert "access-control-allow-origin" not in other.headers


def test_no_page_may_call_from_a_browser_by_itself(idle: Running) -> None:
    headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    for response in (
        idle.http.options("/v1/models", headers=headers),
        idle.http.get("/health", headers=headers),
    ):
        assert not any(name.startswith("access-control") for name in response.headers)


# ---- to the byte -------------------------------------------------------------------------------------------


def test_a_stream_is_these_bytes(idle: Running) -> None:
    with idle.ask(stream=True, max_tokens=1, structured_outputs={"choice": ["z"]}, temperature=0) as sock:
        raw = read_until(sock, b"[DONE]\n\n\r\n0\r\n\r\n")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    lines = [line.lower() for line in head.split(b"\r\n")]
    assert b"content-type: text/event-stream; charset=utf-8" in lines and b"cache-control: no-cache" in lines
    text = b"".join(body.split(b"\r\n")[1::2])  # without the sizes of the chunks
    events = text.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    keys = {"id", "object", "created", "model", "choices"}
    assert [set(chunk) - {"timings"} for chunk in chunks] == [keys] * len(chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "z"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_headers_and_heartbeats_come_while_the_engine_is_busy(folder: Path) -> None:
    with running(folder, Settings(heartbeat_seconds=0.05)) as server:
        with server.paused(), server.ask(stream=True, max_tokens=1) as sock:
            raw = read_until(sock, b": waiting\n\n")
            assert raw.startswith(b"HTTP/1.1 200") and b'"role":"assistant"' in raw
            assert b": waiting\n\n" in read_until(sock, b": waiting\n\n")
        server.check_idle()


def test_an_answer_that_takes_too_long_ends_with_an_error(folder: Path) -> None:
    with running(folder, Settings(request_seconds=0.4)) as server:
        response = server.chat(**ENDLESS)
        assert response.status_code == 503 and error_of(response)["code"] == "request_timeout"
        response = server.chat(**ENDLESS, stream=True)
        *_, error, done, rest = response.text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert (done, rest) == ("data: [DONE]", "")
        server.check_idle()


def test_one_that_has_waited_too_long_for_its_turn_ends_with_an_error_and_waits_no_more(folder: Path) -> None:
    with running(folder, Settings(request_seconds=0.3), engine={"max_num_seqs": 1}) as server:
        with server.paused():
            response = server.chat(max_tokens=1)
            assert response.status_code == 503 and error_of(response)["code"] == "request_timeout"
            service = server.process.server.service
            assert service is not None
            wait_until(lambda: service.admission.num_answers == 0)  # while the engine still stands
        server.check_idle()
        assert server.chat(max_tokens=1).status_code == 200


def test_the_server_can_end_what_is_under_way(idle: Running) -> None:
    """Streams by an event that OpenAI's client raises, the others by a body."""
    with idle.client() as client, ThreadPoolExecutor(1) as threads:
        whole = threads.submit(idle.chat, **ENDLESS)
        stream = client.chat.completions.create(
            model=NAME, messages=HELLO, stream=True, max_tokens=90_000, extra_body=GREEDY
        )
        next(stream)
        wait_until(lambda: len(idle.process.server.calls) == 2)
        idle.fail_calls()
        with pytest.raises(openai.APIError, match="the server failed"):
            list(stream)
        assert whole.result().status_code == 500


# ---- leaving -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_during_an_answer_frees_its_place(stream: bool, idle: Running) -> None:
    with idle.ask(stream=stream, **ENDLESS):
        idle.wait_for_tokens()
    idle.check_idle()


def test_who_leaves_after_sending_more_than_a_request_frees_its_place(idle: Running) -> None:
    with idle.paused():
        with idle.ask(**ENDLESS) as sock:
            wait_until(lambda: idle.process.server.calls)
            for _ in range(3):
                sock.sendall(b"GET /version HTTP/1.1\r\nhost: here\r\n\r\n")
                time.sleep(0.05)  # in which the server reads it
        wait_until(lambda: not idle.process.server.calls)
    idle.check_idle()


def test_what_follows_the_last_request_of_a_connection_does_not_spoil_its_answer(idle: Running) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    with idle.paused():
        sock = idle.open(request_of("/v1/completions", body, "connection: close"))
        wait_until(lambda: idle.process.server.calls)
        sock.sendall(b"\r\n")
        time.sleep(0.05)  # in which the server reads it
    with sock:
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 200")


def test_what_follows_the_last_request_of_a_connection_is_not_read_without_end(idle: Running) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    with idle.paused(), idle.open(request_of("/v1/completions", body, "connection: close")) as sock:
        wait_until(lambda: idle.process.server.calls)
        sock.settimeout(1)
        with pytest.raises(TimeoutError):
            for _ in range(64):
                sock.sendall(bytes(1 << 20))


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_before_the_engine_has_looked_frees_its_place(stream: bool, idle: Running) -> None:
    with idle.paused():
        with idle.ask(stream=stream, **ENDLESS):
            wait_until(lambda: idle.process.server.calls)
        wait_until(lambda: not idle.process.server.calls)
    idle.check_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_while_the_prompt_is_read_frees_its_place(stream: bool, idle: Running) -> None:
    with idle.ask("/v1/completions", prompt=[9] * 90_000, stream=stream, max_tokens=5):
        wait_until(lambda: any(one.num_computed > 0 for one in streams(idle)))
        assert not any(one.num_drawn for one in streams(idle))


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_after_the_last_token_is_counted_once(stream: bool, idle: Running) -> None:
    tally = service_of(idle).tally
    before = sum(tally.finished.values())
    with idle.ask(stream=stream, max_tokens=2000, **GREEDY) as sock:
        idle.wait_for_tokens()
        with idle.deaf():
            assert idle.llm.engine.has_work
            wait_until(lambda: not idle.llm.engine.has_work)
            sock.close()
    idle.check_idle()
    assert sum(tally.finished.values()) == before + 1


def streams(server: Running) -> list[Any]:
    return [one for request in list(server.llm.engine.requests.values()) for one in request.completions]


def service_of(server: Running) -> Service:
    assert server.process.server.service is not None
    return server.process.server.service


def test_who_leaves_while_sending_a_body_leaves_nothing(idle: Running) -> None:
    with idle.open(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 100\r\n\r\n{"):
        pass
    idle.check_idle()


@pytest.mark.parametrize("is_stream", [True, False])
def test_who_reads_nothing_is_given_up(
    is_stream: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not read is bounded by buffers, and its place by time."""
    monkeypatch.setattr(http_limits, "STALL_SECONDS", 0.1)
    prompt = {
        "prompt": [190] * 2_000,
        "echo": True,
        "n": 128,
        "max_tokens": 2,
        "stream": is_stream,
        "ignore_eos": True,
    }
    with running(folder) as server:
        for listener in server.process.web.servers[0].sockets:  # its connections would hold megabytes
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        before = server.open_things()
        with server.ask("/v1/completions", **prompt) as sock:
            wait_until(lambda: server.process.server.calls)
            wait_until(lambda: not server.process.server.calls)
            wait_until(lambda: server.open_things()[1] <= before[1] + 1)  # though the caller keeps its end
            assert sock.fileno() >= 0
        server.check_idle()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel does not count the time")
def test_who_has_vanished_is_given_up_by_the_kernel(idle: Running) -> None:
    idle.http.get("/version")
    (one, *_) = idle.process.web.server_state.connections
    limit = one.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit == http_limits.STALL_SECONDS * 1e3


def test_empty_lines_after_a_body_are_none_of_the_next_request(idle: Running) -> None:
    asked = request_of("/tokenize", b'{"prompt": "a"}')
    with idle.open(asked + b"\r\n") as sock:
        for empty in (b"", b"\r\n", b"\n\r\n"):
            assert read_until(sock, b"}").startswith(b"HTTP/1.1 200")
            sock.sendall(empty + asked)
        assert read_until(sock, b"}").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("target", ["http://here/v1/models", "HTTP://x:80/version?a=b", "https://x"])
def test_a_whole_url_is_taken_for_its_path(target: str, idle: Running) -> None:
    with idle.open(f"GET {target} HTTP/1.1\r\nhost: here\r\n\r\n".encode()) as sock:
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 200")


def test_an_offer_of_another_protocol_is_passed_over(idle: Running, caplog: pytest.LogCaptureFixture) -> None:
    headers = {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AAMAAABkAAQAAP__",
    }
    assert idle.http.get("/health", headers=headers).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nothing_is_written_to_who_has_left(idle: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Though what came for it meanwhile, of 64 answers, is found together with its leaving"""
    with idle.ask(stream=True, n=64, **ENDLESS) as sock:
        read_until(sock, b'{"content":"')
        with idle.deaf():
            num_drawn = streams(idle)[0].num_drawn
            wait_until(lambda: streams(idle)[0].num_drawn > num_drawn + 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # without a word
            sock.close()
    idle.check_idle()
    assert not [one.getMessage() for one in caplog.records if one.name in ("asyncio", "uvicorn.error")]


def test_one_of_ten_leaves_and_all_others_get_what_they_asked_for(idle: Running) -> None:
    def told(number: int) -> Any:
        n = 3 if number % 4 == 1 else 1
        return idle.chat("one", max_tokens=50, seed=1, n=n, ignore_eos=True).json()["choices"]

    alone = [told(number) for number in range(4)]

    def ask(number: int) -> bool:
        if number % 10 == 0:
            with idle.ask(stream=number % 20 == 0, **ENDLESS) as sock:
                sock.settimeout(PATIENCE)
                wait_until(lambda: idle.llm.engine.requests)
            return True
        return bool(told(number) == alone[number % 4])

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(100)))


# ---- too many ----------------------------------------------------------------------------------------------


def test_as_many_as_there_are_places_are_let_in_and_the_others_come_again(folder: Path) -> None:
    with running(folder, max_num_seqs=2, max_queue=3, engine={"max_num_seqs": 2}) as server:
        with ThreadPoolExecutor(40) as threads, server.paused():
            asked = [threads.submit(server.chat, max_tokens=2, **GREEDY) for _ in range(40)]
            wait_until(lambda: sum(one.done() for one in asked) == 35)
            refused = [one.result() for one in asked if one.done()]
            assert {one.status_code for one in refused} == {429}
            assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
            assert error_of(refused[0])["type"] == "rate_limit_error"
            assert server.chat(n=2, max_tokens=1).status_code == 429
        assert sorted(one.result().status_code for one in asked) == [200] * 5 + [429] * 35
        server.check_idle()


def test_each_of_several_answers_takes_a_place_and_all_are_let_in_or_none(folder: Path) -> None:
    with running(folder, max_num_seqs=2, max_queue=8) as server, ThreadPoolExecutor(2) as threads:
        with server.paused():
            first = threads.submit(server.chat, max_tokens=2, n=6)
            admission = service_of(server).admission
            wait_until(lambda: admission.num_answers == 6)
            assert server.chat(max_tokens=2, n=8).status_code == 429
            assert admission.num_answers == 6
            second = threads.submit(server.chat, max_tokens=2, n=4)
            wait_until(lambda: admission.num_answers == 10)
        assert [len(one.result().json()["choices"]) for one in (first, second)] == [6, 4]
        server.check_idle()


def test_tokens_of_prompts_that_wait_are_bounded_before_they_are_encoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(folder, max_queue_tokens=1000) as server:
        with server.paused(), server.ask(messages=[{"role": "user", "content": "x" * 900}], max_tokens=1):
            service = server.process.server.service
            wait_until(lambda: service and service.admission.num_tokens > 900)
            monkeypatch.setattr(service, "prepare", None)  # whom it would be encoded by
            response = server.chat("x" * 900)
            assert response.status_code == 429 and "tokens" in error_of(response)["message"]
            monkeypatch.undo()
        server.check_idle()
        assert server.chat("x" * 5000, max_tokens=1).status_code == 200  # too many for any queue, but alone


# ---- health ------------------------------------------------------------------------------------------------


def test_health_is_503_until_the_model_is_there(folder: Path) -> None:
    with loading(folder) as (server, may_load):
        for response in (server.http.get("/health"), server.chat()):
            assert response.status_code == 503 and error_of(response)["message"] == "Loading model"
        may_load.set()
        assert server.wait().http.get("/health").json() == {"status": "ok"}


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    server = Running(lambda: AsyncLLM(tmp_path / "nothing"))
    server.thread.join(PATIENCE)
    server.stop()
    assert "nothing" in str(server.failure)


def test_health_is_503_when_the_engine_is_dead(folder: Path) -> None:
    with running(folder) as server:
        server.llm.shutdown()
        assert server.http.get("/health").status_code == 503
        response = server.chat()
        assert response.status_code >= 500 and error_of(response)["type"] == "server_error"


def test_a_system_that_starts_no_process_is_the_servers_fault_and_no_path_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "PROGRAM", "/no/such/render.py")
    with running(folder) as server:
        response = server.chat()
        assert response.status_code == 500 and error_of(response)["type"] == "server_error"
        assert "/" not in error_of(response)["message"]


def test_health_answers_at_once_during_a_long_step(idle: Running) -> None:
    assert idle.http.get("/health").status_code == 200
    time.sleep(0.05)  # in which the engine gives a new sign of life
    with idle.paused():
        assert idle.http.get("/health", timeout=3).status_code == 200


def test_an_answer_does_not_wait_for_the_callers_kernel(idle: Running) -> None:
    """Two small writes after one another, of which Nagle's algorithm would hold back the second for 40 ms"""
    seconds = []
    idle.http.get("/version")  # the first answers of a connection are acknowledged at once
    for _ in range(20):
        start = time.perf_counter()
        idle.http.get("/version")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.03


@pytest.mark.parametrize(
    "text",
    ["a b " * 75_000, "a" * 300_000, " " * 1_000_000, "the" * 100_000, "👩\u200d👩\u200d👧" * 30_000],
    ids=lambda text: repr(text[:5]),
)
def test_the_event_loop_goes_on_while_a_long_text_is_encoded(text: str, default_server: Running) -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        httpx.Client(base_url=default_server.url, timeout=PATIENCE) as http,
    ):
        asked = threads.submit(default_server.chat, text)
        num_answers = 0
        while not asked.done():
            assert http.get("/health").status_code == 200
            num_answers += 1
    assert asked.result().status_code == 400 and num_answers > 10


def test_tokens_of_a_long_text_are_not_told_by_the_event_loop(
    idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, threads = service_of(idle).tokenizer, set[str]()
    decode = tokenizer.decode

    def noted(*given: Any, **how: Any) -> str:
        threads.add(threading.current_thread().name)
        return decode(*given, **how)

    monkeypatch.setattr(tokenizer, "decode", noted)
    tokens = idle.post("/tokenize", prompt="x" * 1000, return_token_strs=True).json()["tokens"]
    assert idle.post("/detokenize", tokens=tokens).json() == {"prompt": "x" * 1000}
    assert threads and all(name.startswith("infinilm-server") for name in threads)


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": HELLO, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 1}),
        ("/v1/messages", {"model": NAME, "messages": HELLO, "max_tokens": 1}),
    ],
)
def test_what_a_large_body_asks_for_is_not_made_by_the_event_loop(
    path: str, body: dict[str, Any], idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, threads = SamplingParams.__post_init__, set[str]()

    def noted(params: SamplingParams) -> None:
        threads.add(threading.current_thread().name)
        check(params)

    monkeypatch.setattr(SamplingParams, "__post_init__", noted)
    assert idle.post(path, **body, metadata={"a": "x" * exchange.LARGE_BODY}).status_code == 200
    assert threads and idle.thread.name not in threads


@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {"prompt": "x" * 50_000}),
        ("/v1/embeddings", {"input": ["x"] * 64}),
        ("/v1/rerank", {"query": "x", "documents": ["x" * 100] * 64}),
        ("/v1/completions", {**GREEDY, "prompt": ["x"] * 8, "logprobs": 5}),
    ],
)
def test_no_thread_waits_until_a_long_answer_is_written(
    path: str, body: dict[str, Any], idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder lets no other thread work before it has written what it was given."""
    dumps, written = exchange.dumps, list[str]()

    def noted(given: Any) -> str:
        written.append(dumps(given))
        return written[-1]

    monkeypatch.setattr(exchange, "dumps", noted)
    answer = idle.post(path, **body)
    assert answer.content == dumps(answer.json()).encode()
    assert written and max(map(len, written)) < len(answer.content) / 4


def test_small_routes(idle: Running) -> None:
    assert idle.http.head("/api/hello").status_code == 200
    assert set(idle.http.get("/version").json()) == {"version"}
    document = idle.http.get("/openapi.json").json()
    assert {operation.path.replace(":path", "") for operation in OPERATIONS} == set(document["paths"])
    assert "ChatBody" in document["components"]["schemas"]


def test_requests_may_have_the_same_id_at_once(idle: Running) -> None:
    def ask(_: int) -> int:
        headers = {"x-request-id": "same"}
        asked = {"messages": HELLO, "max_tokens": 30, **GREEDY}
        return idle.http.post("/v1/chat/completions", json=asked, headers=headers).status_code

    with ThreadPoolExecutor(8) as threads, idle.paused():
        asked = [threads.submit(ask, number) for number in range(8)]
        wait_until(lambda: len(idle.process.server.calls) == 8)
    assert [one.result() for one in asked] == [200] * 8


def test_a_request_id_is_the_callers_or_a_new_one(idle: Running) -> None:
    assert idle.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = idle.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert made.startswith("req_")


def test_a_request_id_is_told_under_the_name_that_each_client_reads(idle: Running) -> None:
    for path in ("/v1/messages", "/v1/models", "/nowhere"):
        headers = idle.http.get(path).headers
        assert headers["x-request-id"] == headers["request-id"]


def test_the_access_log_has_no_prompt(idle: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "infinilm.access"):
        idle.chat("a secret", max_tokens=1)
        wait_until(lambda: [one for one in caplog.records if one.name == "infinilm.access"])
    (record,) = [one for one in caplog.records if one.name == "infinilm.access"]
    line = json.loads(record.getMessage())
    assert line["path"] == "/v1/chat/completions" and line["status"] == 200 and line["request_id"]
    assert "secret" not in record.getMessage()


# ---- the built-in model ------------------------------------------------------------------------------------

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_openais_client_gets_the_answer_of_the_built_in_model(default_server: Running) -> None:
    with default_server.client() as client:
        whole = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0)
        stream = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == said == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"


def test_openais_client_gets_what_its_schema_says(default_server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    with default_server.client() as client:
        answer = client.chat.completions.create(
            model=NAME, messages=QUESTION, temperature=0, response_format=wanted, max_tokens=60
        )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"city", "is_capital"} and isinstance(found["is_capital"], bool)


def test_openais_client_comes_again_after_429(folder: Path) -> None:
    with running(folder, max_num_seqs=1, max_queue=1) as server, ThreadPoolExecutor(8) as threads:

        def ask(_: int) -> str | None:
            with server.client(max_retries=50) as client:
                answer = client.chat.completions.create(
                    model=NAME, messages=HELLO, max_tokens=30, extra_body=GREEDY
                )
            return answer.choices[0].message.content

        assert len(set(threads.map(ask, range(8)))) == 1
        server.check_idle()


def test_a_stream_is_the_same_whatever_others_send(idle: Running) -> None:
    """And nothing is left of them: no thread, no file, no task."""
    alone = said(idle.stream(max_tokens=400, **GREEDY))
    left = []
    for _ in range(2):  # the first time brings threads that are kept
        with ThreadPoolExecutor(9) as threads:
            control = [threads.submit(idle.stream, max_tokens=400, **GREEDY) for _ in range(3)]
            others = [
                threads.submit(idle.chat, **{name: value}) for name, value in WRONG if name != "messages"
            ]
            hostile = [threads.submit(idle.http.post, CHAT, content=body) for body in BODIES.values()]
            assert {one.result().status_code for one in [*others, *hostile]} == {400}
            assert all(said(one.result()) == alone for one in control)
        idle.check_idle()
        left.append(idle.open_things())
    wait_until(lambda: all(now <= then for now, then in zip(idle.open_things(), left[0], strict=True)))


def said(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
