"""Anthropic's API over HTTP: messages, whole or as events, and how many tokens they have."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any

from pydantic_core import from_json

from infinilm.engine.stats import Progress
from infinilm.sampling import SamplingParams, StructuredOutputsParams
from infinilm.server.anthropic_bodies import (
    BlockMessage,
    CountBody,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from infinilm.server.bodies import BodyError, as_body_errors, sampled
from infinilm.server.conversation import led_by
from infinilm.server.errors import HttpError
from infinilm.server.exchange import Call, Events, Operation, Reply, named_event
from infinilm.server.parts import CallArguments, CallStart, Part, Reasoning, Text
from infinilm.server.tools import Choice, Named, Tool
from infinilm.server.turn import Piece, Run, Turn, Usage, cache_miss, progress_body

MESSAGES = "/v1/messages"
# Claude Code's first words to the system, new with every request: no two prompts would begin alike.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")

Event = dict[str, Any]


# ---- from a body to a turn ---------------------------------------------------------------------------------


def turn_of(body: CountBody, params: SamplingParams) -> Turn:
    """The turn that a body asks for; BodyError if that cannot be done."""
    is_single = None if body.tool_choice is None else body.tool_choice.disable_parallel_tool_use
    return Turn(
        params=params,
        messages=conversation(body),
        tools=tuple(
            Tool(tool.name, tool.description, tool.input_schema, is_strict=tool.strict) for tool in body.tools
        ),
        choice=choice_of(body),
        parallel=None if is_single is None else not is_single,
        variables=variables_of(body),
        salt=body.cache_salt,
        priority=body.priority,
        structure_field="output_config",
    )


def params_of(body: MessagesBody, defaults: Mapping[str, Any]) -> SamplingParams:
    return sampled(body, defaults, stop=body.stop_sequences, structured_outputs=structure(body))


def structure(body: MessagesBody) -> StructuredOutputsParams | None:
    wanted = body.output_config.format or body.output_format
    if wanted is None:
        return None
    with as_body_errors({}, "output_config"):
        return StructuredOutputsParams(json=wanted.schema_)


def choice_of(body: CountBody) -> Choice:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type != "tool":
        return "required" if choice.type == "any" else "none"
    if choice.name is None:
        raise BodyError("tool_choice.name must be given where its type is 'tool'", "tool_choice")
    return Named(choice.name)


def variables_of(body: CountBody) -> dict[str, Any]:
    """What templates have names for"""
    found: dict[str, Any] = {}
    if body.thinking is not None:
        found["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config.effort is not None:
        found["reasoning_effort"] = body.output_config.effort
    return {**found, **body.chat_template_kwargs}


def conversation(body: CountBody) -> list[dict[str, Any]]:
    messages = [one for message in body.messages for one in messages_of(message)]
    return led_by(system_text(body.system), messages)


def messages_of(message: BlockMessage) -> Iterator[dict[str, Any]]:
    """One of Anthropic's messages as those of OpenAI's, where a tool's result is a message of its own."""
    if message.role == "assistant":
        yield assistant_message(message.content)
    elif message.role == "system":
        text = system_text(message.content)
        yield from [{"role": "system", "content": text}] if text else []
    else:
        for is_result, group in groupby(message.content, lambda block: isinstance(block, ToolResultBlock)):
            if is_result:
                yield from map(result_message, group)
            else:
                yield {"role": "user", "content": joined(group)}


def assistant_message(blocks: Sequence[Any]) -> dict[str, Any]:
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": joined(blocks)}
    message |= {"reasoning_content": thoughts} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def result_message(block: Any) -> dict[str, Any]:
    text = joined(block.content)
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def system_text(blocks: Iterable[Any]) -> str:
    return "\n\n".join(text for block in blocks if (text := BILLING.sub("", block.text)))


