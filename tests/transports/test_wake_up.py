"""What a polling thread is woken by; an alarm at the earliest of its times."""

from __future__ import annotations

import os
import select
import threading
import time

import pytest

from kvxfer.transports.wake_up import Alarm, Completions, TimerFd, WakeUp


def is_awake(wake: WakeUp | TimerFd | Alarm, timeout_s: float = 0.0) -> bool:
    return bool(select.select([wake.fd], [], [], timeout_s)[0])


def test_a_wake_lasts_until_it_is_cleared() -> None:
    wake = WakeUp()
    assert not is_awake(wake)
    wake.clear()  # nothing to clear, and nothing to wait for
    threads = [threading.Thread(target=wake) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_awake(wake)
    wake.clear()
    assert not is_awake(wake)
    wake()
    assert is_awake(wake)
    wake.close()


def test_late_wakes_are_not_written_to_whoever_has_the_number_now() -> None:
    wake = WakeUp()
    number = wake.fd
    wake.close()
    wake.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    if other != number:
        os.dup2(other, number)
    wake()
    assert not select.select([number], [], [], 0)[0]
    os.close(number)
    if other != number:
        os.close(other)


def test_a_timer_can_be_read_after_its_time_unless_it_is_set_anew() -> None:
    timer, begin_s = TimerFd(), time.monotonic()
    timer.set(0.02)
    assert is_awake(timer, 30.0)
    assert time.monotonic() >= begin_s + 0.02
    timer.set(3600.0)
    assert not is_awake(timer)
    timer.set(0.001)
    assert is_awake(timer, 30.0)
    timer.set(0)
    assert not is_awake(timer, 0.05)
    timer.close()
    timer.close()
    with pytest.raises(ValueError, match="closed"):
        timer.set(1.0)


def test_an_alarm_lasts_until_it_is_cleared() -> None:
    alarm = Alarm()
    while True:  # until nothing held this thread up meanwhile
        begin_s = time.monotonic()
        alarm.after(0.02)
        alarm.clear()  # its time has not come
        if time.monotonic() < begin_s + 0.02:
            break
    assert is_awake(alarm, 30.0)
    assert time.monotonic() >= begin_s + 0.02
    alarm.after(3600.0)  # it rings already
    assert is_awake(alarm)
    alarm.clear()
    assert not is_awake(alarm, 0.05)
    alarm.after(0.001)
    assert is_awake(alarm, 30.0)
    alarm.close()
    alarm.close()


def test_the_earliest_of_an_alarms_times_counts() -> None:
    alarm, begin_s = Alarm(), time.monotonic()
    alarm.after(300.0)
    alarm.after(0.01)
    alarm.after(600.0)
    assert is_awake(alarm, 100.0)
    assert time.monotonic() < begin_s + 300.0
    alarm.close()


def test_what_is_told_is_taken_once_in_its_order_and_wakes() -> None:
    wakes: list[None] = []
    completions: Completions[int] = Completions(lambda: wakes.append(None))
    assert not completions
    completions.append(1)
    assert not wakes  # who appends is on his way to take it
    completions.tell(2)
    assert (len(completions), len(wakes)) == (2, 1)
    taken = completions.take()
    completions.append(3)
    assert taken == [1, 2]
    assert completions.take() == [3]
    assert completions.take() == []
