"""Every metric: its name, type, unit, labels and meaning, declared once. What is exported is made
of this list; the table in ``docs/operations.md``, the dashboard and the alerts are checked against
it.

Ranks count under the short names of the ledger. :func:`of_worker` and :func:`of_scheduler` make
*tables* of what was counted in a step: numbers by metric and labels, in plain dicts that travel
between processes. :func:`add` joins tables of ranks, and of one step and the next.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvxfer.connector.records import KVConnectorStats, LoadReport
from kvxfer.transfer.wire import Reason

Tables = dict[str, dict[str, float]]
"""By name of a metric, then by its labels, joined by SEPARATOR. Of a histogram the last label is
the number of a bucket.
"""
SEPARATOR = "\x1f"
MAX_LABEL_CHARS = 100

PHASES = ("queue", "ask", "read", "verdict", "pickup")
"""Where the time of a load goes, from the engine's order to the step that collects its report:
until the first Pull leaves, until the first Grant, until the last byte is in place, until the last
verdict, until the engine's next step.
"""
TOTAL = "total"

_FIRST_S = 1e-5
_STEPS_PER_OCTAVE = 4
"""Buckets of a factor 2 ** (1 / 4): a quantile is right within 9 percent."""
_LAST_BUCKET = 120  # 1e-5 s * 2 ** 30: three hours
BOUNDS_S = tuple(_FIRST_S * 2**octave for octave in range(3, 24))
"""Of the exported histogram: 80 us to 84 s, each twice the one before. All of them are bounds of
our own buckets too, so that none is split.
"""


class Kind(enum.StrEnum):
    """Prometheus' types. A counter's exported name ends in ``_total``. Tables add counters and
    histograms; of a gauge the last value holds.
    """

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """``name``: without the exporter's prefix. ``counts``: a pattern of the names in the ledger
    that it adds up; the pattern's groups are the values of its labels. ``known``: values of its
    label that are exported from the start, because a rate misses what a new series begins with.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    text: str
    counts: str = ""
    known: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


_REASONS = tuple(reason.value for reason in Reason)


def _counter(
    name: str, unit: str, labels: str, text: str, counts: str = "", known: tuple[str, ...] = ()
) -> Metric:
    """One without labels counts what the ledger has under its name, as ``offers.done``."""
    counts = counts or ("" if labels else re.escape(name.replace("_", ".", 1)))
    return Metric(name, Kind.COUNTER, unit, tuple(labels.split()), text, counts, known)


def _gauge(name: str, unit: str, labels: str, text: str) -> Metric:
    return Metric(name, Kind.GAUGE, unit, tuple(labels.split()), text)


