"""A token of each row of bfloat16 logits (draw.cu)"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

import infinicore
from infinicore.ops import hopper

NUM_THREADS = 1024
SHARED_BYTES = 226 * 1024


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token", "logits", "uniforms", "settings", "top_k")),
        ("logit_stride", ctypes.c_longlong),
        ("num_tokens", ctypes.c_int),
    )


def suits(logits: Tensor) -> bool:
    """Whether rows [R, V] can be read by 16 bytes. Sums are not those of another kernel to the last bit, and
    one that draws the same whatever the neighbours want must draw from float32 too."""
    return (
        hopper.is_there(logits.device)
        and not infinicore.deterministic
        and logits.dtype == torch.bfloat16
        and logits.data_ptr() % 16 == 0
        and logits.stride(0) % 8 == logits.shape[1] % 8 == 0
    )


def launch(y: Tensor, logits: Tensor, uniforms: Tensor, settings: Tensor, top_k: Tensor) -> None:
    hopper.bind_context(logits.device)
    pointers = (t.data_ptr() for t in (y, logits, uniforms, settings, top_k))
    problem = Problem(*pointers, logits.stride(0), logits.shape[1])
    kernel = kernel_of(logits.device)
    hopper.launch(kernel, len(logits), NUM_THREADS, SHARED_BYTES, True, ctypes.addressof(problem))


@cache
def kernel_of(device: torch.device) -> Any:
    return hopper.loaded(hopper.source("draw.cu"), {}, SHARED_BYTES)
