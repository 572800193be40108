"""Finds tests that lean on time, and races: `scripts/test -p tests.naps PATH`.

It naps at random before lines of tests, 60 ms at most, and at calls of kvxfer in whatever thread,
30 ms at most; in one test 1.5 s of either. In every second test one thread is slow beside: it naps
at every tenth of its calls of kvxfer, as one does whose core another process has. What fails only
then would fail on a busy machine some day. NAPS_SEED chooses the naps.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SEED = os.environ.get("NAPS_SEED", "1")
MOST_S = {"tests": 0.06, "kvxfer": 0.03, "slow": 0.03}
OFTEN = {"tests": 0.15, "kvxfer": 0.003, "slow": 0.1}
IN_ALL_S = 1.5
MOST_THREADS = 4  # that a test begins, of which one may be slow

_sleep = time.sleep  # tests replace it
_random = random.Random()
_left_s = dict.fromkeys(MOST_S, 0.0)
_here = threading.local()


@cache
def _room(file: str) -> str:
    path = Path(file)
    return path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""


def _perhaps_nap(room: str) -> None:
    if _left_s[room] > 0 and _random.random() < OFTEN[room]:
        nap_s = min(MOST_S[room], _random.expovariate(3 / MOST_S[room]))
        _left_s[room] -= nap_s
        _sleep(nap_s)


def _at_line(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
    if event == "line":
        _perhaps_nap("tests")
    return _at_line if _left_s["tests"] > 0 else None


def _at_call(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
    room = _room(frame.f_code.co_filename)
    if room == "tests" and _left_s["tests"] > 0:
        return _at_line
    if room == "kvxfer":
        _perhaps_nap("slow" if getattr(_here, "is_slow", False) else "kvxfer")
    if max(_left_s.values()) <= 0:
        sys.settrace(None)  # of this thread: the rest of the test runs at its usual speed
    return None


def _in_new_threads(slow: int) -> Callable[[FrameType, str, object], Callable[..., Any] | None]:
    """Trace threads as they begin; the one of this number is slow."""
    begun = itertools.count()

    def at_first_call(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        _here.is_slow = next(begun) == slow
        if _here.is_slow:
            _left_s["slow"] = IN_ALL_S
        sys.settrace(_at_call)
        return _at_call(frame, event, arg)

    return at_first_call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _random.seed(f"{SEED} {item.nodeid}")
    _left_s.update(tests=IN_ALL_S, kvxfer=IN_ALL_S, slow=0.0)
    threading.settrace(_in_new_threads(_random.randrange(2 * MOST_THREADS)))
    sys.settrace(_at_call)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
