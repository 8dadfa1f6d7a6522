"""GGUF files of every model, written by the gguf package with its own names, have the logits of the model
they were made from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_out
from parity import prompt
from safetensors.torch import load_file
from test_models import LONGROPE, MODELS
from torch import Tensor

from infinicore.quantization import BlockType, quantize
from infinilm.checkpoint import CheckpointError
from infinilm.config import LAYER_TYPES
from infinilm.models.latent import joined
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.stored import Weight

Weights = dict[str, Tensor]


def paired(weights: Weights, config: Any) -> Weights:
    """llama.cpp's order of the rows of a head where it rotates neighbours"""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in weights.items():
        if (part := name.split(".")[-2]) in heads:
            halves = weight.view(heads[part], 2, -1, *weight.shape[1:])
            weights[name] = halves.transpose(1, 2).reshape(weight.shape)
    return weights


def plus_one(weights: Weights, config: Any) -> Weights:
    return {name: weight + 1 if "norm" in name else weight for name, weight in weights.items()}


def with_factors(weights: Weights, config: Any) -> Weights:
    factors = {kind: torch.tensor(LONGROPE[f"{kind}_factor"]) for kind in ("short", "long")}
    return weights | {f"rope_factors_{kind}.weight": each for kind, each in factors.items()}


def stacked(weights: Weights, config: Any) -> Weights:
    """The experts of a layer as one tensor"""
    found: dict[str, list[Tensor]] = {}
    for name in [name for name in weights if re.search(r"experts\.\d+\.", name)]:
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(weights.pop(name))
    return weights | {name: torch.stack(parts) for name, parts in found.items()}


def halved(weights: Weights, config: Any) -> Weights:
    """Gate and up of all experts apart"""
    found: Weights = {}
    for name, weight in weights.items():
        if name.endswith("input_linear.weight"):
            gate, up = weight.chunk(2, dim=1)
            found[name.replace("input_linear", "experts.w1")] = gate
            found[name.replace("input_linear", "experts.w3")] = up
        else:
            found[name] = weight
    return found


def dealt(weights: Weights, config: Any) -> Weights:
    """Gate and up apart, as rows"""
    found: Weights = {}
    for name, weight in weights.items():
        rows = weight.transpose(1, 2) if name.endswith("_proj") else weight
        if "gate_up_proj" in name:
            for start, part in enumerate(("gate", "up")):
                found[suffixed(name.replace("gate_up", part))] = rows[:, start::2]
        else:
            found[suffixed(name)] = rows
    return found


def suffixed(name: str) -> str:
    """GGUF's names end in weight or bias."""
    if name.endswith("_proj_bias"):
        return name.removesuffix("_bias") + ".bias"
    return name if name.endswith((".weight", ".bias")) else name + ".weight"


def parted(weights: Weights, config: Any) -> Weights:
    """What makes keys of a latent apart from what makes values, and with its columns as rows"""
    for name in [name for name in weights if "kv_b_proj" in name]:
        heads = weights.pop(name).unflatten(0, (config.num_attention_heads, -1))
        keys, values = heads.tensor_split([config.qk_nope_head_dim], dim=1)
        weights |= {name.replace("kv_b", "k_b"): keys.mT, name.replace("kv_b", "v_b"): values}
    return weights


def nothing(writer: Any, config: Any) -> None:
    """What all have says all"""


def caps(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def gemma3_scaled(writer: Any, config: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    writer.add_rope_freq_base_swa(300.0)


def layers_with_windows(writer: Any, config: Any) -> None:
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def olmo3_scaled(writer: Any, config: Any) -> None:
    layers_with_windows(writer, config)
    scaling = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    yarn(writer, scaling)


def part_of_a_head(writer: Any, config: Any) -> None:
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def another_base(writer: Any, config: Any) -> None:
    rope, head_dim = config.rope_parameters, config.head_dim
    del writer.kv_data[0][f"{writer.arch}.rope.freq_base"]
    writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2)))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1.0)


