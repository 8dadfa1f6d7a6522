"""Models on several ranks, as real processes over loopback: every rank has the logits of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import results_of

from infinicore import _native
from infinicore.distributed import LocalCommunicator, TorchCommunicator
from infinicore.quantization import BlockType, quantize
from infinilm.cache import DynamicCache
from infinilm.models.deepseek import DeepseekV2Config, DeepseekV2ForCausalLM
from infinilm.models.ernie import Ernie4_5ForCausalLM
from infinilm.models.exaone4 import Exaone4ForCausalLM
from infinilm.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from infinilm.models.gemma3 import Gemma3ForCausalLM
from infinilm.models.glm import Glm4ForCausalLM, GlmForCausalLM
from infinilm.models.granite import GraniteForCausalLM
from infinilm.models.granite4 import GraniteMoeHybridForCausalLM
from infinilm.models.hunyuan import HunYuanDenseV1ForCausalLM
from infinilm.models.llama import LlamaConfig, LlamaForCausalLM
from infinilm.models.ministral3 import Ministral3Config, Ministral3ForCausalLM
from infinilm.models.mistral import MistralForCausalLM
from infinilm.models.olmo2 import Olmo2ForCausalLM
from infinilm.models.olmo3 import Olmo3ForCausalLM
from infinilm.models.olmoe import OlmoeConfig, OlmoeForCausalLM
from infinilm.models.parallel import split_layers, split_tensors
from infinilm.models.phi3 import Phi3ForCausalLM
from infinilm.models.qwen import Qwen3ForCausalLM
from infinilm.models.seed_oss import SeedOssForCausalLM
from infinilm.models.smollm3 import SmolLM3ForCausalLM

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": None,
}  # fmt: skip
GROWING = {
    "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4},
    "llama_4_scaling_beta": 0.7,
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
IDS = torch.tensor([[5, 6, 7, 8, 9]])
OTHERS: dict[str, type[LlamaForCausalLM]] = {
    "ernie": Ernie4_5ForCausalLM,
    "exaone4": Exaone4ForCausalLM,
    "gemma3": Gemma3ForCausalLM,
    "glm": GlmForCausalLM,
    "glm4": Glm4ForCausalLM,
    "granite": GraniteForCausalLM,
    "granite4": GraniteMoeHybridForCausalLM,
    "hunyuan": HunYuanDenseV1ForCausalLM,
    "mistral": MistralForCausalLM,
    "phi3": Phi3ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "seed_oss": SeedOssForCausalLM,
    "smollm3": SmolLM3ForCausalLM,
}
SPLITS = {"tensors": split_tensors, "layers": split_layers}


def models() -> dict[str, LlamaForCausalLM]:
    """The same in every process"""
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=4)),
        "ministral3": Ministral3ForCausalLM(Ministral3Config(**SIZES, **GROWING)),
        **{name: kind(kind.config_class(**SIZES)) for name, kind in OTHERS.items()},
    }


def outcome(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    cache = DynamicCache()
    with torch.inference_mode():
        first = model(IDS, past_key_values=cache, logits_to_keep=0)
        return {
            "logits": torch.cat([first, model(IDS + 9, past_key_values=cache, logits_to_keep=0)], 1),
            "greedy": model.generate(PROMPTS, max_new_tokens=8),
            "drawn": model.generate(PROMPTS, max_new_tokens=8, temperature=1.0, seed=3),
        }


def all_outcomes(rank: int, size: int) -> dict:
    communicator = TorchCommunicator(timeout=120)
    found = {}
    for how, split in SPLITS.items():
        for name, model in models().items():
            part = split(model, communicator)
            found[how, name] = {**outcome(part), "held": num_held(part)}
    return found


def num_held(model: LlamaForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.model.layers.parameters())


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return results_of(all_outcomes, 2, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("name", ["llama", "gemma2", "ministral3", *OTHERS])
@pytest.mark.parametrize("how", SPLITS)
def test_two_ranks_give_what_the_whole_model_gives(how: str, name: str, ranks: list[dict]) -> None:
    whole = models()[name]
    wanted, found = outcome(whole), [rank[how, name] for rank in ranks]
    for key in ("logits", "greedy", "drawn"):
        assert torch.equal(found[0][key], found[1][key])
    torch.testing.assert_close(found[0]["logits"], wanted["logits"], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0]["greedy"], wanted["greedy"])
    assert torch.equal(found[0]["drawn"], wanted["drawn"])
    assert all(rank["held"] < 0.7 * num_held(whole) for rank in found)


@pytest.mark.parametrize("split", SPLITS.values())
def test_one_rank_alone_has_the_bits_of_the_model(split) -> None:
    for name, model in models().items():
        wanted, found = outcome(models()[name]), outcome(split(model, LocalCommunicator()))
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


def told_of_differences(rank: int, size: int) -> dict[str, str]:
    """What each rank hears where the others have something else"""
    communicator = TorchCommunicator(timeout=120)
    sizes = LlamaConfig(**{**SIZES, "num_hidden_layers": 3 + rank})
    split = models()["llama"]
    split_tensors(split, communicator)

    def at_level(name: str) -> None:
        before = _native.isa()
        _native.set_isa(name)
        try:
            split_tensors(models()["llama"], communicator)
        finally:
            _native.set_isa(before)

    def with_one_weight_more(value: float) -> None:
        model = models()["llama"]
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight[0, 0] += value
        split_layers(model, communicator)

    levels = _native.isa_levels()
    calls: dict[str, Callable[[], Any]] = {
        "split": lambda: [split_tensors, split_layers][rank](models()["llama"], communicator),
        "config": lambda: split_layers(LlamaForCausalLM(sizes), communicator),
        "weights": lambda: with_one_weight_more(rank),
        "instruction set": lambda: at_level(levels[-rank]),
        "prompts": lambda: split.generate([[1 + rank, 2]], max_new_tokens=3),
        "no seed": lambda: split.generate([[1, 2]], max_new_tokens=30, temperature=9.0),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            told[name] = str(error)
    return {**told, "after": split.generate([[1, 2]], max_new_tokens=3).tolist()}


def test_ranks_that_have_different_models_or_tokens_are_all_told_and_can_go_on(tmp_path: Path) -> None:
    first, second = results_of(told_of_differences, 2, tmp_path, 2)
    assert first == second
    assert first.pop("after") == models()["llama"].generate([[1, 2]], max_new_tokens=3).tolist()
    for name in ("split", "config", "weights", "instruction set"):
        if name != "instruction set" or len(_native.isa_levels()) > 1:
            assert f"the ranks differ in {name}, in rank order: " in first[name]
    assert "different tokens, in rank order: [1, 2]; [2, 2]; make the same calls" in first["prompts"]
    assert "with one seed where tokens are drawn" in first["no seed"]


@pytest.mark.parametrize("split", SPLITS.values())
@pytest.mark.parametrize("given", [2, None, "gloo"])
def test_what_is_no_communicator_or_no_model_is_refused(split: Callable[..., Any], given: Any) -> None:
    name = split.__name__
    with pytest.raises(TypeError, match=f"{name}: communicator must be one, such as TorchCommunicator"):
        split(models()["llama"], given)
    with pytest.raises(TypeError, match=f"{name}: model must be one, as load_model gives it, not "):
        split(given, LocalCommunicator())


class Ranks(LocalCommunicator):
    def __init__(self, size: int) -> None:
        self.size = size


def test_what_cannot_be_shared_is_refused_and_left_whole() -> None:
    model = models()["llama"]
    names = set(model.state_dict())
    with pytest.raises(ValueError, match="num_key_value_heads is 2, which 3 ranks cannot share evenly"):
        split_tensors(model, Ranks(3))
    with pytest.raises(ValueError, match="num_hidden_layers is 3, which 4 ranks cannot share"):
        split_layers(model, Ranks(4))
    with pytest.raises(ValueError, match="a OlmoeForCausalLM cannot be split: no plan says how layers.0.mlp"):
        split_tensors(OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=2, num_experts_per_tok=1)), Ranks(2))
    with pytest.raises(ValueError, match="no plan says how layers.0.self_attn.q_a_proj is"):
        split_tensors(DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES, first_k_dense_replace=3)), Ranks(2))
    for kind in (Olmo2ForCausalLM, Olmo3ForCausalLM):
        with pytest.raises(ValueError, match=f"a {kind.__name__} cannot be split: it has norms of all heads"):
            split_tensors(kind(kind.config_class(**SIZES)), Ranks(2))
    assert set(model.state_dict()) == names and model.config.num_attention_heads == 4
    for split in SPLITS.values():
        part = split(models()["llama"], Ranks(2))
        with pytest.raises(ValueError, match="this LlamaForCausalLM has been split already"):
            split(part, Ranks(2))
    layer = model.model.layers[0].mlp.up_proj
    layer.set_weight(quantize(layer.weight.detach(), BlockType.Q8_0))
    with pytest.raises(ValueError, match="layers.0.mlp.up_proj is quantised"):
        split_tensors(model, Ranks(2))
