"""Linear and Embedding with a weight that stays in blocks."""

from __future__ import annotations

import copy

import pytest
import torch

from infinicore import nn
from infinicore.ops.samples import random_blocks
from infinicore.quantization import BlockType, QuantizedTensor

Q4 = random_blocks(BlockType.Q4_1, 5, 2)
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


def quantized_linear() -> nn.Linear:
    layer = nn.Linear(64, 5, device="meta")
    layer.bias = nn.Parameter(torch.arange(5.0))
    layer.set_weight(Q4)
    return layer


def test_a_layer_made_on_the_meta_device_takes_a_quantised_weight() -> None:
    wanted = X @ Q4.dequantize().T + torch.arange(5.0)
    torch.testing.assert_close(quantized_linear()(X), wanted)


def test_a_quantised_embedding_gives_dequantised_rows() -> None:
    layer = nn.Embedding(5, 64, device="meta")
    layer.set_weight(Q4)
    assert torch.equal(layer([4, 0]), Q4.dequantize()[[4, 0]])


def test_two_layers_share_one_weight() -> None:
    embedding, head = nn.Embedding(5, 64), nn.Linear(64, 5)
    embedding.set_weight(Q4)
    head.set_weight(embedding.weight)
    assert isinstance(head.weight, QuantizedTensor) and isinstance(embedding.weight, QuantizedTensor)
    assert head.weight.blocks.data_ptr() == embedding.weight.blocks.data_ptr()


def test_a_dense_weight_of_half_precision_serves_float32_inputs() -> None:
    layer, weight = nn.Linear(64, 5, bias=False), torch.randn(5, 64).bfloat16()
    layer.set_weight(weight)
    assert layer.get_parameter("weight").data_ptr() == weight.data_ptr()
    # AMX keeps 16 bits of the input
    torch.testing.assert_close(layer(X), X @ weight.float().T, rtol=1e-4, atol=1e-4)


def test_a_dense_weight_takes_the_place_of_a_quantised_one() -> None:
    layer = quantized_linear()
    layer.set_weight(torch.ones(5, 64))
    assert set(layer.state_dict()) == {"weight", "bias"}
    torch.testing.assert_close(layer(X), X.sum(-1, keepdim=True) + torch.arange(5.0))


def test_a_parallel_layer_keeps_its_split() -> None:
    layer = nn.ColumnParallelLinear(64, 10, tp_rank=1, tp_size=2)
    layer.set_weight(torch.ones(5, 64))
    assert layer.get_parameter("weight").whole_shape == (10, 64)
    layer.set_weight(Q4)
    torch.testing.assert_close(layer(X), X @ Q4.dequantize().T + layer.bias)


def test_to_moves_the_blocks_and_casts_leave_them() -> None:
    layer = quantized_linear().to("cpu").double()
    assert layer.weight.blocks.data_ptr() == Q4.blocks.data_ptr()
    assert layer.bias.dtype == torch.float64
    assert layer.to("meta").weight.device.type == "meta"


def test_a_quantised_weight_is_no_part_of_the_state() -> None:
    layer = quantized_linear()
    assert list(layer.state_dict()) == ["bias"] == [name for name, _ in layer.named_parameters()]
    assert layer.load_state_dict({"weight": torch.ones(5, 64)}).unexpected_keys == ["weight"]


def test_a_copy_computes_the_same() -> None:
    layer = quantized_linear()
    assert torch.equal(copy.deepcopy(layer)(X), layer(X))


def test_repr_names_the_block_type() -> None:
    assert "weight=Q4_1" in repr(quantized_linear())
    assert repr(Q4) == "QuantizedTensor(Q4_1, shape=(5, 64), device='cpu')"


@pytest.mark.parametrize(
    "weight, error, message",
    [
        (
            random_blocks(BlockType.Q4_1, 4, 2),
            ValueError,
            r"Linear: weight has shape \(4, 64\), but \(5, 64\)",
        ),
        (torch.ones(5, 63), ValueError, r"Linear: weight has shape \(5, 63\), but \(5, 64\) is wanted"),
        (torch.ones(5, 64, dtype=torch.int8), TypeError, "Linear: weight must have a floating dtype"),
        ([1.0], TypeError, "Linear: weight must be a tensor or quantised, but is list"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused(weight, error, message) -> None:
    layer = nn.Linear(64, 5)
    before = layer(X)
    with pytest.raises(error, match=message):
        layer.set_weight(weight)
    assert torch.equal(layer(X), before)
