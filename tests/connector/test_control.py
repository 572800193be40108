"""The edges of the control sockets that whole engines do not reach."""

from __future__ import annotations

import errno
import multiprocessing
import os
import queue
import struct
import threading
import time
from contextlib import closing
from socket import AF_INET, AF_INET6, SO_LINGER, SO_RCVBUF, SOL_SOCKET, socket

import pytest
import zmq

from kvxfer.config import Config
from kvxfer.connector.control import ControlClient, ControlServer, LastWords
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.ledger import Ledger
from kvxfer.errors import ConfigError, ProtocolError
from kvxfer.transfer.wire import Hello, Keep, OfferRef, Ping, ToSource, encode
from kvxfer.transports.channel import bind_address
from kvxfer.transports.guard import Guard
from tests import zmtp
from tests.connector.rig import until
from tests.helpers import free_port


def test_a_message_that_the_other_side_would_refuse_is_not_sent() -> None:
    io = IoThread("io", lambda: None)
    with zmq.Context() as context, closing(LastWords(io)) as last_words:
        client = ControlClient(
            io,
            context,
            Config(control_max_nbytes=1000),
            Ledger(),
            last_words,
            f"tcp://127.0.0.1:{free_port()}",
            None,
            lambda endpoint, message: None,
            lambda endpoint, detail: None,
        )
        client.send(Ping())
        with pytest.raises(ProtocolError, match=r"Keep: expected at most 1000 bytes, got 1\d{3};"):
            client.send(Keep((OfferRef(b"n" * 16, b"i" * 16),) * 30, b"i" * 16, 1.0))
        client.close()
        client.close()
        client.send(Ping())  # closed: nobody hears it
    assert io.stop(60)


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_closed_connection_stays_for_its_last_word_unless_the_engine_has_ended(
    *, ends_first: bool
) -> None:
    io = IoThread("io", lambda: None)
    with zmq.Context() as context, closing(LastWords(io)) as last_words:
        where = f"tcp://127.0.0.1:{free_port()}"
        about = (io, context, Config(), Ledger(), last_words, where, None)
        client = ControlClient(*about, lambda *_: None, lambda *_: None)
        if ends_first:
            last_words.close()
        client.close()
        assert client.dealer.socket.closed == ends_first
        io.start()
        until(lambda: client.dealer.socket.closed)
        assert io.stop(60)


def _say_what_cannot_leave_and_close() -> None:
    """To a peer that reads nothing, says one more word and goes, while heartbeats are due."""
    io, context = IoThread("io", lambda: None), zmq.Context()
    io.start()
    last_words, made = LastWords(io), queue.SimpleQueue[ControlClient]()
    with socket(AF_INET) as listener:
        listener.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        config = Config(peer_silent_s=0.3)

        def connect() -> None:
            about = (io, context, config, Ledger(), last_words, endpoint, None)
            made.put(ControlClient(*about, lambda *_: None, lambda *_: None))

        io.post(connect)
        client, (peer, _) = made.get(), listener.accept()
    zmtp.answer(peer)

    def say_and_close() -> None:
        for _ in range(100):
            client.dealer.send(bytes(100_000))
        client.close()

    closed = threading.Event()
    io.post(say_and_close)
    io.post(closed.set)
    assert closed.wait(60)
    time.sleep(0.02)  # ZeroMQ's thread closes it meanwhile, if it was told to
    peer.sendall(zmtp.frame(b"one more word"))
    time.sleep(0.02)
    peer.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    time.sleep(1.0)
    os._exit(0)  # nothing waits for what cannot leave


def test_who_closes_with_words_that_cannot_leave_lives() -> None:
    """libzmq 4.3.5 aborts the process if a socket lingers then."""
    process = multiprocessing.get_context("spawn").Process(target=_say_what_cannot_leave_and_close)
    process.start()
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_addresses_are_bound_as_they_are(host: str, address: str) -> None:
    assert bind_address(host) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no.such.name.invalid"])
def test_hosts_that_cannot_be_announced(host: str) -> None:
    with pytest.raises(ConfigError, match="host: expected"):
        bind_address(host)


@pytest.mark.parametrize("host", ["192.0.2.2", "2001:db8::2"])  # of nobody: RFC 5737, RFC 3849
def test_a_host_of_another_machine_is_no_port_in_use(host: str) -> None:
    with socket(AF_INET6 if ":" in host else AF_INET) as tried:
        try:
            tried.bind((host, 0))
        except OSError as e:
            if e.errno != errno.EADDRNOTAVAIL:
                pytest.skip(f"this machine has no such addresses: {e}")
        else:
            pytest.skip("this machine lets everybody bind any address")
    io = IoThread("io", lambda: None)
    with (
        zmq.Context() as context,
        pytest.raises(ConfigError, match=f"host: expected an address of this machine, got {host};"),
    ):
        ControlServer(io, context, Config(host=host), Ledger(), lambda *_: None, lambda _: None)
    assert io.stop(60)


def test_last_words_are_followed_by_the_end_of_their_connection() -> None:
    """Long ones are nobody's: they are thrown away."""
    told: list[tuple[str, bytes]] = []
    has_met = threading.Event()

    def handle(identity: bytes, message: ToSource) -> None:
        assert message == Ping()
        told.append(("heard", identity))

    def gone(identity: bytes) -> None:
        told.append(("gone", identity))

    io = IoThread("io", lambda: None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Guard(context, Config())
    ledger = Ledger()
    server = ControlServer(io, context, Config(), ledger, handle, gone)
    io.start()
    router = server.router

    def both_are_there() -> None:  # the end is read first: its socket is watched first
        router.visitors.meet()
        has_met.set()
        assert router.monitor.poll(120_000)
        assert router.socket.poll(120_000)

    with closing(zmtp.connect(server.endpoint)) as peer:
        io.post(both_are_there)
        assert has_met.wait(120)
        long = encode(Hello((1, 2), ("a" * 60,) * 20, "decode", b"i" * 16))
        peer.sendall(zmtp.frame(long) + zmtp.frame(encode(Ping())))
    # The end is told behind each turn of the reader, and a busy one may have a turn for each word
    until(lambda: [what for what, _ in told[-2:]] == ["heard", "gone"])
    assert len({identity for _, identity in told}) == 1
    assert [what for what, _ in told].count("heard") == 1
    stats = ledger.take_stats()
    assert stats is not None
    assert stats.counts["control.left"] == 1
    io.post(server.close)
    assert io.stop(60)
    context.term()  # the guard closes its socket, on its own thread
    guard.join()
