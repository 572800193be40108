"""Nothing is left behind by what a wire has moved, nor by connections that have come and gone.

Two processes for each wire, with nothing in them but the wire (kvxfer/bench/soak.py, which
``kvxfer bench soak`` runs for longer). Resident memory is looked at after a garbage
collection and ``malloc_trim``: without these it varies by megabytes.
"""

from __future__ import annotations

import time

import pytest

from kvxfer.bench.members import Usage
from kvxfer.bench.soak import Soak, soak
from tests.helpers import needs_nixl, needs_ucxx

pytestmark = pytest.mark.slow

WIRES = (
    "shm",
    "zmq",
    "tcp",
    pytest.param("ucx", marks=needs_ucxx),
    pytest.param("nixl", marks=needs_nixl),
)
NUM_TRANSFERS, WARM_TRANSFERS = 2000, 500
NUM_CONNECTIONS, WARM_CONNECTIONS = 24, 8
STAGING_TOKENS = 512
"""Of a request that fills all of a connection's staging, 256 KiB on each side."""
MOST_CONNECTIONS_GROWTH_NBYTES = 2 << 20
"""A third of their staging. UCX takes up to 0.9 MB in the first connections and nothing in the next
600; the others take less than 1 KiB each."""
SETTLE_S = 60.0


@pytest.mark.parametrize("wire", WIRES)
def test_transfers_leave_nothing_behind(wire: str) -> None:
    soaked = soak(wire, NUM_TRANSFERS, warm=WARM_TRANSFERS)
    assert not [leak for held in soaked for leak in held.leaks()], soaked


@pytest.mark.parametrize("wire", WIRES)
def test_connections_leave_nothing_behind(wire: str) -> None:
    pair = Soak(wire, num_tokens=STAGING_TOKENS)
    try:
        pair.reattach(WARM_CONNECTIONS)
        first = settled(pair)
        pair.reattach(NUM_CONNECTIONS)
        last = settled(pair, first)
    finally:
        pair.close()
    for side, before in first.items():
        after = last[side]
        grown_nbytes = after.rss_nbytes - before.rss_nbytes
        assert grown_nbytes < MOST_CONNECTIONS_GROWTH_NBYTES, (side, before, after)
        assert after.num_threads <= before.num_threads, (side, before, after)
        assert after.num_descriptors <= before.num_descriptors, (side, before, after)


def settled(pair: Soak, wanted: dict[str, Usage] | None = None) -> dict[str, Usage]:
    """What both hold once nothing of it changes any more, or is no more than wanted: a source hears
    that a sink has left after a moment, and some libraries let go of things later.
    """
    deadline_s = time.monotonic() + SETTLE_S
    known = counts(pair.usages())
    while time.monotonic() < deadline_s:
        time.sleep(0.5)
        usages = pair.usages()
        now = counts(usages)
        if now == known if wanted is None else not grown(now, counts(wanted)):
            return usages
        known = now
    return pair.usages()


def grown(now: list[tuple[int, int]], before: list[tuple[int, int]]) -> bool:
    """What ends later than it usually does is no leak."""
    return any(a > b for each in zip(now, before, strict=True) for a, b in zip(*each, strict=True))


def counts(usages: dict[str, Usage]) -> list[tuple[int, int]]:
    return [(usage.num_threads, usage.num_descriptors) for usage in usages.values()]
