"""The acquaintance with one source engine, from the first Hello to the last word: no sockets, no
clocks.

    MEETING --its front door says who it is--> TRYING: Keep and Cancel can be sent
    TRYING --every wire was tried--> CHECKING
    CHECKING --every rank that is read has said the same of itself--> READY: Pulls too
    any of them --refused, silent, gone--> OVER, for ever: the next contact makes a new peer

The ranks are asked while the wires are tried, because trials carry no KV: so CHECKING is often over
as it begins. What has happened is an event, what is to be done an action: :data:`TABLE` turns one
into the other, and :mod:`kvxfer.connector.peers` performs. What the table does not have for a state
changes nothing there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvxfer.connector.access import check_rank
from kvxfer.transfer.manifest import EngineManifest, RankManifest
from kvxfer.transfer.wire import Reason


class PeerState(enum.Enum):
    """How far the acquaintance has come."""

    MEETING = "meeting"
    TRYING = "trying"
    CHECKING = "checking"
    READY = "ready"
    OVER = "over"


class Awaited(enum.Enum):
    """What has to come before the deadline."""

    NOTHING = "nothing"
    ANSWER = "answer"
    """Of the front door, within ``connect_timeout_s``."""
    REST = "rest"
    """Trials, and the answers of the ranks."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a peer cannot be used."""

    reason: Reason
    detail: str


# ------------------------------------------------------------------ events


class PeerEvent:
    """What has happened to the acquaintance."""


@dataclass(frozen=True, slots=True)
class Wanted(PeerEvent):
    """Somebody waits for this engine in a life that it is not known in."""


@dataclass(frozen=True, slots=True)
class Answered(PeerEvent):
    """Who listens there says who it is: the front door for all ranks, another one for itself."""

    endpoint: str
    manifest: EngineManifest


@dataclass(frozen=True, slots=True)
class Examined(PeerEvent):
    """What it said was looked at and may be true."""

    manifest: EngineManifest


@dataclass(frozen=True, slots=True)
class Matched(PeerEvent):
    """Its KV can be used here; ``ranks`` are those that will be asked for anything."""

    ranks: tuple[RankManifest, ...]


@dataclass(frozen=True, slots=True)
class LifeHeard(PeerEvent):
    """A rank says in which life its engine is."""

    incarnation: bytes


@dataclass(frozen=True, slots=True)
class WiresTried(PeerEvent):
    """There is a choice for each rank that is read."""


@dataclass(frozen=True, slots=True)
class Attached(PeerEvent):
    """All chosen wires can be read from."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed(PeerEvent):
    """What is awaited has not come. ``failure``: what to say of a front door that is silent."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Ended(PeerEvent):
    """The peer cannot be used any more, as somebody has found."""

    failure: Failure


# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class SayHello:
    """Ask who listens at one of its endpoints."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Examine:
    """Look at what the engine says of itself, before anything is done with it."""

    manifest: EngineManifest


@dataclass(frozen=True, slots=True)
class Serve:
    """Tell everybody for whom the peer is far enough. ``is_sure``: the engine has just said in
    which life it is, so that offers of others are stale.
    """

    is_sure: bool


@dataclass(frozen=True, slots=True)
class Match:
    """See what of its KV is read here, if it can be used at all."""


@dataclass(frozen=True, slots=True)
class TryWires:
    """Time the wires to every source rank that is read here."""


@dataclass(frozen=True, slots=True)
class Replace:
    """This rank has answered: whoever was known where it listens is not there any more."""

    entry: RankManifest


@dataclass(frozen=True, slots=True)
class Attach:
    """Make the chosen wires ready to be read from."""


@dataclass(frozen=True, slots=True)
class End:
    """Tell everybody; let connections, mappings and what trials have opened go. ``is_anew``: who
    waits meets the engine's next life instead.
    """

    failure: Failure
    is_anew: bool = False


PeerAction = SayHello | Examine | Serve | Match | TryWires | Replace | Attach | End

# ------------------------------------------------------------------ the table


@dataclass(frozen=True, slots=True)
class PeerSnapshot:
    """What the table knows of the engine whose front door is ``endpoint``.

    ``manifest``: there from TRYING on. ``unconfirmed``, ``confirmed``: of the ranks that will be
    read, by control endpoint, what the front door says, and what they have said themselves.
    ``was_ready``: of one that is over.
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
    """The front door has said so already of the rank that it belongs to."""
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
    """What the peer is after an event, and what to do, in order."""
    handler = TABLE.get((peer.state, type(event)))
    return handler(peer, event) if handler is not None else (peer, [])
