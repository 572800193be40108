"""The pipe that every host has: the payload travels as a frame behind its announcement.

Python copies the payload only to pack and to unpack it. A slot of the source is a ZeroMQ message
that is packed and sent again and again, in pinned memory where a GPU packs it; the sink unpacks a
chunk straight out of the received frame, or out of a pinned copy of it.

A credit says that the chunk has left the source's socket, so the message may be written again. A
sink may say so of what it has not read: then ZeroMQ holds the message for as long as it likes. So a
chunk of another size is another message in the same memory, and a slot never costs more than that.
ZeroMQ tells a thread of pyzmq's when it lets go of a message, once for each that is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import zmq

from kvxfer.errors import ProtocolError
from kvxfer.transports.pipe import (
    HOST_STAGING,
    Parts,
    Pipe,
    SinkLane,
    Slots,
    SourceLane,
    StagingSize,
)

MakeMemory = Callable[[int], torch.Tensor]
"""So many bytes of host memory: flat uint8."""
_MALLOC_LESSON_NBYTES = 31 << 20


class ZmqSourceLane(SourceLane):
    """Memory for as many slots as are used."""

    address = b""

    def __init__(self, slots: Slots, make: MakeMemory) -> None:
        self._slot_nbytes = slots.slot_nbytes
        self._make = make
        self._buffers: dict[int, torch.Tensor] = {}
        self._frames: list[zmq.Frame | None] = [None] * slots.num_slots
        self._sent: list[int] = []

    def staging(self, slot: int, nbytes: int) -> torch.Tensor:
        """The slot's message, made anew when the size differs (the last chunk of a class)."""
        frame = self._frames[slot]
        if frame is None or len(frame) != nbytes:
            frame = self._frames[slot] = self._make_frame(slot, nbytes)
        return torch.frombuffer(frame.buffer, dtype=torch.uint8)

    def _make_frame(self, slot: int, nbytes: int) -> zmq.Frame:
        if slot not in self._buffers:
            self._buffers[slot] = self._make(self._slot_nbytes)
        # Of its own it would be cleared and copied once: 0.7 ms for 1 MiB, and this takes 0.03
        return zmq.Frame(self._buffers[slot][:nbytes].numpy(), copy=False)

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        frame = self._frames[slot]
        if frame is None or len(frame) != nbytes:
            raise ValueError(f"slot {slot}: expected {nbytes} packed bytes, got {frame!r}")
        self._sent.append(slot)
        return (frame,)

    def poll(self) -> Sequence[int]:
        sent, self._sent = self._sent, []
        return sent

    def close(self) -> None:
        """ZeroMQ keeps what it still sends."""
        self._frames = [None] * len(self._frames)
        self._buffers.clear()
        self._sent = []


class ZmqSinkLane(SinkLane):
    """Holds each received frame until its chunk is unpacked."""

    address = b""

    def __init__(self, slots: Slots) -> None:
        self._frames: list[zmq.Frame | None] = [None] * slots.num_slots
        self._arrived: list[int] = []

    def connected(self, address: bytes) -> None:
        """Nothing to do: the frames come over the connection that is there."""

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        if len(parts) != 1 or len(parts[0]) != nbytes:
            raise ProtocolError(
                f"chunk: expected a frame of {nbytes} bytes, got {[len(part) for part in parts]}"
            )
        self._frames[slot] = parts[0]
        self._arrived.append(slot)

    def poll(self) -> Sequence[int]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def payload(self, slot: int) -> torch.Tensor:
        """The bytes of the frame, which goes with the tensor: so it is freed by who unpacks."""
        frame, self._frames[slot] = self._frames[slot], None
        if frame is None:
            raise ValueError(f"slot {slot}: expected a chunk that nobody has taken, got none")
        return torch.frombuffer(frame.buffer, dtype=torch.uint8)

    def free(self, slot: int) -> None:
        self._frames[slot] = None

    def path(self, signals: str) -> str:
        return signals

    def close(self) -> None:
        self._frames = [None] * len(self._frames)
        self._arrived = []


class ZmqPipe(Pipe):
    """The pipe that needs no library but ZeroMQ. ``pinned``: makes memory that the GPU of the pool
    reaches, for what is sent.
    """

    name = "zmq"
    has_streams = True
    is_driven = False

    def __init__(self, pinned: MakeMemory | None = None) -> None:
        self._make = pinned or untouched
        _keep_freed_frames()

    @classmethod
    def staging_size(cls, device_type: str) -> StagingSize:
        """The same for every device: frames are host memory."""
        return HOST_STAGING

    def open_source(self, address: bytes, slots: Slots, *, fd: int | None = None) -> ZmqSourceLane:
        return ZmqSourceLane(slots, self._make)

    def open_sink(self, slots: Slots, way: str = "") -> ZmqSinkLane:
        self.way_named(way)
        return ZmqSinkLane(slots)

    def close(self) -> None:
        """Nothing: the pipe itself holds neither memory nor sockets."""


def untouched(nbytes: int) -> torch.Tensor:
    """Zeroed memory of which only what is written costs anything."""
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))


def _keep_freed_frames() -> None:
    """Teach glibc's malloc to keep the memory of received frames: the kernel need not clear it.

    It learns from the largest block that is freed (up to 32 MiB). Untaught, every frame of 1 MiB is
    paid for with 256 page faults: a third of the receiving thread's time. Memory that is not
    touched costs nothing.
    """
    np.empty(_MALLOC_LESSON_NBYTES, dtype=np.uint8)
