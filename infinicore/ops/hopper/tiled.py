"""Products of 2 to 128 rows of bfloat16 and a weight in tiles, or 2 to 64 and one of float8 (few.cu, many.cu,
tiled.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import infinicore
from infinicore.float8 import Float8, Float8Tensor
from infinicore.ops import hopper
from infinicore.ops.hopper import rows
from infinicore.ops.hopper.one import TYPES
from infinicore.ops.hopper.rows import After
from infinicore.quantization import BlockType
from infinicore.tiles import BYTES, PARTS, TILE_ROWS, Part, TiledTensor

WARPS = {8: 16, 16: 16, 32: 16, 64: 12, 128: 8}  # that multiply so many rows: their sums take registers
FEW, MOST_ROWS = min(WARPS), max(WARPS)
MOST_FLOAT8_ROWS = 64  # with more, x is rounded too (rows.py)
FP8 = -1  # stands where others have ggml's number of their type
LOADERS = 3  # warps that ask for the weight
NUM_PARTS, MAP_BYTES = 5, 128
PIECE, LINE = 2048, 128  # bytes of codes that are loaded at once, of each tile; of each row of float8
ROOM = 227 * 1024  # bytes of a program, which are all that a processor has
BARRIERS = 24  # bytes, of a step
PAIR = 0x43004300  # two bfloat16 of 128, in bits: the last of them count ones
PART = 20000  # what a part of a sum costs, in bytes


Type = BlockType | Float8


def parts_of(type: Type) -> tuple[Part, ...]:
    return (BYTES,) if isinstance(type, Float8) else PARTS[type]


class Plan(NamedTuple):
    """Tiles that a program has, programs that share its columns, and rows of x that there is room for"""

    type: Type
    tiles: int
    splits: int
    rows: int

    @property
    def teams(self) -> int:
        return WARPS[self.rows] // self.tiles

    @property
    def num_threads(self) -> int:
        return 32 * (self.teams * self.tiles + LOADERS + 1)

    @property
    def groups(self) -> int:
        """Of 32 columns, in a step: at least a piece, and as many as there is room for some times, twice for
        every team"""
        piece = LINE * TILE_ROWS if isinstance(self.type, Float8) else PIECE
        least, some = piece // self.sizes(1)[0], 4 if self.rows == FEW else 3
        room = (ROOM - self.sum_bytes) // max(2 * self.teams, some)
        return next((n for n in (8, 4) if self.bytes_of(n) + BARRIERS <= room), least)

    def sizes(self, groups: int) -> list[int]:
        """Bytes of a tile's parts in so many groups, or in the block that they are of"""
        return [
            TILE_ROWS * part.num_bytes * max(32 * groups // part.elements, 1) for part in parts_of(self.type)
        ]

    def bytes_of(self, groups: int) -> int:
        """A step's, of x and the weight"""
        parts = sum(-(-self.tiles * size // 128) * 128 for size in self.sizes(groups))
        return -(-(groups * 64 * self.rows + parts) // 1024) * 1024

    @property
    def stage_bytes(self) -> int:
        return self.bytes_of(self.groups)

    @property
    def sum_bytes(self) -> int:
        """Of few rows; those of many lie where steps were"""
        return self.teams * FEW * (TILE_ROWS * self.tiles + 4) * 4 if self.rows == FEW else 0

    @property
    def num_stages(self) -> int:
        return (ROOM - self.sum_bytes) // (self.stage_bytes + BARRIERS) // self.teams * self.teams

    @property
    def shared_bytes(self) -> int:
        return self.sum_bytes + self.num_stages * (self.stage_bytes + BARRIERS)


class Weight(ctypes.Structure):
    _fields_ = (("num_groups", ctypes.c_int), ("num_items", ctypes.c_int), ("pair", ctypes.c_uint))


def suits(x: Tensor, weight: TiledTensor | Float8Tensor) -> bool:
    """Whether there are rows for this, and a weight of a type that is known here"""
    return (
        hopper.is_there(x.device)
        and not infinicore.deterministic
        and 1 < x.numel() // x.shape[-1] <= most_rows(weight)
        and x.dtype == torch.bfloat16
        and weight.shape[0] % 4 == 0
        and weight.shape[1] % rows.STEP == 0
        and weight.blocks.data_ptr() % 16 == 0
    )


def most_rows(weight: TiledTensor | Float8Tensor) -> int:
    """None of a type that is not known"""
    if isinstance(weight, Float8Tensor):
        return MOST_FLOAT8_ROWS
    return MOST_ROWS if weight.type in TYPES else 0


def launch(
    y: Tensor,
    x: Tensor,
    weight: TiledTensor | Float8Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """y = x times the weight + bias + residual, or silu(gate) * up where the weight has the rows of both"""
    hopper.bind_context(x.device)
    place = y if y.data_ptr() % 4 == 0 else torch.empty_like(y)
    x = rows.aligned(x)
    bias, residual = (None if t is None else rows.aligned(t) for t in (bias, residual))
    num_outputs = y.shape[-1]
    num_rows = next(most for most in WARPS if len(x) <= most)
    plan = plan_of(num_rows, num_outputs, weight.shape[1], weight.type, is_gated, x.device)
    scales = weight.row_scales if isinstance(weight, Float8Tensor) else None
    after = After(is_gated, bias is not None, residual is not None)
    problem = rows.problem_of(place, x, bias, residual, None, scales)
    num_items = items_of(plan, num_outputs, is_gated)
    maps, source = maps_of(weight, plan, is_gated), Weight(weight.shape[1] // 32, num_items, PAIR)
    hopper.launch(
        kernel_of(plan, after, x.device), num_programs(plan, num_items, x.device),
        plan.num_threads, plan.shared_bytes, True,
        map_of(x, plan).getPtr(), *(ctypes.addressof(t) for t in (maps, problem, source)),
    )  # fmt: skip
    if place is not y:
        y.copy_(place)


def map_of(x: Tensor, plan: Plan) -> Any:
    """A step's columns, by pieces that are as long as memory is swizzled"""
    sizes = rows.STEP, len(x), x.shape[1] // rows.STEP
    box = rows.STEP, plan.rows, plan.groups // 2
    return hopper.tensor_map(x.data_ptr(), sizes, (x.stride(0), rows.STEP), box)


def maps_of(weight: TiledTensor | Float8Tensor, plan: Plan, is_gated: bool) -> Any:
    """What a step takes of each part of its tiles, or of its rows; of gates and ups"""
    halves = 1 + is_gated
    maps = (ctypes.c_char * (NUM_PARTS * MAP_BYTES))()
    if isinstance(weight, Float8Tensor):
        found = [rows_map(weight, plan, halves)]
    else:
        found = list(part_maps(weight, plan, halves))
    for i, map in enumerate(found):
        ctypes.memmove(ctypes.addressof(maps) + i * MAP_BYTES, map.getPtr(), MAP_BYTES)
    return maps


def part_maps(weight: TiledTensor, plan: Plan, halves: int) -> Iterator[Any]:
    """In eights of bytes"""
    tile_bytes, at = weight.blocks.stride(0), weight.blocks.data_ptr()
    num_tiles = len(weight.blocks) // halves
    for part, size in zip(PARTS[weight.type], plan.sizes(plan.groups), strict=True):
        length = TILE_ROWS * part.num_bytes * weight.shape[1] // part.elements
        sizes, strides = (length // 8, num_tiles, halves), (tile_bytes // 8, num_tiles * tile_bytes // 8)
        yield hopper.tensor_map(at, sizes, strides, (min(size, PIECE) // 8, plan.tiles // halves, halves), 8)
        at += length


def rows_map(weight: Float8Tensor, plan: Plan, halves: int) -> Any:
    num_rows, length = weight.shape[0] // halves, weight.shape[1]
    box = LINE, TILE_ROWS * plan.tiles // halves, halves
    strides = length, num_rows * length
    return hopper.tensor_map(weight.blocks.data_ptr(), (length, num_rows, halves), strides, box, 1)


# ---- which plan --------------------------------------------------------------------------------------------


def items_of(plan: Plan, num_outputs: int, is_gated: bool) -> int:
    each = plan.tiles // 2 if is_gated else plan.tiles
    return -(-num_outputs // (each * TILE_ROWS))


@cache
def plan_of(  # noqa: PLR0913  what a product is
    num_rows: int, num_outputs: int, num_columns: int, type: Type, is_gated: bool, device: torch.device
) -> Plan:
    """That by which a program has least to read"""
    row_bytes = sum(TILE_ROWS * part.num_bytes / part.elements for part in parts_of(type))

    def cost(plan: Plan) -> float:
        rounds = -(-items_of(plan, num_outputs, is_gated) // most_items(plan, device))
        columns = num_columns / plan.splits
        return rounds * columns * (plan.tiles * row_bytes + 2 * num_rows) + PART * plan.splits

    def candidates() -> Iterator[Plan]:
        is_few = num_rows == FEW
        for tiles in tile_counts(num_rows, type):
            for splits in (1, 2) if is_few else (1, 2, 3):
                plan = Plan(type, tiles, splits, num_rows)
                is_one_round = items_of(plan, num_outputs, is_gated) <= most_items(plan, device)
                if splits == 1 or (is_one_round and num_columns >= 32 * splits * plan.groups):
                    yield plan

    return min(candidates(), key=cost)


def tile_counts(num_rows: int, type: Type) -> tuple[int, ...]:
    """A box has no more than 256 rows of float8."""
    if num_rows > FEW:
        return 4, 8
    return (2, 4, 8) if isinstance(type, Float8) else (2, 4, 8, 16)


@cache
def most_items(plan: Plan, device: torch.device) -> int:
    """How many are there at once; the programs of a cluster are on processors that lie together"""
    if plan.splits == 1:
        return hopper.num_processors(device)
    kernel = kernel_of(plan, After(), device)
    return hopper.most_clusters(kernel, plan.splits, plan.num_threads, plan.shared_bytes)


def num_programs(plan: Plan, num_items: int, device: torch.device) -> int:
    """Of few rows a program has several items where there are more than programs at once"""
    return (min(num_items, most_items(plan, device)) if plan.rows == FEW else num_items) * plan.splits


# ---- the kernel --------------------------------------------------------------------------------------------


@cache
def kernel_of(plan: Plan, after: After, device: torch.device) -> Any:
    number = FP8 if isinstance(plan.type, Float8) else plan.type.ggml_id
    defines = {
        "TYPE": number, "TILES": plan.tiles, "TEAMS": plan.teams, "ROWS": plan.rows, "GROUPS": plan.groups,
        "SPLITS": plan.splits, "STAGES": plan.num_stages,
        "IS_BFLOAT16": 1, **after.defines,
    }  # fmt: skip
    return hopper.loaded(source_of(plan), defines, plan.shared_bytes)


def source_of(plan: Plan) -> str:
    names = "product.cuh", "tiles.cuh", "tiled.cuh", "float8.cuh"
    if plan.rows == FEW:
        return hopper.source(*names, "few.cu")
    return multiply_of(plan.rows) + hopper.source(*names, "many.cu")


def multiply_of(num_rows: int) -> str:
    """The instruction, whose weight comes from registers; it names each of its sums"""
    count = num_rows // 2
    names, sums = (", ".join(form % i for i in range(count)) for form in ("%%%d", '"+f"(sums[%d])'))
    return f"""
__device__ void multiply(float (&sums)[{count}], const unsigned (&a)[4], unsigned long long x, int adds) {{
  asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 5}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{num_rows}k16.f32.bf16.bf16 "
               "{{{names}}}, {{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, "
               "adds, 1, 1, 0;\\n}}"
               : {sums} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(adds));
}}
"""
