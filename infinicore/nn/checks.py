"""What functions ask of their arguments. Each check names the function, the argument, what was found and what
was wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from infinicore.checks import FLOATS, check_places, check_tensor, first_outside, integer, number, sizes
from infinicore.ops.descriptor import INDEX_DTYPES
from infinicore.quantization import QuantizedTensor

HALVES = (torch.float16, torch.bfloat16)
LARGEST_TOPK = 2**31  # beyond any vocabulary


class ShapeError(ValueError, AssertionError):
    """A shape that does not fit; also an AssertionError, which callers by the design documents catch."""


def check_float(function: str, name: str, tensor: Tensor) -> None:
    check_tensor(function, name, tensor)
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{function}: {name} must be float16, bfloat16, float32 or float64, but is {tensor.dtype}"
        )


def check_same(function: str, like: Tensor, name: str, tensor: Tensor) -> None:
    check_tensor(function, name, tensor)
    if tensor.dtype is not like.dtype or tensor.device != like.device:
        raise TypeError(
            f"{function}: {name} is {tensor.dtype} on {tensor.device}, "
            f"but the input is {like.dtype} on {like.device}"
        )


def check_shape(function: str, name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise ShapeError(f"{function}: {name} has shape {tuple(tensor.shape)}, but {tuple(wanted)} is wanted")


def check_like(function: str, like: Tensor, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    check_same(function, like, name, tensor)
    check_shape(function, name, tensor, shape)


def check_out(function: str, out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> None:
    if out is not None:
        check_like(function, like, "out", out, shape)
        check_places(function, "out", out)


def check_pair(function: str, out: tuple[Tensor, Tensor], like: Tensor) -> None:
    if not isinstance(out, tuple | list) or len(out) != 2:
        found = f"{len(out)} of them" if isinstance(out, tuple | list) else type(out).__name__
        raise TypeError(f"{function}: out must be a pair of tensors, but is {found}")
    for tensor in out:
        check_out(function, tensor, like, like.shape)


def check_normalized(function: str, input: Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """normalized_shape as the sizes it names, which are the last ones of the input."""
    wanted = torch.Size(sizes(function, "normalized_shape", normalized_shape))
    if not wanted or input.shape[-len(wanted) :] != wanted:
        shapes = f"input shape {tuple(input.shape)} does not end in normalized_shape {tuple(wanted)}"
        raise ShapeError(f"{function}: {shapes}")
    return wanted


def check_approximate(function: str, approximate: str) -> None:
    if approximate not in ("none", "tanh", "fast"):
        raise ValueError(f"{function}: approximate must be 'none', 'tanh' or 'fast', but is {approximate!r}")


def check_linear(input: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> None:
    check_float("linear", "input", input)
    check_weight(input, weight)
    if len(weight.shape) != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: input {tuple(input.shape)} does not fit weight {tuple(weight.shape)}; "
            "expected [*, in] and [out, in]"
        )
    if bias is not None:
        check_like("linear", input, "bias", bias, tuple(weight.shape[:1]))


def check_weight(input: Tensor, weight: Tensor | QuantizedTensor) -> None:
    is_half = isinstance(weight, Tensor) and weight.dtype in HALVES
    if isinstance(weight, QuantizedTensor) or (is_half and input.dtype == torch.float32):
        if weight.device != input.device:
            raise TypeError(f"linear: weight is on {weight.device}, but the input is on {input.device}")
    else:
        check_same("linear", input, "weight", weight)


def check_lookup(ids: Tensor, weight: Tensor | QuantizedTensor, out: Tensor | None) -> None:
    if not isinstance(weight, QuantizedTensor):
        check_float("embedding", "weight", weight)
    check_ids(ids, weight)
    is_wide = getattr(out, "dtype", None) == torch.float32
    if isinstance(weight, Tensor) and not (is_wide and weight.dtype in HALVES):
        row: Tensor = weight
    else:  # whose rows come in float32
        row = torch.empty(0, dtype=torch.float32, device=weight.device)
    check_out("embedding", out, row, (*ids.shape, weight.shape[1]))


def check_ids(ids: Tensor, weight: Tensor | QuantizedTensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in INDEX_DTYPES:
        found = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"embedding: input must be a tensor of integers, but is {found}")
    if len(weight.shape) != 2:
        raise ValueError(
            f"embedding: weight must be [num_embeddings, dim], but has shape {tuple(weight.shape)}"
        )
    if ids.device != weight.device:
        raise ValueError(f"embedding: input is on {ids.device}, but weight is on {weight.device}")
    if (outside := first_outside(ids, weight.shape[0])) is not None:
        raise IndexError(f"embedding: id {outside} is outside [0, {weight.shape[0]})")


def check_lookup_options(
    weight: Tensor, padding_idx: int | None, max_norm: float | None, norm_type: float
) -> None:
    if padding_idx is not None:
        row = integer("embedding", "padding_idx", padding_idx)
        if not -len(weight) <= row < len(weight):
            raise ValueError(f"embedding: padding_idx {row} names none of the {len(weight)} rows of weight")
    if max_norm is not None:
        number("embedding", "max_norm", max_norm)
    number("embedding", "norm_type", norm_type)


def sampling_options(
    random_val: float, topp: float, topk: int, temperature: float
) -> tuple[float, float, int, float]:
    random_val = number("random_sample", "random_val", random_val)
    if not 0 <= random_val < 1:
        raise ValueError(f"random_sample: random_val must be in [0, 1), but is {random_val!r}")
    topp = number("random_sample", "topp", topp)
    if not 0 <= topp <= 1:
        raise ValueError(f"random_sample: topp must be in [0, 1], but is {topp!r}")
    topk = min(integer("random_sample", "topk", topk), LARGEST_TOPK)
    if topk < 0:
        raise ValueError(f"random_sample: topk must be 0 (off) or a positive count, but is {topk!r}")
    temperature = number("random_sample", "temperature", temperature)
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"random_sample: temperature must be finite and not negative, but is {temperature!r}"
        )
    return random_val, topp, topk, temperature


def check_token(out: Tensor, logits: Tensor) -> None:
    check_tensor("random_sample", "out", out)
    if out.dim() != 0 or out.dtype not in (torch.int64, torch.int32) or out.device != logits.device:
        found = f"{out.dtype} {tuple(out.shape)} on {out.device}"
        raise ValueError(f"random_sample: out must be one int64 or int32 on {logits.device}, but is {found}")


def check_logits(logits: Tensor) -> None:
    """For kernels that do not check logits themselves."""
    if logits.is_meta:
        raise ValueError("random_sample: logits are on the meta device and hold no values to draw by")
    if bool((logits.isnan() | (logits == torch.inf)).any()):
        raise ValueError("random_sample: logits hold NaN or +inf; expected finite values or -inf")
    if bool((logits == -torch.inf).all()):
        raise ValueError("random_sample: every logit is -inf, so there is no token to take")
