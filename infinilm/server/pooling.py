"""Embeddings and rankings over HTTP: prompts that are read and not continued.

An embedding is the state of the last token after the model's last norm, scaled to length one. A document's
relevance is the probability of "yes" against "no", in small letters or with a capital, after a prompt that
asks whether it answers the query.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from infinilm.engine.request import RequestError
from infinilm.sampling import SamplingParams
from infinilm.server.bodies import BodyError, EmbeddingBody, RerankBody
from infinilm.server.service import BYTES_A_TOKEN, Service, field_of
from infinilm.server.stream import Call, Operation, Raw, Reply, dumps
from infinilm.server.turn import Turn, encode
from infinilm.tokenizer import Tokenizer, TokenizerError

T = TypeVar("T")
MAX_INPUTS = 2048  # of one request
AT_ONCE = 32  # of them in the engine
READING = SamplingParams(max_tokens=1)
FOREIGN_IDS = (
    "; token ids must be of this model (POST /tokenize gives them), not of tiktoken: LangChain's "
    "OpenAIEmbeddings sends those unless check_embedding_ctx_length is False"
)
# Of the ways to ask, one that small models answer well. Documents come late, so that all of them share the
# prompt up to there.
QUESTION = 'Does the text answer "{query}"?\n\nText: {document}\n\nAnswer yes or no.'
PLAIN = "{question}\n\nAnswer:\n"  # for models without a chat template
YES, NO = ("yes", "Yes"), ("no", "No")


# ---- embeddings --------------------------------------------------------------------------------------------


async def embeddings(call: Call) -> Reply:
    """Directions of texts: each the state of its last token, of length one"""
    body = await call.read(EmbeddingBody)
    service = call.service
    service.check_model(body.model)
    size = embedding_size(body, service)
    reading = Reading(call, "input", body.priority, body.cache_salt)
    prompts = await reading.begin(body.input, lambda: [input_ids(one, service) for one in body.input])
    states = await reading.each(reading.state, prompts)

    def answer() -> bytes:
        directions = [direction(state, size) for state in states]
        data = [
            {"object": "embedding", "index": index, "embedding": written(found, body.encoding_format)}
            for index, found in enumerate(directions)
        ]
        told = {"object": "list", "data": data, "model": service.name, "usage": usage_of(prompts)}
        return dumps(told).encode()

    return Raw(await service.off_loop(answer))


def embedding_size(body: EmbeddingBody, service: Service) -> int:
    size: int = service.llm.model.config.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise BodyError(f"dimensions must be at most {size}, but is {body.dimensions}", "dimensions")
    return body.dimensions or size


def input_ids(given: str | list[int], service: Service) -> list[int]:
    if isinstance(given, str):
        return service.tokenizer.encode(given, allow_special=False)
    for token_id in given:
        if not 0 <= token_id < service.vocab_size:
            told = f"input has token id {token_id}; the model's are 0 to {service.vocab_size - 1}"
            raise BodyError(told + FOREIGN_IDS, "input")
    return given


def direction(state: Tensor, size: int) -> Tensor:
    """The first so many numbers, of length one"""
    return torch.nn.functional.normalize(state[:size], dim=0)


def written(found: Tensor, encoding: str) -> str | list[float]:
    if encoding == "float":
        numbers: list[float] = found.tolist()
        return numbers
    return base64.b64encode(found.numpy().astype("<f4").tobytes()).decode()


def usage_of(prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    num_tokens = sum(map(len, prompts))
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


# ---- rankings ----------------------------------------------------------------------------------------------


async def rerank(call: Call) -> Reply:
    """Documents by how likely they answer a query"""
    body = await call.read(RerankBody)
    service = call.service
    service.check_model(body.model)
    yes, no = words(YES, service.tokenizer), words(NO, service.tokenizer)
    if set(yes) & set(no):
        raise BodyError("the model's tokens do not tell yes from no, so that it cannot rank", "model")
    reading = Reading(call, "documents", body.priority, body.cache_salt)
    prompts = await reading.begin(
        body.documents, lambda: [judged_ids(body.query, one, service) for one in body.documents]
    )

    async def score(prompt: list[int]) -> float:
        logits = await service.llm.logits(await reading.state(prompt))
        return float(torch.sigmoid(logits[yes].logsumexp(0) - logits[no].logsumexp(0)))

    scores = await reading.each(score, prompts)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [result_of(index, scores[index], body) for index in best]
    told = {"id": f"rerank-{uuid.uuid4().hex}", "model": service.name, "results": results}
    return Raw(await service.off_loop(lambda: dumps({**told, "usage": usage_of(prompts)}).encode()))


def result_of(index: int, score: float, body: RerankBody) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "relevance_score": score}
    return {**found, "document": {"text": body.documents[index]}} if body.return_documents else found


def words(several: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The tokens that they begin with, each once"""
    firsts = [tokenizer.encode(word, add_special_tokens=False)[0] for word in several]
    return list(dict.fromkeys(firsts))


