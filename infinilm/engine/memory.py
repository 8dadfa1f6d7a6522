"""How much memory a process may still take, by the machine and by the group it is confined to."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

SHARE = 0.4  # of what is free, for keys and values
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(free_of_machine(), *free_of_groups())


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
