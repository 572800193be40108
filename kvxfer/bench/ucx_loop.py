"""Chunks over UCX by one loop on each side that knows beforehand what comes: nothing is asked,
offered, announced, granted or certified. Both ends are set up as those of the wire ``ucx``.

    raw ucx     buffer to buffer, as large and as many under way as the wire has found best: what
                UCX itself makes of such messages. Both sides look on for a moment, then sleep
    least       between GPUs: each chunk is packed, sent, received and unpacked (see ``least``)
"""

from __future__ import annotations

import select
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kvxfer.bench.core import Timing, timed
from kvxfer.bench.members import SOURCE, Devices, Member
from kvxfer.bench.pools import Ids, Pool, Request
from kvxfer.bench.wires import Cut
from kvxfer.config import Config
from kvxfer.tensors.device_launch import Event
from kvxfer.tensors.device_memory import current_context
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.plan import Chunk, DenseOrder
from kvxfer.transports.native_peers import net_devices
from kvxfer.transports.pipe import DEVICE_STAGING, Slots
from kvxfer.transports.ucx_end import MAX_SLOTS, UcxEnd, tag_of
from kvxfer.transports.ucx_library import Request as Operation
from kvxfer.transports.ucx_library import Ucx

RAW_UCX = "raw ucx"
RAW_SLOTS = Slots(16, 4 << 20)
"""At most."""
USUAL_CUT = Cut(1 << 20, 8)
"""Where the wire is not there to say how it cuts."""
LEAST_SLOTS = Slots(DEVICE_STAGING.busy_slots, DEVICE_STAGING.most_slot_nbytes)
MOST_PACKING = 2
"""Launches before the source looks for what is packed, as in the wire."""
CONNECTION = 1
"""Of all tags; an end has one."""
SPIN_S = 30e-6
"""How long raw ends look on before they sleep."""
LOOK_S = 0.1
"""How long they sleep at most: for a descriptor that says nothing."""
END_S = 10.0
"""Of a run, before it is given up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A request as one side moves it: bytes of each chunk and, where it is packed, which. ``order``
    and ``ids``: of what is packed.
    """

    chunks: tuple[tuple[int, Chunk | None], ...]
    num_slots: int
    order: DenseOrder
    ids: Ids


