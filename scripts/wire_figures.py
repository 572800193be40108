"""Collect what each wire was measured at, from the committed results, for ``kvxfer plan``.

Latency and rate of a wire are those with which the product's own cost model comes nearest to all of
its median times: the largest ratio between a measured time and the model's is as small as can be.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.config import Config
from kvxfer.plan.transfer_plan import STREAMS, WireFigures
from kvxfer.transfer.costs import REFERENCE_TOKENS, StagingBounds, WireCosts, Workload, plan_staging
from kvxfer.transports.parallel import streams_on
from kvxfer.transports.pipe import chunk_s, staging_bounds

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
TARGET = ROOT / "kvxfer" / "plan" / "wire_figures.json"
TOKEN_NBYTES = 128 << 10
"""Of the 8B geometry of all these results."""
WORKLOAD = Workload(REFERENCE_TOKENS * TOKEN_NBYTES, 16 * 2 * 128 * 8)
LEAST_LATENCY_S = 1e-4
"""Trials of stream wires in these results were answered after 128 us and more. What a chunk costs
can hide all of a latency: without a bound that of ``tcp`` comes out as nothing.
"""

Times = list[tuple[int, float]]
"""(bytes, seconds)."""


def collect() -> tuple[WireFigures, ...]:
    """All wires, those of host memory first."""
    return tuple(_all_figures())


def _all_figures() -> Iterator[WireFigures]:
    host = _newest("transfer_host_*.json")
    ways = (("shm", (1,)), ("zmq", (1,)), ("zmq-tcp", (2,)), ("ucx", (1, 2)), ("nixl", (1, 2)))
    for way, hosts in ways:
        yield from _figures(way.removesuffix("-tcp"), "cpu", hosts, host, {"way": f"kvxfer {way}"})
    streams = _newest("streams_2x_*.json")
    number = streams_on(_num_cores(streams))
    for way in ("zmq-tcp", "tcp"):
        wire, wanted = way.removesuffix("-tcp"), {"way": f"kvxfer {way} x{number}"}
        yield from _figures(wire, "cuda", (1, 2), streams, wanted, number)
    runs = (("cuda_ipc", "2x", (1,)), ("ucx", "peer", (1, 2)), ("nixl", "peer", (1, 2)))
    for wire, where, hosts in runs:
        file = _newest(f"connector_{wire}_{where}_*.json")
        yield from _figures(wire, "cuda", hosts, file, {"mode": "idle"})


def _newest(pattern: str) -> Path:
    return max(RESULTS.glob(pattern))


def _num_cores(file: Path) -> int:
    """Of the machine, which both ends share."""
    return int(json.loads(file.read_text())["facts"]["CPUs"].split()[-1])


def times_of(file: Path, wanted: dict[str, str]) -> Times:
    """The medians of the cells that have all these values."""
    cells = json.loads(file.read_text())["cells"]
    chosen = [cell for cell in cells if wanted.items() <= cell.items()]
    return [(cell["nbytes"], cell["p50_ms"] / 1e3) for cell in chosen]


def _copied_per_s(file: Path) -> float:
    """Of a plain copy in the same run, or between the same GPUs."""
    cells = json.loads(file.read_text())["cells"]
    copies = [(each["nbytes"], each["memcpy_ms"]) for each in cells if "memcpy_ms" in each]
    copies += [(each["nbytes"], each["p50_ms"]) for each in cells if each.get("way") == "memcpy"]
    rates: list[float] = [nbytes / took_ms * 1e3 for nbytes, took_ms in copies]
    return max(rates) if rates else _copied_per_s(_newest("transfer_peer_*.json"))


def bounds_of(wire: str, device: str, num_streams: int) -> StagingBounds | None:
    """Of a stream wire's staging; None for a direct wire."""
    if (pipe := STREAMS.get(wire)) is None:
        return None
    return staging_bounds(Config(), pipe, {device}, num_streams)


def _figures(
    wire: str,
    device: str,
    hosts: tuple[int, ...],
    file: Path,
    wanted: dict[str, str],
    num_streams: int = 1,
) -> Iterator[WireFigures]:
    facts, bounds = json.loads(file.read_text())["facts"], bounds_of(wire, device, num_streams)
    message_s = chunk_s({device}) if bounds else 0.0
    times = times_of(file, wanted)
    latency_s, bytes_per_s, most_off = _fit(times, _copied_per_s(file), message_s, bounds)
    for num_hosts in hosts:
        yield WireFigures(
            wire=wire,
            device=device,
            num_hosts=num_hosts,
            num_streams=num_streams,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            most_off=most_off,
            hardware=facts.get("GPU") or f"{_num_cores(file)} CPU cores",
            date=re.findall(r"\d{4}-\d{2}-\d{2}", file.name)[0],
            results=f"scripts/results/{file.name}",
        )


def predicted_s(costs: WireCosts, nbytes: int, bounds: StagingBounds | None) -> float:
    """By the product: with the staging that it would choose."""
    if bounds is None:
        return costs.direct_s(nbytes)
    staging = plan_staging(costs, WORKLOAD, bounds)
    return costs.stream_s(nbytes, staging.chunk_nbytes(costs, nbytes))


def _fit(
    times: Times, most_per_s: float, message_s: float, bounds: StagingBounds | None
) -> tuple[float, float, float]:
    """Latency, rate and the ratio that is left, by a grid that gets finer around its best point. No
    wire is taken for faster than a plain copy of the same bytes.
    """
    latency, rate, width = math.log(LEAST_LATENCY_S), math.log(most_per_s), math.log(1e3)

    def costs(latency_s: float, bytes_per_s: float) -> WireCosts:
        return WireCosts(max(latency_s, LEAST_LATENCY_S), message_s, min(bytes_per_s, most_per_s))

    def off(costs: WireCosts) -> float:
        predicted = [(predicted_s(costs, nbytes, bounds), took_s) for nbytes, took_s in times]
        return max(abs(math.log(said_s / took_s)) for said_s, took_s in predicted)

    for _ in range(20):
        steps = [width * step / 10 for step in range(-10, 11)]
        points = [(latency + a, rate + b) for a in steps for b in steps]
        latency, rate = min(points, key=lambda point: off(costs(*map(math.exp, point))))
        width /= 1.5
    best = costs(math.exp(latency), math.exp(rate))
    latency_s, bytes_per_s = float(f"{best.latency_s:.3g}"), float(f"{best.bytes_per_s:.3g}")
    return latency_s, bytes_per_s, round(math.exp(off(costs(latency_s, bytes_per_s))), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with what is there")
    rows = b",\n".join(msgspec.json.encode(each) for each in collect())
    text = b"[\n" + rows + b"\n]\n"
    if not parser.parse_args().check:
        TARGET.write_bytes(text)
    elif TARGET.read_bytes() != text:
        raise SystemExit(f"{TARGET}: expected what the results give, got other figures")


if __name__ == "__main__":
    main()
