"""Copy the KV of a request between pools, or between a pool and dense chunks, on the CPU.

The heavy work is one NumPy call per region and piece, which releases the GIL: ``take(out=)``
gathers and ``pool[starts] = dense`` scatters rows of bytes. Rows are elements of a void dtype: one
memmove each, whatever their length and alignment. One thread, against ``torch.index_select``: 13 to
10 GB/s at rows of 256 bytes, equal at 32 KiB. A gather runs at 1.6 times the rate of a plain copy
(it writes into the cache), a scatter at 1.3 times (it reads from there): together at 0.62 to 0.67.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.tensors.strided_index import (
    PIECE_NBYTES,
    Ids,
    Piece,
    Units,
    check_bases,
    check_chunk,
    check_flat,
    check_order,
    check_pair,
    check_regions,
    check_span,
    read_piece,
    token_pieces,
    write_piece,
)
from kvxfer.transfer.plan import Base, CopyClass, DenseOrder, Side, Tile

Bytes = NDArray[np.uint8]

_PAGE_NBYTES = 4096


class Scratch:
    """Kept from call to call so that its bytes stay in the cache. For one thread."""

    def __init__(self, nbytes: int = PIECE_NBYTES) -> None:
        self._bytes = _page_aligned(nbytes)

    def take(self, nbytes: int) -> Bytes:
        """The first ``nbytes``; grows when they are more than ever before."""
        if nbytes > self._bytes.size:
            self._bytes = _page_aligned(nbytes)
        return self._bytes[:nbytes]


def _page_aligned(nbytes: int) -> Bytes:
    # As malloc returns it, a large array begins 16 bytes into a page. Rows of 4 KiB or more
    # copied there from the start of a page run at 1.3 to 2 GB/s instead of 5 to 14: the "rep movsb"
    # of memmove on AMD Zen takes source and target for overlapping if their low 12 bits are close.
    whole = np.empty(nbytes + _PAGE_NBYTES, dtype=np.uint8)
    start = -whole.ctypes.data % _PAGE_NBYTES
    return whole[start : start + nbytes]


def gather(
    memories: Sequence[Tensor],
    side: Side,
    block_ids: Ids,
    order: DenseOrder,
    regions: tuple[int, int],
    tokens: tuple[int, int],
    out: Tensor,
) -> None:
    """Pack tokens [lo, hi) of regions [lo, hi) into ``out``.

    memories: this rank's, flat uint8; block_ids: int64, positional from the request's first token;
    out: uint8, exactly the chunk's bytes, filled in ``order``. Raises ValueError, before anything
    is written, for ids or bases outside the memories and for a wrong size.
    """
    bases = _regions(side, regions)
    pools = _checked(memories, side.tile, bases, block_ids, tokens)
    check_order(side.tile, order)
    piece = read_piece(side.tile, block_ids, order, *tokens)
    chunk = _chunk(out, "out", piece, len(bases))
    for base, region_bytes in zip(bases, chunk, strict=True):
        _gather(pools[base.memory], base.offset, piece, region_bytes)


def scatter(
    memories: Sequence[Tensor],
    side: Side,
    block_ids: Ids,
    regions: tuple[int, int],
    tokens: tuple[int, int],
    dense: Tensor,
) -> None:
    """The reverse of :func:`gather` with the order of the sink's tile; the same checks."""
    bases = _regions(side, regions)
    pools = _checked(memories, side.tile, bases, block_ids, tokens)
    piece = write_piece(side.tile, block_ids, side.tile.order, *tokens)
    chunk = _chunk(dense, "dense", piece, len(bases))
    for base, region_bytes in zip(bases, chunk, strict=True):
        _scatter(pools[base.memory], base.offset, piece, region_bytes)


