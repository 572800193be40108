"""Copies of chunks between a pool and the staging of a stream wire.

In host memory the copy thread copies. On a GPU kernels copy; the IO thread launches them on a
stream of their own and sees which are over (:mod:`~kvxfer.transports.launches`). Kernels reach the
memory of their GPU and pinned memory of the host. Staging that is neither, like frames that ZeroMQ
has received, lies behind a few pinned buffers: between these and the staging a copy thread copies
what waits, several chunks at once, while others are on their way to the host or back and on the
wire.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.extras import install
from kvxfer.kernels.strided_work import WHOLE_GPU
from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.tensors.device_memory import DeviceMemory, Gpu
from kvxfer.tensors.strided_copy import gather, scatter
from kvxfer.transfer.plan import Chunk, CopyClass, DenseOrder, Side
from kvxfer.transports.base import LocalMemory, TransferKey, Wake
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, Mailbox, work_of
from kvxfer.transports.launches import Launches
from kvxfer.transports.parallel import num_streams
from kvxfer.transports.pipe import SourceLane

if TYPE_CHECKING:  # it needs Triton, which a host without a GPU need not have
    from kvxfer.tensors.device_copy import BoundSide, DeviceCopier

_BOUNCES = 2
"""Pinned buffers of a packer, each as large as the largest chunk, for each stream and for one more:
some are copied while kernels work on others.
"""
_COPIED_AT_ONCE = 4
"""Chunks: the link to the GPU carries those of one call while the next is under way. Nine at once
took 16.9 to 18.3 ms where four took 14.9 to 16.6 (128 MiB, two H200s).
"""
_LAUNCH_NBYTES, _LAUNCH_CHUNKS = 16 << 20, 4
"""What one launch packs at most, or unpacks from where it came; one chunk at least. A launch takes
the IO thread 0.1 to 0.2 ms, in which 8 MB go to the host, and each chunk in it 0.1 more.
"""
_LAUNCHES_OF_TURN = 2
"""Then what is packed leaves: meanwhile the next launch is over."""
RING_NBYTES = 1 << 20
"""For ids and addresses on their way to the GPU; a chunk has a few KB of them."""
MAX_BOUND = 1024
"""Sides whose addresses are kept; a plan has a handful."""

Ids = NDArray[np.int64]


@dataclass(eq=False)
class ChunkJob(CopyJob):
    """One chunk of a transfer, from this rank's pool to staging or back, in one piece. It is a job
    of the copy thread in host memory; on a GPU it is launched.

    ``owner``: the connection whose slot it is. ``order``: of the packed bytes; None where they are
    unpacked, for they come in the order of ``side``. ``dense``: where they lie; a lane, where they
    are to lie. ``after``: what a GPU must have done before the pool is written. ``span``: regions
    and tokens, each from and to.

    Of a :class:`DevicePacker`: ``is_by_host``: the bytes go to or come from memory of the host;
    ``bounce``: the pinned buffer, if one is needed; ``is_copying``: a copy thread has it, or is to
    have it.
    """

    owner: object
    key: TransferKey
    chunk: Chunk
    slot: int
    side: Side
    block_ids: Ids
    dense: Tensor | SourceLane | None
    order: DenseOrder | None = None
    after: StreamEvent | None = None
    span: tuple[tuple[int, int], tuple[int, int]] = field(init=False)
    packer: HostPacker | None = field(default=None, init=False)
    is_by_host: bool = field(default=False, init=False)
    bounce: Tensor | None = field(default=None, init=False)
    is_copying: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        chunk = self.chunk
        super().__init__(self.key, work_of(chunk.nbytes, chunk.region_hi - chunk.region_lo))
        self.span = (chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi)

    def run(self) -> bool:
        assert self.packer is not None
        tensors, dense = self.packer.tensors, self.take_dense()
        if self.order is not None:
            gather(tensors, self.side, self.block_ids, self.order, *self.span, dense)
        else:
            scatter(tensors, self.side, self.block_ids, *self.span, dense)
        return False

    def on_end(self) -> None:
        self.dense = None  # also of a job that never ran
        assert self.packer is not None
        self.packer.put(self, more_follows=self.has_successor)

    def take_dense(self) -> Tensor:
        """Take the chunk's memory out of the job, once, so that it is freed with the copy."""
        dense, self.dense = self.dense, None
        assert dense is not None
        if isinstance(dense, SourceLane):
            return dense.staging(self.slot, self.chunk.nbytes)
        return dense

    @property
    def near(self) -> Tensor:
        """What a kernel reaches of the chunk's memory: itself, or the pinned buffer before it."""
        near = self.dense if self.bounce is None else self.bounce[: self.chunk.nbytes]
        assert isinstance(near, Tensor)
        return near


