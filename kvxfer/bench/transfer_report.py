"""A transfer as benchmarks report it: one way of moving one request beside a limit and NIXL."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from kvxfer.bench import core
from kvxfer.bench.contenders import Contenders
from kvxfer.bench.frame import Progress
from kvxfer.bench.nixl_ways import HOST_SETTINGS
from kvxfer.bench.plain_ways import LIMITS
from kvxfer.bench.plots import Plot, line, plot_of
from kvxfer.bench.pools import SHAPES, Request, request_of
from kvxfer.bench.sockets import UNIX_SOCKETS

NIXL_DEFAULT = HOST_SETTINGS[0].name
_NOT_DRAWN = {*LIMITS, UNIX_SOCKETS}
_MOST_OTHERS = 3
_Aims = Callable[[Request, str], float | None]
"""The least ratio to the limit that we want of a way, where there is one."""
LimitOf = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Cell:
    """One way in one case. ``ratios`` at p20, p50 and p80, each to the same quantile of the limit's
    speed; ``beside_nixl``: the median to that of NIXL's default.
    """

    case: str
    layouts: str
    num_tokens: int
    nbytes: int
    way: str
    speed: core.Speed
    ratios: core.Quantiles | None
    beside_nixl: float | None
    post_ms: float
    cpu_ms: float
    aim: float | None

    @property
    def shape(self) -> str:
        return self.case.split()[0]

    @property
    def verdict(self) -> str:
        """Which aims there are, and whether they were met."""
        said = [core.goal_text(self.ratios[1] if self.ratios else None, self.aim, "{:g}")]
        if said[0] and self.beside_nixl is not None:
            said.append(f"NIXL's default {'met' if self.beside_nixl >= 1 else 'MISSED'}")
        return ", ".join(said)


def _ratio(at: int) -> Callable[[Cell], str]:
    return lambda cell: f"{cell.ratios[at]:.3f}" if cell.ratios else ""


COLUMNS: core.Columns[Cell] = {
    "case": lambda cell: cell.case,
    "way": lambda cell: cell.way,
    "MB": lambda cell: f"{cell.nbytes / 1e6:.1f}",
    **core.of_ms(),
    "GB/s": lambda cell: f"{cell.speed.gbps[1]:.4g}",
    "ratio p20": _ratio(0),
    "p50": _ratio(1),
    "p80": _ratio(2),
    "to NIXL": lambda cell: "" if cell.beside_nixl is None else f"{cell.beside_nixl:.2f}",
    "aim": lambda cell: cell.verdict,
    "post ms": lambda cell: f"{cell.post_ms:.3f}",
    "CPU ms": lambda cell: f"{cell.cpu_ms:.3f}",
    "rounds": lambda cell: str(cell.speed.num_rounds),
}

WATCHED: core.Columns[Cell] = {**COLUMNS, "of the limit": COLUMNS["p50"]}


def cells_of(
    request: Request, taken: Mapping[str, Sequence[core.Timing]], limit_of: LimitOf, aims: _Aims
) -> Iterator[Cell]:
    speeds = {way: core.speed_of(request.nbytes, timings) for way, timings in taken.items()}
    nixl = speeds.get(NIXL_DEFAULT)
    for way, speed in speeds.items():
        limits, ratios = speeds.get(limit_of(way)), None
        if limits is not None:
            p20, p50, p80 = (o / t for o, t in zip(speed.per_s, limits.per_s, strict=True))
            ratios = (p20, p50, p80)
        yield Cell(
            case=request.name,
            layouts=request.layouts,
            num_tokens=request.num_tokens,
            nbytes=request.nbytes,
            way=way,
            speed=speed,
            ratios=ratios,
            beside_nixl=speed.per_s[1] / nixl.per_s[1] if nixl else None,
            post_ms=core.quantiles([timing.post_s * 1e3 for timing in taken[way]])[1],
            cpu_ms=core.quantiles([timing.cpu_s * 1e3 for timing in taken[way]])[1],
            aim=aims(request, way),
        )


SHOWN = ("way", "p50 ms", "GB/s", "of the limit")


@dataclass(slots=True)
class Run:
    """Contenders and the report of them. ``limit_of``: the way that a way's ratios are to."""

    contenders: Contenders
    report: core.Report
    progress: Progress
    limit_of: LimitOf
    aims: _Aims

    def cases(self, requests: Sequence[Request], rounds: int, budget_s: float) -> None:
        """All of them, and a word of each on the way. From the first one on with another layout
        those that move blocks as they are have nothing more to do.
        """
        self.progress.plan(len(requests))
        for request in requests:
            self.report.begin(f"{request.name}, {request.nbytes / 1e6:.1f} MB", SHOWN)
            if not request.is_equal:
                self.contenders.retire()
            taken = self.contenders.measure(request, rounds, budget_s)
            self.report.lost = self.contenders.lost()
            for cell in cells_of(request, taken, self.limit_of, self.aims):
                self.report.add(WATCHED, cell)
            self.report.write()
            self.progress.step()

    @contextmanager
    def written(self) -> Iterator[None]:
        """What was found is kept, and the processes end, whatever happens."""
        try:
            yield
        finally:
            self.report.lost |= self.contenders.lost()
            self.contenders.close()
            self.report.write(is_last=True)


