"""The taking side of one rank: its loads, from the order to the one report. Runs on the IO thread.

Decisions are the session's (:mod:`kvxfer.transfer.sink_session`), performed by
:mod:`kvxfer.connector.load_actions`. A load waits for its peer, then asks every source rank of its
routes, reads, and is reported once: with its verdict, and never before everything that could write
its blocks has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

import torch

from kvxfer.config import Config
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.keeper import Keeper
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.load_actions import LoadActions
from kvxfer.connector.load_routes import (
    Addressing,
    Way,
    check_granted,
    make_routes,
    ways_of,
    with_granted_ids,
)
from kvxfer.connector.loads import AskedOffers
from kvxfer.connector.peer import Peer
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.peers import Peers
from kvxfer.connector.records import AbortLoad, NewLoad
from kvxfer.connector.sink_load import Loads, SinkLoad, span_failure
from kvxfer.errors import KvxferError, ProtocolError
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.session import (
    Abort,
    BrokenArrived,
    GrantArrived,
    ReadCompleted,
    ReadDrained,
    ReadFailed,
    RefuseArrived,
    RouteState,
    SinkEvent,
    SourceLost,
    Start,
    VerdictArrived,
)
from kvxfer.transfer.wire import (
    Broken,
    Grant,
    OfferRef,
    Reason,
    Refuse,
    ToSink,
    Verdict,
    is_addressed_to,
)
from kvxfer.transports.base import (
    PeerGone,
    Progress,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SinkCompletion,
)

_UNATTACHED = (Reason.PEER_LOST, Reason.INCARNATION)
"""A wire that breaks a read for these does not know the source rank, or knows another there."""

QUICK_LOADS, QUICK_IDS = 4, 4096
"""Of a step whose loads the engine's thread begins itself: 0.25 ms each, and 0.2 us an id, 65,000
tokens in blocks of 16. 32,768 tokens that were handed over took 0.15 to 0.5 ms more, of 12.5.
"""

_log = logging.getLogger("kvxfer.connector")


class Sink:
    """All loads of this rank."""

    def __init__(
        self, io: IoThread, config: Config, ledger: Ledger, addressing: Addressing
    ) -> None:
        self._io = io
        self._ledger = ledger
        self._addressing = addressing
        self._actions = LoadActions(
            io,
            config,
            ledger,
            addressing=addressing,
            step=self._step,
            granted=self._on_grant,
            report=self._report,
        )
        self._loads = Loads()
        self._asked = AskedOffers()
        self._ways: dict[Peer, tuple[Way, ...]] = {}
        self._on_idle: Callable[[], object] | None = None

    def bind(self, peers: Peers, keeper: Keeper) -> None:
        """The source engines, which tell this sink of their messages and their ends."""
        self._peers = peers
        self._keeper = keeper

    # -------------------------------------------------- orders of the engine

    def begins_quickly(self, orders: Sequence[NewLoad]) -> bool:
        """Whether to begin these loads is to launch some copies, a matter of microseconds."""
        return (
            len(orders) <= QUICK_LOADS
            and sum(len(ids) for order in orders for ids in order.block_ids) <= QUICK_IDS
            and all(self._is_quick(order) for order in orders)
        )

    def _is_quick(self, order: NewLoad) -> bool:
        peer = self._peers.ready(order.source)
        ways = self._ways.get(peer) if peer is not None else None
        return ways is not None and all(way.is_quick for way in ways)

    def load(self, order: NewLoad, handed_s: float, after: torch.cuda.Event | None = None) -> None:
        """Begin a load that the engine ordered at ``handed_s``; it will be reported once, whatever
        happens. ``after``: as :class:`~kvxfer.transports.base.ReadRequest` has it.
        """
        if order.request_id in self._loads.by_request:
            raise ValueError(f"request {order.request_id}: expected one load, got another")
        load = self._loads.by_request[order.request_id] = SinkLoad(
            order, handed_s=handed_s, after=after
        )
        wrong = span_failure(order) or self._offer_failure(order.source.offer)
        if wrong is not None:
            self._fail(load, wrong, cancel=wrong.reason is Reason.PLAN)
            return
        self._loads.by_offer[order.source.offer] = load
        self._try(load, partial(self._want, load))

    def _want(self, load: SinkLoad) -> None:
        peer = self._peers.ready(load.order.source)
        if peer is not None:
            self._begin(load, peer)
            return
        # ``want`` may call back before it returns; then there is nothing left to wait for.
        waiter = self._peers.want(
            load.order.source,
            needs_wire=True,
            ready=lambda peer: self._try(load, lambda: self._begin(load, peer)),
            failed=lambda failure: self._fail(load, failure, cancel=False),
        )
        if load.session is None:
            load.waiter = waiter

    def abort(self, order: AbortLoad) -> None:
        """The engine does not want a load any more; the source hears of it at once."""
        load = self._loads.by_request.get(order.request_id)
        if load is None:
            self._ledger.count("aborts.late")
        elif load.session is None:
            self._fail(load, Failure(order.reason, "aborted before it was asked for"), cancel=True)
        else:
            self._step(load, Abort(order.reason))

    def shutdown(self, reason: Reason, done: Callable[[], object]) -> None:
        """Abort every load; ``done`` is called when all were reported."""
        for request_id in list(self._loads.by_request):
            self._io.guard(partial(self.abort, AbortLoad(request_id, reason)))
        self._on_idle = done
        self._tell_idle()

    # -------------------------------------------------- from order to session

    def _try(self, load: SinkLoad, call: Callable[[], object]) -> None:
        """A load is reported whatever goes wrong while it begins."""
        try:
            call()
        except Exception as e:  # noqa: BLE001  # the engine waits for the report
            _log.exception("request %s: its load cannot begin", load.order.request_id)
            self._ledger.count("loads.unforeseen")
            load.note(f"{type(e).__name__}: {e}")
            if load.session is None:
                self._fail(load, Failure(Reason.READ_FAILED, str(e)), cancel=True)
                return
            self._step(load, Abort(Reason.READ_FAILED))
            if not any(run.asked_s for run in load.routes.values()):  # else it has sent Cancels
                self._keeper.cancel(load.order.source, Reason.READ_FAILED)

    def _begin(self, load: SinkLoad, peer: Peer) -> None:
        load.waiter = None
        try:
            ways = self._ways.get(peer)
            if ways is None:
                ways = self._ways[peer] = ways_of(peer, self._addressing)
            routes = make_routes(load.order, ways, self._addressing, after=load.after)
        except (KvxferError, ValueError) as e:
            self._fail(load, Failure(Reason.PLAN, str(e)), cancel=True)
            return
        if not routes:
            self._report(load, None)
            return
        load.started_s = self._io.now()
        self._loads.begin(load, peer, routes)
        self._asked.add(load.order.source.offer)
        self._actions.watch(load)  # first: from here on it ends, whatever fails
        self._keeper.hold_at(load.order.request_id, load.order.source, frozenset(routes))
        peer.begin_load()
        load.is_begun = True
        if self._loads.by_request.get(load.order.request_id) is not load:
            return  # the peer has just been found silent
        self._step(load, Start())

    def _fail(self, load: SinkLoad, failure: Failure, *, cancel: bool) -> None:
        """A load that never got a session. ``cancel``: its source has to hear that it will not be
        read.
        """
        if load.waiter is not None:
            self._peers.forget(load.waiter)
            load.waiter = None
        load.note(failure.detail)
        self._report(load, failure.reason)
        if cancel:
            self._keeper.cancel(load.order.source, failure.reason)

    def _offer_failure(self, offer: OfferRef) -> Failure | None:
        if offer in self._loads.by_offer:
            detail = "expected an offer that is not being loaded, got one that is"
            return Failure(Reason.BAD_PARAMS, detail)
        if offer in self._asked:
            # One read per rank: to the source a second load would be the first one's Pull again.
            detail = "expected an offer that was not asked for before, got one that was"
            return Failure(Reason.ENDED, detail)
        return None

    # -------------------------------------------------- what happens

    def on_message(self, peer: Peer, source: RankId, message: ToSink) -> None:
        """An answer of a source rank, about one of our loads or a mistake."""
        if not isinstance(message, Grant | Refuse | Verdict | Broken):
            self._ledger.count("control.unexpected")
            return
        if not is_addressed_to(message, self._addressing.consumer):
            self._ledger.count("control.misaddressed")
            return
        load = self._loads.by_offer.get(message.offer)
        if load is None or load.peer is not peer or source not in load.routes:
            self._ledger.count("control.late")
            return
        match message:
            case Grant():
                self._on_grant(load, source, message)
            case Refuse():
                load.note(message.detail)
                self._step(load, RefuseArrived(source, message.reason))
            case Verdict():
                self._step(load, VerdictArrived(source, message.valid, message.reason))
            case Broken():
                self._step(load, BrokenArrived(source, message.reason))
            case _:
                assert_never(message)

    def _on_grant(self, load: SinkLoad, source: RankId, grant: Grant) -> None:
        run = load.routes[source]
        if load.session is not None and load.session.state_of(source) is RouteState.ASKED:
            try:
                check_granted(load.order, grant)
                run.request = with_granted_ids(run, grant.block_ids)
            except (KvxferError, ValueError) as e:
                load.note(str(e))
                self._step(load, Abort(Reason.PLAN))
                return
        self._step(load, GrantArrived(source))

    def on_completion(self, completion: SinkCompletion) -> None:
        """Something happened on a wire."""
        if isinstance(completion, PeerGone):
            self._peers.lost(completion.control_endpoint, "the data connection ended")
            return
        found = self._loads.by_key.get(completion.key)
        if found is None:
            return  # stopped after its load had ended
        load, source = found
        run = load.routes[source]
        match completion:
            case Progress(_, nbytes):
                if nbytes > run.nbytes:
                    run.progressed_s = self._io.now()
                run.nbytes = nbytes
            case ReadDone(_, nbytes, certified):
                run.nbytes = nbytes
                load.placed_s = self._io.now()
                self._step(load, ReadCompleted(source, certified))
            case ReadBroke(_, reason, detail):
                load.note(detail)
                self._step(load, ReadFailed(source, reason))
                if reason in _UNATTACHED and load.peer is not None:  # met anew, it will be right
                    self._io.defer(partial(load.peer.end, Failure(Reason.PEER_LOST, detail)))
            case ReadStopped():
                self._step(load, ReadDrained(source))
            case _:
                assert_never(completion)

    def on_over(self, peer: Peer, failure: Failure) -> None:
        """A source engine cannot be used any more: its loads fail, and are reported when they have
        drained.
        """
        self._ways.pop(peer, None)
        for load in [load for load in self._loads.by_request.values() if load.peer is peer]:
            load.note(failure.detail)
            for source in load.routes:
                self._step(load, SourceLost(source))

    # -------------------------------------------------- sessions

    def _step(self, load: SinkLoad, event: SinkEvent) -> None:
        if load.session is None or load.peer is None:
            return
        before = load.session.snapshot.routes
        try:
            actions = load.session.step(event)
        except ProtocolError:
            self._ledger.count("control.out_of_state")
            _log.debug("request %s: %s", load.order.request_id, event, exc_info=True)
            return
        now_s = self._io.now()
        for old, new in zip(before, load.session.snapshot.routes, strict=True):
            if new.state is not old.state:  # a repeated answer is no progress
                load.routes[new.source].progressed_s = now_s
        for action in actions:
            self._actions.perform(load, load.peer, action)

    def _report(self, load: SinkLoad, reason: Reason | None) -> None:
        """The one report of a load."""
        order = load.order
        if not self._loads.remove(load):
            return
        if reason is Reason.TOKENS:
            # The offer belongs to another request, which may still come.
            self._asked.forget(order.source.offer)
        if load.timer is not None:
            load.timer.cancel()
        if load.peer is not None and load.is_begun:
            load.peer.end_load()
        self._keeper.release(order.request_id)
        self._ledger.loaded(load.report(reason, self._io.now()))
        if reason is not None:
            _log.debug("request %s: KV not used: %s: %s", order.request_id, reason, load.detail)
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self._on_idle is not None and not self._loads.by_request:
            done, self._on_idle = self._on_idle, None
            done()
