"""The session with one source engine, from the first Hello to the last message: no sockets, no
clocks.

    MEETING --its front door says who it is--> TRYING: Keep and Cancel can be sent
    TRYING --every wire was tried--> CHECKING
    CHECKING --every rank that is read has said the same of itself--> READY: Pulls too
    any state --refused, silent, gone--> OVER, for ever: the next contact makes a new peer

The ranks are asked who they are while the wires are tried, because trials carry no KV. So CHECKING
often ends as it begins. :data:`TABLE` turns a state and an event into a state and actions, and
:mod:`kvxfer.connector.peers` performs the actions. An event that the table does not have for a
state changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvxfer.connector.access import check_rank
from kvxfer.transfer.manifest import EngineManifest, RankManifest
from kvxfer.transfer.wire import Reason


class PeerState(enum.Enum):
    """The state of the session."""

    MEETING = "meeting"
    TRYING = "trying"
    CHECKING = "checking"
    READY = "ready"
    OVER = "over"


class Awaited(enum.Enum):
    """What the deadline waits for."""

    NOTHING = "nothing"
    ANSWER = "answer"
    """Of the front door, within ``connect_timeout_s``."""
    REST = "rest"
    """Trials, and the answers of the ranks."""


class Failure(msgspec.Struct, frozen=True):
    """Why a peer cannot be used."""

    reason: Reason
    detail: str


# ------------------------------------------------------------------ events


class Wanted(msgspec.Struct, frozen=True):
    """A load waits for this engine in another life than the one that is known."""


class Answered(msgspec.Struct, frozen=True):
    """A listener has sent its manifest: the front door that of all ranks, another rank its own."""

    endpoint: str
    manifest: EngineManifest


class Examined(msgspec.Struct, frozen=True):
    """The manifest was examined and may be true."""

    manifest: EngineManifest


class Matched(msgspec.Struct, frozen=True):
    """KV of the engine can be used here. ``ranks``: the source ranks that will get a Pull."""

    ranks: tuple[RankManifest, ...]


class LifeHeard(msgspec.Struct, frozen=True):
    """A rank has stated the life (incarnation) of its engine."""

    incarnation: bytes


class WiresTried(msgspec.Struct, frozen=True):
    """A wire is chosen for each rank that is read."""


class Attached(msgspec.Struct, frozen=True):
    """All chosen wires can be read from."""


class DeadlinePassed(msgspec.Struct, frozen=True):
    """What the deadline waits for has not come. ``failure``: the one to report for a silent front
    door.
    """

    failure: Failure


class Ended(msgspec.Struct, frozen=True):
    """The peer cannot be used any more, for a reason found outside of the session."""

    failure: Failure


PeerEvent = (
    Wanted
    | Answered
    | Examined
    | Matched
    | LifeHeard
    | WiresTried
    | Attached
    | DeadlinePassed
    | Ended
)

# ------------------------------------------------------------------ actions


class SayHello(msgspec.Struct, frozen=True):
    """Send Hello to one of its endpoints."""

    endpoint: str


class Examine(msgspec.Struct, frozen=True):
    """Check the engine's manifest, before it is used."""

    manifest: EngineManifest


class Serve(msgspec.Struct, frozen=True):
    """Call every waiter whose need this state meets. ``is_sure``: the engine has just stated its
    life, so offers of other lives are stale.
    """

    is_sure: bool


class Match(msgspec.Struct, frozen=True):
    """Check that its KV can be used here, and plan what this rank reads."""


class TryWires(msgspec.Struct, frozen=True):
    """Time the wires to every source rank that is read here."""


class Replace(msgspec.Struct, frozen=True):
    """This rank has answered: another peer that was known at its endpoint is not there any more."""

    entry: RankManifest


class Attach(msgspec.Struct, frozen=True):
    """Attach the chosen wires."""


class End(msgspec.Struct, frozen=True):
    """Tell the loads and waiters; close connections, mappings and what trials have opened.
    ``is_anew``: waiters wait for the engine's next life instead.
    """

    failure: Failure
    is_anew: bool = False


PeerAction = SayHello | Examine | Serve | Match | TryWires | Replace | Attach | End

# ------------------------------------------------------------------ the table


@dataclass(frozen=True, slots=True)
class PeerSnapshot:
    """What the table knows of the engine whose front door is ``endpoint``.

    ``manifest``: set from TRYING on. ``unconfirmed``, ``confirmed``: for the ranks that will be
    read, by control endpoint, what the front door says of them and what they have said themselves.
    ``was_ready``: whether a peer that is OVER was READY.
    """

    engine_id: str
    endpoint: str
    state: PeerState = PeerState.MEETING
    awaited: Awaited = Awaited.NOTHING
    manifest: EngineManifest | None = None
    unconfirmed: Mapping[str, RankManifest] = field(default_factory=dict)
    confirmed: Mapping[str, RankManifest] = field(default_factory=dict)
    was_ready: bool = False

    def is_replaced_by(self, other: PeerSnapshot, entry: RankManifest) -> bool:
        """Whether this rank of the other peer listens where this peer has heard another, or the
        same one say something else. Under two names of its host an engine says the same.
        """
        known = self.confirmed.get(entry.control_endpoint)
        if known is None or self.manifest is None or other.manifest is None:
            return False
        return known != entry or self.manifest.incarnation != other.manifest.incarnation


Step = tuple[PeerSnapshot, list[PeerAction]]
Handler = Callable[[PeerSnapshot, Any], Step]

_ANEW = Failure(Reason.PEER_LOST, "the engine was started anew")


def _greet(peer: PeerSnapshot, _: Wanted) -> Step:
    if peer.awaited is Awaited.ANSWER:
        return peer, []
    return replace(peer, awaited=Awaited.ANSWER), [SayHello(peer.endpoint)]