def joined(blocks: Iterable[Any]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


# ---- to a message ------------------------------------------------------------------------------------------


class Answer:
    """A message while it comes: its blocks, and the events that tell of them."""

    def __init__(self, run: Run, body: MessagesBody) -> None:
        self.run, self.body = run, body
        self.head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self.head["model"] = run.model
        self.content: list[dict[str, Any]] = []
        self.texts: list[str] = []  # of the last block, while that is open
        self.is_open = False
        self.last = Piece(0, "", [], [])

    async def events(self) -> AsyncIterator[bytes]:
        yield encoded([self.start()])
        async with aclosing(self.run.pieces(self.body.return_progress)) as items:
            async for item in items:
                if told := encoded(self.add(item) if isinstance(item, Piece) else [ping(item)]):
                    yield told
        yield encoded(self.end())

    async def whole(self) -> Event:
        for piece in (await self.run.whole())[0]:
            for _ in self.add(piece):
                pass
        told = {"content": self.content, **self.reason(), "usage": usage_body(self.run.usage)}
        return {**self.head, **told, "timings": self.run.timings()}

    def start(self) -> Event:
        """Before anything is known but the length of the prompt"""
        usage = usage_body(Usage(len(self.run.prepared[0].token_ids), 0, 0))
        told: Event = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": {**self.head, **told}}

    def end(self) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": self.reason(), "usage": usage_body(self.run.usage)}
        yield {"type": "message_stop", "timings": self.run.timings()}

    def add(self, piece: Piece) -> Iterator[Event]:
        self.last = piece
        for part in piece.parts:
            yield from self.told(part)
        if piece.finish_reason is not None:
            yield from self.closed()

    def told(self, part: Part) -> Iterator[Event]:
        if isinstance(part, Text):
            yield from self.opened({"type": "text", "text": ""})
            yield self.more(part.text, {"type": "text_delta", "text": part.text})
        elif isinstance(part, Reasoning):
            yield from self.opened({"type": "thinking", "thinking": "", "signature": ""})
            yield self.more(part.text, {"type": "thinking_delta", "thinking": part.text})
        elif isinstance(part, CallStart):
            yield from self.opened({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        elif isinstance(part, CallArguments):
            yield self.more(part.text, {"type": "input_json_delta", "partial_json": part.text})
        else:
            yield from self.closed()

    def opened(self, block: dict[str, Any]) -> Iterator[Event]:
        """Text goes on in a block of its kind; a call is always a new one."""
        if self.is_open and block["type"] == self.content[-1]["type"] != "tool_use":
            return
        yield from self.closed()
        self.content.append(block)
        self.texts, self.is_open = [], True
        yield self.about_block("content_block_start", content_block=dict(block))

    def more(self, text: str, delta: dict[str, Any]) -> Event:
        self.texts.append(text)
        return self.about_block("content_block_delta", delta=delta)

    def closed(self) -> Iterator[Event]:
        if not self.is_open:
            return
        self.is_open = False
        block, text = self.content[-1], "".join(self.texts)
        if block["type"] == "thinking":
            yield self.about_block("content_block_delta", delta={"type": "signature_delta", "signature": ""})
        if block["type"] == "tool_use":
            block["input"] = input_of(text)
        else:
            block[block["type"]] = text
        yield self.about_block("content_block_stop")

    def about_block(self, kind: str, **told: Any) -> Event:
        return {"type": kind, "index": len(self.content) - 1, **told}

    def reason(self) -> Event:
        found = self.last.stop_reason
        if self.last.finish_reason == "length":
            is_asked = self.run.usage.drawn >= self.body.max_tokens
            kind = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif isinstance(found, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": found}
        else:
            kind = "tool_use" if self.last.has_calls else "end_turn"
        return {"stop_reason": kind, "stop_sequence": None}


def input_of(arguments: str) -> dict[str, Any]:
    """The object that is written; of one that a limit cut off, what is whole."""
    try:
        found = json.loads(arguments, parse_float=finite)
    except (ValueError, RecursionError):
        found = whole_part(arguments)
    return found if isinstance(found, dict) else {}


def whole_part(arguments: str) -> Any:
    try:
        return json.loads(json.dumps(from_json(arguments, allow_partial=True)), parse_constant=finite)
    except (ValueError, RecursionError):
        return {}


def finite(number: str) -> float:
    """The number, or the largest that readers of JSON know; 0 for what is none"""
    found = float(number.replace("NaN", "0"))
    return max(min(found, sys.float_info.max), -sys.float_info.max)


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.drawn,
        **cache_miss(usage),
    }


def encoded(events: Iterable[Event]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)


def ping(progress: Progress) -> Event:
    return {"type": "ping", **progress_body(progress)}


PING = named_event("ping", {"type": "ping"})

# By status; what is not here is the caller's mistake below 500, and ours above.
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# By the field that is refused. The client's tool runner begins a thread unasked; told this, it does without.
DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}


def error_body(error: HttpError) -> dict[str, Any]:
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    kind = error.kind if error.kind == "timeout_error" else kind
    details = {"details": DETAILS[error.param]} if error.param in DETAILS else {}
    return {"type": "error", "error": {"type": kind, "message": str(error), **details}}


def ending(error: HttpError) -> bytes:
    return named_event("error", error_body(error))


# ---- routes ------------------------------------------------------------------------------------------------


async def messages(call: Call) -> Reply:
    """Answer a conversation, in Anthropic's form."""
    body = await call.read(MessagesBody)
    service = call.service
    served = service.served(body.model)
    if body.messages[-1].role == "assistant":
        told = "messages must not end with one of the assistant's: to continue it is not supported"
        raise BodyError(told, "messages")
    turn = await call.made(lambda: turn_of(body, params_of(body, service.defaults)))
    answer = Answer(await service.start([turn], call, served), body)
    return Events(answer.events(), ending, lambda: PING) if body.stream else await answer.whole()


async def count_tokens(call: Call) -> Reply:
    """How many tokens a conversation has, in Anthropic's form"""
    body = await call.read(CountBody)
    service = call.service
    service.served(body.model)
    turn = await call.made(turn_of, body, SamplingParams())
    return {"input_tokens": len(await service.off_loop(service.tokens_of, turn))}


OPERATIONS = (
    Operation("POST", MESSAGES, messages, MessagesBody, can_stream=True, error_body=error_body),
    Operation("POST", f"{MESSAGES}/count_tokens", count_tokens, CountBody, error_body=error_body),
)
