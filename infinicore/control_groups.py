"""What Linux lets a process have by its control groups, in both of their versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cpu_quotas() -> list[int]:
    """How many CPUs it may keep busy, rounded up, where its time on them is limited"""
    limits = limits_of("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    return [max(-(-quota // period), 1) for quota, period in limits if period]


def limits_of(controller: str, files: Sequence[str], old_files: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The two numbers in these files, of its own group and of each around it; the old ones are version 1's.

    Where there is no limit they say "max", or -1.
    """
    for hierarchy, names in (("", files), (controller, old_files)):
        for folder in folders_of(hierarchy):
            words = words_in([folder / name for name in names])
            if len(words) == 2 and all(word.isdecimal() for word in words):
                yield int(words[0]), int(words[1])


def folders_of(controller: str) -> Iterator[Path]:
    """That of its own group and those around it; of version 2 the controller is "". In a container the path
    may be the host's, of which only the root is there."""
    try:
        lines = OWN.read_text(errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        return
    root = ROOT / controller
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller in controllers.split(","):
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def words_in(paths: Sequence[Path]) -> list[str]:
    try:
        return [word for path in paths for word in path.read_text().split()]
    except OSError:
        return []
