"""Programs in fresh interpreters that have torch already: forks of one that has imported it, and no more."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

RunPython = Callable[..., subprocess.CompletedProcess[str]]
StartPython = Callable[..., "Forked | subprocess.Popen[bytes]"]

COMMAND = "import infinilm.__main__"  # what `python -m infinilm` does

# Forks a keeper for each job, which comes as files: where it is written, and its pid and its end are told,
# and the program's own three. The keeper's fork becomes the program, and ends as any does.
FORKING = """
import gc, json, os, signal, socket, struct, sys
import torch
gc.freeze()  # no fork has to search at its end what was there before
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # how keepers end is not asked for
jobs = socket.socket(fileno=os.dup(0))
while True:
    word, files, *_ = socket.recv_fds(jobs, 1, 4)
    if not word:
        sys.exit()
    if os.fork() == 0:
        break
    for file in files:
        os.close(file)
jobs.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
with socket.socket(fileno=files.pop(0)) as asking:
    code, sys.argv, environment, folder = json.load(asking.makefile())
    pid = os.fork()
    if pid:
        os.closerange(0, 3)
        for file in files:
            os.close(file)
        asking.sendall(struct.pack("i", pid))
        asking.sendall(struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
os.setsid()
os.chdir(folder)
os.environ.update(environment)
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
# as new, since a terminal's are others than a file's
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1, errors="backslashreplace")
exec(code)
"""


class Forked:
    """A program under way, as subprocess.Popen has it; at the end of the block it ends with all it forked."""

    def __init__(self, jobs: socket.socket, job: list[object], files: list[int]) -> None:
        self.returncode: int | None = None
        self.asking, asked = socket.socketpair()
        with asked:
            socket.send_fds(jobs, [b"."], [asked.fileno(), *files])
        self.asking.sendall(json.dumps(job).encode())
        self.asking.shutdown(socket.SHUT_WR)
        self.pid = self._told()

    def _told(self) -> int:
        (number,) = struct.unpack("i", self.asking.recv(4))
        return int(number)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.asking], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = self._told()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.asking.close()


@contextmanager
def warm_python() -> Iterator[StartPython]:
    """Starts code with arguments, in a folder, with more in its environment; files not given are empty."""
    jobs, theirs = socket.socketpair()
    with theirs:
        warm = subprocess.Popen([sys.executable, "-c", FORKING], stdin=theirs)
    with warm, jobs, open(os.devnull, "r+b") as empty:

        def start(
            code: str,
            *arguments: str,
            cwd: Path | None = None,
            files: Sequence[int | None] = (None, None, None),
            **environment: str,
        ) -> Forked:
            job = [code, ["-c", *arguments], os.environ | environment, str(cwd or Path.cwd())]
            return Forked(jobs, job, [empty.fileno() if file is None else file for file in files])

        yield start


def start_afresh(
    code: str, *arguments: str, files: Sequence[int | None], **environment: str
) -> subprocess.Popen[bytes]:
    """The same in an interpreter that has nothing yet, as users have it"""
    command, given = [sys.executable, "-c", code, *arguments], os.environ | environment
    return subprocess.Popen(command, 0, None, *files, env=given, start_new_session=True)


def run_to_the_end(start: StartPython, *program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """How a program ends, and what it has written"""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with start(*program, files=(None, out.fileno(), err.fileno()), **options) as child:
            status = child.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(program, status, out.read(), err.read())
