"""Conversations as chat templates take them: content as one text, calls and results in each family's ways."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = dict[str, Any]


def plain_message(message: Mapping[str, Any]) -> Message:
    """One of OpenAI's messages, as bodies have it, with what templates know of it: arguments are objects."""
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    found: Message = {"role": role, "content": message.get("content") or ""}
    found |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        found |= {"reasoning_content": reasoning} if isinstance(reasoning, str) else {}
        alone = message.get("function_call")  # as calls were before there were tools
        calls = message.get("tool_calls") or ([] if alone is None else [{"function": alone}])
        if calls:  # without a word beside them there is no content, which DeepSeek's template looks at
            found |= {"tool_calls": list(map(plain_call, calls)), "content": found["content"] or None}
    return found


def led_by(system: str, messages: Sequence[Message]) -> list[Message]:
    """The messages after one of the system, which says this and what their own first ones say."""
    own = list(takewhile(lambda message: message["role"] == "system", messages))
    said = "\n\n".join(filter(None, [system, *(message["content"] for message in own)]))
    rest = list(messages[len(own) :])
    return [{"role": "system", "content": said}, *rest] if said else rest


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if (custom := call.get("custom")) is not None:
        name, arguments = custom["name"], {"input": custom["input"]}
    else:
        name, arguments = call["function"]["name"], parsed(call["function"]["arguments"])
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
