"""What kernels share: which tensors they take, where a result goes, how a launch overlaps the one before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinicore.ops.registry import span_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LARGEST_TILE = 1 << 14  # values of a row that one program holds
IN_TURN = {"OVERLAPS": False}  # launch options of a kernel that begins when the one before has ended


def are_plain(device: torch.device, dtypes: Sequence[torch.dtype], *tensors: Any) -> bool:
    """Whether these lie on the device as dense memory that may be read by address, and need no gradient"""
    return all(
        isinstance(t, Tensor)
        and (type(t) is Tensor or isinstance(t, torch.nn.Parameter))
        and t.layout is torch.strided
        and t.dtype in dtypes
        and t.device == device
        and not (t.requires_grad and torch.is_grad_enabled())
        for t in tensors
    )


def fits(out: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a result can go there: there is none yet, or one of its shape, dtype and device"""
    return out is None or (are_plain(device, (dtype,), out) and out.shape == torch.Size(shape))


def target(out: Tensor | None, like: Tensor, *apart: Tensor, rows: Sequence[Tensor] = ()) -> Tensor:
    """Contiguous memory to write to, shaped and typed as `like`: `out`, where no input can be spoilt by that.

    Of `rows` a program reads what it writes over beforehand, so `out` may be one of them; `apart` it may not.
    """
    if out is None or not out.is_contiguous() or any(shares(out, t) for t in apart):
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    if any(shares(out, t) and not is_same_view(out, t) for t in rows):
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return out


def settled(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None or out is y else out.copy_(y)


def shares(a: Tensor, b: Tensor) -> bool:
    """Whether they may lie in each other; of one buffer's parts one is no other's place"""
    (begin, end), (other_begin, other_end) = span_of(a), span_of(b)
    return begin < other_end and other_begin < end


def is_same_view(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def rows_of(x: Tensor) -> Tensor:
    """[..., E] as [R, E] whose rows are contiguous; a view where its strides allow one"""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def pairs_of(x: Tensor) -> Tensor:
    """Rows of bfloat16, two to an int32"""
    whole = (
        x if x.is_contiguous() and x.data_ptr() % 4 == 0 else x.clone(memory_format=torch.contiguous_format)
    )
    return whole.view(torch.int32)


def on_device(t: Tensor, device: torch.device) -> Tensor:
    """Sent there without waiting, from pinned memory: other memory must not change until it has been read."""
    return t if t.device == device else t.pin_memory().to(device, non_blocking=True)


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """What a program may have of it, in bytes"""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options that let a kernel come up while the one before it ends (Hopper and later)"""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return IN_TURN
    return {"OVERLAPS": True, "launch_pdl": True}


def overlap_reading(device: torch.device, *early: Tensor | None) -> dict[str, Any]:
    """Those of a kernel that reads some tensors before all its inputs are there. Only of what a layer holds
    is it sure that the kernel before is not still writing it; of a copy of that it is not."""
    return overlap(device) if all(map(is_held, early)) else IN_TURN


def is_held(t: Tensor | None) -> bool:
    return t is None or isinstance(t, torch.nn.Parameter)


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr, STORES: tl.constexpr = False):
    """What stands before this may run while the kernel before is still writing: it reads weights alone, and
    is launched with what overlap_reading says of these.

    Every program waits, so that a kernel that has ended has all before it ended too. Of one that stores keys
    and values the next begins when all before it have ended: what that reads early no other can change.
    """
    if OVERLAPS:
        if STORES:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        else:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()


@triton.jit
def tanh(x):
    """Near zero a polynomial, since 1 - 2 / (e^2x + 1) cancels there"""
    size = tl.abs(x)
    square = x * x
    near = (-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2
    near = size + size * square * ((near * square + 1.33314422036e-1) * square - 3.33332819422e-1)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    y = tl.where(size < 0.625, near, far)
    return tl.where(x < 0, -y, y)
