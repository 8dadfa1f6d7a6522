"""Norms, embeddings and activations as modules: against torch, their first values, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import infinicore
from infinicore import nn
from infinicore.graph import Graph
from infinicore.nn import functional as F
from infinicore.quantization import BlockType, quantize


def test_layer_norm_of_one_to_four_has_mean_zero_and_variance_one() -> None:
    y = nn.LayerNorm([4])(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert abs(y.mean().item()) < 1e-6
    assert abs(y.var(unbiased=False).item() - 1) < 1e-4


@pytest.mark.parametrize("shape", [(7,), (3, 7), (5, 3, 7)])
def test_layer_norm_takes_a_suffix_of_any_rank_and_both_forms_agree(shape: tuple[int, ...]) -> None:
    norm = nn.LayerNorm(shape)
    norm.load_state_dict({"weight": torch.randn(shape), "bias": torch.randn(shape)})
    x = torch.randn(2, 5, 3, 7) / 100  # eps counts
    wanted = torch.nn.functional.layer_norm(x, shape, norm.weight, norm.bias)
    torch.testing.assert_close(norm(x), wanted)
    torch.testing.assert_close(norm.forward_standard(x), wanted)


def test_layer_norm_names_both_shapes_when_they_do_not_fit() -> None:
    norm = nn.LayerNorm([3, 4])
    for x in (torch.randn(4), torch.randn(2, 4, 3)):
        for form in (norm.forward, norm.forward_standard):
            with pytest.raises(ValueError, match=r"\(3, 4\)"):
                form(x)


def test_both_forms_of_layer_norm_refuse_an_input_of_another_dtype() -> None:
    norm = nn.LayerNorm(4)
    for form in (norm.forward, norm.forward_standard):
        with pytest.raises(TypeError, match=r"layer_norm: weight is .*float32 .* input is .*bfloat16"):
            form(torch.ones(2, 4, dtype=torch.bfloat16))


def test_rms_norm_matches_torch_under_any_leading_dimensions() -> None:
    norm = nn.RMSNorm(8)
    norm.weight.load(torch.randn(8))
    for shape in ((8,), (3, 8), (2, 3, 4, 8), (0, 8)):
        x = torch.randn(shape) / 100  # eps counts
        torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-6))


def test_embedding_starts_with_the_stated_spread_and_a_zero_padding_row() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(1000, 256, padding_idx=0)
    assert abs(table.weight[1:].std().item() - math.sqrt(2 / 1256)) < 1e-3
    y = table([1, 2, 3, 0])
    assert y.shape == (4, 256) and (y[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_embedding_gives_its_rows_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    layer, ids = nn.Embedding(50, 33, dtype=dtype), torch.tensor([[1, 49], [0, 7]])
    wanted = layer.weight.detach()[ids]
    assert torch.equal(layer(ids, torch.float32), wanted.float())
    assert torch.equal(layer(ids, torch.bfloat16), wanted.bfloat16())
    assert layer(ids).dtype == dtype


@pytest.mark.parametrize("wrong", ["meta", torch.device("meta"), torch.int64, 1], ids=str)
def test_embedding_refuses_what_is_no_dtype_of_floats(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"Embedding: dtype must be .*float32.* but is"):
        nn.Embedding(5, 3)(torch.tensor([1]), wrong)


def test_widened_rows_can_be_recorded_and_differentiated() -> None:
    layer, ids = nn.Embedding(50, 33, dtype=torch.bfloat16), torch.tensor([1, 49])
    graph = Graph.record(lambda: layer(ids, torch.float32))
    ids.fill_(7)
    assert torch.equal(graph.replay(), layer.weight.detach()[ids].float())
    layer.requires_grad_()
    layer(ids, torch.float32).sum().backward()
    assert layer.weight.grad is not None and bool((layer.weight.grad[7] == 2).all())


def test_embedding_takes_tensors_lists_and_lists_of_lists() -> None:
    table = nn.Embedding(10, 4)
    wanted = table.weight[torch.tensor([[1, 2], [3, 0]])]
    assert torch.equal(table(torch.tensor([[1, 2], [3, 0]])), wanted)
    assert torch.equal(table([[1, 2], [3, 0]]), wanted)
    assert torch.equal(table([3, 0]), wanted[1])
    assert torch.equal(table(list(np.array([3, 0]))), wanted[1])  # numpy's integers


@pytest.mark.parametrize(
    "ids, error",
    [
        ([], ValueError),
        ([[1, 2], [3]], ValueError),
        ([1, [2]], ValueError),
        ([1.5], TypeError),
        ([True], TypeError),
        ("12", TypeError),
        (3, TypeError),
        ([10], IndexError),
        ([-1], IndexError),
        ([1, 2**63], IndexError),
        ([[-(10**5000)]], IndexError),
    ],
)
def test_embedding_refuses_empty_ragged_mistyped_and_foreign_ids(ids: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        nn.Embedding(10, 4)(ids)


@pytest.mark.parametrize("ids, found", [([], r"\[\]"), ([1, [2]], r"\[1, \[2\]\]"), ([[1, 1.5]], "1.5")])
def test_embedding_says_which_ids_it_refuses(ids: object, found: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"ids must be .*integers, but .*{found}"):
        nn.Embedding(10, 4)(ids)


@pytest.mark.parametrize("layer", [nn.Linear, nn.ColumnParallelLinear, nn.RowParallelLinear, nn.RBELinear])
def test_a_bias_given_as_a_tensor_is_refused(layer: type[nn.Module]) -> None:
    for bias in (torch.zeros(1), torch.zeros(4)):
        with pytest.raises(TypeError, match="bias must be True or False"):
            layer(8, 4, bias)


@pytest.mark.parametrize("layer", [nn.Linear, nn.ColumnParallelLinear, nn.RowParallelLinear, nn.RBELinear])
@pytest.mark.parametrize("given", [torch.float16, torch.device("cpu"), "cpu"], ids=str)
def test_a_dtype_or_device_in_the_place_of_a_bias_is_refused(layer: type[nn.Module], given: object) -> None:
    with pytest.raises(TypeError, match=f"bias must be True or False, but is .*{given}"):
        layer(8, 4, given)


@pytest.mark.parametrize(
    "name, make",
    [
        ("out_features", lambda: nn.Linear(8, True)),
        ("in_features", lambda: nn.Linear(True, 8)),
        ("embedding_dim", lambda: nn.Embedding(8, True)),
        ("padding_idx", lambda: nn.Embedding(8, 4, True)),
        ("max_seq_len", lambda: nn.RoPE(8, True)),
        ("normalized_shape", lambda: nn.LayerNorm([8, True])),
        ("intermediate_size", lambda: nn.MLPBlock(8, True)),
        ("dim", lambda: nn.Softmax(True)),
        ("offset", lambda: nn.PositionalEmbedding(8, 4)(2, True)),
        ("shape", lambda: infinicore.from_blob(bytes(4), True)),
    ],
)
def test_true_is_refused_where_a_whole_number_is_wanted(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, but is True"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda device: nn.Linear(8, 4, device=device),
        lambda device: nn.Embedding(8, 4, device=device),
        lambda device: nn.RMSNorm(8, device=device),
        lambda device: nn.RoPE(8, 4, device=device),
        lambda device: nn.MLPBlock(8, 4, device=device),
        lambda device: infinicore.from_blob(bytes(4), 1, device=device),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_its_name(make: Callable[[object], object]) -> None:
    for device in ("cuda:99", torch.device("cuda", 99)):  # of which torch says so in an assertion of its own
        with pytest.raises(ValueError, match=r": device .*cuda.*99.* cannot be used here: \w+"):
            make(device)


@pytest.mark.parametrize(
    "layer, arguments",
    [
        (nn.Linear, {"in_features": 8, "out_features": 4}),
        (nn.ColumnParallelLinear, {"in_features": 8, "out_features": 4, "tp_rank": 0, "tp_size": 1}),
        (
            nn.RowParallelLinear,
            {"in_features": 8, "out_features": 4, "tp_rank": 0, "tp_size": 1, "communicator": None},
        ),
        (nn.Embedding, {"num_embeddings": 4, "embedding_dim": 4, "padding_idx": 1}),
        (nn.PositionalEmbedding, {"max_len": 4, "embed_dim": 4}),
        (nn.PositionalEmbedding.sinusoidal, {"max_len": 4, "embed_dim": 4}),
        (nn.PositionalEmbedding(4, 4).forward, {"seq_len": 2, "offset": 0}),
        (nn.RMSNorm, {"normalized_shape": 4, "eps": 1e-6}),
        (nn.LayerNorm, {"normalized_shape": [4], "eps": 1e-5}),
        (nn.RoPE, {"head_dim": 8, "max_seq_len": 4, "theta": 1e4, "algo": nn.RoPE.Algo.GPT_J}),
        (nn.RoPE(8, 4).forward, {"x": torch.ones(2, 1, 8), "pos": torch.arange(2)}),
        (nn.Softmax, {"dim": 0}),
        (nn.GELU, {"approximate": "none"}),
        (nn.SiLU, {}),
        (nn.MLPBlock, {"hidden_size": 4, "intermediate_size": 4}),
        (nn.RBELinear, {"in_features": 4, "out_features": 4, "block_size": 4, "num_coefficients": 4}),
        (nn.Linear(4, 4).forward, {"x": torch.ones(2, 4), "residual": torch.ones(2, 4)}),
        (nn.Parameter, {"data": torch.ones(4), "tp_dim": 0, "tp_rank": 0, "tp_size": 1}),
        (infinicore.from_blob, {"data": b"1234", "shape": (1,), "dtype": torch.float32}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_an_argument_of_a_wrong_type_is_refused_by_its_name(
    layer: Callable[..., object], arguments: dict[str, object]
) -> None:
    layer(**arguments)
    is_made = isinstance(layer, type) and layer is not nn.Parameter
    for name in (*arguments, *(("dtype", "device") if is_made else ())):
        for wrong in ("a", [1.5], (), 2.5, object(), torch.ones(3)):
            if not is_right(name, wrong):
                with pytest.raises((TypeError, ValueError), match=rf"\b({name}|input|pos_ids)\b"):
                    layer(**{**arguments, name: wrong})


def is_right(name: str, value: object) -> bool:
    """A shape may be empty where bytes are counted, a number may be any number, and a tensor is data."""
    right: dict[str, tuple[type, ...]] = {
        "eps": (float,), "theta": (float,), "data": (torch.Tensor,), "shape": (tuple,)
    }  # fmt: skip
    return isinstance(value, right.get(name, ()))


def test_sizes_may_be_integers_of_numpy_and_torch() -> None:
    layer = nn.Linear(np.int64(8), torch.tensor(4))  # type: ignore[arg-type]
    assert repr(layer) == "Linear(in_features=8, out_features=4, bias=True)"
    assert nn.RMSNorm(np.int32(4)).normalized_shape == (4,)  # type: ignore[arg-type]
    assert nn.RoPE(np.int64(8), np.int64(4)).sin_cache.shape == (4, 4)  # type: ignore[arg-type]
    assert nn.RBELinear(8, 4, block_size=np.int8(16), num_coefficients=9).dense_weight().shape == (4, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf])
def test_an_eps_without_meaning_is_refused_when_the_layer_is_made(norm: type, eps: float) -> None:
    with pytest.raises(ValueError, match=f"{norm.__name__}: eps must be finite and not negative"):
        norm(4, eps=eps)


@pytest.mark.parametrize("layer", [nn.GELU, nn.SiLU, nn.Softmax])
def test_activations_take_a_dtype_and_a_device_and_hold_nothing(layer: type[nn.Module]) -> None:
    made = layer(dtype=torch.bfloat16, device="meta")
    assert not list(made.parameters()) and not list(made.buffers())
    assert made(torch.randn(3, 4)).dtype == torch.float32


def test_embedding_refuses_a_padding_row_it_does_not_have() -> None:
    for padding_idx in (10, -1):
        with pytest.raises(ValueError, match=rf"{padding_idx}.*\[0, 10\)"):
            nn.Embedding(10, 4, padding_idx=padding_idx)


def test_sinusoidal_positions_follow_the_formula() -> None:
    table = nn.PositionalEmbedding.sinusoidal(50, 7)
    for position, column in ((0, 0), (0, 1), (3, 2), (49, 5), (17, 6)):
        angle = position / 10000 ** (2 * (column // 2) / 7)
        wanted = math.sin(angle) if column % 2 == 0 else math.cos(angle)
        assert abs(table(1, position)[0, column].item() - wanted) < 1e-6


def test_positions_are_a_slice_and_never_exceed_the_table() -> None:
    table = nn.PositionalEmbedding(20, 4)
    assert torch.equal(table(5, 3), table.weight[3:8]) and table(0).shape == (0, 4)
    for seq_len, offset in ((21, 0), (5, 16), (-1, 0), (1, -1)):
        with pytest.raises(ValueError, match=f"seq_len {seq_len} from offset {offset} .* max_len 20"):
            table(seq_len, offset)


def test_learned_positions_start_small() -> None:
    torch.manual_seed(0)
    assert abs(nn.PositionalEmbedding(500, 100).weight.std().item() - 0.02) < 1e-3


def test_gelu_forms_stay_within_their_known_distance_of_the_exact_one() -> None:
    x = torch.linspace(-6, 6, 10001)
    exact = torch.nn.functional.gelu(x.double()).float()
    for form, bound in (("none", 1e-6), ("tanh", 5e-4), ("fast", 0.0204)):
        assert (nn.GELU(form)(x) - exact).abs().max() < bound
    assert nn.GELU()(torch.zeros(1)).item() == 0 and nn.GELU().approximate == "tanh"


def test_gelu_is_not_monotone() -> None:
    y = nn.GELU()(torch.tensor([-2.0, -1.0]))
    assert y[0] > y[1]


def test_softmax_sums_to_one_over_its_dimension() -> None:
    x = torch.randn(3, 4, 5) * 50
    for dim in (0, 1, 2, -1, -3):
        torch.testing.assert_close(nn.Softmax(dim)(x).sum(dim), torch.ones(x.sum(dim).shape))
    for dim in (3, -4):
        with pytest.raises(IndexError, match="out of range"):
            nn.Softmax(dim)(x)


def test_layers_describe_themselves() -> None:
    assert repr(nn.Embedding(10, 4)) == "Embedding(num_embeddings=10, embedding_dim=4)"
    assert repr(nn.RMSNorm(8)) == "RMSNorm(8, eps=1e-06)"
    assert repr(nn.RoPE(8, 16)) == "RoPE(head_dim=8, max_seq_len=16, theta=10000.0, algo=GPT_J)"
    assert repr(nn.SiLU()) == "SiLU()"


def test_layers_are_made_in_the_dtype_asked_for() -> None:
    for layer in (nn.RMSNorm(8, dtype=torch.bfloat16), nn.Embedding(4, 8, dtype=torch.bfloat16)):
        assert layer.weight.dtype == torch.bfloat16
    x = torch.randn(3, 8).bfloat16()
    assert nn.LayerNorm(8, dtype=torch.bfloat16)(x).dtype == torch.bfloat16


def test_layers_learn_once_they_are_asked_to() -> None:
    norm = nn.RMSNorm(8)
    assert not norm.weight.requires_grad
    norm.requires_grad_()
    norm(torch.randn(3, 8)).sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.abs().sum() > 0


def test_blobs_are_copied_and_their_size_is_checked() -> None:
    data = bytearray(torch.arange(6.0).numpy().tobytes())
    t = infinicore.from_blob(data, (2, 3))
    assert torch.equal(t, torch.arange(6.0).view(2, 3))
    data[:] = bytes(24)
    assert t[1, 2] == 5
    assert infinicore.from_blob(b"", (0, 3), infinicore.int8).shape == (0, 3)
    for bad in ((b"1234", (2,)), (b"1234", (-1,)), (b"12345", (1,))):
        with pytest.raises(ValueError):
            infinicore.from_blob(*bad)
    assert infinicore.from_blob(b"1234", 1).shape == (1,)
    assert infinicore.from_blob(b"1234", ()).shape == ()
    every_other = memoryview(b"1x2x3x")[::2]
    assert infinicore.from_blob(every_other, 3, infinicore.int8).tolist() == list(b"123")
    for bad_data in (1234, "text", None):
        with pytest.raises(TypeError):
            infinicore.from_blob(bad_data, (1,))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4])
def test_bytes_as_a_dtype_that_needs_scales_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"^from_blob: .*{dtype}"):
        infinicore.from_blob(bytes(dtype.itemsize), 1, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_padding_row_of_an_embedding_does_not_learn(dtype: torch.dtype) -> None:
    table = nn.Embedding(5, 3, padding_idx=1, dtype=dtype).requires_grad_()
    table(torch.tensor([1, 2, 1]), torch.float32).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.sum(1).tolist() == [0, 0, 3, 0, 0]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_a_lookup_in_float32_is_that_whatever_dtype_is_the_default(default: torch.dtype) -> None:
    weight, ids = torch.randn(6, 32), torch.tensor([[0, 1, 2], [3, 4, 5]]).T
    blocks, rows = quantize(weight, BlockType.Q8_0), torch.empty(3, 2, 32)
    half = nn.Embedding(6, 32, dtype=torch.bfloat16)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(half(ids, torch.float32), half.weight.float()[ids])
        for table in (blocks, blocks.pack()):
            assert torch.equal(F.embedding(ids, table, out=rows), blocks.dequantize()[ids])
    finally:
        torch.set_default_dtype(usual)


def test_positions_that_were_looked_up_are_the_callers_own() -> None:
    table = nn.PositionalEmbedding.sinusoidal(6, 4)
    before = table.weight.clone()
    rows = table(3)
    rows += 1
    torch.testing.assert_close(table.weight.data, before)
    assert nn.PositionalEmbedding.sinusoidal(6, 4, device="meta").weight.is_meta
    with torch.device("meta"):
        assert torch.equal(nn.PositionalEmbedding.sinusoidal(6, 4, device="cpu").weight, table.weight)
