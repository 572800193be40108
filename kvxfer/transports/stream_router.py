"""The socket at which sinks attach to a source: who is heard, and what reaches whom."""

from __future__ import annotations

import logging
import sys
from collections import Counter

import zmq

from kvxfer.config import Config
from kvxfer.transports.stream_connections import Connection, may_be_served
from kvxfer.transports.stream_wire import (
    Context,
    Refused,
    Socket,
    encode,
    make_poller,
    make_router,
    readable,
    receive,
    send_message,
)

_log = logging.getLogger("kvxfer.transports")


class Router:
    """A ROUTER socket and its monitor. Raises TransportUnavailable."""

    def __init__(self, name: str, config: Config, context: Context, counts: Counter[str]) -> None:
        self._config = config
        self._counts = counts
        self._socket, self.endpoint = make_router(context, config, name)
        self._monitor: Socket = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._num_strangers = 0
        self._poller = make_poller((self._socket, self._monitor))

    def pollables(self) -> tuple[Socket, ...]:
        """The ROUTER and its monitor."""
        return (self._socket, self._monitor)

    def receive(self) -> tuple[list[list[zmq.Frame]], bool]:
        """What came, identity first; and whether a sink has gone: the monitor does not say who."""
        messages: list[list[zmq.Frame]] = []
        has_gone = False
        for socket in readable(self._poller):
            if socket is self._socket:
                messages.extend(receive(socket))
            else:
                for event in receive(socket):
                    has_gone |= self._was_connected(event[0])
        return messages, has_gone

    def send(self, identity: bytes, *frames: bytes | zmq.Frame) -> zmq.ZMQError | None:
        """One message to a sink; the error if it has gone, or EAGAIN if its queue is full."""
        try:
            send_message(self._socket, identity, *frames)
        except zmq.ZMQError as exc:
            self._counts["send_failed"] += 1
            _log.debug("data connection takes nothing: %s", exc)
            return exc
        return None

    def tell(self, connection: Connection, *frames: bytes | zmq.Frame) -> bool:
        """One message to an attached sink; False if it has gone (and is marked) or its queue is
        full.
        """
        error = self.send(connection.identity, *frames)
        connection.is_gone |= error is not None and error.errno != zmq.EAGAIN
        return error is None

    def refuse(self, identity: bytes, detail: str) -> None:
        """Tell a sink that it is not served, or not any more."""
        self.send(identity, encode(Refused(detail)))

    def is_served(self, frame: zmq.Frame) -> bool:
        """Whether who sent this may be answered."""
        try:
            address = str(frame.get("Peer-Address"))
        except zmq.ZMQError:
            return False
        return may_be_served(self._config, address)

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    def _was_connected(self, event: zmq.Frame) -> bool:
        """Whether an event of the monitor means that a sink has gone.

        Of who left before the handshake, as a sink does that looks for the Unix socket, ZeroMQ says
        both that the handshake failed and that he is disconnected.
        """
        if int.from_bytes(event.buffer[:2], sys.byteorder) != zmq.EVENT_DISCONNECTED:
            self._num_strangers += 1
        elif self._num_strangers:
            self._num_strangers -= 1
        else:
            return True
        return False
