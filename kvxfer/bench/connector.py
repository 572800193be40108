"""A request's KV from offer to accepted through the whole connector, warm: two
engines without a model, one process and one GPU each, scheduler side and worker
side as an engine drives them.

Times are the load report's own moments: from the order (start_load_kv) to the
last verdict; "start" until the first Pull left, "place" until the last byte was
in its place, "verdict" until the source had said that what was read is valid.
"seen" is from the first call of the step to the look at its result. "idle": the
engine's thread sleeps until there is something. "busy": it computes in Python
and looks every 0.1 ms. In turns with the loads one contiguous memcpy of as many bytes between the
GPUs, by a third process: the limit. Bytes are checked first, token by token. The
wire is cuda_ipc, without a GPU shm, or --transport: one of kvxfer's others.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kvxfer.bench import core
from kvxfer.bench.contenders import check_bytes
from kvxfer.bench.engines import BenchEngine, LoadTiming, start_engines
from kvxfer.bench.frame import Benchmark, Session, cases, option
from kvxfer.bench.members import GPU_OPTIONS, SINK, SOURCE, Devices, devices_for
from kvxfer.bench.plain_ways import MEMCPY, PlainCopy
from kvxfer.bench.plots import Plot, line, plot_of
from kvxfer.bench.pools import LLAMA_8B, TINY, Request
from kvxfer.bench.transfer_report import case_of, pool_nbytes, requests_of
from kvxfer.bench.workers import Worker, close_all, method_for
from kvxfer.connector.verifier import EVERY

_MODES = ("idle", "busy")
WARM_ROUNDS = 3
SHORT_TOKENS, MIDDLE_TOKENS, LONG_TOKENS = 128, 8192, 32768
_SHORT_AIMS_MS = {
    ("cuda_ipc", "idle"): 0.3,
    ("cuda_ipc", "busy"): 0.5,
    ("ucx", "idle"): 0.4,
    ("zmq", "idle"): 2.0,
}
"""By wire and mode; of zmq in host memory, of the others between GPUs."""
_LONG_AIM = 0.87
"""Of memcpy, of cuda_ipc."""
_MIDDLE_AIM_GBPS = 250.0
"""Of ucx between GPUs, where an 8B model has 1 GiB."""


def aim_of(devices: Devices, mode: str, cell: core.Cell) -> str:
    """What we want of a wire there, and whether it was met."""
    if (devices.wire == "zmq") != (devices.where == "cpu"):
        return ""
    most_ms = _SHORT_AIMS_MS.get((devices.wire, mode))
    match cell.num_tokens, devices.wire, mode:
        case (num_tokens, _, _) if num_tokens == SHORT_TOKENS and most_ms is not None:
            return core.goal_text(-cell.p50_ms, -most_ms, f"{most_ms} ms")
        case (num_tokens, "ucx", "idle") if num_tokens == MIDDLE_TOKENS:
            return core.goal_text(cell.gbps[1], _MIDDLE_AIM_GBPS, "{:g} GB/s")
        case (num_tokens, "cuda_ipc", "idle") if num_tokens == LONG_TOKENS:
            return core.goal_text(cell.ratio, _LONG_AIM, "{:g} of memcpy")
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCell(core.Cell):
    """Loads of one case. ``ms``: medians of their times, by the name in LoadTiming. ``cost``: of
    being verified, to the same load that is not.
    """

    verify: str
    mode: str
    transports: tuple[str, ...]
    ms: Mapping[str, float]
    memcpy_ms: float
    cost: float | None


def _median(name: str) -> Callable[[LoadCell], str]:
    return lambda cell: f"{cell.ms[name]:.3f}"


CASE: core.Columns[LoadCell] = {
    "shape": lambda cell: cell.case.split()[0],
    "layouts": lambda cell: cell.layouts,
    "tokens": lambda cell: str(cell.num_tokens),
}
TIMES: core.Columns[LoadCell] = {
    **CASE,
    "mode": lambda cell: cell.mode,
    "verify": lambda cell: cell.verify,
    **{name: core.CELL[name] for name in ("MB", "p20 ms", "p50 ms", "p80 ms")},
    "start": _median("start_s"),
    "place": _median("place_s"),
    "verdict": _median("verdict_s"),
    "seen": _median("seen_s"),
    "memcpy ms": lambda cell: f"{cell.memcpy_ms:.3f}",
    "ratio": core.CELL["ratio"],
    "GB/s": core.CELL["GB/s"],
    "cost": lambda cell: "" if cell.cost is None else f"{cell.cost:+.1%}",
    "aim": core.CELL["aim"],
}
CPU: core.Columns[LoadCell] = {
    **CASE,
    "scheduler's calls": _median("scheduler_cpu_s"),
    "worker's calls": _median("worker_cpu_s"),
    "IO thread": _median("io_cpu_s"),
    "others": _median("other_cpu_s"),
}
SHOWN = ("mode", "verify", "p50 ms", "GB/s", "memcpy ms", "cost")
_TIMES_TEXT = (
    "From the order to the last verdict; start, place and verdict are its parts, medians each; the "
    "ratio is of its speed to memcpy, the cost the median of each verified load to the one of the "
    "same turn that is not."
)
_CPU_TEXT = (
    "Engine's thread: in the scheduler's calls, and in the worker's until the result was seen (an "
    "idle engine; a busy one computes meanwhile)."
)


def tables(report: core.Report) -> list[core.Table]:
    """Times of all cases, processor time of idle engines."""
    cells: list[LoadCell] = report.records.get("cells", [])
    idle = [cell for cell in cells if cell.mode == "idle"]
    title = "processor time of a request at the sink, ms"
    return [core.table("times", _TIMES_TEXT, TIMES, cells), core.table(title, _CPU_TEXT, CPU, idle)]


def plot(report: core.Report) -> Plot | None:
    """ms by bytes, and the limits of the first layouts. All shapes are on one line."""
    of_name: dict[str, list[LoadCell]] = {}
    for cell in sorted(report.records.get("cells", []), key=lambda cell: cell.nbytes):
        of_name.setdefault(f"{cell.layouts}, {cell.way}", []).append(cell)
    first = next(iter(of_name.values()), [])
    lines = [
        line(MEMCPY, first, lambda cell: (cell.nbytes, cell.memcpy_ms), is_limit=True),
        *(
            line(name, cells, lambda cell: (cell.nbytes, cell.p50_ms))
            for name, cells in of_name.items()
        ),
    ]
    return plot_of(report.title, "bytes of the request", "ms", lines)


# ------------------------------------------------------------------ the engines and their limits


class Pair:
    """Two engines that know each other, once for each setting of ``verify``, and the process that
    knows the limit.
    """

    def __init__(
        self,
        devices: Devices,
        request: Request,
        limits: Worker,
        settings: dict[str, object],
        verifies: Sequence[str],
    ) -> None:
        self._devices, self._limits = devices, limits
        self.engines = {
            verify: start_engines(BenchEngine, devices, request, {**settings, "verify": verify})
            for verify in verifies
        }

    def load(self, request: Request, mode: str, verify: str) -> LoadTiming:
        """Offer, load, settle. Raises ContenderLost."""
        source, sink = self.engines[verify][SOURCE], self.engines[verify][SINK]
        params = source.call(dict, "offer", request)
        timing = sink.call(LoadTiming, "load", request, params, mode != "idle")
        source.call(object, "settle")
        return timing

    def check(self, request: Request) -> None:
        """Raises ContenderLost, SystemExit for wrong bytes."""
        try:
            for verify, engines in self.engines.items():
                move = partial(self.load, request, "idle", verify)
                check_bytes(engines[SOURCE], engines[SINK], request, move)
        except core.WrongBytes as exc:
            raise SystemExit(f"bench connector: {exc}; nothing was timed") from exc

    def measure(self, request: Request, mode: str, rounds: int) -> list[LoadCell]:
        """Loads and limits in turns. Raises ContenderLost."""
        loads = {verify: partial(self.load, request, mode, verify) for verify in self.engines}
        limit = partial(self._limits.call, core.Timing, "run", MEMCPY, request)
        runs: dict[str, core.Run] = {MEMCPY: limit, **loads}
        taken = core.measure(runs, rounds, warm_rounds=WARM_ROUNDS)
        return [_cell_of(self._devices, request, mode, verify, taken) for verify in loads]

    def close(self) -> None:
        close_all([each for engines in self.engines.values() for each in engines.values()])


def _cell_of(
    devices: Devices,
    request: Request,
    mode: str,
    verify: str,
    taken: Mapping[str, Sequence[core.Timing]],
) -> LoadCell:
    loads = [each for each in taken[verify] if isinstance(each, LoadTiming)]
    plain = taken.get("off", ()) if verify != "off" else ()
    costs = [load.total_s / off.total_s - 1 for load, off in zip(loads, plain, strict=False)]
    way = mode if verify == "off" else f"{mode}, {verify} verified"
    cell = core.cell_of(case_of(request), way, loads, taken[MEMCPY])
    parts = ("start_s", "place_s", "verdict_s", "seen_s")
    cpu = ("scheduler_cpu_s", "worker_cpu_s", "io_cpu_s", "other_cpu_s")
    return LoadCell(
        **{**asdict(cell), "aim": aim_of(devices, mode, cell)},
        verify=verify,
        mode=mode,
        transports=loads[0].transports,
        ms={
            name: statistics.median(getattr(load, name) for load in loads) * 1e3
            for name in (*parts, *cpu)
        },
        memcpy_ms=statistics.median(limit.total_s for limit in taken[MEMCPY]) * 1e3,
        cost=statistics.median(costs) if costs else None,
    )


def run(session: Session, options: argparse.Namespace) -> int:
    """All pairs of pools; those whose engines fail are named in the report."""
    has_gpu = torch.cuda.is_available() and options.transport != "shm"
    device = options.device or ("cuda" if has_gpu else "cpu")
    devices = devices_for(device, options.transport)
    options.shapes = options.shapes or [(TINY if device == "cpu" else LLAMA_8B).name]
    report = session.report(
        f"connector_{devices.wire}_{devices.where}",
        f"Offer to accepted through the connector, {devices.wire}, {devices.where}",
        tables,
        plot,
        ("triton", *core.WIRE_PACKAGES),
        devices=f"source {devices.source}, sink {devices.sink}",
    )
    settings: dict[str, object] = {}
    if options.launch_programs and devices.wire == "cuda_ipc":
        settings["launch_programs"] = options.launch_programs
    everything = requests_of(options)
    session.progress.plan(len(everything))
    limits = Worker(
        *(MEMCPY, PlainCopy, devices, pool_nbytes(everything)), method=method_for(devices.sink)
    )
    try:
        for name, requests in _by_pools(everything).items():
            pair = Pair(devices, requests[0], limits, settings, options.verify)
            try:
                for request in requests:
                    _run_request(pair, request, options, report)
                    session.progress.step()
            except core.ContenderLost as exc:
                core.tell_lost(name, exc)
                report.lost[name] = str(exc)
            finally:
                pair.close()
    finally:
        report.write(is_last=True)
        limits.close()
    return 0


def _by_pools(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """By shape and layouts: what two engines with such pools can move."""
    found: dict[str, list[Request]] = {}
    for request in requests:
        found.setdefault(f"{request.shape.name} {request.layouts}", []).append(request)
    return found


def _run_request(
    pair: Pair, request: Request, options: argparse.Namespace, report: core.Report
) -> None:
    """In all modes. Raises ContenderLost."""
    report.begin(f"{request.name}, {request.nbytes / 1e6:.1f} MB", SHOWN)
    pair.check(request)
    for mode in options.modes:
        for cell in pair.measure(request, mode, options.rounds):
            report.add(TIMES, cell)
        report.write()


BENCHMARK = Benchmark(
    (
        *cases(
            layouts=(["HND16->HND16", "HND16->NHD64"], ["HND16->HND16"]),
            tokens=([128, 1024, 8192, 32768], [128, 32768]),
            rounds=(25, 9),
        ),
        option("--device", choices=("cuda", "cpu"), help="where KV lies; default: a GPU if any"),
        option(
            "--transport", choices=("shm", "cuda_ipc", "zmq", "tcp", "ucx", "nixl"), help="the wire"
        ),
        option(
            "--verify",
            ["off"],
            nargs="+",
            choices=("off", *EVERY),
            help="settings of it, measured in turns",
        ),
        option("--modes", list(_MODES), nargs="+", choices=_MODES, help="what the engine does"),
        GPU_OPTIONS[1],
    ),  # fmt: skip
    run,
)
