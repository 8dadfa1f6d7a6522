"""Products with dense weights and weights in blocks: near the float64 product, and the same bits for a row
whatever stands beside it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import infinicore
from infinicore import _native, ops
from infinicore.nn import functional as F
from infinicore.nn.fused import can_follow_gate, gated_linear, gated_linear_onto, linear_add, linear_group
from infinicore.ops.samples import random_blocks
from infinicore.quantization import BlockType, PackedTensor, QuantizedTensor, quantize

BLOCK_TYPES = pytest.mark.parametrize("block_type", list(BlockType), ids=lambda block_type: block_type.name)
DENSE = ["float32", "float16", "bfloat16"]
EXACT = [*(block_type.name for block_type in BlockType), *DENSE]
INT8 = [f"int8 {block_type.name}" for block_type in BlockType]
INT12 = [f"int12 {block_type.name}" for block_type in BlockType]
INT16 = [f"int16 {block_type.name}" for block_type in BlockType]
EVERY_KIND = EXACT + INT8 + INT12 + INT16
KINDS = pytest.mark.parametrize("kind", EVERY_KIND)
BARS = {"int8": 5e-4, "int12": 3e-6, "int16": 1e-8}  # about three times the largest error


BIG = random_blocks(BlockType.Q8_0, 64, 2)


def rows(num_rows: int, length: int) -> Tensor:
    return torch.randn(num_rows, length, generator=torch.Generator().manual_seed(num_rows))


def weight_of(kind: str, num_rows: int) -> Tensor | QuantizedTensor:
    """Rows of 768, three chunks of the narrowest kernels."""
    activations, _, name = kind.rpartition(" ")
    if name not in BlockType.__members__:
        return rows(num_rows, 768).to(getattr(torch, name))
    weight = random_blocks(BlockType[name], num_rows, 768 // BlockType[name].elements_per_block)
    return weight.pack(int(activations.removeprefix("int"))) if activations else weight


def nmse(found: Tensor, wanted: Tensor) -> float:
    error = found.double() - wanted.double()
    return float(error.square().sum() / wanted.double().square().sum())


def product(x: Tensor, weight: Tensor | QuantizedTensor) -> Tensor:
    dense = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    return x.double() @ dense.double().T


@BLOCK_TYPES
def test_native_values_are_those_of_dequantize_bit_for_bit(block_type: BlockType, level: str) -> None:
    """Of any bytes, so also for scales that are infinite or not a number."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (64, 5 * block_type.bytes_per_block), generator=generator, dtype=torch.uint8)
    weight = QuantizedTensor(blocks, block_type, (64, 5 * block_type.elements_per_block))
    found, wanted = ops.quantized_embedding(torch.arange(64), weight), weight.dequantize()
    is_nan = wanted.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found.view(torch.int32)[~is_nan], wanted.view(torch.int32)[~is_nan])


def bar_of_rounding(kind: str, level: str, length: int) -> float:
    """A few times what rounding changes: AMX tiles keep 16 bits of x, and take rows that fill lines."""
    return 3e-11 if (kind, level) == ("bfloat16", "amx") and length % 32 == 0 else 1e-13


def test_no_rows_make_no_products(level: str) -> None:
    """A part of a prompt may want no logits."""
    for weight in (weight_of(kind, 100) for kind in EVERY_KIND):
        assert F.linear(torch.empty(0, 768), weight).shape == (0, 100)
        assert F.linear(torch.empty(2, 0, 768), weight).shape == (2, 0, 100)


@pytest.mark.parametrize("num_rows", [1, 5, 9, 300])
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_what_has_no_columns_comes_to_its_bias(bits: int, num_rows: int, level: str) -> None:
    bias = rows(1, 20)[0]
    for block_type in (BlockType.Q4_0, BlockType.Q6_K):
        weight = QuantizedTensor(torch.empty(20, 0, dtype=torch.uint8), block_type, (20, 0)).pack(bits)
        assert torch.equal(F.linear(torch.empty(num_rows, 0), weight, bias), bias.expand(num_rows, 20))


