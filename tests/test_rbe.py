"""RBELinear against a slow decoder written from the definition, and what it is worth on random weights."""

import math
import pickle

import pytest
import torch

from infinicore.nn.rbe import MLPBlock, RBELinear

LOW = (0.176777, 0.530330, 0.530330, 0.176777)  # Bior3.1's reconstruction filters
HIGH = (0.353553, 1.060660, -1.060660, -0.353553)


def surface_at(p: list[float], x: float, y: float) -> float:
    d, pi = math.sqrt(x * x + y * y), math.pi
    waves = [math.cos(pi * x), math.cos(pi * y), math.cos(2 * pi * x), math.cos(2 * pi * y)]
    basis = [1.0, d, d * d, *waves, waves[0] * waves[1]]
    return sum(weight * function for weight, function in zip(p, basis, strict=True))


def inverse_dct(spectrum: list[float]) -> list[float]:
    n = len(spectrum)
    scale = [math.sqrt((1 if k == 0 else 2) / n) for k in range(n)]
    return [
        sum(scale[k] * spectrum[k] * math.cos(math.pi * (2 * i + 1) * k / (2 * n)) for k in range(n))
        for i in range(n)
    ]


def inverse_bior_step(halves: list[float]) -> list[float]:
    n = len(halves)
    signal = [0.0] * n
    for k in range(n // 2):
        for tap in range(4):
            value = LOW[tap] * halves[k] + HIGH[tap] * halves[n // 2 + k]
            signal[(2 * k + tap) % n] += value * math.sqrt(2)
    return signal


def inverse_on_corner(block: list[list[float]], size: int, inverse) -> None:
    """The inverse of "rows, then columns": columns first."""
    for c in range(size):
        for r, value in enumerate(inverse([block[r][c] for r in range(size)])):
            block[r][c] = value
    for r in range(size):
        block[r][:size] = inverse(block[r][:size])


def slow_decode(layer: RBELinear, block: int) -> list[list[float]]:
    size = layer.block_size
    decoded = [[0.0] * size for _ in range(size)]
    for r, c, value in zip(layer.rows[block], layer.columns[block], layer.coefficients[block], strict=True):
        decoded[int(r)][int(c)] = float(value)
    if layer.transform == "dct":
        inverse_on_corner(decoded, size, inverse_dct)
    else:
        for level in range(1, size.bit_length()):
            inverse_on_corner(decoded, 2**level, inverse_bior_step)
    at = [2 * i / (size - 1) - 1 for i in range(size)]
    p = layer.surface[block].tolist()
    return [[decoded[r][c] + surface_at(p, at[c], at[r]) for c in range(size)] for r in range(size)]


@pytest.mark.parametrize("transform", ["dct", "bior3.1"])
def test_decoded_matrix_is_what_the_definition_says(transform):
    torch.manual_seed(0)
    layer = RBELinear.from_dense_weights(torch.randn(16, 8), None, 8, 20, transform)
    slow = torch.tensor(slow_decode(layer, 0) + slow_decode(layer, 1))
    torch.testing.assert_close(layer.dense_weight(), slow, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("transform", ["dct", "bior3.1"])
@pytest.mark.parametrize("shape", [(64, 64), (70, 130), (1, 1), (3, 200)], ids=str)
def test_with_all_coefficients_the_matrix_is_rebuilt(shape, transform):
    weight = torch.randn(shape)
    layer = RBELinear.from_dense_weights(weight, None, 64, 64 * 64, transform)
    torch.testing.assert_close(layer.dense_weight(), weight, rtol=0, atol=1e-5)


def test_smooth_block_needs_no_coefficients():
    line = torch.linspace(-1, 1, 16)
    smooth = 3 + 2 * torch.hypot(line[:, None], line) - torch.cos(torch.pi * line)
    layer = RBELinear.from_dense_weights(smooth, None, 16, 0)
    assert layer.relative_error(smooth) < 1e-6 and layer.num_bytes == 32


def test_random_weights_lose_most_of_themselves_at_256_of_4096_coefficients():
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    layer = RBELinear.from_dense_weights(weight)
    assert layer.relative_error(weight) == pytest.approx(0.82, abs=0.01)


def test_kept_coefficients_are_the_largest():
    torch.manual_seed(0)
    weight = torch.randn(32, 32)
    few, all_of_them = (RBELinear.from_dense_weights(weight, None, 32, count) for count in (10, 1024))
    largest = all_of_them.coefficients.abs().sort(descending=True).values[:, :10]
    torch.testing.assert_close(few.coefficients.abs().sort(descending=True).values, largest)


@pytest.mark.parametrize(
    "shape, bias, expected",
    [((64, 64), False, 2080), ((70, 130), False, 6 * 2080), ((64, 64), True, 2080 + 256)],
)
def test_num_bytes_counts_all_that_is_stored(shape, bias, expected):
    layer = RBELinear.from_dense_weights(torch.randn(shape), torch.zeros(shape[0]) if bias else None)
    assert layer.num_bytes == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 4)], ids=str)
