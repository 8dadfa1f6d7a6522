"""Models beside Llama against transformers, on tiny random checkpoints of every one and its variants."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parity import BFLOAT16_BAR, FLOAT32_BAR, SIZES, check_greedy, check_parity, nmse, prompt
from safetensors.torch import load_file, save_file
from torch import Tensor

from infinicore.quantization import QuantizedTensor
from infinilm.checkpoint import CheckpointError, open_checkpoint
from infinilm.models.description import describe
from infinilm.models.llama import LlamaForCausalLM

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
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32}
OLMO_ROPES = {
    "full_attention": {**YARN, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
MINISTRAL_ROPE = {
    **YARN,
    "rope_theta": 5000.0,
    "original_max_position_embeddings": 8,  # so that prompts are longer
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.7,
}
HUNYUAN_ROPE = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 100.0}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
GRANITE4 = {
    **GRANITE,
    "layer_types": ["full_attention"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
}
GEMMA3 = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
DEEPSEEK = {
    **QWEN_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK_ROPE = {**YARN, "rope_theta": 5000.0, "mscale": 0.707, "mscale_all_dim": 0.707}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "num_mtp_layers": 0,
}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
DEEPSEEK_V3 = {**{key: value for key, value in DEEPSEEK.items() if "experts" not in key}, **GROUPED}
ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek2": ("DeepseekV2", {**DEEPSEEK, "first_k_dense_replace": 1, "rope_parameters": DEEPSEEK_ROPE}),
    "deepseek2, latent queries": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": 24, "routed_scaling_factor": 2.5, "n_shared_experts": 3},
    ),
    "deepseek2, another head": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "qk_nope_head_dim": 18,
            "v_head_dim": 11,
            "attention_bias": True,
            "rope_parameters": {**DEEPSEEK_ROPE, "mscale_all_dim": 0.5},
        },
    ),
    "deepseek3": ("DeepseekV3", {**DEEPSEEK_V3, "rope_parameters": DEEPSEEK_ROPE}),
    "deepseek3, no groups": (
        "DeepseekV3",
        {**DEEPSEEK_V3, **NO_GROUPS, "q_lora_rank": 24, "norm_topk_prob": False},
    ),
    "dots": ("Dots1", {**GROUPED, **NO_GROUPS, "head_dim": 16, "norm_topk_prob": True}),
    "dots, window": ("Dots1", {**GROUPED, "head_dim": 16, "sliding_window": 9, "max_window_layers": 1}),
    "ernie": ("Ernie4_5", {"head_dim": 16}),
    "erniemoe": ("Ernie4_5_Moe", ERNIE_EXPERTS),
    "erniemoe, some layers": (
        "Ernie4_5_Moe",
        {**ERNIE_EXPERTS, "num_hidden_layers": 4, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
    ),
    "ernie, biases": ("Ernie4_5", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL_ROPE}),
    "ministral3, window": (
        "Ministral3",
        {"head_dim": 24, "sliding_window": 9, "rope_parameters": {**MINISTRAL_ROPE, "mscale_all_dim": 0.5}},
    ),
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
    "glm": ("Glm", {"head_dim": 16}),
    "glm, another part": (
        "Glm",
        {"head_dim": 24, "partial_rotary_factor": 0.75, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4, scaled": ("Glm4", {"head_dim": 16, "rope_parameters": {**YARN, "rope_theta": 5000.0}}),
    "glm4moe": ("Glm4Moe", {**GROUPED, **NO_GROUPS, "head_dim": 16, "attention_bias": True}),
    "glm4moe, norms": ("Glm4Moe", {**GROUPED, "head_dim": 24, "use_qk_norm": True}),
    "granite": ("Granite", GRANITE),
    "granitemoe": ("GraniteMoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "granite, fourth": ("GraniteMoeHybrid", {**GRANITE4, "position_embedding_type": "rope"}),
    "granite, fourth, not rotated": ("GraniteMoeHybrid", {**GRANITE4, "attention_bias": True}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16, "rope_parameters": HUNYUAN_ROPE}),
    "hunyuan, biases": (
        "HunYuanDenseV1",
        {"attention_bias": True, "head_dim": 24, "tie_word_embeddings": True},
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
    "olmo3": ("Olmo3", {"sliding_window": 9, "num_hidden_layers": 5}),
    "olmo3, scaled": (
        "Olmo3",
        {
            "sliding_window": 9,
            "rope_parameters": OLMO_ROPES,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "olmo3, biases": ("Olmo3", {"sliding_window": 9, "attention_bias": True, "tie_word_embeddings": True}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4, windows": ("Exaone4", {"sliding_window": 9, "num_hidden_layers": 5}),
    "exaone4, another pattern": ("Exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "seedoss": ("SeedOss", {"head_dim": 16}),
    "seedoss, other biases": (
        "SeedOss",
        {"head_dim": 24, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
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
    return any("experts" in option and value for option, value in options.items())


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


def change_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in content.items() if key not in remove}
    (folder / "config.json").write_text(json.dumps(kept | changes))


@pytest.mark.parametrize(
    "key, value",
    [
        ("topk_method", "group_limited_greedy"),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", True),
        ("moe_layer_freq", 2),
        ("use_mla", False),
    ],
)
def test_a_deepseek_that_does_otherwise_is_refused_by_key(key: str, value: Any, make: Any) -> None:
    kind, options = MODELS["deepseek2"]
    _, folder = make(kind, **options)
    change_config(folder, **{key: value})
    with pytest.raises(CheckpointError, match=f"{key} = {value!r} is not supported in a deepseek_v2 model"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "key, value, rule",
    [
        ("v_head_dim", 6, "v_head_dim must be from qk_rope_head_dim 8 to a head's 24, but is 6"),
        ("v_head_dim", 25, "v_head_dim must be from qk_rope_head_dim 8 to a head's 24, but is 25"),
        ("qk_rope_head_dim", 7, "qk_rope_head_dim must be even, but is 7"),
        ("qk_nope_head_dim", 0, "qk_nope_head_dim must be a whole number"),
        ("q_lora_rank", 0, "q_lora_rank must be a whole number"),
        ("n_shared_experts", 0, "n_shared_experts must be a whole number"),
        ("routed_scaling_factor", -1.0, "routed_scaling_factor must be a number above 0"),
    ],
)
def test_sizes_of_a_deepseek_that_have_no_heads_are_refused(
    key: str, value: Any, rule: str, make: Any
) -> None:
    kind, options = MODELS["deepseek2"]
    _, folder = make(kind, **options)
    change_config(folder, **{key: value})
    with pytest.raises(CheckpointError, match=rule):
        LlamaForCausalLM.from_pretrained(folder)


GUESSING = {
    "deepseek3": "model.layers.2.eh_proj.weight",
    "glm4moe": "model.layers.2.shared_head.norm.weight",
    "erniemoe": "model.mtp_block.0.self_attn.q_proj.weight",
}


@pytest.mark.parametrize("name", GUESSING)
def test_layers_that_guess_further_tokens_are_not_read(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    _, folder = make(kind, **options)
    change_config(folder, num_nextn_predict_layers=1)
    wanted = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(prompt())
    weights = load_file(folder / "model.safetensors") | {GUESSING[name]: torch.ones(3)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(prompt()), wanted)


@pytest.mark.parametrize("name", ["deepseek3", "erniemoe"])
def test_a_bias_of_the_choice_stays_in_float32(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    model = LlamaForCausalLM.from_pretrained(make(kind, **options)[1], dtype=torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    assert gate.weight.dtype == torch.bfloat16
    assert gate.e_score_correction_bias.dtype == torch.float32


CHOSEN_OTHERWISE: dict[str, tuple[str, str, Any, str]] = {
    "softmax": ("deepseek3", "scoring_func", "softmax", "'softmax' is not supported in a deepseek_v3 model"),
    "greedily": ("deepseek3", "topk_method", "greedy", "'greedy' is not supported in a deepseek_v3 model"),
    "by halves": ("deepseek3", "rope_interleave", False, "False is not supported in a deepseek_v3 model"),
    "by halves, as null": ("deepseek3", "rope_interleave", None, "rope_interleave = None is not supported"),
    "groups that differ": ("glm4moe", "n_group", 3, "num_experts 8 are not 3 groups of equally many"),
    "groups of one": ("dots", "n_group", 8, "num_experts 8 are not 8 groups of equally many experts, two"),
    "too many groups": ("deepseek3", "topk_group", 5, "topk_group must be a whole number from 1 to 4"),
    "too few left": ("deepseek3", "topk_group", 1, "num_experts_per_tok must be a whole number from 1 to 2"),
    "too large at once": ("erniemoe", "moe_intermediate_size", 10**6, "moe_num_shared_experts must be"),
    "too many at once": (
        "deepseek2, latent queries",
        "moe_intermediate_size",
        10**6,
        "n_shared_experts must be a whole number from 1 to 1, but is 3",
    ),
    "least total": ("erniemoe", "moe_norm_min", 0.1, "0.1 is not supported in an ernie4_5_moe model"),
    "biases": ("erniemoe", "use_bias", True, "True is not supported in an ernie4_5_moe model"),
    "float8": ("deepseek3", "quantization_config", {"quant_method": "fp8"}, "give the unquantised model"),
}


@pytest.mark.parametrize("name", CHOSEN_OTHERWISE)
def test_experts_that_are_chosen_in_a_way_unknown_are_refused(name: str, make: Any) -> None:
    model, key, value, rule = CHOSEN_OTHERWISE[name]
    kind, options = MODELS[model]
    _, folder = make(kind, **options)
    change_config(folder, **{key: value})
    with pytest.raises(CheckpointError, match=rule):
        LlamaForCausalLM.from_pretrained(folder)


SHARES_UNSAID = ("norm_topk_prob", "routed_scaling_factor")
UNSAID = {
    "deepseek3": SHARES_UNSAID,
    "dots": SHARES_UNSAID,
    "erniemoe": ("moe_layer_start_index", "moe_layer_end_index", "moe_num_shared_experts"),
    "glm4moe": SHARES_UNSAID,
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_a_config_does_not_say_of_experts_is_as_in_transformers(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    change_config(folder, UNSAID[name])
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


def test_shares_of_experts_that_are_null_do_not_add_up_to_one_as_in_transformers(make: Any) -> None:
    kind, options = MODELS["deepseek3"]
    theirs, folder = make(kind, **options)
    change_config(folder, norm_topk_prob=None)
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


def test_windows_of_a_dots_have_a_usual_size(make: Any) -> None:
    theirs, folder = make("Dots1", **{**MODELS["dots"][1], "max_window_layers": 1})
    change_config(folder, ("sliding_window", "layer_types"))
    config = LlamaForCausalLM.from_pretrained(folder).config
    wanted = type(theirs).from_pretrained(folder).config
    assert [config.window_of(layer) for layer in range(2)] == [None, wanted.sliding_window]


def test_a_dots_may_name_its_sigmoids_as_its_makers_do(make: Any) -> None:
    kind, options = MODELS["dots"]
    theirs, folder = make(kind, **options)
    change_config(folder, scoring_func="noaux_tc")
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


def test_gradients_go_through_the_latents_of_a_deepseek_as_in_transformers(make: Any) -> None:
    kind, options = MODELS["deepseek2, latent queries"]
    theirs, folder = make(kind, **options)
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_()
    for logits in (ours(prompt(), logits_to_keep=0), theirs(prompt()).logits):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), prompt().flatten()).backward()
    for part in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        name = f"model.layers.0.self_attn.{part}.weight"
        found, wanted = (model.get_parameter(name).grad for model in (ours, theirs))
        assert nmse(found, wanted) < 1e-9


@torch.inference_mode()
def test_who_observes_a_layer_of_a_deepseek_keeps_what_it_made(make: Any) -> None:
    """Queries are rotated elsewhere."""
    kind, options = MODELS["deepseek2"]
    model = LlamaForCausalLM.from_pretrained(make(kind, **options)[1], dtype=torch.float32)
    layer, seen = model.model.layers[1].self_attn.q_proj, list[Tensor]()
    layer.register_forward_hook(lambda layer, args, made: seen.extend([*args, made]))
    model(prompt())
    x, found = seen
    assert nmse(found, x @ layer.weight.T) < 1e-10


def test_an_exaone_whose_pattern_is_a_word_goes_by_its_layer_types(make: Any) -> None:
    kind, options = MODELS["exaone4, windows"]
    theirs, folder = make(kind, **options)
    change_config(folder, sliding_window_pattern="LLLG")
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


def test_a_hunyuan_whose_config_is_as_its_makers_write_it_has_another_base(make: Any) -> None:
    kind, options = MODELS["hunyuan"]
    theirs, folder = make(kind, **options)
    passed_over = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, **passed_over}
    change_config(folder, ("rope_parameters",), rope_theta=10000.0, rope_scaling=rope, use_qk_norm=True)
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize(
    "name, key",
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma3", "query_pre_attn_scalar"),
        ("granite", "logits_scaling"),
    ],
)
def test_a_scale_whose_quotients_no_float32_holds_is_refused(name: str, key: str, make: Any) -> None:
    kind, options = MODELS[name]
    _, folder = make(kind, **options)
    change_config(folder, **{key: 1e-300})
    with pytest.raises(CheckpointError, match=f"{key} must be a number from 1e-06 to .* but is 1e-300"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_gemma_whose_config_has_no_scale_has_that_of_transformers(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    change_config(folder, remove=("query_pre_attn_scalar",))
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


def test_how_many_experts_an_ernie_chooses_stands_under_the_usual_name_first_as_in_transformers(
    make: Any,
) -> None:
    kind, options = MODELS["erniemoe"]
    theirs, folder = make(kind, **options)
    change_config(folder, num_experts_per_tok=1)
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_scaling": YARN}, {"rope_parameters": {}}],
    ids=["no rope", "no truncate", "an empty rope"],
)
def test_gpt_oss_is_rotated_as_by_transformers_where_its_config_says_little(changes: Any, make: Any) -> None:
    kind, options = MODELS["gptoss"]
    theirs, folder = make(kind, **options)
    change_config(folder, remove=("rope_parameters",), **changes)
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize("key", ["swiglu_alpha", "swiglu_limit"])
def test_gpt_oss_with_another_gate_is_refused_by_key(key: str, make: Any) -> None:
    kind, options = MODELS["gptoss"]
    _, folder = make(kind, **options, **{key: 2.0})
    with pytest.raises(CheckpointError, match=f"{key} = 2.0 is not supported; expected"):
        LlamaForCausalLM.from_pretrained(folder)


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
    change_config(folder, quantization_config={"quant_method": "mxfp4"})


MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


GATE = "model.layers.0.mlp.experts.gate_up_proj"
BROKEN_BLOCKS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a block less": ("blocks", lambda codes: codes[:, :, :-1]),
    "blocks of 8 bytes": ("blocks", lambda codes: codes[..., :8]),
    "no groups": ("blocks", lambda codes: codes.flatten(2)),
    "floats": ("blocks", lambda codes: codes.float()),
    "one exponent": ("scales", lambda scales: scales[0, 0, 0]),
    "signed exponents": ("scales", lambda scales: scales.to(torch.int8)),
}


@pytest.mark.parametrize("name", BROKEN_BLOCKS)
def test_mxfp4_of_another_shape_or_type_is_refused_by_name(name: str, make: Any) -> None:
    kind, options = MODELS["gptoss"]
    theirs, folder = make(kind, **options, intermediate_size=64)
    write_mxfp4(theirs, folder)
    part, change = BROKEN_BLOCKS[name]
    change_weights(folder, {f"{GATE}_{part}": change})
    with pytest.raises(CheckpointError, match=f"'{GATE}_blocks': MXFP4 needs torch.uint8 .* but has"):
        LlamaForCausalLM.from_pretrained(folder)


def change_weights(folder: Path, changes: Mapping[str, Any]) -> None:
    """Put a tensor, what a function makes of the one that is there, or None in its place"""
    weights = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        weights[name] = change(weights[name]).contiguous() if callable(change) else change
    save_file({n: w for n, w in weights.items() if w is not None}, folder / "model.safetensors")


QUERIES, EXPERTS = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts"
ZEROS = torch.zeros(6, 240, 2, 16, dtype=torch.uint8)
NEW_WEIGHTS: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "in blocks too": (
        "gptoss",
        {f"{GATE}_blocks": ZEROS, f"{GATE}_scales": ZEROS[..., 0].clone()},
        f"'{GATE}' and '{GATE}_blocks' are both",
    ),
    "under two names": (
        "gemma3",
        {"language_model.model.norm.weight": torch.ones(64)},
        "'model.norm.weight'",
    ),
    "parts of a whole": (
        "phi3",
        {QUERIES: torch.ones(64, 64)},
        f"'{QUERIES}' and '.*qkv_proj.weight' are both",
    ),
    "stacked too": ("olmoe", {f"{EXPERTS}.up_proj.weight": torch.ones(720, 64)}, "up_proj.weight' are both"),
    "of all experts too": (
        "olmoe",
        {f"{EXPERTS}.gate_up_proj": torch.ones(6, 240, 64)},
        r"gate_up_proj' and '.*experts.0.gate_proj.weight' are both",
    ),
    "of all experts, no halves": (
        "qwen2moe",
        {f"{EXPERTS}.gate_up_proj": torch.ones(6, 81, 64)},
        r"gate_up_proj' has shape \(6, 81, 64\), but should be \[experts, 2 parts, columns\]",
    ),
    "of all experts, one number": (
        "mixtral",
        {f"{EXPERTS}.down_proj": torch.tensor(1.0)},
        r"down_proj' has shape \(\), but should be \[experts, 1 parts, columns\]",
    ),
    "one number for heads": (
        "phi3",
        {QUERIES.replace("q_", "qkv_"): None, QUERIES: torch.tensor(1.0)},
        f"'{QUERIES}' is a single number",
    ),
    "one number for experts": (
        "olmoe",
        {f"{EXPERTS}.{i}.up_proj.weight": torch.tensor(1.0) for i in range(6)},
        "the 6 weights like .* are not all rows",
    ),
    "one number for a score": (
        "olmo2",
        {"score.weight": torch.tensor(1.0)},
        r"'score.weight' has shape \(\)",
    ),
}


@pytest.mark.parametrize("name", NEW_WEIGHTS)
def test_a_weight_that_is_there_twice_or_has_no_rows_is_refused_by_name(name: str, make: Any) -> None:
    model, weights, error = NEW_WEIGHTS[name]
    kind, options = MODELS[model]
    _, folder = make(kind, **options)
    change_weights(folder, weights)
    with pytest.raises(CheckpointError, match=error):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["granitemoe", "mixtral", "olmoe", "qwen2moe", "qwen3moe, some layers"])
def test_experts_that_transformers_saved_as_one_tensor_are_read(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    theirs.save_pretrained(folder, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(folder / "model.safetensors"))
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


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


def test_a_gemma_that_also_sees_has_the_dtype_that_is_said_of_the_whole(make: Any) -> None:
    kind, options = MODELS["gemma3"]
    _, folder = make(kind, **options)
    text = json.loads((folder / "config.json").read_text())
    text.pop("dtype")
    whole = {"model_type": "gemma3", "text_config": text, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(whole))
    assert LlamaForCausalLM.from_pretrained(folder).config.dtype == torch.float16


def test_a_quantised_gemma_that_also_sees_is_refused_by_key(make: Any) -> None:
    kind, options = MODELS["gemma3"]
    _, folder = make(kind, **options)
    whole = {"model_type": "gemma3", "text_config": json.loads((folder / "config.json").read_text())}
    whole["quantization_config"] = {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="quantization_config = .* is not supported"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("is_tied", [None, False])
@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_the_text_of_a_mistral_that_also_sees_is_that_of_transformers(
    kind: str, is_tied: bool | None, tmp_path: Path
) -> None:
    text = {**SIZES, "model_type": kind, "head_dim": 16, "sliding_window": 9, "initializer_range": 0.25}
    if kind == "ministral3":
        text["rope_parameters"] = MINISTRAL_ROPE
    eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = {} if is_tied is None else {"tie_word_embeddings": is_tied}
    config = transformers.Mistral3Config(text_config=text, vision_config={**eyes, "head_dim": 16}, **whole)
    torch.manual_seed(1)
    theirs = transformers.Mistral3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    check_parity(theirs, tmp_path, torch.float32, FLOAT32_BAR)
    change_config(tmp_path, remove=("tie_word_embeddings",))  # which the files of Mistral Small leave out
    check_parity(theirs, tmp_path, torch.float32, FLOAT32_BAR)


def test_a_ministral_is_rotated_as_by_transformers_where_its_config_says_nothing(make: Any) -> None:
    kind, options = MODELS["ministral3"]
    theirs, folder = make(kind, **options)
    change_config(folder, remove=("rope_parameters",), rope_theta=300.0)
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


GRANITES: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba layers": ({"layer_types": ["mamba", "attention"]}, r"layer_types \['mamba', 'attention'\]"),
    "Mamba layers, unsaid": ({"layer_types": None}, "layer_types None is not supported"),
    "experts": ({"num_local_experts": 4}, "num_local_experts = 4 is not supported"),
}


@pytest.mark.parametrize("name", GRANITES)
def test_a_granite_of_more_than_attention_is_refused_by_key(name: str, make: Any) -> None:
    kind, options = MODELS["granite, fourth"]
    _, folder = make(kind, **options)
    changes, error = GRANITES[name]
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=error):
        LlamaForCausalLM.from_pretrained(folder)


def test_a_granite_4_whose_layers_are_named_as_their_makers_name_them_is_one(make: Any) -> None:
    kind, options = MODELS["granite, fourth"]
    theirs, folder = make(kind, **options)
    change_config(folder, layer_types=["attention"] * 2)
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


MINISTRALS: dict[str, tuple[dict[str, Any], str]] = {
    "growth": ({"rope_parameters": {**MINISTRAL_ROPE, "llama_4_scaling_beta": -1}}, "llama_4_scaling_beta"),
    "rope": ({"rope_parameters": HUNYUAN_ROPE | {"alpha": None}}, "'dynamic'.* is not supported"),
    "text": (
        {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
        "text_config: model_type must be one of mistral, ministral3, but is 'mistral4'",
    ),
}


@pytest.mark.parametrize("name", MINISTRALS)
def test_what_a_ministral_cannot_have_is_refused_by_name(name: str, make: Any) -> None:
    kind, options = MODELS["ministral3"]
    _, folder = make(kind, **options)
    changes, error = MINISTRALS[name]
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=error):
        LlamaForCausalLM.from_pretrained(folder)


WITHOUT_WINDOW = [
    "deepseek2",
    "deepseek3",
    "ernie",
    "erniemoe",
    "glm",
    "glm4",
    "glm4moe",
    "granite",
    "granitemoe",
    "hunyuan",
    "olmo2",
    "olmoe",
    "seedoss",
]


@pytest.mark.parametrize("name", [*WITHOUT_WINDOW, "granite, fourth"])
def test_a_window_where_a_model_has_none_changes_nothing(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    change_config(folder, sliding_window=9)
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize("name", [*WITHOUT_WINDOW, "mixtral, window", "phi3, window"])
def test_layer_types_where_all_layers_look_equally_far_change_nothing(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    change_config(folder, sliding_window=9, layer_types=["sliding_attention", "full_attention"])
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


SETTLED = {
    "erniemoe": {"norm_topk_prob": False},
    "gemma2": {"mlp_bias": True},
    "gemma3": {"attn_logit_softcapping": 0.5, "mlp_bias": True},
    "gptoss": {"norm_topk_prob": False},
    "granitemoe": {"norm_topk_prob": False, "mlp_bias": True},
    "mixtral": {"norm_topk_prob": False, "attention_bias": True},
    "olmo2": {"mlp_bias": True},
    "phi3": {"attention_bias": True, "mlp_bias": True},
    "qwen2moe": {"mlp_bias": True},
}


@pytest.mark.parametrize("name", SETTLED)
def test_what_a_model_always_does_its_config_does_not_change(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    change_config(folder, **SETTLED[name])
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


def test_a_qwen3_mixture_may_say_what_all_of_them_have_and_have_not(make: Any) -> None:
    """As Qwen3-Coder's files do"""
    kind, options = MODELS["qwen3moe"]
    theirs, folder = make(kind, **options)
    change_config(folder, use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0)
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize("name", ["glm", "glm4", "glm4moe"])
def test_a_part_of_a_head_that_is_null_is_all_of_it_as_in_transformers(name: str, make: Any) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    change_config(folder, ("rope_parameters",), partial_rotary_factor=None)
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_how_much_of_a_head_phi_rotates_stands_among_its_rope_first(place: str, make: Any) -> None:
    _, folder = make("Phi3")
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.75}
    change_config(folder, ("rope_parameters",), partial_rotary_factor=0.5, **{place: rope})
    theirs = transformers.Phi3ForCausalLM.from_pretrained(folder)
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


