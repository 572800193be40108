"""The real sessions behind small integers, and who gets which message: what makes it cheap.

Snapshots, messages and events are numbered. A step is remembered as (snapshot, event) -> (snapshot,
effects). Reasons are reduced to one (beside refused tokens, which cancel nothing) and sets are put
in order, because no decision depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvxfer.errors import ProtocolError
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.session import (
    BrokenArrived,
    CancelArrived,
    FinishedRecving,
    FinishedSending,
    GrantArrived,
    GrowStream,
    OfferState,
    PullArrived,
    RefuseArrived,
    ReleaseArrived,
    RouteState,
    SendBroken,
    SendCancel,
    SendChunk,
    SendGrant,
    SendPull,
    SendRefuse,
    SendRelease,
    SendVerdict,
    SinkEvent,
    SourceAction,
    SourceEvent,
    StartRead,
    StartStream,
    StopStream,
    VerdictArrived,
    Wire,
)
from kvxfer.transfer.sink_session import LoadSession, LoadSnapshot, RouteRecord
from kvxfer.transfer.source_session import OfferSession, OfferSnapshot, events_due
from kvxfer.transfer.wire import (
    Broken,
    Cancel,
    Consumer,
    Grant,
    OfferRef,
    Pull,
    Reason,
    Refuse,
    Release,
    ToSink,
    ToSource,
    Verdict,
    is_addressed_to,
)

_Session = TypeVar("_Session", OfferSession, LoadSession)

SOURCE = RankId(0, 0)
NUM_CHUNKS = 2
TOKENS = b"tokens"
REASON = Reason.PREEMPTED  # stands for every reason but TOKENS


@dataclass(frozen=True)
class SinkSpec:
    """One sink rank in one life. ``endpoint``: where it listens; lives of the same rank share it.

    ``follows``: the sink (by position) whose kill lets this life begin; None: from the start.
    ``grows``: it reads what is open while the rest is computed.
    """

    incarnation: bytes
    rank: RankId
    claim: frozenset[RankId]
    endpoint: str
    offer: int = 0
    follows: int | None = None
    digest: bytes = TOKENS
    grows: bool = False
    num_wanted: int | None = None  # spans from the first on; None: all


@dataclass(frozen=True)
class Scenario:
    """Who takes part, what may happen, and which session classes and checks they use (faults are
    planted here).
    """

    sinks: tuple[SinkSpec, ...]
    wire: Wire
    num_offers: int = 1
    num_spans: int = 1  # in which an offer is computed
    heeds_open: bool = True  # a stream packs only what is open
    may_lose_claimants: bool = False
    may_fail_reads: bool = False
    two_step_scatter: bool = False
    may_forge_releases: bool = False  # in the name of sinks that have not been granted
    verifies: bool = False  # reads wait for a verdict on stream wires, too
    keeps_releases: bool = True  # until the stream of their consumer is over
    has_board: bool = False  # sinks see for themselves whether an offer is open
    is_board_late: bool = False  # an offer's end is shown some time after it
    may_end_first: bool = False  # the engine ends offers in memory; the source hears of it later
    heeds_ends: bool = True
    shows_ended: bool = False  # the board is left as it was when the engine ends an offer
    board_states: tuple[OfferState, ...] = (OfferState.OPEN,)
    offer_session: type[OfferSession] = OfferSession
    load_session: type[LoadSession] = LoadSession
    checks_incarnation: bool = True
    keys_consumers_by_incarnation: bool = True
    keys_offers_by_nonce: bool = True
    binds_tokens: bool = True
    allows_protocol_errors: bool = False
    max_states: int = 400_000


class SourceStep(NamedTuple):
    offer: int
    sent: int = 0
    starts: tuple[int, ...] = ()
    grows: tuple[int, ...] = ()  # sinks whose streams are told what is open
    stops: tuple[int, ...] = ()
    sends_chunk: bool = False
    num_finished: int = 0
    is_done: bool = False

    def is_quiet(self, offer: int, net: int) -> bool:
        """Nothing changes: the snapshot stays and every answer has been sent before."""
        return (
            self.offer == offer
            and not self.sent & ~net
            and not (self.starts or self.grows or self.stops or self.num_finished)
        )


class SinkStep(NamedTuple):
    load: int
    sent: int = 0
    reads: tuple[tuple[int, int], ...] = ()  # spans, from and to
    num_finished: int = 0
    is_valid: bool = False

    def is_quiet(self, load: int, net: int) -> bool:
        """Nothing changes: the snapshot stays and every message has been sent before."""
        return self.load == load and not self.sent & ~net and not (self.reads or self.num_finished)


class Sessions:
    """The sessions of one scenario, stepped through a memo."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.refs = [OfferRef(b"nonce%d" % k, b"source") for k in range(scenario.num_offers)]
        self.snapshots: list[OfferSnapshot] = []
        self._snapshot_ids: dict[OfferSnapshot, int] = {}
        self.loads: list[LoadSnapshot] = []
        self._load_ids: dict[LoadSnapshot, int] = {}
        self.is_reading: list[bool] = []  # by load: chunks may still be taken
        self.is_releasing: list[bool] = []  # by load: all is read, and the verdict is waited for
        self._source_memo: dict[tuple[int, int, bool], SourceStep | None] = {}
        self._sink_memo: dict[tuple[int, int, int], SinkStep | None] = {}
        self._events: list[SourceEvent | SinkEvent] = []
        self._event_ids: dict[SourceEvent | SinkEvent, int] = {}
        self._messages: list[ToSource | ToSink] = []
        self._message_bits: dict[ToSource | ToSink, int] = {}
        self.deliveries: list[tuple[str, list[tuple[bool, int, int]]]] = []
        # A sink rank sends 3 messages and is sent 5; with two offers under one request id twice
        # that.
        self.chunk_base = 20 * len(scenario.sinks)
        self.consumers = [
            Consumer(s.incarnation if scenario.keys_consumers_by_incarnation else b"any", s.rank)
            for s in scenario.sinks
        ]
        self.initial_load = self._load_id(LoadSession([SOURCE], frozenset()).snapshot)

    def num_wanted(self, sink: int) -> int:
        """Spans that this sink reads."""
        return self.scenario.sinks[sink].num_wanted or self.scenario.num_spans

    # -------------------------------------------------------------- interning

    def new_offer(self, k: int) -> int:
        """Offer ``k`` at its admission."""
        digest = TOKENS if self.scenario.binds_tokens else None
        return self.snapshot_id(OfferSnapshot(self.refs[k].nonce, digest))

    def snapshot_id(self, snapshot: OfferSnapshot) -> int:
        """Its number, after what no decision depends on (order, reasons) is made equal."""
        snapshot = replace(
            snapshot,
            reason=None if snapshot.reason is None else REASON,
            parked=dict(sorted(snapshot.parked.items(), key=lambda item: str(item[0]))),
            gone=dict.fromkeys(snapshot.gone, REASON),
            shares=dict(sorted(snapshot.shares.items(), key=lambda item: str(item[0]))),
        )
        if snapshot not in self._snapshot_ids:
            self._snapshot_ids[snapshot] = len(self.snapshots)
            self.snapshots.append(snapshot)
        return self._snapshot_ids[snapshot]

    def _load_id(self, load: LoadSnapshot) -> int:
        reads = RouteState.READING
        routes = tuple(
            each if each.state is reads else RouteRecord(each.source, each.is_null, each.state)
            for each in load.routes
        )
        failure = None if load.failure is None else REASON
        load = msgspec.structs.replace(load, failure=failure, routes=routes)
        if load not in self._load_ids:
            self._load_ids[load] = len(self.loads)
            self.loads.append(load)
            state = load.routes[0].state
            self.is_reading.append(state in (RouteState.ASKED, RouteState.READING))
            self.is_releasing.append(state is RouteState.RELEASING)
        return self._load_ids[load]

    def event_id(self, event: SourceEvent | SinkEvent) -> int:
        if event not in self._event_ids:
            self._event_ids[event] = len(self._events)
            self._events.append(event)
        return self._event_ids[event]

    def event(self, number: int) -> SourceEvent | SinkEvent:
        return self._events[number]

    def bit(self, message: ToSource | ToSink) -> int:
        if message not in self._message_bits:
            bit = len(self._messages)
            assert bit < self.chunk_base
            self._message_bits[message] = bit
            self._messages.append(message)
            self.deliveries.append((label_of(message), list(self._receivers(message))))
        return 1 << self._message_bits[message]

    # ------------ addressing: what the connector does with a message

    def _receivers(self, message: ToSource | ToSink) -> Iterator[tuple[bool, int, int]]:
        """(to a sink?, which offer or sink, event) for everybody who would take this message."""
        scenario = self.scenario
        if isinstance(message, Pull | Release | Cancel):
            for k, ref in enumerate(self.refs):
                if message.offer == ref or not scenario.keys_offers_by_nonce:
                    yield False, k, self.event_id(self._to_source(message))
            return
        assert isinstance(message, Grant | Refuse | Verdict | Broken)
        sent_to = next(
            spec
            for spec in scenario.sinks
            if message.consumer == Consumer(spec.incarnation, spec.rank)
            and message.offer == self.refs[spec.offer]
        )
        for i, spec in enumerate(scenario.sinks):
            if spec.endpoint != sent_to.endpoint:
                continue
            reader = Consumer(spec.incarnation, spec.rank)
            if scenario.checks_incarnation and not is_addressed_to(message, reader):
                continue
            if scenario.keys_offers_by_nonce and message.offer != self.refs[spec.offer]:
                continue
            # A sink of protocol 1 does not know that a Grant may open a part only
            num_known = self.num_wanted(i) if spec.grows else 0
            yield True, i, self.event_id(_to_sink(message, num_known))

    def _to_source(self, message: Pull | Release | Cancel) -> SourceEvent:
        if isinstance(message, Cancel):
            by_incarnation = self.scenario.keys_consumers_by_incarnation
            life = message.incarnation if by_incarnation else b"any"
            return CancelArrived(life, REASON, message.digest)
        index = next(
            i
            for i, s in enumerate(self.scenario.sinks)
            if message.consumer == Consumer(s.incarnation, s.rank)
        )
        if isinstance(message, Release):
            return ReleaseArrived(self.consumers[index])
        return PullArrived(
            self.consumers[index],
            frozenset(message.claim),
            message.digest,
            self.scenario.wire,
            message.grows is True,
        )

    # -------------------------------------------------------------- sessions

    def source_step(self, offer: int, event: int, *, is_ended: bool = False) -> SourceStep | None:
        """None: the event is not allowed there (the connector counts and drops it). ``is_ended``:
        the engine has ended the offer.
        """
        key = (offer, event, is_ended and self.scenario.heeds_ends)
        if key not in self._source_memo:
            session = restored(self.scenario.offer_session, self.snapshots[offer])
            ended = REASON if key[2] else None
            actions: list[SourceAction] = []
            try:
                for due in events_due(session.snapshot, self._events[event], ended):  # type: ignore[arg-type]
                    actions += session.step(due)
            except ProtocolError:
                self._source_memo[key] = None
                return None
            step = SourceStep(self.snapshot_id(session.snapshot))
            for action in actions:
                step = self._with_source_action(step, session.snapshot, action)
            self._source_memo[key] = step
        return self._source_memo[key]

    def _with_source_action(
        self, step: SourceStep, offer: OfferSnapshot, action: SourceAction
    ) -> SourceStep:
        is_growing = offer.state is OfferState.PENDING
        open_tokens = offer.open_tokens if is_growing else UNSET
        if isinstance(action, FinishedSending):
            is_done = action.reason is None
            return step._replace(num_finished=step.num_finished + 1, is_done=is_done)
        for i, spec in enumerate(self.scenario.sinks):
            if self.consumers[i] != action.consumer:
                continue
            # A source that looks offers up by request id takes its offer for the sink's.
            own = self.refs[spec.offer]
            is_mine = own.nonce == offer.nonce or not self.scenario.keys_offers_by_nonce
            answer = _answer(action, own, Consumer(spec.incarnation, spec.rank), open_tokens)
            if answer is not None and is_mine:
                step = step._replace(sent=step.sent | self.bit(answer))
            elif isinstance(action, StartStream):
                step = step._replace(starts=(*step.starts, i), grows=(*step.grows, i))
            elif isinstance(action, GrowStream):
                step = step._replace(grows=(*step.grows, i))
            elif isinstance(action, StopStream):
                step = step._replace(stops=(*step.stops, i))
            elif isinstance(action, SendChunk):
                step = step._replace(sends_chunk=True)
        return step

    def sink_step(self, sink: int, load: int, event: int) -> SinkStep | None:
        key = (sink, load, event)
        if key not in self._sink_memo:
            session = restored(self.scenario.load_session, self.loads[load])
            try:
                actions = session.step(self._events[event])  # type: ignore[arg-type]
            except ProtocolError:
                self._sink_memo[key] = None
                return None
            spec = self.scenario.sinks[sink]
            ref, consumer = self.refs[spec.offer], Consumer(spec.incarnation, spec.rank)
            step = SinkStep(self._load_id(session.snapshot))
            for action in actions:
                match action:
                    case SendPull():
                        claim = tuple(sorted(spec.claim))
                        message: ToSource = Pull(
                            offer=ref,
                            consumer=consumer,
                            claim=claim,
                            digest=spec.digest,
                            transport="",
                            grows=spec.grows or UNSET,
                        )
                    case SendRelease():
                        message = Release(ref, consumer)
                    case SendCancel():
                        message = Cancel(ref, spec.incarnation, REASON, spec.digest)
                    case StartRead():
                        read = action.token_lo, min(action.token_hi, self.num_wanted(sink))
                        step = step._replace(reads=(*step.reads, read))
                        continue
                    case FinishedRecving():
                        step = step._replace(
                            num_finished=step.num_finished + 1, is_valid=action.reason is None
                        )
                        continue
                    case _:
                        continue
                step = step._replace(sent=step.sent | self.bit(message))
            self._sink_memo[key] = step
        return self._sink_memo[key]


