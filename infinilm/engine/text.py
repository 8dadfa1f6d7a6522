"""The text of one stream as its tokens come: whole characters, and nothing of a stop string.

The text is read character by character, so that how it was cut into tokens does not matter: it stops where
the first stop string ends, and of several that end there at the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from infinilm.sampling import SamplingParams
from infinilm.tokenizer import Detokenizer, Tokenizer


class Text:
    """`add` each token, read `text` at any time: it only ever grows, also through `finish`.

    What could still become a stop string is held back. A stop string that ends within the first min_tokens
    tokens is text like any other. Work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, is_start: bool = True) -> None:
        self.stop: str | None = None  # the stop string that was met
        self._params = params
        self._detokenizer = (
            Detokenizer(tokenizer, params.skip_special_tokens, is_start) if params.detokenize else None
        )
        self._stops = stop_strings(params.stop)
        self._place = 0  # in the automaton of stop strings
        self.num_tokens = 0
        self._pieces: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All that can be shown."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_id: int, is_shown: bool = True) -> None:
        """One more token, whose text may be left out; none has any after a stop string or `finish`."""
        self.num_tokens += 1
        if self._detokenizer is not None and is_shown:
            self._read(self._detokenizer.add(token_id))

    def finish(self) -> None:
        """No token follows: show what was held back, and U+FFFD for a character that was not completed."""
        if self._detokenizer is not None:
            self._read(self._detokenizer.finish())
            self._end(self._held)

    def _read(self, piece: str) -> None:
        start = len(self._held)
        self._held += piece
        for end, character in enumerate(piece if self._params.stop else "", start + 1):
            self._place = self._stops.follow(self._place, character)
            length = self._stops.found[self._place]
            if length and self.num_tokens > self._params.min_tokens:
                return self._stop_at(end - length, end)
        num_shown = len(self._held) - self._stops.pending[self._place]
        self._show(self._held[:num_shown])
        self._held = self._held[num_shown:]

    def _stop_at(self, begin: int, end: int) -> None:
        self.stop = self._held[begin:end]
        self._end(self._held[: end if self._params.include_stop_str_in_output else begin])

    def _end(self, last: str) -> None:
        self._show(last)
        self._held = ""
        self._detokenizer = None

    def _show(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)


class StopStrings:
    """Finds any of several strings in one pass (Aho and Corasick, 1975).

    A node stands for the longest end of the text that is the beginning of a string. Of each node there is
    `found`, the length of the longest string that ends here, and `pending`, the length of the longest end of
    the text that could still become one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._children: dict[tuple[int, str], int] = {}
        self._shorter = [0]  # the node of the next shorter end that is a beginning
        self._depths = [0]
        self.found = [0]
        self.pending = [0]
        for string in strings:
            self._insert(string)
        # Level by level: what a node inherits comes from shorter ones.
        by_depth = sorted(self._children.items(), key=lambda item: self._depths[item[1]])
        for (parent, character), node in by_depth:
            self._link(parent, character, node)

    def follow(self, node: int, character: str) -> int:
        while node and (node, character) not in self._children:
            node = self._shorter[node]
        return self._children.get((node, character), 0)

    def _insert(self, string: str) -> None:
        node = 0
        for depth, character in enumerate(string):
            self.pending[node] = depth
            node = self._children.setdefault((node, character), len(self._depths))
            if node == len(self._depths):
                self._depths.append(depth + 1)
                for values in (self._shorter, self.found, self.pending):
                    values.append(0)
        self.found[node] = len(string)

    def _link(self, parent: int, character: str, node: int) -> None:
        shorter = self.follow(self._shorter[parent], character) if parent else 0
        self._shorter[node] = shorter
        self.found[node] = self.found[node] or self.found[shorter]
        self.pending[node] = self.pending[node] or self.pending[shorter]


# Few, since the largest take megabytes; the streams of one request share theirs.
@lru_cache(maxsize=4)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)
