"""Messages about offers that this rank does not know yet: of sinks that were dispatched early.

A sink that comes before its offer waits: its Find until the request is scheduled here, its Pull
until this rank, too, has heard of the nonce. Anybody who is admitted can ask for what never comes,
so what waits is bounded for each connection and for all, in number, bytes and time. Runs on the IO
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

from kvxfer.connector.io_thread import IoThread, Timer
from kvxfer.transfer.wire import Cancel, Find, Pull, decode_to_source, encode

MAX_PARKED, MAX_NBYTES = 4096, 64 << 20
"""Of all connections. A Find has 100 bytes, a Pull of a stream of 80 layers 5 KB."""
MAX_OF_PEER, MAX_PEER_NBYTES = 512, 8 << 20
"""Of one connection: as many requests wait at a large decode engine."""

Early = Find | Pull | Cancel
Item = tuple[bytes, bytes]
"""A connection and what it has said: encoded, which is smaller, and of a known size."""


class Parked:
    """Messages by what they wait for: the name of a request, or a nonce. ``late``: gets each one
    that has waited for ``wait_s`` in vain.
    """

    def __init__(self, io: IoThread, wait_s: float, late: Callable[[bytes, Early], None]) -> None:
        self._io, self._wait_s, self._late = io, wait_s, late
        self._waiting: dict[bytes, dict[Item, Timer]] = {}
        self._num_of: Counter[bytes] = Counter()
        self._nbytes_of: Counter[bytes] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def park(self, key: bytes, identity: bytes, message: Early) -> bool:
        """False if there is no room for it. One that is repeated waits no longer."""
        frame = encode(message)
        if (identity, frame) in self._waiting.get(key, ()):
            return True
        if not self._has_room(identity, len(frame)):
            return False
        timer = self._io.after(self._wait_s, self._expire, key, (identity, frame))
        self._waiting.setdefault(key, {})[identity, frame] = timer
        self._num_of[identity] += 1
        self._nbytes_of[identity] += len(frame)
        return True

    def take(self, key: bytes) -> list[tuple[bytes, Early]]:
        """What waited for this, in the order in which it came, with its connection."""
        items = list(self._waiting.get(key, ()))
        for item in items:
            self._drop(key, item)
        return [(identity, _decoded(frame)) for identity, frame in items]

    def gone(self, identity: bytes) -> None:
        """A connection has ended: nothing waits for it any more."""
        if self._num_of[identity]:
            for key in list(self._waiting):
                for item in [each for each in self._waiting[key] if each[0] == identity]:
                    self._drop(key, item)

    def _has_room(self, identity: bytes, nbytes: int) -> bool:
        return (
            self._num_of[identity] < MAX_OF_PEER
            and self._nbytes_of[identity] + nbytes <= MAX_PEER_NBYTES
            and self._num_of.total() < MAX_PARKED
            and self._nbytes_of.total() + nbytes <= MAX_NBYTES
        )

    def _expire(self, key: bytes, item: Item) -> None:
        self._drop(key, item)
        self._late(item[0], _decoded(item[1]))

    def _drop(self, key: bytes, item: Item) -> None:
        items, (identity, frame) = self._waiting[key], item
        items.pop(item).cancel()
        if not items:
            del self._waiting[key]
        self._num_of[identity] -= 1
        self._nbytes_of[identity] -= len(frame)
        if not self._num_of[identity]:
            del self._num_of[identity], self._nbytes_of[identity]


def _decoded(frame: bytes) -> Early:
    """It was encoded here."""
    return cast("Early", decode_to_source(frame))
