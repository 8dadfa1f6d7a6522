"""A transformer's MLP as a module: an assignment in `__init__` declares a child or a parameter."""

import infinicore
from infinicore import Tensor, nn
from infinicore.nn import functional as F


class TransformerMLP(nn.Module):
    """fc2(gelu(fc1(x))) * gating: [*, E] -> [*, E]. The gating starts at one."""

    def __init__(
        self,
        hidden_size: int,
        dtype: infinicore.dtype | None = None,
        device: infinicore.device | str | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, 4 * hidden_size, dtype=dtype, device=device)
        self.fc2 = nn.Linear(4 * hidden_size, hidden_size, dtype=dtype, device=device)
        self.gating = nn.Parameter(infinicore.ones(hidden_size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x))  # [*, 4E]
        return self.fc2(hidden) * self.gating


def main() -> None:
    infinicore.manual_seed(0)
    mlp = TransformerMLP(hidden_size=64)
    x = infinicore.randn(2, 10, 64)
    print(mlp)
    print("parameters:", ", ".join(mlp.state_dict()))
    print("output:", tuple(mlp(x).shape))


if __name__ == "__main__":
    main()
