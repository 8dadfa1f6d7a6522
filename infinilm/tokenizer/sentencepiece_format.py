"""A sentencepiece model, tokenizer.model: what its protobuf says, and whether that can be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Self

from infinilm.tokenizer.pieces import BYTE, NORMAL, UNKNOWN, UNUSED, check_pieces
from infinilm.tokenizer.protobuf import FLOAT, SIZED, ProtobufReader
from infinilm.tokenizer.spelling import BYTE_TOKEN

# The largest there are: 5 MB, 262,144 pieces, and a table of half a megabyte.
MAX_BYTES = 1 << 24
MAX_PIECES = 1 << 19
MAX_FIELDS = 1 << 21
MAX_TABLE_BYTES = 1 << 21

UNIGRAM, BPE = 1, 2

# Its messages, as far as they matter here.
PIECE = {1: ("text", str), 2: ("score", float), 3: ("kind", int)}
TRAINER = {
    3: ("model_type", int),
    24: ("treat_whitespace_as_suffix", bool),
    35: ("byte_fallback", bool),
    41: ("bos_id", int),
    42: ("eos_id", int),
    43: ("pad_id", int),
}
NORMALIZER = {
    2: ("precompiled_charsmap", bytes),
    3: ("add_dummy_prefix", bool),
    4: ("remove_extra_whitespaces", bool),
    5: ("escape_whitespaces", bool),
}

Piece = tuple[str, float, int]  # text, score, kind


@dataclass(frozen=True)
class SentencePieceFile:
    """What a model file says, checked; a token's id is its place."""

    tokens: list[str]
    scores: list[float]
    kinds: list[int]
    is_unigram: bool
    byte_fallback: bool
    ids: Mapping[str, int]  # of BOS, EOS and padding, where it has them
    table: bytes  # of characters to write otherwise
    adds_prefix: bool
    removes_extra_spaces: bool

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        pieces, trainer, normalizer, denormalizer = _read_model(raw)
        _check_support(trainer, normalizer, denormalizer)
        tokens, scores, kinds = (
            (list(column) for column in zip(*pieces, strict=True)) if pieces else ([], [], [])
        )
        byte_fallback = trainer.get("byte_fallback", False)
        _check_tokens(tokens, kinds, byte_fallback)
        return cls(
            tokens,
            scores,
            kinds,
            is_unigram=trainer.get("model_type", UNIGRAM) == UNIGRAM,
            byte_fallback=byte_fallback,
            ids=_role_ids(trainer, len(tokens)),
            table=normalizer.get("precompiled_charsmap", b""),
            adds_prefix=normalizer.get("add_dummy_prefix", True),
            removes_extra_spaces=normalizer.get("remove_extra_whitespaces", True),
        )


def _read_model(raw: bytes) -> tuple[list[Piece], dict[str, Any], dict[str, Any], dict[str, Any]]:
    pieces: list[Piece] = []
    trainer: dict[str, Any] = {}
    normalizer: dict[str, Any] = {}
    denormalizer: dict[str, Any] = {}
    specs = {2: (trainer, TRAINER), 3: (normalizer, NORMALIZER), 5: (denormalizer, NORMALIZER)}
    reader = ProtobufReader(MAX_FIELDS)
    for number, kind, value in reader.fields(raw):
        if number == 1 and kind == SIZED:
            pieces.append(_read_piece(reader, value, len(pieces)))
        elif number in specs and kind == SIZED:
            found, schema = specs[number]
            found |= reader.message(value, schema)
    return pieces, trainer, normalizer, denormalizer


def _read_piece(reader: ProtobufReader, raw: bytes, index: int) -> Piece:
    if index >= MAX_PIECES:
        raise ValueError(f"has more than {MAX_PIECES} pieces")
    text, score, kind = _read_usual_piece(raw) or _read_any_piece(reader, raw)
    if not text or not math.isfinite(score) or not NORMAL <= kind <= BYTE:
        found = f"piece {index} has text {short(text)}, score {score} and kind {kind}"
        raise ValueError(f"{found}; but a piece has a text, a finite score and a kind from 1 to 6")
    return text, score, kind


def _read_usual_piece(raw: bytes) -> Piece | None:
    """A piece whose fields are in order and short, which nearly all are: there are a quarter of a million."""
    end = 2 + raw[1] if raw[:1] == b"\x0a" and len(raw) > 1 else len(raw)
    if end > 129 or raw[end : end + 1] != b"\x15":
        return None
    match len(raw) - end:
        case 5:
            return str(raw[2:end], "utf-8"), FLOAT.unpack_from(raw, end + 1)[0], NORMAL
        case 7 if raw[end + 5] == 0x18 and raw[end + 6] < 0x80:
            return str(raw[2:end], "utf-8"), FLOAT.unpack_from(raw, end + 1)[0], raw[end + 6]
    return None


def _read_any_piece(reader: ProtobufReader, raw: bytes) -> Piece:
    piece: dict[str, Any] = {"text": "", "score": 0.0, "kind": NORMAL}
    piece |= reader.message(raw, PIECE)
    return piece["text"], piece["score"], piece["kind"]


def _check_support(trainer: dict[str, Any], normalizer: dict[str, Any], denormalizer: dict[str, Any]) -> None:
    kind = trainer.get("model_type", UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        name = {3: "word", 4: "char"}.get(kind, str(kind))
        raise ValueError(f"sentencepiece models of type {name} are not supported; unigram and bpe are")
    unsupported = {
        "treat_whitespace_as_suffix": trainer.get("treat_whitespace_as_suffix", False),
        "escape_whitespaces = false": not normalizer.get("escape_whitespaces", True),
        "a table for decoding": bool(denormalizer.get("precompiled_charsmap")),
    }
    for name, is_asked in unsupported.items():
        if is_asked:
            raise ValueError(f"{name} is not supported; transformers may write a tokenizer.json of the model")
    size = len(normalizer.get("precompiled_charsmap", b""))
    if size > MAX_TABLE_BYTES:
        raise ValueError(f"its table of characters has {size} bytes, more than {MAX_TABLE_BYTES}")


def _check_tokens(tokens: list[str], kinds: list[int], byte_fallback: bool) -> None:
    ids = {token: index for index, token in enumerate(tokens)}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if ids[token] != index:
            raise ValueError(f"piece {index} is {short(token)}, which is also piece {ids[token]}")
        if kind == BYTE and not BYTE_TOKEN.fullmatch(token):
            raise ValueError(f"piece {index} is {short(token)}, but a byte is <0x00> to <0xFF>")
        if kind == UNUSED:
            raise ValueError(f"piece {index}, {short(token)}, is marked as unused, which is not supported")
    if kinds.count(UNKNOWN) != 1:
        raise ValueError(f"has {kinds.count(UNKNOWN)} pieces for what is unknown, but must have one")
    num_bytes = kinds.count(BYTE)
    if num_bytes != (256 if byte_fallback else 0):
        raise ValueError(f"has {num_bytes} pieces for bytes, but 'byte_fallback' is {byte_fallback}")
    check_pieces(tokens)


def _role_ids(trainer: dict[str, Any], num_tokens: int) -> dict[str, int]:
    defaults = {"bos_id": 1, "eos_id": 2, "pad_id": -1}
    found = {
        f"{name.removesuffix('_id')}_token": trainer.get(name, default) for name, default in defaults.items()
    }
    return {role: token_id for role, token_id in found.items() if 0 <= token_id < num_tokens}
