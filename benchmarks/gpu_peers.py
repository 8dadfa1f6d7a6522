"""Others on the same shape and GPU: a plain torch step in a CUDA graph, and transformers if it is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from infinilm.config import LlamaConfig


class Peer(Protocol):
    most_streams: int  # of a batch that it is asked for

    def step_seconds(self, batch: int, context: int, num_steps: int) -> float:
        """Of one step of so many streams, each after so many tokens"""


def timed(step: Callable[[], object], num_steps: int) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_steps


class PlainTorch:
    """The layers written down with torch's functions alone, over keys and values that lie as a dense tensor,
    and the largest logit; captured as a CUDA graph."""

    most_streams = 1 << 30

    def __init__(self, config: LlamaConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        hidden, wide = config.hidden_size, config.intermediate_size
        heads, narrow = config.num_attention_heads, config.num_key_value_heads
        width = (heads + 2 * narrow) * config.head_dim
        self.layers = [
            tuple(self.random(*shape) for shape in ((width, hidden), (hidden, hidden), (2 * wide, hidden)))
            + (self.random(hidden, wide),)
            for _ in range(config.num_hidden_layers)
        ]
        self.embedding, self.head = (self.random(config.vocab_size, hidden) for _ in range(2))
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device).mul_(0.02)

    def step_seconds(self, batch: int, context: int, num_steps: int) -> float:
        config = self.config
        size = batch, config.num_key_value_heads, context, config.head_dim
        pools = [(self.random(*size), self.random(*size)) for _ in self.layers]
        tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        angles = self.random(config.head_dim)

        def step() -> None:
            tokens.copy_(self.logits(tokens, pools, angles, context).argmax(-1))

        with torch.inference_mode():
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            return timed(graph.replay, num_steps)

    def logits(
        self, tokens: Tensor, pools: list[tuple[Tensor, Tensor]], angles: Tensor, context: int
    ) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        for (qkv, o, gate_up, down), pool in zip(self.layers, pools, strict=True):
            x = x + F.linear(self.attended(F.linear(self.normed(x), qkv), pool, angles, context), o)
            gate, up = F.linear(self.normed(x), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(self.normed(x), self.head)

    def normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.norm.shape, self.norm, 1e-5)

    def attended(self, qkv: Tensor, pool: tuple[Tensor, Tensor], angles: Tensor, context: int) -> Tensor:
        config, keys, values = self.config, *pool
        count = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        q, k, v = qkv.view(len(qkv), -1, 1, config.head_dim).split(count, 1)
        q, k = (turned(part, angles) for part in (q, k))
        keys[:, :, context - 1 :], values[:, :, context - 1 :] = k, v
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).flatten(1)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles + torch.cat([-second, first], -1) * angles


class Transformers:
    """transformers' own Llama with a static cache, step by step, eager or compiled"""

    def __init__(self, config: LlamaConfig, device: torch.device, is_compiled: bool) -> None:
        import transformers  # type: ignore[import-not-found,unused-ignore]

        self.library, self.device = transformers, device
        self.most_streams = 1 if is_compiled else 1 << 30  # it would compile each batch anew, for minutes
        shape = transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=8192,
        )
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device:
                self.model: Any = transformers.LlamaForCausalLM(shape).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        options = {"mode": "reduce-overhead", "fullgraph": True}
        self.forward: Any = torch.compile(self.model, **options) if is_compiled else self.model

    def step_seconds(self, batch: int, context: int, num_steps: int) -> float:
        cache = self.library.StaticCache(config=self.model.config, max_cache_len=context + 64)
        tokens = torch.zeros(batch, 8, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            place = torch.arange(8, device=self.device)  # which lays the cache out, all of which is read
            self.model(tokens, past_key_values=cache, cache_position=place, logits_to_keep=1)
            place, token = torch.tensor([context], device=self.device), tokens[:, :1].clone()

            def step() -> None:
                found = self.forward(token, past_key_values=cache, cache_position=place)
                token.copy_(found.logits[:, -1:].argmax(-1))

            return timed(step, num_steps)


PEERS: dict[str, Callable[[LlamaConfig, torch.device], Peer]] = {
    "torch in a CUDA graph": PlainTorch,
    "transformers": lambda config, device: Transformers(config, device, is_compiled=False),
    "transformers compiled": lambda config, device: Transformers(config, device, is_compiled=True),
}
