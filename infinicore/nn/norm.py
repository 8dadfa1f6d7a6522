"""RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infinicore.checks import check_eps, check_place, sizes
from infinicore.nn import functional as F
from infinicore.nn.checks import check_float, check_like, check_normalized
from infinicore.nn.module import Module, Parameter


def normalized_sizes(layer: str, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    found = sizes(layer, "normalized_shape", normalized_shape)
    if not found or min(found) < 1:
        raise ValueError(f"{layer}: normalized_shape must hold positive sizes, but is {found}")
    return found


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; any leading ones."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_place("RMSNorm", dtype, device)
        self.normalized_shape = normalized_sizes("RMSNorm", normalized_shape)
        self.eps = check_eps("RMSNorm", eps)
        self.weight = Parameter(torch.ones(self.normalized_shape, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.normalized_shape))}, eps={self.eps}"


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over a suffix of the shape, of any rank.

    `forward` is the fused form with float64 sums; `forward_standard` is the same in separate torch steps.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_place("LayerNorm", dtype, device)
        self.normalized_shape = normalized_sizes("LayerNorm", normalized_shape)
        self.eps = check_eps("LayerNorm", eps)
        self.weight = Parameter(torch.ones(self.normalized_shape, dtype=dtype, device=device))
        self.bias = Parameter(torch.zeros(self.normalized_shape, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def forward_standard(self, x: Tensor) -> Tensor:
        check_float("layer_norm", "input", x)
        check_normalized("layer_norm", x, self.normalized_shape)
        check_like("layer_norm", x, "weight", self.weight, self.normalized_shape)
        dims = tuple(range(-len(self.normalized_shape), 0))
        centered = x - x.mean(dims, keepdim=True)
        variance = centered.square().mean(dims, keepdim=True)
        return centered / (variance + self.eps).sqrt() * self.weight + self.bias

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"
