"""Rotary position embedding with its tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor

from infinicore.checks import check_place, integer, number, positive
from infinicore.nn import functional as F
from infinicore.nn.checks import check_float
from infinicore.nn.functional import RopeAlgo
from infinicore.nn.module import Module


def sin_and_cos(angle: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """sin and cos times a factor. Each angle is taken alone: torch's sin takes several at once, and how it
    rounds one depends on those beside it, and so on the number of threads."""
    turned = torch.polar(angle.new_tensor(factor), angle)
    return turned.imag.contiguous(), turned.real.contiguous()


class RoPE(Module):
    """Rotates x [(B,) S, H, D] by positions [S] or [B, S]; its tables [max_seq_len, D/2] are not saved.

    The buffers follow the module's dtype and device, and x may have another dtype. Whatever the dtype, tables
    are rounded once, from float32: a module that was bfloat16 for a while has lost nothing.
    """

    Algo: ClassVar[type[RopeAlgo]] = RopeAlgo
    sin_cache: Tensor
    cos_cache: Tensor

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
        check_place("RoPE", dtype, device)
        self.head_dim = integer("RoPE", "head_dim", head_dim)
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"RoPE: head_dim must be even and positive, but is {head_dim}")
        self.max_seq_len = positive("RoPE", "max_seq_len", max_seq_len)
        self.theta = number("RoPE", "theta", theta)
        if not 0 < self.theta < math.inf:
            raise ValueError(f"RoPE: theta must be finite and positive, but is {theta!r}")
        if not isinstance(algo, RopeAlgo):
            raise TypeError(f"RoPE: algo must be a RopeAlgo, but is {algo!r}")
        self.algo = algo
        self.register_buffer("sin_cache", None, persistent=False)
        self.register_buffer("cos_cache", None, persistent=False)
        device = torch.get_default_device() if device is None else torch.device(device)
        self.set_tables(*self.tables(), dtype or torch.get_default_dtype(), device)

    def tables(self) -> tuple[Tensor, Tensor]:
        """sin and cos of position * theta^(-2i/D), computed in float32 as models are trained with"""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu") / self.head_dim
        frequency = 1.0 / (self.theta**exponent)
        angle = torch.outer(torch.arange(self.max_seq_len, dtype=torch.float32, device="cpu"), frequency)
        return sin_and_cos(angle)

    def set_tables(self, sin: Tensor, cos: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        """Rotate by these tables, which are float32 on the CPU, with the buffers in this dtype and place."""
        self._exact = sin, cos
        self.sin_cache, self.cos_cache = sin.to(device, dtype), cos.to(device, dtype)
        self._rounded: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def tables_as(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The buffers, or tables in another dtype that x has, rounded when it is first seen."""
        if dtype == self.sin_cache.dtype:
            return self.sin_cache, self.cos_cache
        if dtype not in self._rounded:
            sin, cos = self._exact
            device = self.sin_cache.device
            self._rounded[dtype] = sin.to(device, dtype), cos.to(device, dtype)
        return self._rounded[dtype]

    def rotation(self, pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, bool]:
        """How far heads of a dtype are rotated at these positions, as ops take it"""
        return pos, *self.tables_as(dtype), self.algo is RopeAlgo.GPT_J

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """torch converts the buffers as they are; here their new dtype and device are filled anew."""
        super()._apply(fn, recurse)
        self.set_tables(*self._exact, self.sin_cache.dtype, self.sin_cache.device)
        return self

    def forward(self, x: Tensor, pos: Tensor, in_place: bool = False, *, out: Tensor | None = None) -> Tensor:
        if not isinstance(in_place, bool):
            raise TypeError(
                f"RoPE: in_place must be a bool, but is {type(in_place).__name__}; out= takes a tensor"
            )
        if in_place and out is not None:
            raise ValueError("RoPE: in_place=True and out= exclude each other; pass one of them")
        check_float("RoPE", "x", x)
        sin, cos = self.tables_as(x.dtype)
        return F.rope(x, pos, sin, cos, self.algo, out=x if in_place else out)

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, max_seq_len={self.max_seq_len}"
        return f"{sizes}, theta={self.theta}, algo={self.algo.name}"
