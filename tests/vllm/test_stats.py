"""Counts and times from the ranks to the log line and the metrics."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvxfer.connector.records import KVConnectorStats, LoadReport
from kvxfer.transfer.wire import Reason

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM loads parts of torch that other parts call deprecated
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats as VllmStats

    from kvxfer.integrations.vllm.connector import KvxferConnector
    from kvxfer.integrations.vllm.stats import (
        KvxferStats,
        bucket_of,
        middle_of,
        of_scheduler,
        of_worker,
        quantile,
        rebuilt,
    )

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def report(number: int = 0, reason: Reason | None = None, read_s: float = 0.02) -> LoadReport:
    start = 100.0 + number
    return LoadReport(
        request_id=f"r{number}",
        reason=reason,
        nbytes=1_000_000,
        handed_s=start,
        started_s=start + 0.001,
        placed_s=start + 0.001 + read_s,
        finished_s=start + 0.001 + read_s + 0.0005,
    )


def worker(*loads: LoadReport, busy_s: float = 0.1, rank: str = "pp0tp0") -> KvxferStats:
    reasons: dict[str, int] = {}
    for load in loads:
        if load.reason is not None:
            reasons[load.reason.value] = reasons.get(load.reason.value, 0) + 1
    stats = KVConnectorStats(
        counts={"loads.accepted": len(loads), "loads.nbytes": 17},
        reasons=reasons | {"expired": 3},
        loads=loads,
    )
    collected_s = max((load.finished_s for load in loads), default=0.0) + 0.002
    made = of_worker(stats, rank=rank, busy_s=busy_s, collected_s=collected_s)
    assert made is not None
    return made


def test_one_load_by_phase() -> None:
    data = worker(report()).data
    seconds = {phase: round(value, 6) for phase, value in data["seconds"].items()}
    assert seconds == {
        "total": 0.0235,
        "queue": 0.001,
        "read": 0.02,
        "verdict": 0.0005,
        "pickup": 0.002,
    }
    assert data["counts"] == {"loads.accepted": 1, "loads.nbytes": 1_000_000}
    assert data["broken"] == {"expired": 3}
    assert data["busy_s"] == {"pp0tp0": 0.1}


def test_failed_loads_have_no_times_and_are_not_broken_offers() -> None:
    data = worker(report(reason=Reason.PEER_LOST), report(1)).data
    assert sum(data["times.total"].values()) == 1
    assert data["counts"]["loads.nbytes"] == 1_000_000
    assert data["broken"] == {"expired": 3}


def test_a_load_without_a_read() -> None:
    null = LoadReport(request_id="r", reason=None, handed_s=5.0, finished_s=5.25)
    made = of_worker(KVConnectorStats(loads=(null,)), rank="pp0tp0", busy_s=0.25, collected_s=5.5)
    assert made is not None
    assert made.data["seconds"] == {
        "total": 0.5,
        "queue": 0.25,
        "read": 0.0,
        "verdict": 0.0,
        "pickup": 0.25,
    }


def test_the_log_line() -> None:
    ranks = worker(*(report(i) for i in range(9)), report(9, read_s=0.2), busy_s=0.5)
    ranks.aggregate(worker(*(report(i) for i in range(10)), rank="pp0tp1", busy_s=0.4))
    scheduler = of_scheduler(
        KVConnectorStats(
            counts={"requests.loaded": 10},
            reasons={"role": 2, "deadline": 1},
            failed={"deadline": 1},
        )
    )
    assert scheduler is not None
    line = ranks.aggregate(scheduler).reduce()
    assert line["Transfers"] == 10
    assert line["MB"] == 20.0
    assert line["GB/s (wall)"] == 0.04  # 20 MB while the busier rank had loads in flight
    # One bucket is 19 percent wide; the slow one's followers were collected with it.
    assert line["read p50 (ms)"] == pytest.approx(20, rel=0.1)
    assert line["read p90 (ms)"] == pytest.approx(20, rel=0.1)
    assert line["queue p50 (ms)"] == pytest.approx(1, rel=0.1)
    assert (line["failed: deadline"], line["plain: role"]) == (1, 2)
    assert "plain: deadline" not in line
    assert line["broken: expired"] == 6


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e-5, 3e-4, 0.02, 1.0, 77.0, 1e4])
def test_buckets_are_within_nine_percent(seconds: float) -> None:
    middle = middle_of(bucket_of(seconds))
    assert middle == pytest.approx(max(seconds, 1e-5), rel=0.1)


def test_quantiles() -> None:
    buckets = {str(bucket_of(0.001)): 90, str(bucket_of(1.0)): 10}
    assert quantile(buckets, 0.5) == pytest.approx(0.001, rel=0.1)
    assert quantile(buckets, 0.9) == pytest.approx(0.001, rel=0.1)
    assert quantile(buckets, 0.91) == pytest.approx(1.0, rel=0.1)


def test_what_gathers_is_bounded() -> None:
    total = worker(report())
    for number in range(2000):
        total.aggregate(worker(report(number % 7, read_s=1e-6 * 1.01**number)))
    assert sum(total.data["times.read"].values()) == 2001
    assert len(msgspec.json.encode(total.data)) < 10_000


def test_travels_as_plain_data() -> None:
    made = worker(report(), report(1, reason=Reason.EXPIRED))
    for copy in (
        msgspec.msgpack.decode(msgspec.msgpack.encode(made.to_dict())),
        json.loads(json.dumps(made.to_dict())),
    ):
        again = KvxferConnector.build_kv_connector_stats(copy)
        assert again.data == made.data
        assert again.reduce() == made.reduce()
    assert KvxferConnector.build_kv_connector_stats().is_empty()


class Foreign(VllmStats):  # type: ignore[misc]
    """Another connector's."""


