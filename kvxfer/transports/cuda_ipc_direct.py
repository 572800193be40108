"""The direct wire between GPUs of one host: the sink maps the source's memory and copies out of it
by one kernel launch for each geometry class of a read (``tensors/device_copy.py``).

The IO thread launches, on a stream of the wire's own, and sees what is over
(:mod:`~kvxfer.transports.launches`). Few bytes are on their way at a time, so that a read that is
given up ends soon, and reads take turns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import zmq

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.cuda_device import CudaDevice, Gpu
from kvxfer.tensors.device_copy import CopySettings, DeviceCopier
from kvxfer.tensors.device_memory import MappedMemory
from kvxfer.tensors.device_work import (
    BoundCopy,
    BoundSide,
    DeviceMemory,
    bind_copy,
    flat_copy,
    join_sides,
)
from kvxfer.tensors.job_ring import Event
from kvxfer.transfer.costs import Staging
from kvxfer.transfer.manifest import CudaIpcHandle, MemoryInfo, RankManifest
from kvxfer.transfer.plan import CopyClass
from kvxfer.transfer.wire import Reason
from kvxfer.transports.attachments import (
    NOT_ATTACHED,
    Attached,
    Attachments,
    DirectSource,
    handle_of,
)
from kvxfer.transports.base import (
    LocalMemory,
    Progress,
    ReadBroke,
    ReadDone,
    ReadRequest,
    ReadStopped,
    SinkCompletion,
    SinkTransport,
    TransferKey,
    Trial,
    Wake,
)
from kvxfer.transports.copy_thread import Copier, CopyJob, PiecesJob
from kvxfer.transports.cuda_ipc_trial import measure_copies
from kvxfer.transports.launches import Flight, Launches

IN_FLIGHT_NBYTES = 2 << 30
"""Bytes launched and not seen complete: two launches, 5 ms of a link of 400 GB/s."""
MAX_LAUNCHES = 64
"""On their way. Behind 200 of them CUDA lets a thread wait for room, and ours would not let go of
the GIL meanwhile.
"""
MAX_BOUND = 1024
"""Geometry classes of one attachment whose addresses are kept; a plan has a handful."""


class CudaIpcSource(DirectSource):
    """Exports this rank's memories. Raises TransportUnavailable where one cannot be."""

    name = "cuda_ipc"

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: zmq.Context[zmq.Socket[bytes]],
        gpu: Gpu | None = None,
    ) -> None:
        gpu = gpu or CudaDevice(memory.device)
        super().__init__(gpu.export(tensor) for tensor in memory.tensors)


@dataclass(slots=True, eq=False)
class _Read:
    """One read. ``launches`` is None when no more follow; ``end``: how it ends once nothing of it
    is in flight, None while it goes well.
    """

    request: ReadRequest
    attached: Attached[MappedMemory]
    launches: Iterator[tuple[Event, int]] | None
    num_in_flight: int = 0
    nbytes: int = 0
    end: SinkCompletion | None = None

    @property
    def key(self) -> TransferKey:
        return self.request.key

    def end_as(self, end: SinkCompletion) -> None:
        """No more launches; the first reason counts."""
        self.launches = None
        self.end = self.end or end


_Bound = dict[int, tuple[CopyClass, BoundCopy]]
"""Addresses of the geometry classes of one attachment, by the id of the class."""


