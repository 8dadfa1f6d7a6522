"""How a model's makers would have its tokens drawn, where its files say so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from infinilm.checkpoint import Checkpoint, CheckpointError
from infinilm.checkpoint.gguf_fields import as_written
from infinilm.folder import Folder
from infinilm.sampling import SamplingParams

LOG = logging.getLogger("infinilm.weights")
# Fields of generation_config.json, and what follows "general.sampling." in the metadata of a GGUF file
FIELDS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def recommended_sampling(checkpoint: Checkpoint) -> SamplingParams:
    """What applies where a request does not say. Nothing is refused for it: a text can be had without."""
    found = of_metadata(checkpoint.metadata) if checkpoint.is_gguf else of_folder(checkpoint)
    usable = {name: value for name, value in found.items() if is_usable(checkpoint, name, value)}
    return SamplingParams(**usable)


def of_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in FIELDS.items()}
    return {name: as_written(v) if isinstance(v, float) else v for name, v in found.items() if v is not None}


def of_folder(checkpoint: Checkpoint) -> dict[str, Any]:
    found = Folder(checkpoint.path, CheckpointError).read_object("generation_config.json") or {}
    chosen = {name: found[name] for name in FIELDS if found.get(name) is not None}
    return {**chosen, "temperature": 0.0} if found.get("do_sample") is False else chosen


def is_usable(checkpoint: Checkpoint, name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except ValueError as error:
        LOG.warning("%s: what it recommends is not used: %s", checkpoint.path, error)
        return False
    return True
