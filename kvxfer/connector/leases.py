"""How long offers are kept. Runs on the IO thread.

A lease begins when the offer opens. ``Keep`` extends it to one lease from now, never beyond
``max_hold_s`` after its beginning. A claim has a lease of its own, extended by whatever its sink
engine says: the claim of an engine that fell silent is dropped, and the offer stays for others
until its own lease ends.
"""

from __future__ import annotations

from kvxfer.config import Config
from kvxfer.connector.given_offer import GivenOffer, StepOffer
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.ledger import Ledger
from kvxfer.transfer.session import Break, ClaimantLost, OfferState
from kvxfer.transfer.wire import Reason


class Leases:
    """The clocks of all open offers of a rank."""

    def __init__(self, io: IoThread, config: Config, ledger: Ledger, step: StepOffer) -> None:
        self._io = io
        self._config = config
        self._ledger = ledger
        self._step = step

    def begin(self, offer: GivenOffer) -> None:
        """The offer is about to open; from now on it ends, whatever fails."""
        offer.opened_s = self._io.now()
        offer.lease_until_s = offer.opened_s + self._config.lease_s
        self._arm(offer, offer.lease_until_s)

    def restart(self, offer: GivenOffer) -> None:
        """The request has finished: only now a sink can hear of its offer."""
        self.extend(offer, self._config.lease_s)

    def heard(self, offer: GivenOffer, incarnation: bytes) -> None:
        """A sink engine said something about the offer. Of one without a claim nothing is kept."""
        if offer.session.snapshot.claim(incarnation) is not None:
            offer.heard_s[incarnation] = self._io.now()

    def extend(self, offer: GivenOffer, lease_s: float) -> None:
        """A Keep came. Before the offer opens there is no lease to extend. What a Keep asks for is
        bounded by this side's own lease: it comes again every ``keep_s``.
        """
        if offer.opened_s:
            lease_s = min(lease_s, self._config.lease_s)
            until_s = min(self._io.now() + lease_s, offer.opened_s + self._config.max_hold_s)
            offer.lease_until_s = max(offer.lease_until_s, until_s)

    def watch(self, offer: GivenOffer) -> None:
        """Drop the claims of silent engines, break the offer if its lease is over, and look again
        in time.
        """
        now_s, lease_s = self._io.now(), self._config.lease_s
        self._arm(offer, now_s + lease_s)  # first: what fails below must not stop the clock
        for incarnation in offer.session.claimants:
            heard_s = offer.heard_s.setdefault(incarnation, now_s)
            if heard_s + lease_s <= now_s < offer.lease_until_s:
                self._ledger.count("claims.lost")
                self._step(offer, ClaimantLost(incarnation))
        if offer.lease_until_s <= now_s:
            self._step(offer, Break(Reason.EXPIRED))
        if offer.state is not OfferState.OPEN:
            self._disarm(offer)
            return
        ends_s = [offer.heard_s[i] + lease_s for i in offer.session.claimants]
        next_s = min([offer.lease_until_s, *(end_s for end_s in ends_s if end_s > now_s)])
        self._arm(offer, next_s)

    def _arm(self, offer: GivenOffer, at_s: float) -> None:
        self._disarm(offer)
        offer.timer = self._io.after(at_s - self._io.now(), lambda: self.watch(offer))

    def _disarm(self, offer: GivenOffer) -> None:
        if offer.timer is not None:
            offer.timer.cancel()
