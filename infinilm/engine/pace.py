"""Pace: for how long a step reads prompts beside the streams that it answers, and how much at a time."""

from __future__ import annotations


class Pace:
    """A passage of a prompt is read a few layers a step, so that answers wait for a little of it each time.

    How long their own steps take is learnt from those there were. A passage has as many tokens as one layer
    takes in the time there is: the more of them, the sooner the prompt is read.
    """

    SLOWDOWN = 2.0  # times that a step may take longer with a part of a prompt than without
    AIM = 0.8  # of that time, for a layer of a passage: some take longer than others
    FEWEST, MOST = 16, 256  # tokens of a passage, always a multiple of the fewest

    def __init__(self) -> None:
        self.num_tokens = self.MOST // 2  # of the next passage
        self._usual: dict[int, float] = {}  # seconds of a step by the tokens that it answers

    def note_answers(self, num_tokens: int, seconds: float) -> None:
        """What a step took without what it read of prompts; an interruption is no news"""
        known = self._usual.get(num_tokens, seconds)
        self._usual[num_tokens] = 0.5 * (known + min(seconds, 2 * known))

    def seconds_beside(self, num_tokens: int, num_answers: int, num_prompts: int) -> float:
        """How long answers of so many tokens may wait for prompts. Where more streams wait for a first token
        than for a next one, their time counts for more."""
        if not self._usual:
            return 0.0
        usual = self._usual[min(self._usual, key=lambda known: abs(known - num_tokens))]
        return (self.SLOWDOWN * max(1.0, num_prompts / num_answers) - 1) * usual

    def note_layer(self, num_tokens: int, seconds: float, allowed: float) -> None:
        """What the slowest layer of a passage took, of the time there was for it"""
        wanted = min(num_tokens * self.AIM * allowed / seconds, self.MOST) // self.FEWEST * self.FEWEST
        self.num_tokens = max(int(wanted), self.FEWEST)
