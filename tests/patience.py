"""How tests wait for what others do: as long as it takes, and not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psutil

PATIENCE = 60.0  # seconds, for what takes milliseconds on an idle machine


def wait_until(is_so: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def is_gone(process: psutil.Process) -> bool:
    """Also if whoever inherited it has yet to ask how it ended, which may take seconds"""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def within_patience(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def until(is_so: Callable[[], object]) -> None:
    """Fails by the patience of the test."""
    while not is_so():
        await asyncio.sleep(0.005)
