"""What each wire makes of a slow link: 1 Gbit/s with 1 ms of delay each way.

The link joins two network namespaces that this benchmark makes (root needed) and
that go with it; see slow_link.py. Contenders are those of "transfer" that go over
a network, one process in each namespace: a plain TCP socket, which is the limit,
zmq, ucx, nixl and NIXL's own READ. Bytes are checked first, contenders take
turns. The aim of each wire is 0.95 of the socket.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvxfer.bench.contenders import Contenders, Make, start_all
from kvxfer.bench.core import WIRE_PACKAGES
from kvxfer.bench.frame import Benchmark, Session, cases, option
from kvxfer.bench.members import SIDES, Devices
from kvxfer.bench.pools import LLAMA_8B, Request
from kvxfer.bench.slow_link import ADDRESSES, LINK_OPTIONS, round_trip_ms, slow_link, speed_of
from kvxfer.bench.sockets import SOCKETS
from kvxfer.bench.transfer import TEXT, WIRE_OPTIONS, settings_of
from kvxfer.bench.transfer_report import Run, pool_nbytes, requests_of, speed_plot, speed_tables
from kvxfer.bench.workers import FORK_SERVER

WIRES = ("zmq", "tcp", "ucx", "nixl")
_NETWORK_ONLY = {"UCX_TLS": "tcp"}
"""UCX sees that both namespaces are of one host, and would copy from process to process."""
BUDGET_S = 30.0
_AIM = 0.95
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def aim(request: Request, way: str) -> float | None:
    return _AIM if way.startswith("kvxfer") else None


def run(session: Session, options: argparse.Namespace) -> int:
    """1 if anybody copied wrong bytes."""
    requests, speed = requests_of(options), speed_of(options)
    with slow_link(speed, "bench link") as link:

        def inside(side: str, make: Make) -> Make:
            return link.inside(SIDES.index(side), make)

        contenders = Contenders(
            *(Devices("cpu", "cpu", "zmq"), pool_nbytes(requests)),
            settings=settings_of(options) | {"allowed_peers": list(ADDRESSES)},
            start_method=FORK_SERVER,
            hosts=ADDRESSES,
            inside=inside,
            environment=_NETWORK_ONLY,
        )
        facts = {
            "link": speed.words,
            "round trip": f"{round_trip_ms(link):.2f} ms",
            "congestion control": _CONGESTION_CONTROL.read_text().strip(),
        }
        report = session.report(
            "link_cpu",
            f"Transfer over {speed.words}",
            speed_tables("speed", TEXT.format(limit=SOCKETS)),
            speed_plot(SOCKETS),
            WIRE_PACKAGES,
            **facts,
        )
        measured = Run(contenders, report, session.progress, lambda _: SOCKETS, aim)
        with measured.written():
            try:
                start_all(contenders, options.transport, requests[0], is_one_host=False)
                report.records["trials"] = contenders.choices
                measured.cases(requests, options.rounds, BUDGET_S)
            finally:
                report.facts["frames of up to 64 KiB"] = link.relayed().words
    return int(contenders.has_wrong_bytes)


BENCHMARK = Benchmark(
    (
        option("--transport", list(WIRES), nargs="+", choices=WIRES, help="some of the wires"),
        *cases(
            shapes=([LLAMA_8B.name], [LLAMA_8B.name]),
            layouts=(["HND16->HND16"], ["HND16->HND16"]),
            tokens=([128, 512], [32]),  # 16 and 64 MiB; 4 MiB
            rounds=(9, 3),
        ),
        *WIRE_OPTIONS,
        *LINK_OPTIONS,
    ),
    run,
)