def restored(kind: type[_Session], snapshot: Any) -> _Session:
    """A session that goes on from a snapshot."""
    session = kind.__new__(kind)
    session.snapshot = snapshot
    return session


def _to_sink(message: ToSink, num_known: int) -> SinkEvent:
    match message:
        case Grant(open_tokens=int(open_tokens)) if open_tokens < num_known:
            return GrantArrived(SOURCE, open_tokens)
        case Grant():
            return GrantArrived(SOURCE)
        case Refuse():
            return RefuseArrived(SOURCE, message.reason)
        case Verdict():
            return VerdictArrived(SOURCE, message.valid, message.reason)
        case Broken():
            return BrokenArrived(SOURCE, REASON)
        case _:
            raise AssertionError(message)


def _answer(
    action: SourceAction, ref: OfferRef, consumer: Consumer, open_tokens: int | UnsetType
) -> ToSink | None:
    match action:
        case SendGrant():
            return Grant(ref, consumer, (), open_tokens=open_tokens)
        case SendRefuse():
            reason = action.reason if action.reason is Reason.TOKENS else REASON
            return Refuse(ref, consumer, reason)
        case SendVerdict():
            return Verdict(ref, consumer, action.valid, None if action.valid else REASON)
        case SendBroken():
            return Broken(ref, REASON, consumer)
        case _:
            return None


def label_of(message: ToSource | ToSink) -> str:
    who = getattr(message, "consumer", None)
    name = type(message).__name__
    if isinstance(message, Grant) and message.open_tokens is not UNSET:
        name += f" to {message.open_tokens}"
    if isinstance(message, Verdict):
        name += " valid" if message.valid else " invalid"
    if who is None:
        return f"{name} arrives"
    return f"{name} of {who.incarnation.decode()} {who.rank} arrives"
