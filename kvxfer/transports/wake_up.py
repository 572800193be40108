"""Wakes a thread that polls its own descriptors, at once or after a time; what it then finds."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from functools import lru_cache
from typing import TypeVar

from kvxfer.transports.base import Wake

T = TypeVar("T")

_ONCE = (1).to_bytes(8, "little")  # eventfd(2): eight bytes, added to a counter
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter
_libc.write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)


class WakeUp:
    """A descriptor that can be read after a wake.

    To wake keeps the interpreter, which a busy thread does not soon give back: beside one that
    never sleeps a copy thread copied 1.1 chunks in each of its turns, and 1.8 so.
    """

    def __init__(self) -> None:
        # A file, which knows that it is closed: its number may be another one's by then
        number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._file = open(number, "r+b", buffering=0)  # noqa: SIM115  # until ``close``
        self._lock = threading.RLock()
        self.fd = number
        """Can be read after a wake, until it is cleared."""

    def __call__(self) -> None:
        """Make ``fd`` readable. From any thread."""
        with self._lock:
            if not self._file.closed:  # else nobody will look
                _libc.write(self.fd, _ONCE, len(_ONCE))

    def clear(self) -> None:
        """Reset ``fd``; call it before the look at what the wake was for."""
        self._file.read(8)

    def close(self) -> None:
        with self._lock:
            self._file.close()


# From Python 3.13 on os has the calls of a timer
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK and TFD_CLOEXEC


class _Times(ctypes.Structure):
    """itimerspec: seconds and nanoseconds, twice."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


_libc.timerfd_settime.argtypes = (
    *(ctypes.c_int, ctypes.c_int),
    *(ctypes.POINTER(_Times), ctypes.c_void_p),
)


@lru_cache(maxsize=64)  # most ask for one time, and it takes 40 us of a cold processor
def _once_in(delay_s: float) -> _Times:
    seconds, rest_s = divmod(delay_s, 1)
    return _Times(0, 0, int(seconds), int(rest_s * 1e9))


class TimerFd:
    """A descriptor that can be read after a time. The kernel keeps that (timerfd_create(2)): a
    thread that did would want the interpreter to begin, and Python's poll its own round.

    Raises OSError where the process can have no descriptor more.
    """

    def __init__(self) -> None:
        number = _libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS)
        if number < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._file = open(number, "rb", buffering=0)  # noqa: SIM115  # until ``close``
        self.fd = number

    def set(self, delay_s: float) -> None:
        """Make ``fd`` readable after that long, and not before; 0: not at all."""
        _libc.timerfd_settime(self._file.fileno(), 0, _once_in(delay_s), None)

    def close(self) -> None:
        self._file.close()


class Completions(list[T]):
    """What one wire returns from its next poll, in order. For the IO thread."""

    def __init__(self, wake: Wake) -> None:
        super().__init__()
        self._wake = wake

    def tell(self, completion: T) -> None:
        """Append, and have the IO thread poll; where it does so anyway, ``append`` is enough."""
        self.append(completion)
        self._wake()

    def take(self) -> list[T]:
        taken = list(self)
        self.clear()
        return taken


class Alarm:
    """A descriptor that can be read after the shortest of the times that were asked for since it
    was cleared last. For one thread: one for whose times its poll loop is too coarse.
    """

    def __init__(self) -> None:
        self._timer = TimerFd()
        self._due_s = math.inf
        self.fd = self._timer.fd

    def after(self, delay_s: float) -> None:
        """Make ``fd`` readable after that long at the latest."""
        due_s = time.monotonic() + delay_s
        if due_s < self._due_s:
            self._due_s = due_s
            self._timer.set(delay_s)

    def clear(self) -> None:
        """Reset ``fd`` if its time has passed; call it before the look at what it was for."""
        if self._due_s <= time.monotonic():
            self._due_s = math.inf
            self._timer.set(0)

    def close(self) -> None:
        self._timer.close()
