"""Managers of layers that do not look at every token before, and the choice of a manager by spec.

What they no longer look at is dropped from the table while the request runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.extra_keys import HashableRequest
from kvxfer.cache.hashing import BlockHashType
from kvxfer.cache.manager import FullAttentionManager, GroupManager
from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)


class SlidingWindowManager(GroupManager):
    """Layers whose tokens see the ``sliding_window`` last tokens, themselves among them.

    A hit needs the ``cdiv(sliding_window - 1, block_size)`` blocks before its end, or all blocks
    where it is shorter than that.
    """

    spec: SlidingWindowSpec

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """The next token, number ``num_computed_tokens``, sees ``sliding_window - 1`` before it."""
        return max(0, num_computed_tokens - self.spec.sliding_window + 1)


class ChunkedLocalAttentionManager(GroupManager):
    """Layers whose tokens see their own chunk of ``attention_chunk_size`` tokens up to themselves.

    A hit needs the blocks from the start of the chunk that it ends in; one that ends with a chunk
    needs none.
    """

    spec: ChunkedLocalAttentionSpec

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All chunks before the one of the next token."""
        return num_computed_tokens - num_computed_tokens % self.spec.attention_chunk_size


class MambaManager(GroupManager):
    """Layers that keep a state. The state after n tokens is in block ``(n - 1) // block_size``.

    A step reads the state before it and writes the one after it, in the same block or in a later
    one; between the two the table is null. Behind the last state follow ``num_speculative_blocks``
    for tokens that may be rejected. A hit needs its last block only.
    """

    spec: MambaSpec

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last, whose block has the state."""
        return max(0, num_computed_tokens - 1)

    def blocks_needed(self, num_tokens: int) -> int:
        """Length of a table for ``num_tokens`` tokens; ValueError when negative."""
        return super().blocks_needed(num_tokens) + self.spec.num_speculative_blocks

    def _first_written_block(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self.block_size

    def cache_blocks(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHashType],
        num_computed_tokens: int,
        request: HashableRequest | None = None,
    ) -> None:
        """Name the block of the state after ``num_computed_tokens`` tokens, if that is a block's
        end. Call it after every step: a state that was passed by a longer step was never written.
        """
        table = self._table(request_id)
        num_blocks, rest = divmod(num_computed_tokens, self.block_size)
        num_passed = num_blocks if rest else num_blocks - 1
        table.num_cached_blocks = max(table.num_cached_blocks, num_passed)
        super().cache_blocks(request_id, block_hashes, num_computed_tokens, request)


def manager_for(
    spec: KVCacheSpec, pool: BlockPool, group_id: int = 0, hash_block_size: int | None = None
) -> GroupManager:
    """The manager of a group whose layers have ``spec``; ValueError for a kind without one."""
    match spec:
        case FullAttentionSpec():
            return FullAttentionManager(spec, pool, group_id, hash_block_size)
        case SlidingWindowSpec():
            return SlidingWindowManager(spec, pool, group_id, hash_block_size)
        case ChunkedLocalAttentionSpec():
            return ChunkedLocalAttentionManager(spec, pool, group_id, hash_block_size)
        case MambaSpec():
            return MambaManager(spec, pool, group_id, hash_block_size)
    raise ValueError(
        f"kv_cache_spec of group {group_id}: expected full, sliding-window or chunked attention or "
        f"a state, got {type(spec).__name__}"
    )
