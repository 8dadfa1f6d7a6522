"""A Llama of random weights as a GGUF file, to measure sizes that are not at hand:
`python -m benchmarks.random_model --type Q4_0 model.gguf`.

It has the tokenizer of the built-in model: what it writes is noise, at the speed of a real model.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from infinicore.quantization import SCALE_BYTES, BlockType, QuantizedTensor
from infinilm.checkpoint import open_checkpoint
from infinilm.hub import resolve

FOLDER = Path(__file__).parent.parent / "build" / "models"
MIX = "Q4_K_M"  # what most files are: Q4_K, and Q6_K where more bits are worth most
TYPES = (*BlockType.__members__, MIX, "BF16")
REPLACED = ("general.architecture", "general.file_type", "general.name")
SPREAD = 0.02  # of the weights
VOCAB_SIZE = 49152  # the built-in tokenizer's


@dataclass(frozen=True)
class Size:
    """What decides how much work a token is; the defaults are the shape of Llama 3.2 1B."""

    num_layers: int = 16
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_heads: int = 32
    num_kv_heads: int = 8
    architecture: str = "llama"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by its GGUF name; the output is tied to the embedding."""
        layers = [f"blk.{i}.{name}" for i in range(self.num_layers) for name in self.layer_shapes()]
        shapes = {name: self.layer_shapes()[name.split(".", 2)[2]] for name in layers}
        vocabulary = {"token_embd.weight": (VOCAB_SIZE, self.hidden_size)}
        return vocabulary | shapes | {"output_norm.weight": (self.hidden_size,)}

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (queries, hidden),
            "attn_k.weight": (keys, hidden),
            "attn_v.weight": (keys, hidden),
            "attn_output.weight": (hidden, queries),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden),
            "ffn_down.weight": (hidden, inner),
        }

    def metadata(self) -> dict[str, int]:
        return {
            "block_count": self.num_layers,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.intermediate_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "rope.dimension_count": self.head_dim,
        }


@dataclass(frozen=True)
class Mixture(Size):
    """Layers of Qwen3 30B-A3B, of whose 128 experts a token goes through 8; fewer of them than it has."""

    num_layers: int = 6
    intermediate_size: int = 768
    num_kv_heads: int = 4
    architecture: str = "qwen3moe"
    num_experts: int = 128
    num_chosen: int = 8

    @property
    def head_dim(self) -> int:
        return 128

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        mlp = [f"ffn_{part}.weight" for part in ("gate", "up", "down")]
        shared = {name: shape for name, shape in super().layer_shapes().items() if name not in mlp}
        hidden, inner, count = self.hidden_size, self.intermediate_size, self.num_experts
        heads = {f"attn_{part}_norm.weight": (self.head_dim,) for part in "qk"}
        experts: dict[str, tuple[int, ...]] = {
            "ffn_gate_inp.weight": (count, hidden),
            "ffn_gate_exps.weight": (count, inner, hidden),
            "ffn_up_exps.weight": (count, inner, hidden),
            "ffn_down_exps.weight": (count, hidden, inner),
        }
        return shared | heads | experts

    def metadata(self) -> dict[str, int]:
        return super().metadata() | {
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "expert_count": self.num_experts,
            "expert_used_count": self.num_chosen,
            "expert_feed_forward_length": self.intermediate_size,
        }


ONE_BILLION, SMALL, MIXTURE = Size(), Size(num_layers=2), Mixture()
SIZES = {"1B": ONE_BILLION, "4B-A0.5B": MIXTURE}


def cached_model(type_name: str, size: Size = ONE_BILLION) -> Path:
    """The model of this type and size in the build folder, made when it is not there yet."""
    billions = sum(int(np.prod(shape)) for shape in size.shapes().values()) / 1e9
    path = FOLDER / f"random-{billions:.1g}B.{type_name}.gguf"
    if not path.exists():
        print(f"making {path.name}, once", flush=True)
        write_model(path, type_name, size)
    return path


