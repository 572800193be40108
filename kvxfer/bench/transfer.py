"""How fast scattered KV moves between two processes of one host, in host memory, beside others that
move the same blocks. Bytes are checked before anything is timed, token by token and not by the code
under test; who copies wrong bytes is out, and the run ends with 1. Contenders take turns. Times are
the wall clock's, of the process that begins, from the request to the last byte in place; "post" is
until the call that asked for it returned, "CPU" the processor time of the thread that asked and
waited. Every wire that this machine has (zmq-tcp is zmq as between two hosts), beside

    sockets, unix-sockets  blocking sendmsg and recvmsg_into straight between the pools: the limit
    memcpy                 one contiguous copy of as many bytes, in one process
    NIXL                   its own scattered READ, as it is by default and at its best
"""

from __future__ import annotations

import argparse

from kvxfer.bench import core
from kvxfer.bench.contenders import Contenders, start_host
from kvxfer.bench.frame import Benchmark, Session, cases, option
from kvxfer.bench.members import Devices
from kvxfer.bench.plain_ways import MEMCPY
from kvxfer.bench.pools import LLAMA_8B, Request
from kvxfer.bench.sockets import SOCKETS
from kvxfer.bench.transfer_report import Run, pool_nbytes, requests_of, speed_plot, speed_tables
from kvxfer.bench.wires import ZMQ_TCP
from kvxfer.bench.workers import FORK_SERVER

WIRES = ("shm", "zmq", ZMQ_TCP, "tcp", "ucx", "nixl")
HOST_AIMS = {"kvxfer shm": 1.4, "kvxfer zmq": 0.6, "kvxfer ucx": 0.45, "kvxfer nixl": 0.8}
"""The least ratio to the socket that we want on one host, for 2048 blocks of 32 KiB."""
_AIM_PIECES = 2048
BUDGET_S = 8.0
"""Of one contender in one case, after its least rounds: some take a second a time."""
HOST_TEXT = (
    "Speeds are of the payload, from the request to the last byte in place; ratios are to "
    f"{SOCKETS} (blocking sendmsg and recvmsg_into of the same scattered blocks over TCP), each "
    "quantile to the same one. Only kvxfer changes layouts: the others, NIXL and "
    f"{MEMCPY} (one contiguous copy in one process) too, move as many bytes in blocks as they are. "
    "CPU: the thread that asks and waits."
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


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    chosen = {"chunk_nbytes": options.chunk_nbytes, "staging_slots": options.staging_slots}
    return {name: value for name, value in chosen.items() if value is not None}


def run(session: Session, options: argparse.Namespace) -> int:
    """How fast; 1 if anybody copied wrong bytes."""
    requests, settings = requests_of(options), settings_of(options)
    contenders = Contenders(
        Devices("cpu", "cpu", "shm"), pool_nbytes(requests), settings, FORK_SERVER
    )
    report = session.report(
        "transfer_host",
        "Transfer between two processes of one host, host memory",
        speed_tables("speed", HOST_TEXT),
        speed_plot(SOCKETS, MEMCPY),
        core.WIRE_PACKAGES,
        settings=", ".join(f"{name} {value}" for name, value in settings.items()) or "none",
    )
    measured = Run(contenders, report, session.progress, lambda _: SOCKETS, host_aim)
    with measured.written():
        start_host(contenders, options.transport, requests, is_one_host=True)
        report.records["trials"] = contenders.choices
        measured.cases(requests, options.rounds, BUDGET_S)
    return int(contenders.has_wrong_bytes)


BENCHMARK = Benchmark(
    (
        option("--transport", list(WIRES), nargs="+", choices=WIRES, help="some of the wires"),
        *cases(
            shapes=([LLAMA_8B.name], [LLAMA_8B.name]),
            layouts=(["HND16->HND16", "HND16->NHD64"], ["HND16->NHD64"]),
            tokens=([16, 128, 512, 2048], [16, 128]),  # 2 to 256 MiB; 512 tokens are 2048 blocks
            rounds=(25, 5),
        ),
        *WIRE_OPTIONS,
    ),
    run,
)
