"""Digests of this rank's KV, made on its copy thread: by a source of what it gives, by a sink of
what lies there after a read. The sink compares them when both its own and the verdict are there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.tensors.kv_digest import Cells, add_digests
from kvxfer.transfer.plan import PullClass
from kvxfer.transports.base import LocalMemory
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, work_of

if TYPE_CHECKING:  # it needs Triton, which a host without a GPU need not have
    from kvxfer.tensors.device_digest import DeviceDigester

SAMPLE_EVERY = 16
"""Of a sample one token in so many is looked at: the block of most engines, so of every block."""
EVERY = {"sample": SAMPLE_EVERY, "all": 1}
WORK = 3
"""A digest takes so many times as long as a copy does, on a CPU."""
TURN_NBYTES = 8 << 20
"""Looked at between two looks at the cancel flag: a millisecond or two on a CPU."""

Digests = tuple[int, ...]
Done = Callable[..., object]
"""Gets, last, the digest of each region, the classes one after the other; None: there is none."""

_log = logging.getLogger("kvxfer.connector")


class Verifier:
    """Of one rank. ``post``: has the IO thread call something."""

    def __init__(self, memory: LocalMemory, copy_thread: Copier, post: Callable[..., bool]) -> None:
        self._memory, self._copy_thread, self._post = memory, copy_thread, post
        self._of_thread = threading.local()

    def submit(
        self,
        lane: Hashable,
        cells: Sequence[Cells],
        seed: int,
        done: Done,
        *about: object,
        after: StreamEvent | None = None,
    ) -> None:
        """Make the digests, on a GPU behind ``after``; ``done(*about, digests)`` is called once,
        later, on the IO thread.
        """
        work_nbytes = None  # a thread that waits for a GPU is not the IO thread
        if self._memory.device.type == "cpu":
            num_regions = sum(len(each.names) for each in cells)
            nbytes = sum(each.nbytes for each in cells)
            work_nbytes = work_of(nbytes, num_regions) * WORK
        pieces = self._pieces(cells, seed, after)
        job = _DigestJob(lane, work_nbytes, pieces, self._post, (done, *about))
        self._copy_thread.submit(job)

    def _digester(self) -> DeviceDigester | None:
        """This thread's, for memory of a GPU."""
        if self._memory.device.type == "cpu":
            return None
        known: DeviceDigester | None = getattr(self._of_thread, "digester", None)
        if known is None:
            from kvxfer.tensors.device_digest import DeviceDigester

            known = self._of_thread.digester = DeviceDigester(self._memory.tensors)
        return known

    def _pieces(
        self, cells: Sequence[Cells], seed: int, after: StreamEvent | None
    ) -> Iterator[int | Digests]:
        """The bytes of each piece of work, and at last the digests."""
        digester = self._digester()
        if digester is not None:
            yield tuple(digester.digests(cells, seed, after))
            return
        if after is not None:
            after.synchronize()
        found: list[int] = []
        for each in cells:
            sums = np.zeros(len(each.names), np.uint64)
            yield from add_digests(self._memory.tensors, each, seed, sums)
            found += sums.tolist()
        yield tuple(found)


class _DigestJob(CopyJob):
    __slots__ = ("_digests", "_done", "_pieces", "_post")

    def __init__(
        self,
        lane: Hashable,
        work_nbytes: int | None,
        pieces: Iterator[int | Digests],
        post: Callable[..., bool],
        done: tuple[object, ...],
    ) -> None:
        super().__init__(lane, work_nbytes)
        self._pieces, self._post, self._done = pieces, post, done
        self._digests: Digests | None = None

    def run(self) -> bool:
        nbytes = 0
        for piece in self._pieces:
            if isinstance(piece, tuple):
                self._digests = piece
                return False
            nbytes += piece
            if nbytes >= TURN_NBYTES or self.cancelled:
                break
        return True

    def on_end(self) -> None:
        self._pieces = iter(())
        if self.end is CopyEnd.FAILED:
            _log.error("digest of %s: %s", self.lane, self.error)
        self._post(*self._done, self._digests)


def where_they_differ(
    classes: Sequence[PullClass], expected: Digests, got: Digests
) -> tuple[int, str]:
    """How many regions have other digests than they should, and the first of them in words."""
    names = [(wanted, name) for wanted in classes for name in wanted.regions]
    if len(expected) != len(names):
        return len(names), f"expected digests of {len(names)} regions, got {len(expected)}"
    found = [
        f"{name.layer}/{'+'.join(name.planes)} heads [{wanted.head_lo}, {wanted.head_hi}) tokens "
        f"[{wanted.token_lo}, {wanted.token_hi}): expected {theirs:016x}, got {ours:016x}"
        for (wanted, name), theirs, ours in zip(names, expected, got, strict=True)
        if theirs != ours
    ]
    return len(found), found[0] if found else ""
