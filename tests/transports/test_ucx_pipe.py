"""UCX as a pipe: the contract, and what is UCX's own."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import msgspec
import pytest
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transports import ucx_pipe as ucx_pipe_module
from kvxfer.transports.base import Wake
from kvxfer.transports.pipe import PipeBroken, Slots
from kvxfer.transports.ucx_library import Worker
from kvxfer.transports.ucx_pipe import (
    GENERATION_BITS,
    MAX_SLOTS,
    MOST_NBYTES,
    SinkAddress,
    UcxLane,
    UcxPipe,
    UcxSinkLane,
    UcxSourceLane,
    tag_of,
)
from tests.helpers import assert_same_bytes, needs_ucxx, run_pair, stop_process
from tests.transports.pipe_contract import (
    NUM_OPENS_ON_GPU,
    Held,
    PipeCase,
    check_pipe,
    scenario_names,
    scenario_params,
)

SLOTS = Slots(num_slots=2, slot_nbytes=1 << 20)
CPU = torch.device("cpu")


def ucx_pipe(device: torch.device, wake: Wake) -> UcxPipe:
    return UcxPipe(device, Config(), wake)


@needs_ucxx
@pytest.mark.parametrize("scenario", scenario_params())
def test_ucx_keeps_the_contract(scenario: str) -> None:
    check_pipe(PipeCase(ucx_pipe, is_broken_by_death=True), scenario)


@needs_ucxx
@pytest.mark.gpu
@pytest.mark.parametrize("scenario", scenario_names())
def test_ucx_keeps_the_contract_between_gpus(scenario: str) -> None:
    case = PipeCase(ucx_pipe, device="cuda:0", is_broken_by_death=True, num_opens=NUM_OPENS_ON_GPU)
    check_pipe(case, scenario)


# ------------------------------------------------------------------ two ends in one process


@dataclass
class Ends:
    """Both ends of a connection, each on a pipe of its own."""

    source_pipe: UcxPipe
    sink_pipe: UcxPipe
    source: UcxSourceLane
    sink: UcxSinkLane

    @property
    def connection(self) -> int:
        """Its number, as the sink's address says it."""
        return msgspec.msgpack.decode(self.sink.address, type=SinkAddress).connection

    def until(self, wanted: Callable[[], Any], timeout_s: float = 120.0) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (found := wanted()):
            assert time.monotonic() < deadline_s, "waited in vain"
            self.source_pipe.progress()
            self.sink_pipe.progress()
        return found

    def send(self, slot: int, generation: int, fill: int, nbytes: int = SLOTS.slot_nbytes) -> None:
        self.source.staging(slot, nbytes).fill_(fill)
        assert self.source.send(slot, generation, nbytes) == ()
        assert self.source.poll() == [slot]


@contextmanager
def two_ends(wake: Wake = lambda: None) -> Iterator[Ends]:
    pipes = [ucx_pipe(CPU, wake) for _ in range(2)]
    try:
        sink = pipes[1].open_sink(SLOTS)
        source = pipes[0].open_source(sink.address, SLOTS)
        sink.connected(source.address)
        yield Ends(pipes[0], pipes[1], source, sink)
    finally:
        for pipe in pipes:
            pipe.close()


