"""dots.llm1: Qwen3 with experts that are chosen as DeepSeek-V3's."""

from __future__ import annotations

from dataclasses import dataclass

from infinilm.config import LIMITS, LlamaConfig
from infinilm.models.deepseek import SHARED_KEYS, SHARED_MODULES, DenseFirstDecoderLayer
from infinilm.models.deepseek_v3 import BIAS_MODULES, GROUP_KEYS, USUAL, GroupedConfig, GroupedMLP
from infinilm.models.gguf import GGUF
from infinilm.models.llama import LlamaForCausalLM
from infinilm.models.mixture import place_bias, stack_experts
from infinilm.models.qwen import Qwen3Attention
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.values import check_whole


@dataclass(frozen=True, kw_only=True)
class Dots1Config(GroupedConfig):
    model_types = ("dots1",)
    # Its files name there how DeepSeek-V3's chooses by sigmoids.
    usual = {**USUAL, "scoring_func": (*USUAL["scoring_func"], "noaux_tc")}
    without = ("mlp_bias",)
    vocab_size: int = 152064
    hidden_size: int = 4608
    intermediate_size: int = 10944
    num_hidden_layers: int = 62
    moe_intermediate_size: int = 1408
    norm_topk_prob: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 62  # those after so many have a window, where there is one
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def _fill_in(self) -> None:
        super()._fill_in()
        check_whole("max_window_layers", self.max_window_layers, 0, LIMITS["num_hidden_layers"])
        if self.sliding_window is not None:
            self._fill_in_windows(lambda layer: layer >= self.max_window_layers)


class Dots1DecoderLayer(DenseFirstDecoderLayer):
    attention_class = Qwen3Attention
    mlp_class = GroupedMLP


@register(
    GGUF(
        "dots1",
        {**SHARED_KEYS, **GROUP_KEYS},
        {**SHARED_MODULES, **BIAS_MODULES},
        has_experts=True,
        has_sigmoids=True,
    )
)
class Dots1ForCausalLM(LlamaForCausalLM):
    config_class = Dots1Config
    layer_class = Dots1DecoderLayer

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        place_bias(stored)
        stack_experts(stored, config)
