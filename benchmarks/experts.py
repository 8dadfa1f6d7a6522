"""How fast a mixture of experts is read: `python -m benchmarks.experts`.

Random layers of the shape of a 30B mixture with 3B active (E 2048, I 768, 128 experts, of which 8 are chosen)
in Q4_0. Each token chooses its own experts in each layer, so what it reads comes from memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import infinicore
from benchmarks.machine import arguments, machine
from benchmarks.timing import race
from infinicore import nn, ops
from infinicore.quantization import BlockType, QuantizedTensor, aligned_bytes, precise_activation_bits
from infinilm.bench import Measured, read_bandwidth

HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 2048, 768, 128, 8
TYPE = BlockType.Q4_0
NUM_TOKENS = (1, 4, 16, 128, 512)
COLUMNS = "{:>7} {:>10} {:>12} {:>10} {:>12}"


def random_layer(generator: torch.Generator) -> nn.Experts:
    layer = nn.Experts(NUM_EXPERTS, HIDDEN, INNER, device="meta")
    for projection in (layer.gate_proj, layer.up_proj, layer.down_proj):
        num_rows, length = projection.weight.shape
        blocks = aligned_bytes(num_rows, TYPE.bytes_per_row(length))
        torch.randint(256, blocks.shape, dtype=torch.uint8, generator=generator, out=blocks)
        scale = torch.tensor([0.05 * length**-0.5], dtype=torch.float16).view(torch.uint8)
        blocks.view(-1, TYPE.bytes_per_block)[:, :2] = scale
        weight = QuantizedTensor(blocks, TYPE, (num_rows, length))
        projection.set_weight(weight.pack(precise_activation_bits(TYPE)))
    return layer


def chosen_bytes(ids: torch.Tensor) -> int:
    """Of the experts that a layer reads for these tokens"""
    return 3 * TYPE.bytes_per_row(HIDDEN) * INNER * len(ids.unique())


def steps(layers: list[nn.Experts], num_tokens: int) -> tuple[Callable[[], None], float]:
    """Some tokens through all layers, and the bytes they read of each layer on average"""
    x = torch.randn(num_tokens, HIDDEN)
    choices = [ops.route(torch.randn(num_tokens, NUM_EXPERTS), NUM_CHOSEN, True) for _ in range(64)]
    at = 0

    def step() -> None:
        nonlocal at
        for layer in layers:
            layer(x, *choices[at % len(choices)])
            at += 1

    return step, sum(chosen_bytes(ids) for ids, _ in choices) / len(choices)


def row(num_tokens: int, seconds: Measured, num_layers: int, num_bytes: float, bandwidth: float) -> str:
    speed = num_bytes * num_layers / seconds.median
    rate = num_tokens * num_layers / seconds.median
    each = f"{seconds.median / num_layers * 1e6:.0f}"
    return COLUMNS.format(num_tokens, each, f"{speed / 1e9:.1f}", f"{speed / bandwidth:.0%}", f"{rate:,.0f}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of 340 MB each (default: %(default)s)")
    options = parser.parse_args()
    infinicore.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    layers = [random_layer(generator) for _ in range(options.layers)]
    bandwidth = read_bandwidth()
    print(machine(options.threads)["CPU"], f"\nmemory is read at {bandwidth / 1e9:.1f} GB/s")
    print(COLUMNS.format("tokens", "us a layer", "GB/s read", "of memory", "layers/s"))
    for num_tokens in NUM_TOKENS:
        step, num_bytes = steps(layers, num_tokens)
        seconds = race({"": step}, num_rounds=7, budget=0.2)[""]
        print(row(num_tokens, seconds, len(layers), num_bytes, bandwidth))


if __name__ == "__main__":
    main()
