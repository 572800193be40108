"""The table of the acquaintance with a source engine, by every order of what can happen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kvxfer.connector.peer_session import (
    TABLE,
    Answered,
    Attach,
    Attached,
    Awaited,
    DeadlinePassed,
    End,
    Ended,
    Examine,
    Examined,
    Failure,
    LifeHeard,
    Match,
    Matched,
    PeerAction,
    PeerEvent,
    PeerSnapshot,
    PeerState,
    Replace,
    SayHello,
    Serve,
    TryWires,
    Wanted,
    WiresTried,
    step,
)
from kvxfer.transfer.manifest import EngineManifest
from kvxfer.transfer.wire import Reason
from tests.builders import EngineShape, build_manifest

LIFE, NEXT_LIFE = b"1" * 16, b"2" * 16


def engine(engine_id: str, life: bytes) -> EngineManifest:
    manifest = build_manifest(EngineShape(tp_size=3), engine_id)
    ranks = tuple(
        replace(entry, control_endpoint=f"tcp://127.0.0.1:{1000 + number}")
        for number, entry in enumerate(manifest.ranks)
    )
    return replace(manifest, incarnation=life, ranks=ranks)


KNOWN, ANEW, OTHER = engine("a", LIFE), engine("a", NEXT_LIFE), engine("b", LIFE)
DOOR, SECOND, THIRD = (entry.control_endpoint for entry in KNOWN.ranks)
LOST = Failure(Reason.PEER_LOST, "lost")
STRANGERS = {"not_allowed": OTHER, "peer_lost": ANEW}
"""Who answers where a rank of the engine is expected, and what that ends the peer for."""


def alone(manifest: EngineManifest, endpoint: str) -> EngineManifest:
    """What a rank says of itself."""
    own = tuple(entry for entry in manifest.ranks if entry.control_endpoint == endpoint)
    return replace(manifest, ranks=own)


AT_ANY_TIME: tuple[PeerEvent, ...] = (
    Wanted(),
    *(Answered(DOOR, manifest) for manifest in (KNOWN, ANEW)),
    *(Answered(at, alone(who, at)) for at in (SECOND, THIRD) for who in (KNOWN, ANEW, OTHER)),
    *(LifeHeard(life) for life in (LIFE, NEXT_LIFE)),
    DeadlinePassed(LOST),
    Ended(LOST),
)
FOLLOWS: dict[type, PeerEvent] = {
    Examine: Examined(KNOWN),
    Match: Matched(KNOWN.ranks),
    TryWires: WiresTried(),
    Attach: Attached(),
}
"""What comes of an action, at once or later, and of nothing else."""

Here = tuple[PeerSnapshot, frozenset[type]]


def steps() -> Iterator[tuple[Here, PeerEvent, Here, list[PeerAction]]]:
    """Every step from every reachable state, each once."""
    todo: list[Here] = [(PeerSnapshot("a", DOOR), frozenset())]
    seen = {_name(todo[0])}
    while todo:
        here = todo.pop()
        peer, due = here
        for event in (*AT_ANY_TIME, *(FOLLOWS[action] for action in due)):
            after, actions = step(peer, event)
            left = frozenset(action for action in due if FOLLOWS[action] is not event)
            there = after, left | {type(action) for action in actions if type(action) in FOLLOWS}
            yield here, event, there, actions
            if _name(there) not in seen:
                seen.add(_name(there))
                todo.append(there)


def _name(here: Here) -> str:
    return repr((here[0], sorted(each.__name__ for each in here[1])))


ALL = list(steps())


def test_every_state_and_row_is_reached() -> None:
    assert {there[0].state for _, _, there, _ in ALL} == set(PeerState)
    assert {(here[0].state, type(event)) for here, event, _, _ in ALL} >= set(TABLE)
    assert len({_name(here) for here, *_ in ALL}) > 20


def test_it_is_ready_only_when_every_rank_has_said_so_and_all_wires_were_tried() -> None:
    for here, event, there, actions in ALL:
        before, after = here[0], there[0]
        if Attach() in actions:
            assert after.state is PeerState.CHECKING
            assert dict(after.confirmed) == {e.control_endpoint: e for e in KNOWN.ranks}
            assert Attach not in here[1]
        for replaced in (action for action in actions if isinstance(action, Replace)):
            is_door = replaced.entry.control_endpoint == DOOR
            assert isinstance(event, Matched if is_door else Answered)
            assert replaced.entry in after.confirmed.values()
        if after.state is PeerState.READY is not before.state:
            assert event == Attached()
            assert actions == [Serve(is_sure=False)]


def test_who_is_over_stays_so_and_has_ended_once() -> None:
    for here, _, there, actions in ALL:
        before, after = here[0], there[0]
        ends = [action for action in actions if isinstance(action, End)]
        assert len(ends) == (after.state is PeerState.OVER is not before.state)
        assert not ends or actions == ends
        if before.state is PeerState.OVER:
            assert (after, actions) == (before, [])
        elif after.state is PeerState.OVER:
            assert after.was_ready is (before.state is PeerState.READY)


def test_a_front_door_is_asked_once_at_a_time() -> None:
    for here, _, there, actions in ALL:
        if SayHello(DOOR) in actions:
            assert here[0].awaited is Awaited.NOTHING
            assert there[0].awaited is Awaited.ANSWER
    asked = [event for _, event, _, actions in ALL if SayHello(SECOND) in actions]
    assert {type(event) for event in asked} == {Matched}


def test_nothing_is_done_before_what_was_said_was_examined() -> None:
    for here, event, _, actions in ALL:
        if here[0].manifest is None and not isinstance(event, Examined):
            assert all(isinstance(action, SayHello | Examine | End) for action in actions)


@pytest.mark.parametrize("reason", list(STRANGERS))
@pytest.mark.parametrize("state", [PeerState.TRYING, PeerState.CHECKING])
def test_a_rank_that_is_anothers_ends_it(state: PeerState, reason: str) -> None:
    told = [
        actions
        for here, event, _, actions in ALL
        if here[0].state is state
        and SECOND in here[0].unconfirmed
        and event == Answered(SECOND, alone(STRANGERS[reason], SECOND))
    ]
    assert told
    for (end,) in told:
        assert isinstance(end, End)
        assert end.failure.reason.value == reason


def test_another_life_is_met_anew_by_who_waits_for_it() -> None:
    told = [
        actions
        for here, event, _, actions in ALL
        if here[0].state is PeerState.READY and event == Answered(DOOR, ANEW)
    ]
    assert told
    assert all(isinstance(end, End) and end.is_anew for (end,) in told)


@pytest.mark.parametrize(
    ("state", "reason", "detail"),
    [
        (PeerState.MEETING, "peer_lost", "lost"),
        (PeerState.TRYING, "transport", "did not end in time"),
        (PeerState.CHECKING, "peer_lost", "expected its ranks to confirm"),
        (PeerState.READY, "peer_lost", "lost"),
    ],
)
def test_a_deadline_says_what_did_not_come(state: PeerState, reason: str, detail: str) -> None:
    told = [
        actions
        for here, event, _, actions in ALL
        if here[0].state is state and event == DeadlinePassed(LOST)
    ]
    assert told
    for (end,) in told:
        assert isinstance(end, End)
        assert end.failure.reason.value == reason
        assert detail in end.failure.detail