def test_forward_multiplies_by_the_decoded_matrix(shape, dtype):
    weight, bias = torch.randn(70, 130), torch.randn(70)
    layer = RBELinear.from_dense_weights(weight, bias)
    x = torch.randn(*shape, 130, dtype=dtype)
    expected = torch.nn.functional.linear(x, layer.dense_weight().to(dtype), bias.to(dtype))
    torch.testing.assert_close(layer(x), expected)


def test_decoded_matrix_is_the_same_under_autocast():
    layer = RBELinear.from_dense_weights(torch.randn(40, 70), num_coefficients=20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoded, y = layer.dense_weight(), layer(torch.ones(2, 70))
    assert torch.equal(decoded, layer.dense_weight()) and torch.equal(y, layer(torch.ones(2, 70)))


def test_decoded_matrix_is_not_kept():
    layer = RBELinear.from_dense_weights(torch.randn(64, 64))
    layer(torch.randn(2, 64))
    assert sum(t.nbytes for t in (*layer.parameters(), *layer.buffers())) == layer.num_bytes == 2080


def test_state_goes_into_an_empty_layer():
    layer = RBELinear.from_dense_weights(torch.randn(70, 130), torch.randn(70), 32, 50)
    twin = RBELinear(130, 70, block_size=32, num_coefficients=50)
    assert not twin.dense_weight().any()
    twin.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(twin.dense_weight(), layer.dense_weight()) and torch.equal(twin.bias, layer.bias)


def test_damaged_positions_are_refused():
    layer = RBELinear.from_dense_weights(torch.randn(8, 8), None, 8, 4)
    layer.rows.fill_(8)
    with pytest.raises(ValueError, match="outside its block"):
        layer.dense_weight()


def test_a_layer_on_the_meta_device_tells_the_shape_of_its_result():
    x = torch.empty(3, 40, device="meta")
    assert RBELinear(40, 70, device="meta")(x).shape == (3, 70)
    assert MLPBlock(40, 70, device="meta")(x).shape == (3, 40)


def test_zeros_are_encoded_without_error():
    assert RBELinear.from_dense_weights(torch.zeros(64, 64)).relative_error(torch.zeros(64, 64)) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 8, "num_coefficients": 65}, r"\[0, 64\].*65"),
        ({"num_coefficients": -1}, "num_coefficients"),
        ({"transform": "fft"}, "'fft'"),
        ({"block_size": 48, "transform": "bior3.1"}, "power of two"),
        ({"bias": torch.zeros(3)}, r"\(3,\).*\(8,\)"),
    ],
)
def test_impossible_encoding_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RBELinear.from_dense_weights(torch.zeros(8, 8), **options)