# ------------------------------------------------------------------ host memory


class HostPacker(Mailbox[ChunkJob]):
    """Chunks are copied on the copy thread, small ones at once; those that have ended, of which
    nothing runs any more, lie in it as in a mailbox. For the IO thread, but for ``prepare``.

    ``takes_more``: False when the IO thread has other work to look at, until ``begin_turn``.
    ``is_at_once``: a job may have ended when ``submit`` returns. ``copies_frames``: another thread
    copies what is submitted, before the IO thread launches it.
    """

    is_at_once = True
    copies_frames = False

    def __init__(self, memory: LocalMemory, copy_thread: Copier, wake: Wake) -> None:
        super().__init__(wake)
        self.tensors, self._copy_thread = memory.tensors, copy_thread
        self.takes_more = True

    def prepare(self, classes: Sequence[CopyClass]) -> None:
        """Nothing: a copy on the CPU needs no compiling."""

    def begin_turn(self) -> None:
        self.takes_more = True

    def submit(self, job: ChunkJob) -> None:
        """Queue it, or copy it now; never blocks."""
        job.packer = self
        self._copy_thread.submit(job)
        if job.end:
            self.takes_more = False  # it leaves before the next one is begun

    def launch(self) -> None:
        """Nothing: the queue takes each at once."""

    def cancel(self, job: ChunkJob) -> None:
        self._copy_thread.cancel(job)

    def close(self) -> None:
        """The copy thread is the worker's."""


# ------------------------------------------------------------------ memory of a GPU


def _make_copier(gpu: Gpu, config: Config | None = None) -> DeviceCopier:
    """For one thread; without a config, for kernels that are only compiled."""
    from kvxfer.tensors.device_copy import CopySettings, DeviceCopier

    if config is None:
        return DeviceCopier(gpu.device, CopySettings(ring_nbytes=RING_NBYTES))
    settings = CopySettings(config.launch_programs, ring_nbytes=RING_NBYTES)
    return DeviceCopier(gpu.device, settings)


