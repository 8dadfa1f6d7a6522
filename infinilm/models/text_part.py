"""The text's part of a model that also sees: of its config.json, and of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.models.stored import Stored

# What is said of all parts
OF_THE_WHOLE = ("model_type", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")


def text_config(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """All of it, where it is that of a text's model already"""
    if not isinstance(content.get("text_config"), Mapping):
        return content
    whole = [key for key in content if key.endswith("token_id") or key in OF_THE_WHOLE]
    return {**content["text_config"], **{key: content[key] for key in whole}}


def keep_text(stored: Stored) -> None:
    """Where the text's part stands depends on who saved it."""
    stored.move("language_model.", "")
    stored.move("model.language_model.", "model.")
    for part in ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_"):
        stored.drop(part)
