"""Prometheus metrics: the engine's totals and the latencies that clients see.

What vLLM measures too has two names: ``prefixkv:...`` and, with the same meaning, ``vllm:...``,
which dashboards and routers know. Token counts are tokens, not requests or blocks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from prefixkv.engine.async_engine import AsyncEngine
from prefixkv.engine.engine import EngineStats
from prefixkv.request import RequestOutput

OWN, ALIAS = "prefixkv:", "vllm:"
WITHOUT_ALIAS = frozenset({"computed_tokens", "num_blocks", "num_free_blocks"})

# Upper bounds in seconds, those of vLLM, so that its dashboards fit; a row a decade or so.
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0),
    *(10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.prefix_queries,
    ),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    "prompt_tokens": ("Prompt tokens of admitted requests", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated", lambda s: s.generation_tokens),
    "computed_tokens": ("Tokens whose K/V was computed", lambda s: s.computed_tokens),
    "num_preemptions": ("Preemptions", lambda s: s.num_preemptions),
}
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests being computed", lambda s: s.num_running),
    "num_requests_waiting": ("Requests in the queue", lambda s: s.num_waiting),
    "num_blocks": ("Blocks in the pool", lambda s: s.num_blocks),
    "num_free_blocks": (
        "Blocks that no request and no reservation holds, cached ones too",
        lambda s: s.num_free_blocks,
    ),
    "kv_cache_usage_perc": (
        "Share of blocks that requests and reservations hold, 0 to 1",
        lambda s: 1 - s.num_free_blocks / s.num_blocks,
    ),
}


class Latencies:
    """Histograms of what clients see, in seconds; queue time is in all but the time a token."""

    def __init__(self) -> None:
        self.first_token = Histogram(
            f"{OWN}time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=None,
        )
        self.inter_token = Histogram(
            f"{OWN}inter_token_latency_seconds",
            "From a token to the next one",
            buckets=_INTER_TOKEN_BUCKETS,
            registry=None,
        )
        self.request = Histogram(
            f"{OWN}e2e_request_latency_seconds",
            "From a request's arrival to its end, aborted requests left out",
            buckets=_REQUEST_BUCKETS,
            registry=None,
        )

    async def observe(self, stream: AsyncGenerator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
        """Pass a request's pieces on and time them; closing this closes the stream."""
        start = time.perf_counter()
        last: dict[int, float] = {}  # when each sample got its last token
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                now = time.perf_counter()
                for sample in piece.samples:
                    if not sample.token_ids:
                        continue
                    if not last:
                        self.first_token.observe(now - start)
                    elif sample.index in last:
                        self._tokens(len(sample.token_ids), now - last[sample.index])
                    last[sample.index] = now
                if piece.finished and piece.finish_reason in ("stop", "length"):
                    self.request.observe(now - start)
                yield piece

    def _tokens(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.inter_token.observe(seconds / count)

    def collect(self) -> Iterator[Metric]:
        for histogram in (self.first_token, self.inter_token, self.request):
            yield from histogram.collect()


class EngineCollector(Collector):
    """Reads the engine's totals when it is scraped."""

    def __init__(self, engine: AsyncEngine, latencies: Latencies, model_name: str) -> None:
        self._engine = engine
        self._latencies = latencies
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics():
            labels = {"model_name": self._model_name}
            samples = [
                sample._replace(labels=labels | sample.labels)
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            plain = metric.name.removeprefix(OWN)
            for prefix in (OWN,) if plain in WITHOUT_ALIAS else (OWN, ALIAS):
                named = Metric(prefix + plain, metric.documentation, metric.type)
                named.samples = [
                    sample._replace(name=_renamed(sample.name, prefix)) for sample in samples
                ]
                yield named

    def _metrics(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, (text, value) in _COUNTERS.items():
            yield CounterMetricFamily(OWN + name, text, value=value(stats))
        for name, (text, value) in _GAUGES.items():
            yield GaugeMetricFamily(OWN + name, text, value=value(stats))
        yield from self._latencies.collect()


def registry(engine: AsyncEngine, latencies: Latencies, model_name: str) -> CollectorRegistry:
    """A registry of its own with all metrics of one server."""
    own = CollectorRegistry(auto_describe=False)
    own.register(EngineCollector(engine, latencies, model_name))
    return own


def _renamed(name: str, prefix: str) -> str:
    return prefix + name.removeprefix(OWN)
