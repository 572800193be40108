"""What is exported: names, labels, and how the numbers of ranks and steps are joined."""

from __future__ import annotations

import ast
import re
from collections import Counter as Bag
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import prometheus_client as client
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvxfer
from kvxfer.connector.metrics import (
    BOUNDS_S,
    BY_NAME,
    MAX_PEERS,
    METRICS,
    OTHER,
    PHASES,
    Exporter,
    Kind,
    Tables,
    add,
    bucket_of,
    key,
    middle_of,
    of_scheduler,
    of_worker,
    phases_of,
    place_of,
    quantile,
    times_of,
)
from kvxfer.connector.records import KVConnectorStats, LoadReport
from kvxfer.transfer.wire import Reason
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, until

ONE = EngineShape(num_kv_heads=2, num_blocks=8)
TWO = EngineShape(tp_size=2, num_kv_heads=2, num_blocks=8)

# ------------------------------------------------------------------ the declaration


def test_names_are_as_prometheus_wants_them() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_created"))
        assert metric.exported.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.text.endswith(".")
        assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
        if metric.unit in ("bytes", "seconds"):
            assert metric.name.endswith(f"_{metric.unit}")
        assert not (metric.known and len(metric.labels) != 1)
        if metric.kind is Kind.GAUGE:  # or ranks would overwrite each other
            assert "rank" in metric.labels


@pytest.mark.parametrize(
    ("count", "name", "labels"),
    [
        ("requests.loaded", "requests_loaded", ()),
        ("offers.opened", "offers_opened", ()),
        ("refused.transport", "refusals", ("transport",)),
        ("verdict.valid", "verdicts", ("valid",)),
        ("peers.ready", "peers_met", ()),
        ("peers.peer_lost", "peers_lost", ("peer_lost",)),
        ("peers.crowded", "peers_lost", ("crowded",)),
        ("connections.refused.key", "connections_refused", ("key",)),
        ("zmq.refused.handshake", "connections_refused", ("handshake",)),
        ("zmq.refused", "wire_problems", ("zmq", "refused")),
        ("cuda_ipc.gpu_broken", "wire_problems", ("cuda_ipc", "gpu_broken")),
        ("ucx.too_much_staging", "staging_refused", ("ucx",)),
        ("sent.nbytes.nixl", "sent_bytes", ("nixl",)),
        ("trials.shm.taken", "trials", ("shm", "taken")),
        ("board.full", "board_events", ("full",)),
        ("boards.seen", "board_events", ("seen",)),
        ("keep.not_granted", "control_problems", ("keep_not_granted",)),
        ("control.late", "control_problems", ("control_late",)),
        ("aborts.late", "control_problems", ("aborts_late",)),
        ("claims.lost", "claims_dropped", ("lost",)),
        ("io.errors", "internal_errors", ("io_errors",)),
        ("loads.undrained", "loads_undrained", ()),
    ],
)
def test_where_a_count_goes(count: str, name: str, labels: tuple[str, ...]) -> None:
    assert place_of(count) == (name, key(*labels))
    assert len(labels) == len(BY_NAME[name].labels)


