"""How fast scattered KV moves between two GPUs, or on one, one process on each side, beside

    memcpy                 one contiguous copy of as many bytes from the other GPU: the limit
    local memcpy, memset   the same on the sink's GPU alone
    torch                  index_select, permute, copy to the other GPU, index_copy_, by region
    cudaMemcpyBatchAsync   blocks as they are, in one call whose arrays were made before
    NIXL                   blocks as they are, prepared descriptor lists, three settings

each after the caches of its GPU were cleared. Bytes are checked first. The last section is a matrix
loop on the sink's GPU while pulls follow each other. Without a GPU: --device cpu, which is the wire
shm, for a look.
"""

from __future__ import annotations

import argparse

from kvxfer.bench import core
from kvxfer.bench.contenders import Contenders
from kvxfer.bench.frame import Benchmark, Session, cases, option
from kvxfer.bench.members import GPU_OPTIONS, devices_for, gpu_missing
from kvxfer.bench.nixl_ways import SETTINGS
from kvxfer.bench.plain_ways import BATCH, LOCAL_MEMCPY, MEMCPY, MEMSET, TORCH
from kvxfer.bench.pools import LLAMA_8B, LLAMA_70B_TP8, TINY, Request
from kvxfer.bench.transfer_report import Run, pool_nbytes, requests_of, speed_plot, speed_tables
from kvxfer.bench.wires import Disturbed
from kvxfer.bench.workers import method_for

_DEVICE_WIRE = "cuda_ipc"
LONG_TOKENS = 8192  # from here on a wire between GPUs should be as fast as the link
BUDGET_S = 3.0
"""Of one contender in one case, after its least rounds."""
_LOOP_ROWS = (16, 4096)  # a small decode batch reads weights, a large one computes
SECTIONS = ("wire", "decode")
LAYOUTS = ["HND16->HND16", "HND16->NHD64", "NHD64->HND16", "NHD24->HND16"]
_DEVICE_TEXT = (
    "Wall time from the request to the last byte in place; GB/s of the payload at the median; "
    "ratios are to memcpy, each quantile to the same one. NIXL and cudaMemcpyBatchAsync move "
    "blocks as they are, so they are in the cases of equal layouts only."
)
_DECODE_TEXT = (
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


def peer_aim(request: Request, way: str) -> float | None:
    if not way.startswith("kvxfer") or request.num_tokens < LONG_TOKENS:
        return None
    is_fine = (
        request.shape.heads == 1 or min(request.source.block_tokens, request.sink.block_tokens) < 16
    )
    return 0.90 if is_fine else 0.95


def run(session: Session, options: argparse.Namespace) -> int:
    """How fast; 1 if anybody copied wrong bytes. Equal layouts first."""
    is_small = options.device == "cpu"
    options.shapes = options.shapes or (
        [TINY.name] if is_small else [LLAMA_8B.name, LLAMA_70B_TP8.name]
    )
    devices = devices_for(options.device)
    where, wire = devices.where, devices.wire
    requests = sorted(requests_of(options), key=lambda request: not request.is_equal)
    settings: dict[str, object] = {}
    if options.launch_programs and wire == _DEVICE_WIRE:
        settings["launch_programs"] = options.launch_programs
    contenders = Contenders(devices, pool_nbytes(requests), settings, method_for(devices.sink))
    report = session.report(
        f"transfer_{wire}_{where}",
        f"Transfer between two processes, {wire}, {where}",
        _device_tables,
        speed_plot(MEMCPY),
        ("triton", "nixl", "cuda-bindings"),
        devices=f"source {devices.source}, sink {devices.sink}",
    )
    report.records["where"] = where
    aims = peer_aim if where == "peer" else lambda *_: None
    measured = Run(contenders, report, session.progress, lambda _: MEMCPY, aims)
    with measured.written():
        names = [MEMCPY, TORCH, BATCH, MEMSET]
        contenders.start_plain([*names, LOCAL_MEMCPY] if where == "peer" else names)
        contenders.start_wire(wire)
        for setting in SETTINGS:
            contenders.start_nixl(setting, is_raw=False)
        contenders.join()
        if "wire" in options.sections:
            measured.cases(requests, options.rounds, BUDGET_S)
        if "decode" in options.sections and wire in contenders.takings:
            longest = max(requests, key=lambda request: (request.nbytes, not request.is_equal))
            options.loop_rows = _LOOP_ROWS[:1] if is_small else _LOOP_ROWS
            run_decode(measured, longest, options)
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
            core.tell_lost(f"decode with {rows} rows", exc)
            run.contenders.absent[f"decode, {rows} rows"] = str(exc)
            break
        run.report.begin(f"decode, {rows} rows", ("programs", "slowdown", "pulls GB/s"))
        for disturbed in found:
            run.report.add(DECODE, disturbed, "decode")
    run.report.write()


def _device_tables(report: core.Report) -> list[core.Table]:
    decode = core.table("decode", _DECODE_TEXT, DECODE, report.records.get("decode", []))
    return [*speed_tables("wire", _DEVICE_TEXT)(report), decode]


BENCHMARK = Benchmark(
    (
        *cases(
            layouts=(LAYOUTS, LAYOUTS[:2]),
            tokens=([128, 1024, 8192, 32768], [128, 8192]),
            rounds=(11, 5),
        ),
        *GPU_OPTIONS,
        option("--sections", list(SECTIONS), nargs="+", choices=SECTIONS, help="some of"),
        option(
            "--widths",
            [0, 8, 16, 24, 32, 48, 64, 96, 132],
            [0, 16, 32, 64],
            nargs="+",
            type=int,
            help="programs of a launch, decode",
        ),
        option("--loop-rounds", 7, 3, type=int, help="of the matrix loop, decode"),
    ),
    run,
    gpu_missing,
)
