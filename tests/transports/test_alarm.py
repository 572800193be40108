"""Alarm: wakes once, at the earliest of the times asked for."""

from __future__ import annotations

import threading
import time

from kvxfer.transports.alarm import Alarm, Reminder


class Bell:
    """What is woken, and when."""

    def __init__(self) -> None:
        self.rung_s: list[float] = []
        self._rung = threading.Semaphore(0)

    def __call__(self) -> None:
        self.rung_s.append(time.monotonic())
        self._rung.release()

    def wait(self, timeout_s: float) -> bool:
        return self._rung.acquire(timeout=timeout_s)


def test_it_wakes_once() -> None:
    bell = Bell()
    alarm = Alarm(bell)
    begin_s = time.monotonic()
    alarm.after(0.02)
    assert bell.wait(5.0)
    assert bell.rung_s[0] >= begin_s + 0.02
    assert not bell.wait(0.05)
    alarm.after(0.0)
    assert bell.wait(5.0)
    alarm.close()


def test_the_earliest_counts() -> None:
    bell = Bell()
    alarm = Alarm(bell)
    begin_s = time.monotonic()
    alarm.after(30.0)
    alarm.after(0.01)
    alarm.after(60.0)
    assert bell.wait(5.0)
    assert bell.rung_s[0] < begin_s + 5.0
    alarm.close()


def test_after_close_it_is_silent() -> None:
    bell = Bell()
    before = threading.active_count()
    alarm = Alarm(bell)
    alarm.after(0.05)
    alarm.close()
    alarm.close()
    alarm.after(0.0)
    assert not bell.wait(0.1)
    assert threading.active_count() == before


def test_a_reminder_comes_once_and_wakes_whoever_waits() -> None:
    bell = Bell()
    before = threading.active_count()
    reminder = Reminder(bell)
    assert not reminder.take()
    assert threading.active_count() == before
    reminder.set(0.02)
    assert not reminder.take()
    assert bell.wait(5.0)
    assert reminder.take()
    assert not reminder.take()
    reminder.set(0.0)
    assert reminder.take()
    reminder.close()
    reminder.close()
    assert threading.active_count() == before


def test_a_reminder_that_was_put_off_wakes_again() -> None:
    bell = Bell()
    reminder = Reminder(bell)
    reminder.set(0.02)
    reminder.set(0.3)
    begin_s = time.monotonic()
    assert bell.wait(5.0)  # of the moment that was set before
    if not reminder.take():  # else this thread came 0.3 s late
        assert bell.wait(5.0)
        assert time.monotonic() >= begin_s + 0.2
        assert reminder.take()
    reminder.close()
