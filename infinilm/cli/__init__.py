"""The infinilm command: arguments to calls, a file a command. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

import infinilm
from infinilm.cli import batch, bench, chat, generate, info, serve
from infinilm.cli.options import one_line
from infinilm.cli.unknown import Command


def main(arguments: Sequence[str] | None = None) -> int:
    atexit.register(gc.freeze)  # to search all that torch has made for cycles would take half a second
    prepare_streams()
    logging.basicConfig(format="infinilm: warning: %(message)s")  # of warnings and worse
    logging.getLogger("huggingface_hub").propagate = False  # it tells of them itself
    with warnings.catch_warnings():
        warnings.showwarning = tell_warning
        try:
            return carry_out(arguments)
        finally:
            close_broken_streams()


def carry_out(arguments: Sequence[str] | None) -> int:
    """What came of it, as the status of the process"""
    try:
        options = parser().parse_args(arguments)
        check_output()
        import numpy  # noqa: F401  if torch were the first to import it, an interrupt meanwhile would be lost

        options.run(options)
        sys.stdout.flush()  # what cannot be written is to be told here, not while Python ends
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell goes on below what was printed or asked
        return 130
    except BrokenPipeError:
        return 141
    except (ValueError, OSError, IndexError, TypeError, MemoryError, ImportError, ArithmeticError) as error:
        return failed(one_line(error))
    except RuntimeError as error:
        _, is_memory, reason = one_line(error).partition("DefaultCPUAllocator: ")  # torch has no kind for it
        if not is_memory:
            raise
        return failed(f"{reason.rstrip('.')}; take a smaller model, or less --kv-cache-memory")
    return 0


def tell_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Without the place in the sources, which tells a user nothing"""
    with suppress(OSError):  # a log that takes no more is no reason to stop
        print(f"infinilm: warning: {message}", file=sys.stderr)


def failed(reason: str) -> int:
    print(f"infinilm: error: {reason}", file=sys.stderr)
    return 1


def close_broken_streams() -> None:
    """What could not be written, Python would try again as it ends, which would become its status."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):  # or it is closed
            with suppress(OSError):
                stream.close()


def prepare_streams() -> None:
    """Text that the terminal cannot show is written with backslashes; what was closed takes no complaint."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")


def check_output() -> None:
    if sys.stdout is None:
        raise ValueError("standard output is closed, so that nothing could be printed")


def parser() -> argparse.ArgumentParser:
    top = Command(prog="infinilm", description="Run language models.")
    top.add_argument("--version", action="version", version=f"infinilm {infinilm.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, chat, batch, serve, bench, info):
        command.add(commands)
    return top
