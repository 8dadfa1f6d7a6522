"""nn.functional against torch and Hugging Face, its edges, and what it refuses."""

from __future__ import annotations

import math
import warnings
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from infinicore import nn
from infinicore.nn import functional as F
from infinicore.nn.functional import RopeAlgo

TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-4},
}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    gelu = torch.nn.functional.gelu(gate.double(), approximate=approximate)
    return gelu.mul(up.double()).to(gate.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_softmax_match_torch(dtype: torch.dtype, level: str) -> None:
    x, y = random(3, 50, dtype=dtype), random(3, 50, dtype=dtype, seed=1)
    small = x * 2**-8  # eps counts
    for found, wanted in (
        (F.silu(x), torch.nn.functional.silu(x)),
        (F.swiglu(x, y), torch.nn.functional.silu(x.double()).mul(y.double()).to(dtype)),
        (F.geglu(x, y), geglu(x, y, "tanh")),
        (F.geglu(x, y, "none"), geglu(x, y, "none")),
        (F.gelu(x), torch.nn.functional.gelu(x)),
        (F.gelu(x, "tanh"), torch.nn.functional.gelu(x, approximate="tanh")),
        (F.gelu(x, "fast"), (x.double() * torch.sigmoid(1.702 * x.double())).to(dtype)),
        (F.softmax(x), torch.softmax(x, -1)),
        (F.softmax(x, 0), torch.softmax(x, 0)),
        (F.layer_norm(small, [50]), torch.nn.functional.layer_norm(small, [50])),
        (F.rms_norm(small, [50], y[0], eps=1e-5), torch.nn.functional.rms_norm(small, [50], y[0], eps=1e-5)),
    ):
        torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


def test_norms_take_a_shape_of_several_dimensions(level: str) -> None:
    x, weight, bias = random(2, 3, 4, 5), random(4, 5, seed=1), random(4, 5, seed=2)
    wanted = torch.nn.functional.layer_norm(x, [4, 5], weight, bias)
    torch.testing.assert_close(F.layer_norm(x, [4, 5], weight, bias), wanted)
    torch.testing.assert_close(
        F.rms_norm(x, [4, 5], weight), torch.nn.functional.rms_norm(x, [4, 5], weight, 1e-5)
    )
    out = torch.empty_like(x)
    assert F.layer_norm(x, [4, 5], weight, bias, out=out) is out
    torch.testing.assert_close(out, wanted)


def test_rms_norm_in_bfloat16_has_the_bits_of_transformers_llama(level: str) -> None:
    x, weight = random(7, 576, dtype=torch.bfloat16), random(576, dtype=torch.bfloat16, seed=1)
    v = x.float()
    wanted = weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)
    differing = (F.rms_norm(x, [576], weight) != wanted).sum()
    assert differing <= 2  # a sum in another order may move a value over a rounding edge


def test_add_rms_norm_returns_the_norm_and_the_sum(level: str) -> None:
    x, residual, weight = random(3, 40), random(3, 40, seed=1), random(40, seed=2)
    y, total = F.add_rms_norm(x, residual, [40], weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, F.rms_norm(x + residual, [40], weight))
    out = (torch.empty_like(x), residual)  # the residual stream updated where it lies
    assert F.add_rms_norm(x, residual, [40], weight, out=out) == out
    assert torch.equal(residual, total) and torch.equal(out[0], y)
    for dtype in (torch.float32, torch.float64):  # by the kernel and by the reference
        both = torch.empty(3, 40, dtype=dtype)
        with pytest.raises(ValueError, match="two of the outputs overlap"):
            F.add_rms_norm(*(t.to(dtype) for t in (x, residual)), [40], weight.to(dtype), out=(both, both))


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5), (2, 3, 4, 9)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_softmax_hides_later_columns_and_sums_to_one(
    shape: tuple[int, ...], dtype: torch.dtype, level: str
) -> None:
    x = random(*shape, dtype=dtype)
    y = F.causal_softmax(x)
    num_queries, num_keys = shape[-2:]
    hidden = torch.ones(num_queries, num_keys).triu(num_keys - num_queries + 1).bool()
    assert (y[..., hidden] == 0).all()
    bar = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        y.double().sum(-1), torch.ones(shape[:-1], dtype=torch.float64), rtol=0, atol=bar
    )
    assert (y[..., ~hidden] > 0).all()


