"""What the steps of a tokenizer.json may cost, bounded before they run: nothing can interrupt the library.

Forty steps that each double a text make a terabyte of one letter. So each kind of step has a factor by which
it makes a text longer, in bytes of UTF-8, and the product of a file's factors is bounded.
"""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infinilm.tokenizer.added_tokens import check_added
from infinilm.tokenizer.normalizer import size_of_keys
from infinilm.tokenizer.pieces import check_pieces, check_tree
from infinilm.tokenizer.regex import cost_of_regex

# The widest in use: T5's normaliser, at 33 by its table, 1.5 by a Replace and 4 by its pre-tokenizer.
MAX_GROWTH = 256
MAX_STEPS = 100
MAX_WORD = 1000
MAX_AFFIX = 100

# The stages of a tokenizer.json, and the name under which a Sequence has its members.
ENCODING = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
DECODING = {"decoder": "decoders"}

# Some follow from Unicode's tables: U+FDFA, of 3 bytes, has 33 in NFKC; a Hangul syllable of 3 has 9 in NFD.
FIXED_GROWTH = {
    **dict.fromkeys(("NFC", "NFD"), 3),
    **dict.fromkeys(("NFKC", "NFKD"), 11),
    **dict.fromkeys(("Lowercase", "WordPiece"), 2),
    "ByteLevel": 4,  # each byte becomes a letter of one or two, and each piece may get a space before it
    "BertNormalizer": 8,  # NFD, lower case, and spaces around Chinese characters
    **dict.fromkeys(("Nmt", "Strip", "StripAccents"), 1),
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"), 1),
    **dict.fromkeys(("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
    **dict.fromkeys(("BertProcessing", "RobertaProcessing"), 1),
    **dict.fromkeys(("BPEDecoder", "ByteFallback", "CTC", "Fuse"), 1),
}


def check_bounds(content: Mapping[str, Any]) -> None:
    """Refuse a tokenizer.json, parsed, whose steps could make a text endless or search it endlessly, or that
    takes the library more memory or time to build than any vocabulary does."""
    _check_growth(steps_of(content, ENCODING))
    _check_growth(steps_of(content, DECODING))
    _check_model(content.get("model"))
    check_added([token["content"] for token in content.get("added_tokens") or []])


def _check_growth(steps: Sequence[Any]) -> None:
    if len(steps) > MAX_STEPS:
        raise ValueError(f"{len(steps)} steps are asked for, but {MAX_STEPS} is the limit")
    factors = [(step["type"], _growth(step)) for step in steps]
    total = math.prod(factor for _, factor in factors)
    if total > MAX_GROWTH:
        parts = ", ".join(f"{kind} ({factor:.3g})" for kind, factor in factors if factor > 1)
        found = f"may make a text {total:.3g} times longer, but {MAX_GROWTH} times is the limit"
        raise ValueError(f"{parts[:500]}: {found}")


def _check_model(model: Any) -> None:
    match model:
        case {"max_input_chars_per_word": int(limit)} if limit > MAX_WORD:  # WordPiece works for its cube
            raise ValueError(f"model: 'max_input_chars_per_word' is {limit}, but {MAX_WORD} is the limit")
        case {"vocab": [*entries]}:  # of Unigram alone it is a list
            pieces = [text for text, _ in entries]
            check_pieces(pieces)
            check_tree(pieces)
        case {"vocab": _}:
            for name in ("continuing_subword_prefix", "end_of_word_suffix"):
                _check_affix(model.get(name) or "")
            _check_merges(model.get("merges") or [], model.get("continuing_subword_prefix") or "")


def _check_affix(affix: str) -> None:
    if len(affix) > MAX_AFFIX:
        rule = f"is put to every character; {MAX_AFFIX} letters is the limit"
        raise ValueError(f"model: {affix[:20]!r}… {rule}")


def _check_merges(merges: Sequence[Any], prefix: str) -> None:
    """The library takes as many bytes as a prefix has from what is joined to a token, whatever they are."""
    for merge in merges if prefix else []:
        right = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not right.startswith(prefix):
            rule = f"which does not begin with 'continuing_subword_prefix', {prefix!r}"
            raise ValueError(f"model: a merge has {right[:60]!r} on its right, {rule}")


def steps_of(content: Mapping[str, Any], stages: Mapping[str, str]) -> list[Any]:
    return [step for stage, members in stages.items() for step in _flat(stage, content.get(stage), members)]


def _flat(stage: str, part: Any, members: str) -> Iterator[Any]:
    match part:
        case None:
            return
        case {"type": "Sequence"}:
            for member in part[members]:
                yield from _flat(stage, member, members)
        case {"type": str()}:
            yield part
        case _:
            raise ValueError(f"{stage}: a step is an object with a 'type', but found {str(part)[:60]!r}")


def _growth(step: Mapping[str, Any]) -> float:
    """How many times longer, at most, a step makes a text of one byte or more."""
    match step:
        case {"type": "Replace", "pattern": pattern, "content": str(new)}:
            return _growth_by_replacing(_width(pattern), _size(new))
        case {"type": "Split", "pattern": pattern}:
            _width(pattern)
            return 1
        case {"type": "Prepend", "prepend": str(new)} | {"type": "Metaspace", "replacement": str(new)}:
            return 1 + _size(new)  # to each piece between added tokens or splits, which can be single bytes
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return _longest_entry(table)
        case {"type": "TemplateProcessing", "single": [*pieces]}:
            return max(1, sum("Sequence" in piece for piece in pieces))
        case {"type": kind} if kind in FIXED_GROWTH:
            return FIXED_GROWTH[kind]
    raise ValueError(f"step {str(step)[:200]} is not known")


def _growth_by_replacing(width: float, size: int) -> float:
    if width == 0:  # between any two characters, and at both ends
        return 1 + 2 * size
    return max(1, size / width)


def _size(text: str) -> int:
    return len(text.encode())


def _longest_entry(table: str) -> int:
    """Sentencepiece's table is the length of its index, the index, then entries that each end in a zero."""
    content = base64.b64decode(table)
    start = 4 + size_of_keys(content)  # as much memory the library takes, whether it is there or not
    return max(1, *map(len, content[start:].split(b"\0")))


def _width(pattern: Any) -> float:
    """The fewest bytes a pattern can match; one that could search without end is refused."""
    match pattern:
        case {"String": str(text)}:
            return _size(text)
        case {"Regex": str(text)}:
            return cost_of_regex(text).width
    raise ValueError(f"pattern {str(pattern)[:60]} must have a 'String' or a 'Regex'")
