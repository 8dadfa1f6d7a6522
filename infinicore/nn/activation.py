"""Activations as modules."""

from __future__ import annotations

from torch import Tensor

from infinicore.nn import functional as F
from infinicore.nn.module import Module


class GELU(Module):
    """x * Phi(x): the tanh form, x * sigmoid(1.702 x) ("fast"), or exactly ("none")."""

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        if approximate not in ("none", "tanh", "fast"):
            raise ValueError(f"GELU: approximate must be 'none', 'tanh' or 'fast', but is {approximate!r}")
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SiLU(Module):
    """x * sigmoid(x)"""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Softmax(Module):
    """exp(x) / sum(exp(x)) over dim"""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
