"""Both session tables together, explored exhaustively; a fault planted for each rule must be found.

``SCENARIOS`` and ``BOARD_SCENARIOS`` say how many worlds each model has: about 300,000 with the
forged Releases, 40 s on one core of a small and busy machine; the faults are found in 2 s more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from kvxfer.transfer import sink_session, source_session
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import ALL
from kvxfer.transfer.session import (
    Break,
    ChunkPacked,
    DeadlinePassed,
    GrantArrived,
    Grown,
    OfferState,
    PullArrived,
    ReadCompleted,
    ReadyCompleted,
    ReleaseArrived,
    RouteState,
    SendChunk,
    SendRelease,
    SendVerdict,
    StartRead,
    StreamDrained,
    StreamSent,
    Wire,
)
from kvxfer.transfer.sink_session import LoadSession, LoadSnapshot, RouteRecord
from kvxfer.transfer.source_session import OfferSession, OfferSnapshot, StreamState
from kvxfer.transfer.wire import Consumer
from tests.transfer.explore import explore
from tests.transfer.explore_sessions import Scenario, SinkSpec

R0, R1 = RankId(0, 0), RankId(0, 1)
BOTH, ALONE = frozenset({R0, R1}), frozenset({R0})

TWO_RANKS = (SinkSpec(b"a", R0, BOTH, "a0"), SinkSpec(b"a", R1, BOTH, "a1"))
TWO_ENGINES = (SinkSpec(b"a", R0, ALONE, "a0"), SinkSpec(b"b", R0, ALONE, "b0"))
TWO_LIVES = (
    SinkSpec(b"a", R0, ALONE, "a0"),
    SinkSpec(b"a2", R0, ALONE, "a0", follows=0),
)
TWO_OFFERS = (
    SinkSpec(b"a", R0, ALONE, "a0"),
    SinkSpec(b"a2", R0, ALONE, "a0", offer=1),
)

OTHER_TOKENS = (
    SinkSpec(b"a", R0, ALONE, "a0"),
    SinkSpec(b"b", R0, ALONE, "b0", digest=b"other"),
)

OTHER_TOKENS_DIRECT = Scenario(OTHER_TOKENS, Wire.DIRECT)
TWO_RANKS_DIRECT = Scenario(TWO_RANKS, Wire.DIRECT, may_lose_claimants=True, may_fail_reads=True)
ONE_RANK_DIRECT = Scenario(TWO_ENGINES[:1], Wire.DIRECT, may_lose_claimants=True)
ONE_RANK_STREAM = Scenario(
    TWO_ENGINES[:1],
    Wire.STREAM,
    may_lose_claimants=True,
    may_fail_reads=True,
    two_step_scatter=True,
)
TWO_RANKS_STREAM = Scenario(TWO_RANKS, Wire.STREAM)
TWO_ENGINES_DIRECT = Scenario(TWO_ENGINES, Wire.DIRECT, may_lose_claimants=True)
TWO_LIVES_DIRECT = Scenario(TWO_LIVES, Wire.DIRECT, may_lose_claimants=True)
TWO_LIVES_STREAM = Scenario(TWO_LIVES, Wire.STREAM)
TWO_OFFERS_DIRECT = Scenario(TWO_OFFERS, Wire.DIRECT, num_offers=2)

# Worlds of each, and those in which some engine has accepted with all its ranks. A change of the
# protocol changes these numbers; few worlds would mean that the exploration has gone blind.
SCENARIOS = {
    "two ranks, direct": (TWO_RANKS_DIRECT, 8_591, 8),
    "one rank, stream, scatter in two steps": (ONE_RANK_STREAM, 1_122, 23),
    "two ranks, stream": (TWO_RANKS_STREAM, 56_606, 53),
    "two engines, direct": (TWO_ENGINES_DIRECT, 15_801, 632),
    "a sink with other tokens, direct": (OTHER_TOKENS_DIRECT, 2_888, 64),
    "restarted sink, direct": (TWO_LIVES_DIRECT, 8_181, 168),
    "restarted sink, stream": (TWO_LIVES_STREAM, 31_802, 870),
    "request id used again, direct": (TWO_OFFERS_DIRECT, 17_861, 748),
    "one rank, stream, verified": (replace(ONE_RANK_STREAM, verifies=True), 1_191, 2),
}

# The same rules where sinks look at a board. The network keeps no order, so a Release may come
# before its Pull, as it does not on one connection: it gets an invalid verdict, and a valid one
# later. A sink that has seen the offer open asks for neither.
BOARD_SCENARIOS = {
    "two ranks": (replace(TWO_RANKS_DIRECT, has_board=True), 32_076, 800),
    "two engines": (replace(TWO_ENGINES_DIRECT, has_board=True), 52_424, 12_864),
    "a sink with other tokens": (replace(OTHER_TOKENS_DIRECT, has_board=True), 4_336, 416),
    "restarted sink": (replace(TWO_LIVES_DIRECT, has_board=True), 20_396, 2_700),
    "request id used again": (replace(TWO_OFFERS_DIRECT, has_board=True), 40_756, 7_088),
}


# The engine ends offers in memory and uses the blocks at once; the source's IO thread, which may be
# stuck, goes on at any time. A sink whose IO thread is stuck is one that takes its steps late: in
# every scenario it may.
STUCK_SCENARIOS = {
    "two ranks, direct": (replace(TWO_RANKS_DIRECT, may_end_first=True), 19_278, 8),
    "one rank, board": (replace(ONE_RANK_DIRECT, may_end_first=True, has_board=True), 910, 108),
    "one rank, stream": (replace(ONE_RANK_STREAM, may_end_first=True), 2_481, 49),
    "request id used again, direct": (
        replace(TWO_OFFERS_DIRECT, may_end_first=True),
        57_576,
        1_350,
    ),
}

# Offers that are computed in several spans, of which sinks of protocol 2 read what is open. A sink
# that wants the first span only has its verdict before the offer is complete.
GROW = replace(TWO_ENGINES[0], grows=True)
GROW_BOTH = tuple(replace(spec, grows=True) for spec in TWO_RANKS)
GROW_FIRST = (replace(GROW, num_wanted=1), replace(TWO_ENGINES[1], grows=True))
ONE_GROWING = Scenario((GROW,), Wire.DIRECT, num_spans=3, may_lose_claimants=True)
FIRST_GROWING = Scenario(GROW_FIRST[:1], Wire.DIRECT, num_spans=2)
BOTH_PROTOCOLS = Scenario((GROW, TWO_ENGINES[1]), Wire.DIRECT, num_spans=2)
TWO_OFFERS_GROWING = Scenario(
    tuple(replace(spec, grows=True) for spec in TWO_OFFERS),
    Wire.DIRECT,
    num_offers=2,
    num_spans=2,
)
STREAM_GROWING = replace(ONE_RANK_STREAM, sinks=(GROW,), num_spans=2)
GROWING_SCENARIOS = {
    "one rank, direct, three spans": (ONE_GROWING, 3_975, 16),
    "one rank, direct, reads that fail": (replace(ONE_GROWING, may_fail_reads=True), 3_975, 16),
    "one rank, board": (replace(ONE_GROWING, has_board=True), 4_775, 187),
    "one rank, the engine ends it first": (replace(ONE_GROWING, may_end_first=True), 9_063, 16),
    "one rank, stream": (STREAM_GROWING, 8_999, 92),
    "one rank, stream, verified": (replace(STREAM_GROWING, verifies=True), 9_275, 8),
    "one rank, stream, stuck": (replace(STREAM_GROWING, may_end_first=True), 20_006, 196),
    "one that wants the first span": (FIRST_GROWING, 929, 38),
    "protocols 1 and 2 at one offer": (BOTH_PROTOCOLS, 43_379, 1_825),
}
LARGE_SCENARIOS = {
    "two ranks, direct": (Scenario(GROW_BOTH, Wire.DIRECT, num_spans=2), 123_833, 72),
    "one wants the first span, one all": (
        Scenario(GROW_FIRST, Wire.DIRECT, num_spans=2),
        143_953,
        8_452,
    ),
    "a prefill that is preempted and begins anew": (
        replace(TWO_OFFERS_GROWING, max_states=500_000),
        496_851,
        11_904,
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_breaks_a_rule(name: str) -> None:
    scenario, num_states, num_accepted = SCENARIOS[name]
    result = explore(scenario)
    assert result.violation is None, f"{result.violation}: {'; '.join(result.trace)}"
    assert (result.num_states, result.num_accepted) == (num_states, num_accepted)


def test_a_release_of_a_running_stream_has_to_be_kept_back() -> None:
    """A sink that verifies may have read the last chunk before its source has noted it as sent."""
    verified, _, _ = SCENARIOS["one rank, stream, verified"]
    assert explore(replace(verified, keeps_releases=False)).violation == "protocol error"


@pytest.mark.parametrize("name", BOARD_SCENARIOS)
def test_no_look_at_the_board_breaks_a_rule(name: str) -> None:
    scenario, num_states, num_accepted = BOARD_SCENARIOS[name]
    result = explore(scenario, frozenset({TWO_VERDICTS}))
    assert result.violation is None, f"{result.violation}: {'; '.join(result.trace)}"
    assert (result.num_states, result.num_accepted) == (num_states, num_accepted)


@pytest.mark.parametrize(
    "name",
    [*GROWING_SCENARIOS, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE_SCENARIOS)],
)
def test_no_growth_breaks_a_rule(name: str) -> None:
    scenario, num_states, num_accepted = (GROWING_SCENARIOS | LARGE_SCENARIOS)[name]
    result = explore(scenario, frozenset({TWO_VERDICTS} if scenario.has_board else ()))
    assert result.violation is None, f"{result.violation}: {'; '.join(result.trace)}"
    assert (result.num_states, result.num_accepted) == (num_states, num_accepted)


@pytest.mark.parametrize("name", STUCK_SCENARIOS)
def test_a_stuck_io_thread_breaks_no_rule(name: str) -> None:
    scenario, num_states, num_accepted = STUCK_SCENARIOS[name]
    result = explore(scenario, frozenset({TWO_VERDICTS} if scenario.has_board else ()))
    assert result.violation is None, f"{result.violation}: {'; '.join(result.trace)}"
    assert (result.num_states, result.num_accepted) == (num_states, num_accepted)


def test_a_release_without_a_grant_harms_nobody() -> None:
    """Somebody else, who knows the nonce, releases in a sink's name before its Grant.

    The forger's answer is invalid and the sink's own may be valid, so two verdicts may differ, and
    one may come that the sink does not await. That leads to nothing else: what is accepted is
    whole, and the offer neither ends for it nor stays.
    """
    forged = replace(TWO_RANKS_DIRECT, may_forge_releases=True, allows_protocol_errors=True)
    result = explore(forged, frozenset({TWO_VERDICTS}))
    assert result.violation is None, f"{result.violation}: {'; '.join(result.trace)}"
    assert (result.num_states, result.num_accepted) == (26_108, 32)


# ------------------------------------------------------------ planted faults

STALE = "accepted KV that is stale, torn or partial"
WRITES = "finished_recving while a read still writes the destination blocks"
PACKS = "finished_sending while a pack still reads the blocks"
TOO_EARLY = "the offer is done although no engine has all of its ranks"
COMPUTED = "the offer is done while it is computed"
TWICE_SENT = "finished_sending was reported twice"
TWICE_RECEIVED = "finished_recving was reported twice"
TWO_VERDICTS = "two different verdicts for one consumer"
NO_EXIT = "no exit by timers alone"

_SOURCE, _SINK = source_session.TABLE, sink_session.TABLE
PENDING, OPEN, DONE, BROKEN = OfferState


def offer_with(rows: Mapping[tuple[OfferState, type], Any]) -> type[OfferSession]:
    """An offer session with these rows in place of its own."""
    return type("FaultyOffer", (OfferSession,), {"table": {**_SOURCE, **rows}})


def load_with(rows: Mapping[tuple[RouteState, type], Any]) -> type[LoadSession]:
    """A load session with these rows in place of its own; a row of None is taken out."""
    table = {key: row for key, row in {**_SINK, **rows}.items() if row is not None}
    return type("FaultyLoad", (LoadSession,), {"table": table})


def reopen(offer: OfferSnapshot, _: ReadyCompleted) -> source_session.Step:
    """A late ready event opens whatever it finds."""
    return replace(offer, state=OPEN), []


def grant_early(offer: OfferSnapshot, pull: PullArrived) -> source_session.Step:
    """A Pull is granted as soon as the blocks are known."""
    return _SOURCE[OPEN, PullArrived](offer, pull)


def release_at_once(load: LoadSnapshot, route: RouteRecord, _: GrantArrived) -> sink_session.Step:
    """The Release leaves when the read is launched, not when it is seen complete."""
    load = load.with_route(msgspec.structs.replace(route, state=RouteState.RELEASING))
    return load, [StartRead(route.source), SendRelease(route.source)]


def nothing(record: Any, *_: Any) -> tuple[Any, list[Any]]:
    return record, []


def read_again(load: LoadSnapshot, route: RouteRecord, _: GrantArrived) -> sink_session.Step:
    """Every Grant starts a read."""
    return load, [StartRead(route.source)]


def count_releases(offer: OfferSnapshot, event: ReleaseArrived) -> source_session.Step:
    """Consumers as a count: each Release is one of the two that the offer waits for."""
    num_released = len(offer.parked) + 1  # parked is empty while OPEN: it serves as the counter
    tally = Consumer(b"tally", RankId(num_released, 0))
    pull = PullArrived(tally, ALONE, b"", Wire.DIRECT)
    offer = replace(offer, parked={**offer.parked, tally: pull})
    if num_released == 2:
        offer = replace(offer, state=DONE, parked={})
    return offer, [SendVerdict(event.consumer, True, None)]


def valid_by_clock(offer: OfferSnapshot, event: ReleaseArrived) -> source_session.Step:
    """Valid whatever has happened to the offer: its lease, or its count, says that it is alive."""
    return offer, [SendVerdict(event.consumer, True, None)]


def send_anyway(offer: OfferSnapshot, event: ChunkPacked) -> source_session.Step:
    """A packed chunk is sent without a look at the offer."""
    return offer, [SendChunk(event.consumer, event.sequence)]


def forget_streams(offer: OfferSnapshot, event: Break) -> source_session.Step:
    """Streams are told to stop, and taken as stopped."""
    offer, actions = _SOURCE[OPEN, Break](offer, event)
    shares = {
        c: replace(s, stream=StreamState.OVER) if s.stream is StreamState.STOPPING else s
        for c, s in offer.shares.items()
    }
    return replace(offer, shares=shares), actions


def forget_verdict(offer: OfferSnapshot, event: ReleaseArrived) -> source_session.Step:
    """A repeated Release is judged anew."""
    shares = {c: share for c, share in offer.shares.items() if c != event.consumer}
    return _SOURCE[DONE, ReleaseArrived](replace(offer, shares=shares), event)


def finish_again(offer: OfferSnapshot, _: Break) -> source_session.Step:
    """A lease that ends after the offer is over breaks it once more."""
    return replace(offer, is_finished=False), []


def fail_undrained(load: LoadSnapshot, route: RouteRecord, _: Any) -> sink_session.Step:
    """A deadline ends the drain as well."""
    return load.with_route(msgspec.structs.replace(route, state=RouteState.FAILED)), []


def fail_again(load: LoadSnapshot, _: RouteRecord, __: Any) -> sink_session.Step:
    """A refusal after the end is reported once more."""
    return msgspec.structs.replace(load, is_finished=False), []


def accept_unverified(
    load: LoadSnapshot, route: RouteRecord, event: ReadCompleted
) -> sink_session.Step:
    """A direct read that is complete is taken as valid, without a verdict."""
    return load.with_route(msgspec.structs.replace(route, state=RouteState.VALID)), []


def drained_is_sent(offer: OfferSnapshot, event: StreamDrained) -> source_session.Step:
    """A stream that ended is taken as one that sent everything."""
    return _SOURCE[OPEN, StreamSent](offer, StreamSent(event.consumer))


def tell_early(offer: OfferSnapshot, event: Grown) -> source_session.Step:
    """Growth is told when the step was launched, not when its event has completed."""
    return _SOURCE[PENDING, Grown](offer, Grown(event.open_tokens + 1))


def grow_again(offer: OfferSnapshot, event: Grown) -> source_session.Step:
    """A span of a broken offer opens all the same."""
    return replace(offer, state=PENDING, open_tokens=event.open_tokens, is_finished=False), []


def open_anew(offer: OfferSnapshot, event: Break) -> source_session.Step:
    """A preempted prefill goes on under its nonce: what was open is not any more."""
    return replace(offer, open_tokens=0), []


def done_early(offer: OfferSnapshot, event: ReleaseArrived) -> source_session.Step:
    """The last claim that is complete ends the offer, whatever is computed yet."""
    offer, actions = _SOURCE[PENDING, ReleaseArrived](offer, event)
    is_done = bool(offer.claims) and all(claim.is_complete for claim in offer.claims.values())
    return (replace(offer, state=DONE) if is_done else offer), actions


def grant_protocol_1(offer: OfferSnapshot, pull: PullArrived) -> source_session.Step:
    """A sink that does not know that offers grow is granted one that does."""
    return _SOURCE[PENDING, PullArrived](offer, msgspec.structs.replace(pull, grows=True))


def read_ahead(load: LoadSnapshot, route: RouteRecord, event: GrantArrived) -> sink_session.Step:
    """A Grant is for all tokens, whatever it says."""
    return _SINK[RouteState.ASKED, GrantArrived](load, route, GrantArrived(event.source))


def read_on(load: LoadSnapshot, route: RouteRecord, event: GrantArrived) -> sink_session.Step:
    """What opens is read at once, also while the read before runs, and from the start."""
    route = msgspec.structs.replace(route, open_tokens=event.open_tokens)
    route = msgspec.structs.replace(route, asked_tokens=event.open_tokens)
    return load.with_route(route), [StartRead(event.source, 0, event.open_tokens)]


def first_is_all(load: LoadSnapshot, route: RouteRecord, event: ReadCompleted) -> sink_session.Step:
    """The first read that is complete completes the route."""
    return load.with_route(msgspec.structs.replace(route, state=RouteState.RELEASING)), [
        SendRelease(route.source)
    ]


def grant_all(offer: OfferSnapshot, event: Grown) -> source_session.Step:
    """Everything is said to be open with the second span."""
    return _SOURCE[PENDING, Grown](offer, Grown(ALL))


@dataclass(frozen=True)
class Fault:
    """What is planted, and the first violation that it leads to, those in ``ignoring`` aside."""

    scenario: Scenario
    finds: str
    ignoring: frozenset[str] = frozenset()


def _planted(scenario: Scenario, **fault: Any) -> Scenario:  # noqa: ANN401
    return replace(scenario, allows_protocol_errors=True, **fault)


RELEASING, READING, DRAINING = RouteState.RELEASING, RouteState.READING, RouteState.DRAINING

_FIRST = replace(ONE_GROWING, num_spans=2)

FAULTS = {
    "growth: it is told before the step's event": Fault(
        _planted(_FIRST, offer_session=offer_with({(PENDING, Grown): tell_early})), STALE
    ),
    "growth: the first span opens everything": Fault(
        _planted(ONE_GROWING, offer_session=offer_with({(PENDING, Grown): grant_all})), STALE
    ),
    "growth: a broken offer grows": Fault(
        _planted(_FIRST, offer_session=offer_with({(BROKEN, Grown): grow_again})), STALE
    ),
    "growth: a preempted prefill keeps its nonce": Fault(
        _planted(
            _FIRST,
            may_end_first=True,
            offer_session=offer_with({(PENDING, Break): open_anew, (OPEN, Break): nothing}),
        ),
        STALE,
    ),
    "growth: an offer is done while it is computed": Fault(
        _planted(FIRST_GROWING, offer_session=offer_with({(PENDING, ReleaseArrived): done_early})),
        COMPUTED,
    ),
    "growth: a sink of protocol 1 is granted a part": Fault(
        _planted(
            BOTH_PROTOCOLS, offer_session=offer_with({(PENDING, PullArrived): grant_protocol_1})
        ),
        STALE,
    ),
    "growth: a sink is ahead": Fault(
        _planted(_FIRST, load_session=load_with({(RouteState.ASKED, GrantArrived): read_ahead})),
        STALE,
    ),
    "growth: a sink reads twice at a time": Fault(
        _planted(_FIRST, load_session=load_with({(READING, GrantArrived): read_on})), WRITES
    ),
    "growth: a sink takes its first read for all": Fault(
        _planted(_FIRST, load_session=load_with({(READING, ReadCompleted): first_is_all})), STALE
    ),
    "growth: a chunk is packed before its tokens are open": Fault(
        _planted(STREAM_GROWING, heeds_open=False), STALE
    ),
    "finality: a late ready event re-opens a broken offer": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            offer_session=offer_with({(BROKEN, ReadyCompleted): reopen}),
        ),
        STALE,
    ),
    "ready event: a Pull is granted in PENDING": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            offer_session=offer_with({(PENDING, PullArrived): grant_early}),
        ),
        STALE,
    ),
    "event before Release: it leaves with the launch": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            load_session=load_with(
                {
                    (RouteState.ASKED, GrantArrived): release_at_once,
                    (RELEASING, ReadCompleted): nothing,
                    (RouteState.VALID, ReadCompleted): nothing,
                }
            ),
        ),
        WRITES,
    ),
    "one read per rank: a second Grant while reading reads again": Fault(
        _planted(TWO_RANKS_DIRECT, load_session=load_with({(READING, GrantArrived): read_again})),
        WRITES,
    ),
    "one read per rank: a second Grant while releasing reads again": Fault(
        _planted(TWO_RANKS_DIRECT, load_session=load_with({(RELEASING, GrantArrived): read_again})),
        WRITES,
    ),
    "consumer set: a duplicated Release counts twice": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            offer_session=offer_with({(OPEN, ReleaseArrived): count_releases}),
        ),
        TOO_EARLY,
    ),
    "consumer set: a counter cannot tell a repeated Release from a late one": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            offer_session=offer_with(
                {(OPEN, ReleaseArrived): count_releases, (DONE, ReleaseArrived): valid_by_clock}
            ),
        ),
        STALE,
        frozenset({TOO_EARLY, TWO_VERDICTS}),
    ),
    "first verdict: a repeated Release is judged anew": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            offer_session=offer_with({(DONE, ReleaseArrived): forget_verdict}),
        ),
        TWO_VERDICTS,
    ),
    "incarnation: the sink takes messages for its earlier life": Fault(
        # Such a sink also releases without a Grant of its own, and is heard again after it.
        _planted(TWO_LIVES_DIRECT, checks_incarnation=False),
        STALE,
        frozenset({TWO_VERDICTS}),
    ),
    "incarnation: the source takes two lives of a sink for one": Fault(
        _planted(TWO_LIVES_DIRECT, keys_consumers_by_incarnation=False), STALE
    ),
    "nonce: offers are looked up by request id": Fault(
        _planted(TWO_OFFERS_DIRECT, keys_offers_by_nonce=False),
        STALE,
        frozenset({TOO_EARLY, TWO_VERDICTS}),
    ),
    "tokens: the digest is not compared": Fault(
        _planted(OTHER_TOKENS_DIRECT, binds_tokens=False), STALE
    ),
    "state, not clock: valid because the lease has not run out": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            offer_session=offer_with({(BROKEN, ReleaseArrived): valid_by_clock}),
        ),
        STALE,
    ),
    "verdict: a complete direct read needs none": Fault(
        _planted(
            TWO_RANKS_DIRECT, load_session=load_with({(READING, ReadCompleted): accept_unverified})
        ),
        STALE,
    ),
    "board: an offer's end is shown after its blocks were given back": Fault(
        _planted(TWO_RANKS_DIRECT, has_board=True, is_board_late=True),
        STALE,
        frozenset({TWO_VERDICTS}),
    ),
    "board: an offer is shown before it is open": Fault(
        _planted(TWO_RANKS_DIRECT, has_board=True, board_states=(PENDING, OPEN)),
        STALE,
        frozenset({TWO_VERDICTS}),
    ),
    "stuck IO thread: the board is left as it was": Fault(
        _planted(TWO_RANKS_DIRECT, has_board=True, may_end_first=True, shows_ended=True),
        STALE,
        frozenset({TWO_VERDICTS}),
    ),
    "stuck IO thread: it answers without a look at what the engine has ended": Fault(
        _planted(TWO_RANKS_DIRECT, may_end_first=True, heeds_ends=False), STALE
    ),
    "stuck IO thread: it sends chunks without a look at what the engine has ended": Fault(
        _planted(TWO_RANKS_STREAM, may_end_first=True, heeds_ends=False), STALE
    ),
    "board: the second look comes before the read is complete": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            has_board=True,
            load_session=load_with(
                {
                    (RouteState.ASKED, GrantArrived): release_at_once,
                    (RELEASING, ReadCompleted): nothing,
                    (RouteState.VALID, ReadCompleted): nothing,
                }
            ),
        ),
        WRITES,
        frozenset({TWO_VERDICTS}),
    ),
    "stream: a chunk is sent after the offer broke": Fault(
        _planted(TWO_RANKS_STREAM, offer_session=offer_with({(BROKEN, ChunkPacked): send_anyway})),
        STALE,
    ),
    "stream: an ended stream counts as sent": Fault(
        _planted(
            ONE_RANK_STREAM, offer_session=offer_with({(OPEN, StreamDrained): drained_is_sent})
        ),
        TOO_EARLY,
    ),
    "drain at the source: finished while a pack runs": Fault(
        _planted(TWO_RANKS_STREAM, offer_session=offer_with({(OPEN, Break): forget_streams})),
        PACKS,
    ),
    "drain at the sink: a deadline ends it": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            load_session=load_with({(DRAINING, DeadlinePassed): fail_undrained}),
        ),
        WRITES,
    ),
    "once: the source reports a broken offer again": Fault(
        _planted(TWO_RANKS_DIRECT, offer_session=offer_with({(BROKEN, Break): finish_again})),
        TWICE_SENT,
    ),
    "once: the sink reports a failed load again": Fault(
        _planted(
            TWO_RANKS_DIRECT,
            load_session=load_with({(RouteState.FAILED, GrantArrived): fail_again}),
        ),
        TWICE_RECEIVED,
    ),
    "exit: no deadline while a Release waits for its verdict": Fault(
        _planted(TWO_RANKS_DIRECT, load_session=load_with({(RELEASING, DeadlinePassed): None})),
        NO_EXIT,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    result = explore(fault.scenario, fault.ignoring)
    assert result.violation == fault.finds
    assert result.trace