def test_linear_matches_torch_and_fills_out(level: str) -> None:
    x, weight, bias = random(2, 3, 8), random(5, 8, seed=1), random(5, seed=2)
    out = torch.empty(2, 3, 5)
    assert F.linear(x, weight, bias, out=out) is out
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))


def test_silu_in_place_writes_over_its_input_and_excludes_out() -> None:
    x = random(3, 4)
    wanted = F.silu(x)
    assert F.silu(x, inplace=True) is x
    assert torch.equal(x, wanted)
    with pytest.raises(ValueError, match="exclude each other"):
        F.silu(x, inplace=True, out=x)


def test_silu_refuses_a_tensor_in_the_place_of_inplace() -> None:
    x = random(1)
    with pytest.raises(TypeError, match="silu: inplace must be True or False"):
        F.silu(x, torch.ones(1))  # type: ignore[arg-type]
    assert torch.equal(x, random(1))


def test_swiglu_gates_with_its_first_argument() -> None:
    a, b = random(3, 4), random(3, 4, seed=1)
    torch.testing.assert_close(F.swiglu(a, b), a * torch.sigmoid(a) * b)
    assert not torch.allclose(F.swiglu(a, b), a * b * torch.sigmoid(b))  # the order other kernels use


def test_embedding_options_mean_what_they_mean_in_torch() -> None:
    ids, weight = torch.tensor([[1, 2], [0, 1]]), random(4, 6)
    for options in ({"padding_idx": 1}, {"max_norm": 0.5}, {"sparse": True}, {"scale_grad_by_freq": True}):
        wanted = torch.nn.functional.embedding(ids, weight.clone(), **options)
        assert torch.equal(F.embedding(ids, weight.clone(), **options), wanted)


@pytest.mark.parametrize("flag", ["scale_grad_by_freq", "sparse"])
def test_embedding_refuses_a_tensor_in_the_place_of_a_flag(flag: str) -> None:
    with pytest.raises(TypeError, match=f"embedding: {flag} must be True or False"):
        F.embedding(torch.tensor([1]), random(4, 6), **{flag: torch.ones(2)})


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16]
)
def test_embedding_takes_ids_of_any_integer_type_and_layout(dtype: torch.dtype) -> None:
    ids, weight = torch.tensor([[1, 2, 3], [0, 3, 1]]).to(dtype), random(4, 6)
    assert torch.equal(F.embedding(ids, weight), weight[ids.long()])
    assert torch.equal(F.embedding(ids.t(), weight), weight[ids.long().t()])


def test_embedding_names_the_id_and_the_range() -> None:
    for bad in (-1, 4, 2**40):
        with pytest.raises(IndexError, match=rf"{bad}.*\[0, 4\)"):
            F.embedding(torch.tensor([0, bad]), random(4, 6))
        with pytest.raises(IndexError, match=rf"{bad}.*\[0, 4\)"):
            F.embedding(torch.tensor([0, bad]), random(4, 6).requires_grad_())


def test_an_index_beyond_int64_is_named_as_it_is() -> None:
    largest = torch.tensor([2**64 - 1], dtype=torch.uint64)
    tables = random(4, 3), random(4, 3)
    for x in (random(1, 1, 6), random(1, 1, 6).requires_grad_()):  # by the kernel, and by torch
        with pytest.raises(IndexError, match=rf"id {2**64 - 1} .*\[0, 1\)"):
            F.embedding(largest, x[0])
        with pytest.raises(IndexError, match=rf"position {2**64 - 1} .*\[0, 4\)"):
            F.rope(x, largest, *tables)


# ---- random_sample ----


