"""Offers whose last token is being computed: open each when its ready event has completed. Runs on
the IO thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvxfer.connector.given_offer import GivenOffer
from kvxfer.connector.io_thread import IoThread

READY_POLL_S = 0.001
"""How often events that have not completed are asked again; only where work is asynchronous."""

IsReady = Callable[[], bool]

_log = logging.getLogger("kvxfer.connector")


class Opening:
    """Asks the events of all offers that wait.

    Args:
        open_offer: opens an offer.
        give_up: called for an offer that cannot open; the others are opened all the same.
    """

    def __init__(
        self,
        io: IoThread,
        open_offer: Callable[[GivenOffer], object],
        give_up: Callable[[GivenOffer], object],
    ) -> None:
        self._io = io
        self._open = open_offer
        self._give_up = give_up
        self._waiting: list[tuple[GivenOffer, IsReady]] = []
        self._is_polling = False

    def add(self, offers: Iterable[GivenOffer], is_ready: IsReady) -> None:
        """Open these offers when ``is_ready()``, at once if it is."""
        self._waiting += [(offer, is_ready) for offer in offers]
        if not self._is_polling:
            self._look()

    def _look(self) -> None:
        """Open the offers whose events have completed; look at the others again soon."""
        self._is_polling = False
        waiting, self._waiting = self._waiting, []
        for offer, is_ready in waiting:
            try:
                if is_ready():
                    self._open(offer)
                else:
                    self._waiting.append((offer, is_ready))
            except Exception:  # noqa: BLE001  # whatever an event raises is about this offer only
                _log.exception("request %s: its offer cannot open", offer.request_id)
                self._give_up(offer)
        if self._waiting:
            self._is_polling = True
            self._io.after(READY_POLL_S, self._look)
