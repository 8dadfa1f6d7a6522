"""What every op means, in plain torch, with the inputs it is tested on.

A reference is pure, runs on every device, and is differentiable where its kernel is not. Half types are
computed in float32 and rounded once, except where a docstring says that the models round twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infinicore.ops.registry import DEFAULT_TOLERANCES, RECORDING, Kernel, Tolerance, op
from infinicore.quantization import DEQUANTIZERS, BlockType, PackedTensor, QuantizedTensor, q8_0_parts

# R rows, E row length, S sequence, H heads, D head size, T keys, V vocabulary
ODD_SIZES = (1, 7, 17, 31, 33, 127, 1023)
EXACT = {dtype: Tolerance(0, 0) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
# A dot product's error grows with its terms, not with its value, which may be near zero.
PRODUCT = {torch.float32: Tolerance(1e-5, 1e-4)}
HALF_PRODUCT = {torch.float16: Tolerance(2e-3, 2e-2), torch.bfloat16: Tolerance(1.6e-2, 2e-2)}
Samples = Iterator[tuple[Any, ...]]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal values that depend on the shape alone, so that a failing case can be run again."""
    generator = torch.Generator().manual_seed(sum((i + 1) * size for i, size in enumerate(shape)))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def wide(x: Tensor) -> Tensor:
    """x in the precision it is computed in: float32 for half types, its own otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


NOT_FINITE = (torch.nan, torch.inf, -torch.inf)


def not_finite(size: int, dtype: torch.dtype) -> Tensor:
    """Rows with a value that is not finite at their start, midst or end, rows with two, one without."""
    x = random(13, size, dtype=dtype)
    for row in range(9):
        x[row, (0, size // 2, size - 1)[row // 3]] = NOT_FINITE[row % 3]
    for row, (first, last) in enumerate(((1, 2), (1, 0), (2, 0)), start=9):
        x[row, 0], x[row, size - 1] = NOT_FINITE[first], NOT_FINITE[last]
    return x


def not_finite_samples(dtype: torch.dtype) -> Samples:
    for size in (3, 18, 133):  # ends of vectors, whole ones, and several at once
        yield (not_finite(size, dtype),)


def row_samples(dtype: torch.dtype) -> Samples:
    for size in ODD_SIZES:
        yield (random(3, size, dtype=dtype, scale=3.0),)
    yield from not_finite_samples(dtype)
    yield (random(2, 3, 5, 65, dtype=dtype),)
    yield (random(40, 1025, dtype=dtype),)  # enough for two threads
    yield (random(0, 8, dtype=dtype),)
    yield (random(3, 0, dtype=dtype),)


def pair_samples(dtype: torch.dtype) -> Samples:
    for (x,) in row_samples(dtype):
        yield x, random(*x.shape, dtype=dtype).flip(0)
    for (x,) in not_finite_samples(dtype):
        yield random(*x.shape, dtype=dtype), x
        yield x, x.flip(0)


def small_rows(dtype: torch.dtype) -> Tensor:
    """Rows whose mean square is near eps, and one of zeros: without eps a norm of them is another."""
    x = random(4, 40, dtype=dtype, scale=2.0**-8)
    x[2] = 0
    return x


def rms_norm_samples(dtype: torch.dtype) -> Samples:
    for (x,) in (*row_samples(dtype), (small_rows(dtype),)):
        yield x, random(x.shape[-1], dtype=dtype), 1e-5
    for (x,) in not_finite_samples(dtype):
        yield random(*x.shape, dtype=dtype), x[9], 1e-5


@op(rms_norm_samples)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    As in LLaMA, the normalised value is rounded to the dtype of x before it is multiplied by the weight.
    """
    v = wide(x)
    normalized = (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normalized * weight).to(x.dtype)


def add_rms_norm_samples(dtype: torch.dtype) -> Samples:
    for x, residual in (*pair_samples(dtype), (small_rows(dtype), small_rows(dtype))):
        yield x, residual, random(x.shape[-1], dtype=dtype), 1e-6


@op(add_rms_norm_samples)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)"""
    total = x + residual
    return rms_norm.reference(total, weight, eps), total


def layer_norm_samples(dtype: torch.dtype) -> Samples:
    for (x,) in (*row_samples(dtype), (small_rows(dtype),)):
        size = x.shape[-1]
        yield x + 10, random(size, dtype=dtype), random(size, dtype=dtype).flip(0), 1e-5
        yield x, None, None, 1e-5
    for (x,) in not_finite_samples(dtype):
        yield random(*x.shape, dtype=dtype), x[9], x[0], 1e-5


@op(layer_norm_samples)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, the moments in float64."""
    v = x.double()
    centered = v - v.mean(-1, keepdim=True)
    normalized = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        normalized = normalized * weight.double()
    return (normalized if bias is None else normalized + bias.double()).to(x.dtype)


