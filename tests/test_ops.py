"""Every kernel equals its reference: on the op's own samples, at every level, however the inputs lie."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import pytest
import torch
from conftest import LEVELS
from torch import Tensor
from warm import RunPython

import infinicore
from infinicore import _native, ops
from infinicore.ops import native, registry
from infinicore.ops.attention_reference import paged
from infinicore.ops.registry import OPS, Kernel, Op
from infinicore.quantization import BlockType

HALF_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = {
    "rope": (*HALF_AND_SINGLE, torch.float64),
    "quantized_linear": (torch.float32,),
    "quantized_embedding": (torch.float32,),
    "packed_linear": (torch.float32,),
    "packed_embedding": (torch.float32,),
}
NATIVE_OPS = [op for op in OPS.values() if any(kernel.name == "native" for kernel in op.kernels)]
# Of these there is nothing to differentiate by.
WITHOUT_GRADIENT = ("random_sample", "sample", "quantized_embedding", "packed_embedding", "store_heads")
NUM_STRIDED = {"rope": 1, "store_heads": 3}  # the tables of angles must be contiguous
# The output of these may be written over the first input; add_rms_norm has two, that of adjust_logits is
# float32 whatever the input is.
ELEMENTWISE = [
    name
    for name, may_be_input in _native.ops().items()
    if may_be_input and name not in ("add_rms_norm", "adjust_logits")
]


def every_sample(name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """Those of all its types"""
    return [each for dtype in DTYPES.get(name, HALF_AND_SINGLE) for each in samples(name, dtype)]


def samples(name: str, dtype: torch.dtype) -> list[tuple[tuple[Any, ...], Any]]:
    return samples_of_levels(name, dtype, _native.activation_rounding(BlockType.Q6_K.ggml_id, 16))


@cache
def samples_of_levels(
    name: str, dtype: torch.dtype, rounding: tuple[int, int]
) -> list[tuple[tuple[Any, ...], Any]]:
    """Each of an op's samples with what its reference makes of it, worked out once for all levels that round
    activations alike
    """
    return [(args, wanted_of(OPS[name], args)) for args in OPS[name].samples(dtype)]


def wanted_of(op: Op, args: tuple[Any, ...]) -> Any:
    """What the reference makes of them

    Dense products in float32: those of torch in bfloat16, where a CPU has AVX-512 without it, make NaN of an
    infinity that ends a row of odd size.
    """
    if op.name != "linear":
        return op.reference(*args)
    wide = [each.float() if isinstance(each, Tensor) else each for each in args]
    return op.reference(*wide).to(args[0].dtype)


def case_id(value: object) -> str:
    return value.name if isinstance(value, Op) else str(value).removeprefix("torch.")


def padded(t: object) -> object:
    """The same values as a window of something wider, so that no leading dimension is contiguous."""
    if not isinstance(t, Tensor) or t.dim() < 2 or not t.is_floating_point():
        return t
    wide = t.new_full((*t.shape[:-2], t.shape[-2] + 1, t.shape[-1] + 5), float("nan"))
    window = wide[..., :-1, :-5]
    return window.copy_(t)


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_close(op: Op, found: Tensor | tuple[Tensor, ...], wanted: Tensor | tuple[Tensor, ...]) -> None:
    for f, w in zip(as_tuple(found), as_tuple(wanted), strict=True):
        tolerance = op.tolerances.get(f.dtype)
        bars = {"rtol": tolerance.rtol, "atol": tolerance.atol} if tolerance else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(f, w, equal_nan=True, **bars)


def assert_same_bits(found: Tensor | tuple[Tensor, ...], wanted: Tensor | tuple[Tensor, ...]) -> None:
    """NaN for NaN, whatever its bits; 0.0 and -0.0 differ."""
    for f, w in zip(as_tuple(found), as_tuple(wanted), strict=True):
        assert f.dtype == w.dtype and f.shape == w.shape and torch.equal(f.isnan(), w.isnan())
        bits = [t.masked_fill(t.isnan(), 0)[..., None].view(torch.uint8) for t in (f, w)]
        assert torch.equal(*bits)


@pytest.mark.parametrize("op", NATIVE_OPS, ids=case_id)
def test_native_kernel_matches_the_reference(op: Op, level: str) -> None:
    for args, wanted in every_sample(op.name):
        assert op.pick(*args) is not None, f"the kernel refuses {args}"
        assert_close(op, op(*args), wanted)


@pytest.mark.parametrize("op", NATIVE_OPS, ids=case_id)
def test_strided_inputs_give_the_bits_of_contiguous_ones(op: Op, level: str) -> None:
    for args, _ in every_sample(op.name):
        num_strided = NUM_STRIDED.get(op.name, len(args))
        strided = (*map(padded, args[:num_strided]), *args[num_strided:])
        assert op.pick(*strided) is not None
        assert_same_bits(op(*strided), op(*args))


@pytest.mark.parametrize("op", OPS.values(), ids=case_id)
def test_results_lie_where_the_inputs_do_whatever_the_default_device_is(op: Op) -> None:
    for args, wanted in samples(op.name, torch.float32):
        with torch.device("meta"):
            made, computed = op.reference(*args), op(*args)
        assert_close(op, made, wanted)
        assert_close(op, computed, wanted)


@pytest.mark.parametrize("op", NATIVE_OPS, ids=case_id)
def test_one_and_two_threads_give_the_same_bits(op: Op, level: str, keep_threads: None) -> None:
    infinicore.set_num_threads(1)
    on_one = [op(*args) for args, _ in every_sample(op.name)]
    infinicore.set_num_threads(2)
    for (args, _), wanted in zip(every_sample(op.name), on_one, strict=True):
        assert_same_bits(op(*args), wanted)


@pytest.mark.parametrize("op", [op for op in NATIVE_OPS if op.name in ELEMENTWISE], ids=case_id)
def test_output_may_be_the_input(op: Op, level: str) -> None:
    for args, _ in every_sample(op.name):
        x = args[0].clone()
        assert op.pick(x, *args[1:], out=x) is not None
        result = op(x, *args[1:], out=x)
        assert result is x
        assert_same_bits(x, op(*args))


@pytest.mark.parametrize("op", [op for op in NATIVE_OPS if op.name in ELEMENTWISE], ids=case_id)
def test_output_may_overlap_the_input_in_part(op: Op, level: str) -> None:
    num_tested = 0
    for args, wanted in every_sample(op.name):
        if args[0].numel() == 0 or args[0].dim() > 3:
            continue
        shape = args[0].shape
        memory = torch.zeros(args[0].numel() + shape[-1], dtype=args[0].dtype)
        x, out = memory[: -shape[-1]].view(shape), memory[shape[-1] :].view(shape)
        x.copy_(args[0])
        assert_close(op, op(x, *args[1:], out=out), wanted)
        num_tested += 1
    assert num_tested > 15


SQUARE, OTHER = torch.randn(2, 130, 130, generator=torch.Generator().manual_seed(0))
HEADS = SQUARE[:, :128].reshape(130, 4, 32)
POOLS = paged(*torch.randn(2, 1, 4, 144, 32, generator=torch.Generator().manual_seed(1)), block_size=16)
IDS = torch.arange(130).flip(0)
VECTOR = SQUARE[0].clone()


@pytest.mark.parametrize(
    "op, args, index",
    [
        (ops.embedding, (IDS, SQUARE), 1),
        (ops.linear, (SQUARE, OTHER, None), 0),
        (ops.linear, (SQUARE, OTHER, None), 1),
        (ops.linear, (VECTOR, OTHER, SQUARE[1]), 2),
        (ops.rms_norm, (VECTOR, SQUARE[1], 1e-5), 1),
        (ops.layer_norm, (VECTOR, SQUARE[1], SQUARE[2], 1e-5), 2),
        (ops.swiglu, (SQUARE, OTHER), 1),
        (ops.attention, (HEADS, *POOLS, IDS * 0, IDS, 0.2, 0), 0),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_an_output_that_is_any_argument_gets_the_right_result(
    op: Op, args: tuple[Any, ...], index: int, level: str
) -> None:
    wanted = op.reference(*args)
    for is_resolved in (False, True):
        given = [a.clone() if isinstance(a, Tensor) else a for a in args]
        out = given[index]
        op.resolve(*given, out=out)() if is_resolved else op(*given, out=out)
        assert_close(op, out, wanted)


def test_two_outputs_may_be_the_inputs_but_not_each_other(level: str) -> None:
    wanted = ops.add_rms_norm.reference(SQUARE, OTHER, VECTOR, 1e-5)
    for y, total in ((0, 1), (1, 0)):
        given = [SQUARE.clone(), OTHER.clone()]
        ops.add_rms_norm(*given, VECTOR, 1e-5, out=(given[y], given[total]))
        assert_close(ops.add_rms_norm, (given[y], given[total]), wanted)
    rows = torch.empty(131, 130)
    for out in ((rows[1:], rows[1:]), (rows[:-1], rows[1:])):
        with pytest.raises(ValueError, match="two of the outputs overlap"):
            ops.add_rms_norm(SQUARE, OTHER, VECTOR, 1e-5, out=out)
        with pytest.raises(ValueError, match="two of the outputs overlap"):
            ops.add_rms_norm.resolve(SQUARE, OTHER, VECTOR, 1e-5, out=out)()


def test_a_prepared_call_refuses_tensors_that_overlap_where_its_own_did_not(level: str) -> None:
    call = ops.linear.resolve(SQUARE, OTHER, None, out=torch.empty(130, 130))
    with pytest.raises(ValueError, match="overlaps an input"):
        call(SQUARE, SQUARE, OTHER, None)
    pair = ops.add_rms_norm.resolve(
        SQUARE, OTHER, VECTOR, 1e-5, out=(torch.empty(130, 130), torch.empty(130, 130))
    )
    both = torch.empty(130, 130)
    with pytest.raises(ValueError, match="two outputs overlap"):
        pair(both, both, SQUARE, OTHER, VECTOR)


@pytest.mark.parametrize("op", NATIVE_OPS, ids=case_id)
def test_a_resolved_call_gives_the_bits_of_a_plain_one(op: Op, level: str) -> None:
    for args, _ in every_sample(op.name):
        wanted = op(*args)
        out = tuple(torch.full_like(w, 3) for w in as_tuple(wanted))
        if op.name == "store_kv":  # of which a call that can be repeated writes in place
            args = (*(cache.clone() for cache in args[:2]), *args[2:])
            out = args[:2]
        call = op.resolve(*args, out=out if isinstance(wanted, tuple) else out[0])
        assert isinstance(call, _native.Call) or out[0].numel() == 0
        for _ in range(2):
            call()
            assert_same_bits(out, wanted)


@pytest.mark.parametrize("op", [op for op in NATIVE_OPS if op.name not in WITHOUT_GRADIENT], ids=case_id)
def test_inputs_that_need_a_gradient_take_the_differentiable_reference(op: Op) -> None:
    args = [
        a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in samples(op.name, torch.float32)[2][0]
    ]
    assert op.pick(*args) is None
    sum(result.square().sum() for result in as_tuple(op(*args))).backward()
    for a in args:
        assert not isinstance(a, Tensor) or not a.requires_grad or (a.grad is not None and a.grad.any())
    with torch.no_grad():
        assert not as_tuple(op(*args))[0].requires_grad


@pytest.mark.parametrize("op", OPS.values(), ids=case_id)
def test_every_op_has_a_tolerance_and_samples_for_each_of_its_dtypes(op: Op) -> None:
    for dtype in DTYPES.get(op.name, HALF_AND_SINGLE):
        assert dtype in op.tolerances and len(samples(op.name, dtype)) > 2


# Blocks are tested with any bytes in test_matmul.py, and what is not finite is refused as a logit.
@pytest.mark.parametrize("op", [op for op in NATIVE_OPS if op.name not in WITHOUT_GRADIENT], ids=case_id)
def test_samples_hold_every_value_that_is_not_finite(op: Op) -> None:
    """So that a kernel which loses one of them differs from its reference."""
    tensors = [a for args, _ in samples(op.name, torch.float32) for a in args if isinstance(a, Tensor)]
    values = torch.cat([t.flatten() for t in tensors if t.is_floating_point()])
    assert values.isnan().any() and values.isposinf().any() and values.isneginf().any()


def test_every_native_function_belongs_to_an_op() -> None:
    bound = {name.removeprefix("bind_") for name in dir(_native) if name.startswith("bind_")}
    assert bound == set(_native.ops()) == {op.name for op in NATIVE_OPS}


def test_kernels_without_a_fast_tensor_exchange_read_attributes_instead() -> None:
    x = torch.randn(3, 4, 5)[:, 1:]
    wanted = ops.silu(x)
    _native.use_torch(torch, native.DTYPES, False)
    try:
        assert ops.silu.attempt(None, x) is not None
        assert_same_bits(ops.silu(x), wanted)
    finally:
        _native.use_torch(torch, native.DTYPES, True)


def test_native_functions_decline_what_would_leave_a_buffer_and_refuse_to_prepare_it() -> None:
    x = torch.randn(3, 4)
    y, tables = torch.zeros(3, 4), (x[:, :2].contiguous(), x[:, 2:].contiguous())
    for name, out, *args in (
        ("silu", torch.zeros(2, 4), x),
        ("silu", y.half(), x),
        ("silu", torch.zeros(4, 3).t(), x),
        ("rms_norm", y, x, torch.ones(3), 1e-5),
        ("layer_norm", y, x, torch.ones(4), torch.ones(3), 1e-5),
        ("swiglu", y, x, torch.randn(3, 5)),
        ("embedding", torch.zeros(1, 4), torch.tensor([[1, 2]]), x),
        ("causal_softmax", torch.zeros(4, 3), torch.randn(4, 3)),
        ("rope", torch.zeros(2, 1, 4), torch.randn(2, 1, 4), torch.tensor([0]), *tables, True),
        *(("silu", bad, x) for bad in (3, "x", [1.0], y.to("meta"), y.to(torch.complex64))),
        *(("silu", y, bad) for bad in (None, 3, "x", [1.0], x.to("meta"))),
    ):
        assert getattr(_native, name)(out, *args) is None
        with pytest.raises((ValueError, TypeError)):
            getattr(_native, "bind_" + name)(out, *args)
        assert not isinstance(out, Tensor) or out.is_meta or not out.any()
    assert _native.random_sample(torch.zeros(2, dtype=torch.int64), x[0], 0.5, 1.0, 0, 1.0) is None


def test_an_op_refuses_an_output_of_another_shape_also_by_its_reference() -> None:
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=r"out has shape \(3, 4\), but the result has \(1, 4\)"):
            ops.silu(torch.randn(1, 4, dtype=dtype), out=torch.empty(3, 4, dtype=dtype))


def test_a_call_bound_without_an_output_keeps_the_one_it_makes() -> None:
    x = torch.randn(300, 100)
    calls = [ops.silu.resolve(x, out=None) for _ in range(20)]
    others = [torch.full_like(x, 7) for _ in range(20)]  # which would get the memory of outputs that are gone
    for call in calls:
        call()
    assert all(bool((other == 7).all()) for other in others)


def test_a_resolved_call_refuses_tensors_of_another_layout() -> None:
    x = torch.randn(3, 4)
    call = ops.silu.resolve(x, out=torch.empty_like(x))
    call(torch.empty(3, 4), torch.randn(3, 4))
    for wrong in (torch.randn(3, 5), torch.randn(4, 3).t(), torch.randn(3, 4).double(), None):
        with pytest.raises((ValueError, TypeError)):
            call(torch.empty(3, 4), wrong)
    x.resize_(5, 5)
    with pytest.raises(ValueError):
        call()


@pytest.mark.parametrize("bits", range(0, 65536, 4096))
def test_half_precision_conversions_are_exact_for_every_bit_pattern(bits: int, level: str) -> None:
    """Through an op that adds zero: x * 1 rounded back must be x, NaN for NaN."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.arange(bits, bits + 4096, dtype=torch.int32).to(torch.int16).view(dtype).view(4, 1024)
        zero, total, y = torch.zeros_like(x), torch.empty_like(x), torch.empty_like(x)
        _native.add_rms_norm((y, total), x, zero, torch.ones(1024, dtype=dtype), 1e-6)
        torch.testing.assert_close(total, x + zero, rtol=0, atol=0, equal_nan=True)


