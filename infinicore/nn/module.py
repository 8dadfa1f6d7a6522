"""Module, ModuleList and Parameter: torch's, with what the seeds, our design documents, add: children built
by name, tensor-parallel slices, loading that is checked before it writes.

Their C++ macros `INFINICORE_NN_MODULE`, `_PARAMETER` and `_BUFFER` are, in Python, an assignment in
`__init__` (`self.fc1 = Linear(8, 8)`) or a call of the `register_*` method of the same name.
Nothing here takes a lock: threads may call one module at once unless it has a communicator, but what changes
it wants it alone.
"""

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from infinicore.checks import check_flag, integer
from infinicore.tensor import tensor_from_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer


# Of what get_extra_state returns, which may be anything
EXTRA = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
Split = tuple[int, int, int]  # tp_dim, tp_rank, tp_size


class LoadError(ValueError, RuntimeError):
    """A tensor or state dict does not fit. Also a RuntimeError, which callers of torch's modules catch."""


class LoadResult(NamedTuple):
    """Names of the module that were not given, and given names that the module does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Parameter(torch.nn.Parameter):
    """This rank's slice of a weight: `data` is the whole tensor, of which dimension `tp_dim` is split over
    `tp_size` ranks. Inference comes first: `requires_grad` is off until asked for.

    With `tp_size` 1 the parameter shares the memory of `data`, as torch's does.
    """

    tp_dim: int
    tp_rank: int
    tp_size: int

    def __new__(
        cls, data: Tensor, tp_dim: int = 0, tp_rank: int = 0, tp_size: int = 1, *, requires_grad: bool = False
    ) -> Self:
        split = checked_split(data, tp_dim, tp_rank, tp_size)
        shard = data if split[2] == 1 else owned(slice_of(data, split))
        return cls._hold(shard, split, requires_grad)

    @classmethod
    def _hold(cls, shard: Tensor, split: Split, requires_grad: bool) -> Self:
        """A parameter of a tensor that is a slice already."""
        parameter: Self = torch.Tensor._make_subclass(cls, shard.detach(), requires_grad)
        parameter.tp_dim, parameter.tp_rank, parameter.tp_size = split
        return parameter

    @property
    def _split(self) -> Split:
        return self.tp_dim, self.tp_rank, self.tp_size

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the tensor this parameter is a slice of."""
        if self.tp_size == 1:
            return self.shape
        sizes = list(self.shape)
        sizes[self.tp_dim] *= self.tp_size
        return torch.Size(sizes)

    def shard_of(self, whole: Tensor, name: str = "full_tensor") -> Tensor:
        """This rank's slice of `whole`, a view; refuses what cannot be loaded, calling it `name`."""
        check_loadable(self, whole, name)
        if whole.shape != self.whole_shape:
            raise LoadError(
                f"{name} has shape {tuple(whole.shape)}, but the parameter needs {tuple(self.whole_shape)}"
            )
        return whole if self.tp_size == 1 else slice_of(whole, self._split)

    def load(self, full_tensor: Tensor) -> None:
        """Copy this rank's slice of the whole tensor in, from any device and between floating dtypes."""
        shard = self.shard_of(full_tensor)
        if self.is_meta:
            raise ValueError("a parameter on the meta device has no memory to load into; call to_empty first")
        with torch.no_grad():
            self.copy_(shard)

    def load_blob(self, data: "Buffer") -> None:
        """Load the whole tensor from its bytes (this parameter's dtype, row-major, native byte order)."""
        self.load(tensor_from_bytes(data, self.whole_shape, self.dtype, "load_blob"))

    def __repr__(self) -> str:  # type: ignore[override]  # as torch.nn.Parameter has it
        """torch's own text; torch would put the name of a class other than its own around the values twice"""
        return f"Parameter containing:\n{self.detach().requires_grad_(self.requires_grad)!r}"

    # torch's own versions rebuild with (data, requires_grad), which would lose the split.
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = self._hold(self.detach().clone(), self._split, self.requires_grad)
        copied: Self = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., "Parameter"], tuple[Any, ...]]:
        return restored, (type(self), self.data, self.requires_grad, vars(self))


