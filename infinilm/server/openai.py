"""OpenAI's API over HTTP: chats, completions, models; and vLLM's tokenize and detokenize."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from infinilm.engine.stats import Progress
from infinilm.sampling import SamplingParams
from infinilm.server import answers, asks
from infinilm.server.asks import CHAT, COMPLETIONS
from infinilm.server.bodies import BodyError, as_body_errors
from infinilm.server.exchange import (
    DONE,
    Call,
    Events,
    Operation,
    Raw,
    Reply,
    dumped_in_turns,
    dumps,
    event,
    openai_ending,
)
from infinilm.server.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from infinilm.server.parts import CallArguments, CallStart, Part, Reasoning, Text
from infinilm.server.service import Service
from infinilm.server.turn import Piece, Run, Turn, Usage, progress_body

Chunk = dict[str, Any]
A = TypeVar("A", ChatBody, CompletionBody)


# ---- chats -------------------------------------------------------------------------------------------------


async def chat(call: Call) -> Reply:
    """Answer a conversation."""
    return await answered(call, ChatBody, ChatStream)


async def answered(call: Call, kind: type[A], stream: Callable[[Run, A, Service], Stream]) -> Reply:
    body = await call.read(kind)
    service = call.service
    served = service.served(body.model)
    turns = await call.made(asks.turns_of, body, service.defaults)
    run = await service.start(turns, call, served)
    if body.stream:
        return Events(stream(run, body, service).events(), openai_ending)
    return await whole_answer(run, body, service)


async def whole_answer(run: Run, body: asks.Asked, service: Service) -> Raw:
    pieces = await run.whole()

    def answer() -> bytes:
        told = answers.whole_answer(body, run.prepared, run.outputs, pieces, run.model, service.tokenizer)
        return dumped_in_turns({**told, "timings": run.timings()})

    takes_long = run.prepared[0].params.logprobs is not None or getattr(body, "echo", False)
    return Raw(await service.off_loop(answer) if takes_long else answer())


class Stream:
    """The chunks of one answer: all with one id, the last with timings and, where asked for, the usage, which
    the others may tell so far."""

    def __init__(self, url: str, run: Run, body: ChatBody | CompletionBody, service: Service) -> None:
        self.run, self.body, self.service = run, body, service
        self.num_choices = len(run.prepared) * body.n
        self.num_done = 0
        self.has_usage = body.stream_options.include_usage
        self.is_continuous = self.has_usage and body.stream_options.continuous_usage_stats
        self.head = answers.head_of(url, run.model, is_chunk=True)
        if self.has_usage and not self.is_continuous:
            self.head["usage"] = None
        self.opening = event(self.head).removesuffix(b"}\n\n")  # of a chunk, written once for all

    async def events(self) -> AsyncIterator[bytes]:
        yield self.begin()
        async with aclosing(self.run.pieces(self.body.return_progress)) as items:
            async for item in items:
                yield self.progress(item) if isinstance(item, Progress) else self.told(item)
        yield self.end()

    def begin(self) -> bytes:
        return b""

    def told(self, piece: Piece) -> bytes:
        raise NotImplementedError

    def chunk(self, choice: Chunk, **more: Any) -> bytes:
        if self.is_continuous:
            more["usage"] = answers.usage_body(self.usage())
        return b"%b,%b\n\n" % (self.opening, dumps({"choices": [choice], **more}).encode()[1:])

    def finished(self, choice: Chunk) -> bytes:
        """The chunk that ends a choice"""
        self.num_done += 1
        is_last = self.num_done == self.num_choices and not self.has_usage
        return self.chunk(choice, **({"timings": self.run.timings()} if is_last else {}))

    def end(self) -> bytes:
        if not self.has_usage:
            return DONE
        told = {"choices": [], "usage": answers.usage_body(self.usage()), "timings": self.run.timings()}
        return event({**self.head, **told}) + DONE

    def usage(self) -> Usage:
        return self.run.usage

    def progress(self, progress: Progress) -> bytes:
        return self.chunk(self.empty(), **progress_body(progress))

    def empty(self) -> Chunk:
        raise NotImplementedError


class ChatStream(Stream):
    def __init__(self, run: Run, body: ChatBody, service: Service) -> None:
        super().__init__(CHAT, run, body, service)
        self.num_top = run.prepared[0].params.logprobs
        self.calls: dict[tuple[int, int], CallStart] = {}  # by the numbers of their choices and their own

    def begin(self) -> bytes:
        """The role, once for each choice"""
        role = {"role": "assistant", "content": ""}
        return b"".join(self.chunk(self.choice(index, role)) for index in range(self.num_choices))

    def told(self, piece: Piece) -> bytes:
        logprobs = answers.chat_logprobs_of(piece, self.num_top, self.service.tokenizer)
        deltas = [self.delta(piece.index, part) for part in piece.parts]
        chunks = [self.choice(piece.index, delta) for delta in deltas if delta]
        if logprobs is not None and piece.token_ids:
            chunks = chunks or [self.choice(piece.index, {"content": ""})]
            chunks[0]["logprobs"] = logprobs
        told = b"".join(map(self.chunk, chunks))
        if piece.finish_reason is None:
            return told
        return told + self.finished(self.choice(piece.index, {}, answers.finish_reason(piece)))

    def choice(self, index: int, delta: Chunk, reason: str | None = None) -> Chunk:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def empty(self) -> Chunk:
        return self.choice(0, {})

    def delta(self, index: int, part: Part) -> Chunk | None:
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning": part.text, "reasoning_content": part.text}
        if isinstance(part, CallStart):
            self.calls[index, part.index] = part
            return {"tool_calls": [{"index": part.index, **answers.call_body(part)}]}
        if isinstance(part, CallArguments):
            kind, key = answers.call_keys(self.calls[index, part.index])
            return {"tool_calls": [{"index": part.index, kind: {key: part.text}}]}
        return None


# ---- completions -------------------------------------------------------------------------------------------


async def completions(call: Call) -> Reply:
    """Continue one or several prompts."""
    return await answered(call, CompletionBody, CompletionStream)


class CompletionStream(Stream):
    body: CompletionBody

    def __init__(self, run: Run, body: CompletionBody, service: Service) -> None:
        super().__init__(COMPLETIONS, run, body, service)
        self.offsets = [0] * self.num_choices  # of the text that follows
        self.unechoed = set(range(self.num_choices) if body.echo else ())  # choices still to begin so
        self.is_alone = asks.is_echo_alone(body)

    def told(self, piece: Piece) -> bytes:
        told = answers.without_tokens(piece) if self.is_alone else piece
        offset = self.offsets[piece.index]
        if piece.index in self.unechoed:
            self.unechoed.remove(piece.index)
            told = self.echoed(told)
        choice = answers.text_choice(told, self.service.tokenizer, offset)
        self.offsets[piece.index] = self.after(choice, offset)
        return self.chunk(choice) if piece.finish_reason is None else self.finished(choice)

    def echoed(self, piece: Piece) -> Piece:
        number = piece.index // self.body.n
        prompt = answers.prompt_text(self.run.prepared[number].turn.prompt, self.service.tokenizer)
        return answers.with_prompt(piece, self.run.output(number), prompt)

    @staticmethod
    def after(choice: Chunk, offset: int) -> int:
        """Where the next text begins, counted in the texts of tokens if these are told."""
        if choice["logprobs"] is None:
            return offset + len(choice["text"])
        return offset + sum(map(len, choice["logprobs"]["tokens"]))

    def usage(self) -> Usage:
        return replace(self.run.usage, drawn=0) if self.is_alone else self.run.usage

    def empty(self) -> Chunk:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": None}


# ---- models ------------------------------------------------------------------------------------------------


async def models(call: Call) -> Reply:
    """The models there are"""
    names = *call.service.names, *call.service.loras
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [model_body(call.service, name) for name in names], **pages}


async def model(call: Call) -> Reply:
    """One model, by its name"""
    name = call.scope["path_params"]["name"]
    call.service.served(name)
    return model_body(call.service, name)


def model_body(service: Service, name: str) -> Chunk:
    """A model with the fields of OpenAI's clients and of Anthropic's"""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created": service.created,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created)),
        "owned_by": "infinilm",
        "parent": service.name if name in service.loras else None,
        "max_model_len": service.max_model_len,
        "max_input_tokens": service.max_model_len,
        "max_tokens": service.max_model_len,
        "default_sampling": service.defaults,
    }


# ---- tokens ------------------------------------------------------------------------------------------------


async def tokenize(call: Call) -> Reply:
    """The tokens of a prompt or of a conversation"""
    body = await call.read(TokenizeBody)
    service = call.service
    service.served(body.model)
    if (body.prompt is None) == (not body.messages):
        raise BodyError("either prompt or messages must be given", "prompt")
    return Raw(await service.off_loop(tokenized, body, service))


def tokenized(body: TokenizeBody, service: Service) -> bytes:
    tokens, strings = tokens_of(body, service), None
    if body.return_token_strs:
        strings = [service.tokenizer.token_text(token) for token in tokens]
    told = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
    return dumped_in_turns({**told, "token_strs": strings})


def tokens_of(body: TokenizeBody, service: Service) -> list[int]:
    if body.prompt is not None:
        with as_body_errors({}, "prompt"):
            return service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    turn = Turn(
        params=SamplingParams(),
        messages=[message.model_dump(exclude_unset=True) for message in body.messages],
        tools=tuple(map(asks.tool_of, body.tools)),
        variables={"add_generation_prompt": body.add_generation_prompt, **body.chat_template_kwargs},
    )
    return service.tokens_of(turn)


async def detokenize(call: Call) -> Reply:
    """The text of tokens"""
    body = await call.read(DetokenizeBody)
    service = call.service
    service.served(body.model)
    return {"prompt": await service.off_loop(text_of, body, service)}


def text_of(body: DetokenizeBody, service: Service) -> str:
    for token in body.tokens:
        if token >= service.vocab_size:
            told = f"tokens has token id {token}; the model's are 0 to {service.vocab_size - 1}"
            raise BodyError(told, "tokens")
    return service.tokenizer.decode(body.tokens, skip_special_tokens=False)


OPERATIONS = (
    Operation("POST", CHAT, chat, ChatBody, can_stream=True),
    Operation("POST", COMPLETIONS, completions, CompletionBody, can_stream=True),
    Operation("GET", "/v1/models", models),
    Operation("GET", "/v1/models/{name:path}", model),
    Operation("POST", "/tokenize", tokenize, TokenizeBody),
    Operation("POST", "/detokenize", detokenize, DetokenizeBody),
)
