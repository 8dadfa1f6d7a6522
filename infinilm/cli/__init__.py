"""The infinilm command: arguments to calls, a file a command. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import infinilm
from infinilm.cli import batch, bench, chat, generate, info, serve
from infinilm.cli.options import one_line


def main(arguments: Sequence[str] | None = None) -> int:
    prepare_streams()
    options = parser().parse_args(arguments)
    try:
        check_output()
        options.run(options)
        sys.stdout.flush()  # what cannot be written is to be told here, not while Python ends
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (ValueError, OSError, IndexError, TypeError, MemoryError, ImportError, ArithmeticError) as error:
        print(f"infinilm: error: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


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
    top = argparse.ArgumentParser(prog="infinilm", description="Run Llama-family models.")
    top.add_argument("--version", action="version", version=f"infinilm {infinilm.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, chat, batch, serve, bench, info):
        command.add(commands)
    return top
