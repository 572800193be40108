"""One offer of a source rank: its session, and what is needed to perform what the session says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvxfer.connector.io_thread import Timer
from kvxfer.connector.records import GroupBlockIds
from kvxfer.transfer.session import OfferState, SourceEvent
from kvxfer.transfer.source_session import OfferSession
from kvxfer.transfer.wire import Consumer, Pull


@dataclass(slots=True, eq=False)
class GivenOffer:
    """One offer of this rank. Times are the IO thread's.

    ``heard_s``: when each sink engine that speaks of it was heard last. ``identities``: over which
    connection each consumer was. ``pulls``: what each consumer asked for, while the offer lives.
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
    pulls: dict[Consumer, Pull] = field(default_factory=dict)

    @property
    def state(self) -> OfferState:
        """Where it stands."""
        return self.session.snapshot.state


StepOffer = Callable[[GivenOffer, SourceEvent], None]
"""Give an event to an offer's session and perform what comes of it."""
