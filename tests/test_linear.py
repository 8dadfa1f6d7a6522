"""Linear layers on one process; tests/test_distributed.py runs the parallel ones on several."""

import copy

import pytest
import torch

from infinicore import nn
from infinicore.distributed import Communicator, LocalCommunicator
from infinicore.nn import functional as F
from infinicore.nn.fused import joined
from infinicore.nn.linear import (
    BaseLinear,
    ColumnParallelLinear,
    Linear,
    RowParallelLinear,
    lay_together,
    project_gated,
    project_heads,
    project_onto,
)
from infinicore.nn.module import Parameter
from infinicore.ops.fused_reference import Where, places

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


class FakeRank(Communicator):
    """A rank whose peers hold zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor):
        return tensor

    def all_gather(self, tensor, dim=-1):
        raise NotImplementedError

    def broadcast(self, tensor, src=0):
        raise NotImplementedError


def column(rank: int, size: int, **options) -> ColumnParallelLinear:
    torch.manual_seed(0)
    return ColumnParallelLinear(6, 8, tp_rank=rank, tp_size=size, **options)


def row(rank: int, size: int, **options) -> RowParallelLinear:
    torch.manual_seed(0)
    return RowParallelLinear(8, 6, tp_rank=rank, tp_size=size, communicator=FakeRank(rank, size), **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_torchs_linear(dtype, shape, bias, level):
    ours, theirs = Linear(5, 3, bias, dtype=dtype), torch.nn.Linear(5, 3, bias, dtype=dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x).detach())


def test_one_seed_gives_the_initial_values_of_torchs_linear():
    torch.manual_seed(3)
    ours = Linear(50, 30)
    torch.manual_seed(3)
    theirs = torch.nn.Linear(50, 30)
    torch.testing.assert_close(ours.weight, theirs.weight, check_dtype=True)
    torch.testing.assert_close(ours.bias, theirs.bias)


@pytest.mark.parametrize("layer_class", [Linear, ColumnParallelLinear, RowParallelLinear])
def test_residual_is_added_to_the_output(layer_class):
    layer = layer_class(5, 3)
    x, residual = torch.randn(2, 5), torch.randn(2, 3)
    torch.testing.assert_close(layer(x, residual), layer(x) + residual)
    torch.testing.assert_close(layer.compute_linear(x), x @ layer.weight.T + layer.bias)


def test_residual_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"residual has shape \(3,\).*\(2, 3\)"):
        Linear(5, 3)(torch.zeros(2, 5), torch.zeros(3))


def test_input_of_another_width_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(3, 5\)"):
        Linear(5, 3)(torch.zeros(2, 4))


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (-1, 3)])
def test_sizes_that_are_not_positive_are_refused(sizes):
    with pytest.raises(ValueError, match="must be positive"):
        Linear(*sizes)


def test_whole_numbers_are_refused_as_weights():
    with pytest.raises(TypeError, match="int8"):
        Linear(2, 2, dtype=torch.int8)


def test_repr_says_what_the_layer_is():
    assert repr(Linear(768, 3072)) == "Linear(in_features=768, out_features=3072, bias=True)"
    assert repr(column(1, 2)) == (
        "ColumnParallelLinear(in_features=6, out_features=8, bias=True, tp_rank=1, tp_size=2)"
    )
    assert "RowParallelLinear(in_features=8, out_features=6, bias=False, tp_rank=0" in repr(
        row(0, 1, bias=False)
    )


def test_arguments_may_be_given_by_position_in_the_seeds_order():
    layer = RowParallelLinear(8, 6, True, torch.float16, "meta", 1, 2, FakeRank(1, 2))
    assert isinstance(layer, BaseLinear) and layer.weight.dtype == torch.float16 and layer.weight.is_meta
    assert ColumnParallelLinear(6, 8, False, torch.float32, "cpu", 1, 2).weight.shape == (4, 6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_columns_of_all_ranks_are_the_whole_layer(size):
    x, whole = torch.randn(3, 6), column(0, 1)
    ranks = [column(rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([layer.weight for layer in ranks]), whole.weight)
    assert torch.equal(torch.cat([layer.bias for layer in ranks]), whole.bias)
    torch.testing.assert_close(torch.cat([layer(x) for layer in ranks], dim=-1), whole(x))


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_all_ranks_are_the_whole_layer_and_each_keeps_the_whole_bias(size):
    x, whole = torch.randn(3, 8), row(0, 1)
    ranks = [row(rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([layer.weight for layer in ranks], dim=1), whole.weight)
    assert all(torch.equal(layer.bias, whole.bias) for layer in ranks)
    parts = [layer(part) for layer, part in zip(ranks, x.chunk(size, dim=-1), strict=True)]
    torch.testing.assert_close(sum(parts) - (size - 1) * whole.bias, whole(x))


def test_parallel_layers_load_the_checkpoint_of_the_whole_layer():
    whole, shard = column(0, 1).state_dict(), column(1, 2)
    shard.load_state_dict(whole, strict=True)
    assert torch.equal(shard.weight, whole["weight"][4:]) and torch.equal(shard.bias, whole["bias"][4:])


def test_sizes_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match=r"\(8, 6\) does not split in tp_size=3"):
        column(0, 3)
    with pytest.raises(ValueError, match=r"\(6, 8\) does not split in tp_size=3"):
        row(0, 3)


def test_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match="tp_rank=2, tp_size=2"):
        column(2, 2)


def test_row_parallel_without_a_communicator_is_refused():
    with pytest.raises(ValueError, match="tp_size=2 needs a communicator"):
        RowParallelLinear(8, 6, tp_size=2)


def test_communicator_of_another_group_is_refused():
    with pytest.raises(ValueError, match="rank 0 of 1.*tp_rank=1 of tp_size=2"):
        RowParallelLinear(8, 6, tp_rank=1, tp_size=2, communicator=LocalCommunicator())


def test_copy_of_a_parallel_layer_keeps_its_communicator():
    layer = row(1, 2)
    twin = copy.deepcopy(layer)
    assert twin.communicator is layer.communicator and twin.weight.tp_rank == 1


def test_layer_learns_once_asked_to():
    layer = Linear(5, 3).requires_grad_()
    layer(torch.randn(2, 5)).sum().backward()
    assert isinstance(layer.weight, Parameter) and layer.bias.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_that_are_laid_together_are_one_view_until_a_layer_moves(has_bias: bool):
    layers = [Linear(8, size, has_bias) for size in (6, 2, 3)]
    weights, biases = [[getattr(layer, name) for layer in layers] for name in ("weight", "bias")]
    wanted = torch.cat([weight.clone() for weight in weights])
    assert joined(weights, biases) is None
    lay_together(*layers)
    weight, bias = joined(weights, biases)
    assert torch.equal(weight, wanted) and weight.data_ptr() == weights[0].data_ptr()
    assert (bias is None) is not has_bias
    assert joined(weights[::-1], biases[::-1]) is None
    weights[1].data = weights[1].data.clone()
    assert joined(weights, biases) is None


def test_weights_laid_together_are_held_as_one_unless_they_learn():
    layers = [Linear(8, size, False) for size in (6, 2)]
    lay_together(*layers)
    weights = [layer.weight for layer in layers]
    assert isinstance(joined(weights, [None, None])[0], torch.nn.Parameter)  # a kernel may read it early
    made = torch.randn(8, 8).split((6, 2))
    assert type(joined(made, [None, None])[0]) is torch.Tensor
    for weight in weights:
        weight.requires_grad_()
    whole, _ = joined(weights, [None, None])
    assert whole.grad_fn is not None


class Elsewhere(torch.Tensor):
    """Stands in for one on a GPU, where weights that lie together are one product with the norm before it."""

    is_cpu = False


class DoubledNorm(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm, torch.nn.LayerNorm, DoubledNorm])
@torch.inference_mode()
def test_what_is_projected_is_what_the_norm_makes_whichever_it_is(kind):
    positions, sin, cos, *pools = places(3, 8, torch.float32)
    x, norm, where = torch.randn(3, 32), kind(32), Where(positions, sin, cos, False, *pools)
    gates, heads = [Linear(32, 48), Linear(32, 48)], [Linear(32, size) for size in (32, 16, 16)]
    wanted = project_heads(norm(x), heads, None, where), F.swiglu(*(gate(norm(x)) for gate in gates))
    lay_together(*gates), lay_together(*heads)
    there = x.as_subclass(Elsewhere)
    found = project_heads(there, heads, norm, where), project_gated(there, *gates, norm)
    torch.testing.assert_close([part.as_subclass(torch.Tensor) for part in found], list(wanted))


def test_torch_compiles_a_product_with_a_residual_whole():
    layer, x = Linear(8, 8), torch.randn(3, 8)
    compiled = torch.compile(lambda x: project_onto(x, layer, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x) + x)
