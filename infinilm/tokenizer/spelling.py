"""How tokens are spelled: the bytes that each stands for, by itself."""

import functools
import json
import re
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

import tokenizers

from infinilm.tokenizer.error import TokenizerError

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the rest as the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class Spelling:
    """How the bytes of a token follow from the way the vocabulary writes it, each token by itself."""

    is_byte_level: bool = False
    has_byte_tokens: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    drops_first_space: bool = False
    is_joined: bool = False  # a further step sees one text, and no tokens

    def to_bytes(self, token: str, is_added: bool) -> bytes:
        if self.is_byte_level:
            return token.encode() if is_added else _bytes_of_letters(token)
        if self.has_byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (self.prefix + token).encode()


def _bytes_of_letters(token: str) -> bytes:
    try:
        return bytes([BYTE_ALPHABET[letter] for letter in token])
    except KeyError:  # never spelled in bytes: it stands for itself
        return token.encode()


def spelling_of(library: tokenizers.Tokenizer) -> Spelling:
    if library.decoder is None:  # the library then joins tokens with spaces
        return Spelling(prefix=" ", drops_first_space=True)
    decoder = json.loads(library.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return functools.reduce(_with_decoder_step, steps, Spelling())


def _with_decoder_step(spelling: Spelling, step: dict[str, Any]) -> Spelling:
    match step:
        case {"type": "ByteLevel"} if not spelling.replacements:
            return replace(spelling, is_byte_level=True, is_joined=True)
        case {"type": "ByteFallback"} if not spelling.is_joined:
            return replace(spelling, has_byte_tokens=True)
        case {"type": "Fuse"}:
            return replace(spelling, is_joined=True)
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if spelling.is_joined:
            return replace(spelling, drops_first_space=True)
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if not spelling.is_joined:
            return replace(spelling, replacements=(*spelling.replacements, (old, new)))
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if not spelling.is_joined:
            return replace(spelling, replacements=((mark, " "),), drops_first_space=scheme != "never")
    raise TokenizerError(
        f"decoder step {short(step)} is not known in its place; byte-level and sentencepiece decoders are"
    )
