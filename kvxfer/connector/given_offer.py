"""One offer of a source rank: its session, and what is needed to perform what the session says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvxfer.connector.io_thread import Timer
from kvxfer.connector.records import GroupBlockIds
from kvxfer.transfer.session import OfferState, SourceEvent, Wire
from kvxfer.transfer.source_session import OfferSession
from kvxfer.transfer.wire import Consumer, Pull


@dataclass(frozen=True, slots=True)
class AskedPull:
    """What a consumer asked for, and how that is served."""

    pull: Pull
    wire: Wire


@dataclass(slots=True, eq=False)
class GivenOffer:
    """One offer of this rank. Times are the IO thread's.

    ``heard_s``: when each sink engine that speaks of it was heard last. ``identities``: over which
    connection each consumer was. ``speakers``: over which connection each sink engine that was
    granted it, or knows its tokens, was heard last. ``pulls``: what each consumer asked for, while
    the offer lives.
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
    pulls: dict[Consumer, AskedPull] = field(default_factory=dict)

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


StepOffer = Callable[[GivenOffer, SourceEvent], None]
"""Give an event to an offer's session and perform what comes of it."""
