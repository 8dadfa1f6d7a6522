"""quantize=: a float checkpoint becomes a quantised model while it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf_files
import pytest
import tokenizers
import torch

from infinicore import nn
from infinicore.quantization import BlockType, PackedTensor, QuantizedTensor, quantize
from infinilm import LLM, SamplingParams, bench
from infinilm.checkpoint import CheckpointError
from infinilm.cli import main
from infinilm.models.llama import LlamaForCausalLM

IDS = torch.tensor([[1, 2, 3, 0, 7]])
KINDS = pytest.mark.parametrize("name", ["q8_0", "q4_0"])


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    dtype = getattr(torch, request.param)
    weights = {name: weight.to(dtype) for name, weight in gguf_files.llama_weights().items()}
    return gguf_files.write_folder(tmp_path / "model", weights)


def quantized_by_hand(folder: Path, name: str, activation_bits: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            weight = quantize(module.weight.detach(), BlockType[name.upper()])
            module.set_weight(weight if activation_bits == 32 else weight.pack(activation_bits))
    return model


@KINDS
@pytest.mark.parametrize("activations, bits", [(None, 16), ("int8", 8), ("float32", 32)])
def test_logits_are_those_of_a_model_quantised_by_hand(
    name: str, activations: str | None, bits: int, folder: Path, level: str
) -> None:
    if (activations, name, level) == (None, "q4_0", "amx"):
        bits = 12  # which one tile takes against weights of four
    model = LlamaForCausalLM.from_pretrained(folder, activations=activations, quantize=name)
    wanted = quantized_by_hand(folder, name, bits)
    assert torch.equal(model(IDS, logits_to_keep=0), wanted(IDS, logits_to_keep=0))


@KINDS
def test_every_matrix_is_in_blocks_and_a_tied_one_is_there_once(name: str, folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, quantize=name)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            assert isinstance(module.weight, PackedTensor) and module.weight.type is BlockType[name.upper()]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.norm.weight.dtype == torch.float32
    assert "weight=Q" in repr(model)


def test_a_float32_model_has_plain_blocks(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype="float32", quantize="q8_0")
    assert type(model.lm_head.weight) is QuantizedTensor


def test_a_gguf_of_floats_can_be_quantised_too(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_files.llama_file().encode())
    folder = gguf_files.write_folder(tmp_path / "folder", gguf_files.llama_weights())
    one, other = (
        LlamaForCausalLM.from_pretrained(path, quantize="q4_0") for path in (tmp_path / "model.gguf", folder)
    )
    assert torch.equal(one(IDS, logits_to_keep=0), other(IDS, logits_to_keep=0))


def test_rows_that_fill_no_blocks_stay_dense_and_are_told_of(tmp_path: Path) -> None:
    weights = gguf_files.llama_weights()
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp."
        for name in ("gate_proj", "up_proj"):
            weights[f"{mlp}{name}.weight"] = weights[f"{mlp}{name}.weight"][:80].contiguous()
        weights[f"{mlp}down_proj.weight"] = weights[f"{mlp}down_proj.weight"][:, :80].contiguous()
    folder = gguf_files.write_folder(tmp_path / "model", weights, intermediate_size=80)
    with pytest.warns(
        UserWarning, match="2 of 16 matrices stay dense: rows of 80 do not fill Q8_0 blocks of 32"
    ):
        model = LlamaForCausalLM.from_pretrained(folder, quantize="q8_0")
    mlp = model.model.layers[1].mlp
    assert isinstance(mlp.down_proj.weight, nn.Parameter) and isinstance(mlp.up_proj.weight, PackedTensor)
    assert bool(model(IDS).isfinite().all())


def test_what_is_quantised_already_is_refused(default_model_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"quantize takes a checkpoint of floats, but .* is Q8_0 already"
    ):
        LlamaForCausalLM.from_pretrained(default_model_path, quantize="q8_0")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"quantize": "q5_k"}, r"quantize must be one of \['fp8', 'q4_0', 'q8_0'\], but is 'q5_k'"),
        ({"quantize": "q8_0", "dtype": "bfloat16"}, "quantize needs a GPU, or a CPU and no dtype or float32"),
        ({"quantize": "q8_0", "device": "meta"}, "device 'meta' cannot be used here"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    folder = gguf_files.write_folder(tmp_path / "model", gguf_files.llama_weights())
    with pytest.raises(ValueError, match=message):
        LlamaForCausalLM.from_pretrained(folder, **options)


MEASURE = """
import resource, sys
from infinilm.models.llama import LlamaForCausalLM
LlamaForCausalLM.from_pretrained(sys.argv[2])  # small: everything is imported and warm
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = LlamaForCausalLM.from_pretrained(sys.argv[1], quantize="q8_0")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_is_the_quantised_model_and_a_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "head_dim": 256, "vocab_size": 1024}
    counts = {"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    weights = wide_weights(12)
    stored = sum(weight.nbytes for weight in weights.values())
    large = gguf_files.write_folder(tmp_path / "large", weights, **sizes, **counts)
    small = gguf_files.write_folder(tmp_path / "small", gguf_files.llama_weights())
    result = subprocess.run([sys.executable, "-c", MEASURE, large, small], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) <= stored * 34 / 64 + 16e6


def wide_weights(num_layers: int) -> dict[str, torch.Tensor]:
    square, half = torch.randn(1024, 1024).bfloat16(), torch.randn(512, 1024).bfloat16()
    weights = {"model.embed_tokens.weight": square.clone(), "model.norm.weight": torch.ones(1024)}
    for layer in range(num_layers):
        for name in gguf_files.LAYER_SHAPES:
            is_norm, is_half = "norm" in name, "k_proj" in name or "v_proj" in name
            weight = torch.ones(1024) if is_norm else half if is_half else square
            weights[f"model.layers.{layer}.{name}"] = weight.clone()
    return weights


def write_tokenizer(folder: Path) -> None:
    words = {f"w{i}": i for i in range(gguf_files.VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "q8_0"},
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"quantize": "q4_0", "activations": "int8"},
        {},
    ],
)
def test_the_command_answers_as_the_library_does(
    options: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(folder)
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = ["generate", "w1 w2 w3", "--raw", "--max-tokens", "6", "--model", str(folder), *flags]
    assert main(command) == 0
    (wanted,) = LLM(folder, **options).generate("w1 w2 w3", SamplingParams(max_tokens=6, temperature=0.0))
    assert capsys.readouterr().out.strip() == wanted.outputs[0].text.strip() != ""


@pytest.mark.parametrize("flag", ["--quantize=q4_0", "--dtype=float32", "--dtype=bfloat16"])
def test_the_benchmark_takes_the_flags(
    flag: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BANDWIDTH_BYTES", 1 << 20)
    write_tokenizer(folder)
    sizes = ["--input-len=8", "--output-len=3", "--rounds=1"]
    assert main(["bench", "latency", *sizes, f"--model={folder}", flag, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decode_tokens_per_second"] > 0


def test_the_command_refuses_to_quantise_twice_in_one_line(
    default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--quantize", "q8_0"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("infinilm: error:") and "already" in line
