"""What the wire between GPUs does with launches that take their time, fail, or are given up: with
events that the test completes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.tensors.device_copy import DeviceCopier, Launched
from kvxfer.tensors.device_launch import HostEvent
from kvxfer.transfer.wire import Reason
from kvxfer.transports import cuda_ipc_direct
from kvxfer.transports import launches as module
from kvxfer.transports.base import Progress, ReadBroke, ReadDone, ReadStopped, SinkCompletion
from kvxfer.transports.cuda_ipc_direct import CudaIpcSink
from kvxfer.transports.launches import CLOSE_S, FIRST_BYTES_PER_S, WAKE_S, Launches
from tests.conftest import HAS_CUDA
from tests.connector.conftest import stand_in_for_gpus
from tests.transports.host_gpu import gpu_of_sink
from tests.transports.pair import Pair, a_move, key_of

__all__ = ["stand_in_for_gpus"]

CONFIG = Config(transport="cuda_ipc")


class Doubtful(HostEvent):
    """An event that completes, or fails, when the test says so."""

    def __init__(self) -> None:
        self.is_over = self.is_waited_for = False
        self.num_queries = 0
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        self.num_queries += 1
        if self.error is not None:
            raise self.error
        return self.is_over

    def synchronize(self) -> None:
        self.is_waited_for = True
        while not self.is_over and self.error is None:
            time.sleep(0.001)
        if self.error is not None:
            raise self.error


class Stage:
    """A pair whose launches are made up: three of 100 bytes for each read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair = Pair(CONFIG)
        self.events: list[Doubtful] = []
        self.failure: Exception | None = None

        def launches(*_: Any, **__: Any) -> Iterator[Launched]:
            return self._launch()

        self.sink.attach(self.pair.manifest)
        monkeypatch.setattr(DeviceCopier, "launches", launches)

    def _launch(self) -> Iterator[Launched]:
        for number in range(3):
            if self.failure is not None and number == 1:
                raise self.failure
            self.events.append(Doubtful())
            yield Launched(self.events[-1], 100 * (number + 1))

    @property
    def sink(self) -> CudaIpcSink:
        sink = self.pair.sink
        assert isinstance(sink, CudaIpcSink)
        return sink

    def read(self, number: int) -> None:
        self.pair.start(key_of(number), a_move())

    def over(self, *numbers: int) -> list[SinkCompletion]:
        """These events complete, in the order in which they were made."""
        for number in numbers:
            self.events[number].is_over = True
        return self.sink.poll()

    def close(self) -> None:
        for event in self.events:
            event.is_over = True
        self.pair.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    if HAS_CUDA:
        pytest.skip("its pools are host memory, where only Triton's interpreter copies")
    stage = Stage(monkeypatch)
    yield stage
    stage.close()


