"""infinicore: neural-network layers and functions on torch tensors, with a native CPU core."""

from torch import (  # noqa: A004
    add,
    argmax,
    bfloat16,
    bool,
    cat,
    device,
    div,
    dtype,
    exp,
    float16,
    float32,
    float64,
    inference_mode,
    int8,
    int16,
    int32,
    int64,
    manual_seed,
    matmul,
    mean,
    mul,
    no_grad,
    pow,
    sqrt,
    stack,
    sub,
    uint8,
    uint16,
    uint32,
    uint64,
)

# `infinicore.tensor` is a function; the module of that name stays importable.
from infinicore.tensor import (
    Tensor,
    arange,
    empty,
    from_blob,
    from_numpy,
    from_torch,
    ones,
    randn,
    tensor,
    zeros,
)

from infinicore import distributed, nn, ops  # isort: skip
from infinicore.ops.native import get_num_threads, set_num_threads

__version__ = "0.1.0"  # of both packages, which one build makes

# Whether kernels of ops.registry.ACCELERATED may run; results do not depend on it.
use_ntops = True

# Whether a row has the same bits in any company on a GPU too, where that takes longer; on a CPU it has.
deterministic = False

__all__ = [
    "Tensor",
    "add",
    "arange",
    "argmax",
    "bfloat16",
    "bool",
    "cat",
    "deterministic",
    "device",
    "distributed",
    "div",
    "dtype",
    "empty",
    "exp",
    "float16",
    "float32",
    "float64",
    "from_blob",
    "from_numpy",
    "from_torch",
    "get_num_threads",
    "inference_mode",
    "int16",
    "int32",
    "int64",
    "int8",
    "manual_seed",
    "matmul",
    "mean",
    "mul",
    "nn",
    "no_grad",
    "ones",
    "ops",
    "pow",
    "randn",
    "set_num_threads",
    "sqrt",
    "stack",
    "sub",
    "tensor",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "use_ntops",
    "zeros",
]
