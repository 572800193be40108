"""Scattered KV between two processes of one host through every wire that this machine has, beside
others that move the same blocks:

    sockets, unix-sockets  blocking sendmsg and recvmsg_into straight between the pools
    memcpy                 one contiguous copy of as many bytes, in one process
    raw ucx                UCX tag messages of the chunks' size: the limit of the wire ucx
    NIXL                   its own scattered READ, as it is by default and at its best

zmq-tcp is zmq as between two hosts, without its Unix socket. A wire whose library is not installed
is named in the report. Blocks have 32 KiB (16 tokens, 8 heads of 256 bytes, 64 regions). Bytes are
checked first, token by token and not by the code under test; contenders take turns. Timed on the
sink from the request to the last byte in place. --soak: so many small transfers over each wire
instead, and what both processes hold before and after.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from scripts.benchmarks.contenders import Contenders, measure
from scripts.benchmarks.host_contenders import HOST, LIBRARIES, WIRES, HostContenders, is_installed
from scripts.benchmarks.host_report import LIMITS, Aims, Report, aims_of, cells_of
from scripts.benchmarks.pools import LLAMA_8B, SHAPES, Request, request_of
from scripts.benchmarks.results import WIRE_PACKAGES, facts_of
from scripts.benchmarks.soak import soak
from scripts.benchmarks.soak_report import SoakReport
from scripts.benchmarks.workers import ContenderLost

LAYOUTS = ("HND16->HND16", "HND16->NHD64")
LENGTHS = (16, 128, 512, 2048)  # 2 to 256 MiB; 512 tokens are 2048 blocks
ROUNDS = 25
BUDGET_S = 8.0


def requests_of(options: argparse.Namespace) -> list[Request]:
    """All cases, by length; pools have an eighth more than the longest request."""
    pool_tokens = max(options.tokens) * 9 // 8
    return [
        request_of(SHAPES[options.shape], layouts, num_tokens, pool_tokens)
        for num_tokens, layouts in product(options.tokens, options.layouts)
    ]


def run_case(
    contenders: Contenders,
    request: Request,
    report: Report,
    aims: Aims,
    *,
    rounds: int,
    budget_s: float,
) -> None:
    """Check everybody, then measure; the least ratios that we want are told to the report."""
    contenders.check(request)
    ways = [way for way in contenders.ways if way.can(request)]
    taken = measure(ways, request, rounds, budget_s)
    report.lost = contenders.lost()
    report.add(list(cells_of(request, taken, aims)))


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """Of all wires."""
    chosen = {"chunk_nbytes": options.chunk_nbytes, "staging_slots": options.staging_slots}
    return {name: value for name, value in chosen.items() if value is not None}


def facts(script: str, settings: dict[str, object], note: str) -> dict[str, str]:
    """Of the machine and of this run."""
    found = facts_of(f"scripts/{script} " + " ".join(sys.argv[1:]), WIRE_PACKAGES)
    found["load at the start"] = f"{os.getloadavg()[0]:.1f}"
    found["settings"] = ", ".join(f"{name} {value}" for name, value in settings.items()) or "none"
    if note:
        found["note"] = note
    return found


def add_options(
    parser: argparse.ArgumentParser, layouts: Sequence[str], lengths: Sequence[int], rounds: int
) -> None:
    """What every benchmark in host memory can be told, with its own defaults."""
    parser.add_argument("--out", type=Path, default=Path("scripts/results"))
    parser.add_argument("--shape", choices=tuple(SHAPES), default=LLAMA_8B.name)
    parser.add_argument("--layouts", nargs="+", default=list(layouts), metavar="HND16->NHD64")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(lengths))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--chunk-nbytes", type=int)
    parser.add_argument("--staging-slots", type=int)
    parser.add_argument("--note", default="", help="of this machine, for the report")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_transfer.py",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    names = ",".join(WIRES)
    parser.add_argument("--transport", default="all", help=f"all, or some of {names}")
    add_options(parser, LAYOUTS, LENGTHS, ROUNDS)
    parser.add_argument("--soak", type=int, metavar="TRANSFERS")
    options = parser.parse_args(arguments)
    options.transport = tuple(
        (names if options.transport == "all" else options.transport).split(",")
    )
    if unknown := sorted(set(options.transport) - set(WIRES)):
        parser.error(f"--transport: expected some of {names}, got {', '.join(unknown)}")
    return options


def run(arguments: list[str]) -> int:
    """The benchmark; 1 if anybody copied wrong bytes, or something leaked."""
    options = parse(arguments)
    return run_soak(options) if options.soak else run_speed(options)


def run_speed(options: argparse.Namespace) -> int:
    """How fast."""
    requests, settings = requests_of(options), settings_of(options)
    nbytes = max(pool.nbytes for request in requests for pool in (request.source, request.sink))
    title = "Transfer between two processes of one host, host memory"
    report = Report(
        options.out,
        "transfer_host",
        title,
        LIMITS,
        facts("bench_transfer.py", settings, options.note),
    )
    contenders = HostContenders(
        HOST, nbytes, settings, requests=tuple(requests), wires=options.transport
    )
    try:
        contenders.start()
        report.choices = contenders.choices
        for request in requests:
            aims = aims_of(request)
            run_case(*(contenders, request, report, aims), rounds=options.rounds, budget_s=BUDGET_S)
    finally:
        report.lost = contenders.lost()
        contenders.close()
        report.write(is_last=True)
    return int(any(way.has_wrong_bytes for way in contenders.ways))


def run_soak(options: argparse.Namespace) -> int:
    """What is left behind."""
    report = SoakReport(options.out, facts("bench_transfer.py", {}, options.note))
    for wire in options.transport:
        if not is_installed(wire):
            report.lost.append((wire, f"{LIBRARIES[wire]} is not installed"))
            continue
        try:
            report.add(soak(wire, options.soak))
        except ContenderLost as exc:
            report.lost.append((wire, str(exc)))
            print(f"lost: {wire}: {exc}")
    report.write()
    return int(any(soaked.leaks() for soaked in report.soaked))
