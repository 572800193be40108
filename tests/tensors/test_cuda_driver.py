"""Contexts within contexts, and events used again: which calls the driver gets."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvxfer.tensors.cuda_driver import CudaError, CurrentContext, Driver, DriverEvents


class Recorder(Driver):
    """Takes note of the calls; has no GPU."""

    def __init__(self) -> None:
        self.current_contexts: list[object] = []
        self.num_calls = 0

    def call(self, name: str, *arguments: object) -> None:
        self.num_calls += 1
        if name == "cuCtxPushCurrent_v2":
            self.current_contexts.append(arguments[0])
        else:
            assert name == "cuCtxPopCurrent_v2"
            self.current_contexts.pop()


def test_one_within_another_of_the_same_gpu_is_free() -> None:
    driver = Recorder()
    context = CurrentContext(driver, 1)
    with context:
        with context, context:
            assert driver.current_contexts == [1]
        assert driver.current_contexts == [1]
    assert driver.current_contexts == []
    assert driver.num_calls == 2


def test_the_innermost_is_the_current_one() -> None:
    driver = Recorder()
    first, second = CurrentContext(driver, 1), CurrentContext(driver, 2)
    with first:
        with second:
            with first:
                assert driver.current_contexts == [1, 2, 1]
            assert driver.current_contexts == [1, 2]
        assert driver.current_contexts == [1]
    assert driver.current_contexts == []


def test_an_error_leaves_what_was_current_before() -> None:
    driver = Recorder()
    context = CurrentContext(driver, 1)
    with pytest.raises(ValueError, match="inside"), context, context:
        raise ValueError("inside")
    assert driver.current_contexts == []


def test_each_thread_enters_by_itself() -> None:
    driver = Recorder()
    context = CurrentContext(driver, 1)

    def enter() -> None:
        with context:
            pass

    with context:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert driver.num_calls == 4


def test_one_that_cannot_be_entered_was_not() -> None:
    class Failing(Recorder):
        def call(self, name: str, *arguments: object) -> None:
            raise RuntimeError("the driver says no")

    driver = Recorder()
    context = CurrentContext(driver, 1)
    with pytest.raises(RuntimeError, match="says no"), CurrentContext(Failing(), 2):
        pass
    with context:
        assert driver.current_contexts == [1]


# ------------------------------------------------------------------ events


class EventDriver(Driver):
    """Has events, by number, and says which call came in which order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.num_created = 0
        self.flags: list[int] = []
        self.over: set[object] = set()
        self.failing = ""

    def call(self, name: str, *arguments: Any) -> None:
        if name == self.failing:
            raise CudaError(f"{name}: the driver says no")
        if name == "cuEventCreate":
            self.num_created += 1
            self.flags.append(arguments[1])
            arguments[0]._obj.value = self.num_created
        elif name == "cuEventElapsedTime":
            arguments[0]._obj.value = 10.0 * arguments[1] + arguments[2]
        elif name == "cuStreamWaitEvent":
            self.calls.append((name, arguments))
        elif not name.startswith("cuCtx"):
            self.calls.append((name, arguments[0]))

    def is_over(self, event: int | None) -> bool:
        return event in self.over


def test_an_event_is_recorded_again_when_nobody_asks_for_it_any_more() -> None:
    driver = EventDriver()
    events = DriverEvents(driver, CurrentContext(driver, 1))
    first, second = events.record(7), events.record(7)
    assert (first.cuda_event, second.cuda_event) == (1, 2)
    driver.over = {1}
    assert (first.query(), second.query()) == (True, False)
    del first
    third = events.record(7)
    assert (third.cuda_event, driver.num_created) == (1, 2)
    second.synchronize()
    assert driver.calls == [
        *[("cuEventRecord", 1), ("cuEventRecord", 2), ("cuEventRecord", 1)],
        ("cuEventSynchronize", 2),
    ]


def test_streams_wait_for_an_event_by_their_handles_and_as_pytorch_asks() -> None:
    driver = EventDriver()
    events = DriverEvents(driver, CurrentContext(driver, 1))
    event = events.record(7)
    events.wait(8, event)
    event.wait(cast(torch.cuda.Stream, SimpleNamespace(cuda_stream=9)))
    waits = [arguments for name, arguments in driver.calls if name == "cuStreamWaitEvent"]
    assert waits == [(8, 1, 0), (9, 1, 0)]


def test_only_stamps_have_a_moment() -> None:
    driver = EventDriver()
    context = CurrentContext(driver, 1)
    events, stamps = (DriverEvents(driver, context, are_timed=timed) for timed in (False, True))
    event, *_ = kept = [events.record(7), stamps.record(7), stamps.record(7)]
    no_timing, blocking = 0x2, 0x1  # CU_EVENT_DISABLE_TIMING, CU_EVENT_BLOCKING_SYNC
    assert driver.flags == [blocking | no_timing, blocking, blocking]
    assert kept[2].since_s(kept[1]) == pytest.approx(0.023)  # from the second to the third
    assert event.cuda_event == 1


def test_events_are_destroyed_with_the_last_who_may_ask() -> None:
    driver = EventDriver()
    events = DriverEvents(driver, CurrentContext(driver, 1))
    kept = [events.record(7) for _ in range(2)]
    del events
    assert ("cuEventDestroy_v2", 1) not in driver.calls
    assert not kept[0].query()
    kept.clear()
    destroyed = [handle for name, handle in driver.calls if name == "cuEventDestroy_v2"]
    assert sorted(map(str, destroyed)) == ["1", "2"]


def test_an_event_that_could_not_be_recorded_is_not_lost() -> None:
    driver = EventDriver()
    events = DriverEvents(driver, CurrentContext(driver, 1))
    driver.failing = "cuEventRecord"
    with pytest.raises(CudaError, match="says no"):
        events.record(7)
    driver.failing = ""
    assert (events.record(7).cuda_event, driver.num_created) == (1, 1)
    driver.failing = "cuEventDestroy_v2"
    del events  # where the GPU has failed, too
