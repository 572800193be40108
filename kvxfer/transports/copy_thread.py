"""The one thread of a worker that copies KV: in pieces, the transfers in turn.

A :class:`CopyJob` belongs to a *lane*, one for each transfer. The thread runs one piece of the
first job of a lane, then one of the next lane, so that a large transfer does not hold up a small
one. Between pieces it looks at the cancel flag.

The submitting thread runs a small job itself: the handover costs more than the copy.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

QUIET_S = 0.001
"""How long after a wake the ends of jobs may lie unread while the same lane goes on.

A few chunks of 1 MiB. A wake costs the IO thread as much as all else that it does with a chunk.
"""

SMALL_NBYTES = 1 << 20
"""Work that takes 0.15 to 0.4 ms on a CPU. To hand it to another thread and back takes as long: two
threads are woken, each waits for the interpreter, and behind the engine's thread for longer. 4 MB
in chunks of 512 KiB over ZeroMQ took 11.3 ms on two cores with a copy thread and 8.8 without.
"""
REGION_NBYTES = 16 << 10
"""What is copied in the time that each region of a chunk takes beside its bytes, 5 us."""

ALONE_S, ASIDE_S = 0.001, 1e-6
"""How long it runs on at most before others get the interpreter for sure, and the sleep by which
they do (it takes 60 us). NumPy lets go of the GIL for each region, for 10 to 25 us: nobody wakes in
that time, and who waits asks for it by force only after a switch interval in which it was not let
go of. 3,000 chunks of 4 MiB, unpacked one after the other, stopped an engine's thread for 250 ms.
"""

T = TypeVar("T")
_log = logging.getLogger("kvxfer.transports")


class CopyEnd(enum.Enum):
    """How a job ended. In every case nothing of it runs any more."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class CopyJob(ABC):
    """Copying in pieces.

    ``on_end`` is called exactly once, on the copy thread or in the caller of ``cancel`` or
    ``close``; it must only note the end and wake the thread that waits for it. A piece may read
    ``cancelled`` more often; ``has_successor``: at its end another job of the lane follows.
    ``is_awaited``: nothing else of its connection is under way meanwhile. ``lets_others_run``: its
    pieces let go of the interpreter for long.

    Args:
        work_nbytes: how long the job takes, as bytes (:func:`work_of`); None if unknown.
    """

    __slots__ = (
        *("cancelled", "end", "error", "has_successor", "is_awaited", "lane"),
        "work_nbytes",
    )

    lets_others_run: ClassVar[bool] = False

    def __init__(self, lane: Hashable, work_nbytes: int | None = None) -> None:
        self.lane = lane
        self.work_nbytes = work_nbytes
        self.cancelled = False
        self.has_successor = False
        self.is_awaited = False
        self.end: CopyEnd | None = None
        self.error: BaseException | None = None

    @abstractmethod
    def run(self) -> bool:
        """Copy one piece, at most JOB_NBYTES; True if there is more. An exception fails the job."""

    @abstractmethod
    def on_end(self) -> None:
        """``end`` and ``error`` are set: nothing of this job runs any more."""


class Copier(Protocol):
    """The part of the copy thread that transports use."""

    def submit(self, job: CopyJob) -> None:
        """Queue a job; never blocks. It may have ended when this returns."""

    def cancel(self, job: CopyJob) -> None:
        """End a job: at once, or after the piece that is running."""


