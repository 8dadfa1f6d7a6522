"""Every op by name: `ops.rms_norm(x, weight, eps)` runs the first kernel that accepts its arguments."""

from infinicore.ops import native as _native_kernels  # noqa: F401  registers itself
from infinicore.ops import triton as _triton_kernels  # noqa: F401  likewise, and imports Triton on a GPU alone
from infinicore.ops.attention_reference import attention, store_kv
from infinicore.ops.descriptor import RopeAlgo, RopeDescriptor, RopeInfo
from infinicore.ops.experts_reference import experts, route
from infinicore.ops.fused_reference import gated_linear, linear_add, project_heads, store_heads
from infinicore.ops.lora_reference import add_lora
from infinicore.ops.quantized_reference import (
    packed_embedding,
    packed_linear,
    quantized_embedding,
    quantized_linear,
)
from infinicore.ops.reference import (
    add,
    add_rms_norm,
    add_scaled,
    causal_softmax,
    embedding,
    gate_rows,
    geglu,
    gelu,
    layer_norm,
    linear,
    rms_norm,
    rope,
    scale,
    silu,
    softcap,
    softmax,
    swiglu,
)
from infinicore.ops.registry import OPS, Kernel, Op
from infinicore.ops.sampling_reference import adjust_logits, logprobs, random_sample, sample

__all__ = [
    "OPS",
    "Kernel",
    "Op",
    "RopeAlgo",
    "RopeDescriptor",
    "RopeInfo",
    "add",
    "add_lora",
    "add_rms_norm",
    "add_scaled",
    "adjust_logits",
    "attention",
    "causal_softmax",
    "embedding",
    "experts",
    "gate_rows",
    "gated_linear",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "linear_add",
    "logprobs",
    "packed_embedding",
    "packed_linear",
    "project_heads",
    "quantized_embedding",
    "quantized_linear",
    "random_sample",
    "rms_norm",
    "rope",
    "route",
    "sample",
    "scale",
    "silu",
    "softcap",
    "softmax",
    "store_heads",
    "store_kv",
    "swiglu",
]
