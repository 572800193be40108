"""The contract of a pipe: how the payload of a chunk gets from the source's staging to the sink's.

A stream wire (``stream_source``, ``stream_sink``) packs, announces, credits and unpacks; a pipe
moves the payload. ZeroMQ tells when the other side has gone. ZeroMQ also carries announcements and
credits, unless the pipe does (``tell``): each ZeroMQ message wakes two threads of ZeroMQ before the
thread that reads it. A connection has *slots*: slot ``i`` of the source's staging is sent into slot
``i`` of the sink's, as its ``generation``-th chunk, counted from 0 on both sides. The slot belongs
to the source from the credit (at first: from the attach) until its chunk is announced, and to the
sink from then on.

Pipes are driven by the IO thread of a worker, like the wires above them; ``wake`` may be called
from any thread. A trial makes a pipe of its own on a thread of its own.

What a pipe promises, whatever its library does: bytes are written to staging only, never to a pool;
what belongs to another connection or generation never shows up in a slot; memory that an operation
may still touch is not freed and not used for anything else, even after ``close``.
"""

from __future__ import annotations

import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import KvxferError, ProtocolError, TransportUnavailable
from kvxfer.tensors.device_memory import allocate, beside_engine
from kvxfer.transfer.costs import BUSY_SLOTS, StagingBounds
from kvxfer.transports.base import TRIAL_NBYTES, LocalMemory, Wake

Parts = tuple[bytes | zmq.Frame, ...]
"""Frames that travel with an announcement, after its header."""


class PipeBroken(KvxferError):
    """A connection's payloads do not arrive any more; the connection is dropped."""


def check_no_parts(parts: Sequence[zmq.Frame]) -> None:
    """Raises ProtocolError for frames on a pipe whose payload comes another way."""
    if parts:
        raise ProtocolError(f"chunk: expected nothing beside its header, got {len(parts)} frames")


@dataclass(frozen=True, slots=True)
class Slots:
    """How many slots a connection has, and how many bytes each holds at most."""

    num_slots: int
    slot_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_nbytes


@dataclass(frozen=True, slots=True)
class StagingSize:
    """The default size of the staging of one connection: bytes of all of it, most bytes of a slot,
    and least number of slots.
    """

    nbytes: int
    most_slot_nbytes: int
    busy_slots: int = BUSY_SLOTS
    striped: bool = False
    """Whether all streams carry each chunk together, and one copy is as fast as all of them."""

    def over(self, num_streams: int) -> StagingSize:
        """For so many streams: each has three chunks, and so have both sides' copies."""
        busy_slots = self.busy_slots
        if not self.striped:
            busy_slots = busy_slots * (num_streams + 1) // 2
        return replace(self, nbytes=self.nbytes * num_streams, busy_slots=busy_slots)


HOST_STAGING = StagingSize(32 << 20, 8 << 20)
"""TCP and memory copies gain nothing by larger chunks."""
DEVICE_STAGING = StagingSize(256 << 20, 64 << 20, busy_slots=4)
"""At 300 GB/s 64 MiB take 0.2 ms, and a chunk costs the IO threads 0.4 ms each, whatever its size:
1 GiB over UCX between two H200s took 18 ms in 8 slots of 32 MiB, and 11 in 4 of 64.
"""


def staging_bounds(
    config: Config, pipe: Pipe | type[Pipe], device_types: Collection[str], num_streams: int
) -> StagingBounds:
    """The settings, and what is usual for the memory of both sides over so many streams."""
    sizes = [pipe.staging_size(each).over(num_streams) for each in device_types]
    return StagingBounds(
        nbytes=config.staging_nbytes or min(size.nbytes for size in sizes),
        most_chunk_nbytes=min(size.most_slot_nbytes for size in sizes),
        is_limit=config.staging_nbytes is not None,
        chunk_nbytes=config.chunk_nbytes,
        num_slots=config.staging_slots,
        busy_slots=min(size.busy_slots for size in sizes),
    )


