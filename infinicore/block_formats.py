"""What the bytes of a block mean, in plain torch: values of each type, and blocks of two, as ggml has them.

`quantization.py` has the tensors that are made of blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# N blocks, E elements of a block, G groups of a block, R runs of W bytes

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
    """Q4_K with 32 bytes of fifth bits before the 4-bit fields; bit g of a byte belongs to group g"""
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


DEQUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _dequantize_q4_0,
    "Q4_1": _dequantize_q4_1,
    "Q5_0": _dequantize_q5_0,
    "Q5_1": _dequantize_q5_1,
    "Q8_0": _dequantize_q8_0,
    "Q2_K": _dequantize_q2_k,
    "Q3_K": _dequantize_q3_k,
    "Q4_K": _dequantize_q4_k,
    "Q5_K": _dequantize_q5_k,
    "Q6_K": _dequantize_q6_k,
    "IQ4_NL": _dequantize_iq4_nl,
    "IQ4_XS": _dequantize_iq4_xs,
    "MXFP4": _dequantize_mxfp4,
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


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _quantize_q8_0,
    "Q4_0": _quantize_q4_0,
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
