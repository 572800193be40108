"""Slots of a source that are full: given to the pipe, and announced when it has sent them."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvxfer.transports.pipe import Parts, Pipe, PipeBroken
from kvxfer.transports.stream_connections import Connection
from kvxfer.transports.stream_wire import Header

Announce = Callable[[Connection, Header, Parts], bool]


class Departures:
    """What leaves a source, over all connections.

    Args:
        announce: tells a sink what its slot holds, with the frames that the pipe sends along; False
            if the sink does not take it. Raises PipeBroken.
        lose: called for a connection that takes no announcement.
        lose_pipe: called for one whose end of the pipe is broken.
    """

    def __init__(
        self,
        pipe: Pipe,
        announce: Announce,
        lose: Callable[[Connection], None],
        lose_pipe: Callable[[Connection, PipeBroken], None],
    ) -> None:
        self._pipe = pipe
        self._tell = announce
        self._lose = lose
        self._lose_pipe = lose_pipe
        self._leaving: dict[Connection, None] = {}

    def give(self, connection: Connection, header: Header) -> None:
        """The slot of this header is full: the pipe sends it, and then it is announced."""
        assert connection.lane is not None
        slot, generation = header.slot, header.generation
        try:
            parts = connection.lane.send(slot, generation, header.nbytes)
        except PipeBroken as exc:
            self._lose_pipe(connection, exc)
            return
        connection.generations[slot] += 1
        connection.leaving[slot] = (header, parts)
        self._leaving[connection] = None
        self._announce(connection)  # most pipes need not go on for that
        if connection.leaving:
            self.progress()

    def progress(self) -> None:
        """Let the pipe go on, and announce what it has sent."""
        self._pipe.progress()
        for connection in list(self._leaving):
            self._announce(connection)

    def forget(self, connection: Connection) -> None:
        """It is lost: nothing more is announced to it."""
        connection.leaving.clear()
        self._leaving.pop(connection, None)

    def _announce(self, connection: Connection) -> None:
        if connection.lane is None or connection.is_lost:
            return
        try:
            for slot in connection.lane.poll():
                if not self._tell(connection, *connection.leaving.pop(slot)):
                    # Gone; or its queue is full, which credits rule out for who counts slots.
                    self._lose(connection)
                    return
                if not connection.in_flight:
                    connection.moved_s = time.monotonic()
                connection.in_flight.add(slot)
        except PipeBroken as exc:
            self._lose_pipe(connection, exc)
        if not connection.leaving:
            self._leaving.pop(connection, None)
