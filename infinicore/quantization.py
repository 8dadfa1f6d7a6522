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

from infinicore import _native

# N blocks, E elements of a block, G groups of a block, R runs of W bytes


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
NO_EXPONENT = 255  # stands for NaN


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """A tensor of `shape` kept in blocks, uint8 [rows, bytes per row], where a row is the last dimension.

    Rows are independent, so they may be selected, sliced or permuted without leaving the format.
    """

    blocks: Tensor
    type: BlockType
    shape: tuple[int, ...]
    native: ClassVar[_native.Weight]

    def __post_init__(self) -> None:
        wanted = (prod(self.shape[:-1]), self.type.bytes_per_row(self.shape[-1]))
        if self.blocks.dtype != torch.uint8 or tuple(self.blocks.shape) != wanted:
            raise ValueError(
                f"{self.type.name} {self.shape} needs torch.uint8 blocks {wanted}, "
                f"but has {self.blocks.dtype} {tuple(self.blocks.shape)}"
            )
        self._hold(activation_bits=0)

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
        return replace(self, blocks=self.blocks[indices], shape=(len(indices), self.shape[-1]))

    def part(self, begin: int, end: int) -> "QuantizedTensor":
        """Rows from begin to end: [end - begin, last dimension], in the same memory where they can be"""
        return replace(self, blocks=self.blocks[begin:end], shape=(end - begin, self.shape[-1]))

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
            rows[chunk] = DEQUANTIZERS[self.type](blocks[chunk])
        return values

    def pack(self, activation_bits: int = 8) -> "PackedTensor":
        """The same matrix on a CPU, laid out for products with activations rounded to 8, 12 or 16 bits."""
        num_rows, row_bytes = self.blocks.shape
        packed = aligned_bytes(-(-num_rows // PACKED_ROWS), PACKED_ROWS * row_bytes)
        _native.pack_rows(packed, self.blocks.contiguous(), self.type.ggml_id)
        return PackedTensor(packed, self.type, self.shape, activation_bits)


FOUR_BITS = (BlockType.Q4_0, BlockType.Q4_1, BlockType.Q4_K)


def precise_activation_bits(type: BlockType) -> int:
    """What keeps a product close to that of floats: 16, or 12 where tile registers do those for nothing."""
    return 12 if _native.isa() == "amx" and type in FOUR_BITS else 16


PACKED_ROWS = 16
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

    To hold one is to choose speed: a linear layer rounds its activations, 32 at a time, and works on
    integers. Of the mean square, 8 bits cost 1e-5 to 1e-4, 12 bits 1e-7 and 16 bits 1e-9, either at twice
    the integer work.
    The weights themselves are the same to the last bit, as `unpack` shows.
    """

    activation_bits: int = 8

    def __post_init__(self) -> None:
        if self.activation_bits not in (8, 12, 16):
            raise ValueError(f"activation_bits must be 8, 12 or 16, but is {self.activation_bits!r}")
        row_bytes = self.type.bytes_per_row(self.shape[-1])
        wanted = (-(-self.shape[0] // PACKED_ROWS), PACKED_ROWS * row_bytes)
        if len(self.shape) != 2 or tuple(self.blocks.shape) != wanted or self.blocks.dtype != torch.uint8:
            raise ValueError(
                f"packed {self.type.name} {self.shape} needs torch.uint8 blocks {wanted}, "
                f"but has {self.blocks.dtype} {tuple(self.blocks.shape)}"
            )
        self._hold(self.activation_bits)

    def unpack(self) -> QuantizedTensor:
        blocks = torch.empty(self.shape[0], self.type.bytes_per_row(self.shape[1]), dtype=torch.uint8)
        _native.unpack_rows(blocks, self.blocks, self.type.ggml_id)
        return QuantizedTensor(blocks, self.type, self.shape)

    def pack(self, activation_bits: int = 8) -> "PackedTensor":
        return replace(self, activation_bits=activation_bits)

    def rows(self, indices: Tensor) -> "PackedTensor":
        return self.unpack().rows(indices).pack(self.activation_bits)

    def part(self, begin: int, end: int) -> "PackedTensor":
        if begin % PACKED_ROWS or (end % PACKED_ROWS and end < self.shape[0]):
            return self.rows(torch.arange(begin, end))
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
    """Whether all scales of MXFP4 are numbers, in blocks of so many rows side by side"""
    exponents = blocks.reshape(-1, num_rows * BlockType.MXFP4.bytes_per_block)[:, :num_rows]
    return not bool((exponents == NO_EXPONENT).any())


NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantize(tensor: Tensor, type: BlockType) -> QuantizedTensor:
    """Round each block of a row to Q8_0 or Q4_0, bit for bit as ggml does."""
    if type not in QUANTIZERS:
        known = ", ".join(known.name for known in QUANTIZERS)
        raise ValueError(f"quantize makes {known}, not {type.name}")
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
        packed[chunk] = QUANTIZERS[type](blocks[chunk].float())
    return QuantizedTensor(packed.view(prod(shape[:-1]), row_bytes), type, shape)


def _chunks(num_blocks: int, device: torch.device) -> list[slice]:
    length = 1 << 13 if device.type == "cpu" else 1 << 19  # a GPU is kept busy by no less
    return [slice(start, start + length) for start in range(0, num_blocks, length)]


# The pieces the formats are made of


def _parts(blocks: Tensor, *lengths: int) -> tuple[Tensor, ...]:
    return torch.split(blocks, list(lengths), dim=1)


def _half(raw: Tensor) -> Tensor:
    """float16 bytes [N, 2] -> float32 [N, 1]"""
    return raw.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _fields(raw: Tensor, bits: int, width: int) -> Tensor:
    """Split bytes into fields of `bits`: the lowest of each byte in a run of `width`, then the next of each.

    [N, R * W] -> [N, R * 8 / bits * W]
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device).unsqueeze(1)
    runs = raw.reshape(len(raw), -1, 1, width)  # [N, R, 1, W]
    return torch.bitwise_and(runs >> shifts, (1 << bits) - 1).flatten(1)


def _grouped(scales: Tensor, fields: Tensor, minimums: Tensor | None = None) -> Tensor:
    """Each of G equal groups times its scale, less its minimum: [N, G], [N, E], [N, G] -> [N, E]"""
    values = scales.unsqueeze(2) * fields.float().reshape(*scales.shape, -1)
    return values.flatten(1) if minimums is None else (values - minimums.unsqueeze(2)).flatten(1)


def _group_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minimums from 12 bytes, as Q4_K and Q5_K store them.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3, in the low 6 bits. Their top 2 bits belong to scales
    and minimums 4-7, whose low 4 bits are the low and the high halves of bytes 8-11.
    """
    scales, minimums, low = _parts(raw, 4, 4, 4)
    late_scales, late_minimums = (low & 15) | (scales >> 6 << 4), (low >> 4) | (minimums >> 6 << 4)
    return torch.cat([scales & 63, late_scales], 1), torch.cat([minimums & 63, late_minimums], 1)


# Each takes blocks, uint8 [N, bytes per block], to float32 [N, elements per block]


def _dequantize_q4_0(blocks: Tensor) -> Tensor:
    """scale f16 | 16 bytes: low halves are elements 0-15, high halves 16-31; value = scale * (q - 8)"""
    scale, packed = _parts(blocks, 2, 16)
    return _half(scale) * (_fields(packed, 4, 16).float() - 8)


def _dequantize_q4_1(blocks: Tensor) -> Tensor:
    """scale f16 | minimum f16 | 16 bytes as in Q4_0; value = scale * q + minimum"""
    scale, minimum, packed = _parts(blocks, 2, 2, 16)
    return _half(scale) * _fields(packed, 4, 16).float() + _half(minimum)


def _dequantize_q5_0(blocks: Tensor) -> Tensor:
    """scale f16 | 32 fifth bits, element 0 lowest | 16 bytes as in Q4_0; value = scale * (q - 16)"""
    scale, high, packed = _parts(blocks, 2, 4, 16)
    return _half(scale) * ((_fields(packed, 4, 16) | _fields(high, 1, 1) << 4).float() - 16)


def _dequantize_q5_1(blocks: Tensor) -> Tensor:
    """scale f16 | minimum f16 | 32 fifth bits | 16 bytes as in Q4_0; value = scale * q + minimum"""
    scale, minimum, high, packed = _parts(blocks, 2, 2, 4, 16)
    return _half(scale) * (_fields(packed, 4, 16) | _fields(high, 1, 1) << 4).float() + _half(minimum)


def _dequantize_q8_0(blocks: Tensor) -> Tensor:
    """scale f16 | 32 signed bytes; value = scale * q"""
    scale, values = _parts(blocks, 2, 32)
    return _half(scale) * values.view(torch.int8).float()


def _dequantize_q2_k(blocks: Tensor) -> Tensor:
    """16 bytes: group scale low, minimum high | 64 bytes of 2 bits in runs of 32 | scale f16 | minimum f16

    value = scale * group scale * q - minimum * group minimum, groups of 16
    """
    groups, packed, scale, minimum = _parts(blocks, 16, 64, 2, 2)
    scales, minimums = _half(scale) * (groups & 15).float(), _half(minimum) * (groups >> 4).float()
    return _grouped(scales, _fields(packed, 2, 32), minimums)


def _dequantize_q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of third bits | 64 bytes of 2 bits in runs of 32 | 12 bytes of 6-bit group scales | scale f16

    Group scales have their low 4 bits in bytes 0-7, their high 2 in bytes 8-11.
    value = scale * (group scale - 32) * (q - 4), groups of 16
    """
    high, packed, low_scales, high_scales, scale = _parts(blocks, 32, 64, 8, 4, 2)
    group_scales = _fields(low_scales, 4, 8) | _fields(high_scales, 2, 4) << 4
    fields = _fields(packed, 2, 32) | _fields(high, 1, 32) << 2
    return _grouped(_half(scale) * (group_scales.float() - 32), fields.float() - 4)


def _dequantize_q4_k(blocks: Tensor) -> Tensor:
    """scale f16 | minimum f16 | 12 bytes of group scales and minimums | 128 bytes of 4 bits in runs of 32

    value = scale * group scale * q - minimum * group minimum, groups of 32
    """
    scale, minimum, groups, packed = _parts(blocks, 2, 2, 12, 128)
    scales, minimums = _group_scales(groups)
    return _grouped(_half(scale) * scales.float(), _fields(packed, 4, 32), _half(minimum) * minimums.float())


def _dequantize_q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the 4-bit fields; bit g of a byte belongs to group g"""
    scale, minimum, groups, high, packed = _parts(blocks, 2, 2, 12, 32, 128)
    scales, minimums = _group_scales(groups)
    fields = _fields(packed, 4, 32) | _fields(high, 1, 32) << 4
    return _grouped(_half(scale) * scales.float(), fields, _half(minimum) * minimums.float())


def _dequantize_q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low 4 bits in runs of 64 | 64 of high 2 bits in runs of 32 | 16 signed bytes | scale f16

    value = scale * group scale * (q - 32), groups of 16
    """
    low, high, scales, scale = _parts(blocks, 128, 64, 16, 2)
    fields = _fields(low, 4, 64) | _fields(high, 2, 32) << 4
    return _grouped(_half(scale) * scales.view(torch.int8).float(), fields.float() - 32)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _levels(fields: Tensor, levels: tuple[int, ...] = LEVELS) -> Tensor:
    """Fields of four bits as the numbers they stand for, sixteen that are closer together near zero"""
    return torch.tensor(levels, dtype=torch.float32, device=fields.device)[fields.int()]


def _dequantize_iq4_nl(blocks: Tensor) -> Tensor:
    """scale f16 | 16 bytes as in Q4_0; value = scale * level[q]"""
    scale, packed = _parts(blocks, 2, 16)
    return _half(scale) * _levels(_fields(packed, 4, 16))


def _dequantize_iq4_xs(blocks: Tensor) -> Tensor:
    """scale f16 | 2 bytes: high 2 bits of group scales | 4: their low 4 bits | 128 of 4 bits in runs of 16

    value = scale * (group scale - 32) * level[q], groups of 32
    """
    scale, high_scales, low_scales, packed = _parts(blocks, 2, 2, 4, 128)
    group_scales = _fields(low_scales, 4, 1) | _fields(high_scales, 2, 1) << 4
    return _grouped(_half(scale) * (group_scales.float() - 32), _levels(_fields(packed, 4, 16)))


DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _dequantize_mxfp4(blocks: Tensor) -> Tensor:
    """exponent e | 16 bytes as in Q4_0; value = 2^(e - 128) * level[q]: OCP's, with half of its scales"""
    exponent, packed = _parts(blocks, 1, 16)
    e = exponent.int()
    bits = torch.where(e < 2, 1 << (21 + e.clamp(max=1)), (e - 1) << 23)  # the first two are subnormal
    return bits.view(torch.float32) * _levels(_fields(packed, 4, 16), DOUBLED_E2M1)


DEQUANTIZERS: dict[BlockType, Callable[[Tensor], Tensor]] = {
    BlockType.Q4_0: _dequantize_q4_0,
    BlockType.Q4_1: _dequantize_q4_1,
    BlockType.Q5_0: _dequantize_q5_0,
    BlockType.Q5_1: _dequantize_q5_1,
    BlockType.Q8_0: _dequantize_q8_0,
    BlockType.Q2_K: _dequantize_q2_k,
    BlockType.Q3_K: _dequantize_q3_k,
    BlockType.Q4_K: _dequantize_q4_k,
    BlockType.Q5_K: _dequantize_q5_k,
    BlockType.Q6_K: _dequantize_q6_k,
    BlockType.IQ4_NL: _dequantize_iq4_nl,
    BlockType.IQ4_XS: _dequantize_iq4_xs,
    BlockType.MXFP4: _dequantize_mxfp4,
}


# Each takes float32 [N, 32] to blocks, uint8 [N, bytes per block]


def _quantize_q8_0(values: Tensor) -> Tensor:
    scale, signed = q8_0_parts(values)
    return torch.cat([_half_bytes(scale, "Q8_0"), signed.view(torch.uint8)], 1)


def q8_0_parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., 1] and signed bytes [..., 32] of float32 values [..., 32].

    Where a value is not finite the scale is not either, and the bytes are 0.
    """
    scale = values.abs().amax(-1, keepdim=True) / 127
    scaled = values * _inverse(scale)
    magnitude = scaled.abs()
    # ggml rounds halves away from zero, torch.round to even.
    rounded = magnitude.floor() + (2 * (magnitude - magnitude.floor())).floor()
    return scale, (scaled.sign() * rounded).nan_to_num(0).to(torch.int8)


def _quantize_q4_0(values: Tensor) -> Tensor:
    # The extreme value keeps its sign and becomes -8, the end of the range that has one more step.
    extreme = values.gather(1, values.abs().argmax(1, keepdim=True))
    scale = extreme / -8
    fields = (values * _inverse(scale) + 8.5).to(torch.uint8).clamp(max=15)
    low, high = _parts(fields, 16, 16)
    return torch.cat([_half_bytes(scale, "Q4_0"), low | high << 4], 1)


QUANTIZERS: dict[BlockType, Callable[[Tensor], Tensor]] = {
    BlockType.Q8_0: _quantize_q8_0,
    BlockType.Q4_0: _quantize_q4_0,
}


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, or 0 where the block is zero or so small that its float16 scale is."""
    inverse = 1 / scale
    return torch.where(inverse.isfinite(), inverse, 0)


def _half_bytes(scale: Tensor, type_name: str) -> Tensor:
    half = scale.to(torch.float16)
    if not half.isfinite().all():
        raise ValueError(
            f"{type_name} scales are float16, but a block needs {scale[~half.isfinite()][0].item()!r}: "
            "the tensor holds NaN, infinity, or values too large to quantize"
        )
    return half.view(torch.uint8)
