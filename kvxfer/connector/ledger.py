"""What the IO thread has to tell the engine thread: finished requests, and a count and a
reason for everything.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from kvxfer.connector.records import KVConnectorStats, LoadReport
from kvxfer.transfer.wire import Reason


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests that ended since the last look; each is told once."""

    sent: frozenset[str] = frozenset()
    loads: tuple[LoadReport, ...] = ()


NONE_FINISHED = Finished()
"""What most steps see."""


class Ledger:
    """Written by the IO thread, read by the engine thread; a lock is held for a few
    assignments only. The engine thread looks without it whether there is anything to take: what
    comes at that moment is there for its next step.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sent: set[str] = set()
        self._loads: list[LoadReport] = []
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._reported: list[LoadReport] = []
        self._signal: int | None = None

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def take_counts(self, name: str, counts: Counter[str]) -> None:
        """What a wire of this name has dropped or refused since it was asked last."""
        if counts:
            for what, number in counts.items():
                self.count(f"{name}.{what}", number)
            counts.clear()

    def reason(self, reason: Reason) -> None:
        """KV was not used, or is no longer given, for this reason."""
        with self._lock:
            self._reasons[reason.value] += 1

    def sent(self, request_id: str) -> None:
        """The engine may have this request's blocks back."""
        with self._lock:
            self._sent.add(request_id)
            self._wake()

    def loaded(self, report: LoadReport) -> None:
        """A load has ended, one way or the other."""
        with self._lock:
            self._loads.append(report)
            self._reported.append(report)
            self._counts["loads.accepted" if report.reason is None else "loads.failed"] += 1
            self._counts["loads.nbytes"] += report.nbytes
            if report.reason is not None:
                self._reasons[report.reason.value] += 1
            self._wake()

    def take_finished(self) -> Finished:
        """Everything that has ended since the last call; NONE_FINISHED itself if nothing has."""
        if not (self._sent or self._loads):
            return NONE_FINISHED
        with self._lock:
            finished = Finished(frozenset(self._sent), tuple(self._loads))
            self._sent.clear()
            self._loads.clear()
            if self._signal is not None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._signal)
        return finished

    def take_stats(self) -> KVConnectorStats | None:
        """Everything that was counted since the last call; None if nothing was."""
        if not (self._counts or self._reasons or self._reported):
            return None
        with self._lock:
            stats = KVConnectorStats(
                counts=dict(self._counts),
                reasons=dict(self._reasons),
                loads=tuple(self._reported),
            )
            self._counts.clear()
            self._reasons.clear()
            self._reported.clear()
        return stats

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something has ended that :meth:`take_finished` would return; False
        after ``timeout_s``.
        """
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._sent or self._loads), timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable while something has ended that :meth:`take_finished`
        would return.
        """
        with self._lock:
            if self._signal is None:
                self._signal = os.eventfd(
                    int(bool(self._sent or self._loads)), os.EFD_NONBLOCK | os.EFD_CLOEXEC
                )
            return self._signal

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        with self._lock:
            signal, self._signal = self._signal, None
        if signal is not None:
            os.close(signal)

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._signal is not None:
            os.eventfd_write(self._signal, 1)
