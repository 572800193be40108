"""All source engines that a sink rank knows, by engine id and front door. Runs on the IO thread.

A contact that failed is remembered for a second and fails at once meanwhile, unless an offer of
another life comes: that one proves that the engine lives. What was lost is forgotten, so that a
restarted engine is met anew.

A manifest states its endpoints itself, so two engines may state the same one. Wires know a source
rank by its control endpoint: one that answers for another engine there would have its memory read
in the other's name. So a peer is READY only when each rank that is read has said the same of itself
there. What nobody has confirmed keeps nobody out, and what was heard last holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvxfer.connector.peer import Peer
from kvxfer.connector.peer_records import Failure, PeerState, Surroundings, Waiter
from kvxfer.connector.records import SourceRef
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transfer.wire import Reason

BACK_OFF_S = 1.0
"""How long a failed contact is not tried again."""
MAX_FAILURES = 1024
MAX_GREETED = 64
"""Engines that are being met at one time; each costs sockets and a thread before it has proved
anything.
"""
_MEETING = (PeerState.GREETING, PeerState.KNOWN)

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Failed:
    """A contact that failed, with the offers of which life, and until when that is believed."""

    failure: Failure
    incarnation: bytes
    until_s: float


class Peers:
    """Finds or makes the peer of an offer.

    Args:
        around: what every peer shares; ``again`` is set here, and ``on_over`` is called after the
            peer was forgotten.
    """

    def __init__(self, around: Surroundings) -> None:
        self._on_over = around.on_over
        self._io = around.io
        self._ledger = around.ledger
        self._around = replace(
            around,
            on_over=self._over,
            again=self._wait,
            confirmed=self._confirmed,
            is_shared=self._is_shared,
        )
        self._peers: dict[Key, Peer] = {}
        self._failed: dict[Key, _Failed] = {}
        self._asked: dict[Key, bytes] = {}
        self._closed: Failure | None = None

    def want(
        self,
        source: SourceRef,
        *,
        needs_wire: bool,
        ready: Callable[[Peer], object],
        failed: Callable[[Failure], object],
    ) -> Waiter:
        """Get the peer that made this offer; ``ready`` or ``failed`` is called once, perhaps before
        this returns.
        """
        waiter = Waiter(source, needs_wire, ready, failed)
        self._wait(waiter)
        return waiter

    def known(self, source: SourceRef) -> Peer | None:
        """The peer that made this offer, if it is known in that life."""
        peer = self._peers.get((source.engine_id, source.endpoint))
        return peer if peer is not None and peer.is_alive_as(source) else None

    def ready(self, source: SourceRef) -> Peer | None:
        """The same, if its offers can be read at once."""
        peer = self.known(source)
        return peer if peer is not None and peer.state is PeerState.READY else None

    def forget(self, waiter: Waiter) -> None:
        """The waiter is not to be called any more."""
        peer = self._peers.get((waiter.source.engine_id, waiter.source.endpoint))
        if peer is not None:
            peer.forget(waiter)

    def lost(self, control_endpoint: str, detail: str) -> None:
        """A wire says that the connection to this rank ended."""
        for peer in list(self._peers.values()):
            ranks = peer.manifest.ranks if peer.manifest is not None else ()
            if any(entry.control_endpoint == control_endpoint for entry in ranks):
                peer.end(Failure(Reason.PEER_LOST, f"{control_endpoint}: {detail}"))

    def close(self, failure: Failure) -> None:
        """End every acquaintance."""
        for peer in list(self._peers.values()):
            peer.end(failure)

    def shutdown(self, failure: Failure) -> None:
        """End every acquaintance and make no new one."""
        self._closed = failure
        self.close(failure)

    def _wait(self, waiter: Waiter) -> None:
        source = waiter.source
        if self._closed is not None:
            waiter.failed(self._closed)
            return
        key = (source.engine_id, source.endpoint)
        known = self._failed.get(key)
        if known is not None and known.until_s <= self._io.now():
            del self._failed[key]
            known = None
        if known is not None and known.incarnation == source.offer.incarnation:
            waiter.failed(known.failure)
            return
        peer = self._peers.get(key)
        if peer is None:
            if sum(other.state in _MEETING for other in self._peers.values()) >= MAX_GREETED:
                self._ledger.count("peers.crowded")
                detail = f"expected at most {MAX_GREETED} engines that are being met, got another"
                waiter.failed(Failure(Reason.PEER_LOST, detail))
                return
            peer = self._peers[key] = Peer(self._around, source)
            self._asked[key] = source.offer.incarnation
            peer.wait(waiter)
            peer.start()
            return
        peer.wait(waiter)
        if peer.state is PeerState.READY and not peer.is_alive_as(source):
            peer.recheck()

    def _confirmed(self, peer: Peer, entry: RankManifest) -> None:
        """This rank has answered: whoever was known where it listens is not there any more."""
        for other in list(self._peers.values()):
            if other is not peer and other.is_replaced_by(peer, entry):
                detail = f"engine {peer.engine_id} answers in its place"
                other.end(Failure(Reason.PEER_LOST, detail))

    def _is_shared(self, peer: Peer, rank: RankId) -> bool:
        entry, wire = peer.source(rank), peer.transport(rank)
        return any(
            other is not peer
            and other.state is PeerState.READY
            and any(
                other.source(its) == entry and other.transport(its) is wire for its in other.choices
            )
            for other in self._peers.values()
        )

    def _over(self, peer: Peer, failure: Failure) -> None:
        key = (peer.engine_id, peer.endpoint)
        self._ledger.count(f"peers.{failure.reason.value}")
        if self._peers.get(key) is peer:
            del self._peers[key]
        asked = self._asked.pop(key, b"")
        if not peer.was_ready:
            if len(self._failed) >= MAX_FAILURES:
                self._failed.clear()
            self._failed[key] = _Failed(failure, asked, self._io.now() + BACK_OFF_S)
        self._on_over(peer, failure)
