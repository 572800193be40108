"""What each wire makes of a slow link: 1 Gbit/s with 1 ms of delay each way.

The link joins two network namespaces that this benchmark makes (root needed) and that go with it;
see slow_link.py. Contenders are those of "transfer" that go over a network, one process in each
namespace: a plain TCP socket, which is the limit, zmq, ucx, nixl, UCX's own messages and NIXL.
Bytes are checked first, contenders take turns. The aim of each wire is 0.95 of the socket.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvxfer.bench.contenders import Contenders, Make, start_host
from kvxfer.bench.core import WIRE_PACKAGES, ContenderLost
from kvxfer.bench.frame import Benchmark, Session, cases, option
from kvxfer.bench.members import SIDES, Devices
from kvxfer.bench.pools import LLAMA_8B, Request
from kvxfer.bench.slow_link import ADDRESSES, LinkUnavailable, SlowLink, Speed, round_trip_ms
from kvxfer.bench.sockets import SOCKETS
from kvxfer.bench.transfer import HOST_TEXT, WIRE_OPTIONS, settings_of
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


def measure(session: Session, options: argparse.Namespace, link: SlowLink, speed: Speed) -> int:
    """1 if anybody copied wrong bytes."""
    requests = requests_of(options)
    gbit, delay_ms = speed.bits_per_s / 1e9, speed.delay_s * 1e3

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
    report = session.report(
        "link_cpu",
        f"Transfer over {gbit:g} Gbit/s with {delay_ms:g} ms of delay",
        speed_tables("speed", HOST_TEXT),
        speed_plot(SOCKETS),
        WIRE_PACKAGES,
        link=speed.words,
    )
    report.facts["round trip of 8 bytes"] = f"{round_trip_ms(link):.2f} ms"
    report.facts["congestion control"] = _CONGESTION_CONTROL.read_text().strip()
    measured = Run(contenders, report, session.progress, lambda _: SOCKETS, aim)
    with measured.written():
        try:
            start_host(contenders, options.transport, requests, is_one_host=False)
            report.records["trials"] = contenders.choices
            measured.cases(requests, options.rounds, BUDGET_S)
        finally:
            relayed = link.relayed()
            report.facts["frames of up to 64 KiB"] = (
                f"{relayed.num_carried} carried, {relayed.num_dropped} dropped, the latest "
                f"{relayed.latest_s * 1e3:.1f} ms late"
            )
    return int(contenders.has_wrong_bytes)


def run(session: Session, options: argparse.Namespace) -> int:
    """Make the link, measure, and let it go."""
    speed = Speed(options.gbit * 1e9, options.delay_ms / 1e3)
    try:
        link = SlowLink(speed)
    except LinkUnavailable as exc:
        raise SystemExit(f"bench link: {exc}") from None
    try:
        return measure(session, options, link, speed)
    except ContenderLost as exc:
        raise SystemExit(f"bench link: {exc}") from None
    finally:
        link.close()


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
        option("--gbit", 1.0, type=float, help="of the link, a second (default 1)"),
        option("--delay-ms", 1.0, type=float, help="one way (default 1)"),
    ),
    run,
)