def _examine(peer: PeerSnapshot, event: Answered) -> Step:
    return replace(peer, awaited=Awaited.NOTHING), [Examine(event.manifest)]


def _get_to_know(peer: PeerSnapshot, event: Examined) -> Step:
    known = replace(peer, state=PeerState.TRYING, awaited=Awaited.REST, manifest=event.manifest)
    return known, [Serve(is_sure=True), Match()]


def _ask_ranks(peer: PeerSnapshot, event: Matched) -> Step:
    """The front door has already answered for its own rank."""
    entries = {entry.control_endpoint: entry for entry in event.ranks}
    confirmed = {at: entry for at, entry in entries.items() if at == peer.endpoint}
    unconfirmed = {at: entry for at, entry in entries.items() if at != peer.endpoint}
    actions: list[PeerAction] = [Replace(entry) for entry in confirmed.values()]
    actions += [SayHello(endpoint) for endpoint in unconfirmed]
    return replace(peer, confirmed=confirmed, unconfirmed=unconfirmed), [*actions, TryWires()]


def _rank_answered(peer: PeerSnapshot, event: Answered) -> Step:
    entry = peer.unconfirmed.get(event.endpoint)  # a second answer of the front door has none
    if entry is None or peer.manifest is None:
        return peer, []
    said = event.manifest
    if said.engine_id == peer.engine_id and said.incarnation != peer.manifest.incarnation:
        return _end(peer, Ended(_ANEW))
    try:
        check_rank(peer.manifest, entry, said)
    except PermissionError as e:
        return _end(peer, Ended(Failure(Reason.NOT_ALLOWED, str(e))))
    peer = replace(
        peer,
        unconfirmed={at: e for at, e in peer.unconfirmed.items() if at != event.endpoint},
        confirmed={**peer.confirmed, event.endpoint: entry},
    )
    return peer, [Replace(entry), *_if_complete(peer)]


def _wires_tried(peer: PeerSnapshot, _: WiresTried) -> Step:
    peer = replace(peer, state=PeerState.CHECKING)
    return peer, _if_complete(peer)


def _if_complete(peer: PeerSnapshot) -> list[PeerAction]:
    is_complete = peer.state is PeerState.CHECKING and not peer.unconfirmed
    return [Attach()] if is_complete else []


def _be_ready(peer: PeerSnapshot, _: Attached) -> Step:
    ready = replace(peer, state=PeerState.READY, awaited=Awaited.NOTHING)
    return ready, [Serve(is_sure=False)]


def _answered_again(peer: PeerSnapshot, event: Answered) -> Step:
    if event.endpoint != peer.endpoint:
        return peer, []
    if peer.manifest is not None and event.manifest.incarnation != peer.manifest.incarnation:
        return _over(peer), [End(_ANEW, is_anew=True)]
    return replace(peer, awaited=Awaited.NOTHING), [Serve(is_sure=True)]


def _life_heard(peer: PeerSnapshot, event: LifeHeard) -> Step:
    if peer.manifest is None or event.incarnation == peer.manifest.incarnation:
        return peer, []
    return _end(peer, Ended(_ANEW))


def _trials_late(peer: PeerSnapshot, _: DeadlinePassed) -> Step:
    detail = "the trials of its wires did not end in time"
    return _end(peer, Ended(Failure(Reason.TRANSPORT, detail)))


def _ranks_silent(peer: PeerSnapshot, event: DeadlinePassed) -> Step:
    silent = ", ".join(peer.unconfirmed)
    detail = f"{silent}: expected its ranks to confirm what its front door says, got nothing"
    return _end(peer, Ended(Failure(event.failure.reason, detail)))


def _end(peer: PeerSnapshot, event: Ended | DeadlinePassed) -> Step:
    return _over(peer), [End(event.failure)]


def _over(peer: PeerSnapshot) -> PeerSnapshot:
    was_ready = peer.state is PeerState.READY
    return replace(peer, state=PeerState.OVER, awaited=Awaited.NOTHING, was_ready=was_ready)


TABLE: Mapping[tuple[PeerState, type], Handler] = {
    (PeerState.MEETING, Wanted): _greet,
    (PeerState.MEETING, Answered): _examine,
    (PeerState.MEETING, Examined): _get_to_know,
    (PeerState.MEETING, DeadlinePassed): _end,
    (PeerState.MEETING, Ended): _end,
    (PeerState.TRYING, Matched): _ask_ranks,
    (PeerState.TRYING, Answered): _rank_answered,
    (PeerState.TRYING, LifeHeard): _life_heard,
    (PeerState.TRYING, WiresTried): _wires_tried,
    (PeerState.TRYING, DeadlinePassed): _trials_late,
    (PeerState.TRYING, Ended): _end,
    (PeerState.CHECKING, Answered): _rank_answered,
    (PeerState.CHECKING, LifeHeard): _life_heard,
    (PeerState.CHECKING, Attached): _be_ready,
    (PeerState.CHECKING, DeadlinePassed): _ranks_silent,
    (PeerState.CHECKING, Ended): _end,
    (PeerState.READY, Wanted): _greet,
    (PeerState.READY, Answered): _answered_again,
    (PeerState.READY, LifeHeard): _life_heard,
    (PeerState.READY, DeadlinePassed): _end,
    (PeerState.READY, Ended): _end,
}


def step(peer: PeerSnapshot, event: PeerEvent) -> Step:
    """The peer after an event, and the actions to perform, in order."""
    handler = TABLE.get((peer.state, type(event)))
    return handler(peer, event) if handler is not None else (peer, [])
