"""Experts: the feed-forward layers of a mixture, of which each token goes through a few."""

from __future__ import annotations

import torch
from torch import Tensor

from infinicore import ops
from infinicore.checks import check_tensor, positive
from infinicore.nn.checks import check_float
from infinicore.nn.linear import Linear
from infinicore.nn.module import Module
from infinicore.ops.descriptor import INDEX_DTYPES
from infinicore.ops.experts_reference import ACTIVATIONS


class Experts(Module):
    """down(gated(gate(x), up(x))) of each chosen expert, times its share, added up.

    The weights are those of all experts, the rows of one after those of the one before: gate_proj and up_proj
    [num_experts * intermediate_size, hidden_size], down_proj [num_experts * hidden_size, intermediate_size].
    Each is a Linear, and takes whatever weight a Linear takes. Of them, only chosen experts are read.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: str = "silu",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if activation not in tuple(ACTIVATIONS):
            known = " or ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"Experts: activation must be {known}, but is {activation!r}")
        self.num_experts = positive("Experts", "num_experts", num_experts)
        self.hidden_size = positive("Experts", "hidden_size", hidden_size)
        self.activation = activation
        num_inner = self.num_experts * positive("Experts", "intermediate_size", intermediate_size)
        self.gate_proj = Linear(hidden_size, num_inner, bias, dtype, device)
        self.up_proj = Linear(hidden_size, num_inner, bias, dtype, device)
        self.down_proj = Linear(intermediate_size, num_experts * hidden_size, bias, dtype, device)

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """x [*, hidden_size], ids and shares [*, k], as `ops.route` gives them -> as x"""
        self._check(x, ids, shares)
        rows, num_chosen = x.reshape(-1, x.shape[-1]), ids.shape[-1]
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        weights, biases = tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers)
        chosen = ids.reshape(-1, num_chosen), shares.reshape(-1, num_chosen)
        return ops.experts(rows, *chosen, weights, biases, self.activation).view(x.shape)

    def _check(self, x: Tensor, ids: Tensor, shares: Tensor) -> None:
        check_float("Experts", "x", x)
        check_float("Experts", "shares", shares)
        check_tensor("Experts", "ids", ids)
        if ids.dtype not in INDEX_DTYPES:
            raise TypeError(f"Experts: ids must be integers, but are {ids.dtype}")
        wanted = (*x.shape[:-1], ids.shape[-1] if ids.dim() else 0)
        if x.shape[-1:] != (self.hidden_size,) or tuple(ids.shape) != wanted or ids.shape != shares.shape:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, ids, shares))
            raise ValueError(
                f"Experts: expected x [*, {self.hidden_size}] and ids and shares [*, k], but found {shapes}"
            )

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, activation={self.activation!r}"
