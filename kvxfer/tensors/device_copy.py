"""Copy the KV of a request on a GPU: between pools, of which one may be a peer's, or between a pool
and dense chunks. The same copy as ``strided_copy.py`` does on the CPU, by one kernel.

All is checked on the host before anything is launched. Nothing waits for the GPU: the parameters of
a launch go there through pinned memory, on the caller's stream, and an event tells the end. Python
works per launch, of about 1 GiB each; ids are handled as arrays. Results that do not depend on ids
and addresses are computed once: the chunks of a transfer are alike, and so are prompts of a length.
A thread that has just woken takes 50 us for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from msgspec import Struct, structs
from torch import Tensor

from kvxfer.kernels import cast_work
from kvxfer.kernels.strided_work import (
    MAX_REGION_NBYTES,
    WHOLE_GPU,
    Launch,
    plan_launch,
)
from kvxfer.tensors import strided_index as index
from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.tensors.device_launch import (
    GpuLauncher,
    HostLauncher,
    JobRing,
    Stamp,
    Stream,
)
from kvxfer.tensors.device_memory import DeviceMemory, is_pinned
from kvxfer.tensors.strided_index import Ids, are_blocks
from kvxfer.transfer.casts import Values
from kvxfer.transfer.plan import AnySide, Base, CopyClass, DenseOrder, Side, Tile

# The widest access of the kernel; alignment beyond it does not matter
_ALIGN_NBYTES = 16


class BoundSide(AnySide, frozen=True, kw_only=True):
    """A side of a geometry class in memories known to hold it: an address for each region.
    ``align_nbytes`` divides all of them; 0: to be found.
    """

    addresses: Ids
    align_nbytes: int = 0
    scale: BoundSide | None = None

    @property
    def dense_token_nbytes(self) -> int:
        """Bytes of one token of one region in a chunk."""
        return self.tile.num_heads * self.dense_inner_nbytes

    def part(self, region_lo: int, region_hi: int) -> BoundSide:
        """Some of its regions."""
        values, chunk, scale = self.values, self.chunk, self.scale
        return structs.replace(
            self,
            addresses=self.addresses[region_lo:region_hi],
            values=values and _part_of(values, region_lo, region_hi),
            chunk=chunk and _part_of(chunk, region_lo, region_hi),
            scale=scale and scale.part(region_lo, region_hi),
        )

    def __post_init__(self) -> None:
        if not self.align_nbytes:
            common = np.gcd.reduce(self.addresses, initial=_ALIGN_NBYTES)
            structs.force_setattr(self, "align_nbytes", int(common))


@dataclass(frozen=True, slots=True)
class BoundCopy:
    """Both sides of a geometry class; good as long as the memories are there."""

    source: BoundSide
    sink: BoundSide


def _part_of(values: Values, region_lo: int, region_hi: int) -> Values:
    return Values(values.dtype, values.scales[region_lo:region_hi])


def side_at(side: Side, address_of: Callable[[Base], int]) -> BoundSide:
    """The side at these addresses, which nobody has checked."""
    return BoundSide(
        tile=side.tile,
        addresses=np.array([address_of(base) for base in side.bases], np.int64),
        values=side.values,
        chunk=side.chunk,
        scale=None if side.scale is None else side_at(side.scale, address_of),
    )


def bind_side(side: Side, memories: Sequence[DeviceMemory]) -> BoundSide:
    """The side in these memories. Raises ValueError for bases outside them."""
    for each in (side, side.scale):
        if each is not None:
            sizes = [memory.nbytes for memory in memories]
            index.check_bases(each.tile, each.bases, sizes)
    return side_at(side, lambda base: memories[base.memory].address + base.offset)


def bind_copy(
    copy_class: CopyClass,
    source_memories: Sequence[DeviceMemory],
    sink_memories: Sequence[DeviceMemory],
) -> BoundCopy:
    """Once for all requests. ValueError for bases outside them or sides that do not fit."""
    index.check_pair(copy_class)
    return BoundCopy(
        bind_side(copy_class.source, source_memories), bind_side(copy_class.sink, sink_memories)
    )


def flat_copy(source_address: int, sink_address: int, nbytes: int) -> BoundCopy:
    """Contiguous bytes as a copy of one block: at most so many, rounded down to 2 KiB where there
    are more. Its binary is that of ordinary caches, of rows of 16-byte words in several regions.
    """
    num_regions, row_nbytes = (8, 256) if nbytes >= 2048 else (1, max(1, nbytes))
    num_rows = max(1, nbytes // (num_regions * row_nbytes))
    region_nbytes = num_rows * row_nbytes
    tile = Tile(
        block_tokens=num_rows,
        kernel_tokens=num_rows,
        num_blocks=1,
        num_heads=1,
        inner_nbytes=row_nbytes,
        stride_block=region_nbytes,
        stride_head=row_nbytes,
        stride_token=row_nbytes,
    )
    offsets = np.arange(num_regions, dtype=np.int64) * region_nbytes
    return BoundCopy(
        BoundSide(tile=tile, addresses=source_address + offsets),
        BoundSide(tile=tile, addresses=sink_address + offsets),
    )


class Work(Struct, frozen=True):
    """One launch of ``nbytes``. ``arrays`` as the kernel takes them: its numbers, the addresses of
    the source and of the sink, the ids of the source and of the sink.
    """

    launch: Launch | cast_work.CastLaunch
    nbytes: int
    arrays: tuple[Ids, Ids, Ids, Ids, Ids]


def _pool_work(
    bound: BoundCopy,
    source_ids: Ids,
    sink_ids: Ids,
    tokens: tuple[int, int],
    programs: int,
    *,
    is_native: bool = False,
) -> Work:
    """Ids are positional. ``programs``: at most, or WHOLE_GPU."""
    source, sink, (lo, hi) = bound.source, bound.sink, tokens
    num_regions = source.addresses.size
    firsts = (lo % source.tile.block_tokens, lo % sink.tile.block_tokens)
    ids = (
        index.span_ids(source.tile, source_ids, lo, hi),
        index.span_ids(sink.tile, sink_ids, lo, hi),
    )
    if source.values is not None:
        return _cast_work((source, sink), firsts, ids, hi - lo, programs, is_native=is_native)
    launch, numbers = _plan_pools(
        *(source.tile, sink.tile, *firsts, hi - lo, num_regions),
        *(math.gcd(source.align_nbytes, sink.align_nbytes), programs),
    )
    nbytes = (hi - lo) * index.token_nbytes(sink.tile) * num_regions
    return Work(launch, nbytes, (numbers, source.addresses, sink.addresses, *ids))


def empty_works(bound: BoundCopy, programs: int, *, is_native: bool = False) -> list[Work]:
    """One copy for each of the binaries that copies between these sides need: tokens of whole
    blocks can be joined to wider words, where a single one cannot. What they name is not to be
    copied.
    """
    ids = np.zeros(1, np.int64)
    works: dict[tuple[object, ...], Work] = {}
    for num_tokens in (0, 1):
        work = _pool_work(bound, ids, ids, (0, num_tokens), programs, is_native=is_native)
        works.setdefault(work.launch.binary, work)
    return list(works.values())


def chunk_works(
    side: BoundSide,
    block_ids: Ids,
    order: DenseOrder,
    tokens: tuple[int, int],
    pieces: Sequence[tuple[tuple[int, int], int]],
    programs: int,
    *,
    is_pack: bool,
    is_native: bool = False,
) -> Iterator[Work]:
    """The launches that chunks of the same ``tokens`` need: from the pool to the chunks, or back.
    Tokens, and the regions of each of the ``pieces``, are given from and to; with the regions goes
    the address of the chunk. Only in head-major order, a kernel block that the tokens cut has other
    strides than whole ones: up to three launches. Where values are cast, each chunk has its own.
    """
    (lo, hi), tile = tokens, side.tile
    if side.is_cast:
        for regions, address in pieces:
            dense = _dense_side(side, regions, hi - lo, address)
            ends = (side.part(*regions), dense)
            firsts = (lo % tile.block_tokens, 0)
            ids = (index.span_ids(tile, block_ids, lo, hi), np.zeros(1, np.int64))
            if not is_pack:
                ends, firsts, ids = ends[::-1], firsts[::-1], ids[::-1]
            yield _cast_work(ends, firsts, ids, hi - lo, programs, is_native=is_native)
        return
    parts = _chunk_parts(
        *(tile, order, lo % math.lcm(tile.block_tokens, order.kernel_tokens), hi - lo),
        sum(region_hi - region_lo for (region_lo, region_hi), _ in pieces),
        math.gcd(side.align_nbytes, *(address for _, address in pieces)),
        programs,
        is_pack=is_pack,
    )
    pool_addresses = np.concatenate([side.addresses[slice(*regions)] for regions, _ in pieces])
    for part in parts:
        pool_ids = index.span_ids(tile, block_ids, lo + part.token_lo, lo + part.token_hi)
        dense_addresses = [
            address + part.offsets[: region_hi - region_lo]
            for (region_lo, region_hi), address in pieces
        ]
        addresses = (pool_addresses, np.concatenate(dense_addresses))
        ids = (pool_ids, part.dense_ids)
        if not is_pack:
            addresses, ids = addresses[::-1], ids[::-1]
        yield Work(part.launch, part.nbytes, (part.numbers, *addresses, *ids))


def _dense_side(
    side: BoundSide, regions: tuple[int, int], num_tokens: int, address: int
) -> BoundSide:
    """A chunk of a side that casts, token by token, as one block of its tokens."""
    assert side.chunk is not None
    token_nbytes, num_tokens = side.dense_token_nbytes, max(1, num_tokens)
    inner_nbytes = token_nbytes // side.tile.num_heads
    tile = Tile(
        block_tokens=num_tokens,
        kernel_tokens=num_tokens,
        num_blocks=1,
        num_heads=side.tile.num_heads,
        inner_nbytes=inner_nbytes,
        stride_block=num_tokens * token_nbytes,
        stride_head=inner_nbytes,
        stride_token=token_nbytes,
    )
    offsets = np.arange(regions[1] - regions[0], dtype=np.int64) * (num_tokens * token_nbytes)
    values = _part_of(side.chunk, *regions)
    return BoundSide(tile=tile, addresses=address + offsets, values=values)


def _cast_work(
    sides: tuple[BoundSide, BoundSide],
    firsts: tuple[int, int],
    ids: tuple[Ids, Ids],
    num_tokens: int,
    programs: int,
    *,
    is_native: bool,
) -> Work:
    """One launch that casts, from the first side to the second. ``ids`` begin with the blocks in
    which the tokens ``firsts`` are. Raises ValueError for addresses between elements.
    """
    ends, tables = [], []
    for number, (side, first) in enumerate(zip(sides, firsts, strict=True)):
        assert side.values is not None
        kind, words = _scale_words(side.values, side.tile.num_heads, is_sink=number == 1)
        if side.scale is not None:
            kind, words = cast_work.TOKENS, side.scale.addresses
        scale_align = side.scale.align_nbytes if side.scale else cast_work.SCALE_NBYTES
        if side.align_nbytes % side.values.item_nbytes or scale_align % cast_work.SCALE_NBYTES:
            raise ValueError(
                f"addresses: expected multiples of {side.values.item_nbytes} bytes, as "
                f"{side.values.dtype} has, got some that {side.align_nbytes} divides"
            )
        scale_tile = side.scale.tile if side.scale else None
        ends.append((side.tile, first, side.values.dtype, kind, scale_tile, side.align_nbytes))
        tables.append(np.concatenate((side.addresses, words)))
    launch, numbers = _plan_cast(
        *ends, num_tokens, sides[0].addresses.size, programs, is_native=is_native
    )
    token_nbytes = next(side.dense_token_nbytes for side in sides if side.chunk)
    nbytes = num_tokens * token_nbytes * sides[0].addresses.size
    return Work(launch, nbytes, (numbers, tables[0], tables[1], *ids))


_End = tuple[Tile, int, str, int, Tile | None, int]
"""Tile, first token, type, kind of scales, the tile of these, and what divides the addresses."""


@lru_cache(maxsize=1024)
def _plan_cast(
    source: _End,
    sink: _End,
    num_tokens: int,
    num_regions: int,
    programs: int,
    *,
    is_native: bool,
) -> tuple[cast_work.CastLaunch, Ids]:
    ends = [_cast_end(*source), _cast_end(*sink)]
    tile = source[0]
    launch = cast_work.plan_cast(
        *ends,
        num_tokens=num_tokens,
        num_heads=tile.num_heads,
        num_elements=tile.inner_nbytes // ends[0].item_nbytes,
        num_regions=num_regions,
        num_programs=programs,
        is_native=is_native,
    )
    return launch, np.array(launch.params, np.int64)


def _cast_end(
    tile: Tile, first_token: int, dtype: str, kind: int, scale_tile: Tile | None, align_nbytes: int
) -> cast_work.CastEnd:
    return cast_work.CastEnd(
        cells=index.pool_side(tile, first_token),
        dtype=dtype,
        item_nbytes=Values(dtype).item_nbytes,
        scales=kind,
        scale_cells=None if scale_tile is None else index.pool_side(scale_tile, first_token),
        align_nbytes=align_nbytes,
    )


@lru_cache(maxsize=256)
def _scale_words(values: Values, num_heads: int, *, is_sink: bool) -> tuple[int, Ids]:
    """The kind of a side's scales, and those of each region and head as words of a table."""
    if not values.scales:
        return cast_work.ONE, np.zeros(0, np.int64)
    scales = np.array(
        [each if len(each) == num_heads else each * num_heads for each in values.scales], np.float32
    )
    kind = cast_work.TABLE
    if is_sink and not (np.frexp(scales)[0] != 0.5).any():  # powers of two
        kind, scales = cast_work.INVERSE, np.float32(1) / scales
    return kind, scales.reshape(-1).view(np.int32).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Part:
    """One launch of a chunk; tokens and offsets (of each region) count from the chunk's first."""

    launch: Launch
    numbers: Ids
    nbytes: int
    token_lo: int
    token_hi: int
    offsets: Ids
    dense_ids: Ids


