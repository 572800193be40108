"""The longest prefix that all groups of a cache can continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.cache.block_pool import KVCacheBlock
from kvxfer.cache.hashing import BlockHashType
from kvxfer.cache.manager import GroupManager


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A prefix that every group knows: its blocks by group (null where a group does not look any
    more) and its length, a multiple of the block size.

    The blocks may be free: admit the request before anything else is allocated.
    """

    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    num_tokens: int


def longest_common_hit(
    groups: Sequence[GroupManager], block_hashes: Sequence[BlockHashType], max_tokens: int
) -> CacheHit:
    """The longest prefix of at most ``max_tokens`` tokens that every one of ``groups`` (of one
    block size) can continue. ValueError when ``max_tokens`` is negative.

    Each group answers with its longest length up to the one asked for, in turn, until nobody
    shortens it any more. A length that all can continue is never passed over: so it is the longest.
    """
    hits: dict[int, list[KVCacheBlock]] = {}
    # Groups that keep every token are asked once, first: any part of what they find is a hit.
    for group in groups:
        if group.keeps_every_token:
            hits[group.group_id] = group.find_longest_cache_hit(block_hashes, max_tokens)
            max_tokens = len(hits[group.group_id]) * group.block_size
    dropping = [group for group in groups if not group.keeps_every_token]
    to_ask = list(dropping)
    while to_ask:
        group = to_ask.pop()
        hits[group.group_id] = group.find_longest_cache_hit(block_hashes, max_tokens)
        num_found_tokens = len(hits[group.group_id]) * group.block_size
        if num_found_tokens <= max_tokens - group.block_size:
            to_ask = [other for other in dropping if other is not group]
        max_tokens = num_found_tokens
    num_blocks = min(map(len, hits.values()))
    return CacheHit(
        tuple(tuple(hits[group.group_id][:num_blocks]) for group in groups),
        num_blocks * groups[0].block_size,
    )