# Of those whose patterns fit a name the first one counts it.
METRICS = (
    # ---- requests, counted once by the scheduler
    _counter("requests_loaded", "requests", "", "Requests whose KV was loaded."),
    _counter("requests_in_step", "requests", "",
             "Requests whose load was part of a step, whatever its verdict."),
    _counter("requests_failed", "requests", "reason",
             "Requests whose KV was to be loaded and could not be.", known=_REASONS),
    _counter("requests_plain", "requests", "reason",
             "Requests with transfer params that ran without transferred KV.",
             known=(*_REASONS, "role", "bad_signature", "draining")),
    _counter("pairs_unusable", "peers", "", "Peers from which no load can work as configured."),
    # ---- loads, counted by each rank that takes KV
    _counter("loads", "loads", "peer wire", "Loads that were accepted."),
    _counter("loads_failed", "loads", "peer reason", "Loads that failed."),
    _counter("loaded_bytes", "bytes", "peer wire", "KV bytes of accepted loads."),
    _counter("read_seconds", "seconds", "peer wire", "Time in which accepted loads were read."),
    Metric("load_seconds", Kind.HISTOGRAM, "seconds", ("phase", "wire"),
           "Time of accepted loads, by phase and in total."),
    _gauge("loads_in_flight", "loads", "rank", "Loads that have not ended."),
    _counter("loads_undrained", "loads", "",
             "Loads whose read was stopped and did not end; their peer is lost."),
    _counter("verified", "reads", "result",
             "Reads whose digests were compared: equal, differing; not_possible: older sources.",
             r"verify\.(.+)", ("equal", "differing")),
    # ---- peers and wires, counted by each rank that takes KV
    _counter("peers_met", "peers", "", "First contacts that ended well.", r"peers\.ready"),
    _counter("peers_lost", "peers", "reason", "Peers that were lost, refused or not reached.",
             r"peers\.(.+)", _REASONS),
    _gauge("peers_ready", "peers", "rank", "Peers that can be read now."),
    _gauge("wire_bytes_per_second", "bytes per second", "rank peer wire",
           "Speed of the wire to a peer at first contact; 0 once the peer is lost."),
    _counter("trials", "trials", "wire result", "Wires that first contacts took or passed over.",
             r"trials\.([^.]+)\.([^.]+)"),
    # ---- offers, counted by each rank that gives KV
    _counter("offers_minted", "offers", "", "Offers of requests that were admitted."),
    _counter("offers_opened", "offers", "", "Offers that could be read."),
    _counter("offers_done", "offers", "", "Offers read to the end."),
    _counter("offers_broken", "offers", "reason", "Offers that ended before they were read.",
             known=_REASONS),
    _counter("offers_pinned", "offers", "",
             "Offers whose blocks an idle vLLM keeps without the request."),
    _gauge("offers_held", "offers", "rank", "Offers that have not ended."),
    _gauge("blocks_held", "blocks", "rank",
           "Blocks of finished requests that wait for sinks; the same ids on all TP ranks."),
    _counter("leases_extended", "leases", "", "Leases that a sink extended."),
    _counter("leases_lapsed", "leases", "", "Offers that ended with their lease."),
    _counter("claims_dropped", "claims", "reason",
             "Claims of sink engines that fell silent or went away.", r"claims\.(.+)"),
    _counter("sent_bytes", "bytes", "wire", "KV bytes sent over stream wires.",
             r"sent\.nbytes\.(.+)"),
    _counter("sends_stopped", "transfers", "reason", "Transfers of stream wires that broke.",
             r"send_stopped\.(.+)"),
    _counter("refusals", "answers", "reason", "Reads that were refused.", r"refused\.(.+)"),
    _counter("verdicts", "answers", "reason", "Verdicts on reads: valid, or why not.",
             r"verdict\.(.+)"),
    # ---- both sides, counted by each rank
    _gauge("draining", "0 or 1", "rank", "1: this rank takes nothing new, because it drains."),
    _counter("connections_refused", "connections", "reason",
             "Connections refused: by address, user or CURVE key, token of tcp, in the handshake, "
             "as a penalty, or because too many came (pace). flood: an address is kept out.",
             r"[^.]+\.refused\.(.+)",
             ("address", "user", "key", "token", "handshake", "penalty", "pace", "flood")),
    _gauge("board_on", "0 or 1", "rank", "1: this rank shows its offers on a board."),
    _gauge("boards_open", "boards", "rank", "Boards of peers that this rank looks at."),
    _counter("board_events", "events", "event",
             "Boards seen; offers posted, or not (full); answers found (grants, verdicts).",
             r"boards?\.(.+)"),
    _gauge("staging_bytes", "bytes", "rank side wire", "Staging of stream connections in use."),
    _counter("staging_refused", "connections", "wire",
             "Sinks turned away: no staging was left.", r"([^.]+)\.too_much_staging",
             ("zmq", "tcp", "ucx", "nixl")),
    _counter("control_problems", "messages", "reason",
             "Control messages that were late, repeated, dropped or not understood.",
             r"((?:control|keep|cancel|aborts)\..+)"),
    _counter("internal_errors", "errors", "reason",
             "Errors that should not occur; the log has each kind once a minute.",
             r"(io\.errors|io\.stands|loads\.unforeseen|offers\.unforeseen)",
             ("io_errors", "io_stands", "loads_unforeseen", "offers_unforeseen")),
    _counter("wire_problems", "events", "wire reason",
             "What a wire dropped or refused; GPUs that failed (gpu_broken).",
             r"([^.]+)\.([^.]+)"),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}
_BY_COUNTS = [(metric, re.compile(metric.counts)) for metric in METRICS if metric.counts]
_TOLD_OTHERWISE = re.compile(r"loads\.(accepted|failed|nbytes)|offers\.broken")
"""Counts that are sums of what other metrics have with their labels."""


@lru_cache(1024)
def place_of(count: str) -> tuple[str, str] | None:
    """The metric and the labels that a count of the ledger adds to; None where others tell it."""
    if _TOLD_OTHERWISE.fullmatch(count):
        return None
    for metric, pattern in _BY_COUNTS:
        found = pattern.fullmatch(count)
        if found is not None:
            return metric.name, key(*(group.replace(".", "_") for group in found.groups()))
    return None


@lru_cache(4096)
def key(*labels: str) -> str:
    return SEPARATOR.join(each.replace(SEPARATOR, " ")[:MAX_LABEL_CHARS] for each in labels)


def peer_label(endpoint: str) -> str:
    """HOST:PORT of an engine's front door."""
    return endpoint.removeprefix("tcp://")


