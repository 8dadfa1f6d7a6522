"""Attention whose keys and values are made of a small latent, and may be narrower: DeepSeek's.

The end of a head is rotated, by neighbours; in keys it is the same for all heads. The cache holds keys and
values, not latents; a value has the width of a key there, and stands at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infinicore import nn, ops
from infinicore.quantization import QuantizedTensor
from infinilm.batch import Batch
from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.llama import LlamaAttention, LlamaRMSNorm, Pools
from infinilm.models.stored import Array, Weight
from infinilm.rope import RopeParameters, yarn_growth
from infinilm.values import check_whole

LATENT_EPS = 1e-6  # of the norms of latents, whatever that of the others is


@dataclass(frozen=True, kw_only=True)
class LatentConfig(LlamaConfig):
    q_lora_rank: int | None = 1536  # None: queries are made of no latent
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    def _fill_in(self) -> None:
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check_whole(name, getattr(self, name), 1, LIMITS["head_dim"])
        size = self.qk_nope_head_dim + self.qk_rope_head_dim
        self._set(head_dim=size, num_key_value_heads=self.num_attention_heads)  # whatever files call so
        super()._fill_in()

    def _check(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, but is {self.qk_rope_head_dim}")
        super()._check()
        check_whole("kv_lora_rank", self.kv_lora_rank, 1, LIMITS["hidden_size"])
        if self.q_lora_rank is not None:
            check_whole("q_lora_rank", self.q_lora_rank, 1, LIMITS["hidden_size"])
        if not self.qk_rope_head_dim <= self.v_head_dim <= self.head_dim:
            sizes = f"from qk_rope_head_dim {self.qk_rope_head_dim} to a head's {self.head_dim}"
            raise ValueError(f"v_head_dim must be {sizes}, but is {self.v_head_dim}")

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    def rope_of(self, theta: float, scaling: Mapping[str, Any] | None) -> RopeParameters:
        """What is rotated lies by itself, as a head would."""
        return replace(super().rope_of(theta, scaling), head_dim=self.qk_rope_head_dim)


class LatentAttention(LlamaAttention):
    def __init__(self, config: LatentConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        del self.q_proj, self.k_proj, self.v_proj
        self.plain_dim, self.rotary_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent_dim, self.value_dim = config.kv_lora_rank, config.v_head_dim
        self.has_latent_queries = config.q_lora_rank is not None
        self.scaling *= score_growth(config.rope.scaling)
        hidden_size, num_heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        query_size, made_size = num_heads * self.head_dim, num_heads * (self.plain_dim + self.value_dim)
        if config.q_lora_rank is not None:
            self.q_a_proj = nn.Linear(hidden_size, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = LlamaRMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_size, bias=False)
        else:
            self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, self.latent_dim + self.rotary_dim, bias=bias)
        self.kv_a_layernorm = LlamaRMSNorm(self.latent_dim, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.latent_dim, made_size, bias=False)
        self.o_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, E] -> q, k and v [N, H, D]. Before a value stands the end of what its head has of a key, which
        lies there: nobody reads what comes of it."""
        latent, shared = self.kv_a_proj_with_mqa(x).tensor_split([self.latent_dim], dim=1)
        made = self.kv_b_proj(self.kv_a_layernorm(latent)).view(len(x), -1, self.plain_dim + self.value_dim)
        k = made.new_empty(*made.shape[:2], self.head_dim)
        ops.scale(made[..., : self.plain_dim], 1.0, out=k[..., : self.plain_dim])
        ops.scale(shared[:, None].expand(*k.shape[:2], -1), 1.0, out=k[..., self.plain_dim :])
        return self.project_queries(x).view(k.shape), k, made[..., -self.head_dim :]

    def project_queries(self, x: Tensor) -> Tensor:
        if self.has_latent_queries:
            return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return self.q_proj(x)

    def rotate(
        self, q: Tensor, k: Tensor, v: Tensor, rope: nn.RoPE | None, batch: Batch, pools: Pools
    ) -> Tensor:
        if rope is not None:
            rows, sin, cos, _ = rope.rotation(batch.rope_rows, q.dtype)
            q = ops.scale(q, 1.0)  # who observes the layer that made it is to keep what it made
            for part in (q[..., self.plain_dim :], k[..., self.plain_dim :]):
                ops.rope(part, rows, sin, cos, True, out=part)
        return super().rotate(q, k, v, None, batch, pools)

    def attend(self, q: Tensor, batch: Batch, pools: Pools) -> Tensor:
        """[N, H, D] -> [N, H, V], by a copy: rows that lie apart cannot be flattened"""
        return ops.scale(super().attend(q, batch, pools)[..., -self.value_dim :], 1.0)

    def lay_out(self) -> None:
        """Each of its layers is called by itself."""


def score_growth(scaling: Mapping[str, Any]) -> float:
    """By how much yarn makes scores larger"""
    weight = scaling.get("mscale_all_dim")
    return yarn_growth(scaling["factor"], weight) ** 2 if weight else 1.0


def joined(keys: Weight, values: Weight) -> Weight:
    """What newer GGUF files make keys of a latent with, [H, L, plain], and values, [H, V, L], as one matrix:
    [H (plain + V), L]. In float32, since the blocks of the first lie across its rows."""
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
        raise ValueError(f"{keys.shape} and {values.shape} are not keys and values of one latent")
    num_heads, latent_dim, plain_dim = keys.shape

    def read() -> Tensor:
        return torch.cat([floats(keys.read()).mT, floats(values.read())], dim=1).flatten(0, 1)

    shape = (num_heads * (plain_dim + values.shape[1]), latent_dim)
    return Weight(shape, torch.float32, read, keys.sources + values.sources)


def floats(array: Array) -> Tensor:
    return array.dequantize() if isinstance(array, QuantizedTensor) else array.float()
