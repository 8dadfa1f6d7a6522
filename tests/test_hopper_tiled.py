"""2 to 8 rows times weights in tiles, in CUDA C++, against products in float64."""

from __future__ import annotations

import pytest
import torch
from test_hopper import DEVICE, assert_near, gated, on_hopper, random
from test_hopper_one import dense, weight_of
from torch import Tensor

from infinicore import ops
from infinicore.ops.hopper import few, one
from infinicore.quantization import BlockType
from infinicore.tiles import TiledTensor

pytestmark = on_hopper
SIZES = ((4, 256), (100, 512), (6144, 4096), (4096, 14336), (9000, 1280), (70000, 256))


@pytest.fixture(name="type", params=one.TYPES, ids=lambda type: type.name)
def _type(request: pytest.FixtureRequest) -> BlockType:
    found: BlockType = request.param
    return found


def launched(x: Tensor, weight: TiledTensor, residual: Tensor | None = None) -> Tensor:
    """By the kernel itself, into memory full of NaN"""
    y = torch.full((len(x), weight.shape[0]), float("nan"), dtype=x.dtype, device=DEVICE)
    assert few.suits(x, weight)
    few.launch(y, x, weight, None, residual)
    return y


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_few_rows(type: BlockType, size: tuple[int, int]) -> None:
    weight, bias = weight_of(type, *size), random(size[0])
    for num_rows in (2, 5, 8):
        x, residual = random(num_rows, size[1]), random(num_rows, size[0])
        expected = x.double() @ dense(weight).T
        assert_near(launched(x, weight), expected)
        assert_near(ops.quantized_linear(x, weight, bias), expected + bias.double())
        assert_near(ops.linear_add(x, weight, bias, residual), expected + bias.double() + residual.double())


@pytest.mark.parametrize("size", ((64, 256), (192, 512), (28672, 4096), (9024, 1280)), ids=str)
def test_few_rows_through_a_gate(type: BlockType, size: tuple[int, int]) -> None:
    weight, x, bias = weight_of(type, *size), random(7, size[1]) / 64, random(size[0])
    product = x.double() @ dense(weight).T
    for b in (bias, None):
        wanted = gated(product if b is None else product + b.double())
        assert_near(ops.gated_linear(x, None, 1e-5, weight, b), wanted)


@pytest.mark.parametrize("tiles", (2, 4, 8, 16))
@pytest.mark.parametrize("splits", (1, 2))
def test_every_plan_gives_the_same_products(
    type: BlockType, tiles: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that fill no step, outputs that fill no tile, programs that have several items"""
    monkeypatch.setattr(few, "plan_of", lambda *_: few.Plan(type, tiles, splits))
    if splits == 1:
        monkeypatch.setattr(few, "most_items", lambda *_: 3)
    for num_outputs in (36, 1100, 2000):
        weight, x = weight_of(type, num_outputs, 1280), random(3, 1280)
        assert_near(launched(x, weight), x.double() @ dense(weight).T)


def test_a_row_with_nan_leaves_its_neighbours_alone(type: BlockType) -> None:
    weight, x = weight_of(type, 100, 512), random(8, 512)
    clean, spoilt = launched(x, weight), x.clone()
    spoilt[3, 17] = torch.nan
    found, others = launched(spoilt, weight), torch.arange(8, device=DEVICE) != 3
    assert found[3].isnan().all() and torch.equal(found[others], clean[others])
    assert torch.equal(launched(x[:5], weight), clean[:5])


def test_results_are_the_same_each_time_and_nothing_beyond_them_is_written(type: BlockType) -> None:
    weight, x = weight_of(type, 4096, 4096), random(5, 4096)
    around = torch.full((7, 4096), 7.0, dtype=x.dtype, device=DEVICE)
    few.launch(around[1:6], x, weight, None)
    assert (around[0] == 7).all() and (around[6] == 7).all()
    assert all(torch.equal(launched(x, weight), around[1:6]) for _ in range(20))


def test_rows_at_odd_addresses_and_a_result_over_its_residual(type: BlockType) -> None:
    weight, wide, residual = weight_of(type, 100, 512), random(4, 515), random(4, 100)
    x = wide[:, 3:]
    expected = launched(x.clone(), weight, residual)
    assert torch.equal(launched(x, weight, residual), expected)
    assert ops.linear_add(x, weight, None, residual, out=residual) is residual
    assert torch.equal(residual, expected)


def test_products_one_after_the_other_are_recorded(type: BlockType) -> None:
    """Each has its weight on its way before the one before has ended."""
    weights = [weight_of(type, 2048, 2048) for _ in range(3)]
    x, states, graph = random(8, 2048), [random(8, 2048) for _ in weights], torch.cuda.CUDAGraph()

    def run() -> None:
        rows = x
        for weight, state in zip(weights, states, strict=True):
            few.launch(state, rows, weight, None)
            rows = state

    run()
    with torch.cuda.graph(graph):
        run()
    for seed in range(1, 30):
        x.copy_(random(8, 2048 + seed)[:, seed:] * 1e-3)
        graph.replay()
        expected = x
        for weight in weights:
            expected = launched(expected, weight)
        assert torch.equal(states[-1], expected)


def test_other_rows_are_left_to_others(type: BlockType) -> None:
    weight = weight_of(type, 64, 512)
    for num_rows, dtype in ((1, torch.bfloat16), (9, torch.bfloat16), (4, torch.float16)):
        assert not few.suits(random(num_rows, 512, dtype=dtype), weight)
    assert not few.suits(random(4, 512), weight.rows(torch.arange(63, device=DEVICE)))
