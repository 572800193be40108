"""Which blocks a request holds, for layers that attend to every token before.

A table grows from the front: first the blocks found by prefix, then new ones. A block is found by
others only after :meth:`FullAttentionManager.cache_blocks` said that its tokens are computed, so
blocks that wait for a load, or whose load failed, are never handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.cache.block_pool import BlockPool, KVCacheBlock
from kvxfer.cache.hashing import BlockHashType


@dataclass(slots=True)
class _Table:
    """The blocks of one request in token order; the first ``num_cached_blocks`` of them have been
    named.
    """

    blocks: list[KVCacheBlock] = field(default_factory=list)
    num_cached_blocks: int = 0


class FullAttentionManager:
    """Block tables of all requests over one pool. Token counts are totals from a request's first
    token.
    """

    def __init__(self, pool: BlockPool, block_size: int, group_id: int = 0) -> None:
        """``block_size`` in tokens; ``group_id`` keeps the names of several groups of one pool
        apart. ValueError below 1.
        """
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1 token, got {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.group_id = group_id
        self._tables: dict[str, _Table] = {}

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the pool."""
        return self.pool.num_free_blocks

    def __contains__(self, request_id: str) -> bool:
        """Whether the request holds a table."""
        return request_id in self._tables

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens; ValueError when negative."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected at least 0, got {num_tokens}")
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block ids in token order; ValueError when it holds none."""
        return [block.block_id for block in self._table(request_id).blocks]

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHashType], max_tokens: int
    ) -> list[KVCacheBlock]:
        """The blocks of the longest known prefix, at most ``max_tokens`` tokens.

        Pass ``max_tokens`` below the prompt's length where its last token must be computed to get a
        logit. The blocks may be free: give them to :meth:`allocate` before anything else is
        allocated.
        """
        if max_tokens < 0:
            raise ValueError(f"max_tokens: expected at least 0, got {max_tokens}")
        hit: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max_tokens // self.block_size]:
            block = self.pool.get_cached_block(block_hash, self.group_id)
            if block is None:
                break
            hit.append(block)
        return hit

    def allocate(
        self, request_id: str, num_tokens: int, hit_blocks: Sequence[KVCacheBlock] = ()
    ) -> list[int] | None:
        """Make the request's table hold ``num_tokens`` tokens.

        Args:
            request_id: a new request, or one whose table grows.
            num_tokens: all its tokens, prefix hit included.
            hit_blocks: from :meth:`find_longest_cache_hit`, for a new request only; they become its
                first blocks.

        Returns:
            The ids of the blocks added after ``hit_blocks`` (those that hold nothing yet), ``[]``
            when the table is large enough, None when too few blocks are free: then nothing has
            changed.

        Raises:
            ValueError: hits for a request that has a table, hits beyond ``num_tokens``, or a hit
                that was evicted since.
        """
        table = self._tables.get(request_id)
        num_needed = self.blocks_needed(num_tokens)
        if hit_blocks:
            self._check_hit(request_id, num_needed, hit_blocks)
        num_held = len(table.blocks) if table else len(hit_blocks)
        num_new = max(num_needed - num_held, 0)
        num_revived = sum(block.ref_cnt == 0 and not block.is_null for block in hit_blocks)
        if num_new + num_revived > self.pool.num_free_blocks:
            return None
        # Hits first: a free hit could otherwise be given out as a new block.
        self.pool.touch(hit_blocks)
        new_blocks = self.pool.get_new_blocks(num_new)
        if table is None:
            table = self._tables[request_id] = _Table(list(hit_blocks), len(hit_blocks))
        table.blocks += new_blocks
        return [block.block_id for block in new_blocks]

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[BlockHashType], num_computed_tokens: int
    ) -> None:
        """Let others find the full blocks among the first ``num_computed_tokens`` tokens, whose KV
        is complete.

        Args:
            request_id: a request with a table.
            block_hashes: the names of its full blocks, from its first.
            num_computed_tokens: tokens computed or accepted from a load; fewer than before changes
                nothing.

        Raises:
            ValueError: an unknown request, or more tokens than its table or ``block_hashes`` cover.
        """
        table = self._table(request_id)
        num_full_blocks = num_computed_tokens // self.block_size
        if num_full_blocks <= table.num_cached_blocks:
            return
        self.pool.cache_full_blocks(
            table.blocks, block_hashes, table.num_cached_blocks, num_full_blocks, self.group_id
        )
        table.num_cached_blocks = num_full_blocks

    def free(self, request_id: str) -> None:
        """Give the request's blocks back, tail first, so that the start of its prefix is evicted
        last.

        Raises:
            ValueError: the request holds no table (freed twice, or never allocated).
        """
        table = self._table(request_id)
        del self._tables[request_id]
        self.pool.free_blocks(reversed(table.blocks))

    def _table(self, request_id: str) -> _Table:
        table = self._tables.get(request_id)
        if table is None:
            raise ValueError(f"request {request_id}: expected one that holds blocks, got none")
        return table

    def _check_hit(
        self, request_id: str, num_needed: int, hit_blocks: Sequence[KVCacheBlock]
    ) -> None:
        if request_id in self._tables:
            raise ValueError(
                f"request {request_id}: expected hit_blocks for a new request only, "
                f"got {len(hit_blocks)}; free it first"
            )
        if len(hit_blocks) > num_needed:
            raise ValueError(
                f"hit_blocks: expected at most the {num_needed} blocks of the request's tokens, "
                f"got {len(hit_blocks)}"
            )
        for block in hit_blocks:
            if block.block_hash is None and not block.is_null:
                raise ValueError(
                    f"hit_blocks: expected cached blocks, got {block}; "
                    "allocate right after the lookup"
                )
