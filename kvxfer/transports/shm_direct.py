"""The direct wire of one host: the sink maps the source's pools and copies out of them.

The source only owns shared pools, whose handles stand in its manifest. A source that dies is
harmless: its bytes stay until the last mapping goes, and a read is valid only with the source's
verdict.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import MappedPool, open_shared
from kvxfer.tensors.strided_copy import Scratch, strided_copy
from kvxfer.tensors.strided_index import all_side_ids
from kvxfer.transfer.costs import fit_costs
from kvxfer.transfer.manifest import MemfdHandle, MemoryInfo, RankManifest
from kvxfer.transfer.plan import CopyClass, PullClass
from kvxfer.transfer.pull import route_nbytes
from kvxfer.transfer.wire import Reason
from kvxfer.transports.attachments import NOT_ATTACHED, Attached, MappingSink, handle_of
from kvxfer.transports.base import (
    JOB_NBYTES,
    TRIAL_NBYTES,
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
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, Mailbox, work_of
from kvxfer.transports.wake_up import Completions

_SOURCE, _SINK = attrgetter("source"), attrgetter("sink")
NUM_TIMED = 4
"""Copies of a trial, 0.3 ms each: one alone, when another thread is given the core, was seen to
take ten times as long, and another wire would be taken.
"""


def shm_source(memory: LocalMemory, *_: object) -> DirectSource:
    """This rank's memories, to be mapped. Raises TransportUnavailable for one that cannot be."""
    memory.require("shm", "cpu")
    return DirectSource("shm", tuple(_own_handle(*each) for each in enumerate(memory.infos)))


def _own_handle(number: int, info: MemoryInfo) -> MemfdHandle:
    if not isinstance(info.handle, MemfdHandle):
        raise TransportUnavailable(
            f"shm: expected memory {number} in a shared pool, got plain {info.device} memory; "
            "allocate it with SharedPool.create"
        )
    return info.handle


class _OfThread(threading.local):
    """Each thread's own: large reads are copied on the copy thread, small ones where they begin."""

    def __init__(self) -> None:
        self.scratch = Scratch()


class _Read(CopyJob):
    """The copy of one read. The copying thread writes ``nbytes``, and ``has_ended`` when nothing of
    the read runs any more; all else belongs to the IO thread. ``told``: the mailbox that gets the
    read after each piece.
    """

    __slots__ = (
        *("_own", "_pieces", "_sink", "broke", "has_ended", "nbytes"),
        *("reported_nbytes", "request", "stopped", "told"),
    )

    def __init__(
        self,
        request: ReadRequest,
        source: tuple[Tensor, ...],
        sink: tuple[Tensor, ...],
        own: _OfThread,
        told: Mailbox[_Read],
    ) -> None:
        pulls = request.pull_classes
        num_regions = sum(len(pull.regions) for pull in pulls)
        super().__init__(request.key, work_of(route_nbytes(pulls), num_regions))
        self.request, self.told = request, told
        self.nbytes = self.reported_nbytes = 0
        self.has_ended = self.stopped = self.broke = False
        self._sink, self._own = sink, own
        self._pieces = self._copy(source)

    def run(self) -> bool:
        return next(self._pieces, self) is not self

    def on_end(self) -> None:
        """Whoever still has the read holds no mapping through it."""
        self._pieces = iter(())
        self.has_ended = True
        self.told.put(self)

    def _copy(self, source: tuple[Tensor, ...]) -> Iterator[None]:
        """Runs on the copy thread, or at once."""
        request = self.request
        classes = request.classes
        source_ids = all_side_ids(map(_SOURCE, classes), request.source_ids)
        sink_ids = all_side_ids(map(_SINK, classes), request.sink_ids)
        for copy_class, pull, given, taken in zip(
            classes, request.pull_classes, source_ids, sink_ids, strict=True
        ):
            for tokens in job_spans(copy_class, pull):
                self.nbytes += strided_copy(
                    source,
                    self._sink,
                    copy_class,
                    given,
                    taken,
                    tokens,
                    scratch=self._own.scratch,
                    stop=self._is_cancelled,
                )
                self.told.put(self)
                yield

    def _is_cancelled(self) -> bool:
        return self.cancelled


