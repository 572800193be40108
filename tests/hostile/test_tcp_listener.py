"""What a stranger at the port of tcp's payloads costs, beside loads of an honest pair that all go
on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache

import msgspec
import pytest

from kvxfer.transports import stream_wire
from kvxfer.transports.tcp_listener import GREETING, HELLO, MOST_UNPROVED
from kvxfer.transports.tcp_pipe import SinkAddress, SourceAddress
from tests import zmtp
from tests.connector.rig import until
from tests.hostile.rig import Honest, Peak, Usage, honest_pair

WAIT_S = 120.0
HASTE_S = 5.0
MOST_GROWTH_NBYTES = 64 << 20


@pytest.fixture(scope="module")
def honest() -> Iterator[Honest]:
    with honest_pair(wire="tcp", connect_timeout_s=HASTE_S) as honest:
        yield honest


@contextmanager
def attached(honest: Honest) -> Iterator[SourceAddress]:
    """A sink that has asked for a trial in two slots, by hand; what the source says of its end."""
    attach = stream_wire.Attach(
        stream_wire.STREAM_VERSION,
        *(2, 4 << 20, "tcp", msgspec.msgpack.encode(SinkAddress(8))),
        is_trial=True,
    )
    with closing(zmtp.connect(honest.target.data, WAIT_S, address="127.0.9.9")) as control:
        control.sendall(zmtp.frame(stream_wire.encode(attach)))
        for _ in range(2):
            control.sendall(zmtp.frame(stream_wire.encode(stream_wire.AskTrial(4 << 20))))
        yield _address_of(control)


@cache
def place_of(honest: Honest) -> tuple[str, int]:
    with attached(honest) as address:
        return address.host, address.port


def dial(honest: Honest, address: str = "127.0.9.9") -> socket.socket:
    return socket.create_connection(place_of(honest), WAIT_S, source_address=(address, 0))


def has_ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    return True


@dataclass(frozen=True, slots=True)
class Case:
    """``says``: what is sent on each of ``number`` connections; ``counted``: why they end."""

    name: str
    says: Callable[[], bytes]
    counted: str
    number: int = 1
    address: str = "127.0.9.9"


HELLO_OF_NOBODY = HELLO.pack(GREETING, 1, bytes(16))
CASES = (
    Case("garbage", lambda: bytes(range(256)) * 64, "handshake"),
    Case("a greeting of ZeroMQ", lambda: zmtp.GREETING, "handshake"),
    Case("a wrong token", lambda: HELLO_OF_NOBODY, "token", number=20),
    Case("half a hello", lambda: HELLO_OF_NOBODY[:20], "handshake", number=20),
    Case("nothing said", lambda: b"", "handshake", number=300),
    Case("an address that is not admitted", lambda: b"", "address", address="127.1.0.9"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stranger_at_the_payload_port_costs_his_connection(case: Case, honest: Honest) -> None:
    before, peak, counted = Usage.now(), Peak(), f"tcp.refused.{case.counted}"
    had = honest.source.count(counted)
    ended: list[bool] = []

    def attack() -> None:
        with ExitStack() as stack:
            peers = []
            for _ in range(case.number):
                try:
                    peers.append(stack.enter_context(closing(dial(honest, case.address))))
                except ConnectionError:  # over before the kernel has told of its begin
                    ended.append(True)
            for peer in peers:
                try:
                    peer.sendall(case.says())
                except OSError:
                    continue  # closed already: more than may wait
            ended.extend(has_ended(peer) for peer in peers)

    thread = threading.Thread(target=attack)
    thread.start()
    num_loads = 0
    while thread.is_alive() or num_loads < 2:
        honest.load()
        num_loads += 1
    thread.join()
    assert ended == [True] * case.number
    until(lambda: honest.source.count(counted) >= had + case.number, WAIT_S)
    until(lambda: Usage.now().descriptors <= before.descriptors)
    until(lambda: Usage.now().threads <= before.threads)
    assert peak.grown_nbytes < MOST_GROWTH_NBYTES


def test_no_more_wait_than_may() -> None:
    with ExitStack() as stack:
        honest = stack.enter_context(honest_pair(wire="tcp"))
        peers = [
            stack.enter_context(closing(dial(honest, f"127.0.8.{number % 4 + 2}")))
            for number in range(4 * MOST_UNPROVED)
        ]
        for peer in peers:
            peer.setblocking(False)
        until(lambda: sum(map(is_open, peers)) <= MOST_UNPROVED)  # none of them is late
        honest.load()


def is_open(peer: socket.socket) -> bool:
    try:
        return bool(peer.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_who_is_admitted_and_reads_nothing_keeps_nobody_up(honest: Honest) -> None:
    """A sink with a token, whose slots the source fills with a trial: it proves one socket, reads
    nothing from it, and goes.
    """
    before = Usage.now()
    with attached(honest) as address:
        assert address.num_sockets == 2  # of the source's own setting
        with closing(dial(honest)) as deaf:
            deaf.sendall(HELLO.pack(GREETING, address.connection, address.token))
            assert deaf.recv(16, socket.MSG_WAITALL) == address.answer
            for _ in range(5):
                honest.load()
    until(lambda: Usage.now().threads <= before.threads, WAIT_S)
    until(lambda: Usage.now().descriptors <= before.descriptors, WAIT_S)
    honest.load()


def _address_of(control: socket.socket) -> SourceAddress:
    """What the source answers: a frame of ZMTP with ``Attached``."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        flags, nbytes = control.recv(2, socket.MSG_WAITALL)
        body = control.recv(nbytes, socket.MSG_WAITALL)
        if flags & 4:  # a command of ZMTP
            continue
        message = stream_wire.decode_to_sink(memoryview(body))
        if isinstance(message, stream_wire.Attached):
            return msgspec.msgpack.decode(message.address, type=SourceAddress)
    raise AssertionError("expected attached, got none")


def test_slots_are_none_of_a_strangers(honest: Honest) -> None:
    """A sink that is attached elsewhere has another number and another token."""
    with attached(honest) as known, attached(honest) as other:
        assert known.connection != other.connection
        with closing(dial(honest)) as sock:
            sock.sendall(HELLO.pack(GREETING, known.connection, other.token))
            assert has_ended(sock)
    honest.load()
