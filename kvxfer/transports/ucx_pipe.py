"""UCX as a pipe: one tag message for each chunk, from staging to staging, and a short one for each
announcement and credit (``ucx_end``).

Each end of a connection has a UCX worker of its own (``ucx_end``); beside that a tag names the
connection, by a number that the sink draws, the slot and the generation. Over TCP on one device a
worker costs 3 ms, 5 descriptors and next to no memory, and to connect it 10 ms.

A receive is posted for each slot as soon as the source's end is known, and again for the next
generation when the slot is freed. Peer error handling is always on: without it a killed peer takes
the process along or leaves requests without an end.
"""

from __future__ import annotations

import logging
import secrets
import select
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import msgspec
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.device_memory import current_context
from kvxfer.transports.base import Wake
from kvxfer.transports.native_peers import net_devices, parse_address
from kvxfer.transports.pipe import (
    Lane,
    Parts,
    Pipe,
    PipeBroken,
    SinkLane,
    Slots,
    SourceLane,
    check_no_parts,
)
from kvxfer.transports.ucx_end import CONNECTION_BITS, UcxEnd, UcxMail, tag_of
from kvxfer.transports.ucx_library import Request, Ucx

SPIN_S = 30e-6
"""How long ``progress`` looks on after something has happened. What belongs to it follows within
that on one host and in one rack, and the way through sleep and wake takes 20 to 40 us. No longer:
two processes that spin on shared cores lose half to three quarters of their throughput."""
TURN_S = 500e-6
"""After this long the IO thread looks at its other work, and comes back at once."""
LOOK_S, LOOK_BYTES_PER_S = 100e-6, 200e9
"""How long the IO thread does not sleep, between GPUs, for a payload that was announced: by NVLink
it is there within that, and UCX told an armed worker of it 0.1 to 0.9 ms late.
"""

_log = logging.getLogger("kvxfer.transports")
_quarantine: list[UcxEnd] = []  # what outlives its pipe


class SinkAddress(msgspec.Struct, frozen=True, array_like=True):
    """What a sink's end says of itself: the number of the connection, and its worker's address."""

    connection: Annotated[int, msgspec.Meta(ge=0, lt=1 << CONNECTION_BITS)]
    worker: bytes


class SourceAddress(msgspec.Struct, frozen=True, array_like=True):
    """What a source's end says of itself: its worker's address."""

    worker: bytes


class UcxLane(Lane):
    """The part that both ends of a connection share."""

    def __init__(self, pipe: UcxPipe, end: UcxEnd, connection: int) -> None:
        self._pipe, self.end, self._connection = pipe, end, connection
        self._mail = UcxMail(end, connection)
        self._is_open = True

    def tell(self, message: bytes) -> bool:
        """Send a message behind the payloads that were sent before."""
        if not (self._is_open and self.end.is_connected):
            return False
        with self._pipe.on_device():
            return self._mail.send(message)

    def heard(self) -> Sequence[bytes]:
        """Messages of the other end that have arrived."""
        if not (self._is_open and self._mail.has_arrived):
            return ()
        with self._pipe.on_device():
            return self._mail.receive()

    @property
    def has_arrivals(self) -> bool:
        """Is there something that the wire would take now?"""
        return self._mail.has_arrived

    def expects_soon(self, now_s: float) -> bool:
        """Whether to sleep would take longer than what is on its way."""
        return False

    def close(self) -> None:
        """What was not sent yet never is; what arrives is thrown away with the worker."""
        if self._is_open:
            self._is_open = False
            self._pipe.finish(self.end)


