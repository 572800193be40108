"""Block tables: by hand, and in random histories against lists that are searched from the start."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.hashing import hash_block_tokens, none_hash, sha256
from kvxfer.cache.manager import FullAttentionManager
from kvxfer.cache.specs import FullAttentionSpec
from tests.cache.group_tables import allocate

BLOCK_SIZE = 2
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="float32")
ROOT = none_hash(b"manager")


def chain(token_ids: list[int]) -> list[bytes]:
    hashes, parent = [], ROOT
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = hash_block_tokens(sha256, parent, token_ids[start : start + BLOCK_SIZE])
        hashes.append(parent)
    return hashes


def make_manager(num_usable_blocks: int) -> FullAttentionManager:
    return FullAttentionManager(SPEC, BlockPool(num_usable_blocks + 1))


def free_ids(manager: FullAttentionManager) -> list[int]:
    return [block.block_id for block in manager.pool.get_free_blocks()]


def test_blocks_needed() -> None:
    manager = make_manager(1)
    assert [manager.blocks_needed(num_tokens) for num_tokens in range(6)] == [0, 1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="num_tokens: expected at least 0, got -1"):
        manager.blocks_needed(-1)


def test_allocate_and_grow() -> None:
    manager = make_manager(5)
    assert "a" not in manager
    assert allocate(manager, "a", 3) == [1, 2]
    assert "a" in manager
    assert allocate(manager, "a", 4) == []
    assert allocate(manager, "b", 1) == [3]
    assert allocate(manager, "a", 5) == [4]
    assert allocate(manager, "a", 1) == []
    assert manager.block_ids("a") == [1, 2, 4]
    assert manager.block_ids("b") == [3]
    assert manager.num_free_blocks == 1


def test_too_few_blocks_changes_nothing() -> None:
    manager = make_manager(3)
    assert allocate(manager, "a", 2) == [1]
    assert allocate(manager, "a", 10) is None
    assert allocate(manager, "b", 6) is None
    assert "b" not in manager
    assert manager.block_ids("a") == [1]
    assert free_ids(manager) == [2, 3]


def test_tail_is_freed_first() -> None:
    manager = make_manager(4)
    allocate(manager, "a", 6)
    manager.free("a")
    assert free_ids(manager) == [3, 2, 1, 4]
    assert "a" not in manager


def test_pending_blocks_are_not_found_until_they_are_computed() -> None:
    manager = make_manager(4)
    hashes = chain([1, 2, 3, 4, 5])
    allocate(manager, "a", 5)
    assert manager.find_longest_cache_hit(hashes, 5) == []
    manager.cache_blocks("a", hashes, 3)  # one full block
    assert [b.block_id for b in manager.find_longest_cache_hit(hashes, 5)] == [1]
    manager.cache_blocks("a", hashes, 2)  # nothing new
    manager.cache_blocks("a", hashes, 5)
    assert [b.block_id for b in manager.find_longest_cache_hit(hashes, 5)] == [1, 2]


def test_failed_load_leaves_nothing_to_find() -> None:
    manager = make_manager(3)
    hashes = chain([1, 2, 3, 4])
    allocate(manager, "a", 4)
    manager.free("a")
    assert manager.find_longest_cache_hit(hashes, 4) == []
    assert free_ids(manager) == [2, 1, 3]


@pytest.mark.parametrize(("max_tokens", "num_blocks"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_hit_is_at_most_max_tokens(max_tokens: int, num_blocks: int) -> None:
    manager = make_manager(3)
    hashes = chain([1, 2, 3, 4])
    allocate(manager, "a", 4)
    manager.cache_blocks("a", hashes, 4)
    assert len(manager.find_longest_cache_hit(hashes, max_tokens)) == num_blocks


def test_hit_ends_at_the_first_missing_block() -> None:
    manager = make_manager(4)
    hashes = chain([1, 2, 3, 4, 5, 6])
    allocate(manager, "a", 6)
    manager.cache_blocks("a", hashes, 6)
    manager.pool.evict_blocks([2])
    assert [b.block_id for b in manager.find_longest_cache_hit(hashes, 6)] == [1]


def test_hit_blocks_are_shared_with_a_running_request() -> None:
    manager = make_manager(4)
    hashes = chain([1, 2, 3, 4])
    allocate(manager, "a", 4)
    manager.cache_blocks("a", hashes, 4)
    hit = manager.find_longest_cache_hit(hashes, 3)
    assert allocate(manager, "b", 4, hit) == [3]
    assert manager.block_ids("b") == [1, 3]
    manager.free("a")
    assert free_ids(manager) == [4, 2]
    manager.free("b")
    assert free_ids(manager) == [3, 4, 2, 1]  # block 3 has no name


def test_blocks_after_a_hit_are_named_when_computed() -> None:
    manager = make_manager(4)
    allocate(manager, "a", 2)
    manager.cache_blocks("a", chain([1, 2]), 2)
    hashes = chain([1, 2, 3, 4])
    allocate(manager, "b", 4, manager.find_longest_cache_hit(hashes, 3))
    manager.cache_blocks("b", hashes, 2)  # only what it found
    assert [b.block_id for b in manager.find_longest_cache_hit(hashes, 4)] == [1]
    manager.cache_blocks("b", hashes, 4)
    assert [b.block_id for b in manager.find_longest_cache_hit(hashes, 4)] == [1, 2]


def test_free_hit_counts_against_the_free_blocks() -> None:
    manager = make_manager(3)
    hashes = chain([1, 2, 3, 4])
    allocate(manager, "a", 4)
    manager.cache_blocks("a", hashes, 4)
    manager.free("a")
    assert free_ids(manager) == [3, 2, 1]
    hit = manager.find_longest_cache_hit(hashes, 4)
    # Two hits and two new blocks are four of three.
    assert allocate(manager, "b", 8, hit) is None
    assert free_ids(manager) == [3, 2, 1]
    assert allocate(manager, "b", 6, hit) == [3]
    assert manager.block_ids("b") == [1, 2, 3]


def test_hits_are_taken_before_new_blocks() -> None:
    manager = make_manager(2)
    hashes = chain([1, 2])
    allocate(manager, "a", 2)
    manager.cache_blocks("a", hashes, 2)
    allocate(manager, "b", 2)
    manager.cache_blocks("b", chain([3, 4]), 2)
    manager.free("a")
    manager.free("b")
    # Block 1 is next to be given out, and is the hit.
    assert free_ids(manager) == [1, 2]
    assert allocate(manager, "c", 4, manager.find_longest_cache_hit(hashes, 2)) == [2]
    assert manager.block_ids("c") == [1, 2]


def test_groups_of_one_pool_are_kept_apart() -> None:
    pool = BlockPool(5)
    one, other = FullAttentionManager(SPEC, pool), FullAttentionManager(SPEC, pool, group_id=1)
    hashes = chain([1, 2])
    allocate(one, "a", 2)
    one.cache_blocks("a", hashes, 2)
    assert len(one.find_longest_cache_hit(hashes, 2)) == 1
    assert other.find_longest_cache_hit(hashes, 2) == []


def test_blocks_that_two_tables_hold_are_used_once() -> None:
    manager = make_manager(4)
    hashes = chain([1, 2, 3, 4])
    allocate(manager, "a", 4)
    manager.cache_blocks("a", hashes, 4)
    allocate(manager, "b", 4, manager.find_longest_cache_hit(hashes, 3))
    assert manager.num_used_blocks == 3
    manager.free("a")
    assert manager.num_used_blocks == 2
    manager.free("b")
    assert manager.num_used_blocks == 0


def test_nothing_is_skipped() -> None:
    manager = make_manager(4)
    allocate(manager, "a", 6)
    manager.drop_skipped("a", 6)
    assert manager.num_skipped_tokens(1000) == 0
    assert manager.block_ids("a") == [1, 2, 3]


def test_positions_left_unhashed_are_never_named() -> None:
    manager = make_manager(4)
    hashes = chain([1, 2, 3, 4, 5, 6])
    allocate(manager, "a", 7)
    manager.leave_unhashed("a", [1])
    manager.cache_blocks("a", hashes, 6)
    assert [block.block_hash for block in manager.pool.blocks[1:4]] == [hashes[0], None, hashes[2]]
    assert [b.block_id for b in manager.find_longest_cache_hit(hashes, 6)] == [1]
    manager.cache_blocks("a", hashes, 6)
    assert manager.pool.blocks[2].block_hash is None
    for position in (2, 4):
        with pytest.raises(ValueError, match=f"without a name: expected 3 to 3, got {position}"):
            manager.leave_unhashed("a", [position])


def test_refusals() -> None:
    manager = make_manager(4)
    hashes = chain([1, 2, 3, 4])
    allocate(manager, "a", 4)
    manager.cache_blocks("a", hashes, 4)
    hit = manager.find_longest_cache_hit(hashes, 4)
    with pytest.raises(ValueError, match="request a: expected hit_blocks for a new request only"):
        allocate(manager, "a", 8, hit)
    with pytest.raises(ValueError, match="at most the 1 blocks of the request's tokens, got 2"):
        allocate(manager, "b", 2, hit)
    manager.pool.evict_blocks([1])
    with pytest.raises(ValueError, match="hit_blocks: expected cached blocks"):
        allocate(manager, "b", 4, hit)
    assert "b" not in manager
    with pytest.raises(ValueError, match="expected at most 2 blocks and 2 hashes, got 3"):
        manager.cache_blocks("a", hashes, 6)
    for method in (manager.free, manager.block_ids):
        with pytest.raises(ValueError, match="request b: expected one that holds blocks, got none"):
            method("b")
    with pytest.raises(ValueError, match="max_tokens: expected at least 0, got -1"):
        manager.find_longest_cache_hit(hashes, -1)


# --- random histories ---------------------------------------------------------------------------


@dataclass
class Held:
    token_ids: list[int]
    block_ids: list[int]
    num_cached_blocks: int = 0


@dataclass
class Naive:
    """The same rules over plain lists; a name is the tuple of all tokens up to the block's end."""

    free: list[int]
    users: dict[int, int]
    named: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # oldest first

    def find(self, token_ids: list[int], max_tokens: int) -> list[int]:
        hit = []
        for end in range(BLOCK_SIZE, min(max_tokens, len(token_ids)) + 1, BLOCK_SIZE):
            found = [b for prefix, b in self.named if prefix == tuple(token_ids[:end])]
            if not found:
                break
            hit.append(found[0])
        return hit

    def forget(self, block_id: int) -> None:
        self.named = [(prefix, b) for prefix, b in self.named if b != block_id]


