"""Many small transfers over one wire between two processes, and what these hold before and after.

What a process holds is looked at after a warm-up (first connections, caches and pools of the
libraries) and after each quarter. Whatever is kept for a transfer would show: over 100,000
transfers 10 bytes each are a megabyte.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.transfer.manifest import RankManifest
from scripts.benchmarks.devices import Devices
from scripts.benchmarks.host_ways import ZMQ_TCP, HostGiving, HostTaking
from scripts.benchmarks.members import SINK, SOURCE
from scripts.benchmarks.pools import TINY, Request, request_of
from scripts.benchmarks.usage import Usage
from scripts.benchmarks.wire_ways import wire_config
from scripts.benchmarks.workers import FORK_SERVER, Worker, close_all

WARM_TRANSFERS = 1500
"""Then pools of the libraries have the size that they keep."""
QUARTERS = 4
MOST_GROWTH_NBYTES = 256 << 10
"""Of resident memory. Up to 32 KiB were seen by themselves, in 100,000 transfers over UCX: which
pages the allocator can give back differs. 100,000 transfers that leave 3 bytes each are more, and
so are 2000 that leave the smallest record that a wire has of one."""
STEP_S = 600.0


@dataclass(frozen=True, slots=True)
class Held:
    """One process: after the warm-up, and after each quarter of the transfers."""

    side: str
    usages: tuple[Usage, ...]

    @property
    def growth_nbytes(self) -> int:
        """Of resident memory, from the first look to the last."""
        return self.usages[-1].rss_nbytes - self.usages[0].rss_nbytes

    def leaks(self) -> list[str]:
        """What has grown, in words."""
        first, last = self.usages[0], self.usages[-1]
        found = []
        if self.growth_nbytes > MOST_GROWTH_NBYTES:
            found.append(f"{self.side}: resident memory grew by {self.growth_nbytes} bytes")
        if last.num_threads != first.num_threads:
            found.append(f"{self.side}: {first.num_threads} threads became {last.num_threads}")
        if last.num_descriptors != first.num_descriptors:
            descriptors = f"{first.num_descriptors} descriptors became {last.num_descriptors}"
            found.append(f"{self.side}: {descriptors}")
        return found


@dataclass(frozen=True, slots=True)
class Soaked:
    """``duration_s``: of all transfers after the warm-up."""

    wire: str
    num_transfers: int
    nbytes: int
    duration_s: float
    held: tuple[Held, ...]

    def leaks(self) -> list[str]:
        """Of both processes."""
        return [leak for held in self.held for leak in held.leaks()]


class Soak:
    """Two processes that are connected by one wire. Raises ContenderLost, as all its methods do."""

    def __init__(self, wire: str, *, num_tokens: int = 16, staging_slots: int = 4) -> None:
        self.wire = wire
        self.request: Request = request_of(TINY, "HND16->NHD64", num_tokens, 4 * num_tokens)
        nbytes = max(self.request.source.nbytes, self.request.sink.nbytes)
        config = wire_config(
            "zmq" if wire == ZMQ_TCP else wire, staging_slots=staging_slots, chunk_nbytes=64 << 10
        )
        devices = Devices("cpu", "cpu", wire)
        self._workers = {
            side: Worker(f"{wire}, {side}", make, devices, nbytes, config, method=FORK_SERVER)
            for side, make in ((SOURCE, HostGiving), (SINK, HostTaking))
        }
        try:
            source, sink = self._workers[SOURCE], self._workers[SINK]
            manifest = source.call(RankManifest, "manifest")
            sink.call(str, "attach", manifest, source.call(tuple, "address"), self.request)
        except BaseException:
            self.close()
            raise

    def transfer(self, count: int) -> float:
        """One after the other; seconds of all."""
        sink = self._workers[SINK]
        return sink.call(float, "many", self.request, count, timeout_s=STEP_S)

    def reattach(self, times: int) -> None:
        """Leave and come back, with one transfer each time."""
        self._workers[SINK].call(object, "reattach", self.request, times, timeout_s=STEP_S)

    def usages(self) -> dict[str, Usage]:
        """What each process holds now."""
        return {side: worker.call(Usage, "usage") for side, worker in self._workers.items()}

    def close(self) -> None:
        """End both."""
        close_all(self._workers.values())


def soak(wire: str, num_transfers: int, *, warm: int = WARM_TRANSFERS) -> Soaked:
    """So many, after the warm-up. Raises ContenderLost."""
    pair = Soak(wire)
    try:
        pair.transfer(warm)
        looks = [pair.usages()]
        duration_s, done = 0.0, 0
        for quarter in range(1, QUARTERS + 1):
            upto = num_transfers * quarter // QUARTERS
            duration_s += pair.transfer(upto - done)
            done = upto
            looks.append(pair.usages())
    finally:
        pair.close()
    held = tuple(Held(side, tuple(look[side] for look in looks)) for side in (SOURCE, SINK))
    return Soaked(wire, num_transfers, pair.request.nbytes, duration_s, held)
