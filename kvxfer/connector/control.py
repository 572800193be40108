"""Control messages over a channel: :class:`ControlServer` listens for a rank, and a
:class:`ControlClient` is a connection to a source rank.

A frame is size-checked, decoded by one typed decoder, and handed on as a record. The server answers
a frame that it cannot decode with Malformed, and counts it; no message of a peer ends a listener.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

import zmq

from kvxfer.config import Config
from kvxfer.connector.io_thread import IoThread, Timer, ZmqSocket
from kvxfer.connector.ledger import Ledger
from kvxfer.errors import ConfigError, ProtocolError
from kvxfer.transfer.wire import (
    Found,
    Malformed,
    Ping,
    Reason,
    Refuse,
    ToSink,
    ToSource,
    decode_to_sink,
    decode_to_source,
    encode,
)
from kvxfer.transports.channel import IN_USE, Bounds, Dealer, Router
from kvxfer.transports.guard import is_own, nearest_endpoint, user_of
from kvxfer.transports.visitors import DEALER_LOOK_S, ManyParts

HARD_LIMIT_NBYTES = 64 << 20
"""ZeroMQ itself drops a connection that sends a larger frame; smaller ones are answered by us."""
BEYOND_NBYTES = 1 << 20
"""What a connection may have sent that was not read, beyond the longest message."""
LINGER_S = 0.2
"""How long a last word (Cancel, Broken) may take to leave."""
HIGH_WATER = 10_000
"""Messages that wait for a connection that does not stand yet."""
ANSWERS_HIGH_WATER = 512
"""Answers that wait for a peer that does not read them; the next ones are dropped and counted, and
asked for again. An answer is 100 bytes, a Grant of 100,000 tokens 20 KB.
"""
MAX_DETAIL = 300
LAST_WORDS_NBYTES = 1024
"""Of a connection that has ended, longer messages are thrown away unread: nobody hears an answer,
and a Release or a Cancel is shorter. Hundreds of connections that each leave 40 of the widest Pulls
made loads wait for 40 ms.
"""
LONG_NBYTES = 64 << 10
"""A message that cannot be understood is answered. Whoever sends two that are longer is sent away:
4 MiB at a time keep ZeroMQ's thread busy, for all connections.
"""
NO_GOOD = frozenset({Reason.TOKENS, Reason.PLAN, Reason.TRANSPORT})
"""Reasons for which a request is refused that are the peer's own; others may be this side's."""


def _bounds(config: Config, num_queued: int) -> Bounds:
    unread_nbytes = config.control_max_nbytes + BEYOND_NBYTES
    return Bounds(HARD_LIMIT_NBYTES, unread_nbytes, num_queued)


class Oversized(ProtocolError):
    """A message that is longer than ``control_max_nbytes``."""


def _only(frames: Sequence[zmq.Frame], nbytes: int, config: Config) -> memoryview:
    """The message, whose size is checked before it is decoded."""
    limit_nbytes = config.control_max_nbytes
    if nbytes > limit_nbytes:
        raise Oversized(
            f"control frame: expected at most {limit_nbytes} bytes, got {nbytes}; "
            "raise control_max_nbytes on both sides if this is right"
        )
    if len(frames) != 1:
        raise ProtocolError(f"control frame: expected one part, got {len(frames)}")
    return frames[0].buffer


class ControlServer:
    """The listener of one rank, at its ``port``. ``handle(identity, message)`` gets every message
    that could be decoded; ``gone(identity)`` is called for each connection that has ended.

    Raises ConfigError if the port cannot be had.
    """

    def __init__(
        self,
        io: IoThread,
        context: zmq.Context[ZmqSocket],
        config: Config,
        ledger: Ledger,
        handle: Callable[[bytes, ToSource], None],
        gone: Callable[[bytes], object],
    ) -> None:
        self._io = io
        self._config = config
        self._ledger = ledger
        self._handle, self._gone = handle, gone
        self._handled = zmq.Frame()
        try:
            self.router = Router(
                context,
                config,
                _bounds(config, ANSWERS_HIGH_WATER),
                config.control_ports,
                has_unix_socket=config.curve_secret_key is None,
            )
        except zmq.ZMQError as e:
            if e.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"host: expected an address of this machine, got {config.host}; "
                    "name the address of one of its interfaces"
                ) from e
            if e.errno not in IN_USE:
                raise
            raise ConfigError(
                f"port: expected a free one on {config.host}, got {config.control_ports}: "
                f"{os.strerror(e.errno)}; end the process that listens there, or choose another "
                "port (0 takes a free one)"
            ) from e
        self.endpoint = self.router.endpoint
        io.watch(self.router.monitor, self._meet)
        io.watch(self.router.socket, self._read)

    def send(self, identity: bytes, answer: ToSink | zmq.Frame) -> None:
        """``answer`` may be encoded already. Dropped if the peer is gone or does not read."""
        frame = answer if isinstance(answer, zmq.Frame) else encode(answer)
        if not self.router.send(identity, frame):
            self._ledger.count("control.dropped")
        if isinstance(answer, Refuse | Found) and answer.reason in NO_GOOD:
            self.refused(identity)

    def refused(self, identity: bytes) -> None:
        """A request was no good, by its peer's own fault. Of many, the connection is warned."""
        self.router.visitors.refused(identity)

    def speaker(self) -> str:
        """Where the message comes from that is being handled; "" for this host."""
        address = str(self._handled.get("Peer-Address"))
        return "" if user_of(address) is not None else address

    def check_own(self) -> None:
        """Raises ProtocolError unless this engine's operator sent what is being handled."""
        stated = (str(self._handled.get(name)) for name in ("Peer-Address", "User-Id"))
        if not is_own(self._config, *stated):
            self._ledger.count("control.not_own")
            raise ProtocolError(
                "drain: expected a process of the engine's user on its host, or its CURVE key, "
                "got another; run it where the engine runs"
            )

    @property
    def look_s(self) -> float:
        """When :meth:`inspect` is due again."""
        return self.router.visitors.look_s

    def inspect(self) -> None:
        """End connections that have sent too much that was not read."""
        num_failed = self.router.inspect()
        if num_failed:
            self._ledger.count("connections.refused.handshake", num_failed)

    def close(self) -> None:
        self._io.unwatch(self.router.monitor)
        self._io.unwatch(self.router.socket)
        self.router.close(LINGER_S)

    def _meet(self) -> None:
        self.router.visitors.meet()
        self._tell_gone()

    def _tell_gone(self) -> None:
        for identity in self.router.visitors.take_gone():
            self._gone(identity)

    def _read(self) -> None:
        for frames in self.router.receive():
            if self._io.posted:
                self._io.run_posted()
            if self.router.socket.closed:
                return
            identity, *parts = frames
            nbytes = sum(map(len, parts))
            if nbytes > LAST_WORDS_NBYTES and self.router.visitors.has_gone(identity.bytes):
                self._ledger.count("control.left")
                continue
            problem = "control.malformed"
            try:
                message = decode_to_source(_only(parts, nbytes, self._config))
                problem = "control.out_of_state"
                self._handled = parts[0]
                self._handle(identity.bytes, message)
            except ProtocolError as e:
                self._ledger.count("control.oversized" if isinstance(e, Oversized) else problem)
                self.send(identity.bytes, Malformed(str(e)[:MAX_DETAIL]))
                if nbytes > LONG_NBYTES:
                    self.router.visitors.warn(parts[-1], "it sent long messages that are none")
        self._tell_gone()  # the connection that sent these messages has ended


