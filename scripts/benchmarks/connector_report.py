"""What the benchmark of the connector has found, and the report of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.benchmarks.devices import Devices
from scripts.benchmarks.results import Line, Plot, Table, today, write_report

SHORT_TOKENS, MIDDLE_TOKENS, LONG_TOKENS = 128, 8192, 32768
SHORT_AIMS_MS = {
    ("cuda_ipc", "idle"): 0.3,
    ("cuda_ipc", "busy"): 0.5,
    ("ucx", "idle"): 0.4,
    ("zmq", "idle"): 2.0,
}
"""By wire and mode; of zmq in host memory, of the others between GPUs."""
LONG_AIM = 1.15
"""Times memcpy, of cuda_ipc."""
MIDDLE_AIM_GBPS = 250.0
"""Of ucx between GPUs, where an 8B model has 1 GiB."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One case; ms, medians unless the name says otherwise. ``ratio``: total to memcpy.
    ``least_ms``: without a connector, where that is known.
    """

    layouts: str
    num_tokens: int
    mode: str
    nbytes: int
    transports: tuple[str, ...]
    p20_ms: float
    p50_ms: float
    p80_ms: float
    start_ms: float
    place_ms: float
    verdict_ms: float
    seen_ms: float
    memcpy_ms: float
    least_ms: float | None
    ratio: float
    gbps: float
    scheduler_cpu_ms: float
    worker_cpu_ms: float
    io_cpu_ms: float
    other_cpu_ms: float
    aim: str


def aim_of(
    devices: Devices, num_tokens: int, mode: str, *, total_ms: float, ratio: float, gbps: float
) -> str:
    """What we want of a wire there, and whether it was met."""
    if (devices.wire == "zmq") != (devices.where == "cpu"):
        return ""
    most_ms = SHORT_AIMS_MS.get((devices.wire, mode))
    if num_tokens == SHORT_TOKENS and most_ms is not None:
        return f"{most_ms} ms {'met' if total_ms <= most_ms else 'MISSED'}"
    if num_tokens == MIDDLE_TOKENS and (devices.wire, mode) == ("ucx", "idle"):
        return f"{MIDDLE_AIM_GBPS:g} GB/s {'met' if gbps >= MIDDLE_AIM_GBPS else 'MISSED'}"
    if num_tokens == LONG_TOKENS and (devices.wire, mode) == ("cuda_ipc", "idle"):
        return f"{LONG_AIM} x memcpy {'met' if ratio <= LONG_AIM else 'MISSED'}"
    return ""


@dataclass(slots=True)
class Report:
    """Written after each case, so that a run cut short leaves something."""

    out: Path
    facts: dict[str, str]
    devices: Devices
    cells: list[Cell] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    date: str = field(default_factory=today)

    def add(self, cell: Cell) -> None:
        """One more case."""
        self.cells.append(cell)
        print(
            f"{cell.layouts} {cell.num_tokens:6} tokens, {cell.mode:9} {cell.p50_ms:8.3f} ms "
            f"(start {cell.start_ms:.3f}, place {cell.place_ms:.3f}, verdict {cell.verdict_ms:.3f})"
            f" seen {cell.seen_ms:.3f}, memcpy {cell.memcpy_ms:.3f}, "
            f"least {_ms_text(cell.least_ms)} {cell.aim}",
            flush=True,
        )
        self.write()

    def write(self, *, is_last: bool = False) -> None:
        """All that there is; the plot, which takes a second, at the end."""
        where = self.devices.where
        write_report(
            self.out,
            f"connector_{self.devices.wire}_{where}_{self.date}",
            f"Offer to accepted through the connector, {self.devices.wire}, {where}, {self.date}",
            self.facts,
            self._tables(),
            {"cells": [asdict(cell) for cell in self.cells], "lost": dict(self.lost)},
            plot=self._plot() if is_last else None,
        )

    def _tables(self) -> list[Table]:
        times = Table(
            "times",
            "Total is from the order to the last verdict; start, place and verdict are its parts, "
            "medians each; the ratio is total to memcpy. Least: the same launches and messages "
            "by a loop that knows beforehand what comes, without a connector.",
            (
                *("layouts", "tokens", "mode", "MB", "p20 ms", "p50 ms", "p80 ms", "start"),
                *("place", "verdict", "seen", "memcpy ms", "least ms", "ratio", "GB/s", "aim"),
            ),
            tuple(
                (
                    *(cell.layouts, str(cell.num_tokens), cell.mode, f"{cell.nbytes / 1e6:.1f}"),
                    *(f"{ms:.3f}" for ms in (cell.p20_ms, cell.p50_ms, cell.p80_ms)),
                    *(f"{ms:.3f}" for ms in (cell.start_ms, cell.place_ms, cell.verdict_ms)),
                    *(f"{cell.seen_ms:.3f}", f"{cell.memcpy_ms:.3f}", _ms_text(cell.least_ms)),
                    *(f"{cell.ratio:.2f}", f"{cell.gbps:.1f}", cell.aim),
                )
                for cell in self.cells
            ),
        )
        cpu = Table(
            "processor time of a request at the sink, ms",
            "Engine's thread: in the scheduler's calls, and in the worker's until the result was "
            "seen (an idle engine; a busy one computes meanwhile).",
            ("layouts", "tokens", "scheduler's calls", "worker's calls", "IO thread", "others"),
            tuple(
                (
                    *(cell.layouts, str(cell.num_tokens)),
                    *(f"{ms:.3f}" for ms in (cell.scheduler_cpu_ms, cell.worker_cpu_ms)),
                    *(f"{ms:.3f}" for ms in (cell.io_cpu_ms, cell.other_cpu_ms)),
                )
                for cell in self.cells
                if cell.mode == "idle"
            ),
        )
        return [times, cpu, Table("not measured", "", ("case", "why"), tuple(self.lost))]

    def _plot(self) -> Plot:
        names = list(dict.fromkeys((cell.layouts, cell.mode) for cell in self.cells))
        of_name = {name: [c for c in self.cells if (c.layouts, c.mode) == name] for name in names}
        lines = [
            Line(", ".join(name), tuple(c.nbytes for c in cells), tuple(c.p50_ms for c in cells))
            for name, cells in of_name.items()
        ]
        first = of_name[names[0]] if names else []
        limits: dict[str, list[tuple[int, float]]] = {
            "memcpy": [(cell.nbytes, cell.memcpy_ms) for cell in first],
            "least": [(cell.nbytes, cell.least_ms) for cell in first if cell.least_ms is not None],
        }
        lines += [
            Line(name, tuple(x for x, _ in points), tuple(y for _, y in points), "--")
            for name, points in limits.items()
            if points
        ]
        return Plot("offer to accepted", "bytes of the request", "ms", tuple(lines))


def _ms_text(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}"
