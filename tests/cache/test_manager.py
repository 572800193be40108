"""Block tables of layers that keep every token, by hand."""

from __future__ import annotations

import pytest

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
