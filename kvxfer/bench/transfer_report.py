"""Contenders that move requests, case by case, as benchmarks report them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from kvxfer.bench import core
from kvxfer.bench.contenders import Contenders
from kvxfer.bench.frame import Progress
from kvxfer.bench.plots import Plot, line, plot_of
from kvxfer.bench.pools import SHAPES, Request, request_of

Aims = Callable[[Request, str], float | None]
"""The least ratio to the limit that we want of a way, where there is one."""
LimitOf = Callable[[str], str]


def case_of(request: Request, section: str = "") -> core.Case:
    return core.Case(
        name=request.name,
        section=section,
        layouts=request.layouts,
        num_tokens=request.num_tokens,
        nbytes=request.nbytes,
    )


@dataclass(slots=True)
class Run:
    """Contenders and the report of them. ``limit_of``: the way that a way's ratios are to."""

    contenders: Contenders
    report: core.Report
    progress: Progress
    limit_of: LimitOf
    aims: Aims

    def cases(self, requests: Sequence[Request], rounds: int, budget_s: float) -> None:
        """All of them, and a word of each on the way."""
        self.progress.plan(len(requests))
        for request in requests:
            self.report.begin(f"{request.name}, {request.nbytes / 1e6:.1f} MB")
            taken = self.contenders.measure(request, rounds, budget_s)
            self.report.lost = self.contenders.lost()
            aim_of = {way: self.aims(request, way) for way in taken}.get
            for cell in core.cells_of(case_of(request), taken, self.limit_of, aim_of):
                self.report.add(core.CELL, cell)
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
    """All cases, and what trials have said."""

    def tables(report: core.Report) -> list[core.Table]:
        trials = tuple(report.records.get("trials", {}).items())
        return [
            core.table(title, text, core.CELL, report.records.get("cells", [])),
            core.Table("trials", _TRIALS, ("wire", "measured, and chosen"), trials),
        ]

    return tables


def speed_plot(*limits: str) -> Callable[[core.Report], Plot | None]:
    """GB/s by bytes, of the first shape: kvxfer's wires in the first layouts, others, then kvxfer's
    wires in other layouts, which others do not change.
    """

    def plot(report: core.Report) -> Plot | None:
        cells: list[core.Cell] = report.records.get("cells", [])
        if not cells:
            return None
        layouts, shape = cells[0].layouts, cells[0].case.split()[0]
        found = dict.fromkeys((cell.layouts, cell.way) for cell in cells)
        drawn = [each for each in found if each[0] == layouts or each[1].startswith("kvxfer")]
        drawn.sort(key=lambda each: (each[0] != layouts, not each[1].startswith("kvxfer")))
        lines = [
            line(
                way if at == layouts else f"{way}, {at}",
                [c for c in cells if (c.layouts, c.way, c.case.split()[0]) == (at, way, shape)],
                lambda cell: (cell.nbytes, cell.gbps[1]),
                is_limit=way in limits,
            )
            for at, way in drawn
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
