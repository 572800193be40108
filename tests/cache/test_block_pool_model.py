"""The pool beside a model of plain lists, under random histories.

The model keeps what each block holds and the order of the free ones, and searches all blocks where
the pool has a table.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.cache import BlockPool, KVCacheBlock

NUM_BLOCKS = 6  # block 0 is the null block
GROUPS = range(2)
NAMES = [number.to_bytes(32, "big") for number in range(3)]  # few, so that blocks share names


@dataclass
class Held:
    """One block of the model; ``named_at`` tells which of two blocks got the name first."""

    num_users: int = 0
    name: bytes | None = None
    group: int = 0
    named_at: int = 0


class PoolAndModel(RuleBasedStateMachine):
    """Every rule does the same to both; the invariants compare all that can be seen."""

    caching = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, self.caching)
        self.held = [Held() for _ in range(NUM_BLOCKS)]
        self.free = list(range(1, NUM_BLOCKS))
        self.clock = 0

    def block(self, block_id: int) -> KVCacheBlock:
        return self.pool.blocks[block_id]

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def get(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            with pytest.raises(ValueError, match="free blocks: expected"):
                self.pool.get_new_blocks(num_blocks)
            return
        want, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block_id in want:
            self.held[block_id] = Held(num_users=1)
        assert [block.block_id for block in self.pool.get_new_blocks(num_blocks)] == want

    @rule(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS))
    def release(self, ids: list[int]) -> None:
        too_often = False
        nameless: list[int] = []
        for block_id in ids:
            held = self.held[block_id]
            if block_id == 0:
                continue
            if held.num_users == 0:
                too_often = True
                break
            held.num_users -= 1
            if held.num_users == 0:
                (nameless if held.name is None else self.free).append(block_id)
        self.free = nameless + self.free
        if too_often:
            with pytest.raises(ValueError, match="freed more often than taken"):
                self.pool.free_blocks(self.block(block_id) for block_id in ids)
        else:
            self.pool.free_blocks(self.block(block_id) for block_id in ids)

    @rule(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS))
    def touch(self, ids: list[int]) -> None:
        for block_id in ids:
            if block_id:
                self.held[block_id].num_users += 1
                if block_id in self.free:
                    self.free.remove(block_id)
        self.pool.touch([self.block(block_id) for block_id in ids])

    @precondition(lambda self: self.nameable())
    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def name(self, data: st.DataObject, group: int) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.nameable()), min_size=1, unique=True))
        names = data.draw(st.lists(st.sampled_from(NAMES), min_size=len(ids), max_size=len(ids)))
        self.name_blocks(ids, names, data.draw(st.integers(0, len(ids))), group)

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), group=st.just(0))
    def serve(self, names: list[bytes], group: int) -> None:
        """A request from begin to end; most of what a pool sees, and names by the dozen."""
        ids = self.free[: len(names)]
        self.get(len(ids))
        self.name_blocks(ids, names[: len(ids)], 0, group)
        self.release(ids[::-1])

    def name_blocks(self, ids: list[int], names: list[bytes], first: int, group: int) -> None:
        self.pool.cache_full_blocks(
            [self.block(block_id) for block_id in ids], names, first, len(ids), group
        )
        if self.caching:
            for block_id, block_name in zip(ids[first:], names[first:], strict=True):
                self.clock += 1
                num_users = self.held[block_id].num_users
                self.held[block_id] = Held(num_users, block_name, group, self.clock)

    def nameable(self) -> list[int]:
        return [
            block_id
            for block_id, held in enumerate(self.held)
            if held.num_users and held.name is None
        ]

    @rule(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3))
    def evict(self, ids: list[int]) -> None:
        self.pool.evict_blocks(ids)
        for block_id in ids:
            self.held[block_id].name = None

    @rule()
    def reset(self) -> None:
        possible = len(self.free) == NUM_BLOCKS - 1
        assert self.pool.reset_prefix_cache() == possible
        if possible:
            for held in self.held:
                held.name = None

    @invariant()
    def same_free_blocks_in_the_same_order(self) -> None:
        assert [block.block_id for block in self.pool.get_free_blocks()] == self.free
        assert self.pool.num_free_blocks == len(self.free)
        assert self.pool.usage == pytest.approx(1 - len(self.free) / (NUM_BLOCKS - 1))

    @invariant()
    def same_users_and_names(self) -> None:
        for block, held in zip(self.pool.blocks, self.held, strict=True):
            assert (block.ref_cnt, block.block_hash) == (held.num_users, held.name)
            in_queue = block.block_id in self.free
            assert (block.prev_free_block is not None) == in_queue
            assert (block.next_free_block is not None) == in_queue

    # No invariant: a look-up tidies the table, so histories without one matter too.
    @rule(group=st.sampled_from(GROUPS), block_name=st.sampled_from(NAMES))
    def look_up(self, group: int, block_name: bytes) -> None:
        named = [
            (held.named_at, block_id)
            for block_id, held in enumerate(self.held)
            if (held.name, held.group) == (block_name, group)
        ]
        found = self.pool.get_cached_block(block_name, group)
        assert (found and found.block_id) == (min(named)[1] if named else None)

    def teardown(self) -> None:
        for group in GROUPS:
            for block_name in NAMES:
                self.look_up(group, block_name)


class PoolWithoutCaching(PoolAndModel):
    """Nothing is ever named."""

    caching = False


@pytest.fixture(autouse=True)
def _no_warnings_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "kvxfer.cache")  # resets refused while blocks are in use


# Not shrunk: that takes minutes, and 25 steps can be read.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
TestPool = PoolAndModel.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=25, deadline=None, phases=PHASES)
TestPoolWithoutCaching = PoolWithoutCaching.TestCase
TestPoolWithoutCaching.settings = settings(TestPool.settings, max_examples=40)
