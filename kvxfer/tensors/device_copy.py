"""Copy the KV of a request on a GPU: between pools, of which one may be a peer's, or between a pool
and dense chunks. The same copy as ``strided_copy.py`` does on the CPU, by one kernel.

All is checked on the host before anything is launched. Nothing waits for the GPU: what a launch
needs to know goes there through pinned memory, on the caller's stream, and an event tells the end.
Python's work is by launch, of about 1 GiB each; ids are handled as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvxfer.kernels.strided_work import MAX_REGION_NBYTES, NUM_PARAMS, WHOLE_GPU
from kvxfer.tensors.device_launch import Stamp, Stream, launcher_of
from kvxfer.tensors.device_work import (
    BoundCopy,
    BoundSide,
    Work,
    chunk_works,
    empty_works,
    pool_work,
)
from kvxfer.tensors.job_ring import WORD_NBYTES, Event, JobRing
from kvxfer.tensors.strided_index import (
    Ids,
    are_blocks,
    check_chunk,
    check_order,
    check_regions,
    check_span,
    check_tokens,
    token_nbytes,
    token_pieces,
)
from kvxfer.transfer.plan import DenseOrder, Tile


@dataclass(frozen=True, slots=True)
class CopySettings:
    """``launch_programs``: thread blocks of a launch, so at most how many SMs a copy takes from
    others; other than of chunks within a GPU. ``launch_nbytes``: at most that much in one launch
    (unless one token is more), so that a copy can be stopped. ``ring_nbytes``: for the ids and
    addresses of all launches on their way.
    """

    launch_programs: int = 24
    launch_nbytes: int = 1 << 30
    ring_nbytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("launch_programs", self.launch_programs, 1, 1 << 16),
            ("launch_nbytes", self.launch_nbytes, 1, MAX_REGION_NBYTES),
            ("ring_nbytes", self.ring_nbytes, 1 << 12, 1 << 30),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")


@dataclass(frozen=True, slots=True)
class Launched:
    """What was put on a stream so far: ``event`` is behind it, ``nbytes`` are all bytes of it.

    ``event`` is None where there was nothing to copy.
    """

    event: Event | None
    nbytes: int


class DeviceCopier:
    """Launches copies on one GPU. For one thread, on any of its streams.

    On the CPU it needs Triton's interpreter (TRITON_INTERPRET=1), for tests; streams are None then.
    """

    def __init__(self, device: torch.device, settings: CopySettings | None = None) -> None:
        self._settings = settings or CopySettings()
        self._device = device
        self._ring = JobRing(self._settings.ring_nbytes, device)
        self._launcher = launcher_of(device)
        self._looked_through: tuple[Ids, Tile] | None = None

    @property
    def num_waits(self) -> int:
        """How often the host waited, because the ring was in use all over."""
        return self._ring.num_waits

    def has_room(self) -> bool:
        """Whether the next launch needs no wait: the ring is at most half in use."""
        return self._ring.has_room()

    def warm(self, bound: BoundCopy, stream: Stream, programs: int | None = None) -> Event:
        """Compile what copies between these sides need, for it takes a second the first time on a
        machine; nothing is copied.
        """
        works = empty_works(bound, self._programs_for(programs))
        events = [self._launch(work, stream, is_empty=True) for work in works]
        return events[-1]

    def warm_unpack(self, side: BoundSide, stream: Stream) -> Event:
        """Compile what unpacks chunks of this side, from this GPU and from the host; nothing is
        copied.
        """
        widths = (WHOLE_GPU, self._settings.launch_programs)
        ids, order = np.zeros(1, np.int64), side.tile.order
        for num_tokens in (side.tile.kernel_tokens, 1):
            span = (0, side.addresses.size, 0, num_tokens)
            for programs in widths:
                for work in chunk_works(side, ids, order, span, 0, programs, is_pack=False):
                    self._launch(work, stream, is_empty=True)
        return self.mark(stream)

    def mark(self, stream: Stream) -> Event:
        """An event behind all that was put on the stream, also by a launch that failed."""
        self._check_stream(stream)
        return self._launcher.record(stream)

    def stamp(self, stream: Stream) -> Stamp:
        """The same, whose moment the GPU notes."""
        self._check_stream(stream)
        return self._launcher.stamp(stream)

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        """What is put on the stream from now on runs after PyTorch's event."""
        self._check_stream(stream)
        self._launcher.wait(stream, event)

    def copy(
        self,
        bound: BoundCopy,
        source_ids: Ids,
        sink_ids: Ids,
        token_lo: int,
        token_hi: int,
        *,
        stream: Stream,
        stop: Callable[[], bool] = lambda: False,
        programs: int | None = None,
    ) -> Launched:
        """Copy tokens ``[token_lo, token_hi)`` of all regions; the source is only read.

        Ids: int64, positional from the request's first token, -1 for none. ``stop`` is asked before
        each launch; once it says True no more follow. ``programs``: other than the settings' for
        this copy, or WHOLE_GPU. Raises ValueError, before anything is launched, for a span or ids
        that are not those of these pools.
        """
        done = Launched(None, 0)
        span = (token_lo, token_hi)
        launches = self.launches(
            bound, source_ids, sink_ids, *span, stream=stream, programs=programs
        )
        while not stop():
            following = next(launches, None)
            if following is None:
                break
            done = following
        return done

    def launches(
        self,
        bound: BoundCopy,
        source_ids: Ids,
        sink_ids: Ids,
        token_lo: int,
        token_hi: int,
        *,
        stream: Stream,
        programs: int | None = None,
    ) -> Iterator[Launched]:
        """The same, launch by launch: each ``next`` puts one on the stream.

        For those who want few on their way at a time, so that a copy ends soon after it is given
        up. The check comes at once.
        """
        check_span(bound.source.tile, source_ids, token_lo, token_hi)
        check_span(bound.sink.tile, sink_ids, token_lo, token_hi)
        limit_nbytes = self._piece_nbytes(bound)
        pieces = token_pieces(bound.source.tile, bound.sink.tile, token_lo, token_hi, limit_nbytes)
        width = self._programs_for(programs)
        works = (pool_work(bound, source_ids, sink_ids, lo, hi, width) for lo, hi in pieces)
        return self._launched(works, stream)

    def pack(
        self,
        side: BoundSide,
        block_ids: Ids,
        order: DenseOrder,
        region_lo: int,
        region_hi: int,
        token_lo: int,
        token_hi: int,
        out: Tensor,
        *,
        stream: Stream,
        programs: int | None = None,
    ) -> Launched:
        """Pack a chunk: tokens of regions ``[region_lo, region_hi)`` into ``out``, in ``order``.

        out: uint8 on the GPU or in pinned memory, exactly the chunk's bytes. Within the GPU it is
        packed by all of it, unless ``programs`` says otherwise: beside a loop that reads memory, a
        GB takes 0.23 ms from it then, and 0.45 by 24 programs. Raises ValueError, before anything
        is launched, for ids outside the pool and for a wrong size or order.
        """
        span = (region_lo, region_hi, token_lo, token_hi)
        self._check_chunk(side, block_ids, order, span, out, "out")
        where = (out.data_ptr(), self._programs_for(programs, out))
        works = chunk_works(side, block_ids, order, span, *where, is_pack=True)
        return _last(self._launched(works, stream))

    def unpack(
        self,
        side: BoundSide,
        block_ids: Ids,
        region_lo: int,
        region_hi: int,
        token_lo: int,
        token_hi: int,
        dense: Tensor,
        *,
        stream: Stream,
        programs: int | None = None,
    ) -> Launched:
        """Unpack a chunk that lies in the sink's own physical order; the reverse of :meth:`pack`
        with the order of the side's tile.
        """
        span = (region_lo, region_hi, token_lo, token_hi)
        order = side.tile.order
        self._check_chunk(side, block_ids, order, span, dense, "dense")
        where = (dense.data_ptr(), self._programs_for(programs, dense))
        works = chunk_works(side, block_ids, order, span, *where, is_pack=False)
        return _last(self._launched(works, stream))

    def _programs_for(self, programs: int | None, dense: Tensor | None = None) -> int:
        """As many as were asked for; else those of the settings, and for a chunk within this GPU
        all of it. Over PCIe a few are enough, and more would only hold SMs.
        """
        if programs is not None:
            return programs
        is_near = dense is not None and dense.device.type == self._device.type
        return WHOLE_GPU if is_near else self._settings.launch_programs

    def _check_chunk(
        self,
        side: BoundSide,
        block_ids: Ids,
        order: DenseOrder,
        span: tuple[int, int, int, int],
        dense: Tensor,
        name: str,
    ) -> None:
        region_lo, region_hi, token_lo, token_hi = span
        check_regions(side.addresses.size, region_lo, region_hi)
        self._check_ids(side.tile, block_ids, token_lo, token_hi)
        check_order(side.tile, order)
        region_nbytes = (token_hi - token_lo) * token_nbytes(side.tile)
        check_chunk(dense, name, region_hi - region_lo, region_nbytes)
        if dense.device.type != self._device.type and not dense.is_pinned():
            raise ValueError(
                f"{name}: expected a tensor on {self._device} or in pinned memory, "
                f"got {dense.device}"
            )

    def _check_ids(self, tile: Tile, ids: Ids, token_lo: int, token_hi: int) -> None:
        """Chunks of a transfer have one array of ids, which nobody writes to any more: it is looked
        through once, for that takes 10 us of a cold processor.
        """
        check_tokens(tile, ids, token_lo, token_hi)
        known = self._looked_through
        if known is not None and known[0] is ids and known[1] == tile:
            return
        if are_blocks(tile, ids):
            self._looked_through = (ids, tile)
        else:  # there may be none for other tokens than these
            check_span(tile, ids, token_lo, token_hi)

    def _piece_nbytes(self, bound: BoundCopy) -> int:
        """Bytes of one region in one launch: what the settings allow, and no more ids than a
        quarter of the ring holds, so that the next launches need not wait for this one.
        """
        num_regions = bound.source.addresses.size
        if num_regions == 0:
            return self._settings.launch_nbytes
        ours, theirs = bound.sink.tile.block_tokens, bound.source.tile.block_tokens
        num_ids = self._ring.num_words // 4 - NUM_PARAMS - 2 * num_regions
        # Tokens fill so many blocks of both sides, and may touch one more at each end
        num_tokens = (num_ids - 4) * ours * theirs // (ours + theirs)
        if num_tokens < 1:
            raise ValueError(
                f"ring_nbytes: expected {16 * WORD_NBYTES * num_regions} or more for {num_regions} "
                f"regions, got {self._settings.ring_nbytes}"
            )
        by_ring = num_tokens * token_nbytes(bound.sink.tile)
        return min(by_ring, max(1, self._settings.launch_nbytes // num_regions))

    def _launched(self, works: Iterator[Work], stream: Stream) -> Iterator[Launched]:
        nbytes = 0
        for work in works:
            if not work.nbytes:
                continue
            event = self._launch(work, stream)
            nbytes += work.nbytes
            yield Launched(event, nbytes)

    def _launch(self, work: Work, stream: Stream, *, is_empty: bool = False) -> Event:
        self._check_stream(stream)
        arrays = (
            *(work.plan.params, work.source_addresses, work.sink_addresses),
            *(work.source_ids, work.sink_ids),
        )
        sizes = [array.size for array in arrays]
        slot = self._ring.take(sum(sizes))
        try:
            np.concatenate(arrays, out=slot.host)
            if is_empty:
                slot.host[0] = 0  # words of each pair
            self._launcher.launch(slot, sizes, work.plan.launch, stream)
        finally:  # whatever failed, a part may be on its way
            event = self._launcher.record(stream)
            self._ring.close(slot, event)
        return event

    def _check_stream(self, stream: Stream) -> None:
        if stream is None and self._device.type != "cpu":
            raise ValueError(f"stream: expected one of {self._device}, got None")


def _last(launches: Iterator[Launched]) -> Launched:
    done = Launched(None, 0)
    for launched in launches:
        done = launched
    return done
