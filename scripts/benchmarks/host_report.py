"""What the benchmarks of host memory have found, beside a plain TCP socket, and their reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.benchmarks.members import Timing
from scripts.benchmarks.nixl_ways import HOST_SETTINGS
from scripts.benchmarks.plain_ways import MEMCPY
from scripts.benchmarks.pools import Request
from scripts.benchmarks.raw_sockets import SOCKETS
from scripts.benchmarks.raw_ucx import RAW_UCX
from scripts.benchmarks.results import Line, Plot, Table, quantiles, today, write_report

AIMS = {"kvxfer shm": 1.4, "kvxfer zmq": 0.6, "kvxfer ucx": 0.45, "kvxfer nixl": 0.8}
"""The least ratio to the socket that we want on one host, for 2048 blocks of 32 KiB."""
AIM_PIECES = 2048
LINK_AIM = 0.95
"""The same over a slow link, of every wire."""
NIXL_DEFAULT = HOST_SETTINGS[0].name
QUANTILES = (20, 50, 80)

Aims = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One way in one case. Speeds in GB/s (1e9 bytes of payload a second) at p20, p50 and p80 of
    all runs, slow ones first; ``ratios``: each to the same quantile of the socket. ``beside_nixl``:
    the median to that of NIXL's default.
    """

    case: str
    layouts: str
    num_tokens: int
    nbytes: int
    way: str
    gbps: tuple[float, float, float]
    ratios: tuple[float, ...]
    beside_nixl: float | None
    p50_ms: float
    cpu_ms: float
    num_rounds: int
    aim: float | None

    @property
    def ratio(self) -> float | None:
        """Of the medians."""
        return self.ratios[1] if self.ratios else None


def speeds(nbytes: int, timings: Sequence[Timing]) -> tuple[float, float, float]:
    """p20, p50 and p80, GB/s."""
    return quantiles([nbytes / timing.total_s / 1e9 for timing in timings])


def cells_of(request: Request, taken: Mapping[str, list[Timing]], aims: Aims) -> Iterator[Cell]:
    """A line of the table for each way."""
    found = {way: speeds(request.nbytes, timings) for way, timings in taken.items()}
    limits, nixl = found.get(SOCKETS), found.get(NIXL_DEFAULT)
    for way, timings in taken.items():
        gbps = found[way]
        yield Cell(
            case=request.name,
            layouts=request.layouts,
            num_tokens=request.num_tokens,
            nbytes=request.nbytes,
            way=way,
            gbps=gbps,
            ratios=tuple(o / t for o, t in zip(gbps, limits, strict=True)) if limits else (),
            beside_nixl=gbps[1] / nixl[1] if nixl else None,
            p50_ms=quantiles([timing.total_s * 1e3 for timing in timings])[1],
            cpu_ms=quantiles([timing.cpu_s * 1e3 for timing in timings])[1],
            num_rounds=len(timings),
            aim=aims.get(way),
        )


def aims_of(request: Request) -> Aims:
    """On one host: of requests of as many blocks as the aims are meant for."""
    num_pieces = request.shape.regions * len(request.source_ids)
    return AIMS if num_pieces == AIM_PIECES else {}


def verdict(cell: Cell) -> str:
    """Which aims there are, and whether they were met."""
    if cell.aim is None or cell.ratio is None:
        return ""
    said = [f"{cell.aim:g} {_met(cell.ratio >= cell.aim)}"]
    if cell.beside_nixl is not None:
        said.append(f"NIXL's default {_met(cell.beside_nixl >= 1)}")
    return ", ".join(said)


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def line(cell: Cell) -> str:
    """For somebody who watches."""
    ratio = "" if cell.ratio is None else f"{cell.ratio:5.2f}"
    return (
        f"{cell.case:36} {cell.way:22} {cell.p50_ms:9.3f} ms {cell.gbps[1]:7.3f} GB/s {ratio} "
        f"{verdict(cell)}"
    )


