"""Text to token ids and back: encode, decode, chat templates, text streamed token by token.

A tokenizer comes from a Hugging Face folder or from a GGUF file's metadata and behaves the same afterwards.
Merging is done by the `tokenizers` library, templates by `jinja2`; both have their only home here.
"""

import codecs
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from infinilm.folder import Folder
from infinilm.tokenizer.bounds import check_bounds
from infinilm.tokenizer.chat import Renderer, break_up, check_messages, unused_character, with_content
from infinilm.tokenizer.error import BYTE_TOKEN, TokenizerError
from infinilm.tokenizer.gguf import GgufVocabulary
from infinilm.tokenizer.normalizer import Normalizer, any_token
from infinilm.tokenizer.sentencepiece import SentencePieceVocabulary
from infinilm.tokenizer.sentencepiece_format import MAX_BYTES as MAX_SENTENCEPIECE_BYTES
from infinilm.tokenizer.sentencepiece_format import SentencePieceFile

__all__ = ["Detokenizer", "Tokenizer", "TokenizerError"]

# Texts come one by one: a pool of threads would serve nothing, and the library warns of it in every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Far above any vocabulary in use: nothing of ours is to be sized by an id of four thousand million.
MAX_VOCAB_SIZE = 1 << 24
# Above the largest there are: 33 MB, and 1.4 million values for 260,000 tokens and their merges.
MAX_TOKENIZER_BYTES = 1 << 26
MAX_TOKENIZER_VALUES = 1 << 21
MAX_NAMES_BYTES = 1 << 22
MAX_TEMPLATE_BYTES = 1 << 20

