"""The timeline of a load, and what it is made of."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from scripts.benchmarks import call_trace
from scripts.benchmarks.call_trace import CallTrace

ROOT = Path(__file__).resolve().parents[2]
INNER = """
import time

def nap(duration_s):
    time.sleep(duration_s)
    return duration_s

def numbers():
    yield nap(0.001)

class Sleeper:
    def __init__(self):
        self.total_s = nap(0.001)

    def sleep(self):
        self.total_s += nap(0.002)
        if self.total_s > 1:
            raise ValueError("too long")
        return self.total_s
"""
OUTER = """
from traced_example.inner import nap

def twice():
    return nap(0.001) + nap(0.001)

def nothing():
    return None
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """A package of two modules, one of which has a function of the other by name."""
    folder = tmp_path / "traced_example"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "inner.py").write_text(INNER)
    (folder / "outer.py").write_text(OUTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    import traced_example.inner  # type: ignore[import-not-found]  # noqa: PLC0415
    import traced_example.outer  # type: ignore[import-not-found]  # noqa: PLC0415

    yield {"inner": traced_example.inner, "outer": traced_example.outer}
    for name in [name for name in sys.modules if name.startswith("traced_example")]:
        del sys.modules[name]


@pytest.fixture
def trace(modules: dict[str, ModuleType]) -> Iterator[CallTrace]:
    yield CallTrace(["traced_example"])
    sys.setprofile(None)
    threading.setprofile(None)


def test_calls_are_kept_with_their_depth_and_thread_while_it_is_on(
    modules: dict[str, ModuleType], trace: CallTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine takes a thread away in the middle of a call that does nothing
    monkeypatch.setattr(call_trace, "LEAST_S", 0.0009)
    outer, inner = modules["outer"], modules["inner"]
    assert outer.twice() == 0.002
    assert trace.stop() == []
    trace.start()
    assert outer.twice() == 0.002
    assert outer.nothing() is None
    sleeper = inner.Sleeper()
    thread = threading.Thread(target=sleeper.sleep, name="other")
    thread.start()
    thread.join()
    assert list(inner.numbers()) == [0.001]
    calls = trace.stop()
    assert outer.twice() == 0.002
    seen = [(call.thread, call.depth, call.name) for call in calls]
    main = threading.current_thread().name
    assert seen == [
        *[(main, 0, "twice"), (main, 1, "nap"), (main, 1, "nap")],
        *[(main, 0, "Sleeper.__init__"), (main, 1, "nap")],
        *[("other", 0, "Sleeper.sleep"), ("other", 1, "nap")],
        *[(main, 0, "numbers"), (main, 1, "nap")],
    ]
    outside, first, second = calls[:3]
    assert outside.started_s <= first.started_s < first.ended_s <= second.started_s
    assert second.ended_s <= outside.ended_s
    assert first.ended_s - first.started_s >= 0.001
    assert first.line(first.started_s - 0.005).split()[:1] == ["5000"]


def test_a_call_that_raises_is_kept_and_raises(
    modules: dict[str, ModuleType], trace: CallTrace
) -> None:
    sleeper = modules["inner"].Sleeper()
    sleeper.total_s = 2
    trace.start()
    with pytest.raises(ValueError, match="too long"):
        sleeper.sleep()
    modules["inner"].nap(0)
    sleeper.total_s = 0
    sleeper.sleep()
    kept = [(call.depth, call.name) for call in trace.stop()]
    assert [entry for entry in kept if entry[1] != "nap"] == [(0, "Sleeper.sleep")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--first"]])
def test_a_load_is_shown_from_both_sides(options: list[str]) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "scripts/trace_load.py", "--device", "cpu", "--transport", "zmq"),
            *("--least-us", "5", *options),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sink, source = done.stdout.split("-- source:")
    assert sink.startswith("-- sink:")
    assert "StreamSink.submit_expect" in sink
    assert "StreamSource.submit_send" in source
    assert ("Peers._match" in sink) is bool(options)
    assert "128 tokens over zmq, 0.1 MB: " in source.splitlines()[-1]
