"""Which wire is taken, and why not another."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import pytest
import torch

from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import plain_info
from kvxfer.transfer.costs import Staging, StagingBounds, WireCosts, Workload
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transports.base import SinkTransport, Trial
from kvxfer.transports.probe import Choice, probe
from tests.helpers import Opened
from tests.transports.pair import CONFIG, Pair

MIB = 1 << 20
MEASURED = msgspec.structs.replace(CONFIG, staging_slots=None)
WORKLOAD = Workload(256 * MIB, 64 << 10)
"""2048 tokens of an 8B model."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(MEASURED)
    yield pair
    pair.close()


def _probe_beside_a_running_source(pair: Pair, min_gbps: float | None = None) -> Choice:
    """The probe blocks, so it runs beside the source's loop, as it does in life."""
    results: list[Choice | Exception] = []

    def run() -> None:
        try:
            results.append(
                probe(pair.sinks, pair.manifest, WORKLOAD, min_gbps=min_gbps, timeout_s=2.0)
            )
        except TransportUnavailable as exc:
            results.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    pair.until(lambda: not thread.is_alive())
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def test_both_wires_are_measured_and_the_faster_one_is_taken(pair: Pair) -> None:
    choice = _probe_beside_a_running_source(pair)
    assert choice.costs.gb_per_s > 0.05
    (other,) = choice.reasons
    assert {choice.transport, other} == {"shm", "zmq"}
    if choice.transport == "shm":  # which a machine with other work may keep from being so
        assert choice.staging is None
        assert choice.chunk_nbytes(64 * MIB) == 0
        assert re.fullmatch(
            r"shm at [\d.]+ GB/s, \d+ us: 2048 tokens \(256 MiB\) in [\d.]+ ms; "
            r"not zmq: (not tried, because shm takes [\d.]+ ms for 2048 tokens"
            r"|[\d.]+ ms instead of [\d.]+ for 2048 tokens"
            r"(, expected less than 0\.25 of a direct wire's)?|.* got no answer)",
            str(choice),
        )


def test_zmq_is_taken_where_shm_cannot_be_and_says_why(pair: Pair) -> None:
    handle = pair.manifest.memories[0].handle
    assert handle is not None
    elsewhere = msgspec.structs.replace(
        pair.manifest.memories[0], handle=msgspec.structs.replace(handle, boot_id="elsewhere")
    )
    pair.manifest = msgspec.structs.replace(pair.manifest, memories=(elsewhere,))
    choice = _probe_beside_a_running_source(pair)
    assert choice.transport == "zmq"
    assert choice.costs.gb_per_s > 0.01
    assert choice.reasons["shm"].startswith("expected a peer on this host")
    assert re.match(
        r"zmq over a Unix socket at [\d.]+ GB/s, \d+ us: 2048 tokens \(256 MiB\) in [\d.]+ ms in "
        r"chunks of [\d.]+ [MK]iB, \d+ slots of [\d.]+ [MK]iB; not shm: expected a peer",
        str(choice),
    )
    assert choice.staging is not None
    assert choice.staging.num_slots * choice.staging.slot_nbytes <= 32 * MIB
    assert choice.chunk_nbytes(1) <= choice.chunk_nbytes(1 << 34) <= choice.staging.slot_nbytes


def test_slow_peers_are_refused_by_policy(pair: Pair) -> None:
    with pytest.raises(TransportUnavailable) as refusal:
        _probe_beside_a_running_source(pair, min_gbps=1e6)
    assert "shm: expected at least min_gbps 1000000.0 GB/s, got" in str(refusal.value)
    assert "zmq: expected at least min_gbps 1000000.0 GB/s, got" in str(refusal.value)


def test_a_named_wire_that_does_not_work_is_an_error(pair: Pair) -> None:
    plain = msgspec.structs.replace(
        pair.manifest, memories=(plain_info(torch.zeros(5, dtype=torch.uint8)),)
    )
    with pytest.raises(TransportUnavailable, match="5701: expected a wire .* shm: .* got none"):
        probe({"shm": pair.sinks["shm"]}, plain, WORKLOAD)