def glm4_scaled(writer: Any, config: Any) -> None:
    part_of_a_head(writer, config)
    yarn(writer, config.rope_parameters)


def multipliers(writer: Any, config: Any) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def granite_experts(writer: Any, config: Any) -> None:
    multipliers(writer, config)
    experts(writer, config)


def gpt_oss(writer: Any, config: Any) -> None:
    experts(writer, config)
    yarn(writer, config.rope_parameters)


def ministral3(writer: Any, config: Any) -> None:
    yarn(writer, config.rope_parameters)
    writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def yarn(writer: Any, scaling: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def experts(writer: Any, config: Any) -> None:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def latents(writer: Any, config: Any) -> None:
    """As all files had it once: heads as they are computed with"""
    for size in ("key_length", "value_length"):
        del writer.kv_data[0][f"{writer.arch}.attention.{size}"]
    writer.add_key_length(config.qk_head_dim)
    writer.add_value_length(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    experts(writer, config)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)


def cached_latents(writer: Any, config: Any) -> None:
    """As newer files have it: one head for all, which is a latent"""
    latents(writer, config)
    for size in ("key_length", "value_length", "head_count_kv"):
        del writer.kv_data[0][f"{writer.arch}.attention.{size}"]
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    yarn(writer, config.rope_parameters)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def biased(weights: Weights, config: Any) -> Weights:
    """A bias of the choice under a name that ends as that of any bias"""
    return {name.replace("_correction_bias", "_correction.bias"): w.squeeze() for name, w in weights.items()}


def grouped(writer: Any, config: Any) -> None:
    experts(writer, config)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    sigmoids(writer, config)


def sigmoids(writer: Any, config: Any) -> None:
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def deepseek3(writer: Any, config: Any) -> None:
    latents(writer, config)
    sigmoids(writer, config)


def deepseek3_scaled(writer: Any, config: Any) -> None:
    deepseek3(writer, config)
    yarn(writer, config.rope_parameters)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def glm4_experts(writer: Any, config: Any) -> None:
    part_of_a_head(writer, config)
    grouped(writer, config)


def ernie_experts(writer: Any, config: Any) -> None:
    experts(writer, config)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.moe_num_shared_experts)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)


def phi3_mini(writer: Any, config: Any) -> None:
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_attn_factors(1.0954451)  # sqrt(1 + ln(64 / 32) / ln(32))
    writer.add_rope_scaling_orig_ctx_len(32)


