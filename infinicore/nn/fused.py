"""Products that share a pass over memory where their weights are packed: what a decoder layer is made of.

Each is the same as its parts, which it falls back to for weights of any other kind. On a GPU weights that lie
one after the other, dense ones or tiles, are multiplied as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from infinicore import _native, ops
from infinicore.checks import check_tensor
from infinicore.nn import functional as F
from infinicore.nn.checks import check_like, check_linear
from infinicore.nn.norm import RMSNorm
from infinicore.quantization import PackedTensor, QuantizedTensor
from infinicore.tiles import RowTensor, can_be_one


def linear_add(
    input: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None, residual: Tensor
) -> Tensor:
    """residual + linear(input, weight, bias)"""
    check_linear(input, weight, bias)
    check_like("linear", input, "residual", residual, (*input.shape[:-1], weight.shape[0]))
    if isinstance(weight, PackedTensor):
        return ops.packed_linear(input, (weight,), (bias,), residual)
    return ops.linear_add(input, weight, bias, residual)


def linear_group(
    input: Tensor, weights: Sequence[Tensor | QuantizedTensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """One input times each of several weights: [*, in] -> a [*, out] for each.

    Up to three packed weights are one pass over the input, and what is returned are views of one tensor.
    """
    if not input.is_cpu and (whole := joined(weights, biases)) is not None:
        return torch.split(F.linear(input, *whole), [weight.shape[0] for weight in weights], -1)
    if not can_share_input(weights):
        return tuple(F.linear(input, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    for weight, bias in zip(weights, biases, strict=True):
        check_linear(input, weight, bias)
    y = ops.packed_linear(input, tuple(weights), tuple(biases), None)
    return torch.split(y, [weight.shape[0] for weight in weights], -1)


GATES = {"silu": F.swiglu, "gelu_tanh": F.geglu}


def gate_of(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of gate and up that an activation names"""
    if activation not in GATES:
        raise ValueError(f"activation must be one of {', '.join(map(repr, GATES))}, but is {activation!r}")
    return GATES[activation]


def gated_linear(  # noqa: PLR0913  two products, what comes before and after them
    input: Tensor,
    gate: Tensor | QuantizedTensor,
    up: Tensor | QuantizedTensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    norm: RMSNorm | None = None,
    activation: str = "silu",
) -> Tensor:
    """activation(linear(input, gate)) * linear(input, up), the input normalised first if there is a norm.

    The activation is "silu" or "gelu_tanh". In one pass where both are packed.
    """
    by = gate_of(activation)
    check_tensor("linear", "input", input)
    whole = None if input.is_cpu or gate.shape != up.shape else joined((gate, up), (gate_bias, up_bias))
    if whole is not None:
        check_linear(input, *whole)
        return ops.gated_linear(input, *scale_of(norm, input), *whole, activation)
    input = input if norm is None else norm(input)
    if not can_share_input((gate, up)) or gate.shape != up.shape:
        return by(*linear_group(input, (gate, up), (gate_bias, up_bias)))
    check_linear(input, gate, gate_bias)
    check_linear(input, up, up_bias)
    return ops.packed_linear(input, (gate, up), (gate_bias, up_bias), None, activation)


def gated_linear_onto(  # noqa: PLR0913  three products, what comes between and after them
    input: Tensor,
    weights: Sequence[PackedTensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    activation: str,
) -> Tensor:
    """gated_linear of two packed weights times a third, plus the residual if there is one, in one pass"""
    gate_of(activation)
    for weight, bias in zip(weights[:2], biases[:2], strict=True):
        check_linear(input, weight, bias)
    if residual is not None:
        check_like("linear", input, "residual", residual, (*input.shape[:-1], weights[2].shape[0]))
    return ops.packed_linear(input, tuple(weights), tuple(biases), residual, activation)


def can_follow_gate(weights: Sequence[Tensor | QuantizedTensor]) -> TypeGuard[Sequence[PackedTensor]]:
    """Whether the third is packed and takes what a gate of the first two gives as that is made"""
    gate, up, last = weights
    return (
        isinstance(last, PackedTensor)
        and last.rounding[1] <= _native.LONGEST_GATED_SPAN
        and can_share_input((gate, up))
        and gate.shape[0] == up.shape[0] == last.shape[1]
    )


def scale_of(norm: RMSNorm | None, input: Tensor) -> tuple[Tensor | None, float]:
    if norm is None:
        return None, 0.0
    check_like("rms_norm", input, "weight", norm.weight, input.shape[-1:])
    return norm.weight, norm.eps


def joined(
    weights: Sequence[Tensor | QuantizedTensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor | RowTensor, Tensor | None] | None:
    """Weights and biases that lie one after the other, each as one"""
    weight = rows_as_one(weights) if can_be_one(weights) else as_one(weights)
    has_biases = any(bias is not None for bias in biases)
    bias = as_one(biases) if has_biases else None
    return None if weight is None or (has_biases and bias is None) else (weight, bias)


def rows_as_one(weights: Sequence[Any]) -> RowTensor | None:
    planes = [as_one(parts) for parts in zip(*(weight.planes for weight in weights), strict=True)]
    found = [plane for plane in planes if plane is not None]
    return weights[0].of(found, sum(w.shape[0] for w in weights)) if len(found) == len(planes) else None


def as_one(parts: Sequence[Tensor | QuantizedTensor | None]) -> Tensor | None:
    """A view of all of them, if one begins where the one before it ends"""
    tensors = [part for part in parts if isinstance(part, Tensor) and part.is_contiguous()]
    ends = [part.data_ptr() + part.nbytes for part in tensors]
    first = tensors[0] if len(tensors) == len(parts) else None
    if first is None or any(end != part.data_ptr() for end, part in zip(ends, tensors[1:], strict=False)):
        return None
    if ends[-1] - first.data_ptr() > room_after(first):
        return None
    whole = first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    are_held = all(isinstance(part, torch.nn.Parameter) for part in tensors) and not whole.requires_grad
    return torch.nn.Parameter(whole, False) if are_held else whole  # which a kernel may then read early


def room_after(first: Tensor) -> int:
    """Bytes of its memory from its first element on"""
    storage = first.untyped_storage()
    return storage.data_ptr() + storage.nbytes() - first.data_ptr()


def can_share_input(weights: Sequence[Tensor | QuantizedTensor]) -> bool:
    """Whether all are packed and take the input rounded alike"""
    packed = [weight for weight in weights if isinstance(weight, PackedTensor)]
    roundings = {weight.rounding for weight in packed}
    return len(packed) == len(weights) <= 3 and len(roundings) == 1
