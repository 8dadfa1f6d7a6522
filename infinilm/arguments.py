"""What callers of LLM and AsyncLLM give: prompts, conversations and what goes with them, read or refused."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from infinilm import elsewhere
from infinilm.config import EngineConfig
from infinilm.elsewhere import Table, is_one_of
from infinilm.engine.intake import Prompt
from infinilm.engine.request import RequestError
from infinilm.models.pooling import PoolingError
from infinilm.sampling import SamplingParams
from infinilm.tokenizer import ChatPrompt, TokenizerError

NO_LISTS = str, bytes, bytearray, memoryview, Mapping
SAMPLING = tuple(f.name for f in fields(SamplingParams))
# Keywords that callers know from elsewhere, as in infinilm.elsewhere: of whatever continues prompts,
OF_CALL: Table = {
    **elsewhere.SAMPLING,
    **{name: ("sampling_params has it",) for name in SAMPLING},
    "max_new_tokens": ("sampling_params has it, as max_tokens",),
}
OF_GENERATE: Table = {
    **OF_CALL,
    "prompt_token_ids": ("prompts may be lists of token ids", None),
    "messages": ("chat answers messages",),
}
OF_STREAM: Table = {
    **OF_CALL,
    "sampling_params": ("it is params here", None),
    "prompts": ("it takes one prompt",),
    "prompt_token_ids": ("prompt may be a list of token ids", None),
    "messages": ("prompt may be what tokenizer.encode_chat makes of messages",),
    "stream": (elsewhere.NEEDLESS, True),
    "use_tqdm": (elsewhere.NEEDLESS, False),
}
OF_ASYNC: Table = {
    **OF_STREAM,
    "prompts": ("it takes one prompt; others may be asked for at once",),
    "inputs": ("it is prompt here",),
    "trace_headers": ("there are no traces", None),
    "data_parallel_rank": (elsewhere.ONE_PROCESS, None),
}
OF_POOLING: Table = {
    "pooling_params": ("states are pooled as the model's files say", None),
    "sampling_params": ("nothing is drawn", None),
    "text_1": ("it is queries here",),
    "text_2": ("it is documents here",),
}
# and of chat, which takes all others for variables of its template
NO_VARIABLES: Table = {
    **OF_CALL,
    **{name: ("give it to sampling_params",) for name in SAMPLING},
    "self": ("",),
    "messages": ("",),
    "tokenize": ("",),
    "chat_template": ("give it to LLM", None),
    "chat_template_content_format": ("", "auto"),
    "continue_final_message": (
        "write what the answer begins with after the text of tokenizer.apply_chat_template, and give both to "
        "generate",
        False,
    ),
    "add_special_tokens": ("", False),
    "mm_processor_kwargs": ("", None),
    "tokenization_kwargs": ("", None),
}


def with_options(init: Any) -> Any:
    """`init` says by its signature that it takes the fields of EngineConfig."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type)
        for f in fields(EngineConfig)[1:]
    ]
    own = list(inspect.signature(init).parameters.values())
    init.__signature__ = inspect.Signature([*own[:-1], *options])
    return init


def as_prompts(given: Any) -> list[Prompt]:
    """One prompt, or several: a text, token ids, or a mapping with either"""
    if isinstance(given, str | Mapping | ChatPrompt):
        return [given]
    items = items_of("prompts", "a text, token ids, or a list of such", given, str | Mapping | Sequence | int)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    if any(isinstance(item, int | bytes) for item in items):
        raise RequestError(
            f"prompts must be all of one kind, texts or lists of ids, but are {reprlib.repr(given)}"
        )
    return items


def as_conversations(given: Any) -> list[Any]:
    wanted = "a list of {'role': ..., 'content': ...}, or of such lists"
    items = items_of("messages", wanted, given, Mapping | list | tuple)
    return [items] if items and isinstance(items[0], Mapping) else items


def as_variables(keywords: Mapping[str, Any], more: Any) -> dict[str, Any]:
    """Variables of a chat template. What other programs take besides is refused: here it would do nothing."""
    more = {} if more is None else more
    if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
        raise RequestError(
            f"chat_template_kwargs must be a dict of variables by name, but are {reprlib.repr(more)}"
        )
    given = {**keywords, **more}
    return {name: value for name, value in given.items() if is_variable(name, value)}


def is_variable(name: str, value: Any) -> bool:
    if name not in NO_VARIABLES:
        return True
    advice, *idle = NO_VARIABLES[name]
    if is_one_of(value, idle):
        return False
    told = f"chat does not know {name}, which is no variable of a template"
    raise RequestError("; ".join(filter(None, [told, advice])))


def items_of(name: str, wanted: str, value: Any, kind: Any) -> list[Any]:
    """The items of whatever can be iterated over, all of one kind."""
    is_list = isinstance(value, Iterable) and not isinstance(value, NO_LISTS)
    items = list(value) if is_list else []
    if not is_list or not all(isinstance(item, kind) for item in items):
        raise RequestError(f"{name} must be {wanted}, but are {reprlib.repr(value)}")
    return items


def as_pairs(queries: Any, documents: Any) -> list[tuple[str, str]]:
    """Each document with its query, or with the only one"""
    names = ("queries", queries), ("documents", documents)
    first, second = (
        [given] if isinstance(given, str) else items_of(name, "a text or a list of texts", given, str)
        for name, given in names
    )
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"queries must be one, or one for each of {len(second)} documents, but are {len(first)}"
        )
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def one_each(name: str, given: Any, kind: Any, count: int, default: Any) -> list[Any]:
    """A value for each prompt, from one that is for all or from a list of them."""
    values = list(given) if isinstance(given, list | tuple) else [default if given is None else given] * count
    if len(values) != count:
        raise RequestError(f"{name} must be one, or one for each of {count} prompts, but are {len(values)}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = getattr(kind, "__name__", kind)
            raise RequestError(f"{name} must be {wanted}, but are {reprlib.repr(given)}")
    return values


@contextmanager
def as_request_errors() -> Iterator[None]:
    """A text that cannot be encoded, messages that no template takes and what the model is not made for are
    the user's mistakes."""
    try:
        yield
    except (TokenizerError, PoolingError) as error:
        raise RequestError(str(error)) from error