class CudaIpcSink(SinkTransport):
    """Maps each source rank once and copies out of it on a stream of its own."""

    name = "cuda_ipc"
    is_stream = False
    is_quick = True

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: zmq.Context[zmq.Socket[bytes]],
        gpu: Gpu | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._gpu = gpu = gpu or CudaDevice(memory.device)
        self._memories = tuple(
            DeviceMemory(tensor.data_ptr(), tensor.numel()) for tensor in memory.tensors
        )
        self._tensors = memory.tensors  # so that the addresses stay good
        settings = CopySettings(launch_programs=config.launch_programs)
        self._copier = DeviceCopier(gpu.device, settings)
        self._stream = gpu.make_stream()
        self._copy_thread = copy_thread
        self._wake = wake
        self._attached = Attachments("cuda_ipc", self._map, self._let_go)
        self._bound: dict[Attached[MappedMemory], _Bound] = {}
        self._leaving: list[Attached[MappedMemory]] = []
        self._reads: dict[TransferKey, _Read] = {}
        self._turns: deque[_Read] = deque()
        self._in_flight: Launches[_Read] = Launches(wake)
        self._ready: list[SinkCompletion] = []
        self._broken = ""
        # What nearly all engines need is compiled now: the first time it takes a second
        self._copier.warm(flat_copy(0, 0, 1 << 20), self._stream).synchronize()

    # -------------------------------------------------- getting ready

    def trial(self, source: RankManifest, timeout_s: float) -> Trial:
        """Map the rank's memories and copy up to 32 MiB of the first. They stay mapped for
        ``attach``: to map anew what was just unmapped takes 5 ms where a process does not see the
        other's GPU, and 32 memories take 4, in which the IO thread would do nothing else.
        """
        mappings = self._attached.map_all(source)
        with ExitStack() as failed:
            for mapping in mappings:
                failed.callback(mapping.close)
            try:
                costs = measure_copies(self._gpu, mappings[0].memory)
            except RuntimeError as exc:  # PyTorch's, of CUDA's own errors
                raise TransportUnavailable(f"cuda_ipc: the trial failed: {exc}") from exc
            failed.pop_all()
        return Trial(costs, held=mappings)

    def prepare(self, classes: Sequence[CopyClass]) -> None:
        """Compile what these classes need and others did not."""
        copier = DeviceCopier(self._gpu.device, CopySettings(ring_nbytes=1 << 20))
        stream = self._gpu.make_stream()
        for each in classes:
            sides = (
                BoundSide(side.tile, np.array([base.offset for base in side.bases], np.int64))
                for side in (each.source, each.sink)
            )
            copier.warm(join_sides(*sides), stream).synchronize()

    def attach(
        self, source: RankManifest, staging: Staging | None = None, trial: Trial | None = None
    ) -> None:
        """Map the rank's memories, once for each life of them, if the trial has not."""
        held = trial.held if trial is not None else ()
        tried = tuple(each for each in held if isinstance(each, MappedMemory))
        self._attached.attach(source, tried)

    def detach(self, control_endpoint: str) -> None:
        """Its unfinished reads break; the mapping goes when no launch runs on it any more."""
        self._attached.detach(control_endpoint)
        self._finish()

    def _map(self, info: MemoryInfo, name: str) -> MappedMemory:
        return self._gpu.map(handle_of("cuda_ipc", info, name, CudaIpcHandle))

    def _let_go(self, attached: Attached[MappedMemory]) -> None:
        for read in self._reads.values():
            if read.attached is attached:
                detail = "the source rank was detached"
                read.end_as(ReadBroke(read.key, Reason.PEER_LOST, detail))
        self._bound.pop(attached, None)
        self._leaving.append(attached)

    def _unmap_unused(self) -> None:
        """On the copy thread: CUDA may wait for other work of this GPU first."""
        in_use = {read.attached for read in self._reads.values()}
        leaving, self._leaving = self._leaving, []
        for attached in leaving:
            if attached in in_use:
                self._leaving.append(attached)
                continue

            def close(job: CopyJob, mappings: tuple[MappedMemory, ...] = attached.mappings) -> None:
                for mapping in mappings:
                    mapping.close()

            # As its listener: a job that is not run, because all ends, has its end as well
            self._copy_thread.submit(PiecesJob(attached, iter(()), close))

    # -------------------------------------------------- reads

    def submit_expect(self, request: ReadRequest) -> None:
        """Nothing: the sink reads by itself."""

    def submit_read(self, request: ReadRequest) -> None:
        """Launch the copy. Ids and addresses are checked before anything is written."""
        key = request.key
        if key in self._reads:
            raise ValueError(f"read: expected a key that is not in use, got {key} twice")
        attached = self._attached.find(request.source)
        if attached is None or self._broken:
            reason = Reason.PEER_LOST if attached is None else Reason.READ_FAILED
            self._tell(ReadBroke(key, reason, self._broken or NOT_ATTACHED))
            return
        try:
            launches = self._launches(request, attached)
        except ValueError as exc:
            self._tell(ReadBroke(key, Reason.READ_FAILED, str(exc)))
            return
        if request.after is not None:
            self._copier.wait(self._stream, request.after)
        read = self._reads[key] = _Read(request, attached, launches)
        self._turns.append(read)
        self._advance(self._launch)
        self._wake()  # poll sees it through

    def stop_read(self, key: TransferKey) -> None:
        """What was launched is the last of it."""
        read = self._reads.get(key)
        if read is None:
            self._tell(ReadStopped(key))
            return
        read.end = None  # whatever it was going to say, it was asked to stop
        read.end_as(ReadStopped(key))
        if self._finish():
            self._wake()

    def poll(self) -> list[SinkCompletion]:
        """Progress and ends of the copies; of one that will be over in a moment its end."""
        self._advance(self._follow)
        return self._done()

    def look(self) -> list[SinkCompletion]:
        """Progress and ends of the copies that are over now."""
        self._advance(self._land_now)
        return self._done()

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way, and nothing has to be told or unmapped."""
        return not (self._reads or self._ready or self._leaving)

    def close(self) -> None:
        """Launch no more, wait for what runs, unmap."""
        for read in self._reads.values():
            read.end_as(ReadStopped(read.key))
        try:
            self._in_flight.synchronize()
            self._land(self._in_flight.land())
        except RuntimeError as exc:
            self._break(str(exc))
        self._finish()
        self._attached.close()
        self._unmap_unused()
        self._in_flight.close()

    def _tell(self, completion: SinkCompletion) -> None:
        self._ready.append(completion)
        self._wake()

    def _done(self) -> list[SinkCompletion]:
        self._finish()
        done, self._ready = self._ready, []
        return done

    def _launches(
        self, request: ReadRequest, attached: Attached[MappedMemory]
    ) -> Iterator[tuple[Event, int]]:
        """Event and bytes of each launch of a read; all of it is checked at once."""
        source_ids = [np.asarray(ids, dtype=np.int64) for ids in request.source_ids]
        sink_ids = [np.asarray(ids, dtype=np.int64) for ids in request.sink_ids]
        checked = [
            self._copier.launches(
                self._bind(attached, copy_class),
                source_ids[copy_class.source.group],
                sink_ids[copy_class.sink.group],
                pull.token_lo,
                pull.token_hi,
                stream=self._stream,
            )
            for copy_class, pull in zip(request.classes, request.pull_classes, strict=True)
            if pull.token_lo < pull.token_hi
        ]

        def each() -> Iterator[tuple[Event, int]]:
            for launches in checked:
                nbytes = 0
                for launched in launches:
                    if launched.event is not None:
                        yield launched.event, launched.nbytes - nbytes
                    nbytes = launched.nbytes

        return each()

    def _bind(self, attached: Attached[MappedMemory], copy_class: CopyClass) -> BoundCopy:
        bound = self._bound.setdefault(attached, {})
        known = bound.get(id(copy_class))
        if known is None:
            if len(bound) >= MAX_BOUND:
                bound.clear()
            theirs = [mapping.memory for mapping in attached.mappings]
            # The class is kept with it: its id is another's once it is gone
            known = (copy_class, bind_copy(copy_class, theirs, self._memories))
            bound[id(copy_class)] = known
        return known[1]

    def _advance(self, step: Callable[[], object]) -> None:
        """One of the three below. An error of CUDA's ends all reads."""
        try:
            step()
        except RuntimeError as exc:
            self._break(str(exc))

    def _follow(self) -> None:
        """See what is over, launch what follows, and look again at what will be over soon."""
        landed = self._in_flight.land()
        while True:
            self._land(landed)
            self._launch()
            landed = self._in_flight.land_close()
            if not landed:
                break
        self._in_flight.expect()

    def _land_now(self) -> None:
        """See what is over, launch what follows; that is followed by ``poll``."""
        self._land(self._in_flight.land())
        if self._launch():
            self._wake()

    def _launch(self) -> bool:
        """One launch for each read in turn, as long as few are on their way, and few bytes, and the
        host need not wait for room for their ids. False if there was none.
        """
        in_flight, has_launched = self._in_flight, False
        while self._turns and in_flight.nbytes < IN_FLIGHT_NBYTES and len(in_flight) < MAX_LAUNCHES:
            if not self._copier.has_room():
                break
            read = self._turns.popleft()
            if read.launches is None:
                continue
            try:
                following = next(read.launches, None)
            except (RuntimeError, ValueError) as exc:
                read.end_as(ReadBroke(read.key, Reason.READ_FAILED, f"launch: {exc}"))
                following = (self._copier.mark(self._stream), 0)  # a part of it may run
            if following is None:
                read.launches = None
                continue
            if read.launches is not None:
                self._turns.append(read)
            in_flight.add(read, *following)
            read.num_in_flight += 1
            has_launched = True
        return has_launched

    def _land(self, landed: Sequence[Flight[_Read]]) -> None:
        """Take note of launches that are over."""
        for flight in landed:
            read = flight.owner
            read.num_in_flight -= 1
            read.nbytes += flight.nbytes
            if read.launches is not None:
                self._ready.append(Progress(read.key, read.nbytes))

    def _break(self, detail: str) -> None:
        """A CUDA error is for ever: nothing runs in this process's context any more."""
        self._broken = f"this GPU cannot be used any more: {detail}"
        self.counts["gpu_broken"] += 1
        self._in_flight.forget()
        for read in self._reads.values():
            read.num_in_flight = 0
            read.end_as(ReadBroke(read.key, Reason.READ_FAILED, self._broken))

    def _finish(self) -> bool:
        """The ends of reads that have nothing in flight; True if there was one."""
        over = [
            read
            for read in self._reads.values()
            if read.launches is None and not read.num_in_flight
        ]
        for read in over:
            del self._reads[read.key]
            self._ready.append(read.end or ReadDone(read.key, read.nbytes, certified=False))
        if self._leaving:
            self._unmap_unused()
        return bool(over)
