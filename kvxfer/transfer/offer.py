"""What one source rank remembers of one offer: an immutable value that a session moves along."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.session import OfferState, PullArrived
from kvxfer.transfer.wire import Consumer, Reason


class StreamState(enum.Enum):
    """What the transport does for one consumer. RUNNING and STOPPING may touch the pool."""

    NONE = "none"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Ruling:
    """The first and only verdict of a consumer; ``reason`` None iff valid."""

    valid: bool
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Share:
    """One consumer's part in an offer. ``granted``: it has pulled and was not refused."""

    consumer: Consumer
    granted: bool = False
    stream: StreamState = StreamState.NONE
    ruling: Ruling | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The ranks of one sink engine life that read this source rank."""

    incarnation: bytes
    ranks: frozenset[RankId]


@dataclass(frozen=True, slots=True)
class Gone:
    """A sink engine life whose claim was dropped, or that cancelled before it had one."""

    incarnation: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class OfferSnapshot:
    """Everything an :class:`OfferSession` knows; immutable and hashable. ``reason``: why it is
    BROKEN.
    """

    nonce: bytes
    digest: bytes | None
    state: OfferState = OfferState.PENDING
    reason: Reason | None = None
    parked: tuple[PullArrived, ...] = ()
    claims: tuple[Claim, ...] = ()
    gone: tuple[Gone, ...] = ()
    shares: tuple[Share, ...] = ()
    is_finished: bool = False

    def share(self, consumer: Consumer) -> Share:
        """The consumer's share; an empty one if it was never heard of."""
        return next((s for s in self.shares if s.consumer == consumer), Share(consumer))

    def claim(self, incarnation: bytes) -> Claim | None:
        """The live claim of a sink engine."""
        return next((c for c in self.claims if c.incarnation == incarnation), None)

    def gone_reason(self, incarnation: bytes) -> Reason | None:
        """Why this sink engine may not read any more; None if it may."""
        return next((g.reason for g in self.gone if g.incarnation == incarnation), None)

    def is_complete(self, claim: Claim) -> bool:
        """Every rank of the claim has a valid verdict."""
        shares = (self.share(Consumer(claim.incarnation, rank)) for rank in claim.ranks)
        return all(share.ruling is not None and share.ruling.valid for share in shares)

    def with_share(self, share: Share) -> OfferSnapshot:
        """A copy in which this share replaces its consumer's, or is added."""
        if all(s.consumer != share.consumer for s in self.shares):
            return replace(self, shares=(*self.shares, share))
        shares = (share if s.consumer == share.consumer else s for s in self.shares)
        return replace(self, shares=tuple(shares))
