"""Products with quantised weights on CUDA, and rows of them, against the reference dequantisation in float64.

TRITON_INTERPRET=1 runs the kernels without a GPU, on fewer sizes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from test_triton import (  # noqa: F401  fixtures too
    DEVICE,
    ERRORS,
    HAS_GPU,
    IS_INTERPRETED,
    _exact,
    no_waiting,
    placed,
    pytestmark,
)
from test_triton import assert_near as assert_same
from torch import Tensor
from torch.nn.functional import silu

import infinicore
from infinicore import nn, ops
from infinicore.float8 import Float8, Float8Tensor, to_float8
from infinicore.graph import CudaArena, Graph
from infinicore.ops import registry
from infinicore.ops.fused_reference import places
from infinicore.ops.registry import Op
from infinicore.ops.samples import random_blocks
from infinicore.quantization import BlockType, QuantizedTensor, quantize
from infinicore.tiles import PARTS, TiledTensor, tile
from infinilm.models.llama import LlamaForCausalLM

on_a_gpu = pytest.mark.skipif(not HAS_GPU, reason="a model is loaded to a CUDA device")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF = torch.bfloat16
ROWS = (1, 2, 7, 16, 17, 64, 300) if HAS_GPU else (1, 7, 17)
SOME_ROWS = (1, 2, 9, 33, 64) if HAS_GPU else (1, 9)
Type = BlockType | Float8
KINDS = (*PARTS, Float8.FP8)
BLOCKS = pytest.mark.parametrize("type", PARTS, ids=lambda type: type.name)
TYPES = pytest.mark.parametrize("type", KINDS, ids=lambda type: type.name)
IDS = torch.tensor([[1, 2, 3, 0, 7, 39, 5]])
# Those that have a kernel of their own for one row
ONE_ROW = pytest.mark.parametrize(
    "type", [type for type in KINDS if type is not BlockType.Q6_K], ids=lambda type: type.name
)


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        from infinicore.ops.triton import fragment_rows

        monkeypatch.setattr(registry, "ACCELERATOR_DEVICES", ("cpu",))
        monkeypatch.setattr(fragment_rows, "num_processors", lambda device: 8)  # so that sums are split


def run(op: Op[Any], x: Tensor, *args: Any, out: Any = None) -> Tensor:
    """By the kernel, which accepts it and waits for nothing"""
    kernels = [kernel for kernel in op.kernels if kernel.name == "triton"]
    x = x.to(DEVICE)
    with no_waiting():
        found = (kernel.run(out, x, *args) for kernel in kernels)
        result: Tensor | None = next((result for result in found if result is not None), None)
    assert result is not None, f"{op.name} was declined"
    return result


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def weight_of(type: Type, num_rows: int, num_blocks: int) -> TiledTensor | Float8Tensor:
    if isinstance(type, Float8):
        return float8_of(num_rows, 16 * num_blocks)
    return tile(random_blocks(type, num_rows, num_blocks)).to(DEVICE)


def float8_of(num_rows: int, length: int) -> Float8Tensor:
    return to_float8(random(num_rows + 1, length, dtype=torch.float32)[1:])


def product(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    wide = x.to(DEVICE).double() @ weight.dequantize().double().T
    return wide if bias is None else wide + bias.double()


def assert_near(found: Tensor, x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> None:
    """A product's error grows with its terms, not with its value, which may be near zero."""
    wanted = product(x, weight, bias)
    squares = x.to(DEVICE).double().square() @ weight.dequantize().double().square().T
    terms = (squares if bias is None else squares + bias.double().square()).sqrt()
    assert found.shape == wanted.shape and found.dtype == x.dtype
    error = (found.double() - wanted).norm() / terms.norm()
    assert error <= ERRORS[x.dtype], error


@TYPES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_of_any_number_of_rows(num_rows: int, dtype: torch.dtype, type: Type) -> None:
    if IS_INTERPRETED and dtype == torch.float32 and num_rows > 1:
        pytest.skip("the interpreter is slow")
    if type is Float8.FP8 and num_rows > 64:
        pytest.skip("so many rows are rounded themselves")
    shapes = [(1, 1), (33, 3), (77, 5), (200, 40)] if HAS_GPU else [(1, 1), (70, 3)]
    for size, num_blocks in shapes:
        weight = weight_of(type, size, num_blocks)
        x, bias = random(num_rows, weight.shape[1], dtype=dtype), random(size, dtype=dtype)
        assert_near(run(ops.quantized_linear, x, weight, None), x, weight)
        assert_near(run(ops.quantized_linear, x, weight, bias), x, weight, bias)


