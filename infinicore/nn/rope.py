"""Rotary position embedding with its tables."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from infinicore.nn import functional as F
from infinicore.nn.functional import RopeAlgo
from infinicore.nn.module import Module


class RoPE(Module):
    """Rotates x [(B,) S, H, D] by positions [S] or [B, S]; its tables [max_seq_len, D/2] are not saved."""

    Algo: ClassVar[type[RopeAlgo]] = RopeAlgo
    sin_table: Tensor
    cos_table: Tensor

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        theta: float = 10000.0,
        algo: RopeAlgo = RopeAlgo.GPT_J,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"RoPE: head_dim must be even and positive, but is {head_dim}")
        if max_seq_len < 1:
            raise ValueError(f"RoPE: max_seq_len must be positive, but is {max_seq_len}")
        if not (math.isfinite(theta) and theta > 0):
            raise ValueError(f"RoPE: theta must be finite and positive, but is {theta!r}")
        if not isinstance(algo, RopeAlgo):
            raise TypeError(f"RoPE: algo must be a RopeAlgo, but is {algo!r}")
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.algo = algo
        sin, cos = self.tables()
        dtype = dtype or torch.get_default_dtype()
        self.register_buffer("sin_table", sin.to(device=device, dtype=dtype), persistent=False)
        self.register_buffer("cos_table", cos.to(device=device, dtype=dtype), persistent=False)

    def tables(self) -> tuple[Tensor, Tensor]:
        """sin and cos of position * theta^(-2i/D), computed in float32 as models are trained with"""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequency = 1.0 / (self.theta**exponent)
        angle = torch.outer(torch.arange(self.max_seq_len, dtype=torch.float32), frequency)
        return angle.sin(), angle.cos()

    def forward(self, x: Tensor, pos: Tensor, in_place: bool = False, *, out: Tensor | None = None) -> Tensor:
        if in_place and out is not None:
            raise ValueError("RoPE: in_place=True and out= exclude each other; pass one of them")
        sin, cos = self.sin_table, self.cos_table
        if x.dtype != sin.dtype:
            sin, cos = sin.to(x.dtype), cos.to(x.dtype)
        return F.rope(x, pos, sin, cos, self.algo, out=x if in_place else out)

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, max_seq_len={self.max_seq_len}"
        return f"{sizes}, theta={self.theta}, algo={self.algo.name}"
