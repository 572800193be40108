"""Control messages over ZeroMQ, the side that listens: a ROUTER for each rank. The other side is in
:mod:`kvxfer.connector.control_client`.

What comes in is size-checked, decoded by one typed decoder, and handed on as a record. What cannot
be understood is answered with Malformed and counted; nothing that a peer sends ends a listener.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import zmq

from kvxfer.config import Config
from kvxfer.connector.io_thread import IoThread, ZmqSocket
from kvxfer.connector.ledger import Ledger
from kvxfer.errors import ConfigError, ProtocolError
from kvxfer.transfer.wire import (
    Malformed,
    ToSink,
    ToSource,
    decode_to_source,
    encode,
)
from kvxfer.transports.visitors import Visitors
from kvxfer.transports.zmq_inbox import Inbox
from kvxfer.transports.zmq_listeners import bind_tcp

HARD_LIMIT_NBYTES = 64 << 20
"""ZeroMQ itself drops a connection that sends a larger frame; smaller ones are answered by us."""
BEYOND_NBYTES = 1 << 20
"""What a connection may have sent that was not read, beyond the longest message."""
LINGER_MS = 200
"""How long a last word (Cancel, Broken) may take to leave after a socket was closed."""
HIGH_WATER = 10_000
"""Messages that wait for a connection that does not stand yet."""
ANSWERS_HIGH_WATER = 512
"""Answers that wait for a peer that does not read them; the next ones are dropped and counted, and
asked for again. An answer is 100 bytes, a Grant of 100,000 tokens 20 KB.
"""
MAX_DETAIL = 300
_IN_USE = (errno.EADDRINUSE, errno.EACCES)


def common_options(socket: ZmqSocket, config: Config) -> None:
    """What both ends have alike: bounds, heartbeats, how long last words may take."""
    silent_ms = max(1, int(config.peer_silent_s * 1000))
    socket.linger = LINGER_MS
    socket.sndhwm, socket.rcvhwm = HIGH_WATER, 0  # see kvxfer.transports.backlog
    socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_NBYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, int(config.connect_timeout_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, silent_ms // 3))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent_ms)


class ControlServer:
    """The listener of one rank. ``handle(identity, message)`` gets every message that could be
    understood; ``gone(identity)`` is called for a connection that has ended.

    Raises ConfigError if the port cannot be had.
    """

    def __init__(
        self,
        io: IoThread,
        context: zmq.Context[ZmqSocket],
        config: Config,
        ledger: Ledger,
        port: int,
        handle: Callable[[bytes, ToSource], None],
        gone: Callable[[bytes], object],
    ) -> None:
        self._io = io
        self._config = config
        self._ledger = ledger
        self._handle, self._gone = handle, gone
        self._socket: ZmqSocket = context.socket(zmq.ROUTER)
        most_nbytes = config.control_max_nbytes + BEYOND_NBYTES
        self._visitors = Visitors(context, self._socket, most_nbytes)
        try:
            common_options(self._socket, config)
            self._socket.sndhwm = ANSWERS_HIGH_WATER
            # Or what does not fit would be dropped without a word.
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._visitors.endpoint = self.endpoint = bind_tcp(self._socket, config, port)
        except BaseException as e:
            self._visitors.close()
            self._socket.close(linger=0)
            if isinstance(e, zmq.ZMQError) and e.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"host: expected an address of this machine, got {config.host}; "
                    "name the address of one of its interfaces"
                ) from e
            if not isinstance(e, zmq.ZMQError) or e.errno not in _IN_USE:
                raise
            raise ConfigError(
                f"port: expected a free one on {config.host}, got {port}: {e.strerror}; "
                "end the process that listens there, or choose another port (0 takes a free one)"
            ) from e
        self._inbox = Inbox(self._socket, self._visitors.names)
        io.watch(self._visitors.monitor, self._meet)
        io.watch(self._socket, self._read)

    def send(self, identity: bytes, message: ToSink) -> None:
        """Hand an answer to ZeroMQ; a peer that is gone or does not read gets nothing."""
        self.send_frame(identity, encode(message))

    def send_frame(self, identity: bytes, frame: bytes | zmq.Frame) -> None:
        """The same with an encoded answer. A :class:`zmq.Frame` is not copied: however many peers
        it is on its way to, it is there once.
        """
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._ledger.count("control.dropped")

    def inspect(self) -> None:
        """Close connections that have sent too much that was not read."""
        self._visitors.look(was_empty=self._inbox.take_empty())

    def close(self) -> None:
        """Stop listening."""
        self._io.unwatch(self._visitors.monitor)
        self._io.unwatch(self._socket)
        self._visitors.close()
        self._socket.close()

    def _meet(self) -> None:
        self._visitors.meet()
        self._tell_gone()

    def _tell_gone(self) -> None:
        for identity in self._visitors.take_gone():
            self._gone(identity)

    def _read(self) -> None:
        for frames in self._inbox.receive():
            self._io.run_posted()
            if self._socket.closed:
                return
            self._visitors.heard(frames)
            identity = frames[0].bytes
            try:
                message = self._decode(frames)
            except ProtocolError as e:
                self.send(identity, Malformed(str(e)[:MAX_DETAIL]))
                continue
            try:
                self._handle(identity, message)
            except ProtocolError as e:
                self._ledger.count("control.out_of_state")
                self.send(identity, Malformed(str(e)[:MAX_DETAIL]))
        self._tell_gone()  # whose last words these were

    def _decode(self, frames: list[zmq.Frame]) -> ToSource:
        limit_nbytes = self._config.control_max_nbytes
        nbytes = sum(len(frame) for frame in frames[1:])
        if nbytes > limit_nbytes:
            self._ledger.count("control.oversized")
            raise ProtocolError(
                f"control frame: expected at most {limit_nbytes} bytes, got {nbytes}; "
                "raise control_max_nbytes on both sides if this is right"
            )
        if len(frames) != 2:
            self._ledger.count("control.malformed")
            if frames[-1].more:
                self._visitors.send_away(frames[0], "it sent a message of many parts")
            raise ProtocolError(f"control frame: expected one part, got {len(frames) - 1}")
        try:
            return decode_to_source(frames[1].buffer)
        except ProtocolError:
            self._ledger.count("control.malformed")
            raise
