"""OpenAI's chats and completions: a body becomes turns, what comes of them an answer; without HTTP."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from reprlib import repr as short
from typing import Any

from infinilm.engine.request import (
    Aborted,
    EngineDead,
    Logprob,
    Logprobs,
    NumericalError,
    QueueFull,
    RequestError,
    RequestOutput,
)
from infinilm.engine.stats import Progress
from infinilm.sampling import SamplingParams, StructuredOutputsParams
from infinilm.server.bodies import (
    BodyError,
    ChatBody,
    CompletionBody,
    Generation,
    Message,
    NamedTool,
    Sampled,
    read,
)
from infinilm.server.reader import CallArguments, CallStart, Part, Reader, Reasoning, Text
from infinilm.server.service import UnknownModel
from infinilm.server.tools import Choice, Named, Tool, family_of
from infinilm.server.turn import Piece, Reading, Turn, Usage, encode, usage_of
from infinilm.tokenizer import Tokenizer, TokenizerError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_CHOICES = 1024  # of one answer: n for each prompt
LEAST_LOGPROB = -9999.0  # JSON has no infinity

Body = dict[str, Any]

# The same in SamplingParams.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


# ---- from a body to turns ----------------------------------------------------------------------------------


def chat_turn(body: ChatBody, defaults: Mapping[str, Any]) -> Turn:
    """The turn that a chat asks for; BodyError if that cannot be done."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    choice = choice_of(body)
    with as_body_errors({}, "tools"):
        tools = tuple(tool_of(given.function.model_dump()) for given in body.tools)
    return Turn(
        params=sampling_params(body, defaults, chat_max_tokens(body), chat_logprobs(body)),
        messages=[message_dict(message) for message in body.messages],
        tools=tools,
        choice=choice,
        is_parallel=is_parallel(body, choice),
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
    return [
        Turn(
            params=params,
            prompt=prompt,
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


def sampled(body: Sampled, defaults: Mapping[str, Any], **asked: Any) -> SamplingParams:
    """What the body says, and what is asked besides under a name of another API"""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name, None)) is not None}
    with as_body_errors({**given, **asked}):
        return SamplingParams(**{**defaults, **given, **asked})


@contextmanager
def as_body_errors(given: Mapping[str, Any], param: str | None = None) -> Iterator[None]:
    """Errors of SamplingParams name the field first."""
    try:
        yield
    except BodyError:
        raise
    except (ValueError, TypeError) as error:
        named = [word for word in re.findall(r"\w+", str(error)) if word in given]
        told = str(error) if param is None or param in str(error) else f"{param}: {error}"
        raise BodyError(told, named[0] if named else param) from error