def test_a_bias_without_values_is_refused_and_not_taken_for_none() -> None:
    x, weight, bias = torch.ones(2, 32), torch.ones(16, 32), torch.empty(0)
    packed = quantize(weight, BlockType.Q8_0).pack()
    with pytest.raises(RuntimeError, match="size"):
        ops.linear(x, weight, bias)
    with pytest.raises(RuntimeError, match="size"):
        ops.packed_linear(x, (packed,), (bias,), None)


@pytest.mark.parametrize("kind", EXACT)
def test_product_is_that_of_float64_but_for_float32_rounding(kind: str, level: str) -> None:
    weight = weight_of(kind, 100)
    for num_rows in (1, 9):
        x = rows(num_rows, 768)
        assert nmse(F.linear(x, weight), product(x, weight)) <= bar_of_rounding(kind, level, 768)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("length", [1, 511, 513, 1024, 1027])
def test_rows_of_any_length_are_summed_alike_for_few_and_for_many(kind: str, length: int, level: str) -> None:
    """Whole panels of 16 outputs and the rest, read in place and widened: one order for all."""
    weight, x = rows(37, length).to(getattr(torch, kind)), rows(21, length)
    whole = F.linear(x, weight)
    assert nmse(whole, product(x, weight)) <= bar_of_rounding(kind, level, length)
    for inputs in (x, x.to(weight.dtype)):
        whole = F.linear(inputs, weight)
        for num_rows in (1, 2, 3, 4, 5, 7, 8, 17):
            assert torch.equal(F.linear(inputs[:num_rows], weight), whole[:num_rows])
        assert torch.equal(F.linear(inputs, weight[32:]), whole[:, 32:])


@pytest.mark.parametrize("kind", DENSE)
def test_more_rows_and_outputs_than_are_kept_at_once_are_those_of_few(kind: str, level: str) -> None:
    weight, x = rows(1100, 544).to(getattr(torch, kind)), rows(300, 544)
    bias = rows(1, 1100)[0]
    whole = F.linear(x, weight, bias)
    assert nmse(whole, product(x, weight) + bias) <= bar_of_rounding(kind, level, 544)
    for few in (slice(0, 1), slice(255, 257), slice(290, 300)):
        assert torch.equal(F.linear(x[few], weight, bias), whole[few])


@pytest.mark.parametrize("kind", DENSE)
def test_numbers_too_small_to_be_normal_are_the_same_for_few_and_for_many(kind: str, level: str) -> None:
    weight, x = rows(37, 64).mul(2.0**-10).to(getattr(torch, kind)), rows(5, 64) * 2.0**-114
    whole = F.linear(x, weight)
    assert whole.count_nonzero() > 100
    for row, wanted in zip(x, whole, strict=True):
        assert torch.equal(F.linear(row[None], weight)[0], wanted)


@pytest.mark.parametrize("kind", DENSE)
def test_infinity_in_an_input_is_infinity_in_its_products(kind: str, level: str) -> None:
    weight, x = torch.ones(5, 64, dtype=getattr(torch, kind)), rows(3, 64)
    x[1, 7], x[2, 9] = math.inf, math.nan
    found = F.linear(x, weight)
    assert found[0].isfinite().all() and found[1].isposinf().all() and found[2].isnan().all()


@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_product_runs_natively_unless_a_gradient_is_wanted(kind: str) -> None:
    weight, x = rows(5, 64).to(getattr(torch, kind)), rows(3, 64)
    assert ops.linear.pick(x, weight, None) is not None
    assert ops.linear.pick(x.requires_grad_(), weight, None) is None
    assert ops.linear.pick(x.detach(), weight, torch.ones(5).requires_grad_()) is None


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_product_of_half_precision_alone_is_rounded_once(kind: str, level: str) -> None:
    dtype = getattr(torch, kind)
    weight, x, bias = rows(37, 768).to(dtype), rows(9, 768).to(dtype), rows(1, 37)[0].to(dtype)
    found = F.linear(x, weight, bias)
    wanted = F.linear(x.float(), weight.float(), bias.float()).to(dtype)
    assert ops.linear.pick(x, weight, bias) is not None and torch.equal(found, wanted)


