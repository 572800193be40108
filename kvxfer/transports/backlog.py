"""What a connection has brought that nobody has read yet, as the kernel counts it.

ZeroMQ has no bound for that: it collects a message until its last part has come, and messages of
any number where no high-water mark is set. Ours receive without one: ZeroMQ 4.3.5 aborts the
process ("Assertion failed: !_io_error") when a connection ends whose reading the mark had stopped
and then its heartbeat is due. An empty part takes 2 bytes of a connection and 64 of memory.
"""

from __future__ import annotations

import socket as sockets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

EVENT = struct.Struct("=HI")
"""First frame of what a monitor tells: which event, and a descriptor or an error."""
LOOK_S = 0.25
"""How often to look. Empty parts fill 0.6 GB/s at most, on two fast cores: 150 MB between two."""
WORD_S = 600.0
"""How often a connection says a word that has nothing to say. Heartbeats are no messages, and so
count as backlog: 16 bytes a second, 80 with CURVE.
"""
_TCP_INFO_NBYTES = 136
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128  # tcpi_bytes_received of linux/tcp.h, from Linux 4.1 on
_SHORT_NBYTES = 255  # ZMTP writes a longer frame's size in 8 bytes, not in 1


@dataclass(slots=True, eq=False)
class Backlog:
    """Of the connection with this descriptor; -1: there is none yet. ``base_nbytes``: received when
    all of it had been read; ``read_nbytes``: read since.
    """

    fd: int
    base_nbytes: int = 0
    read_nbytes: int = 0
    is_heard: bool = False

    def note(self, frames: Sequence[zmq.Frame]) -> None:
        """A message was read."""
        self.is_heard = True
        for frame in frames:
            nbytes = len(frame)
            self.read_nbytes += nbytes + (2 if nbytes <= _SHORT_NBYTES else 9)

    def look(self, *, was_empty: bool) -> int:
        """How many bytes were received and not read. ``was_empty``: since the last look there was
        nothing left to read; then what was read is all there was, but for a message on its way.
        """
        received_nbytes = _received(self.fd)
        if self.is_heard and was_empty:
            self.base_nbytes, self.read_nbytes = received_nbytes, 0
        self.is_heard = False
        return received_nbytes - self.base_nbytes - self.read_nbytes


@contextmanager
def borrowed(fd: int) -> Iterator[sockets.socket]:
    """ZeroMQ's socket. Raises OSError if the descriptor is none, or no socket's."""
    socket = sockets.socket(fileno=fd)
    try:
        yield socket
    finally:
        socket.detach()


def _received(fd: int) -> int:
    """Bytes, in all; 0 where the kernel does not say: of a Unix socket, whose peer is this user."""
    if fd < 0:
        return 0
    try:
        # With all that is known of it, or Python would ask the kernel three times more
        socket = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, sockets.IPPROTO_TCP, fd)
        try:
            info = socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_NBYTES)
        finally:
            socket.detach()
    except OSError:  # gone, or a Unix socket
        return 0
    if len(info) < _TCP_INFO_NBYTES:
        return 0
    return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
