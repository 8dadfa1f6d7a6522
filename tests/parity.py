"""Tiny random models of transformers, and how close ours have to come to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from infinilm import DynamicCache
from infinilm.models.llama import LlamaForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS = {"Gemma3": "Gemma3Text"}  # where a model's is not called as it is


def write_theirs(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model of transformers, which is saved to the folder, weights large enough that tokens differ"""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    sizes = {**SIZES, "initializer_range": 0.25, **options}
    config = getattr(transformers, CONFIGS.get(kind, kind) + "Config")(**sizes)
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")) or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.3)
    model.to(dtype).save_pretrained(folder)
    return model


def nmse(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float((found.double() - wanted).square().sum() / wanted.square().sum())


def prompt(batch_size: int = 2, length: int = 21) -> Tensor:
    return torch.randint(
        0, SIZES["vocab_size"], (batch_size, length), generator=torch.Generator().manual_seed(3)
    )


# A few times the largest error at any level, and a thousandth of what a wrong eps or angle would change.
FLOAT32_BAR, BFLOAT16_BAR = 2e-11, 5e-4


@torch.inference_mode()
def check_parity(theirs: Any, folder: Path, dtype: torch.dtype, bar: float, length: int = 21) -> None:
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = prompt(length=length)
    wanted = theirs(ids).logits
    assert nmse(ours(ids, logits_to_keep=0), wanted) <= bar
    cache, steps = DynamicCache(), ids.split([10, 3, ids.shape[1] - 17, 1, 1, 1, 1], dim=1)
    logits = torch.cat([ours(step, past_key_values=cache, logits_to_keep=0) for step in steps], dim=1)
    assert nmse(logits, wanted) <= bar


def check_greedy(theirs: Any, folder: Path) -> None:
    """64 tokens are the same"""
    ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = theirs.generate(prompt(), max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(prompt(), max_new_tokens=64), wanted)
