"""Float8Tensor: a matrix of 8-bit floats (e4m3) with a scale for each row, which GPUs multiply from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil

import torch
from torch import Tensor

from infinicore.tiles import RowTensor

LARGEST = 448.0  # of a float8_e4m3fn
CHUNK = 1 << 24  # values that are rounded at once


class Float8(Enum):
    """Stands where blocks have their BlockType."""

    FP8 = "e4m3, a scale for each row"

    @property
    def elements_per_block(self) -> int:
        """Kernels take 16 values of a row at once."""
        return 16


@dataclass(frozen=True, eq=False, repr=False)
class Float8Tensor(RowTensor):
    """blocks uint8 [N, K], the bytes of float8_e4m3fn, and scales uint8 [N, 4], those of a float32 each.

    Both are bytes so that no change of a model's dtype reaches them.
    """

    scales: Tensor

    def __post_init__(self) -> None:
        found = tuple(self.blocks.shape), tuple(self.scales.shape)
        if found != (self.shape, (self.shape[0], 4)) or self.blocks.dtype != torch.uint8:
            raise ValueError(
                f"float8 {self.shape} needs bytes and scales of its rows, but has shapes {found}"
            )

    @property
    def values(self) -> Tensor:
        return self.blocks.view(torch.float8_e4m3fn)

    @property
    def row_scales(self) -> Tensor:
        """float32 [N]"""
        return self.scales.view(torch.float32).flatten()

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel() + self.scales.numel()

    @property
    def planes(self) -> tuple[Tensor, ...]:
        return self.blocks, self.scales

    def of(self, planes: Sequence[Tensor], num_rows: int) -> Float8Tensor:
        return replace(self, blocks=planes[0], scales=planes[1], shape=(num_rows, self.shape[1]))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Float8Tensor:
        return replace(self, blocks=move(self.blocks), scales=move(self.scales))

    def rows(self, indices: Tensor) -> Float8Tensor:
        return self.of([plane[indices] for plane in self.planes], len(indices))

    def has_finite_scales(self) -> bool:
        return bool(self.row_scales.isfinite().all())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        for rows in chunks(self.shape):
            result[rows] = self.values[rows].float() * self.row_scales[rows, None]
        return result


def to_float8(matrix: Tensor) -> Float8Tensor:
    """Each row rounded to float8, its largest value being the largest there is"""
    if not bool(matrix.isfinite().all()):
        raise ValueError("to_float8: the matrix holds NaN or infinity, which no scale can bring into range")
    values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    for rows in chunks(tuple(matrix.shape)):
        wide = matrix[rows].float()
        scales[rows] = (wide.abs().amax(1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        values[rows] = (wide / scales[rows, None]).clamp(-LARGEST, LARGEST).to(values.dtype)
    planes = values.view(torch.uint8), scales[:, None].view(torch.uint8)
    return Float8Tensor(planes[0], Float8.FP8, tuple(matrix.shape), planes[1])  # type: ignore[arg-type]


def chunks(shape: tuple[int, ...]) -> list[slice]:
    step = ceil(CHUNK / max(shape[1], 1))
    return [slice(start, start + step) for start in range(0, shape[0], step)]
