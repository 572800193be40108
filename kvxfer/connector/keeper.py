"""Finds the offers that this engine wants, and keeps their leases. Runs on the IO thread.

Rank 0 keeps every held offer at all source ranks, from before its admission until its load ends.
Every rank keeps the offers that it is loading at the source ranks it reads, so that a slow rank
does not lose what a fast one has finished with. A Keep is also the sign of life of the engine's
claim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvxfer.connector.io_thread import Timer
from kvxfer.connector.loads import MAX_PRESUMED
from kvxfer.connector.peer import Peer, Surroundings
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.peers import BACK_OFF_S, Peers
from kvxfer.connector.records import FindOffer, FoundOffer, SourceRef
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import (
    GROWING,
    MAX_EARLY,
    MAX_KEPT,
    PROTOCOL_MAX,
    Cancel,
    Find,
    Found,
    Keep,
    OfferRef,
    Reason,
)

OFFER_NBYTES = 270
"""The most that one offer takes in a Keep: three ids and a digest of up to 64 bytes."""
_NOTHING_OWED = (Reason.PEER_LOST, Reason.INCARNATION)
OWED_S = 2 * BACK_OFF_S
"""How long after a refusal an engine is told which offers it need not hold."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An offer, and the source ranks that get its Keeps; None: all of them."""

    source: SourceRef
    ranks: frozenset[RankId] | None


@dataclass(frozen=True, slots=True)
class _Owed:
    """An offer that is not wanted any more, and whose source engine could not be told so yet."""

    source: SourceRef
    reason: Reason
    until_s: float


