"""One offer of a source rank: its session, what performing needs, and its clocks.

A lease begins when the offer opens. ``Keep`` extends it to one lease from now, never beyond
``max_hold_s`` after its beginning. A claim has a lease of its own, extended by whatever its sink
engine says: the claim of an engine that fell silent is dropped, and the offer stays for others
until its own lease ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.connector.io_thread import Timer
from kvxfer.connector.records import GroupBlockIds
from kvxfer.transfer.session import Break, ClaimantLost, OfferState
from kvxfer.transfer.source_session import OfferSession
from kvxfer.transfer.wire import Consumer, Pull, Reason


@dataclass(slots=True, eq=False)
class GivenOffer:
    """One offer of this rank. Times are the IO thread's.

    ``block_ids``: once it has opened, those of this rank that hold the offered tokens. ``heard_s``:
    when each sink engine that speaks of it was heard last. ``identities``: over which connection
    each consumer was. ``speakers``: over which connection each sink engine that was granted it, or
    knows its tokens, was heard last. ``pulls``: what each consumer asked for, while the offer
    lives.
    """

    request_id: str
    nonce: bytes
    num_tokens: int
    session: OfferSession
    block_ids: GroupBlockIds = ()
    is_delayed: bool = False
    opened_s: float = 0.0
    lease_until_s: float = 0.0
    timer: Timer | None = None
    heard_s: dict[bytes, float] = field(default_factory=dict)
    identities: dict[Consumer, bytes] = field(default_factory=dict)
    speakers: dict[bytes, bytes] = field(default_factory=dict)
    pulls: dict[Consumer, Pull] = field(default_factory=dict)

    @property
    def state(self) -> OfferState:
        """Where it stands."""
        return self.session.snapshot.state

    def refuses(self, pull: Pull) -> bool:
        """The session will refuse this Pull, or answer it as before, whatever it asks for: a look
        at what it asks for would be wasted work.
        """
        offer = self.session.snapshot
        return (
            offer.state not in (OfferState.PENDING, OfferState.OPEN)
            or offer.digest not in (None, pull.digest)
            or offer.gone_reason(pull.consumer.incarnation) is not None
        )

    def heard(self, incarnation: bytes, now_s: float) -> None:
        """A sink engine said something about the offer. Of one without a claim nothing is kept."""
        if self.session.snapshot.claim(incarnation) is not None:
            self.heard_s[incarnation] = now_s

    def extend(self, now_s: float, lease_s: float, max_hold_s: float) -> None:
        """Before the offer opens there is no lease to extend."""
        if self.opened_s:
            until_s = min(now_s + lease_s, self.opened_s + max_hold_s)
            self.lease_until_s = max(self.lease_until_s, until_s)

    def due(self, now_s: float, lease_s: float) -> list[ClaimantLost | Break]:
        """What the clocks say now."""
        if self.lease_until_s <= now_s:
            return [Break(Reason.EXPIRED)]
        return [
            ClaimantLost(incarnation)
            for incarnation in self.session.claimants
            if self.heard_s.setdefault(incarnation, now_s) + lease_s <= now_s
        ]

    def next_due_s(self, now_s: float, lease_s: float) -> float:
        """When they have something to say, if nothing is heard until then."""
        ends_s = [self.heard_s[i] + lease_s for i in self.session.claimants]
        return min([self.lease_until_s, *(end_s for end_s in ends_s if end_s > now_s)])
