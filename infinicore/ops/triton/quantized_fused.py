"""linear_add, gated_linear and project_heads of weights in tiles or float8: the residual, the gate, or
rotation and cache after a product are one launch with it, and so is the norm before it, of one row. For dense
weights see linear.py and heads.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import infinicore
from infinicore.float8 import Float8Tensor
from infinicore.ops.fused_reference import Where
from infinicore.ops.triton import float8, float8_one, fragment_rows, tiles_one
from infinicore.ops.triton.beside import Beside, Heads
from infinicore.ops.triton.cache import note_stored
from infinicore.ops.triton.heads import are_heads, are_projected_heads, query_shape
from infinicore.ops.triton.norm import are_rows, rms_norm
from infinicore.ops.triton.quantized import accepts_quantized_linear
from infinicore.ops.triton.tensors import are_plain, fits, rows_of, settled, target
from infinicore.tiles import TILE_ROWS, TiledTensor

Weight = TiledTensor | Float8Tensor


def is_one(x: Tensor, weight: Weight) -> bool:
    """Whether this is a row that has a kernel of its own"""
    takes = float8_one.takes_one if isinstance(weight, Float8Tensor) else tiles_one.takes_one
    return takes(x, weight)  # type: ignore[arg-type]


def are_few(
    x: Tensor, weight: Any, bias: Tensor | None, norm: Tensor | None = None, is_gated: bool = False
) -> bool:
    """Whether rows, their norm and a weight are such as one launch takes"""
    return (
        isinstance(weight, Weight)
        and accepts_quantized_linear(None, x, weight, bias)
        and not infinicore.deterministic
        and (fragment_rows.suits(x, weight) or are_rounded(x, weight, is_gated))
        and (norm is None or (are_rows(x, norm) and norm.dtype == x.dtype))
    )


def are_rounded(x: Tensor, weight: Weight, is_gated: bool = False) -> bool:
    return isinstance(weight, Float8Tensor) and float8.rounds(x, weight, is_gated)


def launch_rows(
    y: Tensor,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    bias = None if bias is None else bias.contiguous()
    by = float8.launch_rounded if are_rounded(x, weight, is_gated) else fragment_rows.launch
    by(y, rows_of(x), weight, bias, residual, is_gated)  # type: ignore[arg-type]


def launch_one(
    y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None, beside: Beside, is_interleaved: bool = False
) -> None:
    bias = None if bias is None else bias.contiguous()
    if isinstance(weight, Float8Tensor):
        float8_one.launch_one(y, rows_of(x), weight, bias, beside, is_interleaved)
    else:
        tiles_one.launch_one(y, rows_of(x), weight, bias, beside)


def accepts_linear_add(out: Any, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor) -> bool:
    return (
        are_few(x, weight, bias)
        and are_plain(x.device, (x.dtype,), residual)
        and residual.shape == (*x.shape[:-1], weight.shape[0])
        and fits(out, residual.shape, x.dtype, x.device)
    )


def linear_add(
    out: Tensor | None, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor
) -> Tensor:
    y = target(out, residual, x, residual, *weight.planes, *(() if bias is None else (bias,)))
    if is_one(x, weight):
        launch_one(y, x, weight, bias, Beside(residual=residual.contiguous()))
    else:
        launch_rows(y, x, weight, bias, rows_of(residual))
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
        and are_few(x, weight, bias, norm, is_gated=True)
        and weight.shape[0] % (2 * TILE_ROWS) == 0
        and fits(out, (*x.shape[:-1], weight.shape[0] // 2), x.dtype, x.device)
    )


def gated_linear(
    out: Tensor | None,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    activation: str = "silu",
) -> Tensor:
    like = torch.empty((*x.shape[:-1], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    y = target(out, like, x, *weight.planes, *(t for t in (norm, bias) if t is not None))
    if is_one(x, weight):
        launch_one(y, x, weight, bias, Beside(norm, eps, is_gated=True))
    else:
        normed = x if norm is None else rms_norm(None, x, norm, eps)
        launch_rows(y, normed, weight, bias, is_gated=True)
    return settled(y, out)


def accepts_project_heads(
    out: Any, x: Tensor, norm: Tensor, eps: float, weight: Any, bias: Tensor | None, *rest: Any
) -> bool:
    """One row alone: those of more are a norm, a product and store_heads. Of tiles, heads whose halves are
    whole tiles, for a program to have both values of what is rotated."""
    where = Where(*rest)
    return (
        are_few(x, weight, bias, norm)
        and is_one(x, weight)
        and are_heads(1, where)
        and (isinstance(weight, Float8Tensor) or are_whole_tiles(where))
        and x.device == where.keys.device
        and are_projected_heads(weight.shape[0], where)
        and fits(out, query_shape(weight, where), x.dtype, x.device)
    )


def are_whole_tiles(where: Where) -> bool:
    return not where.is_interleaved and where.values.shape[3] % (2 * TILE_ROWS) == 0


def project_heads(
    out: Tensor | None, x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None, *rest: Any
) -> Tensor:
    where = Where(*rest)
    like = torch.empty(query_shape(weight, where), dtype=x.dtype, device=x.device)
    q = target(out, like, x, norm, *weight.planes, *(t for t in (bias, *rest) if isinstance(t, Tensor)))
    beside = Beside(norm, eps, heads=Heads.of(like.shape[1], where))
    launch_one(q, x, weight, bias, beside, where.is_interleaved)
    note_stored(where.values, *where.places)
    return settled(q, out)