# The special tokens that have a role, under the names configuration files and chat templates give them.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes and decodes as the model was trained to read; made by `from_folder` or `from_gguf`."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        roles: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
        normalizer: Normalizer | None = None,
    ) -> None:
        self._library = library
        self._plain_library = _with_special_tokens_as_text(library)
        self._added_tokens = library.get_added_tokens_decoder()
        self._spelling = _spelling_of(library)
        self._roles = roles
        self._normalizer = normalizer
        self.special_token_ids = frozenset(i for i, token in self._added_tokens.items() if token.special)
        self.vocab_size = _vocab_size(library)
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Load tokenizer.json, or else tokenizer.model, and the names in the files beside it."""
        folder = Folder(Path(path), TokenizerError)
        with _errors_of(str(path)):
            names = folder.read_object("special_tokens_map.json", MAX_NAMES_BYTES) or {}
            config = names | (folder.read_object("tokenizer_config.json", MAX_NAMES_BYTES) or {})
            found = _read_vocabulary(folder, config)
            _mark_special(found.library, found.roles.values())
            _try_out(found.library, str(found.path))
            eos_ids, template = _eos_ids_in(folder, found), _template_in(folder, config)
            return cls(found.library, found.roles, eos_ids, template, found.normalizer)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """Build from the `tokenizer.*` entries of a GGUF file's metadata, each of them checked."""
        with _errors_of("GGUF tokenizer"):
            vocabulary = GgufVocabulary(metadata)
            library, roles = vocabulary.build_library(), vocabulary.roles
            eos_token_ids, chat_template = vocabulary.eos_token_ids, vocabulary.chat_template
            del vocabulary  # hundreds of thousands of objects, whose memory others would keep a few of
            _try_out(library, "GGUF tokenizer")
            return cls(library, roles, eos_token_ids, chat_template)

    @property
    def bos_token_id(self) -> int | None:
        return self._library.token_to_id(self._roles["bos_token"]) if "bos_token" in self._roles else None

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """The token ids of text, framed by BOS and EOS where the model asks for them.

        As in Hugging Face tokenizers, a special token written in the text ("<|im_end|>") becomes that token;
        with allow_special=False it stays plain text. A text that already begins with BOS gets no second one.
        """
        ids = self._encode_stretch(text, add_special_tokens, allow_special)
        has_two_bos = add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id
        return ids[1:] if has_two_bos else ids

    def _encode_stretch(
        self, text: str, add_special_tokens: bool, allow_special: bool, is_start: bool = True
    ) -> list[int]:
        library = self._library if allow_special else self._plain_library
        with _errors_of("encode"):
            _check_text(text)
            if self._normalizer is not None:
                kept_whole = self._added_pattern if allow_special else self._plain_added_pattern
                text = self._normalizer.rewrite_between(kept_whole, text, is_start)
            # As a batch of one, for which the library lets go of the GIL: a long text takes seconds.
            (found,) = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(found.ids)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token_ids; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return "".join(map(detokenizer.add, token_ids)) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, which may be only a part of a character.

        An id that is no token stands for none: added tokens leave holes, and models have rows of padding.
        """
        if token_id < 0:
            raise TokenizerError(f"token id {token_id} is negative")
        token = self._library.id_to_token(token_id) if token_id < self.vocab_size else None
        if token is None:
            return b""
        return self._spelling.to_bytes(token, is_added=token_id in self._added_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **template_variables: object,
    ) -> str:
        """The prompt that the model's own template writes for a conversation, as transformers renders it.

        The template sees template_variables by name. Its text has BOS where the model wants it: encode with
        add_special_tokens=False, or use encode_chat.
        """
        check_messages(messages)
        if self.chat_template is None:
            raise TokenizerError("the model has no chat template; complete plain text or take a chat model")
        with _errors_of("chat template"):
            variables = {"tools": None, "documents": None, **self._roles, **template_variables}
            prompted = {"messages": with_content(messages), "add_generation_prompt": add_generation_prompt}
            return self._renderer.render({**variables, **prompted})

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **template_variables: object,
    ) -> list[int]:
        """The token ids of a conversation, with the BOS its template writes and no other.

        Only the template makes special tokens: written inside a message, a tool or a variable they stay plain
        text, so that nobody can end a turn or speak in another role from within one.
        """
        text = self.apply_chat_template(messages, add_generation_prompt, **template_variables)
        marker = unused_character(text)
        given = {**template_variables, "messages": list(messages)}
        marked = break_up(given, self._special_pattern, marker)
        if marked == given:
            return self.encode(text, add_special_tokens=False)
        text = self.apply_chat_template(add_generation_prompt=add_generation_prompt, **marked)
        return self._encode_marked(text, marker)

    def _encode_marked(self, text: str, marker: str) -> list[int]:
        """Special tokens of text as such, all between them as plain text without its markers."""
        ids = []
        for position, piece in enumerate(self._special_pattern.split(text)):
            is_special = position % 2 == 1  # the pattern is one group, so its matches stand between the rest
            ids += self._encode_stretch(piece.replace(marker, ""), False, is_special, is_start=position == 0)
        return ids

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return any_token(self._added_tokens[i] for i in self.special_token_ids)

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """What the library takes out of a text before anything is done to it."""
        return any_token(token for token in self._added_tokens.values() if not token.normalized)

    @functools.cached_property
    def _plain_added_pattern(self) -> re.Pattern[str]:
        tokens = self._added_tokens.values()
        return any_token(token for token in tokens if not token.normalized and not token.special)

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.chat_template or "")


class Detokenizer:
    """Text as its tokens arrive: `add` gives what is complete, `finish` the rest; joined, they are `decode`.

    A character whose bytes are still under way is held back. Work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer._spelling.drops_first_space

    def add(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if text and self._drops_space:
            self._drops_space = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """U+FFFD if the last character never became complete, otherwise nothing."""
        return self._decoder.decode(b"", final=True)


# --- The library --------------------------------------------------------------------------------------------


@contextmanager
def _errors_of(subject: str) -> Iterator[None]:
    """Whatever the Rust library or a template throws becomes TokenizerError, panics included."""
    try:
        yield
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(f"{subject}: {error}") from error
    except BaseException as error:
        # A Rust panic derives from BaseException and its type cannot be imported; Ctrl-C must pass.
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{subject}: the tokenizers library failed: {error}") from error


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"encode takes a str, but got {type(text).__name__}")
    text.encode()  # half a surrogate pair: Python says where, the library only that it is no text


