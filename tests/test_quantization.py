"""Block formats, against the gguf package: every dequantised and quantised bit is the same."""

import gguf
import numpy as np
import pytest
import torch

from infinicore import _native
from infinicore.block_formats import QUANTIZERS
from infinicore.float8 import to_float8
from infinicore.quantization import BlockType, QuantizedTensor, quantize
from infinicore.tiles import tile

BLOCK_TYPES = pytest.mark.parametrize("block_type", list(BlockType), ids=lambda block_type: block_type.name)
QUANTIZABLE = pytest.mark.parametrize("block_type", [BlockType.Q8_0, BlockType.Q4_0], ids=["Q8_0", "Q4_0"])


def random_blocks(block_type: BlockType, num_rows: int, num_blocks: int, seed: int = 0) -> QuantizedTensor:
    """Any bytes are a tensor, though perhaps with scales that are infinite or not a number."""
    generator = torch.Generator().manual_seed(seed)
    row_bytes = num_blocks * block_type.bytes_per_block
    blocks = torch.randint(0, 256, (num_rows, row_bytes), generator=generator, dtype=torch.uint8)
    return QuantizedTensor(blocks, block_type, (num_rows, num_blocks * block_type.elements_per_block))


def oracle_values(tensor: QuantizedTensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(tensor.blocks.numpy(), oracle_type(tensor.type))
    return torch.from_numpy(values)


def oracle_type(block_type: BlockType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[block_type.name]


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    is_nan = wanted.isnan()
    assert found.dtype == wanted.dtype and torch.equal(found.isnan(), is_nan)
    assert torch.equal(found.view(torch.int32)[~is_nan], wanted.view(torch.int32)[~is_nan])


@BLOCK_TYPES
def test_block_sizes_and_ids_are_those_of_ggml(block_type):
    wanted = gguf.GGML_QUANT_SIZES[oracle_type(block_type)]
    assert (block_type.elements_per_block, block_type.bytes_per_block) == wanted
    assert block_type.ggml_id == oracle_type(block_type).value


@BLOCK_TYPES
@pytest.mark.parametrize("num_rows, num_blocks", [(1, 1), (7, 3), (33, 1), (300, 40)])
def test_dequantized_values_are_those_of_ggml_bit_for_bit(block_type, num_rows, num_blocks):
    tensor = random_blocks(block_type, num_rows, num_blocks)
    assert_same_bits(tensor.dequantize(), oracle_values(tensor))


@BLOCK_TYPES
def test_rows_are_independent(block_type):
    tensor = random_blocks(block_type, 7, 2)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    reordered = QuantizedTensor(tensor.blocks[order], block_type, tensor.shape)
    assert_same_bits(reordered.dequantize(), tensor.dequantize()[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dequantize_rounds_once_to_the_dtype_asked_for(dtype):
    tensor = quantize(torch.randn(5, 64), BlockType.Q8_0)
    assert torch.equal(tensor.dequantize(dtype), tensor.dequantize().to(dtype))


def test_any_shape_is_kept_and_its_last_dimension_is_a_row():
    values = torch.randn(2, 3, 5, 96)
    tensor = quantize(values, BlockType.Q8_0)
    assert tensor.shape == (2, 3, 5, 96) and tuple(tensor.blocks.shape) == (30, 102)
    assert tensor.dequantize().shape == values.shape


def test_a_tensor_without_rows_is_empty():
    assert quantize(torch.empty(0, 64), BlockType.Q4_0).dequantize().shape == (0, 64)


@QUANTIZABLE
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4])
def test_quantized_bytes_are_those_of_ggml(block_type, scale):
    values = torch.randn(37, 96, generator=torch.Generator().manual_seed(1)) * scale
    values[3] = 0
    values[4, ::2] = -values[4, 1::2]  # two extremes of equal size: the first one counts
    values[5] = values[5].round()  # halves: rounded away from zero
    wanted = torch.from_numpy(gguf.quants.quantize(values.numpy(), oracle_type(block_type)))
    assert torch.equal(quantize(values, block_type).blocks, wanted)


@QUANTIZABLE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_of_every_level_rounds_as_the_plain_one_does(block_type, level, dtype):
    generator = torch.Generator().manual_seed(2)
    values = (torch.randn(70, 992, generator=generator) * 10 ** torch.linspace(-9, 3, 992)).to(dtype)
    wanted = torch.cat([QUANTIZERS[block_type.name](block) for block in values.float().split(32, 1)], 1)
    assert torch.equal(quantize(values, block_type).blocks, wanted)
    assert torch.equal(quantize(values.t().contiguous().t(), block_type).blocks, wanted)


@QUANTIZABLE
def test_ties_round_away_from_zero_as_in_ggml(block_type):
    values = torch.arange(-127, 129).reshape(8, 32).float() / 2
    values[:, 0] = 127.0
    wanted = torch.from_numpy(gguf.quants.quantize(values.numpy(), oracle_type(block_type)))
    assert torch.equal(quantize(values, block_type).blocks, wanted)


@QUANTIZABLE
def test_a_block_below_the_smallest_scale_becomes_zero(block_type):
    assert not quantize(torch.full((1, 32), 1e-44), block_type).dequantize().any()


@QUANTIZABLE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_values_without_a_float16_scale_are_refused(block_type, bad):
    values = torch.ones(2, 64)
    values[1, 40] = bad
    with pytest.raises(ValueError, match=f"{block_type.name} scales are float16"):
        quantize(values, block_type)


def test_a_row_that_does_not_fill_its_blocks_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="row of 33 does not fill Q8_0 blocks of 32"):
        quantize(torch.ones(2, 33), BlockType.Q8_0)


def test_a_format_that_cannot_be_written_is_refused_with_those_that_can():
    with pytest.raises(ValueError, match="makes Q8_0, Q4_0, not Q6_K"):
        quantize(torch.ones(2, 256), BlockType.Q6_K)


@pytest.mark.parametrize(
    ("tensor", "type"),
    [([[1.0] * 32], BlockType.Q8_0), (torch.ones(2, 32), "q8_0"), (torch.tensor(1.0), BlockType.Q8_0)],
)
def test_what_is_no_tensor_or_no_type_is_refused_with_what_is_wanted(tensor, type):
    with pytest.raises(TypeError, match="takes a tensor of rows and a BlockType, but found .* and "):
        quantize(tensor, type)


def test_rows_that_a_matrix_does_not_have_are_no_part_of_it():
    matrix = quantize(torch.ones(20, 32), BlockType.Q8_0)
    for held in (matrix, matrix.pack(), tile(matrix), to_float8(torch.ones(20, 32))):
        for begin, end in ((16, 32), (-4, 20), (8, 4)):
            with pytest.raises(IndexError, match=f"from {begin} to {end} are not among the 20"):
                held.part(begin, end)
        assert held.part(16, 20).dequantize().shape == (4, 32)


def test_only_a_matrix_is_packed():
    with pytest.raises(ValueError, match=r"packed Q8_0 must be a matrix, but has shape \(2, 3, 32\)"):
        quantize(torch.ones(2, 3, 32), BlockType.Q8_0).pack()


@pytest.mark.parametrize(
    "blocks",
    [torch.zeros(2, 33, dtype=torch.uint8), torch.zeros(1, 34, dtype=torch.uint8), torch.zeros(2, 34)],
)
def test_blocks_that_do_not_fit_the_shape_are_refused(blocks):
    with pytest.raises(ValueError, match=r"Q8_0 \(2, 32\) needs torch.uint8 blocks \(2, 34\)"):
        QuantizedTensor(blocks, BlockType.Q8_0, (2, 32))


def test_block_sizes_are_those_of_the_native_core() -> None:
    found = {type.ggml_id: (type.elements_per_block, type.bytes_per_block) for type in BlockType}
    assert found == _native.block_sizes()


@pytest.mark.parametrize("exponent", [253, 254, 255])
def test_an_exponent_that_makes_infinity_or_nan_is_found_in_mxfp4(exponent: int) -> None:
    blocks = torch.full((20, 34), 0x77, dtype=torch.uint8)  # codes of 6, the largest
    blocks[:, ::17] = 252
    weight = QuantizedTensor(blocks, BlockType.MXFP4, (20, 64))
    assert weight.has_finite_scales() and weight.pack().has_finite_scales()
    assert torch.isfinite(weight.dequantize()).all()
    blocks[17, 17] = exponent
    assert not torch.isfinite(weight.dequantize()).all()
    assert not weight.has_finite_scales() and not weight.pack().has_finite_scales()
