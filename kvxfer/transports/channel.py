"""Frames between two ranks, for control and for stream data alike: a ROUTER that listens, and a
DEALER that connects to it.

Both ends have bounds, CURVE where keys are configured, and sends that never wait. There is one
scheme of liveness: ZeroMQ's heartbeats. ZeroMQ's own thread answers them, so they tell whether a
connection is up even if its owner is busy, at no cost to the thread that moves KV. A stopped peer,
or one behind a cut cable, is gone after ``peer_silent_s`` and a third of it; a killed peer is gone
at once. The monitor reports it, and at a ROUTER which connection it was. Heartbeats do not tell
whether the thread behind a connection still works: a side that waits for an answer sends a
``Ping``.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket as sockets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import zmq

from kvxfer.config import Config
from kvxfer.errors import ConfigError, ProtocolError, TransportUnavailable
from kvxfer.ports import Ports
from kvxfer.transports.guard import pinned_keys, remedy, unix_endpoint
from kvxfer.transports.key_folder import short
from kvxfer.transports.visitors import EVENT, Backlog, Inbox, Visitors

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

WORD_S = 600.0
"""How often a DEALER says a word that has nothing to say. Heartbeats are no messages, and so count
as backlog: 16 bytes a second, 80 with CURVE.
"""
IN_USE = (errno.EADDRINUSE, errno.EACCES)
"""Why a port cannot be had: somebody has it, or this user may not."""
RECONNECT_MS = (20, 500)
"""First and longest wait before a connection is tried again."""

_ZAP_DOMAIN = b"kvxfer"
"""Any name: without one ZeroMQ asks nobody about a connection without CURVE."""
_ANY_PORT = Ports("port", 0, 0)
# Plain numbers: pyzmq's flags are enums, whose arithmetic costs more than the calls they go to.
_NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.NOBLOCK | zmq.SNDMORE)
# The events of a connection: it is established, it has ended, or it has failed to begin.
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
_OTHER_MECHANISM = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
"""One side has CURVE on, the other has not."""

_log = logging.getLogger("kvxfer.transports")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one socket.

    frame_nbytes: ZeroMQ ends a connection that announces a larger frame, before it allocates it.
    unread_nbytes: what a connection may have sent that was not read.
    num_queued: messages to one peer that wait for it to read.
    """

    frame_nbytes: int
    unread_nbytes: int
    num_queued: int


class Router:
    """A ROUTER socket that listens on ``host``, and its connections (``visitors``).

    Args:
        ports: it takes the first that is free.
        has_unix_socket: whether it answers the Unix socket beside it, too, if that can be had.
        threads: those of ZeroMQ that may carry it (``zmq.AFFINITY``); 0: as its context has it.

    Raises ConfigError for a host that cannot be used, zmq.ZMQError where the port cannot be had.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        bounds: Bounds,
        ports: Ports = _ANY_PORT,
        *,
        has_unix_socket: bool = False,
        threads: int = 0,
    ) -> None:
        self.socket: Socket = context.socket(zmq.ROUTER)
        self.visitors = Visitors(context, self.socket, bounds.unread_nbytes)
        self.monitor = self.visitors.monitor
        try:
            _set_options(self.socket, config, bounds, threads)
            # Otherwise a message to a peer that has gone, or does not read, is dropped without an
            # error
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.visitors.endpoint = self.endpoint = _bind(self.socket, config, ports)
            self.visitors.key = config.curve_public_key
            if has_unix_socket and not bind_unix(self.socket, self.endpoint):
                _log.debug("no Unix socket beside %s: everybody uses TCP", self.endpoint)
        except BaseException:
            self.visitors.close()
            self.socket.close(linger=0)
            raise
        self._inbox = Inbox(self.socket, self.visitors)
        self._poller = zmq.Poller()
        self._poller.register(self.monitor, zmq.POLLIN)  # first: the ends of connections
        self._poller.register(self.socket, zmq.POLLIN)

    def __len__(self) -> int:
        return len(self.visitors)

    def poll(self) -> Iterator[list[zmq.Frame]]:
        """Handle the monitor and the socket, for a caller that has not polled them. If nothing is
        there this is one call: a read from an empty socket costs twice as much.
        """
        for socket, _ in self._poller.poll(0):
            if socket is self.socket:
                return self._inbox.receive()
            self.visitors.meet()
        return iter(())

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """The messages that came, each with the peer's identity first, for one turn."""
        return self._inbox.receive()

    def send(self, identity: bytes, *frames: bytes | zmq.Frame) -> bool:
        """Send one message. False if the peer has gone, or its queue is full: who does not read is
        sent away after some of these. A :class:`zmq.Frame` is not copied: one buffer serves all
        peers that it is sent to.
        """
        try:
            self.socket.send(identity, _SNDMORE)
            for frame in frames[:-1]:
                self.socket.send(frame, _SNDMORE, copy=False)
            self.socket.send(frames[-1], _NOBLOCK, copy=False)
        except zmq.ZMQError as exc:
            _log.debug("%s: a connection takes nothing: %s", self.endpoint, exc)
            if exc.errno == zmq.EAGAIN:
                self.visitors.unread(identity)
            return False
        return True

    def inspect(self) -> int:
        """Close connections that have sent too much that was not read. Returns how many handshakes
        have failed since the last call. The next one is due in ``visitors.look_s``.
        """
        self.visitors.look(self._inbox.take_empty)
        return self.visitors.take_num_failed()

    def close(self, linger_s: float = 0.0) -> None:
        """As a Dealer's."""
        self.visitors.close()
        self.socket.close(linger=round(linger_s * 1000))


