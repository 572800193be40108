"""UCX as a pipe: one tag message for each chunk, from staging to staging, and a short one for each
announcement and credit (:class:`UcxMail`).

Each end of a connection has a UCX worker of its own (:class:`UcxEnd`); beside that a tag names the
connection, by a number that the sink draws, the slot and the generation. Over TCP on one device a
worker costs 3 ms, 5 descriptors and next to no memory, and to connect it 10 ms.

A receive is posted for each slot as soon as the source's end is known, and again for the next
generation when the slot is freed. Peer error handling is always on: without it a killed peer takes
the process along or leaves requests without an end.

No operation of a peer that lives is cancelled: UCX cannot take back what has begun, and ``ucxx``
keeps what it was told to cancel, with its worker. So a closed end is driven on until nothing of it
is under way: the source's until its payloads have gone, and then it ends the connection; the sink's
until that has come, for only the source knows what is under way. What outlives its pipe goes to
another pipe of the process.
"""

from __future__ import annotations

import logging
import secrets
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Annotated

import msgspec
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.device_memory import current_context
from kvxfer.transfer.pull import MAX_CHUNK_NBYTES
from kvxfer.transports.base import Wake
from kvxfer.transports.native_peers import check_way, net_devices, parse_address
from kvxfer.transports.pipe import (
    Lane,
    Parts,
    Pipe,
    PipeBroken,
    SinkLane,
    Slots,
    SourceLane,
    check_no_parts,
    make_staging,
)
from kvxfer.transports.ucx_library import Endpoint, Request, Ucx

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
SLOW_LOOK_S = 0.05
"""How often a closed end has a turn whatever its descriptor says."""
KEPT_S = 1.0
"""What is still under way this long after a close counts as quarantined: the peer stands still."""
CLOSE_S = 0.5
"""How long ``close`` waits for closed ends, where no other pipe of the process takes them."""

_log = logging.getLogger("kvxfer.transports")
_open_pipes: weakref.WeakSet[UcxPipe] = weakref.WeakSet()
_open_pipes_lock = threading.Lock()
_left: deque[UcxEnd] = deque()
"""Closed ends that have outlived their pipe, until another one takes them."""


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
        if not (self._is_open and self._mail.has_arrived):
            return ()
        with self._pipe.on_device():
            return self._mail.receive()

    @property
    def has_arrivals(self) -> bool:
        return self._mail.has_arrived

    def expects_soon(self, now_s: float) -> bool:
        """Whether to sleep would take longer than what is on its way."""
        return False

    def close(self) -> None:
        """What is under way ends in staging that is kept for it; nobody looks at it."""
        if self._is_open:
            self._is_open = False
            self._mail.forget()
            self._pipe.retire(self.end)


class UcxSourceLane(UcxLane, SourceLane):
    """Sends at once; UCX queues what the network does not take yet."""

    def __init__(self, pipe: UcxPipe, end: UcxEnd, connection: int) -> None:
        """Raises PipeBroken if the receive of messages cannot be posted."""
        super().__init__(pipe, end, connection)
        self._mail.listen()
        self._sent: list[int] = []
        self.address = msgspec.msgpack.encode(SourceAddress(end.worker.address.tobytes()))

    def staging(self, slot: int, nbytes: int) -> torch.Tensor:
        return self.end.beginning(slot, nbytes)

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        with self._pipe.on_device():
            self.end.send(slot, tag_of(self._connection, slot, generation), nbytes)
        self._sent.append(slot)
        return ()

    def poll(self) -> Sequence[int]:
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
        check_no_parts(parts)
        self._announced[slot] = nbytes
        self._look_until_s = time.perf_counter() + LOOK_S + nbytes / LOOK_BYTES_PER_S
        if self._pipe.is_fast:
            self._pipe.drive_soon(self.end)

    def poll(self) -> Sequence[int]:
        """A payload that is there counts, even if the peer has died since."""
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
        return self._mail.has_arrived or any(self._is_there(slot) for slot in self._announced)

    def expects_soon(self, now_s: float) -> bool:
        return self._pipe.is_fast and bool(self._announced) and now_s < self._look_until_s

    def _is_there(self, slot: int) -> bool:
        request = self._posted.get(slot)
        return request is not None and bool(request.completed)

    def payload(self, slot: int) -> torch.Tensor:
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
        self._posted.clear()
        super().close()


