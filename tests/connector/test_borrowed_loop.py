"""Somebody else in the IO thread's place: when, who runs meanwhile, and what is left to it."""

from __future__ import annotations

import select
import threading
import time

import pytest

from kvxfer.connector import io_thread
from kvxfer.connector.io_thread import IoThread
from tests.connector.rig import until


def asleep(io: IoThread) -> None:
    """Until it polls, so that it can be borrowed; it goes on polling."""
    until(lambda: io._num_rounds)  # before its first round, too, nobody has the turn
    until(io.borrow)
    io.give_back()


def test_a_borrower_takes_its_place_and_leaves_the_rest_to_it(io: IoThread) -> None:
    seen: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        seen.append((what, threading.current_thread().name == "io"))

    io.start()
    asleep(io)
    assert io.borrow()
    assert io.is_lent
    io.post(lambda: note("posted"))
    io.defer(lambda: note("deferred"))
    io.after(0.0, lambda: note("timer"))
    time.sleep(0.05)
    assert seen == []
    assert not io.borrow()
    io.give_back()
    assert not io.is_lent
    until(lambda: len(seen) == 3)
    assert seen == [("posted", True), ("deferred", True), ("timer", True)]
    until(io.borrow)
    io.give_back()


@pytest.mark.parametrize("asked", ["nothing", "wake", "post", "another turn"])
def test_what_a_borrower_defers_leaves_at_leisure(
    io: IoThread, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread sleeps on, though it is given back: until something else wakes it."""
    monkeypatch.setattr(io_thread, "LEISURE_S", 3600.0)
    done: list[str] = []
    io.start()
    asleep(io)
    assert io.borrow()
    io.defer(lambda: done.append("deferred"))
    io.give_back()
    begun = io._num_rounds
    for fd in (io._wake_up.fd, io._leisure.fd):
        assert not select.select([fd], [], [], 0)[0]
    match asked:
        case "wake":
            io.wake()
        case "post":
            io.post(lambda: done.append("posted"))
        case "another turn":  # in which somebody waits
            assert io.borrow()
            io.defer(lambda: done.append("sent"))
            io.wake()
            io.give_back()
    if asked == "nothing":
        time.sleep(0.05)
        assert (io._num_rounds, done) == (begun, [])
        return
    until(lambda: "deferred" in done)
    until(lambda: len(done) == (1 if asked == "wake" else 2))
    assert done in (["deferred"], ["posted", "deferred"], ["deferred", "sent"])
    asleep(io)
    assert not io._has_leisure  # nor is its sleep disturbed for what has left


@pytest.mark.parametrize("who", ["the borrower", "another thread"])
@pytest.mark.parametrize("sees_through", [True, False])
def test_a_transport_waits_for_a_borrower_that_sees_it_through(
    io: IoThread, who: str, sees_through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_thread, "LEISURE_S", 3600.0)
    io.start()
    asleep(io)
    begun = io._num_rounds
    assert io.borrow(sees_through=sees_through)
    if who == "the borrower":
        io.attend()
    else:
        other = threading.Thread(target=io.attend)
        other.start()
        other.join()
    io.give_back()
    if who == "the borrower" and sees_through:
        time.sleep(0.05)
        assert io._num_rounds == begun
        io.attend()  # from now on it is as any other
    until(lambda: io._num_rounds > begun)


def test_what_is_seen_through_is_looked_at_all_the_same(io: IoThread) -> None:
    io.start()
    asleep(io)
    begun = io._num_rounds
    assert io.borrow(sees_through=True)
    io.attend()
    io.give_back()
    until(lambda: io._num_rounds > begun)


def test_what_is_deferred_leaves_by_itself(io: IoThread) -> None:
    """Also what a second borrower defers while the first one's waits, and again after that."""
    done: list[int] = []
    io.start()
    for number in range(0, 6, 2):
        for each in (number, number + 1):
            until(io.borrow)
            io.defer(done.append, each)
            io.give_back()
        until(lambda number=number: len(done) == number + 2)  # type: ignore[misc]
    assert done == [*range(6)]


@pytest.mark.parametrize("asked", ["wake", "post", "defer"])
def test_what_is_asked_for_while_it_is_lent_is_not_lost(io: IoThread, asked: str) -> None:
    rounds: list[int] = []

    class Member:
        is_idle = False

        def pollables(self) -> tuple[int, ...]:
            return ()

    io.watch_group(Member(), lambda _: rounds.append(1))
    io.start()
    asleep(io)
    before = len(rounds)
    assert io.borrow()
    calls = {
        "wake": io.wake,
        "post": lambda: io.post(lambda: None),
        "defer": lambda: io.defer(lambda: None),
    }
    other = threading.Thread(target=calls[asked])
    other.start()
    other.join()
    assert not select.select([io._wake_up.fd], [], [], 0)[0]  # it would only wait for its turn
    assert len(rounds) == before
    io.give_back()
    until(lambda: len(rounds) > before)


def test_it_is_not_lent_while_it_runs_or_has_something_to_run(io: IoThread) -> None:
    io.post(lambda: None)
    assert not io.borrow()  # what was posted comes first
    io.start()
    asleep(io)
    go, has_begun = threading.Event(), threading.Event()

    def busy() -> None:
        has_begun.set()
        assert go.wait(120)

    io.post(busy)
    assert has_begun.wait(120)
    assert not io.borrow()
    go.set()
    until(io.borrow)
    io.give_back()
    assert io.stop(60)
    assert not io.borrow()


NUM_TURNS = 200


def test_whoever_runs_runs_alone(io: IoThread) -> None:
    """Turns of both, each of which would lose a count if the other one ran at the same time."""
    counts = [0, 0]
    total = 0

    def count(who: int) -> None:
        nonlocal total
        known = total
        time.sleep(0)
        total = known + 1
        counts[who] += 1

    def post() -> None:
        for number in range(NUM_TURNS):
            io.post(lambda: count(1))
            until(lambda number=number: counts[1] > number)  # type: ignore[misc]

    io.start()
    poster = threading.Thread(target=post)
    poster.start()
    while poster.is_alive() or counts[0] < NUM_TURNS:
        if io.borrow():
            count(0)
            io.give_back()
    assert counts[1] == NUM_TURNS
    assert total == sum(counts)


def test_a_borrower_is_within_what_handlers_are_within() -> None:
    entered: list[str] = []

    class Within:
        def __enter__(self) -> None:
            entered.append(threading.current_thread().name)

        def __exit__(self, *_: object) -> None:
            entered.append("left")

    io = IoThread("io", lambda: None, within=Within())
    io.start()
    asleep(io)
    entered.clear()
    assert io.borrow()
    assert entered == [threading.current_thread().name]
    io.give_back()
    assert entered == [threading.current_thread().name, "left"]
    assert io.stop(60)
