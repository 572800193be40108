"""What a polling thread is woken by."""

from __future__ import annotations

import os
import select
import threading

from kvxfer.transports.wake_up import WakeUp


def is_awake(wake: WakeUp) -> bool:
    return bool(select.select([wake.fd], [], [], 0)[0])


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
