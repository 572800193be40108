"""The direct wire of one host: the sink maps the source's pools and copies out of them.

The source does nothing but own shared pools whose handles stand in its manifest. A source that dies
is harmless: its bytes stay until the last mapping goes, and what was read counts only with the
source's verdict.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import zmq
from torch import Tensor

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import MappedPool, open_shared
from kvxfer.tensors.strided_copy import Scratch, strided_copy
from kvxfer.transfer.costs import Staging, fit_direct_costs
from kvxfer.transfer.manifest import MemfdHandle, MemoryInfo, RankManifest
from kvxfer.transfer.plan import CopyClass, PullClass
from kvxfer.transfer.pull import route_nbytes
from kvxfer.transfer.wire import Reason
from kvxfer.transports.attachments import (
    NOT_ATTACHED,
    Attached,
    Attachments,
    DirectSource,
    handle_of,
)
from kvxfer.transports.base import (
    JOB_NBYTES,
    TRIAL_NBYTES,
    TRIAL_SMALL_NBYTES,
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
from kvxfer.transports.completions import Completions
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, Mailbox, PiecesJob, work_of

NUM_TIMED = 4
"""Copies of a trial, 0.3 ms each: one alone, when another thread is given the core, was seen to
take ten times as long, and another wire would be taken.
"""


class ShmSource(DirectSource):
    """Says that this rank's memories can be mapped.

    Raises TransportUnavailable where one cannot.
    """

    name = "shm"

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        memory.require(self.name, "cpu")
        super().__init__(_own_handle(*each) for each in enumerate(memory.infos))


def _own_handle(number: int, info: MemoryInfo) -> MemfdHandle:
    if not isinstance(info.handle, MemfdHandle):
        raise TransportUnavailable(
            f"shm: expected memory {number} in a shared pool, got plain {info.device} memory; "
            "allocate it with SharedPool.create"
        )
    return info.handle


@dataclass(slots=True, eq=False)
class _Read:
    """One read; ``nbytes`` is written by who copies, the rest belongs to the IO thread."""

    request: ReadRequest
    job: CopyJob | None = None
    nbytes: int = 0
    reported_nbytes: int = 0
    stopped: bool = False
    broke: Reason | None = None


class _OfThread(threading.local):
    """Each thread's own: large reads are copied on the copy thread, small ones where they begin."""

    def __init__(self) -> None:
        self.scratch = Scratch()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece is copied (``end`` None), or the whole read has ended."""

    read: _Read
    end: CopyEnd | None = None
    error: BaseException | None = field(default=None)


class ShmSink(SinkTransport):
    """Maps each source rank once and copies out of it on the copy thread; little, at once."""

    name = "shm"
    is_stream = False

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        memory.require(self.name, "cpu")
        self.counts: Counter[str] = Counter()
        self._memory = memory
        self._copy_thread = copy_thread
        self._mailbox: Mailbox[_Piece] = Mailbox(wake)
        self._own = _OfThread()
        self._completions: Completions[SinkCompletion] = Completions(wake)
        self._attached = Attachments("shm", _map_pool, self._let_go)
        self._reads: dict[TransferKey, _Read] = {}

    def trial(self, source: RankManifest, timeout_s: float) -> Trial:
        """Map the rank's first pool, copy up to 4 MiB of it, unmap."""
        mapping = self._attached.map_first(source)
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
            return Trial(fit_direct_costs((small, small_s), (first.size, large_s)))
        finally:
            mapping.close()

    def attach(
        self, source: RankManifest, staging: Staging | None = None, trial: Trial | None = None
    ) -> None:
        """Map the rank's pools, once for each life of them."""
        self._attached.attach(source)

    def detach(self, control_endpoint: str) -> None:
        """Its unfinished reads break; the mapping goes with the last copy that runs on it."""
        self._attached.detach(control_endpoint)

    def _let_go(self, attached: Attached[MappedPool]) -> None:
        for mapping in attached.mappings:
            mapping.close()
        endpoint = attached.control_endpoint
        for read in list(self._reads.values()):
            if read.request.source.control_endpoint == endpoint and read.job is not None:
                read.broke = Reason.PEER_LOST
                self._copy_thread.cancel(read.job)

    def submit_expect(self, request: ReadRequest) -> None:
        """Nothing: the sink reads by itself."""

    def submit_read(self, request: ReadRequest) -> None:
        """Start the copy. Ids and addresses are checked there, before anything is written."""
        key = request.key
        if key in self._reads:
            raise ValueError(f"read: expected a key that is not in use, got {key} twice")
        attached = self._attached.find(request.source)
        if attached is None:
            self._completions.tell(ReadBroke(key, Reason.PEER_LOST, NOT_ATTACHED))
            return
        tensors = tuple(mapping.tensor for mapping in attached.mappings)
        read = _Read(request)
        read.job = PiecesJob(
            key,
            self._pieces(read, tensors),
            lambda job: self._mailbox.put(_Piece(read, job.end, job.error)),
            work_of(
                route_nbytes(request.pull_classes),
                sum(len(pull.regions) for pull in request.pull_classes),
            ),
        )
        self._reads[key] = read
        self._copy_thread.submit(read.job)

    def stop_read(self, key: TransferKey) -> None:
        """The running piece is the last one."""
        read = self._reads.get(key)
        if read is None or read.job is None:
            self._completions.tell(ReadStopped(key))
            return
        read.stopped = True
        self._copy_thread.cancel(read.job)

    def poll(self) -> list[SinkCompletion]:
        """Progress and ends of the copies."""
        done = self._completions.take()
        for piece in self._mailbox.drain():
            done.extend(self._on_piece(piece))
        return done

    def close(self) -> None:
        """Cancel the copies, wait for the running one, unmap."""
        for read in self._reads.values():
            if read.job is not None:
                read.stopped = True
                self._copy_thread.cancel(read.job)
        while self._reads:
            self._on_piece(self._mailbox.take())
        self._attached.close()

    def _pieces(self, read: _Read, tensors: tuple[Tensor, ...]) -> Iterator[None]:
        """Runs on the copy thread, or at once."""
        request = read.request

        def stop() -> bool:
            return read.job is not None and read.job.cancelled

        source_ids = [np.asarray(ids, dtype=np.int64) for ids in request.source_ids]
        sink_ids = [np.asarray(ids, dtype=np.int64) for ids in request.sink_ids]
        for copy_class, pull in zip(request.classes, request.pull_classes, strict=True):
            for tokens in job_spans(copy_class, pull):
                read.nbytes += strided_copy(
                    tensors,
                    self._memory.tensors,
                    copy_class,
                    source_ids[copy_class.source.group],
                    sink_ids[copy_class.sink.group],
                    tokens,
                    scratch=self._own.scratch,
                    stop=stop,
                )
                self._mailbox.put(_Piece(read))
                yield

    def _on_piece(self, piece: _Piece) -> list[SinkCompletion]:
        read, key = piece.read, piece.read.request.key
        if piece.end is None:
            if read.nbytes == read.reported_nbytes or read.stopped:
                return []
            read.reported_nbytes = read.nbytes
            return [Progress(key, read.nbytes)]
        del self._reads[key]
        read.job = None
        if read.stopped:
            return [ReadStopped(key)]
        if piece.end is CopyEnd.DONE:
            return [ReadDone(key, read.nbytes, certified=False)]
        if read.broke is not None:
            return [ReadBroke(key, read.broke, "the source rank was detached")]
        return [ReadBroke(key, Reason.READ_FAILED, f"copy {piece.end.value}: {piece.error}")]


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


def _map_pool(info: MemoryInfo, name: str) -> MappedPool:
    return open_shared(handle_of("shm", info, name, MemfdHandle))
