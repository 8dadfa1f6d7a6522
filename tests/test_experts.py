"""Mixtures of experts: routed as each family does it, a token having the bits it has alone."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from test_ops import assert_same_bits
from torch import Tensor

import infinicore
from infinicore import nn, ops
from infinicore.graph import Arena, Graph
from infinicore.ops.samples import random_blocks
from infinicore.quantization import BlockType, PackedTensor, QuantizedTensor, quantize

Weight = Tensor | QuantizedTensor
NUM_EXPERTS, NUM_CHOSEN = 8, 3
NO_BIASES = (None, None, None)
PLAIN = ("softmax", None, (1, 1))  # by logits alone
KINDS = ["f32", "bf16", "f16", "Q4_0", "Q4_K", "Q6_K", "Q8_0", "MXFP4"]
PACKED = ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "MXFP4"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def rows(num_rows: int, length: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(num_rows, length, generator=torch.Generator().manual_seed(seed)) * scale


def matrix(kind: str, num_rows: int, length: int, seed: int) -> Weight:
    if kind in DTYPES:
        return rows(num_rows, length, seed, length**-0.5).to(DTYPES[kind])
    blocks = random_blocks(BlockType[kind], num_rows, length // BlockType[kind].elements_per_block)
    return blocks.rows(torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)))


def mixture(kind: str, hidden: int, inner: int, num_experts: int = NUM_EXPERTS) -> tuple[Weight, ...]:
    sizes = ((num_experts * inner, hidden), (num_experts * inner, hidden), (num_experts * hidden, inner))
    return tuple(matrix(kind, *size, seed) for seed, size in enumerate(sizes))


def packed(weights: tuple[Weight, ...], bits: int = 16) -> tuple[Weight, ...]:
    return tuple(w.pack(bits) if isinstance(w, QuantizedTensor) else w for w in weights)


def chosen(num_tokens: int, num_experts: int = NUM_EXPERTS) -> tuple[Tensor, Tensor]:
    return ops.route(rows(num_tokens, num_experts, seed=7), NUM_CHOSEN, True, *PLAIN)


def inputs(num_tokens: int, weights: tuple[Weight, ...]) -> Tensor:
    is_dense = isinstance(weights[0], Tensor)
    return rows(num_tokens, weights[0].shape[1], seed=5, scale=1.0 if is_dense else 0.05)


def values(weight: Weight) -> Tensor:
    return (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight).double()


def plain_loop(x: Tensor, ids: Tensor, shares: Tensor, weights: tuple[Weight, ...]) -> Tensor:
    """Token after token, slot after slot, in float64"""
    hidden = x.shape[1]
    gate, up, down = (values(weight) for weight in weights)
    inner, y = down.shape[1], torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            inside = slice(expert * inner, (expert + 1) * inner)
            state = torch.nn.functional.silu(gate[inside] @ row) * (up[inside] @ row)
            y[token] += share * (down[expert * hidden : (expert + 1) * hidden] @ state)
    return y


class Case(NamedTuple):
    """What tokens bring to a mixture, and what they take from it"""

    x: Tensor
    ids: Tensor
    shares: Tensor
    weights: tuple[Weight, ...]
    wanted: Tensor


@cache
def case(kind: str, num_tokens: int, hidden: int, inner: int) -> Case:
    """The same at every level, and slow to make; nobody changes it."""
    weights = mixture(kind, hidden, inner)
    x, (ids, shares) = inputs(num_tokens, weights), chosen(num_tokens)
    return Case(x, ids, shares, weights, plain_loop(x, ids, shares, weights))


def assert_near(found: Tensor, wanted: Tensor, error: float) -> None:
    """Of the mean square"""
    assert found.isfinite().all()
    assert (found.double() - wanted.double()).square().sum() <= error * wanted.double().square().sum()


# ---- routing ----


ROUTERS = {
    "mixtral": ("MixtralTopKRouter", True),
    "qwen2_moe": ("Qwen2MoeTopKRouter", False),
    "qwen3_moe": ("Qwen3MoeTopKRouter", True),
    "olmoe": ("OlmoeTopKRouter", False),
    "gpt_oss": ("GptOssTopKRouter", True),
}


def family(name: str, class_name: str, **config: Any) -> torch.nn.Module:
    """A module of transformers with random weights"""
    import transformers

    module = getattr(transformers.models, name)
    made = getattr(module, f"modeling_{name}")
    prefix = (
        class_name.removesuffix("TopKRouter")
        .removesuffix("TopkRouter")
        .removesuffix("SparseMoeBlock")
        .removesuffix("MLP")
    )
    config_class = getattr(getattr(module, f"configuration_{name}"), f"{prefix}Config")
    layer: torch.nn.Module = getattr(made, class_name)(config_class(**config))
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(rows(parameter.numel(), 1, seed, 0.2).view(parameter.shape))
    return layer


def sizes(hidden: int, inner: int) -> dict[str, int]:
    """Under the names that the families have for them"""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "num_experts": NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_CHOSEN,
    }


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_shares_are_those_of_the_familys_router(name: str) -> None:
    class_name, normalizes = ROUTERS[name]
    config = sizes(48, 32) | ({} if name in ("mixtral", "gpt_oss") else {"norm_topk_prob": normalizes})
    router = family(name, class_name, **config)
    logits, shares, ids = router(rows(50, 48))
    found_ids, found_shares = ops.route(logits.detach(), NUM_CHOSEN, normalizes, *PLAIN)
    assert torch.equal(found_ids.long(), ids)
    torch.testing.assert_close(found_shares, shares.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("normalizes", [False, True])
def test_experts_in_groups_are_those_of_deepseeks_router(normalizes: bool, level: str) -> None:
    config = sizes(48, 32) | {"n_group": 4, "topk_group": 2, "norm_topk_prob": normalizes}
    router = family("deepseek_v3", "DeepseekV3TopkRouter", **config, routed_scaling_factor=1.0)
    router.e_score_correction_bias.copy_(rows(1, NUM_EXPERTS, seed=3, scale=0.2)[0])
    logits, wanted, ids = router(rows(50, 48))
    args = NUM_CHOSEN, normalizes, "sigmoid", router.e_score_correction_bias, (4, 2)
    found_ids, shares = ops.route(logits.detach(), *args)
    order = ids.sort(dim=1)
    assert torch.equal(found_ids.long().sort(dim=1)[0], order[0])
    found = shares.gather(1, found_ids.argsort(dim=1))
    torch.testing.assert_close(found, wanted.detach().gather(1, order[1]), rtol=1e-6, atol=1e-7)


def test_a_bias_chooses_and_has_no_share(level: str) -> None:
    """As in ERNIE, whose scores are those of softmax"""
    logits, bias = rows(9, 16), rows(1, 16, seed=3)[0]
    ids, shares = ops.route(logits, 4, False, "softmax", bias, (1, 1))
    scores = logits.softmax(1)
    assert torch.equal(ids.long(), (scores + bias).topk(4)[1])
    torch.testing.assert_close(shares, scores.gather(1, ids.long()), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("groups", [(3, 1), (8, 3), (2, 0), (1, 2), (4, 1)])
def test_groups_that_are_none_or_too_small_are_declined(groups: tuple[int, int]) -> None:
    assert ops.route.pick(rows(2, 8), NUM_CHOSEN, True, "sigmoid", None, groups) is None


def test_a_token_is_routed_alone_as_in_company(level: str) -> None:
    logits, bias = rows(300, 64), rows(1, 64, seed=3)[0]
    args = 6, True, "sigmoid", bias, (8, 3)
    ids, shares = ops.route(logits, *args)
    for i in (0, 150, 299):
        found = ops.route(logits[i : i + 1], *args)
        assert torch.equal(found[0], ids[i : i + 1]) and torch.equal(found[1], shares[i : i + 1])


def test_of_equal_logits_the_first_are_chosen_in_their_order(level: str) -> None:
    ids, shares = ops.route(torch.tensor([[1.0, 3, 3, 0, 3, 1]]), 5, True, *PLAIN)
    assert ids.tolist() == [[1, 2, 4, 0, 5]]
    assert shares[0, 0] == shares[0, 1] == shares[0, 2] and shares[0, 3] == shares[0, 4]


def test_a_logit_that_is_no_number_spoils_its_own_row_alone(level: str) -> None:
    logits = rows(5, 40)
    wanted_ids, wanted = ops.route(logits, 4, False, *PLAIN)
    logits[2, 30] = torch.nan
    ids, shares = ops.route(logits, 4, False, *PLAIN)
    others = [0, 1, 3, 4]
    assert torch.equal(ids[others], wanted_ids[others]) and torch.equal(shares[others], wanted[others])
    assert shares[2].isnan().all() and ids[2, 0] == 30 and len(set(ids[2].tolist())) == 4


@pytest.mark.parametrize("num_chosen", [0, 6])
def test_more_experts_than_there_are_cannot_be_chosen_natively(num_chosen: int) -> None:
    assert ops.route.pick(rows(2, 5), num_chosen, True, *PLAIN) is None


# ---- values ----


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_a_plain_loop_over_tokens_and_slots(kind: str, num_tokens: int, level: str) -> None:
    odd = kind in DTYPES
    x, ids, shares, weights, wanted = case(kind, num_tokens, *((65, 39) if odd else (256, 256)))
    found = ops.experts.attempt(None, x, ids, shares, weights, NO_BIASES, "silu")
    assert found is not None
    assert_near(found, wanted, 1e-11)


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_experts_are_that_loop_but_for_rounding(kind: str, num_tokens: int, level: str) -> None:
    x, ids, shares, weights, wanted = case(kind, num_tokens, 256, 512)
    for bits, error in ((16, 1e-7), (12, 1e-5), (8, 1e-3)):
        rounded = packed(weights, bits)
        found = ops.experts.attempt(None, x, ids, shares, rounded, NO_BIASES, "silu")
        assert found is not None
        fewer = bits - rounded[0].rounding[0]
        assert_near(found, wanted, error * 4**fewer)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_bfloat16_rows_in_whole_lines_go_through_the_kernels_for_those(num_tokens: int, level: str) -> None:
    weights = mixture("bf16", 128, 96)
    x, (ids, shares) = inputs(num_tokens, weights), chosen(num_tokens)
    found = ops.experts(x, ids, shares, weights, NO_BIASES, "silu")
    assert_near(found, plain_loop(x, ids, shares, weights), 1e-9)  # AMX keeps 16 bits of the input


@pytest.mark.parametrize("kind", ["f32", "Q4_0"])
def test_all_tokens_may_choose_one_expert_and_the_others_are_not_read(kind: str, level: str) -> None:
    weights = mixture(kind, 64, 96)
    for index in (0, 1, 2, 3, 4, 6, 7):
        for weight in weights:
            memory = weight.blocks if isinstance(weight, QuantizedTensor) else weight
            spoilt = 255 if isinstance(weight, QuantizedTensor) else torch.nan
            memory.view(NUM_EXPERTS, -1, memory.shape[1])[index] = spoilt
    x, shares = inputs(64, weights), rows(64, 2, seed=3)
    ids = torch.full((64, 2), 5)
    for given in (weights, packed(weights)):
        found = ops.experts(x, ids, shares, given, NO_BIASES, "silu")
        assert_near(found, plain_loop(x, ids, shares, weights), 1e-7)


def test_a_token_may_choose_an_expert_twice(level: str) -> None:
    weights = mixture("Q4_0", 64, 96)
    x, ids, shares = inputs(1, weights), torch.tensor([[5, 2, 5, 7, 5]]), rows(1, 5, seed=3)
    for given in (weights, packed(weights)):
        found = ops.experts(x, ids, shares, given, NO_BIASES, "silu")
        assert_near(found, plain_loop(x, ids, shares, weights), 1e-7)


def test_weights_of_several_kinds_make_one_mixture(level: str) -> None:
    gate, up, down = mixture("Q4_0", 256, 256)[0], mixture("Q6_K", 256, 256)[1], mixture("bf16", 256, 256)[2]
    x, (ids, shares) = inputs(9, (gate, up, down)), chosen(9)
    wanted = plain_loop(x, ids, shares, (gate, up, down))
    for given in (
        (gate, up, down),
        (gate.pack(12), up.pack(16), down),
        (gate.pack(16), up, down),
        (gate.pack(16), up.pack(16), down),
    ):
        found = ops.experts.attempt(None, x, ids, shares, given, NO_BIASES, "silu")
        assert found is not None
        assert_near(found, wanted, 1e-5)


def test_packed_experts_whose_rows_do_not_fill_panels_take_the_reference_and_are_right() -> None:
    gate, up = (matrix("Q4_0", NUM_EXPERTS * 40, 64, seed) for seed in (0, 1))
    down = matrix("f32", NUM_EXPERTS * 64, 40, 2)
    x, (ids, shares) = inputs(5, (gate, up, down)), chosen(5)
    given = (gate.pack(16), up.pack(16), down)
    assert ops.experts.pick(x, ids, shares, given, NO_BIASES, "silu") is None
    found = ops.experts(x, ids, shares, given, NO_BIASES, "silu")
    assert_near(found, plain_loop(x, ids, shares, (gate, up, down)), 1e-7)


@pytest.mark.parametrize("is_learning", [False, True])
@pytest.mark.parametrize("expert", [8, -1, 2**40])
def test_an_expert_that_does_not_exist_is_named(expert: int, is_learning: bool) -> None:
    weights = mixture("f32", 64, 96)
    x, ids = inputs(2, weights).requires_grad_(is_learning), torch.tensor([[0, 1], [2, expert]])
    with pytest.raises(IndexError, match=rf"experts: id {expert} \(element 3\) is outside \[0, 8\)"):
        ops.experts(x, ids, torch.ones(2, 2), weights, NO_BIASES, "silu")


# ---- bits ----


@pytest.mark.parametrize("kind", ["f32", "bf16", "Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_a_token_has_the_same_bits_alone_and_in_company(kind: str, level: str) -> None:
    weights = mixture(kind, 256, 512)
    x, (ids, shares) = inputs(300, weights), chosen(300)
    for given in (weights, packed(weights, 12)) if kind in PACKED else (weights,):
        together = ops.experts(x, ids, shares, given, NO_BIASES, "silu")
        for part in (slice(0, 1), slice(7, 8), slice(3, 5), slice(100, 140), slice(299, 300)):
            few = ops.experts(x[part], ids[part], shares[part], given, NO_BIASES, "silu")
            assert_same_bits(few, together[part])


@pytest.mark.parametrize("kind", ["bf16", "Q4_0", "Q6_K"])
def test_one_two_and_three_threads_give_the_same_bits(kind: str, level: str, keep_threads: None) -> None:
    weights = packed(mixture(kind, 256, 512))
    for num_tokens in (1, 5, 130):
        x, (ids, shares) = inputs(num_tokens, weights), chosen(num_tokens)
        found = []
        for count in (1, 2, 3):
            infinicore.set_num_threads(count)
            found.append(ops.experts(x, ids, shares, weights, NO_BIASES, "silu"))
        assert_same_bits(found[1], found[0])
        assert_same_bits(found[2], found[0])


@pytest.mark.parametrize("kind", ["f32", "Q4_0"])
def test_more_tokens_than_lie_in_memory_at_once_have_the_bits_of_fewer(kind: str) -> None:
    weights = packed(mixture(kind, 64, 32))
    x, (ids, shares) = inputs(1200, weights), chosen(1200)
    together = ops.experts(x, ids, shares, weights, NO_BIASES, "silu")
    for begin in range(0, 1200, 400):
        part = slice(begin, begin + 400)
        found = ops.experts(x[part], ids[part], shares[part], weights, NO_BIASES, "silu")
        assert_same_bits(found, together[part])


def test_nan_in_one_token_leaves_its_neighbours_alone(level: str) -> None:
    for weights in (mixture("f32", 64, 96), mixture("bf16", 64, 96), packed(mixture("Q4_0", 64, 96))):
        x, (ids, shares) = inputs(20, weights), chosen(20)
        wanted = ops.experts(x, ids, shares, weights, NO_BIASES, "silu")
        x[4, 9] = torch.nan
        found = ops.experts(x, ids, shares, weights, NO_BIASES, "silu")
        assert found[4].isnan().all()
        others = [i for i in range(20) if i != 4]
        assert_same_bits(found[others], wanted[others])


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_a_recording_follows_tokens_that_choose_other_experts(num_tokens: int) -> None:
    weights = packed(mixture("Q4_0", 64, 96))
    x, router = inputs(num_tokens, weights), rows(NUM_EXPERTS, 64, seed=9)

    def step() -> Tensor:
        ids, shares = ops.route(ops.linear(x, router, None), NUM_CHOSEN, True, *PLAIN)
        return ops.experts(x, ids, shares, weights, NO_BIASES, "silu")

    graph = Graph.record(step, Arena())
    for seed in (20, 21):
        x.copy_(rows(num_tokens, 64, seed))
        assert_same_bits(graph.replay().clone(), step())


# ---- the layer ----


def experts_layer(gate_up: Tensor, down: Tensor, **options: Any) -> nn.Experts:
    """Of transformers' weights: [X, 2 I, E] and [X, E, I]"""
    num_experts, hidden, inner = down.shape
    layer = nn.Experts(num_experts, hidden, inner, **options, device="meta")
    gate, up = gate_up.detach().chunk(2, 1)
    for place, weight in ((layer.gate_proj, gate), (layer.up_proj, up), (layer.down_proj, down.detach())):
        place.set_weight(weight.flatten(0, 1).contiguous())
    return layer


