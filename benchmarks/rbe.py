"""What RBELinear keeps of a real model's weights, against int8, int4 and low rank at no more bytes:
`python -m benchmarks.rbe [model]`.

A number is |decoded - weight| / |weight|: 0 is perfect, 1 is what a matrix of zeros scores.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from infinicore.nn import RBELinear
from infinicore.quantization import BlockType, QuantizedTensor, quantize
from infinilm.checkpoint import Checkpoint, open_checkpoint
from infinilm.hub import resolve
from infinilm.models.registry import read_config
from infinilm.models.stored import Stored
from infinilm.models.weights import stored_weights

NUM_ROWS = 1536  # of a matrix, at most: the embedding has 49,152
BLOCK_SIZE = 64
FORMATS = {"int8": BlockType.Q8_0, "int4": BlockType.Q4_0}
COLUMNS = "{:<26} {:<6} {:>6} {:>7} {:>9} {:>9} {:>13}"


def weights_of(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The embedding, a matrix from the first, the middle and the last layer, and a random one."""
    config = read_config(checkpoint)
    stored, last = stored_weights(checkpoint, config), config.num_hidden_layers - 1
    yield "embed_tokens", dense(stored, "model.embed_tokens.weight")
    yield "layer 0, q_proj", dense(stored, "model.layers.0.self_attn.q_proj.weight")
    yield f"layer {last // 2}, gate_proj", dense(stored, f"model.layers.{last // 2}.mlp.gate_proj.weight")
    yield f"layer {last}, down_proj", dense(stored, f"model.layers.{last}.mlp.down_proj.weight")
    yield "random, normal", torch.randn(512, 512, generator=torch.Generator().manual_seed(0))


def dense(stored: Stored, name: str) -> Tensor:
    weight = stored[name].read()
    tensor = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.float()
    return tensor[:NUM_ROWS]


def relative_error(decoded: Tensor, weight: Tensor) -> float:
    return float(torch.linalg.norm(decoded - weight) / torch.linalg.norm(weight))


def low_rank_error(weight: Tensor, num_bytes: int) -> float:
    """The best factors that fit in the bytes, kept in float16."""
    rank = num_bytes // (2 * sum(weight.shape))
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    left, right = (u[:, :rank] * s[:rank]).half(), v[:rank].half()
    return relative_error(left.float() @ right.float(), weight)


def rbe_error(weight: Tensor, num_bytes: int, transform: str) -> float:
    num_blocks = math.prod(math.ceil(size / BLOCK_SIZE) for size in weight.shape)
    num_coefficients = (num_bytes // num_blocks - 32) // 8
    layer = RBELinear.from_dense_weights(weight, None, BLOCK_SIZE, num_coefficients, transform)
    if layer.num_bytes > num_bytes:
        raise RuntimeError(f"RBELinear took {layer.num_bytes} bytes of {num_bytes}: the comparison is unfair")
    return layer.relative_error(weight)


def print_rows(name: str, weight: Tensor) -> None:
    for format, block_type in FORMATS.items():
        packed = quantize(weight, block_type)
        errors = [
            relative_error(packed.dequantize(), weight),
            low_rank_error(weight, packed.num_bytes),
            rbe_error(weight, packed.num_bytes, "dct"),
            rbe_error(weight, packed.num_bytes, "bior3.1"),
        ]
        bits = 8 * packed.num_bytes / weight.numel()
        print(COLUMNS.format(name, format, f"{bits:.1f}", *(f"{error:.3f}" for error in errors)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "model", nargs="?", help="a path or a Hugging Face id; the built-in model if not given"
    )
    with open_checkpoint(resolve(parser.parse_args().model)) as checkpoint:
        print(COLUMNS.format("weights", "budget", "bits", "integer", "low rank", "RBE dct", "RBE bior3.1"))
        for name, weight in weights_of(checkpoint):
            print_rows(name, weight)


if __name__ == "__main__":
    main()
