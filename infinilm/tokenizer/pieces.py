"""What vocabularies of pieces have in common, from whichever file: kinds, limits, and merges by score."""

import os
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from reprlib import repr as short

# The kinds of tokens, as sentencepiece numbers them and GGUF after it.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Cutting a token in all places costs its length squared; no real sentencepiece token comes near this.
MAX_PIECE_LENGTH = 512
# Each character is a place to cut. The largest vocabularies have two million.
MAX_PIECE_CHARACTERS = 1 << 23
# The largest vocabularies have one million.
MAX_BEGINNINGS = 1 << 21


def check_pieces(tokens: Iterable[str]) -> None:
    total = 0
    for index, token in enumerate(tokens):
        total += len(token)
        if len(token) > MAX_PIECE_LENGTH:
            raise ValueError(
                f"token {index} is {short(token)}, but a token has at most {MAX_PIECE_LENGTH} characters"
            )
    if total > MAX_PIECE_CHARACTERS:
        raise ValueError(f"the tokens have {total} characters, but at most {MAX_PIECE_CHARACTERS}")


def check_tree(tokens: Collection[str]) -> None:
    """Of a unigram model the library keeps a table for each beginning of a token: 300 bytes of memory for a
    byte of the file."""
    if has_more_beginnings(tokens, MAX_BEGINNINGS):
        raise ValueError(f"its pieces have more than {MAX_BEGINNINGS} beginnings, which is the limit")


def has_more_beginnings(tokens: Collection[str], limit: int) -> bool:
    """Whether a tree of tokens has more nodes than that, byte by byte; of few bytes nothing need be sorted"""
    ends = [token.encode() for token in tokens]
    if sum(map(len, ends)) <= limit:
        return False
    ends.sort()
    shared = (len(os.path.commonprefix([*pair])) for pair in pairwise(ends))
    return sum(map(len, ends)) - sum(shared) > limit


def merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose union scores best: each cut of each token, best first."""
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]
