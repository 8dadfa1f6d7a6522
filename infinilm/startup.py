"""A model's name becomes a model with its tokenizer, and an engine that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from infinicore import _native
from infinicore.checks import check_usable
from infinilm.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from infinilm.config import EngineConfig
from infinilm.engine.draft import SpeculativeConfig
from infinilm.engine.engine import Engine
from infinilm.engine.memory import told_of_memory
from infinilm.hub import DEFAULT_MODEL, resolve
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.registry import read_config
from infinilm.sampling import SamplingParams
from infinilm.tokenizer import Tokenizer

Report = Callable[[int], None]


def tell_nobody(num_bytes: int) -> None:
    """Where nobody wants to know how many bytes have been loaded"""


def load_model(
    model: str | Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    activations: str | None = None,
    quantize: str | None = None,
    report: Report = tell_nobody,
) -> tuple[LlamaForCausalLM, Tokenizer]:
    """A model and its tokenizer: a path, a Hugging Face id, or None for the built-in default.

    device "auto", or None, is a GPU if there is one, else the CPU.
    """
    return load(
        EngineConfig(model=model, device=device, dtype=dtype, activations=activations, quantize=quantize),
        report,
    )


def load(config: EngineConfig, report: Report) -> tuple[LlamaForCausalLM, Tokenizer]:
    if not callable(report):
        raise TypeError(f"report must be called with numbers of bytes, but is {report!r}; options go by name")
    config = replace(config, device=chosen_device(config))
    check_arguments(config)
    path = resolve(None if config.model is None else str(config.model))
    with open_checkpoint(path) as checkpoint:
        tokenizer = tokenizer_of(checkpoint, config.chat_template)
        check_vocabulary(checkpoint, tokenizer)
        checkpoint.forget_vocabulary()  # which the tokenizer has in its own way
        _native.release_memory()
        with told_of_memory("the weights", torch.device(config.device or "cpu")):
            model = LlamaForCausalLM.from_checkpoint(checkpoint, config, report)
    if config.model is None:
        model.recommended = SamplingParams(**DEFAULT_MODEL.sampling)  # type: ignore[arg-type]
    _native.release_memory()
    return model, tokenizer


def chosen_device(config: EngineConfig) -> torch.device | str:
    """A GPU if there is one, unless something is asked for that CPUs alone do"""
    if config.device is not None and config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() and config.activations is None else "cpu"


def check_arguments(config: EngineConfig) -> None:
    """What would only fail, and less clearly, when half a model has been read."""
    model = config.model
    if not isinstance(model, str | Path | None) or model == "":
        raise ValueError(
            f"model must be a path, a Hugging Face id such as 'org/name', or None, not {model!r}"
        )
    check_usable(config.device)


def tokenizer_of(checkpoint: Checkpoint, chat_template: str | None = None) -> Tokenizer:
    found = (
        Tokenizer.from_gguf(checkpoint.metadata)
        if checkpoint.is_gguf
        else Tokenizer.from_folder(checkpoint.path)
    )
    if chat_template is not None:
        found.chat_template = found.tool_template = chat_template
    return found


def check_vocabulary(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Every token has its row, but for special ones that no text needs: Gemma 3 has one for images where it
    does not see, others one for padding. Rows beyond the last token are padding too, as Qwen has it."""
    num_rows = read_config(checkpoint).vocab_size
    num_spared = sum(token_id >= num_rows for token_id in tokenizer.special_token_ids)
    last_of_frame = max(tokenizer.encode(""), default=-1)
    if tokenizer.vocab_size - num_spared > num_rows or last_of_frame >= num_rows:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has token ids up to {tokenizer.vocab_size - 1}, but the model "
            f"{num_rows} rows of embeddings; take the tokenizer that belongs to this model"
        )


def make_engine(config: EngineConfig, report: Report) -> Engine:
    """The model, what guesses for it if there is such, and an engine that runs them."""
    speculative = SpeculativeConfig.read(config.speculative_config)
    draft = None
    if speculative is not None and speculative.model is not None:
        draft, _ = load(replace(config, model=speculative.model), tell_nobody)
    return Engine(*load(config, report), config, draft)
