"""infinilm: language models on infinicore, from checkpoints to text."""

from infinilm.cache import DynamicCache
from infinilm.sampling import SamplingParams

__all__ = ["DynamicCache", "SamplingParams"]
