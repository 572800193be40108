"""What is checked before a copy, on the CPU or on a GPU, where nothing else would notice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvxfer.tensors.strided_index import Ids, span_ids, tile_extent_nbytes
from kvxfer.transfer.plan import Base, CopyClass, DenseOrder, Tile


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
    """Is there an id, good or not, for every token of ``[token_lo, token_hi)``? Raises
    ValueError.
    """
    if not 0 <= token_lo <= token_hi:
        raise ValueError(f"tokens: expected 0 <= lo <= hi, got [{token_lo}, {token_hi})")
    if block_ids.dtype != np.int64 or block_ids.size * tile.block_tokens < token_hi:
        raise ValueError(
            f"block_ids: expected int64 ids of {token_hi} tokens in blocks of "
            f"{tile.block_tokens}, got {block_ids.size} of {block_ids.dtype}"
        )


def are_blocks(tile: Tile, block_ids: Ids) -> bool:
    """Does every one of these int64 ids name a block of the pool?"""
    # Seen as unsigned, a negative id is a very large one: one look instead of two
    return int(block_ids.view(np.uint64).max(initial=0)) < tile.num_blocks


def check_bases(tile: Tile, bases: Sequence[Base], memories_nbytes: Sequence[int]) -> None:
    """Do all blocks of every region lie inside its memory? Raises ValueError."""
    extent = tile_extent_nbytes(tile)
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
