"""Registers the kernels of csrc/ and says what each accepts: plain CPU tensors that need no gradient."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    from infinicore import _native
except ImportError as error:
    raise ImportError(f"the native core of infinicore is not there: {error}; run `make setup`") from error

from infinicore.checks import integer
from infinicore.ops import reference
from infinicore.ops.registry import Kernel, Op
from infinicore.quantization import PackedTensor, QuantizedTensor

MAX_THREADS = 1024


def missing_from_core(name: str) -> Any:
    """Asked where the core lacks a name, as one does that is older than the Python sources."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"the native core of infinicore has no {name!r}, so it is older; run `make setup`")


def set_num_threads(count: int) -> None:
    """Use this many threads from now on; results do not depend on it."""
    found = integer("set_num_threads", "count", count)
    if not 1 <= found <= MAX_THREADS:
        raise ValueError(f"set_num_threads: count must be from 1 to {MAX_THREADS}, but is {found}")
    _native.set_num_threads(found)


def use_environment() -> None:
    if level := os.environ.get("INFINICORE_ISA"):
        _native.set_isa(level)
    if count := os.environ.get("INFINICORE_NUM_THREADS"):
        if not re.fullmatch("[0-9]{1,4}", count) or not 1 <= int(count) <= MAX_THREADS:
            raise ValueError(
                f"INFINICORE_NUM_THREADS must be a whole number from 1 to {MAX_THREADS}, but is {count!r}"
            )
        set_num_threads(int(count))


_native.__getattr__ = missing_from_core
_native.use_torch(torch.Tensor, torch.nn.Parameter, torch.is_grad_enabled, torch.empty_like, True)
use_environment()
# A forked child has none of the threads that torch knows of, and would wait for them for ever. Our own pool
# begins anew there (csrc/pool.cpp).
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

GELU_KERNELS = {"none": "gelu", "tanh": "gelu_tanh", "fast": "gelu_fast"}


def register(op: Op[Any]) -> None:
    """Make `_native.<op>` a kernel of the op, one that accepts, allocates and runs in one call."""
    accepts, run, bind = (getattr(_native, prefix + op.name) for prefix in ("accepts_", "", "bind_"))
    op.register(Kernel("native", accepts, run, bind, is_whole=True))


def register_parts(
    op: Op[Any],
    accepts: Callable[..., bool],
    empty: Callable[..., Any],
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda native: native,
) -> None:
    """Make `_native.<op>(out, *args)` a kernel of the op; `adapt` brings the op's arguments into its form."""
    run_native, bind_native = adapt(getattr(_native, op.name)), adapt(getattr(_native, "bind_" + op.name))

    def run(out: Any, *args: Any) -> Any:
        if out is None:
            out = empty(*args)
        run_native(out, *args)
        return out

    op.register(Kernel("native", accepts, run, bind_native))


def run_gelu(out: Tensor | None, x: Tensor, approximate: str) -> Tensor | None:
    return getattr(_native, GELU_KERNELS[approximate])(out, x)  # type: ignore[no-any-return]


def bind_gelu(out: Tensor, x: Tensor, approximate: str) -> Callable[[], None]:
    return getattr(_native, "bind_" + GELU_KERNELS[approximate])(out, x)  # type: ignore[no-any-return]


def accepts_add_rms_norm(out: tuple[Tensor, Tensor] | None, *args: Any) -> bool:
    if out is None:
        return _native.accepts_rows(None, *args)
    y, total = out  # y is written while total is read, so they may not be one
    return (
        _native.accepts_rows(y, *args) and _native.accepts_rows(total, *args) and _native.are_apart(y, total)
    )


