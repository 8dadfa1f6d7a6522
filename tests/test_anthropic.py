"""/v1/messages as Anthropic's own client and Claude Code read it, and by the byte.

The client, which takes seconds to import, is left to the one process that runs these tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
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
    loading,
    named_events,
    read_until,
    request_of,
    running,
    texts,
)

from infinilm import LLM
from infinilm.server.exchange import Settings
from infinilm.server.tools import MAX_CALLS, Family

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.usefixtures("one_thread")

MESSAGES = "/v1/messages"


def client(server: Running, **options: Any) -> anthropic.Anthropic:
    import anthropic

    options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
    return anthropic.Anthropic(base_url=server.url, _strict_response_validation=True, **options)


def ask(server: Running, **body: Any) -> httpx.Response:
    return server.post(MESSAGES, **{"model": NAME, "messages": HELLO, "max_tokens": 4, **body})


def answer(server: Running, **body: Any) -> dict[str, Any]:
    return answered(ask(server, **body))


def events(server: Running, **body: Any) -> list[dict[str, Any]]:
    response = ask(server, stream=True, **body)
    assert response.status_code == 200, response.text
    return named_events(response.text)


def error_of(response: httpx.Response) -> str:
    body = response.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) - {"details"} == {"type", "message"}
    kind: str = body["error"]["type"]
    return kind


def prompt_of(server: Running, **body: Any) -> str:
    return server.prompt_of(MESSAGES, **{"model": NAME, "messages": HELLO, "max_tokens": 1, **body})


# ---- messages ----------------------------------------------------------------------------------------------


def test_anthropics_client_reads_a_message(idle: Running, llm: LLM) -> None:
    with client(idle) as asker:
        found = asker.messages.create(model=NAME, messages=HELLO, max_tokens=8, extra_body=GREEDY)
    (block,) = found.content
    assert block.type == "text" and block.text == texts(llm, max_tokens=8)[0]
    assert (found.stop_reason, found.stop_sequence, found.role) == ("max_tokens", None, "assistant")
    assert found.id.startswith("msg_") and found.model == NAME and found._request_id
    assert found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0) == 11
    assert found.usage.output_tokens == 8


def test_a_stream_says_what_the_whole_message_says(idle: Running) -> None:
    asked: Any = {"model": NAME, "messages": HELLO, "max_tokens": 60, "extra_body": GREEDY}
    with client(idle) as asker:
        whole = asker.messages.create(**asked)
        with asker.messages.stream(**asked) as stream:
            said = "".join(stream.text_stream)
            last = stream.get_final_message()
        raw = list(asker.messages.create(**asked, stream=True))
    assert whole.content[0].type == "text" and said == whole.content[0].text
    assert last.content[0].type == "text" and last.content[0].text == said
    assert last.usage.output_tokens == 60 and last.stop_reason == "max_tokens"
    assert {event.type for event in raw} == {
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    }


def test_a_stream_is_these_events(idle: Running) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    output = {"format": {"type": "json_schema", "schema": schema}}
    start, *told, delta, stop = events(idle, output_config=output, max_tokens=50)
    head = start["message"]
    assert start == {
        "type": "message_start",
        "message": {
            "id": head["id"],
            "type": "message",
            "role": "assistant",
            "model": NAME,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 11,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        },
    }
    assert told[0] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert all(
        one == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for one in told[1:-1]
        for text in [one["delta"]["text"]]
    )
    assert json.loads("".join(one["delta"]["text"] for one in told[1:-1])) == {}
    assert told[-1] == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["input_tokens"] == 11 and delta["usage"]["output_tokens"] > 1
    assert stop.keys() == {"type", "timings"} and stop["type"] == "message_stop"


def test_a_stop_sequence_is_told_and_not_said(idle: Running) -> None:
    text = answer(idle, max_tokens=60, **GREEDY)["content"][0]["text"]
    stop = text[20:24]
    found = answer(idle, max_tokens=60, stop_sequences=["no such", stop], **GREEDY)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text[: text.index(stop)]
    *told, delta, _ = events(idle, max_tokens=60, stop_sequences=[stop], **GREEDY)
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}
    said = "".join(one["delta"]["text"] for one in told if one["type"] == "content_block_delta")
    assert said == text[: text.index(stop)]


def test_max_tokens_beyond_the_context_is_clamped(folder: Path) -> None:
    with running(folder, engine={"max_model_len": 64}) as server:
        found = answer(server, max_tokens=(1 << 31) - 1, **GREEDY)
        assert found["usage"]["input_tokens"] + found["usage"]["output_tokens"] == 64
        assert found["stop_reason"] == "model_context_window_exceeded"
        response = ask(server, messages=[{"role": "user", "content": "x" * 64}])
        assert response.status_code == 400 and error_of(response) == "invalid_request_error"
        assert "64 tokens" in response.json()["error"]["message"]


def test_tokens_are_counted_as_they_are_read(idle: Running) -> None:
    tools: Any = [{"name": "clock", "description": "The time", "input_schema": {"type": "object"}}]
    said: Any = [{"role": "user", "content": [{"type": "text", "text": "how late is it?"}]}]
    with client(idle) as asker:
        counted = asker.messages.count_tokens(model=NAME, messages=said, tools=tools, system="be brief")
        found = asker.messages.create(model=NAME, messages=said, tools=tools, system="be brief", max_tokens=1)
    assert counted.input_tokens == found.usage.input_tokens > 100
    long = [{"role": "user", "content": "x" * (MAX_LENGTH + 1)}]
    response = idle.post(f"{MESSAGES}/count_tokens?beta=true", model=NAME, messages=long)
    assert response.json() == {"input_tokens": MAX_LENGTH + 7}


def test_anthropics_client_lists_the_models(idle: Running) -> None:
    with client(idle) as asker:
        (listed,) = asker.models.list()
        found = asker.models.retrieve(NAME)
    assert listed == found and (found.id, found.type, found.display_name) == (NAME, "model", NAME)
    assert found.max_input_tokens == found.max_tokens == MAX_LENGTH


def test_progress_of_a_prompt_is_told_in_pings_where_it_is_asked_for(idle: Running) -> None:
    told = [one for one in events(idle, return_progress=True) if one["type"] == "ping"]
    assert told[-1] == {"type": "ping", "prompt_progress": {"total": 11, "cache": 0, "processed": 11}}
    assert not [one for one in events(idle) if one["type"] == "ping"]


# ---- conversations -----------------------------------------------------------------------------------------


def test_blocks_become_what_the_template_knows(idle: Running) -> None:
    said = [
        {"role": "system", "content": "in short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "no file"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "toolu_2"},
                {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "hurry"}]},
    ]
    system = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    assert prompt_of(idle, messages=said, system=system) == (
        "system:be kind\n\nin short\nuser:a\nb\n"
        'assistant:I look\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>\n'
        "user:<tool_response>\nError: no file\n</tool_response>\n<tool_response>\n\n</tool_response>\n"
        "user:and?\nsystem:hurry\n"
    )


BILLING = "x-anthropic-billing-header: cc_version=2.1.36.b1a; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("place", ["block", "text", "message"])
def test_claude_codes_billing_header_does_not_split_prefixes(place: str, idle: Running) -> None:
    def num_cached(value: str) -> int:
        system: Any = "".join([f"You are an agent, and this is in a {place}. ", "Work well. " * 20])
        messages: list[Any] = [{"role": "user", "content": "go"}]
        if place == "block":
            texts = [BILLING.format(value), system]
            system = [{"type": "text", "text": text} for text in texts]
        elif place == "text":
            system = f"{BILLING.format(value)}\n{system}"
        else:
            messages = [{"role": "system", "content": BILLING.format(value)}, *messages]
        usage = answer(idle, system=system, messages=messages, metadata={"user_id": value})["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] < 320
        return int(usage["cache_read_input_tokens"])

    first, second = num_cached("aaaaa"), num_cached("bbbbb")
    assert first < 64 and second >= 208


def test_a_prompt_that_parts_from_the_one_before_says_where(idle: Running) -> None:
    text = "a long beginning which two prompts share, before they part from each other "
    answer(idle, messages=[{"role": "user", "content": text + "here, for one of them says this"}])
    *_, delta, _ = events(idle, messages=[{"role": "user", "content": text + "where the other says that"}])
    usage = delta["usage"]
    assert usage["cache_miss"] == {"position": len("user:") + len(text)}
    assert usage["cache_read_input_tokens"] == 80 // 16 * 16


def test_a_salt_keeps_prefixes_apart(idle: Running) -> None:
    said = [{"role": "user", "content": "what only those of the same salt may find in the cache here"}]

    def num_cached(salt: str) -> int:
        return int(answer(idle, messages=said, cache_salt=salt)["usage"]["cache_read_input_tokens"])

    assert [num_cached(salt) for salt in ("a", "b", "a")] == [0, 0, 64]


# ---- thoughts ----------------------------------------------------------------------------------------------


def test_thoughts_are_a_block_of_their_own(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    # A schema that is held to from the first thought on makes a model that knows nothing think and answer.
    monkeypatch.setattr(Family, "beside", lambda family, structure, *rest: (structure, []))
    asked: Any = {"model": NAME, "messages": HELLO, "max_tokens": 50}
    asked["extra_body"] = {
        "output_config": {"format": {"type": "json_schema", "schema": {"enum": ["</think>b"]}}}
    }
    with client(thinker) as asker:
        whole = asker.messages.create(**asked)
        with asker.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_message()
    for found in (whole, last):
        thought, text = found.content
        assert thought.type == "thinking" and (thought.thinking, thought.signature) == ('"', "")
        assert text.type == "text" and text.text == 'b"' and found.stop_reason == "end_turn"
    assert "thinking" in kinds and "signature" in kinds


def test_thinking_is_what_the_template_takes_it_for(thinker: Running) -> None:
    assert prompt_of(thinker, thinking={"type": "disabled"}).endswith("quick:")
    assert prompt_of(thinker, thinking={"type": "enabled", "budget_tokens": 1024}).endswith("<think>")
    said = [*HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}, *HELLO]
    assert "assistant:<think>hm</think>" in prompt_of(thinker, messages=said)


# ---- tools -------------------------------------------------------------------------------------------------

TOOLS: list[Any] = [
    {"name": "dial", "description": "Dials", "input_schema": DIGIT},
    {"name": "ring", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
]
# The model finds no end by itself.
WITHOUT_END: Any = {"logit_bias": {"0": -100}, "max_tokens": 8000}
ONE_DIAL: Any = {"type": "tool", "name": "dial", "disable_parallel_tool_use": True}


def test_a_tool_that_is_chosen_is_called(idle: Running) -> None:
    with client(idle) as asker:
        asked: Any = {"model": NAME, "messages": HELLO, "max_tokens": 200, "tools": TOOLS}
        whole = asker.messages.create(**asked, tool_choice=ONE_DIAL)
        with asker.messages.stream(**asked, tool_choice=ONE_DIAL) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            last = stream.get_final_message()
    for found in (whole, last):
        (call,) = found.content
        assert call.type == "tool_use" and call.name == "dial" and call.input["digit"] in (1, 2)
        assert found.stop_reason == "tool_use"
    assert len(pieces) > 1 and json.loads("".join(pieces)) == last.content[0].input  # type: ignore[union-attr]


def test_the_clients_tool_runner_goes_on_without_the_thread_that_it_asks_for(idle: Running) -> None:
    from anthropic import beta_tool

    @beta_tool
    def dial(digits: str) -> str:
        """Calls a number

        Args:
            digits: the number
        """
        return digits

    with client(idle) as asker:
        runner = asker.beta.messages.tool_runner(
            model=NAME, messages=HELLO, max_tokens=4, tools=[dial], extra_body=GREEDY
        )
        assert runner.until_done().stop_reason == "max_tokens"


def test_any_tool_is_called_and_none_is_not(idle: Running) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": False}
    found = answer(idle, tools=TOOLS, tool_choice=choice, **WITHOUT_END)
    assert [block["type"] for block in found["content"]] == ["tool_use"] * MAX_CALLS
    assert {block["name"] for block in found["content"]} <= {"dial", "ring"}
    assert len({block["id"] for block in found["content"]}) == len(found["content"])
    assert "dial" not in prompt_of(idle, tools=TOOLS, tool_choice={"type": "none"})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "dial"}])
def test_a_forced_call_is_one_which_no_stop_sequence_ends(choice: Any, idle: Running) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice, "stop_sequences": ['"', "\n"]}
    found = answer(idle, **asked, **WITHOUT_END)
    assert [block["type"] for block in found["content"]] == ["tool_use"]
    assert found["stop_reason"] == "tool_use"


def test_a_call_that_is_cut_off_has_what_is_whole_of_its_arguments(idle: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": "xyz"}, "b": {"type": "string", "minLength": 500}},
        "required": ["a", "b"],
    }
    tools = [{"name": "f", "input_schema": schema}]
    asked = {"tools": tools, "tool_choice": {"type": "tool", "name": "f"}, "max_tokens": 160, "seed": 1}
    found = answer(idle, **asked)
    assert found["stop_reason"] == "max_tokens" and found["content"][0]["input"] == {"a": "xyz"}
    *_, stop, delta, _ = events(idle, **asked)
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"]["stop_reason"] == "max_tokens"


def test_the_default_model_calls_the_tool_that_a_conversation_forces(default_model_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "kelvin"]}},
        "required": ["city", "unit"],
    }
    tools: Any = [{"name": "get_weather", "description": "Weather of a city", "input_schema": schema}]
    said: Any = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    asked: Any = {
        "model": NAME,
        "messages": said,
        "tools": tools,
        "tool_choice": {**ONE_DIAL, "name": "get_weather"},
    }
    with running(default_model_path, engine={"kv_cache_memory": "64MB"}) as server, client(server) as asker:
        with asker.messages.stream(**asked, max_tokens=100, extra_body={"temperature": 0}) as stream:
            found = stream.get_final_message()
        (call,) = found.content
        assert call.type == "tool_use" and call.input == {"city": "Paris", "unit": "celsius"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
        said += [{"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
        asked["tool_choice"] = {"type": "none"}
        last = asker.messages.create(**asked, max_tokens=30)
        assert last.content[0].type == "text" and last.stop_reason in ("end_turn", "max_tokens")


# ---- what Claude Code sends --------------------------------------------------------------------------------

CLAUDE_CODE = {
    "model": NAME,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>\n"},
                {"type": "text", "text": "list the files", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ls will do", "signature": "Eo8="},
                {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_01",
                    "content": "README.md",
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
        {"role": "system", "content": "The user prefers short answers."},
    ],
    "system": [
        {"type": "text", "text": BILLING.format("00a1f")},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                "required": ["command"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
    "stream": True,
    "a_field_of_tomorrow": {"x": 1},
}


def test_claude_codes_request_is_answered(idle: Running) -> None:
    headers = {
        "authorization": "Bearer none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,of-tomorrow-2027-01-01",
        "x-app": "cli",
    }
    body = {**CLAUDE_CODE, "max_tokens": 30}
    response = idle.http.post(f"{MESSAGES}?beta=true", json=body, headers=headers)
    assert response.status_code == 200 and response.text.startswith("event: message_start\n")
    assert response.text.rstrip().split("\n")[-2] == "event: message_stop"
    counted = idle.http.post(f"{MESSAGES}/count_tokens?beta=true", json=CLAUDE_CODE, headers=headers)
    assert counted.json()["input_tokens"] > 300
    text = prompt_of(idle, **{**body, "stream": False})
    assert "billing" not in text and "web_search" not in text and text.startswith("system:You are an agent.")


# ---- what is refused ---------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
WRONG: list[tuple[str, Any]] = [
    ("max_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("max_tokens", 1 << 31),
    ("max_completion_tokens", 5),
    ("messages", None),
    ("messages", []),
    ("messages", "hello"),
    ("messages", [{"role": "tool", "content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": [IMAGE]}]),
    ("messages", [{"role": "user", "content": [5]}]),
    ("messages", [*HELLO, {"role": "assistant", "content": "I"}, {"role": "user", "content": []}]),
    ("messages", [{"role": "user", "content": [{"text": "x"}]}]),
    (
        "messages",
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}],
    ),
    ("messages", [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]),
    ("messages", [*HELLO, {"role": "assistant", "content": "I"}]),
    ("model", 5),
    ("system", 5),
    ("system", [IMAGE]),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", 2),
    ("top_k", -5),
    ("stop_sequences", "x"),
    ("stop_sequences", [5]),
    ("tools", [{"name": "x"}]),
    ("tools", [{"name": "a b", "input_schema": {}}]),
    ("tools", [{"name": "a", "input_schema": {}}] * 2),
    ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "tool"}),
    ("tool_choice", {"type": "tool", "name": "x"}),
    ("tool_choice", "any"),
    ("thinking", True),
    ("output_config", {"format": {"type": "xml"}}),
    ("output_config", {"format": {"type": "json_schema", "schema": {"type": "object", "$ref": "#/a"}}}),
    ("stream", 1),
    ("container", "x"),
    ("mcp_servers", [{"type": "url"}]),
    ("thread", {"id": "x"}),
    ("n", 2),
    ("stop", ["x"]),
]


@pytest.mark.parametrize("name, value", WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_field_is_told_by_its_name(name: str, value: Any, idle: Running) -> None:
    response = ask(idle, **{name: value})
    assert response.status_code == 400, response.text
    assert error_of(response) == "invalid_request_error"
    assert name.rstrip("s").split("_")[0] in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("system", {"type": "text", "text": "x"}), ("messages", [{"role": "user", "content": 5}])],
)
def test_what_is_neither_text_nor_blocks_is_told_that_it_may_be_either(
    name: str, value: Any, idle: Running
) -> None:
    told = ask(idle, **{name: value}).json()["error"]["message"]
    assert "must be a text or a list of blocks, but is" in told


@pytest.mark.parametrize("kind, words", [("image", "process image"), ("document", "process PDF")])
def test_media_are_refused_in_the_words_by_which_claude_code_takes_them_out(
    kind: str, words: str, idle: Running
) -> None:
    medium = {"type": kind, "source": {"type": "base64", "media_type": "x/y", "data": "aGk="}}
    for content in ([medium], [RESULT | {"content": [medium]}]):
        message = ask(idle, messages=[{"role": "user", "content": content}]).json()["error"]["message"]
        assert f"could not {words}" in message and message.startswith("messages[0].content[0]")


def test_the_client_raises_what_each_error_is(folder: Path) -> None:
    import anthropic

    settings = Settings(keys=("secret",), max_body=3000)
    with running(folder, settings, max_num_seqs=1, max_queue=0) as server:
        asked: Any = {"model": NAME, "messages": HELLO, "max_tokens": 1}
        with client(server, api_key="wrong") as asker, pytest.raises(anthropic.AuthenticationError) as error:
            asker.messages.create(**asked)
        assert error.value.type == "authentication_error"
        with client(server, api_key="secret") as asker:
            with pytest.raises(anthropic.NotFoundError) as missing:
                asker.messages.create(**{**asked, "model": "claude"})
            assert missing.value.type == "not_found_error"
            with pytest.raises(anthropic.RequestTooLargeError) as large:
                asker.messages.create(**{**asked, "system": "x" * 3000})
            assert large.value.type == "request_too_large"
            with (
                server.paused(),
                server.open(request_of(MESSAGES, json.dumps(asked).encode(), "x-api-key: secret")),
            ):
                wait_until(lambda: server.process.server.calls)
                with pytest.raises(anthropic.RateLimitError) as many:
                    asker.messages.create(**asked)
            assert many.value.type == "rate_limit_error" and many.value.response.headers["retry-after"]
        server.check_idle()


def test_errors_of_every_status_have_anthropics_shape(idle: Running) -> None:
    for method, path, status, kind in (
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/batches", 404, "not_found_error"),
        ("DELETE", f"{MESSAGES}/count_tokens", 405, "invalid_request_error"),
    ):
        response = idle.http.request(method, path)
        assert (response.status_code, error_of(response)) == (status, kind)
    response = idle.http.post(MESSAGES, content=b"{", headers={"content-encoding": "gzip"})
    assert (response.status_code, error_of(response)) == (415, "invalid_request_error")
    response = idle.http.post(MESSAGES, content=b"[]")
    assert (response.status_code, error_of(response)) == (400, "invalid_request_error")


def test_a_server_that_loads_is_overloaded(folder: Path) -> None:
    with loading(folder) as (server, _):
        response = ask(server)
        assert (response.status_code, error_of(response)) == (503, "overloaded_error")


# ---- streams that wait, fail, or are left ------------------------------------------------------------------


def test_pings_come_while_the_engine_is_busy(folder: Path) -> None:
    with running(folder, Settings(heartbeat_seconds=0.05)) as server:
        ping = b'event: ping\ndata: {"type":"ping"}\n\n'
        asked = {"model": NAME, "messages": HELLO, "max_tokens": 3, "stream": True}
        with server.paused(), server.ask(MESSAGES, **asked) as sock:
            raw = read_until(sock, ping)
            assert raw.startswith(b"HTTP/1.1 200") and raw.index(b"message_start") < raw.index(ping)
            assert ping in read_until(sock, ping)
        server.check_idle()


def test_an_error_ends_a_stream_and_the_client_raises_it(idle: Running) -> None:
    import anthropic

    with client(idle) as asker:
        asked: Any = {"model": NAME, "messages": HELLO, "max_tokens": 90_000, "extra_body": GREEDY}
        with asker.messages.stream(**asked) as stream:
            next(stream)
            idle.fail_calls()
            with pytest.raises(anthropic.APIStatusError, match="the server failed") as error:
                list(stream)
        assert error.value.type == "api_error"


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_place(stream: bool, idle: Running) -> None:
    with idle.ask(MESSAGES, stream=stream, messages=HELLO, **ENDLESS):
        idle.wait_for_tokens()
    idle.check_idle()


def test_an_answer_that_takes_too_long_ends_with_an_error(folder: Path) -> None:
    with running(folder, Settings(request_seconds=0.3)) as server:
        response = ask(server, **ENDLESS)
        assert (response.status_code, error_of(response)) == (503, "timeout_error")
        *_, last = events(server, **ENDLESS)
        assert last["error"]["type"] == "timeout_error"
        server.check_idle()
