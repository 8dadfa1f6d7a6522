"""Gemma 2: norms before and after attention and MLP, GELU, soft caps, a window in every other layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from infinicore import nn, ops
from infinicore.nn import functional as F
from infinilm.config import DTYPES, LlamaConfig
from infinilm.models import llama
from infinilm.models.gguf import GGUF
from infinilm.models.registry import register
from infinilm.models.stored import Stored
from infinilm.values import check_number

NORMS = [f"{at}_layernorm" for at in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
GGUF_NORMS = dict(zip(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), NORMS, strict=True))
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
GGUF_SCALE = {"query_pre_attn_scalar": None}  # which files do not say: that of the size of the model


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(LlamaConfig):
    model_types: ClassVar[tuple[str, ...]] = ("gemma2",)
    without = ("mlp_bias",)
    activation_functions = ("gelu_pytorch_tanh",)
    layers_of_27b = 46  # whose scores have a scale of their own, of which GGUF files say nothing
    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0
    query_pre_attn_scalar: float = None  # type: ignore[assignment]  # the size of a head
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    @classmethod
    def adapted(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Files have two names for the activation, of which this one counts. They may leave out a scale."""
        activation = content.get("hidden_activation") or "gelu_pytorch_tanh"
        named = {"hidden_act": activation, "hidden_activation": None}
        return {"query_pre_attn_scalar": 256, **super().adapted(content), **named}

    def _fill_in(self) -> None:
        super()._fill_in()
        self._fill_in_windows(lambda layer: layer % 2 == 0)
        if self.query_pre_attn_scalar is None:
            is_27b = self.num_hidden_layers == self.layers_of_27b
            size = self.hidden_size // self.num_attention_heads if is_27b else self.head_dim
            self._set(query_pre_attn_scalar=size)

    def _check(self) -> None:
        super()._check()
        for name in ("query_pre_attn_scalar", *CAPS):
            if getattr(self, name) is not None:
                # A power, a quotient and a product of it are float32's too.
                self._set(**{name: check_number(name, getattr(self, name), 1e6, 1e-6)})


class Gemma2Attention(llama.LlamaAttention):
    def __init__(self, config: Gemma2Config, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.scaling = config.query_pre_attn_scalar**-0.5
        self.softcap = config.attn_logit_softcapping or 0.0


class Gemma2MLP(llama.LlamaMLP):
    act_fn = staticmethod(partial(F.gelu, approximate="tanh"))
    activation = "gelu_tanh"


class Gemma2DecoderLayer(llama.LlamaDecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))"""

    attention_class: type[llama.LlamaAttention] = Gemma2Attention
    mlp_class = Gemma2MLP

    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def flow(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x = ops.add(x, self.post_attention_layernorm(attention(x, norm=self.input_layernorm)))
        return ops.add(x, self.post_feedforward_layernorm(self.mlp(x, norm=self.pre_feedforward_layernorm)))


class Gemma2Model(llama.LlamaModel):
    def __init__(self, config: LlamaConfig, layer_class: type[llama.LlamaDecoderLayer]) -> None:
        super().__init__(config, layer_class)
        root = torch.tensor(config.hidden_size**0.5, dtype=torch.float64, device="cpu")
        self.roots = {dtype: root.to(dtype).item() for dtype in (torch.float64, *DTYPES.values())}

    def embed(self, token_ids: Tensor) -> Tensor:
        """Scaled by the root of their size, which is rounded as they are"""
        embedded = super().embed(token_ids)
        return ops.scale(embedded, self.roots[embedded.dtype])


@register(
    GGUF(
        "gemma2",
        {cap: cap for cap in CAPS},
        GGUF_NORMS,
        GGUF_SCALE,
        has_windows=True,
        usual_window=4096,  # which the first files do not say
    )
)
class Gemma2ForCausalLM(llama.LlamaForCausalLM):
    config_class: type[Gemma2Config] = Gemma2Config
    layer_class: type[Gemma2DecoderLayer] = Gemma2DecoderLayer
    model_class: type[Gemma2Model] = Gemma2Model
    config: Gemma2Config

    @classmethod
    def arrange(cls, stored: Stored, config: LlamaConfig) -> None:
        """Hugging Face's files hold what norms add to one, GGUF's the sum."""
        for norm in (*NORMS, "norm", "q_norm", "k_norm"):
            stored.add(norm, 0.0 if stored.is_gguf else 1.0)

    def logits(self, hidden_states: Tensor) -> Tensor:
        logits, cap = super().logits(hidden_states), self.config.final_logit_softcapping
        return logits if cap is None else ops.softcap(logits, cap)
