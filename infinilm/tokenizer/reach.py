"""How much of a text a token stands for at most, so that a text can be too long before it is encoded.

It is told only where it follows from the steps of a tokenizer. Many leave something out of a text, of any
length: white space, accents, words that they do not know.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from infinilm.tokenizer.bounds import ENCODING, steps_of
from infinilm.tokenizer.spelling import BYTE_ALPHABET

Step = Mapping[str, Any]

# Characters of a text to one of what becomes of it. Those that Unicode composes were four at most.
FIXED_LOSS = {
    **dict.fromkeys(("NFC", "NFKC"), 4),
    **dict.fromkeys(("NFD", "NFKD", "Lowercase", "Prepend"), 1),
    **dict.fromkeys(("ByteLevel", "Digits", "Metaspace"), 1),
}
CUTS = ("Split", "Digits")  # that leave the bytes of a text as they are
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


@dataclass(frozen=True)
class Reach:
    """What a token of a text stands for, at most"""

    length: float  # in characters; in bytes, where some of them are unknown
    unknown: bytes = b""  # what no token has, and is left out of a text

    def fewest_tokens(self, text: str) -> int:
        known = text.encode().translate(None, self.unknown) if self.unknown else text
        return math.ceil(len(known) / self.length)


def reach_of(library: tokenizers.Tokenizer) -> Reach:
    """Its length is inf where nothing bounds it."""
    steps = _steps(library, "normalizer", "pre_tokenizer")
    unknown = _unknown_bytes(library.model, steps)
    if unknown is None or not all(map(_keeps_text, _steps(library, "post_processor"))):
        return Reach(math.inf)
    own = map(len, library.get_vocab(with_added_tokens=False))
    length = max(1, *_lengths_of_added(library), max(own, default=1))
    return Reach(length * math.prod(map(_loss, steps)), unknown)


def _steps(library: tokenizers.Tokenizer, *stages: str) -> list[Step]:
    parts = {stage: getattr(library, stage) for stage in stages}
    content = {stage: json.loads(part.__getstate__()) for stage, part in parts.items() if part is not None}
    return steps_of(content, {stage: ENCODING[stage] for stage in stages})


def _loss(step: Step) -> float:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
            return max(1, len(old) / len(new))
        case {"type": "Split", "behavior": behavior} if behavior != "Removed":
            return 1
    return FIXED_LOSS.get(step["type"], math.inf)


def _keeps_text(step: Step) -> bool:
    """Whether it only adds to the tokens of a text: a frame may be without any."""
    match step:
        case {"type": "TemplateProcessing", "single": [*pieces]}:
            return any(piece.get("Sequence", {}).get("id") == "A" for piece in pieces)
        case {"type": "ByteLevel"}:
            return True
    return False


def _unknown_bytes(model: models.Model, steps: Sequence[Step]) -> bytes | None:
    """Those that no token has, where all else of a text becomes tokens or parts of them. None where more may
    be left out, or become one token for whatever is not known."""
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    is_byte_level = bool(steps) and steps[-1]["type"] == "ByteLevel"
    if not is_byte_level and not model.byte_fallback:
        return None
    letters = BYTE_ALPHABET if is_byte_level else BYTE_TOKENS
    unknown = bytes(byte for letter, byte in letters.items() if model.token_to_id(letter) is None)
    has_same_bytes = is_byte_level and all(step["type"] in CUTS for step in steps[:-1])
    return unknown if has_same_bytes or not unknown else None


def _lengths_of_added(library: tokenizers.Tokenizer) -> Iterator[float]:
    """Of tokens that are found whole, as they are written or as the normalizer leaves them. Some take all the
    white space beside them."""
    for token in library.get_added_tokens_decoder().values():
        yield math.inf if token.lstrip or token.rstrip else len(token.content.encode())
        if token.normalized and library.normalizer is not None:
            yield len(library.normalizer.normalize_str(token.content))
