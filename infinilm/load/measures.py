"""What came of requests, in numbers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from infinilm.load.client import Answer, Target
from infinilm.load.prompts import Arrivals, Load


def head(target: Target, load: Load) -> dict[str, Any]:
    return {
        "base_url": target.address.uds or target.address.authority,
        "endpoint_type": target.endpoint,
        "model_id": target.model,
        "distribution": load.distribution,
        **vars(load),
    }


def measured(answers: Sequence[Answer], arrivals: Arrivals, limits: Mapping[str, float]) -> dict[str, Any]:
    """In the words of `bench throughput`, then in those of `vllm bench serve`"""
    whole = [answer for answer in answers if answer.error is None]
    seconds = max(answer.end for answer in answers) - min(answer.due for answer in answers)
    tokens = tokens_of(whole)
    found = {
        "request_rate": arrivals.rate if math.isfinite(arrivals.rate) else "inf",
        "max_concurrency": arrivals.concurrency,
        "completed": len(whole),
        **failures_of(answers),
        "elapsed_seconds": seconds,
        **tokens,
        "requests_per_second": len(whole) / seconds,
        **speeds_of(tokens, seconds),
        **times_of(whole),
        "goodput_limits_seconds": dict(limits),
        "good_requests_per_second": sum(is_good(one, limits) for one in whole) / seconds if limits else None,
        "most_seconds_sent_late": max(answer.sent - answer.due for answer in answers),
    }
    return found | vllm_words(found)


def failures_of(answers: Sequence[Answer]) -> dict[str, Any]:
    failed = [answer for answer in answers if answer.error is not None]
    return {
        "failed": len(failed),
        "errors": dict(Counter(one.error for one in failed)),
        "error_messages": {one.error: one.told for one in reversed(failed)},
    }


def tokens_of(whole: Sequence[Answer]) -> dict[str, Any]:
    """By the usage that the server tells; without it nothing is known of prompts, and answers have chunks."""
    inputs, num_output = [one.num_prompt for one in whole], sum(one.num_tokens for one in whole)
    num_chunks = sum(len(one.moments) for one in whole)
    is_counted = all(one.num_usage is not None for one in whole)
    return {
        "total_input_tokens": None if None in inputs else sum(filter(None, inputs)),
        "total_output_tokens": num_output,
        "tokens_counted_by": "usage" if is_counted else "chunks",
        "tokens_per_chunk": num_output / num_chunks if num_chunks and is_counted else None,
    }


def speeds_of(tokens: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    num_input, num_output = tokens["total_input_tokens"], tokens["total_output_tokens"]
    return {
        "total_tokens_per_second": None if num_input is None else (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
    }


def times_of(whole: Sequence[Answer]) -> dict[str, Any]:
    return {
        "time_to_first_token_seconds": spread_of([one.first for one in whole]),
        "inter_token_latency_seconds": spread_of([gap for one in whole for gap in one.gaps]),
        "time_per_output_token_seconds": spread_of([one.seconds_a_token for one in whole]),
    }


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Its first token came in time, and the others did on average."""
    found = {"ttft": answer.first, "itl": answer.seconds_a_token}
    return all(found[name] <= most for name, most in limits.items())


def vllm_words(found: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "duration": "elapsed_seconds",
        "request_throughput": "requests_per_second",
        "request_goodput": "good_requests_per_second",
        "output_throughput": "output_tokens_per_second",
        "total_token_throughput": "total_tokens_per_second",
    }
    spreads = {
        "ttft": "time_to_first_token_seconds",
        "tpot": "time_per_output_token_seconds",
        "itl": "inter_token_latency_seconds",
    }
    return {theirs: found[ours] for theirs, ours in names.items()} | {
        f"{'median' if of == 'p50' else of}_{theirs}_ms": None if value is None else 1e3 * value
        for theirs, ours in spreads.items()
        for of, value in found[ours].items()
    }


def spread_of(seconds: Sequence[float]) -> dict[str, Any]:
    """Their mean, and what half of them, nine tenths and all but a hundredth do not exceed"""
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    ordered = sorted(seconds)
    shares = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
    return {"mean": statistics.fmean(ordered)} | {
        name: percentile(ordered, share) for name, share in shares.items()
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of them that so large a share does not exceed"""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