DEVICE_TRIAL_NBYTES = 32 << 20
"""The large message between GPUs: a fast wire carries 4 MiB in less time than it takes to ask."""
MOST_TRIAL_SLOTS = 5
"""That a trial may have: earlier sinks ask for four small messages at once beside the large one."""
CHUNK_S = 100e-6
"""What a chunk costs each side at least, beside its bytes: jobs, credits, and threads that are
woken for them. 64 MiB took 65 ms of processor time in chunks of 4 MiB and 81 ms in chunks of 1 MiB.
"""
DEVICE_CHUNK_S = 400e-6
"""The same where a GPU packs or unpacks: two launches, and looks at their ends. Between two H200s
128 tokens went in two chunks, and 0.4 ms of their 2.4 were the second one's.
"""


def chunk_s(device_types: Collection[str]) -> float:
    """What a chunk costs each side between memories on such devices."""
    return CHUNK_S if set(device_types) == {"cpu"} else DEVICE_CHUNK_S


def trial_slots(*device_types: str) -> Slots:
    """One for the large message and one for the small one, so that each is filled once.

    ``device_types``: of the memory of both sides, or of the one that says what it admits; between
    unlike ones the large message is the smaller one, which either admits.
    """
    return Slots(2, TRIAL_NBYTES if "cpu" in device_types else DEVICE_TRIAL_NBYTES)


class Lane(ABC):
    """One end of one connection."""

    address: bytes
    """What the other end needs to know of this one: of the sink's with the attach, of the source's
    before the first chunk.
    """

    def tell(self, message: bytes) -> bool:
        """Carry an announcement or credit to the other end. False if it is for ZeroMQ to carry.

        Raises PipeBroken.
        """
        return False

    def heard(self) -> Sequence[bytes]:
        """The messages of the other end, in order; called after every ``progress``. Never blocks.

        Raises PipeBroken.
        """
        return ()

    @abstractmethod
    def close(self) -> None:
        """The connection has ended. Idempotent."""


class SourceLane(Lane):
    """The giving end of one connection."""

    @abstractmethod
    def staging(self, slot: int, nbytes: int) -> torch.Tensor:
        """Where to pack a chunk of ``nbytes`` that will be sent from this slot: flat uint8.

        Called on whatever thread packs.
        """

    @abstractmethod
    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        """The slot is packed: begin to send it. Returns what its announcement takes along.

        Raises PipeBroken.
        """

    @abstractmethod
    def poll(self) -> Sequence[int]:
        """Slots whose announcement may leave now, in the order of ``send``; each does at once, by
        ``tell`` or, where that says False, over ZeroMQ. Never blocks.

        A pipe whose sink learns by itself when the payload is there names a slot at once; one that
        writes into the sink's memory names it when the bytes lie there. Raises PipeBroken.
        """


class SinkLane(Lane):
    """The taking end of one connection."""

    @abstractmethod
    def connected(self, address: bytes) -> None:
        """The source's end is known. Raises PipeBroken."""

    @abstractmethod
    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        """A chunk was announced, wanted or not. Raises ProtocolError for parts that do not belong
        to it, PipeBroken.
        """

    @abstractmethod
    def poll(self) -> Sequence[int]:
        """Announced slots whose payload lies in staging now. Never blocks. Raises PipeBroken."""

    @abstractmethod
    def payload(self, slot: int) -> torch.Tensor:
        """The payload of a slot that ``poll`` has named: flat uint8 of the announced size.

        Read on whatever thread unpacks, until ``free``.
        """

    @abstractmethod
    def free(self, slot: int) -> None:
        """A slot that ``poll`` has named was unpacked, or is not wanted: get ready for the next
        generation, whose credit leaves after this call. Raises PipeBroken.
        """

    def path(self, signals: str) -> str:
        """What carries the payload, for people ("TCP"); empty where that says nothing more than
        the pipe's name. ``signals``: what ZeroMQ's messages go over.
        """
        return ""


