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
    more) and its length, a multiple of every group's block size.

    The blocks may be free: admit the request before anything else is allocated.
    """

    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    num_tokens: int


def longest_common_hit(
    groups: Sequence[GroupManager],
    block_hashes: Sequence[BlockHashType],
    max_tokens: int,
    alignment_tokens: int,
) -> CacheHit:
    """The longest prefix of at most ``max_tokens`` tokens that every one of ``groups`` can
    continue, a multiple of ``alignment_tokens``, where blocks of all groups end. ValueError when
    ``max_tokens`` is negative.

    Each group answers with its longest length up to the one asked for, in turn, until nobody
    shortens it any more. A length that all can continue is never passed over: so it is the longest.
    """
    hits: dict[int, list[KVCacheBlock]] = {}
    num_tokens = max_tokens // alignment_tokens * alignment_tokens
    dropping = [group for group in groups if not group.keeps_every_token]
    # Groups that keep every token are asked once, first: any part of what they find is a hit.
    to_ask = dropping + [group for group in groups if group.keeps_every_token]
    while to_ask:
        group = to_ask.pop()
        hit = group.find_longest_cache_hit(block_hashes, num_tokens, alignment_tokens)
        hits[group.group_id] = hit
        num_found_tokens = len(hit) * group.block_size
        if num_found_tokens < num_tokens and not group.keeps_every_token:
            to_ask = [other for other in dropping if other is not group]
        num_tokens = num_found_tokens
    return CacheHit(
        tuple(tuple(hits[group.group_id][: num_tokens // group.block_size]) for group in groups),
        num_tokens,
    )
