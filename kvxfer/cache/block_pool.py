"""The blocks of a cache: which are free, which hold what, and which goes next.

A block is in use while its reference count is above 0; otherwise it waits in the free queue, with
its content and its name, until it is given out again from the front of the queue. Reusing a prefix
takes a waiting block out of the middle. So the queue is a doubly linked list through the blocks
themselves: every operation costs the same at any pool size and creates no object.

Order of eviction: least recently freed first, and of blocks freed together the first of the list,
so callers free a chain tail first and its start lives longest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

from kvxfer.cache.hashing import BlockHashType

logger = logging.getLogger("kvxfer.cache")


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of the pool. Two blocks are equal only if they are the same block.

    ``block_hash`` is the name of its content, None while it has none (not full, not computed, or
    evicted); ``group_id`` is the group whose table holds that name. Both links are None outside the
    free queue. ``is_null`` marks the placeholder that stands for "no block" in a table.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHashType | None = None
    prev_free_block: KVCacheBlock | None = None
    next_free_block: KVCacheBlock | None = None
    group_id: int = 0
    is_null: bool = False

    def incr_ref(self) -> None:
        """One more user."""
        self.ref_cnt += 1

    def decr_ref(self) -> None:
        """One user less; ValueError when there was none."""
        if self.ref_cnt < 1:
            raise ValueError(
                f"block {self.block_id}: expected at least one user, got {self.ref_cnt}"
            )
        self.ref_cnt -= 1

    def __repr__(self) -> str:
        # Neighbours by id: the generated form would walk the whole queue.
        prev_id = None if self.prev_free_block is None else self.prev_free_block.block_id
        next_id = None if self.next_free_block is None else self.next_free_block.block_id
        name = None if self.block_hash is None else self.block_hash.hex()[:16]
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, block_hash={name}, "
            f"prev_free_block={prev_id}, next_free_block={next_id})"
        )


class FreeKVCacheBlockQueue:
    """Free blocks, next to be given out first: a list linked through the blocks, with O(1) removal
    from its middle.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take ``blocks``, in this order; RuntimeError when one is in a queue already."""
        self.num_free_blocks = 0
        # Two sentinels, so that no operation asks whether it is at an end.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the first block; ValueError when there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, num_blocks: int, ref_cnt: int = 0) -> list[KVCacheBlock]:
        """Take the first ``num_blocks`` blocks and set their reference count.

        Raises:
            ValueError: fewer are free; nothing was taken.
        """
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise ValueError(
                f"free blocks: expected 0 to {self.num_free_blocks}, got a request for {num_blocks}"
            )
        taken: list[KVCacheBlock] = []
        block = self._head.next_free_block
        for _ in repeat(None, num_blocks):
            assert block is not None  # num_free_blocks is the length of the list
            taken.append(block)
            block.ref_cnt = ref_cnt
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        assert block is not None
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= num_blocks
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take ``block`` from wherever it is; RuntimeError when it is in no queue."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(
                f"block {block.block_id}: expected it in the free queue, got {block}"
            )
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put ``block`` at the end; RuntimeError when it is in a queue already."""
        self.append_n((block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put ``blocks`` at the end, in this order; RuntimeError, and nothing changed, when one is
        in a queue already.
        """
        first_last = last = self._last()
        num_blocks = 0
        for block in blocks:
            if block.prev_free_block is not None:
                self._undo_append(last, first_last)
                raise RuntimeError(f"block {block.block_id}: expected it in no queue, got {block}")
            block.prev_free_block = last
            last.next_free_block = block
            last = block
            num_blocks += 1
        last.next_free_block = self._tail
        self._tail.prev_free_block = last
        self.num_free_blocks += num_blocks

    def release_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One user less for each block; those left without users go to the end, in this order.

        One pass instead of a list for :meth:`append_n`: 60 ns a block instead of 97. Null blocks
        are skipped.

        Raises:
            ValueError: a block without users. Those before it are released, those after it not.
        """
        last = self._last()
        num_freed = 0
        try:
            for block in blocks:
                ref_cnt = block.ref_cnt - 1
                if ref_cnt == 0:
                    block.prev_free_block = last
                    last.next_free_block = block
                    last = block
                    num_freed += 1
                elif ref_cnt < 0:
                    if block.is_null:
                        continue
                    raise ValueError(
                        f"block {block.block_id}: expected at least one user, got {ref_cnt + 1}; "
                        "it was freed more often than taken"
                    )
                block.ref_cnt = ref_cnt
        finally:
            last.next_free_block = self._tail
            self._tail.prev_free_block = last
            self.num_free_blocks += num_freed

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks in order, for tests and reports: O(number of free blocks)."""
        blocks = []
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def _last(self) -> KVCacheBlock:
        last = self._tail.prev_free_block
        assert last is not None  # the head at least
        return last

    def _undo_append(self, block: KVCacheBlock, first_last: KVCacheBlock) -> None:
        while block is not first_last:
            before = block.prev_free_block
            assert before is not None
            block.prev_free_block = block.next_free_block = None
            block = before
        first_last.next_free_block = self._tail


# A name has one block nearly always; requests that compute the same prefix at the same time give it
# more (oldest first).
_Named: TypeAlias = KVCacheBlock | dict[int, KVCacheBlock]


class BlockPool:
    """All blocks of a cache, by id, with the names of what they hold. For one thread.

    Block 0 is the null block: never given out, never counted, skipped wherever a list of blocks
    contains it.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        """``num_blocks`` includes the null block; without caching nothing is ever found again.
        ValueError below 1 block.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks: expected at least 1 (the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = tuple(KVCacheBlock(block_id) for block_id in range(num_blocks))
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self._free = FreeKVCacheBlockQueue(self.blocks[1:])
        self._named: dict[int, dict[BlockHashType, _Named]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that :meth:`get_new_blocks` can give out now, those with reusable content
        included.
        """
        return self._free.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks in use, from 0 to 1, the null block left out."""
        if self.num_blocks == 1:
            return 0.0
        return 1.0 - self.num_free_blocks / (self.num_blocks - 1)

    def get_free_blocks(self) -> list[KVCacheBlock]:
        """Free blocks, next to be given out first, for tests and reports: O(number of free
        blocks).
        """
        return self._free.get_all_free_blocks()

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Give out ``num_blocks`` blocks with one user each; what they held is forgotten.

        Raises:
            ValueError: fewer are free; nothing was taken.
        """
        blocks = self._free.popleft_n(num_blocks, ref_cnt=1)
        if not self.enable_caching:
            return blocks
        tables = self._named
        for block in blocks:
            block_hash = block.block_hash
            if block_hash is not None:
                # _forget() written out: the call would cost 60 ns a block of 230.
                block.block_hash = None
                named = tables[block.group_id].pop(block_hash)
                if named is not block:
                    self._keep_other_blocks(named, block, block_hash)
        return blocks

    def get_cached_block(self, block_hash: BlockHashType, group_id: int = 0) -> KVCacheBlock | None:
        """A block of the group with this content, or None. It may be free: :meth:`touch` it before
        anything is given out.
        """
        named = self._named.get(group_id, {}).get(block_hash)
        return next(iter(named.values())) if isinstance(named, dict) else named

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more user for each block; a free one leaves the queue and keeps its content."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One user less for each block; those left without users become free.

        They are evicted in the order of this list, after what was freed before.

        Raises:
            ValueError: a block without users. The blocks before it in the list have been freed,
                those after it not.
        """
        self._free.release_n(ordered_blocks)

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[BlockHashType],
        num_cached_blocks: int,
        num_full_blocks: int,
        group_id: int = 0,
    ) -> None:
        """Name ``blocks[num_cached_blocks:num_full_blocks]``, so that equal prefixes find them.
        No-op without caching.

        Call it when their KV is complete: from then on any request may read them. Null blocks are
        skipped.

        Args:
            blocks: a request's blocks, from its first.
            block_hashes: the names of its full blocks, from its first.
            num_cached_blocks: how many have been named before.
            num_full_blocks: how many are full and computed.
            group_id: the group whose table the blocks are in.

        Raises:
            ValueError: too few blocks or hashes, a block that has a name, or a free block.
        """
        if num_full_blocks > min(len(blocks), len(block_hashes)):
            raise ValueError(
                f"num_full_blocks: expected at most {len(blocks)} blocks and "
                f"{len(block_hashes)} hashes, got {num_full_blocks}"
            )
        if not self.enable_caching:
            return
        table = self._named.setdefault(group_id, {})
        new = slice(num_cached_blocks, num_full_blocks)
        for block, block_hash in zip(blocks[new], block_hashes[new], strict=True):
            if block.block_hash is not None or block.ref_cnt == 0:
                if block.is_null:
                    continue
                raise ValueError(f"block: expected one in use without a name, got {block}")
            block.block_hash = block_hash
            block.group_id = group_id
            named = table.setdefault(block_hash, block)
            if named is block:
                continue
            if isinstance(named, KVCacheBlock):
                table[block_hash] = named = {named.block_id: named}
            named[block.block_id] = block

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take the names of these blocks away, so that nothing finds them; users and queue stay as
        they are.

        Raises:
            ValueError: an id outside the pool; no block has changed.
        """
        ids = list(block_ids)
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block id: expected 0 to {self.num_blocks - 1}, got {block_id}")
        for block_id in ids:
            if self.blocks[block_id].block_hash is not None:
                self._forget(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forget all content. False, a warning and no change while any block is in use."""
        num_used = self.num_blocks - 1 - self.num_free_blocks
        if num_used:
            logger.warning("prefix cache not reset: %d blocks are in use", num_used)
            return False
        for block in self.blocks:
            block.block_hash = None
        self._named.clear()
        return True

    def _forget(self, block: KVCacheBlock) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        block.block_hash = None
        named = self._named[block.group_id].pop(block_hash)
        if named is not block:
            self._keep_other_blocks(named, block, block_hash)

    def _keep_other_blocks(
        self, named: _Named, block: KVCacheBlock, block_hash: BlockHashType
    ) -> None:
        assert isinstance(named, dict)
        del named[block.block_id]
        if named:
            self._named[block.group_id][block_hash] = named
