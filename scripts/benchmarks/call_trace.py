"""Which calls a process makes, and when: all functions of some packages, by Python's profile hook.

A call costs about 1 us more, ten times that on a cold processor. Only long ones are kept.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType

LEAST_S = 3e-6
"""Shorter calls are not kept."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Times are of the clock that all processes of a host share; ``depth``: how many
    calls of its thread it is within.
    """

    thread: str
    depth: int
    name: str
    started_s: float
    ended_s: float

    @property
    def took_s(self) -> float:
        return self.ended_s - self.started_s

    def line(self, origin_s: float) -> str:
        """Start and duration in microseconds, thread, name."""
        start_us, took_us = (self.started_s - origin_s) * 1e6, self.took_s * 1e6
        indent = "  " * min(self.depth, 14)
        return f"{start_us:9.0f} {took_us:8.0f}  {self.thread[:14]:14s} {indent}{self.name}"


class CallTrace:
    """The calls of this thread and of all that begin later."""

    def __init__(self, packages: Iterable[str]) -> None:
        self._folders = tuple(
            folder for name in packages for folder in importlib.import_module(name).__path__
        )
        self._is_on = False
        self._calls: list[Call] = []
        self._begun_s: defaultdict[int, list[float]] = defaultdict(list)
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def start(self) -> None:
        """Forget what was kept, and keep calls from now on."""
        self._calls.clear()
        self._begun_s.clear()
        self._is_on = True

    def stop(self) -> list[Call]:
        """What was kept, by start."""
        self._is_on = False
        return sorted(self._calls, key=lambda call: (call.started_s, call.depth))

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_named = code.co_name[0] != "<"  # comprehensions are calls, too
        if not (self._is_on and is_named and code.co_filename.startswith(self._folders)):
            return
        begun_s = self._begun_s[threading.get_ident()]
        if event == "call":
            begun_s.append(time.perf_counter())
        elif event == "return" and begun_s:
            started_s, ended_s = begun_s.pop(), time.perf_counter()
            if ended_s - started_s >= LEAST_S:
                thread = threading.current_thread().name
                call = Call(thread, len(begun_s), code.co_qualname, started_s, ended_s)
                self._calls.append(call)
