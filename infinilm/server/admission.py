"""Who is let in: answers under way and prompts that wait are counted before any work is done."""

from __future__ import annotations

import math
import time

from infinilm.engine.request import QueueFull


class Overloaded(QueueFull):
    """So much waits that this request has to come again, after some seconds."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class Admission:
    """How many answers are under way and how many tokens of prompts wait, counted before work is done."""

    def __init__(self, max_answers: int, max_tokens: int) -> None:
        self.max_answers = max_answers
        self.max_tokens = max_tokens
        self.num_answers = 0
        self.num_tokens = 0
        self.mean_seconds = 1.0  # of the last requests

    def enter(self, num_answers: int, num_tokens: int) -> Place:
        """A place for a request, or Overloaded. What is too large for any time is let in when it is alone."""
        if self.num_answers and self.num_answers + num_answers > self.max_answers:
            self._refuse(
                f"{self.num_answers} answers are under way; with {num_answers} more they would be over "
                f"{self.max_answers}"
            )
        if self.num_tokens and self.num_tokens + num_tokens > self.max_tokens:
            self._refuse(
                f"about {self.num_tokens} tokens of prompts wait; with {num_tokens} more they would be "
                f"over {self.max_tokens}"
            )
        return Place(self, num_answers, num_tokens)

    def _refuse(self, reason: str) -> None:
        seconds = min(60, math.ceil(self.mean_seconds))
        raise Overloaded(f"{reason}; try again in {seconds} s", seconds)


class Place:
    """What one request has reserved, until it ends."""

    def __init__(self, admission: Admission, num_answers: int, num_tokens: int) -> None:
        self._admission = admission
        self._num_answers = num_answers
        self._num_tokens = 0
        self._start = time.monotonic()
        admission.num_answers += num_answers
        self.takes(num_tokens)

    def takes(self, num_tokens: int) -> None:
        """So many tokens of it wait, as is known by now."""
        self._admission.num_tokens += num_tokens - self._num_tokens
        self._num_tokens = num_tokens

    def has_begun(self, num_tokens: int) -> None:
        """So many of them wait no more."""
        self.takes(max(self._num_tokens - num_tokens, 0))

    def leave(self) -> None:
        self.takes(0)
        self._admission.num_answers -= self._num_answers
        seconds = time.monotonic() - self._start
        self._admission.mean_seconds += (seconds - self._admission.mean_seconds) / 16
