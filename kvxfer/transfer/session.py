"""States, events and actions of the two sessions: an offer on a source rank, a load on a sink rank.

Only records are here. The tables that turn (state, event) into (state, actions) are in
:mod:`kvxfer.transfer.source_session` (``OfferSession``) and :mod:`kvxfer.transfer.sink_session`
(``LoadSession``). An event says what has happened, an action what to do about it; a session does
nothing by itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import Consumer, Reason

# ------------ source: one offer at one source rank


class OfferState(enum.Enum):
    PENDING = "pending"
    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"


class Wire(enum.Enum):
    """How a consumer reads: by itself (direct; null routes read nothing), or from sent chunks."""

    DIRECT = "direct"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class ReadyCompleted:
    """The ready event has completed: the offered KV is whole."""


@dataclass(frozen=True, slots=True)
class PullArrived:
    consumer: Consumer
    claim: frozenset[RankId]
    digest: bytes
    wire: Wire


@dataclass(frozen=True, slots=True)
class ReleaseArrived:
    consumer: Consumer


@dataclass(frozen=True, slots=True)
class CancelArrived:
    """A sink engine gave up; ``reason`` is counted. ``digest``: of the offered tokens, as it knows
    them.
    """

    incarnation: bytes
    reason: Reason
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class ChunkPacked:
    """The transport packed a chunk into staging and asks whether it may go."""

    consumer: Consumer
    sequence: int


@dataclass(frozen=True, slots=True)
class StreamSent:
    """Every chunk of this consumer has been handed to the wire: it needs the pool no more."""

    consumer: Consumer


@dataclass(frozen=True, slots=True)
class StreamDrained:
    """After StopStream, or after a failure of the wire: nothing of this consumer touches the pool
    any more.
    """

    consumer: Consumer


@dataclass(frozen=True, slots=True)
class ClaimantLost:
    """A sink engine has been silent for too long; its claim is dropped."""

    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Break:
    """Lease expired, preempted, aborted, reset, shutdown: this side ends the offer."""

    reason: Reason


SourceEvent = (
    ReadyCompleted
    | PullArrived
    | ReleaseArrived
    | CancelArrived
    | ChunkPacked
    | StreamSent
    | StreamDrained
    | ClaimantLost
    | Break
)


@dataclass(frozen=True, slots=True)
class SendGrant:
    consumer: Consumer


@dataclass(frozen=True, slots=True)
class SendRefuse:
    consumer: Consumer
    reason: Reason


@dataclass(frozen=True, slots=True)
class SendVerdict:
    consumer: Consumer
    valid: bool
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class SendBroken:
    consumer: Consumer
    reason: Reason


@dataclass(frozen=True, slots=True)
class StartStream:
    consumer: Consumer


@dataclass(frozen=True, slots=True)
class StopStream:
    """Stop packing and sending for this consumer; answer with StreamDrained."""

    consumer: Consumer


@dataclass(frozen=True, slots=True)
class SendChunk:
    consumer: Consumer
    sequence: int


@dataclass(frozen=True, slots=True)
class DropChunk:
    consumer: Consumer
    sequence: int


@dataclass(frozen=True, slots=True)
class FinishedSending:
    """Report the request once: the engine may reuse its blocks. ``reason`` None: done; else why it
    broke.
    """

    reason: Reason | None


SourceAction = (
    SendGrant
    | SendRefuse
    | SendVerdict
    | SendBroken
    | StartStream
    | StopStream
    | SendChunk
    | DropChunk
    | FinishedSending
)

# ------------------------------------------------------------------ sink: one load on one sink rank


class RouteState(enum.Enum):
    """One route of a load."""

    __hash__ = object.__hash__  # each is there once; Enum's own is written in Python

    IDLE = "idle"
    ASKED = "asked"  # Pull sent
    READING = "reading"  # granted; something may write the destination blocks
    RELEASING = "releasing"  # direct: read complete, Release sent
    VALID = "valid"
    DRAINING = "draining"  # failed, and something may still write the destination blocks
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Start:
    """Send the Pulls."""


@dataclass(frozen=True, slots=True)
class GrantArrived:
    source: RankId


@dataclass(frozen=True, slots=True)
class RefuseArrived:
    source: RankId
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReadCompleted:
    """The read of a route is seen complete on the host. ``certified``: every chunk came from an
    open offer (streams).
    """

    source: RankId
    certified: bool


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The read broke off; nothing of it is in flight any more."""

    source: RankId
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReadDrained:
    """After StopRead: nothing of this route can write the destination blocks any more."""

    source: RankId


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    source: RankId
    valid: bool
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class BrokenArrived:
    source: RankId
    reason: Reason


@dataclass(frozen=True, slots=True)
class RetryDue:
    """Send the last message of this route again (the connection may have lost it)."""

    source: RankId


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    source: RankId


@dataclass(frozen=True, slots=True)
class SourceLost:
    source: RankId


@dataclass(frozen=True, slots=True)
class Abort:
    """The engine no longer wants the load (aborted, or another route failed it)."""

    reason: Reason


SinkEvent = (
    Start
    | GrantArrived
    | RefuseArrived
    | ReadCompleted
    | ReadFailed
    | ReadDrained
    | VerdictArrived
    | BrokenArrived
    | RetryDue
    | DeadlinePassed
    | SourceLost
    | Abort
)


@dataclass(frozen=True, slots=True)
class SendPull:
    source: RankId


@dataclass(frozen=True, slots=True)
class StartRead:
    source: RankId


@dataclass(frozen=True, slots=True)
class StopRead:
    source: RankId


@dataclass(frozen=True, slots=True)
class SendRelease:
    source: RankId


@dataclass(frozen=True, slots=True)
class SendCancel:
    source: RankId
    reason: Reason


@dataclass(frozen=True, slots=True)
class FinishedRecving:
    """Report the load once. ``reason`` None: all routes valid; else what failed it first."""

    reason: Reason | None


SinkAction = SendPull | StartRead | StopRead | SendRelease | SendCancel | FinishedRecving
