"""First contact: who is refused, why, how fast, and for how long."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from kvxfer.connector import peers as peers_module
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.records import ConnectorMetadata, SourceRef
from kvxfer.transfer.wire import OfferRef
from kvxfer.transports.guard import nearest_endpoint
from kvxfer.transports.key_folder import short
from tests.builders import EngineShape
from tests.connector.rig import (
    POISON,
    Engine,
    io_thread_of,
    is_kept_off,
    links_of,
    num_pulls,
    only_peer_of,
    owed_by,
    pass_s,
    service_of,
    stuck,
    until,
)
from tests.helpers import free_port

ONE = EngineShape(num_kv_heads=2, num_blocks=8)


def test_incompatible_engines_list_every_field_and_the_offer_is_given_back() -> None:
    facts = {"weights": "another", "rope": ""}
    with (
        Engine(ONE, "prefill", fill=1, facts=facts) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"incompatible"}
        detail = sink.reports("d")[0].detail
        assert "weights: source has another, sink has 0123abcd" in detail
        assert "rope: source has unknown" in detail
        until(lambda: source.sent("p"))


def test_offers_of_an_engine_that_was_just_refused_are_given_back_too() -> None:
    """The second load comes while the refusal is remembered: nothing is sent at that time."""
    with (
        Engine(ONE, "prefill", fill=1, facts={"weights": "another"}) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        for number, name in enumerate(("first", "second")):
            ref = source.offer(name, 16, [number])
            source.compute(name)
            sink.load(name, ref, [number], (0, 16))
            until(lambda name=name: sink.received(name))  # type: ignore[misc]
            assert sink.reasons(name) == {"incompatible"}
            sink.unhold(name, ref)  # as the scheduler side does after a failed load
        until(lambda: source.sent("first") and source.sent("second"))


def test_params_of_an_engine_whose_place_another_has_taken_are_of_another_life() -> None:
    """As after a restart under a new engine id, which vLLM makes up at each start."""
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = msgspec.structs.replace(source.offer("p", 16, [1]), engine_id="somebody")
        sink.load("d", ref, [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"incarnation"}
        assert "expected somebody" in sink.reports("d")[0].detail


def test_nobody_looks_at_all_who_wait_for_another_life_with_each_that_comes() -> None:
    """Params of a life that never was are free to make."""
    looks: list[bytes] = []

    class Watched(SimpleNamespace):
        @property
        def offer(self) -> OfferRef:
            looks.append(ref.offer.nonce)
            return OfferRef(ref.offer.nonce, b"?" * 16)

    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [1], (0, 16))
        until(lambda: sink.received("d"))
        service, told, num = service_of(sink), list[object](), 100
        never = cast(
            "SourceRef",
            Watched(engine_id=ref.engine_id, endpoint=ref.endpoint, curve_public_key=None),
        )
        with stuck(source):
            for _ in range(num):
                service.io.post(lambda: service._peers.want(never, told.append, needs_wire=False))
            io_thread_of(sink)
            assert len(looks) <= 10 * num
        until(lambda: len(told) == num)
        assert {each.reason for each in told if isinstance(each, Failure)} == {"incarnation"}


def test_an_offer_of_another_life_is_owed_no_cancel() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = source.offer("p", 16, [1])
        other = msgspec.structs.replace(ref, offer=OfferRef(ref.offer.nonce, b"?" * 16))
        service, told = service_of(sink), list[object]()
        sink.unhold("d", other)
        service.io.post(lambda: service._peers.want(other, told.append, needs_wire=False))
        until(lambda: told)
        assert not owed_by(sink)


def test_an_engine_that_is_not_ready_yet_is_asked_again() -> None:
    with (
        Engine(ONE, "prefill", fill=1, announce=False) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [1], (0, 16))
        time.sleep(0.2)
        assert not sink.received("d")
        source.step(ConnectorMetadata(manifest=source.manifest))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}


def _ref(sink: Engine, endpoint: str) -> SourceRef:
    """An offer of nobody at an endpoint."""
    return msgspec.structs.replace(sink.offer("x", 16, [1]), engine_id="prefill", endpoint=endpoint)


def test_silence_ends_at_the_deadline_and_is_remembered_for_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, dialled = zmq.Context.socket, list[int]()

    def noted(context: zmq.Context[Any], kind: int, **more: Any) -> Any:
        if kind == zmq.DEALER:
            dialled.append(kind)
        return make(context, kind, **more)

    monkeypatch.setattr(zmq.Context, "socket", noted)
    monkeypatch.setattr(peers_module, "BACK_OFF_S", 300.0)  # however late this thread is
    with Engine(ONE, "decode", fill=POISON, connect_timeout_s=0.8) as sink:
        ref = _ref(sink, f"tcp://127.0.0.1:{free_port()}")
        started_s = time.perf_counter()
        sink.load("d0", ref, [1], (0, 16))
        until(lambda: sink.received("d0"))
        assert time.perf_counter() - started_s > 0.75
        assert sink.reasons("d0") == {"peer_lost"}
        assert "did not answer within 0.8 s" in sink.reports("d0")[0].detail
        sink.load("d1", ref, [1], (0, 16))
        until(lambda: sink.received("d1"))
        assert len(dialled) == 1
        pass_s(sink, 300.0)
        started_s = time.perf_counter()
        sink.load("d2", ref, [1], (0, 16))
        until(lambda: sink.received("d2"))
        assert time.perf_counter() - started_s > 0.75
        assert len(dialled) == 2


def test_a_load_is_aborted_before_its_peer_is_there() -> None:
    port = free_port()
    with Engine(ONE, "decode", fill=POISON, connect_timeout_s=100.0) as sink:
        sink.load("d", _ref(sink, f"tcp://127.0.0.1:{port}"), [1], (0, 16))
        time.sleep(0.05)
        sink.abort("d")
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"cancelled"}


def test_a_source_that_is_connected_but_says_nothing_is_lost() -> None:
    """ZeroMQ's own heartbeats go on while the thread behind the socket hangs; Ping sees it."""
    with (
        Engine(ONE, "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON, peer_silent_s=300.0, pull_timeout_s=3600.0) as sink,
    ):
        ref = source.offer("p", 16, [1])
        sink.load("d", ref, [1], (0, 16))  # parked: it never opens
        until(lambda: num_pulls(source, ref.offer.nonce))
        (link,) = links_of(only_peer_of(sink))
        for _ in range(4):
            pass_s(sink, 100.0)
            now = service_of(sink).io.now
            until(lambda now=now: now() - link.heard_s < 50.0)  # type: ignore[misc]
        assert not sink.received("d")  # parked, but the source answers
        with stuck(source):
            pass_s(sink, 100.0)
            until(lambda: link.unanswered_s is not None)
            assert not sink.received("d")
            pass_s(sink, 150.0)
            until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"peer_lost"}
        assert "was silent for" in sink.reports("d")[0].detail


