"""/v1/responses as OpenAI's own client and Codex read it, and by the byte."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
from servers import DIGIT, GREEDY, NAME, Running, answered, error_of, named_events, read_until, running, texts

from infinilm import LLM
from infinilm.engine.request import CompletionOutput
from infinilm.server.exchange import Settings
from infinilm.server.parts import CallStart, Text
from infinilm.server.reader import Reader
from infinilm.server.tools import MAX_CALLS, OURS, Family, Tool
from infinilm.server.turn import Reading

pytestmark = pytest.mark.usefixtures("one_thread")

RESPONSES = "/v1/responses"


def ask(server: Running, **body: Any) -> httpx.Response:
    return server.post(RESPONSES, **{"model": NAME, "input": "hello", "max_output_tokens": 4, **body})


def answer(server: Running, **body: Any) -> dict[str, Any]:
    return answered(ask(server, **body))


def events(server: Running, **body: Any) -> list[dict[str, Any]]:
    response = ask(server, stream=True, **body)
    assert response.status_code == 200, response.text
    return events_in(response.text)


def events_in(text: str) -> list[dict[str, Any]]:
    """They are numbered from 0."""
    found = named_events(text)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def prompt_of(server: Running, **body: Any) -> str:
    return server.prompt_of(RESPONSES, **{"model": NAME, "input": "hello", "max_output_tokens": 1, **body})


def of_schema(schema: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "wanted", "schema": schema, "strict": True}}


# ---- responses ---------------------------------------------------------------------------------------------


def test_openais_client_reads_a_response(idle: Running, llm: LLM) -> None:
    schema = of_schema({"const": "yes"})
    with idle.client() as client:
        found = client.responses.create(
            model=NAME, input="hello", max_output_tokens=50, text=schema, instructions="be brief"
        )
    assert found.output_text == '"yes"' and found.status == "completed" and found.id.startswith("resp_")
    assert found.usage is not None and found.usage.input_tokens == 11 + len("system:be brief\n")
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    (item,) = answer(idle, max_output_tokens=9, **GREEDY)["output"]
    assert item["content"][0]["text"] == texts(llm, max_tokens=9)[0] and item["status"] == "incomplete"


def test_openais_client_reads_a_stream(idle: Running) -> None:
    schema = of_schema({"enum": ["a text of some length, which comes in pieces"]})
    asked: Any = {"model": NAME, "input": "hello", "text": schema}
    with idle.client() as client:
        with client.responses.stream(**asked) as stream:
            said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            last = stream.get_final_response()
        raw = list(client.responses.create(**asked, stream=True))
    assert said == last.output_text == '"a text of some length, which comes in pieces"'
    assert raw[-1].type == "response.completed" and raw[-1].response.output_text == said


def test_a_model_of_pydantic_is_parsed(idle: Running) -> None:
    class Answer(pydantic.BaseModel):
        is_so: bool

    with idle.client() as client:
        found = client.responses.parse(model=NAME, input="hello", text_format=Answer, max_output_tokens=400)
    assert found.output_parsed is not None and found.output_parsed.is_so in (True, False)


YES: dict[str, Any] = {
    "text": of_schema({"const": "yes"}),
    "max_output_tokens": 20,
    "metadata": {"a": "b"},
}


def test_the_schema_of_a_json_object_is_kept(idle: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    wanted = {"type": "json_object", "schema": {**schema, "additionalProperties": False}}
    found = answer(idle, text={"format": wanted}, max_output_tokens=100)
    assert json.loads(found["output"][0]["content"][0]["text"])["a"] in (1, 22)


def head_of(response: dict[str, Any]) -> dict[str, Any]:
    """What every event of the stream of YES that has a response tells of it"""
    return {
        "id": response["id"],
        "object": "response",
        "created_at": response["created_at"],
        "completed_at": None,
        "model": NAME,
        "background": False,
        "error": None,
        "frequency_penalty": 0.0,
        "instructions": None,
        "max_tool_calls": None,
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
        **YES,
    }


def test_a_stream_begins_with_a_response_that_is_in_progress(idle: Running) -> None:
    created, begun, *_ = events(idle, **YES)
    begin = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    wanted = {**head_of(created["response"]), **begin}
    assert created == {"type": "response.created", "sequence_number": 0, "response": wanted}
    assert begun == {"type": "response.in_progress", "sequence_number": 1, "response": wanted}


def test_a_stream_tells_a_message_from_its_item_down_to_its_text_and_back(idle: Running) -> None:
    _, _, *told, last = events(idle, **YES)
    for number, one in enumerate(told, 2):
        assert one.pop("sequence_number") == number
    added, part_added, *deltas, text_done, part_done, done = told
    (item,) = last["response"]["output"]
    part = {"type": "output_text", "text": '"yes"', "annotations": [], "logprobs": []}
    assert item == {
        "id": item["id"],
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    empty = {**item, "status": "in_progress", "content": []}
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    assert added == {"type": "response.output_item.added", "output_index": 0, "item": empty}
    assert part_added == {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    for one in deltas:
        assert one == {"type": "response.output_text.delta", **place, "delta": one["delta"], "logprobs": []}
    assert "".join(one["delta"] for one in deltas) == '"yes"'
    assert text_done == {"type": "response.output_text.done", **place, "text": '"yes"', "logprobs": []}
    assert part_done == {"type": "response.content_part.done", **place, "part": part}
    assert done == {"type": "response.output_item.done", "output_index": 0, "item": item}


# The fields of a response that Open Responses requires, of which some may be null
REQUIRED = {
    *(
        "id",
        "object",
        "created_at",
        "completed_at",
        "status",
        "incomplete_details",
        "model",
        "output",
        "error",
    ),
    *("previous_response_id", "instructions", "tools", "tool_choice", "truncation", "parallel_tool_calls"),
    *("text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning"),
    *("user", "usage", "max_output_tokens", "max_tool_calls", "store", "background", "service_tier"),
    *("metadata", "safety_identifier", "prompt_cache_key"),
}


def test_a_response_has_every_field_that_open_responses_requires(idle: Running) -> None:
    asked = {"max_output_tokens": 5, "frequency_penalty": 0.5, "presence_penalty": 1}
    for found in (
        answer(idle, **asked),
        *(one["response"] for one in events(idle, **asked) if "response" in one),
    ):
        assert found.keys() >= REQUIRED and found["reasoning"].keys() == {"effort", "summary"}
        assert (found["frequency_penalty"], found["presence_penalty"]) == (0.5, 1.0)


def test_a_stream_ends_with_the_whole_response(idle: Running) -> None:
    *_, done, last = events(idle, **YES)
    found = last["response"]
    usage, timings = found.pop("usage"), found.pop("timings")
    end = {"status": "completed", "incomplete_details": None, "output": [done["item"]]}
    end["completed_at"] = found["completed_at"]
    assert last["type"] == "response.completed" and found == {**head_of(found), **end}
    assert found["created_at"] <= found["completed_at"] <= time.time()
    assert timings["prompt_n"] + timings["cache_n"] == 11
    tokens, details = ("input_tokens", "output_tokens"), ("input_tokens_details", "output_tokens_details")
    assert set(usage) == {*tokens, *details, "total_tokens"}
    assert usage["input_tokens_details"].keys() >= {"cached_tokens", "cache_write_tokens"}


def test_an_answer_without_a_word_is_a_message_without_one(idle: Running) -> None:
    nothing = {"logit_bias": {"0": 100}}  # the end, at once
    (item,) = answer(idle, **nothing)["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == "" and item["status"] == "completed"
    *told, last = [one["type"] for one in events(idle, **nothing)]
    added, done = told.index("response.output_item.added"), told.index("response.output_item.done")
    assert last == "response.completed" and 0 < added < done


def test_a_token_limit_ends_in_an_incomplete_response(idle: Running) -> None:
    *_, done, last = events(idle, max_output_tokens=5, **GREEDY)
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"] == [done["item"]] and done["item"]["status"] == "incomplete"
    with idle.client() as client:
        raw = list(client.responses.create(model=NAME, input="hello", max_output_tokens=5, stream=True))
    assert raw[-1].type in ("response.incomplete", "response.completed")


def test_a_call_that_a_token_limit_cuts_off_is_no_complete_item(idle: Running) -> None:
    asked = {"tools": [DIAL], "tool_choice": "required", "max_output_tokens": 50, **GREEDY}
    *_, done, last = events(idle, **asked)
    assert done["item"]["type"] == "function_call" and done["item"]["status"] == "incomplete"
    assert last["type"] == "response.incomplete" and last["response"]["output"] == [done["item"]]


def test_progress_of_a_prompt_is_told_where_it_is_asked_for(idle: Running) -> None:
    told = [one for one in events(idle, return_progress=True) if "prompt_progress" in one]
    assert told[-1]["prompt_progress"] == {"total": 11, "cache": 0, "processed": 11}
    assert {one["type"] for one in told} == {"response.in_progress"}


# ---- conversations -----------------------------------------------------------------------------------------


def test_items_become_what_the_template_knows(thinker: Running) -> None:
    said = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "in short"}]},
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** x", "namespace": "ed"},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "ok"}],
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
    ]
    asked = {"input": said, "instructions": "be kind", "reasoning": {"effort": "low", "summary": "auto"}}
    assert prompt_of(thinker, **asked) == (
        "system:be kind\n\nin short\nuser:a\n"
        "assistant:<think>hm</think>I look\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ed__patch", "arguments": {"input": "*** x"}}\n</tool_call>\n'
        "user:<tool_response>\nseen\n</tool_response>\n<tool_response>\nok\n</tool_response>\n"
        "user:and?\nlow<think>"
    )


def test_words_and_calls_are_of_one_message_whichever_comes_first(thinker: Running) -> None:
    asked = {"role": "user", "content": "a"}
    words = {"role": "assistant", "content": "I look"}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    seen = {"type": "function_call_output", "call_id": "c1", "output": "seen"}
    first = prompt_of(thinker, input=[asked, words, call, seen])
    assert prompt_of(thinker, input=[asked, call, words, seen]) == first


def test_thoughts_are_an_item_of_their_own(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    # A schema that is held to from the first thought on makes a model that knows nothing think and answer.
    monkeypatch.setattr(Family, "beside", lambda family, structure, *rest: (structure, []))
    asked: Any = {"model": NAME, "input": "hello", "text": of_schema({"const": "</think>b"})}
    with thinker.client() as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_response()
    for found in (whole, last):
        thought, message = found.output
        assert thought.type == "reasoning" and thought.content is not None
        assert [part.text for part in thought.content] == ['"'] and thought.summary == []
        assert found.output_text == 'b"' and message.type == "message"
        assert found.usage is not None and found.usage.output_tokens_details.reasoning_tokens >= 1
    at = kinds.index("response.output_item.added")
    assert kinds[at : at + 6] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


# ---- tools -------------------------------------------------------------------------------------------------

DIAL = {"type": "function", "name": "dial", "description": "Dials", "parameters": DIGIT, "strict": False}
WORD = {"type": "grammar", "syntax": "regex", "definition": "(ab|cd)\n"}
TOOLS: list[Any] = [
    DIAL,
    {"type": "custom", "name": "write", "description": "Writes", "format": WORD},
    {"type": "namespace", "name": "mcp__phone", "description": "A phone", "tools": [DIAL]},
    {"type": "web_search"},
]
# The model finds no end by itself.
WITHOUT_END: Any = {"logit_bias": {"0": -100}, "max_output_tokens": 8000}


@pytest.mark.parametrize("stream", [True, False])
def test_a_function_that_is_chosen_is_called(stream: bool, idle: Running) -> None:
    asked: Any = {"model": NAME, "input": "hello", "tools": TOOLS, "parallel_tool_calls": False}
    asked["tool_choice"] = {"type": "function", "name": "dial"}
    with idle.client() as client:
        if stream:
            with client.responses.stream(**asked) as told:
                kinds = [event.type for event in told]
                found: Any = told.get_final_response()
            assert kinds.count("response.function_call_arguments.delta") > 1
            assert kinds[-3:] == [
                "response.function_call_arguments.done",
                "response.output_item.done",
                "response.completed",
            ]
        else:
            found = client.responses.create(**asked)
    (call,) = found.output
    assert (call.type, call.name, call.namespace, call.status) == ("function_call", "dial", None, "completed")
    assert call.call_id.startswith("call_") and json.loads(call.arguments)["digit"] in (1, 2)
    assert [tool.type for tool in found.tools] == ["function", "custom", "namespace"]


def test_the_end_of_a_functions_arguments_tells_its_name(idle: Running) -> None:
    told = events(idle, tools=TOOLS, tool_choice={"type": "function", "name": "dial"}, max_output_tokens=300)
    (done,) = [one for one in told if one["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "dial" and json.loads(done["arguments"])["digit"] in (1, 2)


def test_a_custom_tool_gets_its_text(idle: Running) -> None:
    choice = {"type": "custom", "name": "write"}
    *told, done, last = events(
        idle, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=300
    )
    (item,) = last["response"]["output"]
    assert item == done["item"] and item["input"] in ("ab\n", "cd\n")
    assert item["type"] == "custom_tool_call" and item["name"] == "write" and item["call_id"]
    kinds = [one["type"] for one in told]
    assert kinds[2] == "response.output_item.added" and told[2]["item"]["input"] == ""
    deltas = [one["delta"] for one in told if one["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == item["input"] and kinds[-1] == "response.custom_tool_call_input.done"
    asked: Any = {"model": NAME, "input": "x", "tools": TOOLS, "tool_choice": choice, "stream": True}
    with idle.client() as client:
        *_, end = client.responses.create(**asked)
    assert end.type == "response.completed" and end.response.output[0].type == "custom_tool_call"


def test_a_call_into_a_namespace_says_so(idle: Running) -> None:
    choice = {"type": "function", "name": "dial", "namespace": "mcp__phone"}
    found = answer(idle, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=300)
    (call,) = found["output"]
    assert (call["name"], call["namespace"]) == ("dial", "mcp__phone")
    assert "mcp__phone__dial" in prompt_of(idle, tools=TOOLS)
    assert "dial" not in prompt_of(idle, tools=TOOLS, tool_choice="none")


def test_only_a_tool_that_is_allowed_is_called(idle: Running) -> None:
    named = [{"type": "function", "name": "dial", "namespace": "mcp__phone"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": named}
    for seed in range(4):
        found = answer(idle, tools=TOOLS, tool_choice=choice, seed=seed, temperature=2, max_output_tokens=900)
        (call,) = found["output"]
        assert (call["name"], call["namespace"]) == ("dial", "mcp__phone")
    assert found["tool_choice"] == {**choice, "tools": named[:1]}


def test_several_calls_are_items_in_their_order(idle: Running) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True, **WITHOUT_END}
    told = events(idle, **asked)
    done = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    added = [one["output_index"] for one in told if one["type"] == "response.output_item.added"]
    assert told[-1]["response"]["output"] == done and added == list(range(len(done)))
    assert len(done) == MAX_CALLS and {item["type"] for item in done} <= {"function_call", "custom_tool_call"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "dial"}])
def test_a_forced_call_is_one_where_nothing_else_is_said(choice: Any, idle: Running) -> None:
    found = answer(idle, tools=TOOLS, tool_choice=choice, **WITHOUT_END)
    assert len(found["output"]) == 1 and found["status"] == "completed"
    assert found["parallel_tool_calls"] is True


def test_a_second_call_is_not_told_where_one_alone_was_asked_for() -> None:
    call = '<tool_call>\n{"name": "dial", "arguments": {}}\n</tool_call>'
    output = CompletionOutput(0, f"{call}\n{call} so", [1], finish_reason="stop")
    for is_parallel, num_calls in ((True, 2), (False, 1)):
        piece = Reading(0, Reader(OURS, [Tool("dial")]), is_parallel).piece(output)
        assert piece is not None
        assert sum(isinstance(part, CallStart) for part in piece.parts) == num_calls
        assert piece.has_calls and isinstance(piece.parts[-1], Text)


def test_the_default_model_calls_the_function_that_a_conversation_forces(default_model_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "kelvin"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "name": "get_weather", "parameters": schema, "strict": True}]
    said: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    asked: Any = {"model": NAME, "tools": tools, "temperature": 0, "tool_choice": "required"}
    with running(default_model_path, engine={"kv_cache_memory": "64MB"}) as server, server.client() as client:
        with client.responses.stream(**asked, input=said, parallel_tool_calls=False) as stream:
            found = stream.get_final_response()
        (call,) = found.output
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Paris", "unit": "celsius"}
        said += [
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"},
        ]
        last = client.responses.create(**{**asked, "tool_choice": "none"}, input=said, max_output_tokens=20)
        assert last.output_text


# ---- what Codex sends --------------------------------------------------------------------------------------

CODEX = {
    "model": NAME,
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read-only</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context>x</environment_context>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "README.md"},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
        },
        {
            "type": "namespace",
            "name": "mcp__docs",
            "description": "Documents",
            "tools": [
                {
                    "type": "function",
                    "name": "find",
                    "description": "Finds",
                    "strict": False,
                    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
                }
            ],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-a",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "y"},
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": False},
}


def test_codexs_request_is_answered(idle: Running) -> None:
    response = idle.http.post(RESPONSES, json={**CODEX, "max_output_tokens": 20})
    first, *_, last = events_in(response.text)
    assert first["type"] == "response.created" and first["response"]["prompt_cache_key"] == "0199-a"
    assert last["type"] in ("response.completed", "response.incomplete")
    text = prompt_of(idle, **{**CODEX, "stream": False})
    assert text.startswith("system:You are a coding agent.\n\n<permissions>read-only</permissions>")
    assert "apply_patch" in text and "mcp__docs__find" in text and "web_search" not in text


# ---- prefixes ----------------------------------------------------------------------------------------------


def test_prefixes_are_shared_whatever_the_cache_key_and_kept_apart_by_a_salt(idle: Running) -> None:
    said = "what every request finds in the cache that has not asked for another salt"

    def num_cached(**more: Any) -> int:
        return int(answer(idle, input=said, **more)["usage"]["input_tokens_details"]["cached_tokens"])

    assert num_cached(prompt_cache_key="a") == 0
    assert num_cached(prompt_cache_key="b", metadata={"user_id": "c"}) == 64
    assert num_cached(prompt_cache_key="a", cache_salt="c") == 0


def test_chats_share_prefixes_whatever_their_cache_key(idle: Running) -> None:
    for key, is_found in (("a", False), ("b", True)):
        usage = idle.chat(
            "a chat's own beginning, long enough for some blocks", prompt_cache_key=key, max_tokens=1
        )
        cached = usage.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached >= 48) == is_found


def test_a_prompt_that_parts_from_the_one_before_says_where(idle: Running) -> None:
    text = "one more long beginning which two prompts share, before they part from each other "
    answer(idle, input=text + "here, for one of them says this")
    response = answer(idle, input=text + "where the other says that")["usage"]
    chat = idle.chat(text + "as a third one does not", max_tokens=1).json()["usage"]
    position = len("user:") + len(text)
    for usage, details in ((response, "input_tokens_details"), (chat, "prompt_tokens_details")):
        assert usage["cache_miss"] == {"position": position}
        assert usage[details]["cached_tokens"] == position // 16 * 16
        # OpenAI's agents for JavaScript refuse an answer that has anything else there.
        assert all(isinstance(found, int) for found in usage[details].values())


# ---- what is refused ---------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any]] = [
    ("input", None),
    ("input", 5),
    ("input", []),
    ("input", [5]),
    ("input", [{"role": "king", "content": "x"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///"}]}]),
    ("input", [{"type": "function_call", "name": "x"}]),
    ("input", [{"type": "item_reference", "id": "msg_1"}]),
    ("input", [{"type": "item_reference"}]),
    ("previous_response_id", "resp_1"),
    ("previous_response_id", 5),
    ("store", "yes"),
    ("conversation", "conv_1"),
    ("prompt", {"id": "pmpt_1"}),
    ("background", True),
    ("truncation", "auto"),
    ("top_logprobs", 3),
    ("logprobs", True),
    ("include", ["reasoning.encrypted_content", "message.output_text.logprobs"]),
    ("include", "message.output_text.logprobs"),
    ("n", 2),
    ("max_tokens", 5),
    ("instructions", 5),
    ("max_output_tokens", 0),
    ("max_output_tokens", "5"),
    ("max_output_tokens", 1 << 31),
    ("temperature", "hot"),
    ("top_p", 5),
    ("model", 5),
    ("stream", "yes"),
    ("text", {"format": {"type": "xml"}}),
    ("text", {"format": {"type": "json_schema", "name": "x"}}),
    ("text", {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "namespace", "name": "x", "tools": [{"type": "custom"}]}]),
    ("tool_choice", {"type": "function", "name": "x"}),
    ("tool_choice", {"type": "web_search"}),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}),
    ("tool_choice", "always"),
    ("cache_salt", 5),
    ("prompt_cache_key", 5),
    ("chat_template_kwargs", {"tools": []}),
]


@pytest.mark.parametrize("name, value", WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_field_is_told_by_its_name(name: str, value: Any, idle: Running) -> None:
    response = ask(idle, **{name: value})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == name and name in error_of(response)["message"]


def test_what_is_stored_elsewhere_is_refused_with_the_way_out(idle: Running) -> None:
    told = error_of(ask(idle, previous_response_id="resp_1"))
    assert told["param"] == "previous_response_id" and told["code"] == "previous_response_not_found"
    assert told["message"].endswith("send the whole conversation as input, without previous_response_id")
    told = error_of(ask(idle, input=[{"type": "item_reference", "id": "msg_1"}]))
    assert (
        told["param"] == "input"
        and "send the item itself, as clients do with store: false" in told["message"]
    )


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call_output", "call_id": "c1", "output": [IMAGE]},
        {"role": "user", "content": [{"type": "input_text", "text": "what is it?"}, IMAGE]},
    ],
    ids=["of a tool", "of the user"],
)
def test_an_image_is_refused_in_the_words_by_which_codex_takes_it_out(item: Any, idle: Running) -> None:
    response = ask(idle, input=[*CODEX["input"], item])
    assert response.status_code == 400 and error_of(response)["param"] == "input"
    assert "The image data you provided does not represent a valid image" in response.text
    assert "reads text alone" in response.text and "aGk" not in response.text


def test_the_tokens_of_an_input_are_those_that_a_response_counts(idle: Running) -> None:
    asked: Any = {"model": NAME, "input": "hello", "instructions": "Be brief.", "tools": TOOLS}
    found = answered(idle.post(f"{RESPONSES}/input_tokens", **asked))
    used = answer(idle, **asked, max_output_tokens=1)["usage"]["input_tokens"]
    assert found == {"object": "response.input_tokens", "input_tokens": used}
    with idle.client() as client:
        assert client.responses.input_tokens.count(**asked).input_tokens == used


def test_a_prompt_beyond_the_context_is_told_its_limit(folder: Path) -> None:
    with running(folder, engine={"max_model_len": 64}) as server:
        response = ask(server, input="x" * 64)
        assert response.status_code == 400 and error_of(response)["code"] == "context_length_exceeded"
        assert answer(server, max_output_tokens=9999, **GREEDY)["usage"]["total_tokens"] == 64


# ---- streams that wait, fail, or are left ------------------------------------------------------------------


def test_a_response_in_progress_is_told_again_while_the_engine_is_busy(folder: Path) -> None:
    with running(folder, Settings(heartbeat_seconds=0.05)) as server:
        with server.paused():
            sock = server.ask(RESPONSES, model=NAME, input="x", max_output_tokens=3, stream=True)
            raw = read_until(sock, b'"sequence_number":4}')
        with sock:
            raw += read_until(sock, b"0\r\n\r\n")
        text = b"".join(raw.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]).decode()
        created, *told = events_in(text)
        assert created["type"] == "response.created"
        assert [one["type"] for one in told[:4]] == ["response.in_progress"] * 4
        assert len({one["response"]["id"] for one in [created, *told] if "response" in one}) == 1
        server.check_idle()


def test_an_error_ends_a_stream_as_a_failed_response(idle: Running) -> None:
    asked: Any = {"model": NAME, "input": "hello", "extra_body": GREEDY}
    with idle.client() as client, client.responses.stream(**asked) as stream:
        first: Any = next(stream)
        while (event := next(stream)).type != "response.output_text.delta":
            pass
        assert event.delta
        idle.fail_calls()
        last: Any = list(stream)[-1]
    assert last.type == "response.failed" and last.response.id == first.response.id
    assert last.response.status == "failed" and last.response.error is not None
    assert last.response.error.code == "server_error" and "failed" in last.response.error.message


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_place(stream: bool, idle: Running) -> None:
    with idle.ask(RESPONSES, stream=stream, input="hello", **GREEDY):
        idle.wait_for_tokens()
    idle.check_idle()


def test_an_answer_that_takes_too_long_fails_and_is_not_asked_for_again(folder: Path) -> None:
    with running(folder, Settings(request_seconds=0.3)) as server:
        response = ask(server, max_output_tokens=90_000, **GREEDY)  # which also compiles the template
        assert response.status_code == 503 and error_of(response)["code"] == "request_timeout"
        *_, last = events(server, max_output_tokens=90_000, **GREEDY)
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "server_is_overloaded"
        assert "0.3 s" in last["response"]["error"]["message"]
        server.check_idle()
