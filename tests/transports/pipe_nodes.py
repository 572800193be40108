"""A process with one pipe, as the check of the contract (pipe_contract.py) drives it.

What ZeroMQ does in a wire (attach, the word that a peer has gone, and announcements and credits
that the pipe does not carry) a multiprocessing pipe does here.

Each byte of a slot differs from that of the generation before, of another slot and, nearly always,
of another connection, so that bytes that stay, are late or go astray are seen. A slot of the source
is overwritten when its credit has come.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch
import zmq

from kvxfer.transports.base import Wake
from kvxfer.transports.pipe import Lane, Pipe, PipeBroken, SinkLane, Slots, SourceLane
from tests.helpers import POISON, assert_same_bytes

CLOSE_MAX_S = 60.0
"""A connection closes within this, also when its peer was killed. Usual are milliseconds, and 0.7 s
where a library has something under way; a busy machine may stand still meanwhile."""
TIMEOUT_S = 120.0


class MakePipe(Protocol):
    """Makes a pipe whose staging lies on ``device``; a function of a module."""

    def __call__(self, device: torch.device, wake: Wake) -> Pipe: ...


@dataclass(frozen=True, slots=True)
class PipeCase:
    """A pipe to check."""

    make_pipe: MakePipe
    device: str = "cpu"
    way: str = ""
    """Of the pipe's, for all connections."""
    wakes: bool = True
    """Is there a descriptor or a wake for whatever there is to do, so that nobody has to look?"""
    tick_s: float = 15.0
    """Without one the process looks again after this long, if ``wakes`` is false; else it fails."""
    quarantines: bool = False
    """May staging be kept for good when a peer was killed?"""
    is_broken_by_death: bool = False
    """Must PipeBroken name a killed peer, before ZeroMQ has noticed?"""
    num_opens: int = 200
    """Connections that come and go: a multiple of four."""
    num_looks: int = 2500
    """Whether closed connections have given their staging back, 10 ms apart."""
    close_max_s: float = CLOSE_MAX_S


# ------------------------------------------------------------------ what ZeroMQ would carry


@dataclass(frozen=True, slots=True)
class Attach:
    lane: int
    slots: Slots
    address: bytes


@dataclass(frozen=True, slots=True)
class Attached:
    lane: int
    address: bytes


@dataclass(frozen=True, slots=True)
class Announced:
    lane: int
    slot: int
    generation: int
    nbytes: int
    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    lane: int
    slot: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The peer has closed its end, or has died."""

    lane: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The other side has come so far."""

    name: str


Message = Attach | Attached | Announced | Credit | Ended | Stage


def content(lane: int, slot: int, generation: int, nbytes: int) -> torch.Tensor:
    """What a chunk must hold."""
    begin = lane * 4099 % (1 << 20)
    return _noise()[begin : begin + nbytes] + (slot * 53 + generation * 37) % 256


@cache
def _noise() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, generator=generator)


# ------------------------------------------------------------------ the two ends of a connection


@dataclass
class Giver:
    """Sends chunks of these sizes, each from whichever slot is free."""

    number: int
    lane: SourceLane
    slots: Slots
    sizes: list[int]
    generations: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    sent: list[tuple[int, int, int, tuple[bytes, ...]]] = field(default_factory=list)
    num_sent: int = 0
    num_credited: int = 0

    def __post_init__(self) -> None:
        self.generations = [0] * self.slots.num_slots
        self.free = list(range(self.slots.num_slots))

    @property
    def done(self) -> bool:
        return self.num_credited == len(self.sizes)

    def fill(self) -> None:
        while self.free and self.num_sent < len(self.sizes):
            slot = self.free.pop(random.randrange(len(self.free)))
            nbytes, generation = self.sizes[self.num_sent], self.generations[slot]
            staging = self.lane.staging(slot, nbytes)
            assert (staging.dtype, staging.shape) == (torch.uint8, (nbytes,))
            staging.copy_(content(self.number, slot, generation, nbytes))
            if staging.is_cuda:
                torch.cuda.synchronize(staging.device)
            parts = tuple(
                part.bytes if isinstance(part, zmq.Frame) else part
                for part in self.lane.send(slot, generation, nbytes)
            )
            self.sent.append((slot, generation, nbytes, parts))
            self.generations[slot] += 1
            self.num_sent += 1

    def poll(self) -> list[Announced]:
        found = []
        for slot in self.lane.poll():
            assert self.sent, f"source: slot {slot} was named and not sent"
            first = self.sent.pop(0)
            assert slot == first[0], f"source: slot {slot} was named before slot {first[0]}"
            found.append(Announced(self.number, *first))
        return found

    def credited(self, slot: int) -> None:
        self.lane.staging(slot, self.slots.slot_nbytes).fill_(POISON)
        self.free.append(slot)
        self.num_credited += 1