class Histories(RuleBasedStateMachine):
    """Requests with few different tokens come, grow, are computed and leave; blocks are evicted."""

    @initialize(num_blocks=st.integers(4, 16))
    def start(self, num_blocks: int) -> None:
        self.manager = make_manager(num_blocks)
        block_ids = range(1, num_blocks + 1)
        self.naive = Naive(list(block_ids), dict.fromkeys(block_ids, 0))
        self.held: dict[str, Held] = {}
        self.num_requests = 0

    def take(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if self.naive.users[block_id] == 0:
                self.naive.free.remove(block_id)
            self.naive.users[block_id] += 1

    def take_new(self, num_blocks: int) -> list[int]:
        block_ids = self.naive.free[:num_blocks]
        for block_id in block_ids:
            self.naive.forget(block_id)
        self.take(block_ids)
        return block_ids

    @rule(
        num_zeros=st.integers(1, 8),
        tail=st.lists(st.integers(0, 1), max_size=4),
        reserve=st.integers(0, 4),
        computed=st.booleans(),
    )
    def admit(self, num_zeros: int, tail: list[int], reserve: int, computed: bool) -> None:
        token_ids = [0] * num_zeros + tail  # prompts that share their start more often than not
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        hit = self.manager.find_longest_cache_hit(chain(token_ids), len(token_ids) - 1)
        want_hit = self.naive.find(token_ids, len(token_ids) - 1)
        assert [block.block_id for block in hit] == want_hit
        num_tokens = len(token_ids) + reserve
        num_new = (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE - len(want_hit)
        got = allocate(self.manager, request_id, num_tokens, hit)
        if num_new > len([b for b in self.naive.free if b not in want_hit]):
            assert got is None
            assert request_id not in self.manager
            return
        self.take(want_hit)
        new = self.take_new(num_new)
        assert got == new
        self.held[request_id] = Held(token_ids, want_hit + new, len(want_hit))
        if computed:
            self.compute_tokens(request_id, len(token_ids))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_more=st.integers(0, 5))
    def grow(self, data: st.DataObject, num_more: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[request_id]
        num_tokens = len(held.token_ids) + num_more
        num_new = max((num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE - len(held.block_ids), 0)
        got = allocate(self.manager, request_id, num_tokens)
        if num_new > len(self.naive.free):
            assert got is None
            return
        new = self.take_new(num_new)
        assert got == new
        held.block_ids += new
        held.token_ids += data.draw(
            st.lists(st.integers(0, 1), min_size=num_more, max_size=num_more)
        )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[request_id]
        self.compute_tokens(request_id, data.draw(st.integers(0, len(held.token_ids))))

    def compute_tokens(self, request_id: str, num_computed: int) -> None:
        held = self.held[request_id]
        self.manager.cache_blocks(request_id, chain(held.token_ids), num_computed)
        while (held.num_cached_blocks + 1) * BLOCK_SIZE <= num_computed:
            index = held.num_cached_blocks
            prefix = tuple(held.token_ids[: (index + 1) * BLOCK_SIZE])
            self.naive.named.append((prefix, held.block_ids[index]))
            held.num_cached_blocks += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        self.manager.free(request_id)
        nameless: list[int] = []
        for block_id in self.held.pop(request_id).block_ids[::-1]:
            self.naive.users[block_id] -= 1
            if self.naive.users[block_id] == 0:
                has_name = any(block_id == named for _, named in self.naive.named)
                (self.naive.free if has_name else nameless).append(block_id)
        self.naive.free = nameless + self.naive.free

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.naive.users)), max_size=3))
        self.manager.pool.evict_blocks(block_ids)
        for block_id in block_ids:
            self.naive.forget(block_id)

    @rule()
    def reset(self) -> None:
        in_use = any(self.naive.users.values())
        assert self.manager.pool.reset_prefix_cache() is not in_use
        if not in_use:
            self.naive.named.clear()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        pool = self.manager.pool
        assert free_ids(self.manager) == self.naive.free
        assert self.manager.num_free_blocks == len(self.naive.free)
        assert {b.block_id: b.ref_cnt for b in pool.blocks[1:]} == self.naive.users
        names = {b: chain(list(prefix))[-1] for prefix, b in self.naive.named}
        assert {b.block_id: b.block_hash for b in pool.blocks if b.block_hash} == names
        for prefix, _ in self.naive.named:
            oldest = next(b for other, b in self.naive.named if other == prefix)
            found = pool.get_cached_block(chain(list(prefix))[-1])
            assert found is pool.blocks[oldest]
        for request_id, held in self.held.items():
            assert self.manager.block_ids(request_id) == held.block_ids


TestHistories = Histories.TestCase
