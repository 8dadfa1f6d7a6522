"""Standard error of a server, which goes on whether anybody reads it or not."""

from __future__ import annotations

import select
from collections.abc import Iterator
from threading import RLock
from typing import Any, TextIO

# A pipe with any room has it for PIPE_BUF bytes, and a character may be written as ten: \U0001f600.
PIECE_LENGTH = select.PIPE_BUF // 16
READER_SECONDS = 1.0  # for a reader to make room
MISSING = "\ninfinilm: warning: lines are missing here, as nobody read the log\n"


class Log:
    """A stream that waits for its reader once, and from then on drops what there is no room for: who waited
    for a pipe that nobody reads would never answer again."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_losing = False
        # Two who find room might need more together; and what Python frees while a thread writes may have
        # something to say itself.
        self._lock = RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            for piece in pieces(text):
                if not self._has_room():
                    self.is_losing = True
                    break
                self.stream.write(MISSING + piece if self.is_losing else piece)
                self.stream.flush()
                self.is_losing = False
        return len(text)

    def _has_room(self) -> bool:
        try:
            _, ready, _ = select.select((), (self.stream,), (), 0 if self.is_losing else READER_SECONDS)
        except (TypeError, ValueError):  # it is no file, or closed
            return True
        return bool(ready)


def pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE_LENGTH):
        yield text[start : start + PIECE_LENGTH]
