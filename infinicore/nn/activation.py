"""Activations as modules. They hold nothing, so `dtype` and `device`, taken as by every layer, do nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from infinicore.checks import check_place, integer
from infinicore.nn import functional as F
from infinicore.nn.checks import check_approximate
from infinicore.nn.module import Module


class GELU(Module):
    """x * Phi(x): the tanh form, x * sigmoid(1.702 x) ("fast"), or exactly ("none")."""

    def __init__(
        self,
        approximate: str = "tanh",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_place("GELU", dtype, device)
        check_approximate("GELU", approximate)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SiLU(Module):
    """x * sigmoid(x)"""

    def __init__(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        check_place("SiLU", dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Softmax(Module):
    """exp(x) / sum(exp(x)) over dim"""

    def __init__(
        self,
        dim: int = -1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_place("Softmax", dtype, device)
        self.dim = integer("Softmax", "dim", dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
