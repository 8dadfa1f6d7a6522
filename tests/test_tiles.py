"""Quantised matrices in tiles, as a GPU reads them: the same values, to the last bit."""

from __future__ import annotations

import pytest
import torch

from infinicore import nn
from infinicore.nn.fused import joined
from infinicore.nn.linear import lay_together
from infinicore.ops.samples import random_blocks
from infinicore.quantization import BlockType, QuantizedTensor
from infinicore.tiles import PARTS, TILE_ROWS, TiledTensor, tile

TYPES = pytest.mark.parametrize("type", PARTS, ids=lambda type: type.name)


@TYPES
@pytest.mark.parametrize("num_rows", [1, 31, 32, 70])
def test_tiles_hold_the_values_of_the_blocks(type: BlockType, num_rows: int) -> None:
    weight = random_blocks(type, num_rows, 3)
    tiled = tile(weight)
    assert torch.equal(tiled.dequantize(), weight.dequantize())
    assert torch.equal(tiled.dequantize(torch.bfloat16), weight.dequantize(torch.bfloat16))
    assert tiled.shape == weight.shape and tiled.type is type


@TYPES
def test_a_tiled_weight_takes_at_most_three_percent_more_than_its_blocks(type: BlockType) -> None:
    weight = random_blocks(type, 4 * TILE_ROWS, 2)
    assert tile(weight).num_bytes <= 1.03 * weight.num_bytes


@TYPES
def test_rows_can_be_taken_out_of_tiles(type: BlockType) -> None:
    weight, wanted = random_blocks(type, 21, 2), torch.tensor([20, 0, 7, 7, 8])
    found = tile(weight).rows(wanted)
    assert isinstance(found, TiledTensor)
    assert torch.equal(found.dequantize(), weight.dequantize()[wanted])


@TYPES
def test_a_scale_that_is_no_number_is_found_in_tiles(type: BlockType) -> None:
    weight = random_blocks(type, 9, 2)
    assert tile(weight).has_finite_scales()
    last = weight.blocks[-1, -type.bytes_per_block :]
    last.copy_(torch.full_like(last, 0xFF))
    assert not tile(weight).has_finite_scales()


@TYPES
def test_a_layer_with_tiles_gives_what_its_blocks_give_where_no_kernel_takes_them(type: BlockType) -> None:
    weight, x = random_blocks(type, 40, 1), torch.randn(3, type.elements_per_block)
    layer = nn.Linear(weight.shape[1], 40, bias=False)
    layer.set_weight(tile(weight))
    torch.testing.assert_close(layer(x), x @ weight.dequantize().T)
    table = nn.Embedding(*weight.shape)
    table.set_weight(tile(weight))
    assert torch.equal(table([3, 39, 3]), weight.dequantize()[[3, 39, 3]])
    assert type.name in repr(layer)


def test_only_types_that_kernels_read_become_tiles() -> None:
    with pytest.raises(ValueError, match="tiles are of Q8_0.*not of Q5_0"):
        TiledTensor(torch.zeros(1, 8, dtype=torch.uint8), BlockType.Q5_0, (8, 32))
    with pytest.raises(ValueError, match=r"needs torch.uint8 tiles \(2, 576\)"):
        TiledTensor(torch.zeros(1, 576, dtype=torch.uint8), BlockType.Q4_0, (33, 32))


def linears(*weights: QuantizedTensor) -> list[nn.Linear]:
    layers = [nn.Linear(weight.shape[1], weight.shape[0], bias=False) for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.set_weight(weight)
    return layers


def test_tiles_of_layers_with_one_input_can_lie_together_as_one() -> None:
    weights = [random_blocks(BlockType.Q4_0, num_rows, 2) for num_rows in (64, 32, 5)]
    layers = linears(*map(tile, weights))
    lay_together(*layers)
    whole = joined([layer.weight for layer in layers], [None] * 3)
    assert whole is not None
    assert torch.equal(whole[0].dequantize(), torch.cat([weight.dequantize() for weight in weights]))
    for layer, weight in zip(layers, weights, strict=True):
        assert torch.equal(layer.weight.dequantize(), weight.dequantize())


@pytest.mark.parametrize("kinds, sizes", [(("Q4_0", "Q8_0"), (32, 32)), (("Q4_0", "Q4_0"), (33, 32))])
def test_tiles_of_two_types_or_with_a_row_that_fills_none_stay_apart(
    kinds: tuple[str, str], sizes: tuple[int, int]
) -> None:
    weights = [random_blocks(BlockType[kind], size, 1) for kind, size in zip(kinds, sizes, strict=True)]
    layers = linears(*map(tile, weights))
    lay_together(*layers)
    assert joined([layer.weight for layer in layers], [None, None]) is None
