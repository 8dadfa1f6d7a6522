"""Tiny models for the checkpoint tests, and GGUF bytes in which any field can be made wrong."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from infinilm.checkpoint import Checkpoint, open_checkpoint
from infinilm.checkpoint.gguf import GGUFCheckpoint
from infinilm.models.gguf import read_gguf_config
from infinilm.models.registry import entry_of, read_config
from infinilm.models.weights import stored_weights

if TYPE_CHECKING:
    import gguf

ALIGNMENT = 32
HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 64, 96, 4, 2, 16, 40

# GGUF value types
UINT8, INT32, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, FLOAT64 = 0, 5, 4, 6, 7, 8, 9, 10, 12


def u32(value: int) -> bytes:
    return struct.pack("<I", value % 2**32)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value % 2**64)


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw) if length is None else length) + raw


def integer(value: int) -> bytes:
    return u32(UINT32) + u32(value)


def real(value: float) -> bytes:
    return u32(FLOAT32) + struct.pack("<f", value)


def text(value: str | bytes) -> bytes:
    return u32(STRING) + string(value)


def array(element_type: int, count: int, payload: bytes = b"") -> bytes:
    return u32(ARRAY) + u32(element_type) + u64(count) + payload


def strings(values: list[str]) -> bytes:
    return array(STRING, len(values), b"".join(string(value) for value in values))


@dataclass
class TensorEntry:
    """A row of the tensor table. `dims` has the fastest dimension first; offset None means the right one."""

    name: str | bytes
    dims: list[int]
    data: bytes
    type_id: int = 0
    offset: int | None = None
    num_dims: int | None = None

    def encode(self, right_offset: int) -> bytes:
        num_dims = len(self.dims) if self.num_dims is None else self.num_dims
        offset = right_offset if self.offset is None else self.offset
        shape = b"".join(u64(size) for size in self.dims)
        return string(self.name) + u32(num_dims) + shape + u32(self.type_id) + u64(offset)


@dataclass
class GGUFFile:
    """The fields of a GGUF file, in their order; a count of None means the right one."""

    values: list[tuple[str | bytes, bytes]]
    tensors: list[TensorEntry]
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_values: int | None = None
    alignment: int = ALIGNMENT
    tail: bytes = b""

    def encode(self) -> bytearray:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_values = len(self.values) if self.num_values is None else self.num_values
        head = self.magic + u32(self.version) + u64(num_tensors) + u64(num_values)
        head += b"".join(string(key) + value for key, value in self.values)
        table, data = b"", b""
        for tensor in self.tensors:
            table += tensor.encode(len(data))
            data += self.padded(tensor.data)
        return bytearray(self.padded(head + table) + data + self.tail)

    def padded(self, raw: bytes) -> bytes:
        return raw + bytes(-len(raw) % self.alignment)

    def without(self, key: str | bytes) -> list[tuple[str | bytes, bytes]]:
        return [(name, value) for name, value in self.values if name != key]

    def set(self, key: str, value: bytes) -> None:
        self.values = [*self.without(key), (key, value)]

    def tensor(self, name: str) -> TensorEntry:
        return next(tensor for tensor in self.tensors if tensor.name == name)


def llama_values() -> list[tuple[str | bytes, bytes]]:
    return [
        ("general.architecture", text("llama")),
        ("llama.block_count", integer(2)),
        ("llama.context_length", integer(128)),
        ("llama.embedding_length", integer(HIDDEN_SIZE)),
        ("llama.feed_forward_length", integer(INTERMEDIATE_SIZE)),
        ("llama.attention.head_count", integer(NUM_HEADS)),
        ("llama.attention.head_count_kv", integer(NUM_KV_HEADS)),
        ("llama.attention.layer_norm_rms_epsilon", real(1e-5)),
        ("llama.rope.freq_base", real(10000.0)),
        ("llama.rope.dimension_count", integer(HEAD_DIM)),
        ("llama.vocab_size", integer(VOCAB_SIZE)),
        ("tokenizer.ggml.tokens", strings([f"token{index}" for index in range(VOCAB_SIZE)])),
        ("tokenizer.ggml.scores", array(FLOAT32, 3, struct.pack("<3f", 0.5, -1.0, 2.0))),
        ("tokenizer.ggml.bos_token_id", integer(1)),
        ("tokenizer.ggml.eos_token_id", integer(2)),
        ("tokenizer.ggml.add_bos_token", u32(BOOL) + b"\x01"),
    ]


def llama_weights(num_layers: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """A random Llama under Hugging Face names, without lm_head: its embeddings are tied."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN_SIZE)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in LAYER_SHAPES.items()}
    shapes["model.norm.weight"] = (HIDDEN_SIZE,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


LAYER_SHAPES: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (HIDDEN_SIZE,),
    "self_attn.q_proj.weight": (NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
    "self_attn.k_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
    "self_attn.v_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
    "self_attn.o_proj.weight": (HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
    "post_attention_layernorm.weight": (HIDDEN_SIZE,),
    "mlp.gate_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
    "mlp.up_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
    "mlp.down_proj.weight": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    prefix, dot, rest = "", "", name
    if name.startswith("model.layers."):
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        prefix, dot = f"blk.{layer}", "."
    module, _, kind = rest.rpartition(".")
    return f"{prefix}{dot}{GGUF_NAMES[module]}.{kind}"


def interleaved(name: str, tensor: Tensor) -> Tensor:
    """Rows as llama.cpp's converter orders a llama's: the halves of each q and k head dealt out in turn."""
    heads = {"q_proj": NUM_HEADS, "k_proj": NUM_KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def write_folder(folder: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    """The weights as Hugging Face stores a model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(weights, folder / "model.safetensors")
    return folder


def llama_file(weights: dict[str, Tensor] | None = None, **fields: Any) -> GGUFFile:
    weights = llama_weights() if weights is None else weights
    tensors = [
        TensorEntry(gguf_name(name), list(tensor.shape)[::-1], interleaved(name, tensor).numpy().tobytes())
        for name, tensor in weights.items()
    ]
    return GGUFFile(llama_values(), tensors, **fields)


def llama_writer(path: Path, num_layers: int, **options: Any) -> gguf.GGUFWriter:
    """The gguf package's, with the metadata of a tiny model"""
    import gguf  # which is not there where kernels are tested on a GPU

    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(num_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    return writer


def write_out(writer: gguf.GGUFWriter) -> None:
    """All that the gguf package's writer was given"""
    for finish in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, finish)()


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789ABCD"  # as many as the tiny model has embeddings


def whole_file() -> GGUFFile:
    """A model with its tokenizer, which can be loaded and answers"""
    file = llama_file()
    file.set("tokenizer.ggml.model", text("gpt2"))
    file.set("tokenizer.ggml.tokens", strings([*LETTERS[:-1], "ab"]))
    file.set("tokenizer.ggml.merges", strings(["a b"]))
    return file


class AsModel(GGUFCheckpoint):
    """A GGUF checkpoint as its model finds it: its own names and forms of weights, and the config.json there
    would be"""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, entry = checkpoint, entry_of(checkpoint)
        assert entry.gguf is not None
        self.path, self.metadata = checkpoint.path, checkpoint.metadata
        self.config = read_gguf_config(checkpoint, entry.gguf)
        self.stored = stored_weights(checkpoint, read_config(checkpoint))

    def names(self) -> list[str]:
        return list(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored[name].shape

    def dtype(self, name: str) -> Any:
        return self.stored[name].dtype

    def tensor(self, name: str) -> Any:
        return self.stored[name].read()

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.stored.values())

    def close(self) -> None:
        self.checkpoint.close()


def open_model(path: Path) -> AsModel:
    return AsModel(open_checkpoint(path))
