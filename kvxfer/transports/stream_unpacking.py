"""The reads of a stream wire's sink: what of them is being unpacked, and how each ends, once."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    Progress,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SinkCompletion,
    TransferKey,
    Wake,
)
from kvxfer.transports.completions import Completions
from kvxfer.transports.copy_thread import CopyEnd
from kvxfer.transports.stream_packing import Packer
from kvxfer.transports.stream_reads import Read, ReadLink, UnpackJob


class Unpacking:
    """Those of one sink.

    Args:
        packer: unpacks a chunk.
        free: takes the slot of a chunk that has been dealt with.
        completions: what has become of reads.
        wake: there is something to free.
    """

    def __init__(
        self,
        packer: Packer[UnpackJob],
        free: Callable[[UnpackJob], None],
        completions: Completions[SinkCompletion],
        wake: Wake,
    ) -> None:
        self._packer, self._free, self._wake = packer, free, wake
        self._completions = completions
        self._reads: dict[TransferKey, Read] = {}
        self._unfreed: list[UnpackJob] = []
        """The last of their reads, which were told already."""

    @property
    def is_idle(self) -> bool:
        """No read is under way, and no slot to be freed."""
        return not (self._reads or self._unfreed)

    def find(self, key: TransferKey) -> Read | None:
        """One that has not ended."""
        return self._reads.get(key)

    def begin(self, read: Read) -> None:
        """From now on its chunks may come."""
        self._reads[read.request.key] = read

    def stop(self, key: TransferKey) -> None:
        """No more chunks are taken; what is being unpacked is the last of it."""
        read = self._reads.get(key)
        if read is None:
            self._completions.tell(ReadStopped(key))
        else:
            self._stop(read)

    def lose(self, link: ReadLink, awaited: Collection[Read], detail: str) -> None:
        """The connection has ended, and with it what did not come before; ``awaited``: reads of
        which a payload was announced and is not there.
        """
        for read in [read for read in self._reads.values() if read.link is link]:
            if read in awaited or not all(read.arrived):
                # else everything is here and only has to be put in place
                self._break(read, Reason.PEER_LOST, detail)
                self._settle(read)

    def unpack(self, read: Read, sequence: int, slot: int) -> None:
        """A chunk that lies in a slot."""
        job = UnpackJob(read, sequence, slot)
        read.jobs[sequence] = job
        read.link.num_unpacking += 1
        self._packer.submit(job)

    def take_unpacked(self) -> None:
        """What the packer has done."""
        for job in self._packer.drain():
            self._on_ended(job)

    def free_told(self) -> None:
        """Slots of chunks that had ended a read, which had to be told first."""
        unfreed, self._unfreed = self._unfreed, []
        for job in unfreed:
            self._free(job)

    def close(self) -> None:
        """Stop all, and wait for what is being unpacked."""
        for read in list(self._reads.values()):
            self._stop(read)
        while self._reads:
            self._on_ended(self._packer.take())

    def _on_ended(self, job: UnpackJob) -> None:
        read, link, sequence = job.read, job.link, job.chunk.sequence
        del read.jobs[sequence]
        link.num_unpacking -= 1
        if job.end is CopyEnd.DONE:
            read.placed[sequence] = 1
            read.nbytes += job.chunk.nbytes
        elif job.end is CopyEnd.FAILED and not read.is_over:
            self._break(read, Reason.READ_FAILED, f"unpacking failed: {job.error}")
        link.close_lane()
        self._settle(read)
        if read.is_placed:  # somebody waits for that; to post another receive takes 0.1 ms
            self._unfreed.append(job)
            self._wake()
        else:
            self._free(job)

    def _settle(self, read: Read) -> None:
        """Say what has become of a read: progress, or its one end once no job of it is left."""
        key = read.request.key
        if read.is_over:
            if not read.jobs and self._reads.pop(key, None) is not None:
                self._completions.tell(
                    read.broke if read.broke and not read.stopped else ReadStopped(key)
                )
        elif read.is_placed:
            if self._reads.pop(key, None) is not None:
                self._completions.tell(ReadDone(key, read.nbytes, certified=True))
        else:
            self._completions.note(Progress(key, read.nbytes))

    def _stop(self, read: Read) -> None:
        read.stopped = True
        self._cancel_jobs(read)
        self._settle(read)

    def _break(self, read: Read, reason: Reason, detail: str) -> None:
        read.broke = ReadBroke(read.request.key, reason, detail)
        self._cancel_jobs(read)

    def _cancel_jobs(self, read: Read) -> None:
        for job in list(read.jobs.values()):
            self._packer.cancel(job)
