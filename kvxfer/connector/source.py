"""The giving side of one rank: its offers, and what it answers to sinks. Runs on the IO thread.

Decisions are the session's (:mod:`kvxfer.transfer.source_session`), performed by
:mod:`kvxfer.connector.offer_actions`; the clocks are in :mod:`kvxfer.connector.leases`. An offer
that is over is remembered, so that a repeated question gets its first answer, until
:data:`REMEMBERED` others have ended.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import assert_never

from kvxfer.config import Config
from kvxfer.connector.board import Posted
from kvxfer.connector.draining import Draining
from kvxfer.connector.ends import Ends
from kvxfer.connector.given_offer import AskedPull, GivenOffer
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.leases import Leases
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.offer_actions import OfferActions, Reply
from kvxfer.connector.opening import IsReady, Opening
from kvxfer.connector.records import EndOffer, NewOffer, OfferBlocks
from kvxfer.connector.requests import Refused, check_same, clip_ids, read_pull
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.offer import MAX_LIVES
from kvxfer.transfer.pull import PullResolver
from kvxfer.transfer.session import (
    Break,
    CancelArrived,
    ClaimantLost,
    OfferState,
    PullArrived,
    ReadyCompleted,
    ReleaseArrived,
    SourceEvent,
    Wire,
)
from kvxfer.transfer.source_session import OfferSession, events_due, knows_tokens
from kvxfer.transfer.windows import group_keepings, held_ids
from kvxfer.transfer.wire import (
    Cancel,
    Keep,
    OfferRef,
    Pull,
    Reason,
    Refuse,
    Release,
    Verdict,
)
from kvxfer.transports.base import SourceCompletion, SourceTransport

REMEMBERED = 4096
"""Offers that are over and still answer; about 1 KiB each."""

_log = logging.getLogger("kvxfer.connector")


class Source:
    """All offers of this rank, those that are over too.

    Args:
        manifest: this rank's own; what a Pull asks for is looked up there.
        reply: sends an answer over the connection that a question came from.
        ends: what the engine has ended, and where open offers are shown to the sinks of this host.
    """

    def __init__(
        self,
        io: IoThread,
        config: Config,
        ledger: Ledger,
        *,
        incarnation: bytes,
        manifest: RankManifest,
        transports: Mapping[str, SourceTransport],
        reply: Reply,
        ends: Ends,
    ) -> None:
        self._io = io
        self._config = config
        self._ledger = ledger
        self._ends = ends
        self._incarnation = incarnation
        self._resolver = PullResolver(manifest)
        self._transports = transports
        self._reply = reply
        self._keepings = group_keepings(manifest.regions)
        self._leases = Leases(io, config, ledger, self._step)
        self._actions = OfferActions(
            ledger,
            incarnation=incarnation,
            resolver=self._resolver,
            transports=transports,
            reply=reply,
            step=self._step,
            finish=self._finish,
        )
        self._live: dict[bytes, GivenOffer] = {}
        self._over: OrderedDict[bytes, GivenOffer] = OrderedDict()
        self._by_request: dict[str, GivenOffer] = {}
        self._opening = Opening(io, self._open, partial(self._break, reason=Reason.PLAN))
        self._draining = Draining()

    # -------------------------------------------------- orders of the engine

    def add(self, order: NewOffer) -> None:
        """A request that will be offered was admitted; Pulls for it are parked until it opens."""
        if order.nonce in self._live or order.nonce in self._over:
            raise ValueError(
                f"offer {order.nonce.hex()}: expected a new nonce, got one that was used"
            )
        digest = order.digest if self._config.bind_tokens else None
        session = OfferSession(order.nonce, digest)
        offer = GivenOffer(order.request_id, order.nonce, order.num_tokens, session)
        self._live[order.nonce] = offer
        self._by_request[order.request_id] = offer
        self._ledger.count("offers.minted")

    def set_blocks(self, order: OfferBlocks) -> None:
        """The block table of an offered request, as of this step; final once it has opened."""
        offer = self._by_request.get(order.request_id)
        if offer is not None and offer.state is OfferState.PENDING:
            # A block that its window has left may be another request's by the next step.
            offer.block_ids = held_ids(order.block_ids, self._keepings, offer.num_tokens)

    def computed(self, request_ids: Sequence[str], is_ready: IsReady) -> None:
        """The step that computes the last offered token was launched; open when ``is_ready()``."""
        offers = [self._by_request[i] for i in request_ids if i in self._by_request]
        self._opening.add(offers, is_ready)

    def delay(self, request_ids: Sequence[str]) -> None:
        """The engine keeps these requests' blocks until they are reported; at once if the offer is
        over.
        """
        for request_id in request_ids:
            offer = self._by_request.get(request_id)
            if offer is None:
                self._ledger.sent(request_id)
            else:
                offer.is_delayed = True
                self._leases.restart(offer)

    def end(self, orders: Sequence[EndOffer]) -> None:
        """Take in what the engine has ended (:class:`Ends`)."""
        for order in orders:
            offer = self._live.get(order.nonce)
            if offer is not None:
                self._break(offer, order.reason)
            self._ends.forget(order.nonce)

    def shutdown(self, done: Callable[[], object]) -> None:
        """Break every offer, tell the consumers; ``done`` is called when all have drained."""
        for offer in list(self._live.values()):
            self._break(offer, Reason.SHUTDOWN)
        self._draining.wait(set(self._live), done)

    # -------------------------------------------------- messages and completions

    def handle(self, identity: bytes, message: Pull | Release | Cancel | Keep) -> None:
        """A message about offers. Raises ProtocolError for one that the offer's state does not
        allow.
        """
        match message:
            case Keep():
                for ref in message.offers:
                    self._on_keep(identity, ref, message)
            case Cancel():
                self._on_cancel(message)
            case Release():
                self._on_release(identity, message)
            case Pull():
                self._on_pull(identity, message)
            case _:
                assert_never(message)

    def gone(self, identity: bytes) -> None:
        """A connection has ended. What a sink engine held over it comes back, unless that is heard
        again soon: it may have connected anew, and keeps every ``keep_s`` what it wants.
        """
        for offer in self._live.values():
            for life in [life for life, last in offer.speakers.items() if last == identity]:
                del offer.speakers[life]
                grace_s = self._config.keep_s + self._config.peer_silent_s
                self._io.after(grace_s, partial(self._left, offer, life))

    def _left(self, offer: GivenOffer, life: bytes) -> None:
        if life in offer.speakers or offer.state is not OfferState.OPEN:
            return
        self._ledger.count("claims.left")
        self._step(offer, ClaimantLost(life))
        if offer.state is OfferState.OPEN and not (offer.speakers or offer.session.claimants):
            self._break(offer, Reason.PEER_LOST)

    def on_completion(self, transport: SourceTransport, completion: SourceCompletion) -> None:
        """Something happened on a stream wire."""
        self._actions.on_completion(transport, completion)

    def _find(self, ref: OfferRef) -> GivenOffer | Reason:
        """The offer, or why there is none."""
        if ref.incarnation != self._incarnation:
            return Reason.INCARNATION
        return self._live.get(ref.nonce) or self._over.get(ref.nonce) or Reason.UNKNOWN

    def _on_pull(self, identity: bytes, pull: Pull) -> None:
        offer = self._find(pull.offer)
        try:
            if isinstance(offer, Reason):
                self._refuse(identity, pull, offer, "")
                return
            wire = self._read(offer, pull)
        except Refused as e:
            self._refuse(identity, pull, e.reason, str(e))
            return
        offer.identities[pull.consumer] = identity
        if offer.nonce in self._live:
            offer.pulls[pull.consumer] = AskedPull(pull, wire)
        self._step(offer, PullArrived(pull.consumer, frozenset(pull.claim), pull.digest, wire))
        if offer.session.serves(pull.consumer):
            self._leases.heard(offer, pull.consumer.incarnation)
            offer.speakers[pull.consumer.incarnation] = identity
        else:
            # Refused: the next one from this rank may be another request's, and may be right.
            offer.pulls.pop(pull.consumer, None)
            del offer.identities[pull.consumer]

    def _read(self, offer: GivenOffer, pull: Pull) -> Wire:
        """How a Pull will be served; looked into once for each consumer. Raises Refused."""
        first = offer.pulls.get(pull.consumer)
        if first is not None:
            check_same(first.pull, pull)
            return first.wire
        if offer.refuses(pull):
            return Wire.DIRECT
        return read_pull(pull, self._resolver, self._transports, offer.num_tokens)

    def _on_release(self, identity: bytes, release: Release) -> None:
        offer = self._find(release.offer)
        if isinstance(offer, Reason):
            self._ledger.count(f"verdict.{offer.value}")
            self._reply(identity, Verdict(release.offer, release.consumer, False, offer))
            return
        offer.identities[release.consumer] = identity
        self._step(offer, ReleaseArrived(release.consumer))
        if offer.session.serves(release.consumer):
            self._leases.heard(offer, release.consumer.incarnation)
            offer.speakers[release.consumer.incarnation] = identity
        else:  # whoever knows the nonce can invent consumers: nothing is kept of them
            del offer.identities[release.consumer]

    def _on_cancel(self, cancel: Cancel) -> None:
        offer = self._find(cancel.offer)
        if isinstance(offer, Reason):
            self._ledger.count(f"cancel.{offer.value}")
            return
        if not knows_tokens(offer.session.snapshot, cancel.incarnation, cancel.digest):
            self._ledger.count("cancel.not_granted")
            return
        self._step(offer, CancelArrived(cancel.incarnation, cancel.reason, cancel.digest))

    def _on_keep(self, identity: bytes, ref: OfferRef, keep: Keep) -> None:
        offer = self._find(ref)
        if isinstance(offer, Reason):
            self._ledger.count(f"keep.{offer.value}")
        elif offer.nonce not in self._live:
            self._ledger.count("keep.ended")
        elif knows_tokens(
            offer.session.snapshot, keep.incarnation, keep.digests.get(ref.nonce, b"")
        ):
            self._leases.heard(offer, keep.incarnation)
            self._leases.extend(offer, keep.lease_s)
            if len(offer.speakers) < MAX_LIVES:
                offer.speakers[keep.incarnation] = identity
        else:
            self._ledger.count("keep.not_granted")

    def _refuse(self, identity: bytes, pull: Pull, reason: Reason, detail: str) -> None:
        self._ledger.count(f"refused.{reason.value}")
        self._reply(identity, Refuse(pull.offer, pull.consumer, reason, detail))

    # -------------------------------------------------- sessions

    def _step(self, offer: GivenOffer, event: SourceEvent, posted: Posted | None = None) -> None:
        """``posted``: what to show of an offer that opens. Raises ProtocolError for an event that
        the offer's state does not allow. An action that fails breaks the offer; the others are
        performed all the same.
        """
        ended = self._ends.reason(offer.nonce)
        for due in events_due(offer.session.snapshot, event, ended):
            has_failed = False
            actions = offer.session.step(due)
            self._show(offer, posted)
            for action in actions:
                try:
                    self._actions.perform(offer, action)
                except Exception:  # noqa: BLE001  # the last action gives the blocks back
                    _log.exception("request %s: %s failed", offer.request_id, action)
                    self._ledger.count("offers.unforeseen")
                    has_failed = True
            if has_failed:
                self._break(offer, Reason.PLAN)

    def _show(self, offer: GivenOffer, posted: Posted | None) -> None:
        """On the board, before anybody is told of its opening, and anything freed at its end."""
        if offer.state is not OfferState.OPEN:
            self._ends.hide(offer.nonce)
        elif posted is not None:
            is_shown = self._ends.show(offer.nonce, posted)
            if is_shown is not None:
                self._ledger.count("board.posted" if is_shown else "board.full")

    def _break(self, offer: GivenOffer, reason: Reason) -> None:
        """Whatever state it is in, it is not valid after this."""
        try:
            self._step(offer, Break(reason))
        except Exception:  # noqa: BLE001  # the others go on
            _log.exception("request %s: its offer cannot be broken", offer.request_id)
            self._ledger.count("offers.unforeseen")
            self._ends.hide(offer.nonce)
            if offer.state in (OfferState.PENDING, OfferState.OPEN):
                self._live.pop(offer.nonce, None)  # unknown from now on: no verdict is valid

    def _open(self, offer: GivenOffer) -> None:
        """Raises ValueError where blocks are missing."""
        if offer.state is not OfferState.PENDING:
            return
        block_ids = clip_ids(offer.block_ids, self._keepings, offer.num_tokens)
        self._ledger.count("offers.opened")
        self._leases.begin(offer)
        posted = Posted(offer.session.snapshot.digest, offer.num_tokens, block_ids)
        self._step(offer, ReadyCompleted(), posted)
        self._leases.watch(offer)

    def _finish(self, offer: GivenOffer, reason: Reason | None) -> None:
        """Over and drained: report it if its blocks are kept for it, remember how it answers."""
        if offer.timer is not None:
            offer.timer.cancel()
        self._live.pop(offer.nonce, None)
        offer.block_ids = ()
        offer.pulls.clear()  # the session alone answers from now on
        offer.speakers.clear()
        self._over[offer.nonce] = offer
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._ledger.count("offers.done" if reason is None else "offers.broken")
        if reason is not None:
            self._ledger.reason(reason)
        if self._by_request.get(offer.request_id) is offer:
            del self._by_request[offer.request_id]
        try:
            if offer.is_delayed:
                self._ledger.sent(offer.request_id)
        finally:
            self._draining.drained(offer.nonce)