@pytest.mark.parametrize(
    "name, class_name",
    [
        ("mixtral", "MixtralSparseMoeBlock"),
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
        ("olmoe", "OlmoeSparseMoeBlock"),
    ],
)
def test_the_layer_gives_what_the_familys_block_gives(name: str, class_name: str, level: str) -> None:
    block = family(name, class_name, **sizes(48, 32))
    layer = experts_layer(block.experts.gate_up_proj, block.experts.down_proj)
    x = rows(2 * 17, 48).view(2, 17, 48)
    with torch.no_grad():
        found = block(x)
        wanted = found[0] if isinstance(found, tuple) else found
        normalizes = bool(getattr(block.gate, "norm_topk_prob", True))
        ids, shares = ops.route(block.gate(x.flatten(0, 1))[0], NUM_CHOSEN, normalizes, *PLAIN)
    assert_near(layer(x, ids.view(2, 17, -1), shares.view(2, 17, -1)), wanted, 1e-12)


def test_the_layer_gives_what_gpt_oss_gives(level: str) -> None:
    block = family("gpt_oss", "GptOssMLP", **sizes(48, 32))
    experts, x = block.experts, rows(1 * 17, 48, scale=9.0).view(1, 17, 48)  # so that some values are clamped
    gate_up = experts.gate_up_proj.detach().mT  # whose outputs take turns
    in_halves = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1)
    layer = experts_layer(in_halves, experts.down_proj.mT, bias=True, activation="swiglu_oai")
    bias = experts.gate_up_proj_bias.detach()
    layer.gate_proj.bias = nn.Parameter(bias[:, ::2].flatten())
    layer.up_proj.bias = nn.Parameter(bias[:, 1::2].flatten())
    layer.down_proj.bias = nn.Parameter(experts.down_proj_bias.detach().flatten())
    with torch.no_grad():
        wanted = block(x)[0]
        ids, shares = ops.route(block.router(x[0])[0], NUM_CHOSEN, True, *PLAIN)
    assert_near(layer(x[0], ids, shares), wanted[0], 1e-11)