@lru_cache(maxsize=1024)
def _plan_pools(
    source: Tile,
    sink: Tile,
    source_first: int,
    sink_first: int,
    num_tokens: int,
    num_regions: int,
    align_nbytes: int,
    programs: int,
) -> tuple[Launch, Ids]:
    sides = (index.pool_side(source, source_first), index.pool_side(sink, sink_first))
    work = index.copy_work(*sides, sink, num_tokens, align_nbytes)
    launch = plan_launch(work, num_regions, programs)
    return launch, np.array(launch.params, np.int64)


@lru_cache(maxsize=1024)
def _chunk_parts(
    tile: Tile,
    order: DenseOrder,
    first_token: int,
    num_tokens: int,
    num_regions: int,
    align_nbytes: int,
    programs: int,
    *,
    is_pack: bool,
) -> tuple[_Part, ...]:
    """``first_token`` counts from where a block and a kernel block of the order begin."""
    region_nbytes = num_tokens * index.token_nbytes(tile)
    regions = np.arange(num_regions, dtype=np.int64) * region_nbytes
    # A piece that is one run of tokens is one block
    cut_tokens = max(1, num_tokens) if index.is_flat(tile, order) else order.kernel_tokens
    first = 0 if index.is_flat(tile, order) else first_token % cut_tokens
    parts = []
    for cut_lo, cut_hi in index.token_rectangles(first, first + num_tokens, cut_tokens):
        lo, hi = cut_lo - first, cut_hi - first
        block_tokens, offset = min(cut_tokens, hi - lo), lo * index.token_nbytes(tile)
        work = index.dense_work(
            *(tile, order, (first_token + lo) % tile.block_tokens, hi - lo, block_tokens),
            math.gcd(align_nbytes, offset, region_nbytes),
        )
        if not is_pack:
            work = replace(work, source=work.sink, sink=work.source)
        launch = plan_launch(work, num_regions, programs)
        numbers = np.array(launch.params, np.int64)
        nbytes = (hi - lo) * index.token_nbytes(tile) * num_regions
        dense_ids = np.arange((hi - lo) // block_tokens, dtype=np.int64)
        parts.append(_Part(launch, numbers, nbytes, lo, hi, offset + regions, dense_ids))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class CopySettings:
    """``launch_programs``: thread blocks of a launch, so at most how many SMs a copy takes from
    others; other than of chunks within a GPU. ``launch_nbytes``: at most that much in one launch
    (unless one token is more), so that a copy can be stopped. ``ring_nbytes``: for the ids and
    addresses of all launches on their way.
    """

    launch_programs: int = 24
    launch_nbytes: int = index.LAUNCH_NBYTES
    ring_nbytes: int = index.RING_NBYTES

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("launch_programs", self.launch_programs, 1, 1 << 16),
            ("launch_nbytes", self.launch_nbytes, 1, MAX_REGION_NBYTES),
            ("ring_nbytes", self.ring_nbytes, 1 << 12, 1 << 30),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")


class Launched(Struct, frozen=True):
    """So far, ``nbytes`` in all; ``event`` is behind it, None where there was nothing to copy."""

    event: StreamEvent | None
    nbytes: int


class DeviceCopier:
    """Launches copies on one GPU. For one thread, on any of its streams.

    On the CPU it needs Triton's interpreter (TRITON_INTERPRET=1), for tests; streams are None then.
    """

    def __init__(self, device: torch.device, settings: CopySettings | None = None) -> None:
        self._settings = settings or CopySettings()
        self._device = device
        self._ring = JobRing(self._settings.ring_nbytes, device)
        self._launcher = HostLauncher() if device.type == "cpu" else GpuLauncher(device)
        self._looked_through: tuple[Ids, Tile] | None = None
        # What has instructions for e4m3
        self._is_native = device.type != "cpu" and torch.cuda.get_device_capability(device) >= (
            8,
            9,
        )

    @property
    def num_waits(self) -> int:
        """How often the host waited, because the ring was in use all over."""
        return self._ring.num_waits

    def has_room(self) -> bool:
        """Whether the next launch needs no wait: the ring is at most half in use."""
        return self._ring.has_room()

    def warm(self, bound: BoundCopy, stream: Stream, programs: int | None = None) -> StreamEvent:
        """Compile them, which takes a second the first time on a machine; nothing is copied."""
        works = empty_works(bound, self._programs_for(programs), is_native=self._is_native)
        events = [self._launch(work, stream, is_empty=True) for work in works]
        return events[-1]

    def warm_unpack(self, side: BoundSide, stream: Stream) -> StreamEvent:
        """Compile what unpacks its chunks, from this GPU and from the host; nothing is copied."""
        widths = (WHOLE_GPU, self._settings.launch_programs)
        ids, order = np.zeros(1, np.int64), side.order
        for num_tokens in (side.tile.kernel_tokens, 1):
            pieces = (((0, side.addresses.size), 0),)
            for programs in widths:
                for work in chunk_works(
                    *(side, ids, order, (0, num_tokens), pieces, programs),
                    is_pack=False,
                    is_native=self._is_native,
                ):
                    self._launch(work, stream, is_empty=True)
        return self.mark(stream)

    def mark(self, stream: Stream) -> StreamEvent:
        """An event behind all that was put on the stream, also by a launch that failed."""
        self._check_stream(stream)
        return self._launcher.record(stream)

    def stamp(self, stream: Stream) -> Stamp:
        """The same, whose moment the GPU notes."""
        self._check_stream(stream)
        return self._launcher.stamp(stream)

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        """What is put on the stream from now on runs behind the event."""
        self._check_stream(stream)
        self._launcher.wait(stream, event)

    def copy(
        self,
        bound: BoundCopy,
        source_ids: Ids,
        sink_ids: Ids,
        tokens: tuple[int, int],
        *,
        stream: Stream,
        programs: int | None = None,
    ) -> Launched:
        """Copy tokens [lo, hi) of all regions; the source is only read.

        Ids: int64, positional from the request's first token, -1 for none. ``programs``: other than
        the settings' for this copy, or WHOLE_GPU. Raises ValueError, before anything is launched,
        for a span or ids that are not those of these pools.
        """
        return _last(
            self.launches(bound, source_ids, sink_ids, tokens, stream=stream, programs=programs)
        )

    def launches(
        self,
        bound: BoundCopy,
        source_ids: Ids,
        sink_ids: Ids,
        tokens: tuple[int, int],
        *,
        stream: Stream,
        programs: int | None = None,
    ) -> Iterator[Launched]:
        """The same, launch by launch: each ``next`` puts one on the stream.

        For those who want few on their way at a time, so that a copy ends soon after it is given
        up. The check comes at once.
        """
        index.check_span(bound.source.tile, source_ids, *tokens)
        index.check_span(bound.sink.tile, sink_ids, *tokens)
        num_regions = bound.source.addresses.size
        bounds = self._settings.launch_nbytes, self._settings.ring_nbytes
        pieces = index.launch_pieces(
            bound.source.tile, bound.sink.tile, num_regions, tokens, *bounds
        )
        width = self._programs_for(programs)
        works = (
            _pool_work(bound, source_ids, sink_ids, piece, width, is_native=self._is_native)
            for piece in pieces
        )
        return self._launched(works, stream)

    def pack(
        self,
        side: BoundSide,
        block_ids: Ids,
        order: DenseOrder,
        tokens: tuple[int, int],
        *pieces: tuple[tuple[int, int], Tensor],
        stream: Stream,
        programs: int | None = None,
    ) -> Launched:
        """Pack chunks of the same tokens [lo, hi), in ``order``, by one launch.

        ``pieces``: of each chunk its regions [lo, hi), and where it is to lie: uint8, exactly the
        chunk's bytes. All chunks are on the GPU, or all in pinned memory. Within the GPU they are
        packed by all of it, unless ``programs`` says otherwise: beside a loop that reads memory, a
        GB takes 0.23 ms from it then, and 0.45 by 24 programs. Raises ValueError, before anything
        is launched, for ids outside the pool and for a wrong size or order.
        """
        return self._copy_chunks(
            *(side, block_ids, order, tokens, pieces, stream, programs), is_pack=True
        )

    def unpack(
        self,
        side: BoundSide,
        block_ids: Ids,
        tokens: tuple[int, int],
        *pieces: tuple[tuple[int, int], Tensor],
        stream: Stream,
        programs: int | None = None,
    ) -> Launched:
        """The reverse of :meth:`pack`, of chunks in the sink's own physical order."""
        return self._copy_chunks(
            *(side, block_ids, side.order, tokens, pieces, stream, programs), is_pack=False
        )

    def _copy_chunks(
        self,
        side: BoundSide,
        block_ids: Ids,
        order: DenseOrder,
        tokens: tuple[int, int],
        pieces: Sequence[tuple[tuple[int, int], Tensor]],
        stream: Stream,
        programs: int | None,
        *,
        is_pack: bool,
    ) -> Launched:
        self._check_ids(side.tile, block_ids, *tokens)
        index.check_order(side.tile, order)
        for regions, dense in pieces:
            self._check_chunk(side, regions, tokens, dense)
        where = tuple((regions, dense.data_ptr()) for regions, dense in pieces)
        works = chunk_works(
            *(side, block_ids, order, tokens, where, self._programs_for(programs, pieces[0][1])),
            is_pack=is_pack,
            is_native=self._is_native,
        )
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
        self, side: BoundSide, regions: tuple[int, int], tokens: tuple[int, int], dense: Tensor
    ) -> None:
        index.check_regions(side.addresses.size, *regions)
        region_nbytes = (tokens[1] - tokens[0]) * side.dense_token_nbytes
        index.check_chunk(dense, "chunk", regions[1] - regions[0], region_nbytes)
        if dense.device.type != self._device.type and not is_pinned(dense):
            raise ValueError(
                f"chunk: expected a tensor on {self._device} or in pinned memory, "
                f"got {dense.device}"
            )

    def _check_ids(self, tile: Tile, ids: Ids, token_lo: int, token_hi: int) -> None:
        """Chunks of a transfer have one array of ids, which nobody writes to any more: it is looked
        through once, for that takes 10 us of a cold processor.
        """
        index.check_tokens(tile, ids, token_lo, token_hi)
        known = self._looked_through
        if known is not None and known[0] is ids and known[1] == tile:
            return
        if are_blocks(tile, ids):
            self._looked_through = (ids, tile)
        else:  # there may be none for other tokens than these
            index.check_span(tile, ids, token_lo, token_hi)

    def _launched(self, works: Iterator[Work], stream: Stream) -> Iterator[Launched]:
        nbytes = 0
        for work in works:
            if not work.nbytes:
                continue
            event = self._launch(work, stream)
            nbytes += work.nbytes
            yield Launched(event, nbytes)

    def _launch(self, work: Work, stream: Stream, *, is_empty: bool = False) -> StreamEvent:
        self._check_stream(stream)
        sizes = [array.size for array in work.arrays]
        slot = self._ring.take(sum(sizes))
        try:
            np.concatenate(work.arrays, out=slot.host)
            if is_empty:
                slot.host[0] = 0  # words of each pair
            self._launcher.launch(slot, sizes, work.launch, stream)
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
