"""Text to token ids and back: encode, decode, chat templates, text streamed token by token.

A tokenizer comes from a Hugging Face folder or from a GGUF file's metadata and behaves the same afterwards.
Merging is done by the `tokenizers` library, templates by `jinja2`; both have their only home here.
"""

import codecs
import functools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from infinicore import _native
from infinicore.checks import integer
from infinilm.folder import Folder
from infinilm.tokenizer.added_tokens import any_of, any_token, names_given
from infinilm.tokenizer.chat import (
    Renderer,
    break_up,
    read_messages,
    unused_character,
    with_content,
    with_thoughts,
    without_marker,
    without_options,
)
from infinilm.tokenizer.error import TokenizerError, TooLong, errors_of
from infinilm.tokenizer.gguf import GgufVocabulary
from infinilm.tokenizer.huggingface import eos_ids_in, read_names, read_vocabulary, templates_in
from infinilm.tokenizer.library import mark_special, try_out, vocab_size, with_special_tokens_as_text
from infinilm.tokenizer.normalizer import Normalizer
from infinilm.tokenizer.reach import Reach, reach_of
from infinilm.tokenizer.spelling import spelling_of

__all__ = ["ChatPrompt", "Detokenizer", "Tokenizer", "TokenizerError", "TooLong"]

# Texts come one by one: a pool of threads would serve nothing, and the library warns of it in every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Characters, for each of which the library takes some hundred bytes. What it has freed would stay with the
# process: gigabytes, after one text that no model can read.
LARGE_TEXT = 1 << 18


class ChatPrompt(list[int]):
    """A conversation as tokens, which an answer follows: a text of its own, whatever the template ends in"""

    def __init__(self, token_ids: Iterable[int], text: str | None = None) -> None:
        super().__init__(token_ids)
        self.text = text  # that the tokens are of


class Encoded(dict[str, Any]):
    """What calling a tokenizer gives: token ids without padding, which need no attention_mask"""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]