def test_a_host_that_is_not_allowed_is_never_connected_to() -> None:
    with Engine(ONE, "decode", fill=POISON, allowed_peers=("10.0.0.0/8",)) as sink:
        sink.load("d", _ref(sink, f"tcp://127.0.0.1:{free_port()}"), [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"not_allowed"}
        assert "allowed_peers of this engine does not admit" in sink.reports("d")[0].detail
        assert "allowed_peers" in sink.reports("d")[0].detail


def test_one_line_for_each_peer(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "kvxfer.connector"),
        Engine(EngineShape(tp_size=2), "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        for number in range(3):
            ref = source.offer(f"p{number}", 16, [1])
            source.compute(f"p{number}")
            sink.load(f"d{number}", ref, [1], (0, 16))
            until(lambda number=number: sink.received(f"d{number}"))  # type: ignore[misc]
        lines = [record.getMessage() for record in caplog.records]
        (line,) = [line for line in lines if line.startswith("engine prefill")]
        assert "shm at " in line
        assert re.search(r" at [\d.]+ GB/s, \d+ us: 2048 tokens .*; not zmq: ", line)


# ------------------------------------------------------------------ CURVE


def _keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_pinned_keys_let_the_right_engines_meet() -> None:
    source_keys, sink_keys = _keys(), _keys()
    pinned = {"prefill": source_keys[0], "decode": sink_keys[0]}
    with (
        Engine(
            ONE,
            "prefill",
            fill=1,
            curve_public_key=source_keys[0],
            curve_secret_key=source_keys[1],
            curve_server_keys=pinned,
        ) as source,
        Engine(
            ONE,
            "decode",
            fill=POISON,
            curve_public_key=sink_keys[0],
            curve_secret_key=sink_keys[1],
            curve_server_keys=pinned,
        ) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}


_SAID = {
    "client": "it does not admit this engine's CURVE key (KEY); name it in curve_server_keys there",
    "server": "the handshake failed; it has no CURVE keys, or another one than this engine expects "
    "(KEY); name it in curve_server_keys here",
    "plain": "it has CURVE keys, and this engine has none; set them on both sides",
    "bare": "the handshake failed; it has no CURVE keys, or another one than this engine expects",
    "unnamed": "curve_server_keys: expected a key of engine prefill, got none",
}


_HEARD = {
    "client": r"127.0.0.1 was refused: expected a CURVE key that is pinned, got another \(KEY\); "
    "name it in curve_server_keys here",
    "server": "a connection from 127.0.0.1 was closed: it expects another CURVE key here than",
    "plain": "was closed: it (has no CURVE key and needs one; set them on|ended the handshake; if)",
    "bare": "was closed: it (has CURVE keys, and this engine has none|ended the handshake; if)",
    "unnamed": "",  # it never connects
}
"""What the source says of it meanwhile. Where one side has no keys, the first that sees it ends the
connection.
"""


@pytest.mark.parametrize("wrong", list(_SAID))
def test_other_keys_do_not(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source_keys, sink_keys, other = _keys(), _keys(), _keys()
    client = other if wrong == "client" else sink_keys
    server = other[0] if wrong == "server" else source_keys[0]
    own: dict[str, Any] = {
        "curve_public_key": source_keys[0],
        "curve_secret_key": source_keys[1],
        "curve_server_keys": {"decode": sink_keys[0]},
    }
    secured: dict[str, Any] = {
        "curve_public_key": client[0],
        "curve_secret_key": client[1],
        "curve_server_keys": {"nobody" if wrong == "unnamed" else "prefill": server},
    }
    with (
        Engine(
            ONE,
            "prefill",
            fill=1,
            **({} if wrong == "bare" else own),
        ) as source,
        Engine(
            ONE,
            "decode",
            fill=POISON,
            connect_timeout_s=60,
            **({} if wrong == "plain" else secured),
        ) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [1], (0, 16))
        if wrong in ("server", "bare"):  # it goes on trying until the deadline
            until(lambda: is_kept_off(sink) or sink.received("d"))
            pass_s(sink, 60.0)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"not_allowed"}
        assert (sink.pools[0].tensor == POISON).all()
        key = short(server if wrong == "server" else client[0])
        assert _SAID[wrong].replace("KEY", key) in sink.reports("d")[0].detail
        heard = _HEARD[wrong].replace("KEY", re.escape(short(client[0])))
        until(lambda: re.search(heard, caplog.text))


@contextmanager
def _doorkeeper(*, admits: bool) -> Iterator[str]:
    """A listener that asks who may come in, as ZeroMQ does it (RFC 27), and says nothing else."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    questions = context.socket(zmq.REP)
    questions.bind("inproc://zeromq.zap.01")
    door = context.socket(zmq.ROUTER)
    door.linger = questions.linger = 0
    door.zap_domain = b"here"
    port = door.bind_to_random_port("tcp://127.0.0.1")
    status = b"200" if admits else b"400"

    def answer() -> None:
        with suppress(zmq.ContextTerminated):
            while True:
                asked = questions.recv_multipart()
                questions.send_multipart([b"1.0", asked[1], status, b"", b"", b""])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        door.close()
        closing = threading.Thread(target=context.term)
        closing.start()
        thread.join()
        questions.close()
        closing.join()


def test_who_is_not_let_in_says_what_the_other_side_refused() -> None:
    with (
        _doorkeeper(admits=False) as endpoint,
        Engine(ONE, "decode", fill=POISON, connect_timeout_s=60) as sink,
    ):
        sink.load("d", _ref(sink, endpoint), [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"not_allowed"}
        detail = sink.reports("d")[0].detail
        assert "it does not admit this engine's address; name it in allowed_peers there" in detail


def test_who_lets_everybody_in_and_says_nothing_is_lost() -> None:
    with (
        _doorkeeper(admits=True) as endpoint,
        Engine(ONE, "decode", fill=POISON, connect_timeout_s=0.5) as sink,
    ):
        sink.load("d", _ref(sink, endpoint), [1], (0, 16))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"peer_lost"}


def test_an_engine_that_looks_for_a_unix_socket_is_nothing_to_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with Engine(ONE, "prefill", fill=1) as source:
        for _ in range(20):
            assert nearest_endpoint(source.endpoint).startswith("ipc:")
        with socket.create_connection(("127.0.0.1", int(source.endpoint.rpartition(":")[2]))) as s:
            assert s.recv(1 << 10)
        until(lambda: "was closed: it ended the handshake" in caplog.text)
    assert caplog.text.count("was closed") == 1
