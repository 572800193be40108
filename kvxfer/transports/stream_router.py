"""The socket at which sinks attach to a source: who is heard, and what reaches whom."""

from __future__ import annotations

import logging
from collections import Counter

import zmq

from kvxfer.config import Config
from kvxfer.transports.stream_connections import Connection
from kvxfer.transports.stream_wire import (
    Context,
    Refused,
    Socket,
    encode,
    listen,
    make_poller,
    make_router,
    readable,
    send_message,
)
from kvxfer.transports.visitors import Visitors
from kvxfer.transports.zmq_inbox import Inbox

BEHIND_NBYTES = 1 << 20
"""What a sink may have sent that was not read: its longest message has 20 KB."""

_log = logging.getLogger("kvxfer.transports")


class Router:
    """A ROUTER socket and who is connected to it. Raises TransportUnavailable."""

    def __init__(self, name: str, config: Config, context: Context, counts: Counter[str]) -> None:
        self._counts = counts
        self._socket = make_router(context, config)
        self.visitors = Visitors(context, self._socket, BEHIND_NBYTES)
        try:
            self.visitors.endpoint = self.endpoint = listen(self._socket, config, name)
        except BaseException:
            self.close()
            raise
        self._inbox = Inbox(self._socket, self.visitors.names)
        self._poller = make_poller((self.visitors.monitor, self._socket))

    def pollables(self) -> tuple[Socket, ...]:
        """The ROUTER and its monitor."""
        return (self._socket, self.visitors.monitor)

    def receive(self) -> tuple[list[list[zmq.Frame]], bool]:
        """What came, identity first; and whether a sink has gone: the monitor does not say who."""
        messages: list[list[zmq.Frame]] = []
        for socket in readable(self._poller):
            if socket is not self._socket:
                self.visitors.meet()
                continue
            for frames in self._inbox.receive():
                self.visitors.heard(frames)
                if frames[-1].more:
                    self._counts["malformed"] += 1
                    self.visitors.send_away(frames[0], "it sent a message of many parts")
                else:
                    messages.append(frames)
        return messages, bool(self.visitors.take_gone())

    def look(self) -> None:
        """Close connections that have sent too much that was not read."""
        self.visitors.look(was_empty=self._inbox.take_empty())

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

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self.visitors.close()
            self._socket.close(linger=0)
