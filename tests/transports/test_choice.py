"""Which wire is taken, and why not another."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import plain_info
from kvxfer.transfer.costs import Staging, StagingBounds, WireCosts, Workload
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transports import choice as choice_module
from kvxfer.transports.base import ReceivingSink, SinkTransport, Trial
from kvxfer.transports.choice import Choice, choose
from kvxfer.transports.pipe import CHUNK_S, DEVICE_CHUNK_S
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


def _choose_beside_a_running_source(pair: Pair, min_gbps: float | None = None) -> Choice:
    """It blocks, so it runs beside the source's loop, as it does in life."""
    results: list[Choice | Exception] = []

    def run() -> None:
        try:
            results.append(choose(pair.sinks, pair.manifest, WORKLOAD, min_gbps=min_gbps))
        except TransportUnavailable as exc:
            results.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    pair.until(lambda: not thread.is_alive())
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def test_a_direct_wire_that_works_is_taken_and_no_other_is_tried(pair: Pair) -> None:
    choice = _choose_beside_a_running_source(pair)
    assert choice.transport == "shm"
    assert choice.costs.gb_per_s > 0.05
    assert choice.staging is None
    assert choice.chunk_nbytes(64 * MIB) == 0
    assert re.fullmatch(
        r"shm at [\d.]+ GB/s, \d+ us: 2048 tokens \(256 MiB\) in [\d.]+ ms; "
        r"not zmq: not tried, because shm works",
        str(choice),
    )


def test_zmq_is_taken_where_shm_cannot_be_and_says_why(pair: Pair) -> None:
    handle = pair.manifest.memories[0].handle
    assert handle is not None
    elsewhere = msgspec.structs.replace(
        pair.manifest.memories[0], handle=msgspec.structs.replace(handle, boot_id="elsewhere")
    )
    pair.manifest = msgspec.structs.replace(pair.manifest, memories=(elsewhere,))
    choice = _choose_beside_a_running_source(pair)
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
        _choose_beside_a_running_source(pair, min_gbps=1e6)
    assert "shm: expected at least min_gbps 1000000.0 GB/s, got" in str(refusal.value)
    assert "zmq: expected at least min_gbps 1000000.0 GB/s, got" in str(refusal.value)


def test_a_named_wire_that_does_not_work_is_an_error(pair: Pair) -> None:
    plain = msgspec.structs.replace(
        pair.manifest, memories=(plain_info(torch.zeros(5, dtype=torch.uint8)),)
    )
    with pytest.raises(TransportUnavailable, match="5701: expected a wire .* shm: .* got none"):
        choose({"shm": pair.sinks["shm"]}, plain, WORKLOAD)


def test_a_peer_that_does_not_answer_is_given_up(pair: Pair) -> None:
    # Nobody drives the source here: it is connected to, and silent.
    with pytest.raises(TransportUnavailable, match=r"within 0\.2 s, got no answer"):
        choose({"zmq": pair.sinks["zmq"]}, pair.manifest, WORKLOAD, timeout_s=0.2)


