"""Runner: the work of a step -> one flat batch -> the model, run or replayed -> the tokens drawn.

Work may also be a Passage, which is run a few layers at a time.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from infinicore.graph import Arena, CudaArena, Graph, RecordError, results_in
from infinilm.adapters import AdaptedModel
from infinilm.batch import Batch, Pausing, Stream
from infinilm.cache import PagedCache
from infinilm.draw import Ranked, Row, Settings, draw, needs_adjusting, ranked, sampled
from infinilm.latest import Latest, Readback
from infinilm.pages import Kinds, Page, num_bytes, tensors_of
from infinilm.tables import Tables

MAX_RECORDED = 64  # tokens of a step that is recorded
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

NOWHERE = range(0)

# N tokens of the step, B streams, M blocks of a stream, R rows of logits, V vocabulary


class Work:
    """The next num_tokens of a stream, which are to be computed, from where it is now.

    After the last known token one is drawn, and one after each guess.
    """

    __slots__ = ("block_ids", "num_drawn", "num_tokens", "start", "stream")

    def __init__(self, stream: Stream, num_tokens: int) -> None:
        self.stream = stream
        self.num_tokens = num_tokens
        self.start = stream.num_computed
        self.block_ids = stream.block_ids
        self.num_drawn = 1 + len(stream.drafts) if num_tokens == stream.num_pending else 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def prompt_positions(self) -> range:
        """Those of the prompt whose logprobs are wanted and follow a token of this work"""
        stream = self.stream
        if stream.params.prompt_logprobs is None:
            return NOWHERE
        return range(self.start + 1, min(self.end + 1, stream.num_prompt))

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the token that is drawn is wanted of it, by nothing but the stream's settings.

        The stream may then go on before that token is known here.
        """
        stream = self.stream
        wants_more = stream.params.logprobs is not None or stream.wants_state or stream.drafts
        return not (wants_more or self.prompt_positions or needs_adjusting(stream))


