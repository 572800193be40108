"""A wire as another package would have it: chunks are deflated, and travel as frames of ZeroMQ.

It imports only what a package may rely on. ``WIRE`` is what its entry point names; the two
functions are what ``kvxfer.testing.check_transport`` is given.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError
from kvxfer.testing.peers import Context
from kvxfer.transports.base import LocalMemory, SinkTransport, SourceTransport, Wake
from kvxfer.transports.copy_thread import CopyThread
from kvxfer.transports.external import stream_wire
from kvxfer.transports.pipe import Parts, Pipe, SinkLane, Slots, SourceLane, make_staging


class DeflatingLane(SourceLane):
    """A chunk is deflated when it is sent, so its slot can be packed again at once."""

    address = b""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._staging = make_staging(slots.nbytes, torch.device("cpu"))
        self._sent: list[int] = []

    def staging(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._staging.narrow(0, slot * self._slots.slot_nbytes, nbytes)

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        self._sent.append(slot)
        return (zlib.compress(self.staging(slot, nbytes).numpy().tobytes(), 1),)

    def poll(self) -> Sequence[int]:
        sent, self._sent = self._sent, []
        return sent

    def close(self) -> None:
        self._sent = []


class InflatingLane(SinkLane):
    """Inflates at most what was announced, whatever a frame would make."""

    address = b""

    def __init__(self) -> None:
        self._payloads: dict[int, torch.Tensor] = {}
        self._came: list[int] = []

    def connected(self, address: bytes) -> None:
        pass

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        inflate = zlib.decompressobj()
        try:
            payload = inflate.decompress(b"".join(part.buffer for part in parts), nbytes)
        except zlib.error as exc:
            raise ProtocolError(f"chunk: {exc}") from exc
        if len(payload) != nbytes or inflate.unconsumed_tail:
            raise ProtocolError(f"chunk: expected {nbytes} bytes, got {len(payload)} or more")
        self._payloads[slot] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._came.append(slot)

    def poll(self) -> Sequence[int]:
        came, self._came = self._came, []
        return came

    def payload(self, slot: int) -> torch.Tensor:
        return self._payloads[slot]

    def free(self, slot: int) -> None:
        self._payloads.pop(slot, None)

    def close(self) -> None:
        self._payloads.clear()
        self._came = []


class DeflatePipe(Pipe):
    name = "deflate"

    def open_source(self, address: bytes, slots: Slots, *, fd: int | None = None) -> DeflatingLane:
        return DeflatingLane(slots)

    def open_sink(self, slots: Slots, way: str = "") -> InflatingLane:
        self.way_named(way)
        return InflatingLane()

    def close(self) -> None:
        pass


def deflate_pipe(memory: LocalMemory, config: Config, wake: Wake) -> DeflatePipe:
    return DeflatePipe()


WIRE = stream_wire(deflate_pipe, auto_for=("cpu",))
CONFIG = Config(staging_slots=4, peer_silent_s=1.0)


def make_source(
    memory: LocalMemory, copy_thread: CopyThread, wake: Wake, context: Context
) -> SourceTransport:
    return WIRE.make_source(memory, CONFIG, copy_thread, wake, context)


def make_sink(
    memory: LocalMemory, copy_thread: CopyThread, wake: Wake, context: Context
) -> SinkTransport:
    return WIRE.make_sink(memory, CONFIG, copy_thread, wake, context)
