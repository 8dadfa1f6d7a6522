"""Float8 weights: a scale for each row, and bytes that no change of a model's dtype reaches."""

from __future__ import annotations

from pathlib import Path

import gguf_files
import pytest
import torch

from infinicore import nn
from infinicore.float8 import Float8Tensor, to_float8
from infinicore.nn.fused import joined
from infinicore.nn.linear import lay_together
from infinilm.models.llama import LlamaForCausalLM


def matrix(num_rows: int = 6, length: int = 40) -> torch.Tensor:
    return torch.randn(num_rows, length, generator=torch.Generator().manual_seed(0))


def test_a_row_keeps_its_largest_value_and_four_bits_of_the_others() -> None:
    dense = matrix() * torch.logspace(-4, 4, 6)[:, None]
    found = to_float8(dense).dequantize()
    torch.testing.assert_close(found.abs().amax(1), dense.abs().amax(1))
    # Half a step of 3 bits beside the leading one, and of the smallest number there is.
    smallest = dense.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert bool(((found - dense).abs() <= dense.abs() / 16 + smallest / 2).all())


def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_is_refused() -> None:
    dense = matrix()
    dense[2] = 0
    assert torch.equal(to_float8(dense).dequantize()[2], dense[2])
    dense[3, 4] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinity"):
        to_float8(dense)


def test_a_layer_computes_with_the_rounded_weight_and_survives_a_change_of_dtype() -> None:
    layer, weight, x = nn.Linear(40, 6), to_float8(matrix()), torch.randn(3, 40)
    layer.set_weight(weight)
    torch.testing.assert_close(layer(x), x @ weight.dequantize().T + layer.bias)
    layer.to(torch.bfloat16)
    assert torch.equal(layer.weight.dequantize(), weight.dequantize()) and "weight=FP8" in repr(layer)
    table = nn.Embedding(6, 40)
    table.set_weight(weight)
    assert torch.equal(table([5, 0]), weight.dequantize()[[5, 0]])


def test_weights_of_one_input_lie_together() -> None:
    layers = [nn.Linear(40, size, bias=False) for size in (3, 6)]
    weights = [to_float8(matrix(size)) for size in (3, 6)]
    for layer, weight in zip(layers, weights, strict=True):
        layer.set_weight(weight)
    lay_together(*layers)
    whole = joined([layer.weight for layer in layers], [None, None])
    assert whole is not None and isinstance(whole[0], Float8Tensor)
    assert torch.equal(whole[0].dequantize(), torch.cat([weight.dequantize() for weight in weights]))


def test_a_model_on_a_cpu_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = gguf_files.write_folder(tmp_path / "model", gguf_files.llama_weights())
    with pytest.raises(ValueError, match="'fp8' needs a GPU, not cpu; 'q8_0'"):
        LlamaForCausalLM.from_pretrained(folder, quantize="fp8")