@TYPES
def test_a_row_that_is_longer_than_a_step(type: Type) -> None:
    length = 14336 if HAS_GPU else 4352
    weight = weight_of(type, 24, length // type.elements_per_block)
    x = random(1, length, dtype=torch.float32)
    assert_near(run(ops.quantized_linear, x, weight, None), x, weight)


@TYPES
def test_rows_of_x_may_lie_apart_and_have_any_leading_sizes(type: Type) -> None:
    weight = weight_of(type, 19, 2)
    wide = random(2, 3, weight.shape[1] + 5, dtype=HALF)
    for x in (wide[..., 5:], wide[:1, 1, 3:-2], wide[0, 0, 1:-4]):
        assert_near(run(ops.quantized_linear, x, weight, None), x, weight)


@TYPES
def test_nan_in_one_row_leaves_its_neighbours_alone(type: Type) -> None:
    weight = weight_of(type, 40, 2)
    for num_rows in (2, 9):
        x = random(num_rows, weight.shape[1], dtype=HALF)
        clean = run(ops.quantized_linear, x, weight, None)
        x[1, 7] = torch.nan
        found = run(ops.quantized_linear, x, weight, None)
        assert found[1].isnan().all()
        assert torch.equal(torch.cat([found[:1], found[2:]]), torch.cat([clean[:1], clean[2:]]))


@BLOCKS
def test_a_scale_that_is_nan_spoils_the_output_of_its_row_alone(type: BlockType) -> None:
    blocks = random_blocks(type, 40, 2)
    spoilt = blocks.clone()
    spoilt.blocks[11, : type.bytes_per_block] = 0xFF
    for num_rows in (1, 9):
        x = random(num_rows, blocks.shape[1], dtype=HALF)
        clean, found = (
            run(ops.quantized_linear, x, tile(weight).to(DEVICE), None) for weight in (blocks, spoilt)
        )
        assert found[:, 11].isnan().all()
        others = torch.arange(40, device=DEVICE) != 11
        assert torch.equal(found[:, others], clean[:, others])


@TYPES
def test_a_row_of_any_size_and_with_values_of_many_sizes(type: Type) -> None:
    weight = weight_of(type, 40, 5)
    x = random(1, weight.shape[1], dtype=torch.float32)
    spread = torch.logspace(-6, 0, weight.shape[1], device=DEVICE)
    for one in (x * 1e-30, x * 1e30, x * spread, x * spread.flip(0)):
        row = one.to(HALF)
        assert_near(run(ops.quantized_linear, row, weight, None), row, weight)
    for spoilt in (torch.nan, torch.inf, -torch.inf):
        row = x.to(HALF)
        row[0, 17] = spoilt
        assert not run(ops.quantized_linear, row, weight, None).isfinite().any()


# ---- rows with what stands beside their product ------------------------------------------------------------


def dense(weight: QuantizedTensor) -> Tensor:
    return weight.dequantize().double()


@TYPES
@pytest.mark.parametrize("num_rows", SOME_ROWS)
def test_rows_with_their_residual(num_rows: int, type: Type) -> None:
    weight = weight_of(type, 70, 3)
    x, bias = random(num_rows, weight.shape[1], dtype=HALF), random(70, dtype=HALF)
    residual = random(num_rows, 70, dtype=HALF).flip(1)
    for b in (None, bias):
        wide = None if b is None else b.double()
        wanted = ops.linear_add.reference(x.double(), dense(weight), wide, residual.double())
        assert_same(run(ops.linear_add, x, weight, b, residual), wanted, HALF)
    assert run(ops.linear_add, x, weight, None, residual, out=residual) is residual
    assert_same(residual, wanted - bias.double(), HALF)


@TYPES
@pytest.mark.parametrize("num_rows", SOME_ROWS)
def test_rows_through_norm_gate_and_up(num_rows: int, type: Type) -> None:
    weight = weight_of(type, 192, 5)
    x, bias = random(num_rows, weight.shape[1], dtype=HALF) * 3, random(192, dtype=HALF)
    norm = random(weight.shape[1], dtype=HALF)
    for n in (None, norm):
        for b in (None, bias):
            wide = [None if t is None else t.double() for t in (n, b)]
            wanted = ops.gated_linear.reference(x.double(), wide[0], 1e-5, dense(weight), wide[1])
            assert_same(run(ops.gated_linear, x, n, 1e-5, weight, b), wanted, HALF)


@TYPES
def test_sums_that_are_split_are_the_same_each_time(type: Type) -> None:
    """As many parts as there are, in their order, whoever comes last"""
    from infinicore.ops.triton import fragment_rows

    num_blocks = 8192 // type.elements_per_block if HAS_GPU else 1024 // type.elements_per_block
    weight = weight_of(type, 256, num_blocks)
    x, residual = random(9, weight.shape[1], dtype=HALF), random(9, 256, dtype=HALF)
    assert fragment_rows.tile_of(9, weight).splits > 1
    found = [run(ops.linear_add, x, weight, None, residual) for _ in range(3)]
    assert_same(found[0], ops.linear_add.reference(x.double(), dense(weight), None, residual.double()), HALF)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@ONE_ROW
def test_a_row_through_norm_and_heads_into_the_cache(type: Type) -> None:
    num_blocks = 96 // type.elements_per_block or 1
    for size in (64, 128) if HAS_GPU else (64,):
        weight, bias = weight_of(type, 6 * size, num_blocks), random(6 * size, dtype=HALF)
        x, norm = random(1, weight.shape[1], dtype=HALF), random(weight.shape[1], dtype=HALF)
        rows, sin, cos, keys, values, *where = places(1, size, HALF)
        rest = placed((rows, sin, cos, False, keys, values, *where))
        wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in rest]
        wanted = ops.project_heads.reference(
            x.double(), norm.double(), 1e-5, dense(weight), bias.double(), *wide
        )
        assert_same(run(ops.project_heads, x, norm, 1e-5, weight, bias, *rest), wanted, HALF)
        assert_same((rest[4], rest[5]), (wide[4], wide[5]), HALF)


