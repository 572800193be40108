"""The connections that a listener has accepted, and what one of them may hold.

ZeroMQ bounds neither how many there are nor what one may send that is not read. So each is followed
by its descriptor, from the events of the listener's monitor on. One too many is closed at once; one
with too large a backlog is closed at the next look.
"""

from __future__ import annotations

import itertools
import logging
import resource
import socket as sockets
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from kvxfer.transports.backlog import EVENT, Backlog, borrowed
from kvxfer.transports.zmq_inbox import SOURCE_FD, Inbox, Names
from kvxfer.transports.zmq_listeners import Rarely
from kvxfer.transports.zmq_same_host import unix_name

MAX_WAITING = 4
"""How many connections may hold the most that one may, all of a listener together."""
_SHARE = 8
"""A listener takes a part of the process's descriptors: a rank has up to four of them, so that half
is left for its own connections and for the engine.
"""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_RESET = struct.pack("ii", 1, 0)
_numbers = itertools.count()

_log = logging.getLogger("kvxfer.transports")


@dataclass(slots=True, eq=False)
class _Visitor:
    address: str
    backlog: Backlog
    has_spoken: bool = False


class Visitors:
    """Of one listener. Make it before it binds, and set ``endpoint`` then.

    Args:
        most_nbytes: what a connection may have sent that was not read, at a look.
        most: connections at once; half of them of one address.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        most_nbytes: int,
        most: int | None = None,
    ) -> None:
        self.endpoint = ""
        self.monitor = _make_monitor(context, socket)
        self._socket = socket
        self.names = Names()
        self._events = Inbox(self.monitor)
        self._most_nbytes = most_nbytes
        self._most = most_connections() if most is None else most
        self._visitors: dict[int, _Visitor] = {}
        self._num_of: Counter[str] = Counter()
        self._has_failed = False
        self._gone: list[bytes] = []
        self._rarely = Rarely()

    def __len__(self) -> int:
        return len(self._visitors)

    def meet(self) -> None:
        """Who has come and gone, as ``monitor`` says."""
        for event, *_ in self._events.receive():
            self._on_event(event)

    def take_gone(self) -> list[bytes]:
        """The identities of connections that have ended since the last call, and had sent a
        message.
        """
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        """End the watch, before the listener is closed. Idempotent."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close(linger=0)
            self._visitors.clear()
            self._num_of.clear()

    def _on_event(self, event: zmq.Frame) -> None:
        kind, fd = EVENT.unpack(event.buffer)
        if kind == zmq.EVENT_ACCEPTED:
            self._enter(fd)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._has_failed = True  # whose connection the next event ends
        elif kind == zmq.EVENT_DISCONNECTED:
            if self._has_failed:
                self._warn(fd, "it speaks another protocol, or has no CURVE key and needs one")
            self._has_failed = False
            self._leave(fd)

    def heard(self, frames: Sequence[zmq.Frame]) -> None:
        """A message came, identity first."""
        fd = frames[-1].get(SOURCE_FD)
        if fd not in self._visitors:  # it came since the last look at the monitor
            self.meet()
        visitor = self._visitors.get(fd)
        if visitor is None:  # it has ended already, and now it had sent a message
            self._leave(fd)
            return
        visitor.has_spoken = True
        visitor.backlog.note(frames[1:])

    def send_away(self, frame: zmq.Frame, why: str) -> None:
        """End the connection that this came from."""
        self._shut(frame.get(SOURCE_FD), why)

    def look(self, *, was_empty: bool) -> None:
        """Close connections that have sent too much that was not read. ``was_empty``: since the
        last look the listener had nothing left to read.
        """
        for fd in [fd for fd, each in self._visitors.items() if each.backlog.is_heard]:
            self._visitors[fd] = self._visitors.pop(fd)  # the longest silent comes first
        backlogs = {
            fd: visitor.backlog.look(was_empty=was_empty) for fd, visitor in self._visitors.items()
        }
        left_nbytes = sum(backlogs.values())
        for fd, nbytes in sorted(backlogs.items(), key=lambda item: -item[1]):
            if nbytes <= self._most_nbytes and left_nbytes <= MAX_WAITING * self._most_nbytes:
                break
            left_nbytes -= nbytes
            self._shut(fd, f"it has sent {nbytes} bytes that are no messages, or too many")

    def _enter(self, fd: int) -> None:
        try:
            with borrowed(fd) as socket:
                address = _address_of(socket)
        except OSError:  # gone already
            return
        self._leave(fd)
        if self._num_of[address] >= self._most // 2:
            self._make_room(address)
        elif len(self._visitors) >= self._most:
            self._make_room(None)
        self._visitors[fd] = _Visitor(address, Backlog(fd))
        self._num_of[address] += 1

    def _make_room(self, address: str | None) -> None:
        """End the connection (of this address) that came first of those that never said a word,
        else the one that has been silent longest.
        """
        fds = [fd for fd, each in self._visitors.items() if address in (None, each.address)]
        silent = next((fd for fd in fds if not self._visitors[fd].has_spoken), fds[0])
        self._shut(silent, f"it was silent, and {self._most} may be connected, half of an address")
        self._leave(silent)

    def _leave(self, fd: int) -> None:
        name = self.names.forget(fd)
        if name is not None:
            self._gone.append(name)
        visitor = self._visitors.pop(fd, None)
        if visitor is not None:
            self._num_of[visitor.address] -= 1
            if not self._num_of[visitor.address]:
                del self._num_of[visitor.address]

    def _shut(self, fd: int, why: str) -> None:
        """ZeroMQ finds its end, and says so. The descriptor may be another connection's by now: it
        must be of the same address and listener.
        """
        visitor = self._visitors.get(fd)
        if visitor is None:
            return
        try:
            with borrowed(fd) as socket:
                if _address_of(socket) == visitor.address and self._is_ours(socket):
                    # The other side learns of it at once, however full its connection is
                    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
                    socket.shutdown(sockets.SHUT_RDWR)
        except OSError:  # gone already
            return
        self._warn(fd, why)

    def _is_ours(self, socket: sockets.socket) -> bool:
        name = socket.getsockname()
        if socket.family == sockets.AF_UNIX:
            return bool(name == unix_name(self.endpoint))
        return self.endpoint.endswith(f":{name[1]}")

    def _warn(self, fd: int, why: str) -> None:
        visitor = self._visitors.get(fd)
        address = "an unknown address" if visitor is None else visitor.address or "this user"
        if self._rarely.take(address):
            _log.warning("%s: a connection from %s was closed: %s", self.endpoint, address, why)


def most_connections() -> int:
    """Of one listener, by how many descriptors the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(2, (soft if soft > 0 else 1 << 16) // _SHARE)


def _make_monitor(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]
) -> zmq.Socket[bytes]:
    """With room for whatever happens: ZeroMQ's thread would wait for room, and with it all others'
    messages.
    """
    name = f"inproc://kvxfer-visitors-{next(_numbers)}"
    socket.monitor(name, _EVENTS)
    monitor = context.socket(zmq.PAIR)
    monitor.rcvhwm = 0
    monitor.connect(name)
    return monitor


def _address_of(socket: sockets.socket) -> str:
    return "" if socket.family == sockets.AF_UNIX else str(socket.getpeername()[0])