@pytest.mark.parametrize("kind", INT8 + INT12 + INT16)
def test_product_of_a_packed_weight_is_near_enough(kind: str, level: str) -> None:
    weight = weight_of(kind, 100)
    assert isinstance(weight, PackedTensor)
    bits, span = weight.rounding
    bar = BARS[kind.split()[0]] * 4 ** (weight.activation_bits - bits) * (1 if span == 32 else 2)
    for num_rows in (1, 2, 9):
        x = rows(num_rows, 768)
        x[:, 40] *= 30  # an outlier costs the values that share its scale, not the row
        assert nmse(F.linear(x, weight), product(x, weight)) <= bar


def test_packing_takes_8_12_or_16_bits_and_changes_between_them_without_a_copy() -> None:
    packed = Q8.pack()
    assert [packed.pack(bits).activation_bits for bits in (8, 12, 16)] == [8, 12, 16]
    assert packed.pack(16).blocks is packed.blocks
    with pytest.raises(ValueError, match="activation_bits must be 8, 12 or 16, but is 4"):
        Q8.pack(4)


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_a_gradient_goes_through_a_packed_product_as_through_its_weight(bits: int) -> None:
    x, upstream = rows(3, Q8.shape[1]), rows(3, Q8.shape[0])
    wanted, packed = upstream @ Q8.dequantize(), Q8.pack(bits)
    learning = x.clone().requires_grad_()
    F.linear(learning, packed).backward(upstream)
    torch.testing.assert_close(learning.grad, wanted)
    (found,) = torch.func.vjp(lambda x: F.linear(x, packed), x)[1](upstream)
    torch.testing.assert_close(found, wanted)


def test_a_traced_packed_product_multiplies_by_the_weight() -> None:
    packed, x = Q8.pack(16), rows(3, Q8.shape[1])
    traced = make_fx(lambda x: F.linear(x, packed))(x)
    torch.testing.assert_close(traced(2 * x), F.linear(2 * x, packed), rtol=1e-4, atol=1e-4)


@BLOCK_TYPES
def test_packing_is_undone_by_unpacking(block_type: BlockType, level: str) -> None:
    for num_rows in (0, 1, 15, 16, 33):
        weight = random_blocks(block_type, num_rows, 3)
        packed = weight.pack()
        assert packed.num_bytes == -(-num_rows // 16) * 16 * block_type.bytes_per_row(weight.shape[1])
        with torch.device("meta"):  # which decides nothing of a weight that is somewhere already
            assert torch.equal(packed.unpack().blocks, weight.blocks)
        assert torch.equal(packed.dequantize(), weight.dequantize())


def test_levels_agree_on_the_integers_of_a_packed_product(level: str) -> None:
    """Steps and scales are powers of two, so that float32 sums are exact and any wrong integer shows."""
    values = torch.randint(-127, 128, (3, 64), generator=torch.Generator().manual_seed(0)).float()
    values[:, ::32] = 127.0
    weight = quantize(torch.arange(40 * 64).reshape(40, 64).remainder(255).sub(127).float(), BlockType.Q8_0)
    wanted = product(values, weight).float()
    torch.testing.assert_close(F.linear(values, weight.pack()), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row_and_no_other(bad: float, bits: int, level: str) -> None:
    weight, x = random_blocks(BlockType.Q4_0, 20, 2).pack(bits), rows(3, 64)
    wanted = F.linear(x, weight)
    x[1, 5] = bad
    found = F.linear(x, weight)
    assert found[1].isnan().all() and torch.equal(found[::2], wanted[::2])


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-36, 1e36])
def test_activations_of_any_size_are_rounded_as_the_reference_does(
    scale: float, bits: int, level: str
) -> None:
    weight, x = random_blocks(BlockType.Q4_0, 20, 2).pack(bits), rows(3, 64) * scale
    wanted = ops.packed_linear.reference(x, (weight,), (None,), None)
    torch.testing.assert_close(F.linear(x, weight), wanted, rtol=1e-4, atol=1e-5 * scale)


