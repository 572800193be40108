"""All groups of a cache over one pool: prefix hits that every group agrees on, admission by counted
reservation, growth on demand.

Nothing that was admitted is ever preempted: :meth:`KVCacheManager.admit` says yes only if every
request, the new one included, can still get all blocks that it may come to need. The count of it,
with ``usable`` blocks in the pool::

    sum over groups that keep every token: blocks in use + blocks promised to its requests
  + sum over groups that drop tokens: the most that each of its requests holds at a time  <=  usable

A group that keeps every token takes promised blocks until its requests end, and a prefix hit on a
block in use costs nothing. In a group that drops tokens a hit saves nothing: when two requests hold
a block and one of them drops it, that one needs another block, and none has become free. Its blocks
in use are never more than the sum of what its tables may hold, so whatever is shared with whom,
growth finds a free block.

Groups may have blocks of as many bytes and other numbers of tokens: each counts its own. A hit ends
where blocks of all groups end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.free_queue import KVCacheBlock
from kvxfer.cache.hashing import BlockHashType, HashableRequest
from kvxfer.cache.kv_events import KVCacheEvent, KVEventLog
from kvxfer.cache.manager import GroupManager, manager_for
from kvxfer.cache.specs import KVCacheConfig, check_positive


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A prefix that every group knows: its blocks by group (null where a group does not look any
    more) and its length, a multiple of every group's block size.

    The blocks may be free: admit the request before anything else is allocated.
    """

    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    num_tokens: int


