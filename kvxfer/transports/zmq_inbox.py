"""Reading a socket that anybody may write to: in turns, and no message of many parts."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator

import zmq

TURN_S = 0.005
"""After which the other readers have their turn; a message that is being handled ends first."""
MESSAGES_PER_TURN = 256
MOST_PARTS = 8
"""Of a message, a ROUTER's identity included. Ours have three at most: who sends more than this is
no peer, and whoever reads ends his connection.
"""
SOURCE_FD = int(zmq.SRCFD)
_PARTS_PER_LOOK = 256
# Plain numbers: pyzmq's flags are enums, whose arithmetic costs more than the calls they go to.
_NOBLOCK = int(zmq.NOBLOCK)
_IDENTITY_NBYTES = 5  # what a ROUTER calls a peer that has not named itself: 0, and four bytes
_AT_END = (errno.EAGAIN, errno.ENOTSOCK)  # nothing more, or closed by whoever reads


class Names:
    """What a ROUTER calls its connections, by their descriptors."""

    def __init__(self) -> None:
        self._fds: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def learn(self, name: bytes, fd: int) -> None:
        """A message came over this connection, with this identity in front."""
        if self._fds.get(name) != fd:
            self.forget(fd)
            self._fds[name], self._names[fd] = fd, name

    def forget(self, fd: int) -> bytes | None:
        """The connection has ended. Returns what it was called, if it had sent a message."""
        name = self._names.pop(fd, None)
        if name is not None:
            self._fds.pop(name, None)
        return name

    def is_known(self, fd: int) -> bool:
        """Whether it has sent a message and has not ended."""
        return fd in self._names

    def may_be(self, part: bytes) -> bool:
        """Whether these bytes are an identity: of one that is known, or such as a ROUTER makes."""
        return part in self._fds or (len(part) == _IDENTITY_NBYTES and not part[0])

    def is_of(self, name: bytes, fd: int) -> bool:
        """Whether a message of this connection has this identity in front: both are known, or
        neither is.
        """
        return self._names.get(fd) == name if fd in self._names else name not in self._fds


class Inbox:
    """The messages of one socket.

    ZeroMQ hands a message over when all of it is there, in however many parts. Of one of too many
    come the first MOST_PARTS, of which the last has ``more``, and then its sender is to be sent
    away: the socket is closed, or a ROUTER's connection. What is left of it at a ROUTER (``names``)
    is thrown away, in turns as well.
    """

    def __init__(self, socket: zmq.Socket[bytes], names: Names | None = None) -> None:
        self._socket = socket
        self._names = names
        self._thrown_fd: int | None = None
        self._was_empty = False

    def take_empty(self) -> bool:
        """Whether everything had been read at some moment since the last call."""
        was_empty, self._was_empty = self._was_empty, False
        return was_empty

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """What lies there, whole and not copied, for one turn."""
        until_s = time.perf_counter() + TURN_S
        try:
            for _ in range(MESSAGES_PER_TURN):
                frames = self._next() if self._thrown_fd is None else self._skip(until_s)
                if frames is None:
                    return
                self._look_at(frames)
                yield frames
                if time.perf_counter() >= until_s:
                    return
        except zmq.ZMQError as exc:
            if exc.errno not in _AT_END:
                raise
            self._thrown_fd = None  # messages come whole: here ends one
            self._was_empty = True

    def _next(self) -> list[zmq.Frame]:
        recv = self._socket.recv
        frames = [recv(_NOBLOCK, copy=False)]
        while frames[-1].more and len(frames) < MOST_PARTS:
            frames.append(recv(_NOBLOCK, copy=False))
        return frames

    def _look_at(self, frames: list[zmq.Frame]) -> None:
        self._thrown_fd = None
        if self._names is not None:
            fd = int(frames[-1].get(SOURCE_FD))
            self._names.learn(frames[0].bytes, fd)
            if frames[-1].more:
                self._thrown_fd = fd

    def _skip(self, until_s: float) -> list[zmq.Frame] | None:
        """Up to the next message of another connection, of one part as all of ours are; None if
        that takes longer than a turn.

        A part takes 0.4 us as bytes and 2.5 as a frame, which has what tells where it comes from.
        So only what may be an identity is followed by a frame; and it counts as one only if it is
        that connection's, because anybody may send such a part.
        """
        assert self._names is not None
        recv, may_be = self._socket.recv, self._names.may_be
        while time.perf_counter() < until_s:
            for _ in range(_PARTS_PER_LOOK):
                part = recv(_NOBLOCK)
                while may_be(part):
                    frame = recv(_NOBLOCK, copy=False)
                    fd = int(frame.get(SOURCE_FD))
                    if fd == self._thrown_fd and self._names.is_known(fd):
                        break
                    if not frame.more and self._names.is_of(part, fd):
                        return [zmq.Frame(part), frame]
                    part = frame.bytes  # perhaps this is the identity, behind a part of the thrown
        return None
