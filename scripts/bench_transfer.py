"""How fast scattered KV moves between two processes of one host, beside others that move the same
blocks. Bytes are checked before anything is timed, token by token and not by the code under test;
who copies wrong bytes is out, and the run ends with 1. Contenders take turns. Times are the wall
clock's, of the process that begins, from the request to the last byte in place; "post" is until the
call that asked for it returned, "CPU" the processor time of the thread that asked and waited.

In host memory, every wire that this machine has (zmq-tcp is zmq as between two hosts), beside

    sockets, unix-sockets  blocking sendmsg and recvmsg_into straight between the pools: the limit
    memcpy                 one contiguous copy of as many bytes, in one process
    raw ucx                UCX tag messages of the chunks' size: the limit of the wire ucx
    NIXL                   its own scattered READ, as it is by default and at its best

--soak: so many small transfers over each wire instead, and what both processes hold before and
after. --transport cuda_ipc: between two GPUs, or on one, one process on each, beside

    memcpy                 one contiguous copy of as many bytes from the other GPU: the limit
    local memcpy, memset   the same on the sink's GPU alone
    torch                  index_select, permute, copy to the other GPU, index_copy_, by region
    cudaMemcpyBatchAsync   blocks as they are, in one call whose arrays were made before
    NIXL                   blocks as they are, prepared descriptor lists, three settings

each after the caches of its GPU were cleared; its last section is a matrix loop on the sink's GPU
while pulls follow each other. Without a GPU: --device cpu, which is the wire shm, for a look.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from scripts.benchmarks import core, soak
from scripts.benchmarks.contenders import LIBRARIES, Contenders, is_installed, start_host
from scripts.benchmarks.members import Devices, devices_for
from scripts.benchmarks.nixl_ways import SETTINGS
from scripts.benchmarks.plain_ways import BATCH, LOCAL_MEMCPY, MEMCPY, MEMSET, TORCH
from scripts.benchmarks.pools import LLAMA_8B, LLAMA_70B_TP8, TINY, Request
from scripts.benchmarks.sockets import SOCKETS
from scripts.benchmarks.transfer import (
    Run,
    add_case_options,
    pool_nbytes,
    requests_of,
    speed_plot,
    speed_tables,
)
from scripts.benchmarks.wires import ZMQ_TCP, Disturbed
from scripts.benchmarks.workers import FORK_SERVER, method_for

SCRIPT = "bench_transfer.py"
WIRES = ("shm", "zmq", ZMQ_TCP, "ucx", "nixl")
DEVICE_WIRE = "cuda_ipc"
HOST_AIMS = {"kvxfer shm": 1.4, "kvxfer zmq": 0.6, "kvxfer ucx": 0.45, "kvxfer nixl": 0.8}
"""The least ratio to the socket that we want on one host, for 2048 blocks of 32 KiB."""
AIM_PIECES = 2048
LONG_TOKENS = 8192  # from here on a wire between GPUs should be as fast as the link
HOST_BUDGET_S, DEVICE_BUDGET_S = 8.0, 3.0
"""Of one contender in one case, after its least rounds: some take a second a time."""
WIDTHS = (0, 8, 16, 24, 32, 48, 64, 96, 132)
LOOP_ROWS = (16, 4096)  # a small decode batch reads weights, a large one computes
HOST_TEXT = (
    "Speeds are of the payload, from the request to the last byte in place; ratios are to "
    f"{SOCKETS} (blocking sendmsg and recvmsg_into of the same scattered blocks over TCP), each "
    "quantile to the same one. Only kvxfer changes layouts: the others, NIXL and "
    f"{MEMCPY} (one contiguous copy in one process) too, move as many bytes in blocks as they are. "
    "raw ucx: tag messages of the size of kvxfer's chunks between buffers, nothing packed or "
    "unpacked: the limit of the wire ucx. CPU: the thread that asks and waits."
)
DEVICE_TEXT = (
    "Wall time from the request to the last byte in place; GB/s of the payload at the median; "
    "ratios are to memcpy, each quantile to the same one. NIXL and cudaMemcpyBatchAsync move "
    "blocks as they are, so they are in the cases of equal layouts only."
)
DECODE_TEXT = (
    "A matrix loop on the sink's GPU while pulls of the longest request follow each other: "
    "slowdown to the loop alone, and what the pulls reach meanwhile. 0 programs: no pulls."
)
DECODE: core.Columns[Disturbed] = {
    "loop": lambda found: found.loop,
    "programs": lambda found: str(found.programs),
    **core.of_three(
        ("p20 ms", "p50 ms", "p80 ms"), "{:.3f}", lambda found: core.quantiles(found.taken_ms)
    ),
    "slowdown": lambda found: f"{core.quantiles(found.taken_ms)[1] / found.alone_ms:.3f}",
    "pulls GB/s": lambda found: f"{found.gbps:.1f}",
}


def host_aim(request: Request, way: str) -> float | None:
    """Of requests of as many blocks as the aims are meant for."""
    num_pieces = request.shape.regions * len(request.source_ids)
    return HOST_AIMS.get(way) if num_pieces == AIM_PIECES else None


def peer_aim(request: Request, way: str) -> float | None:
    """Of the wire between two GPUs."""
    if not way.startswith("kvxfer") or request.num_tokens < LONG_TOKENS:
        return None
    is_fine = (
        request.shape.heads == 1 or min(request.source.block_tokens, request.sink.block_tokens) < 16
    )
    return 0.90 if is_fine else 0.95


# ------------------------------------------------------------------ in host memory


def parse_host(arguments: list[str]) -> argparse.Namespace:
    parser = core.parser_of(__doc__, SCRIPT)
    names = ",".join(WIRES)
    parser.add_argument("--transport", default="all", help=f"all, or some of {names}")
    add_case_options(
        parser,
        shapes=[LLAMA_8B.name],
        layouts=["HND16->HND16", "HND16->NHD64"],
        tokens=[16, 128, 512, 2048],  # 2 to 256 MiB; 512 tokens are 2048 blocks
        rounds=25,
    )
    add_wire_options(parser)
    parser.add_argument("--soak", type=int, metavar="TRANSFERS")
    options = parser.parse_args(arguments)
    options.transport = (names if options.transport == "all" else options.transport).split(",")
    if unknown := sorted(set(options.transport) - set(WIRES)):
        parser.error(f"--transport: expected some of {names}, got {', '.join(unknown)}")
    return options


def add_wire_options(parser: argparse.ArgumentParser) -> None:
    """What wires can be told, see :func:`settings_of`."""
    parser.add_argument("--chunk-nbytes", type=int)
    parser.add_argument("--staging-slots", type=int)


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    chosen = {"chunk_nbytes": options.chunk_nbytes, "staging_slots": options.staging_slots}
    return {name: value for name, value in chosen.items() if value is not None}


def run_host(options: argparse.Namespace) -> int:
    """How fast; 1 if anybody copied wrong bytes."""
    requests, settings = requests_of(options), settings_of(options)
    facts = core.facts_of(SCRIPT, core.WIRE_PACKAGES, options.note)
    facts["settings"] = ", ".join(f"{name} {value}" for name, value in settings.items()) or "none"
    contenders = Contenders(
        Devices("cpu", "cpu", "shm"), pool_nbytes(requests), settings, FORK_SERVER
    )
    title = "Transfer between two processes of one host, host memory"
    tables = speed_tables("speed", HOST_TEXT)
    report = core.Report(options.out, "transfer_host", title, facts, tables, speed_plot)
    run = Run(contenders, report, SOCKETS, host_aim)
    try:
        start_host(contenders, options.transport, requests, is_one_host=True)
        report.records["trials"] = contenders.choices
        for request in requests:
            run.case(request, options.rounds, HOST_BUDGET_S)
    finally:
        report.lost = contenders.lost()
        contenders.close()
        report.write(is_last=True)
    return int(contenders.has_wrong_bytes)


def run_soak(options: argparse.Namespace) -> int:
    """What is left behind; 1 if something leaked."""
    facts = core.facts_of(SCRIPT, core.WIRE_PACKAGES, options.note)
    title = "Many small transfers between two processes"
    report = core.Report(options.out, "soak_cpu", title, facts, soak.tables)
    found: list[soak.Soaked] = []
    report.records["soaked"] = found
    for wire in options.transport:
        if not is_installed(wire):
            report.lost[wire] = f"{LIBRARIES[wire]} is not installed"
            continue
        try:
            found.append(soak.soak(wire, options.soak))
        except core.ContenderLost as exc:
            report.lost[wire] = str(exc)
            print(f"lost: {wire}: {exc}")
            continue
        for held in found[-1].held:
            print(core.line_of(soak.COLUMNS, (found[-1], held)), flush=True)
        report.write()
    report.write()
    return int(any(soaked.leaks() for soaked in found))


# ------------------------------------------------------------------ between GPUs


def parse_device(arguments: list[str]) -> argparse.Namespace:
    """The command line, with --transport cuda_ipc."""
    parser = core.parser_of(__doc__, f"{SCRIPT} --transport {DEVICE_WIRE}")
    add_case_options(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: a minute")
    sections = ("wire", "decode")
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--budget-s", type=float, default=DEVICE_BUDGET_S)
    parser.add_argument("--widths", nargs="+", type=int, help="programs of a launch, decode")
    parser.add_argument("--launch-programs", type=int, help="of a launch, wire; else the default")
    options = parser.parse_args(arguments)
    is_small, is_quick = options.device == "cpu", options.quick
    layouts = ["HND16->HND16", "HND16->NHD64", "NHD64->HND16", "NHD24->HND16"]
    shapes = [TINY.name] if is_small else [LLAMA_8B.name, LLAMA_70B_TP8.name]
    options.shapes = options.shapes or shapes
    options.layouts = options.layouts or (layouts[:2] if is_quick else layouts)
    options.tokens = options.tokens or ([128, 8192] if is_quick else [128, 1024, 8192, 32768])
    options.rounds = options.rounds or (5 if is_quick else 11)
    options.widths = options.widths or list((0, 16, 32, 64) if is_quick else WIDTHS)
    options.loop_rows = LOOP_ROWS[:1] if is_small else LOOP_ROWS
    options.loop_rounds = 3 if is_quick else 7
    return options


def run_device(options: argparse.Namespace) -> int:
    """How fast; 1 if anybody copied wrong bytes. Equal layouts first."""
    devices = devices_for(options.device)
    where, wire = devices.where, devices.wire
    requests = sorted(requests_of(options), key=lambda request: not request.is_equal)
    settings: dict[str, object] = {}
    if options.launch_programs and wire == DEVICE_WIRE:
        settings["launch_programs"] = options.launch_programs
    facts = core.facts_of(SCRIPT, ("triton", "nixl", "cuda-bindings"), options.note)
    facts["devices"] = f"source {devices.source}, sink {devices.sink}"
    method = method_for(devices.sink)
    contenders = Contenders(devices, pool_nbytes(requests), settings, method)
    title = f"Transfer between two processes, {wire}, {where}"
    report = core.Report(
        *(options.out, f"transfer_{wire}_{where}", title, facts, device_tables, speed_plot)
    )
    report.records["where"] = where
    run = Run(contenders, report, MEMCPY, peer_aim if where == "peer" else lambda *_: None)
    try:
        names = [MEMCPY, TORCH, BATCH, MEMSET]
        contenders.start_plain([*names, LOCAL_MEMCPY] if where == "peer" else names)
        contenders.start_wire(wire)
        for setting in SETTINGS:
            contenders.start_nixl(setting, is_raw=False)
        contenders.join()
        for request in requests if "wire" in options.sections else ():
            if not request.is_equal:
                contenders.retire()
            run.case(request, options.rounds, options.budget_s)
        if "decode" in options.sections and wire in contenders.takings:
            longest = max(requests, key=lambda request: (request.nbytes, not request.is_equal))
            run_decode(run, longest, options)
    finally:
        report.lost |= contenders.lost()
        report.write(is_last=True)
        contenders.close()
    return int(contenders.has_wrong_bytes)


def run_decode(run: Run, request: Request, options: argparse.Namespace) -> None:
    """A matrix loop on the sink's GPU beside pulls."""
    run.contenders.retire()
    wire = run.contenders.devices.wire
    for rows in options.loop_rows:
        taking, manifest = run.contenders.takings[wire]
        arguments = (manifest, request, rows, list(options.widths), options.loop_rounds)
        try:
            found = taking.call(list, "disturb", *arguments, timeout_s=180)
        except core.ContenderLost as exc:
            print(f"lost: decode with {rows} rows: {exc}")
            run.contenders.absent[f"decode, {rows} rows"] = str(exc)
            break
        for disturbed in found:
            run.report.add(DECODE, disturbed, "decode")
    run.report.write()


def device_tables(report: core.Report) -> list[core.Table]:
    decode = core.table("decode", DECODE_TEXT, DECODE, report.records.get("decode", []))
    return [*speed_tables("wire", DEVICE_TEXT)(report), decode]


def main() -> None:
    """Look at --transport for where memory lies, which has its own options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--transport", default="all")
    wanted, rest = parser.parse_known_args()
    if wanted.transport == DEVICE_WIRE:
        raise SystemExit(run_device(parse_device(rest)))
    options = parse_host(sys.argv[1:])
    raise SystemExit(run_soak(options) if options.soak else run_host(options))


if __name__ == "__main__":
    main()
