"""LLaMA and its kin against transformers, on tiny random checkpoints of every architecture and rope type."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
import transformers
from parity import BFLOAT16_BAR, FLOAT32_BAR, SIZES, check_greedy, check_parity, nmse, prompt
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor

import infinicore
from infinicore import nn
from infinicore.quantization import SCALE_BYTES, BlockType, QuantizedTensor, quantize
from infinilm import DynamicCache
from infinilm.checkpoint import CheckpointError
from infinilm.models.gemma2 import Gemma2MLP
from infinilm.models.llama import (
    AutoLlamaModel,
    LlamaAttention,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaMLP,
    grouped_query_attention,
    multi_head_attention,
    repeat_kv,
)
from infinilm.models.mistral import MistralConfig
from infinilm.models.qwen import Qwen2Config, Qwen3Config

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama, wide heads": ("Llama", {"head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_of_every_architecture_equal_those_of_transformers(name: str, known: Any, level: str) -> None:
    kind, options = ARCHITECTURES[name]
    check_parity(*known(kind, **options), torch.float32, FLOAT32_BAR)


def swap_heads(state: dict[str, Tensor]) -> None:
    weight = state["model.layers.1.self_attn.q_proj.weight"]
    weight.copy_(torch.cat([weight[16:32], weight[:16], weight[32:]]))


@pytest.mark.parametrize(
    "change_config, change_weights",
    [
        ({"rms_norm_eps": 1e-5}, lambda state: None),
        ({"rope_parameters": {"rope_theta": 10010.0, "rope_type": "default"}}, lambda state: None),
        ({}, lambda state: state["model.layers.1.mlp.down_proj.bias"].zero_()),
        ({}, swap_heads),
    ],
    ids=["eps", "theta", "bias", "heads"],
)
@torch.inference_mode()
def test_what_is_slightly_wrong_is_far_above_the_bar(
    change_config: dict[str, Any], change_weights: Any, make: Any
) -> None:
    theirs, folder = make("Llama", attention_bias=True, mlp_bias=True)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | change_config))
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    change_weights(ours.state_dict())
    assert nmse(ours(prompt(), logits_to_keep=0), theirs(prompt()).logits) > 500 * FLOAT32_BAR


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16_logits_stay_close_to_those_of_transformers(name: str, make: Any) -> None:
    kind, options = ARCHITECTURES[name]
    options = {"initializer_range": 0.1, **options}
    check_parity(*make(kind, torch.bfloat16, **options), torch.bfloat16, BFLOAT16_BAR)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_of_every_architecture_equal_those_of_transformers(name: str, known: Any) -> None:
    kind, options = ARCHITECTURES[name]
    check_greedy(*known(kind, **options))


@pytest.mark.parametrize("length", [21, 60])
@pytest.mark.parametrize("rope_type", ROPES)
def test_logits_of_every_rope_type_equal_those_of_transformers(
    rope_type: str, length: int, known: Any
) -> None:
    theirs, folder = known("Llama", rope_parameters={"rope_theta": 5000.0, **ROPES[rope_type]})
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt(length=length)
    with torch.inference_mode():
        assert nmse(ours(ids, logits_to_keep=0), theirs(ids).logits) <= FLOAT32_BAR


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "yarn"])
def test_rope_beyond_the_trained_length_equals_transformers_token_for_token(
    rope_type: str, known: Any
) -> None:
    theirs, folder = known("Llama", rope_parameters={"rope_theta": 5000.0, **ROPES[rope_type]})
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt(1, 50)
    wanted = theirs.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(ids, max_new_tokens=64), wanted)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "default"])
def test_a_prompt_longer_than_chunk_and_training_equals_transformers(rope_type: str, make: Any) -> None:
    sizes = {"max_position_embeddings": 600, "num_hidden_layers": 1}
    rope = {"rope_theta": 5000.0, **ROPES[rope_type]}
    theirs, folder = make("Llama", **sizes, rope_parameters=rope)
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt(1, 700).clamp(min=1)  # transformers would take 0 for padding
    wanted = theirs.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(ids, max_new_tokens=8), wanted)


@pytest.mark.parametrize(
    "scaling, reason",
    [
        ({"rope_type": "ntk"}, "unknown"),
        ({"type": "cubic", "factor": 2.0}, "unknown"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be a number from 1.0 to"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta": 1}, "beta"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "numbers"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ("linear", "mapping"),
    ],
)
def test_a_wrong_rope_scaling_is_an_error_and_never_no_scaling(scaling: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LlamaConfig(rope_scaling=scaling)


def test_a_config_keeps_its_scaling_whatever_becomes_of_the_one_given() -> None:
    given: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    config = LlamaConfig(rope_scaling=given)
    given["short_factor"][0], given["long_factor"] = 9.0, [9.0] * 64
    assert config == LlamaConfig(rope_scaling=dict(config.rope.scaling))
    assert len({config, replace(config), LlamaConfig()}) == 2


def test_type_is_an_alias_of_rope_type() -> None:
    assert LlamaConfig(rope_scaling={"type": "linear", "factor": 2.0}).rope.scaling["rope_type"] == "linear"


PLACES: dict[str, dict[str, Any]] = {
    "trained length outside": {"original_max_position_embeddings": 16},
    "trained length in both places": {"rope_scaling": {"original_max_position_embeddings": 48}}
    | {"original_max_position_embeddings": 16},
    "trained length nowhere": {},
    "theta within": {"rope_scaling": {"rope_theta": 700.0}, "rope_theta": 900.0},
    "theta outside": {"rope_theta": 900.0},
    "two scalings": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}},
    "keys of other programs": {"rope_scaling": {"attn_factor": 0.878, "finetuned": True}},
}


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("place", PLACES)
def test_rope_keys_are_read_where_transformers_reads_them(place: str, rope_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = {key: value for key, value in ROPES[rope_type].items() if not key.startswith("original")}
    changes = PLACES[place]
    content = {"model_type": "llama", **SIZES, **changes} | {
        "rope_scaling": {**scaling, **changes.get("rope_scaling", {})}
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs, ours = transformers.AutoConfig.from_pretrained(tmp_path), LlamaConfig.from_dict(content)
    for length in (10, 20, 40, 60, 100):
        found, factor = ours.rope.frequencies(length)
        if rope_type == "default":
            wanted = 1.0 / theirs.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16), 1.0
        else:
            wanted = rope_utils.ROPE_INIT_FUNCTIONS[rope_type](theirs, "cpu", seq_len=length)
        assert torch.equal(found, wanted[0]) and factor == wanted[1]


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "given", [{}, {"sliding_window": None}, {"sliding_window": 9}, {"use_sliding_window": True}]
)
def test_windows_are_those_of_transformers_where_the_config_is_silent(kind: str, given: Any) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, kind + "Config")(**SIZES, **given)
    classes = {"Mistral": MistralConfig, "Qwen2": Qwen2Config, "Qwen3": Qwen3Config}
    ours = classes[kind].from_dict({"model_type": kind.lower(), **SIZES, **given})
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 2
    wanted = [getattr(theirs, "sliding_window", None) if "sliding" in kind else None for kind in types]
    assert [ours.window_of(layer) for layer in range(2)] == wanted


@pytest.mark.parametrize("types", [{}, {"layer_types": ["sliding_attention"] * 2}], ids=["a size", "types"])
def test_a_llama_that_gives_a_window_a_size_has_none_as_in_transformers(types: Any, make: Any) -> None:
    theirs, folder = make("Llama")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"sliding_window": 9, **types}))
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


# ---- the config ----


def test_config_defaults() -> None:
    config = LlamaConfig()
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers)
    assert sizes == (32000, 4096, 11008, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 32, 128)
    assert (config.hidden_act, config.max_position_embeddings, config.rms_norm_eps) == ("silu", 2048, 1e-6)
    assert (config.rope_theta, config.attention_bias, config.mlp_bias) == (10000.0, False, False)
    assert config.base_model_tp_plan["layers.*.self_attn.o_proj"] == "rowwise"
    assert set(config.base_model_pp_plan) == {"embed_tokens", "layers", "norm"}


def test_silu_may_be_called_swish() -> None:
    assert LlamaConfig(hidden_act="swish").hidden_act == "swish"
    with pytest.raises(ValueError, match="expected 'silu' or 'swish'"):
        LlamaConfig(hidden_act="relu")


def test_config_dtype_is_one_of_three() -> None:
    assert LlamaConfig(torch_dtype="bfloat16").dtype == torch.bfloat16
    assert LlamaConfig(dtype=torch.float16).dtype == torch.float16
    for bad in ("float64", "int8", torch.float64):
        with pytest.raises(ValueError, match="dtype"):
            LlamaConfig(dtype=bad)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"hidden_size": 65}, r"'model.embed_tokens.weight' has shape \(257, 64\), .* \(257, 65\)"),
        ({"hidden_size": 0}, "hidden_size .* is 0"),
        ({"hidden_size": -64}, "hidden_size .* is -64"),
        ({"hidden_size": 64.0}, "hidden_size .* is 64.0"),
        ({"hidden_size": "64"}, "hidden_size .* is '64'"),
        ({"hidden_size": True}, "hidden_size .* is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers .* is 1000000000"),
        ({"num_hidden_layers": 3}, "3 layers, but it holds weights of 2 layers"),
        ({"num_hidden_layers": 1}, "1 layers, but it holds weights of 2 layers"),
        ({"vocab_size": 256}, r"'model.embed_tokens.weight' has shape \(257, 64\), .* \(256, 64\)"),
        ({"vocab_size": 2**62}, "vocab_size .* is 4611686018427387904"),
        ({"rope_parameters": {"rope_theta": 0, "rope_type": "default"}}, "rope_theta .* is 0"),
        ({"rope_parameters": {"rope_theta": -1.0, "rope_type": "default"}}, "rope_theta .* is -1.0"),
        ({"rope_parameters": 7}, "rope_parameters must be a mapping, but is 7"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps .* is 'x'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps .* is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"model_type": "mamba"}, "model_type 'mamba' is unknown"),
        ({"head_dim": 15}, "head_dim must be even, but is 15"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config = .* give the unquantised",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, "{'bits': 4, .* give the unquantised"),  # of MLX
        ({"num_experts": 8}, "num_experts = 8 is not supported"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    changed: dict[str, Any], message: str, make: Any
) -> None:
    _, folder = make("Llama")
    content = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(folder))}.*{message}"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "kind, changed",
    [
        ("Mistral", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {"attention_bias": False, "mlp_bias": True}),
        ("Qwen3", {"mlp_bias": True}),
    ],
)
def test_biases_that_a_model_never_or_always_has_its_config_does_not_change(
    kind: str, changed: dict[str, Any], make: Any
) -> None:
    theirs, folder = make(kind)
    content = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(content))
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint32])
def test_a_quantised_model_is_refused_by_its_config_whatever_its_tensors_are(
    dtype: torch.dtype, make: Any
) -> None:
    _, folder = make("Llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name!r} is {dtype}; expected one of"):
        LlamaForCausalLM.from_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="quantization_config = .* give the unquantised"):
        LlamaForCausalLM.from_pretrained(folder)


def test_code_that_a_checkpoint_brings_along_never_runs(make: Any) -> None:
    theirs, folder = make("Llama")
    sentinel = folder / "was_run"
    (folder / "evil.py").write_text(f"open({str(sentinel)!r}, 'w').close()\nclass Evil: pass\n")
    content = json.loads((folder / "config.json").read_text())
    content["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(content))
    LlamaForCausalLM.from_pretrained(folder)
    assert not sentinel.exists()


# ---- weights ----


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.update({"model.extra.weight": torch.ones(1)}), "model.extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.full((64,), float("nan"))}), "model.norm.weight"),
        (lambda t: t["lm_head.weight"].__setitem__((5, 5), float("inf")), "lm_head.weight"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}), "lm_head.weight"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].double()}), "lm_head.weight"),
    ],
)
def test_missing_extra_misshapen_and_nan_weights_are_named(change: Any, named: str, make: Any) -> None:
    _, folder = make("Llama")
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=named):
        LlamaForCausalLM.from_pretrained(folder)


def test_tied_weights_are_one_tensor(make: Any) -> None:
    _, folder = make("Llama", tie_word_embeddings=True)
    for dtype in (None, torch.float32, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_weights_may_stand_under_the_name_of_the_head_alone(make: Any) -> None:
    theirs, folder = make("Llama", tie_word_embeddings=True)
    save_model(theirs, str(folder / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(folder / "model.safetensors")
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)
    model = LlamaForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_head_of_its_own_counts_where_the_config_says_that_it_is_tied(make: Any) -> None:
    theirs, folder = make("Llama")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": True}))
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = LlamaForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_on_how_many_machines_a_model_was_trained_changes_nothing(make: Any) -> None:
    check_parity(*make("Llama", pretraining_tp=2), torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
def test_numbers_beyond_float16_are_not_made_infinite(name: str, tmp_path: Path) -> None:
    weights = gguf_files.llama_weights()
    weights[name].view(-1)[0] = 1e5
    folder = gguf_files.write_folder(tmp_path, weights)
    with pytest.raises(CheckpointError, match=f"'{name}' has numbers beyond float16; take bfloat16"):
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float16)
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def test_stored_half_precision_weights_stay_as_they_are_without_a_dtype(make: Any, level: str) -> None:
    theirs, folder = make("Llama", torch.bfloat16)
    ours = LlamaForCausalLM.from_pretrained(folder)
    matrices = [m.weight for m in ours.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    assert {weight.dtype for weight in matrices} == {torch.bfloat16} and len(matrices) == 16
    with torch.inference_mode():
        logits = ours(prompt(), logits_to_keep=0)
        assert logits.dtype == torch.float32
        exact = type(theirs).from_pretrained(folder, dtype=torch.float32)
        # AMX tiles keep 16 bits of what they multiply
        assert nmse(logits, exact(prompt()).logits) <= (1e-9 if level == "amx" else FLOAT32_BAR)


def test_loaded_weights_do_not_change_with_the_file(make: Any) -> None:
    _, folder = make("Llama")
    model = LlamaForCausalLM.from_pretrained(folder)
    before = model(prompt())
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert torch.equal(model(prompt()), before)


def test_a_gguf_and_a_safetensors_copy_of_one_model_give_equal_logits(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = gguf_files.llama_weights()
    (tmp_path / "model.gguf").write_bytes(gguf_files.llama_file(weights).encode())
    with gguf_files.open_model(tmp_path / "model.gguf") as checkpoint:
        config = checkpoint.config
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    ids = torch.tensor([[1, 2, 3, 0]])
    paths = (folder, tmp_path / "model.gguf")
    one, other = (LlamaForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths)
    assert torch.equal(one(ids, logits_to_keep=0), other(ids, logits_to_keep=0))


@pytest.mark.parametrize("block_type", list(BlockType), ids=lambda block_type: block_type.name)
def test_scales_that_are_not_a_number_are_found(block_type: BlockType) -> None:
    blocks = torch.zeros(2, block_type.bytes_per_block, dtype=torch.uint8)
    weight = QuantizedTensor(blocks, block_type, (2, block_type.elements_per_block))
    assert weight.has_finite_scales() and weight.pack().has_finite_scales()
    begin, end = SCALE_BYTES[block_type]
    for last in range(begin + 2, end + 1, 2):  # of each scale there is
        blocks[1, last - 1] = 0x7E  # the high byte of a float16 NaN
        assert not weight.has_finite_scales() and not torch.isfinite(weight.dequantize()).all()
        assert not weight.pack().has_finite_scales()
        blocks[1, last - 1] = 0
    blocks.fill_(255)
    blocks[:, begin:end] = 0x7B  # a large number, amid bytes that would be none
    assert weight.has_finite_scales() and weight.pack().has_finite_scales()


def test_a_quantised_scale_that_is_not_a_number_is_refused_by_name(tmp_path: Path) -> None:
    file = gguf_files.llama_file()
    weight = gguf_files.llama_weights()["model.layers.1.mlp.down_proj.weight"]
    entry, blocks = file.tensor("blk.1.ffn_down.weight"), quantize(weight, BlockType.Q8_0).blocks
    entry.type_id = BlockType.Q8_0.ggml_id
    for scale, is_refused in ((None, False), (0x7E, True)):
        if scale is not None:
            blocks[3, 1] = scale
        entry.data = blocks.numpy().tobytes()
        (tmp_path / "model.gguf").write_bytes(file.encode())
        with (
            pytest.raises(CheckpointError, match=r"model.layers.1.mlp.down_proj.weight|blk.1.ffn_down.weight")
            if is_refused
            else nullcontext()
        ):
            LlamaForCausalLM.from_pretrained(tmp_path / "model.gguf")


# ---- attention and generation ----


def test_repeat_kv_repeats_each_head_in_a_row() -> None:
    k, v = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    keys, values = repeat_kv(k, v, 3)
    assert keys.shape == (5, 6, 3)
    assert all(
        torch.equal(keys[:, i], k[:, i // 3]) and torch.equal(values[:, i], v[:, i // 3]) for i in range(6)
    )


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("num_queries", [1, 3, 7])
def test_grouped_attention_equals_torchs(num_kv_heads: int, num_queries: int) -> None:
    q = torch.randn(num_queries, 6, 8)
    k, v = torch.randn(2, 7, num_kv_heads, 8)
    visible = torch.ones(num_queries, 7, dtype=torch.bool).tril(7 - num_queries)
    repeated = (t.repeat_interleave(6 // num_kv_heads, 1).transpose(0, 1) for t in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), *repeated, attn_mask=visible, scale=0.3
    )
    torch.testing.assert_close(grouped_query_attention(q, k, v, 0.3), wanted.transpose(0, 1))
    if num_kv_heads == 6:
        torch.testing.assert_close(multi_head_attention(q, k, v, 0.3), wanted.transpose(0, 1))


def test_attention_layer_equals_the_plain_functions_for_any_batch_and_length() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=8)
    layer = LlamaAttention(config)
    for shape in ((2, 7), (3, 7), (2, 4)):
        x = torch.randn(*shape, 32)
        found = layer(x)
        for b in range(shape[0]):
            q, k, v = (p(x[b]).unflatten(-1, (-1, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
            wanted = layer.o_proj(grouped_query_attention(q, k, v, layer.scaling).flatten(1))
            torch.testing.assert_close(found[b], wanted)


@pytest.mark.parametrize("rope_type", ROPES)
def test_layers_by_themselves_make_up_the_model(rope_type: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_scaling=ROPES[rope_type])).model
    ours, its = DynamicCache(), DynamicCache()
    for ids in (prompt(2, 70), prompt(2, 1)):  # longer than trained for, and one more
        x = model.embed_tokens(ids)
        for layer in model.layers:
            x = layer(x, ours, True, model.rope_instance)
        wanted = model(ids, past_key_values=its)
        torch.testing.assert_close(model.norm(x)[:, -1:], wanted, rtol=1e-4, atol=1e-4)


def test_attention_by_itself_takes_the_norm_and_the_residual_too() -> None:
    model = tiny_model().model
    layer, x = model.layers[0], torch.randn(2, 3, 64)
    alone = partial(layer.self_attn, rope_instance=model.rope_instance)
    wanted = x + alone(layer.input_layernorm(x))
    torch.testing.assert_close(alone(x, norm=layer.input_layernorm, residual=x), wanted)


@pytest.mark.parametrize("part", ["project", "rotate", "attend"])
def test_each_part_of_attention_may_be_a_models_own(part: str) -> None:
    asked = []

    def own(self: LlamaAttention, *arguments: Any) -> Any:
        asked.append(part)
        return getattr(LlamaAttention, part)(self, *arguments)

    model = tiny_model().model
    layer, x = model.layers[0].self_attn, torch.randn(2, 3, 64)
    wanted = layer(x, rope_instance=model.rope_instance)
    layer.__class__ = type("OwnAttention", (LlamaAttention,), {part: own})
    assert torch.equal(layer(x, rope_instance=model.rope_instance), wanted) and asked == [part]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden_states": None}, TypeError, "hidden_states must be a tensor"),
        ({"hidden_states": torch.ones(3, 64)}, ValueError, r"\[batch, seq, hidden\].*\(3, 64\)"),
        ({"hidden_states": torch.ones(2, 0, 64)}, ValueError, r"not empty.*\(2, 0, 64\)"),
        ({"past_key_values": transformers.DynamicCache()}, TypeError, "of infinilm, but is transformers"),
        ({"rope_instance": "neox"}, TypeError, "rope_instance must be an nn.RoPE, but is str"),
        ({"position_ids": torch.arange(4)}, ValueError, r"shape \(4,\).*\(2, 3\) tokens"),
        ({"position_ids": torch.arange(3.0)}, TypeError, "position_ids must be whole numbers"),
        ({"position_ids": torch.tensor([0, 1, 10**12])}, IndexError, "position 1000000000000 is outside"),
    ],
)
def test_a_layer_by_itself_refuses_what_is_none_of_its_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = tiny_model().model
    given = {"hidden_states": torch.ones(2, 3, 64), "rope_instance": model.rope_instance, **arguments}
    for layer in (model.layers[0], model.layers[0].self_attn):
        with pytest.raises(error, match=message):
            layer(**given)


def test_mlp_of_a_seven_billion_model_has_the_right_number_of_weights() -> None:
    with torch.device("meta"):
        mlp = LlamaMLP(LlamaConfig())
    assert sum(p.numel() for p in mlp.parameters()) == 135_266_304


@pytest.mark.parametrize("mlp_class", [LlamaMLP, Gemma2MLP])
def test_the_activation_that_an_mlp_shows_is_the_one_of_its_gate(mlp_class: type[LlamaMLP]) -> None:
    mlp = mlp_class(LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4))
    x = torch.randn(5, 32)
    wanted = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), wanted)


def test_mlp_of_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="input must be a tensor, but is NoneType"):
        tiny_model().model.layers[0].mlp(None)


def seen_by_hooks(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """What the layers of a model make of these ids, by name, each token in a row"""
    seen: dict[str, Tensor] = {}

    def keep(name: str, module: Any, args: Any, made: Any) -> None:
        rows = made[0] if isinstance(made, tuple) else made
        seen[name] = rows.reshape(-1, rows.shape[-1])

    hooks = [
        module.register_forward_hook(partial(keep, name))
        for name, module in model.named_modules()
        if name.startswith("model.layers.") and not name.endswith("act_fn")
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", ["llama with biases", "qwen3"])
def test_hooks_see_of_every_layer_what_those_of_transformers_see(name: str, known: Any) -> None:
    kind, options = ARCHITECTURES[name]
    theirs, folder = known(kind, **options)
    found = seen_by_hooks(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), prompt())
    wanted = seen_by_hooks(theirs, prompt())
    assert found.keys() == wanted.keys()
    for layer, rows in wanted.items():
        assert nmse(found[layer].view(rows.shape), rows) <= FLOAT32_BAR, layer


def test_what_a_hook_returns_takes_the_place_of_what_a_layer_makes(known: Any) -> None:
    theirs, folder = known("Llama")
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = theirs(prompt()).logits
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "mlp"):
        hooks = [
            model.get_submodule(f"model.layers.1.{name}").register_forward_hook(lambda *call: call[2] * 0.5)
            for model in (ours, theirs)
        ]
        with torch.no_grad():
            changed = theirs(prompt()).logits
            assert nmse(ours(prompt(), logits_to_keep=0), changed) <= FLOAT32_BAR < nmse(changed, wanted)
        for hook in hooks:
            hook.remove()


def test_hooks_see_every_step_that_is_generated() -> None:
    model, steps = tiny_model(), []
    model.model.layers[0].register_forward_hook(lambda *call: steps.append(len(call[2])))
    model.generate([[5, 6, 7]], max_new_tokens=12)
    assert steps == [3, *[1] * 11]


class LowRank(torch.nn.Module):
    """What a user puts around a layer, which takes x alone"""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.a, self.b = torch.full((layer.in_features, 2), 0.1), torch.full((2, layer.out_features), 0.01)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made + x @ self.a @ self.b


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "gate_proj", "down_proj"])
def test_any_linear_layer_may_be_wrapped_in_one_that_takes_x_alone(name: str, make: Any) -> None:
    theirs, folder = make("Llama")
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for model in (ours, theirs):
        parents = [module for module in model.modules() if hasattr(module, name)]
        for parent in parents:
            setattr(parent, name, LowRank(getattr(parent, name)))
    with torch.no_grad():
        assert nmse(ours(prompt(), logits_to_keep=0), theirs(prompt()).logits) <= FLOAT32_BAR
    wanted = theirs.generate(prompt(), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(prompt(), max_new_tokens=8), wanted)


def test_the_last_of_a_stream_are_kept_whichever_side_its_padding_is_on() -> None:
    model, row = tiny_model(), prompt(1, 5)
    wanted = model(row, logits_to_keep=3)
    for pads in ((4, 0), (0, 4), (2, 2)):
        ids, mask = (torch.nn.functional.pad(t, pads) for t in (row, torch.ones_like(row)))
        torch.testing.assert_close(model(ids, attention_mask=mask, logits_to_keep=3), wanted)
    ids, mask = (torch.nn.functional.pad(t[:, :2], (0, 3)) for t in (row, torch.ones_like(row)))
    found = model(ids, attention_mask=mask, logits_to_keep=3)
    torch.testing.assert_close(found[:, 1:], model(row[:, :2], logits_to_keep=2))
    assert not found[:, 0].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side: str, make: Any) -> None:
    _, folder = make("Llama")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [prompt(1, 12)[0], prompt(1, 5)[0] + 1 & 127]
    pads = [12 - len(row) for row in rows]
    ids = torch.stack(
        [
            torch.nn.functional.pad(r, (p, 0) if side == "left" else (0, p))
            for r, p in zip(rows, pads, strict=True)
        ]
    )
    mask = torch.stack(
        [
            torch.nn.functional.pad(torch.ones(len(r)), (p, 0) if side == "left" else (0, p))
            for r, p in zip(rows, pads, strict=True)
        ]
    )
    logits = model(ids, attention_mask=mask)
    for row, found in zip(rows, logits, strict=True):
        torch.testing.assert_close(found, model(row[None])[0], rtol=1e-4, atol=1e-4)
    generated = model.generate(ids, max_new_tokens=10, attention_mask=mask)[:, 12:]
    for row, found in zip(rows, generated, strict=True):
        assert torch.equal(found, model.generate(row[None], max_new_tokens=10)[0, len(row) :])


def test_prompts_of_several_lengths_each_get_what_they_get_alone(make: Any) -> None:
    _, folder = make("Llama")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8]]
    together = model.generate(prompts, max_new_tokens=12)[:, 8:]
    for ids, found in zip(prompts, together, strict=True):
        assert found.tolist() == model.generate([ids], max_new_tokens=12)[0, len(ids) :].tolist()


def test_generation_stops_at_end_of_text_and_fills_with_padding(make: Any) -> None:
    _, folder = make("Llama")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    free = model.generate(prompt(), max_new_tokens=12)[:, 21:]
    eos = int(free[0, 3])
    first = free[0].tolist().index(eos)
    stopped = model.generate(prompt(), max_new_tokens=12, eos_token_id=eos, pad_token_id=7)[:, 21:]
    assert torch.equal(stopped[0, : first + 1], free[0, : first + 1])
    assert (stopped[0, first + 1 :] == 7).all()


def test_sampling_depends_on_the_seed_and_not_on_neighbours(make: Any) -> None:
    _, folder = make("Llama")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 2.0, "top_k": 200, "top_p": 0.99}
    one = model.generate(prompt(1), seed=5, **options)
    assert torch.equal(one, model.generate(prompt(1), seed=5, **options))
    assert not torch.equal(one, model.generate(prompt(1), seed=6, **options))
    assert torch.equal(one[0], model.generate(prompt(2)[:1].repeat(3, 1), seed=5, **options)[0])


def test_callback_sees_every_token_and_can_stop(make: Any) -> None:
    _, folder = make("Llama")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[list[int | None]] = []

    def callback(tokens: list[int | None]) -> bool:
        seen.append(tokens)
        return len(seen) == 5

    generated = model.generate(prompt(), max_new_tokens=12, callback=callback)
    assert generated[:, 21:].t().tolist() == seen and len(seen) == 5


def test_repetition_penalty_and_min_p_equal_transformers(make: Any) -> None:
    theirs, folder = make("Llama")
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = theirs.generate(
        prompt(), max_new_tokens=32, do_sample=False, repetition_penalty=1.7, pad_token_id=0
    )
    assert torch.equal(ours.generate(prompt(), max_new_tokens=32, repetition_penalty=1.7), wanted)
    # with min_p this high only the likeliest token is left, whatever the temperature
    sampled = ours.generate(prompt(), max_new_tokens=16, min_p=1.0, temperature=5.0)
    assert torch.equal(sampled, ours.generate(prompt(), max_new_tokens=16))


def test_the_usage_example_of_the_design_runs(make: Any) -> None:
    _, folder = make("Llama", torch.bfloat16)
    device = infinicore.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = AutoLlamaModel.from_pretrained(model_path=str(folder), device=device, dtype=infinicore.bfloat16)
    input_ids = infinicore.tensor([[1, 128, 26, 66, 92]], device=device)
    position_ids = infinicore.tensor([[0, 1, 2, 3, 4]], device=device)
    cache = DynamicCache()
    logits = model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
    assert logits.shape == (1, 1, 257) and logits.dtype == torch.bfloat16
    tokens, new_position = [], infinicore.tensor([[5]], device=device)
    for _ in range(10):
        new_token = infinicore.argmax(logits, dim=-1).view(1, 1)
        tokens.append(int(new_token))
        logits = model(input_ids=new_token, position_ids=new_position, past_key_values=cache, use_cache=True)
        new_position += 1
    assert model.generate(input_ids, max_new_tokens=10)[0, 5:].tolist() == tokens


@pytest.mark.parametrize(
    "ids", [torch.zeros(0, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), [], [[]], [[1], []]]
)
def test_empty_prompts_are_refused(ids: Any, make: Any) -> None:
    _, folder = make("Llama")
    model = LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError):
        model.generate(ids)


def test_tokens_outside_the_vocabulary_are_refused(make: Any) -> None:
    _, folder = make("Llama")
    model = LlamaForCausalLM.from_pretrained(folder)
    for bad in (-1, 257, 2**40):
        with pytest.raises(IndexError, match=str(bad)):
            model.generate([[1, bad]])


# ---- the cache ----


def test_cache_appends_grows_and_returns_all() -> None:
    cache = DynamicCache()
    parts = [torch.randn(2, 3, n, 4) for n in (5, 1, 300, 1)]
    for i in range(len(parts)):
        keys, values = cache.update(parts[i], -parts[i], 0)
        assert torch.equal(keys, torch.cat(parts[: i + 1], 2)) and torch.equal(values, -keys)
    assert cache.get_seq_length() == 307 and cache.get_seq_length(1) == 0


def test_a_cache_keeps_the_bits_of_its_first_keys_when_it_grows_by_others() -> None:
    cache = DynamicCache()
    first, more = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 300, 4).half()
    cache.update(first, -first, 0)
    keys, values = cache.update(more, -more, 0)
    assert torch.equal(keys, torch.cat([first, more.float()], 2)) and torch.equal(values, -keys)


def test_cache_refuses_what_does_not_belong() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4), 0)
    for keys, layer, error in (
        (torch.ones(1, 3, 1, 4), 0, ValueError),
        (torch.ones(2, 3, 1, 5), 0, ValueError),
        (torch.ones(3, 1, 4), 0, ValueError),
        (torch.ones(2, 3, 1, 4), 2, IndexError),
        (torch.ones(2, 3, 1, 4), "0", TypeError),
        (torch.ones(2, 3, 1, 4, dtype=torch.int64), 0, TypeError),
        (torch.ones(0, 3, 1, 4), 0, ValueError),
        (None, 0, TypeError),
    ):
        with pytest.raises(error, match="^cache: "):
            cache.update(keys, keys, layer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="values is torch.float64"):
        cache.update(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 4, dtype=torch.float64), 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, "float16"])
def test_a_cache_of_anything_but_floats_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match="DynamicCache: dtype must be"):
        DynamicCache(dtype=dtype)


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be a tensor, but is list"),
        ({"position_ids": [[0, 1]]}, TypeError, "position_ids must be a tensor"),
        ({"position_ids": torch.tensor([[0.0, 1.0]])}, TypeError, "position_ids must be whole numbers"),
        ({"position_ids": torch.tensor([[0, 1, 2]])}, ValueError, r"shape \(1, 3\).*\(1, 2\) tokens"),
        (
            {"position_ids": torch.tensor([[0, 10**12]])},
            IndexError,
            r"position 1000000000000 is outside \[0, ",
        ),
        ({"attention_mask": [[1, 1]]}, TypeError, "attention_mask must be a tensor"),
        ({"logits_to_keep": -1}, ValueError, "logits_to_keep must be 0 or more, but is -1"),
    ],
)
def test_inputs_that_are_none_are_refused_by_name(
    inputs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny_model()(**{"input_ids": torch.tensor([[1, 2]]), **inputs})


def test_a_decoder_layer_takes_its_arguments_by_place_and_by_name() -> None:
    model = tiny_model().model
    layer, x = model.layers[0], torch.randn(1, 5, model.config.hidden_size)
    rope = model.rope_reaching(8)
    by_place = layer(x, DynamicCache(), True, rope)
    by_name = layer(x, past_key_values=DynamicCache(), use_cache=True, rope_instance=rope)
    assert torch.equal(by_place, by_name)
    unrotated = layer(x, DynamicCache(), True)
    assert not torch.equal(by_place, unrotated)
    attention = layer.self_attn
    assert torch.equal(attention(x, DynamicCache(), rope, use_cache=True), attention(x, DynamicCache(), rope))


def test_generate_stops_at_the_ends_that_generation_config_names(make: Callable[..., Any]) -> None:
    _, folder = make("Llama", eos_token_id=5)
    ids = prompt(1, 6)
    said = AutoLlamaModel.from_pretrained(folder).generate(ids, max_new_tokens=8)[0].tolist()
    end = said[8]
    assert end != 5 and len(said) == 14
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    stopped = AutoLlamaModel.from_pretrained(folder).generate(ids, max_new_tokens=8)[0].tolist()
    assert stopped == said[: said.index(end, 6) + 1]


def test_a_device_that_is_not_there_is_refused_by_name(known: Callable[..., Any]) -> None:
    _, folder = known("Llama")
    with pytest.raises(ValueError, match="device 'foo' cannot be used here"):
        AutoLlamaModel.from_pretrained(folder, device="foo")


def test_a_model_may_be_moved_before_it_has_run(known: Callable[..., Any]) -> None:
    _, folder = known("Llama")
    stayed, moved = (AutoLlamaModel.from_pretrained(folder) for _ in range(2))
    assert torch.equal(moved.to("cpu").generate(prompt(1, 6)), stayed.generate(prompt(1, 6)))


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("torch_dtype", "; it is dtype here"), ("device_map", "; it is device here"), ("cache_dir", "")],
)
def test_a_keyword_of_from_pretrained_that_others_have_is_refused_with_ours(
    known: Callable[..., Any], name: str, way_out: str
) -> None:
    _, folder = known("Llama")
    for kind in (AutoLlamaModel, LlamaForCausalLM):
        with pytest.raises(TypeError, match=f"from_pretrained does not know '{name}'{way_out}$"):
            kind.from_pretrained(folder, **{name: "auto"})


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("streamer", "callback"), ("max_length", "max_new_tokens"), ("num_beams", "no beam search")],
)
def test_a_keyword_of_generate_that_others_have_is_refused_with_ours(
    known: Callable[..., Any], name: str, way_out: str
) -> None:
    _, folder = known("Llama")
    with pytest.raises(TypeError, match=f"generate does not know '{name}'; .*{way_out}"):
        AutoLlamaModel.from_pretrained(folder).generate(prompt(1, 6), **{name: 2})


def gradients(model: Any, cache: Any, has_gradient: bool) -> dict[str, Tensor]:
    """Of what a stream ends with, by a weight's name; it is read in two parts, the first with a gradient or
    without"""
    parts = prompt(1).split(13, dim=1)
    with torch.set_grad_enabled(has_gradient):
        model(parts[0], past_key_values=cache)
    made = model.requires_grad_(True)(parts[1], past_key_values=cache)
    model.zero_grad()
    getattr(made, "logits", made)[:, -1].square().sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("has_gradient", [False, True])
def test_gradients_reach_through_a_cache_as_those_of_transformers(has_gradient: bool, make: Any) -> None:
    theirs, folder = make("Llama")
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(True)
    wanted = gradients(theirs, transformers.DynamicCache(), has_gradient)
    found = gradients(ours, DynamicCache(), has_gradient)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert nmse(found[name], gradient) <= 100 * FLOAT32_BAR, name  # the way there and back


@pytest.mark.parametrize("size", [0, 1, 15, 17])
def test_a_cache_of_blocks_that_kernels_cannot_read_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 16, but is {size}"):
        DynamicCache(block_size=size)


def test_a_cache_is_cut_to_a_length_alone() -> None:
    cache = DynamicCache()
    tiny_model()(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    for length, error in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="length"):
            cache.truncate(length)  # type: ignore[arg-type]
    length = torch.tensor(2)
    cache.truncate(length)  # type: ignore[arg-type]
    length += 1
    assert cache.get_seq_length() == 2
    assert cache.get_seq_length(torch.tensor(1)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_cache_that_a_call_left_midway_is_refused_until_it_is_cut(num_before: int) -> None:
    """Its first layer knows more than the others, which would attend to keys that are not there."""
    model, cache, ids = tiny_model(), DynamicCache(), torch.tensor([[1, 2, 3]])
    if num_before:
        model(ids, past_key_values=cache)
    with pytest.raises(IndexError, match="position -1"):
        model(ids, torch.tensor([[0, 1, -1]]), cache)
    with pytest.raises(
        ValueError, match=rf"layer 1 holds \[{num_before}\] .* \[{num_before + 3}\] come before"
    ):
        model(ids, past_key_values=cache)
    cache.truncate(num_before)
    wanted = model(torch.cat([ids, ids], 1)[:, -num_before - 3 :], logits_to_keep=0)[:, num_before:]
    torch.testing.assert_close(model(ids, past_key_values=cache, logits_to_keep=0), wanted)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"querys": None}, TypeError, "querys must be a tensor, but is NoneType"),
        ({"keys": [1.0]}, TypeError, "keys must be a tensor, but is list"),
        ({"values": torch.ones(3, 4, 8, dtype=torch.float64)}, TypeError, "values is torch.float64"),
        ({"querys": torch.ones(1, 2, 4, 8)}, ValueError, r"querys must be \[seq, heads, dim\]"),
        ({"querys": torch.ones(2, 4, 6)}, ValueError, r"querys has shape \(2, 4, 6\)"),
        ({"values": torch.ones(3, 1, 8)}, ValueError, r"values has shape \(3, 1, 8\)"),
        ({"querys": torch.ones(5, 4, 8)}, ValueError, "5 querys cannot be the last of 3 keys"),
        ({"scaling": "0.1"}, TypeError, "scaling must be a number"),
    ],
)
def test_plain_attention_refuses_by_name_what_does_not_fit(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    heads = {"querys": torch.ones(2, 4, 8), "keys": torch.ones(3, 4, 8), "values": torch.ones(3, 4, 8)}
    for attention in (multi_head_attention, grouped_query_attention):
        with pytest.raises(error, match=message):
            attention(**{**heads, "scaling": 0.1, **arguments})


def test_heads_are_not_shared_unless_that_is_asked_for() -> None:
    q, k = torch.ones(2, 4, 8), torch.ones(3, 1, 8)
    with pytest.raises(ValueError, match="4 heads of querys, but 1 of keys; grouped_query_attention"):
        multi_head_attention(q, k, k, 0.1)


@pytest.mark.parametrize("ngroup, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_heads_are_repeated_a_whole_number_of_times(ngroup: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="repeat_kv: ngroup must be"):
        repeat_kv(torch.ones(3, 2, 8), torch.ones(3, 2, 8), ngroup)


@pytest.mark.parametrize("kind", [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)])
def test_ids_positions_and_masks_may_be_integers_of_any_kind(kind: str) -> None:
    model, dtype = tiny_model(), getattr(torch, kind)
    ids, ones, positions = torch.tensor([[1, 2, 3]]), torch.ones(1, 3), torch.arange(3)
    found = model(ids.to(dtype), positions.to(dtype), attention_mask=ones.to(dtype))
    assert torch.equal(found, model(ids))
    generated = model.generate(ids.to(dtype), 4, attention_mask=ones.to(dtype))
    assert torch.equal(generated, model.generate(ids, 4)) and generated.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("attention_mask", "111"),
        ("attention_mask", {}),
        ("do_sample", torch.ones(2)),
        ("do_sample", "no"),
        ("temperature", torch.ones(2)),
        ("top_k", torch.ones(2)),
    ],
)
def test_generate_refuses_by_name_what_is_of_another_type(name: str, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        tiny_model().generate(torch.tensor([[1, 2, 3]]), 1, **{name: wrong})


def test_generate_says_that_there_is_no_memory_for_so_many_tokens() -> None:
    large = {"hidden_size": 8, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 4096}
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **large, "num_hidden_layers": 1}))
    with pytest.raises(
        MemoryError, match="generate: .* tokens do not fit on cpu; ask for fewer max_new_tokens"
    ):
        model.generate([[1]], 1 << 27)  # of 280 TB


def test_no_key_value_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="4 query heads cannot share 0"):
        grouped_query_attention(torch.zeros(1, 4, 8), torch.zeros(1, 0, 8), torch.zeros(1, 0, 8), 1.0)
