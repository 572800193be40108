"""Digests of the KV of a request where it lies, equal for equal bytes whatever the layout.

A *cell* is what one region keeps for one head and one token. Its inner bytes are words of 8 bytes,
little-endian, the last one filled up with zeros. With all sums and products modulo 2^64::

    m(i)    = mix(seed + (i + 1) * STEP) | 1
    h(cell) = sum of (word_i ^ word_i >> 32) * m(i)
    key     = mix(seed ^ name of the region) + head * HEAD + token * TOKEN
    digest of a region = sum over its cells of mix(h(cell) + key)

``mix`` ends SplitMix64, head and token count from the model's first head and the request's first
token. A sum has no order, so block sizes, strides, cuts into chunks and the number of ranks do not
show, and digests of the parts of a region add up. The key binds the bytes to their place.

One changed bit changes the digest for certain: it changes h by an odd number times a power of two.
Of other changes one in 2^32 or fewer goes unnoticed by chance: the fold brings the high bits of a
word down, where their product with m fills the upper half. It is no proof against who may choose
the bytes.

Of a sample each run of ``every`` tokens (from a multiple of it on) gives one, chosen by the seed:
the cells of a block that has a whole run in it are never all left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.tensors.strided_copy import Bytes, void
from kvxfer.tensors.strided_index import (
    Ids,
    check_bases,
    check_flat,
    check_span,
    side_ids,
    token_offsets,
)
from kvxfer.transfer.plan import PullClass, RegionName, Side, Tile

PIECE_NBYTES = 256 << 10
"""Bytes that are looked at in one go on a CPU: they and their words fit the second-level cache."""

Words = NDArray[np.uint64]

STEP, HEAD, TOKEN = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
_FOLD = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Cells:
    """What to look at on one side of a class: ``tokens`` of the request (:func:`picked_tokens`), of
    which ``block_ids`` are the blocks of the side's group, positional.
    """

    side: Side
    names: tuple[RegionName, ...]
    head_lo: int
    block_ids: Ids
    tokens: Ids

    @property
    def nbytes(self) -> int:
        tile = self.side.tile
        return len(self.side.bases) * self.tokens.size * tile.num_heads * tile.inner_nbytes


def cells_of(
    side: Side, wanted: PullClass, block_ids: Sequence[Sequence[int]], every: int, seed: int
) -> Cells:
    """The cells of a class at one side; ``block_ids`` by the side's groups. Raises ValueError for
    tokens without a block of the pool.
    """
    ids = side_ids(side, block_ids)
    check_span(side.tile, ids, wanted.token_lo, wanted.token_hi)
    tokens = picked_tokens(wanted.token_lo, wanted.token_hi, every, seed)
    return Cells(side, wanted.regions, wanted.head_lo, ids, tokens)


def seed_of(nonce: bytes) -> int:
    """The seed of an offer, 64 bits."""
    return int.from_bytes(hashlib.blake2b(nonce, digest_size=8).digest(), "little")


def picked_tokens(token_lo: int, token_hi: int, every: int, seed: int) -> Ids:
    """One token of each run of ``every``, clipped to ``[token_lo, token_hi)``; in order."""
    if token_lo >= token_hi:
        return np.zeros(0, np.int64)
    runs = np.arange(token_lo // every, -(-token_hi // every), dtype=np.int64)
    first = np.maximum(runs * every, token_lo)
    length = np.minimum(runs * every + every, token_hi) - first
    chosen = mix(runs.view(np.uint64) * np.uint64(STEP) + np.uint64(seed))
    return first + (chosen % length.view(np.uint64)).view(np.int64)


def mix(words: Words) -> Words:
    """The finaliser of SplitMix64, of an array."""
    for shift, factor in MIX:
        words = (words ^ words >> np.uint64(shift)) * np.uint64(factor)
    return words ^ words >> np.uint64(LAST_SHIFT)


def multipliers(num_words: int, seed: int) -> Words:
    """m(i) of each word of a cell."""
    steps = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(STEP)
    return mix(steps + np.uint64(seed)) | np.uint64(1)


def region_keys(names: Sequence[RegionName], seed: int) -> Words:
    """The part of the key that a region's cells have in common."""
    return mix(_hashes(tuple(names)) ^ np.uint64(seed))


@lru_cache(maxsize=256)
def _hashes(names: tuple[RegionName, ...]) -> Words:
    texts = ("\0".join((name.layer, *name.planes)).encode() for name in names)
    hashes = [int.from_bytes(hashlib.blake2b(t, digest_size=8).digest(), "little") for t in texts]
    return np.array(hashes, np.uint64)


def add_digests(
    memories: Sequence[Tensor],
    cells: Cells,
    seed: int,
    sums: Words,
    piece_nbytes: int = PIECE_NBYTES,
) -> Iterator[int]:
    """Add the digest of each region to ``sums``; yields the bytes of each piece of work. Memories
    are flat uint8 of a CPU. Raises ValueError for regions outside them.
    """
    for number, memory in enumerate(memories):
        check_flat(memory, f"memory {number}")
    tile, bases = cells.side.tile, cells.side.bases
    check_bases(tile, bases, [memory.numel() for memory in memories])
    heads = np.arange(tile.num_heads, dtype=np.int64)
    step = max(1, piece_nbytes // (tile.num_heads * tile.inner_nbytes))
    factors = multipliers(-(-tile.inner_nbytes // 8), seed)
    head_keys = (heads + cells.head_lo).view(np.uint64) * np.uint64(HEAD)
    region = region_keys(cells.names, seed)
    pools: list[Bytes] = [memory.numpy() for memory in memories]
    for lo in range(0, cells.tokens.size, step):
        tokens = cells.tokens[lo : lo + step]
        offsets = token_offsets(tile, cells.block_ids, tokens)
        starts = (offsets[:, None] + heads * tile.stride_head).reshape(-1)
        keys = tokens.view(np.uint64)[:, None] * np.uint64(TOKEN) + head_keys
        for number, base in enumerate(bases):
            words = _words(pools[base.memory], base.offset, starts, tile)
            words ^= words >> _FOLD
            hashes = np.einsum("ij,j->i", words, factors) + keys.reshape(-1) + region[number]
            sums[number : number + 1] += mix(hashes).sum(dtype=np.uint64)  # no scalar: it warns
            yield words.nbytes


def _words(pool: Bytes, offset: int, starts: Ids, tile: Tile) -> Words:
    """The words [cells, words] of cells that start at these bytes; a copy."""
    element, count, stride = tile.inner_nbytes, 1, 1
    if tile.has_channels_apart:
        element, count, stride = tile.channel_nbytes, tile.num_channels, tile.stride_channel
    strides = (tile.stride_block, tile.stride_head, tile.stride_token)
    if count == 1 and not any(each % element for each in strides):  # taken by number: 1.5 x as fast
        rows = np.ndarray(((pool.size - offset) // element,), void(element), pool, offset)
        found = rows.take(starts // element)
    else:
        num_starts = pool.size - offset - (count - 1) * stride - element + 1
        units = np.ndarray((num_starts, count), void(element), pool, offset, (1, stride))
        found = units[starts]
    cells = found.view(np.uint8).reshape(starts.size, tile.inner_nbytes)
    if tile.inner_nbytes % 8:
        cells = np.pad(cells, ((0, 0), (0, -tile.inner_nbytes % 8)))
    return cells.view("<u8")
