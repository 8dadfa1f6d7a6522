"""OpenAI's bodies: a request becomes prompts and SamplingParams, their outputs become an answer.

Of each body every field is read, known to change nothing, or refused by its name.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from reprlib import repr as short
from typing import Any

from infinilm.engine.request import CompletionOutput, Logprob, RequestError, RequestOutput
from infinilm.sampling import MAX_LOGPROBS, SamplingParams, StructuredOutputsParams, whole
from infinilm.tokenizer import Tokenizer, TokenizerError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_CHOICES = 1024  # of one answer: n for each prompt
LEAST_LOGPROB = -9999.0  # JSON has no infinity

Body = dict[str, Any]
Prompt = str | dict[str, list[int]]

# The same in SamplingParams; from top_k on they are vLLM's.
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
READ_FIELDS = {
    CHAT: {"messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"},
    COMPLETIONS: {"prompt", "max_tokens", "logprobs"},
}
# How an answer travels is for those who send it.
UNFELT_FIELDS = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "user",
}
# What is not there yet, and the values that ask for nothing.
IDLE_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}


class BodyError(RequestError):
    """What is wrong with a body, and in which of its fields."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Ask:
    """What a body asks for: each prompt continued n times."""

    url: str
    model: str | None
    prompts: list[Prompt]
    params: SamplingParams


# ---- from a body -------------------------------------------------------------------------------------------


def ask_of(url: str, body: Body, tokenizer: Tokenizer) -> Ask:
    """What the body of a request to CHAT or COMPLETIONS asks for; BodyError if that cannot be done."""
    given = {name: value for name, value in body.items() if value is not None}
    check_fields(url, given)
    with as_body_errors(given):
        params = sampling_params(url, given)
    with as_body_errors({}, "messages" if url == CHAT else "prompt"):
        prompts = [chat_prompt(given, tokenizer)] if url == CHAT else plain_prompts(given)
    if len(prompts) * params.n > MAX_CHOICES:
        asked = f"{len(prompts)} prompts with n {params.n}"
        raise BodyError(f"{asked} are {len(prompts) * params.n} choices; at most {MAX_CHOICES} are made", "n")
    return Ask(url, given.get("model"), prompts, params)


def check_fields(url: str, given: Body) -> None:
    known = {
        "model",
        "response_format",
        "structured_outputs",
        *SAMPLING_FIELDS,
        *UNFELT_FIELDS,
        *READ_FIELDS[url],
    }
    for name, value in given.items():
        if name not in known and value not in IDLE_VALUES.get(name, ()):
            raise BodyError(f"{name[:64]} is not supported, but is {short(value)}; leave it out", name)
    if not isinstance(given.get("model", ""), str):
        raise BodyError(f"model must be a name, but is {short(given['model'])}", "model")


@contextmanager
def as_body_errors(given: Body, param: str | None = None) -> Iterator[None]:
    """Errors of SamplingParams name the field first."""
    try:
        yield
    except BodyError:
        raise
    except (ValueError, TypeError) as error:
        named = [word for word in re.findall(r"\w+", str(error)) if word in given]
        raise BodyError(str(error), named[0] if named else param) from error


def sampling_params(url: str, given: Body) -> SamplingParams:
    chosen = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    chosen["max_tokens"] = max_tokens(url, given)
    chosen["logprobs"] = chat_logprobs(given) if url == CHAT else given.get("logprobs")
    return SamplingParams(**chosen, structured_outputs=structure(given))