@dataclass
class Drawn:
    """What came of some work: tokens (-1 where the logits were no numbers) and, if wanted, logprobs, or the
    state [E] that the first of them was drawn from."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Ranked]] = field(default_factory=list)
    prompt_logprobs: list[list[Ranked]] = field(default_factory=list)
    state: Tensor | None = None


class Pending:
    """Work that has been launched. Its tokens may be on their way from a device until they are read."""

    def __init__(
        self,
        work: Sequence[Work],
        rows: Sequence[Row],
        outcome: tuple[Tensor, Tensor],
        tokens: list[int] | Readback | None,
        *,
        is_settled: bool,
        may_be_followed: bool,
    ) -> None:
        self.work = work
        self.is_settled = is_settled  # whether it took what such steps will take from now on
        self.may_be_followed = may_be_followed  # by other work, before it is read
        self._rows = rows
        self._outcome = outcome
        self._tokens = tokens

    @torch.inference_mode()
    def read(self) -> list[Drawn]:
        """What came of it"""
        tokens = self._tokens.read() if isinstance(self._tokens, Readback) else self._tokens
        return collected(self.work, *self._outcome, self._rows, tokens)


class Runner:
    """Runs steps of a model over a cache. Steps of few tokens are recorded and replayed.

    A recording reads token ids, places and block tables from fixed buffers, so it is good for any streams.

    On a GPU a step can be launched before the tokens of the one before have been read (`is_ahead`): those
    stay there as well, in `latest`, and a token that is not known here is read from its row of that.
    """

    def __init__(self, model: Any, cache: PagedCache, max_streams: int, max_length: int) -> None:
        self.model = model
        self.cache = cache
        self.device = model.device
        self._adapted: AdaptedModel | None = None
        self.tables = Tables(max_streams, -(-max_length // cache.shape.size), self.device)
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._num_seen: Counter[tuple[int, int]] = Counter()  # steps that would be of one recording
        self.is_ahead = is_cuda = self.device.type == "cuda"
        self._arena = CudaArena(self.device) if is_cuda else Arena()
        self._unrecorded = Arena()  # which no replay writes over: what a passage has made waits there for it
        has_recordings = is_cuda or self.device.type == "cpu"
        self.obstacle = "" if has_recordings else f"{self.device.type} has none"  # to recording steps
        self.refused_from = sys.maxsize if has_recordings else 1  # tokens: steps of so many meet it
        most_bytes = num_bytes(page_kinds(PROMPTED[-1], MAX_CAPTURED))
        self._latest = Latest(max(MAX_CAPTURED, max_streams), most_bytes, self.device)

    def run(self, work: Sequence[Work]) -> list[Drawn]:
        """Compute the tokens of all work; each stream has the blocks for them."""
        return self.launch(work).read()

    @torch.inference_mode()
    def begin(self, work: Sequence[Work]) -> Passage:
        """The same work, to be computed layer by layer; others may run in between."""
        self.tables.show(work)
        adapted = self._adapted_for(work)
        steps = (adapted or self.model).step_by_layers(*self._inputs(work, adapted))
        return Passage(work, steps, self._unrecorded)

    @torch.inference_mode()
    def launch(self, work: Sequence[Work]) -> Pending:
        """Begin to compute the tokens of all work, which on a CPU ends it as well."""
        self.tables.show(work)
        rows = drawn_rows(work)
        self._is_settled = True
        recording = self._replayed(work, rows) if is_small(work, len(rows), self.device) else None
        outcome = self._outcome(work) if recording is None else recording.outcome(len(rows))
        is_plain = self.is_ahead and all(item.is_plain for item in work)
        tokens: list[int] | Readback | None = None
        if recording is not None:
            tokens = self._latest.note(recording.drawn(len(rows)))
        elif is_plain and rows:
            tokens = self._latest.note(draw(outcome[1], rows))
        settled = self._is_settled
        return Pending(work, rows, outcome, tokens, is_settled=settled, may_be_followed=is_plain)

    def _adapted_for(self, work: Sequence[Work]) -> AdaptedModel | None:
        """The model with the adapters of all streams among them; None where no stream has one"""
        wanted = {item.stream.adapter: None for item in work if item.stream.adapter is not None}
        if not wanted:
            return None
        known = self._adapted.places if self._adapted is not None else {}
        if new := [adapter for adapter in wanted if adapter not in known]:
            self._adapted = AdaptedModel(self.model, [*known, *new])
        return self._adapted

    def _outcome(self, work: Sequence[Work]) -> tuple[Tensor, Tensor]:
        """States [R, E] and logits [R, V]"""
        adapted = self._adapted_for(work)
        inputs = self._inputs(work, adapted)
        with results_in(self._unrecorded):
            outcome: tuple[Tensor, Tensor] = (adapted or self.model).step(*inputs)
        return outcome

    def _inputs(self, work: Sequence[Work], adapted: AdaptedModel | None) -> tuple[Batch, PagedCache, Any]:
        """What a step of the model takes. Its rows of logits are for the logprobs of prompts and for what is
        drawn, in the order of the work."""
        token_ids, streams, slots, spans, logit_rows = (array("q") for _ in range(5))
        for row, item in enumerate(work):
            stream, start, end = item.stream, item.start, item.end
            base = len(slots) - start
            logit_rows.extend(base + position - 1 for position in item.prompt_positions)
            logit_rows.extend(range(base + end - item.num_drawn, base + end))
            token_ids.extend(stream.pending(item.num_tokens))
            streams.extend([row] * item.num_tokens)
            slots.extend(range(start, end))
            spans.extend(map(stream.span, range(start, end)))
        rope, rope_rows = self._rope(slots, spans)
        lengths = [item.end for item in work]
        tables = self.tables.of(work, -(-max(lengths) // self.cache.shape.size))
        batch = Batch(
            tensor(token_ids), rope_rows, tensor(streams), tensor(slots), tables, lengths, tensor(logit_rows)
        )
        if adapted is not None:
            places = torch.tensor([adapted.place_of(item.stream) for item in work])
            batch = replace(batch, adapters=places[batch.streams])
        batch = batch.to(self.device)
        if self.is_ahead and min(token_ids) < 0:
            batch = replace(batch, token_ids=self._latest.known(batch.token_ids))
        return batch, self.cache, rope

    def _rope(self, slots: array[int], spans: array[int]) -> tuple[Any, Tensor]:
        rope = self.model.model.rope_reaching(max(slots) + 1)
        return rope.placed(tensor(slots), tensor(spans))  # type: ignore[no-any-return]

    def _replayed(self, work: Sequence[Work], rows: Sequence[Row]) -> Recording | None:
        """A recording that has run this work, or None where there is none"""
        size = recorded_size(sum(item.num_tokens for item in work), len(rows), self.device)
        if size[0] >= self.refused_from:
            return None
        adapted = self._adapted_for(work)
        recordings = self._recordings if adapted is None else adapted.recordings
        recording = recordings.get(size)
        if recording is None:
            self._is_settled = False
            self._num_seen[size] += 1
            if self._num_seen[size] < RECORDED_AT:
                return None
            recording = Recording(*size, adapted is not None, self.tables.on_device, self._latest)
        recording.fill(work, rows, self.tables, adapted)
        if (rope := self._fixed_rope(recording)) is None:
            self._is_settled = True
            return None
        try:
            recording.run(adapted or self.model, self.cache, rope, self._arena)
        except RecordError as error:
            self.obstacle, self.refused_from = str(error).partition("\n")[0], size[0]
            return None
        recordings[size] = recording
        if len(recordings) > MAX_RECORDINGS:
            del recordings[next(iter(recordings))]
        return recording

    def _fixed_rope(self, recording: Recording) -> Any:
        """Tables that serve other steps too, with their rows filled in; None where tokens need their own"""
        rope = self.model.model.rope_reaching(max(recording.slots) + 1)
        if rope.rope_parameters.is_fixed:
            recording.rope_rows[:] = recording.slots
            return rope
        placed, rope_rows = rope.placed(tensor(recording.slots), tensor(recording.spans))
        recording.rope_rows[:] = array("q", rope_rows.tolist())
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
        return sum(item.num_tokens for item in self.work)

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


def page_kinds(num_tokens: int, num_rows: int) -> Kinds:
    """Token ids, where they are read from, rows of rope, streams, slots, spans, adapters, rows of logits;
    settings"""
    return *[("q", num_tokens)] * 7, ("q", num_rows), *Settings.kinds(num_rows)


class Recording:
    """A step of N tokens, R of them with logits, on buffers of its own: recorded once, replayed since.

    Where there are fewer, the last one is computed again: it changes nothing of what it finds in its slot.

    On a GPU two pages are filled in turn: of one the copy may still be under way.
    """

    graph: Graph[tuple[Tensor, Tensor]]

    def __init__(
        self, num_tokens: int, num_rows: int, is_adapted: bool, tables: Tensor, latest: Latest
    ) -> None:
        kinds = page_kinds(num_tokens, num_rows)
        self._latest = latest
        self._pages = [Page(kinds, latest.is_sent) for _ in range(1 + latest.is_sent)]
        self._all_settings = [Settings(page.arrays[8:]) for page in self._pages]
        self._sent = self._pages[0].memory  # what the step reads: the same memory on a CPU
        if latest.is_sent:
            self._sent = latest.memory[8 * latest.num_rows :][: num_bytes(kinds)]
        *tensors, _, adapters, logit_rows = (parts := tensors_of(self._sent, kinds))[:8]
        token_ids, self._sources, rope_rows, streams, slots = tensors
        self._settings = parts[8:]
        self._token_ids = token_ids
        wanted = None if num_rows == num_tokens else logit_rows
        adapted = adapters if is_adapted else None
        self.batch = Batch(token_ids, rope_rows, streams, slots, tables, [1], wanted, adapted)
        self.num_rows = num_rows
        self._drawn = Page([("q", num_rows)], is_sent=False)
        self.tokens = self._drawn.memory.view(torch.int64)
        if latest.is_sent:
            self.tokens = latest.on_device[:num_rows]
        self.rope: Any = None
        self._turn()

    def _turn(self) -> None:
        self._pages.reverse()
        self._all_settings.reverse()
        arrays = self._pages[0].arrays
        self.token_ids, self.sources, self.rope_rows, self.streams, self.slots, self.spans = arrays[:6]
        self.adapters, self.logit_rows = arrays[6:8]

    def fill(
        self, work: Sequence[Work], rows: Sequence[Row], tables: Tables, adapted: AdaptedModel | None
    ) -> None:
        self._turn()
        at = num_wanted = 0
        for item in work:
            stream, start, row = item.stream, item.start, tables.row_of(item)
            for i, token_id in enumerate(stream.pending(item.num_tokens)):
                source = self._latest.num_rows + at
                if token_id < 0:
                    source, token_id = -1 - token_id, self._latest.here(-1 - token_id)
                self.token_ids[at], self.sources[at] = token_id, source
                self.streams[at], self.slots[at], self.spans[at] = row, start + i, stream.span(start + i)
                at += 1
            if self.batch.logit_rows is None:
                continue
            for i in range(at - item.num_drawn, at):
                self.logit_rows[num_wanted] = i
                num_wanted += 1
        for values in (self.token_ids, self.sources, self.streams, self.slots, self.spans):
            values[at:] = array("q", [values[at - 1]]) * (len(values) - at)
        if adapted is not None:
            self._fill_adapters(work, adapted)
        self._all_settings[0].fill(rows)

    def _fill_adapters(self, work: Sequence[Work], adapted: AdaptedModel) -> None:
        at = 0
        for item in work:
            place, end = adapted.place_of(item.stream), at + item.num_tokens
            self.adapters[at:end] = array("q", [place]) * item.num_tokens
            at = end
        self.adapters[at:] = array("q", [place]) * (len(self.adapters) - at)

    def run(self, model: Any, cache: PagedCache, rope: Any, arena: Arena | CudaArena) -> None:
        if self._latest.is_sent:
            self._sent.copy_(self._pages[0].memory, non_blocking=True)
        if rope is self.rope:
            self.graph.replay()
            return

        def step() -> tuple[Tensor, Tensor]:
            states, logits = model.step(self._batch(), cache, rope)
            sampled(logits, self._settings, out=self.tokens)
            return states, logits

        self._resolve()
        before = self._latest.copy()
        try:
            self.graph = Graph.record(step, arena)
        except RecordError:
            self._latest.restore(before)
            raise
        self.rope = rope

    def _batch(self) -> Batch:
        if not self._latest.is_sent:
            return self.batch
        return replace(self.batch, token_ids=self._reachable()[self._sources])

    def _reachable(self) -> Tensor:
        """The latest tokens and after them those of the step"""
        end = 8 * (self._latest.num_rows + len(self._token_ids))
        return self._latest.memory[:end].view(torch.int64)

    def _resolve(self) -> None:
        """Be told the tokens that are not known: a step runs several times until it is recorded, and writes
        over the latest ones each time."""
        if self._latest.is_sent:
            self._token_ids.copy_(self._reachable()[self._sources])
            first = self._latest.num_rows
            torch.arange(first, first + len(self._sources), out=self._sources)

    def outcome(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """The states and logits of so many rows, of those that it has"""
        states, logits = self.graph.result
        return (states, logits) if num_rows == self.num_rows else (states[:num_rows], logits[:num_rows])

    def drawn(self, num_rows: int) -> Tensor | list[int]:
        return self.tokens[:num_rows] if self._latest.is_sent else self._drawn.arrays[0].tolist()


def drawn_rows(work: Sequence[Work]) -> list[Row]:
    return [
        Row(item.stream, len(item.stream) + item.stream.num_unread + i)
        for item in work
        for i in range(item.num_drawn)
    ]


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


def is_small(work: Sequence[Work], num_rows: int, device: torch.device) -> bool:
    """Whether a step may be recorded: few tokens, some drawn, and no logprobs of prompts"""
    num_tokens = sum(item.num_tokens for item in work)
    if num_rows == 0 or any(w.prompt_positions for w in work):
        return False
    if device.type == "cpu":
        return num_tokens <= MAX_RECORDED
    return num_rows <= MAX_CAPTURED and num_tokens <= PROMPTED[-1]


def collected(
    work: Sequence[Work],
    states: Tensor,
    logits: Tensor,
    rows: Sequence[Row],
    tokens: list[int] | None = None,
) -> list[Drawn]:
    """What came of each item of the work. The tokens of a replay are drawn already, but that does not count
    where a stream has something to say about its logits."""
    results = [Drawn() for _ in work]
    note_states(work, states, results)
    logits = without_prompts(work, logits, results)
    if not rows:
        return results
    streams = [row.stream for row in rows]
    if tokens is None or any(map(needs_adjusting, streams)):
        tokens = draw(logits, rows).tolist()
    logprobs = chosen_logprobs(logits, streams, tokens)
    at = 0
    for item, result in zip(work, results, strict=True):
        own = slice(at, at := at + item.num_drawn)
        result.token_ids, result.logprobs = tokens[own], logprobs[own]
    return results


def note_states(work: Sequence[Work], states: Tensor, results: list[Drawn]) -> None:
    """Copies, in float32: the next replay writes over the states."""
    if not any(item.stream.wants_state for item in work):
        return
    end = 0
    for item, result in zip(work, results, strict=True):
        end += len(item.prompt_positions) + item.num_drawn
        if item.num_drawn and item.stream.wants_state:
            result.state = states[end - 1].to("cpu", torch.float32, copy=True)


def without_prompts(work: Sequence[Work], logits: Tensor, results: list[Drawn]) -> Tensor:
    """The logits that tokens are drawn from; those of prompts go into the results."""
    if not any(item.prompt_positions for item in work):
        return logits
    kept, at = [], 0
    for item, result in zip(work, results, strict=True):
        stream, positions = item.stream, item.prompt_positions
        own, at = logits[at : at + len(positions)], at + len(positions)
        if positions:
            wanted = stream.token_ids[positions.start : positions.stop].tolist()
            result.prompt_logprobs = ranked(own, wanted, stream.params.prompt_logprobs or 0)
        kept.append(logits[at : at + item.num_drawn])
        at += item.num_drawn
    return torch.cat(kept)


def chosen_logprobs(logits: Tensor, streams: Sequence[Stream], tokens: list[int]) -> list[list[Ranked]]:
    """Of each row the drawn token and the likeliest ones, as far as its stream asks for them"""
    found: list[list[Ranked]] = [[] for _ in streams]
    wanted = [i for i, s in enumerate(streams) if s.params.logprobs is not None and tokens[i] >= 0]
    if wanted:
        num_top = max(streams[i].params.logprobs or 0 for i in wanted)
        for i, best in zip(wanted, ranked(logits[wanted], [tokens[i] for i in wanted], num_top), strict=True):
            found[i] = best[: 1 + (streams[i].params.logprobs or 0)]
    return found


def tensor(numbers: array[int] | memoryview[int]) -> Tensor:
    """A view of plain memory"""
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
