"""What the benchmark of a wire between two processes has found, and the report of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.benchmarks.contenders import Contenders
from scripts.benchmarks.members import Timing
from scripts.benchmarks.plain_ways import MEMCPY
from scripts.benchmarks.pools import LLAMA_70B_TP8, Request
from scripts.benchmarks.results import Line, Plot, Table, quantiles, today, write_report
from scripts.benchmarks.wire_ways import Disturbed

EQUAL = "HND16->HND16"
LONG_TOKENS = 8192  # from here on the wire should be as fast as the link


@dataclass(frozen=True, slots=True)
class Cell:
    """One way in one case: times in ms, GB/s of the payload at the median, and the ratio of
    memcpy's median to its own. ``aim``: the least ratio that we want, where there is one.
    """

    case: str
    shape: str
    layouts: str
    num_tokens: int
    way: str
    nbytes: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    gbps: float
    ratio: float | None
    post_ms: float
    cpu_ms: float
    num_rounds: int
    aim: float | None = None


@dataclass(slots=True)
class Findings:
    """What has been measured so far."""

    cells: list[Cell] = field(default_factory=list)
    disturbed: list[Disturbed] = field(default_factory=list)


def aim_of(request: Request, way: str, where: str) -> float | None:
    """What we want of the wire between two GPUs."""
    if where != "peer" or not way.startswith("kvxfer") or request.num_tokens < LONG_TOKENS:
        return None
    is_fine = (
        request.shape.heads == 1 or min(request.source.block_tokens, request.sink.block_tokens) < 16
    )
    return 0.90 if is_fine else 0.95


def cells_of(request: Request, taken: dict[str, list[Timing]], where: str) -> Iterator[Cell]:
    """A line of the table for each way."""
    limit = taken.get(MEMCPY)
    limit_ms = quantiles([timing.total_s * 1e3 for timing in limit])[1] if limit else None
    for way, timings in taken.items():
        p20, p50, p80 = quantiles([timing.total_s * 1e3 for timing in timings])
        yield Cell(
            case=request.name,
            shape=request.shape.name,
            layouts=request.layouts,
            num_tokens=request.num_tokens,
            way=way,
            nbytes=request.nbytes,
            p20_ms=p20,
            p50_ms=p50,
            p80_ms=p80,
            gbps=request.nbytes / p50 / 1e6,
            ratio=None if limit_ms is None else limit_ms / p50,
            post_ms=quantiles([timing.post_s * 1e3 for timing in timings])[1],
            cpu_ms=quantiles([timing.cpu_s * 1e3 for timing in timings])[1],
            num_rounds=len(timings),
            aim=aim_of(request, way, where),
        )


def verdict(cell: Cell) -> str:
    """Whether the aim was met."""
    if cell.aim is None or cell.ratio is None:
        return ""
    return f"{cell.aim:.2f} {'met' if cell.ratio >= cell.aim else 'MISSED'}"


def ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


@dataclass(slots=True)
class Report:
    """Where the findings go, again and again, so that a run cut short leaves something."""

    out: Path
    facts: dict[str, str]
    contenders: Contenders
    findings: Findings = field(default_factory=Findings)
    date: str = field(default_factory=today)

    def write(self, *, is_last: bool = False) -> None:
        """All that there is; the plot, which takes a second, at the end."""
        where = self.contenders.devices.where
        record = {
            "where": where,
            "cells": [asdict(cell) for cell in self.findings.cells],
            "decode": [asdict(line) for line in self.findings.disturbed],
            "lost": dict(self.contenders.lost()),
        }
        write_report(
            self.out,
            f"transfer_{self.contenders.devices.wire}_{where}_{self.date}",
            f"Transfer between two processes, {self.contenders.devices.wire}, {where}, {self.date}",
            self.facts,
            self._tables(),
            record,
            plot=self._plot() if is_last else None,
        )

    def _tables(self) -> list[Table]:
        wire = Table(
            "wire",
            "Wall time from the request to the last byte in place; GB/s of the payload at the "
            "median; the ratio is the median of memcpy to the median here. NIXL and "
            "cudaMemcpyBatchAsync move blocks as they are, so they are in the cases of equal "
            "layouts only.",
            (
                "case",
                "way",
                "MB",
                "p20 ms",
                "p50 ms",
                "p80 ms",
                "GB/s",
                "ratio",
                "aim",
                "post ms",
                "CPU ms",
                "rounds",
            ),
            tuple(
                (
                    cell.case,
                    cell.way,
                    f"{cell.nbytes / 1e6:.1f}",
                    f"{cell.p20_ms:.3f}",
                    f"{cell.p50_ms:.3f}",
                    f"{cell.p80_ms:.3f}",
                    f"{cell.gbps:.1f}",
                    ratio_text(cell.ratio),
                    verdict(cell),
                    f"{cell.post_ms:.3f}",
                    f"{cell.cpu_ms:.3f}",
                    str(cell.num_rounds),
                )
                for cell in self.findings.cells
            ),
        )
        decode = Table(
            "decode",
            "A matrix loop on the sink's GPU while pulls of the longest request follow each other: "
            "slowdown to the loop alone, and what the pulls reach meanwhile. 0 programs: no pulls.",
            ("loop", "programs", "p20 ms", "p50 ms", "p80 ms", "slowdown", "pulls GB/s"),
            tuple(
                (
                    line.loop,
                    str(line.programs),
                    *(f"{ms:.3f}" for ms in quantiles(line.taken_ms)),
                    f"{quantiles(line.taken_ms)[1] / line.alone_ms:.3f}",
                    f"{line.gbps:.1f}",
                )
                for line in self.findings.disturbed
            ),
        )
        lost = Table("not measured", "", ("contender", "why"), tuple(self.contenders.lost()))
        return [wire, decode, lost]

    def _plot(self) -> Plot:
        cells = [cell for cell in self.findings.cells if cell.shape != LLAMA_70B_TP8.name]
        names = dict.fromkeys(
            (cell.way, cell.layouts)
            for cell in cells
            if cell.layouts == EQUAL or cell.way.startswith("kvxfer")
        )
        lines = []
        for way, layouts in names:
            chosen = [cell for cell in cells if (cell.way, cell.layouts) == (way, layouts)]
            is_equal = layouts == EQUAL
            lines.append(
                Line(
                    way if is_equal else f"{way}, {layouts}",
                    tuple(cell.nbytes for cell in chosen),
                    tuple(cell.gbps for cell in chosen),
                    "o-" if is_equal else ".--",
                )
            )
        return Plot(
            f"scattered blocks of 16 tokens, {self.contenders.devices.where}",
            "bytes of the request",
            "GB/s of payload",
            tuple(lines),
        )
