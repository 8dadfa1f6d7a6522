"""Registers the kernels for CUDA. Triton is imported when the first tensor on a GPU comes, and not before.

A family is a file that has for each op a pair `accepts_<op>`, `<op>`, which take (out, *args) as the registry
has it, with its kernels and their launchers, or over files that have those. Kernels read no number on the
host, so nothing waits for the device. An index that is out of range cannot be reported from there: its row
comes out as NaN, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from infinicore.ops import (  # noqa: F401  which fill OPS
    attention_reference,
    experts_reference,
    fused_reference,
    reference,
    sampling_reference,
)
from infinicore.ops.registry import OPS, Kernel

FAMILIES = {
    "norm": ("rms_norm", "add_rms_norm"),
    "elementwise": ("add", "add_scaled", "scale", "softcap", "silu", "swiglu", "geglu"),
    "rope": ("rope",),
    "embedding": ("embedding",),
    "linear": ("linear", "linear_add", "gated_linear"),
    "cache": ("store_kv",),
    "attention": ("attention",),
    "sample": ("sample",),
    "logits": ("adjust_logits", "logprobs"),
    "experts": ("route", "experts"),
    "heads": ("store_heads", "project_heads"),
    "quantized": ("quantized_linear", "quantized_embedding"),
    "quantized_fused": ("linear_add", "gated_linear", "project_heads"),
}


def deferred(family: str, name: str) -> Kernel:
    """The kernel of a file that is imported when it is asked for"""

    @cache
    def found(part: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(f"{__name__}.{family}"), part)
        return function

    def accepts(out: Any, *args: Any) -> bool:
        return bool(found(f"accepts_{name}")(out, *args))

    def run(out: Any, *args: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        with torch.cuda.device_of(first):
            return found(name)(out, *args)

    return Kernel("triton", accepts, run, lambda out, *args: lambda: run(out, *args))


for family, names in FAMILIES.items():
    for name in names:
        OPS[name].register(deferred(family, name))
