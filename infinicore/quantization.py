"""Block formats: rows of weights in 2 to 8 bits, each block with scales of its own, as GGUF stores them.

A tensor stays in blocks in memory; `dequantize` says what they mean, bit for bit as ggml defines it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from math import prod
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from infinicore import _native
from infinicore.block_formats import DEQUANTIZERS, QUANTIZERS


class BlockType(Enum):
    """Name = ggml's type id, elements per block, bytes per block."""

    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    MXFP4 = (39, 32, 17)

    def __init__(self, ggml_id: int, elements_per_block: int, bytes_per_block: int) -> None:
        self.ggml_id = ggml_id
        self.elements_per_block = elements_per_block
        self.bytes_per_block = bytes_per_block

    def bytes_per_row(self, row_length: int) -> int:
        if row_length % self.elements_per_block:
            raise ValueError(
                f"a row of {row_length} does not fill {self.name} blocks of {self.elements_per_block}"
            )
        return row_length // self.elements_per_block * self.bytes_per_block

    def packed_shape(self, num_rows: int, row_length: int) -> tuple[int, int]:
        """Of a matrix with PACKED_ROWS rows side by side: how many such panels, and the bytes of one"""
        return -(-num_rows // PACKED_ROWS), PACKED_ROWS * self.bytes_per_row(row_length)


FLOAT16_EXPONENT = 0x7C00  # all of it set: infinity or NaN

# Where the float16 scale of a block lies, and its minimum if it has one: the first byte and the end.
SCALE_BYTES = {
    BlockType.Q4_0: (0, 2),
    BlockType.Q4_1: (0, 4),
    BlockType.Q5_0: (0, 2),
    BlockType.Q5_1: (0, 4),
    BlockType.Q8_0: (0, 2),
    BlockType.Q2_K: (80, 84),
    BlockType.Q3_K: (108, 110),
    BlockType.Q4_K: (0, 4),
    BlockType.Q5_K: (0, 4),
    BlockType.Q6_K: (208, 210),
    BlockType.IQ4_NL: (0, 2),
    BlockType.IQ4_XS: (0, 2),
    BlockType.MXFP4: (0, 1),  # which is an exponent
}
INFINITE_EXPONENT = 253  # of which the largest code, 6, makes infinity, as of 254; 255 stands for NaN


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """A tensor of `shape` kept in blocks, uint8 [rows, bytes per row], where a row is the last dimension.

    Rows are independent, so they may be selected, sliced or permuted without leaving the format.
    """

    blocks: Tensor
    type: BlockType
    shape: tuple[int, ...]
    native: ClassVar[_native.Weight]  # of each tensor: made of its fields, and none of them

    def __post_init__(self) -> None:
        self._check_blocks((prod(self.shape[:-1]), self.type.bytes_per_row(self.shape[-1])), self.type.name)
        self._hold(activation_bits=0)

    def _check_blocks(self, wanted: tuple[int, int], name: str) -> None:
        if self.blocks.dtype != torch.uint8 or tuple(self.blocks.shape) != wanted:
            raise ValueError(
                f"{name} {self.shape} needs torch.uint8 blocks {wanted}, "
                f"but has {self.blocks.dtype} {tuple(self.blocks.shape)}"
            )

    def _hold(self, activation_bits: int) -> None:
        """What kernels take: the blocks with what their bytes do not say"""
        num_rows = prod(self.shape[:-1])
        native = _native.Weight(self.blocks, self.type.ggml_id, num_rows, activation_bits)
        object.__setattr__(self, "native", native)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel()

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def to(self, device: torch.device | str) -> Self:
        return self.moved(lambda memory: memory.to(device))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """With its memory where `move` puts it"""
        return replace(self, blocks=move(self.blocks))

    def clone(self) -> Self:
        """With blocks of its own, where these may be pages of a file."""
        if not self.blocks.is_cpu:
            return replace(self, blocks=self.blocks.clone())
        return replace(self, blocks=aligned_bytes(*self.blocks.shape).copy_(self.blocks))

    def rows(self, indices: Tensor) -> "QuantizedTensor":
        """The rows that indices [R] name, still in blocks: [R, last dimension]"""
        rows = self.blocks.index_select(0, indices)  # whole rows are copied; by [indices] it would be bytes
        return replace(self, blocks=rows, shape=(len(indices), self.shape[-1]))

    def part(self, begin: int, end: int) -> "QuantizedTensor":
        """Rows from begin to end: [end - begin, last dimension], in the same memory where they can be"""
        self._check_part(begin, end)
        return replace(self, blocks=self.blocks[begin:end], shape=(end - begin, self.shape[-1]))

    def _check_part(self, begin: int, end: int) -> None:
        num_rows = prod(self.shape[:-1])
        if not 0 <= begin <= end <= num_rows:
            raise IndexError(f"rows from {begin} to {end} are not among the {num_rows} there are")

    def has_finite_scales(self) -> bool:
        """Whether every scale and minimum is a number: the codes beside them always are."""
        if self.type is BlockType.MXFP4:
            return _has_exponents(self.blocks, 1)
        begin, end = SCALE_BYTES[self.type]
        if self.blocks.is_cpu and self.blocks.is_contiguous():
            return _native.has_finite_halves(self.blocks, self.type.bytes_per_block, begin, end)
        blocks = self.blocks.reshape(-1, self.type.bytes_per_block)
        halves = blocks.view(torch.int16)[:, begin // 2 : end // 2]
        return not bool(((halves & FLOAT16_EXPONENT) == FLOAT16_EXPONENT).any())

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self.type.name}, shape={self.shape}, device={str(self.device)!r})"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, computed in float32 and rounded once to dtype."""
        values = torch.empty(self.shape, dtype=dtype, device=self.blocks.device)
        blocks = self.blocks.reshape(-1, self.type.bytes_per_block)
        rows = values.view(-1, self.type.elements_per_block)
        # In chunks, so that the intermediates stay in the cache and cost no memory beside the result.
        for chunk in _chunks(len(blocks), blocks.device):
            rows[chunk] = DEQUANTIZERS[self.type.name](blocks[chunk])
        return values

    def pack(self, activation_bits: int = 8) -> "PackedTensor":
        """The same matrix on a CPU, laid out for products with activations rounded to 8, 12 or 16 bits."""
        packed = aligned_bytes(*self.type.packed_shape(len(self.blocks), self.shape[-1]))
        _native.pack_rows(packed, self.blocks.contiguous(), self.type.ggml_id)
        return PackedTensor(packed, self.type, self.shape, activation_bits)


