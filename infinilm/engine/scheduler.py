"""Scheduler: who moves how far in the next step, within the tokens of a step and the blocks of the cache.

There is no phase of prompts and none of answers. A stream has tokens that are known and tokens that are
computed; each step lets some catch up. Where some streams are answered, prompts are read beside them, in
passages that take several steps.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

from infinilm.engine.blocks import Blocks
from infinilm.engine.pace import Pace
from infinilm.engine.recent import Recent
from infinilm.engine.request import Completion
from infinilm.engine.stats import Counts
from infinilm.work import Work, num_tokens_of

IN_ORDER = attrgetter("order")
# Of a prompt whose logprobs are wanted: the logits of so many tokens are in memory at once.
MAX_LOGPROB_TOKENS = 64


class Scheduler:
    """Streams wait, run, and wait again when blocks run out; lists are in the order of who goes first."""

    def __init__(
        self, blocks: Blocks, max_num_seqs: int, max_num_batched_tokens: int, reads_beside: bool
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.reads_beside = reads_beside  # else prompts and answers share a step
        self.waiting: list[Completion] = []
        self.running: list[Completion] = []
        self.beside: list[Work] = []  # of prompts, which is read beside answers until it is done
        self.pace = Pace()
        self.counts = Counts()
        self.recent = Recent(blocks.size)

    @property
    def num_waiting(self) -> int:
        """Requests, of which the first of n streams is counted: the others come after it"""
        return sum(stream.index == 0 for stream in self.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Of all n streams of these requests; a request whose first stream runs is none of them"""
        return sum(len(stream) * stream.params.n for stream in self.waiting if stream.index == 0)

    def add(self, stream: Completion) -> None:
        insort(self.waiting, stream, key=IN_ORDER)

    def remove(self, stream: Completion) -> None:
        """It has ended, or is not wanted any more."""
        self._stop_reading(stream)
        if stream in self.running:
            self.running.remove(stream)
            self._release(stream)
        elif stream in self.waiting:
            self.waiting.remove(stream)

    def answering(self) -> list[Completion]:
        """The streams that wait for their next token, and are not among what is read beside others"""
        reading = {item.stream for item in self.beside}
        return [
            stream
            for stream in self.running
            if stream.is_answering and not is_ending(stream) and stream not in reading
            if stream.num_before_switch > 0
        ]

    def schedule(self) -> list[Work]:
        """What the next step computes: a token of each stream that is answered, or of prompts what fits"""
        work: list[Work] = []
        budget = self.max_num_batched_tokens
        for stream in self.answering():
            if budget > 0 and stream in self.running:
                stream.drafts = stream.drafts[: min(budget, stream.num_before_switch) - 1]
                budget -= self._move(stream, stream.num_pending, work)
        if self.beside:
            return work
        num_answers = len(work)
        is_apart = self.reads_beside and num_answers > 0
        self._add_prompts(work, min(budget, self.pace.num_tokens) if is_apart else budget)
        if is_apart:
            work, self.beside = work[:num_answers], work[num_answers:]
        return work

    def _add_prompts(self, work: list[Work], budget: int) -> None:
        for stream in list(self.running):
            if budget > 0 and not stream.is_answering and stream in self.running:
                budget -= self._move(stream, min(chunk(stream), budget), work)
        for stream in list(self.waiting):
            if budget > 0 and len(self.running) < self.max_num_seqs and is_ready(stream):
                if not (count := self._admit(stream, budget, work)):
                    break
                budget -= count

    def seconds_beside(self, answers: Sequence[Work]) -> float:
        """How long these may wait for what is read beside them"""
        if not answers:
            return math.inf
        num_prompts = len(self.beside) + len(self.waiting)
        return self.pace.seconds_beside(num_tokens_of(answers), len(answers), num_prompts)

    def advance(self, work: Sequence[Work]) -> None:
        """It has been launched: what comes of it will be known when it is read."""
        row = 0
        for item in work:
            stream = item.stream
            stream.num_computed += item.num_tokens
            if item.num_drawn:
                stream.num_unread, stream.unread_row = stream.num_unread + 1, row
                row += item.num_drawn

    def preempt(self, stream: Completion) -> None:
        """Take its blocks; it will be computed again, from what others or itself left in the cache."""
        self._stop_reading(stream)
        self.running.remove(stream)
        self._release(stream)
        stream.num_computed, stream.drafts = 0, []
        stream.request.metrics.num_preemptions += 1
        self.counts.preemptions += 1
        self.add(stream)

    def begin_anew(self, streams: Iterable[Completion]) -> None:
        """A step has ended midway: what came of it is lost. Streams wait, with what they had before it."""
        self.beside, self.running, self.waiting = [], [], sorted(streams, key=IN_ORDER)
        self.blocks.free_all()
        for stream in self.waiting:
            stream.block_ids, stream.chain, stream.drafts = [], None, []
            stream.num_computed = stream.num_unread = 0

    def switch(self, stream: Completion, salt: bytes) -> None:
        """All of it is computed anew, as a text that begins with other frequencies."""
        stream.salt = salt
        if stream in self.running:
            self.preempt(stream)

    def _stop_reading(self, stream: Completion) -> None:
        """What is read beside answers writes to the blocks of its streams: it ends when one loses them."""
        if any(item.stream is stream for item in self.beside):
            self.beside = []

    def _move(self, stream: Completion, count: int, work: list[Work]) -> int:
        """Add work to the step, if there are blocks for it; streams behind this one may have to give some."""
        while not self.take_blocks(stream, stream.num_computed + count):
            last = self.running[-1]
            if any(item.stream is last for item in work):
                return 0
            self.preempt(last)
            if last is stream:
                return 0
        work.append(Work(stream, count))
        return count

    def take_blocks(self, stream: Completion, num_tokens: int) -> bool:
        """Give a running stream the blocks that so many tokens need; False, and none, if too few are free."""
        more = self.blocks.take(max(self.blocks.num_for(num_tokens) - len(stream.block_ids), 0))
        stream.block_ids += more or []
        return more is not None

    def _admit(self, stream: Completion, budget: int, work: list[Work]) -> int:
        """Begin a stream where the cache knows its beginning, if the rest of its tokens has room now."""
        blocks = self.blocks
        root = blocks.root(stream.salt)
        stream.chain, stream.block_ids = root, []
        if may_find(stream):
            stream.chain, stream.block_ids = blocks.find(root, stream.token_ids)
        stream.num_computed = stream.num_found = len(stream.block_ids) * blocks.size
        if blocks.num_for(len(stream)) - len(stream.block_ids) > blocks.num_free:
            self._release(stream)
            stream.num_computed = 0
            return 0
        self._note_start(stream)
        self.waiting.remove(stream)
        insort(self.running, stream, key=IN_ORDER)
        return self._move(stream, min(chunk(stream), budget), work)

    def _note_start(self, stream: Completion) -> None:
        request = stream.request
        if request.metrics.first_scheduled_time is not None:
            return
        request.metrics.first_scheduled_time = time.monotonic()
        request.num_cached_tokens = stream.num_found
        if self.blocks.keeps_contents and may_find(stream):
            self.counts.prefix_queries += stream.num_prompt
            self.counts.prefix_hits += stream.num_found
            if not stream.wants_state:  # texts that are embedded are many, and seldom come again
                self._note_prompt(stream)

    def _note_prompt(self, stream: Completion) -> None:
        """Why less of a prompt was found than could have been, and the prompt for those that follow"""
        salt, prompt = stream.salt, stream.token_ids[: stream.num_prompt]
        if stream.num_found < (stream.num_prompt - 1) // self.blocks.size * self.blocks.size:
            position = self.recent.parting(salt, prompt)
            is_reason = position is not None and position >= stream.num_found
            stream.request.prefix_miss = position if is_reason else None
        self.recent.add(salt, prompt)

    def keep(self, stream: Completion, num_computed: int) -> None:
        """Let others find the full blocks of a stream, as far as what was computed has been read."""
        if stream.chain is not None:
            stream.chain = self.blocks.keep(stream.chain, stream.token_ids, num_computed, stream.block_ids)

    def _release(self, stream: Completion) -> None:
        self.blocks.give_back(stream.block_ids)
        stream.block_ids, stream.chain = [], None


def is_ending(stream: Completion) -> bool:
    """Whether the last token that it may have is drawn already"""
    return stream.num_drawn + stream.num_unread >= stream.max_tokens


def is_ready(stream: Completion) -> bool:
    """The first of n streams computes the prompt; the others wait, and find it in the cache. One that was
    preempted begins anew when its tokens are known."""
    first = stream.request.completions[0]
    is_first_done = first is stream or first.num_drawn > 0 or first.finish_reason is not None
    return is_first_done and not stream.num_unread


def chunk(stream: Completion) -> int:
    if stream.params.prompt_logprobs is not None and stream.num_computed < stream.num_prompt:
        return min(stream.num_pending, MAX_LOGPROB_TOKENS)
    return stream.num_pending


def may_find(stream: Completion) -> bool:
    """Logprobs of the prompt need all of it computed, once."""
    return stream.params.prompt_logprobs is None or stream.num_drawn > 0 or stream.index > 0
