"""RopeDescriptor: rotary embedding validated once, run many times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from infinicore import _native
from infinicore.checks import FLOATS, check_places, check_tensor
from infinicore.ops import reference
from infinicore.ops.registry import RECORDING, is_watched

INDEX_DTYPES = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))


class RopeAlgo(Enum):
    """How the elements of a head are paired: (2i, 2i + 1), or (i, i + d/2)."""

    GPT_J = 0
    GPT_NEOX = 1


@dataclass(frozen=True)
class RopeInfo:
    """What a rotary embedding of these tensors needs to know; strides count elements."""

    data_type: torch.dtype
    pos_type: torch.dtype
    batch: int
    seqlen: int
    nhead: int
    dhead: int
    table_len: int
    table_dim: int
    x_stride_batch: int
    x_stride_seqlen: int
    x_stride_nhead: int
    y_stride_batch: int
    y_stride_seqlen: int
    y_stride_nhead: int
    has_batch_dim: bool
    pos_has_batch_dim: bool
    algo: RopeAlgo

    @classmethod
    def create(cls, y: Tensor, x: Tensor, pos: Tensor, sin: Tensor, cos: Tensor, algo: RopeAlgo) -> RopeInfo:
        """Check every rule; a tensor that breaks one is named in the error."""
        check_tensors(y=y, x=x, pos=pos, sin=sin, cos=cos)
        if not isinstance(algo, RopeAlgo):
            raise TypeError(f"rope: algo must be a RopeAlgo, but is {algo!r}")
        check_heads(y, x)
        check_tables(x, sin, cos)
        check_positions(x, pos)
        x_stride, y_stride = batched_strides(x), batched_strides(y)
        return cls(
            data_type=x.dtype,
            pos_type=pos.dtype,
            batch=x.shape[0] if x.dim() == 4 else 1,
            seqlen=x.shape[-3],
            nhead=x.shape[-2],
            dhead=x.shape[-1],
            table_len=sin.shape[0],
            table_dim=sin.shape[1],
            x_stride_batch=x_stride[0],
            x_stride_seqlen=x_stride[1],
            x_stride_nhead=x_stride[2],
            y_stride_batch=y_stride[0],
            y_stride_seqlen=y_stride[1],
            y_stride_nhead=y_stride[2],
            has_batch_dim=x.dim() == 4,
            pos_has_batch_dim=pos.dim() == 2,
            algo=algo,
        )


class RopeDescriptor:
    """A rotary embedding for tensors of one layout: `create` validates, `calculate` runs."""

    workspace_size = 0

    def __init__(self, info: RopeInfo, run: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]) -> None:
        self.info = info
        self._run = run

    @classmethod
    def create(
        cls, y: Tensor, x: Tensor, pos: Tensor, sin: Tensor, cos: Tensor, algo: RopeAlgo = RopeAlgo.GPT_NEOX
    ) -> RopeDescriptor:
        info = RopeInfo.create(y, x, pos, sin, cos, algo)
        check_places("rope", "y", y)
        is_interleaved = algo is RopeAlgo.GPT_J
        kernel = reference.rope.pick(x, pos, sin, cos, is_interleaved, out=y)
        if kernel is not None and kernel.name == "native":
            return cls(info, where_unseen(_native.bind_rope(y, x, pos, sin, cos, is_interleaved), info))
        return cls(info, partial(run_reference, info))

    def calculate(self, y: Tensor, x: Tensor, pos: Tensor, sin: Tensor, cos: Tensor) -> None:
        """y = rope(x). The tensors must be laid out as those the descriptor was created for; y may be x."""
        try:
            self._run(y, x, pos, sin, cos)
        except (AttributeError, TypeError, ValueError):
            # which name the tensor, as the kernel does not
            check_same(self.info, RopeInfo.create(y, x, pos, sin, cos, self.info.algo))
            raise


def where_unseen(run: Callable[..., None], info: RopeInfo) -> Callable[..., None]:
    """The kernel alone, but where a gradient goes through what it is given, or torch or a graph watches"""

    def call(y: Tensor, x: Tensor, pos: Tensor, sin: Tensor, cos: Tensor) -> None:
        learns = x.requires_grad or y.requires_grad or sin.requires_grad or cos.requires_grad
        if is_watched() or (learns and torch.is_grad_enabled()):
            run_reference(info, y, x, pos, sin, cos)
        elif RECORDING.stack:
            check_same(info, RopeInfo.create(y, x, pos, sin, cos, info.algo))
            reference.rope(x, pos, sin, cos, info.algo is RopeAlgo.GPT_J, out=y)  # which a graph keeps
        else:
            run(y, x, pos, sin, cos)
            if not y.is_inference():
                increment_version(y)

    return call


def run_reference(info: RopeInfo, y: Tensor, x: Tensor, pos: Tensor, sin: Tensor, cos: Tensor) -> None:
    check_same(info, RopeInfo.create(y, x, pos, sin, cos, info.algo))
    reference.check_range(pos, info.table_len)
    y.copy_(reference.rope.reference(x, pos, sin, cos, info.algo is RopeAlgo.GPT_J))


def check_same(info: RopeInfo, found: RopeInfo) -> None:
    wanted = {name: value for name, value in vars(info).items() if value != getattr(found, name)}
    if wanted:
        given = {name: getattr(found, name) for name in wanted}
        raise ValueError(f"rope: the tensors have {given}, but those of the descriptor {wanted}")


def check_tensors(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check_tensor("rope", name, tensor)
    for name, tensor in tensors.items():
        if tensor.device != tensors["x"].device:
            raise ValueError(f"rope: {name} is on {tensor.device}, but x is on {tensors['x'].device}")


def check_heads(y: Tensor, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"rope: x must be float16, bfloat16, float32 or float64, but is {x.dtype}")
    if y.dtype != x.dtype:
        raise TypeError(f"rope: y is {y.dtype}, but x is {x.dtype}")
    if x.dim() not in (3, 4):
        raise ValueError(
            f"rope: x must be [seq, heads, dim] or [batch, seq, heads, dim], but has shape {tuple(x.shape)}"
        )
    if y.shape != x.shape:
        raise ValueError(f"rope: y has shape {tuple(y.shape)}, but x has {tuple(x.shape)}")
    for name, tensor in (("x", x), ("y", y)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"rope: the last dimension of {name} must have stride 1, but has {tensor.stride(-1)}"
            )


def check_tables(x: Tensor, sin: Tensor, cos: Tensor) -> None:
    for name, table in (("sin", sin), ("cos", cos)):
        if table.dim() != 2:
            raise ValueError(f"rope: {name} must be [length, dim / 2], but has shape {tuple(table.shape)}")
        if table.dtype != x.dtype:
            raise TypeError(f"rope: {name} is {table.dtype}, but x is {x.dtype}")
        if not table.is_contiguous():
            raise ValueError(f"rope: {name} must be contiguous, but has strides {table.stride()}")
    if sin.shape != cos.shape:
        raise ValueError(f"rope: sin has shape {tuple(sin.shape)}, but cos has {tuple(cos.shape)}")
    if x.shape[-1] != 2 * sin.shape[1]:
        raise ValueError(f"rope: x has head size {x.shape[-1]}, but sin and cos are for {2 * sin.shape[1]}")


def check_positions(x: Tensor, pos: Tensor) -> None:
    if pos.dtype not in INDEX_DTYPES:
        raise TypeError(f"rope: pos must be integers, but is {pos.dtype}")
    batch, seqlen = (x.shape[0] if x.dim() == 4 else 1), x.shape[-3]
    if pos.dim() not in (1, 2) or tuple(pos.shape) != ((seqlen,) if pos.dim() == 1 else (batch, seqlen)):
        raise ValueError(
            f"rope: pos must be [{seqlen}] or [{batch}, {seqlen}], but has shape {tuple(pos.shape)}"
        )


def batched_strides(t: Tensor) -> tuple[int, int, int]:
    strides = t.stride()
    return (strides[0], strides[1], strides[2]) if t.dim() == 4 else (0, strides[0], strides[1])