def filled(value: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


@needs_ucxx
def test_a_slot_is_named_when_it_was_announced_and_has_come() -> None:
    with two_ends() as ends:
        ends.send(1, 0, fill=7)
        ends.send(0, 0, fill=8, nbytes=5)
        ends.until(lambda: all(request.completed for request in ends.sink._posted.values()))
        assert ends.sink.poll() == []  # UCX brought them, but nobody said what they are
        ends.sink.announced(0, 0, 5, ())
        assert ends.sink.poll() == [0]
        assert_same_bytes(ends.sink.payload(0), filled(8, 5))
        assert ends.sink.poll() == []
        ends.sink.announced(1, 0, SLOTS.slot_nbytes, ())
        assert ends.sink.poll() == [1]
        assert_same_bytes(ends.sink.payload(1), filled(7, SLOTS.slot_nbytes))


@needs_ucxx
def test_another_generation_or_connection_is_not_taken() -> None:
    with two_ends() as ends:
        for slot, tag in (
            (0, tag_of(ends.connection, 0, 1)),
            (1, tag_of(ends.connection + 1, 1, 0)),
        ):
            ends.source.staging(slot, 100).fill_(0xBA)
            ends.source.end.send(slot, tag, 100)
        for slot in range(2):
            ends.sink.announced(slot, 0, 100, ())
        deadline_s = time.monotonic() + 0.2
        while time.monotonic() < deadline_s:
            ends.source_pipe.progress()
            ends.sink_pipe.progress()
            assert ends.sink.poll() == []
        ends.send(0, 0, fill=3, nbytes=100)
        assert ends.until(ends.sink.poll) == [0]
        assert_same_bytes(ends.sink.payload(0), filled(3, 100))


@needs_ucxx
def test_frames_beside_an_announcement_are_refused() -> None:
    with two_ends() as ends, pytest.raises(ProtocolError, match="got 1 frames"):
        ends.sink.announced(0, 0, 1, [zmq.Frame(b"x")])


def told(ends: Ends, taker: UcxLane, num_messages: int) -> list[bytes]:
    """What the lane hears, of so many messages."""
    found: list[bytes] = []

    def hear() -> bool:
        found.extend(taker.heard())
        return len(found) >= num_messages

    ends.until(hear)
    assert not taker.heard()
    return found


@needs_ucxx
def test_messages_come_whole_once_and_in_order_both_ways() -> None:
    """More than are taken at once, of all sizes, beside payloads."""
    sizes = [0, 1, MOST_NBYTES, 2] * 40
    with two_ends() as ends:
        up, down = ([bytes([number]) * size for number, size in enumerate(sizes)] for _ in range(2))
        for first, second in zip(up, reversed(down), strict=True):
            assert ends.source.tell(first)
            assert ends.sink.tell(second)
        ends.send(0, 0, fill=5)
        assert told(ends, ends.sink, len(up)) == up
        assert told(ends, ends.source, len(down)) == down[::-1]
        ends.sink.announced(0, 0, SLOTS.slot_nbytes, ())
        assert ends.until(ends.sink.poll) == [0]
        assert_same_bytes(ends.sink.payload(0), filled(5, SLOTS.slot_nbytes))


@needs_ucxx
@pytest.mark.parametrize("side", ["source", "sink"])
def test_messages_that_were_sent_leave_nothing_behind(side: str) -> None:
    """A sink whose payloads are always there when it looks asks after nothing else."""
    with two_ends() as ends:
        lanes: tuple[UcxLane, UcxLane] = (ends.source, ends.sink)
        giver, taker = lanes if side == "source" else lanes[::-1]
        for number in range(20):
            assert giver.tell(bytes([number]))
            assert told(ends, taker, 1) == [bytes([number])]
        # What is posted stays: the slots' receives and the next message's, and the last one sent
        assert len(giver.end._sending) <= 1
        assert len(giver.end._receiving) <= SLOTS.num_slots + 1


@needs_ucxx
def test_numbers_of_messages_wrap() -> None:
    with two_ends() as ends:
        for lane in (ends.source, ends.sink):
            assert told_after(ends, lane) == b"first"
            # All but the last few numbers are used up; the one that is posted is the next
            mails = (ends.source._mail, ends.sink._mail)
            giver, taker = mails if lane is ends.source else mails[::-1]
            giver._num_sent = (1 << GENERATION_BITS) + 1
            taker._num_posted = (1 << GENERATION_BITS) + 2
            for number in range(5):
                assert told_after(ends, lane, bytes([number])) == bytes([number])


def told_after(ends: Ends, giver: UcxLane, message: bytes = b"first") -> bytes:
    assert giver.tell(message)
    (found,) = told(ends, ends.sink if giver is ends.source else ends.source, 1)
    return found


@needs_ucxx
def test_what_is_too_long_or_too_early_is_not_carried() -> None:
    pipe = ucx_pipe(CPU, lambda: None)
    try:
        assert not pipe.open_sink(SLOTS).tell(b"x")  # nobody is known yet
    finally:
        pipe.close()
    with two_ends() as ends:
        assert not ends.source.tell(bytes(MOST_NBYTES + 1))
        assert told_after(ends, ends.source) == b"first"
        ends.source.close()
        assert not ends.source.tell(b"x")
        assert ends.source.heard() == ()


@needs_ucxx
@pytest.mark.parametrize("message", [b"\xff\xff", bytes(MOST_NBYTES + 3)])
def test_a_message_that_is_none_breaks_the_connection(message: bytes) -> None:
    """A length that cannot be; more bytes than there is room for."""
    with two_ends() as ends:
        end = ends.source.end
        tag = tag_of(ends.connection, MAX_SLOTS, 0)
        end.start_send(end.ucx.array(bytearray(message)), tag)
        with pytest.raises(PipeBroken, match="ucx: expected"):
            ends.until(ends.sink.heard)


@needs_ucxx
def test_a_message_wakes_who_waits_for_it() -> None:
    with two_ends() as ends:
        (fd,) = ends.sink_pipe.fds()
        ends.until(lambda: not select.select([fd], [], [], 0.05)[0])
        assert ends.source.tell(b"x")
        assert select.select([fd], [], [], 30.0)[0]
        assert told(ends, ends.sink, 1) == [b"x"]


def _send_to(ends: Ends, address: bytes) -> None:
    lane = ends.source_pipe.open_source(address, SLOTS)
    lane.send(0, 0, 1)
    assert lane.poll() == [0]
    ends.until(lane.poll)


@needs_ucxx
def test_a_source_connects_to_no_sink_that_has_no_way() -> None:
    """Nothing of it is left, and it does where there is one."""
    with two_ends() as ends, socket.socket() as alone:
        address = ends.sink_pipe.open_sink(SLOTS).address
        with pytest.raises(TransportUnavailable, match="ucx: expected a way to the other side"):
            ends.source_pipe.open_source(address, SLOTS, fd=alone.fileno())
        ends.until(lambda: ends.source_pipe.is_idle)
        here, there = socket.socketpair()
        with here, there:
            ends.source_pipe.open_source(address, SLOTS, fd=here.fileno())


@needs_ucxx
def test_addresses_that_are_none() -> None:
    with two_ends() as ends:
        with pytest.raises(TransportUnavailable, match="expected the address of another end"):
            ends.source_pipe.open_source(b"\xff", SLOTS)
        with pytest.raises(TransportUnavailable, match="expected the address of another end"):
            ends.source_pipe.open_source(msgspec.msgpack.encode([1 << 32, b"x"]), SLOTS)
        with pytest.raises(PipeBroken, match="expected the address of another end"):
            ends.sink_pipe.open_sink(SLOTS).connected(b"")
        with pytest.raises(TransportUnavailable, match="expected at most 4095 slots, got 5000"):
            ends.sink_pipe.open_sink(Slots(5000, 1))
        gone = ends.sink_pipe.open_sink(SLOTS)
        gone.close()
        with pytest.raises((TransportUnavailable, PipeBroken), match="ucx: expected"):
            _send_to(ends, gone.address)  # either at once, or the first chunk tells
        ends.send(0, 0, fill=1)
        ends.sink.announced(0, 0, SLOTS.slot_nbytes, ())
        assert ends.until(ends.sink.poll) == [0]  # the connection beside them goes on


@needs_ucxx
def test_the_descriptor_is_silent_when_nothing_is_to_be_done() -> None:
    with two_ends() as ends:
        ends.send(0, 0, fill=1)
        ends.sink.announced(0, 0, SLOTS.slot_nbytes, ())
        ends.until(ends.sink.poll)
        (fd,) = ends.sink_pipe.fds()
        ends.until(lambda: not select.select([fd], [], [], 0.05)[0])
        ends.send(1, 0, fill=1)
        assert select.select([fd], [], [], 30.0)[0]


@needs_ucxx
def test_an_idle_pipe_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ends() as ends:
        ends.until(lambda: not select.select(ends.sink_pipe.fds(), [], [], 0.01)[0])
        monkeypatch.setattr("kvxfer.transports.ucx_pipe.SPIN_S", 0.005)
        monkeypatch.setattr("kvxfer.transports.ucx_pipe.TURN_S", 0.02)
        before_s = time.process_time()
        for _ in range(100):
            ends.sink_pipe.progress()
        assert time.process_time() - before_s < 0.25  # a spin each time would be 0.5 s in all


class Busy:
    """A worker that has something to do so many times, whatever its descriptor says."""

    def __init__(self, worker: Any, times: int) -> None:
        self._worker, self.times = worker, times
        self.armed = False

    def progress_once(self) -> bool:
        self.armed = False
        self.times -= 1
        return bool(self._worker.progress_once()) or self.times >= 0

    def arm(self) -> bool:
        self.armed = bool(self._worker.arm()) and self.times < 0
        return self.armed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


def busy(lane: UcxLane, times: int) -> Busy:
    worker = Busy(lane.end.worker, times)
    lane.end.worker = cast(Worker, worker)
    return worker


@needs_ucxx
@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_worker_is_armed_or_driven_again(times: int) -> None:
    """UCX may leave a descriptor silent that nobody has armed (over TCP it does not)."""
    wakes: list[bool] = []

    def drive(pipe: UcxPipe, worker: Busy) -> None:
        """A turn that is over before the worker is armed (a busy machine) asks for another."""
        for _ in range(100):
            wakes.clear()
            pipe.progress()
            assert worker.armed or wakes
            if worker.armed:
                return
        pytest.fail("the worker was never armed")

    with two_ends(lambda: wakes.append(True)) as ends:
        drive(ends.sink_pipe, busy(ends.sink_pipe.open_sink(SLOTS), times))
        worker = busy(ends.source, times)
        drive(ends.source_pipe, worker)
        wakes.clear()
        worker.times = times
        ends.send(0, 0, fill=1, nbytes=1)
        assert worker.armed != bool(wakes)
        drive(ends.source_pipe, worker)


@needs_ucxx
def test_progress_comes_back_in_time() -> None:
    wakes: list[bool] = []
    with two_ends(lambda: wakes.append(True)) as ends:
        busy(ends.source, 1 << 60)
        wakes.clear()
        begin_s = time.monotonic()
        ends.source_pipe.progress()
        assert time.monotonic() - begin_s < 30  # not until there is nothing left
        assert wakes == [True]
        ends.source_pipe.progress()
        assert wakes == [True, True]


@needs_ucxx
def test_between_gpus_a_payload_that_was_announced_is_looked_for_and_not_for_ever() -> None:
    wakes: list[bool] = []

    def is_looking(ends: Ends) -> bool:
        wakes.clear()
        ends.sink_pipe.progress()
        return bool(wakes)

    with two_ends(lambda: wakes.append(True)) as ends:
        ends.sink.announced(0, 0, 100, ())
        ends.sink._look_until_s = math.inf
        ends.sink_pipe.drive_soon(ends.sink.end)
        ends.until(lambda: not is_looking(ends))  # not in memory of the host
        ends.sink_pipe.is_fast = True
        wakes.clear()
        begin_s = time.perf_counter()
        ends.sink.announced(1, 0, SLOTS.slot_nbytes, ())
        assert wakes
        assert begin_s < ends.sink._look_until_s < begin_s + 300
        ends.sink._look_until_s = math.inf
        for _ in range(100):  # longer than what UCX itself asks to be driven
            assert is_looking(ends)
        ends.sink._look_until_s = time.perf_counter()
        ends.until(lambda: not is_looking(ends))
        ends.send(1, 0, fill=1)  # it comes all the same
        assert ends.until(ends.sink.poll) == [1]


# ------------------------------------------------------------------ ends that were closed


@needs_ucxx
@pytest.mark.parametrize("first", ["source", "sink"])
@pytest.mark.parametrize("num_turns", [0, 1, 5])
def test_large_sends_on_their_way_leave_nothing_when_they_are_closed(
    first: str, num_turns: int
) -> None:
    with two_ends() as ends:
        assert told_after(ends, ends.source) == b"first"  # these two have all their descriptors
        before = Held.now().fds
        for _ in range(4):
            sink = ends.sink_pipe.open_sink(SLOTS)
            source = ends.source_pipe.open_source(sink.address, SLOTS)
            sink.connected(source.address)
            for slot in range(SLOTS.num_slots):
                source.send(slot, 0, SLOTS.slot_nbytes)
            for _ in range(num_turns):
                ends.source_pipe.progress()
                ends.sink_pipe.progress()
            for lane in (source, sink) if first == "source" else (sink, source):
                lane.close()
            ends.until(lambda: ends.source_pipe.is_idle and ends.sink_pipe.is_idle)
            del lane, sink, source
            ends.until(lambda: not Held.now().fds - before)  # an earlier test's may go meanwhile


@needs_ucxx
def test_a_closed_sink_gets_nothing_more_and_waits_for_its_source() -> None:
    with two_ends() as ends:
        assert told_after(ends, ends.source) == b"first"
        ends.sink.close()
        assert ends.source.tell(b"second")
        for _ in range(20):
            ends.source_pipe.progress()
            ends.sink_pipe.progress()
        assert not ends.sink_pipe.is_idle
        assert ends.sink.poll() == ()
        assert ends.sink.heard() == ()
        ends.source.close()
        ends.until(lambda: ends.source_pipe.is_idle and ends.sink_pipe.is_idle)


def holds_a_message(lane: UcxLane) -> bool:
    """That no receive was posted for."""
    library = lane.end.ucx._library
    tags = (library.UCXXTag(0), library.UCXXTagMask(0))
    return bool(lane.end.worker.tag_probe(*tags).matched)


@needs_ucxx
@pytest.mark.parametrize("nbytes", [100, SLOTS.slot_nbytes, SLOTS.slot_nbytes + 1])
def test_a_payload_for_a_sink_that_was_never_connected_ends_with_it(nbytes: int) -> None:
    """What ``ucxx`` would wait for without an end; more than there is room for, too."""
    with two_ends() as ends:
        sink = ends.sink_pipe.open_sink(SLOTS)
        source = ends.source_pipe.open_source(sink.address, Slots(1, nbytes))
        source.send(0, 0, nbytes)
        ends.until(lambda: holds_a_message(sink))
        sink.close()
        ends.until(lambda: ends.sink_pipe.is_idle)
        source.close()
        ends.until(lambda: ends.source_pipe.is_idle)


@needs_ucxx
def test_what_outlives_its_pipe_goes_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_pipe_module, "CLOSE_S", 60.0)
    wakes: list[bool] = []
    with two_ends(lambda: wakes.append(True)) as ends:
        assert told_after(ends, ends.source) == b"first"
        before = Held.now().fds
        trial = ucx_pipe(CPU, lambda: None)
        sink = trial.open_sink(SLOTS)
        source = ends.source_pipe.open_source(sink.address, SLOTS)
        sink.connected(source.address)
        source.send(0, 0, SLOTS.slot_nbytes)
        wakes.clear()
        begin_s = time.monotonic()
        trial.close()
        assert time.monotonic() - begin_s < 30  # nobody waits for it
        assert wakes
        assert not ends.sink_pipe.is_idle
        source.close()
        ends.until(lambda: ends.source_pipe.is_idle and ends.sink_pipe.is_idle)
        del sink, source, trial
        ends.until(lambda: not Held.now().fds - before)  # an earlier test's may go meanwhile