def restored(
    kind: type[Parameter], shard: Tensor, requires_grad: bool, attributes: dict[str, Any]
) -> Parameter:
    """A parameter as it was pickled; its split is among its attributes, and so is what others noted on it."""
    parameter: Parameter = torch.Tensor._make_subclass(kind, shard.detach(), requires_grad)
    vars(parameter).update(attributes)
    return parameter


torch.serialization.add_safe_globals([Parameter, restored])  # torch.load reads weights alone unless told


def slice_of(whole: Tensor, split: Split) -> Tensor:
    dim, rank, size = split
    length = whole.shape[dim] // size
    return whole.narrow(dim, rank * length, length)


def owned(shard: Tensor) -> Tensor:
    """A dense copy: a view would keep the whole tensor in memory."""
    return shard.detach().clone(memory_format=torch.contiguous_format)


def checked_split(data: Tensor, tp_dim: int, tp_rank: int, tp_size: int) -> Split:
    if not isinstance(data, Tensor):
        raise TypeError(f"Parameter data must be a tensor, found {type(data).__name__}")
    if tp_dim is True:  # what torch's Parameter takes here, and would be lost
        raise TypeError("Parameter: tp_dim must be an integer, but is True; requires_grad goes by its name")
    tp_dim = integer("Parameter", "tp_dim", tp_dim)
    tp_rank = integer("Parameter", "tp_rank", tp_rank)
    tp_size = integer("Parameter", "tp_size", tp_size)
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank must be in [0, tp_size), found tp_rank={tp_rank!r}, tp_size={tp_size!r}")
    if not 0 <= tp_dim < max(data.ndim, 1):
        raise ValueError(f"tp_dim={tp_dim!r} is not a dimension of shape {tuple(data.shape)}")
    if tp_size > 1 and (data.ndim == 0 or data.shape[tp_dim] % tp_size):
        raise ValueError(f"tp_dim={tp_dim} of shape {tuple(data.shape)} does not split in tp_size={tp_size}")
    return tp_dim, tp_rank, tp_size


def check_loadable(target: Tensor, source: Tensor, name: str) -> None:
    """Floating dtypes convert into each other; any other difference would change the values' meaning."""
    if not isinstance(source, Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(source).__name__}")
    if source.dtype != target.dtype and not (source.is_floating_point() and target.is_floating_point()):
        raise TypeError(f"{name} has dtype {source.dtype}, but the parameter needs {target.dtype}")
    if source.is_nested:  # of which torch tells no shape
        raise TypeError(f"{name} is nested, but the parameter needs a dense tensor")
    if source.layout is not target.layout:
        raise TypeError(f"{name} has layout {source.layout}, but the parameter needs {target.layout}")
    if source.is_meta and not target.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no values to load")


