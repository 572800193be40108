"""What a reader gets of a socket that anybody may write to, and what lies there unread."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from kvxfer.transports import visitors as visitors_module
from kvxfer.transports.visitors import (
    EVENT,
    LEAST_SEEN,
    LOOK_PARTS,
    LOOK_S,
    LOOKED_AT_ONCE,
    MESSAGES_PER_TURN,
    MOST_LAST_WORDS,
    MOST_MUTE,
    MOST_PARTS,
    SOONER,
    TURN_S,
    Backlog,
    Inbox,
    ManyParts,
    Visitors,
    has_other_side,
)
from tests import zmtp
from tests.connector.rig import until

Socket = zmq.Socket[bytes]
MOST_NBYTES = 1 << 20
"""That a connection may have sent, unread."""


@pytest.fixture
def router() -> Iterator[Socket]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = router.rcvhwm = 0
        yield router


@pytest.fixture
def visitors(router: Socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Visitors]:
    """Who sends many parts stays, so that what it says next is read, too."""
    visitors = Visitors(router.context, router, MOST_NBYTES)
    monkeypatch.setattr(visitors, "send_away", lambda *_: None)
    router.bind("tcp://127.0.0.1:*")
    visitors.endpoint = endpoint_of(router)
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


def all_of(inbox: Inbox, router: Socket, number: int) -> list[list[bytes]]:
    """So many messages, and those that come for a while after them."""
    messages: list[list[bytes]] = []
    while router.poll(500 if len(messages) >= number else 120_000):
        messages += turn(inbox)
    return messages


def test_a_turn_ends_by_number_and_by_time(router: Socket, inbox: Inbox) -> None:
    count = 2 * MESSAGES_PER_TURN
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"x") * count + zmtp.EMPTY_PART + zmtp.frame(b"last"))
        time.sleep(0.3)
        assert router.poll(120_000)
        assert turn(inbox, each_s=2 * TURN_S) == [[b"x"]]
        assert not inbox.take_empty()
        num_read = len(turn(inbox))
        assert num_read <= MESSAGES_PER_TURN
        rest = all_of(inbox, router, count - num_read)
    assert rest[-1] == [b"", b"last"]
    assert turn(inbox) == []  # the last turn may have ended with the last message, by time
    assert inbox.take_empty()
    assert inbox.take_empty()  # nothing has come since


def long_ones(messages: list[list[bytes]]) -> list[list[bytes]]:
    return [message for message in messages if len(message) == MOST_PARTS - 1]


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
        messages: list[list[bytes]] = []
        while messages.count([b"again"]) < 3 or not long_ones(messages):
            assert router.poll(120_000)
            messages += turn(inbox)
        messages += all_of(inbox, router, 0)
    long = long_ones(messages)
    assert 1 <= len(long) <= 3
    assert [each for each in messages if each not in long] == [[b"honest"], [b"again"]] * 3


def test_a_descriptor_that_becomes_a_unix_socket_s_meanwhile_is_nobody_s(
    router: Socket, visitors: Visitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's thread has closed the connection, and made another, between two looks at it."""
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"a word"))
        assert router.poll(120_000)
        number = peer.fileno()

        class Reused(socket.socket):
            def __init__(self, *, fileno: int) -> None:
                super().__init__(fileno=fileno)
                os.dup2(ours.fileno(), fileno)

        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Reused)
            visitors._enter(number)
        assert number not in visitors._visitors


def test_who_has_gone_does_not_stand_though_nobody_was_told(
    router: Socket, visitors: Visitors, inbox: Inbox
) -> None:
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"a word"))
        assert router.poll(120_000)
        ((name, _),) = inbox.receive()
        assert visitors.stands(name.bytes)
    until_s = time.monotonic() + 240.0
    while visitors.stands(name.bytes):  # its end is on its way
        assert time.monotonic() < until_s
    assert visitors.take_gone() == []
    while not visitors.take_gone():
        assert time.monotonic() < until_s
        visitors.meet()
    assert not visitors.stands(name.bytes)


def test_many_parts_from_who_was_connected_to_are_an_error_after_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visitors_module, "TURN_S", 60.0)  # both messages are of one turn
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as peer,
        context.socket(zmq.PAIR) as reader,
    ):
        peer.bind("inproc://many")
        reader.connect("inproc://many")
        parts = [b""] * MOST_PARTS
        peer.send_multipart(parts)
        peer.send_multipart([*parts, b""])
        turn = Inbox(reader, Backlog(-1)).receive()
        assert [frame.bytes for frame in next(turn)] == parts
        with pytest.raises(ManyParts, match=r"^it sent a message of many parts$"):
            next(turn)


