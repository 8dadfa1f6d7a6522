"""The names and signatures that callers type. A change here is a change of the public contract."""

import inspect
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import infinicore
import infinilm
from infinicore import distributed, nn, ops
from infinicore.nn import functional as F
from infinicore.nn.functional import RopeAlgo

INFINICORE = """
    Tensor add arange argmax bfloat16 bool cat deterministic device distributed div dtype empty exp float16
    float32 float64 from_blob from_numpy from_torch get_num_threads inference_mode int16 int32 int64 int8
    manual_seed matmul mean mul nn no_grad ones ops pow randn set_num_threads sqrt stack sub tensor uint16
    uint32 uint64 uint8 use_ntops zeros
"""
NN = """
    ColumnParallelLinear Embedding Experts GELU LayerNorm Linear MLPBlock Module ModuleList Parameter
    PositionalEmbedding RBELinear RMSNorm RoPE RowParallelLinear SiLU Softmax functional
"""
FUNCTIONAL = """
    RopeAlgo add_rms_norm causal_softmax embedding geglu gelu layer_norm linear random_sample rms_norm rope
    silu softmax swiglu
"""

INFINILM = """
    AsyncLLM CompletionOutput DynamicCache EmbeddingRequestOutput EngineConfig EngineDead LLM LoRARequest
    Logprob QueueFull RequestError RequestOutput SamplingParams ScoringRequestOutput
    StructuredOutputsParams load_model
"""

PLACE = "dtype=None, device=None"
LINEAR = f"in_features, out_features, bias=True, {PLACE}"
FUNCTIONS = {
    F.causal_softmax: "input, out=None",
    F.embedding: "input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, "
    "sparse=False, *, out=None",
    F.linear: "input, weight, bias=None, *, out=None",
    F.random_sample: "logits, random_val, topp, topk, temperature, *, out=None",
    F.rms_norm: "input, normalized_shape, weight, eps=1e-5, *, out=None",
    F.rope: "x, pos_ids, sin_table, cos_table, algo=RopeAlgo.GPT_NEOX, *, out=None",
    F.silu: "input, inplace=False, *, out=None",
    F.swiglu: "input, other, *, out=None",
    F.add_rms_norm: "input, residual, normalized_shape, weight, eps=1e-5, *, out=None",
    F.geglu: "input, other, approximate='tanh', *, out=None",
    F.gelu: "input, approximate='none', *, out=None",
    F.layer_norm: "input, normalized_shape, weight=None, bias=None, eps=1e-5, *, out=None",
    F.softmax: "input, dim=-1, *, out=None",
}
CONSTRUCTORS = {
    nn.Linear: LINEAR,
    nn.ColumnParallelLinear: f"{LINEAR}, tp_rank=0, tp_size=1",
    nn.RowParallelLinear: f"{LINEAR}, tp_rank=0, tp_size=1, communicator=None",
    nn.Embedding: f"num_embeddings, embedding_dim, padding_idx=None, {PLACE}",
    nn.PositionalEmbedding: f"max_len, embed_dim, {PLACE}",
    nn.Experts: "num_experts, hidden_size, intermediate_size, bias=False, activation='silu', " + PLACE,
    nn.RMSNorm: f"normalized_shape, eps=1e-6, {PLACE}",
    nn.LayerNorm: f"normalized_shape, eps=1e-5, {PLACE}",
    nn.RoPE: f"head_dim, max_seq_len, theta=10000.0, algo=RopeAlgo.GPT_J, {PLACE}",
    nn.GELU: f"approximate='tanh', {PLACE}",
    nn.SiLU: PLACE,
    nn.Softmax: f"dim=-1, {PLACE}",
    nn.MLPBlock: f"hidden_size, intermediate_size, {PLACE}",
    nn.Parameter: "data, tp_dim=0, tp_rank=0, tp_size=1, *, requires_grad=False",
    distributed.LocalCommunicator: "",
    distributed.TorchCommunicator: "group=None, timeout=30.0",
}
METHODS = {
    nn.Module.register_module: "self, name, module, *args, **kwargs",
    nn.Module.register_modules: "self, count, name, module_class, *args, **kwargs",
    nn.Module.load_state_dict: "self, state_dict, strict=False, assign=False",
    nn.Module.load_parameter_from_blob: "self, name, data",
    nn.Parameter.load: "self, full_tensor",
    nn.Parameter.load_blob: "self, data",
    nn.RoPE.forward: "self, x, pos, in_place=False, *, out=None",
    nn.PositionalEmbedding.sinusoidal: f"max_len, embed_dim, {PLACE}",
    nn.PositionalEmbedding.forward: "self, seq_len, offset=0",
    nn.RBELinear.from_dense_weights: "weight, bias=None, block_size=64, num_coefficients=256, "
    f"transform='dct', {PLACE}",
    nn.RBELinear.dense_weight: "self",
    ops.RopeDescriptor.create: "y, x, pos, sin, cos, algo=RopeAlgo.GPT_NEOX",
    ops.RopeDescriptor.calculate: "self, y, x, pos, sin, cos",
    distributed.Communicator.all_reduce: "self, tensor",
    distributed.Communicator.all_gather: "self, tensor, dim=-1",
    distributed.Communicator.broadcast: "self, tensor, src=0",
}
SIGNATURES = {**FUNCTIONS, **CONSTRUCTORS, **METHODS}


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    "module, names",
    [(infinicore, INFINICORE), (nn, NN), (F, FUNCTIONAL)],
    ids=["infinicore", "nn", "functional"],
)
def test_public_names_are_these_and_each_can_be_imported(module: ModuleType, names: str) -> None:
    assert module.__all__ == names.split() == sorted(names.split())
    assert all(hasattr(module, name) for name in names.split())


