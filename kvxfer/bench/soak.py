"""Many small transfers over one wire between two processes, and what these hold
before and after.

What a process holds is looked at after a warm-up (first connections, caches and
pools of the libraries) and after each quarter. Whatever is kept for a transfer
would show: over 100,000 transfers 10 bytes each are a megabyte.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.bench.contenders import LIBRARIES, is_installed
from kvxfer.bench.core import WIRE_PACKAGES, Columns, ContenderLost, Report, Table, table, tell_lost
from kvxfer.bench.frame import Benchmark, Session, option
from kvxfer.bench.members import SINK, SOURCE, Devices, Usage
from kvxfer.bench.pools import TINY, Request, request_of
from kvxfer.bench.transfer import WIRES
from kvxfer.bench.wires import Giving, Taking, wire_config
from kvxfer.bench.workers import FORK_SERVER, Worker, close_all
from kvxfer.transfer.manifest import RankManifest

WARM_TRANSFERS = 1500
"""Then pools of the libraries have the size that they keep."""
_QUARTERS = 4
MOST_GROWTH_NBYTES = 256 << 10
"""Of resident memory. Up to 32 KiB were seen by themselves, in 100,000 transfers over UCX: which
pages the allocator can give back differs. 100,000 transfers that leave 3 bytes each are more, and
so are 2000 that leave the smallest record that a wire has of one."""
_STEP_S = 600.0


class Soak:
    """Two processes that are connected by one wire. Raises ContenderLost, as all its methods do."""

    def __init__(self, wire: str, *, num_tokens: int = 16) -> None:
        self.request: Request = request_of(TINY, "HND16->NHD64", num_tokens, 4 * num_tokens)
        nbytes = max(self.request.source.nbytes, self.request.sink.nbytes)
        given = Devices("cpu", "cpu", wire), nbytes
        config = wire_config(wire, staging_slots=4, chunk_nbytes=64 << 10)
        self._workers = {
            side: Worker(f"{wire}, {side}", make, *given, config, method=FORK_SERVER)
            for side, make in ((SOURCE, Giving), (SINK, Taking))
        }
        try:
            source, sink = self._workers[SOURCE], self._workers[SINK]
            manifest = source.call(RankManifest, "manifest")
            sink.call(str, "meet", manifest, source.call(tuple, "address"), self.request)
        except BaseException:
            self.close()
            raise

    def transfer(self, count: int) -> float:
        sink = self._workers[SINK]
        return sink.call(float, "many", self.request, count, timeout_s=_STEP_S)

    def reattach(self, times: int) -> None:
        """Leave and come back, with one transfer each time."""
        self._workers[SINK].call(object, "reattach", self.request, times, timeout_s=_STEP_S)

    def usages(self) -> dict[str, Usage]:
        return {side: worker.call(Usage, "usage") for side, worker in self._workers.items()}

    def close(self) -> None:
        close_all(self._workers.values())


@dataclass(frozen=True, slots=True)
class Held:
    """One process: after the warm-up, and after each quarter of the transfers. ``duration_s``: of
    all of them.
    """

    wire: str
    num_transfers: int
    nbytes: int
    duration_s: float
    side: str
    usages: tuple[Usage, ...]

    def leaks(self) -> list[str]:
        first, last = self.usages[0], self.usages[-1]
        found = []
        grown_nbytes = last.rss_nbytes - first.rss_nbytes
        if grown_nbytes > MOST_GROWTH_NBYTES:
            found.append(f"{self.side}: resident memory grew by {grown_nbytes} bytes")
        if last.num_threads != first.num_threads:
            found.append(f"{self.side}: {first.num_threads} threads became {last.num_threads}")
        if last.num_descriptors != first.num_descriptors:
            descriptors = f"{first.num_descriptors} descriptors became {last.num_descriptors}"
            found.append(f"{self.side}: {descriptors}")
        return found


def soak(wire: str, num_transfers: int, *, warm: int = WARM_TRANSFERS) -> list[Held]:
    """So many, after the warm-up; both processes. Raises ContenderLost."""
    if not is_installed(wire):
        raise ContenderLost(f"{LIBRARIES[wire]} is not installed")
    pair = Soak(wire)
    try:
        pair.transfer(warm)
        looks = [pair.usages()]
        duration_s, done = 0.0, 0
        for quarter in range(1, _QUARTERS + 1):
            upto = num_transfers * quarter // _QUARTERS
            duration_s += pair.transfer(upto - done)
            done = upto
            looks.append(pair.usages())
    finally:
        pair.close()
    known = wire, num_transfers, pair.request.nbytes, duration_s
    return [Held(*known, side, tuple(look[side] for look in looks)) for side in (SOURCE, SINK)]


TEXT = (
    f"After {WARM_TRANSFERS} transfers of warm-up; memory is resident memory in KiB, the first "
    "look, then what each quarter has added to it, after a garbage collection and malloc_trim "
    f"each. Allowed in all: {MOST_GROWTH_NBYTES >> 10} KiB, and not one thread or descriptor more."
)


def _added(quarter: int) -> Callable[[Held], str]:
    def text(held: Held) -> str:
        earlier, later = held.usages[quarter - 1 : quarter + 1]
        return f"{(later.rss_nbytes - earlier.rss_nbytes) / 1024:+g}"

    return text


def _became(name: str) -> Callable[[Held], str]:
    def text(held: Held) -> str:
        first, *_, last = (getattr(usage, name) for usage in held.usages)
        return f"{first} -> {last}"

    return text


COLUMNS: Columns[Held] = {
    "wire": lambda held: held.wire,
    "process": lambda held: held.side,
    "transfers": lambda held: str(held.num_transfers),
    "bytes each": lambda held: str(held.nbytes),
    "ms each": lambda held: f"{held.duration_s / held.num_transfers * 1e3:.3f}",
    "memory KiB": lambda held: str(held.usages[0].rss_nbytes >> 10),
    **{name: _added(number) for number, name in enumerate(("1st", "2nd", "3rd", "4th quarter"), 1)},
    "threads": _became("num_threads"),
    "descriptors": _became("num_descriptors"),
    "leaks": lambda held: "; ".join(held.leaks()) or "none",
}


def tables(report: Report) -> list[Table]:
    return [table("what is left", TEXT, COLUMNS, report.records["soaked"])]


def run(session: Session, options: argparse.Namespace) -> int:
    """What is left behind; 1 if something leaked."""
    report = session.report(
        *("soak_cpu", "Many small transfers between two processes", tables),
        packages=WIRE_PACKAGES,
    )
    soaked: list[Held] = []
    report.records["soaked"] = soaked
    session.progress.plan(len(options.transport))
    for wire in options.transport:
        try:
            found = soak(wire, options.transfers)
        except ContenderLost as exc:
            report.lost[wire] = str(exc)
            tell_lost(wire, exc)
        else:
            report.begin(f"{wire}: {options.transfers} transfers", ("process", "ms each", "leaks"))
            for held in found:
                report.add(COLUMNS, held, "soaked")
        report.write()
        session.progress.step()
    return int(any(held.leaks() for held in soaked))


BENCHMARK = Benchmark(
    (
        option("--transport", list(WIRES), nargs="+", choices=WIRES, help="some of the wires"),
        option("--transfers", 100_000, 4_000, type=int, help="of each wire, after the warm-up"),
    ),
    run,
)