def test_a_peer_that_does_not_answer_is_given_up(pair: Pair) -> None:
    # Nobody drives the source here: it is connected to, and silent.
    with pytest.raises(TransportUnavailable, match=r"within 0\.2 s, got no answer"):
        probe({"zmq": pair.sinks["zmq"]}, pair.manifest, WORKLOAD, timeout_s=0.2)


def test_no_candidates(pair: Pair) -> None:
    with pytest.raises(TransportUnavailable, match="got none: no candidates"):
        probe({}, pair.manifest, WORKLOAD)


# ------------------------------------------------------------------ what made-up costs lead to

NOWHERE = RankManifest(
    rank=RankId(0, 0), control_endpoint="tcp://h:1", data_endpoints={}, memories=(), regions=()
)
SLOW, MIDDLE, FAST = (WireCosts(1e-4, 1e-4, gbps * 1e9) for gbps in (1, 2, 8))
HOST = StagingBounds(32 * MIB, 8 * MIB)


@dataclass
class Wire:
    """As much of a sink as the probe uses."""

    costs: WireCosts | str
    bounds: StagingBounds | None = None
    is_dear: bool = False
    limits_s: list[float] = field(default_factory=list)
    held: list[Opened] = field(default_factory=list)

    @property
    def is_stream(self) -> bool:
        return self.bounds is not None

    def trial(self, source: RankManifest, timeout_s: float) -> Trial:
        self.limits_s.append(timeout_s)
        if isinstance(self.costs, str):
            raise TransportUnavailable(self.costs)
        self.held.append(Opened())
        return Trial(self.costs, held=(self.held[-1],))

    def staging_bounds(self, source: RankManifest) -> StagingBounds | None:
        return self.bounds


def choose(wires: dict[str, Wire], **settings: Any) -> Choice:
    return probe(cast("dict[str, SinkTransport]", wires), NOWHERE, WORKLOAD, **settings)


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")])
def test_the_choice_follows_the_costs_and_not_the_order(names: tuple[str, ...]) -> None:
    for fastest in names:
        wires = {name: Wire(FAST if name == fastest else SLOW, HOST) for name in names}
        choice = choose(wires)
        assert choice.transport == fastest
        assert choice.duration_s == FAST.stream_s(256 * MIB, choice.chunk_nbytes(256 * MIB))
        assert set(choice.reasons) == set(names) - {fastest}


def test_what_trials_hold_is_closed_but_for_the_wire_that_is_taken() -> None:
    wires = {
        "slow": Wire(SLOW, HOST),
        "fast": Wire(FAST, HOST),
        "none": Wire("not here"),
        "below": Wire(replace(FAST, bytes_per_s=1e6)),
    }
    choice = choose(wires, min_gbps=0.5)
    left = {name: [held.is_open for held in wire.held] for name, wire in wires.items()}
    assert (choice.transport, left) == (
        "fast",
        {"slow": [False], "fast": [True], "none": [], "below": [False]},
    )
    choice.trial.close()
    assert [held.is_open for held in wires["fast"].held] == [False]


