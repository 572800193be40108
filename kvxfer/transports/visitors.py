"""Reads what any peer may send, in turns, and bounds what one connection may cost.

ZeroMQ bounds neither how many connections a listener has, nor what one of them may send that is not
read: it collects a message until its last part has come, and messages of any number where no
high-water mark is set. Our sockets receive without a high-water mark: ZeroMQ 4.3.5 aborts the
process ("Assertion failed: !_io_error") when a connection ends whose reading the mark had stopped
and then its heartbeat is due.

So a :class:`Backlog` counts what a connection has brought that nobody has read yet, an
:class:`Inbox` reads a socket in turns and no message of many parts, and :class:`Visitors` follows
each connection of a listener by its descriptor. One connection too many is closed at once; one with
too large a backlog is closed at the next look.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import select
import socket as sockets
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import zmq

from kvxfer.bounded import Bounded
from kvxfer.errors import ProtocolError
from kvxfer.log_limit import LogLimit
from kvxfer.transports.guard import MAX_WARNED, floods_of, penalties_of, unix_name
from kvxfer.transports.key_folder import short
from kvxfer.transports.syn_filter import lent

TURN_S = 0.001
"""After which the other readers have their turn; a message that is being handled ends first. A load
over a stream waits for three turns of a flooded port: with 5 ms it took 15 ms instead of 2.5.
"""
LISTENER_TURN_S = 0.00025
"""Of those that anybody may flood, and that bring no chunks. Beside floods of pulls a load took 2.4
ms instead of 3.4, medians on six cores.
"""
MESSAGES_PER_TURN = 256
MOST_PARTS = 8
"""Of a message, a ROUTER's identity included. Ours have three at most: who sends more than this is
no peer, and whoever reads ends his connection.
"""
LOOK_S = 0.1
"""How often to look for backlogs. Empty parts, of 2 bytes each, fill 0.6 GB/s of memory at most, on
two fast cores: 60 MB between two looks. With 0.25 s these parts took 400 MB and not 240, and one
load in a hundred beside them up to 14 ms instead of 2.5.
"""
SOONER = 8
"""So many looks in the time of one at connections that have sent more than a quarter of the most: a
message without an end takes all the time of ZeroMQ's thread until the look that closes it.
"""
DEALER_LOOK_S = 0.25
"""The same of connections to those that this side has chosen, of which it may have hundreds."""
LOOKED_AT_ONCE, LOOK_PARTS = 64, 8
"""Of more connections than that each look is made in parts, for one takes 3 us each: a load beside
1,300 waited for 4 ms.
"""
MOST_LEFT = 8
"""Connections of an address that may end while a listener is behind, which has had something to
read for LOOK_S: what they sent lies there and is nobody's backlog. One that came and went at once
filled 17 GB.
"""
MOST_UNREAD = 64
"""Answers that were dropped because a connection does not read; 512 lie there then. One that sent
6,000 hellos at a time and read nothing kept a source busy without an end.
"""
MOST_REFUSED = 128
"""Requests of an address that were no good, between two looks; the last one is a warning. A peer of
which each request is refused makes a dozen in that time. One that sent 40,000 pulls a second of
another prompt, and connected anew for every 50, kept a load waiting for 9 ms instead of 3.
"""
MOST_MUTE, LEAST_SEEN = 64, 4
"""Connections that end without a word, between two looks: whose most of them are is kept out if so
many were seen of it. Each takes ZeroMQ, the guard and this reader 0.1 ms, and an address made
10,000 a second, of which one in 40 was still there when it was looked at. Engines speak first, and
a probe comes once a second.
"""
MAX_WAITING = 4
"""How many connections may hold the most that one may, all of a listener together."""
EVENT = struct.Struct("=HI")
"""First frame of what a monitor tells: which event, and a descriptor or an error."""
MOST_EVENTS = 4096
"""Of a monitor that nobody has read. ZeroMQ's thread waits for room then, and takes no new
connection meanwhile: where each one was refused and came back at once, 12,000 a second, those of
one address filled 8.7 GB, and a load took 36 s.
"""
_EVENTS_AT_A_TIME = 16  # few: all of them are handled before a turn may end

# Plain numbers: pyzmq's flags are enums, whose arithmetic costs more than the calls they go to.
_NOBLOCK = int(zmq.NOBLOCK)
_SOURCE_FD = int(zmq.SRCFD)
_AT_END = (errno.EAGAIN, errno.ENOTSOCK)  # no more messages, or the reader has closed the socket
_PARTS_PER_LOOK = 256
_NAME_NBYTES = 5  # what a ROUTER calls a peer that has not named itself: 0, and four bytes
_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_ENDED = zmq.EVENT_DISCONNECTED
_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | _ENDED | _FAILED[0] | _FAILED[1]
_TURNS_TO_MEET = 4
"""Who connects again and again must not hold up a reader for ever."""
_MAX_ENDED = 4096
"""Names of connections that have ended. Hundreds of messages may be left of one; to look at the
monitor for each took half of a reader's time.
"""
MOST_LAST_WORDS = 256
"""Of a connection that has ended so many messages are handled, what one that was sent away has left
is thrown away. Of 150 that had sent 6,000 hellos each a source answered all, for half a minute, and
an honest one waited for 8 ms while each had its turn.
"""
_SHARE = 8
"""A listener takes a part of the process's descriptors: a rank has up to four of them, so that half
is left for its own connections and for the engine.
"""
MOST_OF_ADDRESS = 512
"""Connections of an address to a listener, however many descriptors there are."""
_TCP_INFO_NBYTES = 136
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128  # tcpi_bytes_received of linux/tcp.h, from Linux 4.1 on
_SHORT_NBYTES = 255  # ZMTP writes a longer frame's size in 8 bytes, not in 1
_RESET = struct.pack("ii", 1, 0)
_numbers = itertools.count()

_log = logging.getLogger("kvxfer.transports")


# ------------------------------------------------------------------ one connection


@dataclass(slots=True, eq=False)
class Backlog:
    """Of the connection with this descriptor; -1: there is none yet. ``base_nbytes``: received when
    all of it had been read; ``read_nbytes``: read since.
    """

    fd: int
    base_nbytes: int = 0
    read_nbytes: int = 0
    is_heard: bool = False

    def heard(self, frames: Sequence[zmq.Frame]) -> int:
        """Count a message that was read, with its framing on the wire. Returns the descriptor."""
        self.is_heard = True
        for frame in frames:
            nbytes = len(frame)
            self.read_nbytes += nbytes + (2 if nbytes <= _SHORT_NBYTES else 9)
        return self.fd

    def connected(self, fd: int) -> None:
        """It has this descriptor; what was counted is of an earlier connection if there was one."""
        if self.fd >= 0:
            self.base_nbytes, self.read_nbytes, self.is_heard = 0, 0, False
        self.fd = fd

    def look(self, *, was_empty: bool) -> int:
        """How many bytes were received and not read. ``was_empty``: since the last look there was
        nothing left to read; then what was read is all there was, but for a message on its way.
        """
        received_nbytes = _received(self.fd)
        if self.is_heard and was_empty:
            self.base_nbytes, self.read_nbytes = received_nbytes, 0
        self.is_heard = False
        return received_nbytes - self.base_nbytes - self.read_nbytes


def _received(fd: int) -> int:
    """Bytes, in all; 0 where the kernel does not say: of a Unix socket, whose peer is this user."""
    if fd < 0:
        return 0
    try:
        # With all that is known of it, or Python would ask the kernel three times more
        with lent(
            sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, sockets.IPPROTO_TCP, fd)
        ) as socket:
            info = socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_NBYTES)
    except OSError:  # gone, or a Unix socket
        return 0
    if len(info) < _TCP_INFO_NBYTES:
        return 0
    return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])


# ------------------------------------------------------------------ one socket


class ManyParts(ProtocolError):
    """The other side of a connection has sent a message of more than MOST_PARTS."""

    def __init__(self) -> None:
        super().__init__("it sent a message of many parts")


class Inbox:
    """The messages of one socket, each counted by ``counter`` before it is handed out.

    ZeroMQ hands a message over when all of it is there, in however many parts. Too many are
    :class:`ManyParts`, and the socket is to be closed. At a ROUTER (whose counter are its Visitors)
    the connection is ended: the first MOST_PARTS come, of which the last has ``more``, and what is
    left is thrown away, in turns as well.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], counter: Visitors | Backlog | None = None
    ) -> None:
        self._socket = socket
        self._counter = counter
        self._thrown_fd: int | None = None
        self._was_empty = False

    def take_empty(self) -> bool:
        """Whether everything had been read at some moment since the last call, or is now: where
        nothing comes nobody reads.
        """
        was_empty, self._was_empty = self._was_empty, False
        return was_empty or self._socket.closed or not self._socket.poll(0)

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """Those that came, for one turn, a peer's name first at a ROUTER. Raises ManyParts, but not
        there.
        """
        recv, counter = self._socket.recv, self._counter
        visitors = counter if isinstance(counter, Visitors) else None
        until_s = time.perf_counter() + (TURN_S if visitors is None else LISTENER_TURN_S)
        try:
            for _ in range(MESSAGES_PER_TURN):
                if self._thrown_fd is not None:
                    frames = self._skip(until_s)
                    if not frames:
                        return
                    self._thrown_fd = None
                else:
                    frames = [recv(_NOBLOCK, copy=False)]
                    while frames[-1].more and len(frames) < MOST_PARTS:
                        frames.append(recv(_NOBLOCK, copy=False))
                if counter is not None:
                    fd = counter.heard(frames)
                is_spent = visitors is not None and visitors.is_spent(frames[0].bytes)
                if frames[-1].more:
                    if visitors is None:
                        raise ManyParts
                    visitors.send_away(frames[0], str(ManyParts()))
                    self._thrown_fd = fd
                if not is_spent:
                    yield frames
                if time.perf_counter() >= until_s:
                    return
        except zmq.ZMQError as exc:
            if exc.errno not in _AT_END:
                raise
            self._thrown_fd = None  # messages come whole: here ends one
            self._was_empty = True

    def _skip(self, until_s: float) -> list[zmq.Frame]:
        """Up to the next message of another connection, of one part as all of ours are; none if
        that takes longer than a turn.

        A part takes 0.4 us as bytes and 2 as a frame, which knows where it comes from and whether
        it is the last: 5 MiB of empty ones would hold up all others for longer than a Ping may go
        unanswered. So only what may be a name is followed by a frame; and it counts as one only if
        it is that connection's, because anybody may send such a part.
        """
        visitors = self._counter
        assert isinstance(visitors, Visitors)
        recv = self._socket.recv
        while time.perf_counter() < until_s:
            for _ in range(_PARTS_PER_LOOK):
                part = recv(_NOBLOCK)
                while visitors.may_be_name(part):
                    frame = recv(_NOBLOCK, copy=False)
                    fd = int(frame.get(_SOURCE_FD))
                    name = visitors.name_of(fd)
                    if fd == self._thrown_fd and name is not None:
                        break
                    if not frame.more and visitors.is_name(part, of=name):
                        return [zmq.Frame(part), frame]
                    part = frame.bytes  # perhaps this is the name, behind a part of the thrown
        return []