@dataclass(slots=True)
class Report:
    """Written after each case, so that a run cut short leaves something. ``name``: of the files,
    without the date; ``text``: above the table; ``digits``: of a speed in GB/s; ``choices``: what
    each wire's trial has said.
    """

    out: Path
    name: str
    title: str
    text: str
    facts: dict[str, str]
    digits: int = 2
    cells: list[Cell] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    lost: list[tuple[str, str]] = field(default_factory=list)
    date: str = field(default_factory=today)

    def add(self, cells: Sequence[Cell]) -> None:
        """One more case."""
        for cell in cells:
            print(line(cell), flush=True)
        self.cells += cells
        self.write()

    def write(self, *, is_last: bool = False) -> None:
        """All that there is; the plot, which takes a second, at the end."""
        write_report(
            self.out,
            f"{self.name}_{self.date}",
            f"{self.title}, {self.date}",
            self.facts,
            self._tables(),
            {
                "cells": [asdict(cell) for cell in self.cells],
                "trials": self.choices,
                "lost": dict(self.lost),
            },
            plot=self._plot() if is_last else None,
        )

    def _tables(self) -> list[Table]:
        header = (
            *("case", "way", "MB", "p20", "p50", "p80 GB/s"),
            *("ratio p20", "p50", "p80", "to NIXL", "aim", "ms", "CPU ms", "rounds"),
        )
        cases = dict.fromkeys(cell.case for cell in self.cells)
        rows = tuple(self._row(cell) for case in cases for cell in self.cells if cell.case == case)
        return [
            Table("speed", self.text, header, rows),
            Table("trials", TRIALS, ("wire", "measured, and chosen"), tuple(self.choices.items())),
            Table("not measured", "", ("contender", "why"), tuple(self.lost)),
        ]

    def _row(self, cell: Cell) -> tuple[str, ...]:
        ratios = [f"{ratio:.2f}" for ratio in cell.ratios] or [""] * len(QUANTILES)
        return (
            *(cell.case, cell.way, f"{cell.nbytes / 1e6:.1f}"),
            *(f"{speed:.{self.digits}f}" for speed in cell.gbps),
            *ratios,
            "" if cell.beside_nixl is None else f"{cell.beside_nixl:.2f}",
            verdict(cell),
            *(f"{cell.p50_ms:.2f}", f"{cell.cpu_ms:.2f}", str(cell.num_rounds)),
        )

    def _plot(self) -> Plot:
        layouts = list(dict.fromkeys(cell.layouts for cell in self.cells))
        lines = []
        for index, layout in enumerate(layouts):
            here = [cell for cell in self.cells if cell.layouts == layout]
            for way in dict.fromkeys(cell.way for cell in here):
                if index and not way.startswith("kvxfer"):
                    continue  # moves blocks as they are: the same line again
                chosen = [cell for cell in here if cell.way == way]
                lines.append(
                    Line(
                        f"{way}, {layout}" if index else way,
                        tuple(cell.nbytes for cell in chosen),
                        tuple(cell.gbps[1] for cell in chosen),
                        ".--" if index else "o-",
                    )
                )
        return Plot(self.title, "bytes of the request", "GB/s of payload", tuple(lines))


TRIALS = "What a trial of each wire has measured before, and which chunks and slots follow from it."
LIMITS = (
    "Speeds are of the payload, from the request to the last byte in place; ratios are to "
    f"{SOCKETS} (blocking sendmsg and recvmsg_into of the same scattered blocks over TCP), each "
    "quantile to the same one. Only kvxfer changes layouts: the others, NIXL and "
    f"{MEMCPY} (one contiguous copy in one process) too, move as many bytes in blocks as they are. "
    f"{RAW_UCX}: tag messages of the size of kvxfer's chunks between buffers, nothing packed or "
    "unpacked: the limit of the wire ucx. CPU: the thread that asks and waits."
)