def test_what_trials_hold_is_closed_where_no_wire_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"slow": Wire(SLOW), "other": Wire(MIDDLE, HOST)}
    with pytest.raises(TransportUnavailable, match="min_gbps"):
        choose(slow, min_gbps=5.0)
    assert [held.is_open for wire in slow.values() for held in wire.held] == [False, False]
    wire = Wire(FAST)
    other = Wire(FAST)
    monkeypatch.setattr(other, "trial", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        choose({"wire": wire, "other": other})
    assert [held.is_open for held in wire.held] == [False]


# A direct wire takes 400 ms for 256 MiB; a stream has two chunks of 256 KiB on top, so 256.5 MiB
DIRECT_400_MS = WireCosts(0.0, 0.0, 256 * MIB * 2.5)
STREAM_99_MS, STREAM_101_MS = (WireCosts(0.0, 0.0, 256.5 * MIB / s) for s in (0.099, 0.101))


@pytest.mark.parametrize("is_direct_first", [True, False])
def test_a_stream_is_taken_before_a_direct_wire_below_a_quarter_of_its_time(
    is_direct_first: bool,
) -> None:
    def race(direct: WireCosts, stream: WireCosts) -> Choice:
        wires = {"direct": Wire(direct), "stream": Wire(stream, HOST)}
        order = sorted(wires, reverse=not is_direct_first)
        return choose({name: wires[name] for name in order})

    choice = race(DIRECT_400_MS, STREAM_99_MS)
    assert (choice.transport, choice.is_stream) == ("stream", True)
    assert choice.reasons == {"direct": "400 ms instead of 99 for 2048 tokens"}
    choice = race(DIRECT_400_MS, STREAM_101_MS)
    assert (choice.transport, choice.is_stream) == ("direct", False)
    reason = "101 ms instead of 400 for 2048 tokens, expected less than 0.25 of a direct wire's"
    assert choice.reasons == {"stream": reason}
    assert str(choice).endswith(f"; not stream: {reason}")
    # A busy GPU: the direct wire's trial was wrong by three
    assert race(SLOW, replace(SLOW, bytes_per_s=3e9)).transport == "direct"
    assert race(FAST, FAST).transport == "direct"
    # The latency of its copies is a stream's as well, twice, and no reason to leave a direct wire
    assert race(replace(FAST, latency_s=2.0), SLOW).transport == "direct"
    choice = race(replace(DIRECT_400_MS, latency_s=0.02), STREAM_99_MS)
    assert choice.transport == "direct"  # else 99 would be less than a quarter of 420
    assert choice.reasons["stream"].startswith("139 ms instead of 420 for 2048 tokens, expected")
    a_little = replace(DIRECT_400_MS, latency_s=0.002)
    assert race(a_little, replace(STREAM_99_MS, bytes_per_s=2.8e9)).transport == "stream"


def test_the_margin_is_between_kinds_and_not_within_one() -> None:
    streams = {"s1": Wire(STREAM_101_MS, HOST), "s2": Wire(STREAM_99_MS, HOST)}
    assert choose(streams).transport == "s2"
    slower = replace(DIRECT_400_MS, bytes_per_s=DIRECT_400_MS.bytes_per_s * 0.99)
    directs = {"d1": Wire(slower), "d2": Wire(DIRECT_400_MS)}
    assert choose(directs).transport == "d2"
    # The faster stream against the faster direct wire: 99 ms and 400, not 101 or 404
    choice = choose({**directs, **streams})
    assert choice.transport == "s2"
    assert choice.reasons == {
        "d1": "404 ms instead of 99 for 2048 tokens",
        "d2": "400 ms instead of 99 for 2048 tokens",
        "s1": "101 ms instead of 99 for 2048 tokens",
    }
    # What is refused by policy is no direct wire that works
    choice = choose({"d": Wire(DIRECT_400_MS), "s": Wire(STREAM_101_MS, HOST)}, min_gbps=1.0)
    assert choice.transport == "s"


def test_reasons_by_hand() -> None:
    choice = choose(
        {
            "a": Wire(WireCosts(0.0, 0.0, 256 * MIB * 10.0)),
            "b": Wire(WireCosts(0.0, 0.0, 256 * MIB * 4.0)),
            "c": Wire("c: expected a cable, got none"),
            "d": Wire(WireCosts(0.0, 0.0, 1e6)),
        },
        min_gbps=0.01,
    )
    assert choice.reasons == {
        "b": "250 ms instead of 100 for 2048 tokens",
        "c": "expected a cable, got none",
        "d": "expected at least min_gbps 0.01 GB/s, got 0.001",
    }
    assert str(choice) == (
        "a at 2.68 GB/s, 0 us: 2048 tokens (256 MiB) in 100 ms; "
        "not c: expected a cable, got none; "
        "not d: expected at least min_gbps 0.01 GB/s, got 0.001; "
        "not b: 250 ms instead of 100 for 2048 tokens"
    )


def test_staging_is_chosen_and_settings_are_kept_to() -> None:
    wire = Wire(WireCosts(300e-6, 200e-6, 3e9), HOST)
    choice = choose({"s": wire})
    # 64 MiB: sqrt(64 MiB x 200 us x 3 GB/s / 2) is 4.3 MiB
    assert [choice.chunk_nbytes(n * MIB) // MIB for n in (16, 64, 1024)] == [2, 4, 4]
    assert choice.staging == Staging(7, 4 * MIB, None)  # 1.8 MB on their way
    assert "in chunks of 4 MiB, 7 slots of 4 MiB" in str(choice)
    wire.bounds = replace(HOST, chunk_nbytes=12345, num_slots=3)
    choice = choose({"s": wire})
    assert choice.staging == Staging(3, 64 << 10, 12345)  # a slot holds a block
    assert choice.chunk_nbytes(1) == choice.chunk_nbytes(1 << 40) == 12345
    wire.bounds = StagingBounds(100_000, 8 * MIB, is_limit=True)
    with pytest.raises(
        TransportUnavailable,
        match="s: staging_nbytes: expected room for 2 chunks of 65536 bytes, got 100000",
    ):
        choose({"s": wire})


def test_dear_wires_are_tried_only_where_no_direct_wire_works() -> None:
    dear = Wire(FAST, HOST, is_dear=True)
    choice = choose({"dear": dear, "stream": Wire(MIDDLE, HOST), "direct": Wire(SLOW)})
    assert choice.transport == "direct"
    assert choice.reasons["dear"] == "not tried, because a direct wire works"
    assert dear.limits_s == []
    broken = Wire("direct: broken")
    choice = choose({"direct": broken, "dear": dear, "stream": Wire(MIDDLE, HOST)})
    assert choice.transport == "dear"
    assert choice.reasons["direct"] == "broken"
    # One that is too slow does not count as one that works
    assert choose({"direct": Wire(SLOW), "dear": dear}, min_gbps=2).transport == "dear"


@pytest.mark.parametrize(("latency_s", "is_tried"), [(0.030, True), (0.032, False)])
def test_a_stream_is_not_tried_whose_copies_alone_take_too_long(
    latency_s: float, is_tried: bool
) -> None:
    """13.4 ms for the bytes and twice the latency, of a quarter of 268 ms and once the latency."""
    stream = Wire(MIDDLE, HOST)
    assert choose({"d": Wire(WireCosts(latency_s, 0.0, 1e9)), "s": stream}).transport == "d"
    assert bool(stream.limits_s) is is_tried


def test_a_stream_is_not_tried_that_could_not_be_taken_any_more() -> None:
    """256 MiB at 20 GB/s are 13.4 ms: a quarter of what a direct wire of 5 GB/s takes."""
    for gbps, is_tried in ((4.9, True), (5.1, False)):
        stream = Wire(MIDDLE, HOST)
        direct = Wire(WireCosts(0.0, 0.0, gbps * 1e9))
        choice = choose({"stream": stream, "direct": direct})  # direct wires come first
        assert choice.transport == "direct"
        assert bool(stream.limits_s) is is_tried
    assert choice.reasons == {
        "stream": "not tried, because direct takes 52.6 ms for 2048 tokens",
    }
    # One that is refused by policy, or does not work, keeps nobody from being tried
    wires = {"direct": Wire(WireCosts(0.0, 0.0, 5.1e9)), "stream": Wire(FAST, HOST)}
    assert choose(wires, min_gbps=6.0).transport == "stream"
    # Nor do direct wires keep each other
    others = {"slow": Wire(WireCosts(0.0, 0.0, 5.1e9)), "fast": Wire(FAST)}
    assert choose(others).transport == "fast"


def test_time_for_each_candidate() -> None:
    """Once a direct wire works the others get little; the last hope gets all that is left."""
    wires = {"a": Wire("no"), "b": Wire(SLOW), "c": Wire("no", HOST)}
    choose(wires, timeout_s=2.0, last_timeout_s=60.0)
    assert [wire.limits_s for wire in wires.values()] == [[2.0], [2.0], [0.25]]
    wires = {"a": Wire("no"), "b": Wire("no", HOST)}
    with pytest.raises(TransportUnavailable, match="a: no; b: no"):
        choose(wires, timeout_s=2.0, last_timeout_s=6.5)
    assert wires["a"].limits_s == [2.0]
    assert 6.0 < wires["b"].limits_s[0] <= 6.5
    wires = {"a": Wire(SLOW, HOST), "b": Wire("no", HOST)}
    choose(wires, timeout_s=2.0, last_timeout_s=1.0)
    assert all(0.5 < wire.limits_s[0] <= 1.0 for wire in wires.values())