class UcxLoop(Member):
    """One side. ``pool``: what is packed from or unpacked to; None: raw."""

    def __init__(
        self, side: str, devices: Devices, pool: Pool | None, slots: Slots, config: Config
    ) -> None:
        is_source = side == SOURCE
        where = {side: devices.by_side[side]}
        super().__init__({} if pool is None else where, 0 if pool is None else pool.nbytes)
        self._is_source, self._slots = is_source, slots
        self._device = torch.device(devices.by_side[side])
        self._packer = None
        if pool is not None:
            from kvxfer.bench.least import Packer  # Triton takes a second

            self._packer = Packer(self.memories[side], pool)
        self._plans: dict[Request, Plan] = {}
        self._num_chunks = self._num_runs = 0
        self._quiet_s = self._until_s = 0.0
        self._thread = ThreadPoolExecutor(1)
        self._serving: Future[None] | None = None
        ucx = Ucx()
        with self._on_device():
            context = ucx.context(self._device, net_devices(config))
            self._end = UcxEnd(ucx, context, self._device, slots, lambda end: None)
        self._word = ucx.array(bytearray(1))
        self._pattern = torch.arange(0 if pool else slots.slot_nbytes).to(torch.uint8)
        if pool is None:
            for part in self._end.parts:
                part.copy_(self._pattern if is_source else torch.zeros_like(self._pattern))

    def address(self) -> bytes:
        return bytes(self._end.worker.address.tobytes())

    def meet(self, address: bytes) -> None:
        with self._on_device():
            self._end.connect(address)

    def use(self, request: Request, cut: Cut) -> None:
        """How the wire moves such a request, where nothing is packed."""
        size = min(cut.chunk_nbytes, self._slots.slot_nbytes)
        chunks = ((size, None),) * -(-request.nbytes // size)
        plan = self._packed_plan(request)
        num_slots = min(cut.num_slots, self._slots.num_slots)
        self._plans[request] = Plan(chunks, num_slots, plan.order, plan.ids)

    def is_intact(self, request: Request) -> bool:
        """Whether what came of a raw request is what was sent."""
        plan = self._plan(request)
        used = self._end.parts[: min(len(plan.chunks), plan.num_slots)]
        (nbytes, _), *_ = plan.chunks
        return all(torch.equal(part[:nbytes], self._pattern[:nbytes]) for part in used)

    def serve(self, request: Request) -> None:
        """Send it once, on a thread, when the sink says the word."""
        self._serving = self._thread.submit(self._serve, self._plan(request))

    def served(self) -> None:
        """It was sent. Raises what went wrong."""
        assert self._serving is not None
        self._serving.result()

    def run(self, way: str, request: Request) -> Timing:
        """From the word until the last chunk is in place."""
        plan = self._plan(request)
        self.flush()
        self._begin()
        with self._on_device():
            return timed(self._say, lambda: self._take(plan))

    def _begin(self) -> None:
        self._quiet_s = time.perf_counter()
        self._until_s = self._quiet_s + END_S

    def _say(self) -> None:
        self._end.start(self._end.endpoint.tag_send, self._word, self._next_word())

    def _serve(self, plan: Plan) -> None:
        self._begin()
        with self._on_device():
            word = self._end.start(self._end.endpoint.tag_recv, self._word, self._next_word())
            while not word.completed:
                self._progress(word)
            self._end.take(word)
            self._give(plan)

    def _give(self, plan: Plan) -> None:
        end, free, left = self._end, deque(range(plan.num_slots)), deque(plan.chunks)
        packing: deque[tuple[Event | None, int, int]] = deque()
        sending: deque[tuple[Operation, int]] = deque()
        while left or packing or sending:
            if left and free and len(packing) < MOST_PACKING:
                slot, (nbytes, chunk) = free.popleft(), left.popleft()
                packing.append((self._pack(plan, slot, nbytes, chunk), slot, nbytes))
            if packing and _is_over(packing[0][0]):
                _, slot, nbytes = packing.popleft()
                sending.append((end.send(slot, self._next_tag(), nbytes), slot))
            self._progress(sending[0][0] if sending and not (left and free) else None)
            while sending and sending[0][0].completed:
                operation, slot = sending.popleft()
                end.take(operation)
                free.append(slot)

    def _take(self, plan: Plan) -> None:
        end, free, left = self._end, deque(range(plan.num_slots)), deque(plan.chunks)
        coming: deque[tuple[Operation, int, int, Chunk | None]] = deque()
        unpacking: deque[tuple[Event | None, int]] = deque()
        while left or coming or unpacking:
            while left and free:
                slot, (nbytes, chunk) = free.popleft(), left.popleft()
                coming.append((end.receive(slot, self._next_tag()), slot, nbytes, chunk))
            self._progress(coming[0][0] if coming else None)
            while coming and coming[0][0].completed:
                operation, slot, nbytes, chunk = coming.popleft()
                end.take(operation)
                unpacking.append((self._unpack(plan, slot, nbytes, chunk), slot))
            while unpacking and _is_over(unpacking[0][0]):
                free.append(unpacking.popleft()[1])

    def _progress(self, waits_for: Operation | None) -> None:
        """``waits_for``: without its end there is nothing to do; None: do not sleep."""
        worker, now_s = self._end.worker, time.perf_counter()
        can_sleep = self._packer is None and waits_for is not None and not waits_for.completed
        if worker.progress_once():
            self._quiet_s = now_s
        elif can_sleep and now_s - self._quiet_s > SPIN_S and worker.arm():
            select.select((self._end.fd,), (), (), LOOK_S)
        if now_s > self._until_s:
            raise TimeoutError(f"expected the other side's part within {END_S:g} s, got none")

    def _pack(self, plan: Plan, slot: int, nbytes: int, chunk: Chunk | None) -> Event | None:
        if self._packer is None or chunk is None:
            return None
        return self._packer.pack(plan.ids, plan.order, chunk, self._end.beginning(slot, nbytes))

    def _unpack(self, plan: Plan, slot: int, nbytes: int, chunk: Chunk | None) -> Event | None:
        if self._packer is None or chunk is None:
            return None
        return self._packer.unpack(plan.ids, chunk, self._end.beginning(slot, nbytes))

    def _next_tag(self) -> int:
        self._num_chunks += 1
        return tag_of(CONNECTION, 0, self._num_chunks)

    def _next_word(self) -> int:
        self._num_runs += 1
        return tag_of(CONNECTION, MAX_SLOTS, self._num_runs)

    def _plan(self, request: Request) -> Plan:
        if request not in self._plans:
            if self._packer is None:
                self.use(request, USUAL_CUT)
            else:
                self._plans[request] = self._packed_plan(request)
        return self._plans[request]

    def _packed_plan(self, request: Request) -> Plan:
        _, pull = request.copy_class()
        chunks = chunk_list((pull,), self._slots.slot_nbytes)
        _, ids = request.side(self._is_source)
        return Plan(
            tuple((chunk.nbytes, chunk) for chunk in chunks), self._slots.num_slots, pull.order, ids
        )

    def _on_device(self) -> AbstractContextManager[object]:
        return current_context(self._device) if self._device.type == "cuda" else nullcontext()

    def close(self) -> None:
        """Disconnect, and give the memory back."""
        self._thread.shutdown()
        with self._on_device():
            self._end.finish()
        super().close()


def _is_over(event: Event | None) -> bool:
    return event is None or event.query()