class DevicePacker:
    """Launches on one GPU, with the same methods. Raises RuntimeError, PyTorch's, where that cannot
    be had.

    In a turn two launches pack, one of one chunk, so that it leaves early, and one of others; a
    third one only what was submitted and is not like these.
    """

    is_at_once = False

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        gpu: Gpu | None = None,
    ) -> None:
        from kvxfer.tensors.device_copy import flat_copy

        self._gpu = gpu = gpu or Gpu(memory.device)
        self._tensors = memory.tensors  # so that the addresses stay good
        self._memories = tuple(
            DeviceMemory(tensor.data_ptr(), tensor.numel()) for tensor in memory.tensors
        )
        self._copier = _make_copier(gpu, config)
        self._stream = gpu.make_stream()
        self._wake = wake
        self._jobs: dict[ChunkJob, None] = {}
        self._num_launched = 0  # in this turn
        self._gathered: list[ChunkJob] = []
        """Like each other, and not launched yet."""
        self._waiting: deque[ChunkJob] = deque()
        self._in_flight: Launches[Sequence[ChunkJob]] = Launches(wake)
        self._copied: Mailbox[ChunkJob] = Mailbox(wake)
        self._ended: deque[ChunkJob] = deque()
        self._bound: dict[int, tuple[Side, BoundSide]] = {}
        self._bounces: list[Tensor] = []
        self._num_bounces = 0
        self._most_bounces = _BOUNCES * (num_streams(config) + 1)
        self._to_copy = _BounceQueue(copy_thread, self._copied)
        self._waited: StreamEvent | None = None
        self._broken = ""
        # What nearly all engines need is compiled now: the first time it takes a second
        self._copier.warm(flat_copy(0, 0, 1 << 20), self._stream, WHOLE_GPU).synchronize()

    def prepare(self, classes: Sequence[CopyClass]) -> None:
        from kvxfer.tensors.device_copy import bind_side

        copier = _make_copier(self._gpu)  # this thread's
        stream = self._gpu.make_stream()
        for each in classes:
            side = bind_side(each.sink, self._memories)
            copier.warm_unpack(side, stream).synchronize()

    @property
    def copies_frames(self) -> bool:
        return self._num_bounces > 0

    def begin_turn(self) -> None:
        self._num_launched = 0

    @property
    def takes_more(self) -> bool:
        return self._num_launched < _LAUNCHES_OF_TURN

    def submit(self, job: ChunkJob) -> None:
        self._jobs[job] = None
        try:
            job.dense = dense = job.take_dense()
            is_reached = self._gpu.reaches(dense)
        except Exception as exc:  # noqa: BLE001  # no memory, say; it fails the transfer
            self._end(job, exc)
        else:
            job.is_by_host = dense.is_cpu
            if is_reached:
                self._gather(job)
            else:
                self._waiting.append(job)
                self._start_waiting()
        if job.order is not None and not self._num_launched:
            self.launch()
        if not job.is_copying:  # else its copy wakes
            self._wake()  # ``drain`` follows, which waits for it

    def cancel(self, job: ChunkJob) -> None:
        """A job that waits ends now, others when the step is over that runs."""
        if job not in self._jobs:
            return
        job.cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
            self._end(job)
        if self._ended:
            self._wake()

    def launch(self) -> None:
        """What was submitted and not yet launched."""
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._num_launched += 1
            self._launch(*gathered)

    def drain(self) -> Iterator[ChunkJob]:
        self.launch()
        self._take_copied(self._copied.drain())
        self._advance()
        for _ in range(len(self._ended)):
            yield self._ended.popleft()

    def take(self) -> ChunkJob:
        self.launch()
        while not self._ended:
            if len(self._in_flight):
                try:
                    self._in_flight.synchronize()
                except RuntimeError as exc:
                    self._break(exc)
            else:
                self._take_copied((self._copied.take(),))
            self._advance()
        return self._ended.popleft()

    def close(self) -> None:
        self._in_flight.close()

    # -- kernels

    def _gather(self, job: ChunkJob) -> None:
        """To be launched with others that are like it."""
        if self._gathered and _likeness(self._gathered[0]) != _likeness(job):
            self.launch()
        self._gathered.append(job)
        sizes = [each.chunk.nbytes for each in self._gathered]
        if len(sizes) >= _LAUNCH_CHUNKS or sum(sizes) >= _LAUNCH_NBYTES:
            self.launch()

    def _launch(self, *jobs: ChunkJob) -> None:
        """By one launch; several are of one class and of the same tokens."""
        if self._broken:
            for job in jobs:
                if job in self._jobs:  # others ended when it broke
                    self._end(job, RuntimeError(self._broken))
            return
        first, event = jobs[0], None
        try:
            side, ids, stream = self._bind(first.side), first.block_ids, self._stream
            if first.after is not None and first.after is not self._waited:
                self._copier.wait(stream, first.after)
                self._waited = first.after  # for all that comes behind it on the stream
            tokens = first.span[1]
            pieces = [(job.span[0], job.near) for job in jobs]
            if first.order is not None:
                launched = self._copier.pack(side, ids, first.order, tokens, *pieces, stream=stream)
            else:
                launched = self._copier.unpack(side, ids, tokens, *pieces, stream=stream)
            event = launched.event
        except (RuntimeError, ValueError) as exc:
            for job in jobs:
                job.error = exc
        try:
            # Also where something failed: a part of it may run
            event = event or self._copier.mark(self._stream)
            # To the host and back it is told of when it is over: nobody looks closely before
            nbytes = 0 if first.is_by_host else sum(job.chunk.nbytes for job in jobs)
            self._in_flight.add(jobs, event, nbytes)
        except RuntimeError as exc:
            self._break(exc)

    def _bind(self, side: Side) -> BoundSide:
        known = self._bound.get(id(side))
        if known is None:
            from kvxfer.tensors.device_copy import bind_side

            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            # The side is kept with it: its id is another's once it is gone
            known = self._bound[id(side)] = (side, bind_side(side, self._memories))
        return known[1]

    def _advance(self) -> None:
        try:
            landed = self._in_flight.land()
            while landed:
                for job in chain.from_iterable(flight.owner for flight in landed):
                    self._on_landed(job)
                self._start_waiting()
                if self._ended and landed[-1].owner[-1].is_by_host:
                    break  # it is sent or credited first: the link to the host has others to carry
                landed = self._in_flight.land_close()
        except RuntimeError as exc:
            self._break(exc)
        self._start_waiting()
        self._in_flight.expect()  # what is soon over needs no thread that waits

    def _on_landed(self, job: ChunkJob) -> None:
        is_over = job.error is not None or job.cancelled
        if is_over or job.order is None or job.bounce is None:
            self._end(job)
        else:
            self._copy(job)

    def _break(self, error: RuntimeError) -> None:
        """Fail all jobs: after a CUDA error nothing runs in this process's context any more."""
        self._broken = str(error)  # not the error, whose frames hold chunks
        self._in_flight.forget()
        for job in list(self._jobs):
            if not job.is_copying:
                self._end(job, error)
        self._waiting.clear()

    # -- pinned buffers

    def _start_waiting(self) -> None:
        """As long as a buffer is free, or there may be one more."""
        while self._waiting and (self._bounces or self._num_bounces < self._most_bounces):
            job = self._waiting.popleft()
            try:
                job.bounce = self._take_bounce(job.chunk.nbytes)
            except RuntimeError as exc:  # PyTorch's: there is no more pinned memory
                self._num_bounces -= 1
                self._end(job, exc)
                continue
            if job.order is not None:
                self._gather(job)
            else:
                self._copy(job)
        self.launch()

    def _take_bounce(self, nbytes: int) -> Tensor:
        """One that is free and large enough, or a new one (in the place of a smaller one)."""
        if self._bounces:
            bounce = self._bounces.pop()
            if bounce.numel() >= nbytes:
                return bounce
        else:
            self._num_bounces += 1
        return self._gpu.pinned(nbytes)

    def _copy(self, job: ChunkJob) -> None:
        job.is_copying = True
        self._to_copy.submit(job)

    def _take_copied(self, copied: Iterable[ChunkJob]) -> None:
        """What lies in pinned buffers is unpacked, as much as can be by each launch: it takes the
        IO thread 0.1 to 0.2 ms beside eight streams, for one chunk as for several.
        """
        ready: dict[Hashable, list[ChunkJob]] = {}
        for job in copied:
            job.is_copying = False
            if job.order is None and job.error is None and not job.cancelled:
                ready.setdefault(_likeness(job), []).append(job)
            else:
                self._end(job)
        for jobs in ready.values():
            self._launch(*jobs)

    # -- ends

    def _end(self, job: ChunkJob, error: BaseException | None = None) -> None:
        del self._jobs[job]
        job.dense = None
        if job.bounce is not None:
            self._bounces.append(job.bounce)
            job.bounce = None
        job.error = error or job.error
        if job.error is not None:
            job.end = CopyEnd.FAILED
        else:
            job.end = CopyEnd.CANCELLED if job.cancelled else CopyEnd.DONE
        self._ended.append(job)