def kept_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "staging are kept" in each]


class Endless:
    """An operation that does not end, whatever is done."""

    completed = False

    def check_error(self) -> None:
        raise AssertionError("asked before its end")


@needs_ucxx
def test_staging_of_an_operation_without_an_end_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ucx_pipe_module, "KEPT_S", 300.0)
    with two_ends() as ends:
        sink = ends.sink_pipe.open_sink(SLOTS)
        source = ends.source_pipe.open_source(sink.address, SLOTS)
        sink.connected(source.address)
        endless, staging = Endless(), weakref.ref(source.end.parts[0])
        source.end._sending[endless] = None
        source.close()
        sink.close()
        assert ends.source_pipe.quarantined_nbytes == 0
        monkeypatch.setattr(ucx_pipe_module, "KEPT_S", 0.2)
        ends.until(lambda: ends.source_pipe.quarantined_nbytes)
        assert ends.source_pipe.quarantined_nbytes == SLOTS.nbytes
        ends.until(lambda: len(kept_lines(caplog)) == 2)  # of the source, and of the sink
        for _ in range(5):
            time.sleep(ucx_pipe_module.SLOW_LOOK_S)
            ends.source_pipe.progress()
        assert len(kept_lines(caplog)) == 2
        endless.completed = True
        ends.until(lambda: ends.source_pipe.is_idle and ends.sink_pipe.is_idle)
        assert ends.source_pipe.quarantined_nbytes == ends.sink_pipe.quarantined_nbytes == 0
        del source, sink
        assert staging() is None


