"""Products in CUDA C++ against those in float64, and which tile a product is made of."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from infinicore import ops
from infinicore.float8 import Float8
from infinicore.ops import hopper
from infinicore.ops.hopper import one, rows, tiled
from infinicore.ops.hopper.rows import Tile
from infinicore.ops.samples import random_blocks
from infinicore.ops.triton.beside import ALONE, Beside
from infinicore.quantization import BlockType
from infinicore.tiles import tile

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper.is_there(DEVICE), reason="there is no GPU of compute capability 9.0"),
]
HALVES = (torch.bfloat16, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def problem(num_rows: int, num_outputs: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, a weight as a layer holds it, a bias and a residual"""
    weight = torch.nn.Parameter(random(num_outputs, length, dtype=dtype) * length**-0.5, False)
    return (
        random(num_rows, length, dtype=dtype),
        weight,
        random(num_outputs, dtype=dtype),
        random(num_rows, num_outputs, dtype=dtype),
    )


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return y if residual is None else y + residual.double()


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def assert_near(found: Tensor, expected: Tensor, most: float = 1e-5) -> None:
    error = (found.double() - expected).square().sum() / expected.square().sum()
    assert error < most, f"{error:.1e}"


def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """By the kernel itself, into memory full of NaN"""
    y = torch.full((len(x), len(weight)), float("nan"), dtype=x.dtype, device=DEVICE)
    rows.launch(y, x, weight, bias, residual)
    return y


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("num_rows", (2, 17, 64, 65, 127, 128))
class TestProducts:
    pytestmark = on_hopper

    @pytest.mark.parametrize("size", ((8, 8), (104, 200), (1000, 4096), (4096, 4096), (304, 14336)), ids=str)
    def test_products_of_up_to_128_rows(
        self, num_rows: int, size: tuple[int, int], dtype: torch.dtype
    ) -> None:
        x, weight, bias, residual = problem(num_rows, *size, dtype)
        assert rows.suits(x, weight) and rows.suits(x, weight, is_gated=True)
        for b in (bias, None):
            assert_near(ops.linear(x, weight, b), wanted(x, weight, b))
            assert_near(ops.linear_add(x, weight, b, residual), wanted(x, weight, b, residual))
            assert_near(ops.gated_linear(x, None, 0.0, weight, b), gated(wanted(x, weight, b)))

    @pytest.mark.parametrize("splits", (1, 2, 4))
    def test_tiles_of_any_size(
        self, num_rows: int, splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, weight, bias, residual = problem(num_rows, 600, 520, dtype)
        for size in (64, 80, 144, 256):
            tile = Tile(size, splits, -(-num_rows // 64))
            monkeypatch.setattr(rows, "tile_of", lambda *_, tile=tile: tile)
            found = [run(x, weight, bias, residual) for _ in range(2)]
            assert_near(found[0], wanted(x, weight, bias, residual))
            assert torch.equal(*found)

    def test_programs_with_several_tiles(
        self, num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, weight, bias, _ = problem(num_rows, 1200, 1032, dtype)
        monkeypatch.setattr(rows, "most_tiles", lambda *_: 2)
        monkeypatch.setattr(rows, "tile_of", lambda *_: Tile(96, 1, -(-num_rows // 64)))
        assert_near(run(x, weight, bias), wanted(x, weight, bias))
        assert_near(ops.gated_linear(x, None, 0.0, weight, bias), gated(wanted(x, weight, bias)))


class TestMemory:
    pytestmark = on_hopper

    def test_tensors_at_odd_addresses(self) -> None:
        x, weight, bias, residual = problem(40, 320, 328, torch.bfloat16)
        expected = run(x, weight, bias, residual)
        shifted = [torch.empty(t.numel() + 3, dtype=t.dtype, device=DEVICE)[3:].view(t.shape) for t in (
            x, bias, residual, expected)]  # fmt: skip
        for to, t in zip(shifted, (x, bias, residual), strict=False):
            to.copy_(t)
        rows.launch(shifted[3], shifted[0], weight, *shifted[1:3])
        assert torch.equal(shifted[3], expected)
        apart = random(40, 400)[:, :328].copy_(x)
        assert torch.equal(run(apart, weight, bias, residual), expected)

    def test_one_row_for_all(self) -> None:
        x, weight, bias, residual = problem(40, 320, 328, torch.bfloat16)
        one, other = x[:1].expand(40, -1), residual[:1].expand(40, -1)
        assert torch.equal(run(one, weight, bias, other), run(one.clone(), weight, bias, other.clone()))

    def test_a_thread_that_has_asked_for_nothing_else(self) -> None:
        x, weight, bias, residual = problem(40, 320, 328, torch.bfloat16)
        y, expected = torch.zeros_like(residual), run(x, weight, bias, residual)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(rows.launch, y, x, weight, bias, residual).result()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)

    def test_a_result_may_go_over_what_it_is_added_to(self) -> None:
        x, weight, bias, residual = problem(40, 320, 320, torch.bfloat16)
        expected = run(x, weight, bias, residual)
        assert ops.linear_add(x, weight, bias, residual, out=residual) is residual
        assert torch.equal(residual, expected)

    def test_nothing_beyond_a_result_is_written(self) -> None:
        x, weight, bias, residual = problem(33, 200, 136, torch.bfloat16)
        for is_gated in (False, True):
            around = torch.full((35, 100 if is_gated else 200), 7.0, dtype=x.dtype, device=DEVICE)
            rows.launch(around[1:-1], x, weight, bias, None if is_gated else residual, is_gated)
            assert (around[0] == 7).all() and (around[-1] == 7).all()

    def test_a_row_that_is_no_number_leaves_others_alone(self) -> None:
        for length in (512, 4096):
            x, weight, bias, residual = problem(128, 4096, length, torch.bfloat16)
            expected = run(x, weight, bias, residual)
            x[5, 3], x[70] = float("nan"), float("inf")
            found = run(x, weight, bias, residual)
            others = [m for m in range(128) if m not in (5, 70)]
            assert torch.equal(found[others], expected[others])
            assert found[5].isnan().all() and not found[70].isfinite().any()

    def test_what_lies_otherwise_is_left_to_others(self) -> None:
        x, weight, bias, _ = problem(8, 64, 64, torch.bfloat16)
        for other in (weight.float(), weight[:, :63], weight[:63], random(64, 65)[:, 1:]):
            assert not rows.suits(x[:, : other.shape[1]], other)
        for num_rows in (1, 129):
            assert not rows.suits(random(num_rows, 64), weight)
        assert_near(ops.linear(x, random(64, 65)[:, 1:], bias), wanted(x, random(64, 65)[:, 1:], bias))

    def test_products_are_recorded(self) -> None:
        x, weight, bias, residual = problem(64, 512, 512, torch.bfloat16)
        y, graph = run(x, weight, bias, residual), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows.launch(y, x, weight, bias, residual)
        x.copy_(random(64, 512).mul_(2))
        graph.replay()
        assert_near(y, wanted(x, weight, bias, residual))


# ---- which tile --------------------------------------------------------------------------------------------

H200 = {1: 132, 2: 66, 4: 30}  # tiles at once, by how many programs share one


@pytest.fixture(name="device")
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(rows, "most_tiles", lambda splits, device: H200[splits])
    rows.tile_of.cache_clear()
    yield torch.device("cuda", 7)
    rows.tile_of.cache_clear()


def test_every_product_of_an_8b_layer_keeps_most_processors_busy(device: torch.device) -> None:
    for num_rows in (2, 64, 128):
        for num_outputs, length, is_gated in (
            (6144, 4096, False),
            (4096, 4096, False),
            (4096, 14336, False),
            (14336, 4096, True),
        ):
            tile = rows.tile_of(num_rows, num_outputs, length, is_gated, device)
            num_tiles = -(-num_outputs // rows.outputs_of(tile, is_gated))
            assert num_tiles <= H200[tile.splits] and num_tiles * tile.splits >= 112
            assert tile.groups == (2 if num_rows > 64 else 1)


def test_a_tile_fits_into_shared_memory_with_some_stages(device: torch.device) -> None:
    for num_rows in (2, 128):
        for num_outputs in (8, 1000, 4096, 28672, 200000):
            for length in (8, 64, 128, 576, 4096, 53248):
                for is_gated in (False, True):
                    tile = rows.tile_of(num_rows, num_outputs, length, is_gated, device)
                    assert tile.num_stages >= 4 and tile.shared_bytes <= 227 * 1024
                    assert tile.splits <= max(-(-length // rows.STEP), 1)
                    num_tiles = -(-num_outputs // rows.outputs_of(tile, is_gated))
                    assert tile.splits == 1 or num_tiles <= H200[tile.splits]


@pytest.mark.parametrize("type", one.TYPES, ids=lambda type: type.name)
def test_stages_of_one_row_fit_into_shared_memory_and_no_team_mistakes_their_round(type: BlockType) -> None:
    for length in (256, 4096, 14336, 28672):
        weight = tile(random_blocks(type, 64, length // type.elements_per_block))
        for beside in (ALONE, Beside(is_gated=True), Beside(norm=torch.ones(length))):
            kind = one.kind_of(weight, beside, has_bias=False)
            is_far = kind.stages >= one.TEAMS + one.num_ahead(type)
            assert kind.stages >= one.TEAMS and (is_far or kind.stages % one.TEAMS == 0)
            assert one.shared_bytes(weight, kind.num_tiles, kind.stages) <= one.ROOM


@pytest.mark.parametrize("type", (*one.TYPES, Float8.FP8), ids=lambda type: type.name)
def test_stages_and_sums_of_several_rows_of_tiles_fit_into_shared_memory(type: BlockType | Float8) -> None:
    for num_rows in tiled.WARPS:
        for num_tiles in tiled.tile_counts(num_rows, type):
            plan = tiled.Plan(type, num_tiles, 1, num_rows)
            assert plan.shared_bytes <= 227 * 1024
            assert plan.num_stages >= max(2 * plan.teams, 3) and plan.num_stages % plan.teams == 0
            sums = plan.teams * num_rows * (32 * num_tiles + 4) * 4
            assert sums <= (plan.sum_bytes or plan.num_stages * plan.stage_bytes)


def test_the_instruction_names_every_sum() -> None:
    for size in (64, 144, 256):
        source = rows.multiply_of(size, "bf16")
        assert f"m64n{size}k16.f32.bf16.bf16 " in source and "{%0, %1, " in source
        assert f'"+f"(sums[{size // 2 - 1}])' in source and f"(sums[{size // 2}])" not in source
        assert f"%{size // 2 - 1}}}, %{size // 2}, %{size // 2 + 1}, adds" in source
        assert f"m64n{size}k32.f32.e4m3.e4m3 " in rows.multiply_of(size, "e4m3")


def test_rows_that_lie_over_each_other_are_copied() -> None:
    whole = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert rows.aligned(whole) is whole and rows.is_aligned(whole[:, :8])
    for lying in (whole[:1].expand(4, -1), whole.view(-1).unfold(0, 64, 8)):
        assert not rows.is_aligned(lying) and rows.aligned(lying).is_contiguous()


@pytest.mark.parametrize("current", [0, 7])
def test_a_thread_without_a_context_gets_that_of_the_device(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        bound: list[Any] = []

        def cuCtxGetCurrent(self) -> tuple[int, int]:
            return 0, current

        def cuDeviceGet(self, index: int) -> tuple[int, str]:
            return 0, f"device {index}"

        def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[int, str]:
            return 0, f"context of {device}"

        def cuCtxSetCurrent(self, context: str) -> tuple[int]:
            self.bound.append(context)
            return (0,)

    monkeypatch.setattr(hopper, "driver", Driver())
    hopper.bind_context(torch.device("cuda", 1))
    assert Driver.bound == ([] if current else ["context of device 1"])


def test_a_cpu_has_no_such_kernels() -> None:
    assert not hopper.is_there(torch.device("cpu"))


@pytest.mark.parametrize(
    ("version", "is_enough"), [((0, 13, 0), True), ((0, 11, 8), False), ((1, 13, 0), False), (None, False)]
)
def test_without_a_compiler_for_them_there_are_none(
    version: tuple[int, ...] | None, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nvrtc:
        def nvrtcVersion(self) -> tuple[int, ...]:
            if version is None:
                raise RuntimeError("libnvrtc.so is not there")
            return version

    monkeypatch.setattr(hopper, "nvrtc", Nvrtc())
    assert hopper.has_compiler.__wrapped__() is is_enough
    monkeypatch.setattr(hopper, "nvrtc", None)
    assert not hopper.has_compiler.__wrapped__()
