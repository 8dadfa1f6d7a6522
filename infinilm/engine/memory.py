"""How much memory a process may still take, by the machine and by the group it is confined to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Of what is free, for keys and values. Nobody else is on a GPU; what is left there is for steps.
SHARES = {"cpu": 0.4, "cuda": 0.8}
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # and not in use
        return int(torch.cuda.mem_get_info(device)[0]) + held
    return min(free_of_machine(), *free_of_groups())


def share_of(device: torch.device) -> int:
    """Bytes for keys and values, where nobody says how many"""
    return int(SHARES.get(device.type, SHARES["cpu"]) * free_bytes(device))


@contextmanager
def told_of_memory(what: str, device: torch.device) -> Iterator[None]:
    """A GPU that is too small is a MemoryError, of one line with the numbers."""
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


def free_of_machine() -> int:
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no Linux: half of what there is


def free_of_groups() -> list[int]:
    """By the limits of cgroups, of both versions, as far as there are any"""
    pairs = (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    limits = [(number_in(CGROUP / limit), number_in(CGROUP / used)) for limit, used in pairs]
    return [
        1 << 62,
        *(max(limit - used, 0) for limit, used in limits if limit is not None and used is not None),
    ]


def number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
