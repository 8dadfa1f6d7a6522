"""How much memory a process may still take, by the machine, its groups and its own limit."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from infinicore.control_groups import limits_of

# Of what is free, for keys and values. Nobody else is on a GPU; what is left there is for steps.
SHARES = {"cpu": 0.4, "cuda": 0.8}


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # and not in use
        return int(torch.cuda.mem_get_info(device)[0]) + held
    return min([free_of_machine(), *free_of_groups(), *free_of_addresses()])


def share_of(device: torch.device) -> int:
    """Bytes for keys and values, where nobody says how many"""
    return int(SHARES.get(device.type, SHARES["cpu"]) * free_bytes(device))


@contextmanager
def told_of_memory(what: str, device: torch.device) -> Iterator[None]:
    """Memory that is too small is a MemoryError, of one line with the numbers."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        taken = torch.cuda.memory_allocated(device)
        raise MemoryError(
            f"{what} do not fit on {device}: of its {total / 1e6:,.0f} MB this process has taken "
            f"{taken / 1e6:,.0f}, and {free / 1e6:,.0f} are free; take a smaller model, weights of fewer "
            "bits, less kv_cache_memory, or device='cpu'"
        ) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # by which alone torch tells that the CPU has no memory
            raise
        free = free_bytes(torch.device("cpu"))
        raise MemoryError(
            f"{what} do not fit in memory, of which {free / 1e6:,.0f} MB are free; take a smaller "
            "model, weights of fewer bits, or less kv_cache_memory"
        ) from error


def free_of_machine() -> int:
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no Linux: half of what there is


def free_of_groups() -> list[int]:
    """By the limits of cgroups, as far as there are any"""
    limits = limits_of(
        "memory", ["memory.max", "memory.current"], ["memory.limit_in_bytes", "memory.usage_in_bytes"]
    )
    return [max(limit - used, 0) for limit, used in limits]


def free_of_addresses() -> list[int]:
    """By `ulimit -v`, which counts what is mapped, whether it is in use or not"""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # no Linux
        num_pages = 0
    return [max(limit - num_pages * resource.getpagesize(), 0)]