# ------------------------------------------------------------------ one listener


@dataclass(slots=True, eq=False)
class _Visitor:
    """A connection. ``inode``: of its socket; unlike the descriptor no other one has it soon.
    ``name``: what the ROUTER calls it, once it has sent a message. ``is_warned``: it has
    misbehaved, and what it said was answered. ``num_unread``: answers that it did not read.
    """

    address: str
    inode: int
    backlog: Backlog
    name: bytes | None = None
    is_warned: bool = False
    num_unread: int = 0


class Visitors:
    """The connections of one ROUTER. Make it before the ROUTER binds, and set ``endpoint`` and
    ``key`` (its public CURVE key, if any) then. ``most_nbytes``: what a connection may have sent
    that was not read, at a look.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        most_nbytes: int,
    ) -> None:
        self.endpoint = ""
        self.key: str | None = None
        self.monitor = _make_monitor(context, socket)
        self._socket = socket
        self._most_nbytes = most_nbytes
        self._most = most_connections()
        self._visitors: dict[int, _Visitor] = {}
        self._fds: dict[bytes, int] = {}
        self._num_of: Counter[str] = Counter()
        self._is_behind = False
        self._num_left: Counter[str] = Counter()
        self._num_refused: Counter[str] = Counter()
        self._unlooked: list[int] = []
        self._suspects: list[int] = []
        self._num_sooner = 0
        self._backlogs: dict[int, int] = {}
        self._num_parts, self._num_at_once = 1, 0
        self._failed_with = 0
        self._num_failed = 0
        self._gone: dict[bytes, None] = {}
        self._ended: Bounded[bytes, int] = Bounded(_MAX_ENDED)
        """How many messages were read since."""
        self._unsure: dict[int, bytes] = {}
        """Who has said something through a descriptor of which more is to be heard first."""
        self._penalties = penalties_of(context)
        self._floods = floods_of(context)
        self._listening: list[int] = []
        self._num_mute, self._num_mute_of = 0, Counter[str]()
        self._warned: LogLimit[tuple[str, int]] = LogLimit(MAX_WARNED)

    def __len__(self) -> int:
        return len(self._visitors)

    def meet(self) -> bool:
        """By ``monitor``, for a turn. Returns whether those were all."""
        until_s, is_all = time.perf_counter() + LISTENER_TURN_S, False
        while not is_all:
            events = self._take_events()
            is_all = len(events) < _EVENTS_AT_A_TIME
            self._note(events, is_behind=not is_all)
            if time.perf_counter() >= until_s:
                break
        if is_all and self._unsure:
            unsure, self._unsure = self._unsure, {}
            for fd, name in unsure.items():
                self._settle(fd, name)
        return is_all

    def _note(self, events: Sequence[tuple[int, int, bytes]], *, is_behind: bool) -> None:
        """``is_behind``: who came and went among these is not looked at, which takes longer than to
        come.
        """
        ends = {fd: at for at, (kind, fd, _) in enumerate(events) if is_behind and kind == _ENDED}
        for at, (kind, fd, where) in enumerate(events):
            if kind == zmq.EVENT_ACCEPTED and ends.get(fd, -1) < at:
                self._enter(fd)
            elif kind in _FAILED and where[:3] == b"tcp":  # engines probe Unix sockets
                self._failed_with = fd  # an error; the next event ends its connection
                # Not who only connects and goes, as probes of a port do
                self._num_failed += kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            elif kind == _ENDED:
                self._tell_failed(fd)
                self._leave(fd)
            elif kind == zmq.EVENT_LISTENING:
                self._listening.append(fd)
                self._floods.filter.watch(fd)

    def _take_events(self) -> list[tuple[int, int, bytes]]:
        """Event, descriptor or error, and endpoint. Fewer than so many are all."""
        recv, events = self.monitor.recv, []
        try:
            for _ in range(_EVENTS_AT_A_TIME):
                events.append((*EVENT.unpack(recv(_NOBLOCK)), recv(_NOBLOCK)))
        except zmq.ZMQError as exc:
            if exc.errno not in _AT_END:
                raise
        return events

    def _settle(self, fd: int, name: bytes) -> None:
        """All events are known by which this connection's descriptor may have been another's."""
        visitor = self._visitors.get(fd)
        if visitor is None:
            self._count_last(name)
        elif visitor.name is None:
            visitor.name, self._fds[name] = name, fd

    def take_gone(self) -> list[bytes]:
        """The names of connections that have ended since the last call, and had sent a message. If
        a last message of one is read later, its name is returned once more.
        """
        gone, self._gone = self._gone, {}
        return list(gone)

    def has_gone(self, name: bytes) -> bool:
        return name in self._gone

    def is_spent(self, name: bytes) -> bool:
        """Whether what is read of it is to be thrown away: it was sent away, or has ended and left
        more than MOST_LAST_WORDS.
        """
        return self._ended.get(name, 0) > MOST_LAST_WORDS

    def _count_last(self, name: bytes, number: int = 1) -> None:
        """A connection has ended, and so many messages of it were read since."""
        self._gone[name] = None
        self._ended[name] = self._ended.get(name, 0) + number

    def stands(self, name: bytes) -> bool:
        """Whether the connection of this name has not ended, by what the kernel knows of it now:
        ZeroMQ may tell of the end later, behind all that was sent before.
        """
        fd = self._fds.get(name)
        return name not in self._ended if fd is None else has_other_side(fd)

    def descriptor_of(self, name: bytes) -> int | None:
        """Of the connection of this name, where it is known."""
        return self._fds.get(name)

    def take_num_failed(self) -> int:
        num_failed, self._num_failed = self._num_failed, 0
        return num_failed

    def heard(self, frames: Sequence[zmq.Frame]) -> int:
        """A message came, the name of its connection first. Returns its descriptor."""
        fd, name = int(frames[-1].get(_SOURCE_FD)), frames[0].bytes
        visitor = self._visitors.get(fd)
        if visitor is None or visitor.name != name:
            if self._has_ended(name, visitor):
                self._count_last(name)
                return fd
            # It came since the last look at the monitor, perhaps with the descriptor of one that
            # has ended since
            is_all = any(self.meet() for _ in range(_TURNS_TO_MEET))
            if fd not in self._visitors and is_all and has_other_side(fd):
                # One of ZeroMQ's threads accepts it and then says so; another has read this
                # meanwhile: with four threads on two busy cores 2 of 44,718 connections
                self._enter(fd)
            visitor = self._visitors.get(fd)
            if not is_all:  # whoever has the descriptor here may be one that ended before
                self._unsure[fd] = name
                return fd
            if visitor is None:  # it has ended already, and now it had sent a message
                self._count_last(name)
                return fd
            if visitor.name == name:  # it was unsure until now
                return visitor.backlog.heard(frames[1:])
            self._forget_name(fd, visitor)
            if visitor.name is not None:  # of one whose coming was untold, and that has ended
                self._count_last(visitor.name, 0)
            self._ended.pop(name, None)  # who names itself is back
            visitor.name, visitor.num_unread, self._fds[name] = name, 0, fd
        return visitor.backlog.heard(frames[1:])

    def send_away(self, frame: zmq.Frame, why: str) -> None:
        """End the connection that this came from; for a while its address makes no new one."""
        self._punish(int(frame.get(_SOURCE_FD)), why)

    def warn(self, frame: zmq.Frame, why: str) -> None:
        """Of the connection that this came from: it goes on to hear the answer, and is ended if it
        does that again. For a while its address makes no new one.
        """
        self._warn_once(int(frame.get(_SOURCE_FD)), why)

    def _warn_once(self, fd: int, why: str) -> None:
        visitor = self._visitors.get(fd)
        if visitor is None:  # it has ended already
            return
        if visitor.is_warned:
            self._punish(fd, why)
        else:
            visitor.is_warned = True
            self._penalise(visitor.address)

    def refused(self, name: bytes) -> None:
        """A request was no good; too many of them are a warning, as :meth:`warn` has it."""
        fd = self._fds.get(name, -1)
        visitor = self._visitors.get(fd)
        address = "" if visitor is None else visitor.address
        self._num_refused[address] += 1
        if self._num_refused[address] < MOST_REFUSED:
            return
        self._num_refused.clear()
        if visitor is not None:
            self._warn_once(fd, "it asks again and again for what it is not given")
        else:  # those that asked have gone
            self._penalise(self._busiest(time.monotonic()))

    def unread(self, name: bytes, most: int = MOST_UNREAD) -> None:
        """An answer was dropped; of so many the last ends the connection."""
        fd = self._fds.get(name)
        if fd is None:  # it has ended
            return
        self._visitors[fd].num_unread += 1
        if self._visitors[fd].num_unread >= most:
            self._punish(fd, "it does not read what it asks for")

    @property
    def keeps_out(self) -> bool:
        """Whether some address is kept out, which a look ends."""
        return bool(len(self._floods))

    @property
    def look_s(self) -> float:
        """After which :meth:`look` is to be called again."""
        return LOOK_S / self._num_parts / (SOONER if self._suspects else 1)

    def look(self, take_empty: Callable[[], bool]) -> None:
        """Close connections that have sent too much that was not read. ``take_empty``: since its
        last call the listener had nothing left to read. Of many connections each call looks at a
        part.
        """
        for visitor in filter(None, map(self._visitors.get, self._next_part(take_empty))):
            if nbytes := visitor.backlog.look(was_empty=not self._is_behind):
                self._backlogs[visitor.backlog.fd] = nbytes
            else:  # all that the look before had found was read
                self._backlogs.pop(visitor.backlog.fd, None)
        left_nbytes = sum(self._backlogs.values())
        for fd, nbytes in sorted(self._backlogs.items(), key=itemgetter(1), reverse=True):
            if nbytes <= self._most_nbytes and left_nbytes <= MAX_WAITING * self._most_nbytes:
                break
            left_nbytes -= self._backlogs.pop(fd)
            self._punish(fd, f"it has sent {nbytes} bytes that are no messages, or too many")
        self._suspects = [
            fd for fd, nbytes in self._backlogs.items() if nbytes > self._most_nbytes // 4
        ]

    def _next_part(self, take_empty: Callable[[], bool]) -> list[int]:
        """Of the connections, to be looked at now."""
        if self._suspects and self._num_sooner < SOONER - 1:
            self._num_sooner += 1
            return self._suspects
        self._num_sooner = 0
        if not self._unlooked:
            self._begin_look(take_empty())
        part, self._unlooked = (
            self._unlooked[: self._num_at_once],
            self._unlooked[self._num_at_once :],
        )
        return part

    def _begin_look(self, was_empty: bool) -> None:
        self._is_behind = not was_empty
        if was_empty:
            self._num_left.clear()
        self._num_refused.clear()
        self._num_mute_of.clear()
        self._num_mute = 0
        self._floods.open_due(time.monotonic())
        for fd in [fd for fd, each in self._visitors.items() if each.backlog.is_heard]:
            self._visitors[fd] = self._visitors.pop(fd)  # the longest silent comes first
        self._unlooked, self._backlogs = list(self._visitors), {}
        self._num_parts = LOOK_PARTS if len(self._unlooked) > LOOKED_AT_ONCE else 1
        self._num_at_once = -(-len(self._unlooked) // self._num_parts)

    def close(self) -> None:
        if not self.monitor.closed:
            # ZeroMQ's thread holds a lock while it waits for room, and the next call waits for that
            # lock, with the interpreter. There is room for more than can come in between.
            while len(self._take_events()) == _EVENTS_AT_A_TIME:
                pass
            self._socket.disable_monitor()
            self.monitor.close(linger=0)
            for fd in self._listening:
                self._floods.filter.forget(fd)
            self._visitors.clear()
            self._fds.clear()
            self._num_of.clear()

    # -- names

    def name_of(self, fd: int) -> bytes | None:
        visitor = self._visitors.get(fd)
        return None if visitor is None else visitor.name

    def may_be_name(self, part: bytes) -> bool:
        """Whether these bytes are a name: a known one, or such as a ROUTER makes."""
        return part in self._fds or _is_given(part)

    def is_name(self, part: bytes, *, of: bytes | None) -> bool:
        """Whether it stands before messages of the connection ``of`` (None: without a name)."""
        return part == of if of is not None else part not in self._fds

    def _has_ended(self, name: bytes, visitor: _Visitor | None) -> bool:
        """Whether the connection of this name is known to have ended: its end was told, or another
        one has its descriptor. A ROUTER counts in the names that it gives.
        """
        if not _is_given(name):
            return False  # who names itself may be back
        if name in self._ended:
            return True
        if visitor is None or visitor.name is None or not _is_given(visitor.name):
            return False
        ahead = int.from_bytes(visitor.name[1:], "big") - int.from_bytes(name[1:], "big")
        return 0 < ahead % (1 << 32) < 1 << 31

    def _forget_name(self, fd: int, visitor: _Visitor) -> None:
        if visitor.name is not None and self._fds.get(visitor.name) == fd:
            del self._fds[visitor.name]

    # -- who comes and goes

    def _enter(self, fd: int) -> None:
        """Whoever has this descriptor now, once. The thread that accepts a connection may say so
        when another of ZeroMQ's threads has read from it, and even when it has ended: who probes a
        Unix socket goes at once. Then the next connection has its descriptor, and is told of twice.
        Of 46,690 connections behind a probe, on two cores, 918 were.
        """
        known = self._visitors.get(fd)
        try:
            with lent(sockets.socket(fileno=fd)) as socket:
                inode = os.fstat(fd).st_ino
                if known is not None and known.inode == inode:
                    return
                address = _address_of(socket)
                if not self._is_ours(socket):  # gone already, and its descriptor is another's
                    return
        except OSError:  # gone already
            return
        if known is not None:
            self._leave(fd)
        if self._num_of[address] >= min(self._most // 2, MOST_OF_ADDRESS):
            self._make_room(address)
        elif len(self._visitors) >= self._most:
            self._make_room(None)
        self._visitors[fd] = _Visitor(address, inode, Backlog(fd))
        self._num_of[address] += 1

    def _make_room(self, address: str | None) -> None:
        """End the connection (of this address) that came first of those that never said a word,
        else the one that has been silent longest.
        """
        fds = (fd for fd, each in self._visitors.items() if address in (None, each.address))
        first = next(fds)
        unnamed = (fd for fd in itertools.chain((first,), fds) if self._visitors[fd].name is None)
        silent = next(unnamed, first)
        most = f"{self._most} may be connected, half and at most {MOST_OF_ADDRESS} of an address"
        self._shut(silent, f"it was silent, and {most}")
        self._leave(silent, gives_way=True)

    def _leave(self, fd: int, *, gives_way: bool = False) -> None:
        visitor = self._visitors.pop(fd, None)
        self._backlogs.pop(fd, None)
        if visitor is None:
            self._count_mute("")
            if self._is_behind:
                self._count_left("")
            return
        if visitor.name is not None:
            self._forget_name(fd, visitor)
            self._count_last(visitor.name, 0)
        elif not gives_way:
            self._count_mute(visitor.address)
        self._num_of[visitor.address] -= 1
        if not self._num_of[visitor.address]:
            del self._num_of[visitor.address]
        if self._is_behind and visitor.address:
            self._count_left(visitor.address)

    def _count_mute(self, address: str) -> None:
        """A connection has ended that said nothing; ``address`` "": nobody looked while it stood,
        so it counts for whom most of the others are of.
        """
        self._num_mute += 1
        if not address:
            return
        self._num_mute_of[address] += 1
        number, num_seen = self._num_mute_of[address], self._num_mute_of.total()
        if self._num_mute >= MOST_MUTE and number >= LEAST_SEEN and 2 * number > num_seen:
            self._floods.shut(address, time.monotonic())
            self._num_mute_of.clear()
            self._num_mute = 0

    def _count_left(self, address: str) -> None:
        """A connection has ended while this listener is behind; ``address`` "": nobody looked while
        it stood, so it counts for whoever has made most connections of late.
        """
        self._num_left[address] += 1
        now_s = time.monotonic()
        if self._num_left[address] < MOST_LEFT:
            return
        address = address or self._busiest(now_s)
        if address and not self._penalties.holds(address, now_s):
            self._num_left.clear()
            self._penalise(address)

    def _busiest(self, now_s: float) -> str:
        """Whose connections came and went unseen; "" if that is not sure: an engine that starts
        makes a few, too.
        """
        address, number = self._penalties.busiest(now_s)
        return address if number >= 2 * MOST_LEFT else ""

    def _punish(self, fd: int, why: str) -> None:
        visitor = self._visitors.get(fd)
        self._shut(fd, why)
        if visitor is not None and visitor.name is not None:
            self._ended[visitor.name] = MOST_LAST_WORDS + 1
        self._penalise(visitor.address if visitor is not None else "")

    def _penalise(self, address: str) -> None:
        """This address makes no new connections for a while, and those of it that have not said a
        word are ended. A process of this user, which comes over the Unix socket, may be back at
        once.
        """
        if not address:
            return
        self._penalties.add(address, time.monotonic())
        for other, each in list(self._visitors.items()):
            if each.address == address and each.name is None:
                self._shut(other, "another one of its address has misbehaved")

    def _shut(self, fd: int, why: str) -> None:
        """ZeroMQ finds its end, and says so. The descriptor may be another connection's by now: it
        must be of the same address and listener.
        """
        visitor = self._visitors.get(fd)
        if visitor is None:
            return
        try:
            with lent(sockets.socket(fileno=fd)) as socket:
                if _address_of(socket) == visitor.address and self._is_ours(socket):
                    _reset(socket)
        except OSError:  # gone already
            return
        self._warn(fd, why)

    def _is_ours(self, socket: sockets.socket) -> bool:
        name = socket.getsockname()
        if socket.family == sockets.AF_UNIX:
            return bool(name == unix_name(self.endpoint))
        return isinstance(name, tuple) and self.endpoint.endswith(f":{name[1]}")

    def _tell_failed(self, fd: int) -> None:
        error, self._failed_with = self._failed_with, 0
        if error == errno.EPIPE:
            # Of two sides of which one has keys the first to see it ends the connection
            why = "it ended the handshake; if it is an engine, give both sides CURVE keys or none"
            self._warn(fd, why, logging.INFO)  # as a probe of the port does
        elif error >= zmq.PROTOCOL_ERROR_ZMTP_UNSPECIFIED:
            self._warn(fd, self._why_failed(error))

    def _why_failed(self, error: int) -> str:
        if error == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            key = short(self.key)
            return f"it expects another CURVE key here than {key}; give both sides the same keys"
        if error != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "it speaks another protocol; is it a kvxfer engine?"
        if self.key is None:
            return "it has CURVE keys, and this engine has none; set them on both sides"
        return "it has no CURVE key and needs one; set them on both sides"

    def _warn(self, fd: int, why: str, level: int = logging.WARNING) -> None:
        visitor = self._visitors.get(fd)
        address = "an unknown address" if visitor is None else visitor.address or "this user"
        if self._warned.note((address, level), time.monotonic()):
            _log.log(level, "%s: a connection from %s was closed: %s", self.endpoint, address, why)


def _is_given(name: bytes) -> bool:
    """Whether it may be a ROUTER's own: 0, and a number of four bytes."""
    return len(name) == _NAME_NBYTES and not name[0]


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(2, (soft if soft > 0 else 1 << 16) // _SHARE)


def _make_monitor(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]
) -> zmq.Socket[bytes]:
    """With room for MOST_EVENTS."""
    name = f"inproc://kvxfer-visitors-{next(_numbers)}"
    socket.monitor(name, _EVENTS)
    monitor = context.socket(zmq.PAIR)
    monitor.rcvhwm = MOST_EVENTS
    monitor.connect(name)
    return monitor


def _reset(socket: sockets.socket) -> None:
    """The other side learns of it at once, however full its connection is; ZeroMQ closes it."""
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
    socket.shutdown(sockets.SHUT_RDWR)


def has_other_side(fd: int) -> bool:
    """Whether this is the descriptor of a connection whose other side has not ended it."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return not poll.poll(0)  # nor POLLHUP, POLLERR or POLLNVAL


def _address_of(socket: sockets.socket) -> str:
    if socket.family == sockets.AF_UNIX:
        return ""
    name = socket.getpeername()
    return str(name[0]) if isinstance(name, tuple) else ""  # a Unix socket has the descriptor now
