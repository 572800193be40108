"""The plugin's counts and times on vLLM's ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvxfer.integrations.vllm.stats import PHASES, bounds_s, middle_of, rebuilt

_COUNTED = {
    "requests.loaded": ("vllm:kvxfer_requests_loaded", "Requests whose KV was loaded from a peer."),
    "loads.nbytes": ("vllm:kvxfer_loaded_bytes", "Bytes of KV that were loaded from peers."),
    "pairs.unusable": (
        "vllm:kvxfer_pairs_unusable",
        "Peers from which no load can work as the two engines are configured; each is an error in "
        "the log.",
    ),
    "offers.opened": (
        "vllm:kvxfer_offers_opened",
        "Offers of KV, counted by each rank.",
    ),
    "offers.pinned": (
        "vllm:kvxfer_offers_pinned",
        "Offers of KV whose blocks an idle engine kept without their request.",
    ),
    "offers.done": (
        "vllm:kvxfer_offers_done",
        "Offers read to the end, counted by each rank.",
    ),
}
_BY_REASON = {
    "failed": (
        "vllm:kvxfer_requests_failed",
        "Requests whose KV was to be loaded and could not be, by reason.",
    ),
    "plain": (
        "vllm:kvxfer_requests_plain",
        "Requests with transfer params that ran without transferred KV, by reason.",
    ),
    "broken": (
        "vllm:kvxfer_offers_broken",
        "Offers of KV that ended before they were read, by reason, counted by each rank.",
    ),
}


class KvxferPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as in stats.py
    """Counters of transfers and failures, one histogram of the time of loads by phase."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, list(labelnames), per_engine_labelvalues)
        names = list(labelnames)
        self._counters = {
            key: self._counter_cls(name=name, documentation=text, labelnames=names)
            for key, (name, text) in _COUNTED.items()
        }
        for values in per_engine_labelvalues.values():
            for counter in self._counters.values():
                counter.labels(*values)  # a series that begins at 1 looks as if nothing had come
        self._reasons = {
            table: self._counter_cls(name=name, documentation=text, labelnames=[*names, "reason"])
            for table, (name, text) in _BY_REASON.items()
        }
        self._times = self._histogram_cls(
            name="vllm:kvxfer_load_seconds",
            documentation="Time of loads from the engine's order to its next step, by phase, in s.",
            buckets=list(bounds_s()),
            labelnames=[*names, "phase"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted since the last time."""
        labels = self.per_engine_labelvalues[engine_idx]
        data = rebuilt(transfer_stats_data).data
        counts = data.get("counts", {})
        for key, counter in self._counters.items():
            if counts.get(key):
                counter.labels(*labels).inc(counts[key])
        for table, counter in self._reasons.items():
            for reason, number in data.get(table, {}).items():
                counter.labels(*labels, reason).inc(number)
        for phase in PHASES:
            for bucket, number in data.get(f"times.{phase}", {}).items():
                child = self._times.labels(*labels, phase)
                for _ in range(number):
                    child.observe(middle_of(int(bucket)))
