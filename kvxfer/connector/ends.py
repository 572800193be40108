"""Which offers their engine has ended: memory that board, verdicts and packers look at.

Whoever lets blocks go ends their offer here first, on its own thread. From then on nothing of the
offer can become valid: the board does not show it, and the source takes the end in before whatever
else it hears of the offer (:func:`~kvxfer.transfer.source_session.events_due`). So no engine waits
for its IO thread, and an IO thread that is stuck makes nothing valid.
"""

from __future__ import annotations

import threading

from kvxfer.connector.board import Board, Posted
from kvxfer.transfer.wire import Reason


class Ends:
    """Of one source rank. ``board``: where open offers are shown; None: nowhere.

    One lock keeps an offer from being shown behind its end; it is held for some microseconds.
    """

    def __init__(self, board: Board | None = None) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._reasons: dict[bytes, Reason] = {}
        self._all: Reason | None = None

    # -------------------------------------------------- from any thread

    def end(self, nonce: bytes, reason: Reason) -> None:
        """The offer is over when this returns. It need not be known yet."""
        with self._lock:
            self._reasons.setdefault(nonce, reason)
            self._take_down(nonce)

    def end_all(self, reason: Reason) -> None:
        """Every offer is over, those to come too."""
        with self._lock:
            self._all = self._all or reason
            if self._board is not None:
                self._board.end_all()

    def reason(self, nonce: bytes) -> Reason | None:
        """Why the engine ended this offer; None if it has not."""
        return self._reasons.get(nonce, self._all)

    # -------------------------------------------------- on the IO thread

    def show(self, nonce: bytes, posted: Posted) -> bool | None:
        """The offer is open. False where the board has no room for it; None where there is no
        board, or the engine has ended the offer meanwhile.
        """
        with self._lock:
            if self._board is None or self.reason(nonce) is not None:
                return None
            return self._board.post(nonce, posted)

    def hide(self, nonce: bytes) -> None:
        """The source has ended the offer itself, before anything of it is freed."""
        if self._board is not None:
            with self._lock:
                self._take_down(nonce)

    def forget(self, nonce: bytes) -> None:
        """The source has taken the end in."""
        self._reasons.pop(nonce, None)

    def _take_down(self, nonce: bytes) -> None:
        if self._board is not None:
            self._board.end(nonce)
