"""Tools: how the families of chat templates show them to a model, and the grammars that force their calls."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from reprlib import repr as short
from typing import Any, Literal

from infinilm.engine.grammar import check_enforceable, json_rule
from infinilm.engine.grammar_schema import loosened
from infinilm.engine.request import RequestError
from infinilm.sampling import MAX_GRAMMAR_LENGTH, StructuredOutputsParams
from infinilm.server.conversation import (
    Message,
    in_words,
    one_call_each,
    plain_message,
    with_description,
    with_short_ids,
    without_system,
)

NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # OpenAI takes 64 characters, Anthropic 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# What reasoning stands between: of most families, and of Magistral and Seed-OSS, whose are special tokens
TAGS, BRACKETS, SEED_TAGS = THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
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
                raise RequestError(f"tools: a name must be {wanted}, but one is {short(part)}", "tools")

    @property
    def full_name(self) -> str:
        """What models call it."""
        return full_name(self.name, self.namespace)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments: an object"""
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
    """The schema of what a custom tool takes: text, under one key"""
    text = {"type": "string"} | ({"pattern": pattern} if pattern else {})
    return {**NO_PARAMETERS, "properties": {"input": text}, "required": ["input"]}


def full_name(name: str, namespace: str | None) -> str:
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
        raise RequestError(f"tools: a name must be there once, but {name!r} is there {count} times", "tools")
    if choice == "none":
        return []
    found = [tool for tool in tools if not isinstance(choice, Named) or tool.full_name == choice.name]
    if not found and choice != "auto":
        wanted = repr(choice.name) if isinstance(choice, Named) else "a tool"
        told = f"tool_choice: {wanted} is to be called, but tools has {names or 'none'}"
        raise RequestError(told, "tool_choice")
    return found


