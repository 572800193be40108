"""The taking side of one rank: its loads, from the order to the one report. Runs on the IO thread.

A load waits for its peer, then asks every source rank of its routes, reads, and is reported once:
with its verdict, and never before everything that could write its blocks has ended.

After a load's start every change is an event: of the engine, a message, a wire, or a clock.
:meth:`Sink._step` gives it to the table of the load's session (:mod:`kvxfer.transfer.sink_session`)
and performs the actions that come back; the outcome of an action is the next event.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from msgspec import UNSET, UnsetType

from kvxfer.connector.board import BoardView
from kvxfer.connector.io_thread import Timer
from kvxfer.connector.keeper import BEYOND_S, Keeper
from kvxfer.connector.load_routes import (
    Addressing,
    Digesting,
    RouteRun,
    Way,
    check_granted,
    make_routes,
    next_read,
    open_tokens_of,
    read_cells,
    take_granted_ids,
    ways_of,
)
from kvxfer.connector.loads import asked_offers
from kvxfer.connector.peer import Peer, Surroundings, Waiter
from kvxfer.connector.peer_session import Failure, PeerState
from kvxfer.connector.peers import Peers
from kvxfer.connector.records import AbortLoad, LoadReport, NewLoad
from kvxfer.connector.verifier import Digests, Verifier, where_they_differ
from kvxfer.errors import KvxferError, ProtocolError
from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.tensors.kv_digest import seed_of
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import ALL
from kvxfer.transfer.session import (
    Abort,
    BrokenArrived,
    DeadlinePassed,
    FinishedRecving,
    GrantArrived,
    ReadCompleted,
    ReadDrained,
    ReadFailed,
    RefuseArrived,
    RetryDue,
    RouteState,
    SendCancel,
    SendPull,
    SendRelease,
    SinkAction,
    SinkEvent,
    SourceLost,
    Start,
    StartRead,
    StopRead,
    VerdictArrived,
)
from kvxfer.transfer.sink_session import LoadSession
from kvxfer.transfer.wire import (
    Broken,
    Cancel,
    Grant,
    OfferRef,
    Reason,
    Refuse,
    Release,
    ToSink,
    Verdict,
    is_addressed_to,
)
from kvxfer.transports.base import (
    DirectSink,
    PeerGone,
    Progress,
    ReadBroke,
    ReadDone,
    ReadStopped,
    ReceivingSink,
    SinkCompletion,
    TransferKey,
)

RETRY_S = 1.0
"""An answer that is this late is asked for again: the connection may have been replaced."""
LEAST_S = 0.001
"""The shortest time to the next look at a load's clocks."""

QUICK_LOADS, QUICK_IDS = 4, 4096
"""Of a step whose loads the engine's thread begins itself: 0.25 ms each, and 0.2 us an id, 65,000
tokens in blocks of 16. 32,768 tokens that were handed over took 0.15 to 0.5 ms more, of 12.5.
"""

_UNATTACHED = (Reason.PEER_LOST, Reason.INCARNATION)
"""A wire that breaks a read for these does not know the source rank, or knows another there."""
_ASKING = (RouteState.ASKED, RouteState.RELEASING)
_WAITING = (RouteState.IDLE, *_ASKING, RouteState.READING)

_CANNOT_VERIFY = (
    "verify: engine %s at %s makes no digests, its version is older; its KV is used unverified; "
    "install this version there"
)
_log = logging.getLogger("kvxfer.connector")


