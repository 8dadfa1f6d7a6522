"""2 to 128 rows times weights in tiles, or 2 to 64 and float8, in CUDA C++, against products in float64."""

from __future__ import annotations

import pytest
import torch
from test_hopper import DEVICE, gated, on_hopper, random
from test_hopper import assert_near as assert_nearer
from test_hopper_one import dense
from test_hopper_one import weight_of as tiles_of
from torch import Tensor

import infinicore
from infinicore import ops
from infinicore.float8 import Float8, Float8Tensor, to_float8
from infinicore.ops.hopper import one, tiled
from infinicore.quantization import BlockType
from infinicore.tiles import TiledTensor

pytestmark = on_hopper
Type = BlockType | Float8
Weight = TiledTensor | Float8Tensor
SIZES = ((4, 256), (100, 512), (6144, 4096), (4096, 14336), (9000, 1280), (70000, 256))


@pytest.fixture(name="type", params=(*one.TYPES, Float8.FP8), ids=lambda type: type.name)
def _type(request: pytest.FixtureRequest) -> Type:
    found: Type = request.param
    return found


def weight_of(type: Type, num_rows: int, length: int) -> Weight:
    if isinstance(type, BlockType):
        return tiles_of(type, num_rows, length)
    return to_float8(random(num_rows, length, dtype=torch.float32))


def skip_more_than_are_taken(type: Type, num_rows: int) -> None:
    if isinstance(type, Float8) and num_rows > tiled.MOST_FLOAT8_ROWS:
        pytest.skip("so many rows are rounded to float8 themselves")


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Of more than 8 rows, weights times their scales are rounded as well."""
    assert_nearer(found, expected, 1e-5 if len(found) <= 8 else 2e-5)


def launched(x: Tensor, weight: Weight, residual: Tensor | None = None) -> Tensor:
    """By the kernel itself, into memory full of NaN"""
    y = torch.full((len(x), weight.shape[0]), float("nan"), dtype=x.dtype, device=DEVICE)
    assert tiled.suits(x, weight)
    tiled.launch(y, x, weight, None, residual)
    return y


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products(type: Type, size: tuple[int, int]) -> None:
    weight, bias = weight_of(type, *size), random(size[0])
    for num_rows in (2, 5, 8, 9, 16, 31, 64) + (() if isinstance(type, Float8) else (65, 128)):
        x, residual = random(num_rows, size[1]), random(num_rows, size[0])
        expected = x.double() @ dense(weight).T
        assert_near(launched(x, weight), expected)
        assert_near(ops.quantized_linear(x, weight, bias), expected + bias.double())
        assert_near(ops.linear_add(x, weight, bias, residual), expected + bias.double() + residual.double())


@pytest.mark.parametrize("size", ((64, 256), (192, 512), (28672, 4096), (9024, 1280)), ids=str)
@pytest.mark.parametrize("num_rows", (7, 16, 30, 50, 100))
def test_rows_through_a_gate(type: Type, size: tuple[int, int], num_rows: int) -> None:
    skip_more_than_are_taken(type, num_rows)
    weight, x, bias = weight_of(type, *size), random(num_rows, size[1]) / 64, random(size[0])
    product = x.double() @ dense(weight).T
    for b in (bias, None):
        wanted = gated(product if b is None else product + b.double())
        assert_near(ops.gated_linear(x, None, 1e-5, weight, b), wanted)


FEW_PLANS = [(tiles, splits, 8) for tiles in (2, 4, 8, 16) for splits in (1, 2)]
PLANS = [(tiles, splits, rows) for rows in (16, 32, 64, 128) for tiles in (4, 8) for splits in (1, 2, 3)]


@pytest.mark.parametrize("plan", FEW_PLANS + PLANS, ids=str)
def test_every_plan_gives_the_same_products(
    type: Type, plan: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that fill no step, outputs that fill no tile, programs that have several items"""
    num_tiles, splits, num_rows = plan
    skip_more_than_are_taken(type, num_rows)
    if num_tiles not in tiled.tile_counts(num_rows, type):
        pytest.skip("a box has no more than 256 rows of float8")
    monkeypatch.setattr(tiled, "plan_of", lambda *_: tiled.Plan(type, *plan))
    if splits == 1:
        monkeypatch.setattr(tiled, "most_items", lambda *_: 3)
    length = 1280 if type is BlockType.Q4_K else 1344
    for num_outputs in (36, 1100, 2000):
        weight, x = weight_of(type, num_outputs, length), random(num_rows - 5, length)
        assert_near(launched(x, weight), x.double() @ dense(weight).T)