class UcxPipe(Pipe):
    """A UCX context, and a descriptor that tells when one of its workers has something to do.
    ``is_fast``: payloads lie in the memory of a GPU.
    """

    name = "ucx"
    reads_peers = True

    def __init__(self, device: torch.device, config: Config, wake: Wake) -> None:
        """Staging lies on ``device``. Raises TransportUnavailable: what is missing."""
        self._device, self._wake = device, wake
        self.is_fast = device.type == "cuda"
        self._ucx = Ucx()
        with self.on_device():
            self._context: object = self._ucx.context(device, net_devices(config))
        self._epoll = select.epoll()
        self._lanes: dict[int, UcxLane] = {}
        """Those that are open, by the descriptor of their worker."""
        self._ending: dict[int, UcxEnd] = {}
        """Those that were closed and have something under way, in the same way."""
        self._next_look_s = 0.0
        self._restless: set[int] = set()
        """Workers that have something to do although their descriptor may be silent."""
        with _open_pipes_lock:
            _open_pipes.add(self)

    @property
    def quarantined_nbytes(self) -> int:
        """Staging that was closed some time ago and is kept: an operation on it has no end."""
        now_s = time.monotonic()
        return sum(end.slots.nbytes for end in self._ending.values() if end.is_late(now_s))

    @property
    def is_idle(self) -> bool:
        return not (self._ending or _left)

    def on_device(self) -> AbstractContextManager[object]:
        return on_device(self._device)

    def open_source(self, address: bytes, slots: Slots, *, fd: int | None = None) -> UcxSourceLane:
        try:
            sink = parse_address("ucx", address, SinkAddress)
        except PipeBroken as exc:
            raise TransportUnavailable(str(exc)) from exc
        with self.on_device():
            end = self._new_end(slots)
            try:
                if fd is not None:
                    check_way("ucx", fd)  # behind the worker, which takes 3 ms
                end.connect(sink.worker)
                lane = UcxSourceLane(self, end, sink.connection)
            except PipeBroken as exc:
                self.retire(end)
                raise TransportUnavailable(
                    f"{exc}; unless both sides have trust_network set, UCX stays within a host"
                ) from exc
        self._lanes[end.fd] = lane
        return lane

    def open_sink(self, slots: Slots, way: str = "") -> UcxSinkLane:
        self.way_named(way)
        with self.on_device():
            end = self._new_end(slots, ends_last=True)
            lane = UcxSinkLane(self, end)
        self._lanes[end.fd] = lane
        return lane

    def _new_end(self, slots: Slots, *, ends_last: bool = False) -> UcxEnd:
        end = UcxEnd(self._ucx, self._context, self._device, slots, ends_last=ends_last)
        self._adopt(end)
        return end

    def _adopt(self, end: UcxEnd) -> None:
        end.restless = self.drive_soon
        self._epoll.register(end.fd, select.EPOLLIN)
        self._restless.add(end.fd)  # its descriptor speaks once it has been armed

    def fds(self) -> Sequence[int]:
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
        if self._ending or _left:
            self._end(fds)

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

    # -- ends that were closed

    def retire(self, end: UcxEnd) -> None:
        """Drive it on until nothing of it is under way."""
        self._lanes.pop(end.fd, None)
        end.closed_s = time.monotonic()
        self._ending[end.fd] = end
        self._end((end.fd,))

    def _end(self, fds: Iterable[int]) -> None:
        """A turn for those of these descriptors, and now and then for all."""
        for end in _taken(_left):
            self._adopt(end)
            self._ending[end.fd] = end
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + SLOW_LOOK_S
            fds = tuple(self._ending)
        for end in [self._ending[fd] for fd in fds if fd in self._ending]:
            if end.is_over():
                self._forget(end)
                end.let_go()
            elif end.is_late(now_s):
                end.warn_once()

    def _forget(self, end: UcxEnd) -> None:
        del self._ending[end.fd]
        self._restless.discard(end.fd)
        self._epoll.unregister(end.fd)

    def close(self) -> None:
        """What is under way is driven on by another pipe of the process. Without one it is waited
        for, and what is left then is kept.
        """
        if self._epoll.closed:
            return
        for lane in list(self._lanes.values()):
            lane.close()
        with _open_pipes_lock:
            _open_pipes.discard(self)
            others = list(_open_pipes)
        give_up_s = time.monotonic() + CLOSE_S
        while (self._ending or _left) and not others and time.monotonic() < give_up_s:
            self._epoll.poll(SLOW_LOOK_S)
            self._end(tuple(self._ending))
        for end in list(self._ending.values()):
            self._forget(end)
            if not others:
                end.warn_once()
            _left.append(end)
        self._epoll.close()
        self._context = None
        for pipe in others:
            pipe.wake()

    def wake(self) -> None:
        """Have ``progress`` called. From any thread."""
        self._wake()


