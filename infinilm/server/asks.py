"""What OpenAI's chats and completions ask for: a body becomes turns; without HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any

from infinilm.sampling import STRUCTURED_CHECKS, SamplingParams, StructuredOutputsParams
from infinilm.server.bodies import BodyError, as_body_errors, sampled
from infinilm.server.openai_bodies import (
    AllowedChoice,
    ChatBody,
    CompletionBody,
    Generation,
    NamedTool,
    OfferedTool,
)
from infinilm.server.tools import Choice, Named, Tool
from infinilm.server.turn import Turn

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_CHOICES = 1024  # of one answer: n for each prompt

Json = dict[str, Any]
Asked = ChatBody | CompletionBody
BODIES: dict[str, type[Asked]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}


# ---- turns -------------------------------------------------------------------------------------------------


def turns_of(body: Asked, defaults: Mapping[str, Any]) -> list[Turn]:
    """The turns that a chat or a completion asks for; RequestError if that cannot be done."""
    return [chat_turn(body, defaults)] if isinstance(body, ChatBody) else completion_turns(body, defaults)


def chat_turn(body: ChatBody, defaults: Mapping[str, Any]) -> Turn:
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    choice, allowed = choice_of(body)
    return Turn(
        params=sampling_params(body, defaults, chat_max_tokens(body), chat_logprobs(body)),
        messages=[message.model_dump(exclude_unset=True) for message in body.messages],
        tools=tuple(map(tool_of, body.tools)),
        choice=choice,
        allowed=allowed,
        parallel=body.parallel_tool_calls,
        variables={**effort, **body.chat_template_kwargs},
        salt=body.cache_salt,
        priority=body.priority,
        structure_field=structure_field(body),
    )


def completion_turns(body: CompletionBody, defaults: Mapping[str, Any]) -> list[Turn]:
    """A turn for each prompt"""
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if is_echo_alone(body):
        max_tokens = 1  # which is not told
    params = sampling_params(body, defaults, max_tokens, body.logprobs)
    if body.echo:
        params = replace(params, prompt_logprobs=body.logprobs)
    check_choices(len(body.prompt), params.n)
    if body.best_of not in (None, params.n):
        told = f"best_of must be as many as n, which is {params.n}, but is {body.best_of}"
        raise BodyError(f"{told}: all that is drawn is told", "best_of")
    return [
        Turn(
            params=params,
            prompt=prompt,
            prompt_field="prompt",
            salt=body.cache_salt,
            priority=body.priority,
            structure_field=structure_field(body),
        )
        for prompt in body.prompt
    ]


def is_echo_alone(body: CompletionBody) -> bool:
    """Whether the prompt is wanted back and nothing after it."""
    return body.echo and body.max_tokens == 0


def check_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        asked = f"{num_prompts} prompts with n {n} are {num_prompts * n} choices"
        raise BodyError(f"{asked}; at most {MAX_CHOICES} are made", "n")


def sampling_params(
    body: Generation, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    asked = {"max_tokens": max_tokens, "logprobs": logprobs, "structured_outputs": structure(body)}
    return sampled(body, defaults, **asked)


def chat_max_tokens(body: ChatBody) -> int | None:
    """A chat goes on as long as the model does, unless it is told."""
    asked = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(asked) == 2:
        raise BodyError("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    return asked.pop() if asked else None


def chat_logprobs(body: ChatBody) -> int | None:
    """How many of the likeliest tokens are told with each"""
    if body.top_logprobs and not body.logprobs:
        raise BodyError("top_logprobs needs logprobs to be true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def structure(body: Generation) -> StructuredOutputsParams | None:
    wanted, own = response_format(body.response_format), body.structured_outputs
    if own is None:
        return wanted
    if wanted is not None:
        raise BodyError("response_format and structured_outputs exclude each other", "structured_outputs")
    with as_body_errors({}, "structured_outputs"):
        return own_structure(own)


def own_structure(given: Mapping[str, Any]) -> StructuredOutputsParams:
    """vLLM's object, read; its further keys ask for nothing where they are null or false."""
    for name, value in given.items():
        if name not in STRUCTURED_CHECKS and value not in (None, False):
            raise ValueError(f"{name[:64]!r} is not supported; leave it out")
    return StructuredOutputsParams(**{name: given[name] for name in STRUCTURED_CHECKS if name in given})


def structure_field(body: Generation) -> str:
    return "response_format" if body.structured_outputs is None else "structured_outputs"


def response_format(wanted: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if wanted is None or wanted.get("type") == "text":
        return None
    kind = wanted.get("type")
    with as_body_errors({}, "response_format"):
        if kind == "json_object":
            return json_object(wanted)
        if kind == "json_schema" and isinstance(wanted.get("json_schema"), Mapping):
            return StructuredOutputsParams(json=schema_of(wanted["json_schema"]))
    raise BodyError(
        "response_format must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', "
        f"'json_schema': {{'name': ..., 'schema': ...}}}}, but is {short(wanted)}",
        "response_format",
    )


def json_object(wanted: Mapping[str, Any]) -> StructuredOutputsParams:
    """Any object, or one of a schema, which llama.cpp calls so and Hugging Face's client `value`"""
    for schema in (wanted.get("schema"), wanted.get("value")):
        if schema not in (None, {}):
            return StructuredOutputsParams(json=schema_of({"schema": schema}))
    return StructuredOutputsParams(json_object=True)


def schema_of(given: Mapping[str, Any]) -> Any:
    if not isinstance(given.get("schema"), dict):
        raise ValueError(f"response_format has no schema that is an object: {short(given)}")
    return given["schema"]


def tool_of(given: OfferedTool) -> Tool:
    inner = given.inner
    if given.type == "function":
        return Tool(inner.name, inner.description, inner.parameters, is_strict=inner.strict)
    wanted = inner.format.grammar if inner.format and inner.format.type == "grammar" else None
    grammar = None if wanted is None else (wanted.syntax, wanted.definition)
    return Tool(inner.name, inner.description, kind="custom", input_grammar=grammar)


def choice_of(body: ChatBody) -> tuple[Choice, frozenset[str] | None]:
    """What has to be called, and what alone may be, if that is said"""
    choice, names = body.tool_choice, [given.inner.name for given in body.tools]
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return allowed.mode, frozenset(known_name(one, names) for one in allowed.tools)
    if isinstance(choice, NamedTool):
        return Named(known_name(choice, names)), None
    if choice == "required" and not names:
        raise BodyError("tool_choice is 'required', but there are no tools", "tool_choice")
    return choice or "auto", None


def known_name(choice: NamedTool, names: Sequence[str]) -> str:
    name: str = choice.inner.name
    if name not in names:
        raise BodyError(f"tool_choice: there is no tool {name!r}", "tool_choice")
    return name
