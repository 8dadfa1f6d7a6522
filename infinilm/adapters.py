"""Adapters: low-rank weights beside those of a model, for the rows of a step that ask for them.

A model stays as it is. Beside it there is a second one, of the same weights, whose layers add what adapters
have; it takes the steps in which some stream has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from infinicore import ops
from infinicore.nn.linear import project_onto
from infinilm.batch import Batch, Pausing, Stream, finished

# N tokens of the step, R rows of all adapters of a layer


@dataclass(frozen=True, eq=False)
class Adapter:
    """By the name of a layer what is added to x Wᵀ: (x aᵀ) b, with a [rank, in] and b [rank, out]"""

    weights: dict[str, tuple[Tensor, Tensor]]
    digest: bytes = b""  # of the weights


class Rows:
    """The adapter of each token [N] of the step that runs"""

    def __init__(self) -> None:
        self.adapters: Tensor | None = None


class AdaptedLinear(torch.nn.Module):
    """A layer, and what adapters add to the rows that are theirs"""

    def __init__(
        self, layer: torch.nn.Module, pairs: Sequence[tuple[Tensor, Tensor] | None], rows: Rows
    ) -> None:
        super().__init__()
        self.layer, self.rows = layer, rows
        for name, own in layer.named_parameters(recurse=False):
            if name not in ("weight", "bias"):  # no part of the product: who calls the layer reads it there
                self.register_parameter(name, own)
        found = [pair for pair in pairs if pair is not None]
        self.a, self.b = (torch.cat(parts) for parts in zip(*found, strict=True))
        ranks = [0 if pair is None else len(pair[0]) for pair in pairs]
        self.ends = torch.tensor(ranks, device="cpu").cumsum(0)  # on the host, whatever the device

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = project_onto(x, self.layer, residual)
        return ops.add_lora(y, x, self.a, self.b, self.ends, self.rows.adapters, out=y)


class AdaptedModel:
    """A model whose layers add what these adapters have; it takes the steps that the model itself takes."""

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        # Adapters that nobody else holds any more get no place in the next AdaptedModel.
        self.places = WeakKeyDictionary({adapter: place for place, adapter in enumerate(adapters)})
        self.recordings: dict[tuple[int, int], Any] = {}  # of its steps, which are gone with it
        self._rows = Rows()
        names = dict.fromkeys(name for adapter in adapters for name in adapter.weights)
        layers = {name: self._layer(model.get_submodule(name), name, adapters) for name in names}
        self._model = with_layers(model, layers)

    def _layer(self, layer: torch.nn.Module, name: str, adapters: Sequence[Adapter]) -> AdaptedLinear:
        adapted = AdaptedLinear(layer, [adapter.weights.get(name) for adapter in adapters], self._rows)
        begin = 0
        for adapter, end in zip(adapters, adapted.ends.tolist(), strict=True):
            if end > begin:  # from here on its weights are these, and no copy of them
                adapter.weights[name] = adapted.a[begin:end], adapted.b[begin:end]
            begin = end
        return adapted

    def place_of(self, stream: Stream) -> int:
        return -1 if stream.adapter is None else self.places[stream.adapter]

    def step(self, batch: Batch, cache: Any, rope: Any) -> tuple[Tensor, Tensor]:
        return finished(self.step_by_layers(batch, cache, rope))

    def step_by_layers(self, batch: Batch, cache: Any, rope: Any) -> Pausing[tuple[Tensor, Tensor]]:
        steps = self._model.step_by_layers(batch, cache, rope)
        while True:
            self._rows.adapters = batch.adapters  # others may have run during the pause
            try:
                next(steps)
            except StopIteration as end:
                result: tuple[Tensor, Tensor] = end.value
                return result
            yield


def with_layers(module: Any, layers: Mapping[str, torch.nn.Module], name: str = "") -> Any:
    """The module with other layers under some names; what has none of them is shared, weights always."""
    if name in layers:
        return layers[name]
    prefix = name and name + "."
    if not any(other.startswith(prefix) for other in layers):
        return module
    changed = copy(module)
    changed._modules = {
        own: with_layers(child, layers, prefix + own) for own, child in module._modules.items()
    }
    return changed