def test_rounding_to_half_precision_is_to_nearest_even(level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16):
        a = (torch.randn(64, 1024, generator=generator) * 10 ** torch.linspace(-8, 5, 1024)).to(dtype)
        b = (torch.randn(64, 1024, generator=generator) * 10 ** torch.linspace(-8, 5, 1024)).to(dtype)
        total, y = torch.empty_like(a), torch.empty_like(a)
        _native.add_rms_norm((y, total), a, b, torch.ones(1024, dtype=dtype), 1e-6)
        wanted = (a.float() + b.float()).to(dtype)
        torch.testing.assert_close(total, wanted, rtol=0, atol=0, equal_nan=True)


def test_levels_of_the_cpu_are_among_those_of_the_build_and_the_best_is_taken() -> None:
    levels = _native.isa_levels()
    assert levels == [name for name in LEVELS if name in levels] and levels[0] == "portable"
    if "INFINICORE_ISA" not in os.environ:
        assert _native.isa() == levels[-1]


def test_an_unknown_level_is_refused_with_those_there_are() -> None:
    levels = re.escape(repr(_native.isa_levels()))
    with pytest.raises(ValueError, match=f"one of {levels}, but found 'sse9'"):
        _native.set_isa("sse9")


def test_use_ntops_switches_accelerators_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a device of the accelerator, and float64 for what the native kernel declines."""
    monkeypatch.setattr(registry, "ACCELERATOR_DEVICES", ("cpu",))
    twice: Op = Op("twice", lambda x: x + x, lambda dtype: [])
    twice.register(
        Kernel("triton", lambda out, x: x.dtype is torch.float64, lambda out, x: 2 * x, lambda out, x: print)
    )
    x, meta = torch.randn(3).double(), torch.randn(3, device="meta").double()

    def is_accelerated(x: Tensor, out: Tensor | None = None) -> bool:
        return twice.pick(x, out=out) is not None

    assert is_accelerated(x)
    assert is_accelerated(x, out=torch.empty_like(x))
    assert not is_accelerated(x.float()) and not is_accelerated(meta)
    accelerated = twice(x)
    monkeypatch.setattr(infinicore, "use_ntops", False)
    assert not is_accelerated(x)
    assert_same_bits(twice(x), accelerated)


def test_a_kernel_whose_name_has_no_place_in_the_order_is_refused_and_not_kept() -> None:
    twice: Op = Op("twice", lambda x: x + x, lambda dtype: [])
    with pytest.raises(ValueError, match="twice: a kernel is named 'mine'; expected 'native' or"):
        twice.register(Kernel("mine", lambda *_: True, lambda *_: None, lambda *_: print))
    assert twice.kernels == []


def test_an_op_does_not_take_the_name_of_another() -> None:
    with pytest.raises(ValueError, match="there is an op 'silu' already"):
        registry.op(lambda dtype: [])(ops.silu.reference)
    assert OPS["silu"] is ops.silu


def test_a_core_with_an_op_that_has_no_reference_says_what_to_do() -> None:
    with pytest.raises(ImportError, match="has 'newer', of which no reference is imported: .*make setup"):
        native.op_of("newer")


def test_triton_and_its_kernels_are_not_imported_until_a_gpu_tensor_comes(run_python: RunPython) -> None:
    code = (
        "import sys, torch, infinicore; infinicore.ops.silu(torch.ones(3).double());"
        "print([name for name in sys.modules if name.startswith('infinicore.ops.triton.')])"
    )
    assert run_python(code).stdout == "[]\n"


def test_greedy_rows_on_another_device_are_known_without_waiting_for_it() -> None:
    """The meta device stands in for it: no number can be read there."""
    logits, uniforms, top_k = torch.empty(3, 50, device="meta"), torch.zeros(3).double(), torch.zeros(3)
    settings = torch.tensor([[0.0, 1.0, 0.0]] * 3)
    assert ops.sample(logits, uniforms, settings, top_k).shape == (3,)
    settings[1, 0] = 0.5
    assert ops.sample.pick(logits, uniforms, settings, top_k) is None


def test_layer_norm_keeps_a_small_variance_under_a_large_mean(level: str) -> None:
    x = 1e4 + torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)) * 1e-2
    wanted = torch.nn.functional.layer_norm(x.double(), (4096,), eps=1e-12).float()
    torch.testing.assert_close(ops.layer_norm(x, None, None, 1e-12), wanted, rtol=1e-5, atol=1e-5)