def run_add_rms_norm(out: tuple[Tensor, Tensor] | None, x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    y, total = (torch.empty_like(x), torch.empty_like(x)) if out is None else out
    _native.add_rms_norm(y, total, x, *args)
    return y, total


def bind_add_rms_norm(out: tuple[Tensor, Tensor], *args: Any) -> Callable[[], None]:
    return _native.bind_add_rms_norm(*out, *args)  # type: ignore[no-any-return]


def accepts_random_sample(out: Tensor | None, logits: Tensor, *_: Any) -> bool:
    return _native.accepts_rows(None, logits)


def run_random_sample(out: Tensor | None, logits: Tensor, *args: Any) -> Tensor:
    token = torch.empty((), dtype=torch.int64) if out is None else out
    _native.random_sample(token, logits, sampling_workspace(logits), *args)
    return token


def bind_random_sample(out: Tensor, logits: Tensor, *args: Any) -> Callable[[], None]:
    return _native.bind_random_sample(out, logits, sampling_workspace(logits), *args)  # type: ignore[no-any-return]


def given_blocks(native: Callable[..., Any]) -> Callable[..., Any]:
    """A native function of (out, x, blocks, ..., type) as one of (out, x, weight: QuantizedTensor, ...)."""

    def call(out: Tensor | None, x: Tensor, weight: QuantizedTensor, *rest: Any) -> Any:
        return native(out, x, weight.blocks, *rest, weight.type.ggml_id)

    return call


def given_packed(native: Callable[..., Any]) -> Callable[..., Any]:
    """As given_blocks, for a native function of (out, x, packed, ..., type, num_rows)."""

    def call(out: Tensor | None, x: Tensor, weight: PackedTensor, *rest: Any) -> Any:
        return native(out, x, weight.blocks, *rest, weight.type.ggml_id, weight.shape[0])

    return call


def three(values: Iterable[Any], missing: Any = None) -> tuple[Any, ...]:
    return (*values, missing, missing, missing)[:3]


def packed_arguments(weights: Sequence[PackedTensor], biases: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Up to three weights as a native function takes them: blocks, biases, types and numbers of rows."""
    blocks, types = three(w.blocks for w in weights), three((w.type.ggml_id for w in weights), 0)
    return *blocks, *three(biases), *types, *three((w.shape[0] for w in weights), 0)


def accepts_packed_linear(
    out: Tensor | None,
    x: Tensor,
    weights: Sequence[PackedTensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    is_gated: bool,
) -> bool:
    if not 1 <= len(weights) <= 3 or len({w.activation_bits for w in weights}) != 1:
        return False
    arguments = packed_arguments(weights, biases)
    return _native.accepts_packed_linear(out, x, residual, *arguments, is_gated)


def given_weights(native: Callable[..., Any]) -> Callable[..., Any]:
    """A native packed product as one of packed_linear's arguments, with room for the rounded x."""

    def call(
        out: Tensor,
        x: Tensor,
        weights: Sequence[PackedTensor],
        biases: Sequence[Tensor | None],
        residual: Tensor | None,
        is_gated: bool,
    ) -> Any:
        bits = weights[0].activation_bits
        room = torch.empty(_native.packed_room(x, bits))
        return native(out, x, residual, room, *packed_arguments(weights, biases), is_gated, bits)

    return call


def empty_packed_product(x: Tensor, weights: Sequence[PackedTensor], *rest: Any) -> Tensor:
    is_gated = rest[-1]
    width = weights[0].shape[0] if is_gated else sum(w.shape[0] for w in weights)
    return x.new_empty(*x.shape[:-1], width)


def empty_product(x: Tensor, weight: Tensor | QuantizedTensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def empty_rows(ids: Tensor, weight: QuantizedTensor) -> Tensor:
    return torch.empty(*ids.shape, weight.shape[1])


def sampling_workspace(logits: Tensor) -> Tensor:
    return torch.empty(2 * len(logits), dtype=torch.int32)


register(reference.rms_norm)
register(reference.silu)
register(reference.swiglu)
register(reference.add)
register(reference.softmax)
register(reference.causal_softmax)
register(reference.layer_norm)
register(reference.rope)
register(reference.embedding)
register_parts(reference.linear, _native.accepts_linear, empty_product)
register_parts(
    reference.quantized_linear, given_blocks(_native.accepts_quantized_linear), empty_product, given_blocks
)
register_parts(
    reference.quantized_embedding, given_blocks(_native.accepts_quantized_embedding), empty_rows, given_blocks
)
register_parts(reference.packed_linear, accepts_packed_linear, empty_packed_product, given_weights)
register_parts(
    reference.packed_embedding, given_packed(_native.accepts_packed_embedding), empty_rows, given_packed
)
reference.gelu.register(Kernel("native", _native.accepts_rows, run_gelu, bind_gelu, is_whole=True))
reference.add_rms_norm.register(Kernel("native", accepts_add_rms_norm, run_add_rms_norm, bind_add_rms_norm))
reference.random_sample.register(
    Kernel("native", accepts_random_sample, run_random_sample, bind_random_sample)
)


def is_head_rows(*tensors: Tensor) -> bool:
    """[tokens, heads, dim] in float32 on a CPU, rows contiguous, no gradient wanted"""
    return all(
        t.is_cpu and t.dtype is torch.float32 and t.dim() == 3 and t.stride(-1) == 1 and not t.requires_grad
        for t in tensors
    )


def accepts_attention(out: Tensor | None, q: Tensor, keys: Tensor, values: Tensor, *_: Any) -> bool:
    if not is_head_rows(q) or not _native.accepts_rows(None, keys, values):
        return False
    dim = q.shape[2]
    fits = dim <= 256 and q.shape[1] // max(keys.shape[1], 1) * (dim + 2) <= 8192
    return fits and (out is None or (is_head_rows(out) and _native.are_apart(out, q)))


# Tokens up to this many share out the keys of long streams, and need room for the parts.
MAX_SPLIT_TOKENS, SPLIT_SIZE = 16, 256


def attention_workspace(q: Tensor, keys: Tensor) -> Tensor:
    num_tokens, num_heads, dim = q.shape
    num_splits = -(-keys.shape[2] // SPLIT_SIZE)
    is_split = num_tokens <= MAX_SPLIT_TOKENS and num_splits > 1
    return torch.empty(num_tokens * num_heads * num_splits * (dim + 2) if is_split else 0)


def run_attention(out: Tensor | None, q: Tensor, keys: Tensor, values: Tensor, *args: Any) -> Tensor:
    y = torch.empty(q.shape) if out is None else out
    _native.attention(y, q, keys, values, *args[:2], attention_workspace(q, keys), *args[2:])
    return y


def bind_attention(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, *args: Any) -> Callable[[], None]:
    workspace = attention_workspace(q, keys)
    return _native.bind_attention(out, q, keys, values, *args[:2], workspace, *args[2:])  # type: ignore[no-any-return]


def accepts_store_kv(out: Any, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, *_: Any) -> bool:
    is_in_place = out is None or (out[0] is keys and out[1] is values)
    return is_in_place and is_head_rows(k, v) and _native.accepts_rows(None, keys, values)


def run_store_kv(out: Any, keys: Tensor, values: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    keys, values = (keys.clone(), values.clone()) if out is None else out
    _native.store_kv(keys, values, *args)
    return keys, values


def bind_store_kv(out: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, *args: Any) -> Callable[[], None]:
    if out[0] is not keys or out[1] is not values:
        raise ValueError("store_kv: a call to be repeated writes in place; pass out=(keys, values)")
    return _native.bind_store_kv(keys, values, *args)  # type: ignore[no-any-return]


reference.attention.register(Kernel("native", accepts_attention, run_attention, bind_attention))
reference.store_kv.register(Kernel("native", accepts_store_kv, run_store_kv, bind_store_kv))


def read_all(buffer: Tensor, ahead: int = 0) -> int:
    """The sum of a contiguous int64 tensor, read on all threads: memory's speed.

    Bytes are asked for `ahead` of their use; how far is best differs from CPU to CPU.
    """
    return _native.read_all(buffer, ahead)  # type: ignore[no-any-return]


def get_num_threads() -> int:
    """How many threads the native core uses."""
    return _native.num_threads()