def test_the_length_that_phi_was_trained_for_stands_beside_its_rope_or_is_that_of_transformers(
    make: Any,
) -> None:
    _, folder = make("Phi3")
    factors = {name: [factor] * 8 for name, factor in (("short_factor", 1.5), ("long_factor", 3.0))}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 8, **factors}
    removed = ("rope_parameters", "original_max_position_embeddings")
    change_config(folder, removed, rope_scaling=rope)
    theirs = transformers.Phi3ForCausalLM.from_pretrained(folder)
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


def test_a_qwen3_whose_config_has_no_size_of_heads_has_that_of_transformers(make: Any) -> None:
    theirs, folder = make("Qwen3", head_dim=128)
    change_config(folder, remove=("head_dim",))
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize(
    "kind, key",
    [("Ernie4_5", "head_dim"), ("SeedOss", "num_key_value_heads"), ("SmolLM3", "num_key_value_heads")],
)
def test_a_size_of_heads_that_is_null_follows_from_others_as_in_transformers(
    kind: str, key: str, make: Any
) -> None:
    theirs, folder = make(kind, head_dim=16, num_key_value_heads=4)
    change_config(folder, **{key: None})
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


def test_a_scaling_beside_the_two_ropes_of_a_gemma_is_that_of_transformers(make: Any) -> None:
    _, folder = make("Gemma3", **GEMMA3, rope_parameters=GEMMA_ROPES)
    change_config(folder, rope_scaling={"rope_type": "linear", "factor": 3.0})
    theirs = transformers.Gemma3ForCausalLM.from_pretrained(folder)
    check_parity(theirs, folder, torch.float32, FLOAT32_BAR)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_gemma_whose_windows_are_scaled_is_refused(key: str, make: Any) -> None:
    _, folder = make("Gemma3", **GEMMA3)
    scaled = {key: "linear", "factor": 4.0, "rope_theta": 50.0}
    change_config(folder, rope_parameters={**GEMMA_ROPES, "sliding_attention": scaled})
    with pytest.raises(CheckpointError, match="is not supported where there is a window"):
        LlamaForCausalLM.from_pretrained(folder)