def _text(node: ast.expr) -> str:
    """A count's name; every part that is worked out is one word."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr), ast.dump(node)
    return "".join(str(v.value) if isinstance(v, ast.Constant) else "word" for v in node.values)


def _counted() -> Iterator[tuple[str, str]]:
    """(file, name of a count) for all that is counted in the package."""
    for path in sorted(Path(kvxfer.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "count"
                and ast.unparse(node.func.value).endswith("ledger")
            ):
                names = [node.args[0]]
                if isinstance(names[0], ast.IfExp):
                    names = [names[0].body, names[0].orelse]
                for name in names:
                    if isinstance(name, ast.Constant | ast.JoinedStr):
                        yield path.name, _text(name)
            elif (
                isinstance(node, ast.Subscript)
                and ast.unparse(node.value) == "self.counts"
                and isinstance(node.slice, ast.Constant)
            ):
                yield path.name, f"zmq.{node.slice.value!s}"


def test_whatever_is_counted_is_exported() -> None:
    found = list(_counted())
    assert len(found) > 70
    for file, name in found:
        place = place_of(name)
        if place is None:
            assert name in {"offers.broken"}, name  # its reasons have it
        elif place[0] == "wire_problems":
            assert file.startswith(("stream_", "cuda_ipc", "shm_")), f"{file}: {name}"


# ------------------------------------------------------------------ tables


def report(**fields: object) -> LoadReport:
    moments = {"handed_s": 10.0, "started_s": 11.0, "granted_s": 13.0, "placed_s": 17.0}
    usual = {
        "request_id": "r",
        "reason": None,
        "nbytes": 1000,
        "peer": "tcp://10.0.0.1:5700",
        "transports": ("shm",),
        "finished_s": 25.0,
    }
    return LoadReport(**(moments | usual | fields))  # type: ignore[arg-type]


def test_the_phases_of_a_load() -> None:
    assert phases_of(report(), 41.0) == {
        "queue": 1.0,
        "ask": 2.0,
        "read": 4.0,
        "verdict": 8.0,
        "pickup": 16.0,
    }
    null = report(granted_s=0.0, placed_s=0.0)
    assert phases_of(null, 41.0)["verdict"] == 14.0
    nothing = report(started_s=0.0, granted_s=0.0, placed_s=0.0)
    assert phases_of(nothing, 41.0) == dict.fromkeys(PHASES, 0.0) | {"queue": 15.0, "pickup": 16.0}


def test_what_a_rank_counted() -> None:
    stats = KVConnectorStats(
        counts={"offers.opened": 2, "loads.nbytes": 99, "refused.plan": 1},
        reasons={"expired": 3, "peer_lost": 1},
        loads=(report(), report(transports=("shm", "zmq")), report(reason=Reason.PEER_LOST)),
        gauges={key("offers_held", "pp0tp1"): 4},
    )
    tables = of_worker(stats, 26.0)
    peer = "10.0.0.1:5700"
    times = tables.pop("load_seconds")
    assert sum(times.values()) == 2 * (len(PHASES) + 1)
    assert tables == {
        "offers_opened": {"": 2},
        "refusals": {"plan": 1},
        "loads": {key(peer, "shm"): 1, key(peer, "shm+zmq"): 1},
        "loaded_bytes": {key(peer, "shm"): 1000, key(peer, "shm+zmq"): 1000},
        "read_seconds": {key(peer, "shm"): 4.0, key(peer, "shm+zmq"): 4.0},
        "loads_failed": {key(peer, "peer_lost"): 1},
        "offers_broken": {"expired": 3},
        "offers_held": {"pp0tp1": 4},
    }


def test_what_a_scheduler_counted() -> None:
    stats = KVConnectorStats(
        counts={"requests.loaded": 5}, reasons={"role": 2, "deadline": 3}, failed={"deadline": 2}
    )
    assert of_scheduler(stats) == {
        "requests_loaded": {"": 5},
        "requests_failed": {"deadline": 2},
        "requests_plain": {"role": 2, "deadline": 1},
    }


_numbers = st.integers(0, 1000)
_tables = st.fixed_dictionaries(
    {},
    optional={
        "offers_done": st.fixed_dictionaries({"": _numbers}),
        "refusals": st.dictionaries(st.sampled_from(["plan", "ended"]), _numbers),
        "offers_held": st.dictionaries(st.sampled_from(["pp0tp0", "pp0tp1"]), _numbers),
    },
)


@given(st.lists(_tables, max_size=6), st.integers(0, 6))
def test_steps_are_joined_in_any_grouping(steps: list[Tables], cut: int) -> None:
    """Counters: sums. Gauges: the last value of each rank."""
    counters: Bag[tuple[str, str]] = Bag()
    gauges: dict[tuple[str, str], float] = {}
    for step in steps:
        for name, numbers in step.items():
            for labels, number in numbers.items():
                if name == "offers_held":
                    gauges[name, labels] = number
                else:
                    counters[name, labels] += int(number)
    first: Tables = {}
    second: Tables = {}
    for step in steps[:cut]:
        add(first, step)
    for step in steps[cut:]:
        add(second, step)
    add(first, second)
    found = {(n, labels): number for n, table in first.items() for labels, number in table.items()}
    assert found == {**counters, **gauges}


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e-5, 3e-4, 0.02, 1.0, 77.0, 1e4])
def test_buckets_are_within_nine_percent(seconds: float) -> None:
    middle = middle_of(bucket_of(seconds))
    assert middle == pytest.approx(max(seconds, 1e-5), rel=0.1)
    assert seconds <= 1e-5 or [seconds > b for b in BOUNDS_S] == [middle > b for b in BOUNDS_S]


def test_quantiles() -> None:
    buckets = {bucket_of(0.001): 90.0, bucket_of(1.0): 10.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.001, rel=0.1)
    assert quantile(buckets, 0.9) == pytest.approx(0.001, rel=0.1)
    assert quantile(buckets, 0.91) == pytest.approx(1.0, rel=0.1)
    tables = of_worker(KVConnectorStats(loads=(report(), report())), 26.0)
    assert times_of(tables, "read") == {bucket_of(4.0): 2}


# ------------------------------------------------------------------ the exporter


def exporter(registry: client.CollectorRegistry) -> Exporter:
    kinds = {
        Kind.COUNTER: client.Counter,
        Kind.GAUGE: client.Gauge,
        Kind.HISTOGRAM: client.Histogram,
    }
    made = {kind: partial(each, registry=registry) for kind, each in kinds.items()}
    return Exporter(made, "kvxfer_", ["engine"], [["0"]])


def test_every_metric_is_exported_with_its_labels() -> None:
    registry = client.CollectorRegistry()
    made = exporter(registry)
    tables: Tables = {}
    for metric in METRICS:
        values = [*metric.labels, *(["7"] if metric.kind is Kind.HISTOGRAM else [])]
        tables[metric.name] = {key(*values): 2}
    made.observe(tables, ["0"])
    families = {family.name: family for family in registry.collect()}
    assert families.keys() == {f"kvxfer_{metric.name}" for metric in METRICS}
    for metric in METRICS:
        family = families[f"kvxfer_{metric.name}"]
        assert (family.type, family.documentation) == (metric.kind.value, metric.text)
        labels = {"engine": "0"} | {label: label for label in metric.labels}
        if metric.name in ("loads_failed",):
            labels["peer"] = "peer"  # met, as others say
        suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[metric.kind]
        assert registry.get_sample_value(family.name + suffix, labels) == 2, metric.name


def test_known_reasons_are_there_from_the_start() -> None:
    registry = client.CollectorRegistry()
    exporter(registry)
    for metric, reason in [
        ("requests_failed", "peer_lost"),
        ("connections_refused", "key"),
        ("staging_refused", "zmq"),
    ]:
        (label,) = BY_NAME[metric].labels
        labels = {"engine": "0", label: reason}
        assert registry.get_sample_value(f"kvxfer_{metric}_total", labels) == 0
    assert registry.get_sample_value("kvxfer_loads_undrained_total", {"engine": "0"}) == 0


def test_peers_have_series_of_their_own_up_to_a_bound() -> None:
    registry = client.CollectorRegistry()
    made = exporter(registry)
    for number in range(MAX_PEERS + 10):
        made.observe(
            {
                "loads_failed": {key(f"stranger:{number}", "peer_lost"): 1},
                "loads": {key(f"h:{number}", "shm"): 1},
                "wire_bytes_per_second": {key("pp0tp0", f"h:{number}", "shm"): 5},
            },
            ["0"],
        )
    made.observe({"loads_failed": {key("h:3", "expired"): 4}}, ["0"])

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvxfer_{name}", {"engine": "0"} | labels)

    assert value("loads_total", peer="h:3", wire="shm") == 1
    assert value("loads_total", peer=OTHER, wire="shm") == 10
    assert value("loads_failed_total", peer=OTHER, reason="peer_lost") == MAX_PEERS + 10
    assert value("loads_failed_total", peer="h:3", reason="expired") == 4
    wires = value("wire_bytes_per_second", rank="pp0tp0", peer=OTHER, wire="shm")
    assert wires is None
    peers = {s.labels["peer"] for f in registry.collect() for s in f.samples if "peer" in s.labels}
    assert len(peers) == MAX_PEERS + 1


def test_what_is_no_metric_is_left_out() -> None:
    registry = client.CollectorRegistry()
    exporter(registry).observe({"busy_s": {"pp0tp0": 3.0}}, ["0"])
    assert not [f.name for f in registry.collect() if "busy" in f.name]


# ------------------------------------------------------------------ ranks


def gauges(engine: Engine) -> dict[tuple[str, str], float]:
    found = {}
    for place, value in engine.take_stats().gauges.items():
        name, _, labels = place.partition("\x1f")
        found[name, labels.replace("\x1f", " ")] = value
    return found


def expect_gauges(engine: Engine, rank: str, **expected: int) -> None:
    """Each rank is read by itself, a moment after the one before it."""
    wanted = {(name, rank): value for name, value in expected.items()}
    until(lambda: wanted.items() <= gauges(engine).items())


def test_gauges_of_ranks_follow_what_they_hold() -> None:
    wire: dict[str, str] = {"transport": "zmq"}
    with (
        Engine(TWO, "prefill", fill=1, **wire) as source,  # type: ignore[arg-type]
        Engine(ONE, "decode", fill=POISON, **wire) as sink,  # type: ignore[arg-type]
    ):
        refs = [source.offer(name, 32, ids) for name, ids in (("p", [1, 2]), ("q", [3, 4]))]
        source.compute("p", "q")
        for rank in ("pp0tp0", "pp0tp1"):
            expect_gauges(source, rank, offers_held=2, blocks_held=4, board_on=0)  # no direct wire
        sink.load("d", refs[0], [3, 4], (0, 32))
        until(lambda: source.sent("p"))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        for rank in ("pp0tp0", "pp0tp1"):
            expect_gauges(source, rank, offers_held=1, blocks_held=2)
        until(lambda: gauges(source)["staging_bytes", "pp0tp0 source zmq"] > 0)
        until(lambda: gauges(sink)["staging_bytes", "pp0tp0 sink zmq"] > 0)
        peer = source.endpoint.removeprefix("tcp://")
        until(lambda: gauges(sink)["wire_bytes_per_second", f"pp0tp0 {peer} zmq"] > 1e6)
        expect_gauges(sink, "pp0tp0", peers_ready=1, loads_in_flight=0)
        assert sink.count("trials.zmq.taken") == 2  # of each source rank
        assert source.count("sent.nbytes.zmq") == sum(r.nbytes for r in sink.reports("d"))
        source.end("q")
        until(lambda: source.sent("q"))
        expect_gauges(source, "pp0tp0", blocks_held=0)


def test_a_lost_peer_has_no_speed_any_more() -> None:
    with Engine(ONE, "decode", fill=POISON) as sink:
        with Engine(ONE, "prefill", fill=1) as source:
            ref = source.offer("p", 16, [1])
            source.compute("p")
            sink.load("d", ref, [3], (0, 16))
            until(lambda: sink.received("d"))
            speed = "wire_bytes_per_second", f"pp0tp0 {source.endpoint.removeprefix('tcp://')} shm"
            until(lambda: gauges(sink)[speed] > 0)
            expect_gauges(sink, "pp0tp0", boards_open=1)
            expect_gauges(source, "pp0tp0", board_on=1)
        until(lambda: gauges(sink)[speed] == 0)
        expect_gauges(sink, "pp0tp0", peers_ready=0, boards_open=0)


def test_an_extended_lease_is_counted() -> None:
    with (
        Engine(ONE, "prefill", fill=1, lease_s=300.0) as source,
        Engine(ONE, "decode", fill=POISON, keep_s=0.05, lease_s=300.0) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.hold("d", ref)
        until(lambda: source.count("leases.extended") >= 2)
        assert source.count("leases.lapsed") == 0


def test_a_lapsed_lease_is_counted() -> None:
    with Engine(ONE, "prefill", fill=1, lease_s=0.2, keep_s=0.1) as source:
        source.offer("q", 16, [2])
        source.compute("q")
        until(lambda: source.sent("q"))
        assert source.count("leases.lapsed") == 1
        assert of_worker(source.stats, 0.0)["offers_broken"] == {"expired": 1}


def test_a_rank_that_does_nothing_tells_nothing() -> None:
    with Engine(ONE, "prefill", fill=1) as source:
        (worker,) = source.workers
        until(lambda: source.take_stats().gauges)

        def is_quiet() -> bool:
            return worker.get_kv_connector_stats() is None

        until(is_quiet)
        assert is_quiet()
