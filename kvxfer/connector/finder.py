"""Finds the offers of requests that a router has sent to both engines at once. Runs on the IO
thread of the front door.

The request's name (the router's id of it) is known before the offer has a nonce. So this side asks
the source's front door, which answers when the request is scheduled there, and again when its
prompt is complete. A question is asked again until it is answered: the connection may have been
replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvxfer.config import Config
from kvxfer.connector.io_thread import IoThread, Timer
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.peer import Peer
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.peers import Peers
from kvxfer.connector.records import FindOffer, FoundOffer, SourceRef
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import GROWING, PROTOCOL_MAX, Find, Found, OfferRef, Reason

ASK_S = 1.0
"""An answer that is this late is asked for again."""
BEYOND_S = 2.0
"""How long after the source's own time-out its answer may come."""
MAX_WANTED = 1 << 14
"""Requests that are looked for, and those whose offers are not complete yet."""
FRONT_DOOR = RankId(0, 0)


@dataclass(slots=True, eq=False)
class _Wanted:
    """A request by its name. ``until_s``: when it is given up; once found, nobody asks any more."""

    source: SourceRef
    until_s: float
    is_found: bool = False
    timer: Timer | None = None


class Finder:
    """The requests that are looked for, by name and life of their source engine."""

    def __init__(
        self, io: IoThread, config: Config, incarnation: bytes, peers: Peers, ledger: Ledger
    ) -> None:
        self._io, self._config, self._incarnation = io, config, incarnation
        self._peers, self._ledger = peers, ledger
        self._wanted: OrderedDict[OfferRef, _Wanted] = OrderedDict()

    def find(self, order: FindOffer) -> None:
        """Look for a request; what becomes of it is told to the ledger."""
        source = order.source
        self._drop(source.offer)
        until_s = self._io.now() + self._config.early_wait_s + BEYOND_S
        self._wanted[source.offer] = _Wanted(source, until_s)
        while len(self._wanted) > MAX_WANTED:
            self._drop(next(iter(self._wanted)))
        self._ask(source.offer)

    def on_message(self, peer: Peer, found: Found) -> None:
        """An answer of a source's front door."""
        life = peer.manifest.incarnation if peer.manifest is not None else b""
        name = OfferRef(found.request, life)
        wanted = self._wanted.get(name)
        if wanted is None or found.incarnation != self._incarnation:
            self._ledger.count("control.late")
        elif found.offer is None:
            self._lost(name, Failure(found.reason or Reason.UNKNOWN, found.detail))
        elif found.offer.incarnation != name.incarnation:
            self._lost(name, Failure(Reason.INCARNATION, "it was found in another life"))
        else:
            wanted.is_found = True
            wanted.until_s = self._io.now() + self._config.max_hold_s
            source = replace(wanted.source, offer=found.offer, num_tokens=found.num_tokens)
            self._ledger.found(found.request.hex(), FoundOffer(source, found.is_complete))
            if found.is_complete:
                self._drop(name)

    def _ask(self, name: OfferRef) -> None:
        """Ask the source as soon as it is known, and again in time."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return
        if self._io.now() >= wanted.until_s:
            self._lost(name, Failure(Reason.UNKNOWN, "its source engine has not answered"))
            return
        again_s = self._config.keep_s if wanted.is_found else ASK_S
        wanted.timer = self._io.after(again_s, self._ask, name)
        peer = self._peers.known(wanted.source)
        if peer is not None:
            self._say(name, peer)
        elif not wanted.is_found:
            self._peers.want(
                wanted.source,
                needs_wire=False,
                ready=partial(self._say, name),
                failed=partial(self._lost, name),
            )

    def _say(self, name: OfferRef, peer: Peer) -> None:
        wanted = self._wanted.get(name)
        if wanted is None:
            return
        if min(PROTOCOL_MAX, peer.protocol) < GROWING:
            detail = f"expected protocol {GROWING} of its source, got {peer.protocol}"
            self._lost(name, Failure(Reason.INCOMPATIBLE, f"{detail}; install this version there"))
            return
        find = Find(name.nonce, self._incarnation, wanted.source.digest)
        peer.send(FRONT_DOOR, find)

    def _lost(self, name: OfferRef, failure: Failure) -> None:
        """It was not found. One that was is told nothing: its load has its own answer."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return
        self._drop(name)
        if not wanted.is_found:
            told = FoundOffer(None, reason=failure.reason, detail=failure.detail)
            self._ledger.found(name.nonce.hex(), told)

    def _drop(self, name: OfferRef) -> None:
        wanted = self._wanted.pop(name, None)
        if wanted is not None and wanted.timer is not None:
            wanted.timer.cancel()
