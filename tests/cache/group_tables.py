"""A table of one group alone, where nobody has counted whether its blocks are free."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.cache.free_queue import KVCacheBlock
from kvxfer.cache.manager import GroupManager


def allocate(
    manager: GroupManager,
    request_id: str,
    num_tokens: int,
    hit_blocks: Sequence[KVCacheBlock] = (),
    num_computed_tokens: int = 0,
) -> list[int] | None:
    """Make a new or known request's table hold ``num_tokens`` tokens, or change nothing: the ids
    added after the hit, None when too few blocks are free.
    """
    if hit_blocks:
        manager.check_hit(request_id, num_tokens, hit_blocks)
    kept, is_new = manager.first_kept_block(num_computed_tokens), request_id not in manager
    num_revived = sum(b.ref_cnt == 0 and not b.is_null for b in hit_blocks[kept:])
    if num_revived > manager.num_free_blocks:
        return None
    if is_new:
        manager.open_table(request_id, hit_blocks, num_computed_tokens)
    try:
        return manager.extend(request_id, num_tokens, num_computed_tokens)
    except ValueError:  # too few are free
        if is_new:
            manager.free(request_id)
        return None