FOUR_BITS = (BlockType.Q4_0, BlockType.Q4_1, BlockType.Q4_K)


def precise_activation_bits(type: BlockType) -> int:
    """What keeps a product close to that of floats: 16, or 12 where tile registers do those for nothing."""
    return 12 if _native.isa() == "amx" and type in FOUR_BITS else 16


PACKED_ROWS = _native.PACKED_ROWS
CACHE_LINE = 64


def aligned_bytes(num_rows: int, row_bytes: int) -> Tensor:
    """Uninitialised bytes from numpy's allocator: torch's may round sizes up by half, and a model is many."""
    size = num_rows * row_bytes
    raw = np.empty(size + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + size]).view(num_rows, row_bytes)


@dataclass(frozen=True, eq=False, repr=False)
class PackedTensor(QuantizedTensor):
    """A quantised matrix with 16 rows side by side, piece by piece, the last ones filled up with zeros.

    To hold one is to choose speed: a linear layer rounds its activations and works on integers. Of the mean
    square, 8 bits cost 1e-5 to 1e-4, 12 bits 1e-7 and 16 bits 1e-9, either at twice the integer work, but for
    12 bits and weights of four on AMX, which cost no more than 8.
    The weights themselves are the same to the last bit, as `unpack` shows.
    """

    activation_bits: int = 8

    def __post_init__(self) -> None:
        if self.activation_bits not in (8, 12, 16):
            raise ValueError(f"activation_bits must be 8, 12 or 16, but is {self.activation_bits!r}")
        if len(self.shape) != 2:
            raise ValueError(f"packed {self.type.name} must be a matrix, but has shape {self.shape}")
        self._check_blocks(self.type.packed_shape(*self.shape), f"packed {self.type.name}")
        self._hold(self.activation_bits)

    @property
    def rounding(self) -> tuple[int, int]:
        """To how many bits activations are rounded, and how many share a scale: 32, or 256 where tile
        registers take blocks of a type whole. Where AVX-512 does so, 64 share one, of as many bits as their
        sums have room for: 14 with Q6_K and IQ4_XS, 15 with Q5_K."""
        return _native.activation_rounding(self.type.ggml_id, self.activation_bits)

    def unpack(self) -> QuantizedTensor:
        with torch._C._DisableFuncTorch(), _disable_current_modes():  # to a transform this is a constant
            blocks = aligned_bytes(self.shape[0], self.type.bytes_per_row(self.shape[1]))
            _native.unpack_rows(blocks, self.blocks, self.type.ggml_id)
        return QuantizedTensor(blocks, self.type, self.shape)

    def pack(self, activation_bits: int = 8) -> "PackedTensor":
        return replace(self, activation_bits=activation_bits)

    def rows(self, indices: Tensor) -> "PackedTensor":
        return self.unpack().rows(indices).pack(self.activation_bits)

    def part(self, begin: int, end: int) -> "PackedTensor":
        self._check_part(begin, end)
        if begin % PACKED_ROWS or (end % PACKED_ROWS and end < self.shape[0]):
            return self.rows(torch.arange(begin, end, device=self.device))
        panels = self.blocks[begin // PACKED_ROWS : -(-end // PACKED_ROWS)]
        return replace(self, blocks=panels, shape=(end - begin, self.shape[1]))

    def has_finite_scales(self) -> bool:
        if self.type is BlockType.MXFP4:
            return _has_exponents(self.blocks, PACKED_ROWS)
        step, begin, end = (PACKED_ROWS * n for n in (self.type.bytes_per_block, *SCALE_BYTES[self.type]))
        return _native.has_finite_halves(self.blocks, step, begin, end)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.unpack().dequantize(dtype)


def _has_exponents(blocks: Tensor, num_rows: int) -> bool:
    """Whether all values of MXFP4 can be numbers, in blocks of so many rows side by side"""
    exponents = blocks.reshape(-1, num_rows * BlockType.MXFP4.bytes_per_block)[:, :num_rows]
    return not bool((exponents >= INFINITE_EXPONENT).any())


NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantize(tensor: Tensor, type: BlockType) -> QuantizedTensor:
    """Round each block of a row to Q8_0 or Q4_0, bit for bit as ggml does."""
    if not isinstance(tensor, Tensor) or not isinstance(type, BlockType) or tensor.dim() == 0:
        found = f"{tensor!r:.80} and {type!r}"
        raise TypeError(f"quantize takes a tensor of rows and a BlockType, but found {found}")
    if type.name not in QUANTIZERS:
        raise ValueError(f"quantize makes {', '.join(QUANTIZERS)}, not {type.name}")
    shape = tuple(tensor.shape)
    row_bytes = type.bytes_per_row(shape[-1])
    if tensor.is_cpu and tensor.dtype in NATIVE_DTYPES:
        rows = tensor.detach().reshape(prod(shape[:-1]), shape[-1]).contiguous()
        result = QuantizedTensor(aligned_bytes(len(rows), row_bytes), type, shape)
        _native.quantize_rows(result.blocks, rows, type.ggml_id)
        if result.has_finite_scales():
            return result
    blocks = tensor.reshape(-1, type.elements_per_block)
    packed = torch.empty(len(blocks), type.bytes_per_block, dtype=torch.uint8, device=tensor.device)
    for chunk in _chunks(len(blocks), tensor.device):
        packed[chunk] = QUANTIZERS[type.name](blocks[chunk].float())
    return QuantizedTensor(packed.view(prod(shape[:-1]), row_bytes), type, shape)


def _chunks(num_blocks: int, device: torch.device) -> list[slice]:
    length = 1 << 13 if device.type == "cpu" else 1 << 19  # a GPU is kept busy by no less
    return [slice(start, start + length) for start in range(0, num_blocks, length)]
