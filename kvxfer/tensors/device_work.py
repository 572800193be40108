"""A copy on a GPU as the kernel takes it: addresses, ids and strides of both sides. NumPy only.

A dense chunk is a side, too: one "block" for each kernel block of the sink, numbered as they come.
Only in head-major order, a kernel block that the chunk's token range cuts has other strides than
whole ones, so a chunk is up to three launches.

What does not depend on ids and addresses is worked out once: the chunks of a transfer are alike,
and so are prompts of a length. A thread that has just woken takes 50 us for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from kvxfer.kernels.strided_work import CopyWork, Launch, plan_launch
from kvxfer.tensors.strided_index import (
    Ids,
    check_bases,
    check_pair,
    copy_work,
    dense_work,
    is_flat,
    pool_side,
    span_ids,
    token_nbytes,
    token_rectangles,
)
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
class Plan:
    """A launch without its ids and addresses. ``params``: the launch's, as an array."""

    launch: Launch
    params: Ids


@dataclass(frozen=True, slots=True)
class Work:
    """One launch of ``nbytes``."""

    plan: Plan
    nbytes: int
    source_addresses: Ids
    sink_addresses: Ids
    source_ids: Ids
    sink_ids: Ids


def pool_work(
    bound: BoundCopy, source_ids: Ids, sink_ids: Ids, token_lo: int, token_hi: int, programs: int
) -> Work:
    """Tokens ``[token_lo, token_hi)`` of all regions from pool to pool; ids are positional.
    ``programs``: at most, or WHOLE_GPU.
    """
    source, sink = bound.source, bound.sink
    num_tokens, num_regions = token_hi - token_lo, source.addresses.size
    first_tokens = (token_lo % source.tile.block_tokens, token_lo % sink.tile.block_tokens)
    return Work(
        _plan_pools(
            *(source.tile, sink.tile, *first_tokens),
            *(num_tokens, num_regions, bound.align_nbytes, programs),
        ),
        num_tokens * token_nbytes(sink.tile) * num_regions,
        *(source.addresses, sink.addresses),
        span_ids(source.tile, source_ids, token_lo, token_hi),
        span_ids(sink.tile, sink_ids, token_lo, token_hi),
    )


def empty_works(bound: BoundCopy, programs: int) -> list[Work]:
    """One copy for each of the binaries that copies between these sides need: tokens of whole
    blocks can be joined to wider words, where a single one cannot. What they name is not to be
    copied.
    """
    ids = np.zeros(1, np.int64)
    works: dict[tuple[object, ...], Work] = {}
    for num_tokens in (0, 1):
        work = pool_work(bound, ids, ids, 0, num_tokens, programs)
        works.setdefault(work.plan.launch.binary, work)
    return list(works.values())


def chunk_works(
    side: BoundSide,
    block_ids: Ids,
    order: DenseOrder,
    span: tuple[int, int, int, int],
    dense_address: int,
    programs: int,
    *,
    is_pack: bool,
) -> Iterator[Work]:
    """The launches that a chunk needs: from the pool to the chunk, or back.

    ``span``: regions and tokens, both as [lo, hi).
    """
    region_lo, region_hi, token_lo, token_hi = span
    tile, pool_addresses = side.tile, side.addresses[region_lo:region_hi]
    parts = _chunk_parts(
        *(tile, order, token_lo % tile.block_tokens, token_lo % order.kernel_tokens),
        *(token_hi - token_lo, region_hi - region_lo),
        *(side.align_nbytes, math.gcd(dense_address, _ALIGN_NBYTES), programs, is_pack),
    )
    for part in parts:
        pool_ids = span_ids(tile, block_ids, token_lo + part.token_lo, token_lo + part.token_hi)
        addresses = dense_address + part.offsets
        if is_pack:
            arrays = (pool_addresses, addresses, pool_ids, part.dense_ids)
        else:
            arrays = (addresses, pool_addresses, part.dense_ids, pool_ids)
        yield Work(part.plan, part.nbytes, *arrays)


@dataclass(frozen=True, slots=True)
class _Part:
    """One launch of a chunk; tokens and offsets (of each region) count from the chunk's first."""

    plan: Plan
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
) -> Plan:
    sides = (pool_side(source, source_first), pool_side(sink, sink_first))
    return _plan(copy_work(*sides, sink, num_tokens, align_nbytes), num_regions, programs)


@lru_cache(maxsize=1024)
def _chunk_parts(
    tile: Tile,
    order: DenseOrder,
    first_in_block: int,
    first_in_kernel_block: int,
    num_tokens: int,
    num_regions: int,
    pool_align_nbytes: int,
    dense_align_nbytes: int,
    programs: int,
    is_pack: bool,
) -> tuple[_Part, ...]:
    region_nbytes = num_tokens * token_nbytes(tile)
    regions = np.arange(num_regions, dtype=np.int64) * region_nbytes
    flat, first = is_flat(tile, order), first_in_kernel_block
    cuts = [(0, num_tokens)]
    if not flat:
        spans = token_rectangles(first, first + num_tokens, order.kernel_tokens)
        cuts = [(lo - first, hi - first) for lo, hi in spans]
    parts = []
    for lo, hi in cuts:
        block_tokens = hi - lo if flat else min(order.kernel_tokens, hi - lo)
        offset = lo * token_nbytes(tile)
        align_nbytes = math.gcd(pool_align_nbytes, dense_align_nbytes, offset, region_nbytes)
        first_token = (first_in_block + lo) % tile.block_tokens
        work = dense_work(tile, order, first_token, hi - lo, block_tokens, align_nbytes)
        if not is_pack:
            work = replace(work, source=work.sink, sink=work.source)
        plan = _plan(work, num_regions, programs)
        dense_ids = np.arange((hi - lo) // max(1, block_tokens), dtype=np.int64)
        nbytes = (hi - lo) * token_nbytes(tile) * num_regions
        parts.append(_Part(plan, nbytes, lo, hi, offset + regions, dense_ids))
    return tuple(parts)


def _plan(work: CopyWork, num_regions: int, programs: int) -> Plan:
    launch = plan_launch(work, num_regions, programs)
    return Plan(launch, np.array(launch.params, np.int64))
