"""Those who wait for one source engine. On the IO thread.

Each is called once, with the peer or with why not. What one of them raises is its own failure: the
others are called all the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.peer_records import Failure, PeerState, Waiter
from kvxfer.connector.records import SourceRef
from kvxfer.transfer.wire import Reason

if TYPE_CHECKING:
    from kvxfer.connector.peer import Peer


class Waiters:
    """The waiters of one peer, in the order in which they came."""

    def __init__(self, io: IoThread) -> None:
        self._io = io
        self._waiters: list[Waiter] = []

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, waiter: Waiter) -> None:
        """One more."""
        self._waiters.append(waiter)

    def forget(self, waiter: Waiter) -> None:
        """The waiter is not to be called any more."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def take(self) -> list[Waiter]:
        """All of them; nobody waits any more."""
        waiters, self._waiters = self._waiters, []
        return waiters

    def sources(self) -> list[SourceRef]:
        """What they wait for."""
        return [waiter.source for waiter in self._waiters]

    def serve(self, peer: Peer) -> None:
        """Call everybody for whom the peer is far enough."""
        if peer.state not in (PeerState.KNOWN, PeerState.READY):
            return
        served = [
            waiter
            for waiter in self._waiters
            if peer.is_alive_as(waiter.source)
            and (peer.state is PeerState.READY or not waiter.needs_wire)
        ]
        for waiter in served:
            if waiter in self._waiters:  # an earlier one may have had it forgotten
                self._waiters.remove(waiter)
                self._io.guard(partial(waiter.ready, peer))

    def refuse_other_lives(self, peer: Peer) -> None:
        """Offers of a life that is not the present one are stale."""
        detail = f"the offer is of another life of engine {peer.engine_id}"
        for waiter in [w for w in self._waiters if not peer.is_alive_as(w.source)]:
            self.forget(waiter)
            self._io.guard(partial(waiter.failed, Failure(Reason.INCARNATION, detail)))

    def fail(self, failure: Failure) -> None:
        """Tell everybody that there is no peer."""
        for waiter in self.take():
            self._io.guard(partial(waiter.failed, failure))