def max_tokens(url: str, given: Body) -> Any:
    """A chat goes on as long as the model does, a completion has 16 tokens, unless they are told."""
    asked = [given[name] for name in ("max_completion_tokens", "max_tokens") if name in given]
    if len(asked) == 2 and asked[0] != asked[1]:
        raise BodyError("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    return asked[0] if asked else None if url == CHAT else 16


def chat_logprobs(given: Body) -> int | None:
    """How many of the likeliest tokens are told with each"""
    is_wanted, num_top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(is_wanted, bool):
        raise BodyError(f"logprobs must be true or false, but is {short(is_wanted)}", "logprobs")
    if num_top is None:
        return 0 if is_wanted else None
    if not is_wanted:
        raise BodyError("top_logprobs needs logprobs to be true", "top_logprobs")
    return whole(0, MAX_LOGPROBS, "top_logprobs", num_top)


def structure(given: Body) -> StructuredOutputsParams | None:
    wanted, own = response_format(given), given.get("structured_outputs")
    if own is None:
        return wanted
    if wanted is not None:
        raise BodyError("response_format and structured_outputs exclude each other", "structured_outputs")
    if not isinstance(own, Mapping):
        raise BodyError(f"structured_outputs must be an object, but is {short(own)}", "structured_outputs")
    with as_body_errors({}, "structured_outputs"):
        return StructuredOutputsParams(**own)


def response_format(given: Body) -> StructuredOutputsParams | None:
    wanted = given.get("response_format", {"type": "text"})
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
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


def chat_prompt(given: Body, tokenizer: Tokenizer) -> Prompt:
    messages = given.get("messages")
    if not isinstance(messages, list):
        raise BodyError(f"messages must be a list of messages, but is {short(messages)}", "messages")
    return {"prompt_token_ids": tokenizer.encode_chat([with_text(i, m) for i, m in enumerate(messages)])}


def with_text(index: int, message: Any) -> Any:
    """A message whose content, if it comes in parts, is one text."""
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            wanted = "{'type': 'text', 'text': ...}, for the model reads nothing else"
            raise BodyError(f"messages[{index}]: a part must be {wanted}, but is {short(part)}", "messages")
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def plain_prompts(given: Body) -> list[Prompt]:
    """Of a text, token ids, or a list of either"""
    prompt = given.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        several = [prompt] if all(map(is_id, prompt)) else prompt
        if all(isinstance(one, str) or is_ids(one) for one in several):
            return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in several]
    raise BodyError(f"prompt must be a text, token ids, or a list of such, but is {short(prompt)}", "prompt")


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_id, value))


# ---- to an answer ------------------------------------------------------------------------------------------


def answer_of(ask: Ask, outputs: Sequence[RequestOutput], tokenizer: Tokenizer, model: str) -> Body:
    """The whole answer, of the outputs of each prompt; `model` is its name where the body gave none."""
    is_chat = ask.url == CHAT
    found = [completion for output in outputs for completion in output.outputs]
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": ask.model or model,
        "choices": [
            {
                "index": index,
                **(chat_choice(completion, ask.params, tokenizer) if is_chat else text_choice(completion)),
                "finish_reason": completion.finish_reason,
            }
            for index, completion in enumerate(found)
        ],
        "usage": usage_of(outputs),
    }


def usage_of(outputs: Sequence[RequestOutput]) -> Body:
    """A prompt is counted once, however many answers it has."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_drawn = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_drawn,
        "total_tokens": num_prompt + num_drawn,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def chat_choice(completion: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer) -> Body:
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    if completion.logprobs is None:
        return {"message": message, "logprobs": None}
    content = []
    for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
        best = sorted(found, key=lambda other: found[other].rank or 0)[: params.logprobs]
        top = [chat_logprob(other, found[other], tokenizer) for other in best]
        content.append({**chat_logprob(token_id, found[token_id], tokenizer), "top_logprobs": top})
    return {"message": message, "logprobs": {"content": content, "refusal": None}}


def chat_logprob(token_id: int, found: Logprob, tokenizer: Tokenizer) -> Body:
    return {
        "token": found.decoded_token,
        "logprob": as_json(found),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def text_choice(completion: CompletionOutput) -> Body:
    if completion.logprobs is None:
        return {"text": completion.text, "logprobs": None}
    chosen = [found[token] for token, found in zip(completion.token_ids, completion.logprobs, strict=True)]
    tokens = [one.decoded_token or "" for one in chosen]
    logprobs = {
        "tokens": tokens,
        "token_logprobs": [as_json(one) for one in chosen],
        "top_logprobs": [
            {o.decoded_token: as_json(o) for o in found.values()} for found in completion.logprobs
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)),
    }
    return {"text": completion.text, "logprobs": logprobs}


def as_json(found: Logprob) -> float:
    return max(found.logprob, LEAST_LOGPROB)


def error_of(error: BaseException) -> tuple[int, Body]:
    """The status and the body that tell of an error: the caller's own, or ours."""
    is_ours = not isinstance(error, RequestError | TokenizerError)
    told = {
        "message": str(error) or type(error).__name__,
        "type": "server_error" if is_ours else "invalid_request_error",
        "param": getattr(error, "param", None),
        "code": None,
    }
    return 500 if is_ours else 400, {"error": told}
