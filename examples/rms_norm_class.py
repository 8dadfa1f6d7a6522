"""A layer without a framework: RMSNorm as a plain class around the function. `nn.RMSNorm` is the module."""

import infinicore
from infinicore import Tensor
from infinicore.nn.functional import rms_norm


class RMSNorm:
    """Scales each row to unit root mean square, then by `weight`: [*, E] -> [*, E]"""

    def __init__(self, hidden_dim: int, eps: float = 1e-5) -> None:
        self.eps = eps
        self.weight = infinicore.ones(hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(input=x, normalized_shape=[x.shape[-1]], weight=self.weight, eps=self.eps)


def main() -> None:
    infinicore.manual_seed(0)
    x = infinicore.randn(3, 64) * 5
    y = RMSNorm(hidden_dim=64).forward(x)
    for name, rows in (("before", x), ("after", y)):
        print(
            f"root mean square of each row {name}:", rows.square().mean(-1).sqrt().round(decimals=3).tolist()
        )


if __name__ == "__main__":
    main()