_TRIALS = (
    "What a trial of each wire has measured before, and which chunks and slots follow from it."
)


def speed_tables(title: str, text: str) -> Callable[[core.Report], list[core.Table]]:
    """By case, and what trials have said."""

    def tables(report: core.Report) -> list[core.Table]:
        cells = report.records.get("cells", [])
        cases = dict.fromkeys(cell.case for cell in cells)
        ordered = [cell for case in cases for cell in cells if cell.case == case]
        trials = tuple(report.records.get("trials", {}).items())
        return [
            core.table(title, text, COLUMNS, ordered),
            core.Table("trials", _TRIALS, ("wire", "measured, and chosen"), trials),
        ]

    return tables


def speed_plot(*limits: str) -> Callable[[core.Report], Plot | None]:
    """GB/s by bytes: kvxfer's wires in the first layouts, the fastest others, then kvxfer's wires
    in other layouts, which others do not change.
    """

    def plot(report: core.Report) -> Plot | None:
        cells: list[Cell] = report.records.get("cells", [])
        if not cells:
            return None
        layouts, shape = cells[0].layouts, cells[0].shape
        # Of the longest request.
        speeds = {cell.way: cell.speed.gbps[1] for cell in cells if cell.layouts == layouts}
        ours = [way for way in speeds if way.startswith("kvxfer")]
        others = set(speeds) - _NOT_DRAWN - {*limits, *ours}
        fastest = sorted(others, key=lambda way: -speeds[way])[:_MOST_OTHERS]
        first = [(layouts, way) for way in (*limits, *ours, *fastest)]
        rest = [(cell.layouts, cell.way) for cell in cells if cell.way in ours]
        lines = [
            line(
                way if at == layouts else f"{way}, {at}",
                [c for c in cells if (c.layouts, c.way, c.shape) == (at, way, shape)],
                lambda cell: (cell.nbytes, cell.speed.gbps[1]),
                is_limit=way in limits,
            )
            for at, way in dict.fromkeys(first + rest)
        ]
        x_name = f"bytes of a request of {shape}, {layouts}"
        return plot_of(report.title, x_name, "GB/s of payload", lines)

    return plot


def requests_of(options: argparse.Namespace) -> list[Request]:
    """All cases, by length; pools have an eighth more than the longest request."""
    pool_tokens = max(options.tokens) * 9 // 8
    return [
        request_of(SHAPES[shape], layouts, num_tokens, pool_tokens)
        for shape, num_tokens, layouts in product(options.shapes, options.tokens, options.layouts)
    ]


def pool_nbytes(requests: Sequence[Request]) -> int:
    """Of memory that all of them fit in."""
    return max(pool.nbytes for request in requests for pool in (request.source, request.sink))