def _taken(left: deque[UcxEnd]) -> list[UcxEnd]:
    """All of them; pipes of other threads may take some meanwhile."""
    taken: list[UcxEnd] = []
    while left:
        with suppress(IndexError):
            taken.append(left.popleft())
    return taken


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Around every call of UCX: it works in the CUDA context of the thread."""
    return current_context(device) if device.type == "cuda" else nullcontext()


# ------------------------------------------------------------------ one end of a connection


SLOT_BITS, GENERATION_BITS = 12, 20
CONNECTION_BITS = 64 - SLOT_BITS - GENERATION_BITS
MAX_SLOTS = (1 << SLOT_BITS) - 1
MOST_NBYTES = 1022
"""Of a message: an announcement has 200 or so."""
_LENGTH_NBYTES = 2
MOST_AT_ONCE = 64
"""Taken in one turn, so that no peer has the IO thread to itself."""


def tag_of(connection: int, slot: int, generation: int) -> int:
    """64 bits that no two messages under way have in common; generations wrap. The slot behind the
    last is that of short messages (:class:`UcxMail`).
    """
    generation &= (1 << GENERATION_BITS) - 1
    return (connection << SLOT_BITS | slot) << GENERATION_BITS | generation


class UcxEnd:
    """A worker, its endpoint, its staging and what is under way. ``restless`` is called when the
    end has something to do although its descriptor is not readable.

    UCX matches tags within a worker and has no way to take back a message that has begun to arrive.
    So what belongs to a connection ends with its worker: what was posted and what has come unasked.
    ``ends_last``: a closed end waits for its peer to end the connection.
    """

    def __init__(
        self,
        ucx: Ucx,
        context: object,
        device: torch.device,
        slots: Slots,
        *,
        ends_last: bool,
    ) -> None:
        """Allocate the staging and a worker. Raises TransportUnavailable."""
        if slots.num_slots > MAX_SLOTS:
            raise TransportUnavailable(
                f"ucx: expected at most {MAX_SLOTS} slots, got {slots.num_slots}"
            )
        self.slots, self.ucx, self._device, self._ends_last = slots, ucx, device, ends_last
        self.restless: Callable[[UcxEnd], None] = _nobody
        staging = make_staging(slots.nbytes, device)
        self.parts: list[torch.Tensor] = list(staging.view(slots.num_slots, -1))
        self._arrays = [ucx.array(part) for part in self.parts]
        self._cuts = list(zip(self.parts, self._arrays, strict=True))
        """The beginning of each slot that was used last: most chunks are as long as the one before,
        and to cut a tensor takes 5 us, 25 of a cold processor."""
        self.worker = ucx.worker(context)
        self.fd = self.worker.epoll_file_descriptor
        self._endpoint: Endpoint | None = None
        self._sending: dict[Request, object] = {}
        self._receiving: dict[Request, object] = {}
        """What may still touch memory, and which: UCX itself keeps no reference to it."""
        self.closed_s = 0.0
        self._is_told = False

    def connect(self, address: bytes) -> None:
        """To the peer's worker. Raises PipeBroken."""
        self._endpoint = self.ucx.connect(self.worker, address)

    def beginning(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._cut(slot, nbytes)[0]

    def send(self, slot: int, tag: int, nbytes: int) -> Request:
        """The beginning of the slot. Raises PipeBroken."""
        return self.start_send(self._cut(slot, nbytes)[1], tag)

    def _cut(self, slot: int, nbytes: int) -> tuple[torch.Tensor, object]:
        known = self._cuts[slot]
        if known[0].numel() != nbytes:
            part = self.parts[slot][:nbytes]
            known = self._cuts[slot] = (part, self.ucx.array(part))
        return known

    def receive(self, slot: int, tag: int) -> Request:
        """Into the slot. Raises PipeBroken."""
        return self.start_receive(self._arrays[slot], tag)

    @property
    def is_connected(self) -> bool:
        return self._endpoint is not None

    @property
    def endpoint(self) -> Endpoint:
        """Raises PipeBroken before it is connected."""
        if self._endpoint is None:
            raise PipeBroken("ucx: expected the peer's address before any chunk, got none")
        return self._endpoint

    def start_send(self, array: object, tag: int) -> Request:
        """Of an array of ``ucx``. Raises PipeBroken."""
        return self._start(self._sending, self.endpoint.tag_send, array, tag)

    def start_receive(self, array: object, tag: int) -> Request:
        """Into an array of ``ucx``. Raises PipeBroken."""
        return self._start(self._receiving, self.endpoint.tag_recv, array, tag)

    def _start(
        self,
        under_way: dict[Request, object],
        operation: Callable[[object, object], Request],
        array: object,
        tag: int,
    ) -> Request:
        try:
            request = operation(array, self.ucx.tag(tag))
        except self.ucx.Error as exc:
            raise PipeBroken(f"ucx: expected to send and receive, got {exc!r}") from exc
        under_way[request] = array
        self._arm()
        return request

    def _arm(self) -> None:
        """What has begun may have to go on, or may be done already: then the descriptor is
        silent.
        """
        if self.worker.progress_once() or not self.worker.arm():
            self.restless(self)

    def check(self) -> None:
        """Raises PipeBroken for an operation that has failed, or a peer that has gone."""
        under_way = (*self._sending, *self._receiving)
        for request in [request for request in under_way if request.completed]:
            self.take(request)
        if self._endpoint is None or self._endpoint.alive:
            return
        try:
            self._endpoint.raise_on_error()
        except self.ucx.Error as exc:
            raise PipeBroken(f"ucx: expected a peer that is there, got {exc!r}") from exc
        raise PipeBroken("ucx: expected an open connection, got one that the peer has closed")

    def take(self, request: Request) -> None:
        """It has completed. Raises PipeBroken if it has failed."""
        self._sending.pop(request, None)
        self._receiving.pop(request, None)
        try:
            request.check_error()
        except self.ucx.Error as exc:
            raise PipeBroken(f"ucx: expected a chunk to get through, got {exc!r}") from exc

    # -- the end of it

    def is_late(self, now_s: float) -> bool:
        return now_s - self.closed_s >= KEPT_S

    def warn_once(self) -> None:
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "ucx: %d bytes of staging are kept: an operation on them has no end",
                self.slots.nbytes,
            )

    def is_over(self) -> bool:
        """A turn for a closed end. Whether nothing of it is under way any more."""
        with on_device(self._device):
            until_s = time.perf_counter() + TURN_S
            while self.worker.progress_once() and time.perf_counter() < until_s:
                pass
            is_over = self._is_disconnected() and not self._takes_unasked()
            if not is_over:
                self._arm()
        return is_over

    def _is_disconnected(self) -> bool:
        endpoint = self._endpoint
        if endpoint is not None and endpoint.alive:
            if self._ends_last or not all(request.completed for request in self._sending):
                return False
            endpoint.close_blocking()  # what is posted is the receive of a message, if anything
        # Of an endpoint that has gone UCX ends what had begun, and this what had not
        self.worker.cancel_inflight_requests()
        return all(request.completed for request in (*self._sending, *self._receiving))

    def _takes_unasked(self) -> bool:
        """Whether something has come that no receive was posted for. To destroy a worker that has
        such a payload takes for ever: ``ucxx`` would wait for it and not see it come. A payload
        that is dropped ends its sender's process: UCX touches what it has freed.
        """
        found = self.ucx.unasked(self.worker, take=False)
        if not found.matched:
            return False
        if found.length > self.slots.slot_nbytes:  # of a peer that does not know its room
            if found.length > MAX_CHUNK_NBYTES:
                return True  # it stays, and is late
            room = self.ucx.array(torch.empty(found.length, dtype=torch.uint8))
        else:
            room = self._arrays[0]
        found = self.ucx.unasked(self.worker, take=True)
        self._receiving[self.worker.tag_recv_with_handle(room, found)] = room
        return True

    def let_go(self) -> None:
        """It is over: the worker goes, and the memory after it."""
        with on_device(self._device):
            self._sending.clear()
            self._receiving.clear()
            del self._endpoint, self.worker


