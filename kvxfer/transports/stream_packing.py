"""Between a pool and the staging of a stream wire: who copies a chunk, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.strided_copy import gather, scatter
from kvxfer.transfer.plan import Chunk, CopyClass, DenseOrder, Side
from kvxfer.transports.base import LocalMemory, TransferKey, Wake
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, Mailbox, work_of

Ids = NDArray[np.int64]
Staging = Callable[[], Tensor]


class ChunkJob:
    """One chunk of a transfer, from this rank's pool to staging or back, in one piece.

    ``order``: of the packed bytes; None where they are unpacked, for they come in the order of
    ``side``. ``staging`` is called once, by who copies, and says where the chunk lies or is to lie.
    ``after``: what a GPU must have done before the pool is written. ``end`` and ``error`` say how
    it ended.
    """

    __slots__ = (
        *("after", "block_ids", "chunk", "end", "error", "key", "order", "side", "slot"),
        "staging",
    )

    def __init__(
        self,
        key: TransferKey,
        chunk: Chunk,
        side: Side,
        block_ids: Ids,
        order: DenseOrder | None,
        slot: int,
        staging: Staging,
        after: torch.cuda.Event | None = None,
    ) -> None:
        self.key = key
        self.chunk = chunk
        self.side = side
        self.block_ids = block_ids
        self.order = order
        self.slot = slot
        self.staging: Staging | None = staging
        self.after = after
        self.end: CopyEnd | None = None
        self.error: BaseException | None = None


J = TypeVar("J", bound=ChunkJob)


class Packer(Protocol[J]):
    """Copies chunks between a pool and staging. For the IO thread, but for ``prepare``.

    ``num_at_once``: after so many submissions, or one that has ended when ``submit`` returns, the
    IO thread has other work to look at.
    """

    num_at_once: int

    def prepare(self, classes: Sequence[CopyClass]) -> None:
        """Get ready to unpack these, where that takes long; from any thread."""

    def submit(self, job: J) -> None:
        """Begin; never blocks."""

    def cancel(self, job: J) -> None:
        """What it does is not wanted any more: it ends at once, or when the copy is over."""

    def drain(self) -> Iterator[J]:
        """Jobs that have ended: nothing of them runs."""

    def take(self) -> J:
        """Wait for one of them, at shutdown."""

    def close(self) -> None:
        """After the end of the last job."""


class MakePacker(Protocol[J]):
    """Makes a packer for a memory. Raises TransportUnavailable."""

    def __call__(
        self, memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake
    ) -> Packer[J]: ...


class HostPacker(Generic[J]):
    """Pools in host memory: chunks are copied on the copy thread, small ones at once."""

    num_at_once = sys.maxsize  # a queue takes them all

    def __init__(self, memory: LocalMemory, copy_thread: Copier, wake: Wake) -> None:
        self._tensors = memory.tensors
        self._copy_thread = copy_thread
        self._running: dict[J, _HostJob[J]] = {}
        self._ended: Mailbox[J] = Mailbox(wake)

    def prepare(self, classes: Sequence[CopyClass]) -> None:
        """Nothing takes long."""

    def submit(self, job: J) -> None:
        """Queue it, or copy it now."""
        running = self._running[job] = _HostJob(job, self._tensors, self._ended)
        self._copy_thread.submit(running)

    def cancel(self, job: J) -> None:
        """A job that waits ends now, one that runs when it is through."""
        running = self._running.get(job)
        if running is not None:
            self._copy_thread.cancel(running)

    def drain(self) -> Iterator[J]:
        """Jobs that have ended."""
        for job in self._ended.drain():
            del self._running[job]
            yield job

    def take(self) -> J:
        """Wait for one of them."""
        job = self._ended.take()
        del self._running[job]
        return job

    def close(self) -> None:
        """The copy thread is the worker's."""


def make_packer(memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake) -> Packer[J]:
    """What copies in this memory. Raises TransportUnavailable."""
    devices = {tensor.device.type for tensor in memory.tensors}
    if devices <= {"cpu"}:
        return HostPacker(memory, copy_thread, wake)
    if devices != {"cuda"}:
        raise TransportUnavailable(
            f"packing: expected memory of a CPU or of a CUDA device, got {sorted(devices)}"
        )
    try:
        from kvxfer.transports.stream_device_packing import DevicePacker
    except ImportError as exc:
        raise TransportUnavailable(
            f"packing on a GPU: expected Triton, got {exc}; install kvxfer[cuda]"
        ) from exc
    return DevicePacker(memory, config, copy_thread, wake)


class _HostJob(CopyJob, Generic[J]):
    """A chunk as it is copied."""

    __slots__ = ("_ended", "_job", "_tensors")

    def __init__(self, job: J, tensors: Sequence[Tensor], ended: Mailbox[J]) -> None:
        chunk = job.chunk
        super().__init__(job.key, work_of(chunk.nbytes, chunk.region_hi - chunk.region_lo))
        self._job = job
        self._tensors = tensors
        self._ended = ended

    def run(self) -> bool:
        """Straight from or into the pool."""
        job, chunk = self._job, self._job.chunk
        assert job.staging is not None
        regions, tokens = (chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi)
        ids, dense = job.block_ids, job.staging()
        if job.order is not None:
            gather(self._tensors, job.side, ids, job.order, regions, tokens, dense)
        else:
            scatter(self._tensors, job.side, ids, regions, tokens, dense)
        return False

    def on_end(self) -> None:
        """What was unpacked is freed here and not on the IO thread."""
        self._job.staging = None
        self._job.end, self._job.error = self.end, self.error
        self._ended.put(self._job, more_follows=self.has_successor)
