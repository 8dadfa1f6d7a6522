"""Text to token ids and back: encode, decode, chat templates, text streamed token by token.

A tokenizer comes from a Hugging Face folder or from a GGUF file's metadata and behaves the same afterwards.
Merging is done by the `tokenizers` library, templates by `jinja2`; both have their only home here.
"""

import codecs
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

# Far above any vocabulary in use: nothing of ours is to be sized by an id of four thousand million.
MAX_VOCAB_SIZE = 1 << 24

# The special tokens that have a role, under the names configuration files and chat templates give them.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A tokenizer file, a chat template or an input to them that cannot be used, and why."""


class Tokenizer:
    """Encodes and decodes as the model was trained to read; made by `from_folder` or `from_gguf`."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        roles: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
    ) -> None:
        self._library = library
        self._plain_library = _with_special_tokens_as_text(library)
        self._added_tokens = library.get_added_tokens_decoder()
        self._spelling = _spelling_of(library)
        self._roles = roles
        self.special_token_ids = frozenset(i for i, token in self._added_tokens.items() if token.special)
        self.vocab_size = _vocab_size(library)
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Load tokenizer.json, which says all about encoding, and the names in the files beside it."""
        folder = Path(path)
        library = _read_library(folder / "tokenizer.json")
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        roles = _roles_in(config)
        _mark_special(library, roles.values())
        _try_out(library, str(folder / "tokenizer.json"))
        return cls(library, roles, _eos_ids_in(folder, library, roles), _template_in(folder, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """Build from the `tokenizer.*` entries of a GGUF file's metadata, each of them checked."""
        vocabulary = GgufVocabulary(metadata)
        with _errors_of("GGUF tokenizer"):
            library = vocabulary.build_library()
        _try_out(library, "GGUF tokenizer")
        return cls(library, vocabulary.roles, vocabulary.eos_token_ids, vocabulary.chat_template)

    @property
    def bos_token_id(self) -> int | None:
        return self._library.token_to_id(self._roles["bos_token"]) if "bos_token" in self._roles else None

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """The token ids of text, framed by BOS and EOS where the model asks for them.

        As in Hugging Face tokenizers, a special token written in the text ("<|im_end|>") becomes that token;
        with allow_special=False it stays plain text. A text that already begins with BOS gets no second one.
        """
        library = self._library if allow_special else self._plain_library
        ids = _encode(library, text, add_special_tokens)
        has_two_bos = add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id
        return ids[1:] if has_two_bos else ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token_ids; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return "".join(map(detokenizer.add, token_ids)) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, which may be only a part of a character."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        token = self._library.id_to_token(token_id)
        if token is None:  # a hole: added tokens may leave ids unused
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
        _check_messages(messages)
        if self.chat_template is None:
            raise TokenizerError("the model has no chat template; complete plain text or take a chat model")
        with _errors_of("chat template"):
            variables = {"tools": None, "documents": None, **self._roles, **template_variables}
            # Through JSON, so that no object with methods of its own reaches the sandbox.
            plain = json.loads(json.dumps({**variables, "messages": messages}))
            return self._compiled_template.render(plain, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **template_variables: object,
    ) -> list[int]:
        """The token ids of a conversation, with the BOS its template writes and no other.

        Only the template makes special tokens: written inside a message they stay plain text, so that nobody
        can end a turn or speak in another role from within one.
        """
        text = self.apply_chat_template(messages, add_generation_prompt, **template_variables)
        marker = _unused_character(text)
        marked = [_break_up(message, self._special_pattern, marker) for message in messages]
        if marked == list(messages):
            return self.encode(text, add_special_tokens=False)
        text = self.apply_chat_template(marked, add_generation_prompt, **template_variables)
        return self._encode_marked(text, marker)

    def _encode_marked(self, text: str, marker: str) -> list[int]:
        """Special tokens of text as such, all between them as plain text without its markers."""
        ids = []
        for position, piece in enumerate(self._special_pattern.split(text)):
            is_special = position % 2 == 1  # the pattern is one group, so its matches stand between the rest
            ids += self.encode(piece.replace(marker, ""), add_special_tokens=False, allow_special=is_special)
        return ids

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        specials = (self._added_tokens[i].content for i in self.special_token_ids)
        longest_first = sorted(specials, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @functools.cached_property
    def _compiled_template(self) -> jinja2.Template:
        return _chat_environment().from_string(self.chat_template or "")


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


def _encode(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if not isinstance(text, str):
        raise TokenizerError(f"encode takes a str, but got {type(text).__name__}")
    with _errors_of("encode"):
        text.encode()  # half a surrogate pair: Python says where, the library only that it is no text
        return list(library.encode(text, add_special_tokens=add_special_tokens).ids)


def _try_out(library: tokenizers.Tokenizer, source: str) -> None:
    """Encode once, so that a file whose parts do not fit together is refused now and not in a request."""
    library.no_truncation()
    library.no_padding()
    with _errors_of(source):
        library.encode("try out")


def _vocab_size(library: tokenizers.Tokenizer) -> int:
    size = max(library.get_vocab().values(), default=-1) + 1
    if size > MAX_VOCAB_SIZE:
        raise TokenizerError(f"vocabulary: token id {size - 1} found, but ids must be below {MAX_VOCAB_SIZE}")
    return size


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
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


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
    raise TokenizerError(f"decoder step {step!r} is not known; byte-level and sentencepiece decoders are")


# --- Chat templates -----------------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here only what stands in it counts."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line_number)


def _chat_environment() -> jinja2.Environment:
    """The one place a template environment is made: templates come with the model and are not trusted."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja's own filter escapes <, >, & and ' for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise TokenizerError(
            f"messages must be a list of at least one message, but got {str(messages)[:60]!r}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TokenizerError(f"messages[{index}] must be a dict, but is a {type(message).__name__}")
        for key in ("role", "content"):
            found = type(message.get(key)).__name__
            if not isinstance(message.get(key), str):
                raise TokenizerError(f"messages[{index}][{key!r}] must be a string, but is a {found}")


def _unused_character(text: str) -> str:
    used = set(text)
    return next(chr(code) for code in range(0xE000, 0x110000) if chr(code) not in used)


def _break_up(value: Any, pattern: re.Pattern[str], marker: str) -> Any:
    """The same data with a marker inside every match of pattern, so that nothing matches any more."""
    match value:
        case str():
            return pattern.sub(lambda match: match[0][0] + marker + match[0][1:], value)
        case dict():
            return {key: _break_up(item, pattern, marker) for key, item in value.items()}
        case list() | tuple():
            return [_break_up(item, pattern, marker) for item in value]
    return value


# --- A Hugging Face folder ----------------------------------------------------------------------------------


def _read_library(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise TokenizerError(f"{path} does not exist; transformers' tokenizer.save_pretrained writes one")
    with _errors_of(str(path)):
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file."""
    if not path.is_file():
        return {}
    with _errors_of(str(path)):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold an object, but holds a {type(content).__name__}")
    return content


def _roles_in(config: Mapping[str, Any]) -> dict[str, str]:
    """A role's token is written as its text, or as an object with the text under "content"."""
    roles = {}
    for role in ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and not isinstance(text, str):
            raise TokenizerError(f"tokenizer_config.json: {role!r} must be a string, but is {text!r}")
        if text:
            roles[role] = text
    return roles


def _eos_ids_in(folder: Path, library: tokenizers.Tokenizer, roles: Mapping[str, str]) -> tuple[int, ...]:
    """The tokenizer's EOS first, then those that the generation settings, or else the model's, name."""
    own = library.token_to_id(roles["eos_token"]) if "eos_token" in roles else None
    if own is None and "eos_token" in roles:
        raise TokenizerError(f"{folder}: 'eos_token' {roles['eos_token']!r} is not in tokenizer.json")
    settings = _read_json(folder / "config.json") | _read_json(folder / "generation_config.json")
    named = settings.get("eos_token_id")
    ids = [own, *(named if isinstance(named, list) else [named])]
    for token_id in ids:
        if token_id is not None and (type(token_id) is not int or token_id < 0):
            raise TokenizerError(f"{folder}: 'eos_token_id' must be token ids, but has {token_id!r}")
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _template_in(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    with _errors_of(f"{folder}: 'chat_template'"):
        template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(template, list):  # several, each with a name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if not isinstance(template, str | None):
            raise TypeError(f"must be a string, but is a {type(template).__name__}")
    return template


# --- GGUF metadata ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSplit:
    """How a family of models cuts text into words before merging, and what else its name implies."""

    steps: Sequence[pre_tokenizers.PreTokenizer]
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    adds_bos: bool = False


def _isolate(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


_TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

# Llama 3 and Qwen 2 differ in nothing but how many digits make a word.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

# The known values of tokenizer.ggml.pre: "default" is GGUF's own, the others are as in their tokenizer.json.
TEXT_SPLITS = {
    "default": TextSplit([*map(_isolate, _DEFAULT), _TO_BYTES]),
    "gpt-2": TextSplit([_GPT2_WORDS]),
    "smollm": TextSplit([pre_tokenizers.Digits(individual_digits=True), _GPT2_WORDS]),
    "llama-bpe": TextSplit([_isolate(_LLAMA3), _TO_BYTES], ignore_merges=True, adds_bos=True),
    "qwen2": TextSplit([_isolate(_QWEN2), _TO_BYTES], normalizer=normalizers.NFC()),
    "tekken": TextSplit([_isolate(_TEKKEN), _TO_BYTES], ignore_merges=True, adds_bos=True),
}

# The values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Cutting a token in all places costs its length squared; no real sentencepiece token comes near this.
MAX_PIECE_LENGTH = 512


class GgufVocabulary:
    """The `tokenizer.*` entries of GGUF metadata, checked, and the library's tokenizer built from them."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self._kind = self._one_of("ggml.model", ["gpt2", "llama"])
        self._tokens = self._array("ggml.tokens", lambda v: isinstance(v, str) and v, "a non-empty string")
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self._types = self._token_types()
        self._check_tokens()
        self.roles = self._find_roles()
        self.eos_token_ids = tuple(dict.fromkeys(self._token_ids("eos", "eot")))
        self.chat_template = self._entry("chat_template", lambda v: isinstance(v, str | None), "text")

    def build_library(self) -> tokenizers.Tokenizer:
        library = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        library.add_tokens(self._added_tokens())
        library.post_processor = self._frame()
        return library

    def _frame(self) -> processors.PostProcessor:
        """BOS before and EOS after a text, where the file asks for them."""
        adds_bos = self._kind == "llama" or self._text_split().adds_bos
        bos = [self.roles["bos_token"]] if self._asks_for("bos", adds_bos) else []
        eos = [self.roles["eos_token"]] if self._asks_for("eos", False) else []
        ids = [(token, self._ids[token]) for token in bos + eos]
        return processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=ids)

    def _asks_for(self, role: str, default: bool) -> bool:
        return self._flag(f"add_{role}_token", default) and f"{role}_token" in self.roles

    def _byte_level(self) -> tokenizers.Tokenizer:
        split = self._text_split()
        model = models.BPE(vocab=self._ids, merges=self._merges(), ignore_merges=split.ignore_merges)
        library = tokenizers.Tokenizer(model)
        library.normalizer = split.normalizer
        library.pre_tokenizer = pre_tokenizers.Sequence(list(split.steps))
        library.decoder = decoders.ByteLevel()
        return library

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        merges = self._merges() if "tokenizer.ggml.merges" in self._metadata else self._merges_by_score()
        unknown = self.roles.get("unk_token")
        model = models.BPE(self._ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        library = tokenizers.Tokenizer(model)
        has_prefix = self._flag("add_space_prefix", True)
        prepend = [normalizers.Prepend("▁")] if has_prefix else []
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        library.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        library.decoder = decoders.Sequence(to_text)
        return library

    def _added_tokens(self) -> list[AddedToken]:
        """What is recognised whole in a text: control tokens, which are special, and user-defined ones."""
        named = self._token_ids("bos", "eos", "eot")
        added = []
        for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            is_special = kind in (UNKNOWN, CONTROL) or index in named
            if is_special or kind == USER_DEFINED:
                added.append(AddedToken(token, special=is_special, normalized=False))
        return added

    def _merges(self) -> list[tuple[str, str]]:
        pairs = []
        for index, merge in enumerate(self._array("ggml.merges", lambda v: isinstance(v, str), "a string")):
            left, _, right = merge.partition(" ")
            for token in (left, right, left + right):
                if token not in self._ids:
                    raise TokenizerError(f"tokenizer.ggml.merges[{index}] = {merge!r}: {token!r} is no token")
            pairs.append((left, right))
        return pairs

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Sentencepiece joins the neighbours whose union scores best: each cut of each token, best first."""
        scores = self._per_token("ggml.scores", lambda v: type(v) is float and math.isfinite(v), "a float")
        pieces = {token: scores[index] for token, index in self._ids.items() if self._types[index] == NORMAL}
        ranked = []
        for piece, score in pieces.items():
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in pieces and right in pieces:
                    ranked.append((-score, -cut, left, right))
        ranked.sort(key=lambda entry: entry[:2])
        return [(left, right) for _, _, left, right in ranked]

    def _token_types(self) -> list[int]:
        if "tokenizer.ggml.token_type" not in self._metadata:
            return [NORMAL] * len(self._tokens)
        return self._per_token("ggml.token_type", lambda v: type(v) is int and 1 <= v <= BYTE, "1 to 6")

    def _check_tokens(self) -> None:
        for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if self._ids[token] != index:
                raise self._token_error(index, f"which is also token {self._ids[token]}")
            if kind == BYTE and not BYTE_TOKEN.fullmatch(token):
                raise self._token_error(index, "but a byte token is <0x00> to <0xFF>")
            if self._kind == "llama" and len(token) > MAX_PIECE_LENGTH:
                raise self._token_error(index, f"but a token has at most {MAX_PIECE_LENGTH} characters")

    def _token_error(self, index: int, rule: str) -> TokenizerError:
        return TokenizerError(f"tokenizer.ggml.tokens[{index}] is {self._tokens[index][:60]!r}, {rule}")

    def _find_roles(self) -> dict[str, str]:
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        return {role: self._tokens[i] for role, name in names.items() for i in self._token_ids(name)}

    def _token_ids(self, *names: str) -> list[int]:
        """The ids of those roles that the file names."""
        size = len(self._tokens)
        entries = (f"ggml.{name}_token_id" for name in names)
        present = [entry for entry in entries if f"tokenizer.{entry}" in self._metadata]
        rule = f"a token id below {size}"
        return [self._entry(entry, lambda v: type(v) is int and 0 <= v < size, rule) for entry in present]

    def _text_split(self) -> TextSplit:
        return TEXT_SPLITS[self._one_of("ggml.pre", list(TEXT_SPLITS), default="default")]

    def _one_of(self, name: str, known: list[str], default: str | None = None) -> str:
        return str(self._entry(name, lambda v: v in known, f"one of {', '.join(known)}", default))

    def _flag(self, name: str, default: bool) -> bool:
        return bool(self._entry(f"ggml.{name}", lambda v: isinstance(v, bool), "true or false", default))

    def _per_token(self, name: str, is_valid: Callable[[Any], object], rule: str) -> list[Any]:
        values = self._array(name, is_valid, rule)
        if len(values) != len(self._tokens):
            raise TokenizerError(f"tokenizer.{name} has {len(values)} entries for {len(self._tokens)} tokens")
        return values

    def _array(self, name: str, is_valid: Callable[[Any], object], rule: str) -> list[Any]:
        values = self._entry(name, lambda v: isinstance(v, list | tuple) and v, "a non-empty array")
        for index, value in enumerate(values):
            if not is_valid(value):
                raise TokenizerError(f"tokenizer.{name}[{index}] is {value!r}, but must be {rule}")
        return list(values)

    def _entry(self, name: str, is_valid: Callable[[Any], object], rule: str, default: object = None) -> Any:
        value = self._metadata.get(f"tokenizer.{name}", default)
        if not is_valid(value):
            raise TokenizerError(f"tokenizer.{name} is {str(value)[:60]!r}, but must be {rule}")
        return value