def _longest_common_hit(
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


@dataclass(slots=True)
class _Admitted:
    """What is promised to one request: steps of up to ``max_step_tokens``, ``num_tokens`` in all.

    ``num_promised_blocks``: still to be taken in groups that keep every token.
    ``num_window_blocks``: the most it holds at a time in the other groups.
    """

    num_tokens: int
    max_step_tokens: int
    num_held_tokens: int | None
    num_promised_blocks: int
    num_window_blocks: int


class KVCacheManager:
    """Block tables of all requests in all groups.

    ``config``: of one rank; every rank of an engine has equal groups and block counts.
    ``max_step_tokens``: the most tokens of one request that one step computes. ``events`` notes
    which names come and go. Raises ValueError for no groups, or ``max_step_tokens`` below 1.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_caching: bool,
        max_step_tokens: int,
        events: KVEventLog | None = None,
    ) -> None:
        sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        if not sizes:
            raise ValueError("kv_cache_groups: expected one or more groups, got none")
        check_positive("max_step_tokens", max_step_tokens)
        self.hash_block_size = math.gcd(*sizes)
        """Tokens for each of a request's block hashes: blocks of all groups end at multiples."""
        self.alignment_tokens = math.lcm(*sizes)
        """A hit is a multiple of that many tokens long: there, blocks of all groups end."""
        self.enable_caching = enable_caching
        self.pool = BlockPool(config.num_blocks, enable_caching, events)
        self.groups: tuple[GroupManager, ...] = tuple(
            manager_for(group.kv_cache_spec, self.pool, group_id, self.hash_block_size)
            for group_id, group in enumerate(config.kv_cache_groups)
        )
        self._no_hit = CacheHit(((),) * len(self.groups), 0)
        self._keeping = [group for group in self.groups if group.keeps_every_token]
        self._dropping = [group for group in self.groups if not group.keeps_every_token]
        self._max_step_tokens = max_step_tokens
        self._admitted: dict[str, _Admitted] = {}
        self._num_promised_blocks = 0
        self._num_window_blocks = 0

    # ------------------------------------------------------------------ counts

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds; some of them may be promised."""
        return self.pool.num_free_blocks

    @property
    def num_unpromised_blocks(self) -> int:
        """Blocks that can still be promised to new requests."""
        num_taken = self._num_promised_blocks + self._num_window_blocks
        for group in self._keeping:
            num_taken += group.num_used_blocks
        return self.num_usable_blocks - num_taken

    @property
    def usage(self) -> float:
        """Share of the blocks in use, from 0 to 1."""
        return self.pool.usage

    def blocks_needed(self, num_tokens: int, num_held_tokens: int | None = None) -> int:
        """The most at a time, all groups together; arguments as in :meth:`admit`."""
        return sum(
            group.max_blocks(num_tokens, self._max_step_tokens, num_held_tokens)
            for group in self.groups
        )

    # ------------------------------------------------------------------ prefix hits

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHashType], max_tokens: int
    ) -> CacheHit:
        """The longest prefix of at most ``max_tokens`` tokens that every group can continue, by the
        request's hashes, one for every :attr:`hash_block_size` tokens.

        Ask again for a shorter one; do not cut it: a group with a window needs other blocks then,
        which may be gone. Without caching the hit is empty. ValueError below 0 tokens.
        """
        if max_tokens < 0:
            raise ValueError(f"max_tokens: expected at least 0, got {max_tokens}")
        if not self.enable_caching:
            return self._no_hit
        return _longest_common_hit(self.groups, block_hashes, max_tokens, self.alignment_tokens)

    # ------------------------------------------------------------------ a request's life

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._admitted

    def admit(
        self,
        request_id: str,
        *,
        num_tokens: int,
        hit: CacheHit,
        num_external_tokens: int = 0,
        num_held_tokens: int | None = None,
        max_step_tokens: int | None = None,
    ) -> bool:
        """Promise a new request all blocks that it can need, and take those for its hit and for the
        tokens that a load will bring. False when that cannot be promised; then nothing has
        changed.

        ``num_tokens``: all that it will ever have. ``hit``: from :meth:`find_longest_cache_hit`,
        with nothing allocated since. ``num_external_tokens``: those after the hit that come from
        elsewhere; groups with a window get blocks only for what is still needed after them.
        ``num_held_tokens``: what is needed after that many stays until the request is freed,
        because somebody else will continue from there; states are written over.
        ``max_step_tokens``: of one step, where less than for others, so that groups with a window
        need fewer blocks.

        Raises ValueError for an id in use, a hit that was evicted since or has another number of
        groups, and counts that do not fit together.
        """
        num_ready = hit.num_tokens + num_external_tokens
        self._check_new(request_id, num_tokens, hit, num_ready, num_held_tokens)
        step = self._max_step_tokens
        if max_step_tokens is not None:
            check_positive("max_step_tokens", max_step_tokens)
            step = min(max_step_tokens, step)
        # Loops, not sums: a short request without a hit spends half its time here.
        num_promised = num_window = num_in_use = 0
        for group in self._keeping:
            num_promised += group.max_blocks(num_tokens, step)
            for block in hit.blocks[group.group_id]:
                num_in_use += block.ref_cnt > 0
        for group in self._dropping:
            num_window += group.max_blocks(num_tokens, step, num_held_tokens)
        if num_promised + num_window - num_in_use > self.num_unpromised_blocks:
            return False
        for group in self.groups:
            group.open_table(request_id, hit.blocks[group.group_id], num_ready)
        if num_ready:
            for group in self.groups:
                group.extend(request_id, num_ready, num_ready)
            for group in self._keeping:
                num_promised -= group.num_held_blocks(request_id)
        self._admitted[request_id] = _Admitted(
            num_tokens, step, num_held_tokens, num_promised, num_window
        )
        self._num_promised_blocks += num_promised
        self._num_window_blocks += num_window
        return True

    def grow(
        self, request_id: str, num_computed_tokens: int, num_tokens: int
    ) -> tuple[tuple[int, ...], ...]:
        """Before a step that computes tokens ``[num_computed_tokens, num_tokens)``: give back what
        it does not look at, and make every table hold its tokens. Returns the appended block ids
        by group, -1 where nothing will be written.

        Raises ValueError for a request that is not admitted or must not grow any more, a step of
        more than was promised, or more tokens than were admitted.
        """
        admitted = self._get(request_id)
        if not 0 <= num_tokens - num_computed_tokens <= admitted.max_step_tokens:
            raise ValueError(
                f"request {request_id}: expected a step of 0 to {admitted.max_step_tokens} tokens, "
                f"got {num_computed_tokens} to {num_tokens}"
            )
        if num_tokens > admitted.num_tokens:
            raise ValueError(
                f"request {request_id}: expected at most the {admitted.num_tokens} tokens that it "
                f"was admitted with, got {num_tokens}"
            )
        if self._dropping:
            self._drop_skipped(request_id, admitted, num_computed_tokens)
        added, num_taken = [], 0
        for group in self.groups:
            ids = group.extend(request_id, num_tokens)
            added.append(tuple(ids))
            if group.keeps_every_token:
                num_taken += len(ids)
        admitted.num_promised_blocks -= num_taken
        self._num_promised_blocks -= num_taken
        return tuple(added)

    def stop_growing(self, request_id: str, num_computed_tokens: int) -> None:
        """The request has ended, and its blocks stay in use until :meth:`free`: give back what
        nobody looks at after ``num_computed_tokens`` (or after its held tokens), and all that was
        promised.
        """
        admitted = self._get(request_id)
        self._drop_skipped(request_id, admitted, num_computed_tokens)
        num_held = sum(group.num_held_blocks(request_id) for group in self._dropping)
        self._num_promised_blocks -= admitted.num_promised_blocks
        self._num_window_blocks += num_held - admitted.num_window_blocks
        admitted.num_promised_blocks, admitted.num_window_blocks = 0, num_held
        admitted.num_tokens = num_computed_tokens

    def free(self, request_id: str) -> None:
        """Give back all blocks of the request and its promise. ValueError when not admitted."""
        admitted = self._get(request_id)
        del self._admitted[request_id]
        self._num_promised_blocks -= admitted.num_promised_blocks
        self._num_window_blocks -= admitted.num_window_blocks
        for group in self.groups:
            group.free(request_id)

    # ------------------------------------------------------------------ tables and names

    def block_ids(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The request's blocks by group, positional from its first token, -1 where it has none."""
        self._get(request_id)
        return tuple(tuple(group.block_ids(request_id)) for group in self.groups)

    def cache_blocks(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHashType],
        num_computed_tokens: int,
        request: HashableRequest | None = None,
    ) -> None:
        """Let others find what is full among the first ``num_computed_tokens`` tokens; call it
        after every step and after an accepted load. ``block_hashes``: one for every
        :attr:`hash_block_size` tokens. ``request``: where events are noted.

        Raises ValueError for a request that is not admitted, fewer blocks or hashes than tokens, or
        events without ``request``.
        """
        self._get(request_id)
        for group in self.groups:
            group.cache_blocks(request_id, block_hashes, num_computed_tokens, request)

    def take_events(self) -> list[KVCacheEvent]:
        """What happened to the names since the last call, oldest first; nothing without a log."""
        return self.pool.take_events()

    def leave_unhashed(self, request_id: str, group_id: int, positions: Iterable[int]) -> None:
        """Never let others find these blocks of the request, given by position in its table of the
        group: they were filled in part only. Call it before :meth:`cache_blocks`. ValueError for an
        unknown group, a position outside the table or named already.
        """
        self._get(request_id)
        if not 0 <= group_id < len(self.groups):
            raise ValueError(f"group_id: expected 0 to {len(self.groups) - 1}, got {group_id}")
        self.groups[group_id].leave_unhashed(request_id, positions)

    # ------------------------------------------------------------------ helpers

    def _drop_skipped(self, request_id: str, admitted: _Admitted, num_computed_tokens: int) -> None:
        if admitted.num_held_tokens is not None:
            num_computed_tokens = min(num_computed_tokens, admitted.num_held_tokens)
        # In every group before any table grows: the promise counts what was dropped as gone.
        for group in self._dropping:
            group.drop_skipped(request_id, num_computed_tokens)

    def _get(self, request_id: str) -> _Admitted:
        admitted = self._admitted.get(request_id)
        if admitted is None:
            raise ValueError(f"request {request_id}: expected one that was admitted, got none")
        return admitted

    def _check_new(
        self,
        request_id: str,
        num_tokens: int,
        hit: CacheHit,
        num_ready: int,
        num_held_tokens: int | None,
    ) -> None:
        if request_id in self._admitted:
            raise ValueError(f"request {request_id}: expected a new id, got one that is admitted")
        if not hit.num_tokens <= num_ready <= num_tokens:
            raise ValueError(
                f"request {request_id}: expected hit and external tokens within its {num_tokens}, "
                f"got {hit.num_tokens} and {num_ready - hit.num_tokens}"
            )
        if num_held_tokens is not None and not num_ready <= num_held_tokens <= num_tokens:
            raise ValueError(
                f"request {request_id}: num_held_tokens: expected {num_ready} to {num_tokens}, "
                f"got {num_held_tokens}"
            )
        if len(hit.blocks) != len(self.groups):
            raise ValueError(
                f"hit: expected blocks of {len(self.groups)} groups, got {len(hit.blocks)}"
            )
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            if blocks:
                group.check_hit(request_id, num_tokens, blocks)
