"""Embeddings, rankings and scores over HTTP: prompts that are read and not continued.

What an embedding is, the model's files say (`models/pooling.py`); how a model is asked whether a document
answers a query, and what its score is, `models/judging.py` does.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from infinilm.engine.intake import limit_of
from infinilm.engine.request import RequestError
from infinilm.models.judging import Judge
from infinilm.models.pooling import PoolingError
from infinilm.server.bodies import BodyError
from infinilm.server.exchange import Call, Operation, Raw, Reply, dumped_in_turns
from infinilm.server.pooling_bodies import EmbeddingBody, Encoded, Judged, RerankBody, ScoreBody
from infinilm.server.service import BYTES_A_TOKEN, Served, Service
from infinilm.server.turn import end_tasks
from infinilm.tokenizer import Detokenizer, Tokenizer, TokenizerError, TooLong

T = TypeVar("T")
MAX_INPUTS = 2048  # of one request
AT_ONCE = 32  # of them in the engine
ASKED_OF = ("prompt_name", "instruction", "truncate_prompt_tokens")  # what not every model or text takes
FOREIGN_IDS = (
    "; token ids must be of this model (POST /tokenize gives them), not of tiktoken: LangChain's "
    "OpenAIEmbeddings sends those unless check_embedding_ctx_length is False"
)


# ---- embeddings --------------------------------------------------------------------------------------------


async def embeddings(call: Call) -> Reply:
    """Vectors of texts: each the state of its last token"""
    body = await call.read(EmbeddingBody)
    service = call.service
    served = service.served(body.model)
    size = embedding_size(body, service)
    encoding = Encoding(call, body, served, "input")
    limit = encoding.limit
    prompts = await encoding.begin(
        body.input, lambda: [input_ids(one, body, service, limit) for one in body.input]
    )
    states = await encoding.each(encoding.state, prompts)

    def answer() -> bytes:
        vectors = [service.llm.model.pooling.vector(state, size) for state in states]
        data = [
            {"object": "embedding", "index": index, "embedding": written(found, body.encoding_format)}
            for index, found in enumerate(vectors)
        ]
        told = {"object": "list", "data": data, "model": served.name, "usage": usage_of(prompts)}
        return dumped_in_turns(told)

    return Raw(await service.off_loop(answer))


def embedding_size(body: EmbeddingBody, service: Service) -> int:
    size: int = service.llm.model.config.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise BodyError(f"dimensions must be at most {size}, but is {body.dimensions}", "dimensions")
    return body.dimensions or size


def input_ids(given: str | list[int], body: EmbeddingBody, service: Service, limit: int | None) -> list[int]:
    if isinstance(given, str):
        pooling, name, most = service.llm.model.pooling, body.prompt_name, service.max_model_len
        return pooling.encode(given, service.tokenizer, name, False, limit=limit, max_tokens=most)
    if body.prompt_name is not None:
        raise BodyError("prompt_name is for texts, but input has token ids; leave it out", "prompt_name")
    for token_id in given:
        if not 0 <= token_id < service.vocab_size:
            told = f"input has token id {token_id}; the model's are 0 to {service.vocab_size - 1}"
            raise BodyError(told + FOREIGN_IDS, "input")
    return given[:limit]


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
    """Documents by how well they answer a query"""
    body = await call.read(RerankBody)
    pairs = [(body.query, document) for document in body.documents]
    scores, usage = await judged(call, body, "documents", pairs)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [result_of(index, scores[index], body) for index in best]
    model = call.service.served(body.model).name
    told = {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "results": results, "usage": usage}
    meta = {"tokens": {"input_tokens": usage["prompt_tokens"]}}  # Cohere's; the AI SDK insists on it
    return Raw(await call.service.off_loop(dumped_in_turns, {**told, "meta": meta}))


def result_of(index: int, score: float, body: RerankBody) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "relevance_score": score}
    return {**found, "document": {"text": body.documents[index]}} if body.return_documents else found


async def score(call: Call) -> Reply:
    """How well documents answer queries, in their order"""
    body = await call.read(ScoreBody)
    queries, documents = body.text_1, body.text_2
    if len(queries) not in (1, len(documents)):
        told = f"text_1 must be one text, or {len(documents)} as text_2 has, but has {len(queries)}"
        raise BodyError(told, "text_1")
    queries = queries * len(documents) if len(queries) == 1 else queries
    scores, usage = await judged(call, body, "text_2", list(zip(queries, documents, strict=True)))
    data = [{"index": index, "object": "score", "score": found} for index, found in enumerate(scores)]
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return {**head, "model": call.service.served(body.model).name, "data": data, "usage": usage}


async def judged(
    call: Call, body: Judged, name: str, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], dict[str, int]]:
    """The scores of queries and documents, and the usage"""
    service = call.service
    served = service.served(body.model)
    judge = Judge(service.llm.model, service.tokenizer, service.max_model_len)
    encoding = Encoding(call, body, served, name, "a query with ")

    def prompt(query: str, document: str) -> list[int]:
        read = beginning(document, body.max_tokens_per_doc, service.tokenizer)
        return judge.prompt(query, read, body.instruction, encoding.limit)

    prompts = await encoding.begin(pairs, lambda: [prompt(*pair) for pair in pairs])

    async def score(prompt: list[int]) -> float:
        state = await encoding.state(prompt)
        return await service.llm.run(lambda: judge.score(state))

    return await encoding.each(score, prompts), usage_of(prompts)


def beginning(text: str, num_tokens: int, tokenizer: Tokenizer) -> str:
    """So many tokens of a text, less the half of a character at their end; 0 is all"""
    if num_tokens == 0:
        return text
    token_ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    if len(token_ids) <= num_tokens:
        return text
    return "".join(map(Detokenizer(tokenizer).add, token_ids[:num_tokens]))


# ---- what all do -------------------------------------------------------------------------------------------


class Encoding:
    """The prompts of one request, each of an item of the field `name` and what is `beside` it, read by the
    engine for their last states."""

    def __init__(self, call: Call, body: Encoded, served: Served, name: str, beside: str = "") -> None:
        self.call, self.name, self.beside = call, name, beside
        self.priority, self.salt, self.lora = body.priority, body.cache_salt, served.lora
        self.service = call.service
        self.ids = call.new_ids()
        self.limit = limit_of(body.truncate_prompt_tokens, self.service.max_model_len)

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
        except TooLong as error:
            raise self._too_long(f"at least {error.least}") from error
        except TokenizerError as error:
            raise BodyError(f"{self.name}: {error}", self.name) from error
        except PoolingError as error:  # which names the field first, where it is about one
            first = str(error).partition(" ")[0]
            raise BodyError(str(error), first if first in ASKED_OF else "model") from error
        for prompt in prompts:
            self._check(prompt)
        return prompts

    def _check(self, prompt: list[int]) -> None:
        if len(prompt) > self.service.max_model_len:
            raise self._too_long(f"{len(prompt)}")
        try:
            self.service.llm.engine.make_encoding(
                prompt, priority=self.priority, cache_salt=self.salt, lora_request=self.lora
            )
        except RequestError as error:
            wrong = error.field or self.name
            raise BodyError(f"{wrong}: {error}", wrong) from error

    def _too_long(self, found: str) -> BodyError:
        return BodyError(
            f"This model's maximum context length is {self.service.max_model_len} tokens, but "
            f"{self.beside}one of {self.name} has {found}; shorten it",
            self.name,
            "context_length_exceeded",
        )

    async def state(self, prompt: list[int]) -> Tensor:
        with self.service.tally.watch():
            state = await self.service.llm.encode(
                {"prompt_token_ids": prompt},
                next(self.ids),
                priority=self.priority,
                cache_salt=self.salt,
                lora_request=self.lora,
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
            await end_tasks(*tasks)


OPERATIONS = (
    Operation("POST", "/v1/embeddings", embeddings, EmbeddingBody),
    Operation("POST", "/v1/rerank", rerank, RerankBody),
    Operation("POST", "/v2/rerank", rerank, RerankBody),  # as Cohere's client asks
    Operation("POST", "/rerank", rerank, RerankBody),
    Operation("POST", "/v1/score", score, ScoreBody),
    Operation("POST", "/score", score, ScoreBody),
)