@dataclass(slots=True, eq=False)
class SinkLoad:
    """One load. ``waiter`` is set until its peer is ready; peer, session and routes are set from
    then on. ``detail``: the first thing that a person should read when the load fails.
    ``is_begun``: the peer counts this load among those that wait for answers. ``after``: on a GPU,
    the event that must be over before the blocks are written. Times and spans are those of the
    report.
    """

    order: NewLoad
    after: StreamEvent | None = None
    waiter: Waiter | None = None
    peer: Peer | None = None
    session: LoadSession | None = None
    routes: Mapping[RankId, RouteRun] = field(default_factory=dict)
    detail: str = ""
    handed_s: float = 0.0
    started_s: float = 0.0
    granted_s: float = 0.0
    placed_s: float = 0.0
    spans: list[tuple[float, int]] = field(default_factory=list)
    timer: Timer | None = None
    is_begun: bool = False
    is_undrained: bool = False

    def note(self, detail: str) -> None:
        """Keep ``detail`` unless the load has one: a failure's first detail is reported."""
        self.detail = self.detail or detail

    def is_in(self, source: RankId, *states: RouteState) -> bool:
        """Whether the route from this source rank is in one of these states now."""
        for route in self.session.snapshot.routes if self.session is not None else ():
            if route.source == source:
                return route.state in states
        return False

    def report(self, reason: Reason | None, finished_s: float) -> LoadReport:
        """The load's one report; ``reason`` None: every route was valid."""
        runs = self.routes.values()
        places = {place for run in runs for place in run.incomplete} if reason is None else ()
        return LoadReport(
            request_id=self.order.request_id,
            reason=reason,
            detail="" if reason is None else self.detail,
            nbytes=sum(run.nbytes for run in runs),
            handed_s=self.handed_s,
            started_s=self.started_s,
            granted_s=self.granted_s,
            placed_s=self.placed_s,
            finished_s=finished_s,
            peer=self.order.source.endpoint,
            transports=tuple(sorted({r.pull.transport for r in runs if not r.pull.is_null})),
            incomplete_blocks=tuple(sorted(places)),
            has_empty_draft=self.peer is not None and bool(self.peer.plan.empty_layers),
            trace=self.order.trace,
            spans=tuple(self.spans),
        )


