"""One contiguous copy in a process that sees both sides: what the hardware can do."""

from __future__ import annotations

from functools import partial

from kvxfer.bench.core import Timing, timed
from kvxfer.bench.members import SINK, SOURCE, Devices, Member, finish
from kvxfer.bench.pools import Request

MEMCPY = "memcpy"


class PlainCopy(Member):
    def __init__(self, devices: Devices, nbytes: int) -> None:
        super().__init__(devices.by_side, nbytes)
        source, sink = self.memories[SOURCE].tensor, self.memories[SINK].tensor
        # A GPU may read the other's memory once torch has copied from it to the other
        sink[:1024].copy_(source[:1024])
        source[:1024].copy_(sink[:1024])

    def run(self, way: str, request: Request) -> Timing:
        """From the call to the end of all that both devices have to do."""
        source, sink = self.memories[SOURCE], self.memories[SINK]
        given, taken = (memory.tensor[: request.nbytes] for memory in (source, sink))
        self.flush()
        return timed(partial(taken.copy_, given), partial(finish, source.device, sink.device))
