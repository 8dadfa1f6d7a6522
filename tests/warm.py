"""Programs in fresh interpreters that have torch already: forks of one that has imported it, and no more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RunPython = Callable[..., subprocess.CompletedProcess[str]]

# Forks for each line, tells the fork's pid and how it ended. A fork leaves the loop to become the program,
# and ends as any does.
FORKING = """
import gc, json, os, sys
import torch
gc.freeze()  # no fork has to search at its end what was there before
for line in open(os.dup(0)):  # sys.stdin is left to the program, as new
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
code, sys.argv, environment, folder, *files = json.loads(line)
os.setsid()
os.chdir(folder)
os.environ.update(environment)
for number, name in enumerate(files):
    os.dup2(os.open(name, os.O_RDWR), number)
exec(code)
"""


@contextmanager
def warm_python() -> Iterator[RunPython]:
    """Runs code with arguments, in a folder, with more in its environment."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(
            code: str, *arguments: str, cwd: Path | None = None, **environment: str
        ) -> subprocess.CompletedProcess[str]:
            with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
                given = ["-c", *arguments], os.environ | environment, str(cwd or Path.cwd())
                status = ask(process, [code, *given, os.devnull, out.name, err.name])
                return subprocess.CompletedProcess(given[0], status, out.read(), err.read())

        yield run


def ask(process: subprocess.Popen[str], job: list[object]) -> int:
    """How the job's fork ended, with which goes all that it forked itself, also if it hangs"""
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(job), file=process.stdin, flush=True)
    pid = int(process.stdout.readline())
    try:
        return int(process.stdout.readline())
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        process.stdout.readline()  # the next one is told of its own end
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
