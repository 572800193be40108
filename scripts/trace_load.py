"""Where the time of one load goes: the calls of both engines, on one clock.

Two engines without a model, as in `kvxfer bench connector`, of which every call of connector, wires
and copies is noted. That makes a load longer: what a call takes beside the others is what to read,
not how long it all is. Microseconds count from the moment at
which the sink's engine asks for the load.

    scripts/trace_load.py --transport zmq             a load of engines that know each other
    scripts/trace_load.py --first --least-us 300      the first one: contact, trial, load
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.bench.core import ContenderLost
from kvxfer.bench.engines import BenchEngine, LoadTiming, start_engines
from kvxfer.bench.members import SINK, SOURCE, Devices, devices_for
from kvxfer.bench.pools import LLAMA_8B, SHAPES, TINY, Pool, Request, request_of
from kvxfer.bench.workers import Worker, close_all
from kvxfer.config import OWN_TRANSPORTS
from scripts.benchmarks.call_trace import Call, CallTrace

PACKAGES = ("kvxfer.connector", "kvxfer.transports", "kvxfer.transfer", "kvxfer.tensors")
WARM_LOADS = 5
BEFORE_S = 1e-3
"""What the other side did shortly before belongs to it."""


class TracedEngine(BenchEngine):
    """One whose calls are kept while it is asked to."""

    def __init__(
        self, side: str, devices: Devices, pool: Pool, settings: dict[str, object]
    ) -> None:
        self._trace = CallTrace(PACKAGES)
        super().__init__(side, devices, pool, settings)

    def start_trace(self) -> float:
        """From now on; returns the time."""
        self._trace.start()
        return time.perf_counter()

    def stop_trace(self) -> list[Call]:
        return self._trace.stop()


def trace(
    engines: dict[str, Worker], request: Request, num_before: int
) -> tuple[LoadTiming, float, dict[str, list[Call]]]:
    """The last of ``num_before`` loads and one more; when it began, and the calls of each side."""
    source, sink = engines[SOURCE], engines[SINK]
    for number in range(num_before + 1):
        is_last = number == num_before
        params = source.call(dict, "offer", request)
        if is_last:
            source.call(float, "start_trace")
            began_s = sink.call(float, "start_trace")
        timing = sink.call(LoadTiming, "load", request, params, False)
        calls = {
            side: engine.call(list, "stop_trace") if is_last else []
            for side, engine in engines.items()
        }
        source.call(object, "settle")
    return timing, began_s, calls


def show(side: str, calls: list[Call], began_s: float, least_us: float) -> None:
    """Those that belong to the load, and take long enough."""
    print(f"-- {side}: start and duration in us, thread, call")
    for call in calls:
        if call.took_s * 1e6 >= least_us and call.ended_s >= began_s - BEFORE_S:
            print(call.line(began_s))


def parse() -> argparse.Namespace:
    shown = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", choices=OWN_TRANSPORTS)
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--layouts", default="HND16->NHD64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--first", action="store_true", help="the load of engines that have not met"
    )
    parser.add_argument("--least-us", type=float, default=10.0, help="shorter calls are not shown")
    return parser.parse_args()


def main() -> None:
    options = parse()
    is_auto = options.transport == "auto"
    devices = devices_for(options.device, None if is_auto else options.transport)
    shape = SHAPES[options.shape or (TINY if options.device == "cpu" else LLAMA_8B).name]
    request = request_of(shape, options.layouts, options.tokens, options.tokens * 9 // 8)
    settings: dict[str, object] = {"transport": "auto"} if is_auto else {}
    engines = start_engines(TracedEngine, devices, request, settings)
    try:
        timing, began_s, calls = trace(engines, request, 0 if options.first else WARM_LOADS)
    except ContenderLost as exc:
        raise SystemExit(f"trace_load: {exc}") from exc
    finally:
        close_all(engines.values())
    for side in (SINK, SOURCE):
        show(side, calls[side], began_s, options.least_us)
    print(
        f"{request.num_tokens} tokens over {', '.join(timing.transports)}, "
        f"{request.nbytes / 1e6:.1f} MB: {timing.total_s * 1e3:.3f} ms (start "
        f"{timing.start_s * 1e3:.3f}, place {timing.place_s * 1e3:.3f}, verdict "
        f"{timing.verdict_s * 1e3:.3f})"
    )


if __name__ == "__main__":
    main()
