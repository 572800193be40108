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
no peer, and whoever reads may end his connection.
"""
_PARTS_PER_LOOK = 256
# Plain numbers: pyzmq's flags are enums, whose arithmetic costs more than the calls they go to.
_NOBLOCK = int(zmq.NOBLOCK)
_AT_END = (errno.EAGAIN, errno.ENOTSOCK)  # nothing more, or closed by whoever reads


class Inbox:
    """The messages of one socket.

    ZeroMQ hands a message over when all of it is there, in however many parts. Of one of too many
    come the first MOST_PARTS, of which the last has ``more``; the rest is thrown away, in turns as
    well.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._has_rest = False

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """What lies there, whole and not copied, for one turn."""
        until_s = time.perf_counter() + TURN_S
        recv = self._socket.recv
        try:
            for _ in range(MESSAGES_PER_TURN):
                if self._has_rest and not self._drop_rest(until_s):
                    return
                frames = [recv(_NOBLOCK, copy=False)]
                while frames[-1].more and len(frames) < MOST_PARTS:
                    frames.append(recv(_NOBLOCK, copy=False))
                self._has_rest = frames[-1].more
                yield frames
                if time.perf_counter() >= until_s:
                    return
        except zmq.ZMQError as exc:
            if exc.errno not in _AT_END:
                raise

    def _drop_rest(self, until_s: float) -> bool:
        """Whether all of it is gone. 2.5 us a part."""
        recv = self._socket.recv
        while time.perf_counter() < until_s:
            for _ in range(_PARTS_PER_LOOK):
                if not recv(_NOBLOCK, copy=False).more:
                    self._has_rest = False
                    return True
        return False
