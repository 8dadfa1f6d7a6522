"""Runner: the work of a step -> one flat batch -> the model, run or replayed -> the tokens drawn.

Work may also be a Passage, which is run a few layers at a time.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinicore.graph import Arena, CudaArena, Graph, RecordError
from infinilm.batch import Batch, Pausing, Stream, finished
from infinilm.cache import PagedCache
from infinilm.draw import Ranked, Row, Settings, draw, needs_adjusting, ranked

MAX_RECORDED = 64  # tokens of a step that is recorded
MAX_CAPTURED = 256  # and of one that is a CUDA graph
MAX_RECORDINGS = 96  # one for each number of tokens, and of those whose logits are wanted
# To record takes longer than to run: it is not for numbers that come once or twice, as when streams end.
RECORDED_AT = 3
# Beyond 16 tokens, if some are of prompts, a step is filled up to a multiple of this: few recordings do.
FULL = 8
# On a GPU, where a few more tokens cost little and a recording much, every step is filled up.
CAPTURED = (1, 2, 4, *range(8, 64, 8), *range(64, MAX_CAPTURED + 1, 16))

NOWHERE = range(0)

# N tokens of the step, B streams, M blocks of a stream, R rows of logits, V vocabulary


class Work(NamedTuple):
    """The next num_tokens of a stream, which are to be computed."""

    stream: Stream
    num_tokens: int

    @property
    def num_drawn(self) -> int:
        """After the last known token one is drawn, and one after each guess"""
        is_last = self.num_tokens == self.stream.num_pending
        return 1 + len(self.stream.drafts) if is_last else 0

    @property
    def prompt_positions(self) -> range:
        """Those of the prompt whose logprobs are wanted and follow a token of this work"""
        stream, start = self.stream, self.stream.num_computed + 1
        if stream.params.prompt_logprobs is None:
            return NOWHERE
        return range(start, min(start + self.num_tokens, stream.num_prompt))


@dataclass
class Drawn:
    """What came of some work: tokens (-1 where the logits were no numbers) and, if wanted, logprobs, or the
    state [E] that the first of them was drawn from."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Ranked]] = field(default_factory=list)
    prompt_logprobs: list[list[Ranked]] = field(default_factory=list)
    state: Tensor | None = None


