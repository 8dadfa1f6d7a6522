"""Models beside Llama against transformers, on tiny random checkpoints of every one and its variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import BFLOAT16_BAR, FLOAT32_BAR, check_greedy, check_parity, known, make, nmse, prompt
from safetensors.torch import load_file, save_file

from infinicore.quantization import QuantizedTensor
from infinilm.checkpoint import open_checkpoint
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.weights import describe

__all__ = ["known", "make"]

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
GEMMA3 = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {}),
    "phi3, window": ("Phi3", {"sliding_window": 9}),
    "phi4-mini": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "tie_word_embeddings": True},
    ),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "gemma2, its own scale": (
        "Gemma2",
        {"head_dim": 16, "num_hidden_layers": 3, "query_pre_attn_scalar": 40, "attn_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", {**GEMMA3, "num_hidden_layers": 7}),
    "gemma3, scaled": ("Gemma3", {**GEMMA3, "rope_parameters": GEMMA_ROPES}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "gptoss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 9},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral, window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe, normalized": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3moe": ("Qwen3Moe", {**QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3moe, some layers": (
        "Qwen3Moe",
        {
            **QWEN_EXPERTS,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
    "qwen2moe": ("Qwen2Moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 48}),
    "olmo2": ("Olmo2", {}),
    "olmo2, biases": ("Olmo2", {"attention_bias": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3, every other layer": ("SmolLM3", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
    "smollm3, window": (
        "SmolLM3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_whole_and_in_pieces(name: str, known: Any, level: str) -> None:
    kind, options = MODELS[name]
    check_parity(*known(kind, **options), torch.float32, FLOAT32_BAR, length=30)


def has_experts(options: dict[str, Any]) -> bool:
    return any("experts" in option for option in options)


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not has_experts(MODELS[name][1])]
)  # one may tip over
@torch.inference_mode()
def test_bfloat16_logits_are_about_as_exact_as_those_of_transformers(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, torch.bfloat16, **{"initializer_range": 0.1, **options})
    ours, exact = (
        LlamaForCausalLM.from_pretrained(folder, dtype=dtype)(prompt(), logits_to_keep=0)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert nmse(ours, exact) <= max(BFLOAT16_BAR, 3 * nmse(theirs(prompt()).logits, exact))


@pytest.mark.parametrize("length", [20, 31, 32, 33, 40])
def test_phi_goes_over_to_long_frequencies_as_transformers_does(length: int, known: Any) -> None:
    """What was computed with the others is computed anew."""
    kind, options = MODELS["phi4-mini"]
    theirs, folder = known(kind, **options)
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = theirs.generate(prompt(1, length), max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(prompt(1, length), max_new_tokens=30), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_64_greedy_tokens_equal_those_of_transformers(name: str, known: Any) -> None:
    kind, options = MODELS[name]
    check_greedy(*known(kind, **options))


def test_gpt_oss_in_mxfp4_has_the_logits_of_the_same_weights_as_floats(make: Any) -> None:
    kind, options = MODELS["gptoss"]
    theirs, folder = make(kind, **options, intermediate_size=64)
    write_mxfp4(theirs, folder)
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


def write_mxfp4(theirs: Any, folder: Path) -> None:
    """Random blocks in the place of its experts, and their values in that of transformers'"""
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(2)
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        count, columns, rows = weights.pop(name).shape
        size = (count, rows, columns // 32)
        codes = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, size, dtype=torch.uint8, generator=generator)
        weights |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        values = torch.tensor(MXFP4)[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)
        dense = (values * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(2)
        theirs.get_parameter(name).data.copy_(dense.transpose(1, 2))
    save_file(weights, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(content | {"quantization_config": {"quant_method": "mxfp4"}})
    )


MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_a_router_stays_as_it_is_where_matrices_are_rounded(make: Any) -> None:
    kind, options = MODELS["qwen3moe"]
    _, folder = make(kind, **{**options, "moe_intermediate_size": 32})
    model = LlamaForCausalLM.from_pretrained(folder, quantize="q8_0")
    mlp, stored = model.model.layers[0].mlp, load_file(folder / "model.safetensors")
    assert isinstance(mlp.experts.down_proj.weight, QuantizedTensor)
    assert torch.equal(mlp.gate.weight, stored["model.layers.0.mlp.gate.weight"])
    exact = LlamaForCausalLM.from_pretrained(folder)
    assert nmse(model(prompt()), exact(prompt())) < 1e-2


def test_which_steps_of_a_mixture_are_not_recorded_is_told(make: Any) -> None:
    kind, options = MODELS["qwen3moe"]
    with open_checkpoint(make(kind, **options)[1]) as checkpoint:
        assert "on a GPU of more than 42 tokens" in describe(checkpoint)["steps"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_gemma_that_also_sees_is_gemma(prefix: str, make: Any) -> None:
    kind, options = MODELS["gemma3"]
    theirs, folder = make(kind, **options)
    content = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    weights = {prefix + name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(weights | {"vision_tower.x.weight": torch.ones(3)}, folder / "model.safetensors")
    whole = {"model_type": "gemma3", "text_config": content, "vision_config": {}, "eos_token_id": [1, 106]}
    (folder / "config.json").write_text(json.dumps(whole))
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)
    assert LlamaForCausalLM.from_pretrained(folder).config.eos_token_ids == (1, 106)
