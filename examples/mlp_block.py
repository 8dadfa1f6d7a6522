"""A residual MLP on compressed weights: what it stores, what that costs in accuracy."""

import infinicore
from infinicore import Tensor, nn
from infinicore.nn import functional as F


def dense_mlp(block: nn.MLPBlock, x: Tensor) -> Tensor:
    """The same block with its weights decoded: x + W2 gelu(W1 layer_norm(x))"""
    w1, w2 = block.linear1.dense_weight(), block.linear2.dense_weight()
    return x + F.linear(F.gelu(F.linear(block.layer_norm(x), w1), "tanh"), w2)


def main() -> None:
    infinicore.manual_seed(0)
    block = nn.MLPBlock(hidden_size=128, intermediate_size=512)
    x = infinicore.randn(2, 10, 128)
    print("distance from the decoded weights:", (block(x) - dense_mlp(block, x)).abs().max().item())

    weight = infinicore.randn(512, 128)
    encoded = nn.RBELinear.from_dense_weights(weight)
    error = (encoded.dense_weight() - weight).norm() / weight.norm()
    print(f"random weights: {weight.nbytes} bytes became {encoded.num_bytes}, relative error {error:.2f}")


if __name__ == "__main__":
    main()
