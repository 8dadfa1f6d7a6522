"""Every op by name: `ops.rms_norm(x, weight, eps)` runs the first kernel that accepts its arguments."""

from infinicore.ops import native as _native_kernels  # noqa: F401  registers itself
from infinicore.ops.descriptor import RopeAlgo, RopeDescriptor, RopeInfo
from infinicore.ops.reference import (
    add_rms_norm,
    causal_softmax,
    embedding,
    gelu,
    layer_norm,
    linear,
    random_sample,
    rms_norm,
    rope,
    silu,
    softmax,
    swiglu,
)
from infinicore.ops.registry import OPS, Kernel, Op

__all__ = [
    "OPS",
    "Kernel",
    "Op",
    "RopeAlgo",
    "RopeDescriptor",
    "RopeInfo",
    "add_rms_norm",
    "causal_softmax",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "random_sample",
    "rms_norm",
    "rope",
    "silu",
    "softmax",
    "swiglu",
]
