"""Linear layers: whole, split by output features (column parallel), split by input features (row parallel).

One seed gives one model at any tp_size: initial values are drawn for the whole matrix, then sliced.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infinicore import ops
from infinicore.checks import check_flag, check_place, integer, positive
from infinicore.distributed import Communicator
from infinicore.nn import functional as F
from infinicore.nn.checks import check_like, check_linear
from infinicore.nn.fused import (
    can_follow_gate,
    gate_of,
    gated_linear,
    gated_linear_onto,
    joined,
    linear_add,
    linear_group,
    scale_of,
)
from infinicore.nn.module import Parameter, is_observed
from infinicore.nn.norm import RMSNorm
from infinicore.nn.weight import WeightLayer
from infinicore.ops.fused_reference import Where
from infinicore.tiles import can_be_one, laid_together

Device = torch.device | str | None


class BaseLinear(WeightLayer):
    """y = x Wᵀ + b, with weight [out_features, in_features] and bias [out_features]."""

    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        check_place(type(self).__name__, dtype, device)
        check_flag(type(self).__name__, "bias", bias)
        self.in_features = in_features = positive(type(self).__name__, "in_features", in_features)
        self.out_features = out_features = positive(type(self).__name__, "out_features", out_features)
        # torch.nn.Linear's distribution, and its order of drawing.
        bound = 1 / math.sqrt(in_features)
        self.weight = Parameter(uniform((out_features, in_features), bound, dtype, device))
        self.bias = Parameter(uniform((out_features,), bound, dtype, device)) if bias else None

    def compute_linear(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b (+ residual), which is what the parallel layers do in their own way."""
        if residual is None:
            return F.linear(x, self.weight, self.bias)
        return linear_add(x, self.weight, self.bias, residual)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, + residual if given: [*, in] -> [*, out]"""
        return self.compute_linear(x, residual)

    def extra_repr(self) -> str:
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{features}, bias={self.bias is not None}{super().extra_repr()}"


class Linear(BaseLinear):
    """The whole matrix on one rank."""


class ColumnParallelLinear(BaseLinear):
    """This rank's share of the output features: [*, in] -> [*, out / tp_size], without communication.

    The gradient of x is a rank's part too: that of the whole layer is the sum of them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: Device = None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype, device)
        self.tp_rank = integer("ColumnParallelLinear", "tp_rank", tp_rank)
        self.tp_size = integer("ColumnParallelLinear", "tp_size", tp_size)
        self.weight = Parameter(self.get_parameter("weight"), 0, tp_rank, tp_size)
        if self.bias is not None:
            self.bias = Parameter(self.bias, 0, tp_rank, tp_size)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"


