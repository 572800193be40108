"""States, events and actions of the two sessions: an offer on a source rank, a load on a sink rank.

Only records are here. The tables that turn (state, event) into (state, actions) are in
:mod:`kvxfer.transfer.source_session` (``OfferSession``) and :mod:`kvxfer.transfer.sink_session`
(``LoadSession``). An event says what has happened, an action what to do about it; a session does
nothing by itself.
"""

from __future__ import annotations

import enum

import msgspec

from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import ALL
from kvxfer.transfer.wire import Consumer, Reason

# ------------ source: one offer at one source rank


class OfferState(enum.Enum):
    PENDING = "pending"  # its tokens are being computed; those before ``open_tokens`` can be read
    OPEN = "open"  # complete
    DONE = "done"
    BROKEN = "broken"


class Wire(enum.Enum):
    """How a consumer reads: by itself (direct; null routes read nothing), or from sent chunks."""

    DIRECT = "direct"
    STREAM = "stream"


class ReadyCompleted(msgspec.Struct, frozen=True):
    """The ready event has completed: the offered KV is whole."""


class Grown(msgspec.Struct, frozen=True):
    """A step's event has completed: the first ``open_tokens`` are whole, others are computed."""

    open_tokens: int


class PullArrived(msgspec.Struct, frozen=True):
    """``grows``: the consumer reads what is open while the rest is computed."""

    consumer: Consumer
    claim: frozenset[RankId]
    digest: bytes
    wire: Wire
    grows: bool = False


class ReleaseArrived(msgspec.Struct, frozen=True):
    consumer: Consumer


class CancelArrived(msgspec.Struct, frozen=True):
    """``reason`` is counted. ``digest``: of the offered tokens, as the sink engine knows them."""

    incarnation: bytes
    reason: Reason
    digest: bytes = b""


class ChunkPacked(msgspec.Struct, frozen=True):
    """The transport packed a chunk into staging and asks whether it may go."""

    consumer: Consumer
    sequence: int


class StreamSent(msgspec.Struct, frozen=True):
    """Every chunk of this consumer has been handed to the wire: it needs the pool no more."""

    consumer: Consumer


class StreamDrained(msgspec.Struct, frozen=True):
    """After StopStream or a failure of the wire: nothing of it touches the pool any more."""

    consumer: Consumer


class ClaimantLost(msgspec.Struct, frozen=True):
    """A sink engine has been silent for too long; its claim is dropped."""

    incarnation: bytes


class Break(msgspec.Struct, frozen=True):
    """Lease expired, preempted, aborted, reset, shutdown: this side ends the offer."""

    reason: Reason


SourceEvent = (
    ReadyCompleted
    | Grown
    | PullArrived
    | ReleaseArrived
    | CancelArrived
    | ChunkPacked
    | StreamSent
    | StreamDrained
    | ClaimantLost
    | Break
)


class SendGrant(msgspec.Struct, frozen=True):
    """Say what is open by now: again, each time that it is more."""

    consumer: Consumer


class SendRefuse(msgspec.Struct, frozen=True):
    consumer: Consumer
    reason: Reason


class SendVerdict(msgspec.Struct, frozen=True):
    consumer: Consumer
    valid: bool
    reason: Reason | None


class SendBroken(msgspec.Struct, frozen=True):
    consumer: Consumer
    reason: Reason


class StartStream(msgspec.Struct, frozen=True):
    consumer: Consumer


class GrowStream(msgspec.Struct, frozen=True):
    """More tokens are open to a stream that runs."""

    consumer: Consumer


class StopStream(msgspec.Struct, frozen=True):
    """Stop packing and sending for this consumer; answer with StreamDrained."""

    consumer: Consumer


class SendChunk(msgspec.Struct, frozen=True):
    consumer: Consumer
    sequence: int


class DropChunk(msgspec.Struct, frozen=True):
    consumer: Consumer
    sequence: int


class FinishedSending(msgspec.Struct, frozen=True):
    """Once: the engine may reuse its blocks. ``reason`` None: done; else why it broke."""

    reason: Reason | None


SourceAction = (
    SendGrant
    | SendRefuse
    | SendVerdict
    | SendBroken
    | StartStream
    | GrowStream
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


class Start(msgspec.Struct, frozen=True):
    """Begin the load: send the Pull of every route."""


class GrantArrived(msgspec.Struct, frozen=True):
    """``open_tokens``: those before it can be read; ALL: whatever this load wants."""

    source: RankId
    open_tokens: int = ALL


class RefuseArrived(msgspec.Struct, frozen=True):
    source: RankId
    reason: Reason


class ReadCompleted(msgspec.Struct, frozen=True):
    """The read that was started is seen complete on the host. ``certified``: all chunks came from
    an open offer (streams). ``is_verified``: what lies here is to be compared with digests of the
    source, which come with its verdict.
    """

    source: RankId
    certified: bool
    is_verified: bool = False


class ReadFailed(msgspec.Struct, frozen=True):
    """The read broke off; nothing of it is in flight any more."""

    source: RankId
    reason: Reason


class ReadDrained(msgspec.Struct, frozen=True):
    """After StopRead: nothing of this route can write the destination blocks any more."""

    source: RankId


class VerdictArrived(msgspec.Struct, frozen=True):
    source: RankId
    valid: bool
    reason: Reason | None


class BrokenArrived(msgspec.Struct, frozen=True):
    source: RankId
    reason: Reason


class RetryDue(msgspec.Struct, frozen=True):
    """Send the last message of this route again (the connection may have lost it)."""

    source: RankId


class DeadlinePassed(msgspec.Struct, frozen=True):
    source: RankId


class SourceLost(msgspec.Struct, frozen=True):
    source: RankId


class Abort(msgspec.Struct, frozen=True):
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


class SendPull(msgspec.Struct, frozen=True):
    source: RankId


class StartRead(msgspec.Struct, frozen=True):
    """Read tokens ``[token_lo, token_hi)``, as far as the load wants them."""

    source: RankId
    token_lo: int = 0
    token_hi: int = ALL


class StopRead(msgspec.Struct, frozen=True):
    source: RankId


class SendRelease(msgspec.Struct, frozen=True):
    source: RankId


class SendCancel(msgspec.Struct, frozen=True):
    source: RankId
    reason: Reason


class FinishedRecving(msgspec.Struct, frozen=True):
    """Report the load once. ``reason`` None: all routes valid; else what failed it first."""

    reason: Reason | None


SinkAction = SendPull | StartRead | StopRead | SendRelease | SendCancel | FinishedRecving
