"""/metrics: what Prometheus asks for, under vLLM's names, so that its dashboards serve here too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from infinilm.engine.stats import Histogram
from infinilm.server.exchange import Call, Raw, Reply
from infinilm.server.service import Service
from infinilm.server.tally import HISTOGRAMS

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4  # which every scraper reads
LABELS = ["model_name", "engine"]
# Names of counters, where Stats has them, and what they are.
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts, found in the cache or computed."),
    "prompt_tokens_cached": ("cached_tokens", "Tokens of prompts that were found in the cache."),
    "generation_tokens": ("generated_tokens", "Tokens that were drawn."),
    "num_preemptions": ("preemptions", "Streams that were interrupted for lack of room."),
    "prefix_cache_queries": ("prefix_queries", "Tokens of prompts that were looked up in the cache."),
    "prefix_cache_hits": ("prefix_hits", "Tokens of prompts that the cache knew."),
    "spec_decode_num_drafts": ("drafts", "Steps of a stream with tokens that were guessed ahead."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Tokens that were guessed ahead."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Guesses that were right."),
}


async def metrics(call: Call) -> Reply:
    """What runs, waits, was counted and took how long, as Prometheus reads it"""
    return Raw(generate_latest(registry_of(call.service, call.server.statuses)), CONTENT_TYPE)


def registry_of(service: Service, statuses: Mapping[tuple[str, str, int], int]) -> CollectorRegistry:
    """The metrics of one server, and of the process it runs in"""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))
    registry.register(StatusCollector(statuses))
    ProcessCollector(registry=registry)
    return registry


class StatusCollector(Collector):
    """Answers by what they were to; those are among them that were refused before they were requests."""

    def __init__(self, statuses: Mapping[tuple[str, str, int], int]) -> None:
        self.statuses = statuses

    def collect(self) -> Iterator[Metric]:
        told = "Answers over HTTP by their status; 499 is none, for the caller left."
        family = CounterMetricFamily("http_requests", told, labels=["method", "handler", "status"])
        for (method, path, status), count in self.statuses.items():
            family.add_metric([method, path, str(status or 499)], count)
        yield family


class ServiceCollector(Collector):
    """Counts nothing itself: it asks when it is asked."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.labels = [service.name, "0"]

    def collect(self) -> Iterator[Metric]:
        yield from self.gauges()
        yield from self.counters()
        for name, (_, help_text) in HISTOGRAMS.items():
            yield self.histogram(name, help_text, self.service.tally.histograms[name])
        told = "Tokens that a step of the engine computed, of prompts and of answers."
        yield self.histogram("iteration_tokens_total", told, self.service.llm.engine.step_sizes)
        yield self.cache_config()

    def gauges(self) -> Iterator[Metric]:
        stats = self.service.llm.stats()
        found = {
            "num_requests_running": (stats.num_running, "Streams that are being made."),
            "num_requests_waiting": (stats.num_waiting, "Requests that wait for their first step."),
            "kv_cache_usage_perc": (
                stats.num_blocks_used / stats.num_blocks,
                "The share of the blocks for keys and values that is in use; 1 is all.",
            ),
        }
        for name, (value, help_text) in found.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            gauge.add_metric(self.labels, value)
            yield gauge

    def counters(self) -> Iterator[Metric]:
        stats = self.service.llm.stats()
        for name, (field, help_text) in COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
            counter.add_metric(self.labels, getattr(stats, field))
            yield counter
        told = "Requests by how they ended."
        finished = CounterMetricFamily("vllm:request_success", told, labels=[*LABELS, "finished_reason"])
        for reason, count in self.service.tally.finished.items():
            finished.add_metric([*self.labels, reason], count)
        yield finished

    def histogram(self, name: str, help_text: str, found: Histogram) -> Metric:
        bounds = [*map(float, found.bounds), float("inf")]
        total, buckets = 0, []
        for bound, count in zip(bounds, found.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
        family.add_metric(self.labels, buckets, found.sum)
        return family

    def cache_config(self) -> Metric:
        engine = self.service.llm.engine
        config = {
            "block_size": engine.blocks.size,
            "cache_dtype": engine.config.kv_cache_dtype,
            "enable_prefix_caching": engine.config.enable_prefix_caching,
            "num_gpu_blocks": engine.blocks.num_blocks,
        }
        told = "How keys and values are kept; num_gpu_blocks is vLLM's name for all blocks there are."
        info = GaugeMetricFamily("vllm:cache_config_info", told, labels=[*LABELS, *config])
        info.add_metric([*self.labels, *map(str, config.values())], 1)
        return info
