"""Block ids to bytes: which geometry a copy has, and where its bytes lie. Pure arithmetic, one for
the copy on the CPU and the copy on a GPU.

A *dense piece* is the bytes of a token range of one region without gaps, in a :class:`DenseOrder`.
It is a side of a copy like the pool (:class:`CopySide`): its blocks are the kernel blocks of the
order, numbered as they come. :func:`dense_work` has both. On a GPU the kernel follows them byte by
byte. On the CPU a copy needs addresses: a *unit* is a part of the pool with one address, a run of
bytes without a gap there and in the piece, as long as the layouts allow. Addresses count from the
region's base: one set serves all regions of a geometry class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.kernels.strided_work import NUM_PARAMS, CopySide, CopyWork
from kvxfer.transfer.interleave import Stripe
from kvxfer.transfer.plan import Base, CopyClass, DenseOrder, Side, Tile

Ids = NDArray[np.int64]

PIECE_NBYTES = 1 << 20
"""A piece stays in the cache between gather and scatter, and its calls cost some 5 us. Of a plain
copy's rate, with 512 KiB of second-level cache: pieces of 128 KiB 0.46, 256 KiB 0.54, 512 KiB 0.56,
1 MiB 0.65, 4 MiB 0.64.
"""

WORD_NBYTES = 8
LAUNCH_NBYTES = 1 << 30
"""At most in one launch on a GPU, so that a copy can be stopped."""
RING_NBYTES = 8 << 20
"""For the ids and addresses of all launches on their way."""

_FEW_IDS = 64
"""Of three ids Python's own min and max take 13 us where NumPy's takes 80, on a processor that has
slept for 20 ms.
"""
_MIN_TAKE_NBYTES = 64
"""Smaller parts of rows are not taken one by one: their index would be as large as their bytes."""


def token_nbytes(tile: Tile) -> int:
    """Bytes of one token, all heads of the tile."""
    return tile.num_heads * tile.inner_nbytes


def _tile_extent_nbytes(tile: Tile) -> int:
    num_kernel_blocks = tile.num_blocks * (tile.block_tokens // tile.kernel_tokens)
    num_channels = tile.num_channels
    return (
        (num_kernel_blocks - 1) * tile.stride_block
        + (tile.num_heads - 1) * tile.stride_head
        + (tile.kernel_tokens - 1) * tile.stride_token
        + (num_channels - 1) * tile.stride_channel
        + tile.inner_nbytes // num_channels
    )


def side_ids(side: Side, block_ids: Sequence[Sequence[int]]) -> Ids:
    """The blocks of a side as a copy takes them, of a block table: those of its group, or where it
    has a stripe the units in them. -1 stands for none.
    """
    own = block_ids[side.group] if side.group < len(block_ids) else ()  # of a growing offer
    ids = np.asarray(own, dtype=np.int64)
    stripe = side.stripe
    if stripe is None:
        return ids
    units, num_units = _first_units(stripe), stripe.num_units(ids.size)
    periods, places = np.divmod(np.arange(num_units, dtype=np.int64), units.size)
    tokens = periods * (stripe.tokens.period // stripe.kept.size) + units[places]
    is_there = ids[tokens // stripe.block_tokens] >= 0
    offsets = token_offsets(stripe, ids, tokens)
    found: Ids = np.where(is_there, offsets // stripe.granule_nbytes, -1)
    return found


@lru_cache(maxsize=64)
def _first_units(stripe: Stripe) -> Ids:
    """The first of the rank's own tokens in each unit of the first period."""
    runs = stripe.tokens.runs
    tokens = [stripe.kept.own(token) for lo, hi in runs for token in range(lo, hi)]
    return np.array(tokens[:: stripe.unit_tokens], np.int64)


def all_side_ids(sides: Iterable[Side], block_ids: Sequence[Sequence[int]]) -> list[Ids]:
    """:func:`side_ids` of each class, made once for those that have the same."""
    made: dict[tuple[int, Stripe | None], Ids] = {}
    found: list[Ids] = []
    for side in sides:
        key = side.group, side.stripe
        if key not in made:
            made[key] = side_ids(side, block_ids)
        found.append(made[key])
    return found


