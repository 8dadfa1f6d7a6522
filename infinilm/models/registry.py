"""Which class runs a checkpoint: by the model_type of its config.json, or the architecture of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, TypeVar

from infinilm.checkpoint import Checkpoint, CheckpointError
from infinilm.checkpoint.gguf_fields import Fields
from infinilm.config import LlamaConfig
from infinilm.folder import Folder
from infinilm.models.gguf import GGUF, SIGMOID, WINDOW_LAYERS, read_gguf_config

if TYPE_CHECKING:
    from infinilm.models.llama import LlamaForCausalLM

# Files of this folder that register a model when they are imported, in the order in which they are.
FILES = (
    "llama",
    "deepseek",
    "deepseek_v3",
    "dots",
    "ernie",
    "ernie_moe",
    "exaone4",
    "gemma2",
    "gemma3",
    "glm",
    "glm_moe",
    "gpt_oss",
    "granite",
    "granite4",
    "granite_moe",
    "hunyuan",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen",
    "qwen2_moe",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
)

PARTS = ("experts", "sigmoids", WINDOW_LAYERS)  # of GGUF files, by which models of one architecture differ

Class = TypeVar("Class", bound="type[LlamaForCausalLM]")


@dataclass(frozen=True)
class Entry:
    model_class: type[LlamaForCausalLM]
    gguf: GGUF | None


ENTRIES: list[Entry] = []


def register(gguf: GGUF | None = None) -> Callable[[Class], Class]:
    """Run checkpoints of the config_class's model_types by the class below, and GGUF files of this kind."""

    def add(model_class: Class) -> Class:
        ENTRIES.append(Entry(model_class, gguf))
        return model_class

    return add


def entry_of(checkpoint: Checkpoint) -> Entry:
    """Of the first file that knows the checkpoint; to import those after it would take time and memory."""
    find = gguf_entry if checkpoint.is_gguf else folder_entry
    for name in FILES:
        import_module(f"infinilm.models.{name}")
        if (entry := find(checkpoint)) is not None:
            return entry
    raise unknown(checkpoint)


def by_rank() -> list[Entry]:
    """The last one first; those of this folder, which may be imported at any time, after all others"""
    here = f"{__package__}."
    return sorted(reversed(ENTRIES), key=lambda entry: entry.model_class.__module__.startswith(here))


def folder_entry(checkpoint: Checkpoint) -> Entry | None:
    model_type = checkpoint.config.get("model_type", "llama")
    return next((e for e in by_rank() if model_type in e.model_class.config_class.model_types), None)


def gguf_entry(checkpoint: Checkpoint) -> Entry | None:
    """A model whose files may name windows or sigmoids also has those that name none, unless another has."""
    architecture, has_experts, *named = gguf_kind(checkpoint)
    known = {entry.gguf.kind: entry for entry in reversed(by_rank()) if entry.gguf is not None}
    sigmoids, windows = (dict.fromkeys((is_named, True)) for is_named in named)
    kinds = ((architecture, has_experts, *both) for both in product(sigmoids, windows))
    return next((known[kind] for kind in kinds if kind in known), None)


def gguf_kind(checkpoint: Checkpoint) -> tuple[str, bool, bool, bool]:
    """The architecture, whether it has experts, and whether it is said that sigmoids choose them, and which
    layers have a window"""
    metadata = checkpoint.metadata
    architecture = Fields(metadata, checkpoint.path).value("general.architecture", str)
    count = metadata.get(f"{architecture}.expert_count")
    has_experts = isinstance(count, int) and count > 0
    gating = metadata.get(f"{architecture}.expert_gating_func")
    has_sigmoids = isinstance(gating, int) and gating == SIGMOID
    return architecture, has_experts, has_sigmoids, f"{architecture}.{WINDOW_LAYERS}" in metadata


def unknown(checkpoint: Checkpoint) -> CheckpointError:
    if checkpoint.is_gguf:
        architecture, *has = gguf_kind(checkpoint)
        known = ", ".join(sorted({entry.gguf.architecture for entry in ENTRIES if entry.gguf}))
        parts = " and ".join(part for part, is_there in zip(PARTS, has, strict=True) if is_there)
        found = f"architecture {short(architecture)}{' with ' if parts else ''}{parts}"
        return CheckpointError(f"{checkpoint.path}: {found} is not supported; known are {known}")
    types = sorted({name for entry in ENTRIES for name in entry.model_class.config_class.model_types})
    found = f"model_type {short(checkpoint.config.get('model_type'))}"
    return CheckpointError(f"{checkpoint.path}: config: {found} is unknown; expected one of {types}")


def class_of(checkpoint: Checkpoint) -> type[LlamaForCausalLM]:
    return entry_of(checkpoint).model_class


def generation_ends(checkpoint: Checkpoint) -> Any:
    """The tokens that end a text, where generation_config.json says so: not config.json then, as with Hugging
    Face"""
    found = Folder(checkpoint.path, CheckpointError).read_object("generation_config.json") or {}
    return found.get("eos_token_id")


def read_config(checkpoint: Checkpoint) -> LlamaConfig:
    """The config of a checkpoint's model; whatever it says is checked."""
    entry, content = entry_of(checkpoint), checkpoint.config
    if "quantization" in content:  # as MLX calls it
        content = {"quantization_config": content["quantization"], **content}
    if entry.gguf is not None and checkpoint.is_gguf:
        content = read_gguf_config(checkpoint, entry.gguf)
    read = entry.model_class.config_class.from_dict
    try:
        config, ends = read(content), None if checkpoint.is_gguf else generation_ends(checkpoint)
        return config if ends is None else read({**content, "eos_token_id": ends})
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.path}: config: {error}") from error
