"""The kernels that join ops on CUDA against those ops one after the other, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_triton import (  # noqa: F401  fixtures too
    DEVICE,
    DTYPES,
    HALF,
    HAS_GPU,
    HEAD_SIZES,
    IS_INTERPRETED,
    _devices,
    _exact,
    assert_near,
    kernel_of,
    placed,
    problem,
    random,
    run,
    wanted,
)
from torch import Tensor

import infinicore
from infinicore import nn, ops
from infinicore.nn.linear import lay_together, project_gated, project_heads
from infinicore.ops.attention_reference import paged
from infinicore.ops.fused_reference import Where

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU and not IS_INTERPRETED, reason="there is no CUDA device here"),
]

SIZES_OF_HEADS = HEAD_SIZES if HAS_GPU else (10,)
NUM_ROWS = (1, 2, 33, 40, 64, 100, 128) if HAS_GPU else (1, 33)
SIZES = ((33, 300), (130, 577), (64, 256), (4096, 4096)) if HAS_GPU else ((33, 300),)


def product(num_rows: int, size: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, whose rows lie apart, a weight that lies in a wider one, a bias and a residual"""
    x = random(num_rows, length + 8, dtype=dtype)[:, 8:]
    weight = random(size, length + 16, dtype=dtype)[:, :length]
    return x, weight, random(size, dtype=dtype), random(num_rows, size + 3, dtype=dtype)[:, 3:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_product_and_what_it_is_added_to(num_rows: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias, residual = product(num_rows, *size, dtype)
    for b in (bias, None):
        args = x, weight, b, residual
        if kernel_of(ops.linear_add).accepts(None, *placed(args)):
            assert_near(run(ops.linear_add, *args), wanted(ops.linear_add, *args), dtype)
            assert_near(run(ops.linear, *args[:3]), wanted(ops.linear, *args[:3]), dtype)
        else:
            assert num_rows > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_norm_a_product_and_its_gate(num_rows: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias, _ = product(num_rows, 2 * size[0], size[1], dtype)
    norm = random(size[1], dtype=dtype)
    for args in ((x, norm, 1e-5, weight, bias), (x, None, 0.0, weight, None)):
        if kernel_of(ops.gated_linear).accepts(None, *placed(args)):
            assert_near(run(ops.gated_linear, *args), wanted(ops.gated_linear, *args), dtype)
        else:
            assert num_rows > 1


def heads_problem(
    num_tokens: int, size: int, dtype: torch.dtype, is_interleaved: bool, block_size: int = 16
) -> Where:
    """Angles, pools of two heads for three streams, and where tokens go, no two to one slot"""
    keys, values, tables = paged(*torch.zeros(2, 3, 2, 192, size).to(dtype), block_size)
    order = torch.randperm(3 * 192, generator=torch.Generator().manual_seed(0))[:num_tokens]
    tables_of_angles = random(50, size, dtype=dtype).chunk(2, -1)
    where = torch.arange(num_tokens) % 50, *tables_of_angles, is_interleaved, keys, values
    return Where(*placed((*where, tables.int(), order // 192, order % 192)))


def assert_stores(op: Any, args: tuple[Any, ...], where: Where, dtype: torch.dtype) -> None:
    """The queries of the reference, and what it leaves in the pools"""
    wide = Where(*(t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in where))
    expected = op.reference(*(t.double() if isinstance(t, Tensor) else t for t in placed(args)), *wide)
    assert_near(run(op, *args, *where), expected, dtype)
    for found, stored in ((where.keys, wide.keys), (where.values, wide.values)):
        assert stored.any()
        assert_near(found, stored, dtype)
        assert torch.equal(found == 0, stored == 0)  # nothing went anywhere else


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES_OF_HEADS)
def test_heads_are_rotated_and_stored(size: int, dtype: torch.dtype) -> None:
    for num_tokens, block_size in ((1, 16), (37, 64)):
        heads = random(num_tokens, 10 * size, dtype=dtype).view(num_tokens, 10, size).split((6, 2, 2), 1)
        for is_interleaved in (False, True):
            where = heads_problem(num_tokens, size, dtype, is_interleaved, block_size)
            assert_stores(ops.store_heads, heads, where, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES_OF_HEADS)
def test_heads_of_one_state_are_projected_rotated_and_stored(size: int, dtype: torch.dtype) -> None:
    for length in (96, 577) if HAS_GPU else (96,):
        x, weight, bias, _ = product(1, 10 * size, length, dtype)
        for is_interleaved, b in ((False, None), (True, bias)):
            where = heads_problem(1, size, dtype, is_interleaved)
            args = x, random(length, dtype=dtype), 1e-5, weight, b
            assert_stores(ops.project_heads, args, where, dtype)


def test_nan_in_one_row_of_a_product_leaves_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infinicore, "deterministic", True)
    x, weight, bias, residual = product(40, 70, 300, HALF)
    spoilt = x.clone()
    spoilt[4, 7] = torch.nan
    both = torch.cat([weight, weight.flip(0)])
    for op, rest in (
        (ops.linear_add, (weight, bias, residual)),
        (ops.gated_linear, (random(300, dtype=HALF), 1e-5, both, None)),
    ):
        found, clean = run(op, spoilt, *rest), run(op, x, *rest)
        assert found[4].isnan().all()
        assert torch.equal(torch.cat([found[:4], found[5:]]), torch.cat([clean[:4], clean[5:]]))


def test_places_that_do_not_exist_are_not_stored_to() -> None:
    heads = random(3, 10, 64, dtype=HALF).split((6, 2, 2), 1)
    where = heads_problem(3, 64, HALF, False)
    rows, _, _, _, keys, values, tables, streams, slots = where
    rows[0], streams[1], slots[2], tables[streams[0], :] = 50, 3, 1 << 20, len(keys)
    found = run(ops.store_heads, *heads, *where)
    assert found[0].isnan().all() and found[1:].isfinite().all()
    assert not keys.any() and not values.any()


def test_a_result_may_go_over_what_it_is_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_rows in (1, 40):
        monkeypatch.setattr(infinicore, "deterministic", num_rows > 1)
        x, weight, bias, residual = product(num_rows, 320, 320, HALF)
        residual = residual.contiguous()
        expected = run(ops.linear_add, x, weight, bias, residual)
        for out in (torch.empty_like(residual), residual):
            assert run(ops.linear_add, x, weight, bias, residual, out=out) is out
            assert torch.equal(out, expected)


@pytest.mark.skipif(not HAS_GPU, reason="nothing overlaps in the interpreter")
def test_a_weight_that_a_kernel_is_still_writing_is_waited_for() -> None:
    half, norm = random(8192, 4096, dtype=HALF).to(DEVICE), random(4096, dtype=HALF).to(DEVICE)
    whole = half + half
    for num_rows in (1, 40):
        x = random(num_rows, 4096, dtype=HALF).to(DEVICE)
        for _ in range(10):
            assert torch.equal(ops.linear(x, ops.add(half, half), None), ops.linear(x, whole, None))
            found = ops.gated_linear(x, ops.add(norm, norm), 1e-5, ops.add(half, half), None)
            assert torch.equal(found, ops.gated_linear(x, norm + norm, 1e-5, whole, None))


def test_layers_that_lie_together_give_what_they_give_apart() -> None:
    def layers(*sizes: int) -> list[nn.Linear]:
        torch.manual_seed(0)
        return [nn.Linear(96, size, dtype=HALF, device=DEVICE) for size in sizes]

    norm = nn.RMSNorm(96, dtype=HALF, device=DEVICE)
    gates, heads = layers(40, 40), layers(6 * 16, 2 * 16, 2 * 16)

    def gated(x: Tensor) -> Tensor:
        return torch.cat([project_gated(x, *gates, norm, name) for name in ("silu", "gelu_tanh")])

    for num_rows in (1, 3):
        x = random(num_rows, 96, dtype=HALF)
        where = heads_problem(num_rows, 16, HALF, False)
        apart = gated(x), project_heads(x, heads, norm, where), where.keys.clone()
        lay_together(*gates), lay_together(*heads)
        where.keys.zero_()
        joined = gated(x), project_heads(x, heads, norm, where), where.keys
        assert_near(joined, tuple(t.double() for t in apart), HALF)


# ---- the same bits in any company --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_product_is_right_and_has_the_same_bits_in_any_company(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infinicore, "deterministic", True)
    size, length = (1030, 4096) if HAS_GPU else (40, 100)
    x, weight, bias, residual = product(300 if HAS_GPU else 70, 2 * size, length, dtype)
    norm = random(length, dtype=dtype)
    calls: list[tuple[Any, Any]] = [
        (ops.linear, lambda rows: (x[rows], weight, bias)),
        (ops.linear_add, lambda rows: (x[rows], weight, bias, residual[rows])),
        (ops.gated_linear, lambda rows: (x[rows], norm, 1e-5, weight, bias)),
    ]
    for op, args in calls:
        together = run(op, *args(slice(None)))
        assert_near(together, wanted(op, *args(slice(None))), dtype)
        for rows in (slice(0, 1), slice(68, 69), slice(3, 5), slice(20, 67), slice(0, 256)):
            assert torch.equal(run(op, *args(rows)), together[rows]), (op.name, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_attends_with_the_same_bits_in_any_company(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infinicore, "deterministic", True)
    num_tokens = 700 if HAS_GPU else 30
    q, keys, values, tables, streams, slots, *rest = problem(
        dtype, 64, 2, 16, list(range(num_tokens)), [0] * num_tokens
    )
    together = run(ops.attention, q, keys, values, tables, streams, slots, *rest)
    for part in (slice(0, 1), slice(27, 28), slice(14, 29), slice(0, 5)):
        some = q[part], keys, values, tables, streams[part], slots[part]
        assert torch.equal(run(ops.attention, *some, *rest), together[part])