def test_the_state_of_a_layer_is_that_of_its_three_projections() -> None:
    layer = nn.Experts(4, 32, 64, bias=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {
        "gate_proj.weight": (256, 32),
        "gate_proj.bias": (256,),
        "up_proj.weight": (256, 32),
        "up_proj.bias": (256,),
        "down_proj.weight": (128, 64),
        "down_proj.bias": (128,),
    }


def test_a_layer_takes_quantised_and_packed_weights_and_moves_with_them() -> None:
    layer, x = nn.Experts(NUM_EXPERTS, 64, 96), rows(5, 64)
    ids, shares = chosen(5)
    dense = layer(x, ids, shares)
    for projection in (layer.gate_proj, layer.up_proj, layer.down_proj):
        projection.set_weight(quantize(projection.get_parameter("weight"), BlockType.Q8_0).pack(16))
    assert_near(layer(x, ids, shares), dense, 1e-4)
    assert not layer.state_dict() and "weight=Q8_0, activation_bits=16" in repr(layer)
    weight = layer.to("meta").down_proj.weight
    assert isinstance(weight, PackedTensor) and weight.device.type == "meta"


def test_gradients_reach_rows_shares_and_weights() -> None:
    layer = nn.Experts(4, 16, 24, bias=True).requires_grad_()
    x, shares = rows(6, 16).requires_grad_(), rows(6, 2, seed=1).requires_grad_()
    layer(x, torch.arange(12).view(6, 2) % 4, shares).square().sum().backward()
    for tensor in (x, shares, *layer.parameters()):
        assert tensor.grad is not None and tensor.grad.any()


def test_an_activation_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="activation must be 'silu' or 'swiglu_oai', but is 'relu'"):
        nn.Experts(2, 16, 16, activation="relu")


