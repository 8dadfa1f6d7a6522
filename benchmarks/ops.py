"""Native ops on rows against the torch ops that do the same work, in one run: `python -m benchmarks.ops`.

A row times a resolved call (buffers fixed, as a model runs it) and the plain function of
`infinicore.nn.functional`, both against torch. A ratio above 1 means we are faster. Inputs are random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import infinicore
from benchmarks.machine import arguments
from benchmarks.timing import race
from infinicore import _native, ops
from infinicore.nn import functional as F
from infinicore.ops.samples import pair_samples, row_samples
from infinilm.bench import Measured

HIDDEN_SIZE = 2048
HEAD_DIM = 64
SHAPES = {"decode 1x2048": 1, "prefill 512x2048": 512}
EPS = 1e-6


@dataclass(frozen=True)
class Row:
    op: str
    resolved: Callable[[], object]
    function: Callable[[], object]
    torch: Callable[[], object]


def unfused_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The steps of transformers' LlamaRMSNorm."""
    v = x.float()
    v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * v.to(x.dtype)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.nn.functional.rms_norm(total, (HIDDEN_SIZE,), weight, EPS), total


def huggingface_rope(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """transformers' apply_rotary_pos_emb, with full-width tables already gathered."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def torch_sample(logits: Tensor, topp: float, topk: int, temperature: float) -> Tensor:
    """Temperature, top-k, softmax, top-p and the draw in torch, on the k survivors."""
    values, tokens = torch.topk(logits / temperature, topk)
    probabilities = torch.softmax(values, -1)
    kept = probabilities * (probabilities.cumsum(-1) - probabilities < topp)
    return tokens[torch.multinomial(kept, 1)]


def resolved(op: ops.Op[Any], *args: Any) -> Callable[[], object]:
    return op.resolve(*args, out=op(*args))


def elementwise_rows(x: Tensor, other: Tensor) -> Iterator[Row]:
    nn = torch.nn.functional
    yield Row("silu", resolved(ops.silu, x), lambda: F.silu(x), lambda: nn.silu(x))
    yield Row(
        "swiglu", resolved(ops.swiglu, x, other), lambda: F.swiglu(x, other), lambda: nn.silu(x) * other
    )
    for kind in ("none", "tanh"):
        yield Row(
            f"gelu {kind}",
            resolved(ops.gelu, x, kind),
            partial(F.gelu, x, kind),
            partial(nn.gelu, x, approximate=kind),
        )
    yield Row(
        "gelu fast",
        resolved(ops.gelu, x, "fast"),
        lambda: F.gelu(x, "fast"),
        lambda: x * torch.sigmoid(1.702 * x),
    )


def row_rows(x: Tensor, other: Tensor, weight: Tensor) -> Iterator[Row]:
    nn, shape = torch.nn.functional, (HIDDEN_SIZE,)
    norm = resolved(ops.rms_norm, x, weight, EPS)
    yield Row(
        "rms_norm",
        norm,
        lambda: F.rms_norm(x, shape, weight, EPS),
        lambda: nn.rms_norm(x, shape, weight, EPS),
    )
    yield Row(
        "rms_norm, unfused",
        norm,
        lambda: F.rms_norm(x, shape, weight, EPS),
        lambda: unfused_rms_norm(x, weight),
    )
    yield Row(
        "add_rms_norm",
        resolved(ops.add_rms_norm, x, other, weight, EPS),
        lambda: F.add_rms_norm(x, other, shape, weight, EPS),
        lambda: torch_add_rms_norm(x, other, weight),
    )
    yield Row(
        "layer_norm",
        resolved(ops.layer_norm, x, weight, weight, EPS),
        lambda: F.layer_norm(x, shape, weight, weight, EPS),
        lambda: nn.layer_norm(x, shape, weight, weight, EPS),
    )
    yield Row("softmax", resolved(ops.softmax, x), lambda: F.softmax(x), lambda: torch.softmax(x, -1))
    scores = x[:, : max(len(x), 1)].contiguous() if len(x) > 1 else x
    mask = torch.zeros(scores.shape, dtype=x.dtype).masked_fill(
        torch.ones(scores.shape).triu(scores.shape[1] - scores.shape[0] + 1).bool(), -torch.inf
    )
    yield Row(
        "causal_softmax",
        resolved(ops.causal_softmax, scores),
        lambda: F.causal_softmax(scores),
        lambda: torch.softmax(scores + mask, -1),
    )


def lookup_rows(num_rows: int, dtype: torch.dtype) -> Iterator[Row]:
    x = torch.randn(num_rows, HIDDEN_SIZE // HEAD_DIM, HEAD_DIM).to(dtype)
    angle = torch.rand(4096, HEAD_DIM // 2)
    sin, cos, positions = angle.sin().to(dtype), angle.cos().to(dtype), torch.randint(0, 4096, (num_rows,))
    full_sin, full_cos = (torch.cat([t, t], -1)[positions][:, None] for t in (sin, cos))
    yield Row(
        "rope, Hugging Face",
        resolved(ops.rope, x, positions, sin, cos, False),
        lambda: F.rope(x, positions, sin, cos),
        lambda: huggingface_rope(x, full_sin, full_cos),
    )
    ids, table = torch.randint(0, 8192, (num_rows,)), torch.randn(8192, HIDDEN_SIZE).to(dtype)
    yield Row(
        "embedding",
        resolved(ops.embedding, ids, table),
        lambda: F.embedding(ids, table),
        lambda: torch.nn.functional.embedding(ids, table),
    )
    if num_rows == 1:
        logits = (torch.randn(49152) * 4).to(dtype)
        yield Row(
            "random_sample 49152",
            resolved(ops.random_sample, logits, 0.7, 0.9, 50, 0.8),
            lambda: F.random_sample(logits, 0.7, 0.9, 50, 0.8),
            lambda: torch_sample(logits, 0.9, 50, 0.8),
        )


def plain_rows(x: Tensor, other: Tensor, named: set[str]) -> Iterator[Row]:
    """Ops on rows that have no row of their own above, against their references"""
    for op in ops.OPS.values():
        args = {row_samples: (x,), pair_samples: (x, other)}.get(op.samples)
        if args and op.name not in named:
            function = getattr(F, op.name, op)
            yield Row(op.name, resolved(op, *args), partial(function, *args), partial(op.reference, *args))


def rows(num_rows: int, dtype: torch.dtype) -> Iterator[Row]:
    x, other = (torch.randn(num_rows, HIDDEN_SIZE).to(dtype) for _ in range(2))
    named = [
        *elementwise_rows(x, other),
        *row_rows(x, other, torch.randn(HIDDEN_SIZE).to(dtype)),
        *lookup_rows(num_rows, dtype),
    ]
    yield from named
    yield from plain_rows(x, other, {row.op for row in named})


def report(shape: str, dtype: torch.dtype, row: Row, num_rounds: int) -> None:
    times = race({"resolved": row.resolved, "function": row.function, "torch": row.torch}, num_rounds)

    def micro(t: Measured) -> str:
        return f"{t.median * 1e6:9.1f} ±{t.spread:4.0%}"

    ratios = [times["torch"].median / times[name].median for name in ("resolved", "function")]
    print(
        f"{shape:17} {str(dtype).removeprefix('torch.'):9} {row.op:20}"
        f"{micro(times['resolved'])} {micro(times['function'])} {micro(times['torch'])}"
        f" {ratios[0]:7.2f}x {ratios[1]:9.2f}x"
    )


def report_call_overhead(num_rounds: int) -> None:
    x = torch.randn(1, 1)
    time = race({"call": resolved(ops.silu, x)}, num_rounds)["call"]
    print(f"\ncall overhead of a resolved op, from Python: {time.median * 1e6:.2f} us ±{time.spread:.0%}")


def check_known(part: str, parser: argparse.ArgumentParser) -> None:
    """An empty table would look like a race that was run."""
    known = sorted({row.op for row in rows(1, torch.float32)})
    if not any(part in name for name in known):
        parser.error(f"--ops: no row has {part!r} in its name; there are {', '.join(known)}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ops", default="", help="only ops whose name contains this")
    options = parser.parse_args()
    check_known(options.ops, parser)
    infinicore.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    threads = f"level {_native.isa()}, {options.threads} threads"
    print(f"{threads}, torch {torch.__version__}; microseconds, median and spread\n")
    columns = f"{'resolved':>15} {'function':>15} {'torch':>15} {'ratio':>8} {'(function)':>10}"
    print(f"{'shape':17} {'dtype':9} {'op':20}{columns}")
    with torch.inference_mode():
        for shape, num_rows in SHAPES.items():
            for dtype in (torch.float32, torch.bfloat16):
                for row in rows(num_rows, dtype):
                    if options.ops in row.op:
                        report(shape, dtype, row, options.rounds)
        report_call_overhead(options.rounds)


if __name__ == "__main__":
    main()
