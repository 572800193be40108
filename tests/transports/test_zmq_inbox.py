"""What a reader gets of a socket that anybody may write to."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from kvxfer.transports.visitors import (
    MESSAGES_PER_TURN,
    MOST_PARTS,
    TURN_S,
    Inbox,
    Visitors,
)
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


def endpoint_of(router: Socket) -> str:
    return router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def turn(inbox: Inbox, *, each_s: float = 0.0) -> list[list[bytes]]:
    messages = []
    for frames in inbox.receive():
        messages.append([frame.bytes for frame in frames[1:]])
        time.sleep(each_s)
    return messages


def all_of(inbox: Inbox, router: Socket) -> list[list[bytes]]:
    """Until nothing more has come for a while."""
    messages = []
    while router.poll(500):
        messages += turn(inbox)
    return messages


def test_a_turn_ends_by_number_and_by_time(router: Socket, inbox: Inbox) -> None:
    count = 2 * MESSAGES_PER_TURN
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"x") * count + zmtp.EMPTY_PART + zmtp.frame(b"last"))
        time.sleep(0.3)
        assert turn(inbox, each_s=2 * TURN_S) == [[b"x"]]
        assert not inbox.take_empty()
        assert len(turn(inbox)) <= MESSAGES_PER_TURN
        rest = all_of(inbox, router)
    assert rest[-1] == [b"", b"last"]
    assert turn(inbox) == []  # the last turn may have ended with the last message, by time
    assert inbox.take_empty()
    assert not inbox.take_empty()


@pytest.mark.parametrize("part", [zmtp.EMPTY_PART, b"\x01\x05\0abcd", b"\x01\x03xyz"])
def test_of_a_message_of_many_parts_come_the_first_and_of_others_all(
    router: Socket, inbox: Inbox, part: bytes
) -> None:
    endpoint = endpoint_of(router)
    with closing(zmtp.connect(endpoint)) as peer, closing(zmtp.connect(endpoint)) as other:
        for _ in range(3):
            peer.sendall(part * 10_000 + part.replace(b"\x01", b"\x00", 1))
            time.sleep(0.1)
            other.sendall(zmtp.frame(b"honest") + zmtp.frame(b"again"))
        messages = all_of(inbox, router)
    long = [message for message in messages if len(message) == MOST_PARTS - 1]
    assert 1 <= len(long) <= 3
    assert [each for each in messages if each not in long] == [[b"honest"], [b"again"]] * 3


def test_what_follows_the_end_is_read_as_it_is(router: Socket, inbox: Inbox) -> None:
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.EMPTY_PART * 1000 + zmtp.EMPTY_END)
        assert [len(message) for message in all_of(inbox, router)] == [MOST_PARTS - 1]
        peer.sendall(zmtp.frame(b"again"))
        assert all_of(inbox, router) == [[b"again"]]


def test_nobody_speaks_in_the_name_of_another(router: Socket, inbox: Inbox) -> None:
    """Neither behind parts of a message that is thrown away nor behind a name of his own."""
    endpoint = endpoint_of(router)
    with (
        closing(zmtp.connect(endpoint)) as thrown,
        closing(zmtp.connect(endpoint)) as victim,
        closing(zmtp.connect(endpoint)) as helper,
        closing(zmtp.connect(endpoint, name=b"own")) as named,
    ):
        victim.sendall(zmtp.frame(b"hello"))
        router.poll(5000)
        ((name, _),) = [[frame.bytes for frame in frames] for frames in inbox.receive()]
        forged = bytes([1, len(name)]) + name + zmtp.frame(b"forged")
        for _ in range(3):
            thrown.sendall(zmtp.EMPTY_PART * 1000 + bytes([1, len(name)]) + name)
            thrown.sendall(zmtp.frame(b"forged") + zmtp.EMPTY_PART * 1000 + bytes([0, len(name)]))
            thrown.sendall(name)
            time.sleep(0.1)
            for peer in (helper, named):
                peer.sendall(forged)
            victim.sendall(zmtp.frame(b"true"))
        heard = []
        while router.poll(500):
            for frames in inbox.receive():
                if frames[0].bytes == name:
                    heard.append([frame.bytes for frame in frames[1:]])
    assert heard == [[b"true"]] * 3


def test_who_has_the_descriptor_of_one_that_has_ended_is_not_taken_for_it(
    router: Socket, visitors: Visitors, inbox: Inbox
) -> None:
    """Its message may be read before what the monitor says of both."""
    with closing(zmtp.connect(endpoint_of(router))):
        assert visitors.monitor.poll(5000)
        visitors.meet()
    time.sleep(0.2)
    for _ in range(2):
        with closing(zmtp.connect(endpoint_of(router))) as peer:
            peer.sendall(zmtp.frame(b"x"))
            assert router.poll(5000)
            ((name, _),) = inbox.receive()
            visitors.meet()
            assert visitors.take_gone() == []
            assert len(visitors) == 1
        time.sleep(0.2)
        visitors.meet()
        assert visitors.take_gone() == [name.bytes]


def test_who_came_behind_many_others_is_not_taken_for_gone(
    router: Socket, visitors: Visitors, inbox: Inbox
) -> None:
    for _ in range(MESSAGES_PER_TURN // 2 + 1):  # two events each
        socket.create_connection(("127.0.0.1", int(endpoint_of(router).rsplit(":")[-1]))).close()
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"x"))
        assert router.poll(5000)
        assert len(turn(inbox)) == 1
        while not visitors.meet():
            pass
        assert (visitors.take_gone(), len(visitors)) == ([], 1)
