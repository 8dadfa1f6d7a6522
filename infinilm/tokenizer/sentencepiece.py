"""A vocabulary from a sentencepiece model, tokenizer.model, where a folder has no tokenizer.json.

Texts become the tokens that sentencepiece makes of them. What it has no word for, tokens behind the model's
own and special tokens inside a text, is as in transformers, which reads the same settings.
"""

import re
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from infinilm.tokenizer.added_tokens import FLAGS, add_tokens, any_of, check_added, names_given, tokens_given
from infinilm.tokenizer.error import TokenizerError
from infinilm.tokenizer.normalizer import SPACE, CharacterTable, Normalizer
from infinilm.tokenizer.pieces import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    check_tree,
    merges_by_score,
)
from infinilm.tokenizer.sentencepiece_format import SentencePieceFile

# Gemma's, which are pieces like any for sentencepiece; nobody may write them inside a message.
TURNS = {"<start_of_turn>", "<end_of_turn>"}

# Each is tried wherever a text has its first letter.
MAX_RESERVED = 1024


class SentencePieceVocabulary:
    """A model file and the settings beside it, and the library's tokenizer built from both."""

    def __init__(self, file: SentencePieceFile, config: Mapping[str, Any], roles: Mapping[str, str]) -> None:
        self._file = file
        self._config = config
        self._given = tokens_given(config)
        self._named_special = TURNS | names_given(config)
        self._tokens = [
            self._given.get(i, {"content": token})["content"] for i, token in enumerate(file.tokens)
        ]
        self.roles = {role: self._tokens[i] for role, i in file.ids.items()} | dict(roles)
        self._unknown = self._tokens[file.kinds.index(UNKNOWN)]
        self.roles.setdefault("unk_token", self._unknown)

    def build_library(self) -> tokenizers.Tokenizer:
        added = self._added_tokens()
        library = tokenizers.Tokenizer(self._unigram() if self._file.is_unigram else self._bpe())
        library.normalizer = normalizers.Replace(" ", SPACE)
        if self._file.is_unigram:
            library.pre_tokenizer = pre_tokenizers.Split(Regex(self._cuts()), "merged_with_previous")
        library.decoder = self._decoder()
        add_tokens(library, added, "tokenizer.model")
        library.post_processor = self._frame(library)
        return library

    def build_normalizer(self) -> Normalizer:
        """What happens to a text before the library sees it."""
        return Normalizer(
            table=CharacterTable(self._file.table) if self._file.table else None,
            symbols=any_of(self._of_kind(USER_DEFINED) if self._file.table else ()),
            removes_extra_spaces=self._file.removes_extra_spaces,
            adds_prefix=self._adds_prefix(),
            # As transformers once did, and some models were trained with: behind each special token too.
            prefixes_every_stretch=self._flag("legacy", False),
        )

    # The model

    def _bpe(self) -> models.BPE:
        ids = {token: index for index, token in enumerate(self._tokens)}
        scores = {token: self._file.scores[ids[token]] for token in self._of_kind(NORMAL)}
        fallback = self._file.byte_fallback
        merges = merges_by_score(scores)
        return models.BPE(ids, merges, unk_token=self._unknown, fuse_unk=True, byte_fallback=fallback)

    def _unigram(self) -> models.Unigram:
        check_tree(self._tokens)
        scores = list(self._file.scores)
        for index in self._ids_of_kind(USER_DEFINED):  # above all others, which are logarithms of frequencies
            scores[index] = 0.1 * (len(self._tokens[index].encode()) - 1)
        vocabulary = list(zip(self._tokens, scores, strict=True))
        unknown = self._file.kinds.index(UNKNOWN)
        return models.Unigram(vocabulary, unk_id=unknown, byte_fallback=self._file.byte_fallback)

    def _cuts(self) -> str:
        """Behind the first letter of what no text may become: the library would find "<s>" like any piece."""
        reserved = [token for kind in (UNKNOWN, CONTROL) for token in self._of_kind(kind) if len(token) > 1]
        if len(reserved) > MAX_RESERVED:
            raise ValueError(f"has {len(reserved)} control pieces, but at most {MAX_RESERVED} are supported")
        cuts = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in reserved]
        return "|".join([*cuts, r"<(?=0x[0-9A-F]{2}>)"])

    def _decoder(self) -> decoders.Decoder:
        steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
        steps += [decoders.ByteFallback()] if self._file.byte_fallback else []
        steps += [decoders.Fuse()]
        drops_space = self._adds_prefix() or self._file.removes_extra_spaces
        return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if drops_space else [])])

    # The settings

    def _adds_prefix(self) -> bool:
        return self._file.adds_prefix and self._flag("add_prefix_space", True)

    def _frame(self, library: tokenizers.Tokenizer) -> processors.PostProcessor:
        """BOS before and EOS after a text, where the settings ask for them."""
        bos = [self.roles["bos_token"]] if self._asks_for("bos", True) else []
        eos = [self.roles["eos_token"]] if self._asks_for("eos", False) else []
        ids = [(token, library.token_to_id(token)) for token in bos + eos]
        for token, token_id in ids:
            if token_id is None:
                raise TokenizerError(
                    f"{short(token)} is to frame every text, but is no token of tokenizer.model"
                )
        return processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=ids)

    def _asks_for(self, role: str, default: bool) -> bool:
        return self._flag(f"add_{role}_token", default) and f"{role}_token" in self.roles

    def _flag(self, name: str, default: bool) -> bool:
        value = self._config.get(name)
        if value is not None and not isinstance(value, bool):
            raise TokenizerError(
                f"tokenizer_config.json: {name!r} must be true or false, but is {short(value)}"
            )
        return default if value is None else value

    def _added_tokens(self) -> dict[int, AddedToken]:
        """By id, in order"""
        kinds = (UNKNOWN, CONTROL) if self._file.is_unigram else (UNKNOWN, CONTROL, USER_DEFINED)
        ids = {*self._given, *(index for kind in kinds for index in self._ids_of_kind(kind))}
        added = {token_id: self._added_token(token_id) for token_id in sorted(ids)}
        check_added([token.content for token in added.values()])
        return added

    def _added_token(self, token_id: int) -> AddedToken:
        kind = self._file.kinds[token_id] if token_id < len(self._tokens) else None
        given = self._given[token_id] if token_id in self._given else {"content": self._tokens[token_id]}
        flags = {name: given[name] for name in FLAGS if name in given}
        is_named = given["content"] in self._named_special
        flags["special"] = flags.get("special", False) or is_named or kind in (UNKNOWN, CONTROL)
        # Sentencepiece finds its own symbols after the spaces have become signs; "▁▁" is one.
        flags["normalized"] = kind == USER_DEFINED and not flags["special"]
        return AddedToken(given["content"], **flags)

    def _of_kind(self, kind: int) -> Iterable[str]:
        return [self._tokens[index] for index in self._ids_of_kind(kind)]

    def _ids_of_kind(self, kind: int) -> list[int]:
        return [index for index, found in enumerate(self._file.kinds) if found == kind]