def token_offsets(side: Tile | CopySide | Stripe, block_ids: Ids, tokens: Ids) -> Ids:
    """Bytes from a region's base to (first head, token); tokens count from slot 0 of the first of
    the ids.
    """
    blocks, slots = np.divmod(tokens, side.block_tokens)
    kernel_blocks, kernel_slots = np.divmod(slots, side.kernel_tokens)
    kernel_blocks += block_ids[blocks] * (side.block_tokens // side.kernel_tokens)
    offsets: Ids = kernel_blocks * side.stride_block + kernel_slots * side.stride_token
    return offsets


def span_ids(tile: Tile, block_ids: Ids, token_lo: int, token_hi: int) -> Ids:
    """The blocks that tokens ``[token_lo, token_hi)`` touch, of positional ``block_ids``."""
    return block_ids[token_lo // tile.block_tokens : -(-token_hi // tile.block_tokens)]


def token_pieces(
    source: Tile, sink: Tile, token_lo: int, token_hi: int, piece_nbytes: int = PIECE_NBYTES
) -> Iterator[tuple[int, int]]:
    """Cut ``[token_lo, token_hi)`` into ranges of at most ``piece_nbytes`` (but at least a token).

    Cuts lie where kernel blocks of both sides end, or the sink's, as the size allows: rows stay
    long.
    """
    limit = max(1, piece_nbytes // token_nbytes(sink))
    ours, theirs = sink.kernel_tokens, source.kernel_tokens
    choices = (math.lcm(ours, theirs), ours, math.gcd(ours, theirs), 1)
    step = next(size for size in choices if size <= limit)
    length = limit // step * step
    lo = token_lo
    while lo < token_hi:
        hi = min(token_hi, lo // step * step + length)
        yield lo, hi
        lo = hi


def launch_pieces(
    source: Tile,
    sink: Tile,
    num_regions: int,
    tokens: tuple[int, int],
    launch_nbytes: int = LAUNCH_NBYTES,
    ring_nbytes: int = RING_NBYTES,
) -> Iterator[tuple[int, int]]:
    """Token ranges of the launches that copy so many regions on a GPU: of at most ``launch_nbytes``
    each, with no more ids than a quarter of the ring holds, so that the next ones need not wait.

    Raises ValueError for a ring that is too small for the regions.
    """
    piece_nbytes = launch_nbytes
    if num_regions:
        ours, theirs = sink.block_tokens, source.block_tokens
        num_ids = ring_nbytes // WORD_NBYTES // 4 - NUM_PARAMS - 2 * num_regions
        # Tokens fill so many blocks of both sides, and may touch one more at each end
        num_tokens = (num_ids - 4) * ours * theirs // (ours + theirs)
        if num_tokens < 1:
            raise ValueError(
                f"ring_nbytes: expected {16 * WORD_NBYTES * num_regions} or more for {num_regions} "
                f"regions, got {ring_nbytes}"
            )
        piece_nbytes = min(num_tokens * token_nbytes(sink), max(1, launch_nbytes // num_regions))
    return token_pieces(source, sink, *tokens, piece_nbytes)


def token_rectangles(lo: int, hi: int, block_tokens: int) -> list[tuple[int, int]]:
    """Head of a block, whole blocks, tail of a block; empty ones left out."""
    first_whole = -(-lo // block_tokens) * block_tokens
    end_whole = hi // block_tokens * block_tokens
    if first_whole > end_whole:
        return [(lo, hi)] if lo < hi else []
    parts = [(lo, first_whole), (first_whole, end_whole), (end_whole, hi)]
    return [(first, end) for first, end in parts if first < end]


def is_flat(tile: Tile, order: DenseOrder) -> bool:
    """Is a dense piece one run of tokens, whatever its kernel blocks?"""
    return order.token_major or (tile.num_heads == 1 and not order.channel_nbytes)


def pool_side(tile: Tile, first_token: int) -> CopySide:
    """The pool, from a token on that counts from the first of the ids."""
    return CopySide(
        block_tokens=tile.block_tokens,
        kernel_tokens=tile.kernel_tokens,
        stride_block=tile.stride_block,
        stride_head=tile.stride_head,
        stride_token=tile.stride_token,
        stride_channel=tile.stride_channel,
        first_token=first_token,
    )


def copy_work(
    source: CopySide, sink: CopySide, tile: Tile, num_tokens: int, align_nbytes: int = 16
) -> CopyWork:
    """Two sides with the heads, inner bytes and channels of a tile."""
    return CopyWork(
        source=source,
        sink=sink,
        num_tokens=num_tokens,
        num_heads=tile.num_heads,
        inner_nbytes=tile.inner_nbytes,
        channel_nbytes=tile.channel_nbytes,
        align_nbytes=align_nbytes,
    )


@lru_cache(maxsize=256)
def dense_work(
    tile: Tile,
    order: DenseOrder,
    first_token: int,
    num_tokens: int,
    block_tokens: int,
    align_nbytes: int = 16,
) -> CopyWork:
    """From the pool to a dense piece, which is equal blocks of ``block_tokens``."""
    block_tokens = max(1, block_tokens)
    token, inner, flat = token_nbytes(tile), tile.inner_nbytes, is_flat(tile, order)
    channel = order.channel_nbytes
    dense = CopySide(
        block_tokens=block_tokens,
        kernel_tokens=block_tokens,
        stride_block=block_tokens * token,
        stride_head=inner if flat else block_tokens * inner,
        stride_token=token if flat else channel or inner,
        stride_channel=block_tokens * channel if channel else tile.channel_nbytes,
    )
    return copy_work(pool_side(tile, first_token), dense, tile, num_tokens, align_nbytes)


@dataclass(frozen=True, slots=True)
class Units:
    """Equal units: where they lie in the pool, and in the dense piece.

    A unit is one element of ``element_nbytes``, or where channels lie apart elements in ``shape``
    [tokens, channels]: rows would be as short as a channel (4 bytes of float32) and their addresses
    twice as long as they. So there is one address for all of them, and the copy turns them on the
    way. On one core, 128 channels of float32 turned, in blocks of 32 to 128 tokens: 1.2 to 3.0
    GB/s, where equal blocks run at 5.7. Elements taken by number, 32 tokens: 2.4 GB/s, 3.2 with the
    numbers kept.

    ``starts`` are byte offsets from the region's base. The dense piece has, from byte ``dense_lo``
    on, the shape of ``starts`` and then that of a unit, by ``dense_strides``. ``granule_nbytes``
    divides a run and every start. ``numbers``: the runs as granules of the pool by number, one
    behind the other in the dense piece, where they are to be read and that is faster; else None.
    ``extent_nbytes``: of the pool, from the first byte of a unit to its last.
    """

    element_nbytes: int
    granule_nbytes: int
    starts: Ids
    numbers: Ids | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    extent_nbytes: int
    dense_lo: int
    dense_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """``contiguous_at``: its start where the region holds it without a gap, else None."""

    nbytes: int
    parts: tuple[Units, ...]
    contiguous_at: int | None


def read_piece(
    tile: Tile, block_ids: Ids, order: DenseOrder, token_lo: int, token_hi: int
) -> Piece:
    """How to gather request tokens ``[token_lo, token_hi)``; ``block_ids`` are positional."""
    ids = span_ids(tile, block_ids, token_lo, token_hi).tobytes()
    return _piece(tile, ids, order, token_lo, token_hi, is_read=True)


def write_piece(
    tile: Tile, block_ids: Ids, order: DenseOrder, token_lo: int, token_hi: int
) -> Piece:
    """Where to scatter request tokens ``[token_lo, token_hi)``; ``block_ids`` are positional."""
    ids = span_ids(tile, block_ids, token_lo, token_hi).tobytes()
    return _piece(tile, ids, order, token_lo, token_hi, is_read=False)


# Chunks of a stream come region by region with the same few spans: without this there would be
# 30 us of index arithmetic for every 100 us of copying. Some MiB at most: an address has 8 bytes.
@lru_cache(maxsize=64)
def _piece(
    tile: Tile, ids: bytes, order: DenseOrder, token_lo: int, token_hi: int, *, is_read: bool
) -> Piece:
    block_ids = np.frombuffer(ids, np.int64)
    first_block = token_lo // tile.block_tokens
    # Token-major bytes do not depend on where blocks end: the tile's own give the longest rows.
    cut_tokens = tile.kernel_tokens if is_flat(tile, order) else order.kernel_tokens
    parts = []
    for lo, hi in token_rectangles(token_lo, token_hi, cut_tokens):
        first_token, block_tokens = lo % tile.block_tokens, min(cut_tokens, hi - lo)
        work = dense_work(tile, order, first_token, hi - lo, block_tokens)
        part_ids = block_ids[lo // tile.block_tokens - first_block :]
        dense_lo = (lo - token_lo) * token_nbytes(tile)
        parts.append(_units(work, part_ids, dense_lo, is_read=is_read))
    nbytes = max(0, token_hi - token_lo) * token_nbytes(tile)
    return Piece(nbytes, tuple(parts), _contiguous_at(parts))


def _units(work: CopyWork, block_ids: Ids, dense_lo: int, *, is_read: bool) -> Units:
    """The units of equal dense blocks; ``block_ids`` are the pool's.

    A *run* is of tokens that cross no kernel block of the pool and no dense block. Axes from the
    innermost of the dense piece outwards join the element while it is as long as their stride.
    """
    pool, dense = work.source, work.sink
    kernel_tokens, block_tokens = pool.kernel_tokens, dense.block_tokens
    first_slot = pool.first_token % kernel_tokens
    in_one_block = first_slot + work.num_tokens <= kernel_tokens
    run_tokens = block_tokens if in_one_block else math.gcd(kernel_tokens, block_tokens, first_slot)
    block_runs = block_tokens // run_tokens
    tokens = np.arange(pool.first_token, pool.first_token + work.num_tokens, run_tokens)
    runs = token_offsets(pool, block_ids, tokens)
    are_together = pool.stride_channel == dense.stride_channel == work.channel_nbytes
    element = work.inner_nbytes if are_together else work.channel_nbytes
    # (count, stride in the pool, in the dense piece); runs have no stride in the pool
    axes = [
        (work.inner_nbytes // element, pool.stride_channel, dense.stride_channel),
        (run_tokens, pool.stride_token, dense.stride_token),
        (block_runs, 0, run_tokens * dense.stride_token),
        (work.num_heads, pool.stride_head, dense.stride_head),
    ]
    row, left = element, sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[2])
    while left and left[0][1] == row:
        row *= left.pop(0)[0]
    if element < work.inner_nbytes and (
        row == element or (block_runs > 1 and row < _MIN_TAKE_NBYTES)
    ):
        return _channel_units(work, runs.reshape(-1, block_runs), run_tokens, dense_lo)
    starts = runs.reshape(-1, *(count if stride == 0 else 1 for count, stride, _ in left[::-1]))
    for at, (count, stride, _) in enumerate(left):
        if stride:
            starts = starts + (np.arange(count) * stride).reshape(-1, *(1,) * at)
    granule = math.gcd(
        row,
        pool.stride_block,
        pool.stride_token * first_slot,
        pool.stride_token * run_tokens if runs.size > 1 and run_tokens < kernel_tokens else 0,
        *(stride for _, stride, _ in left),
    )
    starts = starts.reshape(-1)
    numbers = _numbers(starts, row, granule) if is_read else None
    return Units(row, granule, starts, numbers, (), (), row, dense_lo, (row,))


def _channel_units(work: CopyWork, runs: Ids, run_tokens: int, dense_lo: int) -> Units:
    """A unit for each head of each run; ``runs`` [dense blocks, runs of a block] are offsets."""
    pool, dense, element = work.source, work.sink, work.channel_nbytes
    heads = np.arange(work.num_heads, dtype=np.int64) * pool.stride_head
    num_channels = work.inner_nbytes // element
    token_extent_nbytes = (num_channels - 1) * pool.stride_channel + element
    return Units(
        element_nbytes=element,
        granule_nbytes=1,
        starts=runs[:, :, None] + heads,
        numbers=None,
        shape=(run_tokens, num_channels),
        strides=(pool.stride_token, pool.stride_channel),
        extent_nbytes=(run_tokens - 1) * pool.stride_token + token_extent_nbytes,
        dense_lo=dense_lo,
        dense_strides=(
            *(dense.stride_block, run_tokens * dense.stride_token, dense.stride_head),
            *(dense.stride_token, dense.stride_channel),
        ),
    )


def _numbers(starts: Ids, row_nbytes: int, granule_nbytes: int) -> Ids | None:
    """Granules are rows that start at multiples of their length, else equal parts of them."""
    numbers: Ids = starts // granule_nbytes
    if granule_nbytes == row_nbytes:
        return numbers
    if granule_nbytes < _MIN_TAKE_NBYTES:
        return None
    parts = np.arange(row_nbytes // granule_nbytes, dtype=np.int64)
    return (numbers[:, None] + parts).reshape(-1)


def _contiguous_at(parts: Sequence[Units]) -> int | None:
    first = end = None
    for part in parts:
        starts, row = part.starts, part.element_nbytes
        if part.shape or (end is not None and starts[0] != end):
            return None
        # The first pair settles nearly every case that is not contiguous.
        if starts.size > 1 and (
            starts[1] - starts[0] != row or not bool((np.diff(starts) == row).all())
        ):
            return None
        first = int(starts[0]) if first is None else first
        end = int(starts[-1]) + row
    return first


# What is checked before a copy, on the CPU or on a GPU, where nothing else would notice


def check_span(tile: Tile, block_ids: Ids, token_lo: int, token_hi: int) -> None:
    """Is there a block of the pool for every token of ``[token_lo, token_hi)``?

    ``block_ids``: positional from the request's first token. Raises ValueError.
    """
    check_tokens(tile, block_ids, token_lo, token_hi)
    needed = span_ids(tile, block_ids, token_lo, token_hi)
    if token_lo < token_hi and not are_blocks(tile, needed):
        lowest, highest = int(needed.min()), int(needed.max())
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"block_ids: expected ids in [0, {tile.num_blocks}), got {wrong}")


def check_tokens(tile: Tile, block_ids: Ids, token_lo: int, token_hi: int) -> None:
    """An id, good or not, for every token of ``[token_lo, token_hi)``? Raises ValueError."""
    if not 0 <= token_lo <= token_hi:
        raise ValueError(f"tokens: expected 0 <= lo <= hi, got [{token_lo}, {token_hi})")
    if block_ids.dtype != np.int64 or block_ids.size * tile.block_tokens < token_hi:
        raise ValueError(
            f"block_ids: expected int64 ids of {token_hi} tokens in blocks of "
            f"{tile.block_tokens}, got {block_ids.size} of {block_ids.dtype}"
        )


def are_blocks(tile: Tile, block_ids: Ids) -> bool:
    """Does every one of these int64 ids name a block of the pool?"""
    if block_ids.size <= _FEW_IDS:
        ids = block_ids.tolist()
        return not ids or (min(ids) >= 0 and max(ids) < tile.num_blocks)
    # Seen as unsigned, a negative id is a very large one: one look instead of two
    return int(block_ids.view(np.uint64).max(initial=0)) < tile.num_blocks


def check_bases(tile: Tile, bases: Sequence[Base], memories_nbytes: Sequence[int]) -> None:
    """Do all blocks of every region lie inside its memory? Raises ValueError."""
    extent = _tile_extent_nbytes(tile)
    for base in bases:
        if not 0 <= base.memory < len(memories_nbytes):
            raise ValueError(
                f"base: expected one of {len(memories_nbytes)} memories, got {base.memory}"
            )
        if base.offset < 0 or base.offset + extent > memories_nbytes[base.memory]:
            raise ValueError(
                f"base: expected {extent} bytes inside memory {base.memory} of "
                f"{memories_nbytes[base.memory]}, got offset {base.offset}"
            )


def check_pair(copy_class: CopyClass) -> None:
    """Have both sides as many regions, heads, inner bytes and channels? Raises ValueError."""
    source, sink = copy_class.source, copy_class.sink
    if len(source.bases) != len(sink.bases):
        raise ValueError(
            f"bases: expected as many on both sides, got {len(source.bases)} and {len(sink.bases)}"
        )
    theirs, ours = source.tile, sink.tile
    if source.values is not None and sink.values is not None:
        of_source, of_sink = (
            (side.tile.num_heads, side.tile.inner_nbytes // values.item_nbytes)
            for side, values in ((source, source.values), (sink, sink.values))
        )
        if of_source != of_sink:
            raise ValueError(
                f"tiles: expected {of_sink[0]} heads of {of_sink[1]} elements like the sink, "
                f"got {of_source[0]} of {of_source[1]} at the source"
            )
        return
    if (theirs.num_heads, theirs.inner_nbytes) != (ours.num_heads, ours.inner_nbytes):
        raise ValueError(
            f"tiles: expected {ours.num_heads} heads of {ours.inner_nbytes} bytes like the sink, "
            f"got {theirs.num_heads} of {theirs.inner_nbytes} at the source"
        )
    if theirs.channel_nbytes != ours.channel_nbytes:
        raise ValueError(
            f"tiles: expected channels of {ours.channel_nbytes} bytes like the sink, "
            f"got {theirs.channel_nbytes} at the source"
        )


def check_regions(num_regions: int, region_lo: int, region_hi: int) -> None:
    """Is ``[region_lo, region_hi)`` a range of the regions? Raises ValueError."""
    if not 0 <= region_lo <= region_hi <= num_regions:
        raise ValueError(
            f"regions: expected a range of [0, {num_regions}), got [{region_lo}, {region_hi})"
        )


def check_order(tile: Tile, order: DenseOrder) -> None:
    """Can this tile be packed in that order? Raises ValueError."""
    if order.channel_nbytes not in (0, tile.channel_nbytes):
        raise ValueError(
            f"order: expected channels of {tile.channel_nbytes} bytes like the tile, "
            f"got {order.channel_nbytes}"
        )


def check_flat(tensor: Tensor, name: str) -> None:
    """Is it a memory, a flat tensor of bytes? Raises ValueError."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous one-dimensional uint8 tensor, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


def check_chunk(tensor: Tensor, name: str, num_regions: int, region_nbytes: int) -> None:
    """Has the chunk exactly the bytes of these regions? Raises ValueError."""
    check_flat(tensor, name)
    if tensor.numel() != num_regions * region_nbytes:
        raise ValueError(
            f"{name}: expected {num_regions * region_nbytes} bytes "
            f"({num_regions} regions of {region_nbytes}), got {tensor.numel()}"
        )
