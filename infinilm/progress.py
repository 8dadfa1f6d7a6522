"""A bar while something takes long."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on standard error that goes away when it is done; nothing where no one looks on."""
    if not is_shown or sys.stderr is None or not sys.stderr.isatty() or is_dumb():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def is_dumb() -> bool:
    """Whether the terminal shows codes that others obey"""
    return os.environ.get("TERM") in ("dumb", "unknown")