class UcxSourceLane(UcxLane, SourceLane):
    """Sends at once; UCX queues what the network does not take yet."""

    def __init__(self, pipe: UcxPipe, end: UcxEnd, connection: int) -> None:
        """Raises PipeBroken if the receive of messages cannot be posted."""
        super().__init__(pipe, end, connection)
        self._mail.listen()
        self._sent: list[int] = []
        self.address = msgspec.msgpack.encode(SourceAddress(end.worker.address.tobytes()))

    def staging(self, slot: int, nbytes: int) -> torch.Tensor:
        """The beginning of the slot."""
        return self.end.beginning(slot, nbytes)

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        """A tag message; nothing travels with the announcement."""
        with self._pipe.on_device():
            self.end.send(slot, tag_of(self._connection, slot, generation), nbytes)
        self._sent.append(slot)
        return ()

    def poll(self) -> Sequence[int]:
        """At once: the sink's UCX tells when a payload is there."""
        if self._is_open:
            self.end.check()
        sent, self._sent = self._sent, []
        return sent


class UcxSinkLane(UcxLane, SinkLane):
    """Keeps a receive posted for each slot that belongs to the source."""

    def __init__(self, pipe: UcxPipe, end: UcxEnd) -> None:
        super().__init__(pipe, end, secrets.randbits(CONNECTION_BITS))
        self._posted: dict[int, Request] = {}
        self._generations = [0] * end.slots.num_slots
        self._announced: dict[int, int] = {}
        """Slot to size, until ``poll`` names the slot."""
        self._nbytes = [0] * end.slots.num_slots
        self._look_until_s = 0.0
        self.address = msgspec.msgpack.encode(
            SinkAddress(self._connection, end.worker.address.tobytes())
        )

    def connected(self, address: bytes) -> None:
        """Now a receive can be bound to an endpoint, which is what ends it when that fails."""
        source = parse_address("ucx", address, SourceAddress)
        with self._pipe.on_device():
            self.end.connect(source.worker)
            for slot in range(self.end.slots.num_slots):
                self._post(slot)
            self._mail.listen()

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        """It is there when its receive has completed."""
        check_no_parts(parts)
        self._announced[slot] = nbytes
        self._look_until_s = time.perf_counter() + LOOK_S + nbytes / LOOK_BYTES_PER_S
        if self._pipe.is_fast:
            self._pipe.drive_soon(self.end)

    def poll(self) -> Sequence[int]:
        """Both announced and received. A payload that is there counts, even if the peer has died
        since.
        """
        if not self._is_open:
            return ()
        arrived = [slot for slot in self._announced if self._is_there(slot)]
        for slot in arrived:
            self.end.take(self._posted.pop(slot))
            self._nbytes[slot] = self._announced.pop(slot)
        if not arrived:
            self.end.check()
        return arrived

    @property
    def has_arrivals(self) -> bool:
        """Would ``heard`` return anything, or ``poll`` name a slot?"""
        return self._mail.has_arrived or any(self._is_there(slot) for slot in self._announced)

    def expects_soon(self, now_s: float) -> bool:
        """Whether to sleep would take longer than what is on its way."""
        return self._pipe.is_fast and bool(self._announced) and now_s < self._look_until_s

    def _is_there(self, slot: int) -> bool:
        request = self._posted.get(slot)
        return request is not None and bool(request.completed)

    def payload(self, slot: int) -> torch.Tensor:
        """The beginning of the slot."""
        return self.end.beginning(slot, self._nbytes[slot])

    def free(self, slot: int) -> None:
        """The receive of the next generation is posted before its credit leaves."""
        self._generations[slot] += 1
        with self._pipe.on_device():
            self._post(slot)

    def _post(self, slot: int) -> None:
        tag = tag_of(self._connection, slot, self._generations[slot])
        self._posted[slot] = self.end.receive(slot, tag)

    def close(self) -> None:
        """The same; nobody asks for what was posted."""
        self._posted.clear()
        super().close()