def judged_ids(query: str, document: str, service: Service) -> list[int]:
    """The prompt that asks whether a document answers a query"""
    question = QUESTION.format(query=query, document=document)
    tokenizer = service.tokenizer
    if tokenizer.chat_template is None:
        return tokenizer.encode(PLAIN.format(question=question), allow_special=False)
    messages = [{"role": "user", "content": question}]
    turn = Turn(params=READING, messages=messages, variables={"enable_thinking": False})
    return encode(turn, tokenizer, service.family)


# ---- what both do ------------------------------------------------------------------------------------------


class Reading:
    """The prompts of one request, of the field `name`, read by the engine for their last states."""

    def __init__(self, call: Call, name: str, priority: int, salt: str | None) -> None:
        self.call, self.name, self.priority, self.salt = call, name, priority, salt
        self.service = call.service
        self.ids = call.new_ids()

    async def begin(self, given: Sequence[Any], encode_all: Callable[[], list[list[int]]]) -> list[list[int]]:
        """A place for all, then their tokens, checked, off the event loop"""
        if len(given) > MAX_INPUTS:
            told = f"{self.name} must be at most {MAX_INPUTS} items long, but has {len(given)}"
            raise BodyError(told, self.name)
        num_bytes = self.call.num_bytes
        self.place = self.service.admission.enter(min(len(given), AT_ONCE), num_bytes // BYTES_A_TOKEN)
        self.call.stack.callback(self.place.leave)
        prompts = await self.service.off_loop(self._checked, encode_all)
        self.place.takes(sum(map(len, prompts)))
        return prompts

    def _checked(self, encode_all: Callable[[], list[list[int]]]) -> list[list[int]]:
        try:
            prompts = encode_all()
        except TokenizerError as error:
            raise BodyError(f"{self.name}: {error}", self.name) from error
        for prompt in prompts:
            self._check(prompt)
        return prompts

    def _check(self, prompt: list[int]) -> None:
        if len(prompt) > self.service.max_model_len:
            raise BodyError(
                f"This model's maximum context length is {self.service.max_model_len} tokens, but one of "
                f"{self.name} has {len(prompt)}; shorten it",
                self.name,
                "context_length_exceeded",
            )
        try:
            self.service.llm.engine.make_encoding(prompt, self.priority, cache_salt=self.salt)
        except RequestError as error:
            wrong = field_of(str(error), self.name, self.name)
            raise BodyError(f"{wrong}: {error}", wrong) from error

    async def state(self, prompt: list[int]) -> Tensor:
        with self.service.tally.watch():
            state = await self.service.llm.encode(
                {"prompt_token_ids": prompt}, next(self.ids), priority=self.priority, cache_salt=self.salt
            )
        self.place.has_begun(len(prompt))
        return state

    async def each(self, work: Callable[[list[int]], Awaitable[T]], prompts: Sequence[list[int]]) -> list[T]:
        """What comes of every prompt, some at a time; the first error ends all."""
        room = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: list[int]) -> T:
            async with room:
                return await work(prompt)

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


OPERATIONS = (
    Operation("POST", "/v1/embeddings", embeddings, EmbeddingBody),
    Operation("POST", "/v1/rerank", rerank, RerankBody),
    Operation("POST", "/rerank", rerank, RerankBody),
)
