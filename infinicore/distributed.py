"""Collectives between tensor-parallel ranks: each ends in an answer or an error, never in a hang.

A communicator is an argument of the layers that need one, so they can be built without a process group.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from infinicore.checks import check_places, check_tensor, integer, number

SIGNATURE_BYTES = 256


class CommunicationError(RuntimeError):
    """A collective did not finish: a peer died, or did not take part within the timeout."""


class Communicator(ABC):
    """The `rank` of this process among `size` ranks, and what they do together."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum the ranks' tensors into `tensor`, in place and equal bit for bit on every rank; returns it."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along `dim` in rank order, as a new tensor.

        Of its gradient, this rank's tensor gets the part that is its own.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `src`, in place; returns it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A communicator is a handle: the copy of a model talks over the same one."""
        return self


class LocalCommunicator(Communicator):
    """One rank alone."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        check_written("all_reduce", tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        check_gather(tensor, dim)
        return tensor.clone()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_broadcast(tensor, src, self.size)
        return tensor


@dataclass(frozen=True)
class Call:
    """One collective under way; all its messages share one deadline."""

    name: str
    started: float
    timeout: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def remaining(self) -> timedelta:
        return timedelta(seconds=max(self.timeout - self.seconds, 0.001))  # zero is "no limit" to torch


class TorchCommunicator(Communicator):
    """The ranks of an initialised torch.distributed group: gloo for CPU tensors, nccl for CUDA tensors.

    On CPU the sum is taken in rank order and rounded once, so an element's value does not depend on how many
    elements stand beside it (in gloo's ring it would). `timeout`, in seconds, bounds each collective; after
    one has failed all later ones fail at once, as the ranks no longer agree on where they are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 30.0) -> None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError(
                "TorchCommunicator found no process group: call torch.distributed.init_process_group first, "
                "or use LocalCommunicator() for a single process"
            )
        timeout = number("TorchCommunicator", "timeout", timeout)
        if not 0.001 <= timeout <= 86400:
            raise ValueError(f"timeout must be between 0.001 and 86400 seconds, found {timeout!r}")
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of the group it was given")
        # Taken out here: torch.compile fails where it sees a group being asked for a method.
        self._allgather, self._allreduce, self._broadcast = group.allgather, group.allreduce, group.broadcast
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.timeout = timeout
        self._failure: str | None = None
        self._intrusion: str | None = None
        self._lock = threading.Lock()

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor) -> Tensor:
        check_written("all_reduce", tensor)
        with self._call("all_reduce", tensor) as call:
            if tensor.is_cuda:
                return tensor.copy_(self._sum_on_device(call, tensor.contiguous()))
            parts = self._gather(call, tensor)
        return tensor.copy_(sum_in_order(parts))

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        check_gather(tensor, dim)
        with torch.no_grad(), self._call(f"all_gather along {dim % tensor.ndim}", tensor) as call:
            parts = self._gather(call, tensor)
        parts[self.rank] = tensor  # the same values, with the way back for gradients
        return torch.cat(parts, dim)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        check_broadcast(tensor, src, self.size)
        message = as_bytes(tensor)
        with self._call(f"broadcast from rank {src}", tensor) as call:
            self._wait(call, partial(self._broadcast, message, src))
        return tensor.copy_(message.view(tensor.dtype).view(tensor.shape))

    @contextmanager
    def _call(self, name: str, tensor: Tensor) -> Iterator[Call]:
        """A collective: from its first message on it has failed unless it comes to its end. What stops this
        rank midway, Ctrl-C too, leaves the others elsewhere, and gloo would abort the process at the next."""
        with self._alone(name):
            if self._failure:
                raise CommunicationError(f"{name} cannot follow a failed collective: {self._failure}")
            call = Call(name, time.monotonic(), self.timeout)
            # On a GPU, reading the peers' answers would cost a synchronisation at every call.
            if not tensor.is_cuda:
                self._check_agreement(call, f"{name} of {tensor.dtype} {tuple(tensor.shape)}")
            yield call
            self._failure = self._intrusion
        if self._failure:
            raise CommunicationError(self._failure)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Two threads may call in another order on each rank: they would get each other's sums, and gloo
        aborts the process where lengths differ. So neither has anything."""
        if not self._lock.acquire(blocking=False):
            self._intrusion = (
                f"{name} on rank {self.rank} of {self.size} came while another thread was in a collective; "
                "give each thread a communicator of a group of its own (torch.distributed.new_group)"
            )
            raise CommunicationError(self._intrusion)
        try:
            yield
        finally:
            self._lock.release()

    def _check_agreement(self, call: Call, text: str) -> None:
        """Refuse, on every rank alike, calls that differ: gloo would abort the process on them."""
        signature = bytearray(text.encode()[:SIGNATURE_BYTES].ljust(SIGNATURE_BYTES))
        answers = self._gather(call, torch.frombuffer(signature, dtype=torch.uint8))
        calls = [bytes(answer.tolist()).decode().rstrip() for answer in answers]
        if len(set(calls)) > 1:
            self._failure = None  # the ranks are all here
            raise ValueError("the ranks call different collectives, in rank order: " + "; ".join(calls))

    def _gather(self, call: Call, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order. They travel as bytes: gloo does not know every dtype."""
        message = as_bytes(tensor)
        messages = [torch.empty_like(message) for _ in range(self.size)]
        self._wait(call, partial(self._allgather, messages, message))
        return [message.view(tensor.dtype).view(tensor.shape) for message in messages]

    def _sum_on_device(self, call: Call, tensor: Tensor) -> Tensor:
        self._wait(call, partial(self._allreduce, [tensor], dist.ReduceOp.SUM))
        return tensor

    def _wait(self, call: Call, send: Callable[..., dist.Work]) -> None:
        place = f"{call.name} on rank {self.rank} of {self.size}"
        self._failure = f"{place} was interrupted; restart all ranks"
        # gloo obeys the first limit (without it a lost call would also block the exit), nccl the second.
        try:
            send(timeout=call.remaining).wait(call.remaining)
        except RuntimeError as error:
            self._failure = (
                f"{place} failed after {call.seconds:.1f} s (timeout {self.timeout:g} s): a peer died or did "
                "not take part; restart all ranks"
            )
            raise CommunicationError(f"{self._failure} ({error})") from error


def sum_in_order(tensors: list[Tensor]) -> Tensor:
    """The sum from first to last, of half types in float32 so that it is rounded once."""
    is_half = tensors[0].dtype in (torch.float16, torch.bfloat16)
    total = tensors[0].float() if is_half else tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """A dense copy of the tensor's bytes, in one dimension."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def check_written(call: str, tensor: Tensor) -> None:
    check_tensor(call, "tensor", tensor)
    check_places(call, "tensor", tensor)


def check_gather(tensor: Tensor, dim: int) -> None:
    check_tensor("all_gather", "tensor", tensor)
    if not -tensor.ndim <= integer("all_gather", "dim", dim) < tensor.ndim:
        raise ValueError(f"all_gather: dim={dim!r} is not a dimension of shape {tuple(tensor.shape)}")


def check_broadcast(tensor: Tensor, src: int, size: int) -> None:
    check_written("broadcast", tensor)
    if not 0 <= integer("broadcast", "src", src) < size:
        raise ValueError(f"broadcast: src must be a rank in [0, {size}), found {src!r}")