class Module(torch.nn.Module):
    """torch's Module with the seeds' additions; the tree, hooks, `to`, `state_dict` are torch's own."""

    __call__: Callable[..., Tensor]  # by torch's own types it may return anything

    @property
    def device(self) -> torch.device:
        """Where the first parameter or buffer lives; the CPU for a module that holds none."""
        tensor = next(chain(self.parameters(), self.buffers()), None)
        return self.__dict__.get("device", torch.device("cpu")) if tensor is None else tensor.device

    @device.setter
    def device(self, value: Any) -> None:
        """Modules often note where they were made. What is answered is where the tensors are, if there are
        any."""
        self.__dict__["device"] = value

    def register_module(  # type: ignore[override]  # torch's takes an instance only and returns nothing
        self, name: str, module: torch.nn.Module | type[torch.nn.Module], *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        """Build `module(*args, **kwargs)`, or take an instance, as the child `name`; returns the child."""
        if isinstance(module, type) and issubclass(module, torch.nn.Module):
            module = module(*args, **kwargs)
        elif args or kwargs:
            raise TypeError(f"register_module({name!r}): arguments need a Module class, found {module!r}")
        self.add_module(name, module)
        return module

    def register_modules(
        self, count: int, name: str, module_class: type[torch.nn.Module], *args: Any, **kwargs: Any
    ) -> "ModuleList":
        """Build `count` modules of one class as the children `name.0`, `name.1`, … and return their list."""
        if integer(f"register_modules({name!r})", "count", count) < 0:
            raise ValueError(f"register_modules({name!r}): count must not be negative, found {count!r}")
        if isinstance(module_class, torch.nn.Module) or not callable(module_class):
            raise TypeError(f"register_modules({name!r}): expected a Module class, found {module_class!r}")
        modules = ModuleList(module_class(*args, **kwargs) for _ in range(count))
        self.add_module(name, modules)
        return modules

    def register_parameter(  # type: ignore[override]  # torch's returns nothing
        self, name: str, param: Tensor | None
    ) -> Tensor | None:
        """Keep a parameter, or a plain tensor made into one, under `name`; returns the parameter."""
        if isinstance(param, Tensor) and not isinstance(param, torch.nn.Parameter):
            param = Parameter(param)
        super().register_parameter(name, param)
        return param

    def register_buffer(  # type: ignore[override]  # torch's returns nothing
        self, name: str, tensor: Tensor | None, persistent: bool = True
    ) -> Tensor | None:
        """Keep a tensor that is not learned under `name`, saved if persistent; returns the tensor."""
        super().register_buffer(name, tensor, persistent)
        return tensor

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = False, assign: bool = False
    ) -> LoadResult:
        """Load what the mapping has of this module's tensors; nothing is written unless everything fits.

        A tensor-parallel parameter takes the whole tensor or its own slice. Names that only one side has are
        reported, and refused when `strict`; a wrong shape (ValueError) or dtype (TypeError) always is.
        """
        check_state(state_dict)
        check_flag("load_state_dict", "strict", strict)
        check_flag("load_state_dict", "assign", assign)
        versions = getattr(state_dict, "_metadata", None) or {}
        state_dict = hooked(self, state_dict, versions, strict)
        held = self.state_dict(keep_vars=True)
        own = {key: value for key, value in held.items() if not key.endswith(EXTRA)}
        given = {key: state_dict[key] for key in held if key not in own and key in state_dict}
        tensors = {key: fit(own[key], value, key) for key, value in state_dict.items() if key in own}
        if assign:
            tensors = adopted(own, tensors)
        else:
            check_has_memory(own, tensors)
        share_between_tied(own, tensors)
        given |= tensors
        known = given if strict else state_dict  # in which a tied tensor may stand under another of its names
        result = LoadResult([k for k in held if k not in known], [k for k in state_dict if k not in held])
        if strict and any(result):
            raise LoadError(f"{type(self).__name__}: {describe(result)}; strict=False skips them")
        with without_hooks(self):
            super().load_state_dict(with_versions(given, versions), strict=False, assign=assign)
        return result

    def load_parameter_from_blob(self, name: str, data: "Buffer") -> None:
        """Load the parameter of that dotted name from the whole tensor's bytes (Parameter.load_blob)."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        if not isinstance(name, str):
            raise TypeError(f"load_parameter_from_blob: name must be a string, found {type(name).__name__}")
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, cutoff=0.0)
            raise LoadError(f"no parameter {name!r} in {type(self).__name__}; the closest names are {close}")
        parameter = as_ours(parameters[name])
        parameter.load(tensor_from_bytes(data, parameter.whole_shape, parameter.dtype, repr(name)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """torch makes new, plain parameters where it cannot convert in place (`to("meta")`): keep ours."""
        splits = {name: p._split for name, p in self._parameters.items() if isinstance(p, Parameter)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, split in splits.items():
            new = self._parameters[name]
            if new is not None and not isinstance(new, Parameter):
                self._parameters[name] = Parameter._hold(new, split, new.requires_grad)
        return self


class ModuleList(Module, torch.nn.ModuleList):
    """torch's list of children, as a Module of ours."""


