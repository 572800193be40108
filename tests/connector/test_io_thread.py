"""The loop: order of work, timers, and that nothing a handler does ends it."""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import zmq

from kvxfer.connector.io_thread import (
    CATCH_UP_MS,
    MOST_CANCELLED,
    ROUNDS_AHEAD,
    IoThread,
    ZmqSocket,
)
from tests.connector.rig import until


@pytest.fixture
def pair() -> Iterator[tuple[ZmqSocket, ZmqSocket]]:
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as near,
        context.socket(zmq.PAIR) as far,
    ):
        near.bind("inproc://pair")
        far.connect("inproc://pair")
        yield near, far


def test_posted_work_runs_in_order_on_the_thread(io: IoThread) -> None:
    seen: list[int] = []
    for number in range(100):
        io.post(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert seen == []
    io.start()
    until(lambda: len(seen) == 100)
    assert seen == list(range(100))
    where: list[bool] = []
    io.post(lambda: where.append(threading.current_thread().name == "io"))
    until(lambda: where)
    assert where == [True]


def test_posts_from_many_threads_all_arrive(io: IoThread) -> None:
    io.start()
    seen: list[int] = []

    def post() -> None:
        for _ in range(500):
            io.post(lambda: seen.append(1))

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(seen) == 2000)


def test_timers_fire_in_order_and_never_early(io: IoThread) -> None:
    fired: list[tuple[str, float]] = []
    started_s = time.monotonic()

    def fire(name: str) -> None:
        fired.append((name, time.monotonic() - started_s))

    io.after(0.06, lambda: fire("b"))
    io.after(0.02, lambda: fire("a"))
    io.after(0.04, lambda: fire("never")).cancel()
    io.start()
    until(lambda: len(fired) == 2)
    assert [name for name, _ in fired] == ["a", "b"]
    assert fired[0][1] >= 0.02
    assert fired[1][1] >= 0.06


def test_an_idle_thread_sleeps(io: IoThread) -> None:
    io.start()
    time.sleep(0.05)
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.2


def test_a_handler_that_fails_is_counted_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[int] = []
    io = IoThread("io", lambda: errors.append(1))
    done: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.CRITICAL):
        io.post(fail)
        io.after(0.0, fail)
        io.after(0.01, lambda: done.append(1))
        io.start()
        until(lambda: done)
    assert len(errors) == 2
    assert io.stop(60)