@KINDS
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str, level: str) -> None:
    weight, x = weight_of(kind, 37), rows(258, 768)
    alone = torch.cat([F.linear(row, weight) for row in x.split(1)])
    for num_rows in (*range(2, 18), 24, 25, 64, 131, 258):
        assert torch.equal(F.linear(x[:num_rows], weight), alone[:num_rows])


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("num_groups", [1, 3, 5, 9, 19])
def test_a_row_has_the_same_bits_with_any_number_of_groups_and_panels(
    num_groups: int, bits: int, level: str
) -> None:
    """Whatever is left when kernels have taken two or four of them at a time, of many rows and of few"""
    x = rows(130, 32 * num_groups)
    for name in ("Q4_0", "Q4_1", "Q8_0"):
        for num_outputs in (16, 17, 48):
            weight = random_blocks(BlockType[name], num_outputs, num_groups).pack(bits)
            alone = torch.cat([F.linear(row[None], weight) for row in x[::16]])
            for num_rows in (63, 64, 95, 96, 130):
                assert torch.equal(F.linear(x[:num_rows], weight)[::16], alone[: -(-num_rows // 16)])


@pytest.mark.parametrize("kind", INT8 + INT12 + INT16)
def test_a_gated_row_and_a_sum_have_the_same_bits_alone_and_among_others(kind: str, level: str) -> None:
    weight, x, residual = weight_of(kind, 37), rows(70, 768), rows(70, 37)
    gated, added = gated_linear(x, weight, weight), linear_add(x, weight, None, residual)
    for some in (slice(0, 1), slice(3, 9), slice(20, 70)):
        assert torch.equal(gated_linear(x[some], weight, weight), gated[some])
        assert torch.equal(linear_add(x[some], weight, None, residual[some]), added[some])


@KINDS
def test_an_output_has_the_same_bits_among_any_others(kind: str, level: str) -> None:
    weight, x = weight_of(kind, 33), rows(5, 768)
    whole = F.linear(x, weight)
    for first, last in ((0, 1), (3, 20), (16, 33)):
        index = torch.arange(first, last)
        some = weight.rows(index) if isinstance(weight, QuantizedTensor) else weight[index]
        assert torch.equal(F.linear(x, some), whole[:, first:last])


@KINDS
def test_threads_do_not_change_a_bit(kind: str, level: str, keep_threads: None) -> None:
    weight, xs = weight_of(kind, 200), [rows(count, 768) for count in (1, 6, 20, 133)]
    infinicore.set_num_threads(1)
    alone = [F.linear(x, weight) for x in xs]
    for count in (2, 3, 8, 16):
        infinicore.set_num_threads(count)
        assert all(map(torch.equal, (F.linear(x, weight) for x in xs), alone))


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize(
    "names", [("Q4_1", "Q5_0", "Q8_0"), ("Q5_K", "Q6_K", "Q2_K"), ("Q4_1", "Q6_K", "Q8_0")]
)
def test_products_that_share_their_input_have_the_bits_of_each_alone(
    names: tuple[str, ...], bits: int, level: str
) -> None:
    packed = [weight_of(f"int{bits} {name}", 40) for name in names]
    biases = [None, rows(1, 40)[0], None]
    for num_rows in (1, 5, 20):
        x, residual = rows(num_rows, 768), rows(num_rows, 40)
        alone = [F.linear(x, weight, bias) for weight, bias in zip(packed, biases, strict=True)]
        together = linear_group(x, packed, biases)
        assert all(map(torch.equal, together, alone))
        assert torch.equal(linear_add(x, packed[0], None, residual), residual + alone[0])
        for activation, gate in (("silu", F.swiglu), ("gelu_tanh", F.geglu)):
            gated = gated_linear(x, packed[0], packed[1], up_bias=biases[1], activation=activation)
            torch.testing.assert_close(gated, gate(alone[0], alone[1]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("last", ["int8 Q4_0", "int12 Q4_1", "int16 Q8_0", "int16 Q5_K", "int8 Q6_K"])
@pytest.mark.parametrize("kind", ["int8 Q8_0", "int12 Q4_0", "int16 Q4_K"])
def test_what_a_gate_gives_is_multiplied_with_the_bits_of_two_ops(
    kind: str, last: str, level: str, keep_threads: None
) -> None:
    gate, up = weight_of(kind, 768), weight_of(kind, 768)
    down, bias = weight_of(last, 37), rows(1, 37)[0]
    weights, biases = (gate, up, down), (rows(1, 768)[0], None, bias)
    if not can_follow_gate(weights):
        assert down.rounding[1] == 256  # which tile registers take whole
        return
    for num_rows in (1, 2, 5, 9, 17, 140):
        x, residual = rows(num_rows, 768), rows(num_rows, 37)
        for activation, added in (("silu", residual), ("gelu_tanh", None)):
            gated = gated_linear(x, gate, up, *biases[:2], activation=activation)
            wanted = ops.packed_linear(gated, (down,), (bias,), added)
            for count in (1, 3, 16):
                infinicore.set_num_threads(count)
                assert torch.equal(gated_linear_onto(x, weights, biases, added, activation), wanted)


@pytest.mark.parametrize("weight", [BIG, BIG.pack()], ids=["blocks", "packed"])
def test_out_may_be_the_input(weight: QuantizedTensor, level: str) -> None:
    x = rows(3, 64)
    wanted = F.linear(x, weight)
    assert F.linear(x, weight, out=x) is x
    torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)  # by the reference, which copies


def test_a_resolved_product_refuses_its_input_as_output() -> None:
    weight, x = random_blocks(BlockType.Q8_0, 64, 2), rows(3, 64)
    call = ops.quantized_linear.resolve(x, weight, None, out=torch.empty(3, 64))
    with pytest.raises(ValueError, match="overlaps an input that is read while it is written"):
        call(x, x, weight.blocks, None)


def test_half_precision_inputs_take_the_reference() -> None:
    weight, x = random_blocks(BlockType.Q4_0, 5, 2), rows(3, 64).bfloat16()
    assert ops.quantized_linear.pick(x, weight, None) is None
    wanted = torch.nn.functional.linear(x, weight.dequantize(torch.bfloat16))
    assert torch.equal(F.linear(x, weight), wanted)


@pytest.mark.parametrize("num_outputs", [16, 40])
def test_a_packed_product_is_added_to_the_residual_in_place(num_outputs: int, level: str) -> None:
    weight, x, residual = (
        random_blocks(BlockType.Q8_0, num_outputs, 2).pack(),
        rows(3, 64),
        rows(3, num_outputs),
    )
    wanted = linear_add(x, weight, None, residual)
    found = ops.packed_linear(x, (weight,), (None,), residual, out=residual)
    assert found is residual and torch.equal(found, wanted)


@pytest.mark.parametrize("is_packed", [False, True])
def test_views_of_rows_are_multiplied_in_place(is_packed: bool, level: str) -> None:
    weight = random_blocks(BlockType.Q4_1, 20, 2)
    weight = weight.pack() if is_packed else weight
    x, out = rows(8, 200)[::2, 100:164], torch.zeros(4, 60)[:, 10:30]
    assert F.linear(x, weight, out=out) is out
    assert torch.equal(out, F.linear(x.contiguous(), weight))


Q8 = random_blocks(BlockType.Q8_0, 5, 2)
X = torch.ones(3, 64)
IDS = torch.tensor([1])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: F.linear(X[:, :32], Q8), ValueError, r"input \(3, 32\) does not fit weight \(5, 64\)"),
        (lambda: F.linear(X.int(), Q8), TypeError, "input must be float16"),
        (lambda: F.linear(X, Q8, torch.ones(4)), ValueError, r"bias has shape \(4,\), but \(5,\) is wanted"),
        (lambda: F.linear(X, Q8, torch.ones(5).half()), TypeError, "bias is torch.float16"),
        (lambda: F.linear(X, Q8, out=torch.empty(3, 6)), ValueError, r"out has shape \(3, 6\)"),
        (lambda: F.linear(X.to("meta"), Q8), TypeError, "weight is on cpu, but the input is on meta"),
        (lambda: F.linear(X.double(), X.half()), TypeError, "weight is torch.float16"),
        (
            lambda: F.linear(X[:, :32], Q8.pack()),
            ValueError,
            r"input \(3, 32\) does not fit weight \(5, 64\)",
        ),
        (lambda: F.embedding(IDS + 4, Q8.pack()), IndexError, r"id 5 .*is outside \[0, 5\)"),
        (
            lambda: PackedTensor(Q8.blocks, Q8.type, Q8.shape),
            ValueError,
            r"needs torch.uint8 blocks \(1, 1088\)",
        ),
        (lambda: F.embedding(IDS.float(), Q8), TypeError, "must be a tensor of integers"),
        (lambda: F.embedding(IDS + 4, Q8), IndexError, r"id 5 .*is outside \[0, 5\)"),
        (lambda: F.embedding(IDS - 2, Q8), IndexError, r"id -1 .*is outside \[0, 5\)"),
        (lambda: F.embedding(IDS, Q8, max_norm=1.0), ValueError, "takes no max_norm"),
        (lambda: F.embedding(IDS, Q8, out=torch.empty(1, 32)), ValueError, r"out has shape \(1, 32\)"),
        (lambda: F.embedding(IDS, Q8, out=torch.empty(1, 64).half()), TypeError, "out is torch.float16"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


Y = torch.empty(3, 5)
Q8_ID, Q4_ID = BlockType.Q8_0.ggml_id, BlockType.Q4_0.ggml_id
PACKED = Q8.pack().blocks


def weight(blocks: Tensor, type: int = Q8_ID, num_rows: int = 5, activation_bits: int = 0) -> SimpleNamespace:
    """What kernels see of a quantised tensor, with no rule checked before them"""
    return SimpleNamespace(native=_native.Weight(blocks, type, num_rows, activation_bits))


def packed(blocks: Tensor = PACKED, type: int = Q8_ID, num_rows: int = 5, bits: int = 8) -> SimpleNamespace:
    return weight(blocks, type, num_rows, bits)


def assert_declined(name: str, out: Tensor, *args: Any) -> None:
    """Neither run, nor said to be accepted, nor prepared for later"""
    assert getattr(_native, name)(out, *args) is None
    assert not getattr(_native, "accepts_" + name)(out, *args)
    with pytest.raises((ValueError, TypeError)):
        getattr(_native, "bind_" + name)(out, *args)


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": weight(Q8.blocks[:, :-1])},
        {"weight": weight(Q8.blocks.to(torch.int8))},
        {"weight": weight(Q8.blocks.flatten())},
        {"weight": weight(Q8.blocks, BlockType.Q4_K.ggml_id)},
        {"weight": weight(Q8.blocks, num_rows=6)},
        {"weight": packed()},
        {"weight": Q8.blocks},
        {"weight": None},
        {"x": X.double()},
        {"x": X[:, :63]},
        {"x": X.t()},
        {"y": torch.empty(2, 5)},
        {"y": torch.empty(3, 4)},
        {"y": X},
        {"y": X[:, :5]},
        {"bias": torch.ones(4)},
        {"bias": torch.ones(5).double()},
    ],
)
def test_a_product_with_blocks_refuses_what_would_leave_a_buffer(changed: dict[str, Any]) -> None:
    right = {"y": Y, "x": X, "weight": Q8, "bias": None}
    assert _native.quantized_linear(*right.values()) is Y
    assert_declined("quantized_linear", *(right | changed).values())


@pytest.mark.parametrize(
    ("type", "num_rows", "bits"), [(0, 5, 8), (255, 5, 8), (Q8_ID, -1, 8), (Q8_ID, 5, 9)]
)
def test_a_weight_that_cannot_be_is_refused(type: int, num_rows: int, bits: int) -> None:
    with pytest.raises(ValueError):
        _native.Weight(PACKED, type, num_rows, bits)


RIGHT = {"y": Y, "x": X, "weights": (packed(),), "biases": (None,), "residual": None, "activation": None}
PAIR = {"weights": (packed(), packed()), "biases": (None, None)}


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": (packed(PACKED[:, :-16]),)},
        {"weights": (packed(PACKED.to(torch.int8)),)},
        {"weights": (), "biases": ()},
        {"weights": (packed(),) * 4, "biases": (None,) * 4},
        {"weights": (packed(num_rows=17),)},
        {"weights": (packed(num_rows=17),), "y": torch.empty(3, 17)},
        {"weights": (packed(type=BlockType.Q4_K.ggml_id),)},
        {"weights": (weight(Q8.blocks),)},
        {"weights": (PACKED,)},
        {"biases": ()},
        {"biases": (torch.ones(4),)},
        {"x": X[:, :32]},
        {"y": X[:, :5]},
        {"residual": torch.ones(3, 4)},
        {"residual": Y.double()},
        {"activation": "silu"},
        {"weights": (packed(),) * 3, "biases": (None,) * 3, "activation": "silu"},
        PAIR | {"activation": "relu"},
        PAIR | {"activation": "gelu_tanh", "weights": (packed(), packed(num_rows=4))},
        PAIR,
        PAIR | {"y": torch.empty(3, 9)},
        PAIR | {"y": torch.empty(3, 11)},
        PAIR | {"y": torch.empty(3, 10), "weights": (packed(), packed(bits=16))},
    ],
)
def test_a_packed_product_refuses_what_would_leave_a_buffer(changed: dict[str, Any]) -> None:
    assert _native.packed_linear(*RIGHT.values()) is Y
    assert_declined("packed_linear", *(RIGHT | changed).values())