def write_model(path: Path, type_name: str, size: Size = ONE_BILLION) -> None:
    """Written beside its place and renamed, so that nobody meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, size.architecture)
    add_metadata(writer, size)
    tensors = {
        name: (shape, kind_of(name, shape, type_name, size.num_layers))
        for name, shape in size.shapes().items()
    }
    for name, (shape, kind) in tensors.items():
        add_tensor(writer, name, shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # Matrices of one shape are equal: drawing takes far longer than writing, and no speed depends on values.
    drawn = {tensor: random_bytes(*tensor) for tensor in set(tensors.values())}
    for tensor in tensors.values():
        writer.write_tensor_data(drawn[tensor])
    writer.close()
    os.replace(partial, path)


def add_metadata(writer: gguf.GGUFWriter, size: Size) -> None:
    """The built-in model's fields, its tokenizer among them, with this size's own."""
    own = size.metadata()
    for key, value in built_in_fields().items():
        name = key.removeprefix("llama.")
        if name not in own:
            key = f"{size.architecture}.{name}" if name != key else key
            writer.add_key_value(key, value, type_of(value))
    for name, number in own.items():
        writer.add_uint32(f"{size.architecture}.{name}", number)


@cache
def built_in_fields() -> dict[str, Any]:
    """By our reader, since the library's takes seconds for the vocabulary"""
    with open_checkpoint(resolve(None)) as checkpoint:
        return {key: plain(value) for key, value in checkpoint.metadata.items() if key not in REPLACED}


def plain(value: Any) -> Any:
    """With lists of Python's for arrays, as the library's writer wants them"""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, str | int | float) else list(value)


def type_of(value: Any) -> gguf.GGUFValueType:
    """The library takes a number for one with a sign, which llama.cpp refuses as a size."""
    return gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)


def kind_of(name: str, shape: tuple[int, ...], type_name: str, num_layers: int) -> str:
    """Vectors and routers stay in float32, as in every quantised file."""
    if len(shape) == 1:
        return "F32"
    if name.endswith("ffn_gate_inp.weight"):
        return "F32 at random"
    if type_name != MIX:
        return type_name
    is_output = name == "token_embd.weight"
    return "Q6_K" if is_output or has_more_bits(name, num_layers) else "Q4_K"


def has_more_bits(name: str, num_layers: int) -> bool:
    """llama.cpp's choice: the first and last layers, and every third between them"""
    if not name.endswith(("ffn_down.weight", "attn_v.weight")):
        return False
    layer, eighth = int(name.split(".")[1]), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    ggml_type = gguf.GGMLQuantizationType[kind.split()[0]]
    in_bytes = gguf.quant_shape_to_byte_shape(shape, ggml_type)
    writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), ggml_type)


def random_bytes(shape: tuple[int, ...], kind: str) -> np.ndarray[Any, Any]:
    """Norms are ones: with random ones the noise would grow from layer to layer until it is no number."""
    generator = torch.Generator().manual_seed(0)
    if kind == "F32":
        return torch.ones(shape).view(torch.uint8).numpy()
    if kind == "F32 at random":
        return torch.empty(shape).normal_(0, SPREAD, generator=generator).view(torch.uint8).numpy()
    if kind == "BF16":
        rows = torch.empty(shape, dtype=torch.bfloat16).normal_(0, SPREAD, generator=generator)
        return rows.view(torch.uint8).numpy()
    return random_blocks(shape, BlockType[kind], generator).numpy()


def random_blocks(shape: tuple[int, ...], type: BlockType, generator: torch.Generator) -> Tensor:
    """Bytes at random, with the scales that make weights of them"""
    size = (*shape[:-1], type.bytes_per_row(shape[-1]))
    blocks = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    if type is BlockType.MXFP4:  # whose scales are exponents
        blocks.view(-1, type.bytes_per_block)[:, 0] = 127 + round(math.log2(SPREAD / 3))
    else:
        set_scales(blocks, type, scales_of(type))
    return blocks


def scales_of(type: BlockType) -> list[float]:
    """A scale, and a minimum if blocks have one, for weights around 0"""
    blocks = torch.randint(
        256, (64, type.bytes_per_block), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    scaled = weights_of(blocks, type, [1.0, 0.0])
    scale, minimum = SPREAD / float(scaled.std()), float(weights_of(blocks, type, [0.0, 1.0]).mean())
    return [scale, -scale * float(scaled.mean()) / minimum if minimum else 0.0]


def weights_of(blocks: Tensor, type: BlockType, scales: list[float]) -> Tensor:
    blocks = blocks.clone()
    set_scales(blocks, type, scales)
    return QuantizedTensor(blocks, type, (len(blocks), type.elements_per_block)).dequantize()


def set_scales(blocks: Tensor, type: BlockType, scales: list[float]) -> None:
    """As many of them as a block of this type has"""
    first, end = SCALE_BYTES[type]
    halves = torch.tensor(scales[: (end - first) // 2], dtype=torch.float16)
    blocks.view(-1, type.bytes_per_block)[:, first:end] = halves.view(torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--type", choices=TYPES, default="Q4_0")
    options = parser.parse_args()
    write_model(options.path, options.type)


if __name__ == "__main__":
    main()