class ShmSink(MappingSink[MappedPool]):
    """Maps each source rank once and copies out of it on the copy thread; small reads at once."""

    name = "shm"

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: Context,
    ) -> None:
        super().__init__()
        memory.require(self.name, "cpu")
        self.counts: Counter[str] = Counter()
        self._memory = memory
        self._copy_thread = copy_thread
        self._mailbox: Mailbox[_Read] = Mailbox(wake)
        self._own = _OfThread()
        self._completions: Completions[SinkCompletion] = Completions(wake)
        self._reads: dict[TransferKey, _Read] = {}

    def trial(
        self, source: RankManifest, timeout_s: float, classes: Sequence[CopyClass] = ()
    ) -> Trial:
        """Map the rank's first pool, copy up to 4 MiB of it, unmap."""
        self._check_has_memories(source)
        mapping = self._map(source.memories[0], "memory 0")
        try:
            # As NumPy's: PyTorch would share a copy with its other threads, and wait for them
            first = mapping.tensor[:TRIAL_NBYTES].numpy()
            landing = torch.empty(first.size, dtype=torch.uint8).numpy()
            small = min(first.size, TRIAL_SMALL_NBYTES)
            np.copyto(landing, first)  # not timed: it pays for the page faults of both ends
            small_s = large_s = math.inf
            for _ in range(NUM_TIMED):
                begins_s = time.perf_counter()
                np.copyto(landing, first)
                middle_s = time.perf_counter()
                np.copyto(landing[:small], first[:small])
                large_s = min(large_s, max(middle_s - begins_s, 1e-9))
                small_s = min(small_s, max(time.perf_counter() - middle_s, 1e-9))
            return Trial(fit_costs((small, small_s), (first.size, large_s)))
        finally:
            mapping.close()

    def _map(self, info: MemoryInfo, name: str) -> MappedPool:
        return open_shared(handle_of(self.name, info, name, MemfdHandle))

    def _let_go(self, attached: Attached[MappedPool]) -> None:
        for mapping in attached.mappings:  # the memory stays as long as a copy's tensors do
            mapping.close()
        for read in list(self._reads.values()):
            if read.request.source.control_endpoint == attached.control_endpoint:
                read.broke = True
                self._copy_thread.cancel(read)

    def submit_read(self, request: ReadRequest) -> None:
        """Start the copy. Ids and addresses are checked there, before anything is written."""
        key = request.key
        if key in self._reads:
            raise ValueError(f"read: expected a key that is not in use, got {key} twice")
        attached = self._find(request.source)
        if attached is None:
            self._completions.tell(ReadBroke(key, Reason.PEER_LOST, NOT_ATTACHED))
            return
        source = tuple(mapping.tensor for mapping in attached.mappings)
        read = _Read(request, source, self._memory.tensors, self._own, self._mailbox)
        self._reads[key] = read
        self._copy_thread.submit(read)

    def stop_read(self, key: TransferKey) -> None:
        read = self._reads.get(key)
        if read is None:
            self._completions.tell(ReadStopped(key))
            return
        read.stopped = True
        self._copy_thread.cancel(read)

    def poll(self) -> list[SinkCompletion]:
        done = self._completions.take()
        for read in self._mailbox.drain():
            if (completion := self._look_at(read)) is not None:
                done.append(completion)
        return done

    def close(self) -> None:
        for key in list(self._reads):
            self.stop_read(key)
        while self._reads:
            self._look_at(self._mailbox.take())
        self._detach_all()

    def _look_at(self, read: _Read) -> SinkCompletion | None:
        """What there is to say of one that a piece of was copied, or that has ended: it lies in the
        mailbox once for each, and may have ended before the first is taken.
        """
        key = read.request.key
        if self._reads.get(key) is not read:
            return None  # its end was said
        if not read.has_ended:
            if read.nbytes == read.reported_nbytes or read.stopped:
                return None
            read.reported_nbytes = read.nbytes
            return Progress(key, read.nbytes)
        del self._reads[key]
        if read.stopped:
            return ReadStopped(key)
        if read.end is CopyEnd.DONE:
            return ReadDone(key, read.nbytes, certified=False)
        if read.broke:
            return ReadBroke(key, Reason.PEER_LOST, "the source rank was detached")
        return ReadBroke(
            key, Reason.READ_FAILED, f"copy {read.end and read.end.value}: {read.error}"
        )


def job_spans(copy_class: CopyClass, pull: PullClass) -> Iterator[tuple[int, int]]:
    """The class's tokens in pieces of at most JOB_NBYTES, but at least one sink block.

    Cut where a sink block ends.
    """
    tile = copy_class.sink.tile
    token_nbytes = tile.num_heads * tile.inner_nbytes * len(copy_class.sink.bases)
    step_tokens = max(1, JOB_NBYTES // (token_nbytes * tile.block_tokens)) * tile.block_tokens
    token_lo = pull.token_lo
    while token_lo < pull.token_hi:
        token_hi = min((token_lo // step_tokens + 1) * step_tokens, pull.token_hi)
        yield token_lo, token_hi
        token_lo = token_hi
