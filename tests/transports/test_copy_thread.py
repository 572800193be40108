"""The copy thread: turns, cancel between pieces, one end for each job."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kvxfer.testing.peers import PiecesJob
from kvxfer.transports import copy_thread
from kvxfer.transports.copy_thread import (
    CopyEnd,
    CopyJob,
    CopyThread,
    Mailbox,
)

Ends = list[tuple[str, CopyEnd, BaseException | None]]


class Stage:
    """Jobs that write down what runs, and a gate that keeps the thread busy until it is opened."""

    def __init__(self, thread: CopyThread) -> None:
        self.thread = thread
        self.ran: list[str] = []
        self.ends: Ends = []
        self.ended = threading.Semaphore(0)
        self.opened = threading.Event()

    def job(
        self, lane: str, num_pieces: int, *, fails: bool = False, work_nbytes: int | None = None
    ) -> CopyJob:
        def pieces() -> Iterator[None]:
            for number in range(num_pieces):
                self.ran.append(f"{lane}{number}")
                if fails:
                    raise OSError("disk")
                yield

        return PiecesJob(lane, pieces(), lambda job: self.end(lane, job), work_nbytes)

    def gate(self) -> CopyJob:
        entered = threading.Event()

        def pieces() -> Iterator[None]:
            entered.set()
            assert self.opened.wait(120)
            yield

        job = PiecesJob("gate", pieces(), lambda job: self.end("gate", job))
        self.thread.submit(job)
        assert entered.wait(120)
        return job

    def end(self, lane: str, job: CopyJob) -> None:
        assert job.end is not None
        self.ends.append((lane, job.end, job.error))
        self.ended.release()

    def wait(self, num_ends: int) -> None:
        for _ in range(num_ends):
            assert self.ended.acquire(timeout=120)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(CopyThread())
    yield stage
    stage.opened.set()
    stage.thread.close()


def test_lanes_take_turns_piece_by_piece(stage: Stage) -> None:
    stage.gate()
    stage.thread.submit(stage.job("a", 3))
    stage.thread.submit(stage.job("a", 1))
    stage.thread.submit(stage.job("b", 2))
    stage.opened.set()
    stage.wait(4)
    # After its last piece a job has one more turn, in which it ends.
    assert stage.ran == ["a0", "b0", "a1", "b1", "a2", "a0"]
    assert [(lane, end) for lane, end, _ in stage.ends] == [
        ("gate", CopyEnd.DONE),
        ("b", CopyEnd.DONE),
        ("a", CopyEnd.DONE),
        ("a", CopyEnd.DONE),
    ]


def test_cancelled_while_waiting_ends_at_once_and_never_runs(stage: Stage) -> None:
    stage.gate()
    job = stage.job("a", 2)
    stage.thread.submit(job)
    stage.thread.cancel(job)
    assert stage.ends == [("a", CopyEnd.CANCELLED, None)]
    stage.thread.cancel(job)
    stage.opened.set()
    stage.wait(2)
    assert stage.ran == []
    assert len(stage.ends) == 2


def test_cancelled_while_running_ends_after_the_piece(stage: Stage) -> None:
    gate = stage.gate()
    stage.thread.cancel(gate)
    assert stage.ends == []
    stage.opened.set()
    stage.wait(1)
    assert stage.ends == [("gate", CopyEnd.CANCELLED, None)]


def test_failure_ends_its_job_only(stage: Stage) -> None:
    stage.thread.submit(stage.job("a", 1, fails=True))
    stage.wait(1)
    stage.thread.submit(stage.job("b", 1))
    stage.wait(1)
    lane, end, error = stage.ends[0]
    assert (lane, end) == ("a", CopyEnd.FAILED)
    assert isinstance(error, OSError)
    assert stage.ends[1] == ("b", CopyEnd.DONE, None)


def test_a_broken_listener_does_not_end_the_thread(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(job: CopyJob) -> None:
        raise RuntimeError("listener")

    stage.thread.submit(PiecesJob("a", iter(()), broken))
    stage.thread.submit(stage.job("b", 1))
    stage.wait(1)
    assert stage.ends == [("b", CopyEnd.DONE, None)]
    assert "its listener failed" in caplog.text


def test_close_waits_for_the_piece_and_cancels_the_rest(stage: Stage) -> None:
    stage.gate()
    stage.thread.submit(stage.job("a", 2))
    threading.Timer(0.05, stage.opened.set).start()
    stage.thread.close()
    assert stage.ran == []
    assert sorted((lane, end.value) for lane, end, _ in stage.ends) == [
        ("a", "cancelled"),
        ("gate", "cancelled"),
    ]
    late = stage.job("late", 1)
    stage.thread.submit(late)
    assert stage.ends[-1] == ("late", CopyEnd.CANCELLED, None)
    stage.thread.close()


def test_torch_has_the_cores_that_were_asked_for_inside_and_as_many_as_before_outside(
    stage: Stage,
) -> None:
    inside: list[int] = []

    def pieces() -> Iterator[None]:
        inside.append(torch.get_num_threads())
        yield

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        second = CopyThread(num_cores=3)
        for copier in (stage.thread, second):
            copier.submit(PiecesJob("a", pieces(), lambda job: stage.end("a", job)))
            stage.wait(1)
        assert inside == [1, 3]
        assert torch.get_num_threads() == 2
        other: list[int] = []
        thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert other == [2]
        second.close()
    finally:
        torch.set_num_threads(before)


def test_mailbox_wakes_once_for_what_lies_unread() -> None:
    wakes: list[None] = []
    mailbox: Mailbox[int] = Mailbox(lambda: wakes.append(None))
    mailbox.put(1)
    mailbox.put(2)
    assert len(wakes) == 1
    assert list(mailbox.drain()) == [1, 2]
    assert list(mailbox.drain()) == []
    mailbox.put(3)
    assert len(wakes) == 2
    assert mailbox.take() == 3


def test_what_lies_behind_an_item_that_its_reader_fails_at_stays() -> None:
    wakes: list[None] = []
    mailbox: Mailbox[int] = Mailbox(lambda: wakes.append(None))
    for number in range(4):
        mailbox.put(number)

    def read() -> None:
        for number in mailbox.drain():
            mailbox.put(10 + number)  # comes later, and wakes
            if number == 1:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    assert len(wakes) == 2
    assert list(mailbox.drain()) == [2, 3, 10, 11]


# ------------------------------------------------------------------ small jobs


@pytest.fixture
def at_once() -> Iterator[Stage]:
    """A thread that leaves small jobs to who submits them, and is busy itself."""
    stage = Stage(CopyThread(small_nbytes=1000))
    stage.gate()
    yield stage
    stage.opened.set()
    stage.thread.close()


def test_a_small_job_has_ended_when_submit_returns(at_once: Stage) -> None:
    at_once.thread.submit(at_once.job("a", 3, work_nbytes=1000))
    assert at_once.ran == ["a0", "a1", "a2"]
    assert at_once.ends == [("a", CopyEnd.DONE, None)]


def test_a_larger_job_and_one_of_unknown_size_wait_for_the_thread(at_once: Stage) -> None:
    at_once.thread.submit(at_once.job("a", 1, work_nbytes=1001))
    at_once.thread.submit(at_once.job("b", 1))
    assert at_once.ran == []
    at_once.opened.set()
    at_once.wait(3)
    assert at_once.ran == ["a0", "b0"]


def test_a_job_that_is_awaited_may_be_twice_as_large(at_once: Stage) -> None:
    for lane, work_nbytes in (("a", 2000), ("b", 2001)):
        job = at_once.job(lane, 1, work_nbytes=work_nbytes)
        job.is_awaited = True
        at_once.thread.submit(job)
    at_once.thread.submit(at_once.job("c", 1, work_nbytes=2000))
    assert at_once.ran == ["a0"]


def test_a_small_job_that_fails_or_is_cancelled_ends_like_any_other(at_once: Stage) -> None:
    at_once.thread.submit(at_once.job("a", 1, fails=True, work_nbytes=1))
    ((_, end, error),) = at_once.ends
    assert end is CopyEnd.FAILED
    assert isinstance(error, OSError)
    unwanted = at_once.job("b", 1, work_nbytes=1)
    at_once.thread.cancel(unwanted)
    at_once.thread.submit(unwanted)
    assert at_once.ends[1:] == [("b", CopyEnd.CANCELLED, None)]
    assert at_once.ran == ["a0"]


def test_after_close_a_small_job_does_not_run() -> None:
    stage = Stage(CopyThread(small_nbytes=1000))
    stage.thread.close()
    stage.thread.submit(stage.job("a", 1, work_nbytes=1))
    assert stage.ran == []
    assert stage.ends == [("a", CopyEnd.CANCELLED, None)]


class Clock:
    """Of a copy thread whose pieces take as long as a test says; notes how long it slept."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_at_s: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0  # else whoever waits does not get the interpreter
        self.slept_at_s.append(self.now_s - 100.0)