def _try_out(library: tokenizers.Tokenizer, source: str) -> None:
    """Encode once, so that a file whose parts do not fit together is refused now and not in a request."""
    library.no_truncation()
    library.no_padding()
    with _errors_of(source):
        found = library.encode("try out").ids
    if any(library.id_to_token(token_id) is None for token_id in found):  # a frame names its ids itself
        end = _vocab_size(library) - 1
        raise TokenizerError(f"{source}: encodes to token id {max(found)}, but its vocabulary ends at {end}")


def _vocab_size(library: tokenizers.Tokenizer) -> int:
    size = max([_model_size(library), *(i + 1 for i in library.get_added_tokens_decoder())])
    if size > MAX_VOCAB_SIZE:
        raise TokenizerError(f"vocabulary: token id {size - 1} found, but ids must be below {MAX_VOCAB_SIZE}")
    return size


def _model_size(library: tokenizers.Tokenizer) -> int:
    """One more than the last id of the model's own tokens"""
    model, count = library.model, library.get_vocab_size(with_added_tokens=False)
    # As many ids as tokens, from 0 on: none is left for a larger one. The table itself would be copied.
    if all(model.id_to_token(token_id) is not None for token_id in range(count)):
        return count
    return max(library.get_vocab(with_added_tokens=False).values(), default=-1) + 1


