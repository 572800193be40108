"""The direct wire between GPUs of one host: the sink maps the source's memory and copies out of it
by one kernel launch for each geometry class of a read (``tensors/device_copy.py``), on a stream of
the wire's own.

Reads take turns, and few bytes are in flight at a time, so that a read that is stopped ends soon.
The IO thread launches the copies and sees which are over (:mod:`~kvxfer.transports.launches`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.tensors.device_copy import (
    BoundCopy,
    CopySettings,
    DeviceCopier,
    Launched,
    bind_copy,
    flat_copy,
    side_at,
)
from kvxfer.tensors.device_memory import DeviceMemory, Gpu, MappedMemory, make_scratch
from kvxfer.tensors.strided_index import all_side_ids
from kvxfer.transfer.costs import WireCosts
from kvxfer.transfer.manifest import CudaIpcHandle, MemoryInfo, RankManifest
from kvxfer.transfer.plan import CopyClass
from kvxfer.transfer.wire import Reason
from kvxfer.transports.attachments import NOT_ATTACHED, Attached, MappingSink, handle_of
from kvxfer.transports.base import (
    TRIAL_SMALL_NBYTES,
    DirectSource,
    LocalMemory,
    Progress,
    ReadBroke,
    ReadDone,
    ReadRequest,
    ReadStopped,
    SinkCompletion,
    TransferKey,
    Trial,
    Wake,
)
from kvxfer.transports.channel import Context
from kvxfer.transports.copy_thread import Copier, CopyJob
from kvxfer.transports.launches import Flight, Launches
from kvxfer.transports.wake_up import Completions

MAX_BOUND = 1024
"""Geometry classes of one attachment whose addresses are kept; a plan has a handful."""
IN_FLIGHT_NBYTES = 2 << 30
"""Bytes launched and not seen complete: two launches, 5 ms of a link of 400 GB/s."""
MAX_LAUNCHES = 64
"""On their way. Behind 200 of them CUDA lets a thread wait for room, and ours would not let go of
the GIL meanwhile.
"""
TRIAL_NBYTES = 32 << 20
"""80 us of such a link, ten times what a launch costs."""
NUM_TIMED = 4
"""Copies of a trial, one behind the other: the first pays for page tables, and where other
processes take turns on the GPU another may be interrupted.
"""


def cuda_ipc_source(memory: LocalMemory, *_: object, gpu: Gpu | None = None) -> DirectSource:
    """Raises TransportUnavailable for memory that cannot be exported."""
    gpu = gpu or Gpu(memory.device)
    return DirectSource("cuda_ipc", tuple(gpu.export(tensor) for tensor in memory.tensors))


@dataclass(slots=True, eq=False)
class _Pull:
    """One read. ``launches``: each ``next`` puts a copy on the stream and gives its event and
    bytes; None when no more follow. ``end``: how the read ends once nothing of it is in flight;
    None while it goes well.
    """

    key: TransferKey
    attached: Attached[MappedMemory]
    launches: Iterator[tuple[StreamEvent, int]] | None
    num_in_flight: int = 0
    nbytes: int = 0
    end: SinkCompletion | None = None

    def end_as(self, end: SinkCompletion) -> None:
        """Launch no more and end as this; the first end counts."""
        self.launches = None
        self.end = self.end or end


class _Unmap(CopyJob):
    """Closes mappings on the copy thread: CUDA may wait for other work of this GPU first."""

    __slots__ = ("_mappings",)

    def __init__(self, attached: Attached[MappedMemory]) -> None:
        super().__init__(attached)
        self._mappings = attached.mappings

    def run(self) -> bool:
        return False

    def on_end(self) -> None:
        """Close here, not in ``run``: a job that is cancelled at shutdown is not run, but ends."""
        with ExitStack() as closing_all:  # the others also where one raises
            for mapping in self._mappings:
                closing_all.callback(mapping.close)


_Bound = dict[int, tuple[CopyClass, BoundCopy]]
"""Addresses of the geometry classes of one attachment, by the id of the class."""


class CudaIpcSink(MappingSink[MappedMemory]):
    """Maps each source rank once and copies out of it on a stream of its own."""

    name = "cuda_ipc"
    is_quick = True

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: Context,
        gpu: Gpu | None = None,
    ) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._gpu = gpu = gpu or Gpu(memory.device)
        self._memories = tuple(
            DeviceMemory(tensor.data_ptr(), tensor.numel()) for tensor in memory.tensors
        )
        self._tensors = memory.tensors  # keeps the addresses valid
        settings = CopySettings(launch_programs=config.launch_programs)
        self._copier = DeviceCopier(gpu.device, settings)
        self._stream = gpu.make_stream()
        self._copy_thread, self._wake = copy_thread, wake
        self._bound: dict[Attached[MappedMemory], _Bound] = {}
        self._leaving: list[Attached[MappedMemory]] = []
        self._completions: Completions[SinkCompletion] = Completions(wake)
        self._pulls: dict[TransferKey, _Pull] = {}
        self._turns: deque[_Pull] = deque()
        self._in_flight: Launches[_Pull] = Launches(wake)
        self._broken = ""
        """Why nothing can be read any more: a CUDA error is for ever."""
        # What nearly all engines need is compiled now: the first time it takes a second
        self._copier.warm(flat_copy(0, 0, 1 << 20), self._stream).synchronize()

    # -------------------------------------------------- getting ready

    def trial(
        self, source: RankManifest, timeout_s: float, classes: Sequence[CopyClass] = ()
    ) -> Trial:
        """Map the rank's memories, copy up to 32 MiB of the first, and compile the kernels of the
        classes that are not compiled yet. They stay mapped for ``attach``: to map anew what was
        just unmapped takes 5 ms where a process does not see the other's GPU, and 32 memories take
        4, in which the IO thread would do nothing else.
        """
        self._check_has_memories(source)
        mappings = self._map_all(source)
        with ExitStack() as failed:
            for mapping in mappings:
                failed.callback(mapping.close)
            try:
                costs = measure_copies(self._gpu, mappings[0].memory)
                self._warm(classes)
            except RuntimeError as exc:  # PyTorch raises it for CUDA's errors
                raise TransportUnavailable(f"cuda_ipc: the trial failed: {exc}") from exc
            failed.pop_all()
        return Trial(costs, held=mappings)

    def _warm(self, classes: Sequence[CopyClass]) -> None:
        # A copier belongs to one thread, and a trial may run on any
        copier = DeviceCopier(self._gpu.device, CopySettings(ring_nbytes=1 << 20))
        stream = self._gpu.make_stream()
        for each in classes:
            sides = (side_at(side, attrgetter("offset")) for side in (each.source, each.sink))
            copier.warm(BoundCopy(*sides), stream).synchronize()

    def _map(self, info: MemoryInfo, name: str) -> MappedMemory:
        return self._gpu.map(handle_of(self.name, info, name, CudaIpcHandle))

    def _let_go(self, attached: Attached[MappedMemory]) -> None:
        for pull in self._pulls.values():
            if pull.attached is attached:
                pull.end_as(ReadBroke(pull.key, Reason.PEER_LOST, "the source rank was detached"))
        self._bound.pop(attached, None)
        self._leaving.append(attached)
        self._finish()
        self._unmap_unused()

    def _unmap_unused(self) -> None:
        if not self._leaving:
            return
        in_use = {pull.attached for pull in self._pulls.values()}
        leaving, self._leaving = self._leaving, []
        for attached in leaving:
            if attached in in_use:
                self._leaving.append(attached)
            else:
                self._copy_thread.submit(_Unmap(attached))

    # -------------------------------------------------- reads

    def submit_read(self, request: ReadRequest) -> None:
        """Launch the copy. Ids and addresses are checked before anything is written."""
        key = request.key
        if key in self._pulls:
            raise ValueError(f"read: expected a key that is not in use, got {key} twice")
        attached = self._find(request.source)
        if attached is None or self._broken:
            reason = Reason.PEER_LOST if attached is None else Reason.READ_FAILED
            self._completions.tell(ReadBroke(key, reason, self._broken or NOT_ATTACHED))
            return
        try:
            launches = _events_of(self._launches(request, attached))
        except ValueError as exc:
            self._completions.tell(ReadBroke(key, Reason.READ_FAILED, str(exc)))
            return
        if request.after is not None:
            self._copier.wait(self._stream, request.after)
        pull = self._pulls[key] = _Pull(key, attached, launches)
        self._turns.append(pull)
        try:
            self._launch()
        except RuntimeError as exc:
            self._break(str(exc))
        self._wake()  # somebody has to see it through

    def stop_read(self, key: TransferKey) -> None:
        """Launch no more of this read; copies that were launched still run."""
        pull = self._pulls.get(key)
        if pull is None:
            self._completions.tell(ReadStopped(key))
            return
        pull.end = None  # ReadStopped replaces any other end
        pull.end_as(ReadStopped(key))
        if self._finish():
            self._wake()

    def copied(self, keys: Collection[TransferKey]) -> StreamEvent | None:
        pulls = [self._pulls.get(key) for key in keys]
        if self._stream is None or any(pull is None or pull.launches is not None for pull in pulls):
            return None
        return self._in_flight.last or self._copier.mark(self._stream)

    def poll(self) -> list[SinkCompletion]:
        """Progress and ends of the copies; waits for a copy that will be over in a moment."""
        try:
            landed = self._in_flight.land()
            while True:
                self._land(landed)
                self._launch()
                landed = self._in_flight.land_close()
                if not landed:
                    break
            self._in_flight.expect()
        except RuntimeError as exc:
            self._break(str(exc))
        return self._done()

    def look(self) -> list[SinkCompletion]:
        try:
            self._land(self._in_flight.land())
            if self._launch():
                self._wake()
        except RuntimeError as exc:
            self._break(str(exc))
        return self._done()

    @property
    def is_idle(self) -> bool:
        return not (self._pulls or self._completions or self._leaving)

    def close(self) -> None:
        for pull in self._pulls.values():
            pull.end_as(ReadStopped(pull.key))
        try:
            self._in_flight.synchronize()
            self._land(self._in_flight.land())
        except RuntimeError as exc:
            self._break(str(exc))
        self._finish()
        self._detach_all()
        self._unmap_unused()  # what was detached before, too
        self._in_flight.close()

    def _done(self) -> list[SinkCompletion]:
        self._finish()
        self._unmap_unused()
        return self._completions.take()

    # -------------------------------------------------- launches

    def _launches(
        self, request: ReadRequest, attached: Attached[MappedMemory]
    ) -> list[Iterator[Launched]]:
        """Of each class that is read; all is checked at once. Raises ValueError."""
        classes = request.classes
        source_ids = all_side_ids((each.source for each in classes), request.source_ids)
        sink_ids = all_side_ids((each.sink for each in classes), request.sink_ids)
        return [
            self._copier.launches(
                self._bind(attached, copy_class),
                given,
                taken,
                (pull.token_lo, pull.token_hi),
                stream=self._stream,
            )
            for copy_class, pull, given, taken in zip(
                classes, request.pull_classes, source_ids, sink_ids, strict=True
            )
            if pull.token_lo < pull.token_hi
        ]

    def _bind(self, attached: Attached[MappedMemory], copy_class: CopyClass) -> BoundCopy:
        bound = self._bound.setdefault(attached, {})
        known = bound.get(id(copy_class))
        if known is None:
            if len(bound) >= MAX_BOUND:
                bound.clear()
            theirs = [mapping.memory for mapping in attached.mappings]
            # Keeps the class alive: a freed class's id may become that of another
            known = (copy_class, bind_copy(copy_class, theirs, self._memories))
            bound[id(copy_class)] = known
        return known[1]

    def _launch(self) -> bool:
        """Launch one copy for each read in turn, as long as few launches and bytes are in flight
        and the ring has room for the ids without a wait. False if there was none.
        """
        in_flight, has_launched = self._in_flight, False
        while self._turns and in_flight.nbytes < IN_FLIGHT_NBYTES and len(in_flight) < MAX_LAUNCHES:
            if not self._copier.has_room():
                break
            pull = self._turns.popleft()
            if pull.launches is None:
                continue
            try:
                following = next(pull.launches, None)
            except (RuntimeError, ValueError) as exc:
                pull.end_as(ReadBroke(pull.key, Reason.READ_FAILED, f"launch: {exc}"))
                following = (self._copier.mark(self._stream), 0)  # a part of the launch may run
            if following is None:
                pull.launches = None
                continue
            if pull.launches is not None:
                self._turns.append(pull)
            in_flight.add(pull, *following)
            pull.num_in_flight += 1
            has_launched = True
        return has_launched

    def _land(self, landed: Sequence[Flight[_Pull]]) -> None:
        for flight in landed:
            pull = flight.owner
            pull.num_in_flight -= 1
            pull.nbytes += flight.nbytes
            if pull.launches is not None:
                self._completions.append(Progress(pull.key, pull.nbytes))

    def _finish(self) -> bool:
        over = [
            pull
            for pull in self._pulls.values()
            if pull.launches is None and not pull.num_in_flight
        ]
        for pull in over:
            del self._pulls[pull.key]
            self._completions.append(pull.end or ReadDone(pull.key, pull.nbytes, certified=False))
        return bool(over)

    def _break(self, detail: str) -> None:
        """After an error of CUDA's nothing runs in this process's context any more."""
        self._broken = f"this GPU cannot be used any more: {detail}"
        self.counts["gpu_broken"] += 1
        self._in_flight.forget()
        for pull in self._pulls.values():
            pull.num_in_flight = 0
            pull.end_as(ReadBroke(pull.key, Reason.READ_FAILED, self._broken))


def _events_of(classes: Sequence[Iterator[Launched]]) -> Iterator[tuple[StreamEvent, int]]:
    for launches in classes:
        nbytes = 0
        for launched in launches:
            if launched.event is not None:
                yield launched.event, launched.nbytes - nbytes
            nbytes = launched.nbytes


def measure_copies(gpu: Gpu, memory: DeviceMemory) -> WireCosts:
    """Time copies of up to 32 MiB from ``memory`` into new memory of this GPU; from any thread.
    Raises RuntimeError, PyTorch's, where CUDA fails.

    The rate is by the GPU's clock: where many processes take turns on a GPU, the host saw a copy of
    10 us over only after 2 ms. The host waits once, for the end of all copies: beside a thread that
    computes in Python each look may take milliseconds.
    """
    nbytes = min(memory.nbytes, TRIAL_NBYTES)
    landing = make_scratch(nbytes, gpu.device)
    stream = gpu.make_stream()
    # The ring belongs to one thread, and this may be any
    copier = DeviceCopier(gpu.device, CopySettings(ring_nbytes=1 << 16))
    large, small = (
        flat_copy(memory.address, landing.data_ptr(), most_nbytes)
        for most_nbytes in (nbytes, min(nbytes, TRIAL_SMALL_NBYTES))
    )
    ids = np.zeros(1, np.int64)
    stamps = [copier.stamp(stream)]
    for _ in range(NUM_TIMED):
        launched = copier.copy(large, ids, ids, (0, large.sink.tile.block_tokens), stream=stream)
        stamps.append(copier.stamp(stream))
    stamps[-1].synchronize()
    copied_s = min(later.since_s(first) for first, later in pairwise(stamps))
    began_s = time.perf_counter()
    copier.copy(small, ids, ids, (0, small.sink.tile.block_tokens), stream=stream)
    copier.mark(stream).synchronize()
    latency_s = time.perf_counter() - began_s
    return WireCosts(latency_s, 0.0, launched.nbytes / max(copied_s, 1e-9))
