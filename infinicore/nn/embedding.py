"""Embedding of tokens, and of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral  # numpy's too
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from infinicore.checks import check_place, integer, positive
from infinicore.nn import functional as F
from infinicore.nn.checks import HALVES
from infinicore.nn.module import Module, Parameter
from infinicore.nn.weight import WeightLayer

Ids = Tensor | Sequence[int] | Sequence[Sequence[int]]


class Embedding(WeightLayer):
    """A table of rows looked up by id: [*] -> [*, embedding_dim]. Lists of ids, also nested, do too."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_place("Embedding", dtype, device)
        self.num_embeddings = num_embeddings = positive("Embedding", "num_embeddings", num_embeddings)
        self.embedding_dim = embedding_dim = positive("Embedding", "embedding_dim", embedding_dim)
        if padding_idx is not None:
            padding_idx = integer("Embedding", "padding_idx", padding_idx)
            if not 0 <= padding_idx < num_embeddings:
                raise ValueError(f"Embedding: padding_idx {padding_idx} is outside [0, {num_embeddings})")
        self.padding_idx = padding_idx
        std = math.sqrt(2.0 / (num_embeddings + embedding_dim))
        weight = normal((num_embeddings, embedding_dim), std, dtype, device)
        if padding_idx is not None and not weight.is_meta:
            weight[padding_idx] = 0
        self.weight = Parameter(weight)

    def forward(self, indices: Ids, dtype: torch.dtype | None = None) -> Tensor:
        """The rows in `dtype`, or as the weight has them."""
        check_place("Embedding", dtype, None)
        ids, weight = ids_tensor(indices, self.num_embeddings, self.weight.device), self.weight
        # The padding row does not learn
        is_learning = isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled()
        padding_idx = self.padding_idx if is_learning else None
        if dtype is torch.float32 and isinstance(weight, Tensor) and weight.dtype in HALVES:
            widened = torch.empty((*ids.shape, self.embedding_dim), dtype=dtype, device=weight.device)
            return F.embedding(ids, weight, padding_idx, out=widened)
        rows = F.embedding(ids, weight, padding_idx)
        return rows if dtype is None else rows.to(dtype)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        sizes = f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"
        return f"{sizes}{padding}{super().extra_repr()}"


def normal(
    shape: tuple[int, ...], std: float, dtype: torch.dtype | None, device: torch.device | str | None
) -> Tensor:
    """First values; none on the meta device, where torch would take seconds to find out that it has none."""
    weight = torch.empty(shape, dtype=dtype, device=device)
    return weight if weight.is_meta else weight.normal_(0, std)


def ids_tensor(indices: Ids, num_embeddings: int, device: torch.device) -> Tensor:
    """Ids as a tensor; an empty or ragged list is refused rather than padded."""
    if isinstance(indices, Tensor):
        return indices
    if not isinstance(indices, Sequence) or isinstance(indices, str):
        raise TypeError(
            f"Embedding: ids must be a tensor or lists of integers, but are {type(indices).__name__}"
        )
    rows = [list(row) for row in indices if isinstance(row, Sequence)]
    if not indices or (rows and len(rows) != len(indices)):
        wanted = "a non-empty list of integers, or of lists of integers"
        raise ValueError(f"Embedding: ids must be {wanted}, but are {short(indices)}")
    for i, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"Embedding: sequence {i} has length {len(row)}, but sequence 0 has {len(rows[0])}"
            )
    items: list[Any] = [item for row in rows for item in row] if rows else list(indices)
    check_items(items, num_embeddings)
    return torch.tensor(rows or items, dtype=torch.int64, device=device)


def check_items(items: list[Any], num_embeddings: int) -> None:
    for other in (item for item in items if type(item) is not int):
        if not isinstance(other, Integral) or isinstance(other, bool):
            raise TypeError(f"Embedding: ids must be integers, but {short(other)} is among them")
    num_bits = max((int(item).bit_length() for item in items), default=0)
    if num_bits > 63:  # which torch cannot hold, and Python may find too long to show
        raise IndexError(f"Embedding: an id of {num_bits} bits is outside [0, {num_embeddings})")


class PositionalEmbedding(Module):
    """A row for each position, learned or `sinusoidal`: forward(seq_len, offset) -> [seq_len, embed_dim]"""

    def __init__(
        self,
        max_len: int,
        embed_dim: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_place("PositionalEmbedding", dtype, device)
        self.max_len = positive("PositionalEmbedding", "max_len", max_len)
        self.embed_dim = positive("PositionalEmbedding", "embed_dim", embed_dim)
        self.weight = Parameter(normal((self.max_len, self.embed_dim), 0.02, dtype, device))

    @classmethod
    def sinusoidal(
        cls,
        max_len: int,
        embed_dim: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> PositionalEmbedding:
        """sin at even and cos at odd columns i of position / 10000^(2 floor(i/2) / embed_dim)"""
        module = cls(max_len, embed_dim, dtype, device)
        column = torch.arange(embed_dim, dtype=torch.float64, device="cpu")
        frequency = 10000.0 ** (-2.0 * (column // 2) / embed_dim)
        position = torch.arange(max_len, dtype=torch.float64, device="cpu")
        angle = position[:, None] * frequency  # [max_len, embed_dim]
        if not module.weight.is_meta:
            module.weight.load(torch.where(column % 2 == 0, angle.sin(), angle.cos()))
        return module

    def forward(self, seq_len: int, offset: int = 0) -> Tensor:
        seq_len = integer("PositionalEmbedding", "seq_len", seq_len)
        offset = integer("PositionalEmbedding", "offset", offset)
        if seq_len < 0 or offset < 0 or offset + seq_len > self.max_len:
            found = f"seq_len {seq_len} from offset {offset}"
            raise ValueError(f"PositionalEmbedding: {found} does not fit max_len {self.max_len}")
        return self.weight[offset : offset + seq_len].clone()

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, embed_dim={self.embed_dim}"
