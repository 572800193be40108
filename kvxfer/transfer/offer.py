"""What one source rank remembers of one offer: an immutable value that a session moves along.

What a peer can make it remember is bounded by ``MAX_LIVES`` and ``MAX_CONSUMERS``, and looked up by
name: one hostile message costs no more than an honest one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvxfer.transfer.manifest import MAX_RANKS, RankId
from kvxfer.transfer.session import OfferState, PullArrived
from kvxfer.transfer.wire import Consumer, Reason

MAX_LIVES = 64
"""Sink engine lives that one offer hears of: those that claimed it, and those that cancelled."""
MAX_CONSUMERS = MAX_RANKS
"""Consumers that one offer serves: as many as the largest engine has ranks."""


class StreamState(enum.Enum):
    """What the transport does for one consumer. RUNNING and STOPPING may touch the pool."""

    NONE = "none"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Share:
    """The part in an offer of one consumer whose Pull was granted.

    ``is_valid``: it has its valid verdict, for ever. Invalid ones follow from what is final (the
    offer's end, the engine's being gone), so they are not kept.
    """

    consumer: Consumer
    stream: StreamState = StreamState.NONE
    is_valid: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """The ranks of one sink engine life that read this source rank.

    ``waiting``: those of them without a valid verdict; none are left when the claim is complete.
    """

    incarnation: bytes
    ranks: frozenset[RankId]
    waiting: frozenset[RankId]

    @property
    def is_complete(self) -> bool:
        """Every rank of the claim has a valid verdict."""
        return not self.waiting


@dataclass(frozen=True, slots=True)
class Gone:
    """A sink engine life whose claim was dropped, or that cancelled before it had one."""

    incarnation: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class OfferSnapshot:
    """Everything an :class:`OfferSession` knows; immutable and hashable. ``reason``: why it is
    BROKEN.

    The mappings are never changed, only replaced; what they hold is compared, and left out of the
    hash.
    """

    nonce: bytes
    digest: bytes | None
    state: OfferState = OfferState.PENDING
    reason: Reason | None = None
    parked: Mapping[Consumer, PullArrived] = field(default_factory=dict, hash=False)
    claims: tuple[Claim, ...] = ()
    gone: tuple[Gone, ...] = ()
    shares: Mapping[Consumer, Share] = field(default_factory=dict, hash=False)
    is_finished: bool = False

    def claim(self, incarnation: bytes) -> Claim | None:
        """The live claim of a sink engine."""
        return next((c for c in self.claims if c.incarnation == incarnation), None)

    def gone_reason(self, incarnation: bytes) -> Reason | None:
        """Why this sink engine may not read any more; None if it may."""
        return next((g.reason for g in self.gone if g.incarnation == incarnation), None)

    @property
    def has_room_for_life(self) -> bool:
        """One more sink engine may claim, or cancel. Once False it stays so: a claim that is
        dropped is gone, and still counts.
        """
        return len(self.claims) + len(self.gone) < MAX_LIVES

    def has_room_for_ranks(self, num_ranks: int) -> bool:
        """So many consumers may be added. A rank that was granted and whose claim lives is counted
        twice, which only makes the room smaller.
        """
        num_claimed = sum(len(claim.ranks) for claim in self.claims)
        return len(self.shares) + num_claimed + num_ranks <= MAX_CONSUMERS

    def with_share(self, share: Share) -> OfferSnapshot:
        """A copy in which this share replaces its consumer's, or is added."""
        return replace(self, shares={**self.shares, share.consumer: share})

    def with_valid(self, consumer: Consumer) -> OfferSnapshot:
        """A copy in which a consumer that has a share has its valid verdict."""
        claims = tuple(
            replace(claim, waiting=claim.waiting - {consumer.rank})
            if claim.incarnation == consumer.incarnation
            else claim
            for claim in self.claims
        )
        share = replace(self.shares[consumer], is_valid=True)
        return replace(self.with_share(share), claims=claims)
