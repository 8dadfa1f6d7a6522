"""What is told of turns in OpenAI's words: chats and completions, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from infinilm.engine.request import Logprob, Logprobs, RequestOutput
from infinilm.server.asks import CHAT, COMPLETIONS, Asked, Json, is_echo_alone
from infinilm.server.openai_bodies import ChatBody, CompletionBody
from infinilm.server.parts import CallArguments, CallStart, Part, Reasoning, Text
from infinilm.server.turn import Piece, Prepared, Turn, Usage, cache_miss, usage_of
from infinilm.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def head_of(url: str, model: str, is_chunk: bool = False) -> Json:
    is_chat = url == CHAT
    kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if is_chat else "text_completion"
    name = "chatcmpl" if is_chat else "cmpl"
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.drawn,
        "total_tokens": usage.prompt + usage.drawn,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        **cache_miss(usage),
    }


def finish_reason(piece: Piece) -> str | None:
    return "tool_calls" if piece.has_calls and piece.finish_reason == "stop" else piece.finish_reason


def chat_choice(piece: Piece, num_top: int | None, tokenizer: Tokenizer) -> Json:
    return {
        "index": piece.index,
        "message": message_of(piece.parts),
        "logprobs": chat_logprobs_of(piece, num_top, tokenizer),
        "finish_reason": finish_reason(piece),
    }


def message_of(parts: Sequence[Part]) -> Json:
    text = "".join(part.text for part in parts if isinstance(part, Text))
    thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = calls_of(parts)
    message: Json = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if thoughts:
        message |= {"reasoning": thoughts, "reasoning_content": thoughts}
    if calls:
        message["tool_calls"] = calls
    return message


def calls_of(parts: Sequence[Part]) -> list[Json]:
    starts = {part.index: part for part in parts if isinstance(part, CallStart)}
    calls = {index: call_body(start) for index, start in starts.items()}
    for part in parts:
        if isinstance(part, CallArguments):
            kind, key = call_keys(starts[part.index])
            calls[part.index][kind][key] += part.text
    return list(calls.values())


def call_body(part: CallStart) -> Json:
    """A call that begins"""
    kind, key = call_keys(part)
    return {"id": part.id, "type": kind, kind: {"name": part.name, key: ""}}


def call_keys(part: CallStart) -> tuple[str, str]:
    """Under which a call stands, and in that what it takes"""
    return part.tool.kind, "input" if part.tool.kind == "custom" else "arguments"


def chat_logprobs_of(piece: Piece, num_top: int | None, tokenizer: Tokenizer) -> Json | None:
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


def chat_logprob(token_id: int, found: Logprob, tokenizer: Tokenizer) -> Json:
    return {
        "token": found.decoded_token,
        "logprob": as_json(found),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def text_choice(piece: Piece, tokenizer: Tokenizer, offset: int = 0) -> Json:
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
) -> Json:
    """In four lists. Of a prompt's first token nothing is known but its text."""
    tokens = [
        (tokenizer.token_text(token) if top is None else top[token].decoded_token) or ""
        for token, top in zip(token_ids, found, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if top is None else as_json(top[token]) for token, top in zip(token_ids, found, strict=True)
        ],
        "top_logprobs": [
            None if top is None else by_text(token, top) for token, top in zip(token_ids, found, strict=True)
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
    }


def by_text(token_id: int, top: Logprobs) -> Json:
    """Parts of characters share one text, under which the token itself is told, or else the likeliest."""
    found: Json = {}
    for other in sorted(top, key=lambda other: (other != token_id, top[other].rank or 0)):
        found.setdefault(top[other].decoded_token or "", as_json(top[other]))
    return found


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
    """The piece of a prompt that is wanted back with nothing after it"""
    return replace(piece, text="", token_ids=[], logprobs=None if piece.logprobs is None else [])


def prompt_text(prompt: str | Sequence[int], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)


def as_json(found: Logprob) -> float:
    return max(found.logprob, LEAST_LOGPROB)


# ---- whole answers -----------------------------------------------------------------------------------------


def whole_answer(
    asked: Asked,
    prepared: Sequence[Prepared],
    outputs: Sequence[RequestOutput],
    pieces: Sequence[Sequence[Piece]],
    model: str,
    tokenizer: Tokenizer,
) -> Json:
    """From the last output of each turn, and the pieces that its choices are whole"""
    usage, turns = usage_of(outputs), [one.turn for one in prepared]
    if isinstance(asked, ChatBody):
        url = CHAT
        choices = [chat_choice(piece, turns[0].params.logprobs, tokenizer) for piece in pieces[0]]
    else:
        url, choices = COMPLETIONS, text_choices(asked, turns, outputs, pieces, tokenizer)
        usage = replace(usage, drawn=0) if is_echo_alone(asked) else usage
    return {**head_of(url, model), "choices": choices, "usage": usage_body(usage)}


def text_choices(
    body: CompletionBody,
    turns: Sequence[Turn],
    outputs: Sequence[RequestOutput],
    pieces: Sequence[Sequence[Piece]],
    tokenizer: Tokenizer,
) -> list[Json]:
    """The choices, from the whole pieces of each prompt"""
    choices = []
    for turn, output, some in zip(turns, outputs, pieces, strict=True):
        for piece in some:
            told = without_tokens(piece) if is_echo_alone(body) else piece
            if body.echo:
                told = with_prompt(told, output, prompt_text(turn.prompt, tokenizer))
            choices.append(text_choice(told, tokenizer))
    return choices
