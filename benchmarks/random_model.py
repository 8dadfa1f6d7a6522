"""A Llama of random weights as a GGUF file, to measure sizes that are not at hand:
`python -m benchmarks.random_model --type Q4_0 model.gguf`.

It has the tokenizer of the built-in model: what it writes is noise, at the speed of a real model.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from infinicore.quantization import BlockType, quantize
from infinilm.hub import resolve

FOLDER = Path(__file__).parent.parent / "build" / "models"
TYPES = ("Q4_0", "Q8_0", "BF16")
CHUNK_ROWS = 4096  # drawn at once, which bounds the memory a large matrix takes
VOCAB_SIZE = 49152  # the built-in tokenizer's


@dataclass(frozen=True)
class Size:
    """What decides how much work a token is; the defaults are the shape of Llama 3.2 1B."""

    num_layers: int = 16
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_heads: int = 32
    num_kv_heads: int = 8

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
        hidden, wide, narrow = self.hidden_size, self.intermediate_size, self.num_kv_heads * self.head_dim
        return {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (hidden, hidden),
            "attn_k.weight": (narrow, hidden),
            "attn_v.weight": (narrow, hidden),
            "attn_output.weight": (hidden, hidden),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (wide, hidden),
            "ffn_up.weight": (wide, hidden),
            "ffn_down.weight": (hidden, wide),
        }

    def metadata(self) -> dict[str, int]:
        return {
            "llama.block_count": self.num_layers,
            "llama.embedding_length": self.hidden_size,
            "llama.feed_forward_length": self.intermediate_size,
            "llama.attention.head_count": self.num_heads,
            "llama.attention.head_count_kv": self.num_kv_heads,
            "llama.rope.dimension_count": self.head_dim,
        }


def cached_model(type_name: str) -> Path:
    """The 1B model of this type in the build folder, made when it is not there yet."""
    path = FOLDER / f"random-1B.{type_name}.gguf"
    if not path.exists():
        print(f"making {path.name}, once", flush=True)
        write_model(path, type_name)
    return path


def write_model(path: Path, type_name: str, size: Size | None = None) -> None:
    """Written beside its place and renamed, so that nobody meets half a file."""
    size = size or Size()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "llama")
    add_metadata(writer, size)
    for name, shape in size.shapes().items():
        add_tensor(writer, name, shape, type_name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # Matrices of one shape are equal: drawing takes far longer than writing, and no speed depends on values.
    drawn = {shape: random_bytes(shape, type_name) for shape in set(size.shapes().values())}
    for shape in size.shapes().values():
        writer.write_tensor_data(drawn[shape])
    writer.close()
    os.replace(partial, path)


def add_metadata(writer: gguf.GGUFWriter, size: Size) -> None:
    """The built-in model's fields, its tokenizer among them, with this size's own."""
    own = size.metadata() | {"general.name": "random weights"}
    for key, value, types in built_in_fields():
        writer.add_key_value(key, own.get(key, value), types[0], types[-1] if len(types) > 1 else None)


@cache
def built_in_fields() -> list[tuple[str, Any, list[gguf.GGUFValueType]]]:
    """Key, value and types, which take seconds to read."""
    fields = gguf.GGUFReader(resolve(None)).fields
    return [
        (key, field.contents(), field.types)
        for key, field in fields.items()
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type")
    ]


def type_of(shape: tuple[int, ...], type_name: str) -> gguf.GGMLQuantizationType:
    """Vectors stay in float32, as in every quantised file."""
    return gguf.GGMLQuantizationType["F32" if len(shape) == 1 else type_name]


def add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], type_name: str) -> None:
    kind = type_of(shape, type_name)
    in_bytes = gguf.quant_shape_to_byte_shape(shape, kind)
    writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), kind)


def random_bytes(shape: tuple[int, ...], type_name: str) -> np.ndarray[Any, Any]:
    """Norms are ones: with random ones the noise would grow from layer to layer until it is no number."""
    if len(shape) == 1:
        return torch.ones(shape).view(torch.uint8).numpy()
    sizes = [min(CHUNK_ROWS, shape[0] - start) for start in range(0, shape[0], CHUNK_ROWS)]
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(size, shape[1], generator=generator) * 0.02 for size in sizes)
    return torch.cat([encoded(chunk, type_name) for chunk in rows]).numpy()


def encoded(rows: Tensor, type_name: str) -> Tensor:
    if type_name == "BF16":
        return rows.to(torch.bfloat16).view(torch.uint8)
    return quantize(rows, BlockType[type_name]).blocks


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