def test_a_listener_that_is_no_source_is_no_connection(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoints = {"zmq": f"tcp://127.0.0.1:{mute.getsockname()[1]}"}
        manifest = msgspec.structs.replace(pair.manifest, data_endpoints=endpoints)
        with pytest.raises(TransportUnavailable, match=r"within 0\.2 s, got no connection"):
            choose({"zmq": pair.sinks["zmq"]}, manifest, WORKLOAD, timeout_s=0.2)


def test_no_candidates(pair: Pair) -> None:
    with pytest.raises(TransportUnavailable, match="got none: no candidates"):
        choose({}, pair.manifest, WORKLOAD)


# ------------------------------------------------------------------ what made-up costs lead to

NOWHERE = RankManifest(
    rank=RankId(0, 0), control_endpoint="tcp://h:1", data_endpoints={}, memories=(), regions=()
)
SLOW, MIDDLE, FAST = (WireCosts(1e-4, 1e-4, gbps * 1e9) for gbps in (1, 2, 8))
HOST = StagingBounds(32 * MIB, 8 * MIB)
# 256.5 MiB: two chunks of 256 KiB are packed and unpacked
STREAM_99_MS, STREAM_101_MS = (WireCosts(0.0, 0.0, 256.5 * MIB / s) for s in (0.099, 0.101))


@dataclass
class Wire:
    """As much of a sink as the choice needs."""

    costs: WireCosts | str
    bounds: StagingBounds | None = None
    limits_s: list[float] = field(default_factory=list)
    held: list[Opened] = field(default_factory=list)

    def trial(self, source: RankManifest, timeout_s: float, classes: object) -> Trial:
        self.limits_s.append(timeout_s)
        if isinstance(self.costs, str):
            raise TransportUnavailable(self.costs)
        self.held.append(Opened())
        return Trial(self.costs, held=(self.held[-1],))

    def staging_bounds(self, source: RankManifest) -> StagingBounds | None:
        return self.bounds


class StreamWire(Wire):
    """Of a stream."""


ReceivingSink.register(StreamWire)


def made(costs: WireCosts | str, bounds: StagingBounds | None = None) -> Wire:
    return Wire(costs) if bounds is None else StreamWire(costs, bounds)


def taken(wires: dict[str, Wire], **settings: Any) -> Choice:
    return choose(cast("dict[str, SinkTransport]", wires), NOWHERE, WORKLOAD, **settings)


# ------------------------------------------------------------------ what was measured before

DEVICE = StagingBounds(256 * MIB, 64 * MIB, busy_slots=4)
DEVICE_NIXL = replace(DEVICE, nbytes=192 * MIB)
US = 1e-6


def direct(gbps: float, latency_us: float) -> Wire:
    return made(WireCosts(latency_us * US, 0.0, gbps * 1e9))


def of_hosts(gbps: float, latency_us: float) -> Wire:
    return made(WireCosts(latency_us * US, CHUNK_S, gbps * 1e9), HOST)


def of_gpus(gbps: float, latency_us: float, bounds: StagingBounds) -> Wire:
    return made(WireCosts(latency_us * US, DEVICE_CHUNK_S, gbps * 1e9), bounds)


# scripts/results: transfer_host, link_cpu and connector_*_peer of 2026-11-22. Digits of the slow
# link's rates follow from its durations.
ONE_HOST = {
    "shm": lambda: direct(63.19, 1),
    "zmq": lambda: of_hosts(4.32, 128),
    "ucx": lambda: of_hosts(4.46, 150),
    "nixl": lambda: of_hosts(6.46, 205),
}
SLOW_LINK = {
    "zmq": lambda: of_hosts(0.1165, 2404),
    "ucx": lambda: of_hosts(0.1172, 2427),
    "nixl": lambda: of_hosts(0.11725, 4808),
}
TWO_GPUS = {
    "cuda_ipc": lambda: direct(325.0, 12),
    "zmq": lambda: of_gpus(6.0, 300, HOST),
    "ucx": lambda: of_gpus(124.3, 100, DEVICE),
    "nixl": lambda: of_gpus(88.7, 200, DEVICE_NIXL),
}


@pytest.mark.parametrize(
    ("measured", "names", "chosen", "chunk_mib", "num_slots"),
    [
        (ONE_HOST, "shm zmq", "shm", 0, 0),
        (ONE_HOST, "shm zmq ucx nixl", "shm", 0, 0),
        (ONE_HOST, "zmq", "zmq", 4, 7),
        (ONE_HOST, "ucx", "ucx", 4, 7),
        (ONE_HOST, "nixl", "nixl", 4, 7),
        (ONE_HOST, "zmq ucx nixl", "nixl", 4, 7),
        (SLOW_LINK, "zmq", "zmq", 1, 7),
        (SLOW_LINK, "ucx", "ucx", 1, 7),
        (SLOW_LINK, "nixl", "nixl", 1, 8),
        (TWO_GPUS, "cuda_ipc zmq ucx nixl", "cuda_ipc", 0, 0),
        (TWO_GPUS, "zmq ucx nixl", "ucx", 64, 4),
        (TWO_GPUS, "zmq nixl", "nixl", 32, 6),
        (TWO_GPUS, "zmq", "zmq", 4, 7),
    ],
)
def test_what_follows_from_recorded_measurements(
    measured: Mapping[str, Callable[[], Wire]],
    names: str,
    chosen: str,
    chunk_mib: int,
    num_slots: int,
) -> None:
    choice = taken({name: measured[name]() for name in names.split()})
    assert choice.transport == chosen
    assert choice.chunk_nbytes(WORKLOAD.nbytes) == chunk_mib * MIB
    assert (choice.staging.num_slots if choice.staging is not None else 0) == num_slots


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")])
def test_the_choice_of_streams_follows_the_costs_and_not_the_order(names: tuple[str, ...]) -> None:
    for fastest in names:
        wires = {name: made(FAST if name == fastest else SLOW, HOST) for name in names}
        choice = taken(wires)
        assert choice.transport == fastest
        assert choice.duration_s == FAST.stream_s(256 * MIB, choice.chunk_nbytes(256 * MIB))
        assert set(choice.reasons) == set(names) - {fastest}
    assert taken({name: made(FAST, HOST) for name in names}).transport == names[0]


def test_what_trials_hold_is_closed_but_for_the_wire_that_is_taken() -> None:
    wires = {
        "none": made("not here"),
        "below": made(replace(FAST, bytes_per_s=1e6)),
        "direct": made(SLOW),
    }
    choice = taken(wires, min_gbps=0.5)
    left = {name: [held.is_open for held in wire.held] for name, wire in wires.items()}
    assert choice.transport == "direct"
    assert left == {"none": [], "below": [False], "direct": [True]}
    choice.trial.close()
    assert [held.is_open for held in wires["direct"].held] == [False]
    with pytest.raises(TransportUnavailable, match="min_gbps"):
        taken({"slow": (slow := made(SLOW)), "other": made(MIDDLE, HOST)}, min_gbps=5.0)
    assert [held.is_open for held in slow.held] == [False]
    # A direct wire of another package is tried after the streams, and these may be faster
    choice = taken({"stream": made(FAST, HOST), "other": (other := made(SLOW))})
    assert (choice.transport, choice.reasons) == (
        "stream",
        {"other": "269 ms instead of 41.1 for 2048 tokens"},
    )
    assert [held.is_open for held in other.held] == [False]
    no_room = made(FAST, StagingBounds(100_000, 8 * MIB, is_limit=True))
    with pytest.raises(TransportUnavailable, match="staging_nbytes: expected room"):
        taken({"no room": no_room})
    assert [held.is_open for held in no_room.held] == [False]


def test_all_that_a_trial_holds_is_closed_although_one_raises() -> None:
    class Broken(Opened):
        def close(self) -> None:
            super().close()
            raise TransportUnavailable("cannot be unmapped")

    held = (Opened(), Broken(), Broken(), Opened())
    with pytest.raises(TransportUnavailable, match="cannot be unmapped"):
        Trial(SLOW, held=held).close()
    assert not any(each.is_open for each in held)


def test_a_direct_wire_that_does_not_work_or_is_too_slow_makes_room_for_streams() -> None:
    streams = {"fast": made(FAST, HOST), "slow": made(MIDDLE, HOST)}
    choice = taken({"direct": made("direct: broken"), **streams})
    assert (choice.transport, choice.reasons["direct"]) == ("fast", "broken")
    choice = taken({"direct": made(SLOW), **streams}, min_gbps=1.5)
    assert (choice.transport, choice.reasons) == (
        "fast",
        {
            "direct": "expected at least min_gbps 1.5 GB/s, got 1.000",
            "slow": "145 ms instead of 41.1 for 2048 tokens",
        },
    )
    # However slow it is: it costs the source nothing
    for stream in streams.values():
        stream.limits_s.clear()
    choice = taken({"direct": made(SLOW), **streams})
    assert choice.transport == "direct"
    assert choice.reasons == dict.fromkeys(streams, "not tried, because direct works")
    assert not any(stream.limits_s for stream in streams.values())


def test_reasons_by_hand() -> None:
    choice = taken(
        {
            "c": made("c: expected a cable, got none"),
            "d": made(WireCosts(0.0, 0.0, 1e6)),
            "a": made(WireCosts(0.0, 0.0, 256 * MIB * 10.0)),
            "b": made(WireCosts(0.0, 0.0, 256 * MIB * 4.0)),
        },
        min_gbps=0.01,
    )
    assert str(choice) == (
        "a at 2.68 GB/s, 0 us: 2048 tokens (256 MiB) in 100 ms; "
        "not c: expected a cable, got none; "
        "not d: expected at least min_gbps 0.01 GB/s, got 0.001; "
        "not b: not tried, because a works"
    )
    streams = {"s1": made(STREAM_101_MS, HOST), "s2": made(STREAM_99_MS, HOST)}
    assert taken(streams).reasons == {"s1": "101 ms instead of 99 for 2048 tokens"}


def test_staging_is_chosen_and_settings_are_kept_to() -> None:
    wire = made(WireCosts(300e-6, 200e-6, 3e9), HOST)
    choice = taken({"s": wire})
    # 64 MiB: sqrt(64 MiB x 200 us x 3 GB/s / 2) is 4.3 MiB
    assert [choice.chunk_nbytes(n * MIB) // MIB for n in (16, 64, 1024)] == [2, 4, 4]
    assert choice.staging == Staging(7, 4 * MIB, None)  # 1.8 MB on their way
    assert "in chunks of 4 MiB, 7 slots of 4 MiB" in str(choice)
    wire.bounds = replace(HOST, chunk_nbytes=12345, num_slots=3)
    choice = taken({"s": wire})
    assert choice.staging == Staging(3, 64 << 10, 12345)  # a slot holds a block
    assert choice.chunk_nbytes(1) == choice.chunk_nbytes(1 << 40) == 12345
    wire.bounds = StagingBounds(100_000, 8 * MIB, is_limit=True)
    with pytest.raises(
        TransportUnavailable,
        match="s: staging_nbytes: expected room for 2 chunks of 65536 bytes, got 100000",
    ):
        taken({"s": wire})


def test_chunks_of_what_grows_are_worth_their_message() -> None:
    """Their bytes take twice as long: 2 x 200 us x 3 GB/s, and so on each of eight streams."""
    wire = made(WireCosts(300e-6, 200e-6, 3e9), HOST)
    assert taken({"s": wire}).least_growing_nbytes == 1_200_000
    wire.bounds = replace(HOST, num_streams=8)
    assert taken({"s": wire}).least_growing_nbytes == 9_600_000
    assert taken({"d": made(WireCosts(300e-6, 200e-6, 3e9))}).least_growing_nbytes == 0


def test_time_for_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds; the last hope gets all that is left."""
    monkeypatch.setattr(choice_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    wires = {"a": made("no"), "b": made("no", HOST)}
    with pytest.raises(TransportUnavailable, match="a: no; b: no"):
        taken(wires, timeout_s=6.5)
    assert wires["a"].limits_s == [2.0]
    assert wires["b"].limits_s == [6.5]
    wires = {"a": made(SLOW, HOST), "b": made("no", HOST)}
    taken(wires, timeout_s=6.5)
    assert wires["b"].limits_s == [2.0]
    taken(wires, timeout_s=1.0)
    assert [wire.limits_s[1] for wire in wires.values()] == [1.0, 1.0]
