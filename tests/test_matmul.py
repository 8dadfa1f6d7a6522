"""Products with weights in blocks or half precision: near the float64 product, and the same bits for a row
whatever stands beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import infinicore
from infinicore import _native, ops
from infinicore.nn import functional as F
from infinicore.ops.reference import random_blocks
from infinicore.quantization import BlockType, QuantizedTensor

BLOCK_TYPES = pytest.mark.parametrize("block_type", list(BlockType), ids=lambda block_type: block_type.name)
WEIGHTS = pytest.mark.parametrize(
    "kind", [*BlockType, torch.float16, torch.bfloat16], ids=lambda kind: getattr(kind, "name", str(kind))
)


@pytest.fixture(params=_native.isa_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    before = infinicore.get_num_threads()
    yield
    infinicore.set_num_threads(before)


def rows(num_rows: int, length: int) -> Tensor:
    return torch.randn(num_rows, length, generator=torch.Generator().manual_seed(num_rows))


def weight_of(kind: BlockType | torch.dtype, num_rows: int) -> Tensor | QuantizedTensor:
    """Rows of 768, three chunks of the narrowest kernels."""
    if isinstance(kind, BlockType):
        return random_blocks(kind, num_rows, 768 // kind.elements_per_block)
    return rows(num_rows, 768).to(kind)


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


@WEIGHTS
def test_product_is_that_of_float64_but_for_float32_rounding(
    kind: BlockType | torch.dtype, level: str
) -> None:
    weight = weight_of(kind, 100)
    for num_rows in (1, 9):
        x = rows(num_rows, 768)
        assert nmse(F.linear(x, weight), product(x, weight)) <= 1e-10


@WEIGHTS
def test_a_row_has_the_same_bits_alone_and_among_others(kind: BlockType | torch.dtype, level: str) -> None:
    weight, x = weight_of(kind, 37), rows(131, 768)
    alone = torch.cat([F.linear(row, weight) for row in x.split(1)])
    for num_rows in (*range(2, 18), 64, 131):
        assert torch.equal(F.linear(x[:num_rows], weight), alone[:num_rows])


@WEIGHTS
def test_an_output_has_the_same_bits_among_any_others(kind: BlockType | torch.dtype) -> None:
    weight, x = weight_of(kind, 33), rows(5, 768)
    whole = F.linear(x, weight)
    for first, last in ((0, 1), (3, 20), (16, 33)):
        index = torch.arange(first, last)
        some = weight.rows(index) if isinstance(weight, QuantizedTensor) else weight[index]
        assert torch.equal(F.linear(x, some), whole[:, first:last])


@WEIGHTS
def test_threads_do_not_change_a_bit(kind: BlockType | torch.dtype, threads: None) -> None:
    weight, x = weight_of(kind, 200), rows(6, 768)
    results = []
    for count in (1, 2, 3):
        infinicore.set_num_threads(count)
        results.append(F.linear(x, weight))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_out_may_be_the_input() -> None:
    weight, x = random_blocks(BlockType.Q8_0, 64, 2), rows(3, 64)
    wanted = F.linear(x, weight)
    assert F.linear(x, weight, out=x) is x
    torch.testing.assert_close(x, wanted)


def test_a_resolved_product_refuses_its_input_as_output() -> None:
    weight, x = random_blocks(BlockType.Q8_0, 64, 2), rows(3, 64)
    call = ops.quantized_linear.resolve(x, weight, None, out=torch.empty(3, 64))
    with pytest.raises(ValueError, match="out may not be the input"):
        call(x, x, weight.blocks, None)


def test_half_precision_inputs_take_the_reference() -> None:
    weight, x = random_blocks(BlockType.Q4_0, 5, 2), rows(3, 64).bfloat16()
    assert F.linear(x, weight).dtype == torch.bfloat16


def test_views_of_rows_are_multiplied_in_place() -> None:
    weight = random_blocks(BlockType.Q4_1, 20, 2)
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


def test_native_functions_refuse_what_would_leave_a_buffer() -> None:
    y, blocks, q8 = torch.empty(3, 5), Q8.blocks, BlockType.Q8_0.ggml_id
    for arguments in (
        (y, X, blocks[:, :-1], None, q8),
        (y, X, blocks.to(torch.int8), None, q8),
        (y, X, blocks, None, BlockType.Q4_K.ggml_id),
        (y, X, blocks, None, 255),
        (y, X.double(), blocks, None, q8),
        (y, X[:, :63], blocks, None, q8),
        (y, X.t(), blocks, None, q8),
        (torch.empty(2, 5), X, blocks, None, q8),
        (torch.empty(3, 4), X, blocks, None, q8),
        (y, X, blocks, torch.ones(4), q8),
        (y, X, blocks.flatten(), None, q8),
    ):
        with pytest.raises(ValueError):
            _native.quantized_linear(*arguments)
    with pytest.raises(ValueError):
        _native.linear(y, X, torch.ones(5, 63), None)
    with pytest.raises(ValueError):
        _native.quantized_embedding(torch.empty(1, 65), IDS, blocks, q8)
    with pytest.raises(IndexError):
        _native.quantized_embedding(torch.empty(1, 64), IDS + 4, blocks, q8)
