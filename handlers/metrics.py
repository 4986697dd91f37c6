"""What `GET /metrics` shows, under MindIE's names. Event loop only.

Every application has a registry of its own, which asks here when somebody asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mindstream.handlers.measures import Histogram, ModelMeasures, RequestMeasure
from mindstream.plugin.backend import BackendStatus
from mindstream.plugin.service import ModelService

# (name, help, value)
_Row = tuple[str, str, Callable[[ModelMeasures, BackendStatus], float]]

_COUNTERS: tuple[_Row, ...] = (
    ("request_received_total", "Number of requests received so far.", lambda m, s: m.received),
    (
        "request_success_total",
        "Number of requests proceed successfully so far.",
        lambda m, s: m.succeeded,
    ),
    ("request_failed_total", "Number of requests failed so far.", lambda m, s: m.failed),
    (
        "num_preemptions_total",
        "Cumulative number of preemption from the engine.",
        lambda m, s: s.preemptions,
    ),
    ("prompt_tokens_total", "Number of prefill tokens processed.", lambda m, s: s.prompt_tokens),
    (
        "generation_tokens_total",
        "Number of generation tokens processed.",
        lambda m, s: s.generated_tokens,
    ),
)
_GAUGES: tuple[_Row, ...] = (
    (
        "num_requests_running",
        "Number of requests currently running on NPU.",
        lambda m, s: s.running,
    ),
    (
        "num_requests_waiting",
        "Number of requests waiting to be processed.",
        lambda m, s: s.waiting,
    ),
    (
        "num_requests_swapped",
        "Number of requests swapped to CPU. Always 0: a preempted one waits and is recomputed.",
        lambda m, s: 0,
    ),
    (
        "avg_prompt_throughput_toks_per_s",
        "Average prefill throughput in tokens/s.",
        lambda m, s: m.prompt_pace.look(s.prompt_tokens),
    ),
    (
        "avg_generation_throughput_toks_per_s",
        "Average generation throughput in tokens/s.",
        lambda m, s: m.generation_pace.look(s.generated_tokens),
    ),
    (
        "failed_request_perc",
        "Requests failure rate. 1 means 100 percent usage.",
        lambda m, s: _share(m.failed, m.received),
    ),
    (
        "npu_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda m, s: _share(s.total_blocks - s.free_blocks, s.total_blocks),
    ),
    ("cpu_cache_usage_perc", "CPU swap usage. Always 0: nothing is swapped.", lambda m, s: 0),
    (
        "npu_prefix_cache_hit_rate",
        "Share of the prompt tokens that the prefix cache had. 1 means all of them.",
        lambda m, s: _share(s.prefix_hit_tokens, s.prefix_query_tokens),
    ),
    (
        "all_radix_match_num",
        "Prompt tokens looked up in the prefix cache so far.",
        lambda m, s: s.prefix_query_tokens,
    ),
    (
        "npu_radix_match_hit_num",
        "Prompt tokens found in the prefix cache so far.",
        lambda m, s: s.prefix_hit_tokens,
    ),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMeasures], Histogram]], ...] = (
    (
        "time_to_first_token_seconds",
        "Histogram of time to first token in seconds, HTTP and tokenizer left out.",
        lambda m: m.time_to_first_token,
    ),
    (
        "time_per_output_token_seconds",
        "Histogram of time per output token in seconds.",
        lambda m: m.time_per_output_token,
    ),
    (
        "e2e_request_latency_seconds",
        "Histogram of end to end request latency in seconds.",
        lambda m: m.latency,
    ),
    ("request_prompt_tokens", "Number of prefill tokens processed.", lambda m: m.prompt_tokens),
    (
        "request_generation_tokens",
        "Number of generation tokens processed.",
        lambda m: m.generated_tokens,
    ),
)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class Metrics(Collector):
    """All models of one application."""

    def __init__(self, services: Mapping[str, ModelService]) -> None:
        self._services = services
        self._models = {name: ModelMeasures() for name in services}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def received(self, model: str) -> RequestMeasure:
        """A request for this model has come in."""
        return RequestMeasure(self._models[model])

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        labels = ["model_name"]
        now = [(n, self._models[n], service.status()) for n, service in self._services.items()]
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            _fill(counter, ((n, value(m, s)) for n, m, s in now))
            yield counter
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            _fill(gauge, ((n, value(m, s)) for n, m, s in now))
            yield gauge
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=labels)
            for n, m, _ in now:
                family.add_metric([n], *histogram(m).cumulative())
            yield family


def _fill(
    family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[str, float]]
) -> None:
    for name, value in values:
        family.add_metric([name], value)