PASSED_OVER: dict[str, tuple[dict[str, Any], str]] = {
    "one rope for all layers": (
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}},
        "rope_parameters of a model with two ropes are of 'full_attention' and .*, but here .*linear",
    ),
    "an old name": (
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling of a model with two ropes needs a rope_type, but is .*linear",
    ),
}


@pytest.mark.parametrize("name", PASSED_OVER)
@pytest.mark.parametrize("model", ["gemma3", "olmo3"])
def test_a_scaling_of_one_of_two_ropes_that_transformers_passes_over_is_refused(
    model: str, name: str, make: Any
) -> None:
    changes, error = PASSED_OVER[name]
    kind, options = MODELS[model]
    _, folder = make(kind, **options)
    change_config(folder, ("rope_parameters",), **changes)
    with pytest.raises(CheckpointError, match=error):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("theta", [500000.0, 10000.0])
def test_an_olmo3_whose_config_has_one_scaling_has_it_where_there_is_no_window(
    theta: float, make: Any
) -> None:
    """As its makers write it; in transformers the base beside it is that of these layers alone."""
    kind, options = MODELS["olmo3"]
    theirs, folder = make(kind, **options)
    change_config(folder, ("rope_parameters", "layer_types"), rope_theta=theta, rope_scaling=YARN)
    check_parity(type(theirs).from_pretrained(folder), folder, torch.float32, FLOAT32_BAR)


def test_windows_of_a_smollm3_that_are_named_and_switched_off_are_refused(make: Any) -> None:
    """In transformers a mask has them and attention has not."""
    _, folder = make("SmolLM3")
    change_config(folder, sliding_window=9, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(CheckpointError, match="layer_types has 'sliding_attention', but use_sliding_window"):
        LlamaForCausalLM.from_pretrained(folder)
