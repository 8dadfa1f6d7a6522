"""linear_add, gated_linear and project_heads of one row and a weight in tiles: the norm before a product, and
the residual, the gate, or rotation and cache after it, are one launch with it. For dense weights see
linear.py and heads.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import infinicore
from infinicore.ops.triton.heads import are_heads, query_shape
from infinicore.ops.triton.norm import are_rows
from infinicore.ops.triton.quantized import accepts_quantized_linear
from infinicore.ops.triton.tensors import are_plain, fits, rows_of, settled, target
from infinicore.ops.triton.tiles import capability
from infinicore.ops.triton.tiles_one import TYPES, Beside, Heads, launch_one
from infinicore.tiles import TILE_ROWS, TiledTensor


def are_one(x: Tensor, weight: Any, bias: Tensor | None, norm: Tensor | None = None) -> bool:
    """Whether a row, its norm and a weight are such as one kernel takes"""
    return (
        isinstance(weight, TiledTensor)
        and weight.type in TYPES
        and accepts_quantized_linear(None, x, weight, bias)
        and x.dtype == torch.bfloat16
        and x.numel() == x.shape[-1]
        and not infinicore.deterministic
        and capability(x.device) >= (8, 0)
        and (norm is None or (are_rows(x, norm) and norm.dtype == x.dtype))
    )


def launch(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None, beside: Beside) -> None:
    launch_one(y, rows_of(x), weight, None if bias is None else bias.contiguous(), beside)


def accepts_linear_add(out: Any, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor) -> bool:
    return (
        are_one(x, weight, bias)
        and are_plain(x.device, (x.dtype,), residual)
        and residual.shape == (*x.shape[:-1], weight.shape[0])
        and fits(out, residual.shape, x.dtype, x.device)
    )


def linear_add(
    out: Tensor | None, x: Tensor, weight: TiledTensor, bias: Tensor | None, residual: Tensor
) -> Tensor:
    y = target(out, residual, x, residual, *weight.planes, *(() if bias is None else (bias,)))
    launch(y, x, weight, bias, Beside(residual=residual.contiguous()))
    return settled(y, out)


def accepts_gated_linear(
    out: Any,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Any,
    bias: Tensor | None,
    activation: str = "silu",
) -> bool:
    return (
        activation == "silu"
        and are_one(x, weight, bias, norm)
        and weight.shape[0] % (2 * TILE_ROWS) == 0
        and fits(out, (*x.shape[:-1], weight.shape[0] // 2), x.dtype, x.device)
    )


def gated_linear(
    out: Tensor | None,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: TiledTensor,
    bias: Tensor | None,
    activation: str = "silu",
) -> Tensor:
    like = torch.empty((*x.shape[:-1], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    y = target(out, like, x, *weight.planes, *(t for t in (norm, bias) if t is not None))
    launch(y, x, weight, bias, Beside(norm, eps, is_gated=True))
    return settled(y, out)


def accepts_project_heads(
    out: Any, x: Tensor, norm: Tensor, eps: float, weight: Any, bias: Tensor | None, *rest: Any
) -> bool:
    """Heads whose halves are whole tiles, for a program to have both values of what is rotated"""
    return (
        are_one(x, weight, bias, norm)
        and are_heads(x.dtype, 1, *rest)
        and not rest[3]
        and rest[5].shape[3] % (2 * TILE_ROWS) == 0
        and x.device == rest[4].device
        and weight.shape[0] > 2 * rest[5].shape[1] * rest[5].shape[3]
        and weight.shape[0] % rest[5].shape[3] == 0
        and fits(out, query_shape(weight, rest[5]), x.dtype, x.device)
    )


def project_heads(
    out: Tensor | None, x: Tensor, norm: Tensor, eps: float, weight: TiledTensor, *rest: Any
) -> Tensor:
    bias, positions, sin, cos, _, keys, values, *places = rest
    like = torch.empty(query_shape(weight, values), dtype=x.dtype, device=x.device)
    q = target(out, like, x, norm, *weight.planes, *(t for t in rest if isinstance(t, Tensor)))
    heads = Heads.of(like.shape[1], positions, sin, cos, keys, values, *places)
    launch(q, x, weight, bias, Beside(norm, eps, heads=heads))
    return settled(q, out)