@pytest.mark.parametrize(
    ("packed", "blocks", "type"),
    [
        (PACKED, Q8.blocks[:4, :-1], Q8_ID),
        (PACKED[:, 16:], Q8.blocks, Q8_ID),
        (PACKED, Q8.blocks, 3),
        (PACKED, Q8.blocks, 0),
    ],
)
def test_packing_refuses_what_would_leave_a_buffer(packed: Tensor, blocks: Tensor, type: int) -> None:
    with pytest.raises(ValueError):
        _native.pack_rows(packed, blocks, type)
    with pytest.raises(ValueError):
        _native.unpack_rows(blocks, packed, type)


@pytest.mark.parametrize(
    ("blocks", "x", "type"),
    [
        (Q8.blocks, X, Q8_ID),
        (Q8.blocks[:3], X, Q4_ID),
        (Q8.blocks[:3], X, BlockType.Q5_0.ggml_id),
        (Q8.blocks[:3], X.double(), Q8_ID),
        (Q8.blocks[:3], X[:, :63], Q8_ID),
        (Q8.blocks[:3, :-1], X, Q8_ID),
        (Q8.blocks[:3].to(torch.int8), X, Q8_ID),
    ],
)
def test_quantising_refuses_what_would_leave_a_buffer(blocks: Tensor, x: Tensor, type: int) -> None:
    with pytest.raises(ValueError):
        _native.quantize_rows(blocks, x, type)


