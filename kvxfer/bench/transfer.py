"""How fast scattered KV moves between two processes of one host, in host memory
or between two GPUs (or on one), beside others that move the same
blocks. Bytes are checked before anything is timed, token by token and not by the
code under test; who copies wrong bytes is out, and the run ends with 1.
Contenders take turns, each after the caches were cleared. Times are the wall
clock's, of the process that begins, from the request to the last byte in place;
"post" is until the call that asked for it returned, "CPU" the processor time of
the thread that asked and waited. Every wire that this machine has (zmq-tcp is
zmq as between two hosts), beside

    sockets   blocking sendmsg and recvmsg_into straight between the pools,
              in host memory: the limit there
    memcpy    one contiguous copy of as many bytes, in one process: the limit
              between GPUs
    NIXL      its own scattered READ or WRITE with prepared descriptor lists, as
              it is by default and at its best
"""

from __future__ import annotations

import argparse

import torch

from kvxfer.bench import core
from kvxfer.bench.contenders import Contenders, start_all
from kvxfer.bench.frame import Benchmark, Session, cases, option
from kvxfer.bench.members import GPU_OPTIONS, devices_for, gpu_missing
from kvxfer.bench.plain_ways import MEMCPY
from kvxfer.bench.pools import LLAMA_8B, Request
from kvxfer.bench.sockets import SOCKETS
from kvxfer.bench.transfer_report import Run, pool_nbytes, requests_of, speed_plot, speed_tables
from kvxfer.bench.wires import ZMQ_TCP
from kvxfer.bench.workers import method_for

WIRES = ("shm", "zmq", ZMQ_TCP, "tcp", "ucx", "nixl")
HOST_AIMS = {"kvxfer shm": 1.4, "kvxfer zmq": 0.6, "kvxfer ucx": 0.45, "kvxfer nixl": 0.8}
"""The least ratio to the socket that we want on one host, for 2048 blocks of 32 KiB."""
_AIM_PIECES = 2048
LONG_TOKENS = 8192
"""From here on ``cuda_ipc`` should be as fast as the link between two GPUs."""
BUDGET_S = {"cpu": 8.0, "cuda": 3.0}
"""Of one contender in one case, after its least rounds: some take a second a time."""
TEXT = (
    "Speeds are of the payload, from the request to the last byte in place; ratios are to {limit} "
    "in the same round. Only kvxfer changes layouts: the others, NIXL too, move as many bytes in "
    "blocks as they are, and memcpy one contiguous piece. CPU: the thread that asks and waits."
)
WIRE_OPTIONS = (
    option("--chunk-nbytes", type=int, help="of a wire, instead of what a trial says"),
    option("--staging-slots", type=int, help="of a wire, instead of what a trial says"),
)
"""What wires can be told, see :func:`settings_of`."""


def host_aim(request: Request, way: str) -> float | None:
    """Of requests of as many blocks as the aims are meant for."""
    num_pieces = request.shape.regions * len(request.source_ids)
    return HOST_AIMS.get(way) if num_pieces == _AIM_PIECES else None


def peer_aim(request: Request, way: str) -> float | None:
    if way != "kvxfer cuda_ipc" or request.num_tokens < LONG_TOKENS:
        return None
    least_tokens = min(request.source.block_tokens, request.sink.block_tokens)
    return 0.90 if request.shape.heads == 1 or least_tokens < 16 else 0.95


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    names = ("chunk_nbytes", "staging_slots", "launch_programs")
    chosen = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in chosen.items() if value is not None}


def run(session: Session, options: argparse.Namespace) -> int:
    """How fast; 1 if anybody copied wrong bytes."""
    usual = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return max(_run_on(device, session, options) for device in options.device or usual)


def _run_on(device: str, session: Session, options: argparse.Namespace) -> int:
    requests, settings = requests_of(options), settings_of(options)
    wires = options.transport or (WIRES if device == "cpu" else ("cuda_ipc",))
    devices = devices_for(device)
    where = "host" if device == "cpu" else devices.where
    limit = SOCKETS if device == "cpu" else MEMCPY
    contenders = Contenders(devices, pool_nbytes(requests), settings, method_for(devices.sink))
    report = session.report(
        f"transfer_{where}",
        f"Transfer between two processes of one host, {where} memory",
        speed_tables("speed", TEXT.format(limit=limit)),
        speed_plot(limit, MEMCPY),
        ("triton", *core.WIRE_PACKAGES) if device == "cuda" else core.WIRE_PACKAGES,
        devices=f"source {devices.source}, sink {devices.sink}",
        settings=", ".join(f"{name} {value}" for name, value in settings.items()) or "none",
    )
    aims = {"host": host_aim, "peer": peer_aim}.get(where, lambda *_: None)
    measured = Run(contenders, report, session.progress, lambda _: limit, aims)
    with measured.written():
        start_all(contenders, wires, requests[0], is_one_host=True)
        report.records["trials"] = contenders.choices
        measured.cases(requests, options.rounds, BUDGET_S[device])
    return int(contenders.has_wrong_bytes)


BENCHMARK = Benchmark(
    (
        option(
            "--device",
            nargs="+",
            choices=("cpu", "cuda"),
            help="default: what there is",
        ),
        option(
            "--transport",
            nargs="+",
            choices=(*WIRES, "cuda_ipc"),
            help="some of",
        ),
        *cases(
            shapes=([LLAMA_8B.name], [LLAMA_8B.name]),
            layouts=(["HND16->HND16", "HND16->NHD64"], ["HND16->NHD64"]),
            tokens=([16, 128, 512, 2048], [16, 128]),  # 2 to 256 MiB; 512 tokens are 2048 blocks
            rounds=(25, 5),
        ),
        *WIRE_OPTIONS,
        GPU_OPTIONS[1],
    ),
    run,
    lambda options: gpu_missing(options) if "cuda" in (options.device or ()) else "",
)