def _likeness(job: ChunkJob) -> Hashable:
    """The same of jobs that one launch can do."""
    return job.key, job.chunk.class_index, job.span[1], job.order is None, job.is_by_host


class _BounceQueue:
    """Chunks that wait to be copied between their pinned buffers and their staging. One job at a
    time copies them, several at once, by all cores that its thread may use; then they are in
    ``copied``.

    Where each of eight threads copied a chunk, the IO thread waited for the interpreter at every
    step: 128 MiB over eight streams took 16.2 ms between two H200s, and 14.3 this way.
    """

    def __init__(self, copier: Copier, copied: Mailbox[ChunkJob]) -> None:
        self._copier, self._copied = copier, copied
        self._lock = threading.Lock()
        self._waiting: deque[ChunkJob] = deque()
        self._has_job = False

    def submit(self, chunk: ChunkJob) -> None:
        with self._lock:
            self._waiting.append(chunk)
            has_job, self._has_job = self._has_job, True
        if not has_job:
            self._copier.submit(_BounceJob(self))

    def take(self) -> list[ChunkJob]:
        """What the job is to copy next."""
        with self._lock:
            number = min(len(self._waiting), _COPIED_AT_ONCE)
            return [self._waiting.popleft() for _ in range(number)]

    def give(self, *chunks: ChunkJob) -> bool:
        """They have been copied, or will not be; False: the job is over, for no other waits."""
        with self._lock:
            has_more = self._has_job = bool(self._waiting)
        self._copied.put(*chunks, more_follows=has_more)
        return has_more


