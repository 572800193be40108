"""The direct wire between GPUs of one host: the sink maps the source's memory and copies out of it
by one kernel launch for each geometry class of a read (``tensors/device_copy.py``), on a stream of
the wire's own (``cuda_ipc_pulls``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import zmq

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.device_copy import (
    BoundCopy,
    BoundSide,
    CopySettings,
    DeviceCopier,
    bind_copy,
    flat_copy,
)
from kvxfer.tensors.device_launch import Event
from kvxfer.tensors.device_memory import DeviceMemory, Gpu, MappedMemory
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
    ReadBroke,
    ReadRequest,
    SinkCompletion,
    SinkTransport,
    TransferKey,
    Trial,
    Wake,
)
from kvxfer.transports.completions import Completions
from kvxfer.transports.copy_thread import Copier, CopyJob, PiecesJob
from kvxfer.transports.cuda_ipc_pulls import Pulls
from kvxfer.transports.cuda_ipc_trial import measure_copies

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
        gpu = gpu or Gpu(memory.device)
        super().__init__(gpu.export(tensor) for tensor in memory.tensors)


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
        self._gpu = gpu = gpu or Gpu(memory.device)
        self._memories = tuple(
            DeviceMemory(tensor.data_ptr(), tensor.numel()) for tensor in memory.tensors
        )
        self._tensors = memory.tensors  # so that the addresses stay good
        settings = CopySettings(launch_programs=config.launch_programs)
        self._copier = DeviceCopier(gpu.device, settings)
        self._stream = gpu.make_stream()
        self._copy_thread = copy_thread
        self._attached = Attachments("cuda_ipc", self._map, self._let_go)
        self._bound: dict[Attached[MappedMemory], _Bound] = {}
        self._leaving: list[Attached[MappedMemory]] = []
        self._completions: Completions[SinkCompletion] = Completions(wake)
        self._pulls = Pulls(self._copier, self._stream, self._completions, wake, self.counts)
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
            copier.warm(BoundCopy(*sides), stream).synchronize()

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
        self._pulls.finish()
        self._unmap_unused()

    def _map(self, info: MemoryInfo, name: str) -> MappedMemory:
        return self._gpu.map(handle_of("cuda_ipc", info, name, CudaIpcHandle))

    def _let_go(self, attached: Attached[MappedMemory]) -> None:
        self._pulls.lose(attached, "the source rank was detached")
        self._bound.pop(attached, None)
        self._leaving.append(attached)

    def _unmap_unused(self) -> None:
        """On the copy thread: CUDA may wait for other work of this GPU first."""
        if not self._leaving:
            return
        in_use = self._pulls.attached
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
        if key in self._pulls:
            raise ValueError(f"read: expected a key that is not in use, got {key} twice")
        attached, broken = self._attached.find(request.source), self._pulls.broken
        if attached is None or broken:
            reason = Reason.PEER_LOST if attached is None else Reason.READ_FAILED
            self._completions.tell(ReadBroke(key, reason, broken or NOT_ATTACHED))
            return
        try:
            launches = self._launches(request, attached)
        except ValueError as exc:
            self._completions.tell(ReadBroke(key, Reason.READ_FAILED, str(exc)))
            return
        self._pulls.begin(key, attached, launches, request.after)

    def stop_read(self, key: TransferKey) -> None:
        """What was launched is the last of it."""
        self._pulls.stop(key)

    def poll(self) -> list[SinkCompletion]:
        """Progress and ends of the copies; of one that will be over in a moment its end."""
        self._pulls.follow()
        return self._done()

    def look(self) -> list[SinkCompletion]:
        """Progress and ends of the copies that are over now."""
        self._pulls.land_now()
        return self._done()

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way, and nothing has to be told or unmapped."""
        return self._pulls.is_idle and not (self._completions or self._leaving)

    def close(self) -> None:
        """Launch no more, wait for what runs, unmap."""
        self._pulls.drain()
        self._attached.close()
        self._unmap_unused()
        self._pulls.close()

    def _done(self) -> list[SinkCompletion]:
        self._pulls.finish()
        self._unmap_unused()
        return self._completions.take()

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
                (pull.token_lo, pull.token_hi),
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
