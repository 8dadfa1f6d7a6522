"""Tools: how the families of chat templates show them to a model, and the grammars that force their calls."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import itemgetter
from reprlib import repr as short
from typing import Any, Literal

from infinilm.engine.grammar import check_enforceable, json_rule
from infinilm.engine.request import RequestError
from infinilm.sampling import MAX_GRAMMAR_LENGTH, StructuredOutputsParams

Message = dict[str, Any]

NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # OpenAI takes 64 characters, Anthropic 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
AFTER_REASONING = "\n\n"
MAX_CALLS = 16  # that are forced: a small model does not come to an end by itself


# ---- tools -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """What a client offers. A custom tool takes text, for which a Lark or regex grammar may be stated."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema; {} for none
    kind: Literal["function", "custom"] = "function"
    is_strict: bool = False
    namespace: str | None = None
    input_grammar: tuple[Literal["lark", "regex"], str] | None = None

    def __post_init__(self) -> None:
        for part in [self.name] if self.namespace is None else [self.namespace, self.name]:
            if not NAME.fullmatch(part):
                wanted = "1 to 128 letters, digits, _ and -"
                raise RequestError(f"tools: a name must be {wanted}, but one is {short(part)}")

    @property
    def full_name(self) -> str:
        """What models call it."""
        return full_name(self.name, self.namespace)

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments: an object"""
        if self.kind == "function":
            return dict(self.parameters) or NO_PARAMETERS
        kind, definition = self.input_grammar or ("", "")
        return input_schema(f"^(?:{definition})$" if kind == "regex" else None)

    @property
    def for_template(self) -> dict[str, Any]:
        description = self.description
        if self.input_grammar is not None:
            kind, definition = self.input_grammar
            description += f"\nThe input has to follow this {kind} grammar:\n{definition}"
        shown = {"name": self.full_name, "description": description, "parameters": self.schema}
        return {"type": "function", "function": shown}


def input_schema(pattern: str | None = None) -> dict[str, Any]:
    """Of what a custom tool takes: text, under one key"""
    text = {"type": "string"} | ({"pattern": pattern} if pattern else {})
    return {**NO_PARAMETERS, "properties": {"input": text}, "required": ["input"]}


def full_name(name: str, namespace: str | None = None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(frozen=True)
class Named:
    """The choice of one tool, by its full name"""

    name: str


Choice = Literal["none", "auto", "required"] | Named


def chosen(tools: Sequence[Tool], choice: Choice) -> list[Tool]:
    """The tools that may be called; RequestError if they are not what the choice needs."""
    names = [tool.full_name for tool in tools]
    name, count = max(Counter(names).items(), key=itemgetter(1), default=("", 0))
    if count > 1:
        raise RequestError(f"tools: a name must be there once, but {name!r} is there {count} times")
    if choice == "none":
        return []
    found = [tool for tool in tools if not isinstance(choice, Named) or tool.full_name == choice.name]
    if not found and choice != "auto":
        wanted = repr(choice.name) if isinstance(choice, Named) else "a tool"
        raise RequestError(f"tool_choice: {wanted} is to be called, but tools has {names or 'none'}")
    return found


# ---- families ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How the models of one family write calls: begin, then head, arguments and tail of each, then end.

    With keeps_special_tokens some of the markers are special tokens, which the text must keep.
    """

    name: Literal["llama3", "hermes", "mistral", "ours"]
    head: str  # with %s for the name
    tail: str
    between: str
    begin: str = ""
    end: str = ""
    markers: tuple[str, ...] = ()  # what calls begin with
    noise: tuple[str, ...] = ()  # special tokens that say nothing
    has_bare_calls: bool = False  # an answer may begin with a call that nothing marks
    keeps_special_tokens: bool = False
    knows_system: bool = True  # the template takes system messages

    def new_id(self) -> str:
        if self.name == "mistral":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), choice: Choice = "auto"
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """OpenAI's messages as the template takes them, and what it is given as tools.

        All tools are shown whichever of them is chosen, so that prompts begin alike.
        """
        shown = [tool.for_template for tool in tools] if chosen(tools, choice) else []
        plain = [plain_message(index, message) for index, message in enumerate(messages)]
        if self.name == "ours":
            described = with_description(in_words(plain), shown)
            return described if self.knows_system else without_system(described), None
        if self.name == "llama3":
            plain = one_call_each(plain)
        if self.name == "mistral":
            plain = [with_short_ids(message) for message in plain]
        return plain, shown or None

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice = "auto",
        is_parallel: bool = True,
        starts_in_reasoning: bool = False,
    ) -> tuple[StructuredOutputsParams | None, list[str]]:
        """What holds calls to their tools' schemas, if anything has to, and what a client should be told.

        A choice that forces calls is enforced, or a RequestError names the tool. Where a model is free to
        call, strict tools are held to their schemas if they can be. The first time takes some tenths of a
        second: not for an event loop.
        """
        wanted = chosen(tools, choice)
        if choice == "auto":
            return self._held_to([tool for tool in wanted if tool.is_strict], wanted, is_parallel)
        if not wanted:
            return None, []
        try:
            return enforced(self._forced(wanted, is_parallel, starts_in_reasoning), wanted), []
        except RequestError as error:
            raise RequestError(f"{error}; change that, or let tool_choice be 'auto'") from error

    def _held_to(
        self, strict: Sequence[Tool], tools: Sequence[Tool], is_parallel: bool
    ) -> tuple[StructuredOutputsParams | None, list[str]]:
        """Those of the strict tools whose schemas can be enforced, and what is wrong with the others."""
        if strict and not self.is_marked_by_text:
            why = "this model's calls cannot be told from its text beforehand"
            return None, [f"tools: {tool.full_name!r} is strict, but not enforced: {why}" for tool in strict]
        if not strict:
            return None, []
        try:
            return enforced(self._free(tools, strict, is_parallel), strict), []
        except RequestError as error:
            faults = {tool.full_name: fault for tool in strict if (fault := fault_of(tool))}
            rest = [tool for tool in strict if faults and tool.full_name not in faults]
            found, more = self._held_to(rest, tools, is_parallel)
            return found, [*(faults.values() or [str(error)]), *more]

    def _forced(self, tools: Sequence[Tool], is_parallel: bool, starts_in_reasoning: bool) -> str:
        """Calls and nothing else, but for reasoning that the prompt has begun"""
        thoughts = f"thoughts {literal(AFTER_REASONING)}" if starts_in_reasoning else ""
        more = f"({literal(self.between)}call){{0,{MAX_CALLS - 1}}} " if is_parallel else ""
        rules = [f"start: {thoughts}{literal(self.begin)}call {more}{literal(self.end)}"]
        rules += [r"thoughts[lazy]: /(?s:.*)<\/think>/"] if starts_in_reasoning else []
        return "\n".join([*rules, *call_rules(self.head, self.tail, tools, tools)])

    def _free(self, tools: Sequence[Tool], strict: Sequence[Tool], is_parallel: bool) -> str:
        """Any text, and calls after the marker"""
        (marker,) = self.markers
        num_calls = MAX_CALLS if is_parallel else 1
        rules = [
            f"start: (lead call){{0,{num_calls}}} REST",
            f"lead[lazy]: /(?s:.*){marker}/",
            f"REST: /(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/",
        ]
        return "\n".join([*rules, *call_rules(self.head.removeprefix(marker), self.tail, tools, strict)])

    @property
    def is_marked_by_text(self) -> bool:
        """Whether every call begins with one marker, and that is no special token."""
        return len(self.markers) == 1 and self.head.startswith(self.markers) and not self.keeps_special_tokens


