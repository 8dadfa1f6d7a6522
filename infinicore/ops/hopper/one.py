"""One row of bfloat16 times a weight in tiles, with what stands beside the product (one.cu)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinicore.ops import hopper
from infinicore.ops.triton.beside import Beside, Heads
from infinicore.quantization import BlockType
from infinicore.tiles import TILE_ROWS, TiledTensor, bytes_per_tile

TYPES = (BlockType.Q8_0, BlockType.Q4_0, BlockType.Q4_1, BlockType.Q4_K)
TEAMS = 4  # that have steps in turn
WARPS = 4  # of each
CHUNK = 256  # values of a step that a warp has, of all rows of a tile
ROOM = 227 * 1024  # bytes of a program, which are all that a processor has
AHEAD = 60 * 1024  # bytes on their way at once: x, once it is there, waits behind them


class Kind(NamedTuple):
    """What a kernel is compiled for: a type, how many steps there is room for, and what stands beside"""

    type: BlockType
    stages: int
    norms: bool
    gates: bool
    rotates: bool
    has_bias: bool
    adds: bool

    @property
    def num_tiles(self) -> int:
        """That make one row of results"""
        return 2 if self.gates or self.rotates else 1


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class HeadsProblem(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "position stream slot table sin cos keys values"),
        *fields(ctypes.c_longlong, "sin_stride cos_stride"),
        *fields(
            ctypes.c_int, "length num_streams num_table_blocks num_blocks num_heads num_kv_heads block_size"
        ),
    )


class Problem(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_void_p, "y x norm bias residual weight"),
        *fields(ctypes.c_longlong, "tile_bytes"),
        *fields(ctypes.c_float, "eps"),
        *fields(ctypes.c_int, "num_outputs num_groups num_items apart"),
        ("heads", HeadsProblem),
    )


def suits(x: Tensor, weight: TiledTensor, beside: Beside) -> bool:
    """Whether a row, its weight and what becomes of heads are such as this kernel reads"""
    return (
        hopper.is_there(x.device)
        and weight.type in TYPES
        and weight.shape[1] % CHUNK == 0
        and weight.blocks.data_ptr() % 16 == 0
        and shared_bytes(weight, 2, TEAMS) <= ROOM
        and (beside.heads is None or are_known(beside.heads))
    )


def are_known(heads: Heads) -> bool:
    positions, sin, cos, streams, slots, tables, keys, values = heads.pointers
    return all(t.dtype == torch.bfloat16 for t in (sin, cos, keys, values)) and (
        tables.dtype == torch.int32 and all(t.dtype == torch.int64 for t in (positions, streams, slots))
    )


def launch(y: Tensor, x: Tensor, weight: TiledTensor, bias: Tensor | None, beside: Beside) -> None:
    """y [1, N] of x [1, K]; of a gate, y [1, N / 2]; of heads [1, H, D], the queries"""
    hopper.bind_context(x.device)
    heads, norm, residual = beside.heads, beside.norm, beside.residual
    x, norm = aligned(x), None if norm is None else aligned(norm)
    kind = kind_of(weight, beside, bias is not None)
    num_items = len(weight.blocks) // kind.num_tiles
    apart = num_items if heads is None else y.shape[-1] // (2 * TILE_ROWS)
    problem = Problem(
        *(0 if t is None else t.data_ptr() for t in (y, x, norm, bias, residual, weight.blocks)),
        weight.blocks.stride(0), beside.eps, y.shape[-1], weight.shape[1] // 32, num_items, apart,
        HeadsProblem() if heads is None else problem_of(heads),
    )  # fmt: skip
    hopper.launch(
        kernel_of(kind, x.device), hopper.num_processors(x.device), (TEAMS * WARPS + 1) * 32,
        shared_bytes(weight, kind.num_tiles, kind.stages),
        norm is None or isinstance(beside.norm, torch.nn.Parameter),  # which is read early, as the weight is
        ctypes.addressof(problem),
    )  # fmt: skip


def aligned(t: Tensor) -> Tensor:
    whole = t.is_contiguous() and t.data_ptr() % 8 == 0
    return t if whole else t.clone(memory_format=torch.contiguous_format)


def problem_of(heads: Heads) -> HeadsProblem:
    positions, sin, cos, streams, slots, tables, keys, values = heads.pointers
    pointers = positions, streams, slots, tables, sin, cos, keys, values
    return HeadsProblem(*(t.data_ptr() for t in pointers), *heads.sizes, heads.block_size)


def kind_of(weight: TiledTensor, beside: Beside, has_bias: bool) -> Kind:
    kind = Kind(
        weight.type, 0, beside.norm is not None, beside.is_gated, beside.heads is not None, has_bias,
        beside.residual is not None,
    )  # fmt: skip
    left = ROOM - shared_bytes(weight, kind.num_tiles, 0)
    most = left // (stage_bytes(weight.type) + 16)
    # A team must know how often a stage was filled: those of its own, or such as are full long before.
    return kind._replace(stages=most if most >= TEAMS + num_ahead(weight.type) else most // TEAMS * TEAMS)


def stage_bytes(type: BlockType) -> int:
    """Of a step: what all warps take at once"""
    return bytes_per_tile(type, WARPS * CHUNK)


def num_ahead(type: BlockType) -> int:
    """Steps that may be on their way at once"""
    return max(AHEAD // stage_bytes(type), 2)


def shared_bytes(weight: TiledTensor, num_tiles: int, stages: int) -> int:
    """Stages, sums of warps twice, squares, and x in bytes"""
    sums = (2 * num_tiles * TILE_ROWS + 1) * TEAMS * WARPS * 4
    return stages * (stage_bytes(weight.type) + 16) + sums + weight.shape[1] // 32 * (32 * 2 + 8)


@cache
def kernel_of(kind: Kind, device: torch.device) -> Any:
    defines = {
        "TYPE": kind.type.ggml_id, "TEAMS": TEAMS, "WARPS": WARPS, "STAGES": kind.stages,
        "AHEAD": num_ahead(kind.type), "NORMS": int(kind.norms), "GATES": int(kind.gates),
        "ROTATES": int(kind.rotates), "HAS_BIAS": int(kind.has_bias), "ADDS": int(kind.adds),
    }  # fmt: skip
    return hopper.loaded(hopper.source("tiles.cuh", "one.cu"), defines, ROOM)
