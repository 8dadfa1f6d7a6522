"""The feed-forward layer of LLaMA, on functions alone."""

import infinicore
from infinicore import Tensor
from infinicore.nn.functional import linear, swiglu

# E hidden size, I intermediate size


def feed_forward_network(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """x [*, E], w_gate and w_up [I, E], w_down [E, I] -> [*, E]"""
    gate = linear(x, w_gate)  # [*, I]
    up = linear(x, w_up)  # [*, I]
    return linear(swiglu(gate, up), w_down)


def main() -> None:
    infinicore.manual_seed(0)
    hidden_size, intermediate_size = 64, 172
    x = infinicore.randn(2, 10, hidden_size)
    w_gate = infinicore.randn(intermediate_size, hidden_size) / hidden_size**0.5
    w_up = infinicore.randn(intermediate_size, hidden_size) / hidden_size**0.5
    w_down = infinicore.randn(hidden_size, intermediate_size) / intermediate_size**0.5
    y = feed_forward_network(x, w_gate, w_up, w_down)
    print(f"output: {tuple(y.shape)}, standard deviation {y.std():.3f}")


if __name__ == "__main__":
    main()