@pytest.mark.parametrize(
    ("step", "begin", "end"), [(0, 0, 0), (34, -2, 0), (34, 33, 35), (34, 2, 1), (33, 0, 2)]
)
def test_looking_for_scales_refuses_what_would_leave_a_buffer(step: int, begin: int, end: int) -> None:
    assert _native.has_finite_halves(torch.zeros(5, 68, dtype=torch.uint8), 34, 32, 34)
    with pytest.raises(ValueError):
        _native.has_finite_halves(torch.zeros(5, 68, dtype=torch.uint8), step, begin, end)
    with pytest.raises(ValueError):
        _native.has_finite_halves(torch.zeros(5, 34), 34, 0, 2)


def test_lookups_and_dense_products_refuse_what_would_leave_a_buffer() -> None:
    with pytest.raises(IndexError):
        _native.packed_embedding(torch.empty(1, 64), IDS + 4, packed())
    with pytest.raises(IndexError):
        _native.quantized_embedding(torch.empty(1, 64), IDS + 4, Q8)
    assert_declined("packed_embedding", torch.empty(1, 64), IDS, packed(num_rows=17))
    assert_declined("packed_embedding", torch.empty(1, 64), IDS, Q8)
    assert_declined("quantized_embedding", torch.empty(1, 65), IDS, Q8)
    assert_declined("quantized_embedding", torch.empty(1, 64), IDS, packed())
    assert_declined("linear", Y, X, torch.ones(5, 63), None)