class LastWords:
    """Connections that this side has done with: each stays for LINGER_S, so that its last word can
    leave. That is left to ZeroMQ only at the engine's end (:meth:`Dealer.close` says why).
    """

    def __init__(self, io: IoThread) -> None:
        self._io = io
        self._leaving: dict[Dealer, Timer] = {}
        self._is_over = False

    def add(self, dealer: Dealer) -> None:
        if self._is_over:
            dealer.close()
        else:
            self._leaving[dealer] = self._io.after(LINGER_S, self._end, dealer)

    def _end(self, dealer: Dealer) -> None:
        del self._leaving[dealer]
        dealer.close()

    def close(self) -> None:
        """The engine ends."""
        self._is_over = True
        leaving, self._leaving = self._leaving, {}
        for dealer, timer in leaving.items():
            timer.cancel()
            dealer.close(LINGER_S)


class ControlClient:
    """The connection to one source rank. ``dealer`` knows why it is not connected.

    ``on_message(endpoint, message)`` gets every message that could be decoded. ``on_gone(endpoint,
    detail)`` is called at most once: when an established connection has ended, or when the other
    side has refused this engine. A connection that was never established is retried until
    :meth:`close`.

    Raises zmq.ZMQError where no socket can be had.
    """

    def __init__(
        self,
        io: IoThread,
        context: zmq.Context[ZmqSocket],
        config: Config,
        ledger: Ledger,
        last_words: LastWords,
        endpoint: str,
        server_key: str | None,
        on_message: Callable[[str, ToSink], None],
        on_gone: Callable[[str, str], None],
    ) -> None:
        self.endpoint = endpoint
        self.heard_s = io.now()
        self.unanswered_s: float | None = None
        self._io = io
        self._config = config
        self._ledger, self._last_words = ledger, last_words
        self._on_message = on_message
        self._on_gone = on_gone
        self._closed = False
        bounds = _bounds(config, HIGH_WATER)
        # Keys are required on this host, too; without keys the Unix socket tells whose process the
        # peer is
        nearest = nearest_endpoint(endpoint) if config.curve_secret_key is None else endpoint
        self.dealer = Dealer(
            context, config, bounds, nearest, server_key, word=encode(Ping()), reconnects=True
        )
        self._inspecting = io.after(DEALER_LOOK_S, self._inspect)
        io.watch(self.dealer.socket, self._read)
        io.watch(self.dealer.monitor, self._look)

    def send(self, message: ToSource) -> None:
        """Queue a message; it leaves once the connection is established, after messages deferred
        before.

        Raises ProtocolError for a message that the other side would refuse unread.
        """
        if self._io.deferred:
            self._io.run_deferred()
        if self._closed:
            return
        frame, limit_nbytes = encode(message), self._config.control_max_nbytes
        if len(frame) > limit_nbytes:
            raise ProtocolError(
                f"{type(message).__name__}: expected at most {limit_nbytes} bytes, "
                f"got {len(frame)}; raise control_max_nbytes on both sides"
            )
        if not self.dealer.send(frame):
            self._ledger.count("control.dropped")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._inspecting.cancel()
            self._io.unwatch(self.dealer.socket)
            self._io.unwatch(self.dealer.monitor)
            self._last_words.add(self.dealer)

    def _read(self) -> None:
        try:
            for frames in self.dealer.receive():
                self.heard_s, self.unanswered_s = self._io.now(), None
                try:
                    message = decode_to_sink(_only(frames, sum(map(len, frames)), self._config))
                except ProtocolError as e:
                    self._ledger.count("control.malformed")
                    self.dealer.problem = str(e)[:MAX_DETAIL]
                    continue
                self._on_message(self.endpoint, message)
                if self._closed:
                    return
        except ManyParts as e:
            self._on_gone(self.endpoint, str(e))

    def _inspect(self) -> None:
        self._inspecting = self._io.after(DEALER_LOOK_S, self._inspect)
        try:
            self.dealer.inspect()
        except ProtocolError as e:
            self._on_gone(self.endpoint, str(e))

    def _look(self) -> None:
        why = self.dealer.why_ended()
        if why is not None:
            self._read()  # messages that it sent before it went still count
            if not self._closed:
                self._on_gone(self.endpoint, why)