def is_observed(module: torch.nn.Module) -> bool:
    """Whether hooks, or a forward of this module alone, are to have what goes into a call and comes out:
    the call may then not be left out, or joined with what stands beside it."""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(forward or backward or torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def as_ours(tensor: Tensor) -> Parameter:
    """The parameter itself, or one over the memory of a plain tensor (torch's own layers, buffers)."""
    return tensor if isinstance(tensor, Parameter) else Parameter(tensor)


def check_state(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict takes a mapping of names to tensors, found {type(state).__name__}")
    for key, value in state.items():
        if not isinstance(key, str):
            raise TypeError(f"load_state_dict: the key {key!r} must be a string, found {type(key).__name__}")
        if not isinstance(value, Tensor) and not key.endswith(EXTRA):
            raise TypeError(f"load_state_dict: {key!r} must be a tensor, found {type(value).__name__}")


def hooked(
    module: torch.nn.Module, state: Mapping[str, Any], versions: Mapping[str, Any], strict: bool
) -> Mapping[str, Any]:
    """What the hooks before a load make of a state, which may give names their present form: torch runs them
    when tensors are copied, and what fits is to be known before"""
    state, errors = dict(state), list[str]()
    for name, child in module.named_modules(remove_duplicate=False):
        for hook in child._load_state_dict_pre_hooks.values():
            hook(state, f"{name}." if name else "", versions.get(name, {}), strict, [], [], errors)
    if errors:
        raise LoadError(f"{type(module).__name__}: {'; '.join(errors)}")
    return state


@contextmanager
def without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Hooks have seen the state already, and one that changes values would change them twice."""
    kept = [(child, child._load_state_dict_pre_hooks) for child in module.modules()]
    try:
        for child, _ in kept:
            child._load_state_dict_pre_hooks = OrderedDict()
        yield
    finally:
        for child, hooks in kept:
            child._load_state_dict_pre_hooks = hooks


def with_versions(state: Mapping[str, Any], versions: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state that says which version of each module it was saved by, where torch looks for it"""
    versioned = OrderedDict(state)
    versioned._metadata = versions  # type: ignore[attr-defined]
    return versioned


def fit(own: Tensor, value: Tensor, key: str) -> Tensor:
    """What of `value` belongs in `own`: its slice of the whole tensor, or all of it if it is that slice."""
    if value.shape != own.shape:
        return as_ours(own).shard_of(value, repr(key))
    check_loadable(own, value, repr(key))
    return value


def adopted(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in place of the module's own. What has two names there stays one, the last given."""
    new = {id(own[key]): adopt(own[key], tensor) for key, tensor in tensors.items()}
    return {key: new[id(own[key])] for key in tensors}


def adopt(own: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(own, Parameter):
        is_parameter = isinstance(own, torch.nn.Parameter)
        return torch.nn.Parameter(tensor.detach(), own.requires_grad) if is_parameter else tensor
    shard = tensor if own.tp_size == 1 else owned(tensor)
    return Parameter._hold(shard, own._split, own.requires_grad)


def share_between_tied(own: Mapping[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """A tensor with two names, given under one of them, is given under both."""
    given = {id(own[key]): tensor for key, tensor in tensors.items()}
    for key, tensor in own.items():
        if key not in tensors and id(tensor) in given:
            tensors[key] = given[id(tensor)]


def check_has_memory(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    on_meta = [key for key in tensors if own[key].is_meta and not tensors[key].is_meta]
    if on_meta:
        raise ValueError(f"{on_meta[0]!r} is on the meta device; use assign=True, or call to_empty first")


def describe(result: LoadResult) -> str:
    parts = [("missing", result.missing_keys), ("unexpected", result.unexpected_keys)]
    return ", ".join(f"{word} {keys}" for word, keys in parts if keys)