def draw(logits: Tensor, u: float = 0.5, topp: float = 1.0, topk: int = 0, temperature: float = 1.0) -> int:
    return int(F.random_sample(logits, u, topp, topk, temperature))


def test_zero_of_anything_or_topk_one_takes_the_first_largest_logit() -> None:
    logits = torch.tensor([1.0, 5.0, 2.0, 5.0])
    assert (
        draw(logits, u=0.0)
        == draw(logits, topp=0.0)
        == draw(logits, topk=1)
        == draw(logits, temperature=0.0)
        == 1
    )


def test_sampling_follows_the_distribution(level: str) -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    counts = torch.zeros(4)
    for i in range(1000):
        counts[draw(probabilities.log(), u=(i + 0.5) / 1000)] += 1
    torch.testing.assert_close(counts / 1000, probabilities, atol=2e-3, rtol=0)


def test_topp_keeps_the_smallest_set_that_reaches_it(level: str) -> None:
    logits = torch.zeros(10)  # ten equal weights: 0.3 is reached by exactly three
    assert {draw(logits, u=i / 100, topp=0.3) for i in range(100)} == {0, 1, 2}
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert {draw(logits, u=i / 100, topp=0.6) for i in range(100)} == {0, 1}


def test_topk_keeps_the_lowest_ids_among_equals_and_topp_counts_what_topk_left() -> None:
    assert {draw(torch.zeros(10), u=i / 100, topk=4) for i in range(100)} == {0, 1, 2, 3}
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # of the two that topk leaves, the first holds 4/7: not 0.6, so both stay
    assert {draw(logits, u=i / 100, topk=2, topp=0.6) for i in range(100)} == {0, 1}
    assert {draw(logits, u=i / 100, topk=2, topp=0.55) for i in range(100)} == {0}


def test_sampling_never_takes_a_masked_token(level: str) -> None:
    logits = torch.full((500,), -math.inf)
    logits[[3, 77, 401]] = torch.tensor([1.0, 0.0, 2.0])
    largest = 1 - 2**-53
    assert {draw(logits, u=u) for u in (0.0, 0.5, 0.7, 0.9, 0.99, largest)} == {3, 77, 401}


def test_extreme_temperatures_stay_finite(level: str) -> None:
    logits = random(1000) * 50
    assert draw(logits, u=0.999, temperature=1e-30) == int(logits.argmax())
    assert 0 <= draw(logits, u=0.999, temperature=1e30) < 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cuts_keep_the_largest_logits_where_the_temperature_leaves_all_weights_equal(
    dtype: torch.dtype, level: str
) -> None:
    logits = torch.arange(40).roll(15).to(dtype)  # 39 stands at 14, and 38 and 37 before it
    assert {draw(logits, u=i / 50, topk=3, temperature=1e30) for i in range(50)} == {12, 13, 14}
    assert {draw(logits, u=i / 50, topp=0.05, temperature=1e30) for i in range(50)} == {13, 14}
    for greedy in ({"u": 0.0}, {"topp": 0.0}, {"topk": 1}):
        assert draw(logits, temperature=1e30, **greedy) == 14  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 8193, 10000, 151936])
def test_sampled_tokens_lie_inside_odd_vocabularies(size: int) -> None:
    logits = random(size)
    assert all(
        0 <= draw(logits, u=u, temperature=t) < size for u in (0, 0.5, 0.9999999) for t in (0.1, 1, 100)
    )


