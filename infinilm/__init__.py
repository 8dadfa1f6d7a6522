"""infinilm: language models on infinicore, from checkpoints to text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "LLM",
    "CompletionOutput",
    "DynamicCache",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "load_model",
]

__version__ = "0.1.0"

HOMES = {"DynamicCache": "cache", "SamplingParams": "sampling", "StructuredOutputsParams": "sampling"}

if TYPE_CHECKING:
    from infinilm.cache import DynamicCache
    from infinilm.llm import LLM, CompletionOutput, RequestOutput, load_model
    from infinilm.sampling import SamplingParams, StructuredOutputsParams
else:  # a type checker that saw this function would take every name for one of ours

    def __getattr__(name: str) -> object:
        """Names are fetched when they are used, so that `infinilm --help` need not wait for torch."""
        if name not in __all__:
            raise AttributeError(f"module 'infinilm' has no attribute {name!r}")
        return getattr(import_module(f"infinilm.{HOMES.get(name, 'llm')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
