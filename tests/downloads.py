"""Tiny embedders and rerankers in folders as people download them, with transformers' models of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
import transformers
from parity import SIZES
from safetensors.torch import load_file
from test_models_gguf import add_metadata, write_tensors
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from infinilm import LLM

DOWNLOADED: dict[str, Any] = {
    **SIZES,
    "vocab_size": 262,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "eos_token_id": 2,
}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("y", "e"), ("ye", "s"), ("n", "o")]
LAST_TOKEN = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_lasttoken": True}
PROMPTS = {"query": "Instruct: Find it\nQuery:", "document": ""}
# What Qwen3-Reranker's folder has, in fewer words; jinja drops the last newline.
PAIR_TEMPLATE = """\
{%- set told = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
<|im_start|>system
{{ told }}<|im_end|>
<Query>: {{ (messages | selectattr("role", "eq", "query") | first).content }}
<Document>: {{ (messages | selectattr("role", "eq", "document") | first).content }}<|im_end|>

"""


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, kv_cache_memory="8MB", device="cpu", **options)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_model(folder: Path, kind: str, **config: Any) -> Any:
    """One of transformers' classes of random weights, saved as it saves them"""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(7)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**{**DOWNLOADED, **config})).eval()
    model.save_pretrained(folder)
    return model


def write_tokenizer(folder: Path, ends_text: bool = False, **settings: Any) -> None:
    """Bytes, and yes and no as tokens; it may put <|endoftext|> after a text, as Qwen3-Embedding's does."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIALS, *alphabet, *("".join(pair) for pair in MERGES)]
    library = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(SPECIALS)
    if ends_text:
        library.post_processor = TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
    library.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    write_json(folder / "tokenizer_config.json", {**names, **settings})


def write_modules(folder: Path, **configs: Any) -> None:
    """modules.json, and the config of each module that has one"""
    kinds = {"Transformer": None, **configs}
    paths = {kind: f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds)}
    types = {kind: f"sentence_transformers.models.{kind}" for kind in kinds}
    modules = [{"idx": i, "name": str(i), "path": paths[k], "type": types[k]} for i, k in enumerate(kinds)]
    write_json(folder / "modules.json", modules)
    for kind, config in configs.items():
        if config is not None:
            write_json(folder / paths[kind] / "config.json", config)


def write_embedder(folder: Path, kind: str = "Qwen3Model", **config: Any) -> Any:
    """Qwen3-Embedding's shape"""
    model = write_model(folder, kind, **config)
    write_tokenizer(folder, ends_text=True)
    write_modules(folder, Pooling=LAST_TOKEN, Normalize=None)
    write_json(
        folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None}
    )
    return model


def tokens_of(folder: Path, text: str, **options: Any) -> list[int]:
    """As transformers has them"""
    ids: list[int] = transformers.AutoTokenizer.from_pretrained(folder)(text, **options)["input_ids"]
    return ids


@torch.inference_mode()
def last_state(model: Any, token_ids: list[int]) -> Tensor:
    """Of transformers' model"""
    state: Tensor = model(torch.tensor([token_ids])).last_hidden_state[0, -1]
    return state


def write_gguf(path: Path, folder: Path, score: Tensor | None = None, **keys: Any) -> None:
    """A folder as llama.cpp's converter writes it; `score` is the classifier of a reranker."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = gguf.MODEL_ARCH.QWEN3
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    add_metadata(writer, config)
    add_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text())["model"])
    for name, value in keys.items():
        getattr(writer, f"add_{name}")(value)
    scores = {} if score is None else {"cls.output.weight": score}
    write_tensors(writer, kind, config, load_file(folder / "model.safetensors") | scores)


def add_vocabulary(writer: Any, model: dict[str, Any]) -> None:
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in SPECIALS else 1 for word in words])  # control and normal ones
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(0)  # which converters take from what ends a text
