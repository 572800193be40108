"""Where a source's payload sockets come in: who is admitted, and what strangers cost.

The sink of a connection says 32 bytes first, and all at once: ``HELLO``, with the number of the
connection and its token, which it has from the source's ``Attached``. The source answers with the
other token of that connection, so either end knows the other before a payload moves. Everything
else costs its connection: an address that is not admitted is closed when it is accepted, a word
that is no hello when it is there, and who says nothing after ``connect_timeout_s``. No more than
MOST_UNPROVED wait at once. A thread of its own does that, so that a busy IO thread holds up no sink
and a flood no IO thread.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvxfer.config import Config
from kvxfer.log_limit import LogLimit
from kvxfer.transports import guard
from kvxfer.transports.channel import IN_USE, bind_address, why_not_listening
from kvxfer.transports.wake_up import WakeUp

TOKEN_NBYTES = 16
HELLO = struct.Struct(f"<8sQ{TOKEN_NBYTES}s")
"""A greeting, the number of the connection, its token."""
GREETING = b"kvxfer\0\1"
MOST_UNPROVED = 64
"""Connections that have not said their hello, half of them of one address; one more takes the place
of the oldest. An honest one is proved as soon as this thread has its turn.
"""
FULL_S = 0.1
"""Without a descriptor nobody can be accepted for so long."""
_BACKLOG = 128
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RESET = struct.pack("ii", 1, 0)
_ABANDON_S = 60.0

_log = logging.getLogger("kvxfer.transports")


def end(sock: socket.socket) -> None:
    """Whoever sends or receives on it stops; what is on its way is worth nothing any more. The
    descriptor stays until ``close``: another thread may be about to use it.
    """
    with contextlib.suppress(OSError):  # gone already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.shutdown(socket.SHUT_RDWR)


def prepare(sock: socket.socket) -> None:
    """For payloads: sent at once, and a network that forgets silent connections hears of it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(_ABANDON_S))


@dataclass(frozen=True, slots=True)
class Expected:
    """A connection whose sink may come. ``token``: what it says; ``answer``: what it hears.
    ``admit``: takes a proved socket over; False if there is no room.
    """

    number: int
    admit: Callable[[socket.socket], bool]
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_NBYTES))
    answer: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_NBYTES))


@dataclass(slots=True, eq=False)
class _Stranger:
    sock: socket.socket
    address: str
    until_s: float
    said: bytes = b""


