"""What the IO thread reports to the engine thread: finished requests, counts, and reasons."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress

import msgspec

from kvxfer.connector.records import FoundOffer, KVConnectorStats, LoadReport
from kvxfer.transfer.wire import Reason


class Finished(msgspec.Struct, frozen=True):
    """Requests that have ended since the last call; each is reported once. ``must_drain``: the
    engine was told to drain since then: :meth:`SchedulerConnector.drain` is due. ``found``: what
    has become of offers that were looked for, by name in hex.
    """

    sent: frozenset[str] = frozenset()
    loads: tuple[LoadReport, ...] = ()
    must_drain: bool = False
    found: Mapping[str, FoundOffer] = msgspec.field(default_factory=dict)


NONE_FINISHED = Finished()
"""What most steps see."""


class Ledger:
    """Written by the IO thread, read by the engine thread; a lock is held for a few
    assignments only. The engine thread checks without the lock whether there is anything to take;
    an entry that it misses is there for its next step.
    """

    def __init__(self, on_drain: Callable[[], object] = lambda: None) -> None:
        """``on_drain``: called first when the engine is told to drain, on any thread."""
        self._on_drain = on_drain
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sent: set[str] = set()
        self._loads: list[LoadReport] = []
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._reported: list[LoadReport] = []
        self._signal: int | None = None
        self._must_drain = False
        self._found: dict[str, FoundOffer] = {}

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def take_counts(self, name: str, counts: Counter[str]) -> None:
        """Move what a wire has counted, messages dropped or refused, into the ledger."""
        for what, number in counts.items():
            self.count(f"{name}.{what}", number)
        counts.clear()

    def failed_call(self) -> None:
        self.count("io.errors")

    def refused(self, why: str) -> None:
        self.count(f"connections.refused.{why}")

    def reason(self, reason: Reason) -> None:
        with self._lock:
            self._reasons[reason.value] += 1

    def sent(self, request_id: str) -> None:
        with self._lock:
            self._sent.add(request_id)
            self._wake()

    def loaded(self, report: LoadReport) -> None:
        with self._lock:
            self._loads.append(report)
            self._reported.append(report)
            self._counts["loads.accepted" if report.reason is None else "loads.failed"] += 1
            self._counts["loads.nbytes"] += report.nbytes
            if report.reason is not None:
                self._reasons[report.reason.value] += 1
            self._wake()

    def found(self, name: str, found: FoundOffer) -> None:
        """Report what has become of an offer that was looked for; the last word counts."""
        with self._lock:
            self._found[name] = found
            self._wake()

    def drain(self) -> None:
        """Have the engine's next step hear that it is to drain; an idle engine makes one."""
        self._on_drain()
        with self._lock:
            self._must_drain = True
            self._wake()

    def take_finished(self) -> Finished:
        if not self._has_news():
            return NONE_FINISHED
        with self._lock:
            finished = Finished(
                frozenset(self._sent), tuple(self._loads), self._must_drain, self._found
            )
            self._sent.clear()
            self._loads.clear()
            self._must_drain = False
            self._found = {}
            if self._signal is not None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._signal)
        return finished

    def take_stats(self) -> KVConnectorStats | None:
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
        """Sleep until :meth:`take_finished` has something; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(self._has_news, timeout_s)

    def wait_for_loads(self, request_ids: AbstractSet[str], timeout_s: float) -> bool:
        """Sleep until all these loads have ended; False after ``timeout_s``."""

        def have_ended() -> bool:
            return request_ids <= {report.request_id for report in self._loads}

        with self._changed:
            return self._changed.wait_for(have_ended, timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable while :meth:`take_finished` has something."""
        with self._lock:
            if self._signal is None:
                self._signal = os.eventfd(int(self._has_news()), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._signal

    def close(self) -> None:
        with self._lock:
            signal, self._signal = self._signal, None
        if signal is not None:
            os.close(signal)

    def _has_news(self) -> bool:
        return bool(self._sent or self._loads or self._must_drain or self._found)

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._signal is not None:
            os.eventfd_write(self._signal, 1)
