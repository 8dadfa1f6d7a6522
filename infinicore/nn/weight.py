"""A layer around one weight matrix, dense or in quantised blocks."""

from collections.abc import Callable
from typing import Self

from torch import Tensor

from infinicore.nn.module import LoadError, Module, Parameter
from infinicore.quantization import PackedTensor, QuantizedTensor


class WeightLayer(Module):
    """A layer whose weight may be replaced by one that stays in blocks.

    A quantised weight is no parameter: `to` moves it, but `parameters`, `state_dict` and `load_state_dict`
    pass it over, and it comes and goes by `set_weight` alone.
    """

    weight: Parameter | QuantizedTensor

    def set_weight(self, weight: Tensor | QuantizedTensor) -> None:
        """Take `weight`, of the present one's shape (a parallel layer: of its slice), without copying it.

        So a layer made on the meta device gets its values, and two layers given one weight share its memory.
        """
        check_weight(type(self).__name__, weight, tuple(self.weight.shape))
        if isinstance(weight, QuantizedTensor):
            del self.weight
            self.weight = weight
        elif isinstance(self.weight, Parameter):
            self.weight = Parameter._hold(weight, self.weight._split, self.weight.requires_grad)
        else:
            self.weight = Parameter(weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if isinstance(self.weight, QuantizedTensor):
            self.weight = self.weight.moved(fn)
        return self

    def extra_repr(self) -> str:
        if not isinstance(self.weight, QuantizedTensor):
            return ""
        name = f", weight={self.weight.type.name}"
        if isinstance(self.weight, PackedTensor):
            return f"{name}, activation_bits={self.weight.activation_bits}"
        return name


def check_weight(layer: str, weight: Tensor | QuantizedTensor, wanted: tuple[int, ...]) -> None:
    if not isinstance(weight, Tensor | QuantizedTensor):
        raise TypeError(f"{layer}: weight must be a tensor or quantised, but is {type(weight).__name__}")
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        raise TypeError(f"{layer}: weight must have a floating dtype, but is {weight.dtype}")
    if tuple(weight.shape) != wanted:
        raise LoadError(f"{layer}: weight has shape {tuple(weight.shape)}, but {wanted} is wanted")
