"""Every public function: its signature, its argument checks, one call into ops.

Kernels know the rules for tensors that they can take, and look faster than Python does. So they are asked
first, and the rules are gone through by name when they decline.
`out=` takes a tensor of the result's shape, dtype and device, is returned, and may be an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infinicore import ops
from infinicore.checks import check_eps, check_flag, check_places, check_tensor, integer
from infinicore.nn.checks import (
    check_approximate,
    check_float,
    check_like,
    check_linear,
    check_logits,
    check_lookup,
    check_lookup_options,
    check_normalized,
    check_out,
    check_pair,
    check_token,
    sampling_options,
)
from infinicore.ops import RopeAlgo
from infinicore.ops.descriptor import RopeInfo
from infinicore.ops.reference import check_range
from infinicore.quantization import PackedTensor, QuantizedTensor

__all__ = [
    "RopeAlgo",
    "add_rms_norm",
    "causal_softmax",
    "embedding",
    "geglu",
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


def causal_softmax(input: Tensor, out: Tensor | None = None) -> Tensor:
    """Softmax over the columns each query may see: of [..., S, T], row i sees columns up to T - S + i."""
    if (y := ops.causal_softmax.attempt(out, input)) is not None:
        return y
    check_float("causal_softmax", "input", input)
    if input.dim() < 2 or input.shape[-2] > input.shape[-1]:
        shape = tuple(input.shape)
        raise ValueError(f"causal_softmax: input must be [..., S, T] with S <= T, but has shape {shape}")
    check_out("causal_softmax", out, input, input.shape)
    return ops.causal_softmax(input, out=out)


def embedding(
    input: Tensor,
    weight: Tensor | QuantizedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The rows of weight that input names: [*] -> [*, E]. The options mean what they mean in torch.

    Rows of a quantised weight come dequantised to float32, and without options. Those of a half dtype come
    widened into an `out` of float32.
    """
    if scale_grad_by_freq is not False or sparse is not False:
        check_flag("embedding", "scale_grad_by_freq", scale_grad_by_freq)
        check_flag("embedding", "sparse", sparse)
    if isinstance(weight, QuantizedTensor):
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ValueError("embedding: a quantised weight takes no max_norm, scale_grad_by_freq or sparse")
        return look_up_blocks(input, weight, out)
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        check_lookup(input, weight, out)
        check_lookup_options(weight, padding_idx, max_norm, norm_type)
        options = (padding_idx, max_norm, norm_type, bool(scale_grad_by_freq), bool(sparse))
        rows = torch.nn.functional.embedding(input.long(), weight, *options)
        return rows if out is None else out.copy_(rows)
    if (found := ops.embedding.attempt(out, input, weight)) is not None:
        return found
    check_lookup(input, weight, out)
    return ops.embedding(input.contiguous(), weight, out=out)


def look_up_blocks(ids: Tensor, weight: QuantizedTensor, out: Tensor | None) -> Tensor:
    op = ops.packed_embedding if isinstance(weight, PackedTensor) else ops.quantized_embedding
    if out is None and len(weight.shape) == 2 and (rows := op.attempt(None, ids, weight)) is not None:
        return rows
    check_lookup(ids, weight, out)
    return op(ids.contiguous(), weight, out=out)


