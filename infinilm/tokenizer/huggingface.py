"""A Hugging Face folder: tokenizer.json or tokenizer.model, and what the files beside it name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import tokenizers
from tokenizers import AddedToken

from infinilm.folder import Folder, parse_object
from infinilm.tokenizer.added_tokens import FLAGS, add_tokens, check_added, names_given, tokens_given
from infinilm.tokenizer.bounds import check_bounds
from infinilm.tokenizer.error import TokenizerError, errors_of
from infinilm.tokenizer.library import MAX_VOCAB_SIZE
from infinilm.tokenizer.normalizer import Normalizer
from infinilm.tokenizer.sentencepiece import SentencePieceVocabulary
from infinilm.tokenizer.sentencepiece_format import MAX_BYTES as MAX_SENTENCEPIECE_BYTES
from infinilm.tokenizer.sentencepiece_format import SentencePieceFile

# Above the largest there are: 33 MB, and 1.4 million values for 260,000 tokens and their merges.
MAX_TOKENIZER_BYTES = 1 << 26
MAX_TOKENIZER_VALUES = 1 << 21
MAX_NAMES_BYTES = 1 << 22
MAX_TEMPLATE_BYTES = 1 << 20

# Files that people have in a vocabulary's place: that of a clone without Git LFS, and one of tiktoken.
POINTER = b"version https://git-lfs"
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")

# Where transformers saves it beside chat_template.jinja.
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"

# The special tokens that have a role, under the names configuration files and chat templates give them.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Where settings may list tokens under names of the model's own
OWN_NAMES = ("extra_special_tokens", "model_specific_special_tokens")


@dataclass(frozen=True)
class Vocabulary:
    """What a folder's file, tokenizer.json or tokenizer.model, says about encoding."""

    path: Path
    library: tokenizers.Tokenizer
    roles: Mapping[str, str]
    normalizer: Normalizer | None = None


def read_names(folder: Folder) -> dict[str, Any]:
    """The settings beside the vocabulary: what its special tokens are called, and more. As in transformers,
    an older folder's map of them counts more than its settings, and a newer one's less."""
    names = folder.read_object("special_tokens_map.json", MAX_NAMES_BYTES) or {}
    config = folder.read_object("tokenizer_config.json", MAX_NAMES_BYTES) or {}
    return names | config if "added_tokens_decoder" in config else config | names


def read_vocabulary(folder: Folder, config: Mapping[str, Any]) -> Vocabulary:
    roles = _roles_in(config)
    settings = _with_added_tokens(folder, config, roles)
    if folder.find("tokenizer.json") is None and folder.find("tokenizer.model") is not None:
        return _read_sentencepiece(folder, settings, roles)
    library = _read_json(folder)
    given, own = tokens_given(settings), library.get_added_tokens_decoder()
    if settings is not config:  # what tokenizer.json says of a token counts more than an older folder's file
        given = {token_id: token for token_id, token in given.items() if token_id not in own}
    check_added([token["content"] for token in given.values()])
    special = {*roles.values(), *(token.content for token in own.values() if token.special)}
    add_tokens(library, {i: _added_token(given[i], special) for i in sorted(given)}, "tokenizer.json")
    return Vocabulary(folder.path / "tokenizer.json", library, roles)


def _with_added_tokens(
    folder: Folder, config: Mapping[str, Any], roles: Mapping[str, str]
) -> Mapping[str, Any]:
    """The settings, with what older folders have in a file beside them"""
    if "added_tokens_decoder" in config:
        return config
    special = {*roles.values(), *names_given(config)}
    added = folder.read_object("added_tokens.json", MAX_NAMES_BYTES) or {}
    given = {str(token_id): {"content": text, "special": text in special} for text, token_id in added.items()}
    return {**config, "added_tokens_decoder": given}


def _added_token(given: Mapping[str, Any], special: set[str]) -> AddedToken:
    """With the flags that it is given; what is special elsewhere stays so"""
    flags = {name: given[name] for name in FLAGS if name in given}
    flags["special"] = flags.get("special", False) or given["content"] in special
    return AddedToken(given["content"], **flags)


