"""Conversations as chat templates take them: content as one text, calls and results in each family's ways."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from reprlib import repr as short
from typing import Any

from infinilm.engine.request import RequestError

Message = dict[str, Any]


def plain_message(index: int, message: Mapping[str, Any]) -> Message:
    """One of OpenAI's messages with its content as one text and its arguments as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a role, but is {short(message)}")
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    found: Message = {"role": role, "content": text_of(index, message.get("content"))}
    found |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        found |= {"reasoning_content": reasoning} if isinstance(reasoning, str) else {}
        calls = [plain_call(index, call) for call in list_of_calls(index, message)]
        found |= {"tool_calls": calls} if calls else {}
    return found


def led_by(system: str, messages: Sequence[Message]) -> list[Message]:
    """The messages after one of the system, which says this and what their own first ones say."""
    own = list(takewhile(lambda message: message["role"] == "system", messages))
    said = "\n\n".join(filter(None, [system, *(message["content"] for message in own)]))
    rest = list(messages[len(own) :])
    return [{"role": "system", "content": said}, *rest] if said else rest


def text_of(index: int, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part_text(part) for part in content] if isinstance(content, list) else [None]
    for text, part in zip(texts, content if isinstance(content, list) else [content], strict=True):
        if text is None:
            wanted = "text, or a list of {'type': 'text', 'text': ...}, for the model reads nothing else"
            raise RequestError(f"messages[{index}].content must be {wanted}, but has {short(part)}")
    return "\n".join(text for text in texts if text is not None)


def part_text(part: Any) -> str | None:
    """What the APIs call text has its text under the same key, but for refusals."""
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_KINDS:
        return None
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    return text if isinstance(text, str) else None


TEXT_KINDS = ("text", "input_text", "output_text", "refusal")


def list_of_calls(index: int, message: Mapping[str, Any]) -> list[Any]:
    """Before there were tools, a call stood alone."""
    calls, alone = message.get("tool_calls"), message.get("function_call")
    if not isinstance(calls, list | None):
        raise RequestError(f"messages[{index}].tool_calls must be a list, but is {short(calls)}")
    return calls or ([] if alone is None else [{"function": alone}])


def plain_call(index: int, call: Any) -> dict[str, Any]:
    match call:
        case {"custom": {"name": str(name), "input": str(text)}}:
            arguments: Any = {"input": text}
        case {"function": {"name": str(name), "arguments": found}}:
            arguments = parsed(found)
        case _:
            wanted = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
            raise RequestError(f"messages[{index}].tool_calls: a call must be {wanted}, but is {short(call)}")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(arguments: Any) -> Any:
    """The object that is written in a text. Models write others too, which then stay text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def one_call_each(messages: list[Message]) -> list[Message]:
    """Llama's template refuses several calls in a message, so each comes alone and with its result."""
    found: list[Message] = []
    waiting = list(reversed(messages))
    while waiting:
        message = waiting.pop()
        calls = message.pop("tool_calls", [])
        if message["content"] or not calls:
            found.append(message)
        results = []
        while calls and waiting and waiting[-1]["role"] == "tool":
            results.append(waiting.pop())
        rest = {} if message["content"] else message  # such as reasoning, which comes before the first call
        for call in calls:
            found.append({**rest, "role": "assistant", "content": "", "tool_calls": [call]})
            rest = {}
            found += [result for result in results if result.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        found += [result for result in results if result.get("tool_call_id") not in ids]
    return found


def with_short_ids(message: Message) -> Message:
    """Mistral's templates refuse ids that are not 9 letters and digits."""
    found = dict(message)
    if "tool_calls" in message:
        found["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in message["tool_calls"]]
    if message["role"] == "tool":
        found["tool_call_id"] = short_id(message.get("tool_call_id"))
    return found


def short_id(given: Any) -> str:
    if isinstance(given, str) and re.fullmatch("[a-zA-Z0-9]{9}", given):
        return given
    return hashlib.sha256(str(given).encode("utf-8", "surrogatepass")).hexdigest()[:9]


DESCRIPTION = """You can call functions. These are there, each with the JSON schema of its arguments:
{tools}
To call one, write its name and arguments as JSON between tags, and nothing else:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
Call several by writing several of these. The results come between <tool_response> tags."""


def with_description(messages: list[Message], shown: list[dict[str, Any]]) -> list[Message]:
    """Ours comes after what the conversation's own system message says."""
    if not shown:
        return messages
    tools = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in shown)
    ours = DESCRIPTION.format(tools=tools)
    if messages and messages[0]["role"] == "system":
        own = messages[0]["content"]
        return [{**messages[0], "content": f"{own}\n\n{ours}" if own else ours}, *messages[1:]]
    return [{"role": "system", "content": ours}, *messages]


def without_system(messages: list[Message]) -> list[Message]:
    """What the system would say, the user says first."""
    match messages:
        case [{"role": "system", "content": said}, {"role": "user", "content": asked}, *rest]:
            return [{"role": "user", "content": f"{said}\n\n{asked}"}, *rest]
        case [{"role": "system", "content": said}, *rest]:
            return [{"role": "user", "content": said}, *rest]
    return messages


def in_words(messages: list[Message]) -> list[Message]:
    """Calls and results as text, in the roles that every template knows."""
    found: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if not is_result:
            found.append(call_in_words(message))
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if was_result:
            text = f"{found.pop()['content']}\n{text}"
        found.append({"role": "user", "content": text})
    return found


def call_in_words(message: Message) -> Message:
    calls = message.get("tool_calls", ())
    written = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
    ]
    text = "\n".join([message["content"], *written] if message["content"] else written or [""])
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
