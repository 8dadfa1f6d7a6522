"""Causal self-attention with rotary positions, on functions alone."""

import infinicore
from infinicore import Tensor
from infinicore.nn.functional import RopeAlgo, causal_softmax, linear, rope

# B batch, S sequence, E hidden size, H heads, D head size


def rope_tables(length: int, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """sin and cos of every position's angles, each [length, D/2]"""
    frequency = theta ** (-infinicore.arange(0, head_dim, 2) / head_dim)
    angle = infinicore.arange(length)[:, None] * frequency
    return angle.sin(), angle.cos()


def self_attention(
    x: Tensor,
    w_qkv: Tensor,
    w_out: Tensor,
    pos_ids: Tensor,
    sin_table: Tensor,
    cos_table: Tensor,
    num_heads: int,
) -> Tensor:
    """x [B, S, E], w_qkv [3E, E], w_out [E, E], pos_ids [S] or [B, S] -> [B, S, E]"""
    batch_size, seq_len, hidden_size = x.shape
    head_dim = hidden_size // num_heads
    q, k, v = linear(x, w_qkv).chunk(3, dim=-1)  # each [B, S, E]
    q, k, v = (t.reshape(batch_size, seq_len, num_heads, head_dim) for t in (q, k, v))
    q = rope(q, pos_ids, sin_table, cos_table, algo=RopeAlgo.GPT_NEOX)
    k = rope(k, pos_ids, sin_table, cos_table, algo=RopeAlgo.GPT_NEOX)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # each [B, H, S, D]
    scores = q @ k.transpose(-2, -1) / head_dim**0.5  # [B, H, S, S]
    heads = causal_softmax(scores) @ v  # [B, H, S, D]
    return linear(heads.transpose(1, 2).reshape(batch_size, seq_len, hidden_size), w_out)


def main() -> None:
    infinicore.manual_seed(0)
    hidden_size, num_heads, seq_len = 64, 4, 10
    x = infinicore.randn(2, seq_len, hidden_size)
    w_qkv = infinicore.randn(3 * hidden_size, hidden_size) / hidden_size**0.5
    w_out = infinicore.randn(hidden_size, hidden_size) / hidden_size**0.5
    tables = rope_tables(seq_len, hidden_size // num_heads)
    y = self_attention(x, w_qkv, w_out, infinicore.arange(seq_len), *tables, num_heads)
    print(f"output: {tuple(y.shape)}, standard deviation {y.std():.3f}")


if __name__ == "__main__":
    main()