# ---- families ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How the models of one family write calls: begin, then head, arguments and tail of each, then end.

    With keeps_special_tokens some of the markers are special tokens, which the text must keep.
    """

    name: Literal["llama3", "hermes", "mistral", "harmony", "ours"]
    head: str  # with %s for the name
    tail: str
    between: str
    begin: str = ""
    end: str = ""
    markers: tuple[str, ...] = ()  # what calls begin with
    noise: tuple[str, ...] = ()  # special tokens that say nothing
    has_bare_calls: bool = False  # an answer may begin with a call that nothing marks
    has_channels: bool = False  # messages have headers, which tell thoughts, answers and calls apart
    keeps_special_tokens: bool = False
    thoughts: tuple[str, str] = TAGS
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
        plain = list(map(plain_message, messages))
        if self.name == "ours":
            described = with_description(in_words(plain), shown)
            return described if self.knows_system else without_system(described), None
        if self.name in ("llama3", "harmony"):
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
        is_limited: bool = False,
    ) -> tuple[StructuredOutputsParams | None, list[str]]:
        """What holds calls to their tools' schemas, if anything has to, and what a client should be told.

        A choice that forces calls is enforced, or a RequestError names the tool; one that is not strict is
        held to what of its schema can be. Where a model is free to call, strict tools are held to their
        schemas if they can be; with is_limited there are others that may not be called. The first time takes
        some tenths of a second: not for an event loop.
        """
        wanted = chosen(tools, choice)
        if choice == "auto":
            strict = [tool for tool in wanted if tool.is_strict]
            return self._held_to(strict, wanted, is_parallel, is_limited)
        if not wanted:
            return None, []
        held, warnings = held_loosely(wanted)
        try:
            return enforceable(self._answers(held, held, is_parallel, starts_in_reasoning), held), warnings
        except RequestError as error:
            raise RequestError(f"{error}; change that, or let tool_choice be 'auto'", "tools") from error

    def beside(
        self,
        structure: StructuredOutputsParams,
        tools: Sequence[Tool] = (),
        is_parallel: bool = True,
        starts_in_reasoning: bool = False,
    ) -> tuple[StructuredOutputsParams, list[str]]:
        """What lets a model that is free to call answer in a structure or by calls, after its reasoning if
        the prompt has begun that, and what a client should be told. Where no grammar can hold both, it is the
        structure alone."""
        rule = structure_rule(structure)
        if rule is None:
            return structure, []
        strict = [tool for tool in tools if tool.is_strict]
        faults = faults_of(strict)
        held = [tool for tool in strict if tool.full_name not in faults]
        try:
            rules = self._answers(tools, held, is_parallel, starts_in_reasoning, rule)
            return enforceable(rules, held), [*faults.values()]
        except RequestError as error:
            return structure, [f"tools: none is called beside a structure: {error}"]

    def _held_to(
        self, strict: Sequence[Tool], tools: Sequence[Tool], is_parallel: bool, is_limited: bool
    ) -> tuple[StructuredOutputsParams | None, list[str]]:
        """The strict tools whose schemas can be enforced, and what is wrong with the others."""
        if not self.is_marked_by_text:
            why = "this model's calls cannot be told from its text beforehand"
            return None, [f"tools: {tool.full_name!r} is strict, but not enforced: {why}" for tool in strict]
        if not strict and not is_limited:
            return None, []
        try:
            return enforceable(self._free(tools, strict, is_parallel), strict), []
        except RequestError as error:
            faults = faults_of(strict)
            rest = [tool for tool in strict if faults and tool.full_name not in faults]
            found, more = self._held_to(rest, tools, is_parallel, is_limited and bool(strict))
            return found, [*(faults.values() or [str(error)]), *more]

    def _answers(
        self,
        tools: Sequence[Tool],
        held: Sequence[Tool],
        is_parallel: bool,
        starts_in_reasoning: bool,
        structure: str | None = None,
    ) -> str:
        """Calls, or a structure if there is a rule for one; before them nothing but reasoning that the prompt
        has begun"""
        thoughts = f"thoughts {literal(AFTER_REASONING)}" if starts_in_reasoning else ""
        more = f"({literal(self.between)}call){{0,{MAX_CALLS - 1}}} " if is_parallel else ""
        kinds = [*(["calls"] if tools else []), *(["structure"] if structure else [])]
        rules = [f"start: {thoughts}({' | '.join(kinds)})"]
        end = re.escape(self.thoughts[1]).replace("/", r"\/")
        rules += [f"thoughts[lazy]: /(?s:.*){end}/"] if starts_in_reasoning else []
        rules += [f"structure: {structure}"] if structure else []
        if tools:
            rules += [f"calls: {literal(self.begin)}call {more}{literal(self.end)}"]
            rules += call_rules(self.head, self.tail, tools, held)
        return "\n".join(rules)

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
SEED = replace(
    HERMES,
    head='<seed:tool_call>\n{"name": "%s", "arguments": ',
    tail="}\n</seed:tool_call>",
    markers=("<seed:tool_call>",),
    keeps_special_tokens=True,
    thoughts=SEED_TAGS,
)
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

# GPT-OSS's
HARMONY = Family(
    name="harmony",
    head="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
    tail="",
    between="",
    markers=("<|start|>", "<|channel|>"),
    noise=("<|end|>", "<|call|>", "<|return|>"),
    has_bare_calls=True,  # a prompt ends inside of a header, which may go on with whom a call is for
    has_channels=True,
    keeps_special_tokens=True,
)


def family_of(chat_template: str | None) -> Family:
    """By what the template itself writes"""
    template = chat_template or ""
    family = family_by_calls(template)
    return replace(family, thoughts=BRACKETS) if BRACKETS[1] in template else family


def family_by_calls(template: str) -> Family:
    knows_tools = re.search(r"\btools\b", template) is not None
    if knows_tools and "<|channel|>" in template:
        return HARMONY
    if knows_tools and "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if knows_tools and "<seed:tool_call>" in template:
        return SEED
    if knows_tools and "<tool_call>" in template:
        return HERMES
    if knows_tools and ("<|python_tag|>" in template or "<|start_header_id|>" in template):
        return LLAMA3
    refuses_system = re.search(r"raise_exception\([^)]*system", template, re.IGNORECASE)
    return replace(OURS, knows_system=False) if refuses_system else OURS


# ---- grammars ----------------------------------------------------------------------------------------------


def structure_rule(wanted: StructuredOutputsParams) -> str | None:
    """The right side of a Lark rule for a structure; None for those that cannot stand among other rules, or
    cannot be enforced, of which the engine tells."""
    if wanted.choice is not None:
        return " | ".join(map(json.dumps, wanted.choice))
    schema = {"type": "object"} if wanted.json_object else json.loads(str(wanted.json or "null"))
    try:
        return json_rule(schema) if isinstance(schema, dict) else None
    except ValueError:
        return None


def call_rules(head: str, tail: str, tools: Sequence[Tool], held: Sequence[Tool]) -> Iterator[str]:
    """One call of any of the tools; only those that are held have just the arguments of their schemas."""
    yield f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"
    for i, tool in enumerate(tools):
        with naming(tool):
            rule = json_rule(forced_schema(tool) if tool in held else free_schema(tool))
        yield f"call_{i}: {literal(head % tool.full_name)}arguments_{i} {literal(tail)}"
        yield f"arguments_{i}: {rule}"


def literal(text: str) -> str:
    """The text as Lark writes it"""
    return f"{json.dumps(text)} " if text else ""


def enforceable(rules: str, tools: Sequence[Tool]) -> StructuredOutputsParams:
    """The grammar of these rules, or RequestError, with the name of the tool whose schema is the reason"""
    if len(rules) > MAX_GRAMMAR_LENGTH:
        length = f"their schemas have {len(rules)} characters together"
        most = f"{MAX_GRAMMAR_LENGTH} are the most that can be enforced"
        raise RequestError(f"tools: {length}, but {most}", "tools")
    found = StructuredOutputsParams(grammar=rules)
    try:
        check_enforceable(found)
    except RequestError:
        for tool in tools:
            check_tool(tool)
        raise
    return found


def held_loosely(tools: Sequence[Tool]) -> tuple[list[Tool], list[str]]:
    """The tools, those that are not strict with a schema that can be enforced, and what is not of it."""
    held, warnings = [], []
    for tool in tools:
        schema, dropped = (tool.parameters, []) if tool.is_strict else loosened(tool.parameters)
        held.append(replace(tool, parameters=schema))
        if dropped:
            warnings.append(f"tools: {tool.full_name!r} is not held to {', '.join(dropped)}")
    return held, warnings


def faults_of(tools: Sequence[Tool]) -> dict[str, str]:
    """What keeps tools from being enforced, by their full names"""
    faults = {}
    for tool in tools:
        try:
            check_tool(tool)
        except RequestError as error:
            faults[tool.full_name] = str(error)
    return faults


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
        raise RequestError(f"tools: {found}: {reason}", "tools") from error


def forced_schema(tool: Tool) -> dict[str, Any]:
    kind = tool.schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise RequestError(f"their type is {short(kind)}, but arguments are an 'object'")
    if tool.input_grammar is not None and tool.input_grammar[0] == "lark":
        raise RequestError("a 'lark' grammar is shown to the model, but not enforced inside a call")
    return {**tool.schema, "type": "object"}


def free_schema(tool: Tool) -> dict[str, Any]:
    return {"type": "object"} if tool.kind == "function" else input_schema()