class Listener:
    """Listens on ``host``, on the first free one of ``data_port``.

    Raises ConfigError where the port cannot be had, TransportUnavailable where ``host`` cannot.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._socket = _listen(config)
        self.host, self.port = self._socket.getsockname()[:2]
        self._expected: dict[int, Expected] = {}
        self._strangers: dict[int, _Stranger] = {}
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._warned: LogLimit[str] = LogLimit(guard.MAX_WARNED)
        self._deaf_until_s = 0.0
        self._is_closing = False
        self._wake = WakeUp()
        self._thread = threading.Thread(target=self._main, name="kvxfer-tcp-listen", daemon=True)
        self._thread.start()

    def expect(self, expected: Expected) -> None:
        self._expected[expected.number] = expected

    def forget(self, number: int) -> None:
        self._expected.pop(number, None)

    def take_counts(self) -> Counter[str]:
        """Connections that were refused since the last call, by ``refused.`` and why."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Idempotent."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._socket.close()
        self._wake.close()

    # -- its thread

    def _main(self) -> None:
        while not self._is_closing:
            ready = self._wait()
            if self._wake.fd in ready:
                self._wake.clear()
            for fd in ready:
                if fd in self._strangers:
                    self._guard(self._hear, fd)
            if self._socket.fileno() in ready:
                self._guard(self._accept)
            now_s = time.monotonic()
            for fd in [fd for fd, each in self._strangers.items() if each.until_s <= now_s]:
                self._refuse(fd, "handshake")
        for stranger in self._strangers.values():
            stranger.sock.close()
        self._strangers.clear()

    def _guard(self, call: Callable[..., None], *strangers: int) -> None:
        """What cannot be foreseen costs one connection, not the thread that admits all others."""
        try:
            call(*strangers)
        except Exception:  # noqa: BLE001  # whatever it is, the loop goes on
            if self._warned.note("", time.monotonic()):
                _log.exception("tcp: a connection is refused that could not be judged")
            for fd in self._strangers.keys() & strangers:
                self._refuse(fd, "handshake")

    def _wait(self) -> list[int]:
        """Until somebody comes, says something, or has taken too long."""
        poll, now_s = select.poll(), time.monotonic()
        for fd in (self._wake.fd, *self._strangers):
            poll.register(fd, select.POLLIN)
        until_s = [each.until_s for each in self._strangers.values()]
        if now_s >= self._deaf_until_s:
            poll.register(self._socket.fileno(), select.POLLIN)
        else:
            until_s.append(self._deaf_until_s)
        return [fd for fd, _ in poll.poll(_ms(min(until_s) - now_s) if until_s else None)]

    def _accept(self) -> None:
        try:
            sock, found = self._socket.accept()
        except OSError as exc:
            if exc.errno in _OUT_OF_DESCRIPTORS:
                self._deaf_until_s = time.monotonic() + FULL_S
                if self._strangers:
                    self._refuse(next(iter(self._strangers)), "handshake")
            return  # else it has gone already
        sock.setblocking(False)
        address, now_s = str(found[0]), time.monotonic()
        why = guard.why_refused(self._config, address, None)
        if why is not None:
            if self._warned.note(address, now_s):
                _log.warning("a connection from %s was refused: %s", address, why)
            self._close(sock, "address")
            return
        self._make_room(address)
        until_s = now_s + self._config.connect_timeout_s
        self._strangers[sock.fileno()] = _Stranger(sock, address, until_s)

    def _make_room(self, address: str) -> None:
        own = [fd for fd, each in self._strangers.items() if each.address == address]
        if len(own) >= MOST_UNPROVED // 2:
            self._refuse(own[0], "handshake")
        elif len(self._strangers) >= MOST_UNPROVED:
            self._refuse(next(iter(self._strangers)), "handshake")

    def _hear(self, fd: int) -> None:
        stranger = self._strangers[fd]
        try:
            said = stranger.sock.recv(HELLO.size - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        stranger.said += said
        if not said or not GREETING.startswith(stranger.said[: len(GREETING)]):
            self._refuse(fd, "handshake")
        elif len(stranger.said) == HELLO.size:
            self._prove(fd, stranger)

    def _prove(self, fd: int, stranger: _Stranger) -> None:
        """The number is no secret: a token is compared with one other, in constant time."""
        _, number, token = HELLO.unpack(stranger.said)
        expected = self._expected.get(number)
        if expected is None or not hmac.compare_digest(token, expected.token):
            self._refuse(fd, "token")
            return
        sock = stranger.sock
        try:
            sock.setblocking(True)
            prepare(sock)
            sock.sendall(expected.answer)  # there is room for it: it is the first word
        except OSError:
            self._refuse(fd, "handshake")
            return
        if not expected.admit(sock):
            self._refuse(fd, "token")
            return
        del self._strangers[fd]

    def _refuse(self, fd: int, why: str) -> None:
        self._close(self._strangers.pop(fd).sock, why)

    def _close(self, sock: socket.socket, why: str) -> None:
        with self._counting:
            self._counts[f"refused.{why}"] += 1
        end(sock)
        sock.close()


def _listen(config: Config) -> socket.socket:
    ports = config.data_ports
    address = bind_address(config.host)
    family, _, _, _, place = numeric(address, 0)
    for port in ports.in_order:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((place[0], port, *place[2:]))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except OSError as exc:
            sock.close()
            if exc.errno not in IN_USE or port == ports.last:
                raise why_not_listening("tcp", config, exc, "two free ones") from exc
        else:
            return sock
    raise AssertionError("ports: expected one at least")


Place = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str | int, ...]]


def numeric(address: str, port: int) -> Place:
    """What the kernel calls it. Raises OSError for a name: nobody is asked about it."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return found[0]  # type: ignore[return-value]  # addresses of other families are no numbers


def _ms(duration_s: float) -> int:
    return max(1, round(duration_s * 1000))