def test_what_stands_beside_products_is_left_to_others_where_rows_depend_on_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(infinicore, "deterministic", True)
    for type in (BlockType.Q8_0, Float8.FP8):
        weight, x = weight_of(type, 64, 64 // type.elements_per_block), random(2, 64, dtype=HALF)
        for kernel in ops.linear_add.kernels:
            assert kernel.name != "triton" or not kernel.accepts(None, x, weight, None, x)


@TYPES
def test_a_row_has_the_same_bits_in_any_company(type: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infinicore, "deterministic", True)
    weight, num_rows = weight_of(type, 70, 5), 300 if HAS_GPU else 20
    for dtype in DTYPES if HAS_GPU else DTYPES[1:2]:
        x = random(num_rows, weight.shape[1], dtype=dtype)
        together = run(ops.quantized_linear, x, weight, None)
        assert_near(together, x, weight)
        for rows in (slice(0, 1), slice(18, 19), slice(3, 12), slice(0, 17), slice(0, 256)):
            assert torch.equal(run(ops.quantized_linear, x[rows], weight, None), together[rows])


@TYPES
def test_embedding_gives_the_bits_of_the_reference(type: Type) -> None:
    weight = weight_of(type, 53, 5)
    ids = torch.tensor([[0, 52, 7], [8, 8, 33]])
    found = run(ops.quantized_embedding, ids, weight)
    assert torch.equal(found, weight.dequantize()[ids.to(DEVICE)])
    out = torch.empty_like(found)
    assert run(ops.quantized_embedding, ids.int(), weight, out=out) is out and torch.equal(out, found)


def test_an_id_outside_of_the_table_gives_nan_in_its_row() -> None:
    weight = weight_of(BlockType.Q4_0, 9, 3)
    found = run(ops.quantized_embedding, torch.tensor([8, 9, -1, 0]), weight)
    assert found[1:3].isnan().all() and found[[0, 3]].isfinite().all()


def test_results_may_go_where_the_caller_says() -> None:
    weight = weight_of(BlockType.Q8_0, 64, 2)
    for num_rows in (1, 5):
        x = random(num_rows, 64, dtype=HALF)
        expected = run(ops.quantized_linear, x, weight, None)
        for out in (torch.empty_like(x), torch.empty(64, num_rows, dtype=HALF, device=DEVICE).t(), x):
            assert run(ops.quantized_linear, x, weight, None, out=out) is out and torch.equal(out, expected)


def test_kernels_decline_what_they_do_not_take() -> None:
    weight, x = weight_of(BlockType.Q8_0, 8, 1), random(2, 32, dtype=torch.float32)
    kernel = next(kernel for kernel in ops.quantized_linear.kernels if kernel.name == "triton")
    plain = random_blocks(BlockType.Q8_0, 8, 1).to(DEVICE)
    for declined in ((x.double(), weight), (x[:0], weight), (x.clone().requires_grad_(), weight), (x, plain)):
        assert kernel.run(None, *declined, None) is None
    assert kernel.run(None, x, weight, random(8, dtype=HALF)) is None


@on_a_gpu
@BLOCKS
def test_a_model_of_blocks_gives_the_logits_it_gives_without_kernels(type: BlockType) -> None:
    model = small_model(type)
    with torch.inference_mode():
        wanted = model(IDS, logits_to_keep=0)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.set_weight(tile(module.weight))
        found = model.to(DEVICE)(IDS.to(DEVICE), logits_to_keep=0).cpu()
    assert nmse(found, wanted) <= 1e-9


def small_model(type: BlockType) -> LlamaForCausalLM:
    from infinilm.config import LlamaConfig

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=77,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            eos_token_id=None,
            tie_word_embeddings=False,
        )  # fmt: skip
    )
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            num_rows, length = module.weight.shape
            module.set_weight(random_blocks(type, num_rows, length // type.elements_per_block))
    return model


def nmse(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return ((found - wanted).square().sum() / wanted.square().sum()).item()


# ---- loading -----------------------------------------------------------------------------------------------


def quantized_file(folder: Path, type: BlockType) -> Path:
    """A tiny GGUF whose matrices are of one type, those whose rows fill its blocks"""
    weights = {name: weight / 8 for name, weight in gguf_files.llama_weights().items()}
    file = gguf_files.llama_file(weights)
    for name, weight in weights.items():
        if weight.dim() == 2 and weight.shape[1] % type.elements_per_block == 0:
            entry = file.tensor(gguf_files.gguf_name(name))
            rounded = quantize(gguf_files.interleaved(name, weight), type)
            entry.data, entry.type_id = rounded.blocks.numpy().tobytes(), type.ggml_id
    path = folder / f"{type.name}.gguf"
    path.write_bytes(file.encode())
    return path


@on_a_gpu
@pytest.mark.parametrize("dtype, bar", [("bfloat16", 1e-3), ("float16", 1e-3), ("float32", 1e-6)])
@pytest.mark.parametrize("type", [BlockType.Q8_0, BlockType.Q4_0], ids=lambda type: type.name)
def test_a_gguf_on_the_gpu_gives_the_logits_of_the_cpu(
    type: BlockType, dtype: str, bar: float, tmp_path: Path
) -> None:
    path = quantized_file(tmp_path, type)
    wanted = LlamaForCausalLM.from_pretrained(path, dtype="float32")(IDS, logits_to_keep=0)
    model = LlamaForCausalLM.from_pretrained(path, device="cuda", dtype=dtype)
    assert isinstance(model.model.layers[0].mlp.down_proj.weight, TiledTensor)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.inference_mode():
        assert nmse(model(IDS.cuda(), logits_to_keep=0).cpu(), wanted) <= bar
        one_by_one = torch.cat([model(IDS[:, : i + 1].cuda()) for i in range(IDS.shape[1])], 1)
        assert nmse(one_by_one.cpu(), wanted) <= bar


@on_a_gpu
def test_types_without_kernels_are_dequantised_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = gguf_files.llama_weights()
    file = gguf_files.llama_file(weights)
    blocks = random_blocks(BlockType.Q5_1, 96, 2)
    entry = file.tensor("blk.0.ffn_gate.weight")
    entry.data, entry.type_id = blocks.blocks.numpy().tobytes(), BlockType.Q5_1.ggml_id
    path = tmp_path / "mixed.gguf"
    path.write_bytes(file.encode())
    with caplog.at_level(logging.WARNING):
        model = LlamaForCausalLM.from_pretrained(path, device="cuda", dtype="float32")
    gate = model.model.layers[0].mlp.gate_proj.weight
    assert torch.equal(gate.detach().cpu(), blocks.dequantize())
    assert "1 Q5_1 matrices become torch.float32" in caplog.text


@on_a_gpu
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_a_float_checkpoint_is_quantised_on_the_gpu_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    folder = gguf_files.write_folder(tmp_path / "model", gguf_files.llama_weights())
    options = {"dtype": "float32", "quantize": name}
    on_cpu = LlamaForCausalLM.from_pretrained(folder, **options)
    on_gpu = LlamaForCausalLM.from_pretrained(folder, device="cuda", **options)
    for one, other in zip(on_cpu.modules(), on_gpu.modules(), strict=True):
        if isinstance(one, nn.Linear | nn.Embedding):
            assert torch.equal(one.weight.dequantize(), other.weight.dequantize().cpu())
    with torch.inference_mode():
        found = on_gpu(IDS.cuda(), logits_to_keep=0).cpu()
    assert nmse(found, on_cpu(IDS, logits_to_keep=0)) <= 1e-6


@on_a_gpu
def test_what_is_sent_through_pinned_memory_arrives_as_it_was() -> None:
    from infinilm.checkpoint.staging import PIECE_BYTES, Staging

    staging = Staging(DEVICE)
    for size in (1, PIECE_BYTES // 4, 5 * PIECE_BYTES // 4 + 3):
        sent = torch.randn(size, generator=torch.Generator().manual_seed(size))
        assert torch.equal(staging.send(sent).cpu(), sent)


@on_a_gpu
def test_products_can_be_recorded() -> None:
    for num_rows in (1, 5):
        weight, x = weight_of(BlockType.Q4_0, 200, 40), random(num_rows, 1280, dtype=HALF)
        graph = Graph.record(
            lambda x=x, weight=weight: ops.quantized_linear(x, weight, None), CudaArena(DEVICE)
        )
        x.copy_(x.flip(1))
        assert_near(graph.replay(), x, weight)


# ---- float8 ------------------------------------------------------------------------------------------------


@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 17, 32])
def test_float8_products_round_nothing_but_the_weight(num_rows: int, dtype: torch.dtype) -> None:
    for size, length in ((1, 16), (33, 304), (77, 592), (64, 4096), (48, 14336)):
        weight = float8_of(size, length)
        x, bias = random(num_rows, length, dtype=dtype), random(size, dtype=dtype)
        assert_near(run(ops.quantized_linear, x, weight, None), x, weight)
        assert_near(run(ops.quantized_linear, x, weight, bias), x, weight, bias)


@on_a_gpu
@pytest.mark.parametrize("num_rows", [65, 300])
def test_float8_products_of_many_rows_round_each_to_a_scale_of_its_own(num_rows: int) -> None:
    for size, length in ((160, 320), (77, 592)):
        weight, bias = float8_of(size, length), random(size, dtype=torch.bfloat16)
        sizes = torch.logspace(-6, 6, num_rows, device=DEVICE)[:, None]
        x = (random(num_rows, length, dtype=torch.float32) * sizes).bfloat16()
        found, wanted = run(ops.quantized_linear, x, weight, bias), product(x, weight, bias)
        errors = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert errors.max() <= 4e-2  # 3 bits of a number are kept
        x[1, 7] = torch.nan
        spoilt = run(ops.quantized_linear, x, weight, bias)
        assert spoilt[1].isnan().all() and torch.equal(spoilt[2:], found[2:])


@on_a_gpu
@pytest.mark.parametrize("num_rows", [65, 100, 128])
def test_rows_that_are_rounded_to_float8_have_a_residual_or_a_gate_in_the_same_launch(num_rows: int) -> None:
    from infinicore.ops.triton import float8

    for size, length in ((64, 320), (6144, 4096), (4096, 14336), (28672, 4096)):
        weight, bias = float8_of(size, length), random(size, dtype=HALF)
        x, residual = random(num_rows, length, dtype=HALF) / 64, random(num_rows, size, dtype=HALF)
        values, scales = float8.rounded(x)
        wanted = product(values.double() * scales.double(), weight, bias)
        found = run(ops.linear_add, x, weight, bias, residual)
        assert nmse(found, wanted + residual.double()) <= 1e-5
        gate, up = wanted.chunk(2, -1)
        assert nmse(run(ops.gated_linear, x, None, 0.0, weight, bias), silu(gate) * up) <= 3e-5


@on_a_gpu
def test_float8_rows_are_those_of_the_reference() -> None:
    weight, ids = float8_of(53, 1296), torch.tensor([[0, 52], [7, 7]])
    assert torch.equal(run(ops.quantized_embedding, ids, weight), weight.dequantize()[ids.to(DEVICE)])
    assert run(ops.quantized_embedding, torch.tensor([53, -1]), weight).isnan().all()


@on_a_gpu
def test_a_float8_model_is_near_the_one_it_was_made_of(tmp_path: Path) -> None:
    folder = gguf_files.write_folder(tmp_path / "model", gguf_files.llama_weights())
    wanted = LlamaForCausalLM.from_pretrained(folder)(IDS, logits_to_keep=0)
    model = LlamaForCausalLM.from_pretrained(folder, device="cuda", dtype="bfloat16", quantize="fp8")
    assert isinstance(model.lm_head.weight, Float8Tensor)
    with torch.inference_mode():
        assert nmse(model(IDS.cuda(), logits_to_keep=0).cpu(), wanted) <= 2e-2
