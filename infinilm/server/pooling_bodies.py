"""The bodies of embeddings, rankings and scores."""

from __future__ import annotations

from reprlib import repr as short
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from infinilm.sampling import is_text
from infinilm.server.bodies import TEXT, Body, Count, Prompts, Whole


def several_documents(given: Any) -> list[str]:
    """The documents, given as texts or as objects that have one"""
    if not isinstance(given, list) or not given:
        raise ValueError("must be a list of at least one text")
    return [document_text(one, index) for index, one in enumerate(given)]


def document_text(given: Any, index: int) -> str:
    text = given["text"] if isinstance(given, dict) and given.keys() == {"text"} else given
    if not isinstance(text, str):
        raise ValueError(f"[{index}] must be a text or {{'text': ...}}, but is {short(given)}")
    return text


def several_texts(given: Any) -> list[str]:
    """The texts, given as one or as a list"""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a text or a list of texts")
    return [whole_text(text) for text in texts]


def whole_text(given: str) -> str:
    """Where the tokenizer refuses one, it does not know which field that was of."""
    if not is_text(given):
        raise ValueError("must be text, without halves of surrogate pairs")
    return given


DOCUMENT = {
    "type": "object",
    "properties": {"text": TEXT},
    "required": ["text"],
    "additionalProperties": False,
}
TEXTS = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}]}
DOCUMENTS = {"type": "array", "items": {"anyOf": [TEXT, DOCUMENT]}, "minItems": 1}

Truncation = Annotated[Whole, Field(ge=-1)]  # vLLM's: -1 is as many tokens as the model takes
Text = Annotated[str, AfterValidator(whole_text)]
Texts = Annotated[Any, PlainValidator(several_texts), WithJsonSchema(TEXTS)]
Documents = Annotated[Any, PlainValidator(several_documents), WithJsonSchema(DOCUMENTS)]


class Encoded(Body):
    """What embeddings, rankings and scores have in common"""

    truncate_prompt_tokens: Truncation | None = None  # of a query and a document at the end of the document
    priority: Whole = 0
    cache_salt: str | None = None
    user: Any = None  # changes nothing here


class EmbeddingBody(Encoded):
    """POST /v1/embeddings: a text, token ids, or a list of either"""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    prompt_name: str | None = None  # of those that the model's files have, for texts


class Judged(Encoded):
    """What rankings and scores have in common"""

    instruction: Text | None = None  # for rerankers that take one
    max_tokens_per_doc: Count = 0  # Cohere's, which Haystack always sends; 0 is all, as vLLM has it


class RerankBody(Judged):
    """POST /v1/rerank: documents as texts, or as objects with one"""

    query: Text
    documents: Documents
    top_n: Count = 0  # 0 is all
    return_documents: bool = True


class ScoreBody(Judged):
    """POST /score, vLLM's: queries and documents, or one query for all"""

    text_1: Texts
    text_2: Texts
