"""Counts and times of transfers as vLLM carries them: from the ranks over the scheduler to the log
line and ``/metrics``. What is counted is declared in :mod:`kvxfer.connector.metrics`.

Everything is sums and histograms in plain dicts, so that what gathers between two reports is
bounded, and two reports are added key by key, whoever made them: ranks, steps or engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats as VllmStats

from kvxfer.connector import metrics
from kvxfer.connector.metrics import PHASES, TOTAL, Exporter, Kind, Tables, quantile, times_of
from kvxfer.connector.records import KVConnectorStats

PREFIX = "vllm:kvxfer_"
"""vLLM takes back what begins with ``vllm:`` when an engine is made anew in one process."""
_BUSY_S = "busy_s"


BEHIND_STEPS = 3
"""With async scheduling an engine launches two more steps before the first token of one is out."""
MOST_S = 1.0
"""Numbers are told that often all the same."""


class Calm:
    """Whether a step may tell numbers. To make them, add them up and observe them takes 0.5 ms of a
    cold processor, where a request waits for its first token: one whose load was part of this step
    or of one shortly before.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._num_left = 0
        self._told_s = 0.0

    def is_now(self, *, has_loaded: bool) -> bool:
        """Asked once in each step. ``has_loaded``: loads were part of it, and have not failed."""
        if has_loaded:
            if not self._num_left:
                self._told_s = self._now()
            self._num_left = BEHIND_STEPS
        elif self._num_left:
            self._num_left -= 1
        if self._num_left:
            now_s = self._now()
            if now_s - self._told_s < MOST_S:
                return False
            self._told_s = now_s
        return True


class KvxferStats(VllmStats):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """``data`` holds :data:`~kvxfer.connector.metrics.Tables`, and for the log line ``busy_s``:
    seconds with a load in flight, by rank.
    """

    data: Tables

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: object) -> KvxferStats:
        """Add ``other`` to this one. What another connector counted is left out."""
        theirs = getattr(other, "data", None) if isinstance(other, VllmStats) else None
        metrics.add(self.data, dict(_tables(theirs)))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The log line: what was moved, how fast, where the time went, and what was not moved."""
        nbytes = sum(self.data.get("loaded_bytes", {}).values())
        busy_s = max(self.data.get(_BUSY_S, {}).values(), default=0.0)
        line: dict[str, int | float] = {
            "Transfers": sum(self.data.get("requests_loaded", {}).values()),
            "MB": round(nbytes / 1e6, 1),
            "GB/s (wall)": round(nbytes / 1e9 / busy_s, 3) if busy_s else 0.0,
        }
        for phase in (TOTAL, *PHASES):
            buckets = times_of(self.data, phase)
            if buckets:
                line[f"{phase} p50 (ms)"] = round(quantile(buckets, 0.5) * 1e3, 2)
                line[f"{phase} p90 (ms)"] = round(quantile(buckets, 0.9) * 1e3, 2)
        for name in ("requests_failed", "requests_plain", "offers_broken"):
            for reason, number in sorted(self.data.get(name, {}).items()):
                line[f"{name.rpartition('_')[2]}: {reason}"] = number
        return line


def of_worker(
    stats: KVConnectorStats | None, *, rank: str, busy_s: float, collected_s: float
) -> KvxferStats | None:
    """What a rank counted since the last step. ``collected_s``: when its reports were collected."""
    tables = metrics.of_worker(stats, collected_s) if stats is not None else {}
    if busy_s > 0:
        tables[_BUSY_S] = {rank: busy_s}
    return KvxferStats(data=tables) if tables else None


def of_scheduler(stats: KVConnectorStats | None) -> KvxferStats | None:
    """What the scheduler side counted since the last step."""
    tables = metrics.of_scheduler(stats) if stats is not None else {}
    return KvxferStats(data=tables) if tables else None


def rebuilt(data: Mapping[str, Any] | None) -> KvxferStats:
    """From what :meth:`KvxferStats.to_dict` gave, in another process."""
    return KvxferStats(data={table: dict(numbers) for table, numbers in _tables(data)})


def _tables(data: object) -> Iterable[tuple[str, Mapping[str, float]]]:
    """The dicts of numbers in what may come from anywhere."""
    if not isinstance(data, Mapping):
        return
    for table, numbers in data.items():
        if isinstance(numbers, Mapping) and all(
            isinstance(number, int | float) for number in numbers.values()
        ):
            yield table, numbers


class KvxferPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as in stats.py
    """All metrics of :mod:`kvxfer.connector.metrics`, with vLLM's labels before their own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, list(labelnames), per_engine_labelvalues)
        kinds = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
        self._exporter = Exporter(
            {kind: metric_types[each] for kind, each in kinds.items()},
            PREFIX,
            labelnames,
            list(per_engine_labelvalues.values()),
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted since the last time."""
        self._exporter.observe(
            rebuilt(transfer_stats_data).data, self.per_engine_labelvalues[engine_idx]
        )