class Tokenizer:
    """Encodes and decodes as the model was trained to read; made by `from_folder` or `from_gguf`."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        roles: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
        normalizer: Normalizer | None = None,
        tool_template: str | None = None,
    ) -> None:
        self._library = library
        self._plain_library = with_special_tokens_as_text(library)
        self._added_tokens = library.get_added_tokens_decoder()
        self._spelling = spelling_of(library)
        self._roles = roles
        self._normalizer = normalizer
        self.special_token_ids = frozenset(i for i, token in self._added_tokens.items() if token.special)
        self.vocab_size = vocab_size(library)
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.tool_template = tool_template  # in its place where there are tools
        self._renderers: dict[bool, Renderer] = {}  # for tools or not

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Load tokenizer.json, or else tokenizer.model, and the names in the files beside it."""
        folder = Folder(Path(path), TokenizerError)
        with errors_of(str(path)):
            config = read_names(folder)
            found = read_vocabulary(folder, config)
            mark_special(found.library, {*found.roles.values()}, names_given(config))
            try_out(found.library, str(found.path))
            eos_ids, (template, for_tools) = eos_ids_in(folder, found), templates_in(folder, config)
            return cls(found.library, found.roles, eos_ids, template, found.normalizer, for_tools)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """Build from the `tokenizer.*` entries of a GGUF file's metadata, each of them checked."""
        with errors_of("GGUF tokenizer"):
            vocabulary = GgufVocabulary(metadata)
            library, roles = vocabulary.build_library(), vocabulary.roles
            eos_token_ids, chat_template = vocabulary.eos_token_ids, vocabulary.chat_template
            tool_template = vocabulary.tool_template
            del vocabulary  # hundreds of thousands of objects, whose memory others would keep a few of
            try_out(library, "GGUF tokenizer")
            return cls(library, roles, eos_token_ids, chat_template, tool_template=tool_template)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of_role("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._roles.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The one that is called so; eos_token_ids are all that end a text."""
        return self._id_of_role("eos_token")

    def _id_of_role(self, role: str) -> int | None:
        return self._library.token_to_id(self._roles[role]) if role in self._roles else None

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token such as "<|im_end|>", or of each; unk_token's, or None, for what is no token."""
        if isinstance(tokens, str):
            found = self._library.token_to_id(tokens)
            return self._id_of_role("unk_token") if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> "Encoded":
        """The token ids of a text, or of each of several, in the shape that transformers gives them"""
        if isinstance(text, str):
            return Encoded(input_ids=self.encode(text, add_special_tokens))
        return Encoded(input_ids=[self.encode(one, add_special_tokens) for one in text])

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        allow_special: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The token ids of text, framed by BOS and EOS where the model asks for them.

        As in Hugging Face tokenizers, a special token written in the text ("<|im_end|>") becomes that token;
        with allow_special=False it stays plain text. A text that already begins with BOS gets no second one.
        A long one that is sure to have more than max_tokens is not encoded: TooLong.
        """
        self._check_reach(text, max_tokens)
        ids = self._encode_stretch(text, add_special_tokens, allow_special)
        has_two_bos = add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id
        return ids[1:] if has_two_bos else ids

    def _encode_stretch(
        self, text: str, add_special_tokens: bool, allow_special: bool, is_start: bool = True
    ) -> list[int]:
        library = self._library
        if not allow_special:
            library = self._plain_library if is_start else self._inner_library
        with errors_of("encode"):
            check_text(text)
            if self._normalizer is not None:
                kept_whole = self._added_pattern if allow_special else self._plain_added_pattern
                text = self._normalizer.rewrite_between(kept_whole, text, is_start)
            # As a batch of one, for which the library lets go of the GIL: a long text takes seconds.
            (found,) = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = list(found.ids)
        if len(text) > LARGE_TEXT:
            del found
            _native.release_memory()
        return ids

    def _check_reach(self, text: str, max_tokens: int | None) -> None:
        """TooLong for a text that cannot have so few tokens, unless it is encoded soon in any case."""
        if max_tokens is None or len(text) <= LARGE_TEXT:
            return
        with errors_of("encode"):
            if (fewest := self._reach.fewest_tokens(text)) > max_tokens:
                raise TooLong(fewest, max_tokens)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token_ids; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        # Those of a tensor equal numbers and are found among none.
        ids = [i if isinstance(i, int) else integer("decode", "a token id", i) for i in token_ids]
        return "".join(map(detokenizer.add, ids)) + detokenizer.finish()

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

    def token_text(self, token_id: int) -> str:
        """One token's text as it stands within others: with its first space, and U+FFFD for parts of
        characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **template_variables: object,
    ) -> str:
        """The prompt that the model's own template writes for a conversation, as transformers renders it.

        The template sees template_variables by name. Its text has BOS where the model wants it: encode with
        add_special_tokens=False, or use encode_chat. What transformers takes besides may ask for nothing, as
        tokenize=False does.
        """
        told = read_messages(messages)
        template_variables = without_options(template_variables)
        if self.chat_template is None:
            raise TokenizerError("the model has no chat template; complete plain text or take a chat model")
        with errors_of("chat template"):
            variables = {**self._roles, "tools": None, "documents": None, **template_variables}
            renderer = self._renderer_of(self.tool_template if variables["tools"] is not None else None)
            told = with_thoughts(with_content(told, renderer.template))
            prompted = {"messages": told, "add_generation_prompt": add_generation_prompt}
            return renderer.render({**variables, **prompted})

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
        **template_variables: object,
    ) -> list[int]:
        """The token ids of a conversation, with the BOS its template writes and no other.

        Only the template makes special tokens: written inside a message, a tool or a variable they stay plain
        text, so that nobody can end a turn or speak in another role from within one. max_tokens is as for
        `encode`.
        """
        text = self.apply_chat_template(messages, add_generation_prompt, **template_variables)
        self._check_reach(text, max_tokens)
        marker = unused_character(text)
        given = {**template_variables, "messages": list(messages)}
        marked = break_up(given, self._special_words, marker)
        if marked == given:
            ids = self.encode(text, add_special_tokens=False)
        else:
            marked_text = self.apply_chat_template(add_generation_prompt=add_generation_prompt, **marked)
            ids = self._encode_marked(marked_text, marker)
        return ChatPrompt(ids, text) if add_generation_prompt else ids

    def _encode_marked(self, text: str, marker: str) -> list[int]:
        """Special tokens of text as such, all between them as plain text without its markers."""
        ids = []
        for position, piece in enumerate(self._special_pattern.split(text)):
            is_special = position % 2 == 1  # the pattern is one group, so its matches stand between the rest
            whole = without_marker(piece, marker)
            ids += self._encode_stretch(whole, False, is_special, is_start=position == 0)
        return ids

    @functools.cached_property
    def _reach(self) -> Reach:
        shortens = self._normalizer is not None and self._normalizer.shortens
        return Reach(math.inf) if shortens else reach_of(self._library)

    @functools.cached_property
    def _inner_library(self) -> tokenizers.Tokenizer:
        return with_special_tokens_as_text(self._library, is_start=False)

    @functools.cached_property
    def _special_words(self) -> re.Pattern[str]:
        return any_of(self._added_tokens[i].content for i in self.special_token_ids)

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

    def _renderer_of(self, tool_template: str | None) -> Renderer:
        """Kept, with its process, until the template is set to another one."""
        is_for_tools = tool_template is not None
        template = (self.chat_template or "") if tool_template is None else tool_template
        found = self._renderers.get(is_for_tools)
        if found is None or found.template != template:
            found = self._renderers[is_for_tools] = Renderer(template)
        return found


class Detokenizer:
    """Text as its tokens arrive: `add` gives what is complete, `finish` the rest; joined, they are `decode`.

    A character whose bytes are still under way is held back. Work per token does not grow with the text. Some
    vocabularies begin every word with a space, which is dropped at the start of a text, and nowhere else.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, is_start: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = is_start and tokenizer._spelling.drops_first_space

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


def check_text(text: object) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"encode takes a str, but got {type(text).__name__}")
    text.encode()  # half a surrogate pair: Python says where, the library only that it is no text
