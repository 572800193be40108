"""A manifest is a claim: who states another's endpoints, and what a first contact may cost."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.config import Config
from kvxfer.connector.access import check_introduction
from kvxfer.connector.peer_session import PeerState
from kvxfer.connector.peers import MAX_GREETED, TOLD_S, TRIALS_S
from kvxfer.connector.records import ConnectorMetadata, SourceRef
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import WireCosts
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import CopyClass
from kvxfer.transfer.wire import Hello, Manifest, decode_to_sink, encode
from kvxfer.transports.base import Trial
from kvxfer.transports.shm_direct import ShmSink
from tests.builders import EngineShape
from tests.connector.rig import (
    POISON,
    WIRES,
    Engine,
    pass_s,
    peers_of,
    service_of,
    until,
    wires_of,
)
from tests.helpers import free_port
from tests.wires import use_sink

ONE = EngineShape(num_kv_heads=2, num_blocks=64)
SPAN = (0, 64)


def _offered(source: Engine, name: str, endpoint: str | None = None) -> SourceRef:
    ref = source.offer(name, 64, range(4))
    source.compute(name)
    return ref if endpoint is None else msgspec.structs.replace(ref, endpoint=endpoint)


def _load(sink: Engine, name: str, ref: SourceRef) -> set[str | None]:
    sink.load(name, ref, range(4), SPAN)
    until(lambda: sink.received(name))
    return sink.reasons(name)


def _blocks_with(engine: Engine, value: int) -> set[int]:
    """Blocks of which some byte has this value, in any region."""
    (rank,) = engine.manifest.ranks
    memory = engine.pools[0].tensor
    return {
        block
        for region in rank.regions
        for block in range(region.num_blocks)
        if (memory[region.offset + block * region.stride_block :][: region.stride_block] == value)
        .any()
        .item()
    }


def _state_as_control_endpoint(engine: Engine, endpoint: str) -> str:
    """Announce a manifest with somebody else's control endpoint; returns the engine's own door."""
    own = engine.workers[0].get_handshake_metadata()
    rank = msgspec.structs.replace(own, control_endpoint=endpoint)
    engine.manifest = msgspec.structs.replace(engine.manifest, ranks=(rank,))
    engine.step(ConnectorMetadata(manifest=engine.manifest))
    return own.control_endpoint


@pytest.mark.parametrize("wire", WIRES)
def test_an_engine_that_states_another_ones_endpoint_is_refused(wire: str) -> None:
    with (
        Engine(ONE, "a", fill=0xAA, transport=wire) as honest,
        Engine(ONE, "b", fill=0xBB, transport=wire, announce=False) as hostile,
        Engine(ONE, "decode", fill=POISON, transport=wire) as sink,
    ):
        assert _load(sink, "a1", _offered(honest, "a1")) == {None}
        door = _state_as_control_endpoint(hostile, honest.endpoint)
        assert _load(sink, "b1", _offered(hostile, "b1", door)) == {"not_allowed"}
        assert "which is engine a's" in sink.reports("b1")[0].detail
        assert sink.count("peers.ready") == 1
        assert _load(sink, "a2", _offered(honest, "a2")) == {None}
        assert not (sink.pools[0].tensor == 0xBB).any()
        assert (sink.pools[0].tensor == 0xAA).any()


@pytest.mark.parametrize("wire", WIRES)
def test_an_endpoint_that_somebody_else_states_keeps_nobody_out(wire: str) -> None:
    with (
        Engine(ONE, "a", fill=0xAA, transport=wire) as honest,
        Engine(ONE, "b", fill=0xBB, transport=wire, announce=False) as hostile,
        Engine(ONE, "decode", fill=POISON, transport=wire) as sink,
    ):
        door = _state_as_control_endpoint(hostile, honest.endpoint)
        sink.load("b1", _offered(hostile, "b1", door), range(8, 12), SPAN)
        until(lambda: peers_of(sink) or sink.received("b1"))
        assert _load(sink, "a1", _offered(honest, "a1")) == {None}
        until(lambda: sink.received("b1"))
        assert sink.reasons("b1") == {"not_allowed"}
        assert _blocks_with(sink, 0xAA) == {0, 1, 2, 3}
        assert not _blocks_with(sink, 0xBB)


TWO = EngineShape(tp_size=2, num_kv_heads=2, num_blocks=64)
LIFE = b"i" * 16


@pytest.mark.parametrize("first", ["honest", "hostile"])
@pytest.mark.parametrize(("engine_id", "life"), [("b", None), ("a", LIFE)])
def test_a_stolen_rank_is_read_in_nobody_elses_name(
    engine_id: str, life: bytes | None, first: str
) -> None:
    """Rank 1 of the hostile engine states the endpoint of the honest one's, and memory of its own.
    Its front door is its own, and says whose name it likes.
    """
    with (
        Engine(TWO, "a", fill=0xAA, transport="shm", incarnation=LIFE) as honest,
        Engine(
            TWO, engine_id, fill=0xBB, transport="shm", incarnation=life, announce=False
        ) as hostile,
        Engine(ONE, "decode", fill=POISON, transport="shm") as sink,
    ):
        mine, other = hostile.manifest.ranks
        stolen = msgspec.structs.replace(
            other, control_endpoint=honest.manifest.ranks[1].control_endpoint
        )
        hostile.manifest = msgspec.structs.replace(hostile.manifest, ranks=(mine, stolen))
        hostile.step(ConnectorMetadata(manifest=hostile.manifest))
        for number in range(2):
            turns = ["honest", "hostile"] if first == "honest" else ["hostile", "honest"]
            for turn in turns:
                name = f"{turn}{number}"
                if turn == "honest":
                    assert _load(sink, name, _offered(honest, name)) == {None}
                else:
                    assert _load(sink, name, _offered(hostile, name)) == {"not_allowed"}
                    assert "rank pp0tp1 of" in sink.reports(name)[0].detail
        assert sink.count("peers.ready") == 1
        assert _blocks_with(sink, 0xAA) == {0, 1, 2, 3}
        assert not _blocks_with(sink, 0xBB)


def is_checked(sink: Engine, source: Engine) -> bool:
    """Its ranks are asked who they are."""
    peer = peers_of(sink).get(("a", source.endpoint))
    return peer is not None and peer.state is PeerState.CHECKING


def test_a_rank_that_is_not_there_fails_the_contact() -> None:
    """A stated endpoint where nobody answers proves as little."""
    with (
        Engine(TWO, "a", fill=1, transport="shm", announce=False) as source,
        Engine(
            ONE,
            "decode",
            fill=POISON,
            transport="shm",
            allowed_peers=("127.0.0.1",),
        ) as sink,
    ):
        nobody = f"tcp://127.0.0.1:{free_port()}"
        front, other = source.manifest.ranks
        moved = msgspec.structs.replace(other, control_endpoint=nobody)
        manifest = msgspec.structs.replace(source.manifest, ranks=(front, moved))
        source.step(ConnectorMetadata(manifest=manifest))
        sink.load("d", _offered(source, "p"), range(4), SPAN)
        until(lambda: is_checked(sink, source))
        pass_s(sink, 300.0 + TRIALS_S + TOLD_S)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"peer_lost"}
        assert f"{nobody}: expected its ranks to confirm" in sink.reports("d")[0].detail


def test_a_rank_that_does_not_know_its_engine_yet_is_asked_again() -> None:
    with (
        Engine(TWO, "a", fill=1, transport="shm", announce=False) as source,
        Engine(ONE, "decode", fill=POISON, transport="shm") as sink,
    ):
        told = ConnectorMetadata(manifest=source.manifest)
        source.workers[0].bind_connector_metadata(told)
        ref = _offered(source, "p")
        sink.load("d", ref, range(4), SPAN)
        until(lambda: is_checked(sink, source))
        assert not sink.received("d")
        source.workers[1].bind_connector_metadata(told)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}


def test_every_endpoint_that_is_stated_is_looked_at() -> None:
    """Where nobody listens, anybody may a moment later."""
    nobody = f"tcp://127.0.0.1:{free_port()}"
    with Engine(ONE, "a", fill=1) as source:
        check_introduction(Config(), "a", source.endpoint, source.manifest)
        with pytest.raises(PermissionError, match=f"{nobody}: expected a process of this user"):
            check_introduction(Config(), "a", nobody, source.manifest)
        for field, stated in (
            ("control_endpoint", nobody),
            ("data_endpoints", {"zmq": nobody}),
        ):
            rank = msgspec.structs.replace(source.manifest.ranks[0], **{field: stated})
            manifest = msgspec.structs.replace(source.manifest, ranks=(rank,))
            with pytest.raises(PermissionError, match=f"{nobody}: expected a process of this user"):
                check_introduction(Config(), "a", source.endpoint, manifest)


def test_only_the_front_door_speaks_for_all_ranks() -> None:
    with Engine(TWO, "a", fill=1) as source, zmq.Context() as context:
        for number, expected in ((0, source.manifest.ranks), (1, source.manifest.ranks[1:])):
            with context.socket(zmq.DEALER) as dealer:
                dealer.connect(source.manifest.ranks[number].control_endpoint)
                dealer.send(encode(Hello((1, 1), (), "decode", b"d" * 16)))
                assert dealer.poll(120_000)
                said = decode_to_sink(dealer.recv())
                dealer.linger = 0
            assert isinstance(said, Manifest)
            assert said.manifest == msgspec.structs.replace(source.manifest, ranks=expected)


def test_another_users_process_is_not_even_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        ref = msgspec.structs.replace(sink.offer("x", 64, range(4)), endpoint=endpoint)
        assert _load(sink, "d", ref) == {"not_allowed"}
        listening.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listening.accept()


def test_kv_of_another_users_process_is_not_taken_unless_its_host_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        Engine(ONE, "a", fill=1, transport="zmq") as source,
        Engine(ONE, "decode", fill=POISON, transport="zmq") as sink,
        Engine(ONE, "d2", fill=POISON, transport="zmq", allowed_peers=("127.0.0.1",)) as named,
        Engine(ONE, "d3", fill=POISON, transport="zmq", params_key="k" * 16) as signed,
    ):
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        assert _load(sink, "d", _offered(source, "p")) == {"not_allowed"}
        assert "expected a process of this user" in sink.reports("d")[0].detail
        assert (sink.pools[0].tensor == POISON).all()
        assert _load(named, "d2", _offered(source, "p2")) == {None}
        assert _load(signed, "d3", _offered(source, "p3")) == {None}


@pytest.mark.parametrize("wire", WIRES)
def test_one_engine_under_two_names_is_detached_with_the_last(wire: str) -> None:
    settings: dict[str, Any] = {"transport": wire}
    with (
        Engine(ONE, "a", fill=1, **settings) as source,
        Engine(ONE, "decode", fill=POISON, **settings) as sink,
    ):
        alias = source.endpoint.replace("127.0.0.1", "localhost")
        assert _load(sink, "d0", _offered(source, "p0")) == {None}
        assert _load(sink, "d1", _offered(source, "p1", alias)) == {None}
        first = peers_of(sink)["a", source.endpoint]
        service_of(sink).io.post(lambda: first.lost("the test says so"))
        until(lambda: first.state is PeerState.OVER)
        assert _load(sink, "d2", _offered(source, "p2", alias)) == {None}


def test_another_engine_on_the_port_of_one_that_ended_is_met() -> None:
    port = free_port()
    with Engine(ONE, "decode", fill=POISON) as sink:
        for name in ("a", "b", "a"):
            with Engine(ONE, name, fill=1, port=port) as source:
                request_id = f"d{source.incarnation.hex()}"
                assert _load(sink, request_id, _offered(source, "p")) == {None}


def test_a_wire_that_has_lost_a_rank_is_met_anew() -> None:
    with (
        Engine(ONE, "a", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm") as sink,
    ):
        assert _load(sink, "d0", _offered(source, "p0")) == {None}
        service_of(sink).io.post(lambda: wires_of(sink)["shm"].detach(source.endpoint))
        assert _load(sink, "d1", _offered(source, "p1")) == {"peer_lost"}
        assert _load(sink, "d2", _offered(source, "p2")) == {None}


def test_a_data_endpoint_that_is_not_allowed_is_never_connected_to() -> None:
    with (
        Engine(ONE, "a", fill=1, announce=False) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        own = source.workers[0].get_handshake_metadata()
        rank = msgspec.structs.replace(own, data_endpoints={"zmq": "tcp://8.8.8.8:9"})
        manifest = msgspec.structs.replace(source.manifest, ranks=(rank,))
        source.step(ConnectorMetadata(manifest=manifest))
        assert _load(sink, "d", _offered(source, "p")) == {"not_allowed"}
        assert (
            "(zmq): allowed_peers of this engine does not admit tcp://8.8.8.8:9"
            in sink.reports("d")[0].detail
        )


def test_a_source_that_does_not_bind_tokens_is_refused_by_a_sink_that_does() -> None:
    with (
        Engine(ONE, "a", fill=1, bind_tokens=False) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        assert _load(sink, "d", _offered(source, "p")) == {"incompatible"}
        assert "bind_tokens: engine a has it off" in sink.reports("d")[0].detail


# ------------------------------------------------------------------ what a first contact may cost


def test_a_wire_that_fails_in_an_unforeseen_way_fails_the_contact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(ShmSink):
        def attach(self, source: RankManifest, trial: Trial | None = None) -> None:
            raise zmq.ZMQError(24)

    use_sink(monkeypatch, "shm", Broken)
    with (
        Engine(ONE, "a", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm", connect_timeout_s=100.0) as sink,
    ):
        assert _load(sink, "d", _offered(source, "p")) == {"transport"}


def test_a_first_contact_is_bounded_whatever_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank's trial takes less than a trial may; all together take more than a contact may."""

    tried: list[RankManifest] = []

    class Slow(ShmSink):
        def trial(
            self, source: RankManifest, timeout_s: float, classes: Sequence[CopyClass] = ()
        ) -> Trial:
            tried.append(source)
            pass_s(sink, min(timeout_s, 160.0))
            return Trial(WireCosts(0.0, 0.0, 1e9))

    use_sink(monkeypatch, "shm", Slow)
    four = EngineShape(tp_size=4, num_kv_heads=4)
    with (
        Engine(four, "a", fill=1, transport="shm") as source,
        Engine(
            EngineShape(num_kv_heads=4),
            "decode",
            fill=POISON,
            transport="shm",
        ) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"transport"}
        until(lambda: "kvxfer-probe" not in {each.name for each in threading.enumerate()})
        assert len(tried) == 2  # and the thread does not go on


