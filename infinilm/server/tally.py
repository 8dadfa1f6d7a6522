"""What a server counts of its requests, in plain numbers of one thread; metrics.py tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from infinilm.engine.request import Aborted, RequestMetrics, RequestOutput
from infinilm.engine.stats import Histogram
from infinilm.sampling import SamplingParams

REASONS = ("stop", "length", "abort", "error")
# vLLM's bounds, so that its dashboards show what they are made for.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
ANSWERS = (1, 2, 5, 10, 20)
# Their bounds, None where these are lengths up to the model's, and what they are.
HISTOGRAMS: dict[str, tuple[Sequence[float] | None, str]] = {
    "time_to_first_token_seconds": (FIRST_TOKEN_SECONDS, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (TOKEN_SECONDS, "From one token of a request to the next."),
    "request_time_per_output_token_seconds": (
        TOKEN_SECONDS,
        "From one token to the next, the mean of a request.",
    ),
    "e2e_request_latency_seconds": (REQUEST_SECONDS, "From a request's arrival to its end."),
    "request_queue_time_seconds": (REQUEST_SECONDS, "From a request's arrival to its first step."),
    "request_inference_time_seconds": (REQUEST_SECONDS, "From a request's first step to its last token."),
    "request_prefill_time_seconds": (REQUEST_SECONDS, "From a request's first step to its first token."),
    "request_decode_time_seconds": (REQUEST_SECONDS, "From a request's first token to its last."),
    "request_prompt_tokens": (None, "Tokens of a request's prompt."),
    "request_generation_tokens": (None, "Tokens that were drawn for a request."),
    "request_max_num_generation_tokens": (None, "Tokens of the longest of a request's answers."),
    "request_params_max_tokens": (None, "The max_tokens that requests ask for."),
    "request_params_n": (ANSWERS, "The n that requests ask for."),
}


def counts_up_to(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ..."""
    found = [step * 10**power for power in range(len(str(most))) for step in (1, 2, 5)]
    return [count for count in found if count <= most]


class Tally:
    """What became of all requests that the engine was given, by the names that metrics have."""

    def __init__(self, max_length: int) -> None:
        lengths = counts_up_to(max_length)
        self.finished = dict.fromkeys(REASONS, 0)
        self.histograms = {name: Histogram(bounds or lengths) for name, (bounds, _) in HISTOGRAMS.items()}

    def add(self, name: str, value: float | None, times: int = 1) -> None:
        if value is not None:
            self.histograms[name].add(value, times)

    @contextmanager
    def watch(self, params: SamplingParams | None = None) -> Iterator[Watch]:
        """A request that begins and ends in this block; one without parameters is read and not continued."""
        watch = Watch(self)
        if params is not None:
            self.add("request_params_n", params.n)
            self.add("request_params_max_tokens", params.max_tokens)
        reason = "error"
        try:
            yield watch
            reason = "stop"
        except (Aborted, GeneratorExit, asyncio.CancelledError):
            reason = "abort"
            raise
        finally:
            watch.end(reason)


class Watch:
    """One request under way."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._output: RequestOutput | None = None
        self._num_tokens = 0  # of its longest answer
        self._last_time = 0.0

    def note(self, output: RequestOutput) -> None:
        """More of it has come: tokens that came together share the time since those before."""
        times, count = output.metrics, max(len(found.token_ids) for found in output.outputs)
        self._output = output
        if times is None or times.first_token_time is None or times.last_token_time is None:
            return
        if self._num_tokens == 0:
            self._num_tokens, self._last_time = 1, times.first_token_time
            self._note_first(times, times.first_token_time)
        if num_new := count - self._num_tokens:
            gap = (times.last_token_time - self._last_time) / num_new
            self._tally.add("inter_token_latency_seconds", gap, num_new)
            self._num_tokens, self._last_time = count, times.last_token_time

    def _note_first(self, times: RequestMetrics, first: float) -> None:
        arrival, scheduled = times.arrival_time, times.first_scheduled_time
        self._tally.add("time_to_first_token_seconds", first - arrival)
        self._tally.add("request_queue_time_seconds", between(arrival, scheduled))
        self._tally.add("request_prefill_time_seconds", between(scheduled, first))

    def end(self, reason: str) -> None:
        """With the reason that it gave itself, if it came to its end."""
        if self._output is not None and self._output.finished:
            reason = self._output.outputs[0].finish_reason or reason
        self._tally.finished[reason] += 1
        if self._output is not None and self._output.metrics is not None:
            self._note_whole(self._output, self._output.metrics)

    def _note_whole(self, output: RequestOutput, times: RequestMetrics) -> None:
        tally, last = self._tally, times.last_token_time
        num_drawn = sum(len(found.token_ids) for found in output.outputs)
        decoding = between(times.first_token_time, last)
        tally.add("e2e_request_latency_seconds", between(times.arrival_time, times.finished_time or last))
        tally.add("request_inference_time_seconds", between(times.first_scheduled_time, last))
        tally.add("request_decode_time_seconds", decoding)
        tally.add("request_prompt_tokens", len(output.prompt_token_ids))
        tally.add("request_generation_tokens", num_drawn)
        tally.add("request_max_num_generation_tokens", self._num_tokens)
        if decoding is not None and self._num_tokens > 1:
            tally.add("request_time_per_output_token_seconds", decoding / (self._num_tokens - 1))


def between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
