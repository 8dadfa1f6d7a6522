"""Products with quantised weights, read as the bytes they are, and rows of them.

What computes them depends on the kind of the weight and on how many rows there are. For many it pays to make
floats of the whole weight first, for cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import infinicore
from infinicore.float8 import Float8Tensor
from infinicore.ops.triton import float8, fragment_rows
from infinicore.ops.triton.tensors import FLOATS, INDICES, are_plain, fits, rows_of, settled, target
from infinicore.ops.triton.tiles import capability
from infinicore.ops.triton.tiles_one import launch_one, takes_one
from infinicore.ops.triton.tiles_row import launch_row
from infinicore.ops.triton.tiles_values import launch_rows, values_of
from infinicore.tiles import TiledTensor

MOST_ALONE = 16  # rows of float32, which the tensor cores do not take


def is_taken(weight: Any, device: torch.device) -> bool:
    """Whether kernels here read this kind of weight, which lies on the device"""
    has_float8 = isinstance(weight, Float8Tensor) and capability(device) >= (8, 9)
    is_known = (isinstance(weight, TiledTensor) or has_float8) and weight.device == device
    return is_known and weight.blocks.is_contiguous() and weight.shape[0] > 0 and weight.shape[1] % 16 == 0


def accepts_quantized_linear(out: Any, x: Tensor, weight: Any, bias: Tensor | None) -> bool:
    return (
        is_taken(weight, x.device)
        and are_plain(x.device, FLOATS, x)
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and (bias is None or (are_plain(x.device, (x.dtype,), bias) and bias.shape == weight.shape[:1]))
        and fits(out, (*x.shape[:-1], weight.shape[0]), x.dtype, x.device)
    )


def quantized_linear(
    out: Tensor | None, x: Tensor, weight: TiledTensor | Float8Tensor, bias: Tensor | None
) -> Tensor:
    like = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    y = target(out, like, x, *weight.planes, *(() if bias is None else (bias,)))
    rows, bias = rows_of(x), None if bias is None else bias.contiguous()
    if isinstance(weight, Float8Tensor):
        float8.linear(y.view(-1, weight.shape[0]), rows, weight, bias)
    else:
        linear(y.view(-1, weight.shape[0]), rows, weight, bias)
    return settled(y, out)


def linear(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None) -> None:
    """y [M, N] = x [M, K] times the weight + bias"""
    if x.dtype == torch.float32 and (infinicore.deterministic or len(x) <= MOST_ALONE):
        launch_row(y, x, weight, bias)
    elif takes_one(x, weight):
        launch_one(y, x, weight, bias)
    elif fragment_rows.suits(x, weight):
        fragment_rows.launch(y, x, weight, bias)
    elif bias is None:
        torch.mm(x, values_of(weight, x.dtype).t(), out=y)
    else:
        torch.addmm(bias, x, values_of(weight, x.dtype).t(), out=y)


def accepts_quantized_embedding(out: Any, ids: Tensor, weight: Any) -> bool:
    return (
        is_taken(weight, ids.device)
        and are_plain(ids.device, INDICES, ids)
        and ids.numel() > 0
        and fits(out, (*ids.shape, weight.shape[1]), torch.float32, ids.device)
    )


def quantized_embedding(out: Tensor | None, ids: Tensor, weight: TiledTensor | Float8Tensor) -> Tensor:
    like = torch.empty((*ids.shape, weight.shape[1]), dtype=torch.float32, device=ids.device)
    y = target(out, like, ids, *weight.planes)
    if isinstance(weight, Float8Tensor):
        float8.rows(y, ids.contiguous(), weight)
    else:
        launch_rows(y, ids.contiguous(), weight)
    return settled(y, out)
