"""Adapters for tiny models, in folders as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infinilm import LoRARequest
from infinilm.models.llama import LlamaForCausalLM

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(ALL), "bias": "none"}


def tensors_for(
    model: LlamaForCausalLM, rank: int = 4, modules: Sequence[str] = ALL, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Large enough that an adapter's tokens are other ones"""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in modules:
            whole = f"base_model.model.{name}"
            found[f"{whole}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator) * 0.3
            found[f"{whole}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator) * 0.3
    return found


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def adapter(folder: Path, model: LlamaForCausalLM, seed: int = 0, rank: int = 4) -> LoRARequest:
    """One of some rank for all layers"""
    path = write_adapter(folder, tensors_for(model, rank, seed=seed), r=rank)
    return LoRARequest(folder.name, seed + 1, path)