def test_infinilm_shows_its_public_names_though_each_is_imported_when_it_is_used() -> None:
    assert sorted(infinilm.__all__) == INFINILM.split()
    assert dir(infinilm) == sorted([*INFINILM.split(), "__version__"])
    assert all(inspect.getdoc(getattr(infinilm, name)) for name in INFINILM.split())


def test_a_name_that_infinilm_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'infinilm' has no attribute 'LMM'"):
        infinilm.LMM  # noqa: B018


def test_both_packages_tell_the_version_of_the_one_build() -> None:
    assert infinicore.__version__ == infinilm.__version__ == version("infinilm")
    assert re.fullmatch(r"\d+\.\d+\.\d+", infinilm.__version__)


@pytest.mark.parametrize("package", [infinicore, infinilm], ids=lambda package: package.__name__)
def test_type_checkers_are_told_that_the_annotations_are_meant_for_them(package: ModuleType) -> None:
    assert (Path(inspect.getfile(package)).parent / "py.typed").is_file()


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature_is_the_one_callers_know(function: Callable[..., Any]) -> None:
    assert parameters(function) == parameters(
        eval(f"lambda {SIGNATURES[function]}: ...", {"RopeAlgo": RopeAlgo})
    )


def test_every_function_has_its_signature_pinned() -> None:
    assert {function.__name__ for function in FUNCTIONS} | {"RopeAlgo"} == set(F.__all__)


def test_tensors_devices_and_dtypes_are_torchs() -> None:
    assert infinicore.Tensor is torch.Tensor
    assert infinicore.device("cuda:0") == torch.device("cuda", 0)
    assert infinicore.bfloat16 is torch.bfloat16 and infinicore.bool is torch.bool


def test_layers_are_torchs_modules_and_ours() -> None:
    layers = [getattr(nn, name) for name in nn.__all__ if name not in ("Parameter", "functional")]
    assert all(issubclass(layer, nn.Module) and issubclass(layer, torch.nn.Module) for layer in layers)


def test_rope_algorithms_are_two_and_one_enum_everywhere() -> None:
    assert [algo.name for algo in RopeAlgo] == ["GPT_J", "GPT_NEOX"]
    assert nn.RoPE.Algo is ops.RopeAlgo is F.RopeAlgo


def test_rope_info_has_the_fields_of_the_seed() -> None:
    fields = """
        data_type pos_type batch seqlen nhead dhead table_len table_dim
        x_stride_batch x_stride_seqlen x_stride_nhead y_stride_batch y_stride_seqlen y_stride_nhead
        has_batch_dim pos_has_batch_dim algo
    """
    assert list(ops.RopeInfo.__dataclass_fields__) == fields.split()
    assert ops.RopeDescriptor.workspace_size == 0


def test_operations_of_the_seeds_rbe_tensor_are_those_of_a_tensor() -> None:
    a, b = infinicore.tensor([1.0, 4.0, 9.0, 16.0]).reshape((2, 2)), infinicore.ones((2, 2))
    assert (
        infinicore.zeros((2, 2)).shape
        == infinicore.randn((2, 2)).shape
        == a.unsqueeze(-1).shape[:2]
        == (2, 2)
    )
    assert torch.equal(a.add(b), a + 1) and torch.equal(a.sub(b), a - b)
    assert torch.equal(a.mul(b * 2), a * 2) and torch.equal(a.div(b * 2), a / 2)
    assert a.sqrt().flatten().tolist() == [1, 2, 3, 4] and torch.equal(a.sqrt().pow(2.0), a)
    assert a.mean(1).tolist() == [2.5, 12.5] and infinicore.zeros(1).exp().item() == 1
    assert a.is_leaf and not a.requires_grad
