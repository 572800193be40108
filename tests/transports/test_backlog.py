"""How much of a connection was received and not read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import zmq

from kvxfer.transports.visitors import Backlog, Inbox, Visitors
from tests import zmtp

Socket = zmq.Socket[bytes]


@pytest.fixture
def router() -> Iterator[Socket]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = router.rcvhwm = 0
        yield router


@pytest.fixture
def inbox(router: Socket) -> Iterator[Inbox]:
    visitors = Visitors(router.context, router, 1 << 20)
    router.bind("tcp://127.0.0.1:*")
    yield Inbox(router, visitors)
    visitors.close()


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
        backlog.note([frame])
        assert backlog.look(was_empty=True) == 0
        long = b"\x02" + (1000).to_bytes(8, "big") + bytes(1000)
        peer.sendall(zmtp.frame(b"y" * 255) + long + zmtp.EMPTY_PART * 500)
        until(lambda: backlog.look(was_empty=False) == 257 + 1009 + 1000)

        def read(number: int) -> None:
            while number:
                assert router.poll(10_000)
                for frames in inbox.receive():
                    backlog.note(frames[1:])
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