def test_sampling_refuses_what_has_no_meaning(level: str) -> None:
    good = torch.zeros(4)
    for name, values in {
        "u": (1.0, -0.1, math.nan),
        "topp": (1.5, -0.1, math.nan),
        "topk": (-1, -(2**40)),
        "temperature": (-1.0, math.inf, math.nan),
    }.items():
        for bad in values:
            with pytest.raises(ValueError, match="random_val" if name == "u" else name):
                draw(good, **{name: bad})
    long = torch.zeros(133)
    for place in (0, 70, 132):
        for bad in (math.nan, math.inf):
            logits = long.index_fill(0, torch.tensor(place), bad)
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                for options in ({}, {"temperature": 0.0}, {"topk": 2}):
                    with pytest.raises(ValueError, match="random_sample: logit"):
                        draw(logits.to(dtype), **options)
    with pytest.raises(ValueError, match="every logit is -inf"):
        draw(torch.full((3,), -math.inf))
    for shape in ((0,), (), (2, 3)):
        with pytest.raises(ValueError):
            draw(torch.zeros(shape))
    with pytest.raises(ValueError, match="logits are on the meta device"):
        draw(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("logits", [[1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf]], ids=str)
def test_sampling_refuses_logits_without_meaning_whoever_draws(logits: list[float]) -> None:
    options = 0.5, 1.0, 0, 1.0
    with pytest.raises(ValueError, match="random_sample: .*logit"):
        F.random_sample(torch.tensor(logits), *options, out=torch.empty((), dtype=torch.int32))
    with FlopCounterMode(display=False), pytest.raises(ValueError, match="random_sample: .*logit"):
        F.random_sample(torch.tensor(logits), *options)
    with dual_level(), pytest.raises(ValueError, match="random_sample: .*logit"):
        F.random_sample(torch.tensor(logits), *options)


def test_sampling_takes_counts_and_probabilities_of_numpy_and_torch() -> None:
    logits = torch.tensor([0.0, 9.0, 1.0])
    assert draw(logits, u=np.float32(0.5), topk=np.int64(2), temperature=torch.tensor(1.0)) == 1  # type: ignore[arg-type]
    assert draw(logits, topk=2**62) == 1


def test_sample_fills_out() -> None:
    for dtype in (torch.int64, torch.int32):
        out = torch.empty((), dtype=dtype)
        assert F.random_sample(torch.tensor([0.0, 9.0]), 0.2, 1.0, 0, 1.0, out=out) is out
        assert out.item() == 1
    with pytest.raises(ValueError):
        F.random_sample(torch.zeros(3), 0.2, 1.0, 0, 1.0, out=torch.empty(1, dtype=torch.int64))


# ---- what every function refuses ----

X = torch.randn(3, 4)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: F.silu([1.0]), TypeError),
        (lambda: F.silu(torch.tensor([1])), TypeError),
        (lambda: F.silu(X, out=torch.empty(3, 5)), ValueError),
        (lambda: F.silu(X, out=torch.empty(3, 4, dtype=torch.float16)), TypeError),
        (lambda: F.silu(X, out=torch.empty(3, 4, device="meta")), TypeError),
        (lambda: F.gelu(X, "quick"), ValueError),
        (lambda: F.geglu(X, X, "quick"), ValueError),
        (lambda: F.geglu(X, torch.randn(4)), ValueError),
        (lambda: F.softmax(X, 2), IndexError),
        (lambda: F.softmax(X, -3), IndexError),
        (lambda: F.swiglu(X, torch.randn(4)), ValueError),
        (lambda: F.swiglu(X, X.double()), TypeError),
        (lambda: F.causal_softmax(torch.randn(4)), ValueError),
        (lambda: F.causal_softmax(torch.randn(4, 3)), ValueError),
        (lambda: F.linear(X, torch.randn(5, 3)), ValueError),
        (lambda: F.linear(X, torch.randn(5, 4), torch.randn(4)), ValueError),
        (lambda: F.linear(X, torch.randn(5, 4).double()), TypeError),
        (lambda: F.rms_norm(X, [3], torch.ones(3)), AssertionError),
        (lambda: F.rms_norm(X, [4], torch.ones(3)), AssertionError),
        (lambda: F.rms_norm(X, [4], torch.ones(3)), ValueError),
        (lambda: F.rms_norm(X, [4], torch.ones(4), eps=-1.0), ValueError),
        (lambda: F.layer_norm(X, [2, 3, 4], torch.ones(2, 3, 4)), ValueError),
        (lambda: F.embedding(torch.tensor([1.0]), X), TypeError),
        (lambda: F.embedding(torch.tensor([1]), torch.ones(4)), ValueError),
        (lambda: F.add_rms_norm(X, torch.randn(3, 5), [4], torch.ones(4)), ValueError),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()  # type: ignore[operator]