@pytest.mark.parametrize(
    "x, ids, shares", [((5, 63), (5, 2), (5, 2)), ((5, 64), (4, 2), (4, 2)), ((5, 64), (5, 2), (5, 3))]
)
def test_rows_and_choices_that_do_not_fit_are_refused_with_their_shapes(
    x: tuple[int, ...], ids: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    layer = nn.Experts(4, 64, 32)
    with pytest.raises(ValueError, match=r"expected x \[\*, 64\] and ids and shares \[\*, k\], but found"):
        layer(torch.ones(x), torch.zeros(ids, dtype=torch.int32), torch.ones(shares))


@pytest.mark.parametrize("name", ["x", "ids", "shares"])
def test_what_is_no_tensor_of_its_kind_is_refused_by_its_name(name: str) -> None:
    layer = nn.Experts(4, 64, 32)
    arguments: dict[str, Any] = {
        "x": torch.ones(5, 64), "ids": torch.zeros(5, 2, dtype=torch.int32), "shares": torch.ones(5, 2)
    }  # fmt: skip
    for wrong in (None, [[0, 1]], torch.ones(5, 2, dtype=torch.bool), arguments["x"].to_sparse()):
        with pytest.raises(TypeError, match=f"Experts: {name} must be"):
            layer(**{**arguments, name: wrong})
    with pytest.raises(TypeError, match="Experts: ids must be integers, but are torch.float32"):
        layer(**{**arguments, "ids": arguments["shares"]})  # of which the whole parts would have been taken


def test_an_activation_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation must be .* but is \[\]"):
        nn.Experts(2, 16, 16, activation=[])  # type: ignore[arg-type]
