"""MXFP4 as Hugging Face's files have it, as blocks: four bits a value, an exponent for 32 of them."""

from __future__ import annotations

import torch
from torch import Tensor

from infinicore.quantization import BlockType, QuantizedTensor
from infinilm.models.stored import Weight


def joined_blocks(codes: Weight, scales: Weight) -> Weight:
    """uint8 [X, R, G, 16], two values a byte, and exponents [X, R, G] -> a matrix of X R rows"""
    is_whole = len(scales.shape) == 3 and codes.shape == (*scales.shape, 16)
    if not is_whole or {codes.dtype, scales.dtype} != {torch.uint8}:
        found = f"{codes.dtype} {codes.shape} and {scales.dtype} {scales.shape}"
        raise ValueError(f"MXFP4 needs torch.uint8 [X, R, G, 16] and [X, R, G], but has {found}")
    num_experts, num_rows, num_groups = scales.shape
    shape = (num_experts * num_rows, 32 * num_groups)

    def read() -> QuantizedTensor:
        return QuantizedTensor(blocks(codes.read(), scales.read()), BlockType.MXFP4, shape)  # type: ignore[arg-type]

    return Weight(shape, BlockType.MXFP4, read, codes.sources + scales.sources)


def blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """The exponent, then the first 16 values in the low halves of bytes, the others in the high ones"""
    values = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)  # [X, R, G, 32]
    packed = values[..., :16] | values[..., 16:] << 4
    return torch.cat([scales.unsqueeze(-1), packed], dim=-1).flatten(2).flatten(0, 1)
