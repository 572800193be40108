"""`kvxfer bench` as a command: its options, how far it is, its pictures, its exit status."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.bench import cache, command, core
from kvxfer.bench.core import CELL, SHOWN, Cell, Report, Timing, cells_of, head_of, line_of
from kvxfer.bench.frame import Progress, Session, words_of
from kvxfer.bench.plots import MOST_LINES, Line, Plot, draw, plot_of
from kvxfer.bench.pools import TINY, request_of
from kvxfer.bench.transfer_report import case_of, speed_plot

NAMES = list(command.BENCHMARKS)


@pytest.mark.parametrize("names", [[], *([name] for name in NAMES)], ids=str)
def test_help_fits_80_columns(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = command.parser_of(names).format_help()
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    for name in NAMES if not names else ():
        assert f"\n  {name} " in shown


def test_what_is_not_given_is_usual_or_quick() -> None:
    for arguments, expected in (
        ([], (100_000, "zmq")),
        (["--quick"], (4_000, "zmq")),
        (["--quick", "--transfers", "3"], (3, "zmq")),
    ):
        given = command.parser_of(["soak"]).parse_args(arguments)
        options = command.options_of("soak", given, given)
        assert (options.transfers, options.transport[1]) == expected
    # One of several: only what all have in common was given.
    assert command.options_of("cache", Namespace(quick=True)).pools == [1_000, 100_000]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "NAME: expected cache, transfer, connector"),
        (["--quick", "cache"], "unrecognized arguments: cache"),
        (["transfer", "--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["transfer", "--layouts", "HND16"], "write HND16->NHD64, say"),
        (["transfer", "--layouts", "XND16->HND16"], "expected HND or NHD"),
        (["cache", "--pools", "700"], "expected a multiple of 500, got 700"),
        (["cache", "transfer", "--tokens", "16"], "unrecognized arguments: --tokens 16"),
    ],
)
def test_a_wrong_line_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_what_this_machine_lacks_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["kernels"]) == 2
    assert capsys.readouterr().err == "kernels: left out: expected a CUDA device, found none\n"


@pytest.mark.usefixtures("without_gpu")
def test_all_of_them_are_those_that_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, with the worst exit status of all."""
    monkeypatch.chdir(tmp_path)
    ran: list[tuple[str, str]] = []

    class Told:
        def __init__(self, name: str) -> None:
            real = benchmark(name)
            self.options, self.missing = real.options, real.missing
            self.name = name

        def run(self, session: Session, options: Namespace) -> int:
            """1 for every other one."""
            ran.append((self.name, session.command))
            return len(ran) % 2

    benchmark = command.benchmark
    monkeypatch.setattr(command, "benchmark", Told)
    assert command.main(["--quick", "--note", "a test"]) == 1
    line = "kvxfer bench --quick --note 'a test'"
    able = ("cache", "transfer", "connector")
    assert ran == [(name, line) for name in able]
    said = capsys.readouterr().out
    assert "kernels: left out: expected a CUDA device, found none\n" in said
    assert "== cache (1 of 3)\n" in said


def test_ctrl_c_says_where_the_results_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "time", SimpleNamespace(perf_counter=stop, thread_time=stop))
    assert command.main(["cache", "--pools", "500", "--out", str(tmp_path)]) == 130
    assert f"stopped; what was measured until then is in {tmp_path}" in capsys.readouterr().out