def wire_label(report: LoadReport) -> str:
    """The wires of a load; "none" if it read nothing."""
    return "+".join(report.transports) or "none"


# ------------------------------------------------------------------ what was counted in a step


def of_worker(stats: KVConnectorStats, collected_s: float) -> Tables:
    tables = _counted(stats.counts)
    broken = dict(stats.reasons)  # the ledger counts failed loads under the same names
    for report in stats.loads:
        peer = peer_label(report.peer)
        if report.reason is not None:
            _count(tables, "loads_failed", key(peer, report.reason.value))
            broken[report.reason.value] -= 1
            continue
        wire = wire_label(report)
        spans_s = phases_of(report, collected_s)
        for phase, seconds in {**spans_s, TOTAL: sum(spans_s.values())}.items():
            _count(tables, "load_seconds", key(phase, wire, str(bucket_of(seconds))))
        _count(tables, "loads", key(peer, wire))
        _count(tables, "loaded_bytes", key(peer, wire), report.nbytes)
        _count(tables, "read_seconds", key(peer, wire), spans_s["read"])
    for reason, number in broken.items():
        if number > 0:
            _count(tables, "offers_broken", key(reason), number)
    for place, value in stats.gauges.items():
        name, _, labels = place.partition(SEPARATOR)
        tables.setdefault(name, {})[labels] = value
    return tables


def of_scheduler(stats: KVConnectorStats) -> Tables:
    tables = _counted(stats.counts)
    for reason, number in stats.reasons.items():
        num_failed = stats.failed.get(reason, 0)
        for name, some in (
            ("requests_failed", num_failed),
            ("requests_plain", number - num_failed),
        ):
            if some > 0:
                _count(tables, name, key(reason), some)
    return tables


def phases_of(report: LoadReport, collected_s: float) -> dict[str, float]:
    """Seconds of each of PHASES of a load that succeeded. One that read nothing has no read."""
    started_s = report.started_s or report.finished_s
    granted_s = report.granted_s or started_s
    placed_s = report.placed_s or granted_s
    moments = (report.handed_s, started_s, granted_s, placed_s, report.finished_s, collected_s)
    spans = (max(0.0, end - start) for start, end in zip(moments, moments[1:], strict=False))
    return dict(zip(PHASES, spans, strict=True))


def add(mine: Tables, theirs: Mapping[str, Mapping[str, float]]) -> None:
    """Add ``theirs``, which is later where both have the same gauge."""
    for name, numbers in theirs.items():
        table = mine.setdefault(name, {})
        if name in BY_NAME and BY_NAME[name].kind is Kind.GAUGE:
            table.update(numbers)
            continue
        for labels, number in numbers.items():
            table[labels] = table.get(labels, 0) + number


def _counted(counts: Mapping[str, int]) -> Tables:
    tables: Tables = {}
    for count, number in counts.items():
        place = place_of(count)
        if place is not None:
            _count(tables, *place, number)
    return tables


def _count(tables: Tables, name: str, labels: str, number: float = 1) -> None:
    table = tables.setdefault(name, {})
    table[labels] = table.get(labels, 0) + number


# ------------------------------------------------------------------ durations


def bucket_of(seconds: float) -> int:
    if seconds <= _FIRST_S:
        return 0
    return min(int(math.log2(seconds / _FIRST_S) * _STEPS_PER_OCTAVE), _LAST_BUCKET)


def middle_of(bucket: int) -> float:
    """The duration in the middle of a bucket, in seconds."""
    return float(_FIRST_S * 2 ** ((bucket + 0.5) / _STEPS_PER_OCTAVE))


def times_of(tables: Mapping[str, Mapping[str, float]], phase: str) -> dict[int, float]:
    """How many loads took how long in a phase, by bucket."""
    buckets: dict[int, float] = {}
    for labels, number in tables.get("load_seconds", {}).items():
        its_phase, _, bucket = labels.split(SEPARATOR)
        if its_phase == phase:
            buckets[int(bucket)] = buckets.get(int(bucket), 0) + number
    return buckets


def quantile(buckets: Mapping[int, float], share: float) -> float:
    """The duration in seconds below which this share of the loads lies. Needs at least one load."""
    wanted = share * sum(buckets.values())
    seen = 0.0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= wanted:
            break
    return middle_of(bucket)


# ------------------------------------------------------------------ what is exported


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
    """Puts tables into the metrics of a Prometheus client, prometheus_client's own or vLLM's.

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
        for name in sorted(tables, key=_MEETS.__contains__, reverse=True):
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
