"""Launches in flight on one stream of a GPU: which are over, and when to look again.

The IO thread queries the launches and never sleeps for a GPU. In the last moments of a copy it
queries without pause, because a wake takes longer. A waiting thread sleeps until a launch is nearly
due, and then until it is over, and wakes the IO thread each time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvxfer.tensors.cuda_driver import StreamEvent

CLOSE_S = 150e-6
"""So long before a copy should be over, and so long after, it is looked at without pause."""
WAKE_S = 100e-6
"""What it takes to be woken: so much sooner. Beside an idle engine 8,192 tokens were seen over
0.12 ms later than beside a busy one, which looks by itself.
"""
FIRST_BYTES_PER_S = 300e9
"""Of a link that has not been measured yet; what is measured counts from the first copy on."""
MEASURED_NBYTES = 32 << 20
"""Launches of fewer bytes take as long as a launch does, and say little of the link."""
_ENDED_AT = 2 / 3  # between two looks: who takes the second for the end never looks earlier

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Flight(Generic[T]):
    """A launch in flight. ``begins_s``, ``due_s``: when it should begin and be over
    (``time.perf_counter``); ``is_expected``: the waiting thread knows of it; ``ended_s``: when the
    waiting thread saw its end.
    """

    owner: T
    event: StreamEvent
    nbytes: int
    begins_s: float
    due_s: float
    is_expected: bool = False
    ended_s: float | None = None


class Launches(Generic[T]):
    """The launches in flight of one stream, in order. For the IO thread; ``wake`` is called on
    another.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.nbytes = 0
        self._flights: deque[Flight[T]] = deque()
        self._bytes_per_s = FIRST_BYTES_PER_S
        self._looked_s = 0.0
        """When the first of them was last looked at, and was on its way."""
        self._waiter: _Waiter[T] = _Waiter(wake)

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, owner: T, event: StreamEvent, nbytes: int) -> None:
        begins_s = time.perf_counter()
        if self._flights:
            begins_s = max(begins_s, self._flights[-1].due_s)
        due_s = begins_s + nbytes / self._bytes_per_s
        self._flights.append(Flight(owner, event, nbytes, begins_s, due_s))
        self.nbytes += nbytes

    @property
    def last(self) -> StreamEvent | None:
        """The event behind all of them; None without any."""
        return self._flights[-1].event if self._flights else None

    def land(self) -> list[Flight[T]]:
        """The launches that are over. Raises RuntimeError, PyTorch's, when the GPU has failed."""
        landed: list[Flight[T]] = []
        while self._flights:
            looked_s = time.perf_counter()
            if not self._flights[0].event.query():
                self._looked_s = looked_s
                break
            flight = self._flights.popleft()
            self.nbytes -= flight.nbytes
            if not landed:  # a second one in the same look began at an unknown time
                self._measure(flight, looked_s)
            landed.append(flight)
        if landed and self._flights:  # the next launch has begun
            following = self._flights[0]
            following.begins_s = landed[-1].ended_s or looked_s
            following.due_s = following.begins_s + following.nbytes / self._bytes_per_s
        return landed

    def land_close(self) -> list[Flight[T]]:
        """Wait for launches that will be over in a moment. Raises RuntimeError."""
        while self._flights:
            early_s = self._flights[0].due_s - time.perf_counter()
            if not -CLOSE_S <= early_s <= CLOSE_S + WAKE_S:
                break
            if landed := self.land():
                return landed
        return []

    def expect(self) -> None:
        waited = [flight for flight in self._flights if not flight.is_expected]
        for flight in waited:
            flight.is_expected = True
            self._waiter.expect(flight)

    def forget(self) -> None:
        self._flights.clear()
        self.nbytes = 0

    def synchronize(self) -> None:
        """Wait for all launches, at shutdown. Raises RuntimeError."""
        for flight in self._flights:
            flight.event.synchronize()

    def close(self) -> None:
        self._waiter.close()

    def _measure(self, flight: Flight[T], looked_s: float) -> None:
        """Update the rate. The end is when the waiting thread saw it, else between two looks."""
        if flight.nbytes < MEASURED_NBYTES:
            return
        running_s = max(self._looked_s, flight.begins_s)
        ended_s = flight.ended_s or running_s + (looked_s - running_s) * _ENDED_AT
        measured = flight.nbytes / max(ended_s - flight.begins_s, 1e-6)
        self._bytes_per_s += (measured - self._bytes_per_s) / 2


class _Waiter(Generic[T]):
    """A thread that wakes the IO thread shortly before a launch is due, and after it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._flights: queue.SimpleQueue[Flight[T] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="kvxfer-gpu-wait", daemon=True)
        self._thread.start()

    def expect(self, flight: Flight[T]) -> None:
        self._flights.put(flight)

    def close(self) -> None:
        self._flights.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (flight := self._flights.get()) is not None:
            if self._sleep_until_nearly_due(flight):
                self._wake()
            with suppress(RuntimeError):  # the next query of the event raises it
                if not flight.event.query():
                    flight.event.synchronize()
                    flight.ended_s = time.perf_counter()
            self._wake()
            del flight

    def _sleep_until_nearly_due(self, flight: Flight[T]) -> bool:
        """False if the launch was nearly due already. The IO thread moves ``due_s`` once the launch
        before is over.
        """
        has_slept = False
        while (early_s := flight.due_s - CLOSE_S - WAKE_S - time.perf_counter()) > 0:
            time.sleep(early_s)
            has_slept = True
        return has_slept
