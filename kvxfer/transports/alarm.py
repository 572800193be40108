"""A thread that wakes somebody after a time that a poll loop is too coarse for."""

from __future__ import annotations

import math
import threading
import time

from kvxfer.transports.base import Wake


class Alarm:
    """Calls ``wake`` once after the shortest of the times that were asked for since.

    Exact to about 60 microseconds.
    """

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._main, name="kvxfer-alarm", daemon=True)
        self._thread.start()

    def after(self, delay_s: float) -> None:
        """Wake after that long at the latest. From any thread."""
        due_s = time.monotonic() + delay_s
        with self._changed:
            if self._is_closing or (self._due_s is not None and self._due_s <= due_s):
                return
            self._due_s = due_s
            self._changed.notify()

    def close(self) -> None:
        """It wakes nobody any more. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _main(self) -> None:
        while self._wait():
            self._wake()

    def _wait(self) -> bool:
        with self._changed:
            while not self._is_closing:
                left_s = None if self._due_s is None else self._due_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._due_s = None
                    return True
                self._changed.wait(left_s)
        return False


class Reminder:
    """One moment to come, for a poll loop that asks whether it has. Few need one ever: the thread
    starts with the first.
    """

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._due_s = math.inf
        self._alarm: Alarm | None = None

    def set(self, delay_s: float) -> None:
        """So long from now, whatever it was before."""
        self._due_s = time.monotonic() + delay_s
        self._alarm = self._alarm or Alarm(self._wake)
        self._alarm.after(delay_s)

    def take(self) -> bool:
        """Whether it has come; True once."""
        left_s = self._due_s - time.monotonic()
        if left_s <= 0:
            self._due_s = math.inf
            return True
        if self._alarm is not None and left_s < math.inf:
            self._alarm.after(left_s)  # the alarm may have been for a moment that was set before
        return False

    def close(self) -> None:
        """It does not come any more. Idempotent."""
        self._due_s = math.inf
        if self._alarm is not None:
            self._alarm.close()
