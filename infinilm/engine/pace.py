"""Pace: how much of a prompt a step takes, so that it does not hold up the answers of others."""

from __future__ import annotations

from collections.abc import Iterator


class Pace:
    """How long steps take, which is learnt from those there were.

    It follows from the number of tokens and, where a part of a prompt is among them, from the keys before
    that part, all of which it looks at. What has not been seen with so many keys is taken to last as long as
    with fewer, and what has not been seen at all a little longer than fewer tokens do: so it is tried.
    """

    SLOWDOWN = 2.5  # times that a step with a part of a prompt may take longer than one of the answers alone
    STRETCH = 512  # keys that make a difference
    FEWEST = 4  # tokens of a step with a part of a prompt
    TILE = 16  # tokens that kernels take together
    MOST_SMALL = 64  # tokens of a step up to which half a tile makes a difference
    # Of a time that is too long, whenever it keeps a step from being larger: what it was due to may be over.
    FORGETTING = 0.998

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds by tokens: steps of answers or of prompts
        self._beside: dict[tuple[int, int], float] = {}  # and by stretches of keys before: of both at once

    def note(self, num_tokens: int, seconds: float, num_keys: int | None = None) -> None:
        """What a step took; where a part of a prompt stood beside answers, after so many keys."""
        if num_keys is None:
            self._alone[num_tokens] = mean(self._alone.get(num_tokens), seconds)
        elif num_tokens in self.sizes(num_tokens - 1, 1):
            key = num_keys // self.STRETCH, num_tokens
            self._beside[key] = mean(self._beside.get(key), seconds)

    def most_prompt_tokens(self, num_answers: int, num_prompts: int, limit: int, num_keys: int) -> int:
        """Beside streams that are answered, of prompts the longest of which has so many keys. Where more
        streams wait for a first token than for a next one, their time counts for more."""
        if not self._alone:
            return min(limit, self.TILE)
        usual = self._alone[min(self._alone, key=lambda known: abs(known - num_answers))]
        allowed = self.SLOWDOWN * max(1.0, num_prompts / num_answers) * usual
        best, last, hoped = 0, num_answers, usual
        for size in self.sizes(num_answers, limit):
            key = self._nearest(num_keys // self.STRETCH, size)
            hoped = self._beside[key] if key else hoped * (1 + size / last) / 2
            if best and hoped > allowed:
                if key:
                    self._beside[key] *= self.FORGETTING
                break
            best = last = size
            if not key:  # the next one when more is known of this
                break
        return best - num_answers if best else limit

    def sizes(self, num_answers: int, limit: int) -> Iterator[int]:
        """Few numbers of tokens beyond the answers, so that each is soon recorded. Fewer than the first would
        look at the same keys for too little."""
        size = self.FEWEST
        while size <= num_answers + limit:
            if size > num_answers:
                yield size
            size += size if size < self.TILE else self.TILE // 2 if size < self.MOST_SMALL else self.TILE

    def _nearest(self, stretch: int, size: int) -> tuple[int, int] | None:
        keys = ((earlier, size) for earlier in range(stretch, -1, -1))
        return next((key for key in keys if key in self._beside), None)


def mean(known: float | None, seconds: float) -> float:
    """An interruption is no news."""
    return seconds if known is None else 0.5 * (known + min(seconds, 2 * known))