def _with_special_tokens_as_text(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second front of the same model, shared and not copied, that reads special tokens as plain text."""
    plain = tokenizers.Tokenizer(library.model)
    plain.normalizer = library.normalizer
    plain.pre_tokenizer = library.pre_tokenizer
    plain.post_processor = library.post_processor
    # All of them and in order, since the library numbers added tokens itself.
    plain.add_tokens([token for _, token in sorted(library.get_added_tokens_decoder().items())])
    plain.encode_special_tokens = True
    return plain


def _mark_special(library: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    new = [text for text in texts if text not in added and library.token_to_id(text) is not None]
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in new])


# --- How tokens are spelled ---------------------------------------------------------------------------------


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


def _spelling_of(library: tokenizers.Tokenizer) -> Spelling:
    if library.decoder is None:  # the library then joins tokens with spaces
        return Spelling(prefix=" ", drops_first_space=True)
    decoder = json.loads(library.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return functools.reduce(_with_decoder_step, steps, Spelling())


def _with_decoder_step(spelling: Spelling, step: dict[str, Any]) -> Spelling:
    match step:
        case {"type": "ByteLevel"}:
            return replace(spelling, is_byte_level=True)
        case {"type": "ByteFallback"}:
            return replace(spelling, has_byte_tokens=True)
        case {"type": "Fuse"}:
            return spelling
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return replace(spelling, drops_first_space=True)
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return replace(spelling, replacements=(*spelling.replacements, (old, new)))
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return replace(spelling, replacements=((mark, " "),), drops_first_space=scheme != "never")
    raise TokenizerError(
        f"decoder step {short(step)} is not known; byte-level and sentencepiece decoders are"
    )


# --- A Hugging Face folder ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Vocabulary:
    """What a folder's file, tokenizer.json or tokenizer.model, says about encoding."""

    path: Path
    library: tokenizers.Tokenizer
    roles: Mapping[str, str]
    normalizer: Normalizer | None = None


def _read_vocabulary(folder: Folder, config: Mapping[str, Any]) -> _Vocabulary:
    roles = _roles_in(config)
    if folder.find("tokenizer.json") is None and folder.find("tokenizer.model") is not None:
        return _read_sentencepiece(folder, config, roles)
    return _Vocabulary(folder.path / "tokenizer.json", _read_json(folder), roles)


def _read_sentencepiece(folder: Folder, config: Mapping[str, Any], roles: Mapping[str, str]) -> _Vocabulary:
    path, raw = folder.path / "tokenizer.model", folder.read("tokenizer.model", MAX_SENTENCEPIECE_BYTES)
    if "added_tokens_decoder" not in config:  # older folders have a file for it
        added = folder.read_object("added_tokens.json", MAX_NAMES_BYTES) or {}
        given = {
            str(token_id): {"content": text, "special": text in roles.values()}
            for text, token_id in added.items()
        }
        config = {**config, "added_tokens_decoder": given}
    with _errors_of(str(path)):
        pieces = SentencePieceVocabulary(SentencePieceFile.parse(raw or b""), config, roles)
        return _Vocabulary(path, pieces.build_library(), pieces.roles, pieces.build_normalizer())


def _read_json(folder: Folder) -> tokenizers.Tokenizer:
    path, raw = folder.path / "tokenizer.json", folder.read("tokenizer.json", MAX_TOKENIZER_BYTES)
    if raw is None:
        raise TokenizerError(
            f"{path} does not exist, nor does a tokenizer.model; "
            "transformers' tokenizer.save_pretrained writes one"
        )
    if raw.count(b",") > MAX_TOKENIZER_VALUES:
        raise TokenizerError(f"{path}: its JSON has more than {MAX_TOKENIZER_VALUES} values")
    with _errors_of(str(path)):
        text = raw.decode("utf-8")
        check_bounds(json.loads(text))
        return tokenizers.Tokenizer.from_str(text)


def _roles_in(config: Mapping[str, Any]) -> dict[str, str]:
    """A role's token is written as its text, or as an object with the text under "content"."""
    roles = {}
    for role in ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and not isinstance(text, str):
            raise TokenizerError(f"tokenizer_config.json: {role!r} must be a string, but is {short(text)}")
        if text:
            roles[role] = text
    return roles


def _eos_ids_in(folder: Folder, found: _Vocabulary) -> tuple[int, ...]:
    """The tokenizer's EOS first, then those that the generation settings, or else the model's, name."""
    eos = found.roles.get("eos_token")
    own = found.library.token_to_id(eos) if eos is not None else None
    if own is None and eos is not None:
        raise TokenizerError(f"{folder.path}: 'eos_token' {short(eos)} is not in {found.path.name}")
    model, generation = (folder.read_object(f"{name}config.json") or {} for name in ("", "generation_"))
    named = (model | generation).get("eos_token_id")
    ids = [own, *(named if isinstance(named, list) else [named])]
    for token_id in ids:
        if token_id is not None and (type(token_id) is not int or not 0 <= token_id < MAX_VOCAB_SIZE):
            raise TokenizerError(
                f"{folder.path}: 'eos_token_id' must be token ids below {MAX_VOCAB_SIZE}, "
                f"but has {short(token_id)}"
            )
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _template_in(folder: Folder, config: Mapping[str, Any]) -> str | None:
    with _errors_of(f"{folder.path}: 'chat_template'"):
        raw = folder.read("chat_template.jinja", MAX_TEMPLATE_BYTES)
        template = _template_beside(folder, config) if raw is None else raw.decode("utf-8")
        if isinstance(template, list):  # several, each with a name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if not isinstance(template, str | None):
            raise TypeError(f"must be a string, but is a {type(template).__name__}")
    return template


def _template_beside(folder: Folder, config: Mapping[str, Any]) -> Any:
    """In the settings, or in the file that a model's processor has for it."""
    if config.get("chat_template") is not None:
        return config["chat_template"]
    return (folder.read_object("chat_template.json", MAX_TEMPLATE_BYTES) or {}).get("chat_template")
