"""A pipe within one process, whose payloads come when a test lets them, and which can break."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import zmq
from torch import Tensor

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transports.base import TRIAL_NBYTES, LocalMemory, Wake
from kvxfer.transports.pipe import Parts, Pipe, PipeBroken, SinkLane, Slots, SourceLane


@dataclass(slots=True)
class World:
    """What both ends share. ``is_write``: the source sees the end of a payload's way, and only then
    is it announced; else the sink does. ``carries``: announcements and credits, too, at once.
    ``is_held``: payloads stay on their way. ``breaks``: names of calls that raise. Of the pipe's
    ``ways`` ``large_s`` says how much longer the large message of a trial takes, ``failing`` ones
    cannot be opened, ``silent`` ones bring nothing, and ``barred`` ones may not be taken.
    """

    is_write: bool = False
    carries: bool = False
    is_held: bool = False
    breaks: set[str] = field(default_factory=set)
    ways: tuple[str, ...] = ("",)
    large_s: dict[str, float] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    barred: set[str] = field(default_factory=set)
    sinks: dict[bytes, MemorySinkLane] = field(default_factory=dict)
    sources: dict[bytes, MemorySourceLane] = field(default_factory=dict)
    num_told: int = 0
    wakes: set[Wake] = field(default_factory=set)
    moving: list[tuple[MemorySourceLane, MemorySinkLane, int, int, int]] = field(
        default_factory=list
    )
    in_move: threading.Lock = field(default_factory=threading.Lock)
    num_progress: int = 0
    num_open: int = 0
    num_pipes: int = 0

    def check(self, call: str) -> None:
        if call in self.breaks:
            raise PipeBroken(f"no {call}")

    def move(self) -> None:
        """All payloads that are on their way, unless they are held."""
        self.num_progress += 1
        with self.in_move:  # others may add to the list meanwhile, which stays the same one
            moving = [] if self.is_held else [self.moving.pop(0) for _ in range(len(self.moving))]
        for source, sink, slot, generation, nbytes in moving:
            assert generation == sink.generations[slot]
            sink.generations[slot] += 1
            sink.parts[slot][:nbytes].copy_(source.parts[slot][:nbytes])
            (source.done if self.is_write else sink.came).append(slot)
        if moving:
            self.wake()

    def wake(self) -> None:
        """Both ends, as descriptors would."""
        for wake in tuple(self.wakes):  # a trial's end comes and goes on a thread of its own
            wake()

    def carry(self, message: bytes, inbox: list[bytes]) -> bool:
        if self.carries:
            inbox.append(message)
            self.num_told += 1
            self.wake()
        return self.carries

    def make_pipe(self, memory: LocalMemory, config: Config, wake: Wake) -> Pipe:
        return MemoryPipe(self, wake)


def _parts(slots: Slots) -> list[Tensor]:
    return list(torch.zeros(slots.num_slots, slots.slot_nbytes, dtype=torch.uint8))


class MemorySourceLane(SourceLane):
    def __init__(self, world: World, address: bytes, slots: Slots, wake: Wake) -> None:
        self.address = b"source of " + address
        self._wake = wake
        world.sources[self.address] = self
        self.inbox: list[bytes] = []
        self.parts = _parts(slots)
        self.done: list[int] = []
        self.is_open = True
        self._world, self._peer = world, world.sinks[address]
        world.num_open += 1

    def staging(self, slot: int, nbytes: int) -> Tensor:
        assert self.is_open
        return self.parts[slot].narrow(0, 0, nbytes)

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        self._world.check("send")
        self._world.moving.append((self, self._peer, slot, generation, nbytes))
        if not self._world.is_write:
            self.done.append(slot)
        self._wake()  # ``progress`` moves it
        return ()

    def poll(self) -> Sequence[int]:
        self._world.check("source poll")
        done, self.done = self.done, []
        return done

    def tell(self, message: bytes) -> bool:
        self._world.check("source tell")
        return self._world.carry(message, self._peer.inbox)

    def heard(self) -> Sequence[bytes]:
        self._world.check("source heard")
        assert self.is_open
        heard, self.inbox = self.inbox, []
        return heard

    def close(self) -> None:
        self._world.num_open -= self.is_open
        self.is_open = False


class MemorySinkLane(SinkLane):
    def __init__(self, world: World, slots: Slots, way: str) -> None:
        self.address = f"sink {len(world.sinks)}".encode()
        self.inbox: list[bytes] = []
        self.way = way
        self.parts = _parts(slots)
        self.generations = [0] * slots.num_slots
        self.came: list[int] = []
        self.peer = b""
        self.is_open = True
        self._nbytes: dict[int, int] = {}
        self._world = world
        world.sinks[self.address] = self
        world.num_open += 1

    def connected(self, address: bytes) -> None:
        self._world.check("connected")
        self.peer = address

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        self._world.check("announced")
        if parts:
            raise ProtocolError("chunk: expected no frames")
        assert self.peer == b"source of " + self.address
        if nbytes >= TRIAL_NBYTES:
            time.sleep(self._world.large_s.get(self.way, 0.0))
        self._nbytes[slot] = nbytes
        if self._world.is_write:
            self.came.append(slot)

    def poll(self) -> Sequence[int]:
        self._world.check("sink poll")
        if self.way in self._world.silent:
            return ()
        named = [slot for slot in self.came if slot in self._nbytes]
        self.came = [slot for slot in self.came if slot not in self._nbytes]
        return named

    def tell(self, message: bytes) -> bool:
        self._world.check("sink tell")
        return bool(self.peer) and self._world.carry(message, self._world.sources[self.peer].inbox)

    def heard(self) -> Sequence[bytes]:
        if not self.peer:  # the source's end is not known yet
            return ()
        self._world.check("sink heard")
        assert self.is_open
        heard, self.inbox = self.inbox, []
        return heard

    def payload(self, slot: int) -> Tensor:
        assert self.is_open
        return self.parts[slot].narrow(0, 0, self._nbytes[slot])

    def free(self, slot: int) -> None:
        assert self.is_open
        self._world.check("free")
        self.parts[slot].fill_(0xDD)
        del self._nbytes[slot]

    def path(self, signals: str) -> str:
        return "memory"

    def close(self) -> None:
        self._world.num_open -= self.is_open
        self.is_open = False


class MemoryPipe(Pipe):
    name = "ucx"

    def __init__(self, world: World, wake: Wake) -> None:
        self._world, self._wake = world, wake
        world.wakes.add(wake)
        self.ways = world.ways
        self._is_open = True
        world.num_pipes += 1

    def ways_between(self, device_types: Collection[str]) -> Sequence[str]:
        return tuple(way for way in self.ways if way not in self._world.barred)

    def open_source(
        self, address: bytes, slots: Slots, *, fd: int | None = None
    ) -> MemorySourceLane:
        if "open_source" in self._world.breaks:
            raise TransportUnavailable("ucx: no way there")
        return MemorySourceLane(self._world, address, slots, self._wake)

    def open_sink(self, slots: Slots, way: str = "") -> MemorySinkLane:
        way = self.way_named(way)
        if "open_sink" in self._world.breaks:
            raise TransportUnavailable("ucx: no staging")
        if way in self._world.failing:
            raise TransportUnavailable(f"ucx: no way {way}")
        return MemorySinkLane(self._world, slots, way)

    def progress(self) -> None:
        self._world.move()

    def close(self) -> None:
        self._world.num_pipes -= self._is_open
        self._world.wakes.discard(self._wake)
        self._is_open = False
