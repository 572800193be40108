"""A copy on a GPU as the kernel takes it: addresses, ids and strides of both sides. NumPy only.

A dense chunk is a side, too: one "block" for each kernel block of the sink, numbered as they come.
Only in head-major order, a kernel block that the chunk's token range cuts has other strides than
whole ones, so a chunk is up to three launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.kernels.strided_work import CopySide, CopyWork, Launch, plan_launch
from kvxfer.tensors.copy_checks import check_bases, check_pair
from kvxfer.tensors.strided_index import Ids, span_ids, token_nbytes, token_rectangles
from kvxfer.transfer.plan import CopyClass, DenseOrder, Side, Tile

# The widest access; what else an address is a multiple of does not matter
_ALIGN_NBYTES = 16


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Contiguous bytes as this GPU addresses them: its own, or a peer's that is mapped here."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BoundSide:
    """A side of a geometry class in memories known to hold it: an address for each region.
    ``align_nbytes`` divides all of them; 0: to be found.
    """

    tile: Tile
    addresses: Ids
    align_nbytes: int = 0

    def __post_init__(self) -> None:
        if not self.align_nbytes:
            common = np.gcd.reduce(self.addresses, initial=_ALIGN_NBYTES)
            object.__setattr__(self, "align_nbytes", int(common))


@dataclass(frozen=True, slots=True)
class BoundCopy:
    """Both sides of a geometry class; good as long as the memories are there. ``align_nbytes``
    divides all addresses.
    """

    source: BoundSide
    sink: BoundSide
    align_nbytes: int


@dataclass(frozen=True, slots=True)
class End:
    """One side of one launch."""

    side: CopySide
    addresses: Ids
    block_ids: Ids
    align_nbytes: int


def bind_side(side: Side, memories: Sequence[DeviceMemory]) -> BoundSide:
    """The side in these memories. Raises ValueError for bases outside them."""
    check_bases(side.tile, side.bases, [memory.nbytes for memory in memories])
    addresses = [memories[base.memory].address + base.offset for base in side.bases]
    return BoundSide(side.tile, np.array(addresses, np.int64))


def bind_copy(
    copy_class: CopyClass,
    source_memories: Sequence[DeviceMemory],
    sink_memories: Sequence[DeviceMemory],
) -> BoundCopy:
    """Both sides in their memories, once for all requests. Raises ValueError for bases outside
    them, and for sides that do not belong together.
    """
    check_pair(copy_class)
    return join_sides(
        bind_side(copy_class.source, source_memories), bind_side(copy_class.sink, sink_memories)
    )


def join_sides(source: BoundSide, sink: BoundSide) -> BoundCopy:
    """Two sides that belong together."""
    return BoundCopy(source, sink, math.gcd(source.align_nbytes, sink.align_nbytes))


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
    return join_sides(
        BoundSide(tile, source_address + offsets), BoundSide(tile, sink_address + offsets)
    )


@dataclass(frozen=True, slots=True)
class Work:
    """One launch."""

    source: End
    sink: End
    tile: Tile
    num_tokens: int
    align_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.num_tokens * token_nbytes(self.tile) * self.source.addresses.size

    def plan(self, programs: int) -> Launch:
        """``programs``: at most, or WHOLE_GPU."""
        work = CopyWork(
            source=self.source.side,
            sink=self.sink.side,
            num_tokens=self.num_tokens,
            num_heads=self.tile.num_heads,
            inner_nbytes=self.tile.inner_nbytes,
            channel_nbytes=self.tile.channel_nbytes,
            align_nbytes=self.align_nbytes,
        )
        return plan_launch(work, self.source.addresses.size, programs)


def pool_work(
    bound: BoundCopy, source_ids: Ids, sink_ids: Ids, token_lo: int, token_hi: int
) -> Work:
    """Tokens ``[token_lo, token_hi)`` of all regions from pool to pool; ids are positional."""
    return Work(
        _pool_end(bound.source, source_ids, token_lo, token_hi),
        _pool_end(bound.sink, sink_ids, token_lo, token_hi),
        bound.sink.tile,
        token_hi - token_lo,
        bound.align_nbytes,
    )


def empty_works(bound: BoundCopy) -> list[Work]:
    """One copy for each of the binaries that copies between these sides need: tokens of whole
    blocks can be joined to wider words, where a single one cannot. What they name is not to be
    copied.
    """
    ids = np.zeros(1, np.int64)
    works: dict[tuple[object, ...], Work] = {}
    for num_tokens in (0, 1):
        work = pool_work(bound, ids, ids, 0, num_tokens)
        works.setdefault(work.plan(1).binary, work)
    return list(works.values())


def chunk_work(taken: tuple[End, End, int], tile: Tile, *, is_pack: bool) -> Work:
    """A launch of :func:`chunk_ends`: from the pool to the chunk, or back."""
    pool, dense, num_tokens = taken
    source, sink = (pool, dense) if is_pack else (dense, pool)
    align_nbytes = math.gcd(pool.align_nbytes, dense.align_nbytes)
    return Work(source, sink, tile, num_tokens, align_nbytes)


def chunk_ends(
    side: BoundSide,
    block_ids: Ids,
    order: DenseOrder,
    span: tuple[int, int, int, int],
    dense_address: int,
) -> Iterator[tuple[End, End, int]]:
    """Pool, chunk and number of tokens of each launch that a chunk needs.

    ``span``: regions and tokens, both as [lo, hi).
    """
    region_lo, region_hi, token_lo, token_hi = span
    tile = side.tile
    pool = BoundSide(tile, side.addresses[region_lo:region_hi], side.align_nbytes)
    region_nbytes = (token_hi - token_lo) * token_nbytes(tile)
    regions = np.arange(region_hi - region_lo, dtype=np.int64)
    regions *= region_nbytes
    is_flat = order.token_major or (tile.num_heads == 1 and not order.channel_nbytes)
    cuts = [(token_lo, token_hi)]
    if not is_flat:
        cuts = token_rectangles(token_lo, token_hi, order.kernel_tokens)
    for lo, hi in cuts:
        block_tokens = hi - lo if is_flat else min(order.kernel_tokens, hi - lo)
        first = dense_address + (lo - token_lo) * token_nbytes(tile)
        yield (
            _pool_end(pool, block_ids, lo, hi),
            _dense_end(
                *(tile, order, is_flat, block_tokens, first + regions, hi - lo),
                align_nbytes=math.gcd(first, region_nbytes, _ALIGN_NBYTES),
            ),
            hi - lo,
        )


def _pool_end(side: BoundSide, block_ids: Ids, token_lo: int, token_hi: int) -> End:
    tile = side.tile
    lies = CopySide(
        block_tokens=tile.block_tokens,
        kernel_tokens=tile.kernel_tokens,
        stride_block=tile.stride_block,
        stride_head=tile.stride_head,
        stride_token=tile.stride_token,
        stride_channel=tile.stride_channel,
        first_token=token_lo % tile.block_tokens,
    )
    ids = span_ids(tile, block_ids, token_lo, token_hi)
    return End(lies, side.addresses, ids, side.align_nbytes)


def _dense_end(
    tile: Tile,
    order: DenseOrder,
    is_flat: bool,
    block_tokens: int,
    addresses: Ids,
    num_tokens: int,
    *,
    align_nbytes: int,
) -> End:
    inner = tile.inner_nbytes
    stride_token = token_nbytes(tile) if is_flat else order.channel_nbytes or inner
    lies = CopySide(
        block_tokens=max(1, block_tokens),
        kernel_tokens=max(1, block_tokens),
        stride_block=block_tokens * token_nbytes(tile),
        stride_head=inner if is_flat else block_tokens * inner,
        stride_token=stride_token,
        stride_channel=(
            block_tokens * order.channel_nbytes if order.channel_nbytes else tile.channel_nbytes
        ),
    )
    num_blocks = num_tokens // block_tokens if num_tokens else 0
    return End(lies, addresses, np.arange(num_blocks, dtype=np.int64), align_nbytes)
