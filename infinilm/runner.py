"""Runner: the work of a step -> one flat batch -> the model, run or replayed -> the tokens drawn.

Work may also be a Passage, which is run a few layers at a time.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infinicore.graph import Arena, CudaArena, RecordError, results_in
from infinicore.nn.module import is_observed
from infinilm.adapters import AdaptedModel
from infinilm.batch import Batch, Pausing
from infinilm.cache import PagedCache
from infinilm.draw import Row, draw
from infinilm.latest import Latest, Readback, Waited
from infinilm.parcels import num_bytes
from infinilm.recording import (
    MAX_CAPTURED,
    MAX_RECORDINGS,
    PROMPTED,
    RECORDED_AT,
    Recording,
    may_come_again,
    parcel_kinds,
    recorded_size,
)
from infinilm.tables import Tables
from infinilm.work import Drawn, Work, collected, drawn_rows, num_tokens_of, tokens_alone

# N tokens of the step, B streams, M blocks of a stream, R rows of logits, V vocabulary


@dataclass(eq=False)
class Pending:
    """Work that has been launched. Its tokens may be on their way from a device until they are read."""

    work: Sequence[Work]
    rows: Sequence[Row]
    outcome: tuple[Tensor, Tensor]  # states and logits
    tokens: list[int] | Readback | Waited | None  # None where they are still to be drawn
    start: float  # of time.perf_counter(), when it was launched
    is_settled: bool  # it took what such steps will take from now on
    is_plain: bool  # nothing but tokens is wanted
    may_be_followed: bool  # by other work, before it is read

    def read(self) -> list[Drawn]:
        """What came of it"""
        tokens = self.tokens.read() if isinstance(self.tokens, Readback | Waited) else self.tokens
        if tokens is not None and self.is_plain:
            return tokens_alone(self.work, tokens)
        return collected(self.work, *self.outcome, self.rows, tokens)


class Runner:
    """Runs steps of a model over a cache. Steps of few tokens are recorded and replayed.

    A recording reads token ids, places and block tables from fixed buffers, so it is good for any streams.

    A step can be launched before the tokens of the one before have been read (`is_ahead`): those stay in
    `latest`, and a token that is not known here is read from its row of that. On a CPU brief steps that are
    replayed go on behind the caller so; all else waits for them, and is done when `launch` returns.
    """

    @torch.inference_mode(mode=False)  # its buffers are written to outside of that mode too
    def __init__(
        self, model: Any, cache: PagedCache, max_streams: int, max_length: int, step_tokens: int = 0
    ) -> None:
        """step_tokens: of a full step, which a long prompt has many of"""
        self.model = model
        self.step_tokens = step_tokens
        self.cache = cache
        self.device = model.device
        self.tables = Tables(max_streams, -(-max_length // cache.shape.size), self.device)
        is_cuda = self.device.type == "cuda"
        self.is_ahead = is_cuda or self.device.type == "cpu"
        self._arena = CudaArena(self.device) if is_cuda else Arena()
        self._waiting = Arena()  # which no replay writes over: what a passage has made waits there for it
        most_bytes = num_bytes(parcel_kinds(PROMPTED[-1], MAX_CAPTURED))
        self._latest = Latest(max(MAX_CAPTURED, max_streams), most_bytes, self.device)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Know nothing of the steps there were: the model may have other layers or weights since."""
        self.settle()
        self._adapted: AdaptedModel | None = None
        self.recordings: dict[tuple[int, int], Recording] = {}
        self._num_seen: Counter[tuple[int, int]] = Counter()  # steps that would be of one recording
        has_recordings = self.device.type in ("cuda", "cpu")
        self.obstacle = "" if has_recordings else f"{self.device.type} has none"  # to recording steps
        self.refused_from = sys.maxsize if has_recordings else 1  # tokens: steps of so many meet it
        self._modules = list(self.model.modules())  # to go through them takes five times as long
        self._is_observed = False
        self.look_for_hooks()

    def settle(self) -> None:
        """Wait for what still runs on a CPU, before others use its blocks, tables or weights."""
        self._latest.settle()

    def look_for_hooks(self) -> None:
        """From here on every step runs op by op where a hook is to see it, which a replay would pass over."""
        was_observed, self._is_observed = self._is_observed, any(map(is_observed, self._modules))
        if was_observed or self._is_observed:
            self._adapted = None  # its modules are copies: a forward set on the model's own is not theirs

    def run(self, work: Sequence[Work]) -> list[Drawn]:
        """Compute the tokens of all work; each stream has the blocks for them."""
        return self._launch(work, is_followed=False).read()

    @torch.inference_mode()
    def begin(self, work: Sequence[Work]) -> Passage:
        """The same work, to be computed layer by layer; others may run in between."""
        self.settle()
        self.tables.show(work)
        adapted = self._adapted_for(work)
        steps = (adapted or self.model).step_by_layers(*self._inputs(work, adapted))
        return Passage(work, steps, self._waiting)

    def launch(self, work: Sequence[Work]) -> Pending:
        """Begin to compute the tokens of all work; other work may then be launched before this is read."""
        return self._launch(work, self.is_ahead)

    def _launch(self, work: Sequence[Work], is_followed: bool) -> Pending:
        start = time.perf_counter()
        if not self.tables.know(work):
            self.settle()
        self.tables.show(work)
        rows = drawn_rows(work)
        may_repeat = may_come_again(work, len(rows), self.device, self.step_tokens)
        is_common = may_repeat and not self._is_observed
        is_plain = all(item.is_plain for item in work)
        is_followed &= is_plain
        recording, is_settled = self._replayed(work, rows, is_followed) if is_common else (None, True)
        outcome = self._outcome(work) if recording is None else recording.outcome(len(rows))
        tokens: list[int] | Readback | Waited | None = None
        if recording is not None:
            tokens = recording.drawn(len(rows))
        elif is_followed and rows and self._latest.is_sent:
            tokens = self._latest.note(draw(outcome[1], rows))
        is_under_way = isinstance(tokens, Waited) or self._latest.is_sent
        return Pending(work, rows, outcome, tokens, start, is_settled, is_plain, is_followed and is_under_way)

    def _adapted_for(self, work: Sequence[Work]) -> AdaptedModel | None:
        """The model with the adapters of all streams among them; None where no stream has one"""
        wanted = {item.stream.adapter: None for item in work if item.stream.adapter is not None}
        if not wanted:
            return None
        known = self._adapted.places if self._adapted is not None else {}
        if new := [adapter for adapter in wanted if adapter not in known]:
            self._adapted = AdaptedModel(self.model, [*known, *new])
        return self._adapted

    @torch.inference_mode()
    def _outcome(self, work: Sequence[Work]) -> tuple[Tensor, Tensor]:
        """States [R, E] and logits [R, V]"""
        self.settle()
        adapted = self._adapted_for(work)
        inputs = self._inputs(work, adapted)
        with results_in(self._waiting if isinstance(self._arena, CudaArena) else self._arena):
            outcome: tuple[Tensor, Tensor] = (adapted or self.model).step(*inputs)
        return outcome

    def _inputs(self, work: Sequence[Work], adapted: AdaptedModel | None) -> tuple[Batch, PagedCache, Any]:
        """What a step of the model takes"""
        token_ids, streams, slots, spans, logit_rows = flattened(work)
        rope, rope_rows = self._rope(slots, spans)
        lengths = [item.end for item in work]
        tables = self.tables.of(work, -(-max(lengths) // self.cache.shape.size))
        batch = Batch(
            tensor(token_ids), rope_rows, tensor(streams), tensor(slots), tables, lengths, tensor(logit_rows)
        )
        if adapted is not None:
            places = torch.tensor([adapted.place_of(item.stream) for item in work], device="cpu")
            batch = replace(batch, adapters=places[batch.streams])
        batch = batch.to(self.device)
        if any(item.stream.num_unread for item in work):
            batch = replace(batch, token_ids=self._latest.known(batch.token_ids))
        return batch, self.cache, rope

    def _rope(self, slots: array[int], spans: array[int]) -> tuple[Any, Tensor]:
        rope = self.model.model.rope_reaching(max(slots) + 1)
        return rope.placed(tensor(slots), tensor(spans))  # type: ignore[no-any-return]

    def _replayed(
        self, work: Sequence[Work], rows: Sequence[Row], is_followed: bool
    ) -> tuple[Recording | None, bool]:
        """A recording that runs this work, or None where there is none; and whether that takes what such
        work will take from now on"""
        size = recorded_size(num_tokens_of(work), len(rows), self.device)
        if size[0] >= self.refused_from:
            return None, True
        adapted = self._adapted_for(work)
        recordings = self.recordings if adapted is None else adapted.recordings
        is_known = size in recordings
        recording = recordings[size] if is_known else self._new_recording(size, adapted is not None)
        if recording is None:
            return None, False
        recording.fill(work, rows, self.tables, adapted)
        if (rope := self._fixed_rope(recording)) is None:
            return None, True
        try:
            recording.run(adapted or self.model, self.cache, rope, self._arena, is_followed)
        except RecordError as error:
            self.obstacle, self.refused_from = str(error).partition("\n")[0], size[0]
            return None, is_known
        recordings[size] = recording
        if len(recordings) > MAX_RECORDINGS:
            del recordings[next(iter(recordings))]
        return recording, is_known

    @torch.inference_mode(mode=False)
    def _new_recording(self, size: tuple[int, int], is_adapted: bool) -> Recording | None:
        """To be filled, once a step of this size has come a few times"""
        self._num_seen[size] += 1
        if self._num_seen[size] < RECORDED_AT:
            return None
        return Recording(*size, is_adapted, self.tables.on_device, self._latest)

    def _fixed_rope(self, recording: Recording) -> Any:
        """Tables that serve other steps too, with their rows filled in; None where tokens need their own"""
        inputs, rope = recording.inputs, recording.rope
        end = max(inputs.slots) + 1
        if rope is None or rope.num_positions < end:
            rope = self.model.model.rope_reaching(end)
        if rope.rope_parameters.is_fixed:
            inputs.rope_rows[:] = inputs.slots
            return rope
        placed, rope_rows = rope.placed(tensor(inputs.slots), tensor(inputs.spans))
        inputs.rope_rows[:] = array("q", rope_rows.tolist())
        return rope if placed is rope else None


class Passage:
    """Work that is computed layer by layer. Its streams keep their blocks until it is done."""

    def __init__(self, work: Sequence[Work], steps: Pausing[tuple[Tensor, Tensor]], arena: Arena) -> None:
        self.work = work
        self.slowest = 0.0  # seconds of a layer
        self._steps = steps
        self._arena = arena

    @property
    def num_tokens(self) -> int:
        return num_tokens_of(self.work)

    @torch.inference_mode()
    def advance(self, seconds: float) -> list[Drawn] | None:
        """Compute a layer, and others while there is time for them; what came of the work after the last."""
        end = time.perf_counter() + seconds
        try:
            while True:
                start = time.perf_counter()
                with results_in(self._arena):
                    next(self._steps)
                took = time.perf_counter() - start
                self.slowest = max(self.slowest, took)
                if start + 2 * took > end:
                    return None
        except StopIteration as done:
            states, logits = done.value
            return collected(self.work, states, logits, drawn_rows(self.work))


def flattened(work: Sequence[Work]) -> tuple[array[int], ...]:
    """Of each token its id, stream, slot and span; and the rows that logits are wanted of, for the logprobs
    of prompts and for what is drawn, in the order of the work"""
    token_ids, streams, slots, spans, logit_rows = arrays = tuple(array("q") for _ in range(5))
    for row, item in enumerate(work):
        stream, start, end = item.stream, item.start, item.end
        base = len(slots) - start
        logit_rows.extend(base + position - 1 for position in item.prompt_positions)
        logit_rows.extend(range(base + end - item.num_drawn, base + end))
        token_ids.extend(stream.pending(item.num_tokens))
        streams.extend([row] * item.num_tokens)
        slots.extend(range(start, end))
        spans.extend(map(stream.span, range(start, end)))
    return arrays


def tensor(numbers: array[int] | memoryview[int]) -> Tensor:
    """A view of plain memory"""
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device="cpu")  # torch.frombuffer refuses an empty buffer
    return torch.frombuffer(numbers, dtype=torch.int64)