def test_messages_name_function_argument_found_and_wanted() -> None:
    with pytest.raises(ValueError, match=r"silu: out has shape \(3, 5\), but \(3, 4\) is wanted"):
        F.silu(X, out=torch.empty(3, 5))
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(3,\), but \(4,\) is wanted"):
        F.rms_norm(X, [4], torch.ones(3))


# A call of each function, all of its arguments given.
CALLS: dict[str, dict[str, object]] = {
    "causal_softmax": {"input": X, "out": torch.empty(3, 4)},
    "embedding": {
        "input": torch.tensor([1]),
        "weight": X,
        "padding_idx": 1,
        "max_norm": 9.0,
        "norm_type": 2.0,
    },
    "linear": {"input": X, "weight": torch.ones(5, 4), "bias": torch.ones(5), "out": torch.empty(3, 5)},
    "random_sample": {
        "logits": torch.zeros(5),
        "random_val": 0.5,
        "topp": 0.5,
        "topk": 2,
        "temperature": 1.0,
        "out": torch.tensor(0),
    },
    "rms_norm": {"input": X, "normalized_shape": [4], "weight": torch.ones(4), "eps": 1e-5, "out": X.clone()},
    "add_rms_norm": {
        "input": X,
        "residual": X,
        "normalized_shape": [4],
        "weight": torch.ones(4),
        "eps": 1e-5,
        "out": (X.clone(), X.clone()),
    },
    "layer_norm": {
        "input": X,
        "normalized_shape": [4],
        "weight": torch.ones(4),
        "bias": torch.ones(4),
        "eps": 1e-5,
        "out": X.clone(),
    },
    "rope": {
        "x": X[:, None],
        "pos_ids": torch.arange(3),
        "sin_table": torch.ones(3, 2),
        "cos_table": torch.ones(3, 2),
        "algo": RopeAlgo.GPT_J,
        "out": torch.empty(3, 1, 4),
    },
    "silu": {"input": X, "out": X.clone()},
    "swiglu": {"input": X, "other": X, "out": X.clone()},
    "geglu": {"input": X, "other": X, "approximate": "tanh", "out": X.clone()},
    "gelu": {"input": X, "approximate": "none", "out": X.clone()},
    "softmax": {"input": X, "dim": 0, "out": X.clone()},
}
OPTIONAL = ("out", "bias", "padding_idx", "max_norm")


@pytest.mark.parametrize("function, argument", [(f, name) for f in CALLS for name in CALLS[f]])
def test_an_argument_of_a_wrong_type_is_refused_by_its_name(function: str, argument: str) -> None:
    getattr(F, function)(**CALLS[function])
    for wrong in (None, "a", [1.5], {}, object(), (X, X, X), X.to_sparse()):
        is_left_out = wrong is None and (
            argument in OPTIONAL or (function, argument) == ("layer_norm", "weight")
        )
        if not is_left_out:
            with pytest.raises((TypeError, ValueError), match=rf"^{function}: .*\b{argument}\b"):
                getattr(F, function)(**{**CALLS[function], argument: wrong})


@pytest.mark.parametrize(
    "function, argument",
    [(f, name) for f in CALLS for name in CALLS[f] if isinstance(CALLS[f][name], Tensor)],
)
def test_a_nested_tensor_is_refused_by_its_name(function: str, argument: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # of torch, that nested tensors may change
        nested = torch.nested.nested_tensor([X, X])
    with pytest.raises(TypeError, match=rf"^{function}: .*\b{argument}\b"):
        getattr(F, function)(**{**CALLS[function], argument: nested})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [Fraction(1, 8), Decimal("0.125"), np.float16(0.125), torch.tensor(1), 2**70])
