"""Plain arguments as what they mean: each is read, or refused by the name of its function and its own."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex

import torch

FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))


def integer(function: str, name: str, value: SupportsIndex) -> int:
    """numpy's integers and torch's are integers too; floats and strings are not, whatever they hold, nor are
    True and False, which were meant for another argument."""
    try:
        if isinstance(value, bool):
            raise TypeError
        # A size that torch traces is a number already; to ask which one would compile for that one alone.
        found: int = value if isinstance(value, int | torch.SymInt) else operator.index(value)  # type: ignore[assignment]
    except TypeError:
        raise TypeError(f"{function}: {name} must be an integer, but is {value!r}") from None
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{function}: {name} must fit 64 bits, but has {found.bit_length()}")
    return found


def positive(function: str, name: str, value: SupportsIndex) -> int:
    found = integer(function, name, value)
    if found < 1:
        raise ValueError(f"{function}: {name} must be positive, but is {found}")
    return found


def sizes(function: str, name: str, value: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    """A shape: integers, or one for a shape of one dimension."""
    items: Iterable[Any] = (value,)
    if not isinstance(value, int):  # torch.compile would fail at an int's having no items
        with contextlib.suppress(TypeError):  # it is one integer, such as numpy's
            items = tuple(value)  # type: ignore[arg-type]
    return tuple(integer(function, name, item) for item in items)


def number(function: str, name: str, value: SupportsFloat) -> float:
    """What float() takes, but for strings."""
    if type(value) is float:  # perhaps one that torch traces
        return value
    try:
        math.isfinite(value)  # which refuses strings, as float() does not
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last by tensors of several numbers
        raise TypeError(f"{function}: {name} must be a number, but is {value!r}") from None


def check_flag(function: str, name: str, value: object) -> None:
    """Whatever Python takes for true or false, but for what was meant for another argument"""
    if isinstance(value, torch.Tensor | torch.dtype | torch.device | str):
        found = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(f"{function}: {name} must be True or False, but is {found}")


def check_tensor(function: str, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{function}: {name} must be a tensor, but is {type(tensor).__name__}")
    if tensor.is_nested:  # of which torch tells no shape
        raise TypeError(f"{function}: {name} must be dense, but is nested; call to_padded_tensor")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{function}: {name} must be dense, but its layout is {tensor.layout}; call to_dense")


def first_outside(indices: torch.Tensor, count: int) -> int | None:
    """The first index that is not in [0, count), if there is one; what torch traces has no values to tell"""
    if indices.is_meta or torch.compiler.is_dynamo_compiling() or is_traced():
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(indices):
        indices = torch._C._functorch.get_unwrapped(indices)
    signed = indices.long()  # of which the largest of uint64 are negative
    is_bad = (signed < 0) | (signed >= count)
    if not bool(is_bad.any()):
        return None
    outside: int = next(index for index in indices.flatten().tolist() if not 0 <= index < count)
    return outside


def is_traced() -> bool:
    """Whether torch makes a graph of what is computed; what only counts or logs it leaves the values"""
    kinds = torch._C._TorchDispatchModeKey
    modes = map(torch._C._get_dispatch_mode, (kinds.FAKE, kinds.FUNCTIONAL, kinds.PROXY))
    return any(mode is not None for mode in modes)


def check_eps(function: str, eps: SupportsFloat) -> float:
    """eps as a float: torch adds no fraction to a tensor, and no integer beyond 64 bits."""
    found = number(function, "eps", eps)
    if not 0 <= found < math.inf:
        raise ValueError(f"{function}: eps must be finite and not negative, but is {found!r}")
    return found


def check_place(function: str, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    """Can a layer's tensors have this dtype, on this device?"""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATS):
        wanted = "float16, bfloat16, float32 or float64"
        raise TypeError(f"{function}: dtype must be {wanted}, but is {dtype!r}")
    check_device(function, device)


def check_device(function: str, device: torch.device | str | None) -> None:
    """Whether there is such a device, and tensors can be made there; None is torch's default."""
    if device is None:
        return
    try:
        torch.device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{function}: device must be a device or its name, but is {device!r}") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"{function}: device {device!r} cannot be used here: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """What torch says first; what follows may be a list of all that it has."""
    return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]


def check_places(function: str, name: str, tensor: torch.Tensor) -> None:
    """Each result needs a place of its own, which an expanded tensor or overlapping windows do not have."""
    if tensor.numel() and shares_places(tensor):
        steps = f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise ValueError(f"{function}: {name} has one place for several results, with {steps}; call clone")


def shares_places(tensor: torch.Tensor) -> bool:
    """Whether two elements lie in one place. Where each dimension steps over all that smaller steps reach, as
    nearly always, none do; else each place is looked at."""
    steps = [pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] > 1]
    if any(step == 0 for step, _ in steps):
        return True
    if torch.compiler.is_dynamo_compiling():  # which cannot sort what it traces
        return False
    reach = 1
    for step, size in sorted(steps):
        if step < reach:
            return has_twins(tensor)
        reach += (size - 1) * step
    return False


def has_twins(tensor: torch.Tensor) -> bool:
    reach = 1 + sum((size - 1) * step for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    places = torch.arange(reach, device="cpu").as_strided(tensor.shape, tensor.stride())
    return len(torch.unique(places)) < tensor.numel()


def check_usable(device: torch.device | str | None) -> None:
    """Whether tensors can be made there; None is the CPU."""
    try:
        torch.zeros(1, device="cpu" if device is None else device).item()
    except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
        raise ValueError(
            f"device {device!r} cannot be used here: {reason_of(error)}; take 'cpu', or 'cuda' on a GPU"
        ) from error
