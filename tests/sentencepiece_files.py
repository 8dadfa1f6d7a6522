"""Sentencepiece models for tests: trained by the package, or written field by field as no trainer would."""

import io
import struct
from typing import Any

import sentencepiece

CORPUS = [
    "the quick brown fox 12 jumps over the lazy dog's back, again and again",
    "你好 世界 é ü 😀 a  b   c\td",
    "def f(x): return x ** 2 # <b> </b>",
    "Hello world, this is a test of tokens; and there are many words in it.",
]
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def train(**options: Any) -> bytes:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=file,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return file.getvalue()


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    groups = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def piece(text: str | bytes, score: float = 0.0, kind: int = NORMAL) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return field(1, field(1, raw) + field(2, score) + field(3, kind))


def model_file(*pieces: bytes, trainer: bytes = field(3, 2), normalizer: bytes = b"") -> bytes:
    """A model file, of byte pairs if nothing else is said."""
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer)
