"""A request's KV from offer to accepted through the whole connector, warm: two engines without a
model, one process and one GPU each, scheduler side and worker side as an engine drives them.

Times are the load report's own moments: "total" from the order (start_load_kv) to the last verdict,
"start" until the first Pull left, "place" until the last byte was in its place, "verdict" until the
source had said that what was read is valid. "seen" is from the first call of the step to the look
at its result. "idle": the engine's thread sleeps until there is something. "busy": it computes in
Python and looks every 0.1 ms. "both busy": a thread of the source's process does so, too.
Beside each load one contiguous memcpy of as many bytes between the GPUs, by a third process: the
limit. Between GPUs, for cuda_ipc and ucx, also "least": the same launches and messages by a loop
that knows beforehand what comes, without a connector (``least_ways``): what the calls take from
Python. Bytes are checked first, token by token. The wire is cuda_ipc, without a GPU (--device cpu)
shm, or --transport: one of kvxfer's others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from scripts.benchmarks.connector_report import Cell, Report, aim_of
from scripts.benchmarks.contenders import NUM_CHECKED
from scripts.benchmarks.devices import Devices, devices_for
from scripts.benchmarks.engines import BenchEngine, LoadTiming, start_engines
from scripts.benchmarks.members import SINK, SOURCE, Timing
from scripts.benchmarks.plain_ways import MEMCPY, PlainWays
from scripts.benchmarks.pools import LLAMA_8B, SHAPES, TINY, Request, request_of
from scripts.benchmarks.results import WIRE_PACKAGES, facts_of, quantiles
from scripts.benchmarks.workers import ContenderLost, Worker, close_all, method_for

LAYOUTS = ("HND16->HND16", "HND16->NHD64")
LENGTHS = (128, 1024, 8192, 32768)
MODES = ("idle", "busy", "both busy")
WARM_ROUNDS = 3


class Least(Protocol):
    """Moves requests between two processes, or within one. Raises ContenderLost."""

    @property
    def members(self) -> tuple[Worker, Worker]:
        """Whose memories are the source's and the sink's."""

    def run(self, request: Request) -> Timing:
        """Once."""

    def close(self) -> None:
        """End what was started for it."""


class Pair:
    """Two engines that know each other, and the processes that know the limits."""

    def __init__(
        self, devices: Devices, request: Request, limits: Worker, settings: dict[str, object]
    ) -> None:
        self.limits = limits
        self.engines = start_engines(BenchEngine, devices, request, settings)
        self.least = least_for(devices, request, limits)

    def load(self, request: Request, mode: str) -> LoadTiming:
        """Offer, load, settle. Raises ContenderLost."""
        source, sink = self.engines[SOURCE], self.engines[SINK]
        params = source.call(dict, "offer", request)
        timing = sink.call(LoadTiming, "load", request, params, mode != "idle")
        source.call(object, "settle")
        return timing

    def check(self, request: Request) -> None:
        """Poison, move, compare. Raises ContenderLost, SystemExit for wrong bytes."""
        engines = (self.engines[SOURCE], self.engines[SINK])
        check_bytes(engines, request, lambda: self.load(request, "idle"))
        if self.least is not None:
            check_bytes(self.least.members, request, partial(self.least.run, request))

    def close(self) -> None:
        """End both engines, and what is compared with them alone."""
        if self.least is not None:
            self.least.close()
        close_all(self.engines.values())


def least_for(devices: Devices, request: Request, limits: Worker) -> Least | None:
    """What such loads take without a connector, for wires of which that is known."""
    if devices.where == "cpu" or devices.wire not in ("cuda_ipc", "ucx"):
        return None
    from scripts.benchmarks.least_ucx import LeastUcx
    from scripts.benchmarks.least_ways import LeastLaunch

    return LeastLaunch(limits) if devices.wire == "cuda_ipc" else LeastUcx(devices, request)


def start_limits(devices: Devices, nbytes: int) -> Worker:
    """The process that knows them."""
    ways = PlainWays
    if devices.where != "cpu":
        from scripts.benchmarks.least_ways import LaunchWays as ways  # Triton takes a second

    return Worker("limits", ways, devices, nbytes, method=method_for(devices.sink))


def check_bytes(
    members: tuple[Worker, Worker], request: Request, move: Callable[[], object]
) -> None:
    """Of source and sink. Raises ContenderLost, SystemExit for wrong bytes."""
    source, sink = members
    sink.call(object, "poison")
    move()
    tokens = request.sampled_tokens(NUM_CHECKED)
    given = source.call(list, "digests", SOURCE, request, tokens)
    taken = sink.call(list, "digests", SINK, request, tokens)
    if given != taken:
        raise SystemExit(
            f"bench_connector: {request.name}: {sink.name}: wrong bytes; nothing was timed"
        )


def measure(pair: Pair, request: Request, mode: str, rounds: int, devices: Devices) -> Cell:
    """Loads and limits in turns."""
    pair.engines[SOURCE].call(object, "set_busy", mode == "both busy")
    timings: list[LoadTiming] = []
    limits_ms: list[float] = []
    least_ms: list[float] = []
    for number in range(rounds + WARM_ROUNDS):
        limit = pair.limits.call(Timing, "run", MEMCPY, request)
        timing = pair.load(request, mode)
        least = pair.least.run(request) if pair.least is not None else None
        if number >= WARM_ROUNDS:
            timings.append(timing)
            limits_ms.append(limit.total_s * 1e3)
            if least is not None:
                least_ms.append(least.total_s * 1e3)
    pair.engines[SOURCE].call(object, "set_busy", False)
    memcpy_ms = statistics.median(limits_ms)
    p20, p50, p80 = quantiles([timing.total_s * 1e3 for timing in timings])
    ratio, gbps = p50 / memcpy_ms, request.nbytes / p50 / 1e6

    def median_ms(name: str) -> float:
        values: list[float] = [getattr(timing, name) for timing in timings]
        return statistics.median(values) * 1e3

    return Cell(
        layouts=request.layouts,
        num_tokens=request.num_tokens,
        mode=mode,
        nbytes=request.nbytes,
        transports=timings[0].transports,
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        start_ms=median_ms("start_s"),
        place_ms=median_ms("place_s"),
        verdict_ms=median_ms("verdict_s"),
        seen_ms=median_ms("seen_s"),
        memcpy_ms=memcpy_ms,
        least_ms=statistics.median(least_ms) if least_ms else None,
        ratio=ratio,
        gbps=gbps,
        scheduler_cpu_ms=median_ms("scheduler_cpu_s"),
        worker_cpu_ms=median_ms("worker_cpu_s"),
        io_cpu_ms=median_ms("io_cpu_s"),
        other_cpu_ms=median_ms("other_cpu_s"),
        aim=aim_of(devices, request.num_tokens, mode, total_ms=p50, ratio=ratio, gbps=gbps),
    )


def cases(options: argparse.Namespace) -> Iterator[tuple[str, list[Request]]]:
    """By layouts, for each of which two engines are started."""
    pool_tokens = max(options.tokens) * 9 // 8
    for layouts in options.layouts:
        yield (
            layouts,
            [
                request_of(SHAPES[options.shape], layouts, num_tokens, pool_tokens)
                for num_tokens in options.tokens
            ],
        )


def run_pair(
    pair: Pair, requests: list[Request], options: argparse.Namespace, report: Report
) -> None:
    """All lengths and modes of one pair of engines."""
    for request, mode in product(requests, options.modes):
        if mode == options.modes[0]:
            pair.check(request)
        report.add(measure(pair, request, mode, options.rounds, report.devices))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("scripts/results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", choices=("shm", "cuda_ipc", "zmq", "ucx", "nixl"))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and cases")
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--layouts", nargs="+", metavar="HND16->NHD64")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--note", default="", help="of this machine, for the report")
    parser.add_argument("--launch-programs", type=int, help="thread blocks of a pull")
    options = parser.parse_args()
    options.shape = options.shape or (TINY if options.device == "cpu" else LLAMA_8B).name
    options.layouts = options.layouts or list(LAYOUTS[:1] if options.quick else LAYOUTS)
    options.tokens = options.tokens or list((128, 32768) if options.quick else LENGTHS)
    options.rounds = options.rounds or (9 if options.quick else 25)
    return options


def main() -> None:
    """All pairs of layouts; those whose engines fail are named in the report."""
    options = parse()
    devices = devices_for(options.device, options.transport)
    facts = facts_of(
        "scripts/bench_connector.py " + " ".join(sys.argv[1:]), ("triton", *WIRE_PACKAGES)
    )
    facts["devices"] = f"source {devices.source}, sink {devices.sink}"
    facts["load at the start"] = f"{os.getloadavg()[0]:.1f}"
    if options.note:
        facts["note"] = options.note
    report = Report(options.out, facts, devices)
    settings: dict[str, object] = {}
    if options.launch_programs and devices.wire == "cuda_ipc":
        settings["launch_programs"] = options.launch_programs
    everything = list(cases(options))
    pools = [
        pool
        for _, requests in everything
        for request in requests
        for pool in (request.source, request.sink)
    ]
    nbytes = max(pool.nbytes for pool in pools)
    limits = start_limits(devices, nbytes)
    try:
        for layouts, requests in everything:
            pair = Pair(devices, requests[0], limits, settings)
            try:
                run_pair(pair, requests, options, report)
            except ContenderLost as exc:
                print(f"lost: {layouts}: {exc}")
                report.lost.append((layouts, str(exc)))
            finally:
                pair.close()
    finally:
        report.write(is_last=True)
        limits.close()


if __name__ == "__main__":
    main()
