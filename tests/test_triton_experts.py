"""Mixtures of experts on a GPU: few tokens by one kernel over their pairs, others product by product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_triton import DEVICE, HAS_GPU, _devices, _exact, kernel_of, pytestmark  # noqa: F401  fixtures too
from torch import Tensor

import infinicore
from infinicore import nn, ops
from infinicore.graph import CudaArena, Graph
from infinicore.ops.samples import random_blocks
from infinicore.quantization import BlockType
from infinicore.tiles import tile

NUM_EXPERTS, NUM_CHOSEN = 8, 3
NO_BIASES = (None, None, None)
PLAIN = ("softmax", None, (1, 1))  # by logits alone


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def mixture(hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    made = (
        random(NUM_EXPERTS * rows, length, seed=i) * length**-0.5 for i, (rows, length) in enumerate(sizes)
    )
    return tuple(weight.to(dtype) for weight in made)


def choice(num_tokens: int) -> tuple[Tensor, Tensor]:
    return ops.route(random(num_tokens, NUM_EXPERTS, seed=7), NUM_CHOSEN, True, *PLAIN)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def by_kernel(*args: Any) -> Tensor:
    found: Tensor | None = kernel_of(ops.experts).run(None, *args)
    assert found is not None, "declined"
    return found


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_experts_of_few_tokens_are_those_of_the_reference(num_tokens: int, activation: str) -> None:
    weights = mixture(70, 45)
    x = 3 * random(num_tokens, 75, seed=5)[:, 2:72]
    for biases in (NO_BIASES, tuple(random(len(weight), seed=9) for weight in weights)):
        args = x, *choice(num_tokens), weights, biases, activation
        assert error(by_kernel(*args), ops.experts.reference(*args)) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16])
def test_half_precision_is_near_float32(dtype: torch.dtype) -> None:
    weights, x = mixture(256, 192, dtype), random(5, 256, seed=5, dtype=dtype)
    ids, shares = choice(5)
    wide = tuple(weight.float() for weight in weights)
    wanted = ops.experts.reference(x.float(), ids, shares, wide, NO_BIASES, "silu")
    assert error(by_kernel(x, ids, shares, weights, NO_BIASES, "silu"), wanted) < 1.2e-2


def test_an_expert_that_does_not_exist_makes_nan_of_its_token_alone() -> None:
    weights, x = mixture(64, 96), random(4, 64, seed=5)
    ids, shares = choice(4)
    wanted = by_kernel(x, ids, shares, weights, NO_BIASES, "silu")
    ids[2, 1] = NUM_EXPERTS
    found = by_kernel(x, ids, shares, weights, NO_BIASES, "silu")
    assert found[2].isnan().all() and torch.equal(found[[0, 1, 3]], wanted[[0, 1, 3]])


def test_a_token_has_the_same_bits_in_any_company_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(infinicore, "deterministic", True)
    weights, x = mixture(16, 8), random(45, 16, seed=5)
    ids, shares = choice(45)  # more than are few
    together = by_kernel(x, ids, shares, weights, NO_BIASES, "silu")
    for part in (slice(0, 1), slice(31, 33)):
        few = by_kernel(x[part], ids[part], shares[part], weights, NO_BIASES, "silu")
        assert torch.equal(few, together[part])


def test_routes_are_those_of_the_reference_with_nan_and_equals_among_them() -> None:
    logits = random(9, 37, seed=3).round()
    logits[4, 20], logits[5, 3], logits[6, :] = torch.nan, torch.inf, -torch.inf
    logits[7, ::2] = -0.0
    for normalizes in (False, True):
        check_routes(logits, 6, normalizes, *PLAIN)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routes_with_a_bias_and_in_groups_are_those_of_the_reference(scoring: str) -> None:
    logits, bias = random(7, 40, seed=3), random(40, seed=4)
    logits[4, 20], logits[5, 3], logits[6, :] = torch.nan, torch.inf, -torch.inf
    for added, groups in ((None, (5, 2)), (bias, (1, 1)), (bias, (5, 2)), (torch.ones_like(bias), (4, 3))):
        for normalizes in (False, True):
            check_routes(logits, 6, normalizes, scoring, added, groups)


def check_routes(*args: Any) -> None:
    found, wanted = kernel_of(ops.route).run(None, *args), ops.route.reference(*args)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], equal_nan=True, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_many_tokens_and_weights_in_tiles_go_through_products_expert_by_expert() -> None:
    for num_tokens in (3, 200):
        blocks = [random_blocks(BlockType.Q8_0, NUM_EXPERTS * rows, 2) for rows in (64, 64, 64)]
        x, (ids, shares) = 0.1 * random(num_tokens, 64, seed=5), choice(num_tokens)
        dense = tuple(weight.dequantize().to(DEVICE) for weight in blocks)
        wanted = ops.experts.reference(x, ids, shares, dense, NO_BIASES, "silu")
        for weights in (dense, tuple(tile(weight).to(DEVICE) for weight in blocks)):
            assert error(ops.experts(x, ids, shares, weights, NO_BIASES, "silu"), wanted) < 1e-3


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_a_recording_follows_tokens_that_choose_other_experts() -> None:
    layer, router = nn.Experts(NUM_EXPERTS, 64, 96).to(DEVICE), random(NUM_EXPERTS, 64, seed=2)
    x = random(4, 64)

    def step() -> Tensor:
        return layer(x, *ops.route(torch.nn.functional.linear(x, router), NUM_CHOSEN, True, *PLAIN))  # type: ignore[no-any-return]

    graph = Graph.record(step, CudaArena(DEVICE))
    for seed in (20, 21):
        x.copy_(random(4, 64, seed=seed))
        assert torch.equal(graph.replay(), step())