def rope_tables(half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(9.0)[:, None] * torch.logspace(0, -2, half)
    return angles.sin().to(dtype), angles.cos().to(dtype)


def rope_samples(dtype: torch.dtype) -> Samples:
    positions = torch.tensor([8, 0, 3, 3, 1])
    per_batch = torch.stack([positions, positions.flip(0)]).to(torch.uint8)
    for half in (1, 3, 4, 16, 17, 64):
        tables = rope_tables(half, dtype)
        for is_interleaved in (False, True):
            yield random(5, 3, 2 * half, dtype=dtype), positions, *tables, is_interleaved
            yield random(2, 5, 4, 2 * half, dtype=dtype), positions.int(), *tables, is_interleaved
            yield random(2, 5, 1, 2 * half, dtype=dtype), per_batch, *tables, is_interleaved
    for half in (3, 17, 64):
        x, tables = not_finite(2 * half, dtype).view(13, 1, 2 * half), rope_tables(half, dtype)
        for is_interleaved in (False, True):
            yield x, torch.arange(13) % 9, *tables, is_interleaved
    yield random(0, 3, 8, dtype=dtype), torch.empty(0, dtype=torch.int64), *rope_tables(4, dtype), False
    yield random(2, 256, 8, 64, dtype=dtype), torch.arange(256) % 9, *rope_tables(32, dtype), True


@op(rope_samples)
def rope(x: Tensor, positions: Tensor, sin: Tensor, cos: Tensor, is_interleaved: bool) -> Tensor:
    """Rotate the pairs of each head by the angle of its position.

    x [(B,) S, H, D], positions [S] or [B, S], sin and cos [length, D/2] -> as x
    """
    index = positions.long()
    s, c = wide(sin)[index].unsqueeze(-2), wide(cos)[index].unsqueeze(-2)  # [(B,) S, 1, D/2]
    v = wide(x)
    if is_interleaved:
        x0, x1 = v[..., 0::2], v[..., 1::2]
    else:
        x0, x1 = v.chunk(2, dim=-1)
    y0, y1 = x0 * c - x1 * s, x0 * s + x1 * c
    y = torch.stack([y0, y1], dim=-1).flatten(-2) if is_interleaved else torch.cat([y0, y1], dim=-1)
    return y.to(x.dtype)


@op(row_samples)
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)"""
    v = wide(x)
    return (v * torch.sigmoid(v)).to(x.dtype)


def gelu_samples(dtype: torch.dtype) -> Samples:
    for approximate in ("none", "tanh", "fast"):
        for (x,) in row_samples(dtype):
            yield x, approximate


@op(gelu_samples)
def gelu(x: Tensor, approximate: str) -> Tensor:
    """x * Phi(x), exactly ("none"), with tanh, or as x * sigmoid(1.702 x) ("fast")"""
    v = wide(x)
    if approximate == "fast":
        return (v * torch.sigmoid(1.702 * v)).to(x.dtype)
    if approximate == "tanh":
        return torch.nn.functional.gelu(v, approximate="tanh").to(x.dtype)
    # By hand: torch's own gelu of infinity is infinite in its scalar form and NaN in its vector form.
    return (v * (0.5 * (1 + torch.erf(v * 0.5**0.5)))).to(x.dtype)


@op(pair_samples)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up"""
    g = wide(gate)
    return (g * torch.sigmoid(g) * wide(up)).to(gate.dtype)


@op(pair_samples)
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b"""
    return a + b


@op(row_samples)
def softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) over the last dimension"""
    return torch.softmax(wide(x), dim=-1).to(x.dtype)


def causal_softmax_samples(dtype: torch.dtype) -> Samples:
    for shape in (
        (1, 1),
        (7, 7),
        (3, 17),
        (2, 33, 127),
        (2, 3, 5, 31),
        (1, 1023),
        (4, 64, 200),
        (0, 4),
        (2, 0, 3),
    ):
        yield (random(*shape, dtype=dtype, scale=3.0),)
    for (x,) in not_finite_samples(dtype):
        yield (x[:3],)
        yield (x.repeat(1, 5)[:, :37],)  # some of it where only some rows see it


@op(causal_softmax_samples)
def causal_softmax(x: Tensor) -> Tensor:
    """softmax over the columns a query may see: row i of [..., S, T] sees columns up to T - S + i.

    The others are 0, also in a row that is spoilt by a NaN.
    """
    num_queries, num_keys = x.shape[-2:]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=x.device).tril(
        num_keys - num_queries
    )
    y = torch.softmax(wide(x).masked_fill(~visible, -torch.inf), dim=-1)
    return y.masked_fill(~visible, 0).to(x.dtype)