class CopyThread:
    """Runs copy jobs, one piece at a time; the other cores belong to the engine.

    Args:
        small_nbytes: ``submit`` itself runs jobs of at most so much work.
        num_cores: that PyTorch may use for one operation on this thread.
    """

    def __init__(
        self, name: str = "kvxfer-copy", *, small_nbytes: int = 0, num_cores: int = 1
    ) -> None:
        self._small_nbytes, self._num_cores = small_nbytes, num_cores
        self._changed = threading.Condition()
        self._lanes: OrderedDict[Hashable, deque[CopyJob]] = OrderedDict()
        self._running: CopyJob | None = None
        self.num_jobs = 0
        """That wait or run; read by other threads."""
        self._resumed_s = 0.0
        """When others were let run for the last time."""
        self._closing = False
        started = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(started,), name=name, daemon=True)
        # torch.set_num_threads in one thread is also the default of threads that start later: set
        # it back here.
        num_torch_threads = torch.get_num_threads()
        self._thread.start()
        started.wait()
        torch.set_num_threads(num_torch_threads)

    def submit(self, job: CopyJob) -> None:
        """Queue a job, or run a small one, which is twice as large where it is awaited. After
        ``close`` the job ends as cancelled.
        """
        small_nbytes = self._small_nbytes << job.is_awaited
        if job.work_nbytes is not None and job.work_nbytes <= small_nbytes:
            end, error = (CopyEnd.CANCELLED, None) if self._closing else self._run_piece(job)
            while end is None:
                end, error = self._run_piece(job)
            _tell(job, end, error)
            return
        with self._changed:
            if not self._closing:
                self._lanes.setdefault(job.lane, deque()).append(job)
                self.num_jobs += 1
                self._changed.notify()
                return
        _tell(job, CopyEnd.CANCELLED, None)

    def cancel(self, job: CopyJob) -> None:
        """End a waiting job now, and a running job after its current piece.

        Unknown jobs are ignored.
        """
        with self._changed:
            job.cancelled = True
            lane = self._lanes.get(job.lane)
            if job is self._running or lane is None or job not in lane:
                return
            lane.remove(job)
            self.num_jobs -= 1
            if not lane:
                del self._lanes[job.lane]
        _tell(job, CopyEnd.CANCELLED, None)

    def close(self) -> None:
        """Wait for the running piece, end all other jobs as cancelled, end the thread.

        Idempotent.
        """
        with self._changed:
            self._closing = True
            left = [
                job for lane in self._lanes.values() for job in lane if job is not self._running
            ]
            self._lanes.clear()
            if self._running is not None:
                self._running.cancelled = True
            self._changed.notify()
        for job in left:
            job.cancelled = True
            _tell(job, CopyEnd.CANCELLED, None)
        self._thread.join()

    def _main(self, started: threading.Event) -> None:
        torch.set_num_threads(self._num_cores)
        torch.get_num_threads()  # fixes it for this thread: the first look takes over the default
        started.set()
        while (job := self._next_job()) is not None:
            end, error = self._run_piece(job)
            end = self._put_back(job, end)
            if end is not None:
                _tell(job, end, error)
            lets_run = job.lets_others_run
            del job, error  # an idle thread keeps no KV memory and no mapping alive
            if not lets_run:
                self._let_others_run()

    def _let_others_run(self) -> None:
        """Sleep ASIDE_S once this thread has run for ALONE_S without waiting."""
        if time.perf_counter() - self._resumed_s >= ALONE_S:
            time.sleep(ASIDE_S)
            self._resumed_s = time.perf_counter()

    def _next_job(self) -> CopyJob | None:
        with self._changed:
            while not self._lanes:
                if self._closing:
                    return None
                self._changed.wait()
                self._resumed_s = time.perf_counter()
            lane = next(iter(self._lanes.values()))
            self._running = lane[0]
            return self._running

    def _run_piece(self, job: CopyJob) -> tuple[CopyEnd | None, BaseException | None]:
        """One piece; None: there is more."""
        if job.cancelled:
            return CopyEnd.CANCELLED, None
        try:
            return (None, None) if job.run() else (CopyEnd.DONE, None)
        except Exception as exc:  # noqa: BLE001  # it fails the transfer, not the thread
            return CopyEnd.FAILED, exc

    def _put_back(self, job: CopyJob, end: CopyEnd | None) -> CopyEnd | None:
        """Let the next lane have its turn.

        Under the lock, so that no cancel or close slips by a job that goes on.
        """
        with self._changed:
            self._running = None
            if end is None and job.cancelled:
                end = CopyEnd.CANCELLED
            lane = self._lanes.get(job.lane)
            if lane is not None and lane[0] is job:  # else: closed meanwhile
                if end is not None:
                    lane.popleft()
                    self.num_jobs -= 1
                    job.has_successor = bool(lane)
                if lane:
                    self._lanes.move_to_end(job.lane)
                else:
                    del self._lanes[job.lane]
        return end


class CopyThreads:
    """Several copy threads as one: a job goes to the thread that has the fewest."""

    def __init__(self, number: int, *, small_nbytes: int = 0) -> None:
        self._threads = [CopyThread(small_nbytes=small_nbytes) for _ in range(number)]

    def submit(self, job: CopyJob) -> None:
        min(self._threads, key=attrgetter("num_jobs")).submit(job)

    def cancel(self, job: CopyJob) -> None:
        for thread in self._threads:
            thread.cancel(job)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


def work_of(nbytes: int, num_regions: int) -> int:
    """The work of a copy of ``nbytes`` of ``num_regions`` regions, expressed in bytes."""
    return nbytes + num_regions * REGION_NBYTES


def _tell(job: CopyJob, end: CopyEnd, error: BaseException | None) -> None:
    job.end, job.error = end, error
    try:
        job.on_end()
    except Exception:  # noqa: BLE001  # a broken listener must not end everybody's copying
        _log.exception("copy job of %s: its listener failed", job.lane)


class Mailbox(Generic[T]):
    """Items from the copy thread to the IO thread.

    ``wake`` is called once for all unread items.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._wake = wake
        self._told = False
        self._woken_s = 0.0

    def put(self, *items: T, more_follows: bool = False) -> None:
        """From any thread. ``more_follows``: another put is certain to come, so this may wait."""
        for item in items:
            self._items.put(item)
        if self._told:
            return
        now_s = time.monotonic()
        if more_follows and now_s - self._woken_s < QUIET_S:
            return
        self._woken_s = now_s
        self._told = True
        self._wake()

    def drain(self) -> Iterator[T]:
        """The unread items of now; never blocks. Those behind one that the reader fails at stay."""
        # The flag goes down before the look, so an item that comes after it wakes again.
        self._told = False
        for _ in range(self._items.qsize()):
            yield self._items.get_nowait()

    def take(self) -> T:
        """Wait for one item: for the end of jobs at shutdown."""
        return self._items.get()