def strided_copy(
    source_memories: Sequence[Tensor],
    sink_memories: Sequence[Tensor],
    copy_class: CopyClass,
    source_ids: Ids,
    sink_ids: Ids,
    tokens: tuple[int, int],
    *,
    scratch: Scratch,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Copy tokens [lo, hi) of all regions from pool to pool; returns the bytes copied.

    The source is only read. ``stop`` is asked before each piece (at most 1 MiB, unless one token
    is larger); once it says True nothing more is written. Raises ValueError, before anything is
    written, for ids or bases outside the memories.
    """
    source, sink = copy_class.source, copy_class.sink
    check_pair(copy_class)
    source_pools = _checked(source_memories, source.tile, source.bases, source_ids, tokens)
    sink_pools = _checked(sink_memories, sink.tile, sink.bases, sink_ids, tokens)
    order = sink.tile.order
    copied_nbytes = 0
    for lo, hi in token_pieces(source.tile, sink.tile, *tokens):
        reads = read_piece(source.tile, source_ids, order, lo, hi)
        writes = write_piece(sink.tile, sink_ids, order, lo, hi)
        for given, taken in zip(source.bases, sink.bases, strict=True):
            if stop():
                return copied_nbytes
            source_pool, sink_pool = source_pools[given.memory], sink_pools[taken.memory]
            if writes.contiguous_at is not None:
                target = _slice(sink_pool, taken.offset + writes.contiguous_at, writes)
                _gather(source_pool, given.offset, reads, target)
            elif reads.contiguous_at is not None:
                dense = _slice(source_pool, given.offset + reads.contiguous_at, writes)
                _scatter(sink_pool, taken.offset, writes, dense)
            else:
                dense = scratch.take(writes.nbytes)
                _gather(source_pool, given.offset, reads, dense)
                _scatter(sink_pool, taken.offset, writes, dense)
            copied_nbytes += writes.nbytes
    return copied_nbytes


def _gather(pool: Bytes, offset: int, piece: Piece, out: Bytes) -> None:
    if piece.contiguous_at is not None:
        np.copyto(out, _slice(pool, offset + piece.contiguous_at, piece))
        return
    for part in piece.parts:
        if part.numbers is None:
            _dense_units(out, part)[...] = _any_unit(pool, offset, part)[part.starts]
            continue
        element = part.granule_nbytes
        target = _elements(out, part.dense_lo, element, part.numbers.size)
        source = _elements(pool, offset, element, (pool.size - offset) // element)
        # "clip" writes straight into out, "raise" goes through a temporary; the range was checked.
        # The method, for it costs 0.6 us and np.take 3.5.
        source.take(part.numbers, out=target, mode="clip")


def _scatter(pool: Bytes, offset: int, piece: Piece, dense: Bytes) -> None:
    if piece.contiguous_at is not None:
        np.copyto(_slice(pool, offset + piece.contiguous_at, piece), dense)
        return
    for part in piece.parts:
        _any_unit(pool, offset, part)[part.starts] = _dense_units(dense, part)


def _elements(memory: Bytes, offset: int, element_nbytes: int, count: int) -> NDArray[np.void]:
    """``count`` elements side by side."""
    return np.ndarray((count,), void(element_nbytes), memory, offset)


def _any_unit(memory: Bytes, offset: int, part: Units) -> NDArray[np.void]:
    """Element i is the unit that starts at byte ``offset + i``: it may lie anywhere."""
    count = memory.size - offset - part.extent_nbytes + 1
    shape, strides = (count, *part.shape), (1, *part.strides)
    return np.ndarray(shape, void(part.element_nbytes), memory, offset, strides)


def _dense_units(dense: Bytes, part: Units) -> NDArray[np.void]:
    """All units where they lie in the dense piece, in the order of ``starts``."""
    shape = (*part.starts.shape, *part.shape)
    return np.ndarray(shape, void(part.element_nbytes), dense, part.dense_lo, part.dense_strides)


@lru_cache(maxsize=256)
def void(nbytes: int) -> np.dtype[Any]:
    """So many bytes as one element: what moves them is one memmove."""
    return np.dtype((np.void, nbytes))


def _slice(pool: Bytes, start: int, piece: Piece) -> Bytes:
    return pool[start : start + piece.nbytes]


def _regions(side: Side, regions: tuple[int, int]) -> tuple[Base, ...]:
    check_regions(len(side.bases), *regions)
    return side.bases[slice(*regions)]


def _chunk(tensor: Tensor, name: str, piece: Piece, num_regions: int) -> NDArray[np.uint8]:
    check_chunk(tensor, name, num_regions, piece.nbytes)
    flat: Bytes = tensor.numpy()
    return flat.reshape(num_regions, piece.nbytes)


def _checked(
    memories: Sequence[Tensor],
    tile: Tile,
    bases: Sequence[Base],
    block_ids: Ids,
    tokens: tuple[int, int],
) -> list[Bytes]:
    """The memories as arrays, once all that will be addressed is known to lie inside them."""
    check_span(tile, block_ids, *tokens)
    for number, memory in enumerate(memories):
        check_flat(memory, f"memory {number}")
    pools: list[Bytes] = [memory.numpy() for memory in memories]
    check_bases(tile, bases, [pool.size for pool in pools])
    return pools