HERMES = Family(
    name="hermes",
    head='<tool_call>\n{"name": "%s", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
    markers=("<tool_call>",),
)
OURS = replace(HERMES, name="ours")
LLAMA3 = Family(
    name="llama3",
    head='{"name": "%s", "parameters": ',
    tail="}",
    between="; ",
    markers=("<|python_tag|>", "<function="),
    noise=("<|eom_id|>", "<|eot_id|>"),
    has_bare_calls=True,
    keeps_special_tokens=True,
)
MISTRAL = Family(
    name="mistral",
    head='{"name": "%s", "arguments": ',
    tail="}",
    between=", ",
    begin="[TOOL_CALLS][",
    end="]",
    markers=("[TOOL_CALLS]",),
    keeps_special_tokens=True,
)
# The newer form of the same
MISTRAL_ARGS = replace(MISTRAL, head="[TOOL_CALLS]%s[ARGS]", tail="", between="", begin="", end="")


def family_of(chat_template: str | None) -> Family:
    """By what the template itself writes"""
    template = chat_template or ""
    knows_tools = re.search(r"\btools\b", template) is not None
    if knows_tools and "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if knows_tools and "<tool_call>" in template:
        return HERMES
    if knows_tools and ("<|python_tag|>" in template or "<|start_header_id|>" in template):
        return LLAMA3
    refuses_system = re.search(r"raise_exception\([^)]*system", template, re.IGNORECASE)
    return replace(OURS, knows_system=False) if refuses_system else OURS


