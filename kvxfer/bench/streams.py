"""How fast tcp and zmq move scattered KV over several TCP streams, as between two hosts with many
cores, in host memory or between GPUs through host memory. In turns with them,

    sockets xN   N plain TCP connections, a thread for each at each end, one call for all of its
                 bytes from and into memory that is there: the limit of "tcp xN" and "zmq xN", in
                 host memory and with nothing packed, whatever is asked for
    NIXL         its own READ and WRITE with UCX over TCP, of blocks as they are

The other end is on this host, so both ends and both directions of PCIe share it.
"""

from __future__ import annotations

import argparse
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product

import torch

from kvxfer.bench import core
from kvxfer.bench.contenders import Contenders, Way
from kvxfer.bench.frame import Benchmark, Session, cases, option
from kvxfer.bench.members import (
    GPU_OPTIONS,
    SINK,
    Devices,
    Member,
    devices_for,
    gpu_missing,
)
from kvxfer.bench.nixl_ways import Setting
from kvxfer.bench.pools import LLAMA_8B, Request
from kvxfer.bench.sockets import (
    CONNECT_S,
    Address,
    SocketSource,
    asking,
    listen,
    say,
    without_delay,
)
from kvxfer.bench.transfer import WIRE_OPTIONS, settings_of
from kvxfer.bench.transfer_report import Run, pool_nbytes, requests_of, speed_tables
from kvxfer.bench.wires import ZMQ_TCP
from kvxfer.bench.workers import method_for

WIRES = ("tcp", ZMQ_TCP)
AIM = 0.5
BUDGET_S = 6.0
"""Of one contender in one case, after its least rounds."""
TEXT = (
    "Wall time from the request to the last byte in place; ratios are to as many plain sockets, of "
    "NIXL to one, in the same round."
)


def nixl_settings(kind: str) -> list[Setting]:
    """NIXL where UCX has TCP and, on a GPU, copies to and from it; with segments as large as
    kvxfer's ``ucx`` has them, which doubles what UCX's own 8 KiB reach.
    """
    transports = "tcp" if kind == "cpu" else "tcp,cuda_copy"
    segments = (("UCX_TCP_TX_SEG_SIZE", "256k"), ("UCX_TCP_RX_SEG_SIZE", "256k"))
    return [
        Setting(f"NIXL {each}, UCX-TCP", each, (("UCX_TLS", transports), *segments))
        for each in ("READ", "WRITE")
    ]


# ------------------------------------------------------------------ plain sockets


class PlainSink(Member):
    """Asks for an equal share on each socket, and takes it where it belongs. The limit of a wire
    shares no code with it, so its loop around ``recv_into`` stands here once more.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__({SINK: "cpu"}, nbytes)
        self._view = self.memories[SINK].tensor.numpy().data
        self._listener = listen("127.0.0.1")
        self._sockets: list[socket.socket] = []
        self._pool = ThreadPoolExecutor()

    def address(self) -> Address:
        host, port = self._listener.getsockname()
        return host, port

    def accept(self, number: int) -> None:
        """So many, which the source has begun."""
        self._listener.settimeout(CONNECT_S)
        for _ in range(number):
            sock = self._listener.accept()[0]
            sock.settimeout(None)
            self._sockets.append(without_delay(sock))
        self._pool = ThreadPoolExecutor(number)

    def run(self, way: str, request: Request) -> core.Timing:
        """``way`` ends with the number of sockets."""
        number = int(way.rpartition("x")[2])
        bounds = [request.nbytes * n // number for n in range(number + 1)]
        running: list[Future[None]] = []

        def post() -> None:
            for sock, first, last in zip(self._sockets, bounds, bounds[1:], strict=False):
                running.append(self._pool.submit(self._take, sock, first, last))

        self.flush()
        return core.timed(post, lambda: [each.result() for each in running])

    def _take(self, sock: socket.socket, first: int, last: int) -> None:
        say(sock, asking(last - first, [first]))
        while first < last:
            count = sock.recv_into(self._view[first:last], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("sockets: expected more bytes, got the end of the stream")
            first += count

    def close(self) -> None:
        for sock in (*self._sockets, self._listener):
            sock.close()
        self._pool.shutdown()
        self._view.release()
        super().close()


def plain(number: int) -> str:
    return f"sockets x{number}"


def start_plain(contenders: Contenders, numbers: list[int]) -> None:
    host = Devices("cpu", "cpu", "")
    source, sink = contenders.pair(
        "sockets", (SocketSource, PlainSink), ((host, contenders.nbytes), (contenders.nbytes,))
    )

    def join() -> None:
        source.call(object, "connect", [sink.call(tuple, "address")] * max(numbers))
        sink.call(object, "accept", max(numbers))

    ways = [Way(plain(number), source, sink, is_limit=True) for number in numbers]
    contenders.add(ways, join)
    contenders.join()


# ------------------------------------------------------------------ the benchmark


def limit_of(way: str) -> str:
    """As many plain sockets as a way has streams; one where it does not say how many."""
    return plain(int(way.rpartition("x")[2])) if way[-1].isdigit() else plain(1)


def aim(request: Request, way: str) -> float | None:
    return AIM if way.startswith("kvxfer") else None


def run(session: Session, options: argparse.Namespace) -> int:
    """How fast; 1 if anybody copied wrong bytes."""
    requests, settings = requests_of(options), settings_of(options)
    devices = devices_for(options.device, ZMQ_TCP)
    method = method_for(devices.sink)
    contenders = Contenders(devices, pool_nbytes(requests), settings, method)
    report = session.report(
        f"streams_{devices.where}",
        f"tcp and zmq over several TCP streams, {devices.where}",
        speed_tables("streams", TEXT),
        None,
        core.WIRE_PACKAGES,
        devices=f"source {devices.source}, sink {devices.sink}",
        settings=", ".join(f"{name} {value}" for name, value in settings.items()) or "none",
    )
    measured = Run(contenders, report, session.progress, limit_of, aim)
    with measured.written():
        start_plain(contenders, options.streams)
        for number, wire in product(options.streams, options.wires):
            contenders.start_wire(wire, requests[0], f" x{number}", zmq_streams=number)
            contenders.join()
        for setting in nixl_settings(torch.device(devices.sink).type):
            contenders.start_nixl(setting)
            contenders.join()
        report.records["trials"] = contenders.choices
        measured.cases(requests, options.rounds, BUDGET_S)
    return int(contenders.has_wrong_bytes)


BENCHMARK = Benchmark(
    (
        option("--streams", [1, 4, 8], [1, 2], nargs="+", type=int, help="of a wire, and sockets"),
        option("--wires", list(WIRES), nargs="+", choices=WIRES, help="some of the wires"),
        *cases(
            shapes=([LLAMA_8B.name], [LLAMA_8B.name]),
            layouts=(["HND16->HND16", "HND16->NHD64"], ["HND16->NHD64"]),
            tokens=([1024, 4096], [128]),  # 128 and 512 MiB; 16 MiB
            rounds=(15, 5),
        ),
        *WIRE_OPTIONS,
        GPU_OPTIONS[0],
    ),
    run,
    gpu_missing,
)