def embedding_samples(dtype: torch.dtype) -> Samples:
    for size in ODD_SIZES:
        yield torch.tensor([[4, 0], [2, 4]]), random(5, size, dtype=dtype)
    yield torch.tensor(3), random(5, 8, dtype=dtype)
    yield torch.tensor([12, 1, 0, 9]), not_finite(37, dtype)
    yield torch.empty(0, 3, dtype=torch.int64), random(5, 8, dtype=dtype)
    yield torch.arange(300, dtype=torch.int32) % 50, random(50, 512, dtype=dtype)


@op(embedding_samples, EXACT)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows of weight that ids name: [*] -> [*, E]"""
    return torch.nn.functional.embedding(ids.long(), weight)


def linear_samples(dtype: torch.dtype) -> Samples:
    """Weights of the dtype, with float32 rows and with rows of their own dtype."""
    for rows in dict.fromkeys((torch.float32, dtype)):
        for size in ODD_SIZES:
            yield random(3, size, dtype=rows), random(5, size, dtype=dtype), random(5, dtype=rows)
        for num_rows in (1, 2, 5, 17, 64, 130):
            yield random(num_rows, 300, dtype=rows), random(33, 300, dtype=dtype), random(33, dtype=rows)
        yield random(5, 1030, dtype=rows), random(16, 1030, dtype=dtype), None  # chunks, and an odd end
        for size in (37, 64):
            for x in (not_finite(size, rows), not_finite(size, rows)[1:2]):
                yield x, random(35, size, dtype=dtype), None
            yield random(6, size, dtype=rows), not_finite(size, dtype), not_finite(13, rows)[9]
        yield random(2, 3, 8, dtype=rows), random(4, 8, dtype=dtype), None
        yield random(8, dtype=rows), random(4, 8, dtype=dtype), None
        yield random(0, 8, dtype=rows), random(4, 8, dtype=dtype), None
        yield random(2, 0, dtype=rows), random(4, 0, dtype=dtype), random(4, dtype=rows)


@op(linear_samples, PRODUCT | HALF_PRODUCT)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, the weight cast to the dtype of x"""
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def random_blocks(type: BlockType, num_rows: int, num_blocks: int) -> QuantizedTensor:
    """Random bytes, but for two bits of each: whichever are a float16 scale, it is below 1/128."""
    generator = torch.Generator().manual_seed(type.ggml_id)
    row_bytes = num_blocks * type.bytes_per_block
    blocks = torch.randint(256, (num_rows, row_bytes), generator=generator, dtype=torch.uint8) & 0b10011111
    return QuantizedTensor(blocks, type, (num_rows, num_blocks * type.elements_per_block))


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


ACTIVATION_GROUP = 32
SMALLEST_ACTIVATION = 2.0**-100  # what is below has no reciprocal in float32


def rounded_activations(x: Tensor, bits: int) -> Tensor:
    """x with each group of 32 rounded to equal steps: the largest absolute value is 127 of them.

    With more than 8 bits a step has 16 or 256 parts, of which kernels keep at most 127 to either side of a
    whole one.
    """
    parts = 1 << (bits - 8)
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // ACTIVATION_GROUP, ACTIVATION_GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    rounded = (groups * torch.where(largest >= SMALLEST_ACTIVATION, 127 * parts / largest, 0)).round()
    if bits == 16:
        rounded = rounded + (rounded.remainder(256) == 128)
    return (rounded * (largest / (127 * parts))).flatten(-2)


def packed_linear_samples(dtype: torch.dtype) -> Samples:
    for bits in (8, 12, 16):
        for x, weight, bias in quantized_linear_samples(dtype):
            yield x, (weight.pack(bits),), (bias,), None, False
    x, first = random(3, 64, dtype=dtype), random_blocks(BlockType.Q4_1, 40, 2).pack()
    second, third = random_blocks(BlockType.Q8_0, 16, 2).pack(), random_blocks(BlockType.Q5_0, 7, 2).pack()
    yield x, (first, second, third), (random(40, dtype=dtype), None, random(7, dtype=dtype)), None, False
    yield x, (first, second), (None, None), random(3, 56, dtype=dtype), False
    yield x, (first, random_blocks(BlockType.Q4_0, 40, 2).pack()), (None, random(40, dtype=dtype)), None, True


