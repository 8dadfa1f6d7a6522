"""What a model is called with, as transformers calls its own: refused by name where it is none of that."""

from __future__ import annotations

import torch
from torch import Tensor

from infinicore.checks import integer
from infinilm.cache import DynamicCache


def check_inputs(
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    cache: DynamicCache | None,
    logits_to_keep: int,
) -> None:
    given = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
    for name, tensor in given.items():
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
    if cache is not None and not isinstance(cache, DynamicCache):
        raise TypeError(f"past_key_values must be a DynamicCache, but is {type(cache).__name__}")
    if integer("model", "logits_to_keep", logits_to_keep) < 0:
        raise ValueError(f"logits_to_keep must be 0 or more, but is {logits_to_keep}")


def check_positions(position_ids: Tensor | None, shape: torch.Size) -> None:
    if position_ids is None:
        return
    if position_ids.is_floating_point() or position_ids.is_complex() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids must be whole numbers, but are {position_ids.dtype}")
    if tuple(position_ids.shape) not in ((shape[1],), (1, shape[1]), tuple(shape)):
        raise ValueError(
            f"position_ids have shape {tuple(position_ids.shape)}, but there are {tuple(shape)} tokens"
        )
