"""The kernels for CUDA against the references in float64, at sizes that no tile divides.

TRITON_INTERPRET=1 runs them without a GPU, on fewer sizes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from infinicore import ops
from infinicore.graph import CudaArena, Graph, RecordError
from infinicore.ops import registry
from infinicore.ops.attention_reference import forget_unseen, paged, unfold_keys
from infinicore.ops.registry import OPS, Kernel, Op
from infinicore.ops.triton import FAMILIES
from infinicore.quantization import QuantizedTensor
from infinicore.tiles import PARTS, tile
from infinilm.batch import Stream
from infinilm.config import LlamaConfig
from infinilm.models.llama import LlamaForCausalLM
from infinilm.sampling import SamplingParams
from infinilm.work import Work

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available() and not IS_INTERPRETED
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU and not IS_INTERPRETED, reason="there is no CUDA device here"),
]

# The interpreter cuts bfloat16 off where a GPU rounds it.
DTYPES = (torch.float32, torch.float16) if IS_INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
HALF = DTYPES[-1]
NAMES = list(dict.fromkeys(name for names in FAMILIES.values() for name in names))
# ‖found - wanted‖ / ‖wanted‖
ERRORS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
VOCABULARIES = (8193, 10000, 151936) if HAS_GPU else (8193,)
HEAD_SIZES = (64, 80, 96, 128, 256)


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        from infinicore.ops.triton import attention_alone, attention_warps

        monkeypatch.setattr(registry, "ACCELERATOR_DEVICES", ("cpu",))
        for kernels in attention_alone, attention_warps:
            monkeypatch.setattr(kernels, "num_processors", lambda device: 8)  # so that keys are split


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def kernel_of(op: Op[Any]) -> Kernel:
    return next(kernel for kernel in op.kernels if kernel.name == "triton")


def placed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(placed(arg) if isinstance(arg, tuple) else there(arg) for arg in args)


def there(arg: Any) -> Any:
    tiled = tile(arg) if type(arg) is QuantizedTensor and arg.type in PARTS else arg
    return tiled.to(DEVICE) if isinstance(tiled, Tensor | QuantizedTensor) else tiled


def held(arg: Any) -> Any:
    """As a layer holds weights, which kernels read before the one before them has ended"""
    is_weight = type(arg) is Tensor and arg.is_floating_point() and arg.dim() <= 2 and not arg.requires_grad
    return torch.nn.Parameter(arg, False) if is_weight else arg


def run(op: Op[Any], *args: Any, out: Any = None) -> Any:
    """By the kernel, which accepts it and waits for nothing"""
    args = tuple(map(held, placed(args)))
    with no_waiting():
        result = kernel_of(op).run(out, *args)
    assert result is not None, f"{op.name} was declined"
    return result


class no_waiting:
    def __enter__(self) -> None:
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode("default")


def wanted(op: Op[Any], *args: Any) -> Any:
    """By the reference, in float64"""
    wide = (a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in placed(args))
    return op.reference(*wide)


def assert_near(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    if isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_near(one, other, dtype)
        return
    assert found.shape == wanted.shape
    is_finite = wanted.isfinite()
    assert torch.equal(found.isfinite(), is_finite)
    error = (found.double() - wanted)[is_finite].norm()
    assert error <= ERRORS[dtype] * wanted[is_finite].norm() + 1e-9, error / wanted[is_finite].norm()


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_op_takes_its_own_samples(name: str, dtype: torch.dtype) -> None:
    op, num_taken = OPS[name], 0
    kernel = kernel_of(op)
    for args in map(placed, op.samples(dtype)):
        if kernel.accepts(None, *args):
            with no_waiting():
                found = kernel.run(None, *args)
            assert_same_or_near(op, found, args, dtype)
            num_taken += 1
    assert num_taken > 1


def assert_same_or_near(op: Op[Any], found: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    """What is exact has the same bits. Sums are near those of wider numbers."""
    if op.name == "quantized_linear":  # whose weights are rounded to the dtype, whatever their sums are
        x, weight, bias = args
        exact = x.float(), weight.dequantize(dtype).float(), None if bias is None else bias.float()
        assert_near(found, torch.nn.functional.linear(*exact).double(), dtype)
    elif op.name in ("attention", "linear", "linear_add", "gated_linear"):
        wide = (arg.float() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)
        assert_near(found, op.reference(*wide).double(), dtype)
    elif op.name == "project_heads":  # which writes to its arguments
        assert_near(found, op.reference(*args).double(), dtype)
    else:
        tolerance, expected = op.tolerances[dtype], op.reference(*args)
        torch.testing.assert_close(found, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


# ---- rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 80, 577, 4096, 10000, 16384])
def test_norms_of_rows_of_any_length(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (random(n, size, dtype=dtype) for n in (7, 7, 1))
    args = x, residual.flip(0), weight[0]
    assert_near(run(ops.add_rms_norm, *args, 1e-6), wanted(ops.add_rms_norm, *args, 1e-6), dtype)
    strided = random(3, 2, size + 3, dtype=dtype)[:, 1, 1:-2]
    assert_near(
        run(ops.rms_norm, strided, args[2], 1e-6), wanted(ops.rms_norm, strided, args[2], 1e-6), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_may_lie_side_by_side_with_what_they_gate(dtype: torch.dtype) -> None:
    for size in (1, 577, 1024, 2305):
        gate, up = random(5, 2 * size, dtype=dtype).chunk(2, -1)
        assert_near(run(ops.swiglu, gate, up), wanted(ops.swiglu, gate, up), dtype)
        assert_near(run(ops.geglu, gate, up, "tanh"), wanted(ops.geglu, gate, up, "tanh"), dtype)
        assert_near(run(ops.add_scaled, gate, up, 0.22), wanted(ops.add_scaled, gate, up, 0.22), dtype)
        assert_near(run(ops.silu, up), wanted(ops.silu, up), dtype)
        assert_near(run(ops.softcap, up, 1.5), wanted(ops.softcap, up, 1.5), dtype)
        assert_near(run(ops.scale, up, 59.75), wanted(ops.scale, up, 59.75), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_rope_of_heads_that_lie_in_a_wider_row(size: int, dtype: torch.dtype) -> None:
    tables = random(50, size, dtype=dtype).chunk(2, -1)
    x = random(11, 9 * size, dtype=dtype)[:, : 6 * size].view(11, 6, size)
    positions = torch.randint(50, (11,), generator=torch.Generator().manual_seed(0))
    for is_interleaved in (False, True):
        args = x, positions, *tables, is_interleaved
        assert_near(run(ops.rope, *args), wanted(ops.rope, *args), dtype)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_embedding_of_any_vocabulary(vocabulary: int) -> None:
    weight = random(vocabulary, 96, dtype=HALF)
    ids = torch.tensor([0, vocabulary - 1, 3, 3])
    found = run(ops.embedding, ids, weight)
    assert torch.equal(found, weight[ids.to(DEVICE)])
    assert torch.equal(run(ops.embedding, ids, weight, out=found.float().zero_()), found.float())


# ---- products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_one_row(dtype: torch.dtype) -> None:
    shapes = [(33, 300), (130, 577), (5, 1), (1024, 4096), (70, 14336)]
    shapes += [(vocabulary, 128) for vocabulary in VOCABULARIES]
    for size, length in shapes if HAS_GPU else shapes[:3]:
        x, weight, bias = (random(n, length, dtype=dtype) for n in (1, size, size))
        for b in (None, bias[:, 0]):
            assert_near(run(ops.linear, x, weight, b), wanted(ops.linear, x, weight, b), dtype)


def test_a_row_of_float32_times_a_half_weight_is_exact_in_the_row() -> None:
    for dtype in DTYPES[1:]:
        x, weight = random(1, 300, dtype=torch.float32), random(70, 300, dtype=dtype)
        assert_near(run(ops.linear, x, weight, None), wanted(ops.linear, x, weight, None), torch.float32)


def test_a_product_of_a_row_and_a_weight_that_lie_apart() -> None:
    x = random(400, dtype=HALF)[50:350]
    weight = random(40, 330, dtype=HALF)[:, 7:307]
    assert_near(run(ops.linear, x, weight, None), wanted(ops.linear, x, weight, None), HALF)


# ---- attention ---------------------------------------------------------------------------------------------


def problem(
    dtype: torch.dtype, size: int, num_kv_heads: int, block_size: int, slots: list[int], streams: list[int],
    window: int = 0, group: int = 4,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of attention, where what no token sees is NaN and lies nowhere"""
    num_streams = max(streams) + 1
    room = -(-(max(slots) + 1) // block_size) * block_size
    generator = torch.Generator().manual_seed(size + len(slots))
    k, v = torch.randn(2, num_streams, num_kv_heads, room, size, generator=generator)
    for stream in range(num_streams):
        last = max((slot for s, slot in zip(streams, slots, strict=True) if s == stream), default=-1)
        k[stream, :, last + 1 :], v[stream, :, last + 1 :] = torch.nan, torch.nan
    keys, values, tables = paged(k.to(dtype), v.to(dtype), block_size)
    forget_unseen(tables, streams, slots, window, block_size)
    q = torch.randn(len(slots), num_kv_heads * group, size, generator=generator).to(dtype)
    return placed(
        (q, keys, values, tables.int(), torch.tensor(streams), torch.tensor(slots), size**-0.5, window)
    )


ALONE = [50, 60, 70], [0, 1, 2]
RUNS = [*range(30), *range(20), *range(9)], [0] * 30 + [1] * 20 + [2] * 9
BATCHES: dict[str, Callable[[], tuple[list[int], list[int]]]] = {
    "a token": lambda: ([700], [0]),
    "a token of each": lambda: ([0, 15, 16, 300, 699], [3, 0, 4, 1, 2]),
    "a prompt": lambda: (list(range(150)), [0] * 150),
    "a chunk": lambda: (list(range(200, 345)), [1] * 145),
    "prompts": lambda: ([*range(40), *range(9), *range(70, 140)], [0] * 40 + [2] * 9 + [1] * 70),
    "tokens and a prompt": lambda: ([300, 5, *range(64, 130), 7], [0, 1, *[2] * 66, 3]),
    "guesses": lambda: ([*range(100, 105), *range(20, 25)], [0] * 5 + [1] * 5),
    "backwards": lambda: (list(range(60))[::-1], [0] * 60),
    "tokens apart": lambda: ([3, 500, 40, 220], [0, 0, 1, 0]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_of(batch: str, size: int, dtype: torch.dtype) -> None:
    if IS_INTERPRETED and size != 80:
        pytest.skip("the interpreter is slow")
    slots, streams = BATCHES[batch]()
    for window, block_size in ((0, 16), (40, 64)):
        args = problem(dtype, size, 2, block_size, slots, streams, window)
        assert_near(run(ops.attention, *args), wanted(ops.attention, *args), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_with_a_soft_cap_and_sinks_of(batch: str, size: int, dtype: torch.dtype) -> None:
    if IS_INTERPRETED and (size != 64 or dtype != torch.float32):
        pytest.skip("the interpreter is slow")
    slots, streams = BATCHES[batch]()
    sinks = random(8, dtype=dtype)
    for window, softcap, beside in ((0, 1.5, sinks), (40, 0.0, sinks), (40, 50.0, None)):
        args = *problem(dtype, size, 2, 32, slots, streams, window), softcap, beside
        assert_near(run(ops.attention, *args), wanted(ops.attention, *args), dtype)


@pytest.mark.parametrize("block_size", [128, 256])
def test_a_prompt_is_found_in_large_blocks(block_size: int) -> None:
    slots, streams = list(range(100, 300)), [0] * 200
    args = problem(HALF, 128, 2, block_size, slots, streams)
    assert_near(run(ops.attention, *args), wanted(ops.attention, *args), HALF)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [128, 256])
def test_a_prompt_is_read_where_a_program_has_little_memory(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinicore.ops.triton import attention_runs

    monkeypatch.setattr(attention_runs, "shared_memory", lambda device: 100_000)
    args = problem(dtype, size, 1, 16, list(range(70)), [0] * 70, group=2)
    assert_near(run(ops.attention, *args), wanted(ops.attention, *args), dtype)


def test_a_scale_below_zero_prefers_the_smallest_scores() -> None:
    for slots, streams in ([37, 90], [0, 1]), (list(range(133)), [0] * 133):
        *args, scale, window = problem(HALF, 128, 2, 16, slots, streams)
        args = *args, -scale, window
        assert_near(run(ops.attention, *args), wanted(ops.attention, *args), HALF)


@pytest.mark.parametrize("group", [1, 3, 7, 20])
def test_any_number_of_heads_shares_a_key_head(group: int) -> None:
    for slots, streams in ([37, 90], [0, 1]), (list(range(33)), [0] * 33):
        args = problem(torch.float16, 64, 3, 16, slots, streams, group=group)
        assert_near(run(ops.attention, *args), wanted(ops.attention, *args), torch.float16)


def test_queries_may_be_wider_than_the_pools_and_lie_apart() -> None:
    for slots, streams in ([37, 90], [0, 1]), (list(range(33)), [0] * 33):
        q, *rest = problem(HALF, 64, 2, 16, slots, streams)
        q = torch.cat([q, q], -1)[..., :64].float() * 1.01
        assert_near(run(ops.attention, q, *rest), wanted(ops.attention, q, *rest), torch.float32)


def test_a_long_stream_is_folded_from_its_splits() -> None:
    for slots in ([4095], [5000, 64], [63]):
        args = problem(HALF, 128, 2, 16, slots, list(range(len(slots))))
        assert_near(run(ops.attention, *args), wanted(ops.attention, *args), HALF)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_keys_and_values_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    for size, block_size in ((64, 16), (80, 32), (256, 64)):
        keys, values, tables = paged(*torch.randn(2, 2, 3, 192, size).to(dtype), block_size)
        k, v = torch.randn(2, 4, 3, 2 * size).to(dtype).chunk(2, -1)[0]
        args = keys, values, k, v, tables, torch.tensor([1, 0, 1, 0]), torch.tensor([88, 0, 89, 33])
        expected = ops.store_kv.reference(*args)
        pools = placed((keys, values))
        found = run(ops.store_kv, *pools, *args[2:], out=pools)
        assert found[0] is pools[0] and found[1] is pools[1]
        assert torch.equal(pools[0].cpu(), expected[0]) and torch.equal(pools[1].cpu(), expected[1])


# ---- what goes wrong stays where it is ---------------------------------------------------------------------


def test_nan_in_one_row_leaves_its_neighbours_alone() -> None:
    x, other, weight = random(9, 300, dtype=HALF), random(9, 300, dtype=HALF).flip(0), random(300, dtype=HALF)
    spoilt = x.clone()
    spoilt[4, 7] = torch.nan
    calls: list[tuple[Op[Any], Callable[[Tensor], tuple[Any, ...]]]] = [
        (ops.rms_norm, lambda t: (t, weight, 1e-5)),
        (ops.add_rms_norm, lambda t: (t, other, weight, 1e-5)),
        (ops.silu, lambda t: (t,)),
        (ops.swiglu, lambda t: (other, t)),
    ]
    for op, args in calls:
        found, clean = run(op, *args(spoilt)), run(op, *args(x))
        for one, same in zip(*((t,) if isinstance(t, Tensor) else t for t in (found, clean)), strict=True):
            assert one[4].isnan().any()
            assert torch.equal(torch.cat([one[:4], one[5:]]), torch.cat([same[:4], same[5:]]))
    matrix = random(40, 300, dtype=HALF)
    clean = run(ops.linear, x[:1], matrix, None)
    matrix[4, 7] = torch.nan
    found = run(ops.linear, x[:1], matrix, None)
    assert (
        found[0, 4].isnan()
        and torch.equal(found[0, 5:], clean[0, 5:])
        and torch.equal(found[0, :4], clean[0, :4])
    )


def test_nan_of_one_stream_leaves_the_others_alone() -> None:
    """In the query, the keys or the values of stream 1, of tokens that stand alone and of runs in one tile"""
    for slots, streams in ALONE, RUNS:
        for at in range(3):
            args = problem(HALF, 64, 2, 16, slots, streams)
            clean = run(ops.attention, *args)
            q, keys, values, tables, owners, *_ = args
            if at == 0:
                q[owners == 1] = torch.nan
            else:
                (keys, values)[at - 1][tables[1, 0].item()] = torch.nan
            found = run(ops.attention, *args)
            assert torch.equal(found[owners != 1], clean[owners != 1]) and found[owners == 1].isnan().any()


def test_a_token_does_not_see_what_is_not_finite_in_a_later_one() -> None:
    args = problem(torch.float32, 64, 2, 16, list(range(50)), [0] * 50)
    clean = run(ops.attention, *args)
    values, tables = args[2], args[3]
    values[tables[0, 1].item(), :, 4] = torch.inf  # slot 20
    found = run(ops.attention, *args)
    assert torch.equal(found[:20], clean[:20]) and not found[20:].isfinite().any()


def test_indices_that_are_out_of_range_give_nan_and_store_nothing() -> None:
    weight, ids = random(5, 40, dtype=torch.float32), torch.tensor([4, 5, -1, 0])
    found = run(ops.embedding, ids, weight)
    assert found[1:3].isnan().all() and torch.equal(found[[0, 3]], weight[[4, 0]])
    x, tables = random(3, 2, 8, dtype=torch.float32), random(2, 6, 4, dtype=torch.float32)
    found = run(ops.rope, x, torch.tensor([6, 5, -1]), *tables, False)
    assert found[[0, 2]].isnan().all() and found[1].isfinite().all()
    for slots, streams in ALONE, RUNS:
        args = problem(torch.float32, 64, 2, 16, slots, streams)
        q, keys, values, block_tables, owners, places, *rest = args
        block_tables[1, 0] = len(keys)
        places[-1] = 1 << 20
        found = run(ops.attention, q, keys, values, block_tables, owners, places, *rest)
        assert found[owners == 1].isnan().all() and found[-1].isnan().all()
        assert found[owners == 0].isfinite().all()
        before = keys.clone(), values.clone()
        new = torch.ones(2, 2, 64)
        where = torch.tensor([1, 2]), torch.tensor([3, 1 << 20])
        run(ops.store_kv, keys, values, new, new, block_tables, *where, out=(keys, values))
        for pool, old in zip((keys, values), before, strict=True):
            torch.testing.assert_close(pool, old, rtol=0, atol=0, equal_nan=True)


def test_a_result_goes_straight_to_a_part_of_its_inputs_buffer() -> None:
    """Unless they lie in each other: it is then copied there in the end."""
    from infinicore.ops.triton.tensors import target

    buffer = torch.randn(12, 64, device=DEVICE)
    x, apart, overlapping = buffer[:4], buffer[4:8], buffer[3:7]
    assert target(apart, x, x) is apart
    assert target(overlapping, x, x) is not overlapping


def test_results_may_go_where_the_caller_says() -> None:
    x, weight = random(6, 320, dtype=torch.float32), random(320, dtype=torch.float32)
    expected = run(ops.rms_norm, x, weight, 1e-5)
    for out in (torch.empty_like(x), torch.empty(320, 6, device=DEVICE).t(), x.clone()):
        assert run(ops.rms_norm, x, weight, 1e-5, out=out) is out and torch.equal(out, expected)
    assert torch.equal(run(ops.rms_norm, y := x.clone(), weight, 1e-5, out=y), expected)
    buffer = random(7, 320, dtype=torch.float32)
    overlapping, out = buffer[1:], buffer[:6]
    expected = run(ops.silu, overlapping.clone())
    assert torch.equal(run(ops.silu, overlapping, out=out), expected)
    matrix = random(320, 320, dtype=HALF)
    row = matrix[:1]
    expected = run(ops.linear, row.clone(), matrix.clone(), None)
    assert torch.equal(run(ops.linear, row, matrix, None, out=row), expected)


def test_kernels_decline_what_wants_a_gradient_and_what_is_no_plain_float() -> None:
    x = random(3, 8, dtype=torch.float32)
    for declined in (x.double(), x.requires_grad_(), x.detach()[:0]):
        assert kernel_of(ops.silu).run(None, declined) is None


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter has no room for it")
def test_offsets_beyond_two_to_the_31() -> None:
    weight = torch.empty(140_000, 16384, dtype=HALF, device=DEVICE)
    weight[-1] = random(16384, dtype=HALF)
    assert torch.equal(run(ops.embedding, torch.tensor([139_999]), weight)[0], weight[-1])
    x = random(1, 16384, dtype=HALF)
    found = run(ops.linear, x, weight, None)[0, -1]
    assert_near(found, (x[0].double() * weight[-1].double()).sum(), HALF)
    weight[-2:] = weight[-1]
    assert_near(run(ops.silu, weight)[-1], wanted(ops.silu, weight[-1]), HALF)


def test_pools_hold_what_was_stored_where_attention_reads_it() -> None:
    keys, values, tables = placed(paged(*torch.zeros(2, 1, 2, 64, 64).to(HALF), 16))
    k, v = random(2, 40, 2, 64, dtype=HALF)
    places = torch.zeros(40, dtype=torch.int64, device=DEVICE), torch.arange(40, device=DEVICE)
    run(ops.store_kv, keys, values, k, v, tables, *places, out=(keys, values))
    assert torch.equal(unfold_keys(keys)[tables[0]].transpose(0, 1).flatten(1, 2)[:, :40], k.transpose(0, 1))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("batch", ["a token", "a token of each", "guesses", "tokens apart"])
def test_attention_sees_what_the_kernel_before_it_has_stored(batch: str, size: int) -> None:
    from infinicore.ops.triton.cache import are_latest

    slots, streams = BATCHES[batch]()
    q, keys, values, *rest = problem(HALF, size, 2, 16, slots, streams)
    for _ in range(3 if IS_INTERPRETED else 50):
        k, v = random(2, len(slots), 2, size, dtype=HALF)
        run(ops.store_kv, keys, values, k, v, *rest[:3], out=(keys, values))
        assert are_latest(values, *rest[:3])
        found = run(ops.attention, q, keys, values, *rest)
        assert_near(found, wanted(ops.attention, q, keys, values, *rest), HALF)
        assert not are_latest(values, rest[0], rest[1], rest[2].clone())


# ---- a whole model -----------------------------------------------------------------------------------------


def model(dtype: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=577, hidden_size=192, intermediate_size=400, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype)


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter is slow")
def test_recorded_steps_of_a_model_give_the_tokens_of_the_cpu() -> None:
    prompts = [list(range(5, 75)), [3, 9], [7]]
    made = model(torch.float32)
    expected = made.generate(prompts, 30)
    made.to(DEVICE)
    assert torch.equal(made.generate(prompts, 30).cpu(), expected)
    made.lay_out()
    assert torch.equal(made.generate(prompts, 30).cpu(), expected)


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter is slow")
def test_a_recorded_step_gives_the_logits_of_a_plain_one() -> None:
    made = model(torch.bfloat16).to(DEVICE)
    streams = [Stream(ids, SamplingParams(temperature=0.0)) for ids in (range(1, 70), range(9), [4])]
    runner = made.runner(streams, 40)
    for _ in range(20):
        made.advanced(runner, streams)
    (recording,) = runner.recordings.values()
    work = [Work(stream, 1) for stream in streams]
    plain = made.step(*runner._inputs(work, None))[1]
    runner.run(work)
    found = recording.outcome(3)[1]
    assert (found - plain).norm() <= 0.02 * plain.norm()


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter is slow")
def test_what_waits_for_the_device_cannot_be_recorded() -> None:
    x, arena = random(4, dtype=torch.float32), CudaArena(DEVICE)
    kept: list[Tensor] = []

    def waits() -> None:
        kept.append(x + 1)
        kept[-1].max().item()

    with pytest.raises(RecordError, match="a CUDA graph cannot repeat this"):
        Graph.record(waits, arena)
    graph = Graph.record(lambda: ops.silu(x), arena)
    x.mul_(2)
    assert torch.equal(graph.replay(), ops.silu(x))
