"""What mixtures of experts share: an MLP of many, of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinicore import nn, ops
from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.stored import Stored
from infinilm.values import check_whole

MAX_EXPERTS = 1 << 12
PARTS = {f"{part}_proj": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
GGUF_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
GGUF_MODULES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(LlamaConfig):
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = None  # type: ignore[assignment]  # intermediate_size
    norm_topk_prob: bool = False  # whether the shares of the chosen are made to add up to one

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Their number has two names."""
        count = content.get("num_local_experts")
        return content if count is None else {**content, "num_experts": count, "num_local_experts": None}

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.moe_intermediate_size is None:
            self._set(moe_intermediate_size=self.intermediate_size)

    def _check(self) -> None:
        super()._check()
        check_whole("num_experts", self.num_experts, 1, MAX_EXPERTS)
        check_whole("num_experts_per_tok", self.num_experts_per_tok, 1, self.num_experts)
        check_whole("moe_intermediate_size", self.moe_intermediate_size, 1, LIMITS["intermediate_size"])


class Router(nn.Linear):
    """A score for each expert. Small and decisive: it stays as it is stored where matrices are rounded."""


class BiasedRouter(Router):
    """With a bias that chooses and has no part in shares. In float32 whatever the model is in: what it tells
    apart differs by less than half precision does."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts, dtype=torch.float32))


class MixtureMLP(nn.Module):
    """The sum of what the chosen experts make of a token, each times its share"""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        self.is_normalized = config.norm_topk_prob
        self.gate = Router(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor, norm: nn.RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """[N, E] -> [N, E]: of x, or of norm(x), with a residual added"""
        mixed = self.mixed(x if norm is None else norm(x))
        return mixed if residual is None else ops.add(residual, mixed)

    def scores(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, X]"""
        return self.gate(x)

    def mixed(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, E]"""
        return self.experts(x, *self.choice(self.scores(x)))

    def choice(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """[N, X] -> experts and shares [N, k]"""
        return ops.route(scores, self.num_chosen, self.is_normalized, "softmax", None, (1, 1))


def place_bias(stored: Stored) -> None:
    """Of the choice, whose name GGUF files end as that of any bias"""
    stored.rename("mlp.gate.e_score_correction.bias", "mlp.gate.e_score_correction_bias")


def stack_experts(stored: Stored, config: LlamaConfig, names: Mapping[str, str] = PARTS) -> None:
    """One matrix for the experts of a layer: GGUF has them as one tensor, Hugging Face each by itself, under
    these names, or as transformers computes with them: as one, gate and up together."""
    if isinstance(config, MixtureConfig):
        if not stored.is_gguf:
            stored.part(
                "mlp.experts.gate_up_proj", [f"mlp.experts.{part}_proj.weight" for part in ("gate", "up")]
            )
            stored.part("mlp.experts.down_proj", ["mlp.experts.down_proj.weight"])
        for ours, theirs in names.items():
            stored.stack(theirs, f"mlp.experts.{ours}", config.num_experts)
            stored.flatten(f"mlp.experts.{ours}")
