"""The sinks that are connected to a source's ROUTER, and what each may ask of it.

Anybody can connect, so everything here is bounded, and nobody is sent the chunks of a transfer who
has not named its nonce: it goes over the control channel, to those who may read the offer.
"""

from __future__ import annotations

import ipaddress
import os
from collections import deque
from dataclasses import dataclass, field

import zmq

from kvxfer.config import LOOPBACK_AND_PRIVATE, Config
from kvxfer.transports.base import TransferKey
from kvxfer.transports.zmq_same_host import user_of

MAX_CONNECTIONS = 1024
"""Sinks attached at once; one more takes the place of the oldest that has no transfer."""
MAX_EXPECTED = 512
"""Reads that one connection has announced and that have not ended; about 0.5 KB each."""
MAX_PROBES = 32
"""Empty frames that wait for one sink at most: fewer than its queue has room for beyond chunks."""
MAX_TRIALS = 2
"""Trials for one connection: a sink makes one of its own for each trial, and asks twice over it."""

ReadName = tuple[bytes, bytes, str]
"""(nonce, incarnation, rank): which read, of whom."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory that chunks are packed into and sent from.

    It is a ZeroMQ message whose content is sent again and again.
    """

    frame: zmq.Frame | None = None

    def sized(self, nbytes: int) -> zmq.Frame:
        """The message, made anew when the size differs (the last chunk of a class).

        Called on the copy thread.
        """
        if self.frame is None or len(self.frame) != nbytes:
            self.frame = zmq.Frame(bytes(nbytes), copy=True)
        return self.frame


@dataclass(slots=True, eq=False)
class Connection:
    """One DEALER of a sink.

    ``turns``: its transfers that have chunks left to pack, next one first. ``num_probes``: empty
    frames sent since it was last heard of. ``is_gone``: ZeroMQ does not know it any more.
    """

    identity: bytes
    free: list[Buffer] = field(default_factory=list)
    expected: dict[ReadName, None] = field(default_factory=dict)
    turns: deque[TransferKey] = field(default_factory=deque)
    in_flight: dict[int, Buffer] = field(default_factory=dict)
    next_number: int = 0
    num_probes: int = 0
    is_gone: bool = False


class Connections:
    """Who is attached, and which read belongs to whom: the first that named it."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Connection] = {}
        self._by_read: dict[ReadName, Connection] = {}
        self._num_trials: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def all(self) -> list[Connection]:
        """Oldest first."""
        return list(self._by_identity.values())

    def get(self, identity: bytes) -> Connection | None:
        """The attached connection of that name."""
        return self._by_identity.get(identity)

    def of_read(self, name: ReadName) -> Connection | None:
        """The connection that named this read."""
        return self._by_read.get(name)

    def add(self, identity: bytes, num_slots: int) -> Connection:
        """A new one, with so many buffers."""
        connection = Connection(identity, [Buffer() for _ in range(num_slots)])
        self._by_identity[identity] = connection
        return connection

    def remove(self, connection: Connection) -> None:
        """It, and the reads that it named."""
        self._by_identity.pop(connection.identity, None)
        for name in list(connection.expected):
            self.forget(name)

    def expect(self, connection: Connection, name: ReadName) -> bool:
        """The read is this connection's. False if its oldest one had to be forgotten for that."""
        had_room = name in connection.expected or len(connection.expected) < MAX_EXPECTED
        if not had_room:
            self.forget(next(iter(connection.expected)))
        self._by_read[name] = connection
        connection.expected[name] = None
        return had_room

    def forget(self, name: ReadName) -> None:
        """The read has ended."""
        connection = self._by_read.pop(name, None)
        if connection is not None:
            connection.expected.pop(name, None)

    def may_try(self, identity: bytes) -> bool:
        """Count a trial; False if this connection has had its share."""
        num_trials = self._num_trials.pop(identity, 0)
        self._num_trials[identity] = min(num_trials + 1, MAX_TRIALS)
        if len(self._num_trials) > MAX_CONNECTIONS:
            del self._num_trials[next(iter(self._num_trials))]
        return num_trials < MAX_TRIALS


def may_be_served(config: Config, address: str) -> bool:
    """Whether a listener answers this address.

    A Unix socket's peer if it is of the same user. With CURVE every one, since the nonces went to
    known keys only. Without it loopback, and others only where ``allowed_peers`` was set and admits
    them.
    """
    user = user_of(address)
    if user is not None:
        return user == os.geteuid()
    if config.curve_secret_key is not None:
        return True
    try:
        if ipaddress.ip_address(address).is_loopback:
            return True
    except ValueError:
        return False
    return config.allowed_peers != LOOPBACK_AND_PRIVATE and config.peer_allowed(address)
