"""OpenAI's /v1/responses over HTTP: items in, items out, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from infinilm.engine.stats import Progress
from infinilm.sampling import SamplingParams, StructuredOutputsParams
from infinilm.server import responses_stored
from infinilm.server.bodies import BodyError, as_body_errors, sampled
from infinilm.server.conversation import Message, led_by
from infinilm.server.errors import HttpError
from infinilm.server.exchange import Call, Events, Operation, Reply, named_event
from infinilm.server.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from infinilm.server.responses_bodies import (
    STORED_ITEMS,
    AllowedTools,
    CallOutputItem,
    ChosenTool,
    CustomCallItem,
    CustomTool,
    FunctionCallItem,
    ItemReference,
    MessageItem,
    Namespace,
    PlainFunction,
    ReasoningItem,
    ResponsesBody,
)
from infinilm.server.responses_stored import hold_chain, hold_named, input_of, with_items
from infinilm.server.stored import Stored
from infinilm.server.tools import Choice, Named, Tool, full_name
from infinilm.server.turn import Piece, Run, Turn, Usage, cache_miss, progress_body

Event = dict[str, Any]


# ---- from a body to a turn ---------------------------------------------------------------------------------


def turn_of(body: ResponsesBody, defaults: Mapping[str, Any], chain: Sequence[Stored]) -> Turn:
    """The turn that a body asks for after a chain of answers; BodyError if that cannot be done."""
    before = STORED_ITEMS.validate_python([item for one in chain for item in one.items()])
    tools = tuple(tool for given in body.tools for tool in tools_of(given))
    effort = {} if body.reasoning.effort is None else {"reasoning_effort": body.reasoning.effort}
    choice, allowed = choice_of(body.tool_choice, tools)
    return Turn(
        params=params_of(body, defaults),
        messages=led_by(body.instructions, conversation([*before, *body.input])),
        tools=tools,
        choice=choice,
        allowed=allowed,
        parallel=body.parallel_tool_calls,
        variables={**effort, **body.chat_template_kwargs},
        salt=body.cache_salt,
        priority=body.priority,
        prompt_field="input",
        structure_field="text",
    )


def params_of(body: ResponsesBody, defaults: Mapping[str, Any]) -> SamplingParams:
    structure = structure_of(body)
    return sampled(body, defaults, max_tokens=body.max_output_tokens, structured_outputs=structure)


def structure_of(body: ResponsesBody) -> StructuredOutputsParams | None:
    wanted = body.text.format
    if wanted.type == "text":
        return None
    if wanted.type == "json_schema" and wanted.schema_ is None:
        raise BodyError("text.format.schema must be given where its type is 'json_schema'", "text")
    with as_body_errors({}, "text"):
        if wanted.type == "json_object" and not wanted.schema_:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=wanted.schema_)


def tools_of(given: Any, namespace: str | None = None) -> Iterator[Tool]:
    """One tool, or those of a namespace"""
    if isinstance(given, Namespace):
        for one in given.tools:
            yield from tools_of(one, given.name)
    elif isinstance(given, PlainFunction):
        parameters, strict = given.parameters, given.strict
        yield Tool(given.name, given.description, parameters, is_strict=strict, namespace=namespace)
    elif isinstance(given, CustomTool):
        wanted = given.format if given.format and given.format.type == "grammar" else None
        grammar = None if wanted is None else (wanted.syntax, wanted.definition)
        yield Tool(given.name, given.description, kind="custom", namespace=namespace, input_grammar=grammar)


def choice_of(
    choice: str | ChosenTool | AllowedTools, tools: Sequence[Tool]
) -> tuple[Choice, frozenset[str] | None]:
    """What has to be called, and what alone may be, if that is said"""
    if isinstance(choice, AllowedTools):
        return choice.mode, frozenset(name_of(one, tools) for one in choice.tools)
    if isinstance(choice, ChosenTool):
        return Named(name_of(choice, tools)), None
    return choice, None  # type: ignore[return-value]


def name_of(choice: ChosenTool, tools: Sequence[Tool]) -> str:
    wanted = full_name(choice.name, choice.namespace)
    found = [tool for tool in tools if wanted in (tool.full_name, tool.name)]
    if not found:
        raise BodyError(f"tool_choice: there is no tool {wanted!r}", "tool_choice")
    return found[0].full_name


def conversation(items: Iterable[Any]) -> list[Message]:
    """Items as the messages of a chat: thoughts, text and calls that follow each other are of one."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, MessageItem):
            say(item, messages)
        elif isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, ReasoningItem):
            think(item, messages)
        else:
            assistant(messages).setdefault("tool_calls", []).append(call_of(item))
    return messages


def say(item: MessageItem, messages: list[Message]) -> None:
    role = "system" if item.role == "developer" else item.role
    last = messages[-1] if messages else {}
    is_silent = last.get("role") == "assistant" and last["content"] is None
    if role == "assistant" and is_silent:  # it has thought, or called: some clients send words after calls
        last["content"] = item.content
    else:
        messages.append({"role": role, "content": item.content})