def test_weight_that_is_no_finite_matrix_is_refused():
    with pytest.raises(ValueError, match=r"\(4,\)"):
        RBELinear.from_dense_weights(torch.zeros(4))
    with pytest.raises(ValueError, match="not finite"):
        RBELinear.from_dense_weights(torch.full((2, 2), math.nan))
    with pytest.raises(TypeError, match="int64"):
        RBELinear.from_dense_weights(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="float8"):  # of which torch does not tell what is finite
        RBELinear.from_dense_weights(torch.zeros(2, 2).to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match="list"):
        RBELinear.from_dense_weights([[1.0]])


def test_a_layer_is_not_encoded_anew_from_what_no_block_can_encode():
    layer = RBELinear.from_dense_weights(torch.ones(2, 2), None, 2, 4)
    for wrong, error in (
        (torch.full((2, 2), math.nan), ValueError),
        (torch.ones(2, 2, device="meta"), ValueError),
        (torch.ones(2, 2, dtype=torch.int64), TypeError),
        ([[1.0, 1.0], [1.0, 1.0]], TypeError),
    ):
        with pytest.raises(error, match="RBELinear: weight"):
            layer.encode(wrong)
    torch.testing.assert_close(layer.dense_weight(), torch.ones(2, 2))


def test_weight_of_another_shape_is_neither_encoded_nor_compared():
    layer = RBELinear(70, 65)
    for call in (layer.encode, layer.relative_error):
        with pytest.raises(ValueError, match=r"\(1, 70\).*\(65, 70\)"):
            call(torch.ones(1, 70))


def test_layer_runs_where_it_is_whatever_device_is_the_default():
    weight, x = torch.randn(20, 12), torch.randn(3, 12)
    for transform in ("dct", "bior3.1"):
        layer = RBELinear.from_dense_weights(weight, block_size=8, num_coefficients=9, transform=transform)
        wanted = layer(x)
        with torch.device("meta"):
            layer.encode(weight)
            assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mlp_block_is_norm_linear_gelu_linear_and_the_input(dtype):
    block = MLPBlock(48, 96, dtype=dtype)
    x = torch.randn(2, 3, 48, dtype=dtype)
    normed = torch.nn.functional.layer_norm(x, (48,))
    hidden = torch.nn.functional.gelu(normed @ block.linear1.dense_weight().to(dtype).T, approximate="tanh")
    expected = x + hidden @ block.linear2.dense_weight().to(dtype).T
    torch.testing.assert_close(block(x), expected)


def test_mlp_block_is_made_and_runs_in_the_dtype_asked_for():
    block = MLPBlock(48, 96, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in block.parameters()} == {torch.bfloat16}
    x = torch.randn(2, 48)
    assert block(x.bfloat16()).dtype == torch.bfloat16
    exact = block.float()(x)
    torch.testing.assert_close(block.bfloat16()(x.bfloat16()).float(), exact, rtol=0.05, atol=0.05)


def test_mlp_block_starts_within_a_tenth_of_zero():
    torch.manual_seed(0)
    weight = MLPBlock(64, 64).linear1.dense_weight()
    assert 0.01 < weight.std() < 0.1 / math.sqrt(3)


def test_a_layer_is_encoded_in_the_dtype_and_on_the_device_asked_for():
    weight, bias = torch.randn(70, 64, dtype=torch.float64), torch.randn(70)
    layer = RBELinear.from_dense_weights(weight, bias, dtype=torch.float16, device="cpu")
    assert layer.bias.dtype == torch.float16 and layer.device == torch.device("cpu")
    torch.testing.assert_close(layer.bias.data, bias.half())
    plain = RBELinear.from_dense_weights(weight, bias)
    torch.testing.assert_close(layer.dense_weight().float(), plain.dense_weight(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("made", [lambda: RBELinear(70, 65), lambda: MLPBlock(32, 64)])
def test_a_pickled_layer_is_the_same(made):
    layer = made()
    copied = pickle.loads(pickle.dumps(layer))
    for name, tensor in layer.state_dict().items():
        assert copied.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(copied.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8))
