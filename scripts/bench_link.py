"""What each wire makes of a slow link: 1 Gbit/s with 1 ms of delay each way.

The link joins two network namespaces that this script makes (root needed) and that go with it; see
scripts/benchmarks/slow_link.py. Contenders are those of bench_transfer.py that go over a network,
one process in each namespace: a plain TCP socket, which is the limit, zmq, ucx, nixl, UCX's own
messages and NIXL. Bytes are checked first, contenders take turns. The aim of every wire of kvxfer
is 0.95 of the socket.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from scripts.bench_transfer import HOST_TEXT, add_wire_options, settings_of
from scripts.benchmarks.contenders import Contenders, Make, start_host
from scripts.benchmarks.core import WIRE_PACKAGES, ContenderLost, Report, facts_of, parser_of
from scripts.benchmarks.members import SIDES, Devices
from scripts.benchmarks.pools import LLAMA_8B, Request
from scripts.benchmarks.slow_link import ADDRESSES, LinkUnavailable, SlowLink, Speed, round_trip_ms
from scripts.benchmarks.sockets import SOCKETS
from scripts.benchmarks.transfer import (
    Run,
    add_case_options,
    pool_nbytes,
    requests_of,
    speed_plot,
    speed_tables,
)
from scripts.benchmarks.workers import FORK_SERVER

SCRIPT = "bench_link.py"
WIRES = ("zmq", "ucx", "nixl")
NETWORK_ONLY = {"UCX_TLS": "tcp"}
"""UCX sees that both namespaces are of one host, and would copy from process to process."""
BUDGET_S = 30.0
AIM = 0.95
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def aim(request: Request, way: str) -> float | None:
    return AIM if way.startswith("kvxfer") else None


def run(options: argparse.Namespace, link: SlowLink, speed: Speed) -> int:
    """1 if anybody copied wrong bytes."""
    requests = requests_of(options)
    facts = facts_of(SCRIPT, WIRE_PACKAGES, options.note)
    gbit, delay_ms = speed.bits_per_s / 1e9, speed.delay_s * 1e3
    facts["link"] = f"{gbit:g} Gbit/s, {delay_ms:g} ms each way"
    facts["round trip of 8 bytes"] = f"{round_trip_ms(link):.2f} ms"
    facts["congestion control"] = CONGESTION_CONTROL.read_text().strip()

    def inside(side: str, make: Make) -> Make:
        return link.inside(SIDES.index(side), make)

    contenders = Contenders(
        *(Devices("cpu", "cpu", "zmq"), pool_nbytes(requests)),
        settings=settings_of(options) | {"allowed_peers": list(ADDRESSES)},
        start_method=FORK_SERVER,
        hosts=ADDRESSES,
        inside=inside,
        environment=NETWORK_ONLY,
    )
    title = f"Transfer over {gbit:g} Gbit/s with {delay_ms:g} ms of delay"
    tables = speed_tables("speed", HOST_TEXT)
    report = Report(options.out, "link_cpu", title, facts, tables, speed_plot)
    measured = Run(contenders, report, SOCKETS, aim)
    try:
        start_host(contenders, options.transport, requests, is_one_host=False)
        report.records["trials"] = contenders.choices
        for request in requests:
            measured.case(request, options.rounds, BUDGET_S)
    finally:
        report.lost = contenders.lost()
        contenders.close()
        relayed = link.relayed()
        facts["frames of up to 64 KiB"] = (
            f"{relayed.num_carried} carried, {relayed.num_dropped} dropped, the latest "
            f"{relayed.latest_s * 1e3:.1f} ms late"
        )
        report.write(is_last=True)
    return int(contenders.has_wrong_bytes)


def main() -> None:
    """Make the link, measure, and let it go."""
    parser = parser_of(__doc__)
    parser.add_argument("--transport", nargs="+", choices=WIRES, default=list(WIRES))
    add_case_options(
        parser,
        shapes=[LLAMA_8B.name],
        layouts=["HND16->HND16"],
        tokens=[128, 512],  # 16 and 64 MiB
        rounds=9,
    )
    add_wire_options(parser)
    parser.add_argument("--gbit", type=float, default=1.0, help="of the link, a second")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="one way")
    options = parser.parse_args()
    speed = Speed(options.gbit * 1e9, options.delay_ms / 1e3)
    try:
        link = SlowLink(speed)
    except LinkUnavailable as exc:
        raise SystemExit(f"bench_link: {exc}") from None
    try:
        raise SystemExit(run(options, link, speed))
    except ContenderLost as exc:
        raise SystemExit(f"bench_link: {exc}") from None
    finally:
        link.close()


if __name__ == "__main__":
    main()
