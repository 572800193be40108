"""Both ends of a connection over UCX, as a stream wire uses them: payloads from slot to slot, and
messages beside them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Protocol

import msgspec
import torch
import zmq

from kvxfer.transports.native_peers import parse_address
from kvxfer.transports.pipe import Lane, Parts, SinkLane, SourceLane, check_no_parts
from kvxfer.transports.ucx_end import CONNECTION_BITS, UcxEnd, tag_of
from kvxfer.transports.ucx_library import Request
from kvxfer.transports.ucx_mail import UcxMail

LOOK_S, LOOK_BYTES_PER_S = 100e-6, 200e9
"""How long the IO thread does not sleep, between GPUs, for a payload that was announced: by NVLink
it is there within that, and UCX told an armed worker of it 0.1 to 0.9 ms late.
"""


class Driver(Protocol):
    """The pipe, as far as its lanes use it. ``is_fast``: payloads lie in the memory of a GPU."""

    is_fast: bool

    def on_device(self) -> AbstractContextManager[object]:
        """Around every call of UCX."""

    def drive_soon(self, *ends: UcxEnd) -> None:
        """Have these driven at once."""

    def finish(self, end: UcxEnd) -> None:
        """This end of a connection is over."""


class SinkAddress(msgspec.Struct, frozen=True, array_like=True):
    """Of a sink's end."""

    connection: Annotated[int, msgspec.Meta(ge=0, lt=1 << CONNECTION_BITS)]
    worker: bytes


class SourceAddress(msgspec.Struct, frozen=True, array_like=True):
    """Of a source's end."""

    worker: bytes


class UcxLane(Lane):
    """What both ends of a connection do alike."""

    def __init__(self, pipe: Driver, end: UcxEnd, connection: int) -> None:
        self._pipe, self.end, self._connection = pipe, end, connection
        self._mail = UcxMail(end, connection)
        self._is_open = True

    def tell(self, message: bytes) -> bool:
        """Behind the payloads that were sent before."""
        if not (self._is_open and self.end.is_connected):
            return False
        with self._pipe.on_device():
            return self._mail.send(message)

    def heard(self) -> Sequence[bytes]:
        """What has come."""
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
    """Sends at once; UCX holds back what the network does not take yet."""

    def __init__(self, pipe: Driver, end: UcxEnd, connection: int) -> None:
        """Raises PipeBroken."""
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
    """Has a receive posted for each slot that is the source's."""

    def __init__(self, pipe: Driver, end: UcxEnd) -> None:
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