@needs_ucxx
def test_the_last_pipe_waits_for_what_is_under_way_and_not_for_ever() -> None:
    with two_ends() as ends:
        ends.source.end._sending[Endless()] = None
        ends.sink_pipe.close()
        begin_s = time.monotonic()
        ends.source_pipe.close()
        assert ucx_pipe_module.CLOSE_S <= time.monotonic() - begin_s < 30
        num_left = len(ucx_pipe_module._left)
        ucx_pipe_module._left.clear()
        assert num_left == 2  # the sink's, too: its source has not gone


# ------------------------------------------------------------------ peers that die or stop


def _early_victim(channel: Connection) -> None:
    """A source that sends before the sink knows it, and is killed."""
    pipe = ucx_pipe(CPU, lambda: None)
    lane = pipe.open_source(channel.recv(), SLOTS)
    for slot in range(2):
        lane.send(slot, 0, SLOTS.slot_nbytes)
    deadline_s = time.monotonic() + 0.3
    while time.monotonic() < deadline_s:
        pipe.progress()
    channel.send(lane.address)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_two(pipe: UcxPipe, lane: UcxSinkLane, address: bytes) -> None:
    lane.connected(address)
    for slot in range(2):
        lane.announced(slot, 0, SLOTS.slot_nbytes, ())
    deadline_s = time.monotonic() + 100.0
    while time.monotonic() < deadline_s:
        pipe.progress()
        lane.poll()


