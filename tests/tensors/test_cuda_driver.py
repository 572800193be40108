"""Contexts within contexts: which calls the driver gets."""

from __future__ import annotations

import threading

import pytest

from kvxfer.tensors.cuda_driver import CurrentContext, Driver


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
