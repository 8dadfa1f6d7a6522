"""Adapter folders that are wrong: each is refused by name, before anything of it is used."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Tiny
from loras import tensors_for, write_adapter
from torch import Tensor

from infinilm.checkpoint import CheckpointError
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.lora import read_adapter

LAYER = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return Tiny.at(tmp_path_factory.mktemp("tiny")).model


@pytest.fixture
def tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    return tensors_for(model)


def refusal(folder: Path, model: LlamaForCausalLM) -> str:
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder, model, 64)
    assert str(folder) in str(error.value)
    return str(error.value)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
    "biases": ({"bias": "all"}, "bias = 'all' is not supported"),
    "biases of its own": ({"lora_bias": True}, "lora_bias = True is not supported"),
    "dora": ({"use_dora": True}, "use_dora = True is not supported"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head'] is not supported"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices = [1] is not supported"),
    "copied layers": ({"layer_replication": [[0, 1]]}, "layer_replication = [[0, 1]] is not supported"),
    "parameters": ({"target_parameters": ["experts"]}, "target_parameters = ['experts'] is not supported"),
    "changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
    "no rank": ({"r": 0}, "r must be a whole number from 1"),
    "absurd rank": ({"r": 10**9}, "r must be a whole number from 1"),
    "a rank that is text": ({"r": "4"}, "r must be a whole number"),
    "rank of a layer": ({"rank_pattern": {"q_proj": -1}}, "rank_pattern must be a whole number"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha must be a number"),
    "absurd alpha": ({"lora_alpha": 1e30}, "lora_alpha must be a number of at most"),
    "alpha true": ({"lora_alpha": True}, "lora_alpha must be a number"),
    "rslora in words": ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    "a pattern that takes for ever": (
        {"alpha_pattern": {"(a+)+$": 1}},
        "alpha_pattern has '(a+)+$', which is not the end of a module's name",
    ),
    "a pattern that is none": ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    "targets that are none": ({"target_modules": [1]}, "target_modules must be a list of names or a string"),
    "other targets": ({"target_modules": ["q_proj"]}, "is not among the target_modules"),
    "larger than allowed": ({"r": 65}, "has rank 65; max_lora_rank is 64"),
    "another rank than its weights": ({"r": 5}, "but the model and config want (5, "),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_asks_for_what_is_not_done_is_refused(
    name: str, tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    config, wanted = CONFIGS[name]
    assert wanted in refusal(write_adapter(tmp_path, tensors, **config), model)


TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "narrow": ({f"{LAYER}.lora_A.weight": torch.zeros(4, 31)}, "lora_A.weight' has shape (4, 31)"),
    "long": ({f"{LAYER}.lora_B.weight": torch.zeros(33, 4)}, "lora_B.weight' has shape (33, 4)"),
    "flat": ({f"{LAYER}.lora_A.weight": torch.zeros(128)}, "has shape (128,)"),
    "NaN": ({f"{LAYER}.lora_A.weight": torch.full((4, 32), torch.nan)}, "holds NaN or infinity"),
    "infinite": ({f"{LAYER}.lora_B.weight": torch.full((32, 4), torch.inf)}, "holds NaN or infinity"),
    "overflowing": ({f"{LAYER}.lora_B.weight": torch.full((32, 4), 3e38)}, "holds NaN or infinity"),
    "whole numbers": ({f"{LAYER}.lora_A.weight": torch.zeros(4, 32, dtype=torch.int32)}, "is torch.int32"),
    "half": ({f"{LAYER}.lora_B.weight": None}, "has one of lora_A and lora_B, but not both"),
    "magnitudes": ({f"{LAYER}.lora_magnitude_vector": torch.zeros(32)}, "is no lora_A or lora_B"),
    "an embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)},
        "is no lora_A or lora_B",
    ),
    "another name": ({"weights": torch.zeros(1)}, "'weights' is no lora_A or lora_B"),
    "a layer too many": (
        {
            f"base_model.model.model.layers.2.mlp.up_proj.lora_{side}.weight": torch.zeros(shape)
            for side, shape in (("A", (4, 32)), ("B", (48, 4)))
        },
        "'model.layers.2.mlp.up_proj' is adapted, but is no linear layer",
    ),
    "the head": (
        {f"base_model.model.lm_head.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"},
        "'lm_head' is adapted, but is no linear layer of the model's decoder layers",
    ),
    "no layer at all": (
        {f"base_model.model.model.layers.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"},
        "'model.layers' is adapted, but is no linear layer",
    ),
    "two for one layer": (
        {f"{LAYER.replace('.model.model', '.model')}.lora_B.weight": torch.zeros(32, 4)},
        "layers.1.self_attn.q_proj.lora_B.weight' are both lora_B of 'model.layers.1.self_attn.q_proj'",
    ),
    "a method": (
        {f"base_model.model.model.run.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"},
        "'model.run' is adapted, but is no linear layer",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_weights_that_do_not_fit_the_model_are_refused(
    name: str, tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    changes, wanted = TENSORS[name]
    changed = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
    assert wanted in refusal(write_adapter(tmp_path, changed, target_modules="all-linear"), model)


def test_a_file_without_weights_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    assert "holds no weights" in refusal(write_adapter(tmp_path, {}), model)


def test_what_is_missing_is_said_by_name(
    tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere", model)
    assert "~no.such.user/x: Could not determine home" in refusal(Path("~no.such.user/x"), model)
    folder = write_adapter(tmp_path / "adapter", tensors)
    (folder / "adapter_model.safetensors").unlink()
    assert "holds no adapter_model.safetensors" in refusal(folder, model)
    (folder / "adapter_config.json").unlink()
    assert "holds no adapter_config.json" in refusal(folder, model)


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was loaded",))


def test_a_pickle_is_refused_by_name_and_never_loaded(
    tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    folder = write_adapter(tmp_path, tensors)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert "adapter_model.bin is pickled, which can run code and is never loaded" in refusal(folder, model)
    shutil.copy(folder / "adapter_model.bin", folder / "adapter_model.safetensors")
    assert "not a safetensors file" in refusal(folder, model)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_no_link_leads_out_of_the_folder(
    name: str, tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    folder = write_adapter(tmp_path / "adapter", tensors)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert "is a link out of its folder" in refusal(folder, model)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"r": NaN}', '{"r": 4, "r": 5}', "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(
    content: str, tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    folder = write_adapter(tmp_path, tensors)
    (folder / "adapter_config.json").write_text(content)
    refusal(folder, model)


def test_a_file_cut_short_is_refused(
    tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    file = write_adapter(tmp_path, tensors) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "cut short" in refusal(tmp_path, model)


def test_nothing_done_to_the_files_reaches_an_adapter(
    tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    file = write_adapter(tmp_path, tensors) / "adapter_model.safetensors"
    read = read_adapter(tmp_path, model, 64)
    before = {name: [part.clone() for part in pair] for name, pair in read.weights.items()}
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    for name, pair in read.weights.items():
        assert all(map(torch.equal, pair, before[name]))


def test_names_without_the_head_of_a_model_are_understood(
    tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    """As PEFT writes them for a model without a head"""
    headless = {
        name.replace("base_model.model.model.", "base_model.model."): t for name, t in tensors.items()
    }
    found = read_adapter(write_adapter(tmp_path / "headless", headless), model, 64)
    wanted = read_adapter(write_adapter(tmp_path / "whole", tensors), model, 64)
    assert found.weights.keys() == wanted.weights.keys()
    assert all(torch.equal(found.weights[name][0], pair[0]) for name, pair in wanted.weights.items())


def test_unknown_keys_of_a_newer_peft_that_change_nothing_are_passed_over(
    tmp_path: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]
) -> None:
    read_adapter(
        write_adapter(tmp_path, tensors, lora_dropout=0.1, inference_mode=True, newer=None), model, 64
    )
    assert json.loads((tmp_path / "adapter_config.json").read_text())["newer"] is None


def test_experts_are_not_adapted(make: Any, tmp_path: Path) -> None:
    """Neither one by one, as older files have them, nor as one matrix"""
    _, folder = make("Mixtral", num_local_experts=2)
    model = LlamaForCausalLM.from_pretrained(folder)
    one, all_of_them = "block_sparse_moe.experts.0.w1", "mlp.experts.gate_proj"
    for module, num_rows in ((one, 120), (all_of_them, 240)):
        name = f"base_model.model.model.layers.0.{module}"
        tensors = {
            f"{name}.lora_A.weight": torch.zeros(4, 64),
            f"{name}.lora_B.weight": torch.zeros(num_rows, 4),
        }
        refusal(write_adapter(tmp_path / module, tensors, target_modules="all-linear"), model)


@pytest.mark.parametrize("num_rows", [0, 2**58])
@pytest.mark.parametrize(
    "kind, module", [("Phi3", "self_attn.q_proj"), ("GptOss", "mlp.experts.gate_up_proj")]
)
def test_rows_without_columns_are_refused_before_they_are_put_in_order(
    kind: str, module: str, num_rows: int, make: Any, tmp_path: Path
) -> None:
    """They take no byte of the file, however many there are."""
    model = LlamaForCausalLM.from_pretrained(make(kind)[1])
    name = f"base_model.model.model.layers.0.{module}"
    tensors = {
        f"{name}.lora_A.weight": torch.zeros(4, 64),
        f"{name}.lora_B.weight": torch.empty(num_rows, 0),
    }
    refusal(write_adapter(tmp_path, tensors, target_modules="all-linear"), model)