def test_cancelled_timers_do_not_pile_up(io: IoThread) -> None:
    fired: list[int] = []
    kept = [io.after(0.01 + number / 1e6, fired.append, number) for number in range(300)]
    for number in range(10_000):
        timer = io.after(300.0, fired.append, -1)
        timer.cancel()
        timer.cancel()  # once more is nothing
        if number % 100 == 0:
            kept[number // 100 * 3].cancel()
        assert len(io._timers) < 2 * (300 + MOST_CANCELLED)
    io.after(0.02, fired.append, 300)
    io.start()
    until(lambda: 300 in fired)
    assert fired == [number for number in range(301) if number % 3 or number == 300]


def test_sockets_are_read_before_timers_fire(
    io: IoThread, pair: tuple[ZmqSocket, ZmqSocket]
) -> None:
    """A thread that was held up finds a message and a deadline: the message counts."""
    near, far = pair
    order: list[str] = []

    def read() -> None:
        order.append(near.recv().decode())

    io.watch(near, read)
    io.after(0.02, lambda: order.append("timer"))
    for _ in range(3):  # one at a time: all of them before the timer
        far.send(b"message")
    time.sleep(0.05)
    io.start()
    until(lambda: len(order) == 4)
    assert order == ["message"] * 3 + ["timer"]
    io.stop(60)


def reads_before_a_timer(
    io: IoThread, pair: tuple[ZmqSocket, ZmqSocket], delay_s: float, each_s: float = 0.0
) -> int:
    """How many messages of a flood are read, each in so long, until a timer has fired."""
    near, far = pair
    num_read: list[int] = []
    over: list[int] = []

    def read() -> None:
        far.send(b"the next one")
        near.recv()
        num_read.append(1)
        time.sleep(each_s)

    io.watch(near, read)
    io.after(delay_s, lambda: over.append(len(num_read)))
    far.send(b"the first one")
    io.start()
    until(lambda: over)
    io.post(lambda: io.unwatch(near))
    io.stop(60)
    return over[0]


def test_timers_fire_beside_a_flood_of_slow_messages(
    io: IoThread, pair: tuple[ZmqSocket, ZmqSocket]
) -> None:
    """By time and not by number: each of these takes as long as a turn may."""
    assert reads_before_a_timer(io, pair, 0.01, each_s=0.05) < 20


def test_a_timer_that_is_on_time_waits_for_few_rounds_of_a_flood(
    io: IoThread, pair: tuple[ZmqSocket, ZmqSocket]
) -> None:
    io.now = lambda: 0.0  # however slow the machine is
    assert reads_before_a_timer(io, pair, 0.0) == 1 + ROUNDS_AHEAD


def test_a_late_thread_gives_messages_time_to_arrive(
    io: IoThread, pair: tuple[ZmqSocket, ZmqSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    order: list[str] = []
    poll, sender = zmq.Poller.poll, threading.Thread(target=lambda: far.send(b"message"))

    def poll_longer(poller: zmq.Poller, timeout_ms: int) -> list[tuple[Any, int]]:
        """The message arrives while it waits for messages, however busy the machine is."""
        if timeout_ms != CATCH_UP_MS:
            return poll(poller, timeout_ms)
        sender.start()
        return poll(poller, 60_000)

    monkeypatch.setattr(zmq.Poller, "poll", poll_longer)
    io.watch(near, lambda: order.append(near.recv().decode()))
    io.after(0.01, lambda: order.append("timer"))
    time.sleep(0.4)
    io.start()
    until(lambda: len(order) == 2)
    assert order == ["message", "timer"]
    io.stop(60)


def test_what_was_posted_before_a_message_runs_before_its_handler(
    io: IoThread, pair: tuple[ZmqSocket, ZmqSocket]
) -> None:
    near, far = pair
    order: list[str] = []

    def read() -> None:
        message = near.recv()
        io.post(lambda: order.append("posted"))  # as another thread would, meanwhile
        io.run_posted()
        order.append(message.decode())

    io.watch(near, read)
    far.send(b"message")
    io.start()
    until(lambda: len(order) == 2)
    assert order == ["posted", "message"]
    io.stop(60)


def test_an_unwatched_socket_is_left_alone(io: IoThread, pair: tuple[ZmqSocket, ZmqSocket]) -> None:
    near, far = pair
    seen: list[bytes] = []
    io.watch(near, lambda: seen.append(near.recv()))
    io.unwatch(near)
    io.unwatch(near)
    far.send(b"message")
    io.start()
    time.sleep(0.05)
    assert seen == []
    io.stop(60)


class _Descriptors:
    """A transport of file descriptors alone."""

    def __init__(self, *fds: int, is_idle: bool = False) -> None:
        self.fds, self.is_idle = fds, is_idle

    def pollables(self) -> tuple[int, ...]:
        return self.fds


def test_descriptors_of_a_transport_wake_the_thread_and_are_not_taken_for_its_own(
    io: IoThread,
) -> None:
    near, far = socket.socketpair()
    other, _ = pair_of_others = socket.socketpair()
    with near, far, other, pair_of_others[1]:
        member, seen = _Descriptors(near.fileno()), []

        def handle(_: _Descriptors) -> None:
            if member.fds and select.select([near], [], [], 0)[0]:
                seen.append(near.recv(10))

        io.watch_group(member, handle)
        io.start()
        time.sleep(0.05)
        far.send(b"1")
        until(lambda: seen == [b"1"])
        io.post(lambda: seen.append(b"posted"))
        until(lambda: seen == [b"1", b"posted"])
        member.fds = (other.fileno(),)
        io.wake()
        until(lambda: not io._is_wanted and not io._awake)  # it sleeps again
        far.send(b"2")  # not polled any more, so only the next round sees it
        time.sleep(0.1)
        assert len(seen) == 2
        pair_of_others[1].send(b"x")
        until(lambda: len(seen) == 3)
        io.post(io.unwatch_groups)
        assert io.stop(60)


def test_an_idle_transport_is_asked_where_it_can_be_read_and_when_it_is_idle_no_more(
    io: IoThread,
) -> None:
    near, far = socket.socketpair()
    with near, far:
        member, asked = _Descriptors(near.fileno(), is_idle=True), []

        def handle(_: _Descriptors) -> None:
            asked.append(select.select([near], [], [], 0)[0] and near.recv(10))

        def go_round() -> None:
            over: list[int] = []
            io.post(lambda: over.append(1))
            io.post(lambda: io.defer(lambda: over.append(2)))  # after the transports' turn
            until(lambda: len(over) == 2)

        io.watch_group(member, handle)
        io.start()
        go_round()
        assert asked == []
        far.send(b"1")
        until(lambda: asked == [b"1"])
        go_round()
        assert asked == [b"1"]
        io.post(lambda: setattr(member, "is_idle", False))  # by a call in this very round
        until(lambda: len(asked) > 1)
        assert asked[1] == []
        io.post(io.unwatch_groups)
        assert io.stop(60)


# ------------------------------------------------------------------ what fails in each round


class _Failing:
    """A transport of which a look fails."""

    def __init__(self, look: str) -> None:
        self._look = look

    def pollables(self) -> tuple[int, ...]:
        if self._look == "pollables":
            raise ZeroDivisionError
        return ()

    @property
    def is_idle(self) -> bool:
        if self._look == "is_idle":
            raise ZeroDivisionError
        return False


class _FailingContext(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        raise ZeroDivisionError


def no_poll(*_: object) -> None:
    raise zmq.ZMQError(errno.ENOMEM)


@pytest.mark.parametrize("what", ["pollables", "is_idle", "context", "poll"])
def test_what_fails_in_each_round_keeps_nothing_else_from_its_turn(
    what: str,
    pair: tuple[ZmqSocket, ZmqSocket],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = pair
    errors: list[int] = []
    within = _FailingContext() if what == "context" else None
    io = IoThread("io", lambda: errors.append(1), within=within)
    done: list[str] = []
    wanted = {"wire", "message", "timer", "deferred"}
    if what == "poll":
        monkeypatch.setattr(zmq.Poller, "poll", no_poll)
        wanted.remove("message")
    io.watch_group(_Failing(what), lambda _: None)
    io.watch_group(_Quiet(), lambda _: done.append("wire"))
    io.watch(near, lambda: done.append(near.recv().decode()))
    io.start()
    for _ in range(3):
        done.clear()
        far.send(b"message")
        io.post(lambda: io.after(0.01, lambda: done.append("timer")))
        io.post(lambda: io.defer(lambda: done.append("deferred")))
        until(lambda: wanted <= {*done})
    assert len(errors) > 3
    assert len(caplog.messages) == 1  # how many there were is told with the next one
    io.post(io.unwatch_groups)
    io.post(lambda: io.unwatch(near))
    assert io.stop(60)


# ------------------------------------------------------------------ one that stands


def test_who_looks_is_told_where_it_stands(io: IoThread) -> None:
    go_on = threading.Event()

    def a_call_that_does_not_return() -> None:
        go_on.wait(60.0)

    def tick() -> None:
        io.after(0.02, tick)

    io.after(0.02, tick)
    io.start()
    until_s = time.monotonic() + 0.6
    while time.monotonic() < until_s:
        assert not io.stands(for_s=30.0)  # it goes round
    io.post(a_call_that_does_not_return)
    time.sleep(1.2)  # nobody has looked: it may be all of the process that stood
    assert not io.stands(for_s=0.2)
    until(lambda: io.stands(for_s=0.2))
    until(lambda: "a_call_that_does_not_return" in io.stack())
    go_on.set()
    until(lambda: not io.stands(for_s=0.2))


# ------------------------------------------------------------------ what is deferred


class _Quiet:
    is_idle = False

    def pollables(self) -> tuple[int, ...]:
        return ()


def test_deferred_calls_run_after_all_else_of_the_round_and_in_order(
    io: IoThread, pair: tuple[ZmqSocket, ZmqSocket]
) -> None:
    near, far = pair
    order: list[str] = []

    def note(name: str) -> None:
        order.append(name)
        io.defer(lambda: order.append(f"after {name}"))

    def read() -> None:
        near.recv()
        note("message")

    io.watch(near, read)
    io.watch_group(_Quiet(), lambda _: note("transport") if len(order) == 2 else None)
    far.send(b"")
    io.post(lambda: note("posted"))
    time.sleep(0.05)
    io.start()
    until(lambda: len(order) == 6)
    names = ["posted", "message", "transport"]
    assert order == [*names, *(f"after {name}" for name in names)]
    io.post(lambda: io.after(0.0, lambda: note("timer")))
    until(lambda: len(order) == 8)  # also what a timer defers, though nothing else happens
    assert order[6:] == ["timer", "after timer"]
    io.post(io.unwatch_groups)
    io.stop(60)


def test_what_cannot_wait_lets_the_deferred_go_first(io: IoThread) -> None:
    order: list[str] = []

    def first() -> None:
        io.run_deferred()  # as one that sends; its turn has come, and not yet the next one's
        order.append("first")

    def say() -> None:
        io.defer(first)
        io.defer(lambda: order.append("second"))
        io.run_deferred()
        order.append("now")
        io.defer(lambda: order.append("later"))

    io.post(say)
    io.start()
    until(lambda: len(order) == 4)
    assert order == ["first", "second", "now", "later"]


def test_a_deferred_call_that_fails_is_counted_and_the_others_run() -> None:
    errors: list[int] = []
    done: list[int] = []
    io = IoThread("io", lambda: errors.append(1))

    def fail() -> None:
        raise ZeroDivisionError

    def defer_both() -> None:
        io.defer(fail)
        io.defer(done.append, 1)

    io.post(defer_both)
    io.start()
    until(lambda: done)
    io.post(lambda: io.defer(lambda: done.append(2)))
    assert io.stop(60)
    assert (errors, done) == ([1], [1, 2])


def test_no_wake_is_lost_whatever_the_loop_is_doing(io: IoThread) -> None:
    """Posts, and bare wakes of a transport, at all moments of a round."""
    mail: list[int] = []
    seen: list[int] = []

    def collect(_: _Quiet) -> None:
        time.sleep(0.0003)
        while mail:
            seen.append(mail.pop())

    io.watch_group(_Quiet(), collect)
    io.start()
    for number in range(300):
        time.sleep(number % 7 * 0.0001)
        mail.append(number)
        io.wake()
        if number % 3 == 0:
            io.post(lambda number=number: seen.append(-number))  # type: ignore[misc]
            until(lambda number=number: -number in seen)  # type: ignore[misc]
        until(lambda number=number: number in seen)  # type: ignore[misc]
    io.post(io.unwatch_groups)
    io.stop(60)


def test_handlers_run_within_what_was_given_and_sleep_does_not() -> None:
    depth: list[str] = []

    class Within:
        def __enter__(self) -> None:
            depth.append("in")

        def __exit__(self, *error: object) -> None:
            depth.append("out")

    io = IoThread("io", lambda: None, within=Within())
    seen: list[int] = []
    io.post(lambda: seen.append(depth.count("in") - depth.count("out")))
    io.start()
    until(lambda: seen)
    assert seen == [1]
    until(lambda: depth.count("in") == depth.count("out"))  # it sleeps now
    assert io.stop(60)


def test_what_cannot_be_entered_stops_no_handler() -> None:
    class Broken:
        def __enter__(self) -> None:
            raise RuntimeError("this GPU has failed")

        def __exit__(self, *error: object) -> None:
            raise AssertionError("it was never entered")

    io = IoThread("io", lambda: None, within=Broken())
    seen: list[int] = []
    io.post(lambda: seen.append(1))
    io.start()
    until(lambda: seen)
    assert io.stop(60)


def test_who_posts_learns_whether_it_will_run(io: IoThread) -> None:
    io.start()
    seen: list[str] = []
    assert io.post(lambda: seen.append("before"))

    def stop_and_post() -> None:
        # As another thread would between the order to end and the end: it was told that it will run
        assert io.post(lambda: seen.append("told"))

    io.post(stop_and_post)
    assert io.stop(60)
    assert seen == ["before", "told"]
    assert not io.post(lambda: seen.append("after"))
    assert seen == ["before", "told"]