@pytest.mark.parametrize(
    ("num_jobs", "num_pieces", "piece_s", "lets_run", "slept_at_s"),
    [
        (4, 1, 0.0012, False, [0.0012, 0.0024, 0.0036, 0.0048]),
        (2, 2, 0.0012, False, [0.0012, 0.0024, 0.0036, 0.0048]),
        (9, 1, 0.0003, False, [0.0012, 0.0024]),
        (3, 1, 0.0003, False, []),
        (2, 2, 0.0012, True, [0.0012]),  # behind what kept the thread busy
    ],
)
def test_others_run_between_copies_that_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
    num_jobs: int,
    num_pieces: int,
    piece_s: float,
    lets_run: bool,
    slept_at_s: list[float],
) -> None:
    clock = Clock()
    monkeypatch.setattr(copy_thread, "time", clock)
    thread = CopyThread()
    stage = Stage(thread)
    stage.gate()

    class Slow(CopyJob):
        lets_others_run = lets_run
        left = 0

        def run(self) -> bool:
            clock.now_s += piece_s
            self.left -= 1
            return self.left > 0

        def on_end(self) -> None:
            stage.ended.release()

    for _ in range(num_jobs):
        job = Slow("lane")
        job.left = num_pieces
        thread.submit(job)
    stage.opened.set()
    for _ in range(num_jobs + 1):
        assert stage.ended.acquire(timeout=120)
    thread.close()
    assert clock.slept_at_s == pytest.approx(slept_at_s)
