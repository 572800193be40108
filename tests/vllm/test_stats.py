"""Counts and times from the ranks to the log line and the metrics."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvxfer.connector.metrics import PHASES, key
from kvxfer.connector.records import KVConnectorStats, LoadReport
from kvxfer.transfer.wire import Reason

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM loads parts of torch that other parts call deprecated
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats as VllmStats

    from kvxfer.integrations.vllm.connector import KvxferConnector
    from kvxfer.integrations.vllm.stats import Calm, KvxferStats, of_scheduler, of_worker, rebuilt

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def report(number: int = 0, reason: Reason | None = None, read_s: float = 0.02) -> LoadReport:
    start = 100.0 + number
    return LoadReport(
        request_id=f"r{number}",
        reason=reason,
        nbytes=1_000_000,
        handed_s=start,
        started_s=start + 0.001,
        granted_s=start + 0.001,
        placed_s=start + 0.001 + read_s,
        finished_s=start + 0.001 + read_s + 0.0005,
        peer="tcp://10.0.0.1:5700",
        transports=("shm",),
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


def test_steps_that_tell_nothing_until_a_first_token_is_out() -> None:
    now_s = [50.0]
    calm = Calm(lambda: now_s[0])
    loads = [False, True, False, False, False, False, True, False, True, False, False, False]
    tells = [calm.is_now(has_loaded=each) for each in loads]
    assert [place for place, is_so in enumerate(tells) if is_so] == [0, 4, 5, 11]


def test_an_engine_whose_loads_never_end_tells_once_a_second() -> None:
    now_s = [50.0]
    calm = Calm(lambda: now_s[0])
    told_s = []
    for number in range(350):
        now_s[0] = 50.0 + number / 100
        if calm.is_now(has_loaded=number % 3 == 0):
            told_s.append(now_s[0])
    assert told_s == pytest.approx([51.0, 52.0, 53.0])


def test_one_load() -> None:
    data = worker(report()).data
    peer = key("10.0.0.1:5700", "shm")
    assert data["loaded_bytes"] == {peer: 1_000_000}
    assert data["loads"] == {peer: 1}
    assert data["read_seconds"] == {peer: pytest.approx(0.02)}
    phases = {labels.split("\x1f")[0] for labels in data["load_seconds"]}
    assert phases == {"total", *PHASES}
    assert data["offers_broken"] == {"expired": 3}
    assert data["busy_s"] == {"pp0tp0": 0.1}


def test_failed_loads_have_no_times_and_are_not_broken_offers() -> None:
    data = worker(report(reason=Reason.PEER_LOST), report(1)).data
    assert sum(data["load_seconds"].values()) == len(PHASES) + 1
    assert data["loads_failed"] == {key("10.0.0.1:5700", "peer_lost"): 1}
    assert data["loaded_bytes"] == {key("10.0.0.1:5700", "shm"): 1_000_000}
    assert data["offers_broken"] == {"expired": 3}


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


def test_what_gathers_is_bounded() -> None:
    total = worker(report())
    for number in range(2000):
        total.aggregate(worker(report(number % 7, read_s=1e-6 * 1.01**number)))
    assert sum(total.data["load_seconds"].values()) == 2001 * (len(PHASES) + 1)
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
    scheduler = of_scheduler(
        KVConnectorStats(
            counts={"requests.loaded": 2, "pairs.unusable": 1},
            reasons={"deadline": 1, "role": 4},
            failed={"deadline": 1},
        )
    )
    gauges = of_worker(
        KVConnectorStats(gauges={key("offers_held", "pp0tp0"): 3}),
        rank="pp0tp0",
        busy_s=0,
        collected_s=0,
    )
    metrics.observe(made.aggregate(scheduler).aggregate(gauges).to_dict(), 1)
    metrics.observe({}, 0)
    labels = {"model_name": "m", "engine": "1"}
    peer = {"peer": "10.0.0.1:5700", "wire": "shm"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"vllm:kvxfer_{name}", labels | more)

    assert value("requests_loaded_total") == 2
    assert value("pairs_unusable_total") == 1
    assert value("loaded_bytes_total", **peer) == 2_000_000
    assert value("read_seconds_total", **peer) == pytest.approx(0.04)
    assert value("requests_failed_total", reason="deadline") == 1
    assert value("requests_plain_total", reason="role") == 4
    assert value("offers_broken_total", reason="expired") == 3
    assert value("load_seconds_count", phase="read", wire="shm") == 2
    assert value("load_seconds_sum", phase="read", wire="shm") == pytest.approx(0.04, rel=0.1)
    assert value("load_seconds_count", phase="total", wire="shm") == 2
    assert value("offers_held", rank="pp0tp0") == 3
