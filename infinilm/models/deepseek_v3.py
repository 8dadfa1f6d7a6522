"""DeepSeek-V3 and Moonlight: DeepSeek-V2 whose experts are chosen by sigmoids and a bias, within groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from infinicore import nn, ops
from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.deepseek import (
    KEYS,
    MODULES,
    DeepseekV2Config,
    DeepseekV2DecoderLayer,
    DeepseekV2ForCausalLM,
    SharedExpertsConfig,
    SharedExpertsMLP,
)
from infinilm.models.gguf import GGUF
from infinilm.models.mixture import BiasedRouter, place_bias
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.values import check_whole

# What others of the family do in another way; 2 is how llama.cpp writes sigmoid.
USUAL: dict[str, tuple[Any, ...]] = {
    "topk_method": (None, "noaux_tc"),
    "scoring_func": (None, "sigmoid", 2),
    "moe_layer_freq": (None, 1),
    "use_mla": (None, True),
    "rope_interleave": (True,),  # null is no
}
GROUP_KEYS = {
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
BIAS_MODULES = {"exp_probs_b": "mlp.gate.e_score_correction"}
# Where GGUF files are silent
SILENT = {
    "q_lora_rank": None,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True, kw_only=True)
class GroupedConfig(SharedExpertsConfig):
    usual = USUAL
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    num_nextn_predict_layers: int = 1  # of files, which guess further tokens and are not read

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of shares null is no, whatever is done where files say nothing of them."""
        content = super().adapted(content)
        is_null = content.get("norm_topk_prob", True) is None
        return {**content, "norm_topk_prob": False} if is_null else content

    def _check(self) -> None:
        super()._check()
        check_whole("n_group", self.n_group, 1, self.num_experts)
        check_whole("topk_group", self.topk_group, 1, self.n_group)
        check_whole("num_nextn_predict_layers", self.num_nextn_predict_layers, 0, LIMITS["num_hidden_layers"])
        size = self.num_experts // self.n_group
        if self.num_experts % self.n_group or (self.n_group > 1 and size < 2):
            groups = f"num_experts {self.num_experts} are not {self.n_group} groups"
            raise ValueError(f"{groups} of equally many experts, two or more")
        check_whole("num_experts_per_tok", self.num_experts_per_tok, 1, self.topk_group * size)


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepseekV2Config, GroupedConfig):
    model_types = ("deepseek_v3",)
    usual = USUAL
    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    max_position_embeddings: int = 4096
    norm_topk_prob: bool = True  # once more: DeepSeek-V2, which comes first, has the opposite
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    n_shared_experts: int = 1
    first_k_dense_replace: int = 3
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1


class GroupedMLP(SharedExpertsMLP):
    def __init__(self, config: GroupedConfig) -> None:
        super().__init__(config)
        self.groups = config.n_group, config.topk_group
        self.gate: BiasedRouter = BiasedRouter(config)

    def choice(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.gate.e_score_correction_bias
        return ops.route(scores, self.num_chosen, self.is_normalized, "sigmoid", bias, self.groups)


class DeepseekV3DecoderLayer(DeepseekV2DecoderLayer):
    mlp_class: type[nn.Module] = GroupedMLP


def drop_guessing_layers(stored: Stored, config: GroupedConfig) -> None:
    """Those after the last, which guess further tokens; GGUF's have been left out already."""
    for i in range(config.num_nextn_predict_layers):
        stored.drop(f"model.layers.{config.num_hidden_layers + i}.")


@register(
    GGUF(
        "deepseek2",
        {**KEYS, **GROUP_KEYS},
        {**MODULES, **BIAS_MODULES},
        SILENT,
        has_experts=True,
        has_sigmoids=True,
    )
)
class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    config_class = DeepseekV3Config
    layer_class = DeepseekV3DecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        if isinstance(config, GroupedConfig):
            drop_guessing_layers(stored, config)
        place_bias(stored)
        super().arrange(stored, config)