def test_what_follows_the_end_is_read_as_it_is(router: Socket, inbox: Inbox) -> None:
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.EMPTY_PART * 1000 + zmtp.EMPTY_END)
        assert [len(message) for message in all_of(inbox, router, 1)] == [MOST_PARTS - 1]
        peer.sendall(zmtp.frame(b"again"))
        assert all_of(inbox, router, 1) == [[b"again"]]


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
        assert router.poll(120_000)
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
        heard: list[list[bytes]] = []
        while router.poll(500 if len(heard) >= 3 else 120_000):
            for frames in inbox.receive():
                if frames[0].bytes == name:
                    heard.append([frame.bytes for frame in frames[1:]])
    assert heard == [[b"true"]] * 3


def test_who_has_the_descriptor_of_one_that_has_ended_is_not_taken_for_it(
    router: Socket, visitors: Visitors, inbox: Inbox
) -> None:
    """Its message may be read before what the monitor says of both."""
    with closing(zmtp.connect(endpoint_of(router))):
        assert visitors.monitor.poll(120_000)
        visitors.meet()
    assert visitors.monitor.poll(120_000)  # its end, of which nobody reads yet
    for _ in range(2):
        with closing(zmtp.connect(endpoint_of(router))) as peer:
            peer.sendall(zmtp.frame(b"x"))
            assert router.poll(120_000)
            ((name, _),) = inbox.receive()
            visitors.meet()
            assert visitors.take_gone() == []
            assert len(visitors) == 1
        until(lambda: visitors.meet() and not len(visitors))
        assert visitors.take_gone() == [name.bytes]


def knock(router: Socket, number: int, wait_s: float | None = None) -> int:
    """Connections that go at once, until one waits too long. Returns how many there were."""
    where = "127.0.0.1", int(endpoint_of(router).rsplit(":")[-1])
    for made in range(number):
        try:
            socket.create_connection(where, wait_s).close()
        except TimeoutError:
            return made
    return number


def test_who_came_behind_many_others_is_not_taken_for_gone(
    router: Socket, visitors: Visitors, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors_module, "LISTENER_TURN_S", 0.0)  # a look at 32 events
    knock(router, 100)  # two events each
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"x"))
        assert router.poll(120_000)
        assert len(turn(inbox)) == 1
        while not visitors.meet():
            pass
        assert (visitors.take_gone(), len(visitors)) == ([], 1)
        (fd,) = visitors._visitors
        assert visitors.name_of(fd) is not None


def test_a_listener_takes_no_more_connections_than_somebody_looks_at(
    router: Socket, visitors: Visitors, inbox: Inbox
) -> None:
    """ZeroMQ waits with 1,000 events beside MOST_EVENTS, some of each connection; the kernel
    keeps 100 connections or more, and lets the next one wait.
    """
    most = (visitors_module.MOST_EVENTS + 1000) // 2
    backlog = int(Path("/proc/sys/net/core/somaxconn").read_text(encoding="ascii"))
    made = knock(router, 2 * (most + backlog), wait_s=0.5)
    assert made <= most + backlog + 2
    until(visitors.meet)
    with closing(zmtp.connect(endpoint_of(router), address="127.0.9.7")) as peer:
        peer.sendall(zmtp.frame(b"x"))
        assert router.poll(120_000)
        assert len(turn(inbox)) == 1


BUSY, OTHER, THIRD, UNSEEN = "127.0.9.1", "127.0.9.2", "127.0.9.3", ""


