"""RBELinear: a weight matrix kept as square blocks, each a smooth surface plus a few transform coefficients.

block = A p + T⁻¹(the K largest of T(block - A p)), where A holds 8 fixed smooth functions, p is their
least-squares weights and T a two-dimensional DCT-II or Bior3.1 transform. docs/rbe.md gives bytes and errors.
"""

import math
from typing import Any, Self

import torch
from torch import Tensor

from infinicore.checks import check_flag, check_place, first_outside, integer, positive
from infinicore.nn import functional as F
from infinicore.nn.activation import GELU
from infinicore.nn.checks import check_float
from infinicore.nn.module import Module, Parameter
from infinicore.nn.norm import LayerNorm

# N blocks, B block size, K coefficients kept of a block, O output features, I input features
NUM_BASIS = 8
CONSTANT: Any = {"dtype": torch.float64, "device": "cpu"}  # whatever torch's defaults are
# Bior3.1's decomposition filters, in units of sqrt(2) / 8.
BIOR_LOW = (-2.0, 6.0, 6.0, -2.0)
BIOR_HIGH = (-1.0, 3.0, -3.0, 1.0)


class RBELinear(Module):
    """A linear layer over an encoded matrix: `from_dense_weights` encodes one, the constructor leaves zeros
    to load a state into.

    A call decodes the matrix, multiplies and forgets it: between calls the layer takes `num_bytes`.
    """

    rows: Tensor
    columns: Tensor
    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        block_size: int = 64,
        num_coefficients: int = 256,
        transform: str = "dct",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_place("RBELinear", dtype, device)
        dtype = dtype or torch.float32
        check_flag("RBELinear", "bias", bias)
        self.in_features = in_features = positive("RBELinear", "in_features", in_features)
        self.out_features = out_features = positive("RBELinear", "out_features", out_features)
        self.block_size = block_size = integer("RBELinear", "block_size", block_size)
        num_coefficients = integer("RBELinear", "num_coefficients", num_coefficients)
        check_layout(block_size, num_coefficients)
        levels(transform, block_size)  # refuses what it cannot transform
        self.transform = transform
        num_blocks = math.ceil(out_features / block_size) * math.ceil(in_features / block_size)
        kept = num_blocks, num_coefficients
        self.surface = Parameter(torch.zeros(num_blocks, NUM_BASIS, dtype=dtype, device=device))
        self.coefficients = Parameter(torch.zeros(kept, dtype=dtype, device=device))
        self.register_buffer("rows", torch.zeros(kept, dtype=torch.uint16, device=device))
        self.register_buffer("columns", torch.zeros(kept, dtype=torch.uint16, device=device))
        self.bias = Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    @classmethod
    def from_dense_weights(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        block_size: int = 64,
        num_coefficients: int = 256,
        transform: str = "dct",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Encode weight [O, I], keeping `num_coefficients` of each block of `block_size`²."""
        check_dense(weight)
        out_features, in_features = weight.shape
        device = weight.device if device is None else device
        layout = block_size, num_coefficients, transform
        layer = cls(in_features, out_features, bias is not None, *layout, dtype=dtype, device=device)
        weight = weight.to(layer.surface.device)
        if layer.bias is not None and bias is not None:
            layer.bias.load(layer.bias.shard_of(bias, "RBELinear: bias"))
        layer.encode(weight)
        return layer

    def __getstate__(self) -> dict[str, Any]:
        """pickle cannot read torch's uint16 back: places go as int16."""
        places = {"rows": self.rows.view(torch.int16), "columns": self.columns.view(torch.int16)}
        return {**self.__dict__, "_buffers": {**self._buffers, **places}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.rows, self.columns = self.rows.view(torch.uint16), self.columns.view(torch.uint16)

    @torch.no_grad()
    def encode(self, weight: Tensor) -> None:
        """Replace the matrix by weight [O, I]."""
        check_dense(weight)
        self._check_shape(weight)
        size = self.block_size
        basis = smooth_basis(size, weight.device)  # [B², 8]
        blocks = tiles_of(weight.double(), size).flatten(1)  # [N, B²]
        self.surface.copy_(blocks @ torch.linalg.pinv(basis, atol=1e-10, rtol=0.0).T)
        residual = blocks - self.surface.double() @ basis.T  # against p as it is stored
        spectrum = analyse(residual.view(-1, size, size), self.transform).flatten(1)
        places = spectrum.abs().topk(self.coefficients.shape[1], dim=1).indices  # [N, K]
        self.coefficients.copy_(spectrum.gather(1, places))
        self.rows.copy_(places // size)
        self.columns.copy_(places % size)

    def dense_weight(self) -> Tensor:
        """The decoded matrix [O, I], in float32, also where autocast would have products in another dtype."""
        if not torch._C._is_any_autocast_enabled():
            return self._decode()
        with torch._C._DisableAutocast():
            return self._decode()

    def _decode(self) -> Tensor:
        size = self.block_size
        surfaces = self.surface.float() @ smooth_basis(size, self.surface.device).float().T  # [N, B²]
        spectrum = torch.zeros_like(surfaces).scatter(1, self.places(), self.coefficients.float())
        residuals = synthesise(spectrum.view(-1, size, size), self.transform)  # [N, B, B]
        blocks = surfaces.view(-1, size, size) + residuals
        return matrix_of(blocks, self.out_features, self.in_features)

    def places(self) -> Tensor:
        """Where in its flattened block each coefficient stands: [N, K]"""
        rows, columns = self.rows.long(), self.columns.long()
        if any(first_outside(index, self.block_size) is not None for index in (rows, columns)):
            raise ValueError(f"a coefficient stands outside its block of {self.block_size}²: damaged state")
        return rows * self.block_size + columns

    @property
    def num_bytes(self) -> int:
        """The bytes this layer stores: 32 + 8 K a block in float32, and the bias."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def relative_error(self, weight: Tensor) -> float:
        """|decoded - weight| / |weight|, in the Frobenius norm."""
        check_dense(weight)
        self._check_shape(weight)
        weight = weight.float()
        error = torch.linalg.norm(self.dense_weight() - weight) / torch.linalg.norm(weight)
        return float(error.nan_to_num())  # zeros decode to zeros

    def _check_shape(self, weight: Tensor) -> None:
        found, wanted = tuple(weight.shape), (self.out_features, self.in_features)
        if found != wanted:
            raise ValueError(f"RBELinear: weight has shape {found}, but the layer's is {wanted}")

    def forward(self, x: Tensor) -> Tensor:
        """[*, I] -> [*, O]"""
        check_float("RBELinear", "x", x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.dense_weight().to(x.dtype), bias)

    def extra_repr(self) -> str:
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        kept = f"block_size={self.block_size}, num_coefficients={self.coefficients.shape[1]}"
        return f"{features}, bias={self.bias is not None}, {kept}, transform={self.transform!r}"


class MLPBlock(Module):
    """x + linear2(gelu(linear1(layer_norm(x)))), both linear layers encoded from weights in [-0.1, 0.1)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_place("MLPBlock", dtype, device)
        hidden_size = positive("MLPBlock", "hidden_size", hidden_size)
        intermediate_size = positive("MLPBlock", "intermediate_size", intermediate_size)
        self.layer_norm = LayerNorm(hidden_size, dtype=dtype, device=device)
        self.linear1 = RBELinear(hidden_size, intermediate_size, bias=False, dtype=dtype, device=device)
        self.activation = GELU("tanh")
        self.linear2 = RBELinear(intermediate_size, hidden_size, bias=False, dtype=dtype, device=device)
        for linear in (self.linear1, self.linear2):
            if not linear.surface.is_meta:  # which takes no values
                linear.encode(random_weight(linear.out_features, linear.in_features, device))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.linear1(self.layer_norm(x)))
        output: Tensor = self.linear2(hidden)
        return x + output


def random_weight(out_features: int, in_features: int, device: torch.device | str | None) -> Tensor:
    return torch.empty(out_features, in_features, dtype=torch.float32, device=device).uniform_(-0.1, 0.1)


def smooth_basis(size: int, device: torch.device) -> Tensor:
    """The 8 functions at the points of a block over [-1, 1]², row by row: [B², 8]"""
    line = torch.linspace(-1, 1, size, **CONSTANT) if size > 1 else torch.zeros(1, **CONSTANT)
    y, x = torch.meshgrid(line, line, indexing="ij")
    distance = torch.hypot(x, y)
    wave_x, wave_y = torch.cos(math.pi * x), torch.cos(math.pi * y)
    functions = [
        torch.ones_like(x),
        distance,
        distance.square(),
        wave_x,
        wave_y,
        torch.cos(2 * math.pi * x),
        torch.cos(2 * math.pi * y),
        wave_x * wave_y,
    ]
    return torch.stack(functions, dim=-1).flatten(0, 1).to(device)


def analyse(blocks: Tensor, transform: str) -> Tensor:
    """T(blocks): each level maps the corner the one before left, rows and columns alike."""
    spectrum = blocks.clone()
    for matrix in levels(transform, blocks.shape[-1]):
        apply_to_corner(spectrum, matrix.to(blocks))
    return spectrum


def synthesise(spectrum: Tensor, transform: str) -> Tensor:
    """T⁻¹(spectrum): the inverse of each level, the last one first."""
    blocks = spectrum.clone()
    for matrix in reversed(levels(transform, spectrum.shape[-1])):
        apply_to_corner(blocks, torch.linalg.inv(matrix).to(spectrum))
    return blocks


def apply_to_corner(blocks: Tensor, matrix: Tensor) -> None:
    size = len(matrix)
    blocks[..., :size, :size] = matrix @ blocks[..., :size, :size] @ matrix.T


def levels(transform: str, size: int) -> list[Tensor]:
    """The one-dimensional steps of a transform as matrices, the first of them [B, B]."""
    if transform == "dct":
        return [dct_matrix(size)]
    if transform != "bior3.1":
        raise ValueError(f"RBELinear: transform must be 'dct' or 'bior3.1', found {transform!r}")
    if size < 2 or size & (size - 1):
        raise ValueError(
            f"RBELinear: bior3.1 needs a power of two as block_size, found {size!r}; 'dct' takes any"
        )
    return [bior_matrix(size >> level) for level in range(size.bit_length() - 1)]


def dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II: sqrt(2 / n) cos(π (2 i + 1) k / 2 n), row 0 divided by sqrt(2)."""
    k, i = torch.meshgrid(*[torch.arange(size, **CONSTANT)] * 2, indexing="ij")
    matrix = math.sqrt(2 / size) * torch.cos(math.pi * (2 * i + 1) * k / (2 * size))
    matrix[0] /= math.sqrt(2)
    return matrix


def bior_matrix(size: int) -> Tensor:
    """One periodic step, scaled by 1 / sqrt(2): the low-pass half of the output, then the high-pass half."""
    matrix = torch.zeros(size, size, **CONSTANT)
    for row in range(size // 2):
        for tap, (low, high) in enumerate(zip(BIOR_LOW, BIOR_HIGH, strict=True)):
            matrix[row, (2 * row + tap) % size] += low / 8
            matrix[size // 2 + row, (2 * row + tap) % size] += high / 8
    return matrix


def tiles_of(matrix: Tensor, size: int) -> Tensor:
    """[O, I], padded with zeros, as its blocks in row-major order: [N, B, B]"""
    rows, columns = matrix.shape
    height, width = math.ceil(rows / size), math.ceil(columns / size)
    padded = matrix.new_zeros(height * size, width * size)
    padded[:rows, :columns] = matrix
    return padded.view(height, size, width, size).transpose(1, 2).reshape(-1, size, size)


def matrix_of(blocks: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of tiles_of, without the padding."""
    size = blocks.shape[-1]
    height, width = math.ceil(rows / size), math.ceil(columns / size)
    padded = blocks.view(height, width, size, size).transpose(1, 2).reshape(height * size, width * size)
    return padded[:rows, :columns].contiguous()


def check_layout(block_size: int, num_coefficients: int) -> None:
    if not 1 <= block_size <= 65536:
        raise ValueError(
            f"RBELinear: block_size must be in [1, 65536], for 16-bit positions, found {block_size}"
        )
    if not 0 <= num_coefficients <= block_size**2:
        limit = f"[0, {block_size**2}], the values of a block of {block_size}²"
        raise ValueError(f"RBELinear: num_coefficients must be in {limit}, found {num_coefficients!r}")


def check_dense(weight: Tensor) -> None:
    check_float("RBELinear", "weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"RBELinear: weight must be [out, in], found shape {tuple(weight.shape)}")
    if weight.is_meta:
        raise ValueError("RBELinear: weight is on the meta device and holds no values to encode")
    if not weight.isfinite().all():
        raise ValueError("RBELinear: weight holds values that are not finite, which no block can encode")