class Keeper:
    """The offers that are kept, by request id."""

    def __init__(self, around: Surroundings, peers: Peers) -> None:
        self._io, self._config, self._peers = around.io, around.config, peers
        self._incarnation = around.identity.incarnation
        self._kept: dict[str, _Kept] = {}
        self._owed: list[_Owed] = []
        self._is_ticking = False

    def hold(self, request_id: str, source: SourceRef) -> None:
        """Keep an offer at every source rank, as soon as the source engine is known."""
        kept = self._kept[request_id] = _Kept(source, None)
        if not self._is_ticking:
            self._start()
        peer = self._peers.known(source)
        if peer is None:
            self._tell_all(request_id, kept)
        else:  # also if a load in this very round has ended before: other ranks may still read
            self._io.defer(self._tell_ranks, peer, source)

    def hold_at(self, request_id: str, source: SourceRef, ranks: frozenset[RankId]) -> None:
        self._kept.setdefault(request_id, _Kept(source, ranks))
        if not self._is_ticking:
            self._start()

    def release(self, request_id: str, source: SourceRef) -> None:
        """Unless another offer is held for it by now: a preempted prefill has a new one."""
        kept = self._kept.get(request_id)
        if kept is not None and kept.source.offer == source.offer:
            del self._kept[request_id]

    def cancel(self, source: SourceRef, reason: Reason) -> None:
        """Give an offer up at every source rank; a source engine that is not known yet is met
        first.

        An engine that was refused is not met again for a second, yet it lives and holds the offer's
        blocks: it is told when it is met again, within the lease.
        """
        self._cancel(_Owed(source, reason, self._io.now() + self._config.lease_s))

    def _cancel(self, owed: _Owed) -> None:
        self._peers.want(owed.source, self._pay, owed, needs_wire=False)

    def _pay(self, owed: _Owed, found: Peer | Failure) -> None:
        if isinstance(found, Peer):
            found.cancel(owed.source, owed.reason)
        elif found.reason not in _NOTHING_OWED and self._io.now() < owed.until_s:
            # else nobody is there, its life is over, or its own lease has ended the offer
            if not self._owed:
                self._io.after(OWED_S, self._settle)
            self._owed.append(owed)

    def _settle(self) -> None:
        waiting, self._owed = self._owed, []
        for owed in waiting:
            self._io.guard(self._cancel, owed)

    def _start(self) -> None:
        self._is_ticking = True
        self._io.after(self._config.keep_s, self._keep)

    def _keep(self) -> None:
        self._is_ticking = False
        if not self._kept:
            return
        self._start()  # first: what fails below must not end the keeping
        held: dict[tuple[Peer, RankId], list[SourceRef]] = {}
        for request_id, kept in list(self._kept.items()):
            peer = self._peers.known(kept.source)
            if peer is None:
                self._io.guard(self._tell_all, request_id, kept)
                continue
            for rank in peer.entries if kept.ranks is None else kept.ranks:
                held.setdefault((peer, rank), []).append(kept.source)
        for (peer, rank), sources in held.items():
            self._io.guard(self._tell, peer, rank, sources)

    def _tell(self, peer: Peer, rank: RankId, sources: Sequence[SourceRef]) -> None:
        num = max(1, min(MAX_KEPT, self._config.control_max_nbytes // OFFER_NBYTES))
        for lo in range(0, len(sources), num):
            some = sources[lo : lo + num]
            offers = tuple(dict.fromkeys(source.offer for source in some))
            digests = {source.offer.nonce: source.digest for source in some if source.digest}
            peer.send(rank, Keep(offers, self._incarnation, self._config.lease_s, digests))

    def _tell_ranks(self, peer: Peer, source: SourceRef) -> None:
        for rank in peer.entries:
            self._tell(peer, rank, (source,))

    def _tell_all(self, request_id: str, kept: _Kept) -> None:
        self._peers.want(kept.source, self._on_peer, request_id, kept, needs_wire=False)

    def _on_peer(self, request_id: str, kept: _Kept, found: Peer | Failure) -> None:
        """The own lease of an engine that cannot be reached ends the offer."""
        is_given_up = self._kept.get(request_id) is not kept
        if isinstance(found, Peer) and not is_given_up:
            self._tell_ranks(found, kept.source)


# ------------------------------------------------------------------ offers that are known by name


ASK_S = 1.0
"""An answer that is this late is asked for again."""
BEYOND_S = 2.0
"""How long after the source's own time-out its answer may come."""
MAX_ASKED = MAX_EARLY - 2 * MAX_PRESUMED
MAX_WANTED = 1 << 14
"""Requests that are looked for, and those whose offers are not complete yet."""
FRONT_DOOR = RankId(0, 0)


_ANOTHER = Failure(Reason.TOKENS, "the source has another prompt under this id")
_UNWANTED = Failure(Reason.CANCELLED, "no request looks for it any more")


@dataclass(slots=True, eq=False)
class _Wanted:
    """One that is looked for. ``until_s``: when it is given up. ``is_asked``: it may wait at its
    source. ``is_found``: and not complete.
    """

    until_s: float
    is_asked: bool = False
    is_found: bool = False
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class _Room:
    """What one source has of these questions: MAX_ASKED at most, or others wait here. The first of
    the ``unwanted`` gives its place up then.
    """

    num_asked: int = 0
    unwanted: OrderedDict[FindOffer, None] = field(default_factory=OrderedDict)
    unasked: OrderedDict[FindOffer, None] = field(default_factory=OrderedDict)


class Finder:
    """The offers of requests that a router has sent to both engines at once, by the router's id and
    the life of their source engine. For the front door.

    The name is known before the offer has a nonce. So this side asks the source's front door, which
    answers when the request is scheduled there, and again when its prompt is complete, or will not
    be. It is asked again until then: the connection may have been replaced, or the engine be gone.

    Whoever chooses the params can give one id to several prompts, and an answer does not say for
    which of them it is. So one of them is asked for at a time, and the next one when that was not
    found.

    A source has room for MAX_EARLY messages of a connection that come before their offer: Pulls of
    offers that are presumed, and MAX_ASKED questions. The others wait here for their turn.
    """

    def __init__(self, around: Surroundings, peers: Peers) -> None:
        self._io, self._config, self._peers = around.io, around.config, peers
        self._incarnation, self._ledger = around.identity.incarnation, around.ledger
        self._wanted: OrderedDict[FindOffer, _Wanted] = OrderedDict()
        self._turns: dict[OfferRef, list[FindOffer]] = {}
        """By the router's id; the source is asked for the first one."""
        self._rooms: dict[bytes, _Room] = {}
        """By the life of the source."""

    def find(self, order: FindOffer) -> None:
        """Look for it; anew, if it is looked for already."""
        if not order.is_wanted:
            self._unwant(replace(order, is_wanted=True))
            return
        turns = self._turns.setdefault(order.source.offer, [])
        before = self._wanted.pop(order, None)
        until_s = self._io.now() + self._config.early_wait_s + BEYOND_S
        self._wanted[order] = _Wanted(until_s)
        if before is None:
            turns.append(order)
        else:
            self._wanted[order].is_asked = before.is_asked
            self._room(order).unwanted.pop(order, None)
            if before.timer is not None:
                before.timer.cancel()
        while len(self._wanted) > MAX_WANTED:
            detail = f"expected at most {MAX_WANTED} requests that are looked for, got another"
            self._lost(next(iter(self._wanted)), Failure(Reason.UNKNOWN, detail))
        if turns[0] == order:
            self._ask(order)
        elif self._wanted[turns[0]].is_found:
            self._lost(order, _ANOTHER)

    def on_message(self, peer: Peer, found: Found) -> None:
        life = peer.manifest.incarnation if peer.manifest is not None else b""
        turns = self._turns.get(OfferRef(found.request, life))
        if turns is None or found.incarnation != self._incarnation:
            self._ledger.count("control.late")
            return
        order, *others = turns
        if found.offer is None:
            self._lost(order, Failure(found.reason or Reason.UNKNOWN, found.detail))
        elif found.offer.incarnation != life:
            self._lost(order, Failure(Reason.INCARNATION, "it was found in another life"))
        else:
            wanted, wait_s = self._wanted[order], self._config.keep_s + self._config.early_wait_s
            wanted.is_found, wanted.until_s = True, self._io.now() + wait_s + BEYOND_S
            self._make_room(order, wanted)
            source = replace(order.source, offer=found.offer, num_tokens=found.num_tokens)
            self._ledger.found(order.name, FoundOffer(source, found.is_complete))
            for other in others:
                self._lost(other, _ANOTHER)
            if found.is_complete:
                self._drop(order)

    def _ask(self, order: FindOffer) -> None:
        wanted = self._wanted.get(order)
        if wanted is None:
            return
        if self._io.now() >= wanted.until_s:
            self._lost(order, Failure(Reason.UNKNOWN, "its source engine has not answered"))
            return
        if wanted.timer is not None:
            wanted.timer.cancel()
        if not (wanted.is_found or self._has_place(order, wanted)):
            wanted.timer = self._io.after(wanted.until_s - self._io.now(), self._ask, order)
            self._displace(self._room(order))
            return
        again_s = self._config.keep_s if wanted.is_found else ASK_S
        wanted.timer = self._io.after(again_s, self._ask, order)
        peer = self._peers.known(order.source)
        if peer is not None:
            self._say(order, peer)
        else:
            self._peers.want(order.source, self._say, order, needs_wire=False)

    def _say(self, order: FindOffer, peer: Peer | Failure) -> None:
        if order not in self._wanted:
            return
        if isinstance(peer, Failure):
            self._lost(order, peer)
            return
        if min(PROTOCOL_MAX, peer.protocol) < GROWING:
            detail = f"expected protocol {GROWING} of its source, got {peer.protocol}"
            self._lost(order, Failure(Reason.INCOMPATIBLE, f"{detail}; install this version there"))
            return
        source = order.source
        peer.send(FRONT_DOOR, Find(source.offer.nonce, self._incarnation, source.digest))

    def _room(self, order: FindOffer) -> _Room:
        return self._rooms.setdefault(order.source.offer.incarnation, _Room())

    def _has_place(self, order: FindOffer, wanted: _Wanted) -> bool:
        """Whether its source has room for the question; else it has its turn later."""
        room = self._room(order)
        if wanted.is_asked:
            return True
        if room.num_asked >= MAX_ASKED:
            room.unasked[order] = None
            return False
        room.num_asked += 1
        wanted.is_asked = True
        return True

    def _unwant(self, order: FindOffer) -> None:
        """It is looked for until another one needs its place."""
        wanted = self._wanted.get(order)
        if wanted is None:
            return
        room = self._room(order)
        if order in room.unasked:
            self._lost(order, _UNWANTED)
        elif wanted.is_asked:
            room.unwanted[order] = None
            if room.unasked:
                self._displace(room)

    def _displace(self, room: _Room) -> None:
        """Another one needs a place. The source forgets the question that it is told of."""
        if not room.unwanted:
            return
        order = next(iter(room.unwanted))
        source, peer = order.source, self._peers.known(order.source)
        if peer is not None:
            digest = source.digest
            peer.send(FRONT_DOOR, Cancel(source.offer, self._incarnation, Reason.CANCELLED, digest))
        self._lost(order, _UNWANTED)

    def _make_room(self, order: FindOffer, wanted: _Wanted) -> None:
        """It waits no longer, at its source or here: the next one has its place, and is asked for
        in a round of its own, because there may be thousands.
        """
        room = self._room(order)
        room.unwanted.pop(order, None)
        room.unasked.pop(order, None)
        if wanted.is_asked and room.unasked:
            following, _ = room.unasked.popitem(last=False)
            self._wanted[following].is_asked = True
            self._ask_at_once(following)
        else:
            room.num_asked -= wanted.is_asked
        wanted.is_asked = False
        if not room.num_asked:
            del self._rooms[order.source.offer.incarnation]

    def _ask_at_once(self, order: FindOffer) -> None:
        wanted = self._wanted[order]
        if wanted.timer is not None:
            wanted.timer.cancel()
        wanted.timer = self._io.after(0.0, self._ask, order)

    def _lost(self, order: FindOffer, failure: Failure) -> None:
        """It was not found, or will not be complete. A load that has begun has its own answer."""
        if order in self._wanted:
            self._drop(order)
            told = FoundOffer(None, reason=failure.reason, detail=failure.detail)
            self._ledger.found(order.name, told)

    def _drop(self, order: FindOffer) -> None:
        """The next one of its id has its turn, in a round of its own: there may be thousands."""
        wanted, turns = self._wanted.pop(order), self._turns[order.source.offer]
        if wanted.timer is not None:
            wanted.timer.cancel()
        self._make_room(order, wanted)
        was_asked = turns[0] == order
        turns.remove(order)
        if not turns:
            del self._turns[order.source.offer]
        elif was_asked:
            self._ask_at_once(turns[0])
