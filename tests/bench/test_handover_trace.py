"""Where the time of a hand-over goes: calls that are noted, windows, and the table of them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.benchmarks import handover_trace
from scripts.benchmarks.handover_trace import (
    BEFORE,
    REST,
    TO_CLIENT,
    TO_CORE,
    CallNotes,
    Legs,
    Window,
    legs_tables,
)
from scripts.benchmarks.load_stats import Answer


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 10.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(handover_trace, "time", clock)
    return clock


class Core:
    """An engine core with three methods, of which one calls another."""

    def __init__(self, clock: Clock, path: Path) -> None:
        self.notes = CallNotes(path)
        self.notes.listen_to_this_thread()
        self._clock = clock
        self.inner = self.notes.noted(lambda: self.wait(2.0), "inner")
        self.outer = self.notes.noted(self._outer, "outer")
        self.fails = self.notes.noted(self._fails, "fails")

    def wait(self, seconds: float) -> None:
        self._clock.now_s += seconds

    def _outer(self) -> None:
        self.wait(1.0)
        self.inner()
        self.inner()
        self.wait(4.0)

    def _fails(self) -> None:
        self.wait(8.0)
        raise ValueError("planted")


def test_calls_are_told_without_those_within_them(clock: Clock, tmp_path: Path) -> None:
    core = Core(clock, tmp_path / "1.jsonl")
    core.outer()  # in nobody's window
    core.notes.arrived("a")
    core.wait(0.5)
    core.outer()
    with pytest.raises(ValueError, match="planted"):
        core.fails()
    core.outer()
    other = threading.Thread(target=core.outer)  # of another thread than the core's
    other.start()
    other.join()
    core.notes.stepped(["b"], 1)
    core.notes.stepped(["b", "a"], 1)
    (window,) = Window.read(tmp_path)
    assert window == Window("a", 19.0, 54.5, {"inner": 8.0, "outer": 10.0, "fails": 8.0})
    core.notes.stepped(["a"], 1)  # its second token
    assert Window.read(tmp_path) == [window]


@pytest.mark.parametrize(("others", "num_running"), [(["b"], 1), ([], 2)])
def test_only_a_request_that_is_alone_is_told(
    others: list[str], num_running: int, clock: Clock, tmp_path: Path
) -> None:
    core = Core(clock, tmp_path / "1.jsonl")
    for name in ("a", *others):
        core.notes.arrived(name)
    core.notes.stepped(["a", *others], num_running)
    assert Window.read(tmp_path) == []
    core.notes.arrived("c")  # after them
    core.notes.stepped(["c"], 1)
    assert [window.request_id for window in Window.read(tmp_path)] == ["c"]


def test_a_call_in_which_a_request_comes_is_the_rest(clock: Clock, tmp_path: Path) -> None:
    core = Core(clock, tmp_path / "1.jsonl")

    def wait_for_work() -> None:
        core.wait(1.0)
        core.notes.arrived("a")
        core.inner()

    core.notes.noted(wait_for_work, "wait")()
    core.notes.stepped(["a"], 1)
    assert Window.read(tmp_path) == [Window("a", 11.0, 13.0, {"inner": 2.0})]


def test_legs_are_all_of_a_hand_over() -> None:
    window = Window("a", 3.0, 7.0, {"schedule": 0.5, "forward": 2.0})
    prefill = Answer(0, prefilled_s=1.0, asked_s=0.25)
    decode = Answer(0, asked_s=1.5, token_s=(8.0, 9.0))
    legs = window.legs_us([prefill, decode])
    assert legs == {
        **{BEFORE: 0.5e6, TO_CORE: 1.5e6, "schedule": 0.5e6, "forward": 2e6},
        **{REST: 1.5e6, TO_CLIENT: 1e6},
    }
    assert sum(legs.values()) == pytest.approx(7e6)


def test_a_table_has_a_column_for_each_contender() -> None:
    def legs(contender: str, **calls: float) -> Legs:
        return Legs("load", contender, {BEFORE: 1.0, **calls, REST: 2.0, TO_CLIENT: 3.0})

    found = [legs("floor", run=10.0), legs("floor", run=30.0), legs("ipc", run=20.0, bind=5.0)]
    (table,) = legs_tables(found)
    assert table.header == ("", "floor (n=2)", "ipc (n=1)")
    assert table.rows == (
        (BEFORE, "1", "1"),
        ("run", "20", "20"),
        ("bind", "0", "5"),
        (REST, "2", "2"),
        (TO_CLIENT, "3", "3"),
        ("all of it", "26", "31"),
    )


def test_methods_that_a_version_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        def called(self) -> str:
            return "as before"

    module: Any = ModuleType("a_vllm")
    module.Known = Known
    monkeypatch.setitem(sys.modules, "a_vllm", module)
    points = (("a_vllm", "Known", ("called", "gone")), ("a_vllm", "Gone", ()), ("gone", "X", ()))
    notes = CallNotes(Path("unused"))
    notes.wrap(points)
    assert Known().called() == "as before"
    assert not hasattr(Known, "gone")
