"""Pools on a GPU: chunks are packed into staging and unpacked from there by kernels.

The IO thread launches them on a stream of their own and sees what is over
(:mod:`~kvxfer.transports.launches`). Kernels reach the memory of their GPU and pinned memory of the
host. Staging that is neither, like ZeroMQ's frames, lies behind a few pinned buffers: between these
and the staging the copy thread copies, so that a chunk is on its way to the host or back while
another is copied there and a third is on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from kvxfer.config import Config
from kvxfer.kernels.strided_work import WHOLE_GPU
from kvxfer.tensors.device_copy import BoundSide, CopySettings, DeviceCopier, bind_side, flat_copy
from kvxfer.tensors.device_memory import DeviceMemory, Gpu
from kvxfer.transfer.plan import CopyClass, Side
from kvxfer.transports.base import LocalMemory, Wake
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, Mailbox
from kvxfer.transports.launches import Launches
from kvxfer.transports.stream_packing import J

MAX_BOUNCES = 4
"""Pinned buffers of one packer, each as large as the largest chunk: one for the kernel, one for the
copy thread, and one each that waits for them.
"""
RING_NBYTES = 1 << 20
"""For ids and addresses on their way to the GPU; a chunk has a few KB of them."""
MAX_BOUND = 1024
"""Sides whose addresses are kept; a plan has a handful."""


@dataclass(slots=True, eq=False)
class _Step(Generic[J]):
    """A job, and where its chunk lies. ``bounce``: its pinned buffer, if it needs one."""

    job: J
    dense: Tensor | None
    nbytes: int
    bounce: Tensor | None = None
    copying: CopyJob | None = None
    error: BaseException | None = None
    is_cancelled: bool = False

    @property
    def is_pack(self) -> bool:
        return self.job.order is not None


class DevicePacker(Generic[J]):
    """Launches on one GPU. Raises RuntimeError, PyTorch's, where that cannot be had."""

    num_at_once = 2  # a launch takes the IO thread 0.1 ms, in which 30 MB could be on the wire

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        gpu: Gpu | None = None,
    ) -> None:
        self._gpu = gpu = gpu or Gpu(memory.device)
        self._tensors = memory.tensors  # so that the addresses stay good
        self._memories = tuple(
            DeviceMemory(tensor.data_ptr(), tensor.numel()) for tensor in memory.tensors
        )
        self._copier = DeviceCopier(
            gpu.device, CopySettings(config.launch_programs, ring_nbytes=RING_NBYTES)
        )
        self._stream = gpu.make_stream()
        self._copy_thread = copy_thread
        self._wake = wake
        self._steps: dict[J, _Step[J]] = {}
        self._waiting: deque[_Step[J]] = deque()
        self._in_flight: Launches[_Step[J]] = Launches(wake)
        self._copied: Mailbox[_BounceJob[J]] = Mailbox(wake)
        self._ended: deque[J] = deque()
        self._bound: dict[int, tuple[Side, BoundSide]] = {}
        self._bounces: list[Tensor] = []
        self._num_bounces = 0
        self._waited: torch.cuda.Event | None = None
        self._broken = ""
        # What nearly all engines need is compiled now: the first time it takes a second
        self._copier.warm(flat_copy(0, 0, 1 << 20), self._stream, WHOLE_GPU).synchronize()

    def prepare(self, classes: Sequence[CopyClass]) -> None:
        """Compile what unpacks these classes."""
        copier = DeviceCopier(
            self._gpu.device, CopySettings(ring_nbytes=RING_NBYTES)
        )  # this thread's
        stream = self._gpu.make_stream()
        for each in classes:
            side = bind_side(each.sink, self._memories)
            copier.warm_unpack(side, stream).synchronize()

    def submit(self, job: J) -> None:
        """Launch it, or let it wait for a pinned buffer."""
        assert job.staging is not None
        dense, job.staging = job.staging(), None
        step = self._steps[job] = _Step(job, dense, dense.numel())
        if self._gpu.reaches(dense):
            self._launch(step, dense)
        else:
            self._waiting.append(step)
            self._start_waiting()
        self._wake()  # ``drain`` follows, which waits for it

    def cancel(self, job: J) -> None:
        """A job that waits ends now, others when the step is over that runs."""
        step = self._steps.get(job)
        if step is None:
            return
        step.is_cancelled = True
        if step in self._waiting:
            self._waiting.remove(step)
            self._end(step, CopyEnd.CANCELLED)
        elif step.copying is not None:
            self._copy_thread.cancel(step.copying)
        self._tell_ended()

    def drain(self) -> Iterator[J]:
        """Jobs that have ended."""
        for copied in self._copied.drain():
            self._on_copied(copied)
        self._advance()
        ended, self._ended = self._ended, deque()
        yield from ended

    def take(self) -> J:
        """Wait for one of them."""
        while not self._ended:
            if len(self._in_flight):
                try:
                    self._in_flight.synchronize()
                except RuntimeError as exc:
                    self._break(exc)
            else:
                self._on_copied(self._copied.take())
            self._advance()
        return self._ended.popleft()

    def close(self) -> None:
        """End the thread that waits for the GPU."""
        self._in_flight.close()

    # -- kernels

    def _launch(self, step: _Step[J], dense: Tensor) -> None:
        """The chunk lies, or is to lie, in ``dense``."""
        job, chunk = step.job, step.job.chunk
        if self._broken:
            self._end(step, CopyEnd.FAILED, RuntimeError(self._broken))
            return
        regions, tokens = (chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi)
        try:
            side, ids, stream = self._bind(job.side), job.block_ids, self._stream
            if job.after is not None and job.after is not self._waited:
                self._copier.wait(stream, job.after)
                self._waited = job.after  # for all that comes behind it on the stream
            if job.order is not None:
                launched = self._copier.pack(
                    side, ids, job.order, regions, tokens, dense, stream=stream
                )
            else:
                launched = self._copier.unpack(side, ids, regions, tokens, dense, stream=stream)
            event = launched.event
        except (RuntimeError, ValueError) as exc:
            step.error, event = exc, None
        try:
            # Also where something failed: a part of it may run
            self._in_flight.add(step, event or self._copier.mark(self._stream), step.nbytes)
        except RuntimeError as exc:
            self._break(exc)

    def _bind(self, side: Side) -> BoundSide:
        known = self._bound.get(id(side))
        if known is None:
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            # The side is kept with it: its id is another's once it is gone
            known = self._bound[id(side)] = (side, bind_side(side, self._memories))
        return known[1]

    def _advance(self) -> None:
        """See what is over, and begin what waits for it."""
        try:
            landed = self._in_flight.land()
            while landed:
                for flight in landed:
                    self._on_landed(flight.owner)
                self._start_waiting()
                landed = self._in_flight.land_close()
        except RuntimeError as exc:
            self._break(exc)
        self._start_waiting()
        self._in_flight.expect()  # what is soon over needs no thread that waits

    def _on_landed(self, step: _Step[J]) -> None:
        if step.error is not None:
            self._end(step, CopyEnd.FAILED, step.error)
        elif step.is_cancelled:
            self._end(step, CopyEnd.CANCELLED)
        elif step.is_pack and step.bounce is not None:
            self._copy(step)
        else:
            self._end(step, CopyEnd.DONE)

    def _break(self, error: RuntimeError) -> None:
        """A CUDA error is for ever: nothing runs in this process's context any more."""
        self._broken = str(error)  # not the error, whose frames hold chunks
        self._in_flight.forget()
        for step in list(self._steps.values()):
            if step.copying is None:
                self._end(step, CopyEnd.FAILED, error)
        self._waiting.clear()

    # -- pinned buffers

    def _start_waiting(self) -> None:
        """Those that wait for a buffer, as far as there are any."""
        while self._waiting and self._has_bounce():
            step = self._waiting.popleft()
            step.bounce = self._take_bounce(step.nbytes)
            if step.is_pack:
                self._launch(step, step.bounce[: step.nbytes])
            else:
                self._copy(step)

    def _has_bounce(self) -> bool:
        return bool(self._bounces) or self._num_bounces < MAX_BOUNCES

    def _take_bounce(self, nbytes: int) -> Tensor:
        """One that is free and large enough, or a new one (in the place of a smaller one)."""
        if self._bounces:
            bounce = self._bounces.pop()
            if bounce.numel() >= nbytes:
                return bounce
        else:
            self._num_bounces += 1
        return self._gpu.pinned(nbytes)

    def _copy(self, step: _Step[J]) -> None:
        """On the copy thread: from the buffer to the staging, or back."""
        step.copying = _BounceJob(step, self._copied)
        self._copy_thread.submit(step.copying)

    def _on_copied(self, copied: _BounceJob[J]) -> None:
        step = copied.step
        step.copying = None
        if copied.end is not CopyEnd.DONE or step.is_cancelled:
            end = CopyEnd.FAILED if copied.end is CopyEnd.FAILED else CopyEnd.CANCELLED
            self._end(step, end, copied.error)
        elif step.is_pack:
            self._end(step, CopyEnd.DONE)
        else:
            assert step.bounce is not None
            self._launch(step, step.bounce[: step.nbytes])

    # -- ends

    def _end(self, step: _Step[J], end: CopyEnd, error: BaseException | None = None) -> None:
        del self._steps[step.job]
        step.dense = None
        if step.bounce is not None:
            self._bounces.append(step.bounce)
            step.bounce = None
        step.job.end, step.job.error = end, error
        self._ended.append(step.job)

    def _tell_ended(self) -> None:
        if self._ended:
            self._wake()


class _BounceJob(CopyJob, Generic[J]):
    """Copies a chunk between its pinned buffer and its staging."""

    __slots__ = ("_copied", "step")

    def __init__(self, step: _Step[J], copied: Mailbox[_BounceJob[J]]) -> None:
        super().__init__(step.job.key)
        self.step = step
        self._copied = copied

    def run(self) -> bool:
        step = self.step
        assert step.bounce is not None
        assert step.dense is not None
        bounce = step.bounce[: step.nbytes]
        if step.is_pack:
            step.dense.copy_(bounce)
        else:
            bounce.copy_(step.dense)
        return False

    def on_end(self) -> None:
        """What was unpacked is freed here and not on the IO thread."""
        self.step.dense = None
        self._copied.put(self, more_follows=self.has_successor)
