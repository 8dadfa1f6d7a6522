"""Layers. Each is a torch.nn.Module whose parameters carry the names of PyTorch and Hugging Face checkpoints.

Threads may call one module at once, unless it has a communicator: ranks have to call that in one order. What
changes a module (`load_state_dict`, `to`) wants it alone.
"""

from infinicore.nn import functional
from infinicore.nn.activation import GELU, SiLU, Softmax
from infinicore.nn.embedding import Embedding, PositionalEmbedding
from infinicore.nn.experts import Experts
from infinicore.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear
from infinicore.nn.module import Module, ModuleList, Parameter
from infinicore.nn.norm import LayerNorm, RMSNorm
from infinicore.nn.rbe import MLPBlock, RBELinear
from infinicore.nn.rope import RoPE

__all__ = [
    "ColumnParallelLinear",
    "Embedding",
    "Experts",
    "GELU",
    "LayerNorm",
    "Linear",
    "MLPBlock",
    "Module",
    "ModuleList",
    "Parameter",
    "PositionalEmbedding",
    "RBELinear",
    "RMSNorm",
    "RoPE",
    "RowParallelLinear",
    "SiLU",
    "Softmax",
    "functional",
]