def linear(
    input: Tensor,
    weight: Tensor | QuantizedTensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """input @ weight.T + bias: [*, in], [out, in], [out] -> [*, out]

    The weight is quantised, or has the dtype of the input, or a half dtype where the input is float32.
    A packed one takes the input rounded to its activation_bits.
    """
    check_linear(input, weight, bias)
    check_out("linear", out, input, (*input.shape[:-1], weight.shape[0]))
    if isinstance(weight, PackedTensor):
        return ops.packed_linear(input, (weight,), (bias,), None, out=out)
    op = ops.quantized_linear if isinstance(weight, QuantizedTensor) else ops.linear
    return op(input, weight, bias, out=out)


def random_sample(
    logits: Tensor,
    random_val: float,
    topp: float,
    topk: int,
    temperature: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The token that random_val in [0, 1) draws from softmax(logits / temperature) cut to topk, then topp.

    logits [V] -> [] int64. topk 0 keeps all; temperature 0 takes the largest logit, the first of equal ones.
    """
    check_float("random_sample", "logits", logits)
    if logits.dim() != 1 or len(logits) == 0:
        raise ValueError(f"random_sample: logits must be [vocabulary], but have shape {tuple(logits.shape)}")
    options = sampling_options(random_val, topp, topk, temperature)
    if out is not None:
        check_token(out, logits)
    logits = logits.detach().contiguous()
    # A CPU's kernel looks at the logits itself, others and the reference do not.
    if logits.is_cpu and (token := ops.random_sample.attempt(out, logits, *options)) is not None:
        return token
    check_logits(logits)
    return ops.random_sample(logits, *options, out=out)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """input / sqrt(mean(input^2) + eps) * weight over the last dimensions, which normalized_shape names."""
    eps = check_eps("rms_norm", eps)
    if is_last(input, normalized_shape) and (y := ops.rms_norm.attempt(out, input, weight, eps)) is not None:
        return y
    check_float("rms_norm", "input", input)
    shape = check_normalized("rms_norm", input, normalized_shape)
    check_like("rms_norm", input, "weight", weight, shape)
    check_out("rms_norm", out, input, input.shape)
    if len(shape) == 1:
        return ops.rms_norm(input, weight, eps, out=out)
    return unflattened(ops.rms_norm(flattened(input, len(shape)), weight.reshape(-1), eps), input, out)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor,
    eps: float = 1e-5,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(input + residual), input + residual), in one pass over the rows."""
    check_float("add_rms_norm", "input", input)
    check_like("add_rms_norm", input, "residual", residual, input.shape)
    shape = check_normalized("add_rms_norm", input, normalized_shape)
    check_like("add_rms_norm", input, "weight", weight, shape)
    eps = check_eps("add_rms_norm", eps)
    if len(shape) != 1:
        raise ValueError(f"add_rms_norm: normalized_shape must name one dimension, but is {tuple(shape)}")
    if out is not None:
        check_pair("add_rms_norm", out, input)
    return ops.add_rms_norm(input, residual, weight, eps, out=out)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias over the last dimensions, the sums in float64."""
    eps = check_eps("layer_norm", eps)
    if is_last(input, normalized_shape):
        y = ops.layer_norm.attempt(out, input, weight, bias, eps)
        if y is not None:
            return y
    check_float("layer_norm", "input", input)
    shape = check_normalized("layer_norm", input, normalized_shape)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_like("layer_norm", input, name, tensor, shape)
    check_out("layer_norm", out, input, input.shape)
    if len(shape) == 1:
        return ops.layer_norm(input, weight, bias, eps, out=out)
    w = None if weight is None else weight.reshape(-1)
    b = None if bias is None else bias.reshape(-1)
    return unflattened(ops.layer_norm(flattened(input, len(shape)), w, b, eps), input, out)


def rope(
    x: Tensor,
    pos_ids: Tensor,
    sin_table: Tensor,
    cos_table: Tensor,
    algo: RopeAlgo = RopeAlgo.GPT_NEOX,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate the pairs of each head of x by the angle of its position.

    x [(B,) S, H, D], pos_ids [S] or [B, S], tables [length, D/2] -> as x
    """
    is_interleaved = algo is RopeAlgo.GPT_J
    if isinstance(algo, RopeAlgo):
        y = ops.rope.attempt(out, x, pos_ids, sin_table, cos_table, is_interleaved)
        if y is not None:
            return y
    check_float("rope", "x", x)
    for name, table in (("pos_ids", pos_ids), ("sin_table", sin_table), ("cos_table", cos_table)):
        check_tensor("rope", name, table)
    check_out("rope", out, x, x.shape)
    info = RopeInfo.create(x if out is None else out, x, pos_ids, sin_table, cos_table, algo)
    check_range(pos_ids, info.table_len)
    return ops.rope(x, pos_ids.contiguous(), sin_table, cos_table, is_interleaved, out=out)


def silu(input: Tensor, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
    """input * sigmoid(input); inplace writes over the input."""
    if inplace is not False:
        check_flag("silu", "inplace", inplace)
    if inplace and out is not None:
        raise ValueError("silu: inplace=True and out= exclude each other; pass one of them")
    if inplace and isinstance(input, Tensor) and input.requires_grad and torch.is_grad_enabled():
        check_float("silu", "input", input)
        return torch.nn.functional.silu(input, inplace=True)
    out = input if inplace else out
    if (y := ops.silu.attempt(out, input)) is not None:
        return y
    check_float("silu", "input", input)
    if inplace:
        check_places("silu", "input", input)
    check_out("silu", out, input, input.shape)
    return ops.silu(input, out=out)


def swiglu(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(input) * other"""
    if (y := ops.swiglu.attempt(out, input, other)) is not None:
        return y
    check_float("swiglu", "input", input)
    check_like("swiglu", input, "other", other, input.shape)
    check_out("swiglu", out, input, input.shape)
    return ops.swiglu(input, other, out=out)


def geglu(input: Tensor, other: Tensor, approximate: str = "tanh", *, out: Tensor | None = None) -> Tensor:
    """gelu(input, approximate) * other"""
    check_approximate("geglu", approximate)
    if (y := ops.geglu.attempt(out, input, other, approximate)) is not None:
        return y
    check_float("geglu", "input", input)
    check_like("geglu", input, "other", other, input.shape)
    check_out("geglu", out, input, input.shape)
    return ops.geglu(input, other, approximate, out=out)


def gelu(input: Tensor, approximate: str = "none", *, out: Tensor | None = None) -> Tensor:
    """input * Phi(input): exactly ("none"), in its tanh form, or as input * sigmoid(1.702 input) ("fast")"""
    check_approximate("gelu", approximate)
    if (y := ops.gelu.attempt(out, input, approximate)) is not None:
        return y
    check_float("gelu", "input", input)
    check_out("gelu", out, input, input.shape)
    return ops.gelu(input, approximate, out=out)


def softmax(input: Tensor, dim: int = -1, *, out: Tensor | None = None) -> Tensor:
    """exp(input) / sum(exp(input)) over dim"""
    if isinstance(dim, int) and dim == -1 and (y := ops.softmax.attempt(out, input)) is not None:
        return y
    check_float("softmax", "input", input)
    dim = integer("softmax", "dim", dim)
    if not -input.dim() <= dim < input.dim():
        raise IndexError(f"softmax: dim {dim} is out of range for an input with {input.dim()} dimensions")
    check_out("softmax", out, input, input.shape)
    if dim % input.dim() == input.dim() - 1:
        return ops.softmax(input, out=out)
    result = ops.softmax(input.transpose(dim, -1).contiguous()).transpose(dim, -1)
    return result.contiguous() if out is None else out.copy_(result)


def is_last(input: Tensor, normalized_shape: int | Sequence[int]) -> bool:
    """Does normalized_shape surely name the last dimension and no other?"""
    try:
        (size,) = normalized_shape  # type: ignore[misc]
        return type(size) is int and input.shape[-1] == size
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):  # the last by nested tensors
        return False


def flattened(x: Tensor, num_dims: int) -> Tensor:
    return x.flatten(x.dim() - num_dims)


def unflattened(result: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
    return result.reshape(like.shape) if out is None else out.copy_(result.reshape(like.shape))