class _BounceJob(CopyJob):
    """As long as any chunk waits."""

    __slots__ = ("_queue",)
    lets_others_run = True

    def __init__(self, queue: _BounceQueue) -> None:
        super().__init__(queue)
        self._queue = queue

    def run(self) -> bool:
        chunks = self._queue.take()
        try:
            _copy_together(chunks)
        except Exception as exc:  # noqa: BLE001  # it fails the transfers, not the thread
            for chunk in chunks:
                chunk.error = exc
        return self._queue.give(*chunks)

    def on_end(self) -> None:
        """Of a copy thread that was closed: nothing more is copied."""
        has_more = self.end is not CopyEnd.DONE  # else what waits by now is another job's
        while has_more:
            chunks = self._queue.take()
            for chunk in chunks:
                chunk.cancelled = True
            has_more = self._queue.give(*chunks)


def _copy_together(chunks: Sequence[ChunkJob]) -> None:
    """Between their pinned buffers and their staging. By one call, for it lets go of the
    interpreter and wants it back: with a call for each chunk 128 MiB took 17.6 ms, and 15.9 so.
    """
    to, of = list[Tensor](), list[Tensor]()
    for chunk in chunks:
        dense, chunk.dense = chunk.dense, None  # a frame is freed here and not on the IO thread
        assert isinstance(dense, Tensor)
        if not chunk.cancelled:
            to.append(chunk.near if chunk.order is None else dense)
            of.append(dense if chunk.order is None else chunk.near)
    if to:  # else it raises
        torch._foreach_copy_(to, of)


# ------------------------------------------------------------------ which of the two

Packer = HostPacker | DevicePacker


def make_packer(memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake) -> Packer:
    """What copies in this memory. Raises TransportUnavailable."""
    devices = {tensor.device.type for tensor in memory.tensors}
    if devices <= {"cpu"}:
        return HostPacker(memory, copy_thread, wake)
    if devices != {"cuda"}:
        raise TransportUnavailable(
            f"packing: expected memory of a CPU or of a CUDA device, got {sorted(devices)}"
        )
    try:
        return DevicePacker(memory, config, copy_thread, wake)
    except ImportError as exc:
        raise TransportUnavailable(
            f"packing on a GPU: expected Triton, got {exc}; {install('cuda')}"
        ) from exc