def test_eps_may_be_any_number_whoever_computes(eps: Any, dtype: torch.dtype) -> None:
    x, weight = random(3, 8, dtype=dtype), random(8, dtype=dtype, seed=1)
    for norm in (F.rms_norm, F.layer_norm):
        assert torch.equal(norm(x, [8], weight, eps=eps), norm(x, [8], weight, eps=float(eps)))
    assert nn.RMSNorm(8, eps).eps == nn.LayerNorm(8, eps).eps == float(eps)


def test_every_function_is_called_with_wrong_types() -> None:
    assert {*CALLS, "RopeAlgo"} == set(F.__all__)


def test_a_normalized_shape_of_one_dimension_may_be_a_number() -> None:
    weight = random(4, seed=1)
    assert torch.equal(F.rms_norm(X, 4, weight), F.rms_norm(X, [4], weight))
    assert torch.equal(F.layer_norm(X, np.int64(4)), F.layer_norm(X, [4]))  # type: ignore[arg-type]
    assert torch.equal(F.softmax(X, np.int64(0)), F.softmax(X, 0))  # type: ignore[arg-type]


def test_a_padding_row_that_weight_does_not_have_is_refused() -> None:
    for padding_idx in (3, -4):
        with pytest.raises(ValueError, match=f"padding_idx {padding_idx} names none of the 3 rows"):
            F.embedding(torch.tensor([1]), X, padding_idx)


@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (8, 1)])
def test_a_norm_refuses_a_weight_that_is_as_long_as_a_row_and_no_row(shape: tuple[int, ...]) -> None:
    x, row, weight = random(3, 8), torch.ones(8), torch.ones(shape)
    with pytest.raises(AssertionError, match=r"^rms_norm: weight has shape .* but \(8,\) is wanted"):
        F.rms_norm(x, [8], weight)
    for arguments in ((weight, row), (row, weight)):
        with pytest.raises(ValueError, match=r"^layer_norm: .* but \(8,\) is wanted"):
            F.layer_norm(x, [8], *arguments)


def test_functions_run_on_tensors_without_memory() -> None:
    """Meta tensors go to the reference, so shapes can be worked out without data."""
    meta = torch.empty(2, 3, device="meta")
    for result in (F.silu(meta), F.softmax(meta), F.rms_norm(meta, [3], torch.ones(3, device="meta"))):
        assert result.shape == (2, 3) and result.is_meta
    assert F.linear(meta, torch.empty(5, 3, device="meta")).shape == (2, 5)
    ids = torch.empty(4, dtype=torch.int64, device="meta")
    assert F.embedding(ids, meta).shape == F.embedding(ids, meta, padding_idx=0).shape == (4, 3)
    heads, table = torch.empty(4, 5, 6, device="meta"), torch.empty(7, 3, device="meta")
    assert F.rope(heads, ids, table, table).shape == heads.shape


def test_gradients_flow_through_every_function_that_has_one() -> None:
    x, weight = random(3, 8).double().requires_grad_(), random(8, seed=1).double().requires_grad_()
    sin, cos = torch.rand(5, 4).double(), torch.rand(5, 4).double()
    for function in (
        F.silu,
        F.gelu,
        F.softmax,
        lambda x: F.rms_norm(x, [8], weight),
        lambda x: F.layer_norm(x, [8], weight, weight),
        lambda x: F.swiglu(x, x.flip(0)),
        lambda x: F.geglu(x, x.flip(0)),
        lambda x: F.causal_softmax(x),
        lambda x: F.rope(x.view(3, 1, 8), torch.arange(3), sin, cos, RopeAlgo.GPT_J),
    ):
        assert torch.autograd.gradcheck(function, (x,))


