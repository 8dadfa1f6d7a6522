"""attention over pools of blocks: one kernel for tokens that stand alone, one for runs of a stream.

Which token is of which kind is found on the device, so both kernels are launched where there may be both, and
the first reads a list of those that are its own. Where there are no runs, half precision has one of its own.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

import infinicore
from infinicore.ops.triton.attention_alone import MOST_FOLDED, launch_alone
from infinicore.ops.triton.attention_places import LONG, Seen, Sizes
from infinicore.ops.triton.attention_runs import launch_runs
from infinicore.ops.triton.attention_warps import launch_warps, suits
from infinicore.ops.triton.cache import are_places, are_pools
from infinicore.ops.triton.tensors import FLOATS, are_plain, fits, settled, target

LOG2_E = math.log2(math.e)


def accepts_attention(  # noqa: PLR0913  those of the op
    out: Any,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    streams: Tensor,
    slots: Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> bool:
    return (
        are_pools(keys, values)
        and are_plain(keys.device, FLOATS, q)
        and q.dim() == 3
        and q.numel() > 0
        and q.shape[1] % values.shape[1] == 0
        and q.shape[2] == values.shape[3]
        and are_places(len(q), keys.device, block_tables, streams, slots)
        and (sinks is None or (are_plain(keys.device, FLOATS, sinks) and sinks.shape == q.shape[1:2]))
        and fits(out, q.shape, q.dtype, q.device)
    )


def attention(  # noqa: PLR0913  those of the op
    out: Tensor | None,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    streams: Tensor,
    slots: Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    has_sinks = () if sinks is None else (sinks,)
    y = target(out, q, q, keys, values, block_tables, streams, slots, *has_sinks)
    q = q if q.stride(2) == 1 else q.contiguous()
    tables, streams, slots = (t.contiguous() for t in (block_tables, streams, slots))
    num_blocks, num_kv_heads, _, size = values.shape
    group = q.shape[1] // num_kv_heads
    # exp2 is what the device has, so scores are in powers of two; a cap multiplies what tanh makes of them.
    scale, cap = (scale / softcap, softcap * LOG2_E) if softcap > 0 else (scale * LOG2_E, 0.0)
    counts = len(q), len(tables), tables.shape[1], num_blocks
    sizes = Sizes(scale, cap, window, *counts, num_kv_heads, group, size)
    sinks = None if sinks is None else sinks.contiguous()
    seen = Seen(q, keys, values, tables, streams, slots, sinks)
    if infinicore.deterministic:
        launch_each(y, seen, sizes)
    elif len(q) > max(len(tables), LONG.value - 1):
        launch_alone(y, seen, sizes, has_runs=True)
        launch_runs(y, seen, sizes)
    else:
        launch_singly(y, seen, sizes)
    return settled(y, out)


def launch_singly(y: Tensor, seen: Seen, sizes: Sizes) -> None:
    """Tokens of which none is of a run"""
    if suits(seen.q, seen.keys, seen.values):
        launch_warps(y, seen, sizes)
    else:
        launch_alone(y, seen, sizes, has_runs=False)


def launch_each(y: Tensor, seen: Seen, sizes: Sizes) -> None:
    """Every token as if it stood alone, with the splits it would have then"""
    most = max(MOST_FOLDED // sizes.num_kv_heads, 1)
    for part, q, streams, slots in zip(
        *(t.split(most) for t in (y, seen.q, seen.streams, seen.slots)), strict=True
    ):
        some = seen._replace(q=q, streams=streams, slots=slots)
        launch_singly(part, some, sizes._replace(num_tokens=len(q)))