# Scales and minimums are applied to sums over a group, which are larger than the values they leave.
@op(packed_linear_samples, {torch.float32: Tolerance(1e-5, 5e-4)})
def packed_linear(
    x: Tensor,
    weights: Sequence[PackedTensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    is_gated: bool,
) -> Tensor:
    """x @ weight.T + bias for each of up to three weights, side by side, with x rounded to 8, 12 or 16 bits.

    Gated, silu(first) * second of two weights; then the residual is added.
    """
    rounded = rounded_activations(x, weights[0].activation_bits)
    products = [
        torch.nn.functional.linear(rounded, weight.dequantize(x.dtype), bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    y = torch.nn.functional.silu(products[0]) * products[1] if is_gated else torch.cat(products, -1)
    return y if residual is None else residual + y


def packed_embedding_samples(dtype: torch.dtype) -> Samples:
    for ids, weight in quantized_embedding_samples(dtype):
        yield ids, weight.pack()


@op(packed_embedding_samples, EXACT)
def packed_embedding(ids: Tensor, weight: PackedTensor) -> Tensor:
    """quantized_embedding of the weight before it was packed"""
    return quantized_embedding.reference(ids, weight.unpack())


def random_sample_samples(dtype: torch.dtype) -> Samples:
    logits = random(1000, dtype=dtype, scale=2.0)
    for random_val in (0.0, 0.3, 0.999):
        for topp, topk, temperature in (
            (1.0, 0, 1.0),
            (0.9, 50, 0.8),
            (0.3, 0, 2.0),
            (1.0, 7, 0.5),
            (1.0, 0, 0.0),
        ):
            yield logits, random_val, topp, topk, temperature
    yield torch.zeros(8, dtype=dtype), 0.5, 0.5, 0, 1.0  # exact ties: four kept, the third taken
    yield torch.zeros(1, dtype=dtype), 0.9, 0.1, 1, 1.0
    yield torch.tensor([-torch.inf, 1.0, -torch.inf], dtype=dtype), 0.99, 1.0, 0, 1.0


@op(random_sample_samples, EXACT)
def random_sample(logits: Tensor, random_val: float, topp: float, topk: int, temperature: float) -> Tensor:
    """The token drawn by random_val from softmax(logits / temperature) cut to topk, then to topp of the rest.

    Tokens stand in falling order of weight, equal ones by id; the smallest set that reaches topp is kept.
    """
    weights, order = falling_weights(logits, temperature or 1.0)
    if temperature == 0:
        return order[0].clone()
    num_kept = topk if 0 < topk < len(weights) else len(weights)
    weights = weights[:num_kept]
    if topp < 1:
        is_short = weights.cumsum(0) < topp * weights.sum()
        weights = weights[: int(is_short.sum()) + 1]
    passed = weights.cumsum(0) > random_val * weights.sum()
    last = int((weights > 0).sum()) - 1
    rank = int(passed.int().argmax()) if passed.any() else last
    return order[min(rank, last)].clone()


def falling_weights(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities in float64, largest first, and the token of each."""
    scaled = logits.double() / temperature
    return torch.sort((scaled - scaled.max()).exp(), descending=True, stable=True)


def sample_samples(dtype: torch.dtype) -> Samples:
    settings = torch.tensor(
        [
            [1.0, 1.0, 0.0],
            [0.8, 0.9, 0.0],
            [2.0, 0.3, 0.02],
            [0.5, 1.0, 0.3],
            [0.0, 1.0, 0.0],
            [1.0, 0.7, 1.0],
        ]
    )
    top_k = torch.tensor([0, 50, -1, 7, 3, 1])
    for size in (1, 7, 33, 1023, 5003):
        for uniform in (0.0, 0.3, 0.999):
            uniforms = torch.full((6,), uniform, dtype=torch.float64)
            yield random(6, size, dtype=dtype, scale=2.0), uniforms, settings, top_k
    size = 133
    spoilt = torch.cat([not_finite(size, dtype), torch.full((1, size), -torch.inf, dtype=dtype)])
    rows = torch.arange(14) % 6
    yield spoilt, torch.full((14,), 0.7, dtype=torch.float64), settings[rows], top_k[rows]
    unsound = torch.tensor([[t, 1.0, 0.0] for t in (*NOT_FINITE, -1.0)])
    yield spoilt[2:3].repeat(4, 1), torch.full((4,), 0.7, dtype=torch.float64), unsound, top_k[:4] * 0
    yield random(0, 8, dtype=dtype), torch.empty(0, dtype=torch.float64), settings[:0], top_k[:0]


@op(sample_samples, EXACT)
def sample(logits: Tensor, uniforms: Tensor, settings: Tensor, top_k: Tensor) -> Tensor:
    """random_sample of each row by its own number and settings, which are temperature, top_p and min_p.

    Tokens less than min_p times as likely as the likeliest are dropped first. A row with NaN, +inf or nothing
    but -inf, or whose temperature is negative or not finite, gets -1 and leaves the others alone.
    logits [R, V], uniforms [R], settings [R, 3], top_k [R] -> [R]
    """
    rows = zip(logits, uniforms.tolist(), settings.tolist(), top_k.tolist(), strict=True)
    return torch.tensor([drawn(*row) for row in rows], dtype=torch.int64, device=logits.device)


def drawn(logits: Tensor, uniform: float, settings: list[float], top_k: int) -> int:
    temperature, top_p, min_p = settings
    if is_spoilt(logits) or not 0 <= temperature < torch.inf:
        return -1
    if temperature > 0:
        weights = ((logits.double() - logits.max()) / temperature).exp()
        logits = logits.masked_fill(weights < min(min_p, 1.0), -torch.inf)
    return int(random_sample.reference(logits, uniform, top_p, top_k, temperature))


def is_spoilt(logits: Tensor) -> Tensor:
    """Whether a row [..., V] has no probabilities: with NaN or +inf, or nothing but -inf"""
    return ~((logits < torch.inf).all(-1) & (logits > -torch.inf).any(-1))


def logprobs_samples(dtype: torch.dtype) -> Samples:
    for size, num_top in ((1, 0), (1, 1), (7, 3), (33, 33), (1023, 5), (5003, 20)):
        yield random(3, size, dtype=dtype, scale=3.0), torch.tensor([0, size - 1, size // 2]), num_top
    yield not_finite(133, dtype), torch.arange(13) * 11 - 1, 20
    yield torch.full((2, 40), -torch.inf, dtype=dtype), torch.tensor([-1, 3]), 2
    yield random(2, 40, dtype=dtype).round(), torch.tensor([3, 9]), 30  # many equal ones
    yield random(0, 8, dtype=dtype), torch.empty(0, dtype=torch.int64), 2


@op(logprobs_samples, dict.fromkeys(DEFAULT_TOLERANCES, Tolerance(1e-6, 1e-6)))
def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """log-softmax of each row at its token, then at its num_top largest logits (equal ones: lower id first).

    Beside the logprobs stand the rank of the token, 1 for the largest, and the ids of the others. A token of
    -1 has the rank -1 and the logprob NaN; in a row without probabilities (`is_spoilt`) all are so.
    logits [R, V], tokens [R] -> ranks and ids [R, 1 + num_top], logprobs in float32 [R, 1 + num_top]
    """
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"logprobs: num_top must be from 0 to {logits.shape[1]}, but is {num_top}")
    check_ids("logprobs: token", tokens, -1, logits.shape[1])
    chosen = tokens.clamp(min=0)[:, None]
    ranks = 1 + (logits > logits.gather(1, chosen)).sum(-1, keepdim=True)
    largest = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    values = torch.log_softmax(logits.double(), -1).gather(1, torch.cat([chosen, largest], 1))
    is_missing = is_spoilt(logits)[:, None].repeat(1, 1 + num_top)
    is_missing[:, 0] |= tokens < 0
    ids = torch.cat([ranks, largest], 1).masked_fill(is_missing, -1)
    return ids, values.masked_fill(is_missing, torch.nan).float()


def check_ids(what: str, ids: Tensor, lowest: int, end: int) -> None:
    is_bad = (ids < lowest) | (ids >= end)
    if is_bad.any():
        at = int(is_bad.int().argmax())
        raise IndexError(f"{what} {int(ids[at])} (element {at}) is outside [0, {end})")


def adjust_logits_samples(dtype: torch.dtype) -> Samples:
    penalties = torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.5, 0.25], [0.7, -1.0, 0.0], [1.0, 0.0, 2.0]])
    generator = torch.Generator().manual_seed(0)
    for size in (*ODD_SIZES, 5003):
        history = torch.randint(size, (40,), generator=generator)
        ends = torch.tensor([[3, 9], [9, 17], [30, 31], [31, 40]])
        words = torch.randint(-(1 << 31), 1 << 31, (4, (size + 31) // 32), generator=generator)
        words[0] = -1
        for allowed in (None, words.int()):
            yield random(4, size, dtype=dtype, scale=3.0), history, ends, penalties, allowed
    rows = torch.arange(13) % 4
    whole = torch.tensor([[0, 133]] + [[133, 133]] * 12)
    yield not_finite(133, dtype), torch.arange(140).clamp(max=132), whole, penalties[rows] + 0.5, None
    nothing = torch.empty(0, dtype=torch.int64)
    yield random(0, 8, dtype=dtype), nothing, nothing.view(0, 2), penalties[:0], None
    yield random(1, 8, dtype=dtype), nothing, torch.zeros(1, 2, dtype=torch.int64), penalties[1:2], None


@op(adjust_logits_samples, EXACT)
def adjust_logits(
    logits: Tensor, history: Tensor, ends: Tensor, penalties: Tensor, allowed: Tensor | None
) -> Tensor:
    """Logits [R, V] in float32 after the penalties of the tokens before them, -inf where none is allowed.

    Row r's tokens are history[ends[r - 1, 1] : ends[r, 1]] (the first row's from 0), the prompt's up to
    ends[r, 0]. penalties [R, 3]: repetition divides positive logits of all these tokens and multiplies
    negative ones; then presence, and frequency for each time it was drawn, are subtracted from what was drawn
    after the prompt. allowed [R, ceil(V / 32)] in int32 has a bit for each token (word v // 32, bit v % 32).
    """
    check_ends(ends.flatten().tolist(), len(history))
    check_ids("adjust_logits: token", history[: int(ends[-1, 1])] if len(ends) else ends, 0, logits.shape[1])
    begins = [0, *ends[:-1, 1].tolist()]
    rows = [
        punished(row.float(), history[begin:prompt_end], history[prompt_end:end], penalty)
        for row, begin, (prompt_end, end), penalty in zip(
            logits, begins, ends.tolist(), penalties, strict=False
        )
    ]
    adjusted = torch.stack(rows) if rows else logits.float()
    if allowed is None:
        return adjusted
    column = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (allowed[:, column // 32] >> (column % 32)) & 1
    return adjusted.masked_fill(is_allowed == 0, -torch.inf)


def check_ends(ends: list[int], length: int) -> None:
    for at, (before, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if not before <= end <= length:
            raise IndexError(
                f"adjust_logits: end {end} (element {at}) is before the one in front of it, or beyond the"
                f" {length} tokens of the history"
            )


def punished(logits: Tensor, prompt: Tensor, drawn: Tensor, penalties: Tensor) -> Tensor:
    """logits [V] after tokens of a prompt and tokens drawn since"""
    repetition, presence, frequency = penalties
    counts = drawn.bincount(minlength=len(logits))
    is_seen = (counts + prompt.bincount(minlength=len(logits))) > 0
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(is_seen, scaled, logits)
    return torch.where(counts > 0, logits - (presence + frequency * counts), logits)


# ---- a paged cache: N tokens, B streams, M blocks of a stream, P blocks in the pool, S slots of a block ----

KEY_LANES = 16  # keys that lie side by side in a pool
Q8_0 = BlockType.Q8_0


def unfold_keys(keys: Tensor) -> Tensor:
    """A pool of keys with a row for each, as a pool of values has: [P, K, S/16, D, 16] -> [P, K, S, D]

    q8_0 keys are rows of its blocks: [P, K, S/16, D/32*544] -> [P, K, S, D/32*34].
    """
    if keys.dtype != torch.uint8:
        return keys.transpose(-1, -2).flatten(-3, -2)
    groups = torch.unflatten(keys, -1, (-1, KEY_LANES * Q8_0.bytes_per_block))
    scales = torch.unflatten(groups[..., : 2 * KEY_LANES], -1, (KEY_LANES, 2))
    codes = torch.unflatten(groups[..., 2 * KEY_LANES :], -1, (-1, KEY_LANES)).transpose(-1, -2)
    blocks = torch.cat([scales, codes], -1)  # [P, K, S/16, D/32, 16, 34]
    return blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def fold_keys(rows: Tensor) -> Tensor:
    """What unfold_keys undoes: 16 keys side by side, a lane for each"""
    groups = torch.unflatten(rows, -2, (-1, KEY_LANES))  # [P, K, S/16, 16, D]
    if rows.dtype != torch.uint8:
        return groups.transpose(-1, -2).contiguous()
    blocks = torch.unflatten(groups, -1, (-1, Q8_0.bytes_per_block)).transpose(-3, -2)
    scales, codes = blocks[..., :2], blocks[..., 2:].transpose(-1, -2)
    return torch.cat([scales.flatten(-2), codes.flatten(-2)], -1).flatten(-2)


def rows_as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """x [..., D] as a pool of this dtype holds it; uint8 is q8_0"""
    if dtype != torch.uint8:
        return x.to(dtype)
    scale, codes = q8_0_parts(torch.unflatten(x.float(), -1, (-1, Q8_0.elements_per_block)))
    return torch.cat([scale.half().view(torch.uint8), codes.view(torch.uint8)], -1).flatten(-2)


def values_of(rows: Tensor) -> Tensor:
    """What the rows of a pool are worth: [..., D] in the precision it is computed in"""
    if rows.dtype != torch.uint8:
        return wide(rows)
    blocks = rows.reshape(-1, Q8_0.bytes_per_block)
    return DEQUANTIZERS[Q8_0](blocks).view(*rows.shape[:-1], -1)


def paged(
    keys: Tensor, values: Tensor, block_size: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools with the keys and values [B, K, T, D] of some streams, in blocks that lie in no order, and their
    tables [B, T/S]"""
    num_streams, num_blocks = len(keys), keys.shape[2] // block_size
    order = torch.randperm(num_streams * num_blocks, generator=torch.Generator().manual_seed(num_blocks))

    def pool(rows: Tensor) -> Tensor:
        blocks = torch.unflatten(rows, 2, (num_blocks, block_size)).transpose(1, 2).flatten(0, 1)
        return rows_as(dtype or rows.dtype, blocks[order.argsort()])

    return fold_keys(pool(keys)), pool(values), order.view(num_streams, num_blocks)


def forget_unseen(
    tables: Tensor, streams: Sequence[int], slots: Sequence[int], window: int, block_size: int
) -> None:
    """Spoils the entries of block tables that no token may look at."""
    is_seen = torch.zeros(tables.shape, dtype=torch.bool)
    for stream, slot in zip(streams, slots, strict=True):
        first = max(slot - window + 1, 0) if window else 0
        is_seen[stream, first // block_size : slot // block_size + 1] = True
    tables[~is_seen] = 1 << 30


def attention_samples(dtype: torch.dtype) -> Samples:
    """Pools in `dtype` and in q8_0, queries in it and in float32; slots that no token may see are NaN."""
    for num_heads, num_kv_heads, dim, window, block_size in (
        (1, 1, 8, 0, 16),
        (6, 2, 33, 0, 32),
        (9, 3, 64, 0, 64),
        (4, 4, 16, 5, 16),
        (8, 1, 128, 300, 128),
        (3, 1, 32, 40, 256),
    ):
        for slots in ([0], [6, 7, 3], [530, 2], list(range(20, 60)), []):
            streams = [i % 2 if len(slots) < 9 else 1 for i in range(len(slots))]
            k, v = (random(2, num_kv_heads, 768, dim, dtype=dtype).flip(i) for i in (0, 2))
            for unseen in (k, v):
                unseen[:, :, max(slots, default=0) + 1 :] = torch.nan
            places = torch.tensor(streams, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
            for pool in (dtype, torch.uint8) if dim % 32 == 0 else (dtype,):
                keys, values, tables = paged(k, v, block_size, pool)
                forget_unseen(tables, streams, slots, window, block_size)
                for rows in dict.fromkeys((torch.float32, dtype)):
                    q = random(len(slots), num_heads, dim, dtype=rows)
                    yield q, keys, values, tables, *places, dim**-0.5, window
    for slots in ([6, 7, 3], [530, 270, 2], list(range(20, 60))):
        for bad in NOT_FINITE:
            yield from spoilt_attention_samples(dtype, slots, bad)


def spoilt_attention_samples(dtype: torch.dtype, slots: list[int], bad: float) -> Samples:
    """One number of a query, of a key or of a value that some of the tokens may see is not finite."""
    places = torch.tensor([0] * len(slots)), torch.tensor(slots)
    for spoilt in range(3):
        q = random(len(slots), 4, 17, dtype=torch.float32)
        keys, values = random(1, 2, 768, 17, dtype=dtype), random(1, 2, 768, 17, dtype=dtype).flip(2)
        (q[1, 2], keys[0, 1, max(slots) - 3], values[0, 1, max(slots) - 3])[spoilt][5] = bad
        keys, values, tables = paged(keys, values, 64)
        yield q, keys, values, tables.int(), *places, 17**-0.5, 0


@op(attention_samples, DEFAULT_TOLERANCES | {torch.float32: Tolerance(2e-5, 2e-6)})
def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    streams: Tensor,
    slots: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Each token attends to the keys of its stream up to its slot, the last `window` of them (0: all).

    q [N, H, D], keys [P, K, S/16, D, 16] with a lane for each key, values [P, K, S, D], block_tables [B, M],
    streams and slots [N] -> [N, H, D]. The key of a slot lies in block block_tables[stream, slot // S]. Pools
    of uint8 are q8_0: keys [P, K, S/16, D/32*544], for each 32 of D the scales of 16 keys and 32 rows of 16
    codes, values [P, K, S, D/32*34].
    """
    blocks_at(block_tables, streams, slots, values)
    y = torch.empty_like(q)
    for stream in sorted(set(streams.tolist())):
        tokens = (streams == stream).nonzero().flatten()
        blocks = blocks_seen(block_tables, stream, slots[tokens], window, values)
        k, v = (
            values_of(rows.transpose(0, 1).flatten(1, 2))  # [K, T, D]
            for rows in (unfold_keys(keys[blocks]), values[blocks])
        )
        for some in tokens.split(TOKENS_AT_ONCE):
            y[some] = attend(q[some], k, v, slots[some], scale, window)
    return y


def blocks_at(block_tables: Tensor, streams: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """The block of each of these slots of these streams [N]"""
    num_blocks, _, block_size = values.shape[:3]
    num_streams, room = block_tables.shape
    for stream, slot in zip(streams.tolist(), slots.tolist(), strict=True):
        if not (0 <= stream < num_streams and 0 <= slot < room * block_size):
            raise IndexError(
                f"there is no slot {slot} of stream {stream} in block tables of {num_streams} streams, "
                f"each with room for {room * block_size} slots"
            )
    blocks = block_tables[streams.long(), slots.long() // block_size].long()
    for stream, slot, block in zip(streams.tolist(), slots.tolist(), blocks.tolist(), strict=True):
        if not 0 <= block < num_blocks:
            raise IndexError(
                f"slot {slot} of stream {stream} is in block {block}, and the pools have {num_blocks} blocks"
            )
    return blocks


def blocks_seen(block_tables: Tensor, stream: int, slots: Tensor, window: int, values: Tensor) -> Tensor:
    """The blocks of a stream up to its last slot here; block 0 stands for those that no token sees."""
    block_size = values.shape[2]
    first = (slots.long() - window + 1).clamp(min=0) if window else torch.zeros_like(slots)
    starts = torch.arange(0, int(slots.max()) + 1, block_size, device=slots.device)
    is_seen = (starts <= slots[:, None]) & (starts + block_size > first[:, None])
    seen = starts[is_seen.any(0)]
    blocks = torch.zeros_like(starts)
    blocks[is_seen.any(0)] = blocks_at(block_tables, torch.full_like(seen, stream), seen, values)
    return blocks


TOKENS_AT_ONCE = 128  # so that the scores of a long prompt take no more memory than its keys


def attend(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, scale: float, window: int) -> Tensor:
    """Attention of some tokens of one stream: q [N, H, D], k and v [K, T, D], slots [N] -> [N, H, D]"""
    column = torch.arange(k.shape[1], device=q.device)
    visible = column <= slots[:, None]  # [N, T]
    if window:
        visible = visible & (column > slots[:, None] - window)
    grouped = torch.unflatten(wide(q), 1, (len(k), -1)).movedim(0, 2)  # [K, H/K, N, D]
    scores = grouped @ k.to(grouped.dtype).transpose(1, 2).unsqueeze(1) * scale
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)  # [K, H/K, N, T]
    y = weigh(weights, v.to(grouped.dtype).unsqueeze(1), visible)
    return y.movedim(2, 0).flatten(1, 2).to(q.dtype)


def weigh(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """weights [..., N, T] @ v [..., T, D], where what is not finite is lost on those who do not see it

    In a plain product 0 * NaN would spoil them too.
    """
    v = v.masked_fill(~visible.any(0)[:, None], 0)
    is_finite = v.isfinite()
    y = weights @ v.masked_fill(~is_finite, 0)
    for t in (~is_finite).flatten(0, 1).any(-1).any(0).nonzero().flatten().tolist():
        product = weights[..., t, None] * v[..., None, t, :].masked_fill(is_finite[..., None, t, :], 0)
        y = y + product.masked_fill(~visible[:, t, None], 0)
    return y


def store_kv_samples(dtype: torch.dtype) -> Samples:
    for num_tokens in (0, 1, 3):
        keys, values = random(2, 3, 96, 32, dtype=dtype), random(2, 3, 96, 32, dtype=dtype).flip(0)
        streams, slots = torch.tensor([1, 0, 1])[:num_tokens], torch.tensor([88, 0, 33])[:num_tokens]
        for pool in (dtype, torch.uint8):
            new_keys, new_values, tables = paged(keys, values, 16, pool)
            forget_unseen(tables, streams.tolist(), slots.tolist(), 1, 16)
            for rows in dict.fromkeys((torch.float32, dtype)):
                k = random(num_tokens, 3, 32, dtype=rows)
                yield new_keys, new_values, k, k.neg(), tables, streams, slots
    places = torch.tensor([1, 0, 1, 0]), torch.tensor([88, 0, 33, 2])
    for size, pool in ((17, dtype), (64, torch.uint8)):
        k = not_finite(size, torch.float32)[:12].view(4, 3, size)
        old_keys, old_values = random(2, 2, 3, 96, size, dtype=dtype)
        keys, values, tables = paged(old_keys, old_values, 32, pool)
        yield keys, values, k, 1e6 * k.flip(0), tables.int(), *places  # some of it beyond float16


@op(store_kv_samples, EXACT)
def store_kv(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    streams: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """The pools of attention with k and v [N, K, D] at (stream, slot) of each token, rounded as they are"""
    blocks, places = blocks_at(block_tables, streams, slots, values), slots.long() % values.shape[2]
    new_keys, new_values = unfold_keys(keys).clone(), values.clone()
    new_keys[blocks, :, places] = rows_as(keys.dtype, k)
    new_values[blocks, :, places] = rows_as(values.dtype, v)
    return fold_keys(new_keys), new_values


def store_in_place(out: Any, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, *places: Tensor) -> Any:
    """The same for pools that are written where they lie, of which only the blocks that change are copied"""
    if out is None or out[0] is not keys or out[1] is not values or RECORDING.stack:
        return None
    tables, streams, slots = places
    used, own = torch.unique(blocks_at(tables, streams, slots, values), return_inverse=True)
    parts = keys[used], values[used]
    keys[used], values[used] = store_kv.reference(
        *parts, k, v, own[:, None], torch.arange(len(own), device=own.device), slots % values.shape[2]
    )
    return out


store_kv.register(
    Kernel(
        "torch",
        lambda out, *args: out is not None and out[0] is args[0] and out[1] is args[1],
        store_in_place,
        lambda out, *args: lambda: store_in_place(out, *args),
    )
)