class Runner:
    """Runs steps of a model over a cache. Steps of few tokens are recorded and replayed.

    A recording reads token ids, places and block tables from fixed buffers, so it is good for any streams.
    """

    def __init__(self, model: Any, cache: PagedCache, max_streams: int, max_length: int) -> None:
        self.model = model
        self.cache = cache
        self.device = model.device
        num_blocks = -(-max_length // cache.shape.size)
        self.tables = torch.zeros(max_streams, num_blocks, dtype=torch.int32)
        self._tables = self.tables.to(self.device)  # the same memory on a CPU
        self._rows = self.tables.numpy()
        self._held: list[tuple[list[int], int]] = [([], 0)] * max_streams  # what each row of the tables shows
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._num_seen: Counter[tuple[int, int]] = Counter()  # steps that would be of one recording
        is_cuda = self.device.type == "cuda"
        self._arena = CudaArena(self.device) if is_cuda else Arena()
        self.can_record = is_cuda or self.device.type == "cpu"
        self.is_settled = True  # whether the last step took what such steps will take from now on

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[Drawn]:
        """Compute the tokens of all work; each stream has the blocks for them."""
        self._fill_tables(work)
        rows = drawn_rows(work)
        is_recorded = self.can_record and is_small(work, len(rows), self.device)
        self.is_settled = True
        recording = self._replayed(work, rows) if is_recorded else None
        if recording is not None:
            return collected(work, *recording.outcome(len(rows)), rows, recording.drawn())
        return self.begin(work).finish()

    @torch.inference_mode()
    def begin(self, work: Sequence[Work]) -> Passage:
        """The same work, to be computed layer by layer; others may run in between."""
        self._fill_tables(work)
        return Passage(work, self.model.step_by_layers(*self._inputs(work)))

    def _fill_tables(self, work: Sequence[Work]) -> None:
        changed = []
        for row, (stream, _) in enumerate(work):
            block_ids, shown = stream.block_ids, self._held[row]
            if shown[0] is not block_ids or shown[1] != len(block_ids):
                self._rows[row, : len(block_ids)] = block_ids
                self._held[row] = block_ids, len(block_ids)
                changed.append(row)
        if changed and self._tables is not self.tables:
            rows = slice(changed[0], changed[-1] + 1)
            self._tables[rows].copy_(self.tables[rows], non_blocking=True)

    def _inputs(self, work: Sequence[Work]) -> tuple[Batch, PagedCache, Any]:
        """What a step of the model takes. Its rows of logits are for the logprobs of prompts and for what is
        drawn, in the order of the work."""
        token_ids, streams, slots, spans, logit_rows = (array("q") for _ in range(5))
        for row, item in enumerate(work):
            stream, start, end = (
                item.stream,
                item.stream.num_computed,
                item.stream.num_computed + item.num_tokens,
            )
            base = len(slots) - start
            logit_rows.extend(base + position - 1 for position in item.prompt_positions)
            logit_rows.extend(range(base + end - item.num_drawn, base + end))
            token_ids.extend(stream.pending(item.num_tokens))
            streams.extend([row] * item.num_tokens)
            slots.extend(range(start, end))
            spans.extend(map(stream.span, range(start, end)))
        rope, rope_rows = self._rope(slots, spans)
        lengths = [item.stream.num_computed + item.num_tokens for item in work]
        tables = self.tables[: len(work), : -(-max(lengths) // self.cache.shape.size)].clone()
        batch = Batch(
            tensor(token_ids), rope_rows, tensor(streams), tensor(slots), tables, lengths, tensor(logit_rows)
        )
        return batch.to(self.device), self.cache, rope

    def _rope(self, slots: array[int], spans: array[int]) -> tuple[Any, Tensor]:
        rope = self.model.model.rope_reaching(max(slots) + 1)
        return rope.placed(tensor(slots), tensor(spans))  # type: ignore[no-any-return]

    def _replayed(self, work: Sequence[Work], rows: Sequence[Row]) -> Recording | None:
        """A recording that has run this work, or None where there is none"""
        size = recorded_size(sum(item.num_tokens for item in work), len(rows), self.device)
        recording = self._recordings.get(size)
        if recording is None:
            self.is_settled = False
            self._num_seen[size] += 1
            if self._num_seen[size] < RECORDED_AT:
                return None
            recording = Recording(*size, self._tables)
        recording.fill(work, rows)
        if (rope := self._fixed_rope(recording)) is None:
            self.is_settled = True
            return None
        try:
            recording.run(self.model, self.cache, rope, self._arena)
        except RecordError:
            self.can_record = False
            return None
        self._recordings[size] = recording
        if len(self._recordings) > MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
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

    def __init__(self, work: Sequence[Work], steps: Pausing[tuple[Tensor, Tensor]]) -> None:
        self.work = work
        self.slowest = 0.0  # seconds of a layer
        self._steps = steps

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.work)

    @torch.inference_mode()
    def finish(self) -> list[Drawn]:
        return collected(self.work, *finished(self._steps), drawn_rows(self.work))

    @torch.inference_mode()
    def advance(self, seconds: float) -> list[Drawn] | None:
        """Compute a layer, and others while there is time for them; what came of the work after the last."""
        end = time.perf_counter() + seconds
        try:
            while True:
                start = time.perf_counter()
                next(self._steps)
                took = time.perf_counter() - start
                self.slowest = max(self.slowest, took)
                if start + 2 * took > end:
                    return None
        except StopIteration as done:
            states, logits = done.value
            return collected(self.work, states, logits, drawn_rows(self.work))


class Recording:
    """A step of N tokens, R of them with logits, on buffers of its own: recorded once, replayed since.

    Where there are fewer, the last one is computed again: it changes nothing of what it finds in its slot.
    """

    graph: Graph[tuple[Tensor, Tensor]]

    def __init__(self, num_tokens: int, num_rows: int, tables: Tensor) -> None:
        numbers = array("q", [0]) * (5 * num_tokens + num_rows)
        lengths = [num_tokens] * 5 + [num_rows]
        self._numbers = tensor(numbers)
        self._sent = self._numbers.to(tables.device)  # what the step reads: the same memory on a CPU
        token_ids, rope_rows, streams, slots, _, logit_rows = torch.split(self._sent, lengths)
        ends = [sum(lengths[: i + 1]) for i in range(6)]
        self.token_ids, self.rope_rows, self.streams, self.slots, self.spans, self.logit_rows = (
            memoryview(numbers)[end - length : end] for end, length in zip(ends, lengths, strict=True)
        )
        wanted = None if num_rows == num_tokens else logit_rows
        self.batch = Batch(token_ids, rope_rows, streams, slots, tables, [1], wanted)
        self.settings = Settings(num_rows)
        self.rope: Any = None

    def fill(self, work: Sequence[Work], rows: Sequence[Row]) -> None:
        at = num_wanted = 0
        for row, item in enumerate(work):
            stream, start = item.stream, item.stream.num_computed
            for i, token_id in enumerate(stream.pending(item.num_tokens)):
                self.token_ids[at], self.streams[at], self.slots[at] = token_id, row, start + i
                self.spans[at] = stream.span(start + i)
                at += 1
            if self.batch.logit_rows is None:
                continue
            for i in range(at - item.num_drawn, at):
                self.logit_rows[num_wanted] = i
                num_wanted += 1
        for values in (self.token_ids, self.streams, self.slots, self.spans):
            values[at:] = array("q", [values[at - 1]]) * (len(values) - at)
        if self.is_drawn:
            self.settings.fill(rows)

    def run(self, model: Any, cache: PagedCache, rope: Any, arena: Arena | CudaArena) -> None:
        if not self.is_drawn:
            self._sent.copy_(self._numbers, non_blocking=True)
        if rope is self.rope:
            self.graph.replay()
            return

        def step() -> tuple[Tensor, Tensor]:
            states, logits = model.step(self.batch, cache, rope)
            if self.is_drawn:
                self.settings.draw(logits)
            return states, logits

        self.graph = Graph.record(step, arena)
        self.rope = rope

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn by the recording; on a GPU they are drawn after it."""
        return self._sent is self._numbers

    def outcome(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """The states and logits of so many rows, of those that it has"""
        states, logits = self.graph.result
        return (states, logits) if self.is_drawn else (states[:num_rows], logits[:num_rows])

    def drawn(self) -> list[int] | None:
        return self.settings.drawn() if self.is_drawn else None


def drawn_rows(work: Sequence[Work]) -> list[Row]:
    return [Row(item.stream, len(item.stream) + i) for item in work for i in range(item.num_drawn)]


def recorded_size(num_tokens: int, num_rows: int, device: torch.device) -> tuple[int, int]:
    if device.type != "cpu":
        size = next(size for size in CAPTURED if size >= num_tokens)
        return size, size
    is_filled_up = num_tokens > max(2 * FULL, num_rows)
    return -(-num_tokens // FULL) * FULL if is_filled_up else num_tokens, num_rows


def is_small(work: Sequence[Work], num_rows: int, device: torch.device) -> bool:
    """Whether a step may be recorded: few tokens, some drawn, and no logprobs of prompts

    On a GPU something follows each of the tokens: others are so many that they do not wait for Python.
    """
    num_tokens = sum(item.num_tokens for item in work)
    if any(w.prompt_positions for w in work):
        return False
    if device.type != "cpu":
        return num_tokens <= MAX_CAPTURED and num_tokens == num_rows
    return num_tokens <= MAX_RECORDED and num_rows > 0


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
        tokens = draw(logits, rows)
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
