"""A vocabulary from the `tokenizer.*` metadata of a GGUF file: every entry checked, then built."""

import math
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Any, TypeGuard

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from infinilm.tokenizer.added_tokens import check_added
from infinilm.tokenizer.error import TokenizerError
from infinilm.tokenizer.pieces import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    check_pieces,
    merges_by_score,
)
from infinilm.tokenizer.spelling import BYTE_TOKEN
from infinilm.tokenizer.text_splits import TEXT_SPLITS, TextSplit

# Tokens that end an answer, by what they are called: files name one of them, or the end of a text alone, or
# the end of a turn alone, though a model may write either.
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",  # but not </s>, which Gemma has for a tag of HTML
)
# Where a turn has several messages, <|end|> ends one of them.
ENDS_OF_MESSAGES = {"<|return|>": "<|end|>"}

# Models whose special tokens take the white space behind them, but for some. Their files do not say so.
STRIPPING = {"phi3": ("<unk>", "<s>", "<|endoftext|>")}


class GgufVocabulary:
    """The `tokenizer.*` entries of GGUF metadata, checked, and the library's tokenizer built from them."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self._kind = self._one_of("ggml.model", ["gpt2", "llama"])
        self._tokens = self._array("ggml.tokens", lambda v: isinstance(v, str) and v, "a non-empty string")
        self._types = self._token_types()
        self._spell_spaces()
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        self._check_tokens()
        self.roles = self._find_roles()
        self.eos_token_ids = tuple(
            dict.fromkeys([*self._token_ids("eos", "eot", "eom"), *self._ends_by_name()])
        )
        self.chat_template, self.tool_template = (
            self._entry(name, lambda v: isinstance(v, str | None), "text")
            for name in ("chat_template", "chat_template.tool_use")
        )

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
        named = {*self._token_ids("bos"), *self.eos_token_ids}
        added = []
        for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            is_special = kind in (UNKNOWN, CONTROL) or index in named
            if is_special or kind == USER_DEFINED:
                # Of Phi-3's tokens that are not special, "</s>" alone does so too.
                strips = (is_special or token == "</s>") and self._strips_behind(token)
                added.append(AddedToken(token, special=is_special, normalized=False, rstrip=strips))
        check_added([token.content for token in added])
        return added

    def _ends_by_name(self) -> list[int]:
        """Whatever their type: there are files that have them as normal tokens, which no text could hold."""
        found = [token for token in ENDS if token in self._ids]
        inner = [ENDS_OF_MESSAGES.get(token) for token in found]
        return [self._ids[token] for token in found if token not in inner]

    def _strips_behind(self, token: str) -> bool:
        others = STRIPPING.get(str(self._metadata.get("general.architecture")))
        return self._kind == "llama" and others is not None and token not in others

    def _merges(self) -> Sequence[tuple[str, str]]:
        ids, merges = self._ids, self._array("ggml.merges", lambda v: isinstance(v, str), "a string")
        for index, merge in enumerate(merges):
            left, _, right = merge.partition(" ")
            if left not in ids or right not in ids or left + right not in ids:
                token = next(token for token in (left, right, left + right) if token not in ids)
                raise TokenizerError(f"tokenizer.ggml.merges[{index}] = {merge!r}: {token!r} is no token")
        return Pairs(merges)

    def _merges_by_score(self) -> list[tuple[str, str]]:
        scores = self._per_token("ggml.scores", lambda v: type(v) is float and math.isfinite(v), "a float")
        normal = (index for index, kind in enumerate(self._types) if kind == NORMAL)
        return merges_by_score({self._tokens[index]: scores[index] for index in normal})

    def _token_types(self) -> list[int]:
        if "tokenizer.ggml.token_type" not in self._metadata:
            return [NORMAL] * len(self._tokens)
        return self._per_token("ggml.token_type", lambda v: type(v) is int and 1 <= v <= BYTE, "1 to 6")

    def _spell_spaces(self) -> None:
        """What is found whole is found before spaces become signs: in older files such tokens have signs."""
        for index, kind in enumerate(self._types):
            if kind == USER_DEFINED and self._kind == "llama":
                self._tokens[index] = self._tokens[index].replace("▁", " ")

    def _check_tokens(self) -> None:
        for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if self._ids[token] != index:
                raise self._token_error(index, f"which is also token {self._ids[token]}")
            if kind == BYTE and not BYTE_TOKEN.fullmatch(token):
                raise self._token_error(index, "but a byte token is <0x00> to <0xFF>")
        if self._kind == "llama":
            check_pieces(self._tokens)

    def _token_error(self, index: int, rule: str) -> TokenizerError:
        return TokenizerError(f"tokenizer.ggml.tokens[{index}] is {short(self._tokens[index])}, {rule}")

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
        return str(
            self._entry(
                name, lambda v: isinstance(v, str) and v in known, f"one of {', '.join(known)}", default
            )
        )

    def _flag(self, name: str, default: bool) -> bool:
        return bool(self._entry(f"ggml.{name}", lambda v: isinstance(v, bool), "true or false", default))

    def _per_token(self, name: str, is_valid: Callable[[Any], object], rule: str) -> list[Any]:
        found, size = self._metadata.get(f"tokenizer.{name}"), len(self._tokens)
        if _is_array(found) and len(found) != size:  # before it is made a list
            raise TokenizerError(f"tokenizer.{name} has {len(found)} entries for {size} tokens")
        return self._array(name, is_valid, rule)

    def _array(self, name: str, is_valid: Callable[[Any], object], rule: str) -> list[Any]:
        found = self._entry(name, lambda v: _is_array(v) and len(v), "a non-empty array")
        values = found.tolist() if isinstance(found, np.ndarray) else list(found)
        for index, value in enumerate(values):
            if not is_valid(value):
                raise TokenizerError(f"tokenizer.{name}[{index}] is {short(value)}, but must be {rule}")
        return values

    def _entry(self, name: str, is_valid: Callable[[Any], object], rule: str, default: object = None) -> Any:
        value = self._metadata.get(f"tokenizer.{name}", default)
        if not is_valid(value):
            raise TokenizerError(f"tokenizer.{name} is {short(value)}, but must be {rule}")
        return value


class Pairs(Sequence[tuple[str, str]]):
    """Merges as the library takes them, each made when it is asked for: of some vocabularies there are half a
    million, and Python keeps the memory of such crowds."""

    def __init__(self, merges: Sequence[str]) -> None:
        self._merges = merges

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: int) -> tuple[str, str]:  # type: ignore[override]
        left, _, right = self._merges[index].partition(" ")
        return left, right


def _is_array(value: object) -> TypeGuard[Sequence[Any] | np.ndarray]:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