class RowParallelLinear(BaseLinear):
    """This rank's share of the input features: [*, in / tp_size] -> the whole output [*, out], on every rank.

    The communicator sums the ranks' products; bias and residual are added after it, so they count once.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: Device = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype, device)
        self.tp_rank = integer("RowParallelLinear", "tp_rank", tp_rank)
        self.tp_size = integer("RowParallelLinear", "tp_size", tp_size)
        check_communicator(communicator, self.tp_rank, self.tp_size)
        self.communicator = communicator
        self.weight = Parameter(self.get_parameter("weight"), 1, tp_rank, tp_size)

    def compute_linear(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.tp_size == 1 or self.communicator is None:
            return super().compute_linear(x, residual)
        y = self.communicator.all_reduce(F.linear(x, self.weight))
        y = y if self.bias is None else y + self.bias
        if residual is None:
            return y
        check_like(type(self).__name__, y, "residual", residual, y.shape)
        return y + residual

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"


def is_product(layer: torch.nn.Module) -> bool:
    """Whether a call of the layer is a product with its weight and no more"""
    return type(layer) is Linear and not is_observed(layer)


def is_rms_norm(norm: torch.nn.Module | None) -> bool:
    """Whether a call of the norm is rms_norm with its weight and no more, which an op can do on the way"""
    return type(norm) is RMSNorm and not is_observed(norm)


def adds_residual(module: torch.nn.Module) -> bool:
    """Whether the module is to add the residual: one that somebody put in the place of ours may not know it,
    and who observes a module wants what it makes alone."""
    return takes_residual(type(module).forward) and not is_observed(module)


def takes_residual(forward: Callable[..., Tensor]) -> bool:
    """By its code: to read a signature takes longer, and torch.compile cannot."""
    code = getattr(forward, "__code__", None)
    return code is not None and "residual" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def project_onto(x: Tensor, layer: torch.nn.Module, residual: Tensor | None) -> Tensor:
    """layer(x), with a residual added if there is one, in one pass where the layer can"""
    if residual is None or adds_residual(layer):
        y: Tensor = layer(x) if residual is None else layer(x, residual)
        return y
    return ops.add(residual, layer(x))


def project(x: Tensor, *layers: BaseLinear) -> tuple[Tensor, ...]:
    """x through each layer, in one pass over x where their weights are packed."""
    if not all(map(is_product, layers)):
        return tuple(layer(x) for layer in layers)
    return linear_group(x, [layer.weight for layer in layers], [layer.bias for layer in layers])


def project_gated(
    x: Tensor, gate: BaseLinear, up: BaseLinear, norm: RMSNorm | None, activation: str = "silu"
) -> Tensor:
    """activation(gate(x)) * up(x), in one pass where their weights are packed; of norm(x) if there is a norm

    The activation is "silu" or "gelu_tanh".
    """
    if norm is not None and not is_rms_norm(norm):
        x, norm = norm(x), None
    if not (is_product(gate) and is_product(up)):
        x = x if norm is None else norm(x)
        return gate_of(activation)(gate(x), up(x))
    return gated_linear(x, gate.weight, up.weight, gate.bias, up.bias, norm, activation)


def project_through(  # noqa: PLR0913  three layers, what comes before and after them
    x: Tensor,
    gate: BaseLinear,
    up: BaseLinear,
    down: BaseLinear,
    norm: RMSNorm | None,
    residual: Tensor | None,
    activation: str = "silu",
) -> Tensor:
    """down(activation(gate(x)) * up(x)), of norm(x) if there is one, plus a residual if there is one.

    In one pass where their weights are packed.
    """
    layers = gate, up, down
    if all(map(is_product, layers)) and can_follow_gate(weights := [layer.weight for layer in layers]):
        biases = [layer.bias for layer in layers]
        return gated_linear_onto(x if norm is None else norm(x), weights, biases, residual, activation)
    return project_onto(project_gated(x, gate, up, norm, activation), down, residual)


def project_heads(x: Tensor, layers: Sequence[BaseLinear], norm: RMSNorm | None, where: Where) -> Tensor:
    """The queries [N, H, D] of norm(x), rotated; its keys and values go where they belong. The layers are
    those of q, k and v."""
    whole = None
    if not x.is_cpu and is_rms_norm(norm) and all(map(is_product, layers)):
        whole = joined([layer.weight for layer in layers], [layer.bias for layer in layers])
    if whole is not None:
        check_linear(x, *whole)
        return ops.project_heads(x, *scale_of(norm, x), *whole, *where)
    projected = project(x if norm is None else norm(x), *layers)
    return ops.store_heads(*(part.view(len(x), -1, where.head_dim) for part in projected), *where)


def lay_together(*layers: BaseLinear) -> None:
    """Put the weights of layers that have one input one after the other in memory; `project` then multiplies
    them as one on a GPU. To move the layers elsewhere undoes it."""
    for name in ("weight", "bias"):
        parts = [getattr(layer, name) for layer in layers]
        if all(isinstance(part, Tensor) for part in parts) and len({part.dtype for part in parts}) == 1:
            together = torch.split(torch.cat([part.data for part in parts]), [len(part) for part in parts])
            for part, place in zip(parts, together, strict=True):
                part.data = place
    weights: list[Any] = [layer.weight for layer in layers]
    if can_be_one(weights):
        for layer, weight in zip(layers, laid_together(weights), strict=True):
            layer.set_weight(weight)


def uniform(shape: tuple[int, ...], bound: float, dtype: torch.dtype | None, device: Device) -> Tensor:
    """First values; none on the meta device, where torch would take seconds to find out that it has none."""
    weight = torch.empty(shape, dtype=dtype, device=device)
    return weight if weight.is_meta else weight.uniform_(-bound, bound)


def check_communicator(communicator: Communicator | None, tp_rank: int, tp_size: int) -> None:
    if not isinstance(communicator, Communicator | None):
        found = type(communicator).__name__
        raise TypeError(f"RowParallelLinear: communicator must be a Communicator or None, but is {found}")
    if communicator is None and tp_size > 1:
        raise ValueError(f"tp_size={tp_size} needs a communicator, to sum the products of the ranks")
    if communicator is not None and (communicator.rank, communicator.size) != (tp_rank, tp_size):
        raise ValueError(
            f"the communicator is rank {communicator.rank} of {communicator.size}, "
            f"but the layer is tp_rank={tp_rank} of tp_size={tp_size}"
        )
