"""Answers of /v1/responses that are stored: gone on from, told again, forgotten, and bounded."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from servers import GREEDY, NAME, Running, answered, error_of, running

from infinilm.server.exchange import Settings
from infinilm.server.stored import NotStored, Store, Stored, parsed

pytestmark = pytest.mark.usefixtures("one_thread")

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"model": NAME, "input": "hello", "max_output_tokens": 4}


def ask(server: Running, **body: Any) -> httpx.Response:
    return server.post(RESPONSES, **{**ASK, **body})


def answer(server: Running, **body: Any) -> dict[str, Any]:
    return answered(ask(server, **body))


def prompt_of(server: Running, **body: Any) -> str:
    return server.prompt_of(RESPONSES, **{**ASK, **body})


def said(response: dict[str, Any]) -> Any:
    return response["output"][0]["content"][0]["text"]


# ---- going on ----------------------------------------------------------------------------------------------


def test_a_response_goes_on_from_the_one_before(idle: Running) -> None:
    first = answer(idle, input="a", **GREEDY)
    second = answer(idle, input="b", previous_response_id=first["id"], **GREEDY)
    assert second["previous_response_id"] == first["id"] and second["store"] is True
    found = prompt_of(idle, input="c", previous_response_id=second["id"])
    whole = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": said(first)},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": said(second)},
        {"role": "user", "content": "c"},
    ]
    assert found == prompt_of(idle, input=whole)


def test_two_responses_go_on_from_one(idle: Running) -> None:
    first = answer(idle, input="a", **GREEDY)
    for text in ("left", "right"):
        answer(idle, input=text, previous_response_id=first["id"])
    assert "left" not in prompt_of(idle, input="c", previous_response_id=first["id"])


def test_instructions_hold_for_one_response(idle: Running) -> None:
    first = answer(idle, instructions="be brief")
    assert "be brief" not in prompt_of(idle, previous_response_id=first["id"])
    found = prompt_of(idle, previous_response_id=first["id"], instructions="be kind")
    assert found.startswith("system:be kind\nuser:hello")


def test_a_stream_is_stored_when_it_is_complete(idle: Running) -> None:
    with idle.client() as client:
        last: Any
        *_, last = client.responses.create(**ASK, stream=True, extra_body=GREEDY)
        assert client.responses.retrieve(last.response.id) == last.response
        client.responses.create(**ASK, previous_response_id=last.response.id)


def test_the_result_of_a_call_is_sent_alone(idle: Running) -> None:
    tool = {"type": "function", "name": "look", "parameters": {}}
    first = answer(idle, tools=[tool], tool_choice="required", max_output_tokens=300, logit_bias={"0": -100})
    (call,) = first["output"]
    seen = {"type": "function_call_output", "call_id": call["call_id"], "output": "a cat"}
    found = prompt_of(idle, previous_response_id=first["id"], input=[seen])
    assert found == prompt_of(idle, input=[{"role": "user", "content": "hello"}, call, seen])
    assert found.index("look") < found.index("a cat")


def test_tokens_are_counted_with_what_is_gone_on_from(idle: Running) -> None:
    first = answer(idle)
    asked = {"model": NAME, "input": "more", "previous_response_id": first["id"]}
    counted = answered(idle.post(f"{RESPONSES}/input_tokens", **asked))["input_tokens"]
    assert counted == answer(idle, **asked)["usage"]["input_tokens"] > 30


def test_an_item_may_be_named_in_its_place(idle: Running) -> None:
    """As Vercel's AI SDK does unless it is told that nothing is stored"""
    first = answer(idle, input="a", **GREEDY)
    named = {"type": "item_reference", "id": first["output"][0]["id"]}
    asked = [{"role": "user", "content": "a"}, named, {"role": "user", "content": "b"}]
    whole = [asked[0], {"role": "assistant", "content": said(first)}, asked[2]]
    assert prompt_of(idle, input=asked) == prompt_of(idle, input=whole)
    second = answer(idle, input=asked)
    found = prompt_of(idle, input="c", previous_response_id=second["id"])
    rest = [{"role": "assistant", "content": said(second)}, {"role": "user", "content": "c"}]
    assert found == prompt_of(idle, input=[*whole, *rest])


@pytest.mark.parametrize("kind", [{}, {"type": None}], ids=["left out", "null"])
def test_an_item_may_be_named_by_its_id_alone(kind: dict[str, None], idle: Running) -> None:
    """OpenAI's client takes the type for optional there"""
    named = {"id": answer(idle, **GREEDY)["output"][0]["id"]}
    asked = {"type": "item_reference", **named}
    assert prompt_of(idle, input=[{**kind, **named}]) == prompt_of(idle, input=[asked])


# ---- what is not there -------------------------------------------------------------------------------------

ODD = ["", "resp_1", "x" * 5000, "../..", "\x00", "é\U0001f600", "input_tokens", "{}", "None"]


