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
_AT_END = (errno.EAGAIN, errno.ENOTSOCK)  # nothing more, or closed by whoever reads
_IDENTITY_NBYTES = 5  # what a ROUTER calls a peer that has not named itself: 0, and four bytes


class Inbox:
    """The messages of one socket.

    ZeroMQ hands a message over when all of it is there, in however many parts. Of one of too many
    come the first MOST_PARTS, of which the last has ``more``. The socket is then closed, or a
    ROUTER's connection; what the latter has sent beyond is thrown away, in turns as well.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
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
                self._thrown_fd = int(frames[0].get(SOURCE_FD)) if frames[-1].more else None
                yield frames
                if time.perf_counter() >= until_s:
                    return
        except zmq.ZMQError as exc:
            if exc.errno not in _AT_END:
                raise
            self._thrown_fd = None  # messages come whole: here ends one
            self._was_empty = True

    def _next(self, *first: zmq.Frame) -> list[zmq.Frame]:
        recv, frames = self._socket.recv, list(first)
        while not frames or (frames[-1].more and len(frames) < MOST_PARTS):
            frames.append(recv(_NOBLOCK, copy=False))
        return frames

    def _skip(self, until_s: float) -> list[zmq.Frame] | None:
        """Up to the next message of another connection; None if that takes longer than a turn.

        A part takes 0.4 us as bytes and 2.5 as a frame, which has what tells where a message ends:
        so only those that look like an identity are followed by a frame.
        """
        recv = self._socket.recv
        while time.perf_counter() < until_s:
            for _ in range(_PARTS_PER_LOOK):
                part = recv(_NOBLOCK)
                if len(part) != _IDENTITY_NBYTES or part[0]:
                    continue
                frame = recv(_NOBLOCK, copy=False)
                if int(frame.get(SOURCE_FD)) != self._thrown_fd:
                    # The only part of a message, or an identity behind a part that looked like one
                    return self._next(frame) if frame.more else [zmq.Frame(part), frame]
        return None