@pytest.fixture(params=[("IN_FLIGHT_NBYTES", 200), ("MAX_LAUNCHES", 2)], ids=["bytes", "number"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches on their way at a time."""
    monkeypatch.setattr(cuda_ipc_direct, *request.param)


def test_a_read_is_done_when_its_last_launch_is_over(stage: Stage) -> None:
    stage.read(1)
    assert len(stage.events) == 3
    assert stage.over(0, 1) == []
    assert stage.over(2) == [ReadDone(key_of(1), 300, certified=False)]


@pytest.mark.usefixtures("narrow")
def test_reads_take_turns_and_few_bytes_are_on_their_way(stage: Stage) -> None:
    stage.read(1)
    stage.read(2)
    assert len(stage.events) == 2
    assert stage.over(0) == [Progress(key_of(1), 100)]
    assert stage.over(1) == [Progress(key_of(1), 200)]
    assert len(stage.events) == 4  # the first one's third, and the second one's first
    assert stage.over(2) == [Progress(key_of(1), 300), ReadDone(key_of(1), 300, False)]
    assert stage.over(3) == [Progress(key_of(2), 100)]
    assert stage.over(4, 5)[-1] == ReadDone(key_of(2), 300, certified=False)


@pytest.mark.usefixtures("narrow")
def test_a_stopped_read_launches_no_more_and_ends_when_nothing_runs(stage: Stage) -> None:
    stage.read(1)
    stage.sink.stop_read(key_of(1))
    assert stage.over(0) == []
    assert stage.over(1) == [ReadStopped(key_of(1))]
    assert len(stage.events) == 2
    stage.sink.stop_read(key_of(1))
    assert stage.sink.poll() == [ReadStopped(key_of(1))]


def test_a_detached_source_stays_mapped_until_nothing_runs_on_it(stage: Stage) -> None:
    gpu = gpu_of_sink(stage.sink)
    stage.read(1)
    stage.sink.detach(stage.pair.manifest.control_endpoint)
    time.sleep(0.05)
    assert gpu.num_mapped == 1
    assert stage.over(0, 1) == []
    broke = ReadBroke(key_of(1), Reason.PEER_LOST, "the source rank was detached")
    assert stage.over(2) == [broke]
    stage.pair.until(lambda: gpu.num_mapped == 0)
    stage.sink.stop_read(key_of(1))  # the end that was said stands
    assert stage.sink.poll() == [ReadStopped(key_of(1))]


def test_a_launch_that_fails_breaks_its_read_when_all_of_it_is_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mark(*_: Any) -> Doubtful:
        stage.events.append(Doubtful())
        return stage.events[-1]

    monkeypatch.setattr(DeviceCopier, "mark", mark)
    stage.failure = ValueError("wrong ids")
    stage.read(1)
    assert len(stage.events) == 2
    assert stage.over(0) == []
    assert stage.over(1) == [ReadBroke(key_of(1), Reason.READ_FAILED, "launch: wrong ids")]


def test_a_gpu_that_fails_breaks_all_reads_now_and_later(stage: Stage) -> None:
    stage.read(1)
    stage.read(2)
    for event in stage.events:
        event.error = RuntimeError("CUDA error: an illegal memory access")
    ended = stage.sink.poll()
    detail = "this GPU cannot be used any more: CUDA error: an illegal memory access"
    assert ended == [ReadBroke(key_of(n), Reason.READ_FAILED, detail) for n in (1, 2)]
    stage.read(3)
    assert stage.sink.poll() == [ReadBroke(key_of(3), Reason.READ_FAILED, detail)]
    assert stage.sink.counts["gpu_broken"] == 1


def test_a_key_is_used_once(stage: Stage) -> None:
    stage.read(1)
    with pytest.raises(ValueError, match="not in use"):
        stage.read(1)


@pytest.mark.usefixtures("narrow")
def test_a_look_notes_what_is_over_and_leaves_the_rest_to_poll(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who waits for a moment looks at this clock until it has gone by
    clock = SimpleNamespace(perf_counter=count(0.0, CLOSE_S / 10).__next__, sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    stage.pair.num_wakes()  # until now
    assert stage.sink.is_idle
    stage.read(1)
    assert (len(stage.events), stage.pair.num_wakes(), stage.sink.is_idle) == (2, 1, False)
    assert stage.sink.look() == []
    assert stage.events[0].num_queries == 1
    assert stage.pair.num_wakes() == 0  # nothing more was launched
    stage.events[0].is_over = True
    assert stage.sink.look() == [Progress(key_of(1), 100)]
    assert (len(stage.events), stage.pair.num_wakes()) == (3, 1)  # poll is to follow
    stage.events[1].is_over = stage.events[2].is_over = True
    assert stage.sink.look()[-1] == ReadDone(key_of(1), 300, certified=False)
    assert (stage.pair.num_wakes(), stage.sink.is_idle) == (0, True)
    stage.close()  # its thread has waited for whatever it was given
    assert not any(event.is_waited_for for event in stage.events)


def test_a_look_sees_that_the_gpu_has_failed(stage: Stage) -> None:
    stage.read(1)
    stage.events[0].error = RuntimeError("CUDA error: an illegal memory access")
    detail = "this GPU cannot be used any more: CUDA error: an illegal memory access"
    assert stage.sink.look() == [ReadBroke(key_of(1), Reason.READ_FAILED, detail)]


def test_what_needs_room_for_its_ids_waits_for_other_launches(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceCopier, "has_room", lambda _: not stage.events)
    stage.read(1)
    assert len(stage.events) == 1
    assert stage.over(0) == [Progress(key_of(1), 100)]
    assert len(stage.events) == 1
    monkeypatch.setattr(DeviceCopier, "has_room", lambda _: True)
    assert stage.sink.poll() == []
    assert stage.over(1, 2) == [ReadDone(key_of(1), 300, certified=False)]


# ------------------------------------------------------------------ when to look


def test_who_waits_is_woken_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[float] = []
    launches: Launches[str] = Launches(lambda: wakes.append(time.perf_counter()))
    event = Doubtful()
    started_s = time.perf_counter()
    launches.add("a", event, round(0.1 * FIRST_BYTES_PER_S))  # due in 100 ms
    assert launches.land_close() == []
    launches.expect()
    while not wakes:
        time.sleep(0.001)
    assert wakes[0] - started_s >= 0.1 - CLOSE_S - WAKE_S
    assert launches.land() == []
    event.is_over = True
    while len(wakes) < 2:
        time.sleep(0.001)
    (flight,) = launches.land()
    assert (flight.owner, launches.nbytes, len(launches)) == ("a", 0, 0)
    launches.close()


def test_what_was_measured_says_when_the_next_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    launches: Launches[int] = Launches(lambda: None)
    nbytes = 256 << 20
    for number in range(30):
        event = Doubtful()
        launches.add(number, event, nbytes)
        clock.now_s += 0.002
        assert launches.land() == []
        event.is_over = True
        assert [flight.owner for flight in launches.land()] == [number]
    launches.add(30, Doubtful(), nbytes)
    launches.add(31, Doubtful(), nbytes)
    first, second = launches._flights
    assert 0.0015 < first.due_s - first.begins_s < 0.2
    assert second.begins_s == first.due_s
    launches.forget()
    assert (launches.nbytes, launches.land()) == (0, [])
    launches.close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Running(HostEvent):
    """An event of a launch that takes so long on the clock."""

    def __init__(self, clock: Clock, duration_s: float) -> None:
        self._clock, self._over_s = clock, clock.now_s + duration_s

    def query(self) -> bool:
        return self._clock.now_s >= self._over_s

    def synchronize(self) -> None:
        raise AssertionError("nobody waits here")


@pytest.mark.parametrize(
    ("late_s", "is_seen"),
    [(-CLOSE_S - WAKE_S - 1e-5, False), (-CLOSE_S - WAKE_S + 1e-5, True), (CLOSE_S + 1e-5, False)],
)
def test_who_is_woken_soon_enough_looks_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch, late_s: float, is_seen: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    launches: Launches[int] = Launches(lambda: None)

    class Soon(HostEvent):
        """Over when it is due, however often it is looked at."""

        def query(self) -> bool:
            clock.now_s += 5e-6
            return clock.now_s >= due_s

        def synchronize(self) -> None:
            """Nobody waits here."""

    launches.add(1, Soon(), 1 << 30)
    due_s = launches._flights[0].due_s
    clock.now_s = due_s + late_s
    assert bool(launches.land_close()) is is_seen
    assert launches.land() or is_seen or late_s < 0
    launches.close()


@pytest.mark.parametrize("expected_s", [0.0005, 0.0028, 0.015, 0.2])
def test_a_launch_is_due_when_it_ends_however_wrong_that_was_at_first(
    monkeypatch: pytest.MonkeyPatch, expected_s: float
) -> None:
    """Launches of 2.8 ms. The IO thread looks when one is nearly due, then without pause, then
    when it is woken 0.1 ms after the end.
    """
    clock, took_s = Clock(), 0.0028
    monkeypatch.setattr(module, "time", clock)
    launches: Launches[int] = Launches(lambda: None)
    nbytes = 1 << 30
    launches._bytes_per_s = nbytes / expected_s
    late_s = []
    for number in range(30):
        began_s = clock.now_s
        launches.add(number, Running(clock, took_s), nbytes)
        due_s = launches._flights[0].due_s
        assert launches.land() == []
        clock.now_s = max(began_s, due_s - CLOSE_S)
        while not launches.land() and clock.now_s < due_s + CLOSE_S:
            clock.now_s += 5e-6
        if len(launches):
            clock.now_s = began_s + took_s + 1e-4
            launches.land()
        late_s.append(clock.now_s - began_s - took_s)
    launches.close()
    assert max(late_s[20:]) < 2e-4


@pytest.mark.parametrize("expected_s", [0.002, 0.0028, 0.004])
def test_launches_of_one_read_are_seen_over_by_who_looks(
    monkeypatch: pytest.MonkeyPatch, expected_s: float
) -> None:
    """Four of 2.8 ms, one behind the other. The IO thread is woken when the first of them is nearly
    due, and looks; else 0.1 ms after the end, by the thread that waits, which has seen it.
    """
    clock, took_s, nbytes = Clock(), 0.0028, 1 << 30
    monkeypatch.setattr(module, "time", clock)
    launches: Launches[int] = Launches(lambda: None)
    launches._bytes_per_s = nbytes / expected_s

    class Looked(Running):
        def query(self) -> bool:
            clock.now_s += 5e-6
            return super().query()

    late_s = []
    for _ in range(10):
        ends_s = [clock.now_s + number * took_s for number in range(1, 5)]
        for end_s in ends_s:
            launches.add(0, Looked(clock, end_s - clock.now_s), nbytes)
        for end_s in ends_s:
            flight = launches._flights[0]
            clock.now_s = max(clock.now_s, flight.due_s - CLOSE_S - WAKE_S + 1e-6)
            if not (launches.land() or launches.land_close()):
                flight.ended_s, clock.now_s = end_s + 5e-5, end_s + 1e-4
                assert len(launches.land()) == 1
            late_s.append(clock.now_s - end_s)
    launches.close()
    assert max(late_s[8:]) < 5e-5


def test_the_thread_that_waits_says_when_it_saw_a_launch_over() -> None:
    launches: Launches[int] = Launches(lambda: None)
    seen, over_before = Doubtful(), Doubtful()
    launches.add(0, seen, 1)
    launches.add(1, over_before, 1)
    first, second = launches._flights
    over_before.is_over = True
    launches.expect()
    while not seen.is_waited_for:
        time.sleep(0.001)
    before_s = time.perf_counter()
    seen.is_over = True
    launches.close()
    assert first.ended_s is not None
    assert first.ended_s > before_s
    assert second.ended_s is None


def test_what_was_seen_over_counts_and_not_when_that_was_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    launches: Launches[int] = Launches(lambda: None)
    for number in range(12):
        launches.add(number, Running(clock, 0.003), 1 << 30)
        assert launches.land() == []
        launches._flights[0].ended_s = clock.now_s + 0.003
        clock.now_s += 0.006
        assert len(launches.land()) == 1
    launches.close()
    assert launches._bytes_per_s == pytest.approx((1 << 30) / 0.003, rel=0.01)


def test_the_thread_that_waits_heeds_what_is_learned_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch is due later than was thought when that thread went to sleep."""
    clock = Clock()
    wakes: list[float] = []
    launches: Launches[int] = Launches(lambda: wakes.append(clock.now_s))
    event = Doubtful()
    event.is_over = True
    launches.add(0, event, 1 << 30)
    (flight,) = launches._flights
    flight.due_s = clock.now_s + 1.0
    slept: list[float] = []

    def sleep(duration_s: float) -> None:
        slept.append(duration_s)
        clock.now_s += duration_s
        if len(slept) == 1:
            flight.due_s += 0.5

    clock.sleep = sleep  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "time", clock)
    launches.expect()
    launches.close()
    assert sum(slept) == pytest.approx(1.5 - CLOSE_S - WAKE_S)
    assert wakes == [clock.now_s] * 2


def test_launches_that_are_over_at_once_say_nothing_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    launches: Launches[int] = Launches(lambda: None)
    for number in range(3):
        launches.add(number, Running(clock, 0.003), 1 << 30)
    clock.now_s += 0.009
    assert len(launches.land()) == 3
    launches.close()
    assert 1e11 < launches._bytes_per_s < 1e12