def _early_survivor(channel: Connection) -> None:
    pipe = ucx_pipe(CPU, lambda: None)
    lane = pipe.open_sink(SLOTS)
    channel.send(lane.address)
    deadline_s = time.monotonic() + 100.0
    while not channel.poll():
        assert time.monotonic() < deadline_s
        pipe.progress()
    address = channel.recv()
    with pytest.raises(EOFError):
        channel.recv()
    deadline_s = time.monotonic() + 0.3
    while time.monotonic() < deadline_s:
        pipe.progress()
        assert not lane.poll()
    with pytest.raises(PipeBroken):
        _wait_for_two(pipe, lane, address)
    lane.close()
    pipe.close()
    assert pipe.quarantined_nbytes == 0


@needs_ucxx
def test_a_source_that_dies_before_the_sink_knows_it() -> None:
    run_pair(_early_victim, _early_survivor, exit_codes=(-9, 0), timeout_s=240)


def _asks_and_waits(channel: Connection) -> None:
    """A source that has asked for a connection, and does not read the answer."""
    pipe = ucx_pipe(CPU, lambda: None)
    lane = pipe.open_source(channel.recv(), SLOTS)
    _drive_for(pipe, 0.1)
    channel.send((lane.address, os.getpid()))
    channel.recv()


def _connects_to_the_dead(channel: Connection) -> None:
    pipe = ucx_pipe(CPU, lambda: None)
    lane = pipe.open_sink(SLOTS)
    channel.send(lane.address)
    address, pid = channel.recv()
    _drive_for(pipe, 0.1)  # UCX answers
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EOFError):
        channel.recv()
    time.sleep(0.1)  # for the socket of an answer that nobody has read to be reset
    with pytest.raises(PipeBroken):
        _credit(pipe, lane, address)
    lane.close()
    pipe.close()
    assert pipe.quarantined_nbytes == 0


