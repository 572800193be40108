"""The life of one load on one sink rank, over all its routes: no sockets, no clocks, no tensors.

Theory of operation
-------------------
A load has one route from every source rank that this sink rank reads::

    direct: IDLE --Start--> ASKED --Grant--> READING --complete--> RELEASING --valid--> VALID
    null:   IDLE --Start--> ASKED --Grant-----------------------> RELEASING --valid--> VALID
    stream: IDLE --Start--> ASKED --Grant--> READING --complete, certified-----------> VALID
            (verified: --complete, certified--> RELEASING, as on a direct wire)
    any failure: --StopRead--> DRAINING --nothing in flight--> FAILED, at once if nothing can write

1. A route reads every token at most once: a retry re-sends the same message, and a second Grant
   counts only for the tokens that it opens beyond those of the first. They are read when the read
   before has ended; the route is complete when all that it wants was read. While more is to be
   opened, the Pull is sent again, and a Grant of now is the answer: none has to arrive.
2. The Release leaves only after the read is seen complete, and only its verdict makes the route
   VALID. On stream wires every chunk is certified by having been sent, so the complete read is the
   verdict; chunks may overtake the Grant. A read that is verified waits for a verdict on every
   wire: it brings the digests of the source, and unequal ones make it an invalid one.
3. The first failure fails the load (a torn read has no good prefix): every other route that is not
   over is stopped, and every source rank that was asked gets one Cancel, also those whose routes
   are VALID: the claim of the whole engine is void.
4. ``FinishedRecving`` comes once, when every route is VALID or FAILED: then nothing of this load
   can write the destination blocks. Deadlines end waits, not drains.
5. After the Grant a Refuse answers a repeated Pull. In READING it says that the offer is over; in
   RELEASING the verdict decides, so it is ignored.
6. Refused tokens cancel nothing: the offer belongs to another request, which may still come for it.

Everything that changes a load's state is in this file, and every step goes through ``TABLE``: a
missing key is a :class:`ProtocolError` that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from kvxfer.errors import ProtocolError
from kvxfer.transfer import session
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import ALL
from kvxfer.transfer.session import RouteState, SinkAction, SinkEvent
from kvxfer.transfer.wire import Reason


class RouteRecord(msgspec.Struct, frozen=True):
    """One route of a load. ``is_null``: Pull and Release, no read. Tokens before ``open_tokens``
    are granted, those before ``asked_tokens`` are read, or were; ``is_busy``: are read.
    """

    source: RankId
    is_null: bool
    state: RouteState = RouteState.IDLE
    open_tokens: int = 0
    asked_tokens: int = 0
    is_busy: bool = False


class LoadSnapshot(msgspec.Struct, frozen=True):
    """Immutable and hashable. ``failure``: the first thing that failed the load."""

    routes: tuple[RouteRecord, ...]
    failure: Reason | None = None
    is_finished: bool = False

    def with_route(self, route: RouteRecord) -> LoadSnapshot:
        """In the place of the one of the same source rank."""
        routes = [route if r.source == route.source else r for r in self.routes]
        return replace(self, routes=tuple(routes))


Step = tuple[LoadSnapshot, list[SinkAction]]
Handler = Callable[[LoadSnapshot, RouteRecord, Any], Step]


def _ask(load: LoadSnapshot, route: RouteRecord, _: session.Start) -> Step:
    return load.with_route(replace(route, state=RouteState.ASKED)), [session.SendPull(route.source)]


def _read(load: LoadSnapshot, route: RouteRecord, event: session.GrantArrived) -> Step:
    if route.is_null:
        return load.with_route(replace(route, state=RouteState.RELEASING)), [
            session.SendRelease(route.source)
        ]
    return _read_open(load, route, event.open_tokens, is_busy=False)


def _read_more(load: LoadSnapshot, route: RouteRecord, event: session.GrantArrived) -> Step:
    if event.open_tokens <= route.open_tokens:
        return load, []
    return _read_open(load, route, event.open_tokens, is_busy=route.is_busy)


def _read_open(load: LoadSnapshot, route: RouteRecord, open_tokens: int, *, is_busy: bool) -> Step:
    """Read what is open and was not asked for, unless a read runs."""
    lo = route.asked_tokens
    hi = lo if is_busy else open_tokens
    route = replace(
        route,
        state=RouteState.READING,
        open_tokens=open_tokens,
        asked_tokens=hi,
        is_busy=is_busy or lo < hi,
    )
    actions: list[SinkAction] = [session.StartRead(route.source, lo, hi)] if lo < hi else []
    return load.with_route(route), actions


def _complete_early(load: LoadSnapshot, route: RouteRecord, event: session.ReadCompleted) -> Step:
    if not event.certified:
        raise ProtocolError(
            f"route from {route.source}: expected a Grant before an uncertified read, got none"
        )
    return _complete(load, route, event)


def _complete(load: LoadSnapshot, route: RouteRecord, event: session.ReadCompleted) -> Step:
    if event.certified and not event.is_verified:
        return load.with_route(replace(route, state=RouteState.VALID)), []
    if not event.certified and route.asked_tokens < ALL:
        return _read_open(load, route, route.open_tokens, is_busy=False)
    return load.with_route(replace(route, state=RouteState.RELEASING)), [
        session.SendRelease(route.source)
    ]


def _verdict(load: LoadSnapshot, route: RouteRecord, event: session.VerdictArrived) -> Step:
    if event.valid:
        return load.with_route(replace(route, state=RouteState.VALID)), []
    return _fail(load, event.reason or Reason.ENDED)


def _ask_again(load: LoadSnapshot, route: RouteRecord, _: session.RetryDue) -> Step:
    return load, [session.SendPull(route.source)] if route.open_tokens < ALL else []


def _release_again(load: LoadSnapshot, route: RouteRecord, _: session.RetryDue) -> Step:
    return load, [session.SendRelease(route.source)]


_OVER = (RouteState.VALID, RouteState.DRAINING, RouteState.FAILED)


def _fail(load: LoadSnapshot, reason: Reason) -> Step:
    """The first failure: stop what is not over, and cancel at every source that was asked."""
    asked = [route.source for route in load.routes if route.state is not RouteState.IDLE]
    actions: list[SinkAction] = []
    for route in load.routes:
        if route.state in _OVER:
            continue
        # ASKED is stopped like READING: on stream wires chunks may have overtaken the Grant.
        may_write = route.state in (RouteState.ASKED, RouteState.READING) and not route.is_null
        state = RouteState.DRAINING if may_write else RouteState.FAILED
        load = load.with_route(replace(route, state=state))
        if may_write:
            actions.append(session.StopRead(route.source))
    if load.failure is None:
        load = replace(load, failure=reason)
        if reason is not Reason.TOKENS:  # rule 6
            actions += [session.SendCancel(source, reason) for source in asked]
    return load, actions


def _answered_no(
    load: LoadSnapshot,
    _: RouteRecord,
    event: session.RefuseArrived | session.BrokenArrived | session.Abort,
) -> Step:
    return _fail(load, event.reason)


def _timed_out(load: LoadSnapshot, _: RouteRecord, __: session.DeadlinePassed) -> Step:
    return _fail(load, Reason.DEADLINE)


def _source_lost(load: LoadSnapshot, _: RouteRecord, __: session.SourceLost) -> Step:
    return _fail(load, Reason.PEER_LOST)


def _read_failed(load: LoadSnapshot, route: RouteRecord, event: session.ReadFailed) -> Step:
    # This route has nothing left to drain, but its source still gets the Cancel.
    load, actions = _fail(load, event.reason)
    stop = session.StopRead(route.source)
    return load.with_route(replace(route, state=RouteState.FAILED)), [
        a for a in actions if a != stop
    ]


def _drained(
    load: LoadSnapshot,
    route: RouteRecord,
    _: session.ReadDrained | session.ReadFailed | session.ReadCompleted,
) -> Step:
    return load.with_route(replace(route, state=RouteState.FAILED)), []


def _ignore(load: LoadSnapshot, _: RouteRecord, __: SinkEvent) -> Step:
    return load, []


_LATE = (
    *(session.GrantArrived, session.RefuseArrived, session.VerdictArrived, session.BrokenArrived),
    *(session.RetryDue, session.DeadlinePassed, session.SourceLost, session.Abort),
)
"""What may still come to a route that is over, and changes nothing."""

TABLE: Mapping[tuple[RouteState, type], Handler] = {
    (RouteState.IDLE, session.Start): _ask,
    (RouteState.IDLE, session.DeadlinePassed): _timed_out,
    (RouteState.IDLE, session.SourceLost): _source_lost,
    (RouteState.IDLE, session.Abort): _answered_no,
    (RouteState.ASKED, session.GrantArrived): _read,
    (RouteState.ASKED, session.RefuseArrived): _answered_no,
    (RouteState.ASKED, session.ReadCompleted): _complete_early,
    (RouteState.ASKED, session.ReadFailed): _read_failed,
    (RouteState.ASKED, session.BrokenArrived): _answered_no,
    (RouteState.ASKED, session.RetryDue): _ask_again,
    (RouteState.ASKED, session.DeadlinePassed): _timed_out,
    (RouteState.ASKED, session.SourceLost): _source_lost,
    (RouteState.ASKED, session.Abort): _answered_no,
    (RouteState.READING, session.GrantArrived): _read_more,
    (RouteState.READING, session.RefuseArrived): _answered_no,
    (RouteState.READING, session.ReadCompleted): _complete,
    (RouteState.READING, session.ReadFailed): _read_failed,
    (RouteState.READING, session.BrokenArrived): _answered_no,
    (RouteState.READING, session.RetryDue): _ask_again,
    (RouteState.READING, session.DeadlinePassed): _timed_out,
    (RouteState.READING, session.SourceLost): _source_lost,
    (RouteState.READING, session.Abort): _answered_no,
    (RouteState.RELEASING, session.GrantArrived): _ignore,  # one read per rank
    (RouteState.RELEASING, session.RefuseArrived): _ignore,  # rule 5
    (RouteState.RELEASING, session.VerdictArrived): _verdict,
    (RouteState.RELEASING, session.BrokenArrived): _answered_no,
    (RouteState.RELEASING, session.RetryDue): _release_again,
    (RouteState.RELEASING, session.DeadlinePassed): _timed_out,
    (RouteState.RELEASING, session.SourceLost): _source_lost,
    (RouteState.RELEASING, session.Abort): _answered_no,
    (RouteState.DRAINING, session.ReadDrained): _drained,
    (RouteState.DRAINING, session.ReadFailed): _drained,
    (RouteState.DRAINING, session.ReadCompleted): _drained,
    (
        RouteState.FAILED,
        session.ReadDrained,
    ): _ignore,  # the read ended by itself before it saw the stop
    (RouteState.FAILED, session.ReadFailed): _ignore,
    (RouteState.FAILED, session.ReadCompleted): _ignore,
    # Deadlines end waits, not drains. An Abort is another route's, or the load has ended.
    **{(state, event): _ignore for state in _OVER for event in _LATE},
}

_FINAL = {RouteState.VALID, RouteState.FAILED}
_FOR_ALL = (session.Start, session.Abort)


class LoadSession:
    """One load on one sink rank: ``routes`` are the source ranks it reads, ``null`` those it reads
    nothing from. ``snapshot`` is all of it, immutable and hashable.
    """

    table: ClassVar[Mapping[tuple[RouteState, type], Handler]] = TABLE

    def __init__(self, routes: Sequence[RankId], null: frozenset[RankId]) -> None:
        if not routes or len(set(routes)) != len(routes):
            names = [str(source) for source in routes]
            raise ValueError(f"routes: expected at least one source rank, each once, got {names}")
        if not null <= set(routes):
            names = sorted(str(source) for source in null - set(routes))
            raise ValueError(f"null: expected source ranks among the routes, got {names}")
        self.snapshot = LoadSnapshot(
            tuple(RouteRecord(source, source in null) for source in routes)
        )

    def step(self, event: SinkEvent) -> list[SinkAction]:
        """Take one event; return what to do, in order. Raises ProtocolError, changing nothing.

        ``Start`` and ``Abort`` are taken by every route in turn, all other events by the route that
        they name.
        """
        load = self.snapshot
        if isinstance(event, _FOR_ALL):
            sources = [route.source for route in load.routes]
        else:
            sources = [event.source]
        actions: list[SinkAction] = []
        for source in sources:
            route = next((route for route in load.routes if route.source == source), None)
            if route is None:
                names = [str(route.source) for route in load.routes]
                raise ProtocolError(f"load: expected a source rank among {names}, got {source}")
            handler = self.table.get((route.state, type(event)))
            if handler is None:
                raise ProtocolError(
                    f"route from {source}: {type(event).__name__} is not allowed in "
                    f"{route.state.name}"
                )
            load, more = handler(load, route, event)
            actions += more
        if not load.is_finished and {route.state for route in load.routes} <= _FINAL:
            load = replace(load, is_finished=True)
            actions.append(session.FinishedRecving(load.failure))
        self.snapshot = load
        return actions
