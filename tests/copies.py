"""Copies on a CPU that a test holds up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvxfer.transports.copy_thread import CopyJob
from kvxfer.transports.stream_packing import ChunkJob
from tests.wires import run_pieces

WAIT_S = 60.0


def is_pack(job: CopyJob) -> bool:
    """At the source of a stream."""
    return isinstance(job, ChunkJob) and job.order is not None


def is_unpack(job: CopyJob) -> bool:
    """At its sink."""
    return isinstance(job, ChunkJob) and job.order is None


class HeldPieces:
    """Pieces of a wire's copies, of some jobs, that wait until they may go on; of those that are
    made from now on.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        wire: str,
        is_held: Callable[[CopyJob], bool] = lambda job: True,
    ) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_ended = 0
        self.is_held = is_held
        run_pieces(patch, wire, self.run)

    def run(self, job: CopyJob) -> bool:
        if not self.is_held(job):
            return job.run()
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)
        has_more = job.run()
        self.num_ended += 1
        return has_more
