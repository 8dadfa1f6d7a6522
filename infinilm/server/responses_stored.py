"""What /v1/responses keeps of answers: gone on from, told again, forgotten."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from infinilm.server.bodies import BodyError
from infinilm.server.errors import HttpError
from infinilm.server.exchange import Call, Operation, Raw, Reply, dumps
from infinilm.server.responses_bodies import (
    STORED_ITEMS,
    ItemReference,
    ItemsQuery,
    MessageItem,
    ReasoningItem,
    ResponseQuery,
    ResponsesBody,
)
from infinilm.server.stored import NotStored, Stored, page_of

HELD = "the body, with the answers that it goes on from,"
GONE = "not found. It was not stored, was deleted or had to make room; send"
# How ids of items begin, by the types that a caller may send
ITEM_IDS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


# ---- what a request goes on from, and leaves ---------------------------------------------------------------


def hold_chain(call: Call, last: str) -> list[Stored]:
    """An answer after those that it goes on from, held within the limits of bodies as if one had them."""
    try:
        chain = call.server.store.chain((call.owner, last))
    except NotStored as error:
        way_out = "the whole conversation as input, without previous_response_id"
        told = f"Previous response with id {error.id[:64]!r} {GONE} {way_out}"
        raise BodyError(told, "previous_response_id", "previous_response_not_found") from error
    for one in chain:
        call.server.hold(call, len(one.input) + len(one.output), HELD)
    return chain


def hold_named(call: Call, item_id: str) -> Stored:
    """The answer that has an item of this id, held likewise"""
    try:
        holder = call.server.store.holder((call.owner, item_id))
    except NotStored as error:
        way_out = "the item itself, as clients do with store: false"
        raise BodyError(f"input: Item with id {error.id[:64]!r} {GONE} {way_out}", "input") from error
    call.server.hold(call, len(holder.output), HELD)
    return holder


def with_items(body: ResponsesBody, holders: Mapping[str, Stored]) -> ResponsesBody:
    """The body with the items that it names, of the answers that hold them"""
    if not holders:
        return body
    items = [holders[one.id].item(one.id) if isinstance(one, ItemReference) else one for one in body.input]
    return body.model_copy(update={"input": STORED_ITEMS.validate_python(items)})


def input_of(body: ResponsesBody) -> bytes:
    """What the answer is stored with; nothing where it is not stored"""
    return dumps([told_item(item) for item in body.input]).encode() if body.store else b""


def told_item(item: Any) -> dict[str, Any]:
    """An item of the input as callers are told it: with an id of its own, and content in parts"""
    told = {"id": f"{ITEM_IDS[item.type]}_{uuid.uuid4().hex}", "type": item.type, "status": "completed"}
    if isinstance(item, MessageItem):
        is_said = item.role == "assistant"
        part = {"type": "output_text", "annotations": []} if is_said else {"type": "input_text"}
        return {**told, "role": item.role, "content": [{**part, "text": item.content}]}
    if isinstance(item, ReasoningItem):
        content = [{"type": "reasoning_text", "text": thought.text} for thought in item.content]
        summary = [{"type": "summary_text", "text": thought.text} for thought in item.summary]
        return {**told, "content": content, "summary": summary}
    return {**told, **item.model_dump(include=set(type(item).model_fields), exclude_none=True)}


# ---- the routes --------------------------------------------------------------------------------------------


def named(call: Call) -> Stored:
    """The answer that the path names"""
    response_id = call.scope["path_params"]["response_id"]
    try:
        return call.server.store.get((call.owner, response_id))
    except NotStored as error:
        raise HttpError(404, f"Response with id {response_id[:64]!r} not found.") from error


async def response(call: Call) -> Reply:
    """An answer that was stored"""
    call.query(ResponseQuery)
    return Raw(named(call).body)


async def delete_response(call: Call) -> Reply:
    """Forget an answer, and so those that go on from it."""
    answer = named(call)
    call.server.store.remove(answer.name)
    return {"id": answer.id, "object": "response", "deleted": True}


async def cancel_response(call: Call) -> Reply:
    """Nothing to cancel: an answer that is stored is complete."""
    named(call)
    raise HttpError(400, "Cannot cancel a synchronous response.")


async def input_items(call: Call) -> Reply:
    """What an answer was made of, in pages"""
    query, answer = call.query(ItemsQuery), named(call)
    return await call.made(page_of, hold_chain(call, answer.id), query)


ONE = "/v1/responses/{response_id}"
OPERATIONS = (
    Operation("GET", ONE, response, query=ResponseQuery),
    Operation("DELETE", ONE, delete_response),
    Operation("POST", f"{ONE}/cancel", cancel_response),
    Operation("GET", f"{ONE}/input_items", input_items, query=ItemsQuery),
)