def think(item: ReasoningItem, messages: list[Message]) -> None:
    text = "\n".join(thought.text for thought in item.content or item.summary)
    if text:
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})


def assistant(messages: list[Message]) -> Message:
    """The last message, if it is the assistant's, or a new one"""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def call_of(item: FunctionCallItem | CustomCallItem) -> dict[str, Any]:
    name = full_name(item.name, item.namespace)
    if isinstance(item, CustomCallItem):
        return {"id": item.call_id, "type": "custom", "custom": {"name": name, "input": item.input}}
    function = {"name": name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


# ---- to a response -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Items of one type: their ids, their events, the key of their text, and the part it stands in."""

    type: str
    id: str
    event: str
    key: str = "text"
    part: str | None = None


MESSAGE = Kind("message", "msg", "output_text", part="output_text")
REASONING = Kind("reasoning", "rs", "reasoning_text", part="reasoning_text")
FUNCTION = Kind("function_call", "fc", "function_call_arguments", "arguments")
CUSTOM = Kind("custom_tool_call", "ctc", "custom_tool_call_input", "input")


class Item:
    """One of the output, and the events that tell of it, but for their numbers."""

    def __init__(self, kind: Kind, index: int, **fields: Any) -> None:
        self.kind, self.index, self.fields = kind, index, fields
        self.id = f"{kind.id}_{uuid.uuid4().hex}"
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def body(self, status: str) -> dict[str, Any]:
        told = {"id": self.id, "type": self.kind.type, "status": status, **self.fields}
        if self.kind.part is None:
            return {**told, self.kind.key: self.text}
        return {**told, "content": [] if status == "in_progress" else [self.part()]}

    def part(self) -> dict[str, Any]:
        lists: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind is MESSAGE else {}
        return {"type": self.kind.part, "text": self.text, **lists}

    def begin(self) -> Iterator[Event]:
        yield self.about_item("added", "in_progress")
        if self.kind.part is not None:
            yield self.event("content_part.added", part=self.part())

    def more(self, text: str) -> Event:
        self.texts.append(text)
        return self.event(f"{self.kind.event}.delta", delta=text, **self.logprobs())

    def end(self, status: str) -> Iterator[Event]:
        # Here too, since a client need not have kept the item.
        name = {"name": self.fields["name"]} if self.kind is FUNCTION else {}
        yield self.event(f"{self.kind.event}.done", **name, **{self.kind.key: self.text}, **self.logprobs())
        if self.kind.part is not None:
            yield self.event("content_part.done", part=self.part())
        yield self.about_item("done", status)

    def logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.kind is MESSAGE else {}

    def about_item(self, what: str, status: str) -> Event:
        told = {"output_index": self.index, "item": self.body(status)}
        return {"type": f"response.output_item.{what}", **told}

    def event(self, kind: str, **told: Any) -> Event:
        place: Event = {"item_id": self.id, "output_index": self.index}
        place |= {} if self.kind.part is None else {"content_index": 0}
        return {"type": f"response.{kind}", **place, **told}


class Answer:
    """A response while it comes: its items, and the events that tell of them."""

    def __init__(self, run: Run, body: ResponsesBody, keep: Callable[[Event], None]) -> None:
        self.run, self.body, self.keep = run, body, keep
        self.head = head_of(run, body)
        self.output: list[dict[str, Any]] = []  # items that are done
        self.item: Item | None = None  # that is not
        self.num_events = 0
        self.num_thoughts = 0  # tokens
        self.status = "in_progress"

    async def events(self) -> AsyncIterator[bytes]:
        yield self.encoded([self.about("created"), self.about("in_progress")])
        async with aclosing(self.run.pieces(self.body.return_progress)) as items:
            async for item in items:
                if told := self.encoded(self.add(item) if isinstance(item, Piece) else [self.progress(item)]):
                    yield told
        yield self.encoded([self.last()])

    async def whole(self) -> Event:
        async with aclosing(self.run.pieces()) as pieces:
            async for piece in pieces:
                for _ in self.add(piece) if isinstance(piece, Piece) else ():
                    pass
        response: Event = self.last()["response"]
        return response

    def beat(self) -> bytes:
        """A sign of life that every client takes for one"""
        return self.encoded([self.about("in_progress")])

    def progress(self, progress: Progress) -> Event:
        return {**self.about("in_progress"), **progress_body(progress)}

    def ending(self, error: HttpError) -> bytes:
        self.status = "failed"
        return self.encoded([self.last({"code": code_of(error), "message": str(error)})])

    def encoded(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self.numbered, events))

    def numbered(self, event: Event) -> bytes:
        number, self.num_events = self.num_events, self.num_events + 1
        return named_event(event["type"], {**event, "sequence_number": number})

    def last(self, error: Event | None = None) -> Event:
        """How it ended. It is stored before anybody knows: the next request may come at once."""
        event = self.about(self.status, error)
        if self.body.store:
            self.keep(event["response"])
        return event

    def about(self, what: str, error: Event | None = None) -> Event:
        return {"type": f"response.{what}", "response": {**self.response(), "error": error}}

    def response(self) -> Event:
        is_over = self.status in ("completed", "incomplete")
        reason = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        told: Event = {"status": self.status, "incomplete_details": reason, "output": list(self.output)}
        if not is_over:
            return {**self.head, **told, "usage": None}
        told["completed_at"] = int(time.time()) if self.status == "completed" else None
        usage = usage_body(self.run.usage, self.num_thoughts)
        return {**self.head, **told, "usage": usage, "timings": self.run.timings()}

    def add(self, piece: Piece) -> Iterator[Event]:
        for part in piece.parts:
            yield from self.told(part)
        if self.item is not None and self.item.kind is REASONING:
            self.num_thoughts += len(piece.token_ids)
        if piece.finish_reason is not None:
            if self.item is None and not self.output:  # agents take it for no answer, and ask again
                yield from self.opened(MESSAGE, {"role": "assistant"})
            self.status = "incomplete" if piece.finish_reason == "length" else "completed"
            yield from self.done(self.status)

    def told(self, part: Part) -> Iterator[Event]:
        if isinstance(part, Text):
            yield from self.going_on(MESSAGE, role="assistant")
        elif isinstance(part, Reasoning):
            yield from self.going_on(REASONING, summary=[])
        elif isinstance(part, CallStart):
            yield from self.opened(*call_kind(part))
        elif isinstance(part, CallEnd):
            yield from self.done("completed" if part.is_whole else "incomplete")
        if self.item is not None and isinstance(part, Text | Reasoning | CallArguments):
            yield self.item.more(part.text)

    def going_on(self, kind: Kind, **fields: Any) -> Iterator[Event]:
        if self.item is None or self.item.kind is not kind:
            yield from self.opened(kind, fields)

    def opened(self, kind: Kind, fields: Mapping[str, Any]) -> Iterator[Event]:
        yield from self.done("completed")
        self.item = Item(kind, len(self.output), **fields)
        yield from self.item.begin()

    def done(self, status: str) -> Iterator[Event]:
        if self.item is not None:
            item, self.item = self.item, None
            self.output.append(item.body(status))
            yield from item.end(status)


