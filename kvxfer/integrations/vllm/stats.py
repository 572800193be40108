"""Counts and times of transfers as vLLM carries them: from the ranks over the scheduler to the log
line and ``/metrics``.

Everything is counts, sums and histograms in plain dicts, so that what gathers between two reports
is bounded, and two reports are added key by key, whoever made them: ranks, steps or engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats as VllmStats

from kvxfer.connector.records import KVConnectorStats, LoadReport

PHASES = ("total", "queue", "read", "verdict", "pickup")
"""Where the time of a load goes, from the engine's order to the step that collects its report:
until the first Pull leaves, until the last byte is in place, until the last verdict, until the
engine's next step; and all of it.
"""

_FIRST_S = 1e-5
_STEPS_PER_OCTAVE = 4
"""Buckets of a factor 2 ** (1 / 4): a quantile is right within 9 percent."""
_LAST_BUCKET = 120  # 1e-5 s * 2 ** 30: three hours


def bucket_of(seconds: float) -> int:
    """The number of the bucket that this duration belongs to."""
    if seconds <= _FIRST_S:
        return 0
    return min(int(math.log2(seconds / _FIRST_S) * _STEPS_PER_OCTAVE), _LAST_BUCKET)


def middle_of(bucket: int) -> float:
    """The duration in the middle of a bucket, in seconds."""
    return float(_FIRST_S * 2 ** ((bucket + 0.5) / _STEPS_PER_OCTAVE))


def _phases_of(report: LoadReport, collected_s: float) -> dict[str, float]:
    """Seconds of each phase of a load that succeeded. A load that read nothing has no read."""
    placed_s = report.placed_s or report.started_s or report.finished_s
    started_s = report.started_s or report.finished_s
    moments = (report.handed_s, started_s, placed_s, report.finished_s, collected_s)
    spans = [max(0.0, end - start) for start, end in zip(moments, moments[1:], strict=False)]
    return dict(zip(PHASES, (max(0.0, collected_s - report.handed_s), *spans), strict=True))


class KvxferStats(VllmStats):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """``data`` holds dicts of numbers by name, one level deep.

    ``counts``: what happened. ``failed``: requests whose load failed, by reason. ``plain``:
    requests that had params and ran without transferred KV, by reason. ``broken``: offers that
    ended before they were read, by reason. ``busy_s``: seconds with a load in flight, by rank.
    ``seconds``: sums by phase. ``times.<phase>``: loads by bucket of their duration.
    """

    data: dict[str, dict[str, Any]]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: object) -> KvxferStats:
        """Add ``other`` to this one. What another connector counted is left out."""
        theirs = getattr(other, "data", None) if isinstance(other, VllmStats) else None
        for table, numbers in _tables(theirs):
            mine = self.data.setdefault(table, {})
            for name, number in numbers.items():
                mine[name] = mine.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """The log line: what was moved, how fast, where the time went, and what was not moved."""
        counts = self.data.get("counts", {})
        nbytes = counts.get("loads.nbytes", 0)
        busy_s = max(self.data.get("busy_s", {}).values(), default=0.0)
        line: dict[str, int | float] = {
            "Transfers": counts.get("requests.loaded", 0),
            "MB": round(nbytes / 1e6, 1),
            "GB/s (wall)": round(nbytes / 1e9 / busy_s, 3) if busy_s else 0.0,
        }
        for phase in PHASES:
            buckets = self.data.get(f"times.{phase}", {})
            if buckets:
                line[f"{phase} p50 (ms)"] = round(quantile(buckets, 0.5) * 1e3, 2)
                line[f"{phase} p90 (ms)"] = round(quantile(buckets, 0.9) * 1e3, 2)
        for table in ("failed", "plain", "broken"):
            for reason, number in sorted(self.data.get(table, {}).items()):
                line[f"{table}: {reason}"] = number
        return line


def quantile(buckets: Mapping[str, int], share: float) -> float:
    """The duration in seconds below which this share of the loads lies. Needs at least one load."""
    wanted = share * sum(buckets.values())
    seen = 0
    for bucket in sorted(int(name) for name in buckets):
        seen += buckets[str(bucket)]
        if seen >= wanted:
            break
    return middle_of(bucket)


def of_worker(
    stats: KVConnectorStats | None, *, rank: str, busy_s: float, collected_s: float
) -> KvxferStats | None:
    """What a rank counted since the last step. ``collected_s``: when its reports were collected."""
    tables: dict[str, dict[str, float]] = {}
    if busy_s > 0:
        tables["busy_s"] = {rank: busy_s}
    if stats is not None:
        loaded = [report for report in stats.loads if report.reason is None]
        counts: dict[str, float] = {**stats.counts}
        counts.pop("loads.nbytes", None)  # those of failed loads are no use to anybody
        if loaded:
            counts["loads.nbytes"] = sum(report.nbytes for report in loaded)
        tables["counts"] = counts
        tables["broken"] = _without_loads(stats)
        _add_times(tables, (_phases_of(report, collected_s) for report in loaded))
    return _stats(tables)


def of_scheduler(stats: KVConnectorStats | None) -> KvxferStats | None:
    """What the scheduler side counted since the last step."""
    if stats is None:
        return None
    plain = {
        reason: number - stats.failed.get(reason, 0)
        for reason, number in stats.reasons.items()
        if number > stats.failed.get(reason, 0)
    }
    return _stats({"counts": {**stats.counts}, "failed": {**stats.failed}, "plain": {**plain}})


def counted(counts: Mapping[str, int]) -> KvxferStats:
    """What happened so many times."""
    return KvxferStats(data={"counts": dict(counts)})


def rebuilt(data: Mapping[str, Any] | None) -> KvxferStats:
    """From what :meth:`KvxferStats.to_dict` gave, in another process."""
    return KvxferStats(data={table: dict(numbers) for table, numbers in _tables(data)})


def _stats(tables: Mapping[str, Mapping[str, float]]) -> KvxferStats | None:
    data = {table: dict(numbers) for table, numbers in tables.items() if numbers}
    return KvxferStats(data=data) if data else None


def _tables(data: object) -> Iterable[tuple[str, Mapping[str, float]]]:
    """The dicts of numbers in what may come from anywhere."""
    if not isinstance(data, Mapping):
        return
    for table, numbers in data.items():
        if isinstance(numbers, Mapping) and all(
            isinstance(number, int | float) for number in numbers.values()
        ):
            yield table, numbers


def _without_loads(stats: KVConnectorStats) -> dict[str, float]:
    """Why offers of this rank ended: the ledger counts failed loads under the same names."""
    reasons: dict[str, float] = {**stats.reasons}
    for report in stats.loads:
        if report.reason is not None and report.reason.value in reasons:
            reasons[report.reason.value] -= 1
    return {reason: number for reason, number in reasons.items() if number > 0}


def _add_times(tables: dict[str, dict[str, float]], loads: Iterable[Mapping[str, float]]) -> None:
    for phases in loads:
        for phase, seconds in phases.items():
            sums = tables.setdefault("seconds", {})
            sums[phase] = sums.get(phase, 0.0) + seconds
            buckets = tables.setdefault(f"times.{phase}", {})
            name = str(bucket_of(seconds))
            buckets[name] = buckets.get(name, 0) + 1


def _bounds_s() -> Sequence[float]:
    """Bucket bounds for histograms of seconds, 0.1 ms to 100 s."""
    return tuple(10.0 ** (power / 3) for power in range(-12, 7))


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
            buckets=list(_bounds_s()),
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
