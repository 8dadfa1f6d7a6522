"""What a checkpoint is, in words: its sizes, its types, and the memory that it needs."""

from __future__ import annotations

import math
from collections import Counter

from infinicore.ops.experts_reference import MOST_PAIRS
from infinicore.quantization import BlockType
from infinilm.checkpoint import Checkpoint
from infinilm.config import LlamaConfig
from infinilm.models.mixture import MixtureConfig
from infinilm.models.registry import read_config
from infinilm.models.stored import Stored
from infinilm.models.weights import stored_weights, type_name


def describe(checkpoint: Checkpoint) -> dict[str, str]:
    """What a checkpoint is and the memory it needs, without reading its weights."""
    config = read_config(checkpoint)
    stored = stored_weights(checkpoint, config)
    counts, per_token = parameters_by_type(stored), bytes_a_token(config, stored)
    total = counts.total()
    shares = ", ".join(f"{kind} {count / total:.0%}" for kind, count in counts.most_common() if count)
    heads = f"{config.num_attention_heads} query heads, {config.num_key_value_heads} key/value heads"
    cache = per_token * config.max_position_embeddings
    return {
        "model": str(checkpoint.path),
        "architecture": config.model_type,
        "parameters": f"{total:,}",
        "layers": f"{config.num_hidden_layers} of width {config.hidden_size}, {heads} of {config.head_dim}",
        "vocabulary": f"{config.vocab_size:,}{', tied' if config.tie_word_embeddings else ''}",
        "context": f"{config.max_position_embeddings:,} tokens, rope {config.rope.scaling['rope_type']}",
        "steps": steps_of(config),
        "weights": f"{checkpoint.num_bytes / 1e6:,.1f} MB ({shares})",
        "memory": f"{checkpoint.num_bytes / 1e6:,.0f} MB of weights, and {per_token / 1e3:,.1f} kB a token "
        f"({cache / 1e6:,.0f} MB for a full context)",
    }


def parameters_by_type(stored: Stored) -> Counter[str]:
    counts: Counter[str] = Counter()
    for weight in stored.values():
        counts[type_name(weight.dtype)] += math.prod(weight.shape)
    return counts


def bytes_a_token(config: LlamaConfig, stored: Stored) -> int:
    """Of keys and values on a CPU, in the dtype that the model's `cache_dtype` will be"""
    is_packed = any(isinstance(weight.dtype, BlockType) for weight in stored.values())
    num_bytes = 2 if is_packed else 4
    return 2 * num_bytes * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def steps_of(config: LlamaConfig) -> str:
    said = ["recorded and replayed"]
    if config.rope.scaling["rope_type"] == "dynamic":
        longest = f"{config.max_position_embeddings:,} tokens"
        said.append(f"beyond {longest} run op by op, for each is rotated by its own angles")
    if isinstance(config, MixtureConfig):
        most = MOST_PAIRS // config.num_experts_per_tok
        said.append(f"on a GPU of more than {most} tokens, or with experts in blocks, run op by op")
    return "; ".join(said)
