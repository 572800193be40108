"""The Unix socket beside a source's TCP one: who finds it, who is served, when it is not used."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq

from kvxfer.testing import check_transport
from kvxfer.transports.base import PeerGone, ReadDone, Trial
from kvxfer.transports.channel import Bounds, Router, bind_unix
from kvxfer.transports.guard import nearest_endpoint, unix_endpoint, user_of
from kvxfer.transports.stream_source import StreamSource
from tests.far_peers import use_tcp
from tests.transports.pair import (
    ZMQ,
    Pair,
    TcpSink,
    a_move,
    connections_of,
    key_of,
    stream_side,
    zmq_pipe,
)


def test_the_wire_keeps_every_promise_over_tcp() -> None:
    check_transport(
        partial(stream_side, StreamSource, zmq_pipe, ZMQ),
        partial(stream_side, TcpSink, zmq_pipe, ZMQ),
    )


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the connections came from that the guard of a pair is asked about, which is made after
    it.
    """
    asked: list[str] = []
    receive = zmq.Socket.recv_multipart

    def record(socket: zmq.Socket[bytes], *args: Any, **how: Any) -> Any:
        frames = receive(socket, *args, **how)
        if frames[1:3] == [b"", b"1.0"]:
            asked.append(frames[5].decode())  # ZeroMQ RFC 27
        return frames

    monkeypatch.setattr(zmq.Socket, "recv_multipart", record)
    return asked


def endpoint_of(pair: Pair) -> str:
    return str(pair.source.data_endpoint())


def read_all(pair: Pair) -> None:
    """One read through the pair, compared byte by byte."""
    move = a_move()
    pair.sink.attach(pair.manifest)
    pair.start(key_of(1), move)
    assert isinstance(pair.end(key_of(1)), ReadDone)
    assert pair.content() == pair.expected(move)


def test_name_is_that_of_the_tcp_endpoint() -> None:
    assert unix_endpoint("tcp://127.0.0.1:5701") == "ipc://@kvxfer-zmq-127.0.0.1:5701"
    assert unix_endpoint("tcp://[::1]:5701") == "ipc://@kvxfer-zmq-[::1]:5701"


@pytest.mark.parametrize(
    ("address", "user"),
    [
        ("localhost:1000:100:4711", 1000),
        ("localhost:0:0:1", 0),
        ("localhost:-1:0:1", None),
        ("localhost:1000:100", None),
        ("localhost:1000:100:4711:5", None),
        ("elsewhere:1000:100:4711", None),
        ("127.0.0.1", None),
        ("::1", None),
        ("::ffff:10.0.0.7", None),
        ("", None),
    ],
)
def test_user_of_a_peer(address: str, user: int | None) -> None:
    assert user_of(address) == user


def test_a_sink_on_the_same_host_takes_the_unix_socket(addresses: list[str], pair: Pair) -> None:
    read_all(pair)
    assert [user_of(address) for address in addresses] == [os.geteuid()]


@pytest.mark.parametrize(("uses_it", "path"), [(True, "a Unix socket"), (False, "TCP")])
def test_a_trial_takes_the_same_path_and_says_which(
    addresses: list[str], pair: Pair, uses_it: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not uses_it:
        use_tcp(monkeypatch)
    trials: list[Trial] = []
    thread = threading.Thread(target=lambda: trials.append(pair.sink.trial(pair.manifest, 5.0)))
    thread.start()
    pair.until(lambda: bool(trials))
    thread.join()
    assert trials[0].path == path
    assert {user_of(address) for address in addresses} == {os.geteuid() if uses_it else None}


def test_sinks_that_look_for_it_disturb_nobody(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    for _ in range(3):
        assert nearest_endpoint(endpoint_of(pair)).startswith("ipc:")
    read_all(pair)
    assert len(connections_of(pair)) == 1
    assert not any(isinstance(each, PeerGone) for each in pair.seen)
    pair.sink.detach(pair.manifest.control_endpoint)
    pair.until(lambda: not len(connections_of(pair)))


def test_a_source_that_has_gone_leaves_no_name(pair: Pair) -> None:
    endpoint = endpoint_of(pair)
    assert nearest_endpoint(endpoint) == unix_endpoint(endpoint)
    pair.source.close()
    # ZeroMQ closes listeners in the background: this fails after a while.
    pair.until(lambda: nearest_endpoint(endpoint) == endpoint)


def test_a_name_that_another_user_has_is_not_used(
    addresses: list[str], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    read_all(pair)
    assert addresses == ["127.0.0.1"]


def test_a_source_whose_name_is_taken_serves_tcp(pair: Pair) -> None:
    port = urlsplit(endpoint_of(pair)).port
    router = Router(pair.context, ZMQ, Bounds(1 << 20, 1 << 20, 10))
    with closing(router), socket.socket(socket.AF_UNIX) as squatter:
        assert not bind_unix(router.socket, f"tcp://127.0.0.1:{port}")
        squatter.bind("\0kvxfer-zmq-127.0.0.1:1")
        assert not bind_unix(router.socket, "tcp://127.0.0.1:1")
        assert router.endpoint.startswith("tcp://127.0.0.1:")


def test_without_unix_sockets_sinks_use_tcp(
    addresses: list[str], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tcp(monkeypatch)
    read_all(pair)
    assert addresses == ["127.0.0.1"]
