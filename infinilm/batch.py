"""Stream: a prompt and what follows it. Batch: the tokens of one step, flat, whatever streams they are of."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from infinilm.parcels import sent
from infinilm.sampling import SamplingParams

# N tokens of the step, B streams, M blocks of a stream, R rows of logits

Result = TypeVar("Result")
Pausing = Generator[None, None, Result]  # what can be left for a while, and comes to a result in the end


def finished(pausing: Pausing[Result]) -> Result:
    """The result, without a pause"""
    while True:
        try:
            next(pausing)
        except StopIteration as end:
            result: Result = end.value
            return result


class Masks(Protocol):
    """What a grammar allows next, token after token."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end of the text may follow"""

    def prepare(self) -> None:
        """Begin to make the next mask"""

    def mask(self) -> Tensor:
        """A bit for each token, in words of 32"""

    def accept(self, token_id: int) -> None: ...


class Stream:
    """Token ids, how many of them have keys in the cache, and the blocks where those lie.

    `drafts` are guesses of what follows; they are fed along with the last token to be confirmed or refuted.
    """

    def __init__(
        self, token_ids: Iterable[int], params: SamplingParams, seed: int = 0, index: int = 0
    ) -> None:
        self.token_ids = array("q", token_ids)
        self.num_prompt = len(self.token_ids)
        self.params = params
        self.seed = seed
        self.index = index
        self.num_computed = 0
        self.num_whole = self.num_prompt  # tokens at the beginning that are rotated as a whole
        self.switch_at: int | None = None  # the length beyond which all of it is computed anew
        self.num_unread = 0  # tokens that were drawn on a device, and are not known here yet
        self.unread_row = 0  # among the rows of the last step, that of the last of them
        self.block_ids: list[int] = []  # it only grows: once its blocks are given back there is another list
        self.drafts: list[int] = []
        self.stop_ids: frozenset[int] = frozenset()  # any of them ends it
        self.bad_words: Sequence[Sequence[int]] = ()
        self.matcher: Masks | None = None
        self.wants_state = False  # of its last token; what is drawn after it counts for nothing
        self.adapter: Any = None  # of the model's layers, which its tokens are computed with

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_drawn(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """How many tokens wait to be computed, guesses included."""
        return len(self.token_ids) + self.num_unread + len(self.drafts) - self.num_computed

    @property
    def is_answering(self) -> bool:
        """Whether all but the last token, and guesses, are computed"""
        is_next = self.num_computed >= len(self.token_ids) + self.num_unread - 1
        return is_next and self.num_drawn + self.num_unread > 0

    def pending(self, count: int) -> list[int]:
        """The next tokens; one that is not known yet is -1 - its row among those of the last step."""
        start, end = self.num_computed, self.num_computed + count
        if count == 1 and start < len(self.token_ids):
            return [self.token_ids[start]]
        if self.num_unread:
            return [-1 - self.unread_row]
        known = self.token_ids[start:end].tolist()
        return known + self.drafts[: count - len(known)]

    def span(self, position: int) -> int:
        """The length whose rope frequencies a token has: a prompt is rotated as a whole."""
        return max(self.num_whole, position + 1)

    @property
    def num_before_switch(self) -> int:
        """How many tokens may follow those that are known or drawn before all are computed anew"""
        if self.switch_at is None:
            return sys.maxsize
        return self.switch_at + 1 - len(self.token_ids) - self.num_unread

    def begin_anew_if_due(self) -> bool:
        """Where the rope changes, nothing counts as computed any more; whether that is here. Its blocks are
        the caller's matter."""
        if self.switch_at is None or len(self) <= self.switch_at:
            return False
        self.switch_at, self.num_whole, self.num_computed = None, len(self), 0
        return True


@dataclass(frozen=True)
class Batch:
    """What the layers see of a step.

    A prompt, a part of one, a token of each of many streams: all are such a list.
    """

    token_ids: Tensor  # [N]
    rope_rows: Tensor  # [N], of the tables that the step rotates by
    streams: Tensor  # [N], rows of block_tables
    slots: Tensor  # [N], the place of each token in its stream
    block_tables: Tensor  # [B, M]
    lengths: Sequence[int]  # of each stream, with the tokens of this step
    logit_rows: Tensor | None = None  # [R], the tokens whose logits are wanted; None: all
    adapters: Tensor | None = None  # [N], the adapter of each token among those of the model, -1 for none

    def to(self, device: torch.device) -> Batch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(**{**vars(self), **{name: sent(value, device) for name, value in tensors.items()}})