class Pipe(ABC):
    """One library on one rank, for one side of a wire."""

    name: str
    ways: tuple[str, ...] = ("",)
    """In which it can move bytes, the usual one first; a sink takes one for each connection, by
    trial (``stream_trial``). Ends on the source's side are made for any of them.
    """
    has_streams: bool = False
    """Whether its payloads travel with their announcements, over whichever of several streams."""
    num_sockets: int = 1
    """Of its own, over which it carries the payloads of a connection; staging is for as many."""
    reads_peers: bool = False
    """Whether its library reads what peers send, in ways that kvxfer cannot check before; see
    ``native_peers``.
    """
    is_driven: bool = True
    """Whether ``progress``, ``tell`` and ``heard`` do something; False where all that a connection
    has goes through ZeroMQ.
    """

    @classmethod
    def staging_size(cls, device_type: str) -> StagingSize:
        """For pools on such a device; a pipe whose staging lies elsewhere says so."""
        return HOST_STAGING if device_type == "cpu" else DEVICE_STAGING

    def ways_between(self, device_types: Collection[str]) -> Sequence[str]:
        """Those of ``ways`` that a sink may take between memories on such devices."""
        return self.ways

    def listen(self) -> None:
        """This end gives: be ready for sinks. Called once, before any of them attaches.

        Raises ConfigError where its port cannot be had, TransportUnavailable.
        """
        return

    def take_counts(self) -> Mapping[str, int]:
        """What its listener has refused since the last call, by why."""
        return {}

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to drive as long as no lane is open."""
        return True

    @abstractmethod
    def open_source(self, address: bytes, slots: Slots, *, fd: int | None = None) -> SourceLane:
        """The giving end of a connection, for a sink that gave this address. ``fd``: of the
        connection by which it came, for a pipe that ``reads_peers``: see
        :func:`kvxfer.transports.native_peers.check_way`.

        Raises TransportUnavailable.
        """

    @abstractmethod
    def open_sink(self, slots: Slots, way: str = "") -> SinkLane:
        """The taking end of a connection. ``way``: one of ``ways``, or "", the usual one.

        Raises TransportUnavailable, and ValueError for a way that it does not have.
        """

    def way_named(self, way: str) -> str:
        """The one of ``ways`` that is meant. Raises ValueError."""
        if way and way not in self.ways:
            raise ValueError(f"{self.name}: way: expected one of {self.ways}, got {way!r}")
        return way or self.ways[0]

    def fds(self) -> Sequence[int]:
        """File descriptors that can be read when ``progress`` has something to do."""
        return ()

    def progress(self) -> None:
        """Let the library do what there is to do. Never blocks for long; called whenever the IO
        thread is awake, before what has come is looked at. After it the descriptors tell of what is
        new; what a call of a lane's begins and has to be driven on wakes the IO thread.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Close every lane and give everything back. Idempotent."""


MakePipe = Callable[[LocalMemory, Config, Wake], Pipe]
"""One end of a pipe for this rank's memory. Raises TransportUnavailable."""


def make_staging(nbytes: int, device: torch.device) -> torch.Tensor:
    """Flat uint8, zeroed. Raises TransportUnavailable, also where there is no room for it.

    The memory is a mapping of its own and not from an allocator: memory that a peer might still
    write to must never become part of another tensor. The mapping is unmapped when its last tensor
    goes.
    """
    try:
        if device.type == "cpu":
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        with beside_engine(device):  # zeros that come later would be in the place of chunks
            return torch.as_tensor(_OwnedMemory(nbytes, device), device=device).zero_()
    except (OSError, RuntimeError) as exc:  # RuntimeError: PyTorch's, and the driver's
        raise TransportUnavailable(
            f"staging: expected {nbytes} bytes of {device}, got {exc}"
        ) from exc


class _OwnedMemory:
    """Memory of a GPU, as tensors take it over; freed with the last of them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        mapped = allocate(nbytes, device)
        # Not at exit: the driver may be gone by then, and the memory goes with the process.
        weakref.finalize(self, mapped.close).atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (mapped.memory.address, False),
            "version": 3,
        }
