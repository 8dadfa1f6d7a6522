"""Sampling on a GPU against the references, at any vocabulary; under the interpreter at small ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_triton import (
    DEVICE,
    DTYPES,
    HALF,
    HAS_GPU,
    IS_INTERPRETED,
    _devices,
    kernel_of,
    no_waiting,
    run,
)
from torch import Tensor

from infinicore import ops
from infinicore.graph import CudaArena, Graph
from infinicore.ops.samples import not_finite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU and not IS_INTERPRETED, reason="there is no CUDA device here"),
]
devices = _devices  # a fixture that is used here as well

# Rows of bfloat16 have a kernel of their own on Hopper
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
VOCABULARIES = (8193, 10000, 128256, 151936) if HAS_GPU else (8193,)
SETTINGS = [  # temperature, top_p, min_p, top_k
    (1.0, 1.0, 0.0, 0),
    (0.8, 0.9, 0.0, 50),
    (2.0, 0.3, 0.02, 0),
    (0.5, 1.0, 0.3, 7),
    (0.0, 1.0, 0.0, 3),
    (1.0, 0.7, 1.0, 1),
    (1.3, 0.95, 0.0, 0),
    (5.0, 1.0, 0.0, 0),
    (1.0, 0.5, 0.0, 3000),
    (1e-30, 0.9, 0.0, 0),
]


def rows_of(num_rows: int, size: int, dtype: torch.dtype, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(size + num_rows)
    return (torch.randn(num_rows, size, generator=generator) * scale).to(dtype)


def settings_of(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = random.Random(seed)
    chosen = [SETTINGS[i % len(SETTINGS)] for i in range(num_rows)]
    uniforms = torch.tensor([rng.random() for _ in chosen], dtype=torch.float64)
    return uniforms, torch.tensor([row[:3] for row in chosen]), torch.tensor([row[3] for row in chosen])


def share_before(logits: Tensor, setting: Any, top_k: int, token: int) -> tuple[float, float]:
    """Between which numbers a row draws this token, in exact order; nothing, if it is cut off"""
    temperature, top_p, min_p = setting
    weights = ((logits.double() - logits.max().double()) / temperature).exp()
    weights[weights < min(min_p, 1.0)] = 0
    values, order = weights.sort(descending=True, stable=True)
    values = values[: top_k or len(values)]
    if top_p < 1:
        values = values[: int((values.cumsum(0) < top_p * values.sum()).sum()) + 1]
    ends = values.cumsum(0) / values.sum()
    place = (order[: len(values)] == token).nonzero()
    if not len(place):
        return 2.0, 2.0
    at = int(place)
    return float(ends[at] - values[at] / values.sum()), float(ends[at])


def assert_at_the_edge(logits: Tensor, setting: Any, top_k: int, token: int, uniform: Tensor) -> None:
    """No sum is exact, and two logits may have one weight in float32, where the lower id goes first."""
    begin, end = share_before(logits, setting, top_k, token)
    slack = 1e-6 + end - begin
    assert begin - slack <= float(uniform) <= end + slack, (token, begin, float(uniform), end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("size", VOCABULARIES)
def test_each_row_draws_the_token_of_the_reference(size: int, scale: float, dtype: torch.dtype) -> None:
    num_rows = 40 if HAS_GPU else 10
    logits, (uniforms, settings, top_k) = rows_of(num_rows, size, dtype, scale), settings_of(num_rows)
    found = run(ops.sample, logits, uniforms, settings, top_k).tolist()
    wanted = ops.sample.reference(logits, uniforms, settings, top_k).tolist()
    for row, (token, expected) in enumerate(zip(found, wanted, strict=True)):
        if token != expected:
            assert_at_the_edge(logits[row], settings[row].tolist(), int(top_k[row]), token, uniforms[row])
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= num_rows // 10


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_few_rows_draw_the_tokens_that_they_draw_among_many(scale: float) -> None:
    num_rows = 40 if HAS_GPU else 12
    args = rows_of(num_rows, VOCABULARIES[0], DTYPES[-1], scale), *settings_of(num_rows)
    among_many = run(ops.sample, *args)
    for start in range(0, num_rows, 8):
        few = run(ops.sample, *(t[start : start + 8] for t in args))
        assert torch.equal(few, among_many[start : start + 8])


def test_even_numbers_draw_each_token_as_often_as_it_is_likely() -> None:
    num_rows, logits = 4096 if HAS_GPU else 16, rows_of(1, 53, torch.float32, 2.0)[0]
    uniforms = (torch.arange(num_rows, dtype=torch.float64) + 0.5) / num_rows
    for temperature, top_p, min_p, top_k in SETTINGS[: 4 if HAS_GPU else 2]:
        settings = torch.tensor([[temperature, top_p, min_p]]).expand(num_rows, 3)
        args = logits.expand(num_rows, -1), uniforms, settings, torch.full((num_rows,), top_k)
        counts = run(ops.sample, *args).cpu().bincount(minlength=53)
        shares = [share_before(logits, (temperature, top_p, min_p), top_k, token) for token in range(53)]
        wanted = torch.tensor([end - begin for begin, end in shares]) * num_rows
        assert (counts - wanted).abs().max() <= 1.01


@both_dtypes
def test_equal_logits_stand_by_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(6, 5000, dtype=dtype)
    logits[:, 1::2] = -0.0
    logits[3:, 100:] = -1.0
    uniforms = torch.tensor([0.0, 0.5, 0.9999, 0.5, 0.5, 0.999], dtype=torch.float64)
    settings = torch.tensor([[1.0, 1.0, 0.0]] * 3 + [[1.0, 0.001, 0.0], [1.0, 1.0, 0.5], [1.0, 0.5, 0.5]])
    top_k = torch.tensor([0, 1000, 0, 0, 0, 10])
    found = run(ops.sample, logits, uniforms, settings, top_k)
    assert found.tolist() == ops.sample.reference(logits, uniforms, settings, top_k).tolist()
    assert found.tolist()[:3] == [0, 500, 4999]


@both_dtypes
def test_a_row_that_is_flat_is_searched_as_a_whole(dtype: torch.dtype) -> None:
    """More candidates than are listed"""
    size = 30000 if HAS_GPU else 9000
    logits = rows_of(3, size, dtype, 0.01)
    uniforms = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    settings, top_k = torch.tensor([[1.0, 0.99, 0.0]] * 3), torch.tensor([0, 8900, 0])
    found = run(ops.sample, logits, uniforms, settings, top_k).tolist()
    for row, token in enumerate(found):
        assert_at_the_edge(logits[row], settings[row].tolist(), int(top_k[row]), token, uniforms[row])


@both_dtypes
def test_the_largest_number_draws_one_of_the_least_likely(dtype: torch.dtype) -> None:
    """All weights reach the last level but one: its sum is that of all, and rounding must not part them"""
    logits = torch.rand(12, 9000, generator=torch.Generator().manual_seed(0)) * 13.5
    logits[:, ::2] = 13.5 - logits[:, ::2] / 20
    logits = logits.to(dtype)
    uniforms = torch.full((12,), 1 - 2.0**-53, dtype=torch.float64)
    settings, top_k = torch.tensor([[1.0, 1.0, 0.0]] * 12), torch.zeros(12, dtype=torch.int64)
    found = run(ops.sample, logits, uniforms, settings, top_k).tolist()
    for row, token in enumerate(found):
        assert_at_the_edge(logits[row], settings[row].tolist(), 0, token, uniforms[row])


@both_dtypes
@pytest.mark.parametrize("size", [5003, 5008])
def test_a_row_without_probabilities_gets_no_token_and_leaves_its_neighbours_alone(
    size: int, dtype: torch.dtype
) -> None:
    logits = rows_of(9, size, dtype, 3.0)
    uniforms, settings, top_k = settings_of(9)
    wanted = run(ops.sample, logits, uniforms, settings, top_k)
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf), start=1):
        logits[row, 700] = logits[row + 4, 5002] = bad
    logits[3] = logits[7] = -torch.inf
    settings[8, 0] = torch.nan
    tokens = run(ops.sample, logits, uniforms, settings, top_k)
    assert tokens[[1, 2, 3, 5, 6, 7, 8]].tolist() == [-1] * 7
    assert torch.equal(tokens[[0, 4]], wanted[[0, 4]])


def test_settings_may_be_on_the_cpu_and_rows_lie_apart() -> None:
    logits = rows_of(6, 2 * 3001, torch.float32, 3.0).to(DEVICE)[:, :3001]
    settings = settings_of(6)
    found = kernel_of(ops.sample).run(None, logits, *settings)
    assert found.tolist() == ops.sample.reference(logits.cpu(), *settings).tolist()
    out = torch.empty(6, dtype=torch.int64, device=DEVICE)
    assert kernel_of(ops.sample).run(out, logits, *settings) is out and torch.equal(out, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", VOCABULARIES)
def test_logprobs_of_any_vocabulary(size: int, dtype: torch.dtype) -> None:
    logits = rows_of(5, size, dtype, 3.0)
    tokens = torch.tensor([0, size - 1, 77, -1, 5000])
    for num_top in (0, 1, 20):
        ids, values = run(ops.logprobs, logits, tokens, num_top)
        wanted_ids, wanted = ops.logprobs.reference(logits, tokens, num_top)
        assert torch.equal(ids.cpu(), wanted_ids)
        torch.testing.assert_close(values.cpu(), wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_row_without_probabilities_has_no_logprobs() -> None:
    logits = torch.cat([not_finite(5003, torch.float32), torch.full((1, 5003), -torch.inf)])
    tokens = torch.arange(14) * 11 - 1
    found, wanted = run(ops.logprobs, logits, tokens, 5), ops.logprobs.reference(logits, tokens, 5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
    outside = run(ops.logprobs, logits[2:3], torch.tensor([5003]), 1)
    assert outside[0][0, 0] == -1 and outside[1][0, 0].isnan() and outside[0][0, 1] >= 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", VOCABULARIES)
def test_penalties_and_masks_have_the_bits_of_the_reference(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    history = torch.randint(size, (9000,), generator=generator)
    history[:500] = 3  # counted by many at once
    ends = torch.tensor([[100, 700], [700, 700], [4000, 9000]])
    penalties = torch.tensor([[1.3, 0.5, 0.25], [1.0, 0.5, 0.1], [0.7, -1.0, 0.3]])
    words = torch.randint(-(1 << 31), 1 << 31, (3, (size + 31) // 32), generator=generator).int()
    logits = rows_of(3, size, dtype, 3.0)
    for allowed in (None, words):
        args = logits, history, ends, penalties, allowed
        assert torch.equal(run(ops.adjust_logits, *args).cpu(), ops.adjust_logits.reference(*args))
    wanted = ops.adjust_logits.reference(logits.float(), *args[1:])
    place = logits.float().to(DEVICE)
    found = kernel_of(ops.adjust_logits).run(place, place, *(t.to(DEVICE) for t in args[1:]))
    assert found is place and torch.equal(place.cpu(), wanted)


@both_dtypes
def test_logits_of_any_size_are_drawn_from(dtype: torch.dtype) -> None:
    """Also such as float32 rounds to 0, or whose difference is infinite there"""
    sizes = torch.tensor([1e-40, 1e-30, 1e-3, 1.0, 2.0**20, 2.0**42, 3e38]).clamp(max=torch.finfo(dtype).max)
    row = torch.cat([sizes.flip(0), torch.zeros(1), -sizes, torch.tensor([-torch.inf])]).to(dtype)
    logits = torch.full((16, 8192), -torch.inf, dtype=dtype)
    for i in range(16):  # each logit as the largest of a row
        logits[i, 40 : 56 - i] = row[i:]
    uniforms = torch.full((16,), 0.999, dtype=torch.float64)
    settings, top_k = torch.tensor([[1.0, 1.0, 0.0]] * 16), torch.tensor([0, 1, 2, 3] * 4)
    found = run(ops.sample, logits, uniforms, settings, top_k)
    assert found.tolist() == ops.sample.reference(logits, uniforms, settings, top_k).tolist()


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter's vocabularies are small")
def test_more_equal_logits_than_16_bits_count() -> None:
    logits = torch.zeros(3, 151936, dtype=HALF)
    uniforms = torch.tensor([0.3, 0.6, 0.9999], dtype=torch.float64)
    settings, top_k = torch.tensor([[1.0, 1.0, 0.0]] * 3), torch.tensor([0, 140000, 0])
    found = run(ops.sample, logits, uniforms, settings, top_k)
    assert found.tolist() == ops.sample.reference(logits, uniforms, settings, top_k).tolist()


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter has no graphs")
def test_a_draw_can_be_recorded() -> None:
    logits = rows_of(8, 10000, torch.bfloat16, 3.0).to(DEVICE)
    settings = [t.to(DEVICE) for t in settings_of(8)]
    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    graph = Graph.record(lambda: ops.sample(logits, *settings, out=out), CudaArena(DEVICE))
    for seed in range(3):
        for ours, new in zip(settings, settings_of(8, seed), strict=True):
            ours.copy_(new)
        logits.copy_(logits.flip(1))
        graph.replay()
        assert torch.equal(out, ops.sample(logits, *settings))


def test_nothing_waits_for_the_device() -> None:
    logits = rows_of(3, 5003, torch.float32, 3.0).to(DEVICE)
    settings = [t.to(DEVICE) for t in settings_of(3)]
    with no_waiting():
        assert kernel_of(ops.sample).run(None, logits, *settings) is not None
