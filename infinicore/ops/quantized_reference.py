"""What products and lookups mean whose weights are blocks of few bits, as they are stored or packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infinicore.ops.reference import GATES, linear
from infinicore.ops.registry import Tolerance, op
from infinicore.ops.samples import EXACT, PRODUCT, Samples, not_finite, random, random_blocks
from infinicore.quantization import BlockType, PackedTensor, QuantizedTensor

Weight = Tensor | QuantizedTensor


def quantized_linear_samples(dtype: torch.dtype) -> Samples:
    for type in BlockType:
        for num_rows, num_blocks, out_features in ((1, 1, 1), (2, 3, 33), (5, 2, 7), (17, 1, 16), (64, 2, 9)):
            weight = random_blocks(type, out_features, num_blocks)
            x = random(num_rows, weight.shape[1], dtype=dtype, scale=0.1)
            yield x, weight, random(out_features, dtype=dtype)
        yield random(2, 3, weight.shape[1], dtype=dtype, scale=0.1), weight, None
        yield random(0, weight.shape[1], dtype=dtype), weight, None
        for x in (not_finite(weight.shape[1], dtype), not_finite(weight.shape[1], dtype)[1:2]):
            yield x, weight, None
    weight = random_blocks(BlockType.Q4_1, 576, 18)  # enough for two threads
    yield random(3, 576, dtype=dtype), weight, None


@op(quantized_linear_samples, PRODUCT)
def quantized_linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, the weight dequantised to the dtype of x"""
    return torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias)


def quantized_embedding_samples(dtype: torch.dtype) -> Samples:
    for type in BlockType:
        yield torch.tensor([[4, 0], [2, 4]]), random_blocks(type, 5, 3)
        yield torch.tensor(3), random_blocks(type, 5, 1)
        yield torch.empty(0, 3, dtype=torch.int64), random_blocks(type, 5, 1)
    yield torch.arange(300, dtype=torch.int32) % 50, random_blocks(BlockType.Q8_0, 50, 16)


@op(quantized_embedding_samples, EXACT)
def quantized_embedding(ids: Tensor, weight: QuantizedTensor) -> Tensor:
    """The rows of weight that ids name, dequantised to float32: [*] -> [*, E]"""
    rows = weight.rows(ids.long().flatten()).dequantize()
    return rows.view(*ids.shape, weight.shape[-1])


SMALLEST_ACTIVATION = 2.0**-100  # what is below has no reciprocal in float32


def rounded_activations(x: Tensor, bits: int, span: int) -> Tensor:
    """x with each `span` values rounded to equal steps: the largest absolute value is 127 of them.

    With more than 8 bits a step has 16 to 256 parts, of which kernels keep at most 127 to either side of a
    whole one. A gradient goes through as if nothing were rounded: of steps it would be 0.
    """
    parts = 1 << (bits - 8)
    spans = x.detach().reshape(*x.shape[:-1], x.shape[-1] // span, span)
    largest = spans.abs().amax(-1, keepdim=True)
    # Divided as kernels divide: a number over a tensor would be a product with its reciprocal.
    inverse = torch.tensor(127.0 * parts, dtype=x.dtype, device="cpu") / largest
    rounded = (spans * torch.where(largest >= SMALLEST_ACTIVATION, inverse, 0)).round()
    if bits == 16:
        rounded = rounded + (rounded.remainder(256) == 128)
    return (rounded * (largest / (127 * parts))).flatten(-2) + (x - x.detach())


def rounded_for(weight: PackedTensor, x: Tensor) -> Tensor:
    return rounded_activations(x, *weight.rounding)


def packed_linear_samples(dtype: torch.dtype) -> Samples:
    for bits in (8, 12, 16):
        for x, weight, bias in quantized_linear_samples(dtype):
            yield x, (weight.pack(bits),), (bias,), None, None
    x, first = random(3, 64, dtype=dtype), random_blocks(BlockType.Q4_1, 40, 2).pack()
    second, third = random_blocks(BlockType.Q8_0, 16, 2).pack(), random_blocks(BlockType.Q5_0, 7, 2).pack()
    yield x, (first, second, third), (random(40, dtype=dtype), None, random(7, dtype=dtype)), None, None
    yield x, (first, second), (None, None), random(3, 56, dtype=dtype)
    pair, biases = (first, random_blocks(BlockType.Q4_0, 40, 2).pack()), (None, random(40, dtype=dtype))
    for activation in GATES:
        yield x, pair, biases, None, activation
    for bits, type, num_rows in ((12, BlockType.Q4_0, 1), (16, BlockType.Q8_0, 17), (8, BlockType.Q5_1, 5)):
        last = random_blocks(type, 24, 3).pack(bits)
        three = (*(random_blocks(BlockType.Q4_1, 96, 2).pack() for _ in range(2)), last)
        x, residual = random(num_rows, 64, dtype=dtype), random(num_rows, 24, dtype=dtype)
        yield x, three, (None, random(96, dtype=dtype), random(24, dtype=dtype)), residual, "silu"
    longer = tuple(random_blocks(type, 16, 2).pack(16) for type in (BlockType.Q2_K, BlockType.Q3_K))
    yield random(3, 512, dtype=dtype), longer, (None, random(16, dtype=dtype)), None, None


# Scales and minimums are applied to sums over a group, which are larger than the values they leave.
@op(packed_linear_samples, {torch.float32: Tolerance(1e-5, 5e-4)})
def packed_linear(
    x: Tensor,
    weights: Sequence[PackedTensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    activation: str | None = None,
) -> Tensor:
    """x @ weight.T + bias for each of up to three weights, side by side, with x rounded to 8, 12 or 16 bits.

    32 values are rounded at a time, or 256 where tile registers take blocks whole.
    With an activation, "silu" or "gelu_tanh", activation(first) * second of two, which a third weight then
    multiplies, if there is one; last the residual is added.
    """
    num_first = len(weights) if activation is None else 2
    pairs = list(zip(weights, biases, strict=True))
    products = [rounded_product(x, *pair) for pair in pairs[:num_first]]
    if activation is None:
        y = torch.cat(products, -1)
    else:
        gate, options = GATES[activation]
        y = gate.reference(*products, *options)
        for pair in pairs[2:]:
            y = rounded_product(y, *pair)
    return y if residual is None else residual + y


def rounded_product(x: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(rounded_for(weight, x), weight.dequantize(x.dtype), bias)


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, by the op for the kind of weight it is"""
    if isinstance(weight, PackedTensor):
        return packed_linear(x, (weight,), (bias,), None)
    if isinstance(weight, QuantizedTensor):
        return quantized_linear(x, weight, bias)
    return linear(x, weight, bias)


def packed_embedding_samples(dtype: torch.dtype) -> Samples:
    for ids, weight in quantized_embedding_samples(dtype):
        yield ids, weight.pack()


@op(packed_embedding_samples, EXACT)
def packed_embedding(ids: Tensor, weight: PackedTensor) -> Tensor:
    """quantized_embedding of the weight before it was packed"""
    return quantized_embedding.reference(ids, weight.unpack())