# ---- grammars ----------------------------------------------------------------------------------------------


def call_rules(head: str, tail: str, tools: Sequence[Tool], held: Sequence[Tool]) -> Iterator[str]:
    """One call of any of the tools; only those that are held have just the arguments of their schemas."""
    yield f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"
    for i, tool in enumerate(tools):
        with naming(tool):
            rule = json_rule(forced_schema(tool) if tool in held else free_schema(tool))
        yield f"call_{i}: {literal(head % tool.full_name)}arguments_{i} {literal(tail)}"
        yield f"arguments_{i}: {rule}"


def literal(text: str) -> str:
    """As Lark writes it"""
    return f"{json.dumps(text)} " if text else ""


def enforced(rules: str, tools: Sequence[Tool]) -> StructuredOutputsParams:
    if len(rules) > MAX_GRAMMAR_LENGTH:
        length = f"their schemas have {len(rules)} characters together"
        raise RequestError(f"tools: {length}, but {MAX_GRAMMAR_LENGTH} are the most that can be enforced")
    found = StructuredOutputsParams(grammar=rules)
    try:
        check_enforceable(found)
    except RequestError:
        for tool in tools:
            check_tool(tool)
        raise
    return found


def fault_of(tool: Tool) -> str | None:
    try:
        check_tool(tool)
    except RequestError as error:
        return str(error)
    return None


def check_tool(tool: Tool) -> None:
    with naming(tool):
        check_enforceable(StructuredOutputsParams(json=forced_schema(tool)))


@contextmanager
def naming(tool: Tool) -> Iterator[None]:
    """Errors say which tool they are about."""
    try:
        yield
    except ValueError as error:
        reason = str(error).partition("cannot be enforced: ")[2] or str(error)
        found = f"the parameters of {tool.full_name!r} cannot be enforced"
        raise RequestError(f"tools: {found}: {reason}") from error


def forced_schema(tool: Tool) -> dict[str, Any]:
    kind = tool.schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise RequestError(f"their type is {short(kind)}, but arguments are an 'object'")
    if tool.input_grammar is not None and tool.input_grammar[0] == "lark":
        raise RequestError("a 'lark' grammar is shown to the model, but not enforced inside a call")
    return dict(closed({**tool.schema, "type": "object"}))


def free_schema(tool: Tool) -> dict[str, Any]:
    return {"type": "object"} if tool.kind == "function" else input_schema()


# With one of these a schema may be about properties that others name.
COMBINED = {"$ref", "allOf", "anyOf", "oneOf", "additionalProperties", "patternProperties", "minProperties"}


def closed(schema: Any) -> Any:
    """The schema without properties that it does not name: left free, a small model invents them for ever."""
    if not isinstance(schema, dict) or COMBINED & schema.keys():
        return schema
    found = dict(schema)
    if isinstance(schema.get("properties"), dict):
        found["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        found["additionalProperties"] = False
    if "items" in schema:
        found["items"] = closed(schema["items"])
    return found


# ---- conversations -----------------------------------------------------------------------------------------


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
        calls = [plain_call(index, call) for call in list_of_calls(index, message.get("tool_calls"))]
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


TEXT_KINDS = {"text", "input_text", "output_text", "refusal"}


def list_of_calls(index: int, calls: Any) -> list[Any]:
    if not isinstance(calls, list | None):
        raise RequestError(f"messages[{index}].tool_calls must be a list, but is {short(calls)}")
    return calls or []


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
        for call in calls:
            found.append({"role": "assistant", "content": "", "tool_calls": [call]})
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