def test_a_trial_that_never_ends_ends_the_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, is_over = threading.Event(), threading.Event()

    class Endless(ShmSink):
        def trial(
            self, source: RankManifest, timeout_s: float, classes: Sequence[CopyClass] = ()
        ) -> Trial:
            has_begun.set()
            is_over.wait(300.0)
            raise TransportUnavailable("too late")

    use_sink(monkeypatch, "shm", Endless)
    with (
        Engine(ONE, "a", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm") as sink,
    ):
        sink.load("d", _offered(source, "p"), range(4), SPAN)
        assert has_begun.wait(120)
        pass_s(sink, 300.0 - 60.0)
        assert not sink.received("d")
        pass_s(sink, 60.0 + TRIALS_S)
        assert not sink.received("d")
        pass_s(sink, TOLD_S)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"transport"}
        is_over.set()


def test_only_so_many_engines_are_met_at_one_time() -> None:
    with Engine(ONE, "decode", fill=POISON) as sink:
        for number in range(MAX_GREETED + 2):
            ref = sink.offer(f"x{number}", 64, range(4))
            nobody = f"tcp://127.0.0.1:{free_port()}"
            ref = msgspec.structs.replace(ref, engine_id=f"e{number}", endpoint=nobody)
            sink.load(f"d{number}", ref, range(4), SPAN)
        last = f"d{MAX_GREETED + 1}"
        until(lambda: sink.received(last))
        assert f"at most {MAX_GREETED} engines" in sink.reports(last)[0].detail
        assert sink.count("peers.crowded") == 2
        pass_s(sink, 300.0)
        until(lambda: sink.received("d0"))


def test_more_engines_than_zeromq_has_sockets_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[zmq.Context[zmq.Socket[bytes]]] = []

    class Noted(zmq.Context[zmq.Socket[bytes]]):
        def __init__(self, **settings: int) -> None:
            super().__init__(**settings)
            made.append(self)

    monkeypatch.setattr(zmq, "Context", Noted)
    with Engine(ONE, "decode", fill=POISON):
        (context,) = made
        assert context.get(zmq.MAX_SOCKETS) > 10_000


def test_no_socket_for_a_contact_fails_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make = zmq.Context.socket

    def no_dealer(context: zmq.Context[Any], kind: int, **more: Any) -> Any:
        if kind == zmq.DEALER:
            raise zmq.ZMQError(24)
        return make(context, kind, **more)

    monkeypatch.setattr(zmq.Context, "socket", no_dealer)
    with (
        Engine(ONE, "a", fill=1) as source,
        Engine(ONE, "decode", fill=POISON, connect_timeout_s=100.0) as sink,
    ):
        assert _load(sink, "d", _offered(source, "p")) == {"peer_lost"}
        assert "expected a socket" in sink.reports("d")[0].detail
