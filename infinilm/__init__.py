"""infinilm: language models on infinicore, from checkpoints to text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "DynamicCache",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDead",
    "LoRARequest",
    "Logprob",
    "QueueFull",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "load_model",
]

__version__ = "0.1.0"

HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "load_model": "startup",
    "DynamicCache": "cache",
    "EngineConfig": "config",
    "LoRARequest": "engine.adapters",
    "SamplingParams": "sampling",
    "StructuredOutputsParams": "sampling",
}

if TYPE_CHECKING:
    from infinilm.async_llm import AsyncLLM
    from infinilm.cache import DynamicCache
    from infinilm.config import EngineConfig
    from infinilm.engine.adapters import LoRARequest
    from infinilm.engine.request import (
        CompletionOutput,
        EmbeddingRequestOutput,
        EngineDead,
        Logprob,
        QueueFull,
        RequestError,
        RequestOutput,
        ScoringRequestOutput,
    )
    from infinilm.llm import LLM
    from infinilm.sampling import SamplingParams, StructuredOutputsParams
    from infinilm.startup import load_model
else:  # a type checker that saw this function would take every name for one of ours

    def __getattr__(name: str) -> object:
        """Names are fetched when they are used, so that `infinilm --help` need not wait for torch."""
        if name not in __all__:
            raise AttributeError(f"module 'infinilm' has no attribute {name!r}")
        return getattr(import_module(f"infinilm.{HOMES.get(name, 'engine.request')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
