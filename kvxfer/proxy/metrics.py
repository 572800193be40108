"""What is counted, as Prometheus reads it."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvxfer.proxy.bodies import Reason
from kvxfer.proxy.settings import Dispatch, Engine

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_PREFIX = "kvxfer_proxy_"
# Prompts of a few tokens on a GPU to a queue of long ones.
_PREFILL_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """One proxy's own numbers: a registry of its own, so that two in one process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "path", "Completion and chat requests taken.")
        self.failures = self._counter(
            "failures",
            "reason",
            "Requests that did not get a decode engine's whole good answer, by reason.",
        )
        self.without_kv = self._counter(
            "without_kv",
            "reason",
            "Requests sent to decode without KV, because prefill gave none or failed, by reason.",
        )
        self.retries = self._counter(
            "retries", "reason", "Requests that another engine took after one was gone, by reason."
        )
        self.dispatched = Counter(
            _PREFIX + "dispatched",
            "Prefill requests, by whether decode was asked together with prefill or in turn.",
            ["how"],
            registry=self._registry,
        )
        self.in_flight = Gauge(
            _PREFIX + "in_flight", "Requests being served now.", registry=self._registry
        )
        self.prefill_s = Histogram(
            _PREFIX + "prefill_seconds",
            "From sending a prefill request to its whole answer.",
            buckets=_PREFILL_BUCKETS_S,
            registry=self._registry,
        )
        self._up = Gauge(
            _PREFIX + "engine_up",
            "1 while an engine's last health probe was good.",
            ["side", "engine"],
            registry=self._registry,
        )
        for how in Dispatch:
            self.dispatched.labels(how.value)
        for reason in Reason:  # a rate over a series that begins at 1 misses it
            self.failures.labels(reason.value)
            self.retries.labels(reason.value)
            if reason.value.startswith("prefill_"):
                self.without_kv.labels(reason.value)

    def _counter(self, name: str, label: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, [label], registry=self._registry)

    def see(self, engine: Engine, is_up: bool) -> None:
        self._up.labels(engine.side.value, engine.url).set(is_up)

    def fail(self, reason: Reason) -> None:
        self.failures.labels(reason.value).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
