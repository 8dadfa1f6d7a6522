"""Recording: a step on buffers of its own, recorded once and replayed; and which steps are"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinicore import _native
from infinicore.graph import Arena, CudaArena, Graph, RecordError
from infinilm.adapters import AdaptedModel
from infinilm.batch import Batch
from infinilm.cache import PagedCache
from infinilm.draw import Row, Settings, sampled
from infinilm.latest import Latest, Readback, Waited
from infinilm.parcels import Kinds, Parcel, num_bytes, tensors_of
from infinilm.tables import Tables
from infinilm.work import Work, num_tokens_of

MAX_RECORDED = 64  # tokens of a step that is recorded on a CPU, unless it is a full one
MAX_CAPTURED = 256  # and of one that is a CUDA graph
MAX_RECORDINGS = 96  # one for each number of tokens, and of those whose logits are wanted
# To record takes longer than to run: it is not for numbers that come once or twice, as when streams end.
RECORDED_AT = 3
# Beyond 16 tokens, if some are of prompts, a step is filled up to a multiple of this: few recordings do.
FULL = 8
# On a GPU, where a few more tokens cost little and a recording much, every step is filled up.
CAPTURED = (1, 2, 4, *range(8, 64, 8), *range(64, MAX_CAPTURED + 1, 16))
# The same of a step that has tokens of prompts, more than there are rows: beyond these a GPU outlasts Python.
PROMPTED = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
PROMPTED_ROWS = (1, 8, 16, 32, 64, 128, MAX_CAPTURED)
# Seconds of a step on a CPU that another one may follow before it is read. That other is for nothing where
# a stream has ended; and what Python takes in between is a tenth of a brief step, but nothing of a long one.
BRIEF = 0.02
# By its lengths attention is cut into calls. Those of later steps are not known: a recorded one is one call.
UNKNOWN_LENGTHS = [1]


class Inputs(NamedTuple):
    """What a step is told of its tokens: arrays of a parcel to be filled in, or tensors over its memory"""

    token_ids: Any
    sources: Any  # where a token id is read from: the latest tokens, and after them token_ids
    rope_rows: Any
    streams: Any
    slots: Any
    spans: Any
    adapters: Any
    logit_rows: Any


class Filled:
    """What one step is told, and on a CPU where what it draws is put if that is read later"""

    def __init__(self, num_tokens: int, num_rows: int, is_sent: bool) -> None:
        self.parcel = Parcel(parcel_kinds(num_tokens, num_rows), is_sent)
        self.inputs, settings = inputs_and_settings(self.parcel.arrays)
        self.settings = Settings(settings)
        self.has_unknown = False  # tokens, which the step before is to draw
        self.drawn = Parcel([("q", num_rows)], is_sent=False)
        self.job: _native.Job | None = None


def parcel_kinds(num_tokens: int, num_rows: int) -> Kinds:
    """The arrays of Inputs, then those of Settings"""
    return *[("q", num_tokens)] * 7, ("q", num_rows), *Settings.kinds(num_rows)


def inputs_and_settings(parts: Sequence[Any]) -> tuple[Inputs, Sequence[Any]]:
    num_inputs = len(Inputs._fields)
    return Inputs(*parts[:num_inputs]), parts[num_inputs:]


class Recording:
    """A step of N tokens, R of them with logits, on buffers of its own: recorded once, replayed since.

    Where there are fewer, the last one is computed again: it changes nothing of what it finds in its slot.

    Two parcels are filled in turn: of one the step may still be under way.
    """

    graph: Graph[tuple[Tensor, Tensor]]

    def __init__(
        self, num_tokens: int, num_rows: int, is_adapted: bool, tables: Tensor, latest: Latest
    ) -> None:
        kinds = parcel_kinds(num_tokens, num_rows)
        self._latest = latest
        self._filled = [Filled(num_tokens, num_rows, latest.is_sent) for _ in range(2)]
        # What the step reads
        if latest.is_sent:
            self._sent = latest.memory[8 * latest.num_rows :][: num_bytes(kinds)]
        else:
            self._sent = torch.zeros(num_bytes(kinds), dtype=torch.uint8, device="cpu")
        self._read, self._settings = inputs_and_settings(tensors_of(self._sent, kinds))
        self.batch = Batch(
            self._read.token_ids,
            self._read.rope_rows,
            self._read.streams,
            self._read.slots,
            tables,
            UNKNOWN_LENGTHS,
            logit_rows=None if num_rows == num_tokens else self._read.logit_rows,
            adapters=self._read.adapters if is_adapted else None,
        )
        self.num_rows = num_rows
        self._drawn = Parcel([("q", num_rows)], is_sent=False)
        self.tokens = self._drawn.memory.view(torch.int64)
        if latest.is_sent:
            self.tokens = latest.on_device[:num_rows]
        self._waited: Waited | None = None  # for the step that is under way on a CPU
        self._seconds = 0.0  # of a step
        self.rope: Any = None

    @property
    def inputs(self) -> Inputs:
        """What was filled in last"""
        return self._filled[0].inputs

    def fill(
        self, work: Sequence[Work], rows: Sequence[Row], tables: Tables, adapted: AdaptedModel | None
    ) -> None:
        self._filled.reverse()
        filled = self._filled[0]
        inputs, filled.has_unknown = filled.inputs, False
        at = num_wanted = 0
        for item in work:
            self._fill_tokens(filled, at, item, tables.row_of(item))
            at += item.num_tokens
            if self.batch.logit_rows is not None:
                for row in range(at - item.num_drawn, at):
                    inputs.logit_rows[num_wanted] = row
                    num_wanted += 1
        for values in (inputs.token_ids, inputs.sources, inputs.streams, inputs.slots, inputs.spans):
            values[at:] = array("q", [values[at - 1]]) * (len(values) - at)
        if adapted is not None:
            fill_adapters(inputs.adapters, work, adapted)
        filled.settings.fill(rows)

    def _fill_tokens(self, filled: Filled, at: int, item: Work, row: int) -> None:
        """What the step is told of the tokens of one stream, whose blocks are in this row of the tables. The
        runner's `flattened` tells as much, but takes twice as long, and this is done for every token."""
        stream, inputs = item.stream, filled.inputs
        for slot, token_id in enumerate(stream.pending(item.num_tokens), item.start):
            source = self._latest.num_rows + at
            if token_id < 0 and stream.num_unread:
                source, token_id, filled.has_unknown = -1 - token_id, 0, True
            inputs.token_ids[at], inputs.sources[at] = token_id, source
            inputs.streams[at], inputs.slots[at] = row, slot
            inputs.spans[at] = stream.span(slot)
            at += 1

    def run(
        self, model: Any, cache: PagedCache, rope: Any, arena: Arena | CudaArena, is_followed: bool
    ) -> None:
        """Compute what was filled in, on a CPU behind the caller if it is brief and another step follows."""
        filled = self._filled[0]
        self._waited = None
        if is_followed and filled.job is not None and rope is self.rope and self._seconds < BRIEF:
            self._waited = Waited(self._latest.queue, filled.job, filled.drawn.arrays[0])
            return
        self._latest.settle()
        self._sent.copy_(filled.parcel.memory, non_blocking=True)
        start = time.perf_counter()
        if rope is self.rope:
            self._resolve_here()
            self.graph.replay()
        else:
            self._record(model, cache, rope, arena)
        self._seconds = time.perf_counter() - start

    def _record(self, model: Any, cache: PagedCache, rope: Any, arena: Arena | CudaArena) -> None:
        def step() -> tuple[Tensor, Tensor]:
            states, logits = model.step(self._batch(), cache, rope)
            if self.num_rows:
                sampled(logits, self._settings, out=self.tokens)
            return states, logits

        self._resolve()
        self._resolve_here()
        before = self._latest.copy()
        try:
            self.graph = Graph.record(step, arena)
        except RecordError:
            self._latest.restore(before)
            raise
        self.rope = rope
        if not self._latest.is_sent and self.num_rows <= self._latest.num_rows:
            for filled in self._filled:
                filled.job = self._job(filled)

    def _job(self, filled: Filled) -> _native.Job:
        """A whole step, for the queue"""
        job, latest = _native.Job(), self._latest.on_device
        job.copy(self._sent, filled.parcel.memory)
        job.take(self._read.token_ids, latest, self._read.sources)
        self.graph.add_to(job)
        job.copy(latest[: self.num_rows], self.tokens)
        job.copy(filled.drawn.memory.view(torch.int64), self.tokens)
        return job

    def _batch(self) -> Batch:
        if not self._latest.is_sent:
            return self.batch
        return replace(self.batch, token_ids=self._reachable()[self._read.sources])

    def _reachable(self) -> Tensor:
        """The latest tokens and after them those of the step"""
        end = 8 * (self._latest.num_rows + len(self._read.token_ids))
        return self._latest.memory[:end].view(torch.int64)

    def _resolve(self) -> None:
        """Be told the tokens that are not known: a step runs several times until a GPU has recorded it, and
        writes over the latest ones each time."""
        if self._latest.is_sent:
            token_ids, sources = self._read.token_ids, self._read.sources
            token_ids.copy_(self._reachable()[sources])
            first = self._latest.num_rows
            torch.arange(first, first + len(sources), out=sources, device=sources.device)

    def _resolve_here(self) -> None:
        """The same on a CPU, where a replay reads token_ids alone"""
        if self._filled[0].has_unknown and not self._latest.is_sent:
            token_ids, sources = self._read.token_ids, self._read.sources
            is_unknown = sources < self._latest.num_rows
            token_ids.copy_(self._latest.known(torch.where(is_unknown, -1 - sources, token_ids)))

    def outcome(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """The states and logits of so many rows, of those that it has"""
        states, logits = self.graph.result
        return (states, logits) if num_rows == self.num_rows else (states[:num_rows], logits[:num_rows])

    def drawn(self, num_rows: int) -> list[int] | Readback | Waited:
        """The tokens of the step that was run last"""
        if self._latest.is_sent:
            return self._latest.note(self.tokens[:num_rows])
        return self._waited or self._drawn.arrays[0].tolist()


def fill_adapters(places: Any, work: Sequence[Work], adapted: AdaptedModel) -> None:
    at = 0
    for item in work:
        place, end = adapted.place_of(item.stream), at + item.num_tokens
        places[at:end] = array("q", [place]) * item.num_tokens
        at = end
    places[at:] = array("q", [place]) * (len(places) - at)


def recorded_size(num_tokens: int, num_rows: int, device: torch.device) -> tuple[int, int]:
    if device.type != "cpu":
        return captured_size(num_tokens, num_rows)
    is_filled_up = num_tokens > max(2 * FULL, num_rows)
    return -(-num_tokens // FULL) * FULL if is_filled_up else num_tokens, num_rows


def captured_size(num_tokens: int, num_rows: int) -> tuple[int, int]:
    if num_tokens == num_rows:
        size = next(size for size in CAPTURED if size >= num_tokens)
        return size, size
    num_rows = next(size for size in PROMPTED_ROWS if size >= num_rows)
    return next(size for size in PROMPTED if size >= num_tokens and size > num_rows), num_rows


def may_come_again(work: Sequence[Work], num_rows: int, device: torch.device, full: int) -> bool:
    """Whether a step may be recorded: of few tokens or a full one, and no logprobs of prompts"""
    num_tokens = num_tokens_of(work)
    if any(w.prompt_positions for w in work):
        return False
    if device.type == "cpu":
        return num_tokens == full or num_rows > 0 and num_tokens <= MAX_RECORDED
    return 0 < num_rows <= MAX_CAPTURED and num_tokens <= PROMPTED[-1]