# Of each model: the architecture, what the converter does to weights, what it writes beside what all have.
KINDS: dict[str, tuple[str, tuple[Callable[[Weights, Any], Weights], ...], Callable[[Any, Any], None]]] = {
    "deepseek2": ("DEEPSEEK2", (stacked, parted), cached_latents),
    "deepseek2, latent queries": ("DEEPSEEK2", (stacked,), latents),
    "deepseek3": ("DEEPSEEK2", (stacked, biased), deepseek3_scaled),
    "deepseek3, no groups": ("DEEPSEEK2", (stacked, biased), deepseek3),
    "dots": ("DOTS1", (stacked, biased), grouped),
    "ernie": ("ERNIE4_5", (), nothing),
    "erniemoe": ("ERNIE4_5_MOE", (stacked, biased), ernie_experts),
    "erniemoe, some layers": ("ERNIE4_5_MOE", (stacked, biased), ernie_experts),
    "ernie, biases": ("ERNIE4_5", (), nothing),
    "ministral3": ("MISTRAL3", (paired,), ministral3),
    "ministral3, window": ("MISTRAL3", (paired,), ministral3),
    "phi3": ("PHI3", (), nothing),
    "phi3, window": ("PHI3", (), nothing),
    "phi4-mini": ("PHI3", (with_factors,), phi3_mini),
    "gemma2": ("GEMMA2", (plus_one,), caps),
    "gemma3": ("GEMMA3", (plus_one,), nothing),
    "gemma3, scaled": ("GEMMA3", (plus_one,), gemma3_scaled),
    "glm": ("CHATGLM", (), part_of_a_head),
    "glm, another part": ("CHATGLM", (), part_of_a_head),
    "glm4": ("GLM4", (), part_of_a_head),
    "glm4, scaled": ("GLM4", (), glm4_scaled),
    "glm4moe": ("GLM4_MOE", (stacked, biased), glm4_experts),
    "glm4moe, norms": ("GLM4_MOE", (stacked, biased), glm4_experts),
    "granite": ("GRANITE", (paired,), multipliers),
    "granitemoe": ("GRANITE_MOE", (paired, halved), granite_experts),
    "hunyuan": ("HUNYUAN_DENSE", (), another_base),
    "gptoss": ("GPT_OSS", (dealt,), gpt_oss),
    "mixtral": ("LLAMA", (paired, stacked), experts),
    "mixtral, window": ("LLAMA", (paired, stacked), experts),
    "olmoe": ("OLMOE", (stacked,), experts),
    "qwen3moe": ("QWEN3MOE", (stacked,), experts),
    "qwen2moe": ("QWEN2MOE", (stacked,), experts),
    "olmo2": ("OLMO2", (), nothing),
    "olmo2, biases": ("OLMO2", (), nothing),
    "olmo3": ("OLMO2", (), layers_with_windows),
    "olmo3, scaled": ("OLMO2", (), olmo3_scaled),
    "exaone4": ("EXAONE4", (), nothing),
    "exaone4, windows": ("EXAONE4", (), layers_with_windows),
    "exaone4, another pattern": ("EXAONE4", (), layers_with_windows),
    "seedoss": ("SEED_OSS", (), nothing),
    "smollm3": ("SMOLLM3", (paired,), nothing),
}