def _read_sentencepiece(folder: Folder, config: Mapping[str, Any], roles: Mapping[str, str]) -> Vocabulary:
    path = folder.path / "tokenizer.model"
    raw = _read_file(folder, path.name, MAX_SENTENCEPIECE_BYTES) or b""
    if TIKTOKEN_LINE.match(raw):
        way_out = "take the tokenizer.json that the model's folder for transformers has"
        raise TokenizerError(f"{path}: is a vocabulary of tiktoken, not of sentencepiece; {way_out}")
    with errors_of(str(path)):
        pieces = SentencePieceVocabulary(SentencePieceFile.parse(raw), config, roles)
        return Vocabulary(path, pieces.build_library(), pieces.roles, pieces.build_normalizer())


def _read_json(folder: Folder) -> tokenizers.Tokenizer:
    path, raw = folder.path / "tokenizer.json", _read_file(folder, "tokenizer.json", MAX_TOKENIZER_BYTES)
    if raw is None:
        raise TokenizerError(
            f"{path} does not exist, nor does a tokenizer.model; "
            "transformers' tokenizer.save_pretrained writes one"
        )
    content = parse_object(raw, path, TokenizerError, MAX_TOKENIZER_VALUES)
    with errors_of(str(path)):
        check_bounds(content)
        del content
        return tokenizers.Tokenizer.from_str(raw.decode("utf-8"))


def _read_file(folder: Folder, name: str, max_bytes: int) -> bytes | None:
    raw = folder.read(name, max_bytes)
    if raw is not None and raw.startswith(POINTER):
        raise TokenizerError(
            f"{folder.path / name}: is a pointer of Git LFS: `git lfs pull` fetches the file itself"
        )
    return raw


def _roles_in(config: Mapping[str, Any]) -> dict[str, str]:
    """What templates call tokens by, and their texts: the roles, and a model's own names"""
    roles = _own_names_in(config)
    for role in ROLES:
        text = _text_of(config.get(role))
        if text is not None and not isinstance(text, str):
            raise TokenizerError(f"tokenizer_config.json: {role!r} must be a string, but is {short(text)}")
        if text:
            roles[role] = text
    return roles


def _own_names_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Such as "image_token": older settings list them, newer ones have them beside the roles."""
    listed = [found for key in OWN_NAMES if isinstance(found := config.get(key), dict)]
    beside = {key: value for key, value in config.items() if key.endswith("_token") and key not in ROLES}
    named = {name: _text_of(value) for group in (*listed, beside) for name, value in group.items()}
    return {name: text for name, text in named.items() if isinstance(text, str) and text}


def _text_of(token: Any) -> Any:
    """It is written as its text, or as an object with the text under "content"."""
    return token.get("content") if isinstance(token, dict) else token


def eos_ids_in(folder: Folder, found: Vocabulary) -> tuple[int, ...]:
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


def templates_in(folder: Folder, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The chat template, and one for conversations with tools where there is another"""
    with errors_of(f"{folder.path}: 'chat_template'"):
        raw = folder.read("chat_template.jinja", MAX_TEMPLATE_BYTES)
        template = _template_beside(folder, config) if raw is None else raw.decode("utf-8")
        if isinstance(template, list):  # several, each with a name
            template = {entry["name"]: entry["template"] for entry in template}
        named = template if isinstance(template, dict) else {"default": template}
        if (raw := folder.read(TOOL_TEMPLATE, MAX_TEMPLATE_BYTES)) is not None:
            named = named | {"tool_use": raw.decode("utf-8")}
        found = named.get("default"), named.get("tool_use")
        for template in found:
            if not isinstance(template, str | None):
                raise TypeError(f"must be a string, but is a {type(template).__name__}")
    return found


def _template_beside(folder: Folder, config: Mapping[str, Any]) -> Any:
    """In the settings, or in the file that a model's processor has for it."""
    if config.get("chat_template") is not None:
        return config["chat_template"]
    return (folder.read_object("chat_template.json", MAX_TEMPLATE_BYTES) or {}).get("chat_template")
