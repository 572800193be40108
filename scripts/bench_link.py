"""What each wire makes of a slow link: 1 Gbit/s with 1 ms of delay each way.

The link joins two network namespaces that this script makes (root needed) and that go with it; see
scripts/benchmarks/slow_link.py. Contenders are those of bench_transfer.py that go over a network,
one process in each namespace: a plain TCP socket, which is the limit, zmq, ucx, nixl, UCX's own
messages and NIXL. Bytes are checked first, contenders take turns. The aim of every wire of kvxfer
is 0.95 of the socket.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from scripts.benchmarks.host_contenders import HOST, SIDES, HostContenders, kvxfer
from scripts.benchmarks.host_report import LIMITS, LINK_AIM, Report
from scripts.benchmarks.host_transfer import add_options, facts, run_case, settings_of
from scripts.benchmarks.link_probe import Echo, RoundTrips
from scripts.benchmarks.pools import SHAPES, request_of
from scripts.benchmarks.slow_link import ADDRESSES, LinkUnavailable, SlowLink, Speed
from scripts.benchmarks.workers import FORK_SERVER, ContenderLost, Worker, close_all

WIRES = ("zmq", "ucx", "nixl")
LAYOUTS = ("HND16->HND16",)
LENGTHS = (128, 512)  # 16 and 64 MiB
ROUNDS = 9
NETWORK_ONLY = {"UCX_TLS": "tcp"}
"""UCX sees that both namespaces are of one host, and would copy from process to process."""
BUDGET_S = 30.0


def round_trip_ms(link: SlowLink) -> float:
    """The median of a few bytes, there and back."""
    source = Worker("echo", link.inside(0, Echo), ADDRESSES[0], method=FORK_SERVER)
    sink = Worker("round trips", link.inside(1, RoundTrips), method=FORK_SERVER)
    try:
        taken_s: list[float] = sink.call(list, "measure", source.call(tuple, "address"))
    finally:
        close_all((sink, source))
    return statistics.median(taken_s) * 1e3


def run(options: argparse.Namespace, link: SlowLink, speed: Speed) -> int:
    """1 if anybody copied wrong bytes."""
    requests = [
        request_of(SHAPES[options.shape], layouts, num_tokens, max(options.tokens) * 9 // 8)
        for num_tokens in options.tokens
        for layouts in options.layouts
    ]
    settings = settings_of(options)
    nbytes = max(pool.nbytes for request in requests for pool in (request.source, request.sink))
    found = facts("bench_link.py", settings, options.note)
    found["link"] = f"{speed.bits_per_s / 1e9:g} Gbit/s, {speed.delay_s * 1e3:g} ms each way"
    found["round trip of 8 bytes"] = f"{round_trip_ms(link):.2f} ms"
    found["congestion control"] = (
        Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    )
    title = (
        f"Transfer over {speed.bits_per_s / 1e9:g} Gbit/s with {speed.delay_s * 1e3:g} ms of delay"
    )
    report = Report(options.out, "link_cpu", title, LIMITS, found, digits=4)

    def inside(side: str, make: Callable[..., object]) -> Callable[..., object]:
        return link.inside(SIDES.index(side), make)

    contenders = HostContenders(
        *(HOST, nbytes, settings | {"allowed_peers": list(ADDRESSES)}),
        requests=tuple(requests),
        wires=options.transport,
        hosts=ADDRESSES,
        inside=inside,
        is_one_host=False,
        environment=NETWORK_ONLY,
    )
    aims = dict.fromkeys(map(kvxfer, WIRES), LINK_AIM)
    try:
        contenders.start()
        report.choices = contenders.choices
        for request in requests:
            run_case(*(contenders, request, report, aims), rounds=options.rounds, budget_s=BUDGET_S)
    finally:
        report.lost = contenders.lost()
        contenders.close()
        relayed = link.relayed()
        found["frames of up to 64 KiB"] = (
            f"{relayed.num_carried} carried, {relayed.num_dropped} dropped, the latest "
            f"{relayed.latest_s * 1e3:.1f} ms late"
        )
        report.write(is_last=True)
    return int(any(way.has_wrong_bytes for way in contenders.ways))


def main() -> None:
    """Make the link, measure, and let it go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--transport", nargs="+", choices=WIRES, default=list(WIRES))
    add_options(parser, LAYOUTS, LENGTHS, ROUNDS)
    parser.add_argument("--gbit", type=float, default=1.0, help="of the link, a second")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="one way")
    options = parser.parse_args()
    options.transport = tuple(options.transport)
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
