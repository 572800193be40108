"""The core of all benchmarks: contenders that take turns, and the tables, records and plots of what
they took.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from kvxfer.bench.plots import Plot, Timeline, draw

WARM_ROUNDS = 2
LEAST_ROUNDS = 3
"""Of a contender whose time is up."""
WIRE_PACKAGES = ("pyzmq", "ucxx-cu13", "libucx-cu13", "nixl")
_DRIVER = Path("/proc/driver/nvidia/version")
_CPU_INFO = Path("/proc/cpuinfo")

R = TypeVar("R")


# ------------------------------------------------------------------ contenders in turns


class ContenderLost(RuntimeError):
    """A contender is out; the message says why."""


class WrongBytes(ContenderLost):
    """It did something else than it was asked to."""


def tell_lost(name: str, why: ContenderLost) -> None:
    """To somebody who watches; the report says it, too."""
    print(fill(f"lost: {name}: {why}", 79, subsequent_indent="    "), flush=True)


@dataclass(frozen=True, slots=True)
class Timing:
    """One run: until all was done, until the call that asked for it returned, and the processor
    time of the thread that asked and waited.
    """

    total_s: float
    post_s: float = 0.0
    cpu_s: float = 0.0


T = TypeVar("T", bound=Timing)
Work = Callable[[], object]
Run = Callable[[], Timing]


def measure(
    runs: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm_rounds: int = WARM_ROUNDS,
    budget_s: float = float("inf"),
    lose: Callable[[str, ContenderLost], object] | None = None,
) -> dict[str, list[T]]:
    """What each contender took, by name, without the warm-up. They run in turns, each begins as
    often as the others. ``budget_s``: of each; one that has used it up runs no more after
    LEAST_ROUNDS. ``lose`` hears of one that is out from then on; without it ContenderLost is
    raised.
    """
    taken: dict[str, list[T]] = {name: [] for name in runs}
    spent_s, lost, names = dict.fromkeys(runs, 0.0), set[str](), list(runs)
    for number in range(rounds + warm_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            is_over = spent_s[name] > budget_s and len(taken[name]) >= LEAST_ROUNDS
            if name in lost or is_over:
                continue
            try:
                timing = runs[name]()
            except ContenderLost as exc:
                if lose is None:
                    raise
                lost.add(name)
                lose(name, exc)
                continue
            spent_s[name] += timing.total_s
            if number >= warm_rounds:
                taken[name].append(timing)
    return {name: timings for name, timings in taken.items() if timings}


def clocked(works: Mapping[str, Work], clock: Callable[[Work], Timing]) -> dict[str, Run]:
    """Contenders in this process: what they do, by name, and how one run is timed."""
    return {name: partial(clock, work) for name, work in works.items()}


def timed(post: Work, wait: Work | None = None) -> Timing:
    """``post`` asks for it, ``wait`` returns when it is done."""
    cpu_s, started_s = time.thread_time(), time.perf_counter()
    post()
    posted_s = ended_s = time.perf_counter()
    if wait is not None:
        wait()
        ended_s = time.perf_counter()
    return Timing(ended_s - started_s, posted_s - started_s, time.thread_time() - cpu_s)


def timed_cpu(work: Work) -> Timing:
    """In processor time of the thread, which other work of the machine is not in."""
    cpu_s = time.thread_time()
    work()
    return Timing(time.thread_time() - cpu_s)


# ------------------------------------------------------------------ cases and their cells

Quantiles = tuple[float, float, float]
"""p20, p50 and p80."""


def quantiles(values: Sequence[float]) -> Quantiles:
    p20, p50, p80 = np.percentile(values, [20, 50, 80]).tolist()
    return p20, p50, p80


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all contenders do. ``nbytes``: or how many tokens or blocks. ``layouts``,
    ``num_tokens``: of a request that moves.
    """

    name: str
    nbytes: int
    section: str = ""
    layouts: str = ""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way of doing one case. ``gbps``: billions of its bytes a second. ``ratios``: of its speed
    to the limit's in the same round; None: it has no limit. ``post_ms``, ``cpu_ms``: medians, see
    :class:`Timing`. ``aim``: what we want of it, and whether it was met.
    """

    case: str
    section: str
    layouts: str
    num_tokens: int
    nbytes: int
    way: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    gbps: Quantiles
    ratios: Quantiles | None
    post_ms: float
    cpu_ms: float
    num_rounds: int
    aim: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ratios[1] if self.ratios else None


def cell_of(
    case: Case,
    way: str,
    timings: Sequence[Timing],
    limits: Sequence[Timing] | None = None,
    aim: float | None = None,
) -> Cell:
    """``limits``: of the same rounds, of which the last may be missing. ``aim``: the least ratio
    that we want.
    """
    taken_s = [timing.total_s for timing in timings]
    pairs = zip(limits or (), taken_s, strict=False)
    ratios = quantiles([limit.total_s / ours for limit, ours in pairs]) if limits else None
    p20, p50, p80 = quantiles(taken_s)
    return Cell(
        case=case.name,
        section=case.section,
        layouts=case.layouts,
        num_tokens=case.num_tokens,
        nbytes=case.nbytes,
        way=way,
        p20_ms=p20 * 1e3,
        p50_ms=p50 * 1e3,
        p80_ms=p80 * 1e3,
        gbps=quantiles([case.nbytes / each_s / 1e9 for each_s in taken_s]),
        ratios=ratios,
        post_ms=quantiles([timing.post_s * 1e3 for timing in timings])[1],
        cpu_ms=quantiles([timing.cpu_s * 1e3 for timing in timings])[1],
        num_rounds=len(timings),
        aim=goal_text(ratios[1] if ratios else None, aim),
    )


def cells_of(
    case: Case,
    taken: Mapping[str, Sequence[Timing]],
    limit_of: Callable[[str], str] | None = None,
    aim_of: Callable[[str], float | None] = lambda way: None,
) -> Iterator[Cell]:
    """Of all ways. ``limit_of``: the way whose speed is the limit of another; the first one of all
    where nothing is said.
    """
    first = next(iter(taken), "")
    for way, timings in taken.items():
        limits = taken.get(limit_of(way) if limit_of else first)
        yield cell_of(case, way, timings, limits, aim_of(way))


def goal_text(reached: float | None, wanted: float | None, text: str = "{:g}") -> str:
    """Whether a goal was reached; nothing where there is none. ``text``: of the goal."""
    if reached is None or wanted is None:
        return ""
    return f"{text.format(wanted)} {'met' if reached >= wanted else 'MISSED'}"


# ------------------------------------------------------------------ tables


@dataclass(frozen=True, slots=True)
class Table:
    """One section of a report."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """As Markdown; nothing without rows."""
        if not self.rows:
            return []
        lines = ["", f"## {self.title}", "", *([self.text, ""] if self.text else [])]
        lines += ["| " + " | ".join(self.header) + " |", "|" + "---|" * len(self.header)]
        return lines + ["| " + " | ".join(row) + " |" for row in self.rows]


Columns = Mapping[str, Callable[[R], str]]
"""What a record has in each column, by the column's name; spaces at its end are not written, so
that two columns can have one name."""


def _ratio(at: int) -> Callable[[Cell], str]:
    return lambda cell: f"{cell.ratios[at]:.3f}" if cell.ratios else ""


CELL: Columns[Cell] = {
    "case": lambda cell: cell.case,
    "way": lambda cell: cell.way,
    "MB": lambda cell: f"{cell.nbytes / 1e6:.1f}",
    "p20 ms": lambda cell: f"{cell.p20_ms:.3f}",
    "p50 ms": lambda cell: f"{cell.p50_ms:.3f}",
    "p80 ms": lambda cell: f"{cell.p80_ms:.3f}",
    "GB/s": lambda cell: f"{cell.gbps[1]:.4g}",
    "ratio p20": _ratio(0),
    "ratio": _ratio(1),
    "ratio p80": _ratio(2),
    "aim": lambda cell: cell.aim,
    "post ms": lambda cell: f"{cell.post_ms:.3f}",
    "CPU ms": lambda cell: f"{cell.cpu_ms:.3f}",
    "rounds": lambda cell: str(cell.num_rounds),
}
SHOWN = ("way", "p50 ms", "GB/s", "ratio")


def by_section(text: str) -> Callable[[Report], list[Table]]:
    """A table of each section, case by case, with that text."""

    def tables(report: Report) -> list[Table]:
        cells: list[Cell] = report.records.get("cells", [])
        sections = dict.fromkeys(cell.section for cell in cells)
        return [
            table(section, text, CELL, [cell for cell in cells if cell.section == section])
            for section in sections
        ]

    return tables


Tail = tuple[float, float, float, float]
"""p50, p90, p99 and the maximum; nan where nothing was measured."""


def tail_of(values: Iterable[float]) -> Tail:
    """Without values that are nan."""
    found = np.array([value for value in values if not math.isnan(value)])
    if not len(found):
        return (math.nan,) * 4
    p50, p90, p99 = np.percentile(found, [50, 90, 99]).tolist()
    return p50, p90, p99, float(found.max())


def number_text(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def tail_columns(name: str, tail: Callable[[Any], Tail], digits: int = 1) -> Columns[Any]:
    def column(at: int) -> Callable[[Any], str]:
        return lambda record: number_text(tail(record)[at], digits)

    quantiles = ("p50", "p90", "p99", "max")
    return {f"{name} {quantile}".strip(): column(at) for at, quantile in enumerate(quantiles)}


def table(title: str, text: str, columns: Columns[R], records: Iterable[R]) -> Table:
    rows = tuple(tuple(column(record) for column in columns.values()) for record in records)
    return Table(title, text, tuple(name.rstrip() for name in columns), rows)


def line_of(columns: Columns[R], record: R, shown: Sequence[str]) -> str:
    """For somebody who watches, in 80 columns: what the record has in the columns ``shown``, below
    :func:`head_of`.
    """
    return _aligned([columns[column](record) for column in shown], shown)


def head_of(shown: Sequence[str]) -> str:
    """The names of the columns ``shown``, but for the first: its cells say what they are."""
    return _aligned(["", *shown[1:]], shown)


def _aligned(cells: Sequence[str], shown: Sequence[str]) -> str:
    first, *others = cells
    padded = (f" {c:>{max(9, len(n) + 1)}}" for c, n in zip(others, shown[1:], strict=True))
    return f"  {first:<28}{''.join(padded)}".rstrip()


def markdown(title: str, facts: Mapping[str, str], tables: Sequence[Table], plot: str = "") -> str:
    """A whole report; ``facts`` has the command. ``plot``: a line with its picture."""
    known = [f"| {what} | {fact} |" for what, fact in facts.items() if what != "command"]
    lines = [f"# {title}", "", f"Command: `{facts['command']}`", ""]
    lines += ["| what | version |", "|---|---|", *known, *(["", plot] if plot else [])]
    for each in tables:
        lines += each.lines()
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------ reports


@dataclass(slots=True)
class Report:
    """``name``_date.json, .md and .png in the folder ``out``; written after each case, so that a
    run cut short leaves something.

    ``records``: what was found, by kind; ``tables`` and ``plot`` make of them what a reader sees.
    ``shown``: the columns that somebody who watches sees of a record. ``lost``: what was not
    measured, and why.
    """

    out: Path
    name: str
    title: str
    facts: dict[str, str]
    tables: Callable[[Report], list[Table]]
    plot: Callable[[Report], Plot | Timeline | None] = lambda report: None
    records: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    date: str = field(default_factory=lambda: today())
    shown: Sequence[str] = ()

    def begin(self, case: str, shown: Sequence[str] = SHOWN) -> None:
        """Tell somebody who watches what follows, and in which columns."""
        self.shown = shown
        print(f"{case}\n{head_of(shown)}", flush=True)

    def add(self, columns: Columns[Any], record: object, kind: str = "cells") -> None:
        print(line_of(columns, record, self.shown), flush=True)
        self.records.setdefault(kind, []).append(record)

    def compare(
        self,
        case: Case,
        taken: Mapping[str, Sequence[Timing]],
        aims: Mapping[str, float] | None = None,
    ) -> None:
        """Tell and keep what all contenders took in that case, the limit first."""
        self.begin(f"{case.section}: {case.name}")
        for cell in cells_of(case, taken, aim_of=(aims or {}).get):
            self.add(CELL, cell)

    def write(self, *, is_last: bool = False) -> None:
        """All that there is; the plot, which takes a second, at the end."""
        self.out.mkdir(parents=True, exist_ok=True)
        name = f"{self.name}_{self.date}"
        document = msgspec.json.encode({"facts": self.facts, **self.records, "lost": self.lost})
        text = msgspec.json.format(document, indent=1)
        draft = self.out / f"{name}.new"  # who is cut off leaves a whole file
        draft.write_bytes(text + b"\n")
        draft.rename(self.out / f"{name}.json")
        plot = self.plot(self) if is_last else None
        is_drawn = plot is not None and draw(self.out / f"{name}.png", plot, self.conditions())
        picture = f"![{plot.title}]({name}.png)" if plot is not None and is_drawn else ""
        (self.out / f"{name}.md").write_text(self.text(picture), encoding="utf-8")

    def conditions(self) -> tuple[str, ...]:
        """What a picture says of its run: where and when, and under which conditions."""
        known = self.facts
        places = [known[name] for name in ("GPU", "CPUs", "link") if name in known]
        states = ["median of each case"]
        states += [f"torch {version}" for version in known.get("torch", "").split()[:1]]
        if load := known.get("load at the start"):
            states.append(f"load {load} at the start")
        if note := known.get("note"):
            states.append(note)
        return ", ".join((*places, self.date)), ", ".join(states)

    def text(self, picture: str = "") -> str:
        """All tables as Markdown. ``picture``: a line with the plot."""
        lost = Table("not measured", "", ("what", "why"), tuple(self.lost.items()))
        title = f"{self.title}, {self.date}"
        return markdown(title, self.facts, [*self.tables(self), lost], picture)


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def facts_of(command: str, packages: Sequence[str] = (), note: str = "") -> dict[str, str]:
    """Command, hardware and versions; ``packages``: other distributions worth naming."""
    facts = {"command": command, "CPUs": f"{_processor()} x {len(os.sched_getaffinity(0))}"}
    if torch.cuda.is_available():
        facts["GPU"] = f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}"
    if _DRIVER.exists():
        facts["driver"] = _DRIVER.read_text().splitlines()[0]
    facts["Python"] = platform.python_version()
    facts["torch"] = f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    for name in packages:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["load at the start"] = f"{os.getloadavg()[0]:.1f}"
    if note:
        facts["note"] = note
    return facts


def _processor() -> str:
    """The model's name where the system tells it, else the architecture."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