def test_results_go_into_a_folder_of_the_day(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(cache, "NUM_REQUESTS", 3)
    assert command.main(["cache", "--tokens", "64", "--pools", "1000", "--rounds", "2"]) == 0
    (path,) = tmp_path.glob("kvxfer-bench/????-??-??/cache_*.json")
    found = json.loads(path.read_text())
    assert found["facts"]["command"] == "kvxfer bench cache --tokens 64 --pools 1000 --rounds 2"
    works = {cell["case"]: cell["nbytes"] for cell in found["cells"]}
    assert works["names"] == 4
    assert works["get + free of 1,000, caching on"] == works["naming of 1,000"] == 1000
    assert works["request of 16 tokens, caching off"] == 3
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert [line.split()[0] for line in lines[4:6]] == ["loop", "kvxfer"]


# ------------------------------------------------------------------ how far


def test_the_time_left_is_that_of_the_cases_left(capsys: pytest.CaptureFixture[str]) -> None:
    moments: Iterator[float] = iter([0.0, 10.0, 30.0, 40.0, 46.0])
    progress = Progress(lambda: next(moments))
    progress.plan(3)
    for _ in range(3):
        progress.step()
    assert capsys.readouterr().out.splitlines() == [
        "  -- case 1 of 3, about 40 s left",
        "  -- case 2 of 3, about 15 s left",
    ]
    assert [words_of(each) for each in (0.2, 89, 100, 600)] == ["1 s", "89 s", "2 min", "10 min"]


# ------------------------------------------------------------------ pictures and lines


def some(number: int, is_limit: bool = False) -> Line:
    return Line(f"line {number}", (1.0,), (1.0,), is_limit)


def test_a_picture_has_its_limit_and_few_lines() -> None:
    plot = plot_of("title", "x", "y", [*(some(n) for n in range(20)), some(20, is_limit=True)])
    assert plot is not None
    assert [line.name for line in plot.lines] == ["line 20", *(f"line {n}" for n in range(7))]
    assert plot_of("title", "x", "y", [some(1)]) is None
    assert plot_of("title", "x", "y", [Line("limit", (), (), is_limit=True)]) is None
    for lines in ((some(1),), (*[some(1)] * MOST_LINES, some(2, is_limit=True))):
        with pytest.raises(ValueError, match="plot: expected at most 8 lines, a limit among them"):
            Plot("title", "x", "y", lines)


def cells(layouts: str, ways: list[str]) -> list[Cell]:
    request = request_of(TINY, layouts, 64, 64)
    taken = {way: [Timing(number + 1.0)] for number, way in enumerate(ways)}
    return list(cells_of(case_of(request), taken, lambda _: "sockets"))


def test_a_picture_of_wires_has_ours_before_others(tmp_path: Path) -> None:
    wires = [f"kvxfer {name}" for name in ("shm", "zmq", "ucx")]
    report = Report(tmp_path, "r", "Title", {"CPUs": "a CPU x 2", "note": "quiet"}, lambda _: [])
    ways = ["fast", "sockets", *wires, "slow", "slower", "slowest"]
    report.records["cells"] = cells("HND16->HND16", ways)
    report.records["cells"] += cells("HND16->NHD64", ["sockets", *wires])
    plot = speed_plot("sockets")(report)
    assert plot is not None
    assert [(line.name, line.is_limit) for line in plot.lines] == [
        ("sockets", True),
        *((way, False) for way in wires),
        *((way, False) for way in ("fast", "slow", "slower", "slowest")),
    ]
    place, state = report.conditions()
    assert place == f"a CPU x 2, {report.date}"
    assert state == "median of each case, quiet"


def test_the_picture_says_where_when_and_how(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    closed: list[Any] = []
    plot = Plot("Speed", "bytes", "GB/s", (some(1, is_limit=True), some(2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", closed.append)
        assert draw(tmp_path / "p.png", plot, ("a GPU, today", "load 0.1"))
    (figure,) = closed
    (axes,) = figure.axes
    assert axes.get_title() == "a GPU, today\nload 0.1"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "line 1 (limit)",
        "line 2",
    ]
    assert (tmp_path / "p.png").stat().st_size > 0
    pyplot.close(figure)


@pytest.mark.parametrize(("highest", "scale"), [(15.0, "linear"), (150.0, "log")])
def test_an_axis_has_numbers_on_it(tmp_path: Path, highest: float, scale: str) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    closed: list[Any] = []
    lines = tuple(Line(str(y), (4e6, 5e8), (9.0, y), y == highest) for y in (10.0, highest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", closed.append)
        assert draw(tmp_path / "p.png", Plot("Time", "bytes", "ms", lines), ())
    (figure,) = closed
    (axes,) = figure.axes
    ticks = zip(axes.yaxis.get_ticklabels(which="both"), axes.yaxis.get_ticklocs(), strict=False)
    low, high = axes.get_ylim()
    assert axes.get_yscale() == scale
    if scale == "linear":
        assert low == 0
        assert sum(bool(label.get_text()) and low <= at <= high for label, at in ticks) >= 4
    pyplot.close(figure)


def test_a_case_fits_80_columns() -> None:
    for cell in cells("HND16->HND16", ["sockets", "NIXL READ, no thread"]):
        assert len(line_of(CELL, cell, SHOWN)) == len(head_of(SHOWN)) <= 80