def check_gone(server: Running, response_id: str) -> None:
    response = ask(server, previous_response_id=response_id)
    told = error_of(response)
    assert response.status_code == 400 and told["code"] == "previous_response_not_found"
    assert told["param"] == "previous_response_id" and len(told["message"]) < 400
    assert told["message"].startswith(f"Previous response with id {response_id[:64]!r} not found.")


@pytest.mark.parametrize("response_id", ODD, ids=lambda value: repr(value[:20]))
def test_an_unknown_response_is_told_in_openais_words(response_id: str, idle: Running) -> None:
    check_gone(idle, response_id)
    told = error_of(ask(idle, input=[{"type": "item_reference", "id": response_id}]))
    assert f"Item with id {response_id[:64]!r} not found." in told["message"] and told["param"] == "input"


def test_an_item_is_no_response(idle: Running) -> None:
    first = answer(idle, **GREEDY)
    check_gone(idle, first["output"][0]["id"])
    assert error_of(ask(idle, input=[{"type": "item_reference", "id": first["id"]}]))["param"] == "input"


def test_what_is_not_to_be_stored_is_not(idle: Running) -> None:
    found = answer(idle, store=False)
    assert found["store"] is False
    check_gone(idle, found["id"])


def test_a_response_that_was_deleted_is_gone_with_those_after_it(idle: Running) -> None:
    first = answer(idle, **GREEDY)
    second = answer(idle, previous_response_id=first["id"])
    with idle.client() as client:
        client.responses.delete(first["id"])
        for gone in (client.responses.delete, client.responses.retrieve, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match=f"Response with id '{first['id']}' not found."):
                gone(first["id"])
        assert client.responses.retrieve(second["id"]).id == second["id"]
    check_gone(idle, first["id"])
    assert first["id"] in error_of(ask(idle, previous_response_id=second["id"]))["message"]
    named = [{"type": "item_reference", "id": first["output"][0]["id"]}]
    assert error_of(ask(idle, input=named))["param"] == "input"


def test_a_key_finds_its_own_responses_alone(folder: Path) -> None:
    with running(folder, Settings(keys=("mine", "yours"))) as server:
        with server.client(api_key="mine") as mine, server.client(api_key="yours") as yours:
            found = mine.responses.create(**ASK)
            for call in (yours.responses.retrieve, yours.responses.delete, yours.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    call(found.id)
            with pytest.raises(openai.BadRequestError, match="not found"):
                yours.responses.create(**ASK, previous_response_id=found.id)
            assert mine.responses.retrieve(found.id) == found
        headers = {"x-api-key": "mine"}
        answered(server.http.get(f"{RESPONSES}/{found.id}", headers=headers))


# ---- telling again -----------------------------------------------------------------------------------------


def test_a_response_is_told_as_it_was(idle: Running) -> None:
    asked = {"metadata": {"a": "b"}, "tools": [{"type": "function", "name": "look", "parameters": {}}]}
    found = answer(idle, **asked, **GREEDY)
    assert answered(idle.http.get(f"{RESPONSES}/{found['id']}")) == found
    response = idle.http.get(f"{RESPONSES}/{found['id']}?stream=true")
    assert response.status_code == 400 and error_of(response)["param"] == "stream"
    response = idle.http.post(f"{RESPONSES}/{found['id']}/cancel")
    assert response.status_code == 400 and "synchronous" in error_of(response)["message"]


def test_a_failed_stream_is_told_as_failed(idle: Running) -> None:
    with idle.client() as client:
        with client.responses.stream(model=NAME, input="hello", extra_body=GREEDY) as stream:
            while next(stream).type != "response.output_text.delta":
                pass
            idle.fail_calls()
            last: Any = list(stream)[-1]
        found = client.responses.retrieve(last.response.id)
    assert found.status == "failed" and found == last.response


def test_who_leaves_a_stream_leaves_nothing_stored(idle: Running) -> None:
    before = len(idle.process.server.store)
    with idle.ask(RESPONSES, stream=True, input="hello", **GREEDY):
        idle.wait_for_tokens()
    idle.check_idle()
    assert len(idle.process.server.store) == before


ITEMS: list[Any] = [
    {"role": "developer", "content": "in short"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}], "id": "msg_twice"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": "I look", "id": "msg_twice"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x", "namespace": "ed"},
    {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
    {"role": "user", "content": "b", "unknown": "x" * 1000},
]


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_openais_client_reads_what_a_response_was_made_of_in_pages(limit: int, idle: Running) -> None:
    first = answer(idle, input=ITEMS, **GREEDY)
    second = answer(idle, input="c", previous_response_id=first["id"])
    with idle.client() as client:
        items = client.responses.input_items
        pages = items.list(second["id"], limit=limit, order="asc"), items.list(second["id"], limit=limit)
        found: list[Any]
        found, backwards = (
            list(islice(page, 50)) for page in pages
        )  # which would have no end if ids came twice
    assert found == backwards[::-1] and len({item.id for item in found}) == len(found)
    kinds = [item.type for item in found]
    assert kinds == [*(one.get("type", "message") for one in ITEMS), "message", "message"]
    assert [found[i].content[0].text for i in (0, 1, 3, 8, 10)] == ["in short", "a", "I look", "b", "c"]
    assert found[9].to_dict() == first["output"][0]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_1"])