@dataclass
class Taker:
    """Compares what comes, except each seventh chunk, which is not wanted; frees in any order."""

    number: int
    lane: SinkLane
    announced: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Slot to (generation, nbytes)."""
    generations: dict[int, int] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    num_taken: int = 0

    def hear(self, message: Attached | Announced) -> None:
        if isinstance(message, Attached):
            self.lane.connected(message.address)
        else:
            self._take(message)

    def _take(self, message: Announced) -> None:
        due = self.generations.get(message.slot, 0)
        assert message.generation == due, (message, due)
        self.generations[message.slot] = due + 1
        self.announced[message.slot] = (message.generation, message.nbytes)
        frames = [zmq.Frame(part) for part in message.parts]
        self.lane.announced(message.slot, message.generation, message.nbytes, frames)

    def poll(self) -> int:
        """How many payloads were there."""
        found = self.lane.poll()
        for slot in found:
            generation, nbytes = self.announced.pop(slot)
            self.num_taken += 1
            if self.num_taken % 7:
                got = self.lane.payload(slot)
                want = content(self.number, slot, generation, nbytes).to(got.device)
                try:
                    assert_same_bytes(got, want)
                except AssertionError as exc:
                    raise AssertionError(
                        f"lane {self.number} slot {slot} generation {generation}: {exc}"
                    ) from exc
            self.held.append(slot)
        return len(found)

    def free(self, keep: int = 0) -> list[int]:
        """Frees all but ``keep`` slots, in random order; which ones."""
        random.shuffle(self.held)
        freed, self.held = self.held[keep:], self.held[:keep]
        for slot in freed:
            self.lane.free(slot)
        return freed


class Node:
    """A process with one pipe, its connections, and the channel to the other process."""

    def __init__(self, case: PipeCase, channel: Connection) -> None:
        self.case, self.channel = case, channel
        self.device = torch.device(case.device)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.pipe = case.make_pipe(self.device, lambda: os.eventfd_write(self._wake_fd, 1))
        self.givers: dict[int, Giver] = {}
        self.takers: dict[int, Taker] = {}
        self.sizes: dict[int, list[int]] = {}
        """What to give on a lane that the peer attaches."""
        self.stages: set[str] = set()
        self.ended: set[int] = set()
        self.broken: dict[int, str] = {}
        self.slow_credits = False
        self.reading, self.writing = threading.Lock(), threading.Lock()
        """Held while messages are: who is killed then leaves half of one to the next reader."""
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    # -- connections

    def attach(self, number: int, slots: Slots) -> None:
        """Take over a new connection."""
        lane = self.pipe.open_sink(slots, self.case.way)
        self.takers[number] = Taker(number, lane)
        self.say(Attach(number, slots, lane.address))

    def close_lane(self, number: int) -> None:
        """Within CLOSE_MAX_S; what broke it has a reason."""
        assert self.broken.get(number, "not broken"), "PipeBroken: expected a reason"
        giver, taker = self.givers.pop(number, None), self.takers.pop(number, None)
        for end in (giver, taker):
            if end is not None:
                begin_s = time.monotonic()
                end.lane.close()
                end.lane.close()  # idempotent
                took_s = time.monotonic() - begin_s
                assert took_s < self.case.close_max_s, f"close took {took_s:.2f} s"
        self.say(Ended(number))

    def close(self) -> None:
        self._outgoing.put(None)
        self._sender.join()
        begin_s = time.monotonic()
        self.pipe.close()
        self.pipe.close()
        took_s = time.monotonic() - begin_s
        assert took_s < self.case.close_max_s, f"close of the pipe took {took_s:.2f} s"
        os.close(self._wake_fd)

    # -- the loop

    def say(self, message: Message) -> None:
        """Never blocks, as a ZeroMQ socket does not."""
        self._outgoing.put(message)

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            with self.writing, contextlib.suppress(BrokenPipeError):
                self.channel.send(message)

    def until(self, wanted: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Goes round until it is so."""
        deadline_s = time.monotonic() + timeout_s
        self.turn(0.0)
        while not wanted():
            assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s: {self}"
            is_holding = any(taker.held for taker in self.takers.values())
            self.turn(0.0 if is_holding else self.case.tick_s)

    def until_attached(self, number: int) -> None:
        """The sink has taken up a connection that this node gives on."""
        self.until(lambda: number in self.givers, f"{number} attached")

    def until_ended(self, number: int) -> None:
        """The peer has closed its end."""
        self.until(lambda: number in self.ended, f"{number} closed by the peer")

    def until_given(self, number: int) -> None:
        """Everything was sent and credited."""
        self.until_attached(number)
        self.until(lambda: self.givers[number].done, f"{number} all credited")

    def until_taken(self, number: int, num_chunks: int, *, or_broken: bool = False) -> None:
        """So many chunks have come."""
        self.until(
            lambda: (
                self.takers[number].num_taken >= num_chunks or (or_broken and number in self.broken)
            ),
            f"{num_chunks} chunks on {number}",
        )

    def stage(self, name: str) -> None:
        """Both sides meet here."""
        self.say(Stage(name))
        self.until(lambda: name in self.stages, f"stage {name}")

    def turn(self, timeout_s: float) -> None:
        """As an IO thread does: wait, read messages, progress, poll."""
        readable = wait([self.channel, self._wake_fd, *self.pipe.fds()], timeout_s)
        assert readable or not timeout_s or not self.case.wakes, f"nobody woke: {self}"
        if self._wake_fd in readable:
            os.eventfd_read(self._wake_fd)
        with self.reading:
            messages = []
            while self.channel.poll():
                messages.append(self.channel.recv())
        for message in messages:
            self.hear(message)
        self.pipe.progress()
        ends: list[Giver | Taker] = [*self.givers.values(), *self.takers.values()]
        for end in ends:
            self._guard(end.number, partial(self._hear_from, end.lane))
        for giver in list(self.givers.values()):
            self._guard(giver.number, partial(self._give, giver))
        for taker in list(self.takers.values()):
            self._guard(taker.number, partial(self._take, taker))

    def _give(self, giver: Giver) -> None:
        found = giver.poll()
        giver.fill()
        found += giver.poll()
        for announced in found:
            self._tell(giver.lane, announced)

    def _take(self, taker: Taker) -> None:
        found = taker.poll()
        # Held slots are freed later and in another order; in the end all of them.
        keep = random.randrange(3) if self.slow_credits and found else 0
        for slot in taker.free(keep):
            self._tell(taker.lane, Credit(taker.number, slot))

    def _tell(self, lane: Lane, message: Announced | Credit) -> None:
        has_parts = isinstance(message, Announced) and message.parts
        if has_parts or not lane.tell(pickle.dumps(message)):
            self.say(message)

    def _hear_from(self, lane: Lane) -> None:
        for message in lane.heard():
            self.hear(pickle.loads(message))

    def _guard(self, number: int, act: Callable[[], None]) -> None:
        if number in self.broken:
            return
        try:
            act()
        except PipeBroken as exc:
            self.broken[number] = str(exc)  # not its frames, which hold the lane

    def hear(self, message: Message) -> None:
        """What is for a connection that is closed already is not looked at."""
        if isinstance(message, Attach):
            lane = self.pipe.open_source(message.address, message.slots)
            giver = Giver(message.lane, lane, message.slots, self.sizes[message.lane])
            self.givers[message.lane] = giver
            self.say(Attached(message.lane, lane.address))
        elif isinstance(message, Attached | Announced):
            if taker := self.takers.get(message.lane):
                self._guard(message.lane, partial(taker.hear, message))
        elif isinstance(message, Credit):
            if message.lane in self.givers:
                self.givers[message.lane].credited(message.slot)
        elif isinstance(message, Ended):
            self.ended.add(message.lane)
        else:
            self.stages.add(message.name)

    def check(self) -> None:
        """Nothing broke that the peer had not closed."""
        broken = {n: error for n, error in self.broken.items() if n not in self.ended}
        assert not broken, broken

    def __str__(self) -> str:
        gave = {n: (g.num_sent, g.num_credited, len(g.sizes)) for n, g in self.givers.items()}
        took = {n: t.num_taken for n, t in self.takers.items()}
        last = list(self.broken.items())[-3:]
        return f"gave {gave}, took {took}, ended {len(self.ended)}, broken last {last}"