def test_what_is_written_over_cannot_be_differentiated_through_unnoticed() -> None:
    w = random(3, 8).requires_grad_()
    kept = torch.exp(2 * w)  # which exp's gradient needs
    with torch.no_grad():
        F.silu(kept, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    kept, both = torch.exp(2 * w), torch.empty(3, 8)
    F.add_rms_norm(random(3, 8), random(3, 8), [8], torch.ones(8), out=(kept.detach(), both))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_autocast_changes_no_dtype_whether_a_kernel_computes_or_torch() -> None:
    x, weight = random(3, 8), random(4, 8, seed=1)
    for rows, learned in ((x, False), (random(8, 3).T, False), (x, True)):  # torch computes all but the first
        wanted = F.linear(rows, weight.requires_grad_(learned))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = F.linear(rows, weight)
        assert found.dtype == torch.float32 and torch.equal(found, wanted)


def test_out_with_one_place_for_several_results_is_refused() -> None:
    x, row = random(3, 8), torch.zeros(8)
    for call in (
        lambda: F.silu(x, out=row.expand(3, 8)),
        lambda: F.softmax(x.double(), 0, out=row.double().expand(3, 8)),
        lambda: F.linear(x, torch.eye(8), out=row.expand(3, 8)),
        lambda: F.add_rms_norm(x, x, [8], row, out=(torch.empty(3, 8), row.expand(3, 8))),
    ):
        with pytest.raises(ValueError, match=r"^\w+: out has one place for several results"):
            call()
    assert not row.any()
    with pytest.raises(ValueError, match="^silu: input has one place for several results"):
        F.silu(row.expand(3, 8), inplace=True)
    with pytest.raises(ValueError, match="silu: out has one place .*strides .1, 1.; call clone"):
        F.silu(x[:, :6], out=torch.zeros(8).unfold(0, 6, 1))  # windows that overlap
    lattice = torch.zeros(6).as_strided((2, 2), (3, 2))  # of which no two elements do
    torch.testing.assert_close(F.silu(x[:2, :2], out=lattice), F.silu(x[:2, :2]), check_stride=False)
    none = torch.zeros(1, 0, 8, dtype=torch.float64).expand(3, 0, 8)  # of no results, none share a place
    assert F.silu(torch.zeros(3, 0, 8, dtype=torch.float64), out=none) is none


def test_what_out_was_before_gets_no_gradient() -> None:
    w, x = random(3, 8).requires_grad_(), random(3, 8, seed=1)
    for function in (F.silu, F.softmax, lambda x, out: F.rms_norm(x, [8], torch.ones(8), out=out)):
        before = w * 2
        (before_grad,) = torch.autograd.grad((function(x, out=before) + w).sum(), w)
        assert torch.equal(before_grad, torch.ones(3, 8))
    both = w * 2, w * 3
    normed, total = F.add_rms_norm(x, x, [8], torch.ones(8), out=both)
    (before_grad,) = torch.autograd.grad((normed + total + w).sum(), w)
    assert torch.equal(before_grad, torch.ones(3, 8))
    with pytest.raises(RuntimeError, match="leaf Variable"):  # as torch has it
        F.silu(x, out=w)
    with torch.no_grad():
        assert torch.equal(F.silu(x, out=w), F.silu(x))


def test_silu_in_place_is_differentiated_as_torchs() -> None:
    found, wanted = (random(3, 8).requires_grad_() for _ in range(2))
    F.silu(found * 1, inplace=True).sum().backward()
    torch.nn.functional.silu(wanted * 1, inplace=True).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
def test_what_torch_traces_or_carries_derivatives_through_is_what_torch_computes() -> None:
    x, tangent = random(3, 8), random(3, 8, seed=1)
    traced = torch.jit.trace(F.silu, x)
    torch.testing.assert_close(traced(tangent), torch.nn.functional.silu(tangent))
    torch.testing.assert_close(make_fx(lambda x: F.silu(x))(x)(tangent), torch.nn.functional.silu(tangent))
    with FlopCounterMode(display=False) as counter:
        F.linear(x, tangent)
    assert counter.get_total_flops() == 2 * 3 * 3 * 8
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(F.silu(dual)).tangent
        wanted = torch.autograd.forward_ad.unpack_dual(torch.nn.functional.silu(dual)).tangent
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("shape", [(1,), (3,), (3, 1), (1, 1), (2, 3)])
def test_what_torch_has_yet_to_negate_is_negated(shape: tuple[int, ...]) -> None:
    x = torch.complex(random(*shape), random(*shape, seed=1)).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(F.silu(x), torch.nn.functional.silu(x))


def test_places_that_there_are_not_are_refused_while_torch_only_counts() -> None:
    rope, encoded = nn.RoPE(4, 8), nn.RBELinear(8, 8, block_size=8, num_coefficients=4)
    encoded.columns.fill_(9)
    with FlopCounterMode(display=False):
        with pytest.raises(IndexError, match=r"rope: position -1 is outside \[0, 8\)"):
            rope(random(1, 1, 4), torch.tensor([-1]))
        with pytest.raises(ValueError, match="outside its block"):
            encoded(random(1, 8))


def test_lookups_are_mapped_over_and_exported_as_torchs() -> None:
    layer, ids = nn.Embedding(5, 3), torch.tensor([[0, 4], [2, 2]])
    assert torch.equal(torch.vmap(layer)(ids), layer(ids))
    with pytest.raises(IndexError, match=r"id 5 is outside \[0, 5\)"):
        torch.vmap(layer)(ids + 1)
    exported = torch.export.export(layer, (ids,)).module()
    assert torch.equal(exported(ids.flip(0)), layer(ids.flip(0)))


def test_an_encoded_layer_is_exported_and_mapped_over_as_any() -> None:
    layers, x = [nn.MLPBlock(8, 16) for _ in range(2)], random(3, 8)
    torch.testing.assert_close(torch.export.export(layers[0], (x,)).module()(x), layers[0](x))
    state = torch.func.stack_module_state(layers)  # type: ignore[arg-type]
    found = torch.vmap(lambda *own: torch.func.functional_call(layers[0], own, x))(*state)
    torch.testing.assert_close(found, torch.stack([layer(x) for layer in layers]))


COMPILED = {
    "embedding": (lambda: nn.Embedding(5, 3), lambda: torch.tensor([[0, 4], [2, 2]])),
    "linear": (lambda: nn.Linear(64, 32), lambda: random(3, 64)),
    "rms_norm": (lambda: nn.RMSNorm(64), lambda: random(3, 64)),
    "layer_norm": (lambda: nn.LayerNorm(64), lambda: random(3, 64)),
    "gelu": (nn.GELU, lambda: random(3, 64)),
    "softmax": (nn.Softmax, lambda: random(3, 64)),
    "rope": (lambda: partial(nn.RoPE(64, 8), pos=torch.arange(3)), lambda: random(3, 2, 64)),
    "mlp": (lambda: nn.MLPBlock(64, 128), lambda: random(3, 64)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compiles_a_layer_whole(name: str) -> None:
    make, inputs = COMPILED[name]
    layer, x = make(), inputs()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


POSITIONS, PADDED = nn.PositionalEmbedding(16, 64), nn.Embedding(5, 3, padding_idx=0).requires_grad_()
WEIGHT = torch.ones(64)
OF_ANY_LENGTH = {
    "positions": lambda x: POSITIONS(len(x)),
    "padding": lambda x: PADDED(x.long()),
    "rms_norm": lambda x: F.rms_norm(x, 64, WEIGHT),
    "layer_norm": lambda x: F.layer_norm(x, 64),
    "add_rms_norm": lambda x: F.add_rms_norm(x, x, 64, WEIGHT)[0],
}


@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_what_is_compiled_for_any_length_is_compiled_once(name: str) -> None:
    call, num_compiled = OF_ANY_LENGTH[name], 0

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    compiled = torch.compile(call, backend=count, fullgraph=True, dynamic=True)  # type: ignore[arg-type]
    for length in (2, 5, 9):
        x = random(length, 64).abs().clamp(max=4)
        torch.testing.assert_close(compiled(x), call(x), rtol=1e-5, atol=1e-5)
    assert num_compiled == 1
