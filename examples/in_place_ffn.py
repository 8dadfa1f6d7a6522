"""A feed-forward layer that reuses its memory: results are written over tensors that are done with."""

import infinicore
from infinicore import Tensor
from infinicore.nn.functional import linear, rms_norm, swiglu

# E hidden size, I intermediate size


def memory_efficient_ffn(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, norm_weight: Tensor
) -> Tensor:
    """x [*, E], w_gate and w_up [I, E], w_down [E, I], norm_weight [E] -> [*, E]"""
    gate = linear(x, w_gate)  # [*, I]
    up = linear(x, w_up)  # [*, I]
    swiglu(gate, up, out=gate)  # applies SiLU to the gate itself: no silu before it
    output = linear(gate, w_down)  # [*, E]
    return rms_norm(output, [output.shape[-1]], norm_weight, out=output)


def main() -> None:
    infinicore.manual_seed(0)
    hidden_size, intermediate_size = 64, 172
    x = infinicore.randn(2, 10, hidden_size)
    w_gate, w_up = infinicore.randn(2, intermediate_size, hidden_size)
    w_down = infinicore.randn(hidden_size, intermediate_size)
    y = memory_efficient_ffn(x, w_gate, w_up, w_down, infinicore.ones(hidden_size))
    print(f"output: {tuple(y.shape)}, mean square {y.square().mean():.3f}")


if __name__ == "__main__":
    main()