def chat_max_tokens(body: ChatBody) -> int | None:
    """A chat goes on as long as the model does, unless it is told."""
    asked = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(asked) == 2:
        raise BodyError("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    return asked.pop() if asked else None


def chat_logprobs(body: ChatBody) -> int | None:
    """How many of the likeliest tokens are told with each"""
    if body.top_logprobs is not None and not body.logprobs:
        raise BodyError("top_logprobs needs logprobs to be true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def structure(body: Generation) -> StructuredOutputsParams | None:
    wanted, own = response_format(body.response_format), body.structured_outputs
    if own is None:
        return wanted
    if wanted is not None:
        raise BodyError("response_format and structured_outputs exclude each other", "structured_outputs")
    with as_body_errors({}, "structured_outputs"):
        return StructuredOutputsParams(**own)


def structure_field(body: Generation) -> str:
    return "response_format" if body.structured_outputs is None else "structured_outputs"


def response_format(wanted: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    kind = "text" if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    with as_body_errors({}, "response_format"):
        if kind == "json_object":
            return StructuredOutputsParams(json_object=True)
        if kind == "json_schema" and isinstance(wanted.get("json_schema"), Mapping):
            return StructuredOutputsParams(json=schema_of(wanted["json_schema"]))
    raise BodyError(
        "response_format must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', "
        f"'json_schema': {{'name': ..., 'schema': ...}}}}, but is {short(wanted)}",
        "response_format",
    )


def schema_of(given: Mapping[str, Any]) -> Any:
    if not isinstance(given.get("schema"), dict):
        raise ValueError(f"response_format: json_schema has no schema that is an object: {short(given)}")
    return given["schema"]


def message_dict(message: Message) -> Body:
    """As templates know it; developers speak in the system's role."""
    role = "system" if message.role == "developer" else message.role
    return {"content": None, **message.model_dump(exclude_unset=True), "role": role}


def tool_of(given: Mapping[str, Any]) -> Tool:
    return Tool(given["name"], given["description"], given["parameters"], "function", given["strict"])


def choice_of(body: ChatBody) -> Choice:
    choice, names = body.tool_choice, [given.function.name for given in body.tools]
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise BodyError(f"tool_choice: there is no tool {choice.function.name!r}", "tool_choice")
        return Named(choice.function.name)
    if choice == "required" and not names:
        raise BodyError("tool_choice is 'required', but there are no tools", "tool_choice")
    return choice or "auto"


def is_parallel(body: ChatBody, choice: Choice) -> bool:
    """Whether one answer may call several tools. A small model that is forced to call does not find an end by
    itself, so then it is one call, unless several are asked for."""
    return choice == "auto" if body.parallel_tool_calls is None else body.parallel_tool_calls


# ---- to an answer ------------------------------------------------------------------------------------------


def head_of(url: str, model: str, is_chunk: bool = False) -> Body:
    is_chat = url == CHAT
    kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if is_chat else "text_completion"
    name = "chatcmpl" if is_chat else "cmpl"
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage_body(usage: Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.drawn,
        "total_tokens": usage.prompt + usage.drawn,
        "prompt_tokens_details": {"cached_tokens": usage.cached, **cache_miss(usage)},
    }


def cache_miss(usage: Usage) -> Body:
    """Where a prompt of which more could have been cached parts from the one before"""
    return {} if usage.miss is None else {"cache_miss": {"position": usage.miss}}


def progress_body(progress: Progress) -> Body:
    told = {"total": progress.total, "cache": progress.cached, "processed": progress.processed}
    return {"prompt_progress": told}


def finish_reason(piece: Piece) -> str | None:
    return "tool_calls" if piece.has_calls and piece.finish_reason == "stop" else piece.finish_reason


def chat_choice(piece: Piece, num_top: int | None, tokenizer: Tokenizer) -> Body:
    return {
        "index": piece.index,
        "message": message_of(piece.parts),
        "logprobs": chat_logprobs_of(piece, num_top, tokenizer),
        "finish_reason": finish_reason(piece),
    }


def message_of(parts: Sequence[Part]) -> Body:
    text = "".join(part.text for part in parts if isinstance(part, Text))
    thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = calls_of(parts)
    message: Body = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if thoughts:
        message |= {"reasoning": thoughts, "reasoning_content": thoughts}
    if calls:
        message["tool_calls"] = calls
    return message


def calls_of(parts: Sequence[Part]) -> list[Body]:
    calls: dict[int, Body] = {}
    for part in parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return list(calls.values())


def chat_logprobs_of(piece: Piece, num_top: int | None, tokenizer: Tokenizer) -> Body | None:
    if piece.logprobs is None:
        return None
    content = []
    for token_id, found in zip(piece.token_ids, piece.logprobs, strict=True):
        if found is None:
            continue
        best = sorted(found, key=lambda other: found[other].rank or 0)[:num_top]
        top = [chat_logprob(other, found[other], tokenizer) for other in best]
        content.append({**chat_logprob(token_id, found[token_id], tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def chat_logprob(token_id: int, found: Logprob, tokenizer: Tokenizer) -> Body:
    return {
        "token": found.decoded_token,
        "logprob": as_json(found),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def text_choice(piece: Piece, tokenizer: Tokenizer, offset: int = 0) -> Body:
    """`offset` is the length of the text before"""
    logprobs = None
    if piece.logprobs is not None:
        logprobs = text_logprobs(piece.token_ids, piece.logprobs, tokenizer, offset)
    return {
        "index": piece.index,
        "text": piece.text,
        "logprobs": logprobs,
        "finish_reason": piece.finish_reason,
    }


def text_logprobs(
    token_ids: Sequence[int], found: Sequence[Logprobs | None], tokenizer: Tokenizer, offset: int
) -> Body:
    """In four lists. Of a prompt's first token nothing is known but its text."""
    tokens = [
        (tokenizer.decode([token], skip_special_tokens=False) if top is None else top[token].decoded_token)
        or ""
        for token, top in zip(token_ids, found, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if top is None else as_json(top[token]) for token, top in zip(token_ids, found, strict=True)
        ],
        "top_logprobs": [
            None if top is None else {one.decoded_token: as_json(one) for one in top.values()}
            for top in found
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
    }


def with_prompt(piece: Piece, output: RequestOutput, prompt: str) -> Piece:
    """The same piece with the prompt before it, as `echo` asks for."""
    if piece.logprobs is None:
        return replace(piece, text=prompt + piece.text)
    return replace(
        piece,
        text=prompt + piece.text,
        token_ids=[*output.prompt_token_ids, *piece.token_ids],
        logprobs=[*(output.prompt_logprobs or ()), *piece.logprobs],
    )


def without_tokens(piece: Piece) -> Piece:
    """Of a prompt that is wanted back and nothing after it"""
    return replace(piece, text="", token_ids=[], logprobs=None if piece.logprobs is None else [])


def prompt_text(prompt: str | Sequence[int], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)


def as_json(found: Logprob) -> float:
    return max(found.logprob, LEAST_LOGPROB)


# ---- whole requests, for those who run the engine themselves -----------------------------------------------


@dataclass(frozen=True)
class Ask:
    """What a body asks for: each prompt continued n times."""

    body: ChatBody | CompletionBody
    turns: Sequence[Turn]
    prompts: Sequence[list[int]]

    @property
    def params(self) -> SamplingParams:
        return self.turns[0].params


def ask_of(url: str, given: Body, tokenizer: Tokenizer) -> Ask:
    """What the body of a request to CHAT or COMPLETIONS asks for; BodyError if that cannot be done."""
    if given.get("tools"):
        raise BodyError("tools is not supported in a file of requests; leave it out", "tools")
    body: ChatBody | CompletionBody
    if url == CHAT:
        body = read(ChatBody, given)
        turns = [chat_turn(body, {})]
    else:
        body = read(CompletionBody, given)
        turns = completion_turns(body, {})
    family = family_of(tokenizer.chat_template)
    with as_body_errors({}, "messages" if url == CHAT else "prompt"):
        return Ask(body, turns, [encode(turn, tokenizer, family) for turn in turns])


def answer_of(ask: Ask, outputs: Sequence[RequestOutput], tokenizer: Tokenizer, model: str) -> Body:
    """The whole answer, of the outputs of each prompt; `model` is its name where the body gave none."""
    reader = Reader(family_of(tokenizer.chat_template), (), False, False)
    pieces = [
        [Reading(number * ask.params.n + found.index, reader).piece(found) for found in output.outputs]
        for number, output in enumerate(outputs)
    ]
    whole = [[piece for piece in some if piece is not None] for some in pieces]
    if isinstance(ask.body, ChatBody):
        choices = [chat_choice(piece, ask.params.logprobs, tokenizer) for piece in whole[0]]
    else:
        choices = text_choices(ask.body, ask.turns, outputs, whole, tokenizer)
    url = CHAT if isinstance(ask.body, ChatBody) else COMPLETIONS
    usage = usage_body(usage_of(outputs))
    return {**head_of(url, ask.body.model or model), "choices": choices, "usage": usage}


def text_choices(
    body: CompletionBody,
    turns: Sequence[Turn],
    outputs: Sequence[RequestOutput],
    pieces: Sequence[Sequence[Piece]],
    tokenizer: Tokenizer,
) -> list[Body]:
    """Of the pieces of each prompt, which are whole"""
    choices = []
    for turn, output, some in zip(turns, outputs, pieces, strict=True):
        for piece in some:
            told = without_tokens(piece) if is_echo_alone(body) else piece
            if body.echo:
                told = with_prompt(told, output, prompt_text(turn.prompt, tokenizer))
            choices.append(text_choice(told, tokenizer))
    return choices


def error_of(error: BaseException) -> tuple[int, Body]:
    """The status and the body that tell of an error: the caller's own, or ours."""
    status, kind = status_of(error)
    is_known = status < 500 or isinstance(error, NumericalError | Aborted)
    unknown = "the engine has stopped" if status == 503 else "the server failed; its log says why"
    told = {
        "message": (str(error) or type(error).__name__) if is_known else unknown,
        "type": kind,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return status, {"error": told}


def status_of(error: BaseException) -> tuple[int, str]:
    if isinstance(error, UnknownModel):
        return 404, "invalid_request_error"
    if isinstance(error, RequestError | TokenizerError):
        return 400, "invalid_request_error"
    if isinstance(error, QueueFull):
        return 429, "rate_limit_error"
    return 503 if isinstance(error, EngineDead) else 500, "server_error"
