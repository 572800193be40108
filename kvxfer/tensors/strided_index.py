"""Block ids to byte addresses: the rows of a region that make up a dense piece. Pure arithmetic.

A *dense piece* is the bytes of a token range of one region without gaps, in a :class:`DenseOrder`.
A *row* is a run of bytes without a gap both there and in the region; the longer the rows, the fewer
addresses. Row starts count from the region's base: one set serves all regions of a geometry class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvxfer.tensors.strided_channels import Channels, channel_units
from kvxfer.transfer.plan import DenseOrder, Tile

Ids = NDArray[np.int64]

PIECE_NBYTES = 1 << 20
"""A piece stays in the cache between gather and scatter, and its calls cost some 5 us. Of a plain
copy's rate, with 512 KiB of second-level cache: pieces of 128 KiB 0.46, 256 KiB 0.54, 512 KiB 0.56,
1 MiB 0.65, 4 MiB 0.64.
"""

MIN_TAKE_NBYTES = 64
"""Smaller parts of rows are not taken one by one: their index would be as large as their bytes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Equally long rows, one behind the other from byte ``dense_lo`` of the dense piece.

    ``starts`` are byte offsets from the region's base; ``granule_nbytes`` divides ``row_nbytes``
    and each of them.
    """

    dense_lo: int
    row_nbytes: int
    granule_nbytes: int
    starts: Ids


@dataclass(frozen=True, slots=True)
class PieceRows:
    """All rows of a dense piece.

    ``contiguous_at`` is the piece's start where the region holds it without a gap, else None.
    """

    nbytes: int
    rows: tuple[Rows | Channels, ...]
    contiguous_at: int | None


@dataclass(frozen=True, slots=True)
class Take:
    """Rows as elements to take: elements of a pool by number."""

    dense_lo: int
    element_nbytes: int
    numbers: Ids


@dataclass(frozen=True, slots=True)
class Reads:
    """A piece and how each of its rows is gathered: by number, or (Rows) by byte address."""

    piece: PieceRows
    parts: tuple[Take | Rows | Channels, ...]


def token_nbytes(tile: Tile) -> int:
    """Bytes of one token, all heads of the tile."""
    return tile.num_heads * tile.inner_nbytes


def tile_extent_nbytes(tile: Tile) -> int:
    """Bytes from the base to the end of the last block."""
    num_kernel_blocks = tile.num_blocks * (tile.block_tokens // tile.kernel_tokens)
    return (
        (num_kernel_blocks - 1) * tile.stride_block
        + (tile.num_heads - 1) * tile.stride_head
        + (tile.kernel_tokens - 1) * tile.stride_token
        + (tile.num_channels - 1) * tile.stride_channel
        + tile.inner_nbytes // tile.num_channels
    )


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


def token_rectangles(lo: int, hi: int, block_tokens: int) -> list[tuple[int, int]]:
    """Head of a block, whole blocks, tail of a block; empty ones left out."""
    first_whole = -(-lo // block_tokens) * block_tokens
    end_whole = hi // block_tokens * block_tokens
    if first_whole > end_whole:
        return [(lo, hi)] if lo < hi else []
    parts = [(lo, first_whole), (first_whole, end_whole), (end_whole, hi)]
    return [(first, end) for first, end in parts if first < end]


def piece_rows(
    tile: Tile, block_ids: Ids, order: DenseOrder, token_lo: int, token_hi: int
) -> PieceRows:
    """The rows of request tokens ``[token_lo, token_hi)``, which lie in exactly ``block_ids``."""
    # Token-major bytes do not depend on where blocks end: the tile's own give the longest rows.
    token_major = order.token_major or (tile.num_heads == 1 and not order.channel_nbytes)
    cut_tokens = tile.kernel_tokens if token_major else order.kernel_tokens
    rows = tuple(
        _rectangle_rows(
            tile,
            block_ids[lo // tile.block_tokens - token_lo // tile.block_tokens :],
            order,
            (lo, hi),
            min(cut_tokens, hi - lo),
            token_major,
            (lo - token_lo) * token_nbytes(tile),
        )
        for lo, hi in token_rectangles(token_lo, token_hi, cut_tokens)
    )
    nbytes = max(0, token_hi - token_lo) * token_nbytes(tile)
    return PieceRows(nbytes, rows, _contiguous_at(rows))


def read_rows(tile: Tile, block_ids: Ids, order: DenseOrder, token_lo: int, token_hi: int) -> Reads:
    """How to gather request tokens ``[token_lo, token_hi)``; ``block_ids`` are positional."""
    ids = span_ids(tile, block_ids, token_lo, token_hi).tobytes()
    return _cached_reads(tile, ids, order, token_lo, token_hi)


def write_rows(
    tile: Tile, block_ids: Ids, order: DenseOrder, token_lo: int, token_hi: int
) -> PieceRows:
    """Where to scatter request tokens ``[token_lo, token_hi)``; ``block_ids`` are positional."""
    ids = span_ids(tile, block_ids, token_lo, token_hi).tobytes()
    return _cached_writes(tile, ids, order, token_lo, token_hi)


# Chunks of a stream come region by region with the same few spans: without these there would be
# 30 us of index arithmetic for every 100 us of copying. Some MiB at most: an address has 8 bytes.
@lru_cache(maxsize=32)
def _cached_writes(
    tile: Tile, block_ids: bytes, order: DenseOrder, token_lo: int, token_hi: int
) -> PieceRows:
    return piece_rows(tile, np.frombuffer(block_ids, np.int64), order, token_lo, token_hi)


@lru_cache(maxsize=32)
def _cached_reads(
    tile: Tile, block_ids: bytes, order: DenseOrder, token_lo: int, token_hi: int
) -> Reads:
    piece = piece_rows(tile, np.frombuffer(block_ids, np.int64), order, token_lo, token_hi)
    return Reads(piece, tuple(_by_number(rows) for rows in piece.rows))


def _by_number(rows: Rows | Channels) -> Take | Rows | Channels:
    """Elements are rows that start at multiples of their length, else equal parts of them."""
    if isinstance(rows, Channels):
        return rows
    element = rows.granule_nbytes
    if element == rows.row_nbytes:
        return Take(rows.dense_lo, element, rows.starts // element)
    if element < MIN_TAKE_NBYTES:
        return rows
    parts = np.arange(rows.row_nbytes // element, dtype=np.int64)
    numbers = (rows.starts // element)[:, None] + parts
    return Take(rows.dense_lo, element, numbers.reshape(-1))


def _rectangle_rows(
    tile: Tile,
    block_ids: Ids,
    order: DenseOrder,
    span: tuple[int, int],
    dense_tokens: int,
    token_major: bool,
    dense_lo: int,
) -> Rows | Channels:
    """Rows of a span made of dense blocks of ``dense_tokens`` tokens each.

    A *unit* is a run of tokens that crosses no kernel block of the tile and no dense block. Axes
    from the innermost outwards join the row while their stride is the row's length.
    """
    lo, hi = span
    kernel_tokens = tile.kernel_tokens
    in_one_block = lo // kernel_tokens == (hi - 1) // kernel_tokens
    unit = dense_tokens if in_one_block else math.gcd(kernel_tokens, dense_tokens, lo)
    units = _unit_starts(tile, block_ids, np.arange(lo, hi, unit, dtype=np.int64))
    if tile.has_channels_apart or order.channel_nbytes:
        if _has_channel_rows(tile, order, unit, dense_tokens):
            return _channel_rows(tile, units, lo % kernel_tokens, unit, dense_tokens, dense_lo)
        return channel_units(
            *(tile, order, units, unit, dense_tokens // unit),
            token_major=token_major,
            dense_lo=dense_lo,
        )
    heads = _axis(tile.num_heads, tile.stride_head)
    tokens = _axis(unit, tile.stride_token)
    row = tile.inner_nbytes
    if token_major:
        row, heads = _joined(row, heads, tile.stride_head)
        if heads.size == 1:
            row, tokens = _joined(row, tokens, tile.stride_token)
        starts = units[:, None, None] + tokens[:, None] + heads
    else:
        row, tokens = _joined(row, tokens, tile.stride_token)
        if tokens.size == 1 and unit == dense_tokens:
            row, heads = _joined(row, heads, tile.stride_head)
        by_block = units.reshape(-1, 1, dense_tokens // unit, 1)
        starts = by_block + heads[:, None, None] + tokens
    first_slot = lo % kernel_tokens
    granule = math.gcd(
        row,
        tile.stride_block,
        tile.stride_head if heads.size > 1 else 0,
        tile.stride_token if tokens.size > 1 else 0,
        tile.stride_token * first_slot,
        tile.stride_token * unit if units.size > 1 and unit < kernel_tokens else 0,
    )
    return Rows(dense_lo, row, granule, starts.reshape(-1))


def _has_channel_rows(tile: Tile, order: DenseOrder, unit: int, dense_tokens: int) -> bool:
    """Are the tokens of one channel together on both sides, enough of them for rows?"""
    if not order.channel_nbytes or (unit > 1 and tile.stride_token != tile.channel_nbytes):
        return False
    return unit == dense_tokens or unit * tile.channel_nbytes >= MIN_TAKE_NBYTES


def _channel_rows(
    tile: Tile, units: Ids, first_slot: int, unit: int, dense_tokens: int, dense_lo: int
) -> Rows:
    """Rows of dense blocks ``[head][channel][token]``, each the tokens of a unit or more."""
    row = unit * tile.channel_nbytes
    channels = _axis(tile.num_channels, tile.stride_channel)
    heads = _axis(tile.num_heads, tile.stride_head)
    if unit == dense_tokens:
        row, channels = _joined(row, channels, tile.stride_channel)
        if channels.size == 1:
            row, heads = _joined(row, heads, tile.stride_head)
    by_block = units.reshape(-1, 1, 1, dense_tokens // unit)
    starts = by_block + heads[:, None, None] + channels[:, None]
    granule = math.gcd(
        row,
        tile.stride_block,
        tile.stride_head if heads.size > 1 else 0,
        tile.stride_channel if channels.size > 1 else 0,
        tile.stride_token * first_slot,
        tile.stride_token * unit if units.size > 1 and unit < tile.kernel_tokens else 0,
    )
    return Rows(dense_lo, row, granule, starts.reshape(-1))


def _unit_starts(tile: Tile, block_ids: Ids, positions: Ids) -> Ids:
    """Byte offset from the base of (position, first head); the first is in block_ids[0]."""
    blocks, slots = np.divmod(positions, tile.block_tokens)
    blocks -= blocks[0]
    kernel_blocks, kernel_slots = np.divmod(slots, tile.kernel_tokens)
    kernel_blocks += block_ids[blocks] * (tile.block_tokens // tile.kernel_tokens)
    starts: Ids = kernel_blocks * tile.stride_block + kernel_slots * tile.stride_token
    return starts


def _axis(count: int, stride: int) -> Ids:
    return np.arange(count, dtype=np.int64) * stride


def _joined(row_nbytes: int, axis: Ids, stride: int) -> tuple[int, Ids]:
    """The row with the axis in it and one step left of the axis; unchanged if there are gaps."""
    if axis.size == 1 or stride == row_nbytes:
        return row_nbytes * axis.size, axis[:1]
    return row_nbytes, axis


def _contiguous_at(rows: tuple[Rows | Channels, ...]) -> int | None:
    """Where the piece starts if every row begins where the one before it ends."""
    first = end = None
    for part in rows:
        if isinstance(part, Channels):
            return None
        starts, row = part.starts, part.row_nbytes
        if end is not None and starts[0] != end:
            return None
        # The first pair settles nearly every case that is not contiguous.
        if starts.size > 1 and (
            starts[1] - starts[0] != row or not bool((np.diff(starts) == row).all())
        ):
            return None
        first = int(starts[0]) if first is None else first
        end = int(starts[-1]) + row
    return first
