"""What a checkpoint says of embeddings and scores, in sentence-transformers' files beside its weights.

Of a causal model the last token alone has read the whole text, so its state is what is pooled.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from infinilm.checkpoint import Checkpoint, CheckpointError
from infinilm.checkpoint.gguf_fields import Fields
from infinilm.checkpoint.gguf_format import Strings
from infinilm.folder import Folder
from infinilm.tokenizer import Tokenizer
from infinilm.tokenizer.huggingface import MAX_NAMES_BYTES

GGUF_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}  # llama.cpp's; 0 is none, and 4 a reranker


class PoolingError(ValueError):
    """What a model is asked for that its files do not give"""


@dataclass(frozen=True)
class Pooling:
    """How texts become embeddings or scores, as the files of a model have it."""

    is_embedder: bool = False
    normalizes: bool = True
    ends_with_eos: bool = False  # which transformers 4 adds, where the tokenizer's settings ask for it
    prompts: Mapping[str, str] = field(default_factory=dict)  # what stands before a text, by what it is
    default_prompt: str = ""
    instruction: str | None = None  # of a reranker
    answers: tuple[int, int | None] | None = None  # of a reranker: the tokens for relevant, and for not
    labels: tuple[str, ...] = ()  # of the scores of a reranker, where it has several
    has_raw_scores: bool = False  # a reranker's head gives them as they are, and not their sigmoid
    max_tokens: int | None = None  # of a text

    def encode(
        self,
        text: str,
        tokenizer: Tokenizer,
        prompt_name: str | None = None,
        allow_special: bool = True,
        limit: int | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The tokens of a text that is to be embedded, at most so many: its end is cut off, and what the
        tokenizer puts behind every text stays. Without a limit max_tokens is as for the tokenizer."""
        whole = self.prompt(prompt_name) + text
        most = max_tokens if limit is None else None
        ids = self._ended(tokenizer.encode(whole, allow_special=allow_special, max_tokens=most), tokenizer)
        if limit is None or len(ids) <= limit:
            return ids
        num_behind = min(limit, num_last_alike(ids, self._ended(tokenizer.encode(""), tokenizer)))
        return ids[: limit - num_behind] + ids[len(ids) - num_behind :]

    def _ended(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        end = list(tokenizer.eos_token_ids[:1]) if self.ends_with_eos else []
        return ids if ids[-1:] == end else ids + end

    def prompt(self, name: str | None) -> str:
        if name is None:
            return self.default_prompt
        if name not in list(self.prompts):  # it may be anything
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise PoolingError(f"prompt_name {short(name)} is not one of the model's; it has {known}")
        return self.prompts[name]

    def vector(self, state: Tensor, size: int | None = None) -> Tensor:
        """The first so many numbers of a state, scaled to length one if the model's embeddings are"""
        return torch.nn.functional.normalize(state[:size], dim=0) if self.normalizes else state[:size]


def num_last_alike(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(reversed(ids), reversed(others), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def read_pooling(checkpoint: Checkpoint) -> Pooling:
    if checkpoint.is_gguf:
        return gguf_pooling(checkpoint)
    folder = Folder(checkpoint.path, CheckpointError)
    modules = modules_of(folder)
    settings = folder.read_object("tokenizer_config.json", MAX_NAMES_BYTES) or {}
    told = folder.read_object("config_sentence_transformers.json") or {}
    return Pooling(
        is_embedder="Pooling" in modules,
        normalizes="Normalize" in modules or "Pooling" not in modules,
        ends_with_eos=settings.get("add_eos_token") is True,
        answers=answers_of(folder, modules["LogitScore"]) if "LogitScore" in modules else None,
        has_raw_scores=has_raw_scores(folder, told, checkpoint.config),
        max_tokens=max_tokens_of(folder),
        **prompts_of(folder, told),
    )


def gguf_pooling(checkpoint: Checkpoint) -> Pooling:
    fields = Fields(checkpoint.metadata, checkpoint.path)
    architecture = fields.value("general.architecture", str)
    key = f"{architecture}.pooling_type"
    mode = GGUF_MODES.get(fields.integer(key, 0, minimum=0))
    if mode is not None:
        check_mode(f"{checkpoint.path}: metadata key {key!r}", [mode])
    labels = checkpoint.metadata.get(f"{architecture}.classifier.output_labels")
    return Pooling(is_embedder=mode is not None, labels=tuple(labels) if isinstance(labels, Strings) else ())


def check_mode(source: object, modes: list[Any]) -> None:
    if modes != ["lasttoken"]:
        found = " and ".join(map(str, modes))
        raise CheckpointError(
            f"{source}: pooling {found} is not supported; embeddings are states of the last token (lasttoken)"
        )


# ---- sentence-transformers' files --------------------------------------------------------------------------


def modules_of(folder: Folder) -> dict[str, dict[str, Any]]:
    """What follows the transformer, by the last part of its type, each with its config"""
    found: dict[str, dict[str, Any]] = {}
    for module in folder.read_list("modules.json") or []:
        kind, path = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(path, str):
            raise CheckpointError(f"{folder.path / 'modules.json'}: {short(module)} is no module")
        found[kind.rpartition(".")[2]] = folder.read_object(f"{path}/config.json") or {} if path else {}
    known = "Transformer", "Pooling", "Normalize", "LogitScore"
    if unknown := [kind for kind in found if kind not in known]:
        raise CheckpointError(
            f"{folder.path / 'modules.json'}: {unknown[0]!r} is not supported; known are {', '.join(known)}"
        )
    if "Pooling" in found:
        check_mode(f"{folder.path}: the config of Pooling", modes_of(found["Pooling"]))
    return found


def modes_of(config: Mapping[str, Any]) -> list[Any]:
    """A name or several, as newer files have it, or a flag for each; none are the mean."""
    given = config.get("pooling_mode")
    if given is not None:
        return given if isinstance(given, list) else [given]
    start = "pooling_mode_"
    flags = [key for key, value in config.items() if key.startswith(start) and value is True]
    return [key.removeprefix(start) for key in flags] or ["mean_tokens"]


def answers_of(folder: Folder, config: Mapping[str, Any]) -> tuple[int, int | None]:
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if type(yes) is not int or not isinstance(no, int | None):
        raise CheckpointError(
            f"{folder.path}: the config of LogitScore must have a true_token_id and may have a "
            f"false_token_id, but has {short(yes)} and {short(no)}"
        )
    return yes, no


def has_raw_scores(folder: Folder, told: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """What follows the head of a reranker: the first that is named, in the order of sentence-transformers"""
    inner = config.get("sentence_transformers")
    named = told.get("activation_fn") or (inner.get("activation_fn") if isinstance(inner, dict) else None)
    named = named or config.get("sbert_ce_default_activation_function")
    if named is None:
        return False
    kind = named.rpartition(".")[2] if isinstance(named, str) and named.startswith("torch.nn.") else None
    if kind not in ("Identity", "Sigmoid"):
        known = "torch.nn.Identity and torch.nn.Sigmoid"
        raise CheckpointError(
            f"{folder.path}: activation_fn {short(named)} is not supported; known are {known}"
        )
    return kind == "Identity"


def max_tokens_of(folder: Folder) -> int | None:
    name = "sentence_bert_config.json"
    found = (folder.read_object(name) or {}).get("max_seq_length")
    if found is not None and (type(found) is not int or found < 1):
        rule = f"max_seq_length must be a whole number above 0, but is {short(found)}"
        raise CheckpointError(f"{folder.path / name}: {rule}")
    return found


def prompts_of(folder: Folder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts of an embedder stand before texts; that of a reranker is its instruction."""
    prompts, name = config.get("prompts") or {}, config.get("default_prompt_name")
    is_map = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not is_map or (name is not None and name not in list(prompts)):
        raise CheckpointError(
            f"{folder.path / 'config_sentence_transformers.json'}: prompts must be texts by name, the one of "
            f"default_prompt_name {short(name)} among them, but are {short(prompts)}"
        )
    if config.get("model_type") == "CrossEncoder":
        return {"instruction": prompts.get(name)}
    return {"prompts": prompts, "default_prompt": prompts.get(name, "")}