@pytest.mark.parametrize(
    "other",
    [
        Foreign(data={"durations": [1.0, 2.0], "names": {"a": "b"}}),
        Foreign(data={}),
        object(),
        None,
    ],
)
def test_statistics_of_others_are_left_out(other: object) -> None:
    made = worker(report())
    before = json.dumps(made.data)
    assert made.aggregate(other) is made
    assert json.dumps(made.data) == before


def test_nothing_is_nothing() -> None:
    assert of_scheduler(None) is None
    assert of_worker(None, rank="pp0tp0", busy_s=0.0, collected_s=0.0) is None
    assert KvxferStats().is_empty()
    assert KvxferStats().reduce() == {"Transfers": 0, "MB": 0.0, "GB/s (wall)": 0.0}
    made = worker(report())
    made.reset()
    assert made.is_empty()
    assert rebuilt({"a": 3, "b": {"c": "d"}, "e": {"f": 1}}).data == {"e": {"f": 1}}


def test_metrics() -> None:
    registry = CollectorRegistry()

    def bound(kind: Any) -> Any:
        return lambda **arguments: kind(**arguments, registry=registry)

    metrics = KvxferConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: bound(Gauge), Counter: bound(Counter), Histogram: bound(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    for number in "01":  # known before it is counted: an alert sees the first one
        zero = registry.get_sample_value(
            "vllm:kvxfer_pairs_unusable_total", {"model_name": "m", "engine": number}
        )
        assert zero == 0
    made = worker(report(), report(1))
    made.data["counts"]["requests.loaded"] = 2
    made.data["counts"]["pairs.unusable"] = 1
    made.data["failed"] = {"deadline": 1}
    made.data["plain"] = {"role": 4}
    metrics.observe(made.to_dict(), 1)
    metrics.observe({}, 0)
    labels = {"model_name": "m", "engine": "1"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"vllm:kvxfer_{name}", labels | more)

    assert value("requests_loaded_total") == 2
    assert value("pairs_unusable_total") == 1
    assert value("loaded_bytes_total") == 2_000_000
    assert value("requests_failed_total", reason="deadline") == 1
    assert value("requests_plain_total", reason="role") == 4
    assert value("offers_broken_total", reason="expired") == 3
    assert value("load_seconds_count", phase="read") == 2
    assert value("load_seconds_sum", phase="read") == pytest.approx(0.04, rel=0.1)
    assert value("load_seconds_count", phase="total") == 2