def _credit(pipe: UcxPipe, lane: UcxSinkLane, address: bytes) -> None:
    """What a sink does first, and on until it is told that the peer has gone."""
    lane.connected(address)
    lane.tell(b"a credit")
    while True:
        pipe.progress()
        lane.poll()


def _drive_for(pipe: UcxPipe, time_s: float) -> None:
    deadline_s = time.monotonic() + time_s
    while time.monotonic() < deadline_s:
        pipe.progress()


@needs_ucxx
def test_a_sink_survives_the_death_of_a_source_that_has_asked_for_a_connection() -> None:
    run_pair(_asks_and_waits, _connects_to_the_dead, exit_codes=(-9, 0), timeout_s=240)


def _stops(channel: Connection) -> None:
    pipe = ucx_pipe(CPU, lambda: None)
    lane = pipe.open_source(channel.recv(), SLOTS)
    channel.send(lane.address)
    channel.send(os.getpid())
    for slot in range(2):
        lane.send(slot, 0, SLOTS.slot_nbytes)
    while not channel.poll():
        pipe.progress()
    lane.close()
    pipe.close()


def _closes_beside_a_stopped_peer(channel: Connection) -> None:
    pipe = ucx_pipe(CPU, lambda: None)
    lane = pipe.open_sink(SLOTS)
    channel.send(lane.address)
    lane.connected(channel.recv())
    pid: int = channel.recv()
    stop_process(pid)
    begin_s = time.monotonic()
    pipe.progress()
    lane.close()
    pipe.close()
    assert time.monotonic() - begin_s < 60
    assert ucx_pipe_module._left
    os.kill(pid, signal.SIGCONT)
    channel.send("end")
    heir = ucx_pipe(CPU, lambda: None)
    deadline_s = time.monotonic() + 100.0
    while not heir.is_idle:
        assert time.monotonic() < deadline_s
        heir.progress()
    heir.close()


@needs_ucxx
def test_close_does_not_wait_for_a_stopped_peer() -> None:
    run_pair(_stops, _closes_beside_a_stopped_peer, timeout_s=240)
