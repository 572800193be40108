"""Plain sockets that move the same scattered pieces as they are: blocking sendmsg and recvmsg_into
straight between the pools. The yardstick of every wire of host memory.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from kvxfer.bench.core import Timing, timed
from kvxfer.bench.members import SINK, SOURCE, Devices, Member
from kvxfer.bench.pools import Ids, Request

SOCKETS = "sockets"
CONNECT_S = 10.0
_PIECES_A_CALL = 64
"""2 MiB of usual blocks: a call takes about that much, and what is left is cut again after each."""

Address = tuple[str, int]
_LENGTH = struct.Struct("<Q")


def connect(address: Address) -> socket.socket:
    sock = socket.create_connection(address, CONNECT_S)
    sock.settimeout(None)
    return without_delay(sock)


def without_delay(sock: socket.socket) -> socket.socket:
    """TCP without Nagle's."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def listen(host: str) -> socket.socket:
    return socket.create_server((host, 0))


def accept(listener: socket.socket) -> socket.socket:
    """The next one that connects. Raises TimeoutError."""
    listener.settimeout(CONNECT_S)
    sock = listener.accept()[0]
    sock.settimeout(None)
    return without_delay(sock)


def say(sock: socket.socket, message: bytes) -> None:
    """A message with its length before it."""
    sock.sendall(_LENGTH.pack(len(message)) + message)


def hear(sock: socket.socket) -> bytes:
    """The next message. Raises ConnectionError at the end of the stream."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    receive_pieces(sock, memoryview(found), [0], nbytes)
    return bytes(found)


def send_pieces(sock: socket.socket, pool: memoryview, offsets: list[int], nbytes: int) -> None:
    """Every piece of so many bytes, in order."""
    for buffers in _batches(pool, offsets, nbytes):
        while buffers:
            _advance(buffers, sock.sendmsg(buffers))


def receive_pieces(sock: socket.socket, pool: memoryview, offsets: list[int], nbytes: int) -> None:
    """Every piece to its place. Raises ConnectionError at the end of the stream."""
    for buffers in _batches(pool, offsets, nbytes):
        while buffers:
            count = sock.recvmsg_into(buffers)[0]
            if not count:
                raise ConnectionError("sockets: expected more bytes, got the end of the stream")
            _advance(buffers, count)


def _batches(pool: memoryview, offsets: list[int], nbytes: int) -> Iterator[list[memoryview]]:
    for first in range(0, len(offsets), _PIECES_A_CALL):
        yield [pool[at : at + nbytes] for at in offsets[first : first + _PIECES_A_CALL] if nbytes]


def _advance(buffers: list[memoryview], count: int) -> None:
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]


def asking(nbytes: int, offsets: Sequence[int] | Ids) -> bytes:
    """What has a source send these pieces."""
    return np.array([nbytes, *offsets], np.int64).tobytes()


class SocketSource(Member):
    """Sends the pieces that it is asked for, on each socket by a thread of its own."""

    def __init__(self, devices: Devices, nbytes: int) -> None:
        super().__init__({SOURCE: devices.source}, nbytes)
        self._view = self.memories[SOURCE].tensor.numpy().data
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def connect(self, addresses: Sequence[Address]) -> None:
        for address in addresses:
            sock = connect(address)
            thread = threading.Thread(target=self._serve, args=(sock,))
            thread.start()
            self._sockets.append(sock)
            self._threads.append(thread)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the sink has closed
            while True:
                nbytes, *offsets = np.frombuffer(hear(sock), dtype=np.int64).tolist()
                send_pieces(sock, self._view, offsets, nbytes)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        self._view.release()
        super().close()


class SocketSink(Member):
    """Asks for pieces, and takes them."""

    def __init__(self, devices: Devices, nbytes: int, host: str) -> None:
        super().__init__({SINK: devices.sink}, nbytes)
        self._view = self.memories[SINK].tensor.numpy().data
        self._listener = listen(host)
        self._socket: socket.socket | None = None
        self._pieces: dict[Request, tuple[bytes, list[int]]] = {}

    def address(self) -> Address:
        """Where the source connects to, which it does at once."""
        host, port = self._listener.getsockname()
        return host, port

    def accept(self) -> None:
        self._socket = accept(self._listener)

    def run(self, way: str, request: Request) -> Timing:
        """From the request, which names each piece, to the last byte."""
        assert self._socket is not None
        if request not in self._pieces:
            given, taken = request.pieces()
            self._pieces[request] = (asking(request.source.block_nbytes, given), taken.tolist())
        asked_for, places = self._pieces[request]
        sock, nbytes = self._socket, request.source.block_nbytes
        self.flush()
        return timed(
            lambda: say(sock, asked_for),
            lambda: receive_pieces(sock, self._view, places, nbytes),
        )

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._listener.close()
        self._view.release()
        super().close()
