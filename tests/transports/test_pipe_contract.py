"""The contract's check accepts a pipe that keeps it, and finds ones that do not."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import zmq

from kvxfer.transports.base import Wake
from kvxfer.transports.pipe import Parts, Pipe, SinkLane, Slots, SourceLane
from tests.transports.pipe_contract import (
    Held,
    MakePipe,
    PipeCase,
    check_pipe,
    leaked,
    scenario_params,
)


class PartsSource(SourceLane):
    """Sends payloads along with announcements."""

    address = b""

    def __init__(self, slots: Slots) -> None:
        self._memory = mmap.mmap(-1, slots.nbytes)
        self._staging = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots: list[torch.Tensor] = list(self._staging.view(slots.num_slots, -1))
        self._sent: list[int] = []

    def staging(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._slots[slot][:nbytes]

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        self._sent.append(slot)
        return (self._slots[slot][:nbytes].numpy().tobytes(),)

    def poll(self) -> Sequence[int]:
        sent, self._sent = self._sent, []
        return sent

    def close(self) -> None:
        self._sent = []


class PartsSink(SinkLane):
    address = b""

    def __init__(self) -> None:
        self._payloads: dict[int, torch.Tensor] = {}
        self._ready: list[int] = []

    def connected(self, address: bytes) -> None:
        pass

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        self._payloads[slot] = torch.frombuffer(bytearray(parts[0].bytes), dtype=torch.uint8)
        self._ready.append(slot)

    def poll(self) -> Sequence[int]:
        ready, self._ready = self._ready, []
        return ready

    def payload(self, slot: int) -> torch.Tensor:
        return self._payloads[slot]

    def free(self, slot: int) -> None:
        del self._payloads[slot]

    def close(self) -> None:
        self._payloads.clear()
        self._ready.clear()


class PartsPipe(Pipe):
    name = "parts"

    def __init__(
        self,
        device: torch.device,
        wake: Wake,
        source: Callable[[Slots], SourceLane] = PartsSource,
        sink: Callable[[], SinkLane] = PartsSink,
    ) -> None:
        self._source, self._sink = source, sink

    def open_source(self, address: bytes, slots: Slots, *, fd: int | None = None) -> SourceLane:
        return self._source(slots)

    def open_sink(self, slots: Slots, way: str = "") -> SinkLane:
        return self._sink()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("scenario", scenario_params())
def test_pipe_that_keeps_the_contract(scenario: str) -> None:
    check_pipe(PipeCase(PartsPipe), scenario)


# ------------------------------------------------------------------ broken on purpose


class SendsAnother(PartsSource):
    """Mixes up two slots, once."""

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        parts = super().send(slot, generation, nbytes)
        return (bytes(self.staging((slot + 1) % 4, nbytes).numpy()),) if generation == 3 else parts


class KeepsTheLast(PartsSink):
    """A payload that was freed shows up again."""

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        old = self._payloads.get(slot)
        super().announced(slot, generation, nbytes, parts)
        if old is not None and generation == 5:
            self._payloads[slot] = old[:1].expand(nbytes)

    def free(self, slot: int) -> None:
        pass


class NamesTheLastFirst(PartsSource):
    def poll(self) -> Sequence[int]:
        return list(super().poll())[::-1]


class NeverWakes(PartsSink):
    """Has a payload a moment later, and tells nobody."""

    _due_s = 0.0

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        super().announced(slot, generation, nbytes, parts)
        self._due_s = time.monotonic() + 0.02

    def poll(self) -> Sequence[int]:
        return super().poll() if time.monotonic() >= self._due_s else ()


HANGS_S = 1.0


class HangsInClose(PartsSink):
    def close(self) -> None:
        time.sleep(HANGS_S)


_kept: list[torch.Tensor] = []


class NeverGivesBack(PartsSource):
    def close(self) -> None:
        _kept.append(self._staging)


class KeepsAThread(PartsSource):
    """One for each connection."""

    def close(self) -> None:
        if self._slots:
            self._slots = []
            threading.Thread(target=_never.wait, daemon=True).start()


class KeepsADescriptor(PartsSink):
    """One for each second connection."""

    _num_closed = 0

    def close(self) -> None:
        type(self)._num_closed += 1
        if self._num_closed % 4 == 0:  # a lane is closed twice
            os.eventfd(0)


class StartsAThreadLate(PartsSink):
    """One for all connections, as libraries do, with the descriptor that wakes it."""

    _num_closed = 0

    def close(self) -> None:
        type(self)._num_closed += 1
        if self._num_closed == 20:
            threading.Thread(target=_never.wait, daemon=True).start()
            os.eventfd(0)


_never = threading.Event()

BYTES = "every byte of every slot and generation"
CLOSED = "closed in the middle"
MANY = "many connections leave nothing"


@pytest.mark.parametrize(
    ("make_pipe", "scenario", "sentence"),
    [
        (partial(PartsPipe, source=SendsAnother), BYTES, "bytes differ"),
        (partial(PartsPipe, sink=KeepsTheLast), BYTES, "bytes differ"),
        (partial(PartsPipe, source=NamesTheLastFirst), BYTES, "was named before slot"),
        (partial(PartsPipe, sink=NeverWakes), BYTES, "nobody woke"),
        (partial(PartsPipe, sink=HangsInClose), CLOSED, "close took"),
        (partial(PartsPipe, source=NeverGivesBack), CLOSED, "staging: .* bytes more"),
        (partial(PartsPipe, source=KeepsAThread), MANY, "16 connections: threads: .*end: {'"),
        (partial(PartsPipe, sink=KeepsADescriptor), MANY, "16 connections: fds: .*eventfd"),
    ],
)
def test_broken_pipe_is_found(make_pipe: MakePipe, scenario: str, sentence: str) -> None:
    case = PipeCase(make_pipe, num_opens=16)
    case = replace(case, num_looks=50)
    if sentence == "close took":
        case = replace(case, close_max_s=HANGS_S)
    if sentence == "nobody woke":  # the others need not wait for a tick, and may be slow
        case = replace(case, tick_s=4.0)
    with pytest.raises(AssertionError, match=sentence):
        check_pipe(case, scenario)


def test_a_thread_that_comes_once_is_no_leak() -> None:
    check_pipe(PipeCase(partial(PartsPipe, sink=StartsAThreadLate), num_opens=16), MANY)


@pytest.mark.parametrize(
    ("nums", "is_leak"),
    [
        ((7, 8, 9, 10), True),  # one for some connections
        ((83, 88, 93, 98), True),
        ((7, 7, 8, 8), False),
        ((7, 8, 8, 9), False),
        ((7, 8, 9, 9), False),
        ((7, 7, 7, 11), False),
        ((7, 7, 7, 12), True),  # many at a time
        ((9, 8, 7, 7), False),
    ],
)
@pytest.mark.parametrize("what", ["threads", "fds"])
def test_what_counts_as_a_leak(nums: tuple[int, ...], is_leak: bool, what: str) -> None:
    other = Counter(python=1)
    counts = [Counter(main=1, helper=num - 1) for num in nums]
    held = [Held(count, other) if what == "threads" else Held(other, count) for count in counts]
    said = leaked(held)
    assert bool(said) is is_leak
    if is_leak:
        assert said.startswith(f"{what}: {list(nums)} in turn, more in the end: {{'helper': ")