def write(path: Path, name: str, config: Any, weights: Weights, edit: Callable[..., None] = nothing) -> None:
    kind, changes, add_more = KINDS[name]
    architecture = gguf.MODEL_ARCH[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_metadata(writer, config)
    add_more(writer, config)
    edit(writer, config)
    for change in changes:
        weights = change(weights, config)
    write_tensors(writer, architecture, config, weights)


def write_tensors(writer: Any, architecture: gguf.MODEL_ARCH, config: Any, weights: Weights) -> None:
    """Under llama.cpp's names, where it has such"""
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for theirs, weight in weights.items():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
        writer.add_tensor(ours, np.ascontiguousarray(weight.float().numpy()))
    write_out(writer)


def add_metadata(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


@pytest.mark.parametrize("name", KINDS)
def test_a_gguf_file_has_the_logits_of_the_folder_it_was_made_from(
    name: str, make: Any, tmp_path: Path
) -> None:
    kind, options = MODELS[name]
    theirs, folder = make(kind, **options)
    write(tmp_path / "model.gguf", name, theirs.config, load_file(folder / "model.safetensors"))
    one, other = (
        LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, tmp_path / "model.gguf")
    )
    found, wanted = other(prompt(), logits_to_keep=0), one(prompt(), logits_to_keep=0)
    assert torch.equal(found, wanted)


@pytest.fixture
def edited(make: Any, tmp_path: Path) -> Callable[..., tuple[LlamaForCausalLM, LlamaForCausalLM]]:
    """A model, and that of its GGUF file, from whose metadata some are taken and to which others are added"""

    def both(name: str, without: tuple[str, ...] = (), more: Any = nothing, **options: Any) -> Any:
        def edit(writer: Any, config: Any) -> None:
            for key in without:
                del writer.kv_data[0][f"{writer.arch}.{key}"]
            more(writer, config)

        kind, usual = MODELS[name]
        theirs, folder = make(kind, **{**usual, **options})
        path = tmp_path / "model.gguf"
        write(path, name, theirs.config, load_file(folder / "model.safetensors"), edit)
        return tuple(LlamaForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (folder, path))

    return both


OTHERWISE: dict[str, tuple[Any, str]] = {
    "shares that add up to one": (
        lambda writer, config: writer.add_expert_weights_norm(True),
        "norm_topk_prob = True is not supported",
    ),
    "groups of experts": (
        lambda writer, config: writer.add_expert_group_count(8),
        "'deepseek2.expert_group_count' is not supported; its value is 8",
    ),
}


def test_a_file_whose_sigmoids_are_an_array_is_refused(edited: Any) -> None:
    def spoil(writer: Any, config: Any) -> None:
        del writer.kv_data[0][f"{writer.arch}.expert_gating_func"]
        writer.add_array(f"{writer.arch}.expert_gating_func", [2, 2])

    with pytest.raises(CheckpointError, match="'scoring_func' are an array, not one value"):
        edited("dots", more=spoil)


def test_a_file_that_does_not_name_its_sigmoids_has_them_all_the_same(edited: Any) -> None:
    wanted, found = edited("glm4moe", without=("expert_gating_func",))
    assert torch.equal(found(prompt()), wanted(prompt()))


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_deepseek_file_whose_experts_are_chosen_otherwise_is_refused(name: str, edited: Any) -> None:
    more, rule = OTHERWISE[name]
    with pytest.raises(CheckpointError, match=rule):
        edited("deepseek2, latent queries", more=more)


def test_a_bias_of_the_choice_of_experts_has_no_place_in_a_deepseek(make: Any, tmp_path: Path) -> None:
    theirs, folder = make(MODELS["deepseek2"][0], **MODELS["deepseek2"][1])
    weights = load_file(folder / "model.safetensors") | {"blk.1.exp_probs_b.bias": torch.ones(6)}
    write(tmp_path / "model.gguf", "deepseek2", theirs.config, weights)
    with pytest.raises(CheckpointError, match=r"'blk.1.exp_probs_b.bias' has no place in a deepseek2 model"):
        LlamaForCausalLM.from_pretrained(tmp_path / "model.gguf")


def test_layers_of_a_file_that_guess_further_tokens_are_not_read(make: Any, tmp_path: Path) -> None:
    kind, options = MODELS["glm4moe"]
    theirs, folder = make(kind, **options)

    def edit(writer: Any, config: Any) -> None:
        del writer.kv_data[0][f"{writer.arch}.block_count"]
        writer.add_block_count(config.num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
        for name in ("attn_norm", "nextn.eh_proj"):
            writer.add_tensor(f"blk.{config.num_hidden_layers}.{name}.weight", np.ones(64, np.float32))

    path = tmp_path / "model.gguf"
    write(path, "glm4moe", theirs.config, load_file(folder / "model.safetensors"), edit)
    one, other = (LlamaForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (folder, path))
    assert torch.equal(other(prompt()), one(prompt()))


def test_what_makes_keys_of_a_latent_may_be_in_blocks() -> None:
    """Which lie across the rows of the matrix that it becomes a part of"""
    keys, values = torch.randn(3, 5, 64), torch.randn(3, 7, 5)
    blocks = quantize(keys, BlockType.Q8_0)
    stored = Weight((3, 5, 64), BlockType.Q8_0, lambda: blocks, ("k",))
    made = joined(stored, Weight((3, 7, 5), torch.float32, lambda: values, ("v",)))
    wanted = torch.cat([blocks.dequantize().mT, values], dim=1).flatten(0, 1)
    assert made.shape == (3 * 71, 5)
    assert torch.equal(made.read(), wanted)


def test_keys_and_values_of_two_latents_are_refused(make: Any, tmp_path: Path) -> None:
    theirs, folder = make(MODELS["deepseek2"][0], **MODELS["deepseek2"][1])
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    del weights[name]
    weights |= {
        "blk.1.attn_k_b.weight": torch.ones(4, 32, 16),
        "blk.1.attn_v_b.weight": torch.ones(4, 16, 31),
    }
    write(tmp_path / "model.gguf", "deepseek2", theirs.config, weights)
    with pytest.raises(CheckpointError, match=r"\(4, 16, 31\) are not keys and values of one latent"):
        LlamaForCausalLM.from_pretrained(tmp_path / "model.gguf")


def test_a_granite_file_without_a_scale_of_scores_has_that_of_llama(edited: Any) -> None:
    wanted, found = edited("granite", without=("attention.scale",), attention_multiplier=16**-0.5)
    assert torch.equal(found(prompt()), wanted(prompt()))


def granite_4(writer: Any, config: Any) -> None:
    """As its models without Mamba layers are written"""
    writer.kv_data[0].pop("granite.attention.head_count_kv")
    writer.add_head_count_kv([config.num_key_value_heads] * config.num_hidden_layers)
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_group_count(1)
    writer.add_ssm_inner_size(128)
    writer.add_ssm_state_size(16)
    writer.add_ssm_time_step_rank(4)
    writer.add_rope_scaling_finetuned(True)


def test_a_granite_4_file_without_mamba_layers_is_a_granite(edited: Any) -> None:
    wanted, found = edited("granite", more=granite_4)
    assert torch.equal(found(prompt()), wanted(prompt()))


def test_a_granite_file_may_have_no_rotation(edited: Any) -> None:
    wanted, found = edited("granite", more=lambda writer, config: writer.add_rope_scaling_finetuned(False))
    at_the_start = wanted(prompt(), position_ids=torch.zeros_like(prompt()))
    assert torch.allclose(found(prompt()), at_the_start, rtol=1e-4, atol=1e-5)


def test_a_gemma2_file_without_a_window_has_the_usual_one(edited: Any) -> None:
    _, found = edited("gemma2", without=("attention.sliding_window",))
    assert found.config.sliding_window == 4096


def test_a_gemma3_file_without_a_window_has_none_in_any_layer(edited: Any) -> None:
    types = ["full_attention"] * 7
    wanted, found = edited("gemma3", without=("attention.sliding_window",), layer_types=types)
    assert torch.equal(found(prompt()), wanted(prompt()))


@pytest.mark.parametrize("cap, written", [(3.0, 3.0), (None, 0.0)], ids=["a cap", "none"])
def test_a_gemma3_file_may_cap_its_logits(cap: float | None, written: float, edited: Any) -> None:
    wanted, found = edited(
        "gemma3",
        more=lambda writer, config: writer.add_final_logit_softcapping(written),
        final_logit_softcapping=cap,
    )
    assert torch.equal(found(prompt()), wanted(prompt()))


def test_what_a_gemma3_file_says_of_its_eyes_does_not_matter_to_its_text(edited: Any) -> None:
    def eyes(writer: Any, config: Any) -> None:
        writer.add_uint32("gemma3.mm.tokens_per_image", 256)
        writer.add_uint32("gemma3.vision.block_count", 27)

    wanted, found = edited("gemma3", more=eyes)
    assert torch.equal(found(prompt()), wanted(prompt()))


def test_as_much_of_a_head_is_rotated_as_a_file_says_whatever_a_quotient_is_rounded_to(edited: Any) -> None:
    """30 / 44 * 44 is less than 30."""
    wanted, found = edited("glm, another part", head_dim=44, partial_rotary_factor=0.69)
    assert found.config.rotary_dim == 30
    assert torch.equal(found(prompt()), wanted(prompt()))


def test_yarn_of_a_phi3_file_is_yarn(edited: Any) -> None:
    def yarn(writer: Any, config: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)

    _, found = edited("phi3", more=yarn)
    assert found.config.rope.scaling["rope_type"] == "yarn"


def test_layers_that_an_olmo3_file_names_no_base_for_have_the_one_there_is(edited: Any) -> None:
    both = {kind: {"rope_type": "default", "rope_theta": 300.0} for kind in LAYER_TYPES}
    wanted, found = edited("olmo3", rope_parameters=both)
    assert torch.equal(found(prompt()), wanted(prompt()))


def test_an_olmo3_file_may_have_the_usual_factor_of_yarn_beside_it(edited: Any) -> None:
    usual = 1 + 0.1 * math.log(16)
    wanted, found = edited(
        "olmo3, scaled", more=lambda writer, config: writer.add_rope_scaling_attn_factors(usual)
    )
    assert torch.equal(found(prompt()), wanted(prompt()))


def test_another_factor_than_the_usual_one_of_yarn_is_refused(edited: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'olmo2.rope.scaling.attn_factor' is 1.5"):
        edited("olmo3, scaled", more=lambda writer, config: writer.add_rope_scaling_attn_factors(1.5))


@pytest.mark.parametrize("name, wanted", [("olmo2", "Olmo2ForCausalLM"), ("olmo3", "Olmo3ForCausalLM")])
def test_an_olmo_file_is_of_the_third_one_where_it_names_its_windows(
    name: str, wanted: str, edited: Any
) -> None:
    """Whatever has been imported before"""
    edited("olmo3")
    assert type(edited(name)[1]).__name__ == wanted


NOT_FLAGS: dict[str, Any] = {
    "one number": lambda writer, config: writer.add_sliding_window_pattern(4),
    "numbers": lambda writer, config: writer.add_sliding_window_pattern([4] * 5),
    "too few": lambda writer, config: writer.add_sliding_window_pattern([True] * 4),
}


@pytest.mark.parametrize("name", NOT_FLAGS)
def test_windows_that_are_named_by_no_flags_are_refused(name: str, edited: Any) -> None:
    with pytest.raises(CheckpointError, match="sliding_window_pattern' must have a flag for each layer"):
        edited("exaone4, windows", ("attention.sliding_window_pattern",), NOT_FLAGS[name])


def test_windows_of_a_model_that_has_none_are_refused_by_key(edited: Any) -> None:
    named = r"'qwen3moe' with experts and attention\.sliding_window_pattern is not supported"
    with pytest.raises(CheckpointError, match=named):
        edited("qwen3moe", more=lambda writer, config: writer.add_sliding_window_pattern([True, False]))


@pytest.mark.parametrize("name", ["olmoe", "qwen2moe", "qwen3moe"])
def test_what_llama_cpp_does_not_read_of_the_shares_of_experts_is_refused(name: str, edited: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"'{name}.expert_weights_norm' is not supported"):
        edited(name, more=lambda writer, config: writer.add_expert_weights_norm(True))


def test_a_bias_in_blocks_is_refused_by_name(make: Any, tmp_path: Path) -> None:
    def add(writer: Any, config: Any) -> None:
        blocks = np.zeros((6, 68), np.uint8)
        writer.add_tensor("blk.0.ffn_down_exps.bias", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    kind, options = MODELS["gptoss"]
    theirs, folder = make(kind, **options)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.experts.down_proj_bias"]
    write(tmp_path / "model.gguf", "gptoss", theirs.config, weights, add)
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_down_exps.bias' is Q8_0, but the rows of a bias"):
        LlamaForCausalLM.from_pretrained(tmp_path / "model.gguf")


def test_two_tensors_of_a_gguf_file_for_one_weight_are_refused(make: Any, tmp_path: Path) -> None:
    theirs, folder = make("Olmo2")
    weights = load_file(folder / "model.safetensors") | {"blk.0.ffn_norm.weight": torch.ones(64)}
    write(tmp_path / "model.gguf", "olmo2", theirs.config, weights)
    named = r"'blk.0.post_attention_norm.weight' and 'blk.0.ffn_norm.weight' are both"
    with pytest.raises(CheckpointError, match=named):
        LlamaForCausalLM.from_pretrained(tmp_path / "model.gguf")


def test_every_model_has_its_gguf_test() -> None:
    families = {name.partition(",")[0] for name in MODELS}
    assert families == {name.partition(",")[0] for name in KINDS}