def test_a_wrong_page_is_told_by_its_field(query: str, idle: Running) -> None:
    response = idle.http.get(f"{RESPONSES}/{answer(idle)['id']}/input_items?{query}")
    assert response.status_code == 400 and error_of(response)["param"] == query.partition("=")[0]


def test_a_page_after_the_last_item_is_empty(idle: Running) -> None:
    path = f"{RESPONSES}/{answer(idle)['id']}/input_items"
    (item,) = answered(idle.http.get(path))["data"]
    found = answered(idle.http.get(path, params={"after": item["id"]}))
    assert found == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


# ---- bounds ------------------------------------------------------------------------------------------------


def stored(number: int, previous: str | None = None, size: int = 1) -> Stored:
    response = {"id": f"resp_{number}", "previous_response_id": previous, "output": [{"id": f"msg_{number}"}]}
    return Stored.of(response, None, json.dumps([{"id": f"in_{number}", "text": "x" * size}]).encode())


def chained(count: int) -> Iterator[Stored]:
    return (stored(i, f"resp_{i - 1}" if i else None) for i in range(count))


def test_the_oldest_answers_make_room_for_the_newest() -> None:
    store = Store(max_answers=100)
    for number in range(1000):
        store.add(stored(number))
    assert len(store) == 100 and store.num_bytes == sum(stored(i).num_bytes for i in range(900, 1000))
    assert store.get((None, "resp_900")) and store.holder((None, "msg_900"))
    for find in (store.get, store.holder):
        with pytest.raises(NotStored):
            find((None, "resp_899" if find == store.get else "msg_899"))


def test_answers_take_no_more_memory_than_is_said() -> None:
    store = Store(max_bytes=1 << 20)
    tracemalloc.start()
    try:
        for number in range(2_000):
            store.add(stored(number, size=10_000 if number % 10 else 200_000))
        assert store.num_bytes <= 1 << 20 and tracemalloc.get_traced_memory()[0] < 2 << 20
        store.add(stored(2_000, size=2 << 20))
        assert len(store) == store.num_bytes == 0
    finally:
        tracemalloc.stop()


def test_a_conversation_that_goes_on_stays_whole() -> None:
    store = Store(max_answers=10)
    for one in chained(5):
        store.add(one)
    for number in range(100, 200):
        store.add(stored(number))
        assert [one.id for one in store.chain((None, "resp_4"))] == [f"resp_{i}" for i in range(5)]


def test_a_conversation_that_names_its_items_stays_whole() -> None:
    store = Store(max_answers=10)
    store.add(stored(0))
    for number in range(100, 200):
        store.add(stored(number))
        assert store.holder((None, "msg_0")).id == "resp_0"


def test_a_chain_of_thousands_is_gone_on_from(folder: Path) -> None:
    with running(folder) as server:
        for one in chained(9_000):
            server.process.server.store.add(with_message(one))
        asked = {"input": "last", "previous_response_id": "resp_8999"}
        found = answered(server.post(f"{RESPONSES}/input_tokens", **asked))["input_tokens"]
        assert found == sum(len(f"user:{i}\n") for i in (*range(9_000), "last"))
        server.check_idle()


def test_others_have_their_turns_while_a_long_chain_is_read() -> None:
    items = json.dumps([{"id": f"rs_{i}"} for i in range(200_000)]).encode()
    num_turns = 0
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(parsed, items)
        while not reading.done():
            num_turns += 1
            time.sleep(0.001)
    assert num_turns > 5 and len(reading.result()) == 200_000


def with_message(one: Stored) -> Stored:
    item = {"id": "x", "type": "message", "role": "user", "content": one.id.removeprefix("resp_")}
    told = {"id": one.id, "previous_response_id": one.previous, "output": []}
    return Stored.of(told, None, json.dumps([item]).encode())


def test_what_is_gone_on_from_counts_as_sent(folder: Path) -> None:
    with running(folder, Settings(max_body=3000)) as server:
        first = answer(server, input="x" * 1000)
        second = answer(server, input="x" * 1000, previous_response_id=first["id"])
        response = ask(server, input="y" * 1000, previous_response_id=second["id"])
        assert response.status_code == 413 and "goes on from" in error_of(response)["message"]
        named = {"type": "item_reference", "id": answer(server, **GREEDY)["output"][0]["id"]}
        assert ask(server, input=[named] * 20).status_code == 413
        server.check_idle()
