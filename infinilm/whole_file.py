"""Files that are there whole or not at all, whenever their writer is stopped."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A file beside `path` to be written, which takes its place in the end"""
    if path.exists() and not path.is_file():  # root could replace /dev/null for all
        raise FileExistsError(errno.EEXIST, "it is no file")
    remove_abandoned(path)
    named: Any = {"dir": path.parent, "prefix": f".{path.name}.", "suffix": PARTIAL}
    with tempfile.NamedTemporaryFile(**named, delete=False) as file:
        try:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())  # or its name could outlive what it holds
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def remove_abandoned(path: Path) -> None:
    """Remove what writers of this file left behind that were killed: nobody holds its lock any more. One that
    holds nothing yet may be about to be locked."""
    for partial in filter(Path.is_file, path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}")):
        with suppress(OSError), partial.open("rb") as file:
            if os.fstat(file.fileno()).st_size:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()