class Sink:
    """All loads of this rank, by what the engine, messages and wires call them."""

    def __init__(
        self,
        around: Surroundings,
        addressing: Addressing,
        peers: Peers,
        keeper: Keeper,
        verifier: Verifier,
    ) -> None:
        self._io, self._ledger = around.io, around.ledger
        self._timeout_s = around.config.pull_timeout_s
        self._early_wait_s = around.config.early_wait_s
        self._addressing, self._peers = addressing, peers
        self._keeper, self._verifier = keeper, verifier
        self._by_request: dict[str, SinkLoad] = {}
        self._by_offer: dict[OfferRef, SinkLoad] = {}
        self._by_key: dict[TransferKey, tuple[SinkLoad, RankId]] = {}
        self._asked = asked_offers()
        self._shown = asked_offers()
        """Those whose board has answered before their source does."""
        self._ways: dict[Peer, tuple[Way, ...]] = {}
        self._on_idle: Callable[[], object] | None = None

    @property
    def num_loads(self) -> int:
        return len(self._by_request)

    # -------------------------------------------------- orders of the engine

    def begins_quickly(self, orders: Sequence[NewLoad]) -> bool:
        """Whether these loads begin with a few launches of copies, within microseconds."""
        return (
            len(orders) <= QUICK_LOADS
            and sum(len(ids) for order in orders for ids in order.block_ids) <= QUICK_IDS
            and all(self._is_quick(order) for order in orders)
        )

    def _is_quick(self, order: NewLoad) -> bool:
        peer = self._peers.ready(order.source)
        ways = self._ways.get(peer) if peer is not None else None
        return ways is not None and all(way.is_quick for way in ways)

    def load(self, order: NewLoad, handed_s: float, after: StreamEvent | None = None) -> None:
        """Begin a load that the engine ordered at ``handed_s``; it will be reported once, whatever
        happens. ``after``: as :class:`~kvxfer.transports.base.ReadRequest` has it.
        """
        if order.request_id in self._by_request:
            raise ValueError(f"request {order.request_id}: expected one load, got another")
        load = SinkLoad(order, handed_s=handed_s, after=after)
        self._by_request[order.request_id] = load
        wrong = self._order_failure(order)
        if wrong is not None:
            self._fail(load, wrong, cancel=wrong.reason is Reason.PLAN)
            return
        self._by_offer[order.source.offer] = load
        self._start(load)

    def _order_failure(self, order: NewLoad) -> Failure | None:
        offer, num_tokens = order.source.offer, order.source.num_tokens
        if not 0 <= order.token_lo < order.token_hi <= num_tokens:
            return Failure(
                Reason.PLAN,
                f"tokens: expected a span within the offered {num_tokens}, "
                f"got [{order.token_lo}, {order.token_hi})",
            )
        if offer in self._by_offer:
            detail = "expected an offer that is not being loaded, got one that is"
            return Failure(Reason.BAD_PARAMS, detail)
        if offer in self._asked:
            # One read per rank: to the source the Pull of a second load would be a repeated Pull of
            # the first.
            detail = "expected an offer that was not asked for before, got one that was"
            return Failure(Reason.ENDED, detail)
        return None

    def copied(self, request_ids: Iterable[str]) -> list[StreamEvent] | None:
        """Events behind all copies of these loads; None where they are not all on a GPU's stream
        yet, so that the host has to wait for their reports.
        """
        keys: dict[DirectSink, list[TransferKey]] = {}
        for request_id in request_ids:
            load = self._by_request.get(request_id)
            if load is None:
                return None
            for source, run in load.routes.items():
                if run.pull.is_null:
                    continue
                if run.direct is None or not load.is_in(source, RouteState.READING):
                    return None
                keys.setdefault(run.direct, []).append(run.key)
        events = [wire.copied(own) for wire, own in keys.items()]
        found = [event for event in events if event is not None]
        return found if found and len(found) == len(events) else None

    def abort(self, order: AbortLoad) -> None:
        """The engine does not want a load any more; the source hears of it at once."""
        load = self._by_request.get(order.request_id)
        if load is None:
            self._ledger.count("aborts.late")
        elif load.session is None:
            self._fail(load, Failure(order.reason, "aborted before it was asked for"), cancel=True)
        else:
            self._step(load, Abort(order.reason))

    def shutdown(self, reason: Reason, done: Callable[[], object]) -> None:
        """Abort every load; ``done`` is called when all were reported."""
        for request_id in list(self._by_request):
            self._io.guard(self.abort, AbortLoad(request_id, reason))
        self._on_idle = done
        self._tell_idle()

    # -------------------------------------------------- from order to session

    def _start(self, load: SinkLoad, peer: Peer | None = None) -> None:
        """Begin with the peer that has become ready, or is; else wait for it. The load is reported
        whatever goes wrong.
        """
        try:
            if peer is None:
                peer = self._peers.ready(load.order.source)
            if peer is not None:
                self._begin(load, peer)
                return
            # ``want`` may call back before it returns; then there is nothing left to wait for.
            waiter = self._peers.want(load.order.source, self._on_peer, load, needs_wire=True)
            if load.session is None:
                load.waiter = waiter
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

    def _on_peer(self, load: SinkLoad, found: Peer | Failure) -> None:
        if isinstance(found, Failure):
            self._fail(load, found, cancel=False)
        else:
            self._start(load, found)

    def _begin(self, load: SinkLoad, peer: Peer) -> None:
        order, load.waiter = load.order, None
        try:
            ways = self._ways.get(peer)
            if ways is None:
                ways = self._ways[peer] = ways_of(peer, self._addressing)
                if self._addressing.verify_every and not peer.can_verify:
                    _log.warning(_CANNOT_VERIFY, peer.engine_id, peer.endpoint)
            routes = make_routes(order, ways, self._addressing, after=load.after)
        except (KvxferError, ValueError) as e:
            self._fail(load, Failure(Reason.PLAN, str(e)), cancel=True)
            return
        if not routes:
            self._report(load, None)
            return
        load.started_s = self._io.now()
        load.session = LoadSession(
            list(routes), frozenset(rank for rank, run in routes.items() if run.pull.is_null)
        )
        load.peer, load.routes = peer, routes
        for rank, run in routes.items():
            run.progressed_s = load.started_s
            self._by_key[run.key] = (load, rank)
        self._asked[order.source.offer] = None
        # First: from here on the load ends, whatever fails
        self._look_in(load, min(RETRY_S, self._timeout_s))
        self._keeper.hold_at(order.request_id, order.source, frozenset(routes))
        if self._addressing.verify_every and not peer.can_verify:
            self._ledger.count("verify.not_possible")
        peer.begin_load()
        load.is_begun = True
        if self._by_request.get(order.request_id) is load:  # else the peer was just found silent
            self._step(load, Start())

    def _fail(self, load: SinkLoad, failure: Failure, *, cancel: bool) -> None:
        """End a load that never got a session. ``cancel``: tell its source."""
        if load.waiter is not None:
            self._peers.forget(load.waiter)
            load.waiter = None
        load.note(failure.detail)
        self._report(load, failure.reason)
        if cancel:
            self._keeper.cancel(load.order.source, failure.reason)

    # -------------------------------------------------- what happens

    def on_message(self, peer: Peer, source: RankId, message: ToSink) -> None:
        """An answer of a source rank, about one of our loads or a mistake."""
        if not isinstance(message, Grant | Refuse | Verdict | Broken):
            self._ledger.count("control.unexpected")
            return
        if not is_addressed_to(message, self._addressing.consumer):
            self._ledger.count("control.misaddressed")
            return
        load = self._by_offer.get(message.offer)
        if load is None or load.peer is not peer or source not in load.routes:
            if message.offer not in self._shown:
                self._ledger.count("control.late")
            return
        match message:
            case Grant():
                self._step(load, self._granted(load, source, message))
            case Refuse():
                load.note(message.detail)
                self._step(load, RefuseArrived(source, message.reason))
            case Verdict():
                event = self._judged(load, source, message)
                if event is not None:
                    self._step(load, event)
            case Broken():
                self._step(load, BrokenArrived(source, message.reason))
            case _:
                assert_never(message)

    def _granted(self, load: SinkLoad, source: RankId, grant: Grant) -> SinkEvent:
        """What a Grant is to the load: it says what to read, if that can be; a later one counts
        where it opens more.
        """
        run = load.routes[source]
        is_complete = grant.open_tokens is UNSET
        open_tokens = ALL if is_complete else open_tokens_of(grant, run)
        opens_more = load.is_in(source, RouteState.ASKED) or (
            open_tokens > run.open_tokens and load.is_in(source, RouteState.READING)
        )
        if opens_more:
            try:
                check_granted(load.order, grant, run)
                take_granted_ids(run, grant.block_ids, open_tokens)
            except (KvxferError, ValueError) as e:
                load.note(str(e))
                return Abort(Reason.PLAN)
            run.open_tokens = open_tokens
        if run.is_growing if is_complete else opens_more:
            self._grow(load, run, grant)
        return GrantArrived(source, open_tokens)

    def _grow(self, load: SinkLoad, run: RouteRun, grant: Grant) -> None:
        """More of a growing offer is open. The digests that a Verdict brings are of the whole: who
        verifies waits for that, even if all that it wants is open.
        """
        now_s = run.progressed_s = self._io.now()
        waits_for_all = run.pull.verify is not UNSET and grant.open_tokens is not UNSET
        run.is_growing = run.open_tokens < ALL or waits_for_all
        told = grant.num_tokens if grant.open_tokens is UNSET else grant.open_tokens
        if not load.spans or told > load.spans[-1][1]:
            load.spans.append((now_s, told))

    def _judged(self, load: SinkLoad, source: RankId, verdict: Verdict) -> SinkEvent | None:
        """What a Verdict is to the load: a valid one is worth something where the digests agree.
        None while this rank still makes its own: the verdict waits for them.
        """
        run = load.routes[source]
        verify, event = run.pull.verify, VerdictArrived(source, verdict.valid, verdict.reason)
        is_due = verdict.valid and load.is_in(source, RouteState.RELEASING)
        if isinstance(verify, UnsetType) or not is_due:
            return event
        if run.digesting is Digesting.RUNS:
            run.verdict = verdict
            return None
        if isinstance(verdict.digests, UnsetType):
            load.note(f"rank {source}: expected digests of its KV, got none")
            return VerdictArrived(source, False, Reason.READ_FAILED)
        if run.digests is None:
            load.note("expected digests of what was read, got none; the log says why")
            return VerdictArrived(source, False, Reason.READ_FAILED)
        num, first = where_they_differ(verify.classes, verdict.digests, run.digests)
        self._ledger.count("verify.differing" if num else "verify.equal")
        if not num:
            return event
        what = (
            f"KV of {self._peer(load).endpoint} rank {source} over {run.pull.transport}: expected "
            f"equal digests at both sides, got {num} of {len(run.digests)} regions that differ; "
            f"the first: {first}"
        )
        _log.warning("request %s: %s; its blocks are not used", load.order.request_id, what)
        load.note(what)
        return VerdictArrived(source, False, Reason.CORRUPT)

    def _digest(self, load: SinkLoad, source: RankId, after: StreamEvent | None = None) -> None:
        """Make digests of what lies here now, or behind ``after``, where the read ends. Meanwhile
        the source is asked for its verdict.
        """
        run = load.routes[source]
        verify = run.pull.verify
        if isinstance(verify, UnsetType) or run.digesting is not Digesting.NOT_BEGUN:
            return
        run.progressed_s, run.digesting = self._io.now(), Digesting.RUNS
        try:
            cells = read_cells(run, verify)
        except ValueError as e:
            load.note(str(e))
            self._digested(load, source, None)
            return
        seed = seed_of(run.pull.offer.nonce)
        self._verifier.submit(run.key, cells, seed, self._digested, load, source, after=after)

    def _digested(self, load: SinkLoad, source: RankId, digests: Digests | None) -> None:
        run = load.routes[source]
        run.digests, run.digesting = digests, Digesting.OVER
        verdict, run.verdict = run.verdict, None
        if verdict is not None:
            event = self._judged(load, source, verdict)
            assert event is not None
            self._step(load, event)

    def on_completion(self, completion: SinkCompletion) -> None:
        if isinstance(completion, PeerGone):
            self._peers.lost(completion.control_endpoint, "the data connection ended")
            return
        found = self._by_key.get(completion.key)
        if found is None:
            return  # stopped after its load had ended
        load, source = found
        run = load.routes[source]
        match completion:
            case Progress(_, nbytes):
                nbytes += run.read_nbytes
                if nbytes > run.nbytes:
                    run.progressed_s = self._io.now()
                    self._peer(load).brought_s[source] = run.progressed_s
                run.nbytes = nbytes
            case ReadDone(_, nbytes, certified):
                run.nbytes = run.read_nbytes = run.read_nbytes + nbytes
                self._step(load, self._placed(load, source, certified=certified))
            case ReadBroke(_, reason, detail):
                load.note(detail)
                self._step(load, ReadFailed(source, reason))
                if reason in _UNATTACHED and load.peer is not None:  # met anew, it will be right
                    self._io.defer(load.peer.end, Failure(Reason.PEER_LOST, detail))
            case ReadStopped():
                self._step(load, ReadDrained(source))
            case _:
                assert_never(completion)

    def _placed(self, load: SinkLoad, source: RankId, *, certified: bool) -> SinkEvent:
        """What was read is in its place: what that is to the load."""
        run = load.routes[source]
        load.placed_s = self._io.now()
        self._peer(load).brought_s[source] = load.placed_s
        if certified or run.asked_tokens == ALL:
            self._digest(load, source)
        return ReadCompleted(source, certified, is_verified=run.pull.verify is not UNSET)

    def on_over(self, peer: Peer, failure: Failure) -> None:
        """Its loads fail, and are reported when they have drained."""
        self._ways.pop(peer, None)
        for load in [load for load in self._by_request.values() if load.peer is peer]:
            load.note(failure.detail)
            for source in load.routes:
                self._step(load, SourceLost(source))

    # -------------------------------------------------- event -> table -> actions -> perform

    def _step(self, load: SinkLoad, event: SinkEvent) -> None:
        """Handle one event and its consequences. The outcome of an action goes through the table at
        once, and its actions come before those that are left, which may be void by then.
        """
        todo = deque(self._actions(load, event))
        while todo:
            outcome = self._perform(load, todo.popleft())
            if outcome is not None:
                todo.extendleft(reversed(self._actions(load, outcome)))

    def _actions(self, load: SinkLoad, event: SinkEvent) -> list[SinkAction]:
        """The table's actions for an event; none where the state does not allow the event."""
        if load.session is None:
            return []
        before = load.session.snapshot.routes
        try:
            actions = load.session.step(event)
        except ProtocolError:
            self._ledger.count("control.out_of_state")
            _log.debug("request %s: %s", load.order.request_id, event, exc_info=True)
            return []
        now_s = self._io.now()
        for old, new in zip(before, load.session.snapshot.routes, strict=True):
            if new.state is not old.state:  # a repeated answer is no progress
                load.routes[new.source].progressed_s = now_s
        return actions

    def _perform(self, load: SinkLoad, action: SinkAction) -> SinkEvent | None:
        """Perform one action, unless an earlier one of the same event has ended the load. A request
        that a wire refuses fails the load. An action that raises does not stop the next one.
        """
        try:
            match action:
                case SendPull(source):
                    return self._ask(load, source)
                case StartRead(source, token_lo, token_hi):
                    load.granted_s = load.granted_s or self._io.now()
                    if load.is_in(source, RouteState.READING):
                        return self._read(load, source, token_lo, token_hi)
                case StopRead(source):
                    run = load.routes[source]
                    if run.wire is not None:
                        run.wire.stop_read(run.key)
                case SendRelease(source):
                    return self._release(load, source)
                case SendCancel(source, reason):
                    life, wanted = self._addressing.consumer.incarnation, load.order.source
                    cancel = Cancel(wanted.offer, life, reason, wanted.digest)
                    self._peer(load).send(source, cancel)
                case FinishedRecving(reason):
                    self._report(load, reason)
                case _:
                    assert_never(action)
        except Exception as e:  # noqa: BLE001  # a load must end whatever fails
            if not isinstance(e, KvxferError | ValueError):
                self._ledger.count("loads.unforeseen")
                _log.exception("request %s: %s failed", load.order.request_id, action)
            load.note(str(e) or type(e).__name__)
            return Abort(Reason.READ_FAILED)
        return None

    def _read(
        self, load: SinkLoad, source: RankId, token_lo: int, token_hi: int
    ) -> SinkEvent | None:
        run = load.routes[source]
        run.asked_tokens = token_hi
        if run.direct is not None:  # else the source sends by itself
            request = next_read(run, token_lo, token_hi)
            if request is None:
                return self._placed(load, source, certified=False)
            if request.key is not run.key:
                del self._by_key[run.key]
                run.key = request.key
                self._by_key[run.key] = (load, source)
            run.direct.submit_read(request)
            if token_hi == ALL and run.pull.verify is not UNSET:
                behind = run.direct.copied((run.key,))
                if behind is not None:  # the GPU goes on by itself, and the host waits once
                    self._digest(load, source, behind)
        if run.owes_pull:
            self._send_owed(load, source)
        return None

    def _ask(self, load: SinkLoad, source: RankId) -> SinkEvent | None:
        if not load.is_in(source, RouteState.ASKED, RouteState.READING):
            return None
        run, peer = load.routes[source], self._peer(load)
        is_first, run.asked_s = not run.asked_s, self._io.now()
        if is_first and run.request is not None and run.direct is None:
            # Before the Pull: the first chunks may overtake the Grant.
            assert isinstance(run.wire, ReceivingSink)
            run.wire.submit_expect(run.request)
        board = _board(run, peer, source)
        posted = board.find(run.pull.offer.nonce) if board is not None else None
        if posted is None or posted.digest not in (None, run.pull.digest):
            peer.send(source, run.pull)  # its answer will say what is to be done
            return None
        run.owes_pull = not run.open_tokens
        grant = Grant(run.pull.offer, run.pull.consumer, posted.block_ids, posted.num_tokens)
        return self._granted(load, source, grant)

    def _release(self, load: SinkLoad, source: RankId) -> SinkEvent | None:
        if not load.is_in(source, RouteState.RELEASING):
            return None
        run, peer = load.routes[source], self._peer(load)
        run.asked_s = self._io.now()
        if run.owes_pull:  # of a null route
            self._send_owed(load, source)
        release = Release(run.pull.offer, run.pull.consumer)
        verdict = _shown_verdict(run, _board(run, peer, source))
        if verdict is None:
            peer.send(source, release)
            return None
        peer.send_later(source, release)
        self._ledger.count("board.verdicts")
        return self._judged(load, source, verdict)

    def _send_owed(self, load: SinkLoad, source: RankId) -> None:
        """The Pull that the board has answered: behind the read, which need not wait for it. What
        is waited for is its digests, where the board does not show them.
        """
        run, peer = load.routes[source], self._peer(load)
        run.owes_pull = False
        self._shown[load.order.source.offer] = None
        is_waited_for = run.pull.verify is not UNSET and (
            _shown_verdict(run, _board(run, peer, source)) is None
        )
        send = peer.send if is_waited_for else peer.send_later
        send(source, run.pull)
        self._ledger.count("board.grants")

    def _report(self, load: SinkLoad, reason: Reason | None) -> None:
        order = load.order
        if self._by_request.get(order.request_id) is not load:
            return
        del self._by_request[order.request_id]
        if self._by_offer.get(order.source.offer) is load:
            del self._by_offer[order.source.offer]
        for run in load.routes.values():
            self._by_key.pop(run.key, None)
        if reason is Reason.TOKENS:
            # The offer belongs to another request, which may still come.
            self._asked.pop(order.source.offer, None)
        if load.timer is not None:
            load.timer.cancel()
        if load.peer is not None and load.is_begun:
            load.peer.end_load()
        self._keeper.release(order.request_id, order.source)
        self._ledger.loaded(load.report(reason, self._io.now()))
        if reason is not None:
            _log.debug("request %s: KV not used: %s: %s", order.request_id, reason, load.detail)
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self._on_idle is not None and not self._by_request:
            done, self._on_idle = self._on_idle, None
            done()

    def _peer(self, load: SinkLoad) -> Peer:
        assert load.peer is not None  # there since the session is
        return load.peer

    # -------------------------------------------------- clocks

    def _look_in(self, load: SinkLoad, delay_s: float) -> None:
        if load.timer is not None:
            load.timer.cancel()
        load.timer = self._io.after(max(delay_s, LEAST_S), self._look, load)

    def _look(self, load: SinkLoad) -> None:
        """Take the retries and deadlines that are due, and look again in time."""
        self._look_in(load, RETRY_S)  # whatever happens below
        for source in load.routes:
            event = self._due(load, source)
            if event is not None:
                self._step(load, event)
        session = load.session
        if session is None or session.snapshot.is_finished:
            return  # the report of the load has stopped the clock
        ends_s = [
            run.progressed_s + self._limit_s(run)
            for source, run in load.routes.items()
            if load.is_in(source, *_WAITING)
        ]
        self._look_in(load, min([RETRY_S, *(end_s - self._io.now() for end_s in ends_s)]))

    def _due(self, load: SinkLoad, source: RankId) -> SinkEvent | None:
        """The event that a route's clocks cause now; None if there is none."""
        run, now_s = load.routes[source], self._io.now()
        quiet_s = now_s - run.progressed_s
        if quiet_s >= self._limit_s(run):
            if load.is_in(source, *_WAITING):
                what = f"rank {source}: nothing for {quiet_s:.1f} s"
                load.note(what)
                if self._stands(load, source):
                    self._io.defer(self._cut, self._peer(load), f"{what} over {run.pull.transport}")
                return DeadlinePassed(source)
            if load.is_in(source, RouteState.DRAINING):
                self._complain(load)
        elif now_s - run.asked_s >= RETRY_S:
            if load.is_in(source, *_ASKING) and run.verdict is None:
                self._ledger.count("control.retries")
                return RetryDue(source)
            if run.is_growing and load.is_in(source, RouteState.READING):
                return RetryDue(source)
        return None

    def _stands(self, load: SinkLoad, source: RankId) -> bool:
        """Whether the stream that this load waits for has brought nothing to anybody all the while.
        A growing offer may have nothing to send.
        """
        run = load.routes[source]
        is_due = load.is_in(source, RouteState.READING) and not (run.is_growing or run.read_nbytes)
        if not (is_due and isinstance(run.wire, ReceivingSink)):
            return False
        return self._peer(load).brought_s.get(source, 0.0) <= run.progressed_s

    def _cut(self, peer: Peer, what: str) -> None:
        """Meet it anew. A library may have lost what one end waits for, in a network that was cut;
        as the stream is, every later load would wait for that, too.
        """
        if peer.state is PeerState.READY:
            _log.warning("engine %s at %s: %s; it is met anew", peer.engine_id, peer.endpoint, what)
            peer.end(Failure(Reason.PEER_LOST, what))

    def _limit_s(self, run: RouteRun) -> float:
        """How long a route may get no further: it may wait for a prefill, or for its source, which
        says itself that no prefill has come.
        """
        if not run.is_growing:
            return self._timeout_s
        return self._early_wait_s + (0.0 if run.open_tokens else BEYOND_S)

    def _complain(self, load: SinkLoad) -> None:
        """Log a read that does not end, and end its peer. The wire may still write its blocks, so
        they are not given back.
        """
        if load.is_undrained:
            return
        load.is_undrained = True
        self._ledger.count("loads.undrained")
        _log.error("request %s: expected its read to end, and it does not", load.order.request_id)
        self._peer(load).end(Failure(Reason.PEER_LOST, "a read from it does not end"))


def _shown_verdict(run: RouteRun, board: BoardView | None) -> Verdict | None:
    """What the source would answer to a Release now, if the board says so: that the offer is open,
    and the digests of a read that is verified.
    """
    offer = run.pull.offer
    if board is None or not board.is_open(offer.nonce):
        return None
    if run.pull.verify is UNSET:
        return Verdict(offer, run.pull.consumer, True, None)
    digests = board.digests(run.shown_as)
    return None if digests is None else Verdict(offer, run.pull.consumer, True, None, digests)


def _board(run: RouteRun, peer: Peer, source: RankId) -> BoardView | None:
    """None for a stream: its source certifies each chunk by sending it."""
    return None if run.pull.classes else peer.boards.get(source)