class UcxPipe(Pipe):
    """A UCX context, and a descriptor that tells when one of its workers has something to do.
    ``is_fast``: payloads lie in the memory of a GPU.
    """

    name = "ucx"
    reads_peers = True

    def __init__(self, device: torch.device, config: Config, wake: Wake) -> None:
        """Staging lies on ``device``. Raises TransportUnavailable: what is missing, and what to
        install.
        """
        self._device, self._wake = device, wake
        self.is_fast = device.type == "cuda"
        self._ucx = Ucx()
        with self.on_device():
            self._context: object = self._ucx.context(device, net_devices(config))
        self._epoll = select.epoll()
        self._lanes: dict[int, UcxLane] = {}
        """Those that are open, by the descriptor of their worker."""
        self._restless: set[int] = set()
        """Workers that have something to do although their descriptor may be silent."""
        self._quarantined: list[UcxEnd] = []

    @property
    def quarantined_nbytes(self) -> int:
        """Staging that is kept until the process ends, because an operation on it has no end."""
        return sum(end.slots.nbytes for end in self._quarantined)

    def on_device(self) -> AbstractContextManager[object]:
        """Around every call of UCX: it works in the CUDA context of the thread."""
        return current_context(self._device) if self._device.type == "cuda" else nullcontext()

    def open_source(self, address: bytes, slots: Slots) -> UcxSourceLane:
        """Begins to connect to the sink's worker."""
        try:
            sink = parse_address("ucx", address, SinkAddress)
        except PipeBroken as exc:
            raise TransportUnavailable(str(exc)) from exc
        with self.on_device():
            end = self._new_end(slots)
            try:
                end.connect(sink.worker)
                lane = UcxSourceLane(self, end, sink.connection)
            except PipeBroken as exc:
                self.finish(end)
                raise TransportUnavailable(
                    f"{exc}; unless both sides have trust_network set, UCX stays within a host"
                ) from exc
        self._lanes[end.fd] = lane
        return lane

    def open_sink(self, slots: Slots, way: str = "") -> UcxSinkLane:
        """A worker that waits for the source's address."""
        self.way_named(way)
        with self.on_device():
            end = self._new_end(slots)
            lane = UcxSinkLane(self, end)
        self._lanes[end.fd] = lane
        return lane

    def _new_end(self, slots: Slots) -> UcxEnd:
        end = UcxEnd(self._ucx, self._context, self._device, slots, self.drive_soon)
        self._epoll.register(end.fd, select.EPOLLIN)
        self._restless.add(end.fd)  # its descriptor speaks once it has been armed
        return end

    def fds(self) -> Sequence[int]:
        """One, whatever connections there are."""
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def drive_soon(self, *ends: UcxEnd) -> None:
        """Have ``progress`` called again at once, for these too."""
        self._restless.update(end.fd for end in ends)
        self._wake()

    def progress(self) -> None:
        """Drive the workers that have something to do, until they have not, a payload has arrived,
        or TURN_S is over.
        """
        if self._epoll.closed:
            return
        fds = self._restless | {fd for fd, _ in self._epoll.poll(0)}
        self._restless.clear()
        if lanes := [self._lanes[fd] for fd in fds if fd in self._lanes]:
            with self.on_device():
                self._drive(lanes)

    def _drive(self, lanes: Sequence[UcxLane]) -> None:
        workers = [lane.end.worker for lane in lanes]
        now_s = last_s = time.perf_counter()
        end_s = now_s + TURN_S
        while now_s < end_s:
            if any([worker.progress_once() for worker in workers]):
                last_s = now_s
                if any(lane.has_arrivals for lane in lanes):
                    break
            elif now_s - last_s >= SPIN_S:
                if any(lane.expects_soon(now_s) for lane in lanes):
                    break
                if all([worker.arm() for worker in workers]):
                    return
            now_s = time.perf_counter()
        self.drive_soon(*(lane.end for lane in lanes))

    def finish(self, end: UcxEnd) -> None:
        """This end of a connection is over."""
        self._lanes.pop(end.fd, None)
        self._restless.discard(end.fd)
        self._epoll.unregister(end.fd)
        with self.on_device():
            self._quarantined = [kept for kept in self._quarantined if not kept.finish()]
            if not end.finish():
                self._quarantined.append(end)
                _log.warning(
                    "ucx: %d bytes of staging are kept: an operation on them has no end",
                    end.slots.nbytes,
                )

    def close(self) -> None:
        """Close what is open, and UCX. Idempotent."""
        for lane in list(self._lanes.values()):
            lane.close()
        _quarantine.extend(self._quarantined)
        self._epoll.close()
        self._context = None
