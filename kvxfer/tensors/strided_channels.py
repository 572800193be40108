"""Channels that lie apart in a pool and together in a dense piece, or the other way round.

Rows would be as short as a channel (4 bytes of float32) and their addresses twice as long as they:
to make, and to keep for the next region. Here there is one address for all tokens and channels of a
*unit*, a run of tokens of one head, and one NumPy call for all units: it copies each through a
strided view of the pool and turns it on the way. On one core, 128 channels of float32 turned, in
blocks of 32 to 128 tokens: 1.2 to 3.0 GB/s, where equal blocks run at 5.7. Elements taken by
number, 32 tokens: 2.4 GB/s, 3.2 with the numbers kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.transfer.plan import DenseOrder, Tile

_OF_CHANNEL_MAJOR = (0, 3, 1, 4, 2)
_OF_HEAD_MAJOR = (0, 2, 1, 3, 4)
_OF_TOKEN_MAJOR = (0, 1, 3, 2, 4)


@dataclass(frozen=True, slots=True)
class Channels:
    """Equal units, and how they lie in the dense piece from byte ``dense_lo`` on.

    ``starts`` [blocks, units of a block, heads] are byte offsets from the region's base. The dense
    piece has shape ``dense_shape``; transposed by ``dense_axes`` it is [blocks, units, heads,
    ``num_tokens``, ``num_channels``]. Both in elements of ``channel_nbytes``.
    """

    dense_lo: int
    channel_nbytes: int
    num_tokens: int
    stride_token: int
    num_channels: int
    stride_channel: int
    starts: NDArray[np.int64]
    dense_shape: tuple[int, ...]
    dense_axes: tuple[int, ...]

    @property
    def extent_nbytes(self) -> int:
        """Bytes of the pool from the first of a unit to its last."""
        return (
            (self.num_tokens - 1) * self.stride_token
            + (self.num_channels - 1) * self.stride_channel
            + self.channel_nbytes
        )


def channel_units(
    tile: Tile,
    order: DenseOrder,
    units: NDArray[np.int64],
    unit_tokens: int,
    block_units: int,
    *,
    token_major: bool,
    dense_lo: int,
) -> Channels:
    """Dense blocks of ``block_units`` units of ``unit_tokens`` tokens; ``units`` are the starts of
    their first heads.
    """
    heads = np.arange(tile.num_heads, dtype=np.int64) * tile.stride_head
    starts = units.reshape(-1, block_units, 1) + heads
    num_blocks, num_heads, num_channels = starts.shape[0], tile.num_heads, tile.num_channels
    if order.channel_nbytes:
        shape = (num_blocks, num_heads, num_channels, block_units, unit_tokens)
        axes = _OF_CHANNEL_MAJOR
    elif token_major:
        shape = (num_blocks, block_units, unit_tokens, num_heads, num_channels)
        axes = _OF_TOKEN_MAJOR
    else:
        shape = (num_blocks, num_heads, block_units, unit_tokens, num_channels)
        axes = _OF_HEAD_MAJOR
    return Channels(
        dense_lo=dense_lo,
        channel_nbytes=tile.channel_nbytes,
        num_tokens=unit_tokens,
        stride_token=tile.stride_token,
        num_channels=num_channels,
        stride_channel=tile.stride_channel,
        starts=starts,
        dense_shape=shape,
        dense_axes=axes,
    )
