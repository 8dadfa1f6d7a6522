"""Rows of logits: what is drawn from them, how likely it was, and what tokens before them make of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from timeit import repeat

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

import infinicore
from infinicore import ops
from infinicore.nn import functional as F
from infinicore.ops.samples import not_finite
from infinicore.ops.sampling_reference import largest

VOCABULARY = 50_257  # a multiple of nothing


def seeded(*shape: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale


def cut_softmax(logits: Tensor, temperature: float, top_p: float, min_p: float, top_k: int) -> Tensor:
    """The probabilities of all tokens once min-p, then top-k, then top-p have taken theirs away"""
    p, order = torch.softmax(logits.double() / temperature, -1).sort(descending=True, stable=True)
    p[p < min_p * p[0]] = 0
    p[top_k or len(p) :] = 0
    p /= p.sum()
    p[p.cumsum(0) - p >= top_p] = 0
    return torch.zeros_like(p).index_put((order,), p / p.sum())


@pytest.mark.parametrize(
    "temperature, top_p, min_p, top_k",
    [
        (1.0, 1.0, 0.0, 0),
        (0.7, 1.0, 0.0, 5),
        (1.5, 0.8, 0.0, 0),
        (2.0, 1.0, 0.1, 0),
        (1.3, 0.7, 0.05, 12),
    ],
)
def test_even_numbers_draw_each_token_as_often_as_the_cut_softmax_says(
    temperature: float, top_p: float, min_p: float, top_k: int, level: str
) -> None:
    num_rows, logits = 4096, seeded(53, scale=2.0)
    uniforms = (torch.arange(num_rows, dtype=torch.float64) + 0.5) / num_rows
    settings = torch.tensor([[temperature, top_p, min_p]]).expand(num_rows, 3)
    tokens = ops.sample(logits.expand(num_rows, -1), uniforms, settings, torch.full((num_rows,), top_k))
    wanted = cut_softmax(logits, temperature, top_p, min_p, top_k) * num_rows
    assert (tokens.bincount(minlength=53) - wanted).abs().max() <= 1.01
    assert bool((wanted[tokens] > 0).all())


def test_a_row_is_drawn_as_random_sample_draws_it(level: str) -> None:
    logits = seeded(4, VOCABULARY)
    uniforms = torch.tensor([0.1, 0.5, 0.9, 0.999], dtype=torch.float64)
    settings = torch.tensor([[1.0, 1.0, 0.0], [0.7, 0.9, 0.0], [1.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    top_k = torch.tensor([0, 40, 0, 0])
    wanted = [
        int(ops.random_sample(row, uniform, top_p, k, temperature))
        for row, uniform, (temperature, top_p, _), k in zip(
            logits, uniforms.tolist(), settings.tolist(), top_k.tolist(), strict=True
        )
    ]
    assert ops.sample(logits, uniforms, settings, top_k).tolist() == wanted


@pytest.mark.parametrize("scale", [0.02, 2.0, 12.0, 300.0], ids=["flat", "usual", "steep", "with gaps"])
def test_rows_of_many_pieces_are_drawn_as_the_reference_draws_them(scale: float, level: str) -> None:
    cuts = [(1.0, 0.0, 0), (0.95, 0.0, 0), (1.0, 0.0, 40), (0.5, 0.001, 3000), (0.3, 0.0, 2)]
    logits = seeded(len(cuts), VOCABULARY, scale=scale)
    settings = torch.tensor([[1.3, top_p, min_p] for top_p, min_p, _ in cuts])
    top_k = torch.tensor([top_k for *_, top_k in cuts])
    for uniform in (0.02, 0.4, 0.77, 0.9999):
        given = logits, torch.full((len(cuts),), uniform, dtype=torch.float64), settings, top_k
        assert torch.equal(ops.sample(*given), ops.sample.reference(*given))


def test_a_row_without_probabilities_gets_no_token_and_leaves_its_neighbours_alone(level: str) -> None:
    logits = seeded(9, 1003)
    uniforms = torch.linspace(0.05, 0.95, 9, dtype=torch.float64)
    settings = torch.tensor([[1.0, 0.95, 0.01]]).repeat(9, 1)
    settings[::2, 0] = 0  # greedy and drawn rows alike
    top_k = torch.zeros(9, dtype=torch.int64)
    wanted = ops.sample(logits, uniforms, settings, top_k)
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf), start=1):
        logits[row, 700] = logits[row + 4, 1002] = bad
    logits[3] = logits[7] = -torch.inf
    settings[8, 0] = torch.nan
    spoilt = [1, 2, 3, 5, 6, 7, 8]
    tokens = ops.sample(logits, uniforms, settings, top_k)
    assert tokens[spoilt].tolist() == [-1] * 7
    assert torch.equal(tokens[[0, 4]], wanted[[0, 4]])


def test_only_temperatures_that_give_weights_reach_the_kernel() -> None:
    """Others would be exponentials above 1, which have no bucket among the falling weights."""
    logits = seeded(1000)
    for temperature in (-1.0, torch.nan, torch.inf, 1e300):
        assert ops.random_sample.pick(logits, 0.5, 1.0, 0, temperature) is None
    assert ops.random_sample.pick(logits, 0.5, 1.0, 0, 1e30) is not None


@pytest.mark.parametrize("temperature, min_p", [(0.02, 0.0), (1.0, 0.3)], ids=["low temperature", "min_p"])
def test_tokens_that_cannot_be_drawn_are_not_put_in_order(temperature: float, min_p: float) -> None:
    """Which are nearly all, where fewer have a weight than top_k asks for"""
    few, many = (partial(draw_of_40, seeded(151_936), *cut) for cut in ((temperature, min_p), (1.0, 0.0)))
    assert min(repeat(few, number=1)) < 5 * min(repeat(many, number=1))


def draw_of_40(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    settings = torch.tensor([[temperature, 1.0, min_p]])
    return ops.sample(logits[None], torch.tensor([0.9], dtype=torch.float64), settings, torch.tensor([40]))


def draw(logits: Tensor) -> Tensor:
    settings = torch.tensor([[0.9, 0.95, 0.01]]).repeat(len(logits), 1)
    numbers = torch.full((len(logits),), 0.77, dtype=torch.float64)
    return ops.sample(logits, numbers, settings, torch.full((len(logits),), 100))


def likelihoods(logits: Tensor) -> Tensor:
    ids, values = ops.logprobs(logits, torch.full((len(logits),), 5), 20)
    return torch.cat([ids.double(), values.double()], 1)


def after_penalties(logits: Tensor) -> Tensor:
    history = torch.arange(40).repeat(len(logits)) * 7
    ends = torch.arange(1, len(logits) + 1)[:, None] * 40 - torch.tensor([[10, 0]])
    penalties = torch.tensor([[1.2, 0.5, 0.3]]).repeat(len(logits), 1)
    return ops.adjust_logits(logits, history, ends, penalties, None)


@pytest.mark.parametrize("function", [draw, likelihoods, after_penalties])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_on_any_number_of_threads(
    function: Callable[[Tensor], Tensor], level: str, keep_threads: None
) -> None:
    logits = seeded(5, VOCABULARY)
    infinicore.set_num_threads(1)
    alone = torch.cat([function(row[None]) for row in logits])
    for num_threads in (1, 2, 3):
        infinicore.set_num_threads(num_threads)
        assert torch.equal(function(logits), alone)


def test_logprobs_are_those_of_float64_to_a_millionth(level: str) -> None:
    logits = torch.stack(
        [
            seeded(VOCABULARY),
            seeded(VOCABULARY, scale=30.0),
            seeded(VOCABULARY, scale=0.01) + 1000,
            torch.zeros(VOCABULARY),
            torch.full((VOCABULARY,), -12.0).index_fill(0, torch.tensor([9]), 0.0),
        ]
    )
    tokens = torch.tensor([0, 1, 2, 3, 9])
    ids, values = ops.logprobs(logits, tokens, 50)
    exact = torch.log_softmax(logits.double(), -1)
    ids = torch.cat([tokens[:, None], ids[:, 1:]], 1)
    torch.testing.assert_close(values.double(), exact.gather(1, ids), rtol=1e-6, atol=1e-6)


def test_ranks_count_larger_logits_and_equal_ones_stand_by_id(level: str) -> None:
    logits = torch.zeros(1, 1003)
    logits[0, [900, 20, 1002]] = 2.0
    ids, _ = ops.logprobs(logits, torch.tensor([500]), 5)
    assert ids.tolist() == [[4, 20, 900, 1002, 0, 1]]
    ids, values = ops.logprobs(logits, torch.tensor([1002]), 0)
    assert ids.tolist() == [[1]] and values.shape == (1, 1)


@pytest.mark.parametrize("token", [-2, 7, 1 << 40])
def test_a_token_outside_the_vocabulary_has_no_logprob(token: int) -> None:
    for dtype in (torch.float32, torch.float64):  # the kernel, and the reference
        with pytest.raises(IndexError, match=rf"logprobs: token {token} \(element 1\) is outside \[0, 7\)"):
            ops.logprobs(torch.zeros(2, 7, dtype=dtype), torch.tensor([3, token]), 2)
    with pytest.raises(ValueError, match="num_top must be from 0 to 7, but is 8"):
        ops.logprobs(torch.zeros(2, 7), torch.tensor([3, 3]), 8)


def test_repetition_is_punished_as_transformers_does(level: str) -> None:
    logits, history = seeded(1, 1003), torch.tensor([5, 9, 5, 1002, 0, 9])
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(history[None], logits.clone())
    penalties = torch.tensor([[1.7, 0.0, 0.0]])
    for prompt_end in (0, 3, 6):
        ends = torch.tensor([[prompt_end, 6]])
        assert torch.equal(ops.adjust_logits(logits, history, ends, penalties, None), wanted)


def test_presence_and_frequency_count_what_was_drawn_after_the_prompt_of_its_own_row(level: str) -> None:
    #                       row 0: prompt 4 4, drawn 4 2 2   row 1: prompt 2   row 2: drawn 0
    history = torch.tensor([4, 4, 4, 2, 2, 2, 0, 99])  # the last is of no row
    ends = torch.tensor([[2, 5], [6, 6], [6, 7]])
    penalties = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.5, 0.25], [1.0, 0.0, -2.0]])
    adjusted = ops.adjust_logits(torch.zeros(3, 5), history, ends, penalties, None)
    assert adjusted.tolist() == [[0, 0, -1.0, 0, -0.75], [0] * 5, [2.0, 0, 0, 0, 0]]


@pytest.mark.parametrize("size", [31, 32, 33, 64, 65, 1003])
def test_the_bits_of_a_mask_are_those_of_their_tokens_at_the_edges_of_words(size: int, level: str) -> None:
    kept = sorted({0, 31, 32, 63, 64, size - 1} & set(range(size)))
    words = torch.zeros(2, (size + 31) // 32, dtype=torch.int64)
    for token in kept:
        words[0, token // 32] |= 1 << (token % 32)
    words[1] = 2**32 - 1
    allowed = (words - (words >> 31) * 2**32).int()
    logits, nothing = seeded(2, size), torch.empty(0, dtype=torch.int64)
    ends, penalties = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 3)
    adjusted = ops.adjust_logits(logits, nothing, ends, penalties, allowed)
    assert (adjusted[0] > -torch.inf).nonzero().flatten().tolist() == kept
    assert torch.equal(adjusted[0, kept], logits[0, kept]) and torch.equal(adjusted[1], logits[1])


def test_logits_may_be_adjusted_in_place(level: str) -> None:
    history, ends = torch.tensor([3, 3, 8]), torch.tensor([[1, 2], [2, 3]])
    penalties, allowed = torch.tensor([[1.5, 0.1, 0.2], [0.5, 0.0, 1.0]]), torch.tensor([[-2], [255]]).int()
    logits = seeded(2, 20)
    wanted = ops.adjust_logits(logits, history, ends, penalties, allowed)
    assert ops.adjust_logits.pick(logits, history, ends, penalties, allowed, out=logits) is not None
    ops.adjust_logits(logits, history, ends, penalties, allowed, out=logits)
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "reference"])
@pytest.mark.parametrize(
    "history, ends, message",
    [
        ([1, 20, 3], [[0, 1], [2, 3]], r"token 20 \(element 1\) is outside \[0, 20\)"),
        ([1, 2, -1], [[0, 1], [2, 3]], r"token -1 \(element 2\) is outside \[0, 20\)"),
        ([1, 2, 3], [[0, 1], [2, 4]], r"end 4 \(element 3\)"),
        ([1, 2, 3], [[0, 2], [1, 3]], r"end 1 \(element 2\)"),
        ([1, 2, 3], [[-1, 2], [2, 3]], r"end -1 \(element 0\)"),
    ],
)
def test_a_history_that_does_not_fit_is_refused_before_anything_is_written(
    history: list[int], ends: list[list[int]], message: str, dtype: torch.dtype
) -> None:
    out = torch.full((2, 20), 7.0)
    with pytest.raises(IndexError, match=message):
        ops.adjust_logits(
            torch.zeros(2, 20, dtype=dtype),
            torch.tensor(history),
            torch.tensor(ends),
            torch.full((2, 3), 2.0),
            None,
            out=out,
        )
    assert bool((out == 7).all())


def test_the_largest_logits_are_what_a_temperature_of_zero_draws() -> None:
    spoilt = torch.cat([not_finite(133, torch.float32), torch.full((1, 133), -torch.inf)])
    for logits in (spoilt, torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))):
        rows = len(logits)
        greedy = torch.zeros(rows).double(), torch.tensor([[0.0, 1.0, 0.0]] * rows), torch.zeros(rows).long()
        assert torch.equal(largest(logits), ops.sample.reference(logits, *greedy))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1e-308, 1e-50, 1e-45, 1e-40, 1e-38])
def test_a_temperature_too_low_to_divide_by_takes_the_largest_logit(
    temperature: float, dtype: torch.dtype, level: str
) -> None:
    logits = torch.linspace(1, 3, 100).to(dtype)
    for flushes in (False, True):
        torch.set_flush_denormal(flushes)
        try:
            drawn = [int(F.random_sample(logits, u, 1.0, 0, temperature)) for u in (0.0, 0.5, 0.99)]
        finally:
            torch.set_flush_denormal(False)
        assert drawn == [99, 99, 99]
