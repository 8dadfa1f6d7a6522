"""What every op means, in plain torch, with the inputs it is tested on.

A reference is pure, runs on every device, and is differentiable where its kernel is not. Half types are
computed in float32 and rounded once, except where a docstring says that the models round twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infinicore.ops.registry import DEFAULT_TOLERANCES, Tolerance, op
from infinicore.quantization import BlockType, PackedTensor, QuantizedTensor

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


def attention_samples(dtype: torch.dtype) -> Samples:
    """Caches in `dtype`, queries in it and in float32; room beyond the positions is never read: NaN."""
    for num_heads, num_kv_heads, dim, window in (
        (1, 1, 8, 0),
        (6, 2, 33, 0),
        (9, 3, 64, 0),
        (4, 4, 16, 5),
        (8, 1, 128, 300),
    ):
        for positions in ([0], [6, 7, 3], [530, 2], list(range(20, 60)), []):
            streams = torch.tensor(
                [i % 2 if len(positions) < 9 else 1 for i in range(len(positions))], dtype=torch.int64
            )
            keys, values = (random(2, num_kv_heads, 600, dim, dtype=dtype).flip(i) for i in (0, 2))
            keys[:, :, max(positions, default=0) + 1 :] = torch.nan
            values[:, :, max(positions, default=0) + 1 :] = torch.nan
            places = torch.tensor(positions, dtype=torch.int64)
            for rows in dict.fromkeys((torch.float32, dtype)):
                q = random(len(positions), num_heads, dim, dtype=rows)
                yield q, keys, values, streams, places, dim**-0.5, window
    for positions in ([6, 7, 3], [530, 270, 2], list(range(20, 60))):
        for bad in NOT_FINITE:
            yield from spoilt_attention_samples(dtype, positions, bad)


def spoilt_attention_samples(dtype: torch.dtype, positions: list[int], bad: float) -> Samples:
    """One number of a query, of a key or of a value that some of the tokens may see is not finite."""
    streams, places = torch.tensor([0] * len(positions)), torch.tensor(positions)
    for spoilt in range(3):
        q = random(len(positions), 4, 17, dtype=torch.float32)
        keys, values = random(1, 2, 600, 17, dtype=dtype), random(1, 2, 600, 17, dtype=dtype).flip(2)
        (q[1, 2], keys[0, 1, max(positions) - 3], values[0, 1, max(positions) - 3])[spoilt][5] = bad
        yield q, keys, values, streams, places, 17**-0.5, 0


@op(attention_samples, DEFAULT_TOLERANCES | {torch.float32: Tolerance(2e-5, 2e-6)})
def attention(
    q: Tensor, keys: Tensor, values: Tensor, streams: Tensor, positions: Tensor, scale: float, window: int
) -> Tensor:
    """Each token attends to the keys of its stream up to its position, the last `window` of them (0: all).

    q [N, H, D], keys and values [B, K, T, D], streams and positions [N] -> [N, H, D]
    """
    num_kv_heads, room = keys.shape[1:3]
    column = torch.arange(room, device=q.device)
    visible = column <= positions[:, None]  # [N, T]
    if window:
        visible = visible & (column > positions[:, None] - window)
    k = wide(keys[streams.long()]).to(wide(q).dtype)  # [N, K, T, D]
    v = wide(values[streams.long()]).to(k.dtype).masked_fill(~visible[:, None, :, None], 0)
    group = q.shape[1] // num_kv_heads
    grouped = wide(q).reshape(len(q), num_kv_heads, group, q.shape[2])  # [N, K, H/K, D]
    scores = (grouped @ k.transpose(2, 3) * scale).masked_fill(~visible[:, None, None], -torch.inf)
    return (torch.softmax(scores, -1) @ v).flatten(1, 2).to(q.dtype)


def store_kv_samples(dtype: torch.dtype) -> Samples:
    for num_tokens in (0, 1, 3):
        keys, values = random(2, 3, 9, 17, dtype=dtype), random(2, 3, 9, 17, dtype=dtype).flip(0)
        places = torch.tensor([1, 0, 1])[:num_tokens], torch.tensor([8, 0, 3])[:num_tokens]
        for rows in dict.fromkeys((torch.float32, dtype)):
            k = random(num_tokens, 3, 17, dtype=rows)
            yield keys, values, k, k.neg(), *places
    k = not_finite(17, torch.float32)[:12].view(4, 3, 17)
    places = torch.tensor([1, 0, 1, 0]), torch.tensor([8, 0, 3, 2])
    yield keys, values, k, 1e6 * k.flip(0), *places  # some of it beyond float16


@op(store_kv_samples, dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), Tolerance(0, 0)))
def store_kv(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, streams: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The caches [B, K, T, D] with k and v [N, K, D] at (stream, position) of each token"""
    new_keys, new_values = keys.clone(), values.clone()
    new_keys[streams.long(), :, positions.long()] = k.to(keys.dtype)
    new_values[streams.long(), :, positions.long()] = v.to(values.dtype)
    return new_keys, new_values
