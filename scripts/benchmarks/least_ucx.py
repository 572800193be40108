"""A load over ``ucx`` between GPUs without its connector: each chunk is packed, sent, received and
unpacked, in as many slots of the same size, by one loop on each side that knows beforehand what
comes. Nothing is asked, offered, announced, granted or certified (see ``least_ways``).
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from kvxfer.tensors.device_copy import DeviceCopier, bind_side
from kvxfer.tensors.device_launch import Event
from kvxfer.tensors.device_memory import current_context
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.plan import Chunk, DenseOrder
from kvxfer.transports.native_peers import LOOPBACK
from kvxfer.transports.pipe import DEVICE_STAGING, Slots
from kvxfer.transports.ucx_end import MAX_SLOTS, UcxEnd, tag_of
from kvxfer.transports.ucx_library import Request as Operation
from kvxfer.transports.ucx_library import Ucx
from scripts.benchmarks.devices import Devices
from scripts.benchmarks.least_ways import LAUNCH, addressed, stream_on
from scripts.benchmarks.members import SINK, SOURCE, Member, Timing, timed
from scripts.benchmarks.pools import Ids, Pool, Request
from scripts.benchmarks.workers import Worker, close_all, method_for

SLOTS = Slots(DEVICE_STAGING.busy_slots, DEVICE_STAGING.most_slot_nbytes)
MOST_PACKING = 2
"""Launches before the source looks for what is packed, as in the wire."""
CONNECTION = 1
"""Of all tags; an end has one."""
END_S = 10.0
"""Of a run, before it is given up."""


class LeastUcx:
    """Of ``ucx``, by a process on each side."""

    def __init__(self, devices: Devices, request: Request, slots: Slots = SLOTS) -> None:
        self.members = (
            Worker(
                *("least source", UcxLoop, SOURCE, devices, request.source, slots),
                method=method_for(devices.source),
            ),
            Worker(
                *("least sink", UcxLoop, SINK, devices, request.sink, slots),
                method=method_for(devices.sink),
            ),
        )
        self._have_met = False

    def run(self, request: Request) -> Timing:
        """All chunks, in the sink's time."""
        source, sink = self.members
        if not self._have_met:
            addresses = [member.call(bytes, "address") for member in self.members]
            source.call(object, "meet", addresses[1])
            sink.call(object, "meet", addresses[0])
            self._have_met = True
        source.call(object, "serve", request)
        timing = sink.call(Timing, "run", LAUNCH, request)
        source.call(object, "served")
        return timing

    def close(self) -> None:
        """End both."""
        close_all(self.members)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A request as one side moves it."""

    chunks: tuple[Chunk, ...]
    order: DenseOrder
    ids: Ids


class UcxLoop(Member):
    """One side of ``ucx``."""

    def __init__(self, side: str, devices: Devices, pool: Pool, slots: Slots) -> None:
        super().__init__({side: devices.source if side == SOURCE else devices.sink}, pool.nbytes)
        self._side, self._memory, self._slots = side, self.memories[side], slots
        self._bound = bind_side(pool.side(), [addressed(self._memory)])
        self._copier = DeviceCopier(self._memory.device)
        self._stream = stream_on(self._memory.device)
        self._cuts: dict[Request, _Cut] = {}
        self._num_chunks = self._num_runs = 0
        self._until_s = 0.0
        self._thread = ThreadPoolExecutor(1)
        self._serving: Future[None] | None = None
        ucx = Ucx()
        with self._on_device():
            self._context = ucx.context(self._memory.device, LOOPBACK)
            self._end = UcxEnd(ucx, self._context, self._memory.device, slots, lambda end: None)
        self._word = ucx.array(bytearray(1))

    def address(self) -> bytes:
        """For the other side."""
        return bytes(self._end.worker.address.tobytes())

    def meet(self, address: bytes) -> None:
        """The other side."""
        with self._on_device():
            self._end.connect(address)

    def serve(self, request: Request) -> None:
        """Send it once, on a thread, when the sink says the word."""
        self._serving = self._thread.submit(self._serve, self._cut(request))

    def served(self) -> None:
        """It was sent. Raises what went wrong."""
        assert self._serving is not None
        self._serving.result()

    def run(self, way: str, request: Request) -> Timing:
        """From the word until the last chunk lies in place."""
        cut = self._cut(request)
        self.flush()
        self._until_s = time.perf_counter() + END_S
        with self._on_device():
            return timed(self._say, partial(self._take, cut))

    def _say(self) -> None:
        self._end.start(self._end.endpoint.tag_send, self._word, self._next_word())

    def _serve(self, cut: _Cut) -> None:
        self._until_s = time.perf_counter() + END_S
        with self._on_device():
            word = self._end.start(self._end.endpoint.tag_recv, self._word, self._next_word())
            while not word.completed:
                self._progress()
            self._end.take(word)
            self._give(cut)

    def _give(self, cut: _Cut) -> None:
        end, free = self._end, deque(range(self._slots.num_slots))
        left = deque(cut.chunks)
        packing: deque[tuple[Event | None, int, Chunk]] = deque()
        sending: deque[tuple[Operation, int]] = deque()
        while left or packing or sending:
            if left and free and len(packing) < MOST_PACKING:
                slot, chunk = free.popleft(), left.popleft()
                packing.append((self._pack(cut, slot, chunk), slot, chunk))
            if packing and _is_over(packing[0][0]):
                _, slot, chunk = packing.popleft()
                sending.append((end.send(slot, self._next_tag(), chunk.nbytes), slot))
            self._progress()
            while sending and sending[0][0].completed:
                operation, slot = sending.popleft()
                end.take(operation)
                free.append(slot)

    def _take(self, cut: _Cut) -> None:
        end, left = self._end, deque(cut.chunks)
        coming: deque[tuple[Operation, int, Chunk]] = deque()
        unpacking: deque[tuple[Event | None, int]] = deque()
        free = deque(range(self._slots.num_slots))
        while left or coming or unpacking:
            while left and free:
                slot, chunk = free.popleft(), left.popleft()
                coming.append((end.receive(slot, self._next_tag()), slot, chunk))
            self._progress()
            while coming and coming[0][0].completed:
                operation, slot, chunk = coming.popleft()
                end.take(operation)
                unpacking.append((self._unpack(cut, slot, chunk), slot))
            while unpacking and _is_over(unpacking[0][0]):
                free.append(unpacking.popleft()[1])

    def _progress(self) -> None:
        self._end.worker.progress_once()
        if time.perf_counter() > self._until_s:
            raise TimeoutError(f"expected the other side's part within {END_S:g} s, got none")

    def _pack(self, cut: _Cut, slot: int, chunk: Chunk) -> Event | None:
        span, out = _span(chunk), self._end.beginning(slot, chunk.nbytes)
        return self._copier.pack(
            *(self._bound, cut.ids, cut.order), *span, out, stream=self._stream
        ).event

    def _unpack(self, cut: _Cut, slot: int, chunk: Chunk) -> Event | None:
        span, dense = _span(chunk), self._end.beginning(slot, chunk.nbytes)
        return self._copier.unpack(self._bound, cut.ids, *span, dense, stream=self._stream).event

    def _next_tag(self) -> int:
        self._num_chunks += 1
        return tag_of(CONNECTION, 0, self._num_chunks)

    def _next_word(self) -> int:
        self._num_runs += 1
        return tag_of(CONNECTION, MAX_SLOTS, self._num_runs)

    def _cut(self, request: Request) -> _Cut:
        known = self._cuts.get(request)
        if known is None:
            _, pull = request.copy_class()
            ids = request.source_ids if self._side == SOURCE else request.sink_ids
            chunks = chunk_list((pull,), self._slots.slot_nbytes)
            known = self._cuts[request] = _Cut(chunks, pull.order, ids)
        return known

    def _on_device(self) -> AbstractContextManager[object]:
        device = self._memory.device
        return current_context(device) if device.type == "cuda" else nullcontext()

    def close(self) -> None:
        """Disconnect, and give the memory back."""
        self._thread.shutdown()
        with self._on_device():
            self._end.finish()
        super().close()


def _span(chunk: Chunk) -> tuple[tuple[int, int], tuple[int, int]]:
    return (chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi)


def _is_over(event: Event | None) -> bool:
    return event is None or event.query()
