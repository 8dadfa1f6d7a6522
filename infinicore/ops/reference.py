"""What norms, activations, products and rope mean, in plain torch, with the inputs they are tested on.

A reference is pure, runs on every device, and is differentiable where its kernel is not. Half types are
computed in float32 and rounded once, except where a docstring says that the models round twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinicore.checks import first_outside
from infinicore.ops.registry import Op, op
from infinicore.ops.samples import (
    EXACT,
    HALF_PRODUCT,
    ODD_SIZES,
    PRODUCT,
    Samples,
    not_finite,
    not_finite_samples,
    pair_samples,
    random,
    row_samples,
    small_rows,
)

# R rows, E row length, S sequence, H heads, D head size, T keys, V vocabulary


def wide(x: Tensor) -> Tensor:
    """x in the precision it is computed in: float32 for half types, its own otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


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


def check_range(positions: Tensor, table_len: int) -> None:
    """For kernels that do not check positions themselves."""
    if (outside := first_outside(positions, table_len)) is not None:
        raise IndexError(f"rope: position {outside} is outside [0, {table_len})")


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
            yield random(5, 3, 2 * half, dtype=dtype), positions[None], *tables, is_interleaved
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
    if positions.is_cpu:  # another device would be waited for; there a negative one counts from the end
        check_range(positions, len(sin))
    index = positions.long() if x.dim() == 4 else positions.long().flatten()  # of one batch: [1, S] is [S]
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


def geglu_samples(dtype: torch.dtype) -> Samples:
    for approximate in ("none", "tanh", "fast"):
        for gate, up in pair_samples(dtype):
            yield gate, up, approximate


@op(geglu_samples)
def geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """gelu(gate) * up"""
    return (gelu.reference(wide(gate), approximate) * wide(up)).to(gate.dtype)


# What a gate is called: its op, and what that takes beside gate and up
GATES: dict[str, tuple[Op[Tensor], tuple[str, ...]]] = {"silu": (swiglu, ()), "gelu_tanh": (geglu, ("tanh",))}


@op(pair_samples)
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b"""
    return a + b


def add_scaled_samples(dtype: torch.dtype) -> Samples:
    for a, b in pair_samples(dtype):
        yield a, b, 0.22


@op(add_scaled_samples)
def add_scaled(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """a + factor * b"""
    return (wide(a) + factor * wide(b)).to(a.dtype)


def gate_rows_samples(dtype: torch.dtype) -> Samples:
    for (x,) in row_samples(dtype):
        yield x, random(*x.shape[:-1], 1, dtype=dtype, scale=4.0)
    yield random(4, 33, dtype=dtype), torch.tensor([[-100.0], [0.0], [100.0], [torch.nan]], dtype=dtype)


@op(gate_rows_samples)
def gate_rows(x: Tensor, gates: Tensor) -> Tensor:
    """x * sigmoid(gates), a gate for each row: [*, E], [*, 1] -> [*, E]"""
    return (wide(x) * torch.sigmoid(wide(gates))).to(x.dtype)


def scale_samples(dtype: torch.dtype) -> Samples:
    for (x,) in row_samples(dtype):
        yield x, 59.866518
        yield x, -0.1


@op(scale_samples)
def scale(x: Tensor, factor: float) -> Tensor:
    """factor * x; who wants the factor rounded to the dtype of x gives it so"""
    return (factor * wide(x)).to(x.dtype)


def softcap_samples(dtype: torch.dtype) -> Samples:
    for (x,) in row_samples(dtype):
        yield x, 30.0
        yield x, 0.5


@op(softcap_samples)
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): what is small stays, and nothing is larger than cap"""
    return (cap * torch.tanh(wide(x) / cap)).to(x.dtype)


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
