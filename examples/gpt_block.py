"""A GPT block: token embedding, causal attention with rotary positions, MLP."""

from transformer_mlp import TransformerMLP

import infinicore
from infinicore import Tensor, nn
from infinicore.nn import functional as F

# B batch, S sequence, E hidden size, H heads, D head size


class GPTBlock(nn.Module):
    """Norms come before each half, residuals around it: token ids [B, S], positions [S] -> [B, S, E]"""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_heads: int,
        max_seq_len: int,
        dtype: infinicore.dtype | None = None,
        device: infinicore.device | str | None = None,
    ) -> None:
        super().__init__()
        head_dim = hidden_size // num_heads
        place = {"dtype": dtype, "device": device}
        self.num_heads = num_heads
        self.wte = nn.Embedding(vocab_size, hidden_size, **place)
        self.ln1 = nn.RMSNorm(hidden_size, eps=1e-5, **place)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False, **place)
        self.rope = nn.RoPE(head_dim, max_seq_len, algo=nn.RoPE.Algo.GPT_NEOX, **place)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False, **place)
        self.ln2 = nn.RMSNorm(hidden_size, eps=1e-5, **place)
        self.mlp = TransformerMLP(hidden_size, **place)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.wte(input_ids)
        hidden = hidden + self.attention(self.ln1(hidden), positions)
        return hidden + self.mlp(self.ln2(hidden))

    def attention(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # each [B, S, H, D]
        q, k = self.rope(q, positions), self.rope(k, positions)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # each [B, H, S, D]
        weights = F.causal_softmax(q @ k.mT * q.shape[-1] ** -0.5)  # [B, H, S, S]
        return self.out((weights @ v).transpose(1, 2).flatten(-2))  # [B, S, E]


def main() -> None:
    infinicore.manual_seed(0)
    block = GPTBlock(vocab_size=100, hidden_size=64, num_heads=4, max_seq_len=32)
    input_ids, positions = infinicore.tensor([[1, 2, 3, 4, 5]]), infinicore.arange(5)
    print(block)
    print("output:", tuple(block(input_ids, positions).shape))


if __name__ == "__main__":
    main()
