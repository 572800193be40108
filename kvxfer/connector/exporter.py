"""Puts tables of counts into the metrics of a Prometheus client: prometheus_client's own classes,
or those that vLLM hands to its connectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvxfer.connector.metrics import BOUNDS_S, METRICS, SEPARATOR, Kind, Metric, middle_of

MAX_PEERS = 64
"""Peers with series of their own: the first that a rank of this engine met. Clients name peers, and
restarted engines have new ports, so all others together are OTHER.
"""
OTHER = "other"
_MEETS = {"loads", "wire_bytes_per_second"}
"""Only a peer that was met has these."""
_MORE: Mapping[Kind, Mapping[str, Any]] = {
    # Several processes of vLLM's front end get the steps of an engine in turn
    Kind.GAUGE: {"multiprocess_mode": "mostrecent"},
    Kind.HISTOGRAM: {"buckets": list(BOUNDS_S)},
}


class Exporter:
    """All metrics of some engines.

    Args:
        kinds: makes a metric of each kind; takes the arguments of prometheus_client's classes.
        prefix: of all names.
        labels: that every series has before its own.
        engines: the values of these labels, of each engine that will be observed.
    """

    def __init__(
        self,
        kinds: Mapping[Kind, Callable[..., Any]],
        prefix: str,
        labels: Sequence[str] = (),
        engines: Sequence[Sequence[object]] = ((),),
    ) -> None:
        self._peers: set[str] = set()
        self._metrics: dict[str, tuple[Metric, Any]] = {}
        for metric in METRICS:
            names = [*labels, *metric.labels]
            made = kinds[metric.kind](
                name=prefix + metric.name,
                documentation=metric.text,
                labelnames=names,
                **_MORE.get(metric.kind, {}),
            )
            self._metrics[metric.name] = metric, made
            values = ((value,) for value in metric.known) if metric.labels else ((),)
            for value in values if metric.kind is Kind.COUNTER and names else ():
                for engine in engines:
                    made.labels(*engine, *value)

    def observe(
        self, tables: Mapping[str, Mapping[str, float]], engine: Sequence[object] = ()
    ) -> None:
        """Add what one engine counted since the last time. What is no metric is left out."""
        for name in sorted(tables, key=lambda name: name not in _MEETS):
            if name not in self._metrics:
                continue
            metric = self._metrics[name][0]
            for joined, number in tables[name].items():
                values = joined.split(SEPARATOR) if metric.labels else []
                self._put(metric, engine, values, number)

    def _put(
        self, metric: Metric, engine: Sequence[object], values: list[str], number: float
    ) -> None:
        made = self._metrics[metric.name][1]
        bucket = values.pop() if metric.kind is Kind.HISTOGRAM else ""
        if "peer" in metric.labels:
            at = metric.labels.index("peer")
            values[at] = self._name(values[at], is_met=metric.name in _MEETS)
            if values[at] == OTHER and metric.kind is Kind.GAUGE:
                return  # one value of many peers would say nothing
        child = made.labels(*engine, *values) if engine or values else made
        match metric.kind:
            case Kind.COUNTER:
                child.inc(number)
            case Kind.GAUGE:
                child.set(number)
            case Kind.HISTOGRAM:
                for _ in range(int(number)):
                    child.observe(middle_of(int(bucket)))

    def _name(self, peer: str, *, is_met: bool) -> str:
        if is_met and len(self._peers) < MAX_PEERS:
            self._peers.add(peer)
        return peer if peer in self._peers else OTHER
