"""Scattered KV between two GPUs, one process on each: the wire ``cuda_ipc``, from the submitted
read to the report that it is done, beside the limits of the hardware and the usual ways.

    memcpy                one contiguous copy of as many bytes from the other GPU: the limit
    local memcpy, memset  the same on the sink's GPU alone
    torch                 index_select, permute, copy to the other GPU, index_copy_, by region
    cudaMemcpyBatchAsync  blocks as they are, in one call whose arrays were made before
    NIXL                  1.5.1, blocks as they are, prepared descriptor lists, three settings

Bytes are checked before anything is timed, token by token and not by the code under test; who
copies wrong bytes is out, and the run ends with 1. Contenders take turns, each after the caches of
its GPU were cleared. Times are the wall clock's, of the process that begins the copy, until its
last byte is in place; "post" is until the call that asked for it returned, "CPU" the processor time
of the thread that asked and waited. The last section is a matrix loop on the sink's GPU while pulls
follow each other. Without a GPU: --device cpu, which is the wire shm, for a look at this program.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

from scripts.benchmarks.contenders import BUDGET_S, Contenders, measure
from scripts.benchmarks.device_report import EQUAL, Report, cells_of, ratio_text, verdict
from scripts.benchmarks.devices import Devices, devices_for
from scripts.benchmarks.pools import LLAMA_8B, LLAMA_70B_TP8, SHAPES, TINY, Request, request_of
from scripts.benchmarks.results import facts_of, quantiles
from scripts.benchmarks.workers import ContenderLost, method_for

LAYOUTS = (EQUAL, "HND16->NHD64", "NHD64->HND16", "NHD24->HND16")
LENGTHS = (128, 1024, 8192, 32768)
WIDTHS = (0, 8, 16, 24, 32, 48, 64, 96, 132)
LOOP_ROWS = (16, 4096)  # a small decode batch reads weights, a large one computes


def run_wire(
    contenders: Contenders, requests: list[Request], options: argparse.Namespace, report: Report
) -> None:
    """Every case: check everybody, then measure; the report is written after each."""
    for request in requests:
        if not request.is_equal:
            contenders.retire()
        contenders.check(request)
        ways = [way for way in contenders.ways if way.can(request)]
        if not ways:
            continue
        taken = measure(ways, request, options.rounds, options.budget_s)
        for cell in cells_of(request, taken, contenders.devices.where):
            report.findings.cells.append(cell)
            print(
                f"{cell.case:36} {cell.way:28} {cell.p50_ms:9.3f} ms {cell.gbps:7.1f} GB/s "
                f"{ratio_text(cell.ratio)} {verdict(cell)}",
                flush=True,
            )
        report.write()


def run_decode(
    contenders: Contenders, request: Request, options: argparse.Namespace, report: Report
) -> None:
    """A matrix loop on the sink's GPU beside pulls."""
    assert contenders.taking is not None
    contenders.retire()
    for rows in options.loop_rows:
        arguments = (request, rows, list(options.widths), options.loop_rounds)
        try:
            found = contenders.taking.call(list, "disturb", *arguments, timeout_s=180)
        except ContenderLost as exc:
            print(f"lost: decode with {rows} rows: {exc}")
            contenders.absent.append((f"decode, {rows} rows", str(exc)))
            break
        report.findings.disturbed += found
        for line in found:
            print(
                f"decode {line.loop:44} {line.programs:4} programs {line.gbps:7.1f} GB/s "
                f"{quantiles(line.taken_ms)[1] / line.alone_ms:.3f}",
                flush=True,
            )
    report.write()


def requests_of(options: argparse.Namespace) -> list[Request]:
    """All cases, equal layouts first; pools have an eighth more than the longest request."""
    pool_tokens = max(options.tokens) * 9 // 8
    requests = [
        request_of(SHAPES[shape], layouts, num_tokens, pool_tokens)
        for shape, layouts, num_tokens in product(options.shapes, options.layouts, options.tokens)
    ]
    return sorted(requests, key=lambda request: not request.is_equal)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, after --transport cuda_ipc."""
    parser = argparse.ArgumentParser(
        prog="bench_transfer.py --transport cuda_ipc",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("scripts/results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: a minute")
    parser.add_argument(
        "--sections", nargs="+", choices=("wire", "decode"), default=["wire", "decode"]
    )
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES))
    parser.add_argument("--layouts", nargs="+", metavar="HND16->NHD64")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--widths", nargs="+", type=int, help="programs of a launch, decode")
    parser.add_argument("--launch-programs", type=int, help="of a launch, wire; else the default")
    options = parser.parse_args(arguments)
    is_small = options.device == "cpu"
    shapes = [TINY.name] if is_small else [LLAMA_8B.name, LLAMA_70B_TP8.name]
    options.shapes = options.shapes or shapes
    options.layouts = options.layouts or list(LAYOUTS[:2] if options.quick else LAYOUTS)
    options.tokens = options.tokens or ([128, 8192] if options.quick else list(LENGTHS))
    options.rounds = options.rounds or (5 if options.quick else 11)
    options.widths = options.widths or list((0, 16, 32, 64) if options.quick else WIDTHS)
    options.loop_rows = LOOP_ROWS[:1] if is_small else LOOP_ROWS
    options.loop_rounds = 3 if options.quick else 7
    return options


def run(arguments: list[str]) -> int:
    """The benchmark; 1 if anybody copied wrong bytes."""
    options = parse(arguments)
    devices: Devices = devices_for(options.device)
    requests = requests_of(options)
    nbytes = max(pool.nbytes for request in requests for pool in (request.source, request.sink))
    settings: dict[str, object] = {}
    if options.launch_programs and devices.wire == "cuda_ipc":
        settings["launch_programs"] = options.launch_programs
    command = "scripts/bench_transfer.py " + " ".join(sys.argv[1:])
    facts = facts_of(command, ("triton", "nixl", "cuda-bindings"))
    facts["devices"] = f"source {devices.source}, sink {devices.sink}"
    for what, fact in facts.items():
        print(f"{what}: {fact}")
    contenders = Contenders(devices, nbytes, settings, start_method=method_for(devices.sink))
    report = Report(options.out, facts, contenders)
    try:
        contenders.start()
        if "wire" in options.sections:
            run_wire(contenders, requests, options, report)
        if "decode" in options.sections:
            longest = max(requests, key=lambda request: (request.nbytes, not request.is_equal))
            run_decode(contenders, longest, options, report)
    finally:
        report.write(is_last=True)
        contenders.close()
    return int(any(way.has_wrong_bytes for way in contenders.ways))
