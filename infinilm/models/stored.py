"""The weights of a checkpoint under the names that a model has for them, each read when it is asked for.

A model that has a weight in another form than its files says so in `arrange`, by the operations here. They
take modules by the end of their names, `self_attn.qkv_proj` being that of every layer; all but `add`, `part`
and `transpose` take weights in blocks too, since their rows are independent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from infinicore.quantization import BlockType, QuantizedTensor
from infinilm.checkpoint import Checkpoint, CheckpointError

Array = Tensor | QuantizedTensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A weight that is not read yet: what it will be, and what it is made of"""

    shape: Shape
    dtype: torch.dtype | BlockType
    read: Callable[[], Array]
    sources: tuple[str, ...]  # the names of tensors in the checkpoint

    @property
    def num_bytes(self) -> int:
        if isinstance(self.dtype, BlockType):
            return prod(self.shape[:-1]) * self.dtype.bytes_per_row(self.shape[-1])
        return prod(self.shape) * self.dtype.itemsize


class Stored(dict[str, Weight]):
    """Weights by name"""

    def __init__(self, checkpoint: Checkpoint, names: dict[str, str]) -> None:
        """`names` has the model's name of each tensor, and the checkpoint's."""
        super().__init__({ours: weight_of(checkpoint, theirs) for ours, theirs in names.items()})
        self.path = checkpoint.path
        self.is_gguf = checkpoint.is_gguf
        for name, weight in self.items():
            if name.endswith(".bias") and isinstance(weight.dtype, BlockType):
                found = f"{names[name]!r} is {weight.dtype.name}"
                raise self.error(f"{found}, but the rows of a bias are no blocks")

    def error(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {rule}")

    def named(self, module: str) -> Iterator[tuple[str, str, str]]:
        """(whole name, what stands before the module, what follows it) of the weights of such modules"""
        pattern = re.compile(rf"((?:.*\.)?){re.escape(module)}((?:\.\w+)?)")
        for name in list(self):
            if match := pattern.fullmatch(name):
                yield name, match[1], match[2]

    def put(self, name: str, weight: Weight) -> None:
        """Under a name that no other weight may have"""
        if name in self:
            raise self.error(f"{self[name].sources[0]!r} and {weight.sources[0]!r} are both {name!r}")
        self[name] = weight

    def rename(self, module: str, other: str) -> None:
        for name, before, after in self.named(module):
            self.put(before + other + after, self.pop(name))

    def move(self, prefix: str, other: str) -> None:
        """What stands under one name, under another"""
        for name in [name for name in self if name.startswith(prefix)]:
            self.put(other + name.removeprefix(prefix), self.pop(name))

    def drop(self, prefix: str) -> None:
        """Leave out what the model has no use for"""
        for name in [name for name in self if name.startswith(prefix)]:
            del self[name]

    def add(self, module: str, number: float) -> None:
        """Add a number to every element, in float32"""
        for name, _, _ in self.named(module):
            if isinstance(self[name].dtype, BlockType):
                raise self.error(f"{name!r} is in blocks, to which no number is added")
            summed = changed(self[name], lambda array: array.float() + number)
            self[name] = replace(summed, dtype=torch.float32)

    def reorder(self, module: str, order: Callable[[int], Tensor]) -> None:
        """Put rows into another order, which is found for their number"""
        for name, _, _ in self.named(module):
            if not self[name].shape:
                raise self.error(f"{name!r} is a single number, but should have rows")
            self[name] = changed(self[name], rows_of, order)

    def split(self, module: str, others: Sequence[str], sizes: Sequence[int]) -> None:
        """Rows that belong to one module after the other"""
        for name, before, after in self.named(module):
            whole = self.pop(name)
            if not whole.shape or whole.shape[0] != sum(sizes):
                raise self.error(f"{name!r} has shape {whole.shape}, but should have {sum(sizes)} rows")
            start = 0
            for other, size in zip(others, sizes, strict=True):
                self.put(before + other + after, part_of(whole, start, start + size))
                start += size

    def stack(self, module: str, other: str, count: int) -> None:
        """The rows of modules that are numbered, as `experts.{}.w1`, one after the other as one"""
        for name, before, after in self.named(module.format(0)):
            names = [f"{before}{module.format(i)}{after}" for i in range(count)]
            if missing := [each for each in names if each not in self]:
                raise self.error(f"{missing[0]!r} is missing")
            parts = [self.pop(each) for each in names]
            if not parts[0].shape or len({(part.shape, part.dtype) for part in parts}) > 1:
                raise self.error(f"the {count} weights like {name!r} are not all rows of one shape and type")
            self.put(before + other + after, stacked(parts))

    def flatten(self, module: str) -> None:
        """All but the last dimension as rows: of experts [X, rows, columns] one matrix, and one bias"""
        for name, _, after in self.named(module):
            shape = self[name].shape
            shape = (prod(shape),) if after == ".bias" else (prod(shape[:-1]), *shape[-1:])
            self[name] = replace(changed(self[name], as_rows, shape), shape=shape)

    def part(self, name: str, others: Sequence[str]) -> None:
        """Experts [X, rows, columns] whose rows belong to one module after the other, equally many"""
        for each, before, after in self.named(name):
            if after:
                continue
            whole, count = self.pop(each), len(others)
            if len(whole.shape) != 3 or whole.shape[1] % count:
                wanted = f"[experts, {count} parts, columns]"
                raise self.error(f"{each!r} has shape {whole.shape}, but should be {wanted}")
            for i, other in enumerate(others):
                self.put(before + other, inner_part_of(whole, i, whole.shape[1] // count))

    def deal(self, module: str, others: Sequence[str]) -> None:
        """Rows that belong to several modules in turn"""
        for name, before, after in self.named(module):
            whole, step = self.pop(name), len(others)
            for start, other in enumerate(others):
                shape = (len(range(start, whole.shape[0], step)), *whole.shape[1:])
                dealt = changed(whole, rows_of, every(step, start))
                self.put(before + other + after, replace(dealt, shape=shape))

    def transpose(self, name: str, other: str) -> None:
        """Experts [X, columns, rows] as [X, rows, columns]"""
        for each, before, after in self.named(name):
            if not after:
                shape = self[each].shape
                turned = changed(self.pop(each), lambda array: array.transpose(-1, -2))
                self.put(before + other, replace(turned, shape=(*shape[:-2], *shape[:-3:-1])))

    def join(self, modules: Sequence[str], other: str, make: Callable[..., Weight]) -> None:
        """One weight of several that stand side by side"""
        for _, before, after in self.named(modules[0]):
            parts = [self.pop(before + module + after, None) for module in modules]
            if None in parts:
                raise self.error(f"{before + modules[parts.index(None)] + after!r} is missing")
            try:
                made = make(*parts)
            except ValueError as error:
                raise self.error(f"{before + modules[0] + after!r}: {error}") from error
            self.put(before + other, made)


def weight_of(checkpoint: Checkpoint, name: str) -> Weight:
    return Weight(checkpoint.shape(name), checkpoint.dtype(name), lambda: checkpoint.tensor(name), (name,))


def changed(weight: Weight, change: Callable[..., Array], *arguments: Any) -> Weight:
    return replace(weight, read=lambda: change(weight.read(), *arguments))


def rows_of(array: Array, order: Callable[[int], Tensor]) -> Array:
    """Their order is made here, once the shape is known to be the model's: a file may claim any number."""
    rows = order(array.shape[0])
    if isinstance(array, QuantizedTensor):
        return array.rows(rows)
    return array.index_select(0, rows)


def every(step: int, start: int) -> Callable[[int], Tensor]:
    return lambda num_rows: torch.arange(start, num_rows, step, device="cpu")


def part_of(weight: Weight, start: int, stop: int) -> Weight:
    shape = (stop - start, *weight.shape[1:])

    def read() -> Array:
        whole = weight.read()
        if isinstance(whole, QuantizedTensor):
            return replace(whole, blocks=whole.blocks[start:stop], shape=shape)
        return whole[start:stop]

    return replace(weight, shape=shape, read=read)


def inner_part_of(weight: Weight, index: int, size: int) -> Weight:
    """So many rows of each expert"""
    num_experts, _, num_columns = weight.shape
    rows = slice(index * size, (index + 1) * size)
    return replace(changed(weight, lambda array: array[:, rows]), shape=(num_experts, size, num_columns))


def stacked(parts: Sequence[Weight]) -> Weight:
    first = parts[0]
    shape = (len(parts) * first.shape[0], *first.shape[1:])

    def read() -> Array:
        arrays = [part.read() for part in parts]
        if isinstance(arrays[0], QuantizedTensor):
            blocks = torch.cat([array.blocks for array in arrays])  # type: ignore[union-attr]
            return replace(arrays[0], blocks=blocks, shape=shape)
        return torch.cat(arrays)  # type: ignore[arg-type]

    return Weight(shape, first.dtype, read, sum((part.sources for part in parts), ()))


def as_rows(array: Array, shape: Shape) -> Array:
    return replace(array, shape=shape) if isinstance(array, QuantizedTensor) else array.reshape(shape)
