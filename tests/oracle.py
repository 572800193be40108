"""The truth about a copy: loops over tokens and heads, one slice at a time, by region addresses.

Deliberately naive, and independent of the plan: it shares no arithmetic with the code under test.
All tests of copies take their addresses and the order of a chunk from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.transfer.layout import Region

Bytes = NDArray[np.uint8]
Spans = Mapping[int, tuple[int, int]]


class Strides(Protocol):
    """How the blocks of a side lie in memory: a ``Tile`` of a plan, a ``CopySide`` of a kernel."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def kernel_tokens(self) -> int: ...
    @property
    def stride_block(self) -> int: ...
    @property
    def stride_head(self) -> int: ...
    @property
    def stride_token(self) -> int: ...
    @property
    def stride_channel(self) -> int: ...


class _RegionStrides(NamedTuple):
    block_tokens: int
    kernel_tokens: int
    stride_block: int
    stride_head: int
    stride_token: int
    stride_channel: int


def oracle_offset(
    side: Strides, ids: Sequence[int], position: int, head: int, channel: int = 0
) -> int:
    """Bytes from a region's base to (request token, head counted from 0, channel)."""
    block_id, token = ids[position // side.block_tokens], position % side.block_tokens
    kernel_blocks = side.block_tokens // side.kernel_tokens
    offset = (block_id * kernel_blocks + token // side.kernel_tokens) * side.stride_block
    offset += head * side.stride_head
    offset += (token % side.kernel_tokens) * side.stride_token
    offset += channel * side.stride_channel
    return offset


def oracle_address(region: Region, block_id: int, head: int, token: int) -> int:
    """Byte offset in the region's memory of (block, global head, token of the block); of the cell
    that this token shares with others, if the region is compressed.
    """
    block_cells = region.block_tokens // cell_tokens(region)
    strides = _RegionStrides(
        block_tokens=block_cells,
        kernel_tokens=block_cells // region.kernel_blocks,
        stride_block=region.stride_block,
        stride_head=region.stride_head,
        stride_token=region.stride_token,
        stride_channel=region.stride_channel,
    )
    cell = token // cell_tokens(region)
    return region.offset + oracle_offset(strides, [block_id], cell, head - region.head_lo)


def cell_tokens(region: Region) -> int:
    """How many tokens share a cell of a region."""
    return region.cell_tokens if isinstance(region.cell_tokens, int) else 1


def oracle_order(
    kernel_tokens: int,
    tokens: tuple[int, int],
    num_heads: int,
    *,
    is_token_major: bool,
    num_channels: int = 0,
) -> list[tuple[int, int, int]]:
    """(token, head counted from 0, channel) of every slice of one region of a chunk in the order in
    which they travel: kernel block by kernel block of the sink. A channel number of -1 stands for
    all of them, where ``num_channels`` is 0.
    """
    (first, end), heads = tokens, range(num_heads)
    found: list[tuple[int, int, int]] = []
    for block in range(first // kernel_tokens, -(-end // kernel_tokens)):
        within = range(max(block * kernel_tokens, first), min((block + 1) * kernel_tokens, end))
        if num_channels:
            found += [(t, h, c) for h in heads for c in range(num_channels) for t in within]
        elif is_token_major:
            found += [(token, head, -1) for token in within for head in heads]
        else:
            found += [(token, head, -1) for head in heads for token in within]
    return found


def keeps(region: Region, position: int) -> bool:
    """Does the rank keep this token of a request?"""
    kept = region.interleave
    return not kept or position // kept.run % kept.size == kept.index


@cache
def number_kept(region: Region, position: int) -> int:
    """How many of the tokens before it the rank keeps, by asking of each."""
    if not region.interleave:
        return position
    return sum(keeps(region, each) for each in range(position))


def oracle_pieces(
    region: Region, memories: Sequence[Bytes], ids: Sequence[int], position: int, head: int
) -> list[Bytes]:
    """Writable views of one (request token, global head), one for each channel that lies apart;
    ``ids`` are positional.
    """
    if not keeps(region, position):
        raise ValueError(f"{region.layer} {region.plane}: token {position} is on another rank")
    position = number_kept(region, position)
    block_id = ids[position // region.block_tokens]
    if not 0 <= block_id < region.num_blocks:
        raise ValueError(f"block id {block_id} at token {position}: not in 0..{region.num_blocks}")
    token = position % region.block_tokens
    num_channels, nbytes = 1, region.inner_nbytes
    if region.stride_channel:
        num_channels, nbytes = region.inner_nbytes // region.channel_nbytes, region.channel_nbytes
    first = oracle_address(region, block_id, head, token)
    places = [first + channel * region.stride_channel for channel in range(num_channels)]
    views = [memories[region.memory][place : place + nbytes] for place in places]
    if any(len(view) != nbytes for view in views):
        raise ValueError(
            f"{region.layer} {region.plane}: address {places[0]} is outside the memory"
        )
    return views


def oracle_bytes(
    region: Region, memories: Sequence[Bytes], ids: Sequence[int], position: int, head: int
) -> Bytes:
    """The inner bytes of one (request token, global head); ``ids`` are positional."""
    views = oracle_pieces(region, memories, ids, position, head)
    return views[0] if len(views) == 1 else np.concatenate(views)


def oracle_write(views: Sequence[Bytes], value: Bytes) -> None:
    """Put inner bytes where they belong."""
    at = 0
    for view in views:
        view[:] = value[at : at + len(view)]
        at += len(view)


def oracle_copy(
    source_regions: Sequence[Region],
    source_memories: Sequence[Bytes],
    sink_regions: Sequence[Region],
    sink_memories: Sequence[Bytes],
    *,
    source_ids: Sequence[Sequence[int]],
    sink_ids: Sequence[Sequence[int]],
    spans: Spans,
) -> None:
    """Copy every (layer, plane, head, token) that both sides hold, for the spans of sink groups.

    One source rank to one sink rank; call it for every pair of ranks (replicas hold the same
    bytes). Ids by the side's own group, positional from the request's first token; ``spans`` by
    sink group, absent groups stay as they are.
    """
    sources = {(region.layer, region.plane): region for region in source_regions}
    for sink in sink_regions:
        source = sources.get((sink.layer, sink.plane))
        if source is None or sink.group not in spans:
            continue
        (lo, hi), given_ids, taken_ids = (
            spans[sink.group],
            source_ids[source.group],
            sink_ids[sink.group],
        )
        if sink.is_state:  # after the span's last token, whatever it begins with
            lo, hi = 0, sink.block_tokens if lo < hi else 0
            given_ids, taken_ids = (
                _state_block(r, i, spans[sink.group][1])
                for r, i in ((source, given_ids), (sink, taken_ids))
            )
        for position in range(lo, hi):
            if (position + 1) % cell_tokens(sink):
                continue  # a cell is there with its last token
            for head in range(sink.head_lo, sink.head_hi):
                if not source.head_lo <= head < source.head_hi:
                    continue
                if not (keeps(source, position) and keeps(sink, position)):
                    continue
                given = oracle_bytes(source, source_memories, given_ids, position, head)
                taken = oracle_pieces(sink, sink_memories, taken_ids, position, head)
                oracle_write(taken, given)


def _state_block(region: Region, ids: Sequence[int], num_tokens: int) -> Sequence[int]:
    """The block of a positional table with the state after so many tokens."""
    assert isinstance(region.state_tokens, int)
    return (ids[(num_tokens - 1) // region.state_tokens],)


def oracle_fill(
    regions: Sequence[Region],
    memories: Sequence[Bytes],
    *,
    ids: Sequence[Sequence[int]],
    num_tokens: int,
    seed: int = 0,
) -> None:
    """Write the KV of a request: bytes that depend on (seed, layer, plane, head, token) only.

    Replicas agree. Of layers that share memory the first of a group in ``regions`` is written.
    """
    written: set[tuple[int, int, int]] = set()
    for region in regions:
        if (region.group, region.memory, region.offset) in written:
            continue
        written.add((region.group, region.memory, region.offset))
        for position in range(num_tokens):
            if not keeps(region, position):
                continue
            for head in range(region.head_lo, region.head_hi):
                taken = oracle_pieces(region, memories, ids[region.group], position, head)
                oracle_write(taken, oracle_value(region, position, head, seed))


def oracle_value(region: Region, position: int, head: int, seed: int = 0) -> Bytes:
    """The bytes that ``oracle_fill`` writes for one (layer, plane, head, token)."""
    name = f"{seed}/{region.layer}/{region.plane}/{head}/{position}".encode()
    digest = blake2b(name, digest_size=32).digest()
    repeated = digest * (-(-region.inner_nbytes // len(digest)))
    return np.frombuffer(repeated[: region.inner_nbytes], dtype=np.uint8)
