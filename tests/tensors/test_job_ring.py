"""The pinned ring: nothing is written again before the work that reads it is over."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.tensors.device_launch import HostEvent, JobRing, Slot

CPU = torch.device("cpu")


class FakeEvent(HostEvent):
    """Over when the test says so, or when somebody waits."""

    def __init__(self) -> None:
        self.is_over = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.num_waits += 1
        self.is_over = True


class Ring(JobRing):
    """With an event behind each slot that was closed."""

    def __init__(self, num_words: int) -> None:
        super().__init__(num_words * 8, CPU)
        self.events: list[FakeEvent] = []

    def end(self, slot: Slot) -> None:
        self.events.append(FakeEvent())
        self.close(slot, self.events[-1])


def ring_of(num_words: int) -> tuple[Ring, list[FakeEvent]]:
    ring = Ring(num_words)
    return ring, ring.events


def send(slot: Slot) -> None:
    """By its addresses, as the GPU's driver does."""
    ctypes.memmove(slot.device_address, slot.host_address, 8 * slot.host.size)


def test_a_slot_lies_where_it_says() -> None:
    ring, _ = ring_of(8)
    slot = ring.take(3)
    slot.host[:] = [1, 2, 3]
    assert slot.pinned.tolist() == [1, 2, 3]
    send(slot)
    assert slot.device.tolist() == [1, 2, 3]
    ring.end(slot)
    following = ring.take(2)
    following.host[:] = [4, 5]
    assert following.pinned.tolist() == [4, 5]
    send(following)
    assert following.device.tolist() == [4, 5]
    assert slot.device.tolist() == [1, 2, 3]


def test_the_host_waits_for_the_oldest_only_where_the_ring_is_full() -> None:
    ring, events = ring_of(10)
    for _ in range(3):
        ring.end(ring.take(3))
    assert ring.num_waits == 0
    slot = ring.take(3)  # the last word is too few, so from the start: over the first slot
    assert slot.at == 0
    assert [event.num_waits for event in events] == [1, 0, 0]
    ring.end(slot)
    events[1].is_over = True
    assert ring.take(3).at == 3
    assert ring.num_waits == 1


def test_all_of_the_ring_at_once_and_too_much() -> None:
    ring, events = ring_of(4)
    ring.end(ring.take(3))
    whole = ring.take(4)
    assert (whole.at, events[0].num_waits) == (0, 1)
    ring.end(whole)
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
        ring.end(slot)
        in_use.append((slot, events[-1]))
        if number < len(over) and over[number] < len(events):
            events[over[number]].is_over = True


def test_there_is_room_while_half_of_the_ring_is_free() -> None:
    ring, events = ring_of(16)
    for _ in range(2):
        ring.end(ring.take(4))
        assert ring.has_room()
    ring.end(ring.take(4))
    assert not ring.has_room()
    events[1].is_over = True  # not the oldest
    assert not ring.has_room()
    events[0].is_over = True
    assert ring.has_room()
    for _ in range(2):  # whatever is left at the ring's end
        ring.take(4)
    assert (ring.num_waits, [event.num_waits for event in events]) == (0, [0, 0, 0])


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=60))
def test_with_room_a_quarter_never_waits(steps: list[tuple[int, bool]]) -> None:
    ring, events = ring_of(32)
    for num_words, ends in steps:
        if ends:
            for event in events[:1]:
                event.is_over = True
            del events[:1]
        if ring.has_room():
            ring.end(ring.take(num_words))
    assert ring.num_waits == 0


def test_a_ring_that_goes_waits_for_its_work() -> None:
    """Both of its memories are others' then."""
    ring = Ring(64)
    for _ in range(2):
        ring.end(ring.take(8))
    events = ring.events
    del ring
    assert [event.num_waits for event in events] == [1, 1]