def _nobody(end: UcxEnd) -> None:
    """Until a pipe drives it."""


class UcxMail:
    """Announcements and credits, in both directions of one end. A message's number is in the place
    of a generation, and one receive is posted, for the next: UCX keeps what comes before its turn.

    They come with the wake that the payload needs anyway: between two GPUs an announcement took 0.1
    to 0.2 ms less than over ZeroMQ, of the 2 that a slot was under way.
    """

    def __init__(self, end: UcxEnd, connection: int) -> None:
        self._end, self._connection = end, connection
        self._num_sent = self._num_posted = 0
        self._buffer = bytearray(_LENGTH_NBYTES + MOST_NBYTES)
        self._array = end.ucx.array(self._buffer)
        self._posted: Request | None = None
        self._sent: deque[Request] = deque()

    def listen(self) -> None:
        """Once the end is connected. Raises PipeBroken."""
        tag = tag_of(self._connection, MAX_SLOTS, self._num_posted)
        self._posted = self._end.start_receive(self._array, tag)
        self._num_posted += 1

    @property
    def has_arrived(self) -> bool:
        return self._posted is not None and bool(self._posted.completed)

    def send(self, message: bytes) -> bool:
        """False for one that is too long. Raises PipeBroken."""
        if len(message) > MOST_NBYTES:
            return False
        while self._sent and self._sent[0].completed:  # nobody else looks at what a sink has sent
            self._end.take(self._sent.popleft())
        framed = bytearray(len(message).to_bytes(_LENGTH_NBYTES, "little") + message)
        tag = tag_of(self._connection, MAX_SLOTS, self._num_sent)
        array = self._end.ucx.array(framed)
        self._sent.append(self._end.start_send(array, tag))
        self._num_sent += 1
        return True

    def receive(self) -> list[bytes]:
        """What has come. Raises PipeBroken."""
        found: list[bytes] = []
        while self._posted is not None and self._posted.completed and len(found) < MOST_AT_ONCE:
            self._end.take(self._posted)
            nbytes = int.from_bytes(self._buffer[:_LENGTH_NBYTES], "little")
            if nbytes > MOST_NBYTES:
                raise PipeBroken(f"ucx: expected a message of {MOST_NBYTES} bytes, got {nbytes}")
            found.append(bytes(self._buffer[_LENGTH_NBYTES : _LENGTH_NBYTES + nbytes]))
            self.listen()
        return found

    def forget(self) -> None:
        """The end has what is under way."""
        self._posted = None
        self._sent.clear()
