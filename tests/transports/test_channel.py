"""When a listener learns that a peer is gone."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import zmq

from kvxfer.config import Config
from kvxfer.transports.channel import Bounds, Router
from kvxfer.transports.guard import Guard, penalties_of
from tests import zmtp
from tests.far_peers import count_as_far


def test_what_cannot_be_foreseen_costs_one_handshake(caplog: pytest.LogCaptureFixture) -> None:
    def fail(reason: str) -> None:
        raise ZeroDivisionError

    config = Config()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Guard(context, config, fail)
    with closing(Router(context, config, Bounds(1000, 1000, 10))) as router:
        penalties_of(context).add("127.0.9.9", time.monotonic())
        for _ in range(2):
            with pytest.raises(OSError, match=r"refused|expected|reset"):
                zmtp.connect(router.endpoint, address="127.0.9.9")
        with closing(zmtp.connect(router.endpoint)) as peer:
            peer.sendall(zmtp.frame(b"x"))
            assert router.socket.poll(120_000)
    context.term()
    guard.join()
    assert len(caplog.messages) == 1


def test_an_address_is_judged_once_and_answered_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    refused: list[str] = []

    def is_far(address: str) -> bool:
        judged.append(address)
        return address == "127.0.9.8"

    count_as_far(monkeypatch, is_far)
    config = Config()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Guard(context, config, refused.append)
    with closing(Router(context, config, Bounds(1000, 1000, 10))) as router:
        for number in range(3):
            with pytest.raises(OSError, match=r"refused|expected|reset"):
                zmtp.connect(router.endpoint, address="127.0.9.8")
            zmtp.connect(router.endpoint, address="127.0.9.9").close()
            assert set(judged) == ({"127.0.9.8", "127.0.9.9"} if not number else set())
            judged.clear()
    context.term()
    guard.join()
    assert refused == ["address"] * 3


def test_a_peer_that_is_silent_is_gone_by_name_after_peer_silent_s() -> None:
    """It is connected all the time, and answers no heartbeat."""
    config = Config(peer_silent_s=0.6)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Guard(context, config)
    with closing(Router(context, config, Bounds(1000, 1000, 10))) as router:
        with closing(zmtp.connect(router.endpoint)) as peer:
            peer.sendall(zmtp.frame(b"x"))
            assert router.socket.poll(120_000)
            ((name, _),) = router.poll()
            began_s = time.monotonic()
            gone: list[bytes] = []
            while not gone:
                assert list(router.poll()) == []
                gone = router.visitors.take_gone()
                assert time.monotonic() < began_s + 240
                time.sleep(0.01)
        assert time.monotonic() - began_s > 0.3
        assert gone == [name.bytes]
    context.term()
    guard.join()
