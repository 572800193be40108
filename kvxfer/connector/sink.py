"""The taking side of one rank: its loads, from the order to the one report. Runs on the IO thread.

Decisions are the session's (:mod:`kvxfer.transfer.sink_session`), performed by
:mod:`kvxfer.connector.load_actions`. A load waits for its peer, then asks every source rank of its
routes, reads, and is reported once: with its verdict, and never before everything that could write
its blocks has ended.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import assert_never

from kvxfer.config import Config
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.keeper import Keeper
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.load_actions import LoadActions
from kvxfer.connector.load_routes import Addressing, make_routes, with_granted_ids
from kvxfer.connector.peer import Peer
from kvxfer.connector.peer_records import Failure
from kvxfer.connector.peers import Peers
from kvxfer.connector.records import AbortLoad, NewLoad
from kvxfer.connector.sink_load import SinkLoad
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
from kvxfer.transfer.sink_session import LoadSession
from kvxfer.transfer.wire import Broken, Grant, OfferRef, Reason, Refuse, ToSink, Verdict
from kvxfer.transports.base import (
    PeerGone,
    Progress,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SinkCompletion,
    TransferKey,
)

REMEMBERED = 1 << 16
"""Offers that were asked for and are not asked for again; about 200 bytes each."""

_log = logging.getLogger("kvxfer.connector")


class Sink:
    """All loads of this rank."""

    def __init__(
        self, io: IoThread, config: Config, ledger: Ledger, addressing: Addressing
    ) -> None:
        self._io = io
        self._config = config
        self._ledger = ledger
        self._addressing = addressing
        self._actions = LoadActions(
            io,
            config,
            ledger,
            addressing=addressing,
            step=self._step,
            report=self._report,
        )
        self._loads: dict[str, SinkLoad] = {}
        self._by_offer: dict[OfferRef, SinkLoad] = {}
        self._by_key: dict[TransferKey, tuple[SinkLoad, RankId]] = {}
        self._asked: OrderedDict[OfferRef, None] = OrderedDict()
        self._on_idle: Callable[[], object] | None = None

    def bind(self, peers: Peers, keeper: Keeper) -> None:
        """The source engines, which tell this sink of their messages and their ends."""
        self._peers = peers
        self._keeper = keeper

    # -------------------------------------------------- orders of the engine

    def load(self, order: NewLoad) -> None:
        """Begin a load; it will be reported once, whatever happens."""
        if order.request_id in self._loads:
            raise ValueError(f"request {order.request_id}: expected one load, got another")
        load = self._loads[order.request_id] = SinkLoad(order, started_s=self._io.now())
        if not 0 <= order.token_lo < order.token_hi <= order.source.num_tokens:
            detail = (
                f"tokens: expected a span within the offered {order.source.num_tokens}, "
                f"got [{order.token_lo}, {order.token_hi})"
            )
            self._fail(load, Failure(Reason.PLAN, detail), cancel=True)
            return
        if order.source.offer in self._by_offer:
            detail = "expected an offer that is not being loaded, got one that is"
            self._fail(load, Failure(Reason.BAD_PARAMS, detail), cancel=False)
            return
        if order.source.offer in self._asked:
            # One read per rank: to the source a second load would be the first one's Pull again.
            detail = "expected an offer that was not asked for before, got one that was"
            self._fail(load, Failure(Reason.ENDED, detail), cancel=False)
            return
        self._by_offer[order.source.offer] = load
        # ``want`` may call back before it returns; then there is nothing left to wait for.
        waiter = self._peers.want(
            order.source,
            needs_wire=True,
            ready=lambda peer: self._begin(load, peer),
            failed=lambda failure: self._fail(load, failure, cancel=False),
        )
        if load.session is None:
            load.waiter = waiter

    def abort(self, order: AbortLoad) -> None:
        """The engine does not want a load any more; the source hears of it at once."""
        load = self._loads.get(order.request_id)
        if load is None:
            self._ledger.count("aborts.late")
        elif load.session is None:
            self._fail(load, Failure(order.reason, "aborted before it was asked for"), cancel=True)
        else:
            self._step(load, Abort(order.reason))

    def shutdown(self, reason: Reason, done: Callable[[], object]) -> None:
        """Abort every load; ``done`` is called when all were reported."""
        for request_id in list(self._loads):
            self.abort(AbortLoad(request_id, reason))
        self._on_idle = done
        self._tell_idle()

    # -------------------------------------------------- from order to session

    def _begin(self, load: SinkLoad, peer: Peer) -> None:
        load.waiter = None
        try:
            routes = make_routes(load.order, peer, self._addressing, self._config.chunk_nbytes)
        except (KvxferError, ValueError) as e:
            self._fail(load, Failure(Reason.PLAN, str(e)), cancel=True)
            return
        if not routes:
            self._report(load, None)
            return
        load.peer, load.routes = peer, routes
        load.session = LoadSession(
            list(routes), frozenset(rank for rank, run in routes.items() if run.pull.is_null)
        )
        self._remember(load.order.source.offer)
        load.started_s = self._io.now()
        for rank, run in routes.items():
            self._by_key[run.key] = (load, rank)
        peer.begin_load()
        self._keeper.hold_at(load.order.request_id, load.order.source, frozenset(routes))
        self._step(load, Start())
        self._actions.watch(load)

    def _fail(self, load: SinkLoad, failure: Failure, *, cancel: bool) -> None:
        """A load that never got a session. ``cancel``: its source has to hear that it will not be
        read.
        """
        if load.waiter is not None:
            self._peers.forget(load.waiter)
            load.waiter = None
        if cancel:
            self._keeper.cancel(load.order.source, failure.reason)
        load.note(failure.detail)
        self._report(load, failure.reason)

    def _remember(self, offer: OfferRef) -> None:
        self._asked[offer] = None
        while len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)

    # -------------------------------------------------- what happens

    def on_message(self, peer: Peer, source: RankId, message: ToSink) -> None:
        """An answer of a source rank, about one of our loads or a mistake."""
        if not isinstance(message, Grant | Refuse | Verdict | Broken):
            self._ledger.count("control.unexpected")
            return
        if message.consumer not in (None, self._addressing.consumer):
            self._ledger.count("control.misaddressed")
            return
        load = self._by_offer.get(message.offer)
        if load is None or load.peer is not peer or source not in load.routes:
            self._ledger.count("control.late")
            return
        load.routes[source].progressed_s = self._io.now()
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
        found = self._by_key.get(completion.key)
        if found is None:
            return  # stopped after its load had ended
        load, source = found
        run = load.routes[source]
        run.progressed_s = self._io.now()
        match completion:
            case Progress(_, nbytes):
                run.nbytes = nbytes
            case ReadDone(_, nbytes, certified):
                run.nbytes = nbytes
                self._step(load, ReadCompleted(source, certified))
            case ReadBroke(_, reason, detail):
                load.note(detail)
                self._step(load, ReadFailed(source, reason))
            case ReadStopped():
                self._step(load, ReadDrained(source))
            case _:
                assert_never(completion)

    def on_over(self, peer: Peer, failure: Failure) -> None:
        """A source engine cannot be used any more: its loads fail, and are reported when they have
        drained.
        """
        for load in [load for load in self._loads.values() if load.peer is peer]:
            load.note(failure.detail)
            for source in load.routes:
                self._step(load, SourceLost(source))

    # -------------------------------------------------- sessions

    def _step(self, load: SinkLoad, event: SinkEvent) -> None:
        if load.session is None or load.peer is None:
            return
        try:
            actions = load.session.step(event)
        except ProtocolError:
            self._ledger.count("control.out_of_state")
            _log.debug("request %s: %s", load.order.request_id, event, exc_info=True)
            return
        for action in actions:
            self._actions.perform(load, load.peer, action)

    def _report(self, load: SinkLoad, reason: Reason | None) -> None:
        """The one report of a load."""
        order = load.order
        if self._loads.get(order.request_id) is not load:
            return
        del self._loads[order.request_id]
        if self._by_offer.get(order.source.offer) is load:
            del self._by_offer[order.source.offer]
        for run in load.routes.values():
            self._by_key.pop(run.key, None)
        if reason is Reason.TOKENS:
            # The offer belongs to another request, which may still come.
            self._asked.pop(order.source.offer, None)
        if load.timer is not None:
            load.timer.cancel()
        if load.peer is not None:
            load.peer.end_load()
        self._keeper.release(order.request_id)
        self._ledger.loaded(load.report(reason, self._io.now()))
        if reason is not None:
            _log.debug("request %s: KV not used: %s: %s", order.request_id, reason, load.detail)
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self._on_idle is not None and not self._loads:
            done, self._on_idle = self._on_idle, None
            done()
