"""Which blocks the requests hold in the layers of one group, and which of them others may reuse.

A table grows from the front: first the blocks found by prefix, then new ones. A block is found by
others only after :meth:`GroupManager.cache_blocks` said that its tokens are computed, so blocks
that wait for a load, or whose load failed, are never handed on.

What differs between kinds of layers is how much they look back. A manager says so in
:meth:`GroupManager.num_skipped_tokens`; the tables, the longest prefix hit and what is dropped
follow from it. In a table the pool's null block stands for "nothing here"; ids that leave are -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.free_queue import KVCacheBlock
from kvxfer.cache.hashing import BlockHashType, HashableRequest
from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    check_ids,
)

NO_BLOCK = -1
"""Stands in tables of ids where a request has no block: dropped, or never allocated."""


@dataclass(slots=True)
class _Table:
    """The blocks of one request in token order. Those before ``num_dropped_blocks`` are null, those
    before ``num_cached_blocks`` have been named, and those of ``unhashed`` never will be.
    """

    blocks: list[KVCacheBlock]
    num_cached_blocks: int = 0
    num_dropped_blocks: int = 0
    unhashed: frozenset[int] = frozenset()


class GroupManager:
    """Block tables of all requests for one group of layers. Token counts are totals from a
    request's first token.

    The group's blocks come from ``pool``, which other groups may share: names are kept apart by
    ``group_id``, and a block is in the tables of one group at a time.

    Groups may have blocks of other sizes. One chain of hashes serves them all, with a hash for
    every ``hash_block_size`` tokens (None: those of a block): a hash covers all tokens before its
    end, so a block's name is the hash at its end.
    """

    keeps_every_token = False
    """Nothing is ever dropped, and every part of a prefix hit is a hit."""

    def __init__(
        self,
        spec: KVCacheSpec,
        pool: BlockPool,
        group_id: int = 0,
        hash_block_size: int | None = None,
    ) -> None:
        """ValueError when a block is not a whole number of ``hash_block_size`` tokens."""
        self.spec = spec
        self.pool = pool
        self.block_size = spec.block_size
        self.group_id = group_id
        self._hashes_per_block, rest = divmod(self.block_size, hash_block_size or self.block_size)
        if rest:
            raise ValueError(
                f"hash_block_size: expected a divisor of the {self.block_size} tokens of a block, "
                f"got {hash_block_size}"
            )
        self.num_used_blocks = 0
        """Blocks in one or more tables, each counted once."""
        self._tables: dict[str, _Table] = {}

    # ------------------------------------------------------------------ what the kind decides

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many leading tokens no later token looks at, after ``num_computed_tokens``."""
        raise NotImplementedError

    def blocks_needed(self, num_tokens: int) -> int:
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected at least 0, got {num_tokens}")
        return -(-num_tokens // self.block_size)

    def block_names(self, block_hashes: Sequence[BlockHashType]) -> Sequence[BlockHashType]:
        """The names of a request's full blocks of this group, of its chain of hashes."""
        step = self._hashes_per_block
        return block_hashes if step == 1 else block_hashes[step - 1 :: step]

    def max_blocks(
        self, num_tokens: int, step_tokens: int, num_held_tokens: int | None = None
    ) -> int:
        """The most blocks that a request of ``num_tokens`` tokens holds at a time.
        ``num_held_tokens``: what is needed after that many tokens is never dropped.
        """
        most = self.spec.max_blocks(num_tokens, step_tokens)
        if num_held_tokens is None:
            return most
        num_blocks = self.blocks_needed(num_tokens)
        return max(most, num_blocks - min(self.first_kept_block(num_held_tokens), num_blocks))

    def _first_written_block(self, num_tokens: int) -> int:
        """The first of the blocks added for ``num_tokens`` tokens that anything is written to."""
        return 0

    # ------------------------------------------------------------------ lookup

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def first_kept_block(self, num_computed_tokens: int) -> int:
        """Position of the first block that is still needed after ``num_computed_tokens``."""
        return self.num_skipped_tokens(num_computed_tokens) // self.block_size

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block ids in token order, -1 for none; ValueError without a table."""
        return [_id(block) for block in self._table(request_id).blocks]

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks in the request's table, null ones left out."""
        table = self._table(request_id)
        return sum(not block.is_null for block in table.blocks[table.num_dropped_blocks :])

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[BlockHashType],
        max_tokens: int,
        alignment_tokens: int | None = None,
    ) -> list[KVCacheBlock]:
        """The blocks of the longest usable prefix, at most ``max_tokens`` tokens: null where the
        token after it does not look, known content everywhere else.

        Pass ``max_tokens`` below the prompt's length where its last token must be computed to get a
        logit. The prefix is a multiple of ``alignment_tokens`` long, itself one of the block size
        (None: the block size). The blocks may be free: take them before anything else is allocated.
        """
        # From the right. A missing block rules out every end whose kept blocks include it, and
        # the first kept block never moves right when the end moves left: so all ends after the
        # missing block are ruled out at once, and each block is looked up at most once.
        names = self.block_names(block_hashes)
        step = self._alignment_blocks(alignment_tokens)
        end = first = self._num_candidates(names, max_tokens) // step * step
        found: list[KVCacheBlock] = []  # blocks [first, end), last one first
        while first > self.first_kept_block(end * self.block_size):
            first -= 1
            block = self.pool.get_cached_block(names[first], self.group_id)
            if block is None:
                end = first = first // step * step
                found.clear()
            else:
                found.append(block)
        return [self.pool.null_block] * first + found[::-1]

    def _alignment_blocks(self, alignment_tokens: int | None) -> int:
        """Blocks between two ends that a prefix may have."""
        return 1 if alignment_tokens is None else alignment_tokens // self.block_size

    def _num_candidates(self, names: Sequence[BlockHashType], max_tokens: int) -> int:
        if max_tokens < 0:
            raise ValueError(f"max_tokens: expected at least 0, got {max_tokens}")
        return min(max_tokens // self.block_size, len(names))

    # ------------------------------------------------------------------ tables

    def open_table(
        self, request_id: str, hit_blocks: Sequence[KVCacheBlock], num_computed_tokens: int
    ) -> None:
        """A table that begins with ``hit_blocks``, those left out that are not needed after
        ``num_computed_tokens``.

        With several groups, open all tables before one is extended: what is a free hit of one group
        could be given out as a new block of another.
        """
        if not hit_blocks:
            self._tables[request_id] = _Table([])
            return
        first_kept = min(self.first_kept_block(num_computed_tokens), len(hit_blocks))
        blocks = [self.pool.null_block] * first_kept + list(hit_blocks[first_kept:])
        self.num_used_blocks += sum(b.ref_cnt == 0 and not b.is_null for b in blocks)
        self.pool.touch(blocks)
        self._tables[request_id] = _Table(blocks, len(blocks), first_kept)

    def extend(self, request_id: str, num_tokens: int, num_computed_tokens: int = 0) -> list[int]:
        """Append blocks until the table holds ``num_tokens`` tokens; null ones where nothing will
        be written, or what is written is not needed after ``num_computed_tokens``. Returns their
        ids, -1 for null. ValueError, and the table as it was, when too few blocks are free.
        """
        blocks = self._table(request_id).blocks
        num_blocks = self.blocks_needed(num_tokens)
        if num_blocks <= len(blocks):
            return []
        first_new = max(
            self.first_kept_block(num_computed_tokens), self._first_written_block(num_tokens)
        )
        first_new = min(max(first_new, len(blocks)), num_blocks)
        new = self.pool.get_new_blocks(num_blocks - first_new)
        added = [self.pool.null_block] * (first_new - len(blocks)) + new
        blocks += added
        self.num_used_blocks += len(new)
        return [_id(block) for block in added]

    def drop_skipped(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the leading blocks that nothing looks at after ``num_computed_tokens``.

        Null blocks take their places. They keep their names, so that a prefix may still find them
        until they are given out again; the last one goes first, as in :meth:`free`.
        """
        table = self._table(request_id)
        first_kept = min(self.first_kept_block(num_computed_tokens), len(table.blocks))
        if first_kept <= table.num_dropped_blocks:
            return
        leading = slice(table.num_dropped_blocks, first_kept)
        dropped = table.blocks[leading]
        table.blocks[leading] = [self.pool.null_block] * len(dropped)
        table.num_dropped_blocks = first_kept
        self._give_back(dropped)

    def free(self, request_id: str) -> None:
        """Tail first: the start of its prefix is evicted last. ValueError without a table."""
        table = self._table(request_id)
        del self._tables[request_id]
        if table.num_dropped_blocks:
            del table.blocks[: table.num_dropped_blocks]
        self._give_back(table.blocks)

    def _give_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        # Blocks that another table holds too are still used.
        self.num_used_blocks -= self.pool.free_blocks(reversed(blocks))

    # ------------------------------------------------------------------ names

    def cache_blocks(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHashType],
        num_computed_tokens: int,
        request: HashableRequest | None = None,
    ) -> None:
        """Let others find the full blocks among the first ``num_computed_tokens`` tokens, computed
        or accepted from a load; fewer than before change nothing. ``block_hashes``: the request's
        chain, from its first. ``request``: for a pool that notes events.

        Raises ValueError for an unknown request, or more tokens than its table or hashes cover.
        """
        table = self._table(request_id)
        num_full_blocks = num_computed_tokens // self.block_size
        if num_full_blocks <= table.num_cached_blocks:
            return
        start, names = table.num_cached_blocks, self.block_names(block_hashes)
        gaps = sorted(at for at in table.unhashed if start <= at < num_full_blocks)
        for gap in (*gaps, num_full_blocks):
            self.pool.cache_full_blocks(
                table.blocks, names, start, gap, self.group_id, request, self.spec
            )
            start = gap + 1
        table.num_cached_blocks = num_full_blocks

    def leave_unhashed(self, request_id: str, positions: Iterable[int]) -> None:
        """Never name the request's blocks at these positions of its table: what they hold is not
        complete. TypeError for a position that is no integer, ValueError for one outside the table
        or whose block may have a name already.
        """
        table, wanted = self._table(request_id), frozenset(check_ids("positions", positions))
        for position in wanted:
            if not table.num_cached_blocks <= position < len(table.blocks):
                raise ValueError(
                    f"request {request_id}: position of a block without a name: expected "
                    f"{table.num_cached_blocks} to {len(table.blocks) - 1}, got {position}"
                )
        table.unhashed |= wanted

    # ------------------------------------------------------------------ checks

    def check_hit(
        self, request_id: str, num_tokens: int, hit_blocks: Sequence[KVCacheBlock]
    ) -> None:
        """ValueError unless ``hit_blocks`` can begin a new request's table of ``num_tokens``."""
        if request_id in self._tables:
            raise ValueError(
                f"request {request_id}: expected hit_blocks for a new request only, "
                f"got {len(hit_blocks)}; free it first"
            )
        num_needed = self.blocks_needed(num_tokens)
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

    def _table(self, request_id: str) -> _Table:
        table = self._tables.get(request_id)
        if table is None:
            raise ValueError(f"request {request_id}: expected one that holds blocks, got none")
        return table


class FullAttentionManager(GroupManager):
    """Layers that look at every token before: nothing is ever dropped."""

    keeps_every_token = True

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def max_blocks(
        self, num_tokens: int, step_tokens: int, num_held_tokens: int | None = None
    ) -> int:
        return self.blocks_needed(num_tokens)

    def extend(self, request_id: str, num_tokens: int, num_computed_tokens: int = 0) -> list[int]:
        blocks = self._table(request_id).blocks
        num_new = self.blocks_needed(num_tokens) - len(blocks)
        if num_new <= 0:
            return []
        new = self.pool.get_new_blocks(num_new)
        blocks += new
        self.num_used_blocks += num_new
        return [block.block_id for block in new]

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[BlockHashType],
        max_tokens: int,
        alignment_tokens: int | None = None,
    ) -> list[KVCacheBlock]:
        # From the left: a prompt that nobody knows costs one lookup.
        hit: list[KVCacheBlock] = []
        names = self.block_names(block_hashes)
        for name in names[: self._num_candidates(names, max_tokens)]:
            block = self.pool.get_cached_block(name, self.group_id)
            if block is None:
                break
            hit.append(block)
        del hit[len(hit) // (step := self._alignment_blocks(alignment_tokens)) * step :]
        return hit


def _id(block: KVCacheBlock) -> int:
    return NO_BLOCK if block.is_null else block.block_id


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