def call_kind(part: CallStart) -> tuple[Kind, dict[str, Any]]:
    fields: dict[str, Any] = {"call_id": part.id, "name": part.name}
    if part.tool.namespace is not None:
        fields["namespace"] = part.tool.namespace
    return (CUSTOM if part.tool.kind == "custom" else FUNCTION), fields


def head_of(run: Run, body: ResponsesBody) -> Event:
    """What all that is said of a response has in common: what was asked for, and what applies. Every field is
    there that Open Responses requires, since clients made from its document read no response without one."""
    choice, params = body.tool_choice, run.prepared[0].params
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": run.model,
        "background": False,
        "error": None,
        "frequency_penalty": params.frequency_penalty,
        "instructions": None,  # long, and the caller's own
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": body.reasoning.model_dump(),
        "safety_identifier": None,
        "service_tier": "default",
        "store": body.store,
        "temperature": params.temperature,
        "text": body.text.model_dump(by_alias=True, exclude_none=True),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": None,
    }


def usage_body(usage: Usage, num_thoughts: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.drawn,
        "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": usage.prompt + usage.drawn,
        **cache_miss(usage),
    }


def code_of(error: HttpError) -> str:
    """A code that Codex knows: it asks again after a server's error, later where the rate was too high."""
    if error.code == "context_length_exceeded":
        return error.code
    known = {429: "rate_limit_exceeded", 503: "server_is_overloaded"}
    return known.get(error.status, "invalid_prompt" if error.status < 500 else "server_error")


# ---- the route ---------------------------------------------------------------------------------------------


async def responses(call: Call) -> Reply:
    """Answer a conversation of items."""
    body, turn = await read_turn(call)
    given = await call.made(input_of, body)

    def keep(response: Event) -> None:
        call.server.store.add(Stored.of(response, call.owner, given))

    run = await call.service.start([turn], call, call.service.served(body.model))
    answer = Answer(run, body, keep)
    return Events(answer.events(), answer.ending, answer.beat) if body.stream else await answer.whole()


async def input_tokens(call: Call) -> Reply:
    """How many tokens the model would read"""
    _, turn = await read_turn(call)
    tokens = await call.service.off_loop(call.service.tokens_of, turn)
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


async def read_turn(call: Call) -> tuple[ResponsesBody, Turn]:
    """A body and the turn that it asks for, after what it names of earlier answers"""
    body = await call.read(ResponsesBody)
    call.service.served(body.model)
    last = body.previous_response_id
    chain = [] if last is None else hold_chain(call, last)
    holders = {one.id: hold_named(call, one.id) for one in body.input if isinstance(one, ItemReference)}
    body = await call.made(with_items, body, holders)
    return body, await call.made(turn_of, body, call.service.defaults, chain)


OPERATIONS = (
    Operation("POST", "/v1/responses", responses, ResponsesBody, can_stream=True),
    Operation("POST", "/v1/responses/input_tokens", input_tokens, ResponsesBody),
    *responses_stored.OPERATIONS,
)
