"""The pinned ring: nothing is written again before the work that reads it is over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.tensors.job_ring import JobRing, Slot

CPU = torch.device("cpu")


class FakeEvent:
    """Over when the test says so, or when somebody waits."""

    def __init__(self) -> None:
        self.is_over = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.num_waits += 1
        self.is_over = True


def ring_of(num_words: int) -> tuple[JobRing, list[FakeEvent]]:
    events: list[FakeEvent] = []

    def record() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    return JobRing(num_words * 8, CPU, record), events


def test_a_slot_goes_to_the_device_as_it_was_written() -> None:
    ring, _ = ring_of(8)
    slot = ring.take(3)
    slot.host[:] = [1, 2, 3]
    slot.send()
    assert slot.device.tolist() == [1, 2, 3]
    ring.close(slot)
    following = ring.take(2)
    following.host[:] = [4, 5]
    following.send()
    assert slot.device.tolist() == [1, 2, 3]


def test_the_host_waits_for_the_oldest_only_where_the_ring_is_full() -> None:
    ring, events = ring_of(10)
    for _ in range(3):
        ring.close(ring.take(3))
    assert ring.num_waits == 0
    slot = ring.take(3)  # the last word is too few, so from the start: over the first slot
    assert slot.at == 0
    assert [event.num_waits for event in events] == [1, 0, 0]
    ring.close(slot)
    events[1].is_over = True
    assert ring.take(3).at == 3
    assert ring.num_waits == 1


def test_all_of_the_ring_at_once_and_too_much() -> None:
    ring, events = ring_of(4)
    ring.close(ring.take(3))
    whole = ring.take(4)
    assert (whole.at, events[0].num_waits) == (0, 1)
    ring.close(whole)
    with pytest.raises(ValueError, match="slot: expected 1 to 4 words, got 5"):
        ring.take(5)
    with pytest.raises(ValueError, match="slot: expected 1 to 4 words, got 0"):
        ring.take(0)


@given(
    sizes=st.lists(st.integers(1, 7), max_size=40),
    over=st.lists(st.integers(0, 39), max_size=40),
)
def test_slots_in_use_never_overlap(sizes: list[int], over: list[int]) -> None:
    ring, events = ring_of(16)
    in_use: list[tuple[Slot, FakeEvent]] = []
    for number, size in enumerate(sizes):
        slot = ring.take(size)
        words = np.arange(slot.at, slot.at + size)
        for other, event in in_use:
            taken = np.arange(other.at, other.at + other.host.size)
            assert event.is_over or not np.intersect1d(words, taken).size
        ring.close(slot)
        in_use.append((slot, events[-1]))
        if number < len(over) and over[number] < len(events):
            events[over[number]].is_over = True
