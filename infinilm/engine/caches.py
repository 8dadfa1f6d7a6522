"""Keys and values of an engine: how many blocks there is room for, and in which numbers they are kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

from infinilm.cache import BlockShape, PagedCache
from infinilm.config import KV_CACHE_DTYPES, EngineConfig
from infinilm.engine.memory import share_of, told_of_memory
from infinilm.models.llama import LlamaForCausalLM


def make_caches(models: Sequence[LlamaForCausalLM], config: EngineConfig) -> list[PagedCache]:
    """A cache for each model, of equally many blocks: as many as kv_cache_memory has room for, or a share of
    what is free, and no more than all streams can fill."""
    shapes = [block_shape(model, config) for model in models]
    block_bytes = sum(
        shape.num_bytes * model.config.num_hidden_layers for shape, model in zip(shapes, models, strict=True)
    )
    given = config.kv_cache_memory
    num_bytes = given if isinstance(given, int) else share_of(models[0].device)
    most = config.max_num_seqs * -(-(config.max_model_len or models[0].max_length) // config.block_size)
    num_blocks = min(num_bytes // block_bytes, most)
    if num_blocks < 1:
        raise ValueError(f"kv_cache_memory: {num_bytes:,} bytes do not hold one block of {block_bytes:,}")
    tell(num_blocks * block_bytes, num_blocks, shapes[0])
    with told_of_memory(f"{num_blocks * block_bytes / 1e6:,.0f} MB of keys and values", models[0].device):
        return [
            PagedCache(model.config.num_hidden_layers, shape, num_blocks, model.device)
            for model, shape in zip(models, shapes, strict=True)
        ]


def block_shape(model: LlamaForCausalLM, config: EngineConfig) -> BlockShape:
    dtype = KV_CACHE_DTYPES.get(config.kv_cache_dtype, model.cache_dtype)
    head_dim = model.config.head_dim
    if dtype == torch.uint8 and head_dim % 32:
        raise ValueError(f"kv_cache_dtype 'q8_0' needs heads of a multiple of 32, but they have {head_dim}")
    return BlockShape(model.config.num_key_value_heads, head_dim, config.block_size, dtype)


def tell(num_bytes: int, num_blocks: int, shape: BlockShape) -> None:
    kind = "q8_0" if shape.dtype == torch.uint8 else str(shape.dtype).removeprefix("torch.")
    blocks = f"{num_blocks:,} blocks of {shape.size} tokens in {kind}"
    with suppress(OSError):  # a log that takes no more is no reason to stop
        print(f"infinilm: keys and values: up to {num_bytes / 1e6:,.0f} MB, {blocks}", file=sys.stderr)
