"""Messages about offers that this rank does not know yet: of sinks that were dispatched early.

A sink that comes before its offer waits: its Find until the request is scheduled here, its Pull
until this rank, too, has heard of the nonce. Anybody who is admitted can ask for what never comes,
so what waits is bounded in number, for each connection and for all, and in time. Runs on the IO
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvxfer.connector.io_thread import IoThread, Timer
from kvxfer.transfer.wire import Cancel, Find, Pull

MAX_PARKED = 4096
"""Messages of all connections: a Find has 100 bytes, a Pull of a stream of 80 layers 5 KB."""
MAX_OF_PEER = 512
"""Of one connection: as many requests wait at a large decode engine."""

Message = Find | Pull | Cancel
Item = tuple[bytes, Message]
"""A connection and what it has said."""


class Parked:
    """Messages by what they wait for: the name of a request, or a nonce. ``late``: gets each one
    that has waited for ``wait_s`` in vain.
    """

    def __init__(self, io: IoThread, wait_s: float, late: Callable[[bytes, Message], None]) -> None:
        self._io, self._wait_s, self._late = io, wait_s, late
        self._waiting: dict[bytes, dict[Item, Timer]] = {}
        self._num_of: Counter[bytes] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return self._num_of.total()

    def park(self, key: bytes, identity: bytes, message: Message) -> bool:
        """False if there is no room for it. One that is repeated waits no longer."""
        item = (identity, message)
        if item in self._waiting.get(key, ()):
            return True
        if len(self) >= MAX_PARKED or self._num_of[identity] >= MAX_OF_PEER:
            return False
        timer = self._io.after(self._wait_s, self._expire, key, item)
        self._waiting.setdefault(key, {})[item] = timer
        self._num_of[identity] += 1
        return True

    def take(self, key: bytes) -> list[Item]:
        """What waited for this, in the order in which it came."""
        items = self._waiting.pop(key, {})
        for (identity, _), timer in items.items():
            timer.cancel()
            self._leave(identity)
        return list(items)

    def gone(self, identity: bytes) -> None:
        """A connection has ended: nothing waits for it any more."""
        if self._num_of[identity]:
            for key in list(self._waiting):
                for item in [each for each in self._waiting[key] if each[0] == identity]:
                    self._drop(key, item).cancel()

    def _expire(self, key: bytes, item: Item) -> None:
        self._drop(key, item)
        self._late(*item)

    def _drop(self, key: bytes, item: Item) -> Timer:
        items = self._waiting[key]
        timer = items.pop(item)
        if not items:
            del self._waiting[key]
        self._leave(item[0])
        return timer

    def _leave(self, identity: bytes) -> None:
        self._num_of[identity] -= 1
        if not self._num_of[identity]:
            del self._num_of[identity]
