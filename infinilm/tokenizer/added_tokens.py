"""Added tokens: as settings beside a vocabulary have them, behind its own or its own with other flags; and
how they are found in a text.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from reprlib import repr as short
from typing import Any

import tokenizers
from tokenizers import AddedToken

from infinilm.tokenizer.error import TokenizerError
from infinilm.tokenizer.pieces import has_more_beginnings

FLAGS = ("lstrip", "rstrip", "single_word", "special", "normalized")

# Gemma 3 has six thousand; Llasa, a Llama that speaks, 66 thousand.
MAX_ADDED_TOKENS = 1 << 17
# What finds them in a text is built in a second for a hundred thousand.
MAX_ADDED_BEGINNINGS = 1 << 18
MAX_BRANCHES = 32  # of a pattern, one in the other: Python's parser goes as deep


def check_added(texts: Collection[str]) -> None:
    """Refuse more tokens that are found whole than any vocabulary has, before the library is given them."""
    if len(texts) > MAX_ADDED_TOKENS:
        raise ValueError(f"{len(texts)} tokens are special or whole, but {MAX_ADDED_TOKENS} is the limit")
    if has_more_beginnings(texts, MAX_ADDED_BEGINNINGS):
        rule = f"more than {MAX_ADDED_BEGINNINGS} beginnings, which is the limit"
        raise ValueError(f"tokens that are special or whole have {rule}")


def add_tokens(library: tokenizers.Tokenizer, tokens: Mapping[int, AddedToken], name: str) -> None:
    """By id, in order. One that the vocabulary, the file of this name, has already gets other flags."""
    library.add_tokens(list(tokens.values()))
    for token_id, token in tokens.items():
        if (found := library.token_to_id(token.content)) != token_id:  # the library numbers them itself
            rule = f"is token {found} of {name}; added ids follow on without a gap"
            raise TokenizerError(f"added token {token_id} is {short(token.content)}, but that {rule}")


def tokens_given(config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """By id, what `added_tokens_decoder` says of tokens: those behind the model's own, and of its own."""
    given = config.get("added_tokens_decoder") or {}
    if not isinstance(given, dict):
        raise TokenizerError(
            f"tokenizer_config.json: 'added_tokens_decoder' must be an object, but is {short(given)}"
        )
    return {_id_given(key): _token_given(key, value) for key, value in given.items()}


def names_given(config: Mapping[str, Any]) -> set[str]:
    """Tokens that have no role but are special."""
    given = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    entries = given.values() if isinstance(given, dict) else given
    if not isinstance(given, dict | list):
        found = f"is a {type(given).__name__}"
        raise TokenizerError(
            f"tokenizer_config.json: 'additional_special_tokens' must be a list, but {found}"
        )
    texts = (entry.get("content") if isinstance(entry, dict) else entry for entry in entries)
    return {text for text in texts if isinstance(text, str)}


def _id_given(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 9):
        raise TokenizerError(
            f"tokenizer_config.json: 'added_tokens_decoder' has {short(key)}, which is no token id"
        )
    return int(key)


def _token_given(key: str, value: Any) -> dict[str, Any]:
    match value:
        case {"content": str(content)} if content and all(type(value.get(f, False)) is bool for f in FLAGS):
            return dict(value)
    raise TokenizerError(
        f"tokenizer_config.json: 'added_tokens_decoder' has {short(value)} for {key}, "
        f"but must have a text as 'content', and true or false as {', '.join(FLAGS)}"
    )


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of texts at each place, as a group: split by it, a text has them at every second place."""
    return re.compile(f"({_longest([(text, '') for text in texts])})")


def any_token(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """The same of tokens, each with the white space around it that is its own."""
    words = [(token.content, r"\s*" * token.rstrip, token.lstrip) for token in tokens]
    patterns = [_longest([(text, behind) for text, behind, _ in words])]
    if taking := [(text, behind) for text, behind, takes_before in words if takes_before]:
        # From the first space on, so that a run of them is read once and not from each of its places; a token
        # before it may have taken them.
        patterns.append(rf"(?<!\s)\s++(?:{_longest(taking)})")
    return re.compile(f"({'|'.join(patterns)})")


def _longest(words: list[tuple[str, str]], depth: int = MAX_BRANCHES) -> str:
    """The longest word at a place, and the pattern that is to follow it. What words begin with is read once:
    of thousands, as Gemma 3 has them, each would be tried wherever a text has a "<"."""
    if not words:
        return "(?!)"
    if depth == 0 or len(words) == 1:
        words = sorted(words, key=lambda word: len(word[0]), reverse=True)
        return "|".join(re.escape(text) + behind for text, behind in words)
    by_letter: dict[str, list[tuple[str, str]]] = {}
    for text, behind in words:
        by_letter.setdefault(text[:1], []).append((text, behind))
    ended = by_letter.pop("", [])
    branches = [_branch(group, depth - 1) for group in by_letter.values()]
    return "|".join([*branches, *(behind for _, behind in ended)])


def _branch(words: list[tuple[str, str]], depth: int) -> str:
    """Words that begin alike"""
    beginning = os.path.commonprefix([text for text, _ in words])
    rest = [(text.removeprefix(beginning), behind) for text, behind in words]
    return f"{re.escape(beginning)}(?:{_longest(rest, depth)})"
