"""How much of a connection was received and not read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import zmq

from kvxfer.transports.visitors import EVENT, Backlog, Inbox, Visitors
from tests import zmtp

Socket = zmq.Socket[bytes]


@pytest.fixture
def router() -> Iterator[Socket]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = router.rcvhwm = 0
        yield router


@pytest.fixture
def visitors(router: Socket) -> Iterator[Visitors]:
    visitors = Visitors(router.context, router, 1 << 20)
    router.bind("tcp://127.0.0.1:*")
    visitors.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    yield visitors
    visitors.close()


@pytest.fixture
def inbox(router: Socket, visitors: Visitors) -> Inbox:
    return Inbox(router, visitors)


def until(wanted: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not wanted():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_what_was_not_read_is_counted_to_the_byte(router: Socket, inbox: Inbox) -> None:
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    with closing(zmtp.connect(endpoint)) as peer:
        peer.sendall(zmtp.frame(b"x"))
        assert router.poll(10_000)
        ((_, frame),) = inbox.receive()
        backlog = Backlog(int(frame.get(zmq.SRCFD)))
        backlog.heard([frame])
        assert backlog.look(was_empty=True) == 0
        long = b"\x02" + (1000).to_bytes(8, "big") + bytes(1000)
        peer.sendall(zmtp.frame(b"y" * 255) + long + zmtp.EMPTY_PART * 500)
        until(lambda: backlog.look(was_empty=False) == 257 + 1009 + 1000)

        def read(number: int) -> None:
            while number:
                assert router.poll(10_000)
                for frames in inbox.receive():
                    backlog.heard(frames[1:])
                    number -= 1

        read(2)
        assert backlog.look(was_empty=False) == 1000  # of a message without an end
        peer.sendall(zmtp.EMPTY_END)
        read(1)
        assert not router.poll(0)
        assert backlog.look(was_empty=True) == 0


def test_what_has_no_descriptor_or_no_count_has_no_backlog() -> None:
    assert Backlog(-1).look(was_empty=False) == 0
    assert Backlog(1_000_000).look(was_empty=False) == 0
    assert Backlog(0).look(was_empty=False) == 0  # no socket


class LateMonitor:
    """What ZeroMQ says of connections, held back until it is told on."""

    def __init__(self, visitors: Visitors, context: zmq.Context[Socket]) -> None:
        self._said, self._visitors = visitors.monitor, visitors
        self._heard: list[list[bytes]] = []
        self._teller, heard = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._teller.bind("inproc://late")
        heard.connect("inproc://late")
        visitors._events = Inbox(heard)
        self._sockets = (self._teller, heard)

    def hear(self, kind: int) -> None:
        """Up to an event of this kind."""
        while not self._heard or EVENT.unpack(self._heard[-1][0])[0] != kind:
            assert self._said.poll(10_000)
            self._heard.append(self._said.recv_multipart())

    def tell(self) -> None:
        """All that was heard."""
        for event in self._heard:
            self._teller.send_multipart(event)
        self._heard.clear()
        self._visitors.meet()

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)


@pytest.fixture
def late(router: Socket, visitors: Visitors) -> Iterator[LateMonitor]:
    with closing(LateMonitor(visitors, router.context)) as late:
        yield late


def read(router: Socket, inbox: Inbox) -> list[bytes]:
    """The next message, its sender's name first."""
    while True:
        assert router.poll(10_000)
        for frames in inbox.receive():
            return [frame.bytes for frame in frames]


def test_a_connection_may_speak_before_its_coming_is_told(
    router: Socket, visitors: Visitors, late: LateMonitor
) -> None:
    """With several threads ZeroMQ may say so when messages of it were read already."""
    inbox = Inbox(router, visitors)
    with closing(zmtp.connect(visitors.endpoint)) as peer:
        peer.sendall(zmtp.frame(b"x"))
        name, text = read(router, inbox)
        assert text == b"x"
        assert (visitors.take_gone(), len(visitors)) == ([], 1)
        late.hear(zmq.EVENT_ACCEPTED)
        late.tell()
        peer.sendall(zmtp.frame(b"y"))
        assert read(router, inbox) == [name, b"y"]
        assert (visitors.take_gone(), len(visitors)) == ([], 1)
    late.hear(zmq.EVENT_DISCONNECTED)
    late.tell()
    assert (visitors.take_gone(), len(visitors)) == ([name], 0)


def test_who_has_ended_before_its_coming_is_told_is_gone(
    router: Socket, visitors: Visitors, late: LateMonitor
) -> None:
    inbox = Inbox(router, visitors)
    with closing(zmtp.connect(visitors.endpoint)) as peer:
        peer.sendall(zmtp.frame(b"x"))
        assert router.poll(10_000)
    late.hear(zmq.EVENT_DISCONNECTED)
    name, _ = read(router, inbox)
    assert (visitors.take_gone(), len(visitors)) == ([name], 0)
    late.tell()
    assert (visitors.take_gone(), len(visitors)) == ([], 0)