class Dealer:
    """A connection to a ROUTER, established in the background.

    ``problem``: why it is not established. ``is_refused``: whether the other side has refused it.
    ``has_stood``: whether it was established.

    Args:
        server_key: the CURVE key that the other side must have. A Unix socket goes without.
        word: the message that is sent every WORD_S if no other is.
        reconnects: whether a connection that fails before it was established is tried again.
        threads: as of a :class:`Router`.

    Raises TransportUnavailable where keys are configured and the key of the other side is not
    pinned, zmq.ZMQError where no socket can be had.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        bounds: Bounds,
        endpoint: str,
        server_key: str | None,
        *,
        word: bytes,
        reconnects: bool,
        threads: int = 0,
    ) -> None:
        is_unix = endpoint.startswith("ipc:")
        self._has_keys = config.curve_public_key is not None
        if self._has_keys and not is_unix and server_key not in pinned_keys(config):
            raise TransportUnavailable(
                f"CURVE: expected a peer whose key is pinned, got {short(server_key)}; "
                + remedy(config, there=False)
            )
        self.endpoint = endpoint
        self.problem = ""
        self.is_refused = False
        self._bounds, self._word, self._reconnects = bounds, word, reconnects
        self._config, self._server_key = config, server_key
        self.has_stood = False
        self._said_s = time.monotonic()
        self.socket: Socket = context.socket(zmq.DEALER)
        try:
            _set_options(self.socket, config, bounds, threads)
            self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            first_ms, longest_ms = RECONNECT_MS if reconnects else (-1, 0)
            self.socket.setsockopt(zmq.RECONNECT_IVL, first_ms)
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, longest_ms)
            if not reconnects:
                self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _ms(config.connect_timeout_s))
            # The ends of a Unix socket know each other's user
            if server_key is not None and not is_unix and set_keys(self.socket, config):
                self.socket.curve_serverkey = server_key.encode()
            self.monitor: Socket = self.socket.get_monitor_socket(_EVENTS)
            self.socket.connect(endpoint)
        except BaseException:
            monitor: Socket | None = self.socket._monitor_socket
            if monitor is not None:
                monitor.close(linger=0)
            self.socket.close(linger=0)
            raise
        self._backlog = Backlog(-1)
        self._inbox = Inbox(self.socket, self._backlog)

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """The messages that came, for one turn. Raises ManyParts; the connection must be dropped
        then.
        """
        return self._inbox.receive()

    def why_ended(self) -> str | None:
        """For good, by the monitor. None: it is established, or may still be."""
        while not self.monitor.closed and self.monitor.poll(0):
            kind, value = EVENT.unpack(self.monitor.recv_multipart()[0])
            if kind == zmq.EVENT_CONNECTED:  # which a thread may say after its first messages
                self._backlog.connected(value)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.has_stood, self.is_refused = True, False
            elif kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                if self.has_stood:
                    return "the connection ended"
                if not self._reconnects:
                    return self.problem or "no connection; can that port be reached from here?"
            elif self._is_refused_for_good(kind, value) or not self._reconnects:
                return self.problem
        return None

    def send(self, frame: bytes) -> bool:
        """It leaves when the connection stands. False if it is not taken."""
        self._said_s = time.monotonic()
        try:
            self.socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as exc:
            _log.debug("%s: the connection takes nothing: %s", self.endpoint, exc)
            return False
        return True

    def inspect(self) -> None:
        """Send the keep-alive message if it is due. Raises ProtocolError if the other side sends
        more than this side reads.
        """
        if time.monotonic() - self._said_s >= WORD_S:
            self.send(self._word)
        nbytes = self._backlog.look(was_empty=self._inbox.take_empty())
        if nbytes > self._bounds.unread_nbytes:
            raise ProtocolError(f"it has sent {nbytes} bytes that are no messages, or too many")

    def close(self, linger_s: float = 0.0) -> None:
        """``linger_s``: how long ZeroMQ lets unsent messages leave. Only for the end of an engine:
        libzmq 4.3.5 ends the process ("Assertion failed: !_io_error") where they cannot leave, the
        other side says one more word and goes, and then a heartbeat is due.
        """
        if not self.monitor.closed:
            with contextlib.suppress(zmq.ZMQError):  # refused when the engine ends at that moment
                self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=round(linger_s * 1000))

    def _is_refused_for_good(self, kind: int, value: int) -> bool:
        """Note why a handshake failed. False: the next one may go better."""
        is_answer = kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        is_other = kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _OTHER_MECHANISM
        self.is_refused = self._has_keys or is_answer or is_other
        if is_answer:
            what = "address; name it in allowed_peers there, or set CURVE keys on both sides"
            if self._has_keys:
                own = short(self._config.curve_public_key)
                what = f"CURVE key ({own}); {remedy(self._config, there=True)}"
            self.problem = f"it does not admit this engine's {what}"
        elif self._has_keys:
            self.problem = (
                "the handshake failed; it has no CURVE keys, or another one than this engine "
                f"expects ({short(self._server_key)}); {remedy(self._config, there=False)}"
            )
        elif is_other:
            self.problem = "it has CURVE keys, and this engine has none; set them on both sides"
        else:
            self.problem = "the handshake failed; is it a kvxfer engine?"
        return is_answer or is_other


def bind_address(host: str) -> str:
    """Also announced. Raises ConfigError for one that peers cannot use."""
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except OSError as e:
        raise ConfigError(
            f"host: expected a name or an address of this machine, got {host!r}: {e}"
        ) from e
    # IPv4, the smaller family, first: "localhost" is both, and most configurations name 127.0.0.1.
    address = str(min(found, key=itemgetter(0))[4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ConfigError(
            f"host: expected an address that peers can connect to, got {host}; "
            "name the address of one interface"
        )
    return address


def why_not_listening(
    wire: str, config: Config, error: Exception, wanted: str = "a free one"
) -> ConfigError | TransportUnavailable:
    """What to raise where a wire cannot listen for payload: its ports are taken (whoever chose them
    must know), or the host is none of this machine. ``wanted``: of the ports.
    """
    number = error.errno if isinstance(error, zmq.ZMQError | OSError) else None
    if number in IN_USE:
        return ConfigError(
            f"data_port: expected {wanted} on {config.host} for {wire}, got {config.data_ports}: "
            f"{os.strerror(number)}; end the process that listens there, or choose others"
        )
    return TransportUnavailable(
        f"{wire}: {config.host} cannot be listened on: {error}; "
        "set host to an address of this machine"
    )


def bind_unix(socket: Socket, endpoint: str) -> bool:
    """Listen beside ``endpoint``, too, without CURVE. False: not possible, which costs speed."""
    socket.curve_server = False  # for this listener only; earlier ones keep their setting
    try:
        socket.bind(unix_endpoint(endpoint))
    except zmq.ZMQError:
        return False
    return True


def ask_guard(socket: Socket, config: Config) -> None:
    """Have a listener admit whom the guard of its context admits (nobody where there is none), with
    CURVE where there are keys.
    """
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if set_keys(socket, config):
        socket.curve_server = True


def _bind(socket: Socket, config: Config, ports: Ports) -> str:
    address = bind_address(config.host)
    host = f"[{address}]" if ":" in address else address
    socket.setsockopt(zmq.IPV6, int(":" in address))
    ask_guard(socket, config)
    for port in ports.in_order:
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
            break
        except zmq.ZMQError as e:
            if e.errno not in IN_USE or port == ports.last:
                raise
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def set_keys(socket: Socket, config: Config) -> bool:
    """This engine's key pair; False if it has none."""
    if config.curve_public_key is None or config.curve_secret_key is None:
        return False
    socket.curve_publickey = config.curve_public_key.encode()
    socket.curve_secretkey = config.curve_secret_key.encode()
    return True


def _set_options(socket: Socket, config: Config, bounds: Bounds, threads: int) -> None:
    silent_ms = _ms(config.peer_silent_s)
    if threads:
        socket.setsockopt(zmq.AFFINITY, threads)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, bounds.num_queued),
        (zmq.RCVHWM, 0),  # see kvxfer.transports.visitors
        (zmq.MAXMSGSIZE, bounds.frame_nbytes),
        (zmq.HANDSHAKE_IVL, _ms(config.connect_timeout_s)),
        (zmq.HEARTBEAT_IVL, max(1, silent_ms // 3)),
        (zmq.HEARTBEAT_TIMEOUT, silent_ms),
    ):
        socket.setsockopt(option, value)


def _ms(duration_s: float) -> int:
    return max(1, round(duration_s * 1000))