@pytest.mark.parametrize(
    ("ended", "shut"),
    [
        ([BUSY] * MOST_MUTE, [BUSY]),
        ([BUSY] * (MOST_MUTE - 1), []),
        ([UNSEEN] * (MOST_MUTE - LEAST_SEEN) + [BUSY] * LEAST_SEEN, [BUSY]),
        ([UNSEEN] * MOST_MUTE + [BUSY] * (LEAST_SEEN - 1), []),
        ([UNSEEN] * MOST_MUTE + [OTHER] * (LEAST_SEEN - 1) + [BUSY] * LEAST_SEEN, [BUSY]),
        ([OTHER] * MOST_MUTE + [BUSY] * MOST_MUTE, [OTHER, BUSY]),
        ([UNSEEN] * 3 * MOST_MUTE, []),
        ([BUSY, OTHER, THIRD] * MOST_MUTE, []),
        ([BUSY, OTHER, BUSY] * MOST_MUTE, [BUSY] * 2),
        ([BUSY, OTHER] * MOST_MUTE, [BUSY]),
        ([BUSY] * MOST_MUTE * 2, [BUSY] * 2),
    ],
)
def test_of_connections_that_say_nothing_most_are_of_one_address_or_nobody_is_kept_out(
    visitors: Visitors, ended: list[str], shut: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(visitors._floods, "shut", lambda address, _: told.append(address))
    for address in ended:
        visitors._count_mute(address)
    assert told == shut


def test_a_look_begins_to_count_anew(
    visitors: Visitors, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(visitors._floods, "shut", lambda address, _: told.append(address))
    for _ in range(4):
        for address in [UNSEEN] * (MOST_MUTE - LEAST_SEEN) + [BUSY] * (LEAST_SEEN - 1):
            visitors._count_mute(address)
        visitors.look(inbox.take_empty)
    for address in [UNSEEN] * MOST_MUTE + [BUSY] * (LEAST_SEEN - 1):
        visitors._count_mute(address)
    assert told == []


def test_who_speaks_or_gives_way_is_no_flood(
    router: Socket, visitors: Visitors, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that were heard, and those that this side has ended to make room."""
    told: list[str] = []
    monkeypatch.setattr(visitors._floods, "shut", lambda address, _: told.append(address))
    monkeypatch.setattr(visitors_module, "MOST_OF_ADDRESS", 2)
    peers = []
    for number in range(2 * MOST_MUTE):
        peers.append(zmtp.connect(endpoint_of(router)))
        if number % 2:
            peers[-1].sendall(zmtp.frame(b"x"))
            until(lambda: turn(inbox))
        visitors.meet()
    for peer in peers:
        peer.close()
    until(lambda: visitors.meet() and not len(visitors))
    assert told == []


def test_a_listener_is_closed_of_which_nobody_has_read(router: Socket) -> None:
    """With the interpreter's lock this waits for a lock of ZeroMQ's, which a thread has that waits
    for room.
    """
    visitors = Visitors(router.context, router, MOST_NBYTES)
    router.bind("tcp://127.0.0.1:*")
    knock(router, visitors_module.MOST_EVENTS, wait_s=0.5)
    visitors.close()
    assert visitors.monitor.closed


def test_what_one_that_was_sent_away_has_left_is_thrown_away(
    router: Socket, visitors: Visitors, inbox: Inbox
) -> None:
    with (
        closing(zmtp.connect(endpoint_of(router))) as rude,
        closing(zmtp.connect(endpoint_of(router), address="127.0.0.9")) as peer,
    ):
        rude.sendall(zmtp.frame(b"x") * 1000)
        assert router.poll(120_000)
        name, *_ = next(inbox.receive())
        visitors.unread(name.bytes, most=1)
        assert visitors.is_spent(name.bytes)
        peer.sendall(zmtp.frame(b"y"))
        heard: list[list[bytes]] = []

        def has_heard() -> bool:
            heard.extend(turn(inbox))
            return [b"y"] in heard

        until(has_heard)
        assert heard + all_of(inbox, router, 0) == [[b"y"]]


def test_of_one_that_has_ended_so_many_last_words_come(
    router: Socket, visitors: Visitors, inbox: Inbox
) -> None:
    for _ in range(2):
        with closing(zmtp.connect(endpoint_of(router))) as peer:
            peer.sendall(zmtp.frame(b"x") * (MOST_LAST_WORDS + 100))
        until(lambda: visitors.meet() and len(visitors) == 0)
        assert all_of(inbox, router, MOST_LAST_WORDS) == [[b"x"]] * MOST_LAST_WORDS
        assert len(visitors.take_gone()) == 1


def test_who_names_itself_and_is_back_is_heard(
    router: Socket, visitors: Visitors, inbox: Inbox
) -> None:
    with router.context.socket(zmq.DEALER) as first:
        first.routing_id = b"same"
        first.connect(endpoint_of(router))
        for _ in range(MOST_LAST_WORDS + 100):
            first.send(b"x")
        assert router.poll(120_000)  # it was there before it is looked whether it has gone
    until(lambda: visitors.meet() and len(visitors) == 0)
    assert all_of(inbox, router, MOST_LAST_WORDS) == [[b"x"]] * MOST_LAST_WORDS
    with router.context.socket(zmq.DEALER) as again:
        again.routing_id = b"same"
        again.connect(endpoint_of(router))
        again.send(b"y")
        assert router.poll(120_000)
        assert all_of(inbox, router, 1) == [[b"y"]]


def test_who_was_unsure_is_known_when_he_speaks_again(
    router: Socket, visitors: Visitors, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """His second message is what has the rest of the events read."""
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"x"))
        assert router.poll(120_000)
        with monkeypatch.context() as patch:
            patch.setattr(visitors, "meet", lambda: False)
            assert len(turn(inbox)) == 1
        peer.sendall(zmtp.frame(b"again"))
        assert router.poll(120_000)
        assert len(turn(inbox)) == 1
        assert visitors.take_gone() == []
        (fd,) = visitors._visitors
        assert visitors.name_of(fd) is not None


# ------------------------------------------------------------------ what lies there


def test_what_was_not_read_is_counted_to_the_byte(
    router: Socket, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is thrown away goes in one turn
    monkeypatch.setattr(visitors_module, "LISTENER_TURN_S", 60.0)
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"x"))
        assert router.poll(120_000)
        ((_, frame),) = inbox.receive()
        backlog = Backlog(int(frame.get(zmq.SRCFD)))
        backlog.heard([frame])
        assert backlog.look(was_empty=True) == 0
        long = b"\x02" + (1000).to_bytes(8, "big") + bytes(1000)
        peer.sendall(zmtp.frame(b"y" * 255) + long + zmtp.EMPTY_PART * 500)
        until(lambda: backlog.look(was_empty=False) == 257 + 1009 + 1000)

        def read(number: int) -> None:
            while number:
                assert router.poll(120_000)
                for frames in inbox.receive():
                    backlog.heard(frames[1:])
                    number -= 1

        read(2)
        assert backlog.look(was_empty=False) == 1000  # of a message without an end
        peer.sendall(zmtp.EMPTY_END)
        read(1)
        assert not router.poll(0)
        assert backlog.look(was_empty=True) == 0


def test_many_connections_are_looked_at_in_parts(
    router: Socket, inbox: Inbox, visitors: Visitors
) -> None:
    """Each once in so many calls; who sends without an end is closed within as many."""

    def num_looked() -> int:
        return sum(not each.backlog.is_heard for each in visitors._visitors.values())

    number = LOOKED_AT_ONCE + 9
    with ExitStack() as stack:
        peers = [
            stack.enter_context(closing(zmtp.connect(endpoint_of(router)))) for _ in range(number)
        ]
        for peer in peers:
            peer.sendall(zmtp.frame(b"x"))
        num_read = 0
        while num_read < number or len(visitors) < number:
            num_read += len(turn(inbox))
            visitors.meet()
        assert visitors.look_s == LOOK_S
        for _ in range(LOOK_PARTS):
            before = num_looked()
            visitors.look(inbox.take_empty)
            assert 0 < num_looked() - before <= -(-number // LOOK_PARTS)
        assert visitors.look_s == LOOK_S / LOOK_PARTS
        assert num_looked() == number
        peers[3].sendall(zmtp.EMPTY_PART * (1 << 20))

        def is_ended() -> bool:
            visitors.look(inbox.take_empty)
            return not has_other_side(peers[3].fileno())

        until(is_ended)
        for peer in peers[4:]:
            peer.close()
        until(lambda: visitors.meet() and len(visitors) <= 3)
        for _ in range(LOOK_PARTS + 1):
            visitors.look(inbox.take_empty)
        assert visitors.look_s == LOOK_S


def test_who_has_sent_much_is_looked_at_sooner(
    router: Socket, inbox: Inbox, visitors: Visitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is counted anew in between, until the next look at all of them."""
    begun: list[None] = []
    begin = visitors._begin_look
    monkeypatch.setattr(visitors, "_begin_look", lambda is_empty: begun.append(begin(is_empty)))
    with closing(zmtp.connect(endpoint_of(router))) as peer:
        peer.sendall(zmtp.frame(b"x"))
        until(lambda: turn(inbox))
        until(visitors.meet)
        visitors.look(inbox.take_empty)
        assert visitors.look_s == LOOK_S
        many = zmtp.EMPTY_PART * (MOST_NBYTES // 4 // len(zmtp.EMPTY_PART) + 1)
        peer.sendall(many)

        def is_suspect() -> bool:
            visitors.look(inbox.take_empty)
            return visitors.look_s == LOOK_S / SOONER

        until(is_suspect)
        begun.clear()
        for number in range(2 * SOONER):
            visitors.look(inbox.take_empty)
            assert len(begun) == (number + 1) // SOONER
        peer.sendall(zmtp.EMPTY_END)
        assert router.poll(120_000)
        until(lambda: not (turn(inbox) or router.poll(0)))
        begun.clear()
        visitors.look(inbox.take_empty)
        assert (visitors.look_s, begun) == (LOOK_S, [])  # all of it was read
        peer.sendall(zmtp.EMPTY_PART * MOST_NBYTES)

        def is_ended() -> bool:
            visitors.look(inbox.take_empty)
            return not has_other_side(peer.fileno())

        until(is_ended)
    until(lambda: visitors.meet() and not len(visitors))
    visitors.look(inbox.take_empty)
    assert visitors.look_s == LOOK_S


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
        visitors.monitor = heard
        self._sockets = (self._teller, heard)

    def hear(self, kind: int) -> None:
        """Up to an event of this kind."""
        while not self._heard or EVENT.unpack(self._heard[-1][0])[0] != kind:
            assert self._said.poll(120_000)
            self._heard.append(self._said.recv_multipart())

    def hear_ends(self, number: int) -> None:
        """Up to the end of so many connections."""
        while number:
            assert self._said.poll(120_000)
            self._heard.append(self._said.recv_multipart())
            number -= EVENT.unpack(self._heard[-1][0])[0] == zmq.EVENT_DISCONNECTED

    def tell(self, *, once: bool = True) -> None:
        """All that was heard; again with the next call unless ``once``."""
        for event in self._heard:
            self._teller.send_multipart(event)
        if once:
            self._heard.clear()
        self._visitors.meet()

    def close(self) -> None:
        self._visitors.monitor = self._said
        for each in self._sockets:
            each.close(linger=0)


@pytest.fixture
def late(router: Socket, visitors: Visitors) -> Iterator[LateMonitor]:
    with closing(LateMonitor(visitors, router.context)) as late:
        yield late


def test_who_came_and_went_among_many_is_not_looked_at(
    router: Socket, visitors: Visitors, late: LateMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    enter = visitors._enter

    def counted(fd: int) -> None:
        looks.append(fd)
        enter(fd)

    monkeypatch.setattr(visitors, "_enter", counted)
    knock(router, 100)
    with closing(zmtp.connect(endpoint_of(router))):
        knock(router, 100)
        late.hear_ends(200)
        late.tell()
        until(visitors.meet)
        assert len(visitors) == 1
        assert 0 < len(looks) < 60


def read(router: Socket, inbox: Inbox) -> list[bytes]:
    """The next message, its sender's name first."""
    while True:
        assert router.poll(120_000)
        for frames in inbox.receive():
            return [frame.bytes for frame in frames]


def test_a_connection_may_speak_before_its_coming_is_told(
    router: Socket, visitors: Visitors, inbox: Inbox, late: LateMonitor
) -> None:
    """With several threads ZeroMQ may say so when messages of it were read already."""
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


def test_who_is_told_of_twice_has_not_gone(
    router: Socket, visitors: Visitors, inbox: Inbox, late: LateMonitor
) -> None:
    """First by what is said of a probe that had its descriptor, behind the probe's end."""
    with closing(zmtp.connect(visitors.endpoint)) as peer:
        late.hear(zmq.EVENT_ACCEPTED)
        late.tell(once=False)
        peer.sendall(zmtp.frame(b"x"))
        name, text = read(router, inbox)
        assert text == b"x"
        late.tell()
        assert (visitors.take_gone(), len(visitors)) == ([], 1)
        assert visitors.stands(name)


def test_who_has_ended_before_its_coming_is_told_is_gone(
    router: Socket, visitors: Visitors, inbox: Inbox, late: LateMonitor
) -> None:
    with closing(zmtp.connect(visitors.endpoint)) as peer:
        peer.sendall(zmtp.frame(b"x"))
        assert router.poll(120_000)
    late.hear(zmq.EVENT_DISCONNECTED)
    name, _ = read(router, inbox)
    assert (visitors.take_gone(), len(visitors)) == ([name], 0)
    late.tell()
    assert (visitors.take_gone(), len(visitors)) == ([], 0)