@pytest.mark.parametrize("num_rows", (8, 16, 32, 64, 128))
def test_a_row_with_nan_leaves_its_neighbours_alone(type: Type, num_rows: int) -> None:
    skip_more_than_are_taken(type, num_rows)
    weight, x = weight_of(type, 100, 512), random(num_rows, 512)
    clean, spoilt = launched(x, weight), x.clone()
    spoilt[3, 17] = torch.nan
    found, others = launched(spoilt, weight), torch.arange(num_rows, device=DEVICE) != 3
    assert found[3].isnan().all() and torch.equal(found[others], clean[others])
    assert torch.equal(launched(x[:-3], weight), clean[:-3])


@pytest.mark.parametrize("num_rows", (5, 11, 25, 63, 90))
def test_results_are_the_same_each_time_and_nothing_beyond_them_is_written(type: Type, num_rows: int) -> None:
    skip_more_than_are_taken(type, num_rows)
    weight, x = weight_of(type, 4096, 4096), random(num_rows, 4096)
    around = torch.full((num_rows + 2, 4096), 7.0, dtype=x.dtype, device=DEVICE)
    tiled.launch(around[1:-1], x, weight, None)
    assert (around[0] == 7).all() and (around[-1] == 7).all()
    assert all(torch.equal(launched(x, weight), around[1:-1]) for _ in range(20))


def test_rows_at_odd_addresses_and_a_result_over_its_residual(type: Type) -> None:
    weight, wide, residual = weight_of(type, 100, 512), random(4, 515), random(4, 100)
    x = wide[:, 3:]
    expected = launched(x.clone(), weight, residual)
    assert torch.equal(launched(x, weight, residual), expected)
    assert ops.linear_add(x, weight, None, residual, out=residual) is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("num_rows", (8, 16, 32, 64, 128))
def test_products_one_after_the_other_are_recorded(type: Type, num_rows: int) -> None:
    """Each has its weight on its way before the one before has ended."""
    skip_more_than_are_taken(type, num_rows)
    weights = [weight_of(type, 2048, 2048) for _ in range(3)]
    x, states = random(num_rows, 2048), [random(num_rows, 2048) for _ in weights]
    graph = torch.cuda.CUDAGraph()

    def run() -> None:
        rows = x
        for weight, state in zip(weights, states, strict=True):
            tiled.launch(state, rows, weight, None)
            rows = state

    run()
    with torch.cuda.graph(graph):
        run()
    for seed in range(1, 30):
        x.copy_(random(num_rows, 2048 + seed)[:, seed:] * 1e-3)
        graph.replay()
        expected = x
        for weight in weights:
            expected = launched(expected, weight)
        assert torch.equal(states[-1], expected)


@pytest.mark.parametrize("num_rows", (8, 16, 64))
def test_every_float8_is_itself(num_rows: int) -> None:
    """A row of x that is 1 in one column chooses it, with the smallest numbers there are."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers = numbers[numbers & 0x7F != 0x7F]
    columns = [numbers.roll(i) for i in range(128)]
    weight = to_float8(torch.ones(len(numbers) - 2, 128, device=DEVICE) * 448)  # whose scales are 1
    weight.blocks.copy_(torch.stack(columns, 1)[:-2])
    for first in range(0, 128, num_rows):
        x = torch.eye(128, dtype=torch.bfloat16, device=DEVICE)[first : first + num_rows]
        assert torch.equal(launched(x, weight).float(), weight.dequantize()[:, first : first + num_rows].T)


def test_other_rows_are_left_to_others(type: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(type, 64, 512)
    for num_rows, dtype in ((1, torch.bfloat16), (129, torch.bfloat16), (4, torch.float16)):
        assert not tiled.suits(random(num_rows, 512, dtype=dtype), weight)
    assert not tiled.suits(random(4, 512), weight.rows(torch.arange(63, device=DEVICE)))
    if isinstance(weight, Float8Tensor):
        odd, x = weight_of(type, 64, 528), random(4, 528)
        assert not tiled.suits(x, odd) and not tiled.suits(random(65, 512), weight)
        assert_near(ops.quantized_linear(x, odd, None), x.double() @ dense(odd).T)
    assert tiled.suits(random(4, 512), weight)
    monkeypatch.setattr(infinicore, "deterministic", True)
    assert not tiled.suits(random(4, 512), weight)
