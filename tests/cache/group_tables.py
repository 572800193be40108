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
    is_new, kept = request_id not in manager, manager.first_kept_block(num_computed_tokens)
    num_held = len(hit_blocks) if is_new else len(manager.block_ids(request_id))
    first_new = max(num_held, kept, manager._first_written_block(num_tokens))
    num_new = max(manager.blocks_needed(num_tokens) - first_new, 0)
    num_revived = sum(b.ref_cnt == 0 and not b.is_null for b in hit_blocks[kept:])
    if num_new + num_revived > manager.num_free_blocks:
        return None
    if is_new:
        manager.open_table(request_id, hit_blocks, num_computed_tokens)
    return manager.extend(request_id, num_tokens, num_computed_tokens)
