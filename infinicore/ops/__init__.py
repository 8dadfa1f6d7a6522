"""Every op by name: `ops.rms_norm(x, weight, eps)` runs the first kernel that accepts its arguments."""

from infinicore.ops import native as _native_kernels  # noqa: F401  registers itself
from infinicore.ops.descriptor import RopeAlgo, RopeDescriptor, RopeInfo
from infinicore.ops.reference import (
    add,
    add_rms_norm,
    attention,
    causal_softmax,
    embedding,
    gelu,
    layer_norm,
    linear,
    packed_embedding,
    packed_linear,
    quantized_embedding,
    quantized_linear,
    random_sample,
    rms_norm,
    rope,
    silu,
    softmax,
    store_kv,
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
    "add",
    "add_rms_norm",
    "attention",
    "causal_softmax",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "packed_embedding",
    "packed_linear",
    "quantized_embedding",
    "quantized_linear",
    "random_sample",
    "rms_norm",
    "rope",
    "silu",
    "softmax",
    "store_kv",
    "swiglu",
]
