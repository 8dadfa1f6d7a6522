"""Products of 2 to 128 rows of 16 bits, or of float8, in little more time than their weight takes to be read
(rows.cu)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinicore.ops import hopper

MOST_ROWS = 128
LARGEST_TILE = 256
STEP = 64  # columns of a stage
ROOM = 226 * 1024  # bytes of a program's stages
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
PART = 500  # what a part of a sum costs, in rows of a weight times steps


class Tile(NamedTuple):
    """Rows of the weight that a program has, programs that share its columns, and groups of 64 rows of x"""

    size: int
    splits: int
    groups: int

    @property
    def num_threads(self) -> int:
        return 128 * self.groups + 64

    @property
    def stage_bytes(self) -> int:
        return (self.size + 64 * self.groups) * STEP * 2

    @property
    def num_stages(self) -> int:
        return ROOM // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.num_stages * (self.stage_bytes + 16)


class After(NamedTuple):
    """What comes after a product: silu(gate) * up, a bias, a residual; scales come first"""

    gates: bool = False
    has_bias: bool = False
    adds: bool = False
    scales: bool = False

    @property
    def defines(self) -> dict[str, int]:
        names = "GATES", "HAS_BIAS", "ADDS", "SCALES"
        return {name: int(value) for name, value in zip(names, self, strict=True)}


class Problem(ctypes.Structure):
    _fields_ = (
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("x_scales", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("residual_stride", ctypes.c_longlong),
        ("num_rows", ctypes.c_int),
        ("num_outputs", ctypes.c_int),
        ("num_columns", ctypes.c_int),
    )


def suits(x: Tensor, weight: Tensor, is_gated: bool = False) -> bool:
    """Whether there are rows for this, the weight lies so that it can be read, and cuBLAS is slower: where no
    program has two tiles, or a gate would be a launch of its own"""
    return (
        hopper.is_there(x.device)
        and 1 < x.numel() // x.shape[-1] <= MOST_ROWS
        and x.dtype in TYPES
        and x.dtype == weight.dtype
        and weight.shape[0] % 8 == 0
        and weight.shape[1] % 8 == 0
        and is_aligned(weight)
        and (is_gated or len(weight) <= LARGEST_TILE * most_tiles(1, x.device))
    )


def launch(  # noqa: PLR0913  what a product is
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """y = x @ weight.T + bias + residual, or silu(gate) * up where the weight has the rows of both

    With scales of the rows of x and of the weight, each value of 16 bits is two of float8.
    """
    hopper.bind_context(x.device)
    place = y if y.data_ptr() % 8 == 0 else torch.empty_like(y)
    x = aligned(x)
    bias, residual = (None if t is None else aligned(t) for t in (bias, residual))
    tile = tile_of(len(x), y.shape[-1], x.shape[1], is_gated, x.device)
    after = After(is_gated, bias is not None, residual is not None, scales is not None)
    problem = problem_of(place, x, bias, residual, *(scales or (None, None)))
    maps = map_of(weight, outputs_of(tile, is_gated)), map_of(x, len(x))
    num_tiles = min(-(-y.shape[-1] // outputs_of(tile, is_gated)), most_tiles(tile.splits, x.device))
    hopper.launch(
        kernel_of(tile, after, x.dtype, x.device), num_tiles * tile.splits, tile.num_threads,
        tile.shared_bytes,
        after.scales or isinstance(weight, torch.nn.Parameter),  # which the kernel before cannot be writing
        *(map.getPtr() for map in maps), ctypes.addressof(problem),
    )  # fmt: skip
    if place is not y:
        y.copy_(place)


def problem_of(y: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None, *scales: Any) -> Problem:
    beside = (0 if t is None else t.data_ptr() for t in (bias, residual, *(scales or (None, None))))
    stride = 0 if residual is None else residual.stride(0)
    return Problem(y.data_ptr(), *beside, stride, *(len(x), y.shape[-1], x.shape[1]))


def is_aligned(t: Tensor) -> bool:
    """Whether every row begins at 16 bytes, and none within another, as those of a broadcast tensor do"""
    are_apart = all(stride % 8 == 0 and stride >= t.shape[-1] for stride in t.stride()[:-1])
    return t.data_ptr() % 16 == 0 and are_apart


def aligned(t: Tensor) -> Tensor:
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def map_of(t: Tensor, num_rows: int) -> Any:
    return hopper.tensor_map(t.data_ptr(), (t.shape[1], len(t)), (t.stride(0),), (STEP, num_rows))


# ---- which tile --------------------------------------------------------------------------------------------


def outputs_of(tile: Tile, is_gated: bool) -> int:
    return tile.size // 2 if is_gated else tile.size


@cache
def tile_of(num_rows: int, num_outputs: int, num_columns: int, is_gated: bool, device: torch.device) -> Tile:
    """That by which a program has least to do"""
    num_steps, groups = -(-num_columns // STEP), -(-num_rows // 64)

    def cost(tile: Tile) -> int:
        num_tiles = -(-num_outputs // outputs_of(tile, is_gated))
        rounds = -(-num_tiles // most_tiles(tile.splits, device))
        return rounds * -(-num_steps // tile.splits) * (tile.size + 32 * groups) + PART * tile.splits

    def candidates() -> Iterator[Tile]:
        for splits in (1,) if is_gated else (1, 2, 4):
            for size in range(64, LARGEST_TILE + 1, 32 if is_gated else 16):
                tile = Tile(size, splits, groups)
                is_one_round = -(-num_outputs // size) <= most_tiles(splits, device)
                if splits == 1 or (splits <= num_steps and is_one_round):
                    yield tile

    return min(candidates(), key=cost)


@cache
def most_tiles(splits: int, device: torch.device) -> int:
    """How many are there at once; the programs of a cluster are on processors that lie together"""
    if splits == 1:
        return hopper.num_processors(device)
    tile = Tile(64, splits, 2)
    kernel = kernel_of(tile, After(), torch.bfloat16, device)
    return hopper.most_clusters(kernel, splits, tile.num_threads, tile.shared_bytes)


# ---- the kernel --------------------------------------------------------------------------------------------


@cache
def kernel_of(tile: Tile, after: After, dtype: torch.dtype, device: torch.device) -> Any:
    kind = "e4m3" if after.scales else TYPES[dtype]
    source = multiply_of(tile.size, kind) + hopper.source("product.cuh", "rows.cu")
    defines = {
        "TILE": tile.size, "SPLITS": tile.splits, "GROUPS": tile.groups, "STAGES": tile.num_stages,
        "IS_BFLOAT16": int(dtype == torch.bfloat16), **after.defines,
    }  # fmt: skip
    return hopper.loaded(source, defines, tile.shared_bytes)


def multiply_of(size: int, kind: str) -> str:
    """The instruction for 32 bytes of each row, which names each of its sums"""
    count, shape = size // 2, f"m64n{size}k{32 if kind == 'e4m3' else 16}"
    names, sums = (", ".join(form % i for i in range(count)) for form in ("%%%d", '"+f"(sums[%d])'))
    order = "" if kind == "e4m3" else ", 0, 0"  # of rows and columns, which bytes have no choice of
    return f"""
__device__ void multiply(float (&sums)[{count}], unsigned long long x, unsigned long long weight, int adds) {{
  asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.{shape}.f32.{kind}.{kind} "
               "{{{names}}}, %{count}, %{count + 1}, adds, 1, 1{order};\\n}}"
               : {sums} : "l"(x), "l"(weight), "r"(adds));
}}
"""
