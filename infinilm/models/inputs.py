"""What a model is called with, as transformers calls its own: refused by name where it is none of that."""

from __future__ import annotations

import torch
from torch import Tensor

from infinicore import nn
from infinicore.checks import integer
from infinicore.nn.checks import check_float, check_like
from infinilm.cache import DynamicCache


def check_inputs(
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    logits_to_keep: int,
) -> None:
    for name, tensor in {"input_ids": input_ids, "attention_mask": attention_mask}.items():
        if not isinstance(tensor, Tensor | None) or (tensor is None and name == "input_ids"):
            raise TypeError(f"{name} must be a tensor, but is {type(tensor).__name__}")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"input_ids must be [batch, seq] and not empty, but have shape {tuple(input_ids.shape)}"
        )
    check_positions(position_ids, input_ids.shape)
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        shapes = f"{tuple(attention_mask.shape)}, but input_ids have {tuple(input_ids.shape)}"
        raise ValueError(f"attention_mask has shape {shapes}; it covers the new tokens alone")
    if attention_mask is not None and not bool(attention_mask.bool().any(1).all()):
        raise ValueError("attention_mask leaves a stream without any token")
    if integer("model", "logits_to_keep", logits_to_keep) < 0:
        raise ValueError(f"logits_to_keep must be 0 or more, but is {logits_to_keep}")


def check_positions(position_ids: Tensor | None, shape: torch.Size) -> None:
    if position_ids is None:
        return
    if not isinstance(position_ids, Tensor):
        raise TypeError(f"position_ids must be a tensor, but is {type(position_ids).__name__}")
    if position_ids.is_floating_point() or position_ids.is_complex() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids must be whole numbers, but are {position_ids.dtype}")
    if tuple(position_ids.shape) not in ((shape[1],), (1, shape[1]), tuple(shape)):
        raise ValueError(
            f"position_ids have shape {tuple(position_ids.shape)}, but there are {tuple(shape)} tokens"
        )


def cache_of(past_key_values: object) -> DynamicCache:
    """Where streams go on, or begin"""
    if past_key_values is None:
        return DynamicCache()
    if not isinstance(past_key_values, DynamicCache):
        found = type(past_key_values)  # transformers has one of the same name
        raise TypeError(
            f"past_key_values must be a DynamicCache of infinilm, but is {found.__module__}.{found.__name__}"
        )
    return past_key_values


def check_states(hidden_states: Tensor, position_ids: Tensor | None, rope: nn.RoPE | None) -> None:
    """What a layer is called with by itself"""
    check_float("attention", "hidden_states", hidden_states)
    if hidden_states.dim() != 3 or hidden_states.numel() == 0:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states must be [batch, seq, hidden] and not empty, but have shape {shape}")
    check_positions(position_ids, hidden_states.shape[:2])
    if not isinstance(rope, nn.RoPE | None):
        raise TypeError(f"rope_instance must be an nn.RoPE, but is {type(rope).__name__}")


def check_keys(function: str, keys: Tensor, values: Tensor) -> None:
    check_heads(function, "keys", keys)
    check_like(function, keys, "values", values, keys.shape)


def check_attention(function: str, querys: Tensor, keys: Tensor, values: Tensor) -> None:
    check_keys(function, keys, values)
    check_heads(function, "querys", querys)
    check_like(function, keys, "querys", querys, (len(querys), querys.shape[1], keys.shape[2]))
    if len(querys) > len(keys):
        raise ValueError(f"{function}: {len(querys)} querys cannot be the last of {len(keys)} keys")


def check_heads(function: str, name: str, heads: Tensor) -> None:
    check_float(function, name, heads)
    if heads.dim() != 3:
        raise ValueError(f"{function}: {name} must be [seq, heads, dim], but have shape {tuple(heads.shape)}")
