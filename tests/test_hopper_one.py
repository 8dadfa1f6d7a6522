"""One row times weights in tiles, in CUDA C++, against products in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hopper import DEVICE, assert_near, gated, on_hopper, random
from torch import Tensor

from infinicore import ops
from infinicore.ops.fused_reference import Where, places
from infinicore.ops.hopper import one
from infinicore.ops.samples import random_blocks
from infinicore.ops.triton.beside import ALONE, Beside, Heads
from infinicore.quantization import BlockType
from infinicore.tiles import TiledTensor, tile

pytestmark = on_hopper
SIZES = ((1, 256), (70, 512), (4096, 4096), (40, 14336), (4096, 14336), (64, 28672), (9000, 1280))


@pytest.fixture(name="type", params=one.TYPES, ids=lambda type: type.name)
def _type(request: pytest.FixtureRequest) -> BlockType:
    found: BlockType = request.param
    return found


def weight_of(type: BlockType, num_rows: int, length: int) -> TiledTensor:
    return tile(random_blocks(type, num_rows, length // type.elements_per_block)).to(DEVICE)


def dense(weight: TiledTensor) -> Tensor:
    return weight.dequantize().double()


def normed(x: Tensor, norm: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()


def launched(x: Tensor, weight: TiledTensor, bias: Tensor | None = None, beside: Beside = ALONE) -> Tensor:
    """By the kernel itself, into memory full of NaN"""
    num_outputs = weight.shape[0] // (2 if beside.is_gated else 1)
    y = torch.full((1, num_outputs), float("nan"), dtype=x.dtype, device=DEVICE)
    assert one.suits(x, weight, beside)
    one.launch(y, x, weight, bias, beside)
    return y


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_one_row(type: BlockType, size: tuple[int, int]) -> None:
    weight = weight_of(type, *size)
    x, bias, residual = random(1, size[1]), random(size[0]), random(1, size[0])
    expected = x.double() @ dense(weight).T
    assert_near(launched(x, weight), expected)
    assert_near(ops.quantized_linear(x, weight, bias), expected + bias.double())
    assert_near(ops.linear_add(x, weight, None, residual), expected + residual.double())
    assert_near(ops.linear_add(x, weight, bias, residual), expected + bias.double() + residual.double())


@pytest.mark.parametrize("size", ((64, 256), (192, 512), (28672, 4096), (9024, 1280)), ids=str)
def test_a_row_through_norm_and_gate(type: BlockType, size: tuple[int, int]) -> None:
    weight = weight_of(type, *size)
    x, norm, bias = random(1, size[1]) * 3, random(size[1]), random(size[0])
    for n in (norm, None):
        product = (x.double() if n is None else normed(x, n)) @ dense(weight).T / 64
        narrow = None if n is None else n / 64
        row = x / 64 if n is None else x
        for b in (bias, None):
            wanted = gated(product if b is None else product + b.double())
            assert_near(ops.gated_linear(row, narrow, 1e-5, weight, b), wanted)


def known_places(size: int, slot: int) -> tuple[Any, ...]:
    rows, sin, cos, keys, values, tables, streams, slots = places(1, size, torch.bfloat16)
    found = rows + 2, sin, cos, False, keys, values, tables.int(), streams, slots + slot
    return tuple(t.to(DEVICE) if isinstance(t, Tensor) else t for t in found)


@pytest.mark.parametrize("length", (256, 1280))
@pytest.mark.parametrize("size", (64, 128, 256))
def test_a_row_into_the_cache(type: BlockType, size: int, length: int) -> None:
    weight, bias = weight_of(type, 6 * size, length), random(6 * size)
    x, norm = random(1, length), random(length) / 64
    for slot in (5, 33):
        rest = known_places(size, slot)
        wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in rest]
        wanted = ops.project_heads.reference(
            x.double(), norm.double(), 1e-5, dense(weight), bias.double(), *wide
        )
        assert one.are_known(Heads.of(2, Where(*rest)))
        assert_near(ops.project_heads(x, norm, 1e-5, weight, bias, *rest), wanted)
        for found, expected in zip(rest[4:6], wide[4:6], strict=True):
            assert_near(found, expected)


def test_values_of_many_sizes(type: BlockType) -> None:
    weight, x = weight_of(type, 40, 512), random(1, 512).float()
    spread = torch.logspace(-6, 0, 512, device=DEVICE)
    for row in (x * 1e-30, x * 1e30, x * spread, x * spread.flip(0)):
        assert_near(launched(row.bfloat16(), weight), row.bfloat16().double() @ dense(weight).T)
    for spoilt in (torch.nan, torch.inf, -torch.inf):
        row = x.bfloat16()
        row[0, 17] = spoilt
        assert not launched(row, weight).isfinite().any()


def test_a_scale_that_is_nan_spoils_its_row_alone(type: BlockType) -> None:
    blocks = random_blocks(type, 40, 1024 // type.elements_per_block)
    spoilt = blocks.clone()
    spoilt.blocks[11, : type.bytes_per_block] = 0xFF
    clean, found = (launched(random(1, 1024), tile(weight).to(DEVICE)) for weight in (blocks, spoilt))
    others = torch.arange(40, device=DEVICE) != 11
    assert found[:, 11].isnan().all() and torch.equal(found[:, others], clean[:, others])


def test_results_are_the_same_each_time_and_nothing_beyond_them_is_written(type: BlockType) -> None:
    weight, x = weight_of(type, 70, 4096), random(1, 4096)
    around = torch.full((3, 70), 7.0, dtype=x.dtype, device=DEVICE)
    one.launch(around[1:2], x, weight, None, ALONE)
    assert (around[0] == 7).all() and (around[2] == 7).all()
    assert all(torch.equal(launched(x, weight), around[1:2]) for _ in range(20))


def test_a_row_at_an_odd_address_and_a_result_over_its_residual(type: BlockType) -> None:
    weight, wide, residual = weight_of(type, 70, 512), random(1, 515), random(1, 70)
    x = wide[:, 3:]
    expected = launched(x.clone(), weight, None, Beside(residual=residual))
    assert torch.equal(launched(x, weight, None, Beside(residual=residual)), expected)
    assert ops.linear_add(x, weight, None, residual, out=residual) is residual
    assert torch.equal(residual, expected)


def test_products_one_after_the_other_are_recorded(type: BlockType) -> None:
    """Each has its weight on its way before the one before has ended."""
    weights = [weight_of(type, 2048, 2048) for _ in range(3)]
    x, states, graph = random(1, 2048), [random(1, 2048) for _ in weights], torch.cuda.CUDAGraph()

    def run() -> None:
        row = x
        for weight, state in zip(weights, states, strict=True):
            one.launch(state, row, weight, None, ALONE)
            row = state

    run()
    with torch.cuda.graph(graph):
        run()
    for seed in range(1, 30):
        x.copy_(random(1, 2048 + seed)[:, seed:] * 1e-3)
        graph.replay()
        expected = x
        for weight in weights:
            expected = launched(expected, weight)
        assert torch.equal(states[-1], expected)


def test_a_norm_that_a_kernel_is_still_writing_is_waited_for(type: BlockType) -> None:
    weight, x, norm = weight_of(type, 64, 4096), random(1, 4096), random(4096) / 64
    expected = ops.gated_linear(x, norm + norm, 1e-5, weight, None)
    for _ in range(20):
        assert torch.equal(ops.gated_linear(x, ops.add(norm, norm), 1e-5, weight, None), expected)


def test_rows_that_do_not_fit_are_left_to_others(type: BlockType) -> None:
    for length in (1152, 106496):  # no multiple of what a warp has, and more than there is room for
        if length % type.elements_per_block == 0:
            weight, x = weight_of(type, 64, length), random(1, length)
            assert not one.suits(x, weight, ALONE)
            assert_near(ops.quantized_linear(x, weight, None), x.double() @ dense(weight).T)
