"""Rotary embedding: the pairs, the descriptor's rules, the module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infinicore import nn
from infinicore.graph import Graph
from infinicore.nn import functional as F
from infinicore.ops import RopeAlgo, RopeDescriptor, reference
from infinicore.ops.registry import Kernel

DATA_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
POSITION_TYPES = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-12}


def tables(length: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.arange(length).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    return angle.sin().to(dtype), angle.cos().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


@pytest.mark.parametrize("algo", RopeAlgo)
@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_every_pair_of_types_equals_the_formulation_of_the_models(
    algo: RopeAlgo, data_type: torch.dtype, level: str
) -> None:
    """GPT-NeoX and LLaMA rotate halves, GPT-J rotates neighbours; angles are repeated to match."""
    x = torch.randn(2, 5, 3, 10, generator=torch.Generator().manual_seed(0)).to(data_type)
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 2, 2, 7, 0]])
    sin, cos = tables(10, 5, data_type)
    if algo is RopeAlgo.GPT_NEOX:
        full_sin, full_cos, rotate = torch.cat([sin, sin], -1), torch.cat([cos, cos], -1), rotate_half
    else:
        full_sin, full_cos, rotate = (
            sin.repeat_interleave(2, -1),
            cos.repeat_interleave(2, -1),
            rotate_every_two,
        )
    s, c = full_sin.double()[positions][:, :, None], full_cos.double()[positions][:, :, None]
    wanted = (x.double() * c + rotate(x.double()) * s).to(data_type)
    for position_type in POSITION_TYPES:
        found = F.rope(x, positions.to(position_type), sin, cos, algo)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[data_type], atol=1e-6)


@pytest.mark.parametrize("algo", RopeAlgo)
def test_three_dimensions_are_a_batch_of_one_and_shared_positions_serve_every_batch(
    algo: RopeAlgo, level: str
) -> None:
    x, positions, (sin, cos) = torch.randn(4, 6, 2, 8), torch.tensor([5, 0, 1, 9, 3, 3]), tables(10, 4)
    batched = F.rope(x, positions, sin, cos, algo)
    for b in range(4):
        assert torch.equal(F.rope(x[b], positions, sin, cos, algo), batched[b])
        assert torch.equal(F.rope(x[b], positions[None], sin, cos, algo), batched[b])
        learning = F.rope(x[b].clone().requires_grad_(), positions[None], sin, cos, algo)
        torch.testing.assert_close(learning.detach(), batched[b])
    assert torch.equal(F.rope(x, positions.expand(4, 6), sin, cos, algo), batched)


@pytest.mark.parametrize("algo", RopeAlgo)
def test_rotation_keeps_length_and_depends_on_distance_alone(algo: RopeAlgo) -> None:
    q, k, (sin, cos) = (
        torch.randn(1, 1, 16).double(),
        torch.randn(1, 1, 16).double(),
        tables(64, 8, torch.float64),
    )

    def at(x: Tensor, position: int) -> Tensor:
        return F.rope(x, torch.tensor([position]), sin, cos, algo)

    torch.testing.assert_close(at(q, 33).norm(), q.norm())
    torch.testing.assert_close((at(q, 12) * at(k, 7)).sum(), (at(q, 45) * at(k, 40)).sum())
    back = F.rope(at(q, 33), torch.tensor([33]), -sin, cos, algo)
    torch.testing.assert_close(back, q)


@pytest.mark.parametrize("algo", RopeAlgo)
def test_strided_heads_of_a_fused_projection_rotate_in_place(algo: RopeAlgo, level: str) -> None:
    qkv, positions, (sin, cos) = torch.randn(2, 5, 3 * 4 * 8), torch.arange(5), tables(8, 4)
    q, k, v = (part.unflatten(-1, (4, 8)) for part in qkv.chunk(3, dim=-1))
    wanted_q, before_k, before_v = F.rope(q.contiguous(), positions, sin, cos, algo), k.clone(), v.clone()
    assert F.rope(q, positions, sin, cos, algo, out=q) is q
    assert torch.equal(q, wanted_q) and torch.equal(k, before_k) and torch.equal(v, before_v)


@pytest.mark.parametrize("position", [-1, 10, 2**31, 2**62])
def test_a_position_outside_the_tables_is_refused_before_anything_is_written(
    position: int, level: str
) -> None:
    x, (sin, cos) = torch.randn(3, 2, 8), tables(10, 4)
    before = x.clone()
    for call in (
        lambda: F.rope(x, torch.tensor([0, 1, position]), sin, cos, out=x),
        lambda: F.rope(x, torch.tensor([0, 1, position]), sin.requires_grad_(), cos),
    ):
        with pytest.raises(IndexError, match=rf"{position}.*\[0, 10\)"):
            call()
    assert torch.equal(x, before)


def test_the_op_refuses_a_position_outside_the_tables_whoever_computes() -> None:
    x, (sin, cos) = torch.randn(3, 2, 8), tables(10, 4)
    for position in (-1, 10):
        positions = torch.tensor([0, 1, position])
        for same in (positions, torch.stack([positions, positions], 1)[:, 0]):  # whose places lie apart
            for heads in (x, x.clone().requires_grad_()):
                with pytest.raises(IndexError, match=rf"position {position}.*\[0, 10\)"):
                    reference.rope(heads, same, sin, cos, False)


def test_unsigned_positions_do_not_wrap_around(level: str) -> None:
    x, (sin, cos) = torch.randn(1, 2, 8), tables(10, 4)
    for dtype, value in ((torch.uint8, 255), (torch.uint16, 65535), (torch.uint64, 2**64 - 1)):
        with pytest.raises(IndexError, match=str(value)):
            F.rope(x, torch.tensor([value], dtype=dtype), sin, cos)


# ---- the descriptor ----


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["y", "x", "pos", "sin", "cos"])
def test_the_descriptor_refuses_a_tensor_that_is_not_dense_by_its_name(name: str) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for other in (nested, torch.ones(10, 4).to_sparse()):
        with pytest.raises(TypeError, match=f"rope: {name} must be dense"):
            RopeDescriptor.create(**arguments(**{name: other}))  # type: ignore[arg-type]


def arguments(**changed: object) -> dict[str, object]:
    sin, cos = tables(10, 4)
    made: dict[str, object] = {
        "y": torch.empty(2, 6, 3, 8),
        "x": torch.randn(2, 6, 3, 8),
        "pos": torch.arange(6),
        "sin": sin,
        "cos": cos,
        "algo": RopeAlgo.GPT_NEOX,
    }
    return made | changed


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"x": None}, "x"),
        ({"y": None}, "y"),
        ({"pos": None}, "pos"),
        ({"sin": None}, "sin"),
        ({"cos": [1.0]}, "cos"),
        ({"algo": 1}, "algo"),
        ({"x": torch.randn(6, 8), "y": torch.empty(6, 8)}, "x"),
        ({"x": torch.randn(1, 2, 6, 3, 8), "y": torch.empty(1, 2, 6, 3, 8)}, "x"),
        ({"y": torch.empty(6, 3, 8)}, "y"),
        ({"y": torch.empty(2, 1, 3, 8).expand(2, 6, 3, 8)}, "y"),
        ({"y": torch.empty(2, 6, 3, 10)}, "y"),
        ({"y": torch.empty(2, 6, 3, 8, dtype=torch.float16)}, "y"),
        ({"x": torch.ones(2, 6, 3, 8, dtype=torch.int32)}, "x"),
        ({"x": torch.randn(2, 6, 8, 3).transpose(-1, -2)}, "x"),
        ({"y": torch.empty(2, 6, 8, 3).transpose(-1, -2)}, "y"),
        ({"pos": torch.arange(6.0)}, "pos"),
        ({"pos": torch.arange(5)}, "pos"),
        ({"pos": torch.zeros(3, 6, dtype=torch.int64)}, "pos"),
        ({"pos": torch.zeros(1, 2, 6, dtype=torch.int64)}, "pos"),
        ({"pos": torch.ones(6, dtype=torch.bool)}, "pos"),
        ({"sin": torch.ones(10)}, "sin"),
        ({"cos": torch.ones(10, 4, 1)}, "cos"),
        ({"sin": torch.ones(9, 4)}, "sin"),
        ({"sin": torch.ones(10, 4, dtype=torch.float64)}, "sin"),
        ({"cos": torch.ones(4, 10).t()}, "cos"),
        ({"sin": torch.ones(10, 3), "cos": torch.ones(10, 3)}, "sin"),
        ({"pos": torch.zeros(6, dtype=torch.int64, device="meta")}, "pos"),
    ],
)
def test_every_rule_refuses_and_names_its_tensor(changed: dict[str, object], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\b{named}\b"):
        RopeDescriptor.create(**arguments(**changed))  # type: ignore[arg-type]


def test_the_descriptor_tells_what_it_was_made_for() -> None:
    x = torch.randn(2, 6, 3, 16)[..., :8]
    made = arguments(x=x)
    descriptor = RopeDescriptor.create(**made)  # type: ignore[arg-type]
    info = descriptor.info
    assert descriptor.workspace_size == 0
    assert (info.batch, info.seqlen, info.nhead, info.dhead) == (2, 6, 3, 8)
    assert (info.table_len, info.table_dim) == (10, 4)
    assert (info.data_type, info.pos_type) == (torch.float32, torch.int64)
    assert (info.x_stride_batch, info.x_stride_seqlen, info.x_stride_nhead) == (288, 48, 16)
    assert (info.y_stride_batch, info.y_stride_seqlen, info.y_stride_nhead) == (144, 24, 8)
    assert info.has_batch_dim and not info.pos_has_batch_dim and info.algo is RopeAlgo.GPT_NEOX
    flat = RopeDescriptor.create(**arguments(x=x[0], y=torch.empty(6, 3, 8))).info  # type: ignore[arg-type]
    assert (flat.batch, flat.x_stride_batch, flat.has_batch_dim) == (1, 0, False)


def test_a_descriptor_runs_on_any_tensors_of_its_layout_and_refuses_others(level: str) -> None:
    made = arguments()
    descriptor = RopeDescriptor.create(**made)  # type: ignore[arg-type]
    for _ in range(3):
        x, y = torch.randn(2, 6, 3, 8), torch.empty(2, 6, 3, 8)
        pos = torch.randint(0, 10, (6,))
        descriptor.calculate(y, x, pos, made["sin"], made["cos"])  # type: ignore[arg-type]
        assert torch.equal(y, F.rope(x, pos, made["sin"], made["cos"]))  # type: ignore[arg-type]
    for wrong, said in (
        (torch.randn(2, 7, 3, 8), r"^rope: y has shape \(2, 6, 3, 8\), but x has \(2, 7, 3, 8\)"),
        (torch.randn(2, 6, 3, 8).double(), "^rope: y is torch.float32, but x is torch.float64"),
        (torch.randn(2, 6, 3, 16)[..., :8], "^rope: .*x_stride_nhead': 16.* descriptor .*x_stride_nhead': 8"),
        (None, "^rope: x must be a tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            descriptor.calculate(y, wrong, pos, made["sin"], made["cos"])  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        descriptor.calculate(y, x, pos + 10, made["sin"], made["cos"])  # type: ignore[arg-type]
    descriptor.calculate(x, x, pos, made["sin"], made["cos"])  # type: ignore[arg-type]
    assert torch.equal(x, y)


def test_autograd_sees_what_a_descriptor_computes() -> None:
    sin, cos = tables(10, 4)
    x, y, pos = torch.randn(6, 3, 8), torch.empty(6, 3, 8), torch.arange(6)
    descriptor = RopeDescriptor.create(y, x, pos, sin, cos)
    product = (torch.ones(6, 3, 8, requires_grad=True) * y).sum()
    descriptor.calculate(y, x, pos, sin, cos)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    learning = x.clone().requires_grad_()
    descriptor.calculate(y, learning, pos, sin, cos)
    y.sum().backward()
    wanted = x.clone().requires_grad_()
    F.rope(wanted, pos, sin, cos).sum().backward()
    assert learning.grad is not None and torch.equal(learning.grad, wanted.grad)


def test_a_graph_keeps_what_a_descriptor_computes() -> None:
    sin, cos = tables(10, 4)
    x, y, pos = torch.randn(6, 3, 8), torch.empty(6, 3, 8), torch.arange(6)
    descriptor = RopeDescriptor.create(y, x, pos, sin, cos)
    graph = Graph.record(lambda: descriptor.calculate(y, x, pos, sin, cos))
    x.normal_()
    graph.replay()
    assert torch.equal(y, F.rope(x, pos, sin, cos))


def test_a_kernel_that_is_not_native_leaves_a_descriptor_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object) -> None:
        raise NotImplementedError

    stand_in = Kernel("torch", accepts=lambda *_: True, run=run, bind=run)
    monkeypatch.setattr(reference.rope, "kernels", [stand_in])
    made = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    descriptor = RopeDescriptor.create(**made)  # type: ignore[arg-type]
    descriptor.calculate(*(made[name] for name in ("y", "x", "pos", "sin", "cos")))  # type: ignore[arg-type]


# ---- the module ----


def test_the_module_rotates_new_in_place_or_into_out() -> None:
    rope = nn.RoPE(8, 32, algo=nn.RoPE.Algo.GPT_NEOX)
    x, pos = torch.randn(2, 5, 3, 8), torch.arange(5)
    wanted = F.rope(x, pos, *tables(32, 4), RopeAlgo.GPT_NEOX)
    torch.testing.assert_close(rope(x, pos), wanted, atol=1e-6, rtol=1e-5)
    out = torch.empty_like(x)
    assert rope(x, pos, out=out) is out and rope(x, pos, in_place=True) is x
    assert torch.equal(out, x)
    with pytest.raises(ValueError, match="exclude each other"):
        rope(x, pos, in_place=True, out=out)


def test_the_module_saves_no_tables_and_defaults_to_gpt_j() -> None:
    rope = nn.RoPE(8, 32)
    assert rope.state_dict() == {} and rope.algo is RopeAlgo.GPT_J
    assert {name for name, _ in rope.named_buffers()} == {"sin_cache", "cos_cache"}
    assert rope.sin_cache.shape == (32, 4)


def test_the_module_serves_half_precision() -> None:
    x = torch.randn(5, 3, 8).bfloat16()
    found = nn.RoPE(8, 32)(x, torch.arange(5))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), nn.RoPE(8, 32)(x.float(), torch.arange(5)), rtol=1.6e-2, atol=8e-3
    )


def test_the_module_loses_nothing_by_being_half_precision_for_a_while() -> None:
    rope, sin = nn.RoPE(8, 32), nn.RoPE(8, 32).sin_cache
    assert torch.equal(rope.bfloat16().sin_cache, sin.bfloat16())
    assert torch.equal(rope.float().sin_cache, sin)
    assert torch.equal(rope.to("meta").to_empty(device="cpu").sin_cache, sin)
    made_in_half = nn.RoPE(8, 32, dtype=torch.float16)
    assert made_in_half.sin_cache.dtype == torch.float16 and torch.equal(made_in_half.float().sin_cache, sin)


def test_the_module_is_made_on_the_meta_device_and_under_a_default_one() -> None:
    with torch.device("meta"):
        rope = nn.RoPE(8, 32)
    assert rope.sin_cache.is_meta and nn.RoPE(8, 32, device="meta").cos_cache.is_meta
    assert torch.equal(rope.to_empty(device="cpu").cos_cache, nn.RoPE(8, 32).cos_cache)


def test_tables_do_not_depend_on_torchs_threads_or_on_how_long_they_are(keep_threads: None) -> None:
    torch.set_num_threads(1)
    longer = nn.RoPE(64, 4096)
    torch.set_num_threads(3)
    shorter = nn.RoPE(64, 2048)
    assert torch.equal(shorter.sin_cache, longer.sin_cache[:2048])
    assert torch.equal(shorter.cos_cache, longer.cos_cache[:2048])


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_tables_of_another_dtype_are_rounded_once(dtype: torch.dtype) -> None:
    rope, x = nn.RoPE(8, 32).bfloat16(), torch.randn(5, 3, 8).to(dtype)
    sin, cos = (table.to(dtype) for table in nn.RoPE(8, 32).tables())
    assert torch.equal(rope(x, torch.arange(5)), F.rope(x, torch.arange(5), sin, cos, RopeAlgo.GPT_J))
    assert rope.tables_as(dtype)[0] is rope.tables_as(dtype)[0]


@pytest.mark.parametrize("bad", [(7, 32), (0, 32), (8, 0), (8, 32, 0.0), (8, 32, float("nan"))])
def test_the_module_refuses_sizes_without_meaning(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        nn.RoPE(*bad)  # type: ignore[arg-type]
